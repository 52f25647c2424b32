"""FuXi-α (Ye et al., "FuXi-α: Scaling Recommendation Model with Feature Interaction Enhanced
Transformer", WWW 2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Count, Positive
from rayrec.layers.kernels.dropout import dropped
from rayrec.layers.mlp import Precision, UninitializedLinear, xavier_linear
from rayrec.layers.sequence_blocks import (
    TIME_BUCKETS,
    Attention,
    ListElements,
    attended,
    by_distance,
    by_time,
    linear,
    normal_values,
    silu_attention,
)
from rayrec.models.base import ModelInputs
from rayrec.models.item_lists import Loss
from rayrec.models.next_item import BlockNetwork, TimedConfig

_EPS: Final = 1e-6
"""Epsilon of norms."""


@dataclass(frozen=True, kw_only=True)
class FuXiConfig(TimedConfig):
    """Attention by contents, by positions and by times in separate channels, and cosines as
    scores.
    """

    loss: Loss = "sampled"
    unit_vectors: bool = True
    temperature: Positive = 0.05
    multiplier: Count = 1
    """Width of the feed-forward layers, as a multiple of `embedding_dim`."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return FuXi(self, inputs, precision=precision)


class FuXi(BlockNetwork):
    """Blocks of attention in channels. Products have the precision's dtype."""

    def __init__(self, config: FuXiConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__(config, inputs, precision=precision)
        dim = config.embedding_dim
        self.positions = nn.Parameter(normal_values(torch.empty(self._history, dim), dim**-0.5))
        self.blocks = nn.ModuleList(
            _Block(
                config,
                self._history,
                is_timed=self._is_timed,
                dtype=self._dtype,
            )
            for _ in range(config.blocks)
        )
        self.scale = math.sqrt(dim)


class _Block(nn.Module):
    """Attention of two channels, or three with times, then feed-forward layers in two stages,
    [elements, dim].
    """

    def __init__(
        self,
        config: FuXiConfig,
        max_length: int,
        *,
        is_timed: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        dim = config.embedding_dim
        hidden = config.multiplier * dim
        self._gates = (2 + is_timed) * dim
        # Gates of all channels, then queries, keys and values
        self.joint = UninitializedLinear(dim, self._gates + 3 * dim, bias=False)
        normal_values(self.joint.weight)
        self.distances = nn.Parameter(normal_values(torch.empty(max_length)))
        self.times = None
        if is_timed:
            self.times = nn.Parameter(normal_values(torch.empty(TIME_BUCKETS)))
        self.mixed = xavier_linear(self._gates, dim)
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
            joint[:, self._gates :],
            heads=self._heads,
            attention=_channels(self.distances, self.times),
        )
        normed = functional.rms_norm(mixed.float(), (self._gates,), eps=_EPS)
        gated = joint[:, : self._gates] * normed
        gated = dropped(gated, dropout)
        hidden = inputs + linear(gated, self.mixed, dtype).float()
        normed = dropped(functional.rms_norm(hidden, (dim,), eps=_EPS), dropout)
        inner = functional.silu(linear(normed, self.first, dtype))
        inner = inner * linear(normed, self.factor, dtype)
        return hidden + linear(inner, self.second, dtype).float()


def _channels(distances: torch.Tensor, times: torch.Tensor | None) -> Attention:
    """Return attention by positions, by times if there are some, and by contents, side by side in
    each head.
    """
    by_contents = silu_attention(None, max_length=len(distances))

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        buckets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        width = value.shape[2]
        channels = [by_distance(distances, width).tril().to(value.dtype) @ value]
        if times is not None and buckets is not None:
            channels.append(_shared_by_heads(by_time(times, buckets).tril(), value))
        channels.append(by_contents(query, key, value))
        return torch.cat(channels, dim=3)

    return attend


def _shared_by_heads(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return sums over values by weights that all heads of a list share, [lists, elements,
    elements].
    """
    heads = value.shape[1]
    side_by_side = value.transpose(1, 2).flatten(2)
    summed = weights.to(value.dtype) @ side_by_side
    return summed.unflatten(2, (heads, -1)).transpose(1, 2)
