"""First-order part of click models: logistic regression over categories and piecewise-linear functions of numbers."""

from typing import Final, final

import torch
from torch import nn

from rayrec.layers.mlp import UninitializedLinear, init_values

_FIRST_BIN: Final = -1.5
_BIN_WIDTH: Final = 0.5
_NUM_BINS: Final = 8
"""Bins of a number, from 1.5 standard deviations below its mean to 2.5 above."""
NUMBER_WIDTH: Final = 1 + _NUM_BINS
"""Values of a number in `piecewise_linear`."""
_NUMBER_SCALE: Final = 10.0
"""Factor of the numbers' weights, which optimizers such as Adam change by about the learning rate per step."""
_CATEGORY_SCALE: Final = 0.5
"""Factor of the categories' weights. Below 1, because learning rates of embeddings are too large for them."""


def piecewise_linear(dense: torch.Tensor) -> torch.Tensor:
    """Return standardized numbers [rows, num_dense] and the part of each in each bin, [rows, num_dense * NUMBER_WIDTH]. Source:
    Gorishniy et al., "On Embeddings for Numerical Features in Tabular Deep Learning", NeurIPS 2022. Ours have equal bins."""
    starts = _FIRST_BIN + _BIN_WIDTH * torch.arange(_NUM_BINS, dtype=dense.dtype, device=dense.device)
    return torch.cat([dense, (dense.unsqueeze(2) - starts).clamp(0, _BIN_WIDTH).flatten(1)], dim=1)


@final
class FirstOrder(nn.Module):
    """Logit of a weight per category and a piecewise-linear function of each number, both initially 0."""

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.linear = UninitializedLinear(num_dense * NUMBER_WIDTH, 1)
        init_values(self.linear.weight, nn.init.zeros_)
        init_values(self.linear.bias, nn.init.zeros_)

    def forward(self, dense: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [rows]. `dense`: numbers from `piecewise_linear`; `weights`: of each feature's category, [rows,
        num_features]."""
        return _NUMBER_SCALE * self.linear(dense).squeeze(1) + _CATEGORY_SCALE * weights.sum(1)
