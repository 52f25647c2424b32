"""DLRM's forward pass as plain PyTorch has it: one embedding look-up a table, linear layers,
pairwise products.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional


class BareDLRM(nn.Module):
    """Plain DLRM with the weights of a `criteo_kaggle` checkpoint (interaction "dot")."""

    def __init__(self, weights: Mapping[str, torch.Tensor], features: Sequence[str]) -> None:
        super().__init__()
        self.tables = [weights[f"embeddings.embedding_bags.{name}.weight"] for name in features]
        self.bottom = _layers(weights, "bottom_mlp")
        self.top = _layers(weights, "top_mlp")
        self.pairs = torch.triu_indices(len(features) + 1, len(features) + 1, offset=1)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows] for dense features [rows, num_dense] and ids [num_sparse, rows]."""
        for weight, bias in self.bottom:
            dense = functional.relu(functional.linear(dense, weight, bias))
        embeddings = [
            functional.embedding(column, table)
            for column, table in zip(ids, self.tables, strict=True)
        ]
        vectors = torch.stack([dense, *embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        hidden = torch.cat([dense, products], dim=1)
        for weight, bias in self.top[:-1]:
            hidden = functional.relu(functional.linear(hidden, weight, bias))
        return functional.linear(hidden, *self.top[-1]).squeeze(1)


def _layers(
    weights: Mapping[str, torch.Tensor], name: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    indices = sorted(
        int(key.split(".")[2])
        for key in weights
        if key.startswith(f"{name}.layers.") and key.endswith(".weight")
    )
    return [
        (weights[f"{name}.layers.{index}.weight"], weights[f"{name}.layers.{index}.bias"])
        for index in indices
    ]
