"""FuXi-α (Ye et al., "FuXi-α: Scaling Recommendation Model with Feature Interaction Enhanced
Transformer", WWW 2025), without times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Count, Positive
from rayrec.layers.mlp import Precision, UninitializedLinear, xavier_linear
from rayrec.layers.sequence_blocks import (
    Attention,
    ListElements,
    attended,
    by_distance,
    dropped,
    linear,
    normal_values,
    silu_attention,
)
from rayrec.models.base import ModelInputs
from rayrec.models.next_item import BlockNetwork, Loss, NextItemConfig

_EPS: Final = 1e-6
"""Epsilon of norms."""


@dataclass(frozen=True, kw_only=True)
class FuXiConfig(NextItemConfig):
    """Attention by contents and by positions in separate channels, and cosines as scores."""

    loss: Loss = "sampled"
    unit_vectors: bool = True
    temperature: Positive = 0.05
    multiplier: Count = 1
    """Width of the feed-forward layers, as a multiple of `embedding_dim`."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return FuXi(self, inputs, precision=precision)


class FuXi(BlockNetwork):
    """Blocks of attention in two channels. Products have the precision's dtype."""

    def __init__(self, config: FuXiConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__(config, inputs, precision=precision)
        dim = config.embedding_dim
        self.positions = nn.Parameter(normal_values(torch.empty(self._history, dim), dim**-0.5))
        self.blocks = nn.ModuleList(
            _Block(config, self._history, dtype=self._dtype) for _ in range(config.blocks)
        )
        self.scale = math.sqrt(dim)


class _Block(nn.Module):
    """Attention of two channels, then feed-forward layers in two stages, [elements, dim]."""

    def __init__(self, config: FuXiConfig, max_length: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        dim = config.embedding_dim
        hidden = config.multiplier * dim
        # Gates of both channels, then queries, keys and values
        self.joint = UninitializedLinear(dim, 5 * dim, bias=False)
        normal_values(self.joint.weight)
        self.distances = nn.Parameter(normal_values(torch.empty(max_length)))
        self.mixed = xavier_linear(2 * dim, dim)
        self.first = xavier_linear(dim, hidden, bias=False)
        self.factor = xavier_linear(dim, hidden, bias=False)
        self.second = xavier_linear(hidden, dim, bias=False)
        self._heads = config.attention_heads
        self._dropout = config.dropout
        self._dtype = dtype

    def forward(self, inputs: torch.Tensor, elements: ListElements) -> torch.Tensor:
        dropout = self._dropout if self.training else 0.0
        dtype = self._dtype
        dim = inputs.shape[1]
        normed = functional.rms_norm(inputs, (dim,), eps=_EPS)
        joint = functional.silu(linear(normed, self.joint, dtype))
        mixed = attended(
            elements,
            joint[:, 2 * dim :],
            heads=self._heads,
            attention=_channels(self.distances),
        )
        gated = joint[:, : 2 * dim] * functional.rms_norm(mixed.float(), (2 * dim,), eps=_EPS)
        gated = dropped(gated, dropout)
        hidden = inputs + linear(gated, self.mixed, dtype).float()
        normed = dropped(functional.rms_norm(hidden, (dim,), eps=_EPS), dropout)
        inner = functional.silu(linear(normed, self.first, dtype))
        inner = inner * linear(normed, self.factor, dtype)
        return hidden + linear(inner, self.second, dtype).float()


def _channels(distances: torch.Tensor) -> Attention:
    """Return attention by positions and by contents, side by side in each head."""
    by_contents = silu_attention(None, max_length=len(distances))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        by_position = by_distance(distances, value.shape[2]).tril().to(value.dtype) @ value
        return torch.cat([by_position, by_contents(query, key, value)], dim=3)

    return attend
