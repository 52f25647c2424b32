"""All of a click model but its tables, on plain tensors: what training wraps, scoring runs and exports write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayrec.models.dlrm import DLRMConfig
from rayrec.models.interaction import CrossInteraction, DotInteraction, Interaction, ProjectionInteraction
from rayrec.models.mlp import MLP, Precision


class DensePart(nn.Module):
    """Bottom MLP, interaction and top MLP. Its weights have the names they have in `DLRM`."""

    def __init__(
        self, config: DLRMConfig, *, num_dense: int, features: Sequence[str], precision: Precision = "fp32"
    ) -> None:
        """Draws start values from torch's global generator."""
        super().__init__()
        self.bottom_mlp = MLP(num_dense, config.bottom_mlp, final_activation=True, precision=precision)
        self.interaction = _interaction(config, features, precision)
        self.top_mlp = MLP(self.interaction.out_features, config.top_mlp, final_activation=False, precision=precision)
        self._order = tuple(range(len(features)))

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Logits (rows,), float32, of dense features (rows, num_dense) and pooled embeddings (rows, num_sparse * dim), both
        float32, the latter in the order of the features."""
        return self.top_mlp(self.interaction.combine(self.bottom_mlp(dense), pooled, self._order)).squeeze(1)


def _interaction(config: DLRMConfig, features: Sequence[str], precision: Precision) -> Interaction:
    dim = config.embedding_dim
    if config.interaction == "dot":
        return DotInteraction(features, dim=dim)
    if config.interaction == "cross":
        return CrossInteraction(
            features, dim=dim, num_layers=config.cross_layers, low_rank=config.cross_low_rank, precision=precision
        )
    return ProjectionInteraction(
        features,
        dim=dim,
        first_branch=config.projection_first,
        second_branch=config.projection_second,
        precision=precision,
    )
