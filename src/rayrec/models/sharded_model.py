"""Click model for training: a network and TorchRec tables, sharded by DistributedModelParallel."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from rayrec import host_resources
from rayrec.batch import DENSE, Batch, StepOutput
from rayrec.config import InputError
from rayrec.layers.keyed_embeddings import Delivery, JaggedEmbeddings, KeyedEmbeddings
from rayrec.layers.mlp import Precision
from rayrec.models.base import (
    ClickModelConfig,
    ModelInputs,
    TableInit,
    table_key,
    unpooled_features,
)
from rayrec.models.ensemble import build_network, plain_name
from rayrec.models.heads import Head, LabelHead, measured, named_outputs, network_loss
from rayrec.models.scoring_tables import find_table, table_name

# Rows drawn from one seed. Small enough to waste little at shard edges, large enough to add no
# cost.
_BLOCK_ROWS = 65_536
# Threads that fill one table. Each has a block in host memory, and 8 are as fast as a copy to a
# GPU.
_MAX_THREADS = 8


def feature_names(num_sparse: int) -> list[str]:
    """Return default names for sparse features: cat_0, cat_1, ..."""
    return [f"cat_{index}" for index in range(num_sparse)]


def _block_seed(seed: int, table: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{table}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch requires a signed 64-bit seed


@dataclass(frozen=True)
class TableValues:
    """Initial values of a table. Row r and column c depend only on (seed, table, r, c, table shape)
    and distribution.
    """

    seed: int
    table: str
    num_embeddings: int
    embedding_dim: int
    start: TableInit | None = None
    """Distribution, or None for the default."""

    def fill(
        self,
        part: torch.Tensor,
        *,
        row_offset: int = 0,
        column_offset: int = 0,
        threads: int | None = None,
    ) -> None:
        """Write the initial values of one part of the table into `part`, in place. `threads`: None
        uses one for a table in host memory, and one per CPU, up to 8, for a table on a device,
        which is larger.
        """
        deviation = (self.start or TableInit()).deviation(self.num_embeddings, self.embedding_dim)
        bound = self.num_embeddings**-0.5
        rows, columns = part.shape

        @torch.no_grad()
        def fill_block(block: int) -> None:
            block_start = block * _BLOCK_ROWS
            block_rows = min(_BLOCK_ROWS, self.num_embeddings - block_start)
            row = max(row_offset, block_start)
            stop = min(block_start + block_rows, row_offset + rows)
            target = part[row - row_offset : stop - row_offset]
            is_plain = target.is_cpu and target.is_contiguous() and target.dtype == torch.float32
            is_direct = is_plain and target.shape == (block_rows, self.embedding_dim)
            values = target if is_direct else torch.empty(block_rows, self.embedding_dim)
            generator = torch.Generator().manual_seed(_block_seed(self.seed, self.table, block))
            if deviation is not None:
                values.normal_(0.0, deviation, generator=generator)
            else:
                values.uniform_(-bound, bound, generator=generator)
            if not is_direct:
                target.copy_(
                    values[
                        row - block_start : stop - block_start,
                        column_offset : column_offset + columns,
                    ]
                )

        if not rows:
            return
        blocks = range(row_offset // _BLOCK_ROWS, (row_offset + rows - 1) // _BLOCK_ROWS + 1)
        if threads is None:
            threads = (
                1
                if part.device.type in ("cpu", "meta")
                else min(_MAX_THREADS, host_resources.usable_cpus(granted=None))
            )
        if min(threads, len(blocks)) <= 1:
            for block in blocks:
                fill_block(block)
            return
        # Each block has a generator of its own, by its number. So values do not depend on the
        # threads.
        with ThreadPoolExecutor(threads, thread_name_prefix="start-values") as pool:
            for _ in pool.map(fill_block, blocks):
                pass

    def fill_full_table(self, parameter: torch.Tensor) -> None:
        """Write all initial values into a parameter that contains the full table. Skip row-wise and
        column-wise shards, which TorchRec passes without their offsets: `initialize_shards` must
        follow.
        """
        if tuple(parameter.shape) == (self.num_embeddings, self.embedding_dim):
            self.fill(parameter.data)


def build_embeddings(
    num_embeddings: Sequence[int],
    *,
    embedding_dim: int,
    seed: int,
    device: str = "meta",
    table_of: Mapping[str, str] | None = None,
    weighted: bool = False,
    start: TableInit | None = None,
) -> EmbeddingBagCollection:
    """Build float32 tables, one per vocabulary, with sum pooling per feature. `num_embeddings` is
    the row count of each feature's table. `table_of` is the vocabulary of each feature, which
    determines its table, or None for unnamed features with separate tables. `weighted` is whether
    ids have weights, `start` the distribution of initial values (None: the default). Tables on
    `meta` get values when placed by DistributedModelParallel. Raises InputError for no rows, or two
    sizes.
    """
    names = table_of or {feature: feature for feature in feature_names(len(num_embeddings))}
    settings = _table_settings(
        num_embeddings,
        names,
        embedding_dim=embedding_dim,
        seed=seed,
        start=start,
    )
    tables = [EmbeddingBagConfig(**table_settings) for table_settings in settings]
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted, device=torch.device(device))


def _table_settings(
    num_embeddings: Sequence[int],
    table_of: Mapping[str, str],
    *,
    embedding_dim: int,
    seed: int,
    start: TableInit | None,
) -> list[dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for (feature, vocabulary), rows in zip(table_of.items(), num_embeddings, strict=True):
        if vocabulary in tables:
            tables[vocabulary]["feature_names"].append(feature)
            if tables[vocabulary]["num_embeddings"] != rows:
                raise InputError(
                    f"table {vocabulary}: features must have equal row counts, got {rows:,} for "
                    f"{feature} and {tables[vocabulary]['num_embeddings']:,} for another"
                )
            continue
        name = table_name(vocabulary)
        if rows < 1:
            raise InputError(
                f"table {vocabulary}: must have at least one row, got {rows}. Check num_embeddings."
            )
        tables[vocabulary] = {
            "name": name,
            "feature_names": [feature],
            "num_embeddings": rows,
            "embedding_dim": embedding_dim,
            "init_fn": TableValues(seed, name, rows, embedding_dim, start).fill_full_table,
        }
    return list(tables.values())


# Values depend on (seed, table, block of rows) alone, so that any sharding starts with the same
# table.
def initialize_shards(model: nn.Module, *, seed: int, start: TableInit | None = None) -> None:
    """Set the initial values of this worker's row-wise and column-wise shards. Call once after
    sharding `model`. Skips full (table-wise) tables, which got their values on placement. `start`
    must match `build_embeddings`.
    """
    for key, value in model.state_dict().items():
        table = find_table(key)
        if not isinstance(value, ShardedTensor) or table is None:
            continue
        num_embeddings, embedding_dim = value.size()
        for shard in value.local_shards():
            if tuple(shard.tensor.shape) == (num_embeddings, embedding_dim):
                continue
            row_offset, column_offset = shard.metadata.shard_offsets
            values = TableValues(seed, table, num_embeddings, embedding_dim, start)
            values.fill(shard.tensor, row_offset=row_offset, column_offset=column_offset)


_NETWORK = "head.network."
"""Prefix that torch adds to the names of a network's weights. Files store the names without it."""


