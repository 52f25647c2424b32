"""eSASRec (Tikhonovich et al., "eSASRec: Enhancing Transformer-based Recommendations in a Modular
Fashion", RecSys 2025): SASRec's objective with LiGR blocks and a sampled softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Count
from rayrec.layers.kernels.dropout import dropped
from rayrec.layers.mlp import Precision, xavier_linear
from rayrec.layers.sequence_blocks import (
    ListElements,
    joint_projection,
    linear,
    softmax_attended,
    xavier_values,
)
from rayrec.models.base import ModelInputs
from rayrec.models.item_lists import Loss
from rayrec.models.next_item import BlockNetwork, NextItemConfig


@dataclass(frozen=True, kw_only=True)
class ESASRecConfig(NextItemConfig):
    """SASRec with gated blocks (LiGR) and a softmax over sampled items."""

    loss: Loss = "sampled"
    multiplier: Count = 4
    """Width of the feed-forward layers, as a multiple of `embedding_dim`."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return ESASRec(self, inputs, precision=precision)


class ESASRec(BlockNetwork):
    """Blocks whose outputs are gated by their inputs. Products have the precision's dtype."""

    def __init__(self, config: ESASRecConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__(config, inputs, precision=precision)
        dim = config.embedding_dim
        self.positions = nn.Parameter(xavier_values(torch.empty(self._history, dim)))
        self.blocks = nn.ModuleList(_Block(config, dtype=self._dtype) for _ in range(config.blocks))


class _Block(nn.Module):
    """Gated attention, then a gated SwiGLU layer, [elements, dim] (LiGR: Borisyuk et al., "From
    Features to Transformers: Redefining Ranking for Scalable Impact", 2025).
    """

    def __init__(self, config: ESASRecConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        dim = config.embedding_dim
        hidden = config.multiplier * dim
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = xavier_linear(dim, 3 * dim)
        self.mixed = xavier_linear(dim, dim)
        self.attention_gate = xavier_linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.first = xavier_linear(dim, hidden, bias=False)
        self.factor = xavier_linear(dim, hidden, bias=False)
        self.second = xavier_linear(hidden, dim, bias=False)
        self.gate = xavier_linear(dim, dim)
        self._heads = config.attention_heads
        self._dropout = config.dropout
        self._dtype = dtype

    def forward(self, inputs: torch.Tensor, elements: ListElements) -> torch.Tensor:
        dropout = self._dropout if self.training else 0.0
        dtype = self._dtype
        normed = self.attention_norm(inputs)
        mixed = softmax_attended(
            elements,
            joint_projection(normed, normed, self.query_key_value, dtype),
            heads=self._heads,
            dropout=dropout,
        )
        mixed = dropped(linear(mixed, self.mixed, dtype), dropout)
        hidden = inputs + linear(inputs, self.attention_gate, dtype).sigmoid() * mixed
        normed = self.norm(hidden)
        inner = functional.silu(linear(normed, self.first, dtype))
        inner = dropped(inner * linear(normed, self.factor, dtype), dropout)
        outer = dropped(linear(inner, self.second, dtype), dropout)
        return hidden + linear(hidden, self.gate, dtype).sigmoid() * outer
