"""DCN V2 (Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems",
WWW 2021), and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rayrec.layers.cross import CrossAndDeep
from rayrec.layers.embedded import Embedded
from rayrec.layers.fields import fields, number_vectors
from rayrec.layers.mlp import Precision
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.checks import check_counts, check_dropouts, check_sizes


@dataclass(frozen=True, kw_only=True)
class DCNv2Config(ClickModelConfig):
    """Cross layers, each of which raises the degree of the products of features by one, and an MLP."""

    structure: Literal["parallel", "stacked"] = "parallel"
    """The MLP takes the features next to the cross layers (parallel), or takes what the cross layers give (stacked)."""
    cross_layers: int = 3
    """Number of cross layers."""
    low_rank: int | None = None
    """Rank of each cross layer's weight; None: full rank."""
    mlp: tuple[int, ...] = (400, 400, 400)
    """Widths of the MLP's layers; empty: cross layers alone."""
    dropout: float = 0.0
    """Share of each MLP layer's activations that a step leaves out."""
    batch_norm: bool = False
    """Normalize each MLP layer's outputs over the global batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "cross_layers")
        if self.low_rank is not None:
            check_counts(self, "low_rank")
        check_sizes(self, "mlp")
        check_dropouts(self, "dropout")

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return DCNv2(self, inputs, precision=precision)


class DCNv2(nn.Module):
    """A number counts as a feature whose embedding is the number times a learned vector."""

    def __init__(self, config: DCNv2Config, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._label = inputs.label
        self.number_vectors = number_vectors(inputs.num_dense, config.embedding_dim)
        self.network = CrossAndDeep(
            (inputs.num_dense + len(inputs.features)) * config.embedding_dim,
            cross_layers=config.cross_layers,
            mlp=config.mlp,
            structure=config.structure,
            low_rank=config.low_rank,
            dropout=config.dropout,
            norm="batch" if config.batch_norm else "none",
            precision=precision,
        )

    def forward(self, dense: torch.Tensor, embedded: Embedded) -> dict[str, torch.Tensor]:
        """See `ClickModelConfig.build`."""
        return {self._label: self.network(fields(dense, self.number_vectors, embedded).flatten(1))}
