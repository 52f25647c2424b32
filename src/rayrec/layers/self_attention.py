"""Self-attention over the fields of a row, as FuxiCTR's AutoInt has it."""

from __future__ import annotations

from typing import final

import torch
from torch import nn
from torch.nn import functional

from rayrec.layers.mlp import Precision, compute_dtype
from rayrec.layers.tower import xavier_linear


@final
class FieldAttention(nn.Module):
    """(rows, fields, in_dim) -> (rows, fields, dim): every head gives each field a mixture of all fields, weighted by a softmax;
    the heads side by side, plus the field itself, go through ReLU.

    Products have the precision's type; the softmax is float32.
    """

    def __init__(
        self, in_dim: int, dim: int, heads: int, *, scale: bool, dropout: float, precision: Precision = "fp32"
    ) -> None:
        """`scale`: divide a product of query and key by the square root of a head's width. The field itself is projected if
        `in_dim` is not `dim`."""
        super().__init__()
        self.query, self.key, self.value = (xavier_linear(in_dim, dim, bias=False) for _ in range(3))
        self.shortcut = xavier_linear(in_dim, dim, bias=False) if in_dim != dim else None
        self._heads, self._dropout, self._dtype = heads, dropout, compute_dtype(precision)
        self._scale = (dim // heads) ** -0.5 if scale else 1.0

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        fields = fields.to(self._dtype)
        query, key, value = (
            self._projected(layer, fields).unflatten(2, (self._heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = ((query @ key.transpose(2, 3)).float() * self._scale).softmax(3)
        weights = functional.dropout(weights, self._dropout, training=self.training)
        mixed = (weights.to(self._dtype) @ value).transpose(1, 2).flatten(2)
        own = fields if self.shortcut is None else self._projected(self.shortcut, fields)
        return (mixed + own).relu()

    def _projected(self, layer: nn.Linear, fields: torch.Tensor) -> torch.Tensor:
        return functional.linear(fields, layer.weight.to(self._dtype))
