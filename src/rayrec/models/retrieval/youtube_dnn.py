"""YouTube's retrieval network (Covington et al., "Deep Neural Networks for YouTube
Recommendations", RecSys 2016), without features besides the history.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from rayrec.bounds import Share, Sizes
from rayrec.layers.mlp import Precision, Tower, xavier_linear
from rayrec.models.base import ModelInputs
from rayrec.models.item_lists import ItemListConfig, Loss
from rayrec.models.item_sets import ItemSetNetwork


@dataclass(frozen=True, kw_only=True)
class YoutubeDNNConfig(ItemListConfig):
    """Mean of a history as the user's vector, in one table with the items.

    Predicts each item of the schema's first list from all its other items, in any order.
    """

    loss: Loss = "sampled"
    user_tower: Sizes = ()
    """Widths of hidden layers from the mean of the history to the user's vector. If empty, it is
    the mean.
    """
    dropout: Share = 0.0
    """Dropout probability of hidden layers and of the user's vector."""

    def build(self, inputs: ModelInputs, *, precision: Precision = "fp32") -> nn.Module:
        return YoutubeDNN(self, inputs, precision=precision)


class YoutubeDNN(ItemSetNetwork):
    """Mean of the history, and an optional MLP."""

    def __init__(
        self,
        config: YoutubeDNNConfig,
        inputs: ModelInputs,
        *,
        precision: Precision,
    ) -> None:
        super().__init__(config, inputs, precision=precision)
        self.tower: Tower | None = None
        if config.user_tower:
            dim = config.embedding_dim
            self.tower = Tower(
                dim,
                config.user_tower,
                dropout=config.dropout,
                precision=precision,
            )
            self.last = xavier_linear(self.tower.out_features, dim)

    def users(
        self,
        histories: torch.Tensor,
        rows: torch.Tensor,
        outputs: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        if self.tower is not None:
            hidden = self.tower(histories).float()
            histories = functional.linear(hidden, self.last.weight, self.last.bias)
        return self.dropped(histories)
