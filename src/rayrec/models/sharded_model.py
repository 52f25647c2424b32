"""Click model for training: a network and TorchRec tables, sharded by DistributedModelParallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from rayrec.batch import DENSE, Batch, StepOutput
from rayrec.config import InputError
from rayrec.layers.keyed_embeddings import Delivery, JaggedEmbeddings, KeyedEmbeddings
from rayrec.models.base import ClickModelConfig, ModelInputs, TableInit, table_key, unpooled_features
from rayrec.models.embeddings import build_embeddings, build_sequences
from rayrec.models.ensemble import build_network
from rayrec.models.heads import Head, LabelHead, measured, named_outputs, network_loss

if TYPE_CHECKING:
    from rayrec.layers.mlp import Precision

_NETWORK = "head.network."
"""Prefix that torch adds to the names of a network's weights. Files store the names without it."""


class ClickModel(nn.Module):
    """Network with its tables. `state_dict` has the tables under `embeddings.` and the network's without prefix, for scoring."""

    def __init__(
        self,
        embeddings: EmbeddingBagCollection | None,
        sequences: EmbeddingCollection | None,
        network: nn.Module,
        inputs: ModelInputs,
        heads: Sequence[Head],
        *,
        dim: int,
        embedding_penalty: float,
    ) -> None:
        """Build from tables with sum pooling and tables with unpooled lookups (None without any), of embedding width `dim`."""
        super().__init__()
        self.embeddings, self.sequences = embeddings, sequences
        tables = [] if sequences is None else sequences.embedding_configs()
        one_by_one = {feature for table in tables for feature in table.feature_names}
        self.head = _Head(network, inputs, heads, dim=dim, penalty=embedding_penalty, one_by_one=one_by_one)
        self.register_state_dict_post_hook(_remove_network_prefix)

    # TorchRec's sparse-dist pipeline traces this method, down to its tables and `head`, so it must not branch on values.
    def forward(self, batch: Batch) -> tuple[torch.Tensor, StepOutput]:
        """Return the weighted loss of the batch, a scalar that is 0 without rows, and the outputs of the step."""
        pooled = one_by_one = None
        if isinstance(self.embeddings, EmbeddingBagCollection):
            pooled = self._pooled(batch.sparse_features)
        elif self.embeddings is not None:
            pooled = self.embeddings(batch.sparse_features)  # Starts the exchange between workers
        if isinstance(self.sequences, EmbeddingCollection):
            one_by_one = self._one_by_one(batch.sequence_features)
        elif self.sequences is not None:
            one_by_one = self.sequences(batch.sequence_features)
        return self.head(batch, pooled, one_by_one)

    def score(
        self,
        dense_features: torch.Tensor,
        sparse_features: KeyedJaggedTensor | None,
        sequence_features: KeyedJaggedTensor | None = None,
    ) -> torch.Tensor:
        """Return the main label's logits with unsharded tables, float32 [rows]. Takes dense features [rows, num_dense], and one
        list of ids per row and feature as in a Batch."""
        pooled = None if self.embeddings is None else self._pooled(sparse_features)
        one_by_one = None if self.sequences is None else self._one_by_one(sequence_features)
        outputs = self.head.outputs(dense_features, pooled, one_by_one, sequence_features)
        return outputs[self.head.inputs.label]

    def table_modules(self) -> list[nn.Module]:
        """Return the modules that contain the tables."""
        return [tables for tables in (self.embeddings, self.sequences) if tables is not None]

    def _pooled(self, sparse_features: KeyedJaggedTensor | None) -> KeyedTensor:
        assert sparse_features is not None
        assert self.embeddings is not None
        if sparse_features.stride():
            return self.embeddings(sparse_features)
        # Unsharded collections reject a batch without rows (IndexError in KeyedJaggedTensor.to_dict).
        features, dim = list(sparse_features.keys()), self.head.dim
        empty = torch.zeros(0, dim * len(features), device=sparse_features.device())
        return KeyedTensor(keys=features, length_per_key=[dim] * len(features), values=empty)

    def _one_by_one(self, sequence_features: KeyedJaggedTensor | None) -> dict[str, JaggedTensor]:
        assert sequence_features is not None
        assert self.sequences is not None
        if sequence_features.stride():
            return self.sequences(sequence_features)
        device = sequence_features.device()
        empty = JaggedTensor(
            values=torch.zeros(0, self.head.dim, device=device), lengths=torch.zeros(0, dtype=torch.int64, device=device)
        )
        return dict.fromkeys(sequence_features.keys(), empty)


