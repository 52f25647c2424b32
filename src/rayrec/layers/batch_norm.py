"""Batch normalization over the global batch, whatever rows each worker gets."""

from typing import Final, final

import torch
from torch import nn

from rayrec.collectives import all_reduce_sum, num_workers

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
        if not self.training or (num_workers() == 1 and len(inputs) >= _FEWEST_ROWS):
            return nn.functional.batch_norm(
                inputs, self.running_mean, self.running_var, self.weight, self.bias, self.training, self._momentum, self._eps
            )
        ones = inputs.new_ones(1).mul_(len(inputs))
        # One exchange for the mean, one for the variance around it: a difference of squares would lose digits.
        count, total = all_reduce_sum(ones, inputs.sum(0))
        count = count.detach().clamp(min=1)
        mean = total / count
        centered = inputs - mean
        (squares,) = all_reduce_sum(centered.square().sum(0))
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
