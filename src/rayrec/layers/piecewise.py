"""Piecewise-linear embeddings of numbers (Gorishniy et al., "On Embeddings for Numerical Features
in Tabular Deep Learning", NeurIPS 2022).

With bins that end at 0, 2, 3 and 7:

    number   parts
    -1       0    0    0
    1        0.5  0    0
    3        1    1    0
    5        1    1    0.5
"""

from collections.abc import Sequence
from statistics import NormalDist
from typing import Final, final

import torch
from torch import nn

from rayrec.layers.mlp import init_values

NUM_BINS: Final = 32
"""Maximum number of bins of a number."""
PARTS: Final = 1 + NUM_BINS
"""Values of a number in `PiecewiseNumbers.parts`."""


# Shapes, for N numbers with B bins and vectors of width D:
#
#   dense     [rows, N]          standardized numbers, and indicators of missing ones
#   parts     [rows, N, 1 + B]   the number itself, then its part of each bin
#   vectors   [rows, N, D]       a layer of each number's own, and ReLU
#
# The number itself tells values of an end bin apart, where all parts are 0 or 1. Every number has
# B bins, so that weights of a checkpoint fit another log's quantiles. A bin that a column with few
# values does not need has scale 0 and no effect.
@final
class PiecewiseNumbers(nn.Module):
    """Vectors of numbers, learned from their parts in bins between quantiles of the training rows.
    A part is 1 in the bins below the number, and (x - start) / width in its own.
    """

    starts: torch.Tensor
    scales: torch.Tensor

    def __init__(self, num_dense: int, dim: int, *, ends: Sequence[Sequence[float]] = ()) -> None:
        """Draw the weights. `ends`: rising ends of the bins of each number, at most NUM_BINS + 1.
        Empty: quantiles of a standard normal distribution for all.
        """
        super().__init__()
        starts = torch.zeros(num_dense, NUM_BINS)
        scales = torch.zeros(num_dense, NUM_BINS)  # A bin of scale 0 is always 0
        if starts.device.type != "meta":
            for number, values in enumerate(ends or [_normal_ends()] * num_dense):
                bins = torch.tensor(values, dtype=torch.float64)
                count = len(bins) - 1
                starts[number, :count] = bins[:-1]
                scales[number, :count] = 1 / bins.diff()
        # Saved, so that a network of a checkpoint has the bins that it was trained with
        self.register_buffer("starts", starts)
        self.register_buffer("scales", scales)

        def draw(weight: torch.Tensor) -> torch.Tensor:
            return nn.init.normal_(weight, std=PARTS**-0.5)

        self.weight = nn.Parameter(init_values(torch.empty(num_dense, PARTS, dim), draw))
        self.bias = nn.Parameter(torch.zeros(num_dense, dim))

    def parts(self, dense: torch.Tensor) -> torch.Tensor:
        """Return each number of `dense` [rows, num_dense], and its part in each bin, [rows,
        num_dense, PARTS].
        """
        values = dense.unsqueeze(2)
        filled = (values - self.starts) * self.scales
        return torch.cat([values, filled.clamp(0, 1)], dim=2)

    def forward(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the vector of each number, from the result of `parts`, [rows, num_dense, dim]."""
        # One product for each number
        products = torch.bmm(parts.transpose(0, 1), self.weight)
        vectors = products.transpose(0, 1) + self.bias
        return vectors.relu()


def _normal_ends() -> list[float]:
    normal = NormalDist()
    levels = [(number + 0.5) / (NUM_BINS + 1) for number in range(NUM_BINS + 1)]
    return [normal.inv_cdf(level) for level in levels]
