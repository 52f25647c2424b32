"""SASRec (Kang & McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018), with a softmax
over all items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Count
from rayrec.layers.mlp import Precision, UninitializedLinear, init_values
from rayrec.models.base import ModelInputs
from rayrec.models.next_item import NextItemConfig, NextItemNetwork

_START_STD: Final = 0.02
"""Standard deviation of the network's initial weights."""
_EPS: Final = 1e-12
"""Epsilon of layer norm, as in RecBole and BERT."""


@dataclass(frozen=True, kw_only=True)
class SASRecConfig(NextItemConfig):
    """Causal attention that predicts each item of a list from the items before it."""

    hidden: Count = 256
    """Width of the feed-forward layers."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return SASRec(self, inputs, precision=precision)


class SASRec(NextItemNetwork):
    """Layer norm follows attention and feed-forward layers, as in RecBole. Products have the
    precision's dtype.
    """

    def __init__(self, config: SASRecConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__(config, inputs, precision=precision)
        self._dropout = config.dropout
        dim = config.embedding_dim
        self.positions = nn.Parameter(_init_normal(torch.empty(self._length - 1, dim)))
        self.norm = nn.LayerNorm(dim, eps=_EPS)
        self.blocks = nn.ModuleList(_Block(config, dtype=self._dtype) for _ in range(config.blocks))

    def encode(self, items: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        # The last position of a full list has no target in training, so it has no separate position
        # embedding.
        positions = torch.cat([self.positions, self.positions[-1:]])[: items.shape[1]]
        hidden = functional.dropout(self.norm(items + positions), self._dropout, self.training)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class _Block(nn.Module):
    """Block in which each place attends to itself and earlier places, [rows, places, dim]."""

    def __init__(self, config: SASRecConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        dim = config.embedding_dim
        self.query_key_value = _linear(dim, 3 * dim)
        self.mixed = _linear(dim, dim)
        self.attention_norm = nn.LayerNorm(dim, eps=_EPS)
        self.first = _linear(dim, config.hidden)
        self.second = _linear(config.hidden, dim)
        self.norm = nn.LayerNorm(dim, eps=_EPS)
        self._heads = config.attention_heads
        self._dropout = config.dropout
        self._dtype = dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(2, (self._heads, -1)).transpose(1, 2)
            for part in self._product(self.query_key_value, inputs).chunk(3, dim=2)
        )
        dropout = self._dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        hidden = self.attention_norm(
            inputs + self._dropped(self._product(self.mixed, mixed.transpose(1, 2).flatten(2)))
        )
        inner = functional.gelu(self._product(self.first, hidden))
        return self.norm(hidden + self._dropped(self._product(self.second, inner)))

    def _product(self, layer: UninitializedLinear, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(
            inputs.to(self._dtype), layer.weight.to(self._dtype), layer.bias.to(self._dtype)
        )

    def _dropped(self, values: torch.Tensor) -> torch.Tensor:
        return functional.dropout(values.float(), self._dropout, self.training)


def _linear(in_features: int, out_features: int) -> UninitializedLinear:
    layer = UninitializedLinear(in_features, out_features)
    _init_normal(layer.weight)
    init_values(layer.bias, nn.init.zeros_)
    return layer


def _init_normal(values: torch.Tensor) -> torch.Tensor:
    return init_values(values, lambda tensor: nn.init.normal_(tensor, std=_START_STD))
