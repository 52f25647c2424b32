"""GDCN (Wang et al., "Towards Deeper, Lighter and Interpretable Cross Network for CTR Prediction", CIKM 2023)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rayrec.bounds import Count, Sizes
from rayrec.layers.cross import CrossAndDeep, Crosses, CrossLayer
from rayrec.layers.keyed_embeddings import KeyedEmbeddings, fields, number_vectors
from rayrec.layers.mlp import Precision
from rayrec.models.base import MLPConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class GDCNConfig(MLPConfig):
    """DCN V2 with gated cross layers, which suppress unhelpful products and make more layers useful."""

    structure: Literal["parallel", "stacked"] = "parallel"
    """Input of the MLP: the features (parallel) or the output of the cross layers (stacked)."""
    cross_layers: Count = 3
    """Number of gated cross layers."""
    mlp: Sizes = (400, 400, 400)
    """Layer widths of the MLP. If empty, there are only cross layers."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return GDCN(self, inputs, precision=precision)


class GDCN(nn.Module):
    def __init__(self, config: GDCNConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._label = inputs.label
        self.number_vectors = number_vectors(inputs.num_dense, config.embedding_dim)
        width = (inputs.num_dense + len(inputs.features)) * config.embedding_dim
        crosses = Crosses(CrossLayer(width, gated=True, precision=precision) for _ in range(config.cross_layers))
        settings = config.layer_settings(precision)
        self.network = CrossAndDeep(width, crosses, mlp=config.mlp, structure=config.structure, **settings)

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        return {self._label: self.network(fields(dense, self.number_vectors, embedded).flatten(1))}