# A step's path, and the exchanges between workers of a sharded model:
#
#   batch -> ids to the owners of tables        the pipeline does this for the next batch
#   tables -> embeddings to the rows' workers   begins in `forward`, ends at their first use
#   dense features -> network                   meanwhile
#   loss -> gradients of the network            averaged by DDP
#   loss -> gradients of embeddings             to the owners, which update their tables
class ClickModel(nn.Module):
    """Network with its tables. `state_dict` has the tables under `embeddings.` and the network's
    without prefix, for scoring.
    """

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
        sample_offset: SampleOffset | None = None,
    ) -> None:
        """Build from tables with sum pooling and tables with unpooled lookups (None without any),
        of embedding width `dim`. `sample_offset` is that of a sample that trains the model.
        """
        super().__init__()
        self.embeddings = embeddings
        self.sequences = sequences
        tables = [] if sequences is None else sequences.embedding_configs()
        one_by_one = {feature for table in tables for feature in table.feature_names}
        self.head = _Head(
            network,
            inputs,
            heads,
            dim=dim,
            penalty=embedding_penalty,
            one_by_one=one_by_one,
            sample_offset=sample_offset,
        )
        self.register_state_dict_post_hook(_remove_network_prefix)

    # TorchRec's sparse-dist pipeline traces this method, down to its tables and `head`, so it must
    # not branch on values.
    def forward(self, batch: Batch) -> tuple[torch.Tensor, StepOutput]:
        """Return the weighted loss of the batch, a scalar that is 0 without rows, and the outputs
        of the step.
        """
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
        """Return the main label's logits with unsharded tables, float32 [rows]. Takes dense
        features [rows, num_dense], and one list of ids per row and feature as in a Batch.
        """
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
        # Unsharded collections reject a batch without rows (IndexError in
        # KeyedJaggedTensor.to_dict).
        features = list(sparse_features.keys())
        dim = self.head.dim
        empty = torch.zeros(0, dim * len(features), device=sparse_features.device())
        return KeyedTensor(keys=features, length_per_key=[dim] * len(features), values=empty)

    def _one_by_one(self, sequence_features: KeyedJaggedTensor | None) -> dict[str, JaggedTensor]:
        assert sequence_features is not None
        assert self.sequences is not None
        if sequence_features.stride():
            return self.sequences(sequence_features)
        device = sequence_features.device()
        empty = JaggedTensor(
            values=torch.zeros(0, self.head.dim, device=device),
            lengths=torch.zeros(0, dtype=torch.int64, device=device),
        )
        return dict.fromkeys(sequence_features.keys(), empty)


