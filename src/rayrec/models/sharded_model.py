"""A click model as it is trained: a network and TorchRec's tables, which DistributedModelParallel shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from rayrec.batch import DENSE, Batch, StepOutput
from rayrec.config import InputError
from rayrec.layers.keyed_embeddings import Delivery, Embedded, Sequences
from rayrec.models.base import ClickModelConfig, ModelInputs, TableStart, unpooled_features
from rayrec.models.embeddings import build_embeddings, build_sequences
from rayrec.models.ensemble import build_network
from rayrec.schema import Label

if TYPE_CHECKING:
    from rayrec.layers.mlp import Precision

_NETWORK = "head.network."
"""What torch puts before the names of a network's weights; they are saved under the network's own names."""


class ClickModel(nn.Module):
    """A network and its tables. `state_dict` has the tables under `embeddings.` and the network's weights under the names that
    the network gives them, as scoring uses the network alone."""

    def __init__(
        self,
        embeddings: EmbeddingBagCollection | None,
        sequences: EmbeddingCollection | None,
        network: nn.Module,
        inputs: ModelInputs,
        *,
        dim: int,
        embedding_penalty: float,
    ) -> None:
        """`embeddings`: the tables whose embeddings are summed; `sequences`: those whose embeddings are given one by one; None:
        there are no such tables. `dim`: width of all."""
        super().__init__()
        self.embeddings, self.sequences = embeddings, sequences
        tables = [] if sequences is None else sequences.embedding_configs()
        one_by_one = {feature for table in tables for feature in table.feature_names}
        self.head = _Head(network, inputs, dim=dim, penalty=embedding_penalty, one_by_one=one_by_one)
        self.register_state_dict_post_hook(_with_own_names)

    # TorchRec's sparse-dist pipeline traces this method, down to its tables and `head`: no branches on values here.
    def forward(self, batch: Batch) -> tuple[torch.Tensor, StepOutput]:
        """The batch's weighted loss (a scalar, 0 for a batch without rows), and the step's outputs."""
        pooled = one_by_one = None
        if isinstance(self.embeddings, EmbeddingBagCollection):
            pooled = self._pooled(batch.sparse_features)
        elif self.embeddings is not None:
            pooled = self.embeddings(batch.sparse_features)  # starts the exchange between workers
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
        """Logits (rows,), float32, of dense features (rows, num_dense) and one list of ids per row and feature, as a Batch has
        them. Not under sharding."""
        pooled = None if self.embeddings is None else self._pooled(sparse_features)
        one_by_one = None if self.sequences is None else self._one_by_one(sequence_features)
        return self.head.logits(dense_features, pooled, one_by_one)

    def table_modules(self) -> list[nn.Module]:
        """What holds the tables."""
        return [tables for tables in (self.embeddings, self.sequences) if tables is not None]

    def _pooled(self, sparse_features: KeyedJaggedTensor | None) -> KeyedTensor:
        assert sparse_features is not None
        assert self.embeddings is not None
        if sparse_features.stride():
            return self.embeddings(sparse_features)
        # An unsharded collection refuses a batch without rows (IndexError in KeyedJaggedTensor.to_dict).
        features, dim = list(sparse_features.keys()), self.head.dim
        nothing = torch.zeros(0, dim * len(features), device=sparse_features.device())
        return KeyedTensor(keys=features, length_per_key=[dim] * len(features), values=nothing)

    def _one_by_one(self, sequence_features: KeyedJaggedTensor | None) -> dict[str, JaggedTensor]:
        assert sequence_features is not None
        assert self.sequences is not None
        if sequence_features.stride():
            return self.sequences(sequence_features)
        place = sequence_features.device()
        nothing = JaggedTensor(
            values=torch.zeros(0, self.head.dim, device=place), lengths=torch.zeros(0, dtype=torch.int64, device=place)
        )
        return dict.fromkeys(sequence_features.keys(), nothing)


class _Head(nn.Module):
    """From pooled embeddings to the loss. Without a sharded part, it is not traced by TorchRec: a network may be any code."""

    def __init__(
        self, network: nn.Module, inputs: ModelInputs, *, dim: int, penalty: float, one_by_one: set[str]
    ) -> None:
        super().__init__()
        self.network, self.inputs, self.dim, self._penalty = network, inputs, dim, penalty
        self._unpooled = [feature for feature in inputs.features if feature in one_by_one]
        self._number = {feature: number for number, feature in enumerate(inputs.features)}
        self._keys, self._order = list(inputs.features), tuple(range(len(inputs.features)))

    def forward(
        self, batch: Batch, pooled: KeyedTensor | None, one_by_one: Mapping[str, JaggedTensor] | None
    ) -> tuple[torch.Tensor, StepOutput]:
        penalty = batch.loss_weight * self._penalty
        outputs = self._outputs(batch.tensors[DENSE], pooled, one_by_one, penalty=penalty)
        loss = self._summed_loss(outputs, batch) * batch.loss_weight
        logits = {label: outputs[label].detach() for label in self.inputs.label_names}
        return loss, StepOutput(loss.detach(), logits, batch.labels, batch.groups)

    def logits(
        self, dense: torch.Tensor, pooled: KeyedTensor | None, one_by_one: Mapping[str, JaggedTensor] | None
    ) -> torch.Tensor:
        return self._outputs(dense, pooled, one_by_one, penalty=0.0)[self.inputs.label]

    def _outputs(
        self,
        dense: torch.Tensor,
        pooled: KeyedTensor | None,
        one_by_one: Mapping[str, JaggedTensor] | None,
        *,
        penalty: float,
    ) -> dict[str, torch.Tensor]:
        embedded = Embedded(
            self.inputs.features,
            self.dim,
            lambda: self._deliver(dense, pooled, penalty),
            sequences=lambda: self._sequences(one_by_one, penalty),
        )
        outputs = self.network(dense, embedded)
        self._check_outputs(outputs, len(dense))
        return outputs

    def _check_outputs(self, outputs: object, rows: int) -> None:
        """What broadcasts would train without an error, and what is not float32 would be refused by scoring, after training."""
        named = f"{type(self.network).__name__}: forward"
        if not isinstance(outputs, Mapping):
            raise InputError(
                f"{named} returned a {type(outputs).__name__}; return a dict of logits, {{'{self.inputs.label}': logits}}"
            )
        for label in self.inputs.label_names:
            logits = outputs.get(label)
            if logits is None:
                raise InputError(
                    f"{named} gave {', '.join(outputs) or 'nothing'}, and no logits by the name of the label, {label}"
                )
            if logits.shape != (rows,) or logits.dtype != torch.float32:
                raise InputError(
                    f"{named} gave logits of shape {tuple(logits.shape)} and {logits.dtype} for {rows} rows; give ({rows},) "
                    "and float32"
                )

    def _sequences(self, one_by_one: Mapping[str, JaggedTensor] | None, penalty: float) -> dict[str, Sequences]:
        if one_by_one is None:
            return {}
        found = {}
        for name in self._unpooled:  # sharded: the first one waits for the exchange between workers
            jagged = one_by_one[name]
            found[name] = Sequences(_penalised(jagged.values(), penalty), jagged.lengths().long())
        return found

    def _deliver(self, dense: torch.Tensor, pooled: KeyedTensor | None, penalty: float) -> Delivery:
        if pooled is None:
            return dense.new_zeros(len(dense), 0), ()
        keys = pooled.keys()  # sharded: waits for the exchange between workers
        if keys != self._keys:
            self._keys, self._order = list(keys), tuple(self._number[key] for key in keys)
        return _penalised(pooled.values(), penalty), self._order

    def _summed_loss(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """The sum over the rows of each row's loss times its weight."""
        own_loss = getattr(self.network, "loss", None)
        if own_loss is None:
            loss = functional.binary_cross_entropy_with_logits(
                outputs[self.inputs.label], batch.labels[self.inputs.label], weight=batch.weights, reduction="sum"
            )
            for label in self.inputs.more_labels:
                loss = loss + _summed_label_loss(label, outputs[label.name], batch)
            return loss
        losses, rows = own_loss(outputs, batch.labels), len(batch.labels[self.inputs.label])
        if losses.shape != (rows,):  # a mean, say, which the sum below would leave too small
            raise InputError(
                f"{type(self.network).__name__}: loss gave shape {tuple(losses.shape)} for {rows} rows; give each row's loss, "
                f"({rows},), unweighted: rayrec averages them"
            )
        return (losses if batch.weights is None else losses * batch.weights).sum()


