"""MaskNet (Wang et al., "MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models",
DLP-KDD 2021).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Count, Share, Sizes
from rayrec.config import InputError
from rayrec.layers.kernels.dropout import dropped
from rayrec.layers.keyed_embeddings import KeyedEmbeddings, fields, number_vectors
from rayrec.layers.mlp import (
    LogitTower,
    Precision,
    apply_linear,
    compute_dtype,
    linear_stack,
    xavier_linear,
)
from rayrec.models.base import ClickModelConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class MaskNetConfig(ClickModelConfig):
    """Layers with inputs multiplied by a mask that is computed from all features."""

    structure: Literal["parallel", "serial"] = "serial"
    """Block layout: all mask blocks take the features, below an MLP (parallel), or each takes the
    previous outputs (serial).
    """
    mlp: Sizes = (400, 400, 400)
    """Widths of the mask blocks (serial), or the MLP's above them (parallel)."""
    num_blocks: Count = 3
    """Number of mask blocks (parallel)."""
    block_dim: Count = 64
    """Width of each mask block (parallel)."""
    reduction_ratio: float = 1.0
    """Width of a mask's hidden layer as a multiple of the mask's width."""
    dropout: Share = 0.0
    """Dropout probability of each layer."""
    embedding_layer_norm: bool = True
    """Whether to apply layer norm to each feature's vector before the mask."""
    layer_norm: bool = True
    """Whether to apply layer norm to the outputs of each mask block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structure == "serial" and not self.mlp:
            raise InputError(
                "MaskNetConfig.mlp: must not be empty for structure serial, got (). Set it."
            )
        if self.reduction_ratio <= 0:
            raise InputError(
                f"MaskNetConfig.reduction_ratio: must be above 0, got {self.reduction_ratio}"
            )

    def needs_categories(self) -> bool:
        return False

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return MaskNet(self, inputs, precision=precision)


# Shapes, for F fields of width D. A block multiplies its input by a mask computed from all
# features:
#
#   numbers and embeddings -> features [rows, F * D]
#   parallel    each block: mask(features) * norm(features) -> block_dim;  all concatenated -> MLP
#   serial      block 1: mask(features) * norm(features) -> h1;  block 2: mask(features) * h1 -> ...
class MaskNet(nn.Module):
    def __init__(self, config: MaskNetConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._label = inputs.label
        dim = config.embedding_dim
        self.number_vectors = number_vectors(inputs.num_dense, dim)
        count = inputs.num_dense + len(inputs.features)
        self.norms = _LayerNorms(count, dim) if config.embedding_layer_norm else None
        self._serial = config.structure == "serial"
        width = count * dim
        self.blocks = nn.ModuleList()
        if self._serial:
            hidden = width
            for size in config.mlp:
                self.blocks.append(_MaskBlock(width, hidden, size, config, precision))
                hidden = size
            self.top = LogitTower(hidden, (), precision=precision)
        else:
            for _ in range(config.num_blocks):
                self.blocks.append(_MaskBlock(width, width, config.block_dim, config, precision))
            hidden = config.num_blocks * config.block_dim
            self.top = LogitTower(hidden, config.mlp, dropout=config.dropout, precision=precision)

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        vectors = fields(dense, self.number_vectors, embedded)
        features = vectors.flatten(1)
        hidden = features if self.norms is None else self.norms(vectors).flatten(1)
        if self._serial:
            for block in self.blocks:
                hidden = block(features, hidden)
        else:
            hidden = torch.cat([block(features, hidden) for block in self.blocks], dim=1)
        return {self._label: self.top(hidden)}


class _LayerNorms(nn.Module):
    """Separate layer norm for each of `count` vectors, [rows, count, dim]."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, dim))
        self.bias = nn.Parameter(torch.zeros(count, dim))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(vectors, vectors.shape[2:]) * self.weight + self.bias


class _MaskBlock(nn.Module):
    """Mask of the features times the inputs, a linear layer without bias, layer norm, ReLU and
    dropout. Maps [rows, num_features] and [rows, in_features] to [rows, out_features].
    """

    def __init__(
        self,
        num_features: int,
        in_features: int,
        out_features: int,
        config: MaskNetConfig,
        precision: Precision,
    ) -> None:
        super().__init__()
        between = max(1, int(in_features * config.reduction_ratio))
        self.first = xavier_linear(num_features, between)
        self.second = xavier_linear(between, in_features)
        self.layer = xavier_linear(in_features, out_features, bias=False)
        self.norm = nn.LayerNorm(out_features) if config.layer_norm else nn.Identity()
        self._dropout = config.dropout
        self._dtype = compute_dtype(precision)

    def forward(self, features: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        parameters = (self.first.weight, self.first.bias, self.second.weight, self.second.bias)
        mask = linear_stack(features, parameters, relus=(True, False), dtype=self._dtype)
        linear = apply_linear(mask * inputs, self.layer.weight, None, dtype=self._dtype)
        dropout = self._dropout if self.training else 0.0
        return dropped(self.norm(linear.float()).relu(), dropout)
