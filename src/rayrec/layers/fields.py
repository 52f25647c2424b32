"""Numbers and categories as one list of fields, each a vector, as FuxiCTR's models take them."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from rayrec.layers.embedded import Embedded
from rayrec.layers.mlp import start_values


def number_vectors(num_dense: int, dim: int) -> nn.Parameter:
    """(num_dense, dim): what each number is multiplied by to be a field; each a layer from 1 to `dim`, Xavier normal."""
    draw = partial(nn.init.normal_, std=(2 / (1 + dim)) ** 0.5)
    return nn.Parameter(start_values(torch.empty(num_dense, dim), draw))


def fields(dense: torch.Tensor, vectors: torch.Tensor, embedded: Embedded) -> torch.Tensor:
    """(rows, num_dense + num_features, dim): each number times its vector, then the embeddings."""
    return torch.cat([dense.unsqueeze(2) * vectors, embedded.stacked()], dim=1)
