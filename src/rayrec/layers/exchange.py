"""Sums over all workers, through which gradients flow."""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed.nn.functional import all_reduce


def alone() -> bool:
    """Whether this process is the only worker."""
    return not distributed.is_initialized() or distributed.get_world_size() == 1


def summed(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each part (values,) added up over the workers, in one exchange in which every worker takes part."""
    if alone():
        return parts
    total = all_reduce(torch.cat(parts))
    return total.split([len(part) for part in parts])


def global_means(values: torch.Tensor) -> torch.Tensor:
    """(rows, columns) -> (columns,): means over the rows of all workers, of which this one may have none; 0 without any row."""
    count, total = summed(values.new_ones(1).mul_(len(values)), values.sum(0))
    return total / count.detach().clamp(min=1)
