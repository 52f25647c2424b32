"""The DLRM network (Naumov et al., 2019), with each interaction that `DLRMConfig` names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rayrec.layers.dlrm import CrossInteraction, DotInteraction, Interaction, ProjectionInteraction
from rayrec.layers.keyed_embeddings import Embedded
from rayrec.layers.mlp import MLP, Precision
from rayrec.models.base import ModelInputs
from rayrec.models.ranking.dlrm import DLRMConfig


class DLRM(nn.Module):
    """Bottom MLP, interaction and top MLP."""

    def __init__(self, config: DLRMConfig, inputs: ModelInputs, *, precision: Precision) -> None:
        """Draws start values from torch's global generator."""
        super().__init__()
        self._labels = inputs.label_names
        settings: dict[str, Any] = {"batch_norm": config.batch_norm, "precision": precision}
        self.bottom_mlp = MLP(
            inputs.num_dense, config.bottom_mlp, final_activation=True, dropout=config.bottom_dropout, **settings
        )
        self.interaction = _interaction(config, inputs, precision)
        top_mlp, width = (*config.top_mlp[:-1], len(self._labels)), self.interaction.out_features
        self.top_mlp = MLP(width, top_mlp, final_activation=False, dropout=config.top_dropout, **settings)

    def forward(self, dense: torch.Tensor, embedded: Embedded) -> dict[str, torch.Tensor]:
        """See `ClickModelConfig.build`."""
        bottom = self.bottom_mlp(dense)  # while embeddings are exchanged
        logits = self.top_mlp(self.interaction(bottom, embedded))
        return dict(zip(self._labels, logits.unbind(1), strict=True))


def _interaction(config: DLRMConfig, inputs: ModelInputs, precision: Precision) -> Interaction:
    features, dim = inputs.features, config.embedding_dim
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
