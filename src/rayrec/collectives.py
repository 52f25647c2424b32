"""Exchanges of tensors between workers, and which device and backend they use. Loads torch when one is called."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def group_arguments(device: torch.device, *, timeout_s: float) -> dict[str, Any]:
    """Arguments of `torch.distributed.init_process_group` for a worker on `device`, which has an index if it is a GPU.

    With NCCL the group is bound to the GPU. NCCL then connects at once, so that a network or a GPU that does not work fails the
    start and not a later step. And no collective has to guess the GPU from the rank, which is wrong on machines of unequal size.
    """
    on_gpu = device.type == "cuda"
    return {
        "backend": "nccl" if on_gpu else "gloo",
        "timeout": timedelta(seconds=timeout_s),
        "device_id": device if on_gpu else None,
    }


def use_device(device: torch.device) -> None:
    """Makes a GPU the calling thread's own; a new thread has the first one."""
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def num_workers(group: ProcessGroup | None = None) -> int:
    """Return the workers of a group (None: all); 1 without torch.distributed."""
    from torch import distributed

    return distributed.get_world_size(group) if distributed.is_available() and distributed.is_initialized() else 1


def group_device(group: ProcessGroup | None = None) -> torch.device:
    """Return the device whose tensors a group (None: all workers) exchanges: the CPU if its backends serve it."""
    import torch
    from torch import distributed

    serves_cpu = "cpu:" in str(distributed.get_backend_config(group))  # as "cpu:gloo,cuda:nccl" or "cuda:nccl"
    return torch.device("cpu") if serves_cpu else torch.device("cuda", torch.cuda.current_device())


def gathered(values: torch.Tensor, group: ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return each worker's values, of one shape everywhere, by rank, on the device of the group; collective."""
    import torch
    from torch import distributed

    if num_workers(group) == 1:
        return [values]
    own = values.to(group_device(group))
    parts = [torch.empty_like(own) for _ in range(num_workers(group))]
    distributed.all_gather(parts, own, group=group)
    return parts


def gathered_rows(values: torch.Tensor, group: ProcessGroup | None = None) -> tuple[torch.Tensor, slice]:
    """Gather the rows of all workers in rank order, with gradient to their owners, and return also the slice of own rows.

    Workers may have different numbers of rows, also none. The gradient of a row is the sum of all workers' gradients, added in
    rank order. Collective, as is its backward pass.

    Args:
        values: float32 or bfloat16 [rows, ...], equal on all workers but for the rows.
    """
    import torch

    counts = [int(count) for count in gathered(torch.tensor([len(values)]), group)]
    start = sum(counts[: distributed_rank(group)])
    rows: torch.Tensor = _gathered_rows().apply(values, counts, group)
    return rows, slice(start, start + len(values))


def distributed_rank(group: ProcessGroup | None = None) -> int:
    """Return the rank in a group (None: all workers); 0 without torch.distributed."""
    from torch import distributed

    return distributed.get_rank(group) if num_workers(group) > 1 else 0


@cache
def _gathered_rows() -> type[torch.autograd.Function]:
    import torch
    from torch import distributed

    class GatheredRows(torch.autograd.Function):
        """See `gathered_rows`."""

        @staticmethod
        def forward(ctx: Any, values: torch.Tensor, counts: list[int], group: ProcessGroup | None) -> torch.Tensor:
            ctx.counts, ctx.group, ctx.own = counts, group, values.shape
            if len(counts) == 1:
                return values.view_as(values)
            padded = values.new_zeros(max(counts), *values.shape[1:])
            padded[: len(values)] = values
            parts = [part[:count] for part, count in zip(gathered(padded, group), counts, strict=True)]
            return torch.cat(parts).to(values.device)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            (gradient,) = gradients
            counts, rows = ctx.counts, ctx.own[0]
            if len(counts) == 1:
                return gradient, None, None
            sent = gradient.contiguous().to(group_device(ctx.group))
            received = sent.new_empty(len(counts) * rows, *ctx.own[1:])
            distributed.all_to_all_single(received, sent, [rows] * len(counts), counts, group=ctx.group)
            total, *others = received.split(rows) if rows else [received]
            for other in others:  # in rank order, so that the sum does not depend on timing
                total = total + other
            return total.to(gradient.device), None, None

    return GatheredRows


def over_workers(*values: float) -> tuple[list[float], list[float]]:
    """(means, maxima) of the values over the workers, added in a fixed order; collective."""
    import torch

    stacked = torch.stack(gathered(torch.tensor(values, dtype=torch.float64)))
    return stacked.mean(dim=0).tolist(), stacked.amax(dim=0).tolist()


def sum_over_workers(counts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the sum of the arrays of all workers; collective."""
    import torch
    from torch import distributed

    if num_workers() == 1:
        return counts
    total = torch.from_numpy(counts).to(group_device(), copy=True)
    distributed.all_reduce(total)
    return total.cpu().numpy()


def all_reduce_sum(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each part (values,) added up over the workers, with gradient, in one exchange in which every worker takes part."""
    if num_workers() == 1:
        return parts
    import torch
    from torch.distributed.nn.functional import all_reduce

    total = all_reduce(torch.cat(parts))
    return total.split([len(part) for part in parts])


def global_means(values: torch.Tensor) -> torch.Tensor:
    """(rows, columns) -> (columns,): means over the rows of all workers, of which this one may have none; 0 without any row."""
    count, total = all_reduce_sum(values.new_ones(1).mul_(len(values)), values.sum(0))
    return total / count.detach().clamp(min=1)


@final
class Collectives:
    """Collectives of a group on NumPy arrays."""

    def __init__(self, process_group: ProcessGroup | None) -> None:
        self._group, self.num_ranks = process_group, num_workers(process_group)

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Each rank's values, equally many everywhere, in rank order."""
        return [part.tolist() for part in self.gather(np.array(values, dtype=np.float64))]

    def gather(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Each rank's array, equally long everywhere, in rank order."""
        import torch

        return [part.cpu().numpy() for part in gathered(torch.from_numpy(np.ascontiguousarray(values)), self._group)]

    def exchange(self, values: npt.NDArray[Any], send_counts: list[int], receive_counts: list[int]) -> npt.NDArray[Any]:
        """All to all: `send_counts[r]` of the values go to rank r; what comes is concatenated in rank order."""
        import torch
        import torch.distributed as dist

        own = torch.from_numpy(np.ascontiguousarray(values)).to(group_device(self._group))
        received = torch.empty(sum(receive_counts), dtype=own.dtype, device=own.device)
        dist.all_to_all_single(received, own, receive_counts, send_counts, group=self._group)
        return received.cpu().numpy()
