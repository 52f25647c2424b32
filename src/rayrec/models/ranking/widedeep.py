"""Wide & Deep (Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016), and its settings."""

from dataclasses import dataclass

import torch
from torch import nn

from rayrec.bounds import Share, Sizes
from rayrec.layers.field_embeddings import FieldsAndLinear, width_with_weight
from rayrec.layers.keyed_embeddings import Embedded
from rayrec.layers.mlp import Precision
from rayrec.layers.tower import LogitTower
from rayrec.models.base import ClickModelConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class WideDeepConfig(ClickModelConfig):
    """Adds the logits of a linear model and an MLP over the same features."""

    mlp: Sizes = (400, 400, 400)
    """Widths of the layers over all features."""
    dropout: Share = 0.0
    """Share of each layer's activations that a step leaves out."""
    batch_norm: bool = False
    """Normalize each layer's outputs over the global batch."""

    @property
    def width(self) -> int:
        return width_with_weight(self.embedding_dim)

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return WideDeep(self, inputs, precision=precision)


class WideDeep(nn.Module):
    """A number counts as a feature whose embedding is the number times a learned vector. The linear model takes the features
    alone: a cross product of features is a column of the data."""

    def __init__(self, config: WideDeepConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._label = inputs.label
        self.fields = FieldsAndLinear(inputs.num_dense, config.embedding_dim)
        # The logit's bias is the MLP's. This one stays as it is: 0, or what a checkpoint has that was trained with both.
        bias = self.fields.linear.bias.detach()
        del self.fields.linear.bias
        self.fields.linear.register_buffer("bias", bias)
        self.deep = LogitTower(
            (inputs.num_dense + len(inputs.features)) * config.embedding_dim,
            config.mlp,
            dropout=config.dropout,
            batch_norm=config.batch_norm,
            precision=precision,
        )

    def forward(self, dense: torch.Tensor, embedded: Embedded) -> dict[str, torch.Tensor]:
        """See `ClickModelConfig.build`."""
        fields, wide = self.fields(dense, embedded)
        return {self._label: wide + self.deep(fields.flatten(1))}
