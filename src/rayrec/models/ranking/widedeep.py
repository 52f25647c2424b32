"""Wide & Deep (Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016)."""

from dataclasses import dataclass

import torch
from torch import nn

from rayrec.layers.keyed_embeddings import FieldsAndLinear, KeyedEmbeddings, width_with_weight
from rayrec.layers.mlp import LogitTower, Precision
from rayrec.models.base import MLPConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class WideDeepConfig(MLPConfig):
    """Linear model and MLP over the same features with added logits."""

    @property
    def width(self) -> int:
        return width_with_weight(self.embedding_dim)

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return WideDeep(self, inputs, precision=precision)


class WideDeep(nn.Module):
    """Network whose linear model takes single features. A cross product of features is a column of the data."""

    def __init__(self, config: WideDeepConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._label = inputs.label
        self.fields = FieldsAndLinear(inputs.num_dense, config.embedding_dim)
        # The logit's bias is in the MLP. This one is constant: 0, or its value in a checkpoint trained with both.
        bias = self.fields.linear.bias.detach()
        del self.fields.linear.bias
        self.fields.linear.register_buffer("bias", bias)
        width = (inputs.num_dense + len(inputs.features)) * config.embedding_dim
        self.deep = LogitTower(width, config.mlp, **config.layer_settings(precision))

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        fields, wide = self.fields(dense, embedded)
        return {self._label: wide + self.deep(fields.flatten(1))}