class _Head(nn.Module):
    """Path from pooled embeddings to the loss. TorchRec does not trace it, so networks may run any code."""

    def __init__(
        self, network: nn.Module, inputs: ModelInputs, heads: Sequence[Head], *, dim: int, penalty: float, one_by_one: set[str]
    ) -> None:
        super().__init__()
        self.network, self.inputs, self.dim, self._penalty = network, inputs, dim, penalty
        self._unpooled = [feature for feature in inputs.features if feature in one_by_one]
        self._number = {feature: number for number, feature in enumerate(inputs.features)}
        self._keys, self._order = list(inputs.features), tuple(range(len(inputs.features)))
        self._heads, self._labels = heads, [head for head in heads if isinstance(head, LabelHead)]
        self._loss, self._predicts = network_loss(network), hasattr(network, "predict")
        if self._loss is None and not self._labels:
            raise InputError(f"{type(network).__name__}: must have a method loss, got none. Add loss(outputs, batch).")

    def forward(
        self, batch: Batch, pooled: KeyedTensor | None, one_by_one: Mapping[str, JaggedTensor] | None
    ) -> tuple[torch.Tensor, StepOutput]:
        penalty = batch.loss_weight * self._penalty
        outputs = self.outputs(batch.tensors[DENSE], pooled, one_by_one, batch.sequence_features, penalty=penalty)
        loss, losses = self._summed_loss(outputs, batch)
        loss = loss * batch.loss_weight
        logits = {head.name: outputs[head.name].detach() for head in self._labels}
        measures: dict[str, torch.Tensor] = {}
        if not self.training and not self._labels:
            row_measures = measured(self.network, outputs, batch, losses)
            measures = {name: values[~values.isnan()].detach() for name, values in row_measures.items()}
        return loss, StepOutput(loss.detach(), logits, batch.labels, batch.groups, measures)

    def outputs(
        self,
        dense: torch.Tensor,
        pooled: KeyedTensor | None,
        one_by_one: Mapping[str, JaggedTensor] | None,
        sequence_features: KeyedJaggedTensor | None,
        *,
        penalty: float = 0.0,
    ) -> Mapping[str, torch.Tensor]:
        """Return the outputs of the network by name."""
        ids, unpooled = ({} if features is None else features for features in (sequence_features, one_by_one))
        embedded = KeyedEmbeddings(
            self.inputs.features,
            self.dim,
            lambda: self._deliver(dense, pooled, penalty),
            sequences=lambda: self._sequences(unpooled, len(dense), penalty),
            ids=lambda feature: ids[feature].values().long(),
            table=lambda feature: unpooled[table_key(feature)].values(),
        )
        where = f"{type(self.network).__name__}: forward"
        outputs = named_outputs(self.network(dense, embedded), self._heads, where=where)
        if not self._predicts:
            for head in self._heads:
                head.check(outputs, rows=len(dense), where=where)
        return outputs

    def _sequences(self, one_by_one: Mapping[str, JaggedTensor], rows: int, penalty: float) -> dict[str, JaggedEmbeddings]:
        sequences = {}
        for name in self._unpooled:  # If sharded, the first one waits for the exchange between workers
            jagged = one_by_one[name]
            lengths = jagged.lengths().long()[:rows]  # A batch without rows has one of empty lists
            sequences[name] = JaggedEmbeddings(_penalised(jagged.values(), penalty), lengths)
        return sequences

    def _deliver(self, dense: torch.Tensor, pooled: KeyedTensor | None, penalty: float) -> Delivery:
        if pooled is None:
            return dense.new_zeros(len(dense), 0), ()
        keys = pooled.keys()  # If sharded, waits for the exchange between workers
        if keys != self._keys:
            self._keys, self._order = list(keys), tuple(self._number[key] for key in keys)
        return _penalised(pooled.values(), penalty), self._order

    def _summed_loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sum of weighted row losses, and the row losses if the network defines its loss."""
        if self._loss is None:
            return reduce(add, (head.losses(outputs, batch.labels, batch.weights).sum() for head in self._labels)), None
        losses, rows = self._loss(outputs, batch), len(batch)
        if losses.shape != (rows,):  # Such as a mean, which would make the sum below too small
            raise InputError(
                f"{type(self.network).__name__}: loss must return unweighted row losses of shape ({rows},), "
                f"got {tuple(losses.shape)}. Do not average them."
            )
        return (losses if batch.weights is None else losses * batch.weights).sum(), losses


def _penalised(values: torch.Tensor, penalty: float) -> torch.Tensor:
    return _Penalised.apply(values, penalty) if penalty and torch.is_grad_enabled() else values


class _Penalised(torch.autograd.Function):
    """Identity that adds `weight` times the values to their gradient, as a loss of weight / 2 * |values|^2 would. For a summed
    list the values are the sum, because its rows stay on the worker that owns the table."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.save_for_backward(values)
        ctx.weight = weight
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (values,) = ctx.saved_tensors
        return gradient.add(values, alpha=ctx.weight), None


