"""AutoInt (Song et al., "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural
Networks", CIKM 2019).
"""

from dataclasses import dataclass

import torch
from torch import nn

from rayrec.bounds import Count, Share, Sizes
from rayrec.config import InputError
from rayrec.layers.attention import FieldAttention
from rayrec.layers.keyed_embeddings import FieldsAndLinear, KeyedEmbeddings, fields, number_vectors
from rayrec.layers.mlp import LogitTower, Precision, xavier_linear
from rayrec.models.base import MLPConfig, ModelInputs, width_with_weight


@dataclass(frozen=True, kw_only=True)
class AutoIntConfig(MLPConfig):
    """Self-attention layers over the features. An optional parallel MLP (AutoInt+) adds its
    logit.
    """

    layers: Count = 3
    """Number of self-attention layers. Each one doubles the order of interactions."""
    attention_dim: Count = 64
    """Width of each feature after a layer, all heads together."""
    heads: Count = 2
    """Number of attention heads per layer."""
    scale: bool = False
    """Whether to divide attention scores by the square root of the head width."""
    mlp: Sizes = ()
    """Layer widths of the MLP over all features. If empty, the model has no MLP."""
    dropout: Share = 0.0
    """Dropout probability of the attention weights and the MLP's layers."""
    use_wide: bool = False
    """Whether to add the logit of a linear model of all features."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_dim % self.heads:
            raise InputError(
                f"AutoIntConfig.attention_dim: must be a multiple of heads {self.heads}, got "
                f"{self.attention_dim}"
            )

    @property
    def width(self) -> int:
        return width_with_weight(self.embedding_dim) if self.use_wide else self.embedding_dim

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return AutoInt(self, inputs, precision=precision)


# Shapes, for F fields of width D and A = attention_dim:
#
#   numbers and embeddings -> vectors [rows, F, D]
#   vectors -> layers of FieldAttention -> [rows, F, A] -> logit
#   vectors -> MLP (if any) -> logit, added
#   weight of each category, and of each number (use_wide) -> logit, added
class AutoInt(nn.Module):
    def __init__(self, config: AutoIntConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._label = inputs.label
        dim = config.embedding_dim
        count = inputs.num_dense + len(inputs.features)
        if config.use_wide:
            self.fields = FieldsAndLinear(inputs.num_dense, dim, bias=False)
        else:
            self.number_vectors = number_vectors(inputs.num_dense, dim)
        self._wide = config.use_wide
        layers = []
        width = dim
        for _ in range(config.layers):
            shape = (width, config.attention_dim, config.heads)
            layers.append(
                FieldAttention(
                    *shape, scale=config.scale, dropout=config.dropout, precision=precision
                )
            )
            width = config.attention_dim
        self.attention = nn.Sequential(*layers)
        self.logit = xavier_linear(count * config.attention_dim, 1)
        self.deep = (
            LogitTower(count * dim, config.mlp, **config.layer_settings(precision))
            if config.mlp
            else None
        )

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        if self._wide:
            vectors, wide = self.fields(dense, embedded)
        else:
            vectors = fields(dense, self.number_vectors, embedded)
            wide = 0.0
        logits = self.logit(self.attention(vectors).float().flatten(1)).squeeze(1) + wide
        return {
            self._label: logits if self.deep is None else logits + self.deep(vectors.flatten(1))
        }
