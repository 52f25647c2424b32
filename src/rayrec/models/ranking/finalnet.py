"""FinalNet (Zhu et al., "FINAL: Factorized Interaction Layer for CTR Prediction", SIGIR 2023)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import MinLen
from torch import nn
from torch.nn import functional

from rayrec.batch import Batch
from rayrec.bounds import Even, Share
from rayrec.layers.kernels.dropout import dropped
from rayrec.layers.keyed_embeddings import KeyedEmbeddings, fields, number_vectors
from rayrec.layers.mlp import (
    GlobalBatchNorm,
    Precision,
    UninitializedLinear,
    apply_linear,
    compute_dtype,
    init_values,
    xavier_linear,
)
from rayrec.models.base import ClickModelConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class FinalNetConfig(ClickModelConfig):
    """Two towers of factorized interaction layers with averaged logits, which also learn from their
    mean.
    """

    first_tower: Annotated[tuple[Even, ...], MinLen(1)] = (400, 400)
    """Layer widths of the first tower, each even."""
    second_tower: tuple[Even, ...] = (400, 400)
    """Layer widths of the second tower, each even. If empty, there is only one tower."""
    first_dropout: Share = 0.1
    """Dropout probability of the first tower's layers."""
    second_dropout: Share = 0.0
    """Dropout probability of the second tower's layers."""
    batch_norm: bool = True
    """Whether to use batch norm, over the global batch, in each layer."""
    activation: Literal["relu", "none"] = "relu"
    """Activation of each layer."""
    feature_gate: bool = True
    """Whether the first tower also takes gated embeddings, multiplied by weights computed from all
    features.
    """
    tower_losses: bool = True
    """Whether to add each tower's cross entropy with the mean's probability to the loss."""

    def needs_categories(self) -> bool:
        return False

    def loss_logits(self) -> tuple[str, ...]:
        return "first tower", "second tower"

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return FinalNet(self, inputs, precision=precision)


# Shapes, for F fields of width D. With the gate, the first tower sees both versions of the fields:
#
#   numbers and embeddings -> vectors [rows, F, D]
#   vectors, and vectors times gates [rows, 2 F * D] -> first tower  -> y1
#   vectors [rows, F * D]                            -> second tower -> y2
#   layer of a tower: linear halves h1, h2 -> [h2, h1 * h2]
class FinalNet(nn.Module):
    """Network with logit (y1 + y2) / 2 of two towers."""

    def __init__(
        self, config: FinalNetConfig, inputs: ModelInputs, *, precision: Precision
    ) -> None:
        super().__init__()
        self._label = inputs.label
        self._tower_losses = config.tower_losses
        dim = config.embedding_dim
        count = inputs.num_dense + len(inputs.features)
        self.number_vectors = number_vectors(inputs.num_dense, dim)
        self.gate = UninitializedLinear(count, count) if config.feature_gate else None
        if self.gate is not None:  # Initial gates are 1
            init_values(self.gate.weight, nn.init.zeros_)
            init_values(self.gate.bias, nn.init.ones_)
        width = count * dim * (2 if config.feature_gate else 1)
        self.first = _Tower(width, config.first_tower, config.first_dropout, config, precision)
        self.second = (
            _Tower(count * dim, config.second_tower, config.second_dropout, config, precision)
            if config.second_tower
            else None
        )

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        """Return the label's logits, and for `tower_losses` the logits of each of two towers."""
        vectors = fields(dense, self.number_vectors, embedded)
        plain = gated = vectors.flatten(1)
        if self.gate is not None:
            gates = self.gate(vectors.transpose(1, 2)).transpose(1, 2)
            gated = torch.cat([vectors, vectors * gates], dim=1).flatten(1)
        first = self.first(gated)
        if self.second is None:
            return {self._label: first}
        second = self.second(plain)
        outputs = {self._label: (first + second) * 0.5}
        return (
            {**outputs, "first tower": first, "second tower": second}
            if self._tower_losses
            else outputs
        )

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the cross entropy of the logit and, for `tower_losses`, of each tower with its
        probability, float32 [rows].
        """
        logits = outputs[self._label]
        loss = functional.binary_cross_entropy_with_logits(
            logits, batch.labels[self._label], reduction="none"
        )
        for tower in ("first tower", "second tower"):
            if tower in outputs:
                loss = loss + functional.binary_cross_entropy_with_logits(
                    outputs[tower], logits.detach().sigmoid(), reduction="none"
                )
        return loss


class _Tower(nn.Module):
    """Factorized interaction layers: half of each layer's linear outputs, concatenated with the
    product of both halves.
    """

    def __init__(
        self,
        in_features: int,
        sizes: tuple[int, ...],
        dropout: float,
        config: FinalNetConfig,
        precision: Precision,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.norms = nn.ModuleList()
        for size in sizes:
            self.layers.append(xavier_linear(in_features, size))
            self.norms.append(GlobalBatchNorm(size) if config.batch_norm else nn.Identity())
            in_features = size
        self.logit = xavier_linear(in_features, 1)
        self._dropout = dropout
        self._relu = config.activation == "relu"
        self._dtype = compute_dtype(precision)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits [rows] for inputs [rows, in_features]."""
        hidden = inputs.to(self._dtype)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            assert isinstance(layer, UninitializedLinear)
            linear = apply_linear(hidden, layer.weight, layer.bias, dtype=self._dtype)
            second, first = linear.chunk(2, dim=1)
            hidden = norm(torch.cat([second, first * second], dim=1))
            hidden = hidden.relu() if self._relu else hidden
            hidden = dropped(hidden, self._dropout if self.training else 0.0)
        return self.logit(hidden.float()).squeeze(1)
