"""DeepFM (Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction",
IJCAI 2017).
"""

from dataclasses import dataclass

import torch
from torch import nn

from rayrec.layers.keyed_embeddings import FieldsAndLinear, KeyedEmbeddings
from rayrec.layers.mlp import LogitTower, Precision
from rayrec.models.base import MLPConfig, ModelInputs, width_with_weight


@dataclass(frozen=True, kw_only=True)
class DeepFMConfig(MLPConfig):
    """Factorization machine and MLP with common embeddings and added logits."""

    @property
    def width(self) -> int:
        return width_with_weight(self.embedding_dim)

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return DeepFM(self, inputs, precision=precision)


# Logits that are added, for F fields of width D. Each embedding has D + 1 values:
#
#   linear    last value of each embedding, and a weight per number
#   pairs     products of all pairs of the vectors [rows, F, D], in linear time
#   deep      vectors [rows, F * D] -> MLP
class DeepFM(nn.Module):
    def __init__(self, config: DeepFMConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._label = inputs.label
        self.fields = FieldsAndLinear(inputs.num_dense, config.embedding_dim)
        width = (inputs.num_dense + len(inputs.features)) * config.embedding_dim
        self.deep = LogitTower(width, config.mlp, **config.layer_settings(precision))

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        fields, linear = self.fields(dense, embedded)
        # Sum of the products of all field pairs, computed as (squared sum - sum of squares) / 2
        pairs = 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(1)
        return {self._label: linear + pairs + self.deep(fields.flatten(1))}