def saved_name(name: str) -> str:
    """Return the saved name of a ClickModel weight from its name in `named_parameters`."""
    return name.removeprefix(_NETWORK)


def _remove_network_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name in [name for name in state if name.startswith(prefix + _NETWORK)]:
        state[prefix + saved_name(name.removeprefix(prefix))] = state.pop(name)


def build_click_model(
    config: ClickModelConfig,
    inputs: ModelInputs,
    *,
    num_embeddings: Sequence[int],
    precision: Precision = "fp32",
    seed: int = 0,
    embedding_device: str = "meta",
    start: TableInit | None = None,
) -> ClickModel:
    """Build the model with its network on CPU and its tables on `embedding_device`. Tables on "meta" have no values until they
    are sharded. "cpu" builds a full model in one process. Initial values depend only on `seed`. `num_embeddings`: row count of
    each feature's table. `start`: initial value distribution of the tables. Raises InputError for a table without rows."""
    unpooled, rows_of = unpooled_features(config, inputs), dict(zip(inputs.features, num_embeddings, strict=True))
    table_of = inputs.table_of
    of_bags = {feature: table_of[feature] for feature in inputs.features if feature not in unpooled}
    of_sequences = {feature: table_of[feature] for feature in unpooled}
    for feature in config.full_tables(inputs):
        of_sequences[table_key(feature)], rows_of[table_key(feature)] = table_of[feature], rows_of[feature]
    shared: dict[str, Any] = {"embedding_dim": config.table_width, "seed": seed, "device": embedding_device, "start": start}
    with torch.random.fork_rng(devices=[]):
        # Inside, because building tables on "cpu" also draws from the global generator before our values replace theirs.
        embeddings = sequences = None
        if of_bags:
            sizes = [rows_of[feature] for feature in of_bags]
            embeddings = build_embeddings(sizes, table_of=of_bags, weighted=inputs.weighted, **shared)
        if of_sequences:
            sizes = [rows_of[feature] for feature in of_sequences]
            sequences = build_sequences(sizes, table_of=of_sequences, **shared)
        torch.manual_seed(seed)
        network = build_network(config, inputs, precision=precision)
    heads, penalty = config.output_heads(inputs), config.embedding_penalty
    return ClickModel(embeddings, sequences, network, inputs, heads, dim=config.table_width, embedding_penalty=penalty)
