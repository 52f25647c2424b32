"""Numbers and categories as one list of fields, each a vector, as FuxiCTR's models take them."""

from __future__ import annotations

import torch
from torch import nn

from rayrec.layers.embedded import Embedded
from rayrec.layers.mlp import start_values


def number_vectors(num_dense: int, dim: int) -> nn.Parameter:
    """(num_dense, dim): what each number is multiplied by to be a field; Xavier normal."""
    empty = torch.empty(num_dense, dim)
    return nn.Parameter(start_values(empty, nn.init.xavier_normal_) if num_dense else empty)


def fields(dense: torch.Tensor, vectors: torch.Tensor, embedded: Embedded) -> torch.Tensor:
    """(rows, num_dense + num_features, dim): each number times its vector, then the embeddings."""
    return torch.cat([dense.unsqueeze(2) * vectors, embedded.stacked()], dim=1)