@dataclass(frozen=True)
class SampleOffset:
    """Difference of the label's logits among the rows of a sample and among all rows. The network's
    logits are those among all rows, and the training loss is that of the sample.
    """

    value: float
    outputs: tuple[str, ...]
    """Outputs that are logits of the label."""

    def added(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the outputs with the logits among the rows of the sample."""
        return {
            name: values + self.value if plain_name(name) in self.outputs else values
            for name, values in outputs.items()
        }


class _Head(nn.Module):
    """Path from pooled embeddings to the loss. TorchRec does not trace it, so networks may run any
    code.
    """

    def __init__(
        self,
        network: nn.Module,
        inputs: ModelInputs,
        heads: Sequence[Head],
        *,
        dim: int,
        penalty: float,
        one_by_one: set[str],
        sample_offset: SampleOffset | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.inputs = inputs
        self.dim = dim
        self._penalty = penalty
        self._sample_offset = sample_offset
        self._unpooled = [feature for feature in inputs.features if feature in one_by_one]
        self._number = {feature: number for number, feature in enumerate(inputs.features)}
        self._keys = list(inputs.features)
        self._order = tuple(range(len(inputs.features)))
        self._heads = heads
        self._labels = [head for head in heads if isinstance(head, LabelHead)]
        self._loss = network_loss(network)
        self._predicts = hasattr(network, "predict")
        if self._loss is None and not self._labels:
            raise InputError(
                f"{type(network).__name__}: must have a method loss, got none. Add loss(outputs, "
                "batch)."
            )

    def forward(
        self,
        batch: Batch,
        pooled: KeyedTensor | None,
        one_by_one: Mapping[str, JaggedTensor] | None,
    ) -> tuple[torch.Tensor, StepOutput]:
        penalty = batch.loss_weight * self._penalty
        outputs = self.outputs(
            batch.tensors[DENSE],
            pooled,
            one_by_one,
            batch.sequence_features,
            gaps=batch.gaps,
            penalty=penalty,
        )
        if self.training and self._sample_offset is not None:
            outputs = self._sample_offset.added(outputs)
        loss, losses = self._summed_loss(outputs, batch)
        loss = loss * batch.loss_weight
        logits = {head.name: outputs[head.name].detach() for head in self._labels}
        measures: dict[str, torch.Tensor] = {}
        if not self.training and not self._labels:
            row_measures = measured(self.network, outputs, batch, losses)
            measures = {
                name: (values[~values.isnan()] if values.is_floating_point() else values).detach()
                for name, values in row_measures.items()
            }
        return loss, StepOutput(loss.detach(), logits, batch.labels, batch.groups, measures)

    def outputs(
        self,
        dense: torch.Tensor,
        pooled: KeyedTensor | None,
        one_by_one: Mapping[str, JaggedTensor] | None,
        sequence_features: KeyedJaggedTensor | None,
        *,
        gaps: Mapping[str, torch.Tensor] | None = None,
        penalty: float = 0.0,
    ) -> Mapping[str, torch.Tensor]:
        """Return the outputs of the network by name."""
        ids, unpooled = (
            {} if features is None else features for features in (sequence_features, one_by_one)
        )
        embedded = KeyedEmbeddings(
            self.inputs.features,
            self.dim,
            lambda: self._deliver(dense, pooled, penalty),
            sequences=lambda: self._sequences(unpooled, gaps or {}, len(dense), penalty),
            ids=lambda feature: ids[feature].values().long(),
            table=lambda feature: unpooled[table_key(feature)].values(),
        )
        where = f"{type(self.network).__name__}: forward"
        outputs = named_outputs(self.network(dense, embedded), self._heads, where=where)
        if not self._predicts:
            for head in self._heads:
                head.check(outputs, rows=len(dense), where=where)
        return outputs

    def _sequences(
        self,
        one_by_one: Mapping[str, JaggedTensor],
        gaps: Mapping[str, torch.Tensor],
        rows: int,
        penalty: float,
    ) -> dict[str, JaggedEmbeddings]:
        sequences = {}
        # If sharded, the first one waits for the exchange between workers
        for name in self._unpooled:
            jagged = one_by_one[name]
            lengths = jagged.lengths().long()[:rows]  # A batch without rows has one of empty lists
            values = _penalised(jagged.values(), penalty)
            sequences[name] = JaggedEmbeddings(values, lengths, gaps.get(name))
        return sequences

    def _deliver(self, dense: torch.Tensor, pooled: KeyedTensor | None, penalty: float) -> Delivery:
        if pooled is None:
            return dense.new_zeros(len(dense), 0), ()
        keys = pooled.keys()  # If sharded, waits for the exchange between workers
        if keys != self._keys:
            self._keys = list(keys)
            self._order = tuple(self._number[key] for key in keys)
        return _penalised(pooled.values(), penalty), self._order

    def _summed_loss(
        self,
        outputs: Mapping[str, torch.Tensor],
        batch: Batch,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sum of weighted row losses, and the row losses if the network defines its
        loss.
        """
        if self._loss is None:
            return reduce(
                add,
                (head.losses(outputs, batch.labels, batch.weights).sum() for head in self._labels),
            ), None
        losses = self._loss(outputs, batch)
        rows = len(batch)
        if losses.shape != (rows,):  # Such as a mean, which would make the sum below too small
            raise InputError(
                f"{type(self.network).__name__}: loss must return unweighted row losses of shape "
                f"({rows},), got {tuple(losses.shape)}. Do not average them."
            )
        return (losses if batch.weights is None else losses * batch.weights).sum(), losses


def _penalised(values: torch.Tensor, penalty: float) -> torch.Tensor:
    return _Penalised.apply(values, penalty) if penalty and torch.is_grad_enabled() else values


class _Penalised(torch.autograd.Function):
    """Identity that adds `weight` times the values to their gradient, as a loss of weight / 2 *
    |values|^2 would. For a summed list the values are the sum, because its rows stay on the worker
    that owns the table.
    """

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


def _remove_network_prefix(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
) -> None:
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
    logit_offset: float = 0.0,
) -> ClickModel:
    """Build the model with its network on CPU and its tables on `embedding_device`. Tables on
    "meta" have no values until they are sharded. "cpu" builds a full model in one process. Initial
    values depend only on `seed`. `num_embeddings`: row count of each feature's table. `start`:
    initial value distribution of the tables. `logit_offset`: logit among the rows that train, minus
    that among all rows. Raises InputError for a table without rows.
    """
    unpooled = unpooled_features(config, inputs)
    rows_of = dict(zip(inputs.features, num_embeddings, strict=True))
    table_of = inputs.table_of
    pooled_tables = {
        feature: table_of[feature] for feature in inputs.features if feature not in unpooled
    }
    unpooled_tables = {feature: table_of[feature] for feature in unpooled}
    for feature in config.full_tables(inputs):
        key = table_key(feature)
        unpooled_tables[key] = table_of[feature]
        rows_of[key] = rows_of[feature]
    shared: dict[str, Any] = {"embedding_dim": config.table_width, "seed": seed, "start": start}
    # Building must not change the caller's generator: runs in one process would depend on each
    # other.
    with torch.random.fork_rng(devices=[]):
        # Inside, because building tables on "cpu" also draws from the global generator before our
        # values replace theirs.
        embeddings = sequences = None
        if pooled_tables:
            sizes = [rows_of[feature] for feature in pooled_tables]
            bags: dict[str, Any] = {
                "table_of": pooled_tables,
                "device": embedding_device,
                "weighted": inputs.weighted,
            }
            embeddings = build_embeddings(sizes, **bags, **shared)
        if unpooled_tables:
            sizes = [rows_of[feature] for feature in unpooled_tables]
            settings = _table_settings(sizes, unpooled_tables, **shared)
            tables = [EmbeddingConfig(**table_settings) for table_settings in settings]
            sequences = EmbeddingCollection(tables=tables, device=torch.device(embedding_device))
        torch.manual_seed(seed)
        network = build_network(config, inputs, precision=precision)
    return ClickModel(
        embeddings,
        sequences,
        network,
        inputs,
        config.output_heads(inputs),
        dim=config.table_width,
        embedding_penalty=config.embedding_penalty,
        sample_offset=_sample_offset(config, inputs, logit_offset),
    )


def _sample_offset(
    config: ClickModelConfig,
    inputs: ModelInputs,
    value: float,
) -> SampleOffset | None:
    """Return the offset of the logits that the model's loss takes, None without one."""
    if not value:
        return None
    main, *_ = config.output_heads(inputs)
    return SampleOffset(value, (main.name, *config.loss_logits()))
