"""Gradient-boosted decision trees of LightGBM (Ke et al., "LightGBM: A Highly Efficient Gradient
Boosting Decision Tree", NIPS 2017) on numbers and statistics of categories.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import torch
from annotated_types import Ge, Gt, Le
from torch import nn

from rayrec.bounds import Amount, Count, Positive, Zero
from rayrec.config import InputError
from rayrec.layers.kernels.trees import BoostedTrees
from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.mlp import Precision
from rayrec.models.base import ClickModelConfig, ModelInputs

STATISTICS: Final = 4
"""Values of a category in its table: effect, logarithm of the row count, 1, and 0. Widths are
multiples of 4.
"""
_COLUMNS: Final = 3
"""Columns of a feature: means of effect and logarithm over its ids, and their number."""
_Ratio = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True, kw_only=True)
class LightGBMConfig(ClickModelConfig):
    """Boosted trees on numbers and on two statistics of each category in the training rows: its
    effect on the label and its row count. A list has the means of both, and its length. LightGBM
    adds one tree per step, in one worker, on CPUs.
    """

    BOOSTED: ClassVar[bool] = True

    embedding_dim: Zero = 0
    """Must be 0, because tables contain statistics."""
    trees: Count = 1000
    """Maximum number of trees. Early stopping selects the actual number."""
    leaves: Annotated[int, Ge(2), Le(65_536)] = 31
    """Maximum number of leaves per tree."""
    max_depth: Annotated[int, Ge(1), Le(64)] = 12
    """Maximum number of splits above a leaf."""
    learning_rate: Positive = 0.05
    """Factor of each tree's values."""
    min_leaf_rows: Count = 20
    """Minimum number of training rows in a leaf."""
    l2: Amount = 0.0
    """L2 penalty on the values of leaves."""
    columns_per_tree: _Ratio = 1.0
    """Share of the columns that each tree may use, drawn for each tree."""
    rows_per_tree: _Ratio = 1.0
    """Share of the training rows that each tree is grown on, drawn for each tree."""
    max_bins: Annotated[int, Ge(2), Le(255)] = 255
    """Maximum number of values that a column is rounded to."""
    smoothing: Positive = 20.0
    """Rows with the mean label that are added to each category, so that rare ones have small
    effects.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("members", 1), ("embedding_penalty", 0.0)):
            if getattr(self, name) != value:
                raise InputError(
                    f"LightGBMConfig.{name}: must be {value}, because trees have no gradients, got "
                    f"{getattr(self, name)}. Leave it out."
                )

    def embedding_settings(self) -> dict[str, Any]:
        return super().embedding_settings() | {"embedding_dim": ClickModelConfig.embedding_dim}

    @classmethod
    def replacing(cls, other: ClickModelConfig) -> LightGBMConfig:
        return cls()

    @property
    def width(self) -> int:
        return STATISTICS

    def needs_categories(self) -> bool:
        return False

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return TreeNetwork(self, inputs)


def tree_columns(dense: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
    """Return the columns that trees compare, float32 [rows, num_dense + 3 * num_features]: numbers,
    then for each feature the means of effect and logarithm, and the number of ids.

    Args:
        dense: Numbers, float32 [rows, num_dense].
        statistics: Sums over each feature's ids, float32 [rows, num_features, STATISTICS].
    """
    weight = statistics[:, :, 2:3]
    means = statistics[:, :, :2] / torch.where(weight > 0, weight, 1.0)
    return torch.cat([dense, torch.cat([means, weight], dim=2).flatten(1)], dim=1)


# An embedding is a category's statistics, which are computed from the training rows, so that
# everything that scores a network by its tables also scores trees.
class TreeNetwork(nn.Module):
    def __init__(self, config: LightGBMConfig, inputs: ModelInputs) -> None:
        super().__init__()
        self._label = inputs.label
        self.trees = BoostedTrees(
            trees=config.trees,
            leaves=config.leaves,
            max_depth=config.max_depth,
            columns=inputs.num_dense + _COLUMNS * len(inputs.features),
        )

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        return {self._label: self.trees(tree_columns(dense, embedded.stacked())).float()}
