"""Batch normalization over the global batch, whatever rows each worker gets, and sums over all workers."""

from __future__ import annotations

from typing import Final, final

import torch
from torch import distributed, nn
from torch.distributed.nn.functional import all_reduce

_FEWEST_ROWS: Final = 2
"""Of which torch's own operator estimates a variance."""


@final
class GlobalBatchNorm(nn.Module):
    """(rows, features) -> the same shape, normalized by mean and variance over all workers' rows (Ioffe and Szegedy, 2015).

    In eval mode by the running statistics, which are the same on every worker. A worker may hold any number of rows, also none.
    Arithmetic is float32; the output has the input's type. torch's SyncBatchNorm does the same for GPUs alone.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, features: int, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        """`affine`: multiplied by a learned weight and shifted by a learned bias, one each for a feature."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))
        self._eps, self._momentum = eps, momentum

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._normalized(inputs.float()).to(inputs.dtype)

    def _normalized(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training or (alone() and len(inputs) >= _FEWEST_ROWS):
            return nn.functional.batch_norm(
                inputs,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                self._momentum,
                self._eps,
            )
        ones = inputs.new_ones(1).mul_(len(inputs))
        # One exchange for the mean, one for the variance around it: a difference of squares would lose digits.
        count, total = summed(ones, inputs.sum(0))
        count = count.detach().clamp(min=1)
        mean = total / count
        centered = inputs - mean
        (squares,) = summed(centered.square().sum(0))
        variance = squares / count
        self._keep(mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1)), count)
        normal = centered * torch.rsqrt(variance + self._eps)
        if self.weight is None or self.bias is None:
            return normal
        return normal * self.weight + self.bias

    @torch.no_grad()
    def _keep(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        share = self._momentum * (count >= _FEWEST_ROWS)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


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
