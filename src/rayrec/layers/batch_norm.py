"""Batch normalization over the global batch, with any number of rows per worker."""

from typing import Final, final

import torch
from torch import nn

from rayrec.collectives import all_reduce_sum, num_workers

_FEWEST_ROWS: Final = 2
"""Minimum row count for a variance estimate by torch's operator."""


@final
class GlobalBatchNorm(nn.Module):
    """Normalization by mean and variance over the rows of all workers, [rows, features] (Ioffe and Szegedy, 2015). Eval mode uses
    the running statistics, which are equal on all workers. A worker may have no rows. Arithmetic is float32, and the output has
    the input's dtype. torch's SyncBatchNorm does the same, but only on GPUs."""

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, features: int, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        """`affine`: whether to multiply each feature by a learned weight and add a learned bias."""
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
        # Two exchanges, for the mean and then the variance around it: a difference of squares would lose digits.
        count, total = all_reduce_sum(ones, inputs.sum(0))
        count = count.detach().clamp(min=1)
        mean = total / count
        centered = inputs - mean
        (squares,) = all_reduce_sum(centered.square().sum(0))
        variance = squares / count
        with torch.no_grad():
            rate = self._momentum * (count >= _FEWEST_ROWS)
            self.running_mean.lerp_(mean, rate)
            self.running_var.lerp_(variance * (count / (count - 1).clamp(min=1)), rate)
        normal = centered * torch.rsqrt(variance + self._eps)
        if self.weight is None or self.bias is None:
            return normal
        return normal * self.weight + self.bias
