"""GDCN (Wang et al., "Towards Deeper, Lighter and Interpretable Cross Network for CTR Prediction", CIKM 2023)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rayrec.bounds import Count, Share, Sizes
from rayrec.layers.cross import CrossAndDeep, Crosses, CrossLayer
from rayrec.layers.field_embeddings import fields, number_vectors
from rayrec.layers.keyed_embeddings import Embedded
from rayrec.layers.mlp import Precision
from rayrec.models.base import ClickModelConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class GDCNConfig(ClickModelConfig):
    """DCN V2 whose cross layers have gates, which hold back the products that do not help; it gains from more layers."""

    structure: Literal["parallel", "stacked"] = "parallel"
    """The MLP takes the features next to the cross layers (parallel), or takes what the cross layers give (stacked)."""
    cross_layers: Count = 3
    """Number of gated cross layers."""
    mlp: Sizes = (400, 400, 400)
    """Widths of the MLP's layers; empty: cross layers alone."""
    dropout: Share = 0.0
    """Share of each MLP layer's activations that a step leaves out."""
    batch_norm: bool = False
    """Normalize each MLP layer's outputs over the global batch."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return GDCN(self, inputs, precision=precision)


class GDCN(nn.Module):
    """A number counts as a feature whose embedding is the number times a learned vector."""

    def __init__(self, config: GDCNConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._label = inputs.label
        self.number_vectors = number_vectors(inputs.num_dense, config.embedding_dim)
        width = (inputs.num_dense + len(inputs.features)) * config.embedding_dim
        self.network = CrossAndDeep(
            width,
            Crosses(CrossLayer(width, gated=True, precision=precision) for _ in range(config.cross_layers)),
            mlp=config.mlp,
            structure=config.structure,
            dropout=config.dropout,
            batch_norm=config.batch_norm,
            precision=precision,
        )

    def forward(self, dense: torch.Tensor, embedded: Embedded) -> dict[str, torch.Tensor]:
        """See `ClickModelConfig.build`."""
        return {self._label: self.network(fields(dense, self.number_vectors, embedded).flatten(1))}
