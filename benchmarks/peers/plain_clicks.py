"""Click model in plain PyTorch, without a framework.

One `nn.Embedding` per feature, torch's operators, the loop of PyTorch's tutorials, Adam on the
network and SparseAdam on the tables.
"""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from rayrec.layers.keyed_embeddings import KeyedEmbeddings


class PlainClicks:
    """Network of rayrec (`ClickModelConfig.build`) with torch's operators only, as `torch.compile`
    traces it, and separate plain tables.
    """

    def __init__(
        self, network: nn.Module, features: Sequence[str], sizes: Sequence[int], *, dim: int
    ) -> None:
        self.network = network.train()
        self._features = list(features)
        self._dim = dim
        self.tables = [nn.Embedding(size, dim, sparse=True) for size in sizes]
        self._dense = torch.optim.Adam(self.network.parameters(), lr=0.001)
        self._sparse = torch.optim.SparseAdam([table.weight for table in self.tables], lr=0.001)

    def step(self, batch: Any) -> torch.Tensor:
        """Train on a batch with one id per feature and row, and return the mean loss."""
        ids = batch.sparse_features.values().view(len(self._features), -1)
        vectors = torch.cat(
            [table(column) for table, column in zip(self.tables, ids, strict=True)], dim=1
        )
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
            outputs = self.network(
                batch.tensors["dense"], KeyedEmbeddings.in_order(self._features, self._dim, vectors)
            )
        custom_loss: Any = getattr(self.network, "loss", None)
        if custom_loss is None:
            loss = functional.binary_cross_entropy_with_logits(
                outputs["label"], batch.labels["label"]
            )
        else:
            loss = custom_loss(outputs, batch).mean()
        self._dense.zero_grad()
        self._sparse.zero_grad()
        loss.backward()
        self._dense.step()
        self._sparse.step()
        return loss.detach()
