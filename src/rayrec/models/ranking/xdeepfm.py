"""xDeepFM (Lian et al., "xDeepFM: Combining Explicit and Implicit Feature Interactions for
Recommender Systems", KDD 2018).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rayrec.bounds import Sizes, SomeSizes
from rayrec.layers.kernels.vector_products import sum_products
from rayrec.layers.keyed_embeddings import FieldsAndLinear, KeyedEmbeddings
from rayrec.layers.mlp import (
    LogitTower,
    Precision,
    UninitializedLinear,
    compute_dtype,
    xavier_linear,
)
from rayrec.models.base import ModelInputs
from rayrec.models.ranking.deepfm import DeepFMConfig


@dataclass(frozen=True, kw_only=True)
class XDeepFMConfig(DeepFMConfig):
    """Linear model, compressed interaction network and MLP with common embeddings and added
    logits.
    """

    interaction: SomeSizes = (16, 16, 16)
    """Number of vectors in each layer of the compressed interaction network. Each layer adds one
    order of interactions.
    """
    mlp: Sizes = (400, 400, 400)
    """Layer widths of the MLP over all features. If empty, the model has no MLP."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return XDeepFM(self, inputs, precision=precision)


# Logits that are added, for F fields of width D:
#
#   linear         last value of each embedding, and a weight per number
#   interaction    CIN: vectors [rows, F, D] -> layers of weighted products, summed over D
#   deep           vectors [rows, F * D] -> MLP (if any)
class XDeepFM(nn.Module):
    def __init__(self, config: XDeepFMConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        super().__init__()
        self._label = inputs.label
        count = inputs.num_dense + len(inputs.features)
        self.fields = FieldsAndLinear(inputs.num_dense, config.embedding_dim, bias=False)
        self.interaction = CompressedInteraction(count, config.interaction, precision=precision)
        deep = (count * config.embedding_dim, config.mlp)
        self.deep = LogitTower(*deep, **config.layer_settings(precision)) if config.mlp else None

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        fields, linear = self.fields(dense, embedded)
        logits = linear + self.interaction(fields)
        return {self._label: logits if self.deep is None else logits + self.deep(fields.flatten(1))}


class CompressedInteraction(nn.Module):
    """Compressed interaction network (CIN): the logit of weighted sums of elementwise products
    between all fields and all vectors in the previous layer. No activation between layers, which is
    best in the paper.
    """

    def __init__(self, num_fields: int, sizes: Sequence[int], *, precision: Precision) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        count = num_fields
        for size in sizes:
            self.layers.append(xavier_linear(num_fields * count, size))
            count = size
        self.logit = xavier_linear(sum(sizes), 1)
        self._dtype = compute_dtype(precision)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits [rows] for fields [rows, num_fields, dim]."""
        first = fields.to(self._dtype)
        hidden = first
        sums = []
        for layer in self.layers:
            assert isinstance(layer, UninitializedLinear)
            hidden = sum_products(first, hidden, layer.weight, layer.bias)
            sums.append(hidden.float().sum(2))
        return self.logit(torch.cat(sums, dim=1)).squeeze(1)
