"""Mixtures of experts over all features, whose weights a gate computes for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from rayrec.layers.mlp import Precision
from rayrec.layers.tower import Tower, xavier_linear


@final
class Experts(nn.Module):
    """Towers of one form: (rows, in_features) -> (rows, count, sizes[-1]) of the precision's type."""

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        count: int,
        *,
        dropout: float,
        batch_norm: bool = False,
        precision: Precision = "fp32",
    ) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            Tower(in_features, sizes, dropout=dropout, batch_norm=batch_norm, precision=precision) for _ in range(count)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([tower(inputs) for tower in self.towers], dim=1)


@final
class Gate(nn.Module):
    """Sums experts' outputs by weights from a tower, a linear layer and a softmax over the gate's own input."""

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        count: int,
        *,
        dropout: float,
        batch_norm: bool = False,
        precision: Precision = "fp32",
    ) -> None:
        super().__init__()
        self.tower = Tower(in_features, sizes, dropout=dropout, batch_norm=batch_norm, precision=precision)
        self.scores = xavier_linear(self.tower.out_features, count)

    def forward(self, inputs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """(rows, in_features) and (rows, count, width) -> (rows, width) of the experts' type."""
        weights = self.scores(self.tower(inputs).float()).softmax(1).to(experts.dtype)
        return (weights.unsqueeze(1) @ experts).squeeze(1)
