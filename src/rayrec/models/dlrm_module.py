"""The DLRM network (Naumov et al., 2019) on TorchRec's tables, with each interaction that `DLRMConfig` names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from rayrec.click_batch import ClickBatch, StepOutput
from rayrec.models.dense_part import DensePart
from rayrec.models.dlrm import DLRMConfig
from rayrec.models.embeddings import build_embeddings, feature_names
from rayrec.models.interaction import Interaction
from rayrec.models.mlp import MLP, Precision


class DLRM(nn.Module):
    """Bottom MLP, embedding tables, interaction and top MLP; DistributedModelParallel shards `embeddings`."""

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        bottom_mlp: MLP,
        interaction: Interaction,
        top_mlp: MLP,
        embedding_penalty: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding_penalty = embedding_penalty
        self.embeddings = embeddings
        self.bottom_mlp = bottom_mlp
        self.interaction = interaction
        self.top_mlp = top_mlp

    # TorchRec's sparse-dist pipeline traces these two methods: no branches on values here, only in the submodules.
    def score(
        self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor, penalty: float = 0.0
    ) -> torch.Tensor:
        """Logits (rows,), float32, of dense features (rows, num_dense) and one bag per row and sparse feature.

        `penalty` times every pooled embedding is added to its gradient.
        """
        if isinstance(self.embeddings, EmbeddingBagCollection) and not dense_features.shape[0]:
            return self._score_nothing(dense_features)
        pooled = self.embeddings(sparse_features)  # sharded: starts the exchange between workers, awaited later
        dense = self.bottom_mlp(dense_features)
        return self.top_mlp(self.interaction(dense, pooled, penalty)).squeeze(1)

    def _score_nothing(self, dense_features: torch.Tensor) -> torch.Tensor:
        # An unsharded collection refuses a batch without rows (IndexError in KeyedJaggedTensor.to_dict).
        features, dim = self.interaction.features, self.interaction.dim
        nothing = torch.zeros(0, dim * len(features), device=dense_features.device)
        pooled = KeyedTensor(keys=features, length_per_key=[dim] * len(features), values=nothing)
        return self.top_mlp(self.interaction(self.bottom_mlp(dense_features), pooled)).squeeze(1)

    def forward(self, batch: ClickBatch) -> tuple[torch.Tensor, StepOutput]:
        """The batch's weighted loss (a scalar, 0 for a batch without rows), and the step's outputs."""
        penalty = batch.loss_weight * self.embedding_penalty
        logits = self.score(batch.dense_features, batch.sparse_features, penalty)
        row_losses = functional.binary_cross_entropy_with_logits(
            logits, batch.labels, weight=batch.weights, reduction="sum"
        )
        loss = row_losses * batch.loss_weight
        return loss, StepOutput(loss.detach(), logits.detach(), batch.labels)


def build_dlrm(
    config: DLRMConfig,
    *,
    num_embeddings: Sequence[int],
    num_dense: int,
    precision: Precision,
    seed: int,
    embedding_device: str,
    features: Sequence[str] | None,
) -> DLRM:
    """See `DLRMConfig.build`."""
    features, dim = list(features or feature_names(len(num_embeddings))), config.embedding_dim
    with torch.random.fork_rng(devices=[]):
        # Inside: constructing tables on "cpu" also draws from the global generator, before our own values go in.
        embeddings = build_embeddings(
            num_embeddings, embedding_dim=dim, seed=seed, device=embedding_device, features=features
        )
        torch.manual_seed(seed)
        dense_part = DensePart(config, num_dense=num_dense, features=features, precision=precision)
    return DLRM(
        embeddings,
        bottom_mlp=dense_part.bottom_mlp,
        interaction=dense_part.interaction,
        top_mlp=dense_part.top_mlp,
        embedding_penalty=config.embedding_penalty,
    )
