"""Numbers and categories as one list of fields, each a vector, as FuxiCTR's models take them, and first-order weights: a scalar
for each category, stored next to its embedding in one row of a table, and for each number."""

from functools import partial
from typing import Final, final

import torch
from torch import nn

from rayrec.layers.keyed_embeddings import Embedded
from rayrec.layers.mlp import EmptyLinear, start_values

_ALIGNMENT: Final = 4
"""fbgemm takes rows whose width is a multiple of it."""


def width_with_weight(dim: int) -> int:
    """Width of a table's row that has an embedding of `dim` values and a scalar; what is left of it is unused."""
    return (dim // _ALIGNMENT + 1) * _ALIGNMENT


def number_vectors(num_dense: int, dim: int) -> nn.Parameter:
    """(num_dense, dim): what each number is multiplied by to be a field; each a layer from 1 to `dim`, Xavier normal."""
    draw = partial(nn.init.normal_, std=(2 / (1 + dim)) ** 0.5)
    return nn.Parameter(start_values(torch.empty(num_dense, dim), draw))


def fields(dense: torch.Tensor, vectors: torch.Tensor, embedded: Embedded) -> torch.Tensor:
    """(rows, num_dense + num_features, dim): each number times its vector, then the embeddings."""
    return torch.cat([dense.unsqueeze(2) * vectors, embedded.stacked()], dim=1)


@final
class FieldsAndLinear(nn.Module):
    """Numbers and categories as `fields`, and a linear model of them (FuxiCTR's LogisticRegression).

    An embedding's first `dim` values are the field and the next one is the category's weight in the linear model.
    """

    def __init__(self, num_dense: int, dim: int, *, bias: bool = True) -> None:
        """`bias`: the linear model has a bias, which starts as 0."""
        super().__init__()
        self.number_vectors = number_vectors(num_dense, dim)
        self.linear = EmptyLinear(num_dense, 1, bias=bias)
        start_values(self.linear.weight, nn.init.normal_)  # each number's a layer from 1 to 1, Xavier normal
        if bias:
            start_values(self.linear.bias, nn.init.zeros_)
        self._dim = dim

    def forward(self, dense: torch.Tensor, embedded: Embedded) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, num_dense) and embeddings of `width_with_weight(dim)` values -> float32 fields (rows, num_dense + num_features,
        dim), and the linear model's float32 (rows,)."""
        stacked = embedded.stacked()
        fields = torch.cat([dense.unsqueeze(2) * self.number_vectors, stacked[:, :, : self._dim]], dim=1)
        return fields, self.linear(dense).squeeze(1) + stacked[:, :, self._dim].sum(1)
