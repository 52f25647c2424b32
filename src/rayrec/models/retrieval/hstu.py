"""HSTU (Zhai et al., "Actions Speak Louder than Words", ICML 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Positive
from rayrec.layers.kernels.dropout import dropped
from rayrec.layers.mlp import Precision, UninitializedLinear, xavier_linear
from rayrec.layers.sequence_blocks import (
    TIME_BUCKETS,
    ListElements,
    attended,
    linear,
    normal_values,
    silu_attention,
)
from rayrec.models.base import ModelInputs
from rayrec.models.item_lists import Loss
from rayrec.models.next_item import BlockNetwork, TimedConfig

_EPS: Final = 1e-6
"""Epsilon of layer norm."""


@dataclass(frozen=True, kw_only=True)
class HSTUConfig(TimedConfig):
    """Attention without softmax, gated by its input, and cosines as scores."""

    loss: Loss = "sampled"
    unit_vectors: bool = True
    temperature: Positive = 0.05

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return HSTU(self, inputs, precision=precision)


class HSTU(BlockNetwork):
    """Blocks of gated attention. Products have the precision's dtype."""

    def __init__(self, config: HSTUConfig, inputs: ModelInputs, *, precision: Precision) -> None:
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
    """Sum of earlier elements' values by the SiLU of their score, times a gate, [elements, dim]."""

    def __init__(
        self,
        config: HSTUConfig,
        max_length: int,
        *,
        is_timed: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        dim = config.embedding_dim
        self.joint = UninitializedLinear(dim, 4 * dim, bias=False)
        normal_values(self.joint.weight)
        self.distances = nn.Parameter(normal_values(torch.empty(max_length)))
        self.times = None
        if is_timed:
            self.times = nn.Parameter(normal_values(torch.empty(TIME_BUCKETS)))
        self.mixed = xavier_linear(dim, dim)
        self._heads = config.attention_heads
        self._dropout = config.dropout
        self._dtype = dtype

    def forward(self, inputs: torch.Tensor, elements: ListElements) -> torch.Tensor:
        shape = (inputs.shape[1],)
        normed = functional.layer_norm(inputs, shape, eps=_EPS)
        joint = functional.silu(linear(normed, self.joint, self._dtype))
        mixed = attended(
            elements,
            joint[:, shape[0] :],
            heads=self._heads,
            attention=silu_attention(
                self.distances,
                max_length=len(self.distances),
                times=self.times,
            ),
        )
        gated = joint[:, : shape[0]] * functional.layer_norm(mixed.float(), shape, eps=_EPS)
        gated = dropped(gated, self._dropout if self.training else 0.0)
        return inputs + linear(gated, self.mixed, self._dtype).float()
