"""Attention of a target over a sequence (Zhou et al., "Deep Interest Network for Click-Through Rate
Prediction", KDD 2018).
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import nn
from torch.nn import functional

from rayrec.layers.kernels.dropout import dropped
from rayrec.layers.kernels.kernel_threads import uses_kernels
from rayrec.layers.kernels.list_attention import attend_lists
from rayrec.layers.keyed_embeddings import JaggedEmbeddings
from rayrec.layers.mlp import (
    Dice,
    Precision,
    UninitializedLinear,
    apply_linear,
    compute_dtype,
    xavier_linear,
)


@final
class AttentionPooling(nn.Module):
    """Sum of a sequence's embeddings, weighted by a network of each embedding and the row's target.
    Its input is the concatenated target, embedding, difference and product. The weights are not
    normalized, so the sum shows an interest's strength.
    """

    def __init__(self, dim: int, sizes: Sequence[int], *, precision: Precision = "fp32") -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.activations = nn.ModuleList()
        in_features = 4 * dim
        for size in sizes:
            self.layers.append(xavier_linear(in_features, size))
            self.activations.append(Dice(size))
            in_features = size
        self.weight = xavier_linear(in_features, 1)
        self._dtype = compute_dtype(precision)

    def forward(self, target: torch.Tensor, sequences: JaggedEmbeddings) -> torch.Tensor:
        """Return the weighted sums, 0 for a row without ids, float32 [rows, dim]. `target`: float32
        [rows, dim].
        """
        hidden = self._first(self.layers[0] if len(self.layers) else self.weight, target, sequences)
        for number, activation in enumerate(self.activations):
            hidden = activation(hidden)
            last = number == len(self.layers) - 1
            layer = self.weight if last else self.layers[number + 1]
            assert isinstance(layer, UninitializedLinear)
            dtype = torch.float32 if last else self._dtype
            hidden = functional.linear(
                hidden.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype)
            )
        return sequences.sum(sequences.values * hidden.float())

    def _first(
        self, layer: nn.Module, target: torch.Tensor, sequences: JaggedEmbeddings
    ) -> torch.Tensor:
        """Compute the product of the inputs with a layer's weights. Computes the target's part once
        per row.
        """
        assert isinstance(layer, UninitializedLinear)
        # W [t, v, t - v, t * v] = (Wt + Wd) t + (Wv - Wd) v + Wp (t * v). Ids share the row's first
        # term.
        target_weight, value_weight, difference_weight, product_weight = layer.weight.chunk(
            4, dim=1
        )
        dtype = self._dtype
        values = sequences.values
        by_row = functional.linear(
            target.to(dtype), (target_weight + difference_weight).to(dtype), layer.bias.to(dtype)
        )
        inputs = torch.cat([values, sequences.spread(target) * values], dim=1)
        weights = torch.cat([value_weight - difference_weight, product_weight], dim=1)
        return functional.linear(inputs.to(dtype), weights.to(dtype)) + sequences.spread(by_row)


@final
class FieldAttention(nn.Module):
    """Attention of each head over fields, [rows, fields, in_dim] to [rows, fields, dim], then ReLU
    of heads plus field. Products have the precision's dtype. The softmax is float32.
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        heads: int,
        *,
        scale: bool,
        dropout: float,
        precision: Precision = "fp32",
    ) -> None:
        """`scale`: whether to divide scores by the square root of the head width. Projects the
        field if `in_dim` is not `dim`.
        """
        super().__init__()
        self.query, self.key, self.value = (
            xavier_linear(in_dim, dim, bias=False) for _ in range(3)
        )
        self.shortcut = xavier_linear(in_dim, dim, bias=False) if in_dim != dim else None
        self._heads = heads
        self._dropout = dropout
        self._dtype = compute_dtype(precision)
        self._scale = (dim // heads) ** -0.5 if scale else 1.0

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        fields = fields.to(self._dtype)
        weight = torch.cat([self.query.weight, self.key.weight, self.value.weight])
        projected = apply_linear(fields, weight, None, dtype=self._dtype)
        if uses_kernels(fields):
            mixed = self._attend_by_kernel(projected)
        else:
            mixed = self._attend(projected)
        residual = fields
        if self.shortcut is not None:
            residual = apply_linear(fields, self.shortcut.weight, None, dtype=self._dtype)
        return (mixed + residual).relu()

    def _attend_by_kernel(self, projected: torch.Tensor) -> torch.Tensor:
        rows, count, _ = projected.shape
        mixed = attend_lists(
            (projected.flatten(0, 1),),
            torch.arange(0, rows * count + 1, count),
            heads=self._heads,
            dropout=self._dropout if self.training else 0.0,
            causal=False,
            scale=self._scale,
        )
        return mixed.unflatten(0, (rows, count))

    def _attend(self, projected: torch.Tensor) -> torch.Tensor:
        # [3, rows, heads, fields, width of a head]
        query, key, value = projected.unflatten(2, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        weights = ((query @ key.transpose(2, 3)).float() * self._scale).softmax(3)
        weights = dropped(weights, self._dropout if self.training else 0.0)
        return (weights.to(self._dtype) @ value).transpose(1, 2).flatten(2)
