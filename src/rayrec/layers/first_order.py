"""First-order part of click models: logistic regression over categories and piecewise-linear
functions of numbers.
"""

from typing import Final

import torch
from torch import nn

from rayrec.layers.mlp import UninitializedLinear, init_values

_FIRST_BIN: Final = -1.5
_BIN_WIDTH: Final = 0.5
_NUM_BINS: Final = 8
"""Bins of a number, from 1.5 standard deviations below its mean to 2.5 above."""
NUMBER_WIDTH: Final = 1 + _NUM_BINS
"""Values of a number in `piecewise_linear`."""


def piecewise_linear(dense: torch.Tensor) -> torch.Tensor:
    """Return standardized numbers [rows, num_dense] and the part of each in each bin, [rows,
    num_dense * NUMBER_WIDTH]. Source: Gorishniy et al., "On Embeddings for Numerical Features in
    Tabular Deep Learning", NeurIPS 2022. Ours have equal bins.
    """
    # A number fills the bins below it and part of its own. So a weight per bin is the slope there.
    starts = _FIRST_BIN + _BIN_WIDTH * torch.arange(
        _NUM_BINS, dtype=dense.dtype, device=dense.device
    )
    return torch.cat([dense, (dense.unsqueeze(2) - starts).clamp(0, _BIN_WIDTH).flatten(1)], dim=1)


class FirstOrder(nn.Module):
    """Logistic regression over numbers, whose weights learn at the network's rate, and categories,
    whose weights are in tables. The scales multiply these weights.
    """

    def __init__(self, num_dense: int, *, number_scale: float, category_scale: float) -> None:
        super().__init__()
        self._number_scale = number_scale
        self._category_scale = category_scale
        self.linear = UninitializedLinear(num_dense, 1)
        init_values(self.linear.weight, nn.init.zeros_)
        init_values(self.linear.bias, nn.init.zeros_)

    def logit(self, dense: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [rows], of numbers [rows, num_dense] and category weights [rows,
        num_features].
        """
        return self._number_scale * self.linear(dense).squeeze(
            1
        ) + self._category_scale * weights.sum(1)
