"""Numbers and categories as one list of field vectors, as in FuxiCTR, and first-order weights: a scalar for each number, and for
each category, stored after its embedding."""

from functools import partial
from typing import Final, final

import torch
from torch import nn

from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.mlp import UninitializedLinear, init_values

_ALIGNMENT: Final = 4
"""Row width multiple that fbgemm requires."""


def width_with_weight(dim: int) -> int:
    """Return the width of table rows that contain an embedding of `dim` values and a scalar. The rest is unused."""
    return (dim // _ALIGNMENT + 1) * _ALIGNMENT


def number_vectors(num_dense: int, dim: int) -> nn.Parameter:
    """Return the factor vector of each number, [num_dense, dim]. Each is a layer from 1 to `dim`, Xavier normal."""
    draw = partial(nn.init.normal_, std=(2 / (1 + dim)) ** 0.5)
    return nn.Parameter(init_values(torch.empty(num_dense, dim), draw))


def fields(dense: torch.Tensor, vectors: torch.Tensor, embedded: KeyedEmbeddings) -> torch.Tensor:
    """Return each number times its vector, then the embeddings, [rows, num_dense + num_features, dim]."""
    return torch.cat([dense.unsqueeze(2) * vectors, embedded.stacked()], dim=1)


@final
class FieldsAndLinear(nn.Module):
    """Field vectors of numbers and categories as in `fields`, and their linear model (FuxiCTR's LogisticRegression).

    The first `dim` values of an embedding are the field. The next one is the category's weight in the linear model.
    """

    def __init__(self, num_dense: int, dim: int, *, bias: bool = True) -> None:
        """`bias`: whether the linear model has a bias, initially 0."""
        super().__init__()
        self.number_vectors = number_vectors(num_dense, dim)
        self.linear = UninitializedLinear(num_dense, 1, bias=bias)
        init_values(self.linear.weight, nn.init.normal_)  # Each number's is a layer from 1 to 1, Xavier normal
        if bias:
            init_values(self.linear.bias, nn.init.zeros_)
        self._dim = dim

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 fields [rows, num_dense + num_features, dim], and the linear model's output, float32 [rows]. Takes
        embeddings of `width_with_weight(dim)` values."""
        stacked = embedded.stacked()
        fields = torch.cat([dense.unsqueeze(2) * self.number_vectors, stacked[:, :, : self._dim]], dim=1)
        return fields, self.linear(dense).squeeze(1) + stacked[:, :, self._dim].sum(1)
