"""Wukong (Zhang et al., "Wukong: Towards a Scaling Law for Large-Scale Recommendation", ICML
2024).
"""

from dataclasses import dataclass

import torch
from torch import nn

from rayrec.bounds import Count, Share, Sizes
from rayrec.layers.keyed_embeddings import KeyedEmbeddings, fields, number_vectors
from rayrec.layers.mlp import (
    LogitTower,
    Precision,
    Tower,
    apply_linear,
    compute_dtype,
    init_values,
    xavier_linear,
)
from rayrec.models.base import ClickModelConfig, ModelInputs


@dataclass(frozen=True, kw_only=True)
class WukongConfig(ClickModelConfig):
    """Stacked factorization machines over vectors. Scale layers, vectors, rank and block_mlp
    together.
    """

    num_layers: Count = 3
    """Number of layers."""
    linear_vectors: Count = 40
    """Number of output vectors per layer that are linear in its input vectors."""
    product_vectors: Count = 40
    """Number of output vectors per layer that are computed from the products of its input
    vectors.
    """
    rank: Count = 8
    """Number of weighted sums of all vectors by which each input vector is multiplied."""
    block_mlp: Sizes = (512, 256)
    """Widths of the hidden layers over the products in each layer."""
    mlp: Sizes = (512, 256)
    """Layer widths of the MLP on top of the last layer."""
    dropout: Share = 0.0
    """Dropout probability of the layers in each block_mlp."""
    mlp_batch_norm: bool = False
    """Whether to use batch norm, over the global batch, in `mlp`. FuxiCTR's default is True."""

    def needs_categories(self) -> bool:
        return False

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return Wukong(self, inputs, precision=precision)


# Shapes, for F fields of width D. Each layer doubles the order of interactions:
#
#   numbers and embeddings -> vectors [rows, F, D]
#   layer: products with `rank` mixtures -> MLP -> product_vectors;  linear -> linear_vectors
#          both concatenated [rows, product_vectors + linear_vectors, D], plus the shortcut, normed
#   last layer -> MLP -> logit
class Wukong(nn.Module):
    def __init__(self, config: WukongConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._label = inputs.label
        dim = config.embedding_dim
        self.number_vectors = number_vectors(inputs.num_dense, dim)
        self.layers = nn.ModuleList()
        count = inputs.num_dense + len(inputs.features)
        for _ in range(config.num_layers):
            self.layers.append(_Layer(count, config, precision))
            count = config.product_vectors + config.linear_vectors
        self.top = LogitTower(
            count * dim, config.mlp, batch_norm=config.mlp_batch_norm, precision=precision
        )

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        vectors = fields(dense, self.number_vectors, embedded)
        for layer in self.layers:
            vectors = layer(vectors)
        return {self._label: self.top(vectors.flatten(1))}


class _Layer(nn.Module):
    """Layer LN(concat(F(X), W X) + P X) with F(X) = ReLU(MLP(LN(X Xᵀ Y))), [rows, count, dim] to
    float32 [rows, product_vectors + linear_vectors, dim]. P is the identity if the vector count is
    unchanged.
    """

    def __init__(self, count: int, config: WukongConfig, precision: Precision) -> None:
        super().__init__()
        dim = config.embedding_dim
        out = config.product_vectors + config.linear_vectors
        self.mixing = nn.Parameter(init_values(torch.empty(count, config.rank), nn.init.normal_))
        self.products_norm = nn.LayerNorm(count * config.rank)
        self.tower = Tower(
            count * config.rank, config.block_mlp, dropout=config.dropout, precision=precision
        )
        self.products = xavier_linear(self.tower.out_features, config.product_vectors * dim)
        self.linear = xavier_linear(count, config.linear_vectors, bias=False)
        self.shortcut = xavier_linear(count, out) if count != out else None
        self.norm = nn.LayerNorm(dim)
        self._shape = (config.product_vectors, dim)
        self._dtype = compute_dtype(precision)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        # One product for all weighted sums of the vectors, [rows, dim, sums]
        weights = [self.mixing.t(), self.linear.weight]
        if self.shortcut is not None:
            weights.append(self.shortcut.weight)
        sums = apply_linear(
            vectors.transpose(1, 2), torch.cat(weights), None, dtype=torch.float32
        ).split([len(weight) for weight in weights], dim=2)
        products = torch.bmm(vectors, sums[0]).flatten(1)
        product_vectors = apply_linear(
            self.tower(self.products_norm(products)),
            self.products.weight,
            self.products.bias,
            dtype=self._dtype,
            relu=True,
        )
        combined = torch.cat(
            [product_vectors.float().unflatten(1, self._shape), sums[1].transpose(1, 2)], dim=1
        )
        residual = vectors
        if self.shortcut is not None:
            residual = (sums[2] + self.shortcut.bias).transpose(1, 2)
        return self.norm(combined + residual)
