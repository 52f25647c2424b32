"""Logistic regression with a weight for each category and each number (Richardson et al.,
"Predicting Clicks", WWW 2007).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayrec.bounds import Positive, Zero
from rayrec.layers.first_order import FirstOrder
from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.mlp import Precision
from rayrec.models.base import ClickModelConfig, ModelInputs, width_with_weight


@dataclass(frozen=True, kw_only=True)
class LinearConfig(ClickModelConfig):
    """Sum of separate weights for each feature. A baseline, and useful in an ensemble on logs of a
    few thousand rows.
    """

    embedding_dim: Zero = 0
    """Must be 0, because a category has one weight."""
    number_scale: Positive = 10.0
    """Factor of the numbers' weights. Optimizers such as Adam change a weight by about the learning
    rate per step, which is too small for a weight without a network behind it.
    """
    category_scale: Positive = 0.7
    """Factor of the categories' weights. Below 1, because embedding learning rates are too large
    for them.
    """

    def embedding_settings(self) -> dict[str, Any]:
        return super().embedding_settings() | {"embedding_dim": ClickModelConfig.embedding_dim}

    @classmethod
    def replacing(cls, other: ClickModelConfig) -> LinearConfig:
        return cls(embedding_penalty=other.embedding_penalty, members=other.members)

    @property
    def width(self) -> int:
        return width_with_weight(0)

    def needs_categories(self) -> bool:
        return False

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return Linear(self, inputs)


# An embedding is one value, the category's weight. Their sum, and a piecewise-linear function of
# each number, is the logit.
class Linear(FirstOrder):
    def __init__(self, config: LinearConfig, inputs: ModelInputs) -> None:
        super().__init__(
            inputs.num_dense, number_scale=config.number_scale, category_scale=config.category_scale
        )
        self._label = inputs.label

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        return {self._label: self.logit(dense, embedded.stacked()[:, :, 0])}
