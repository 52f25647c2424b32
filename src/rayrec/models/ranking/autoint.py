"""AutoInt (Song et al., "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks", CIKM 2019)."""

from dataclasses import dataclass

import torch
from torch import nn

from rayrec.bounds import Count, Share, Sizes
from rayrec.config import InputError
from rayrec.layers.attention import FieldAttention
from rayrec.layers.field_embeddings import FieldsAndLinear, fields, number_vectors, width_with_weight
from rayrec.layers.keyed_embeddings import Embedded
from rayrec.layers.mlp import Precision
from rayrec.layers.tower import LogitTower, xavier_linear
from rayrec.models.base import ClickModelConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class AutoIntConfig(ClickModelConfig):
    """Layers of self-attention over the features; with an MLP next to them (AutoInt+), the logits are added."""

    layers: Count = 3
    """Layers of self-attention; a layer doubles the order of interactions."""
    attention_dim: Count = 64
    """Values of each feature after a layer, those of all heads together."""
    heads: Count = 2
    """Heads of each layer."""
    scale: bool = False
    """Divide a product of query and key by the square root of a head's width."""
    mlp: Sizes = ()
    """Widths of the MLP's layers over all features; empty: there is no MLP."""
    dropout: Share = 0.0
    """Share of the attention's weights and of the MLP's activations that a step leaves out."""
    batch_norm: bool = False
    """Normalize the outputs of the MLP's layers over the global batch."""
    use_wide: bool = False
    """Add the logit of a linear model of all features."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_dim % self.heads:
            raise InputError(f"AutoIntConfig.attention_dim: {self.attention_dim} must be a multiple of heads, {self.heads}")

    @property
    def width(self) -> int:
        return width_with_weight(self.embedding_dim) if self.use_wide else self.embedding_dim

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return AutoInt(self, inputs, precision=precision)


class AutoInt(nn.Module):
    """A number counts as a feature whose embedding is the number times a learned vector."""

    def __init__(self, config: AutoIntConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._label, dim = inputs.label, config.embedding_dim
        count = inputs.num_dense + len(inputs.features)
        if config.use_wide:
            self.fields = FieldsAndLinear(inputs.num_dense, dim, bias=False)
        else:
            self.number_vectors = number_vectors(inputs.num_dense, dim)
        self._wide = config.use_wide
        self.attention = nn.Sequential(
            *(
                FieldAttention(
                    config.attention_dim if layer else dim,
                    config.attention_dim,
                    config.heads,
                    scale=config.scale,
                    dropout=config.dropout,
                    precision=precision,
                )
                for layer in range(config.layers)
            )
        )
        self.logit = xavier_linear(count * config.attention_dim, 1)
        self.deep = (
            LogitTower(count * dim, config.mlp, dropout=config.dropout, batch_norm=config.batch_norm, precision=precision)
            if config.mlp
            else None
        )

    def forward(self, dense: torch.Tensor, embedded: Embedded) -> dict[str, torch.Tensor]:
        """See `ClickModelConfig.build`."""
        if self._wide:
            vectors, wide = self.fields(dense, embedded)
        else:
            vectors, wide = fields(dense, self.number_vectors, embedded), 0.0
        logits = self.logit(self.attention(vectors).float().flatten(1)).squeeze(1) + wide
        return {self._label: logits if self.deep is None else logits + self.deep(vectors.flatten(1))}
