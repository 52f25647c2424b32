"""SimpleX (Mao et al., "SimpleX: A Simple and Strong Baseline for Collaborative Filtering", CIKM
2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Fraction, Share
from rayrec.config import InputError
from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.mlp import Precision, xavier_linear
from rayrec.models.base import ModelInputs
from rayrec.models.item_lists import ItemListConfig, Loss
from rayrec.models.item_sets import ItemSetNetwork


@dataclass(frozen=True, kw_only=True)
class SimpleXConfig(ItemListConfig):
    """Vectors of a user and her history, and a loss of cosines.

    Predicts each item of the schema's first list from all its other items, in any order. The user
    is the schema's first column with one category a row.
    """

    loss: Loss = "ccl"
    unit_vectors: bool = True
    user_weight: Fraction = 0.5
    """Weight of the user's own vector, up to 1; the history has the rest. 0 needs no column of
    users.
    """
    pooling: Literal["mean", "attention"] = "mean"
    """Weights of a history's items: equal ones, or by attention to the user."""
    dropout: Share = 0.1
    """Dropout probability of the user's vector."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling == "attention" and not self.user_weight:
            raise InputError(
                "SimpleXConfig.user_weight: must be above 0 for pooling attention, got 0. Set it."
            )

    def user(self, inputs: ModelInputs) -> str | None:
        """Return the column of users, None if it is no input. Raises InputError if the schema has
        none.
        """
        if not self.user_weight:
            return None
        lists = dict(inputs.lists)
        name = next((name for name in inputs.features if name not in lists), None)
        if name is None:
            raise InputError(
                "SimpleXConfig.user_weight: the schema must have a column of users, got "
                f"{', '.join(inputs.features)}. Set user_input: true of its sequence, or "
                "user_weight 0."
            )
        return name

    def sequences(self, inputs: ModelInputs) -> tuple[str, ...]:
        user = self.user(inputs)
        names = super().sequences(inputs)
        return names if user is None else (*names, user)

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return SimpleX(self, inputs, precision=precision)


# With the user's vector u, her history's items h, and the weight g:
#
#   mean         v = g u + (1 - g) V mean(h)
#   attention    v = g u + (1 - g) V sum of a h, a = softmax of u tanh(K h + b)
#
# Unknown users have the vector 0, and cosines do not depend on the length of v.
class SimpleX(ItemSetNetwork):
    """Vector of the user and projected history."""

    def __init__(
        self,
        config: SimpleXConfig,
        inputs: ModelInputs,
        *,
        precision: Precision,
    ) -> None:
        super().__init__(config, inputs, precision=precision)
        dim = config.embedding_dim
        self._user = config.user(inputs)
        self._weight = config.user_weight
        self._users = inputs.candidates_of(self._user or "")
        self.projection = xavier_linear(dim, dim, bias=False)
        self.key = xavier_linear(dim, dim) if config.pooling == "attention" else None

    def forward(self, dense: torch.Tensor, embedded: KeyedEmbeddings) -> dict[str, torch.Tensor]:
        """Return the outputs of ItemListNetwork, and vectors `users` [rows, dim]."""
        outputs = super().forward(dense, embedded)
        if self._user is None:
            return outputs
        is_user = self._users.contains(outputs[f"ids_{self._user}"])
        return outputs | {
            "users": embedded.sequences(self._user).values * is_user.unsqueeze(1),
        }

    def item_logits(self, rows: torch.Tensor, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.key is None:
            return super().item_logits(rows, outputs)
        keys = functional.linear(outputs["values"], self.key.weight, self.key.bias).tanh()
        return (keys * outputs["users"][rows]).sum(1, keepdim=True)

    def users(
        self,
        histories: torch.Tensor,
        rows: torch.Tensor,
        outputs: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        vectors = (1 - self._weight) * functional.linear(histories, self.projection.weight)
        if self._user is not None:
            vectors = vectors + self._weight * outputs["users"][rows]
        return self.dropped(vectors)