def _summed_label_loss(label: Label, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The sum over the rows that have the label of the row's loss times its weight."""
    values = batch.labels[label.name]
    there = ~values.isnan()
    weights = there.to(logits.dtype) if batch.weights is None else there * batch.weights
    values = values.where(there, 0.0)
    if label.kind == "binary":
        return functional.binary_cross_entropy_with_logits(logits, values, weight=weights, reduction="sum")
    return (weights * (logits - values).square()).sum()


def _penalised(values: torch.Tensor, penalty: float) -> torch.Tensor:
    return _Penalised.apply(values, penalty) if penalty and torch.is_grad_enabled() else values


class _Penalised(torch.autograd.Function):
    """Passes values on; adds `weight` times them to their gradient, as a loss of weight / 2 * |values|^2 would. Of a summed list
    the values are the sum: those of its rows do not leave the worker that has the table."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.save_for_backward(values)
        ctx.weight = weight
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (values,) = ctx.saved_tensors
        return gradient.add(values, alpha=ctx.weight), None


def own_name(name: str) -> str:
    """The name under which a weight of a ClickModel is saved, from its name among `named_parameters`."""
    return name.removeprefix(_NETWORK)


def _with_own_names(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name in [name for name in state if name.startswith(prefix + _NETWORK)]:
        state[prefix + own_name(name.removeprefix(prefix))] = state.pop(name)


def build_click_model(
    config: ClickModelConfig,
    inputs: ModelInputs,
    *,
    num_embeddings: Sequence[int],
    precision: Precision = "fp32",
    seed: int = 0,
    embedding_device: str = "meta",
    start: TableStart | None = None,
) -> ClickModel:
    """The model with its network on CPU and its tables on `embedding_device`.

    Tables on "meta" hold no values until they are sharded; "cpu" gives a whole model in one process. All start values depend on
    `seed` alone; `start` is the distribution of those of tables. `num_embeddings`: rows of each feature's table. Raises
    InputError for a table without rows.
    """
    unpooled, rows_of = unpooled_features(config, inputs), dict(zip(inputs.features, num_embeddings, strict=True))
    table_of = inputs.table_of
    of_bags = {feature: table_of[feature] for feature in inputs.features if feature not in unpooled}
    of_sequences = {feature: table_of[feature] for feature in unpooled}
    shared: dict[str, Any] = {
        "embedding_dim": config.table_width,
        "seed": seed,
        "device": embedding_device,
        "start": start,
    }
    with torch.random.fork_rng(devices=[]):
        # Inside: constructing tables on "cpu" also draws from the global generator, before our own values go in.
        embeddings = sequences = None
        if of_bags:
            sizes = [rows_of[feature] for feature in of_bags]
            embeddings = build_embeddings(sizes, table_of=of_bags, weighted=inputs.weighted, **shared)
        if of_sequences:
            sizes = [rows_of[feature] for feature in of_sequences]
            sequences = build_sequences(sizes, table_of=of_sequences, **shared)
        torch.manual_seed(seed)
        network = build_network(config, inputs, precision=precision)
    return ClickModel(
        embeddings,
        sequences,
        network,
        inputs,
        dim=config.table_width,
        embedding_penalty=config.embedding_penalty,
    )
