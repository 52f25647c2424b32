"""SASRec (Kang & McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Count, Positive
from rayrec.layers.kernels.dropout import dropped
from rayrec.layers.mlp import Precision, UninitializedLinear, init_values, xavier_linear
from rayrec.layers.sequence_blocks import (
    ListElements,
    joint_projection,
    linear,
    normal_values,
    softmax_attended,
    xavier_values,
)
from rayrec.models.base import ModelInputs
from rayrec.models.next_item import NextItemConfig, NextItemNetwork

_RECBOLE_EPS: Final = 1e-12
"""Epsilon of layer norm, as in RecBole and BERT."""
_LAST_EPS: Final = 1e-8
"""Epsilon of the last layer norm, as in RecTools and the authors' code."""


@dataclass(frozen=True, kw_only=True)
class SASRecConfig(NextItemConfig):
    """Causal attention that predicts each item of a list from the items before it."""

    EARLIER: ClassVar[Mapping[str, Any]] = {**NextItemConfig.EARLIER, "block": "recbole"}

    block: Literal["rectools", "recbole"] = "rectools"
    """Network: the authors' as in RecTools, with positions from the newest item (rectools), or
    RecBole's, with layer norm behind attention and feed-forward layers, and positions from the
    oldest item (recbole).
    """
    hidden: Count | None = None
    """Width of the feed-forward layers. None: `embedding_dim`, and four times that in recbole."""
    weight_std: Positive | None = None
    """Standard deviation of the initial matrices and positions, which are normal. None: Xavier's,
    and 0.02 in recbole.
    """

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        network_class = RecBoleSASRec if self.block == "recbole" else SASRec
        network = network_class(self, inputs, precision=precision)
        if self.weight_std is not None:
            for parameter in network.parameters():
                if parameter.dim() > 1:
                    normal_values(parameter, self.weight_std)
        return network


class SASRec(NextItemNetwork):
    """Blocks with layer norm of queries. Products have the precision's dtype."""

    def __init__(self, config: SASRecConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__(config, inputs, precision=precision)
        dim = config.embedding_dim
        self.positions = nn.Parameter(xavier_values(torch.empty(self._history, dim)))
        self.blocks = nn.ModuleList(_Block(config, dtype=self._dtype) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(dim, eps=_LAST_EPS)

    def encode(self, items: torch.Tensor, elements: ListElements) -> torch.Tensor:
        hidden = items + self.positions.index_select(0, elements.age)
        hidden = self.dropped(hidden)
        for block in self.blocks:
            hidden = block(hidden, elements)
        normed: torch.Tensor = self.norm(hidden)
        return normed


class _Block(nn.Module):
    """Block in which each place attends to itself and earlier elements, [elements, dim]."""

    def __init__(self, config: SASRecConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        dim = config.embedding_dim
        hidden = config.hidden or dim
        self.query_norm = nn.LayerNorm(dim)
        self.query_key_value = xavier_linear(dim, 3 * dim)
        self.mixed = xavier_linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.first = xavier_linear(dim, hidden)
        self.second = xavier_linear(hidden, dim)
        self._heads = config.attention_heads
        self._dropout = config.dropout
        self._dtype = dtype

    def forward(self, inputs: torch.Tensor, elements: ListElements) -> torch.Tensor:
        dropout = self._dropout if self.training else 0.0
        query = self.query_norm(inputs)
        mixed = softmax_attended(
            elements,
            joint_projection(query, inputs, self.query_key_value, self._dtype),
            heads=self._heads,
            dropout=dropout,
        )
        hidden = self.norm(query + linear(mixed, self.mixed, self._dtype).float())
        inner = linear(hidden, self.first, self._dtype, relu=True)
        inner = dropped(inner, dropout)
        outer = linear(inner, self.second, self._dtype).float()
        return hidden + dropped(outer, dropout)


class RecBoleSASRec(NextItemNetwork):
    """Layer norm follows attention and feed-forward layers, as in RecBole. Products have the
    precision's dtype.
    """

    def __init__(self, config: SASRecConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__(config, inputs, precision=precision)
        # Earlier versions took all of a full list, although its last item had no target in training
        self._history = self._length
        dim = config.embedding_dim
        self.positions = nn.Parameter(normal_values(torch.empty(self._length - 1, dim)))
        self.norm = nn.LayerNorm(dim, eps=_RECBOLE_EPS)
        self.blocks = nn.ModuleList(
            _RecBoleBlock(config, dtype=self._dtype) for _ in range(config.blocks)
        )

    def encode(self, items: torch.Tensor, elements: ListElements) -> torch.Tensor:
        positions = self.positions.index_select(0, elements.index.clamp(max=self._length - 2))
        hidden = self.dropped(self.norm(items + positions))
        for block in self.blocks:
            hidden = block(hidden, elements)
        return hidden


class _RecBoleBlock(nn.Module):
    """Block in which each place attends to itself and earlier elements, [elements, dim]."""

    def __init__(self, config: SASRecConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        dim = config.embedding_dim
        hidden = config.hidden or 4 * dim
        self.query_key_value = _linear(dim, 3 * dim)
        self.mixed = _linear(dim, dim)
        self.attention_norm = nn.LayerNorm(dim, eps=_RECBOLE_EPS)
        self.first = _linear(dim, hidden)
        self.second = _linear(hidden, dim)
        self.norm = nn.LayerNorm(dim, eps=_RECBOLE_EPS)
        self._heads = config.attention_heads
        self._dropout = config.dropout
        self._dtype = dtype

    def forward(self, inputs: torch.Tensor, elements: ListElements) -> torch.Tensor:
        dropout = self._dropout if self.training else 0.0
        mixed = softmax_attended(
            elements,
            joint_projection(inputs, inputs, self.query_key_value, self._dtype),
            heads=self._heads,
            dropout=dropout,
        )
        mixed = linear(mixed, self.mixed, self._dtype).float()
        hidden = self.attention_norm(inputs + dropped(mixed, dropout))
        inner = functional.gelu(linear(hidden, self.first, self._dtype))
        outer = linear(inner, self.second, self._dtype).float()
        normed: torch.Tensor = self.norm(hidden + dropped(outer, dropout))
        return normed


def _linear(in_features: int, out_features: int) -> UninitializedLinear:
    layer = UninitializedLinear(in_features, out_features)
    normal_values(layer.weight)
    init_values(layer.bias, nn.init.zeros_)
    return layer
