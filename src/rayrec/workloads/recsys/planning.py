"""Planning of click models: table placement, and the speed of reading, encoding and training on a
log slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rayrec import host_resources, storage
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.encoding.counts import count_parts
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import make_preprocessor
from rayrec.data.engine import InProcess
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import Block, LogIndex, SegmentRange, numbered
from rayrec.data.logs.random_log import index_random
from rayrec.data.logs.table_log import is_table
from rayrec.data.logs.text_log import cut, index_chunk
from rayrec.data.stage_times import BlockTimes, measured
from rayrec.ingest.block_order import BlockOrder
from rayrec.models.base import ModelInputs, unpooled_features
from rayrec.native import keep_freed_memory
from rayrec.optim.config import FLOAT_BYTES
from rayrec.schema import Schema
from rayrec.sharding.communication import CommunicationVolume, Lookup, estimate_communication
from rayrec.sharding.placement import (
    PROCESS_BYTES,
    TablePlacement,
    WorkerMemory,
    describe,
    placements,
    worker_memories,
)
from rayrec.sharding.planner import Site, plan_sharding
from rayrec.storage.cache import is_packed
from rayrec.workloads.base import (
    LocalTrainer,
    MeasuredSpeed,
    Target,
    TrainConfig,
    WorkerContext,
    WorkerSetup,
)
from rayrec.workloads.recsys.settings import ClickSettings, Prepared

if TYPE_CHECKING:
    from rayrec.batch import Batch
    from rayrec.models.cost import NetworkCost
    from rayrec.models.sharded_model import ClickModel

_UNKNOWN_BYTES: Final = 2**50
"""Memory limit larger than any tables."""
_OBJECT_STORE_FRACTION: Final = 0.3
"""Share of free memory that a local Ray reserves for its object store."""
_MANY_ROWS: Final = 2**62
"""Row count of an unknown log."""
_COPIES_OF_EMBEDDINGS: Final = 6
"""Copies of pooled embeddings in a batch: lookup, exchange, interaction, and the gradient of
each.
"""
_COPIES_OF_ACTIVATIONS: Final = 2
"""Copies of activations, including the gradient."""
_EXCHANGE_BYTES: Final = {"fp32": 4, "fp16": 2, "bf16": 2}
NOT_CHECKED: Final = (
    "Not checked: whether the tables fit the GPUs, because this machine has none. Set --cluster "
    "gpus=N,gpu_memory_gb=N,..."
)


def plan(
    workload: ClickSettings,
    config: TrainConfig,
    num_embeddings: list[int],
    *,
    inputs: Schema,
    hotness: Sequence[int | None] | None = None,
    target: Target | None = None,
) -> str:
    """Return the plan as text, for the workers of `target`, or for workers that share this
    machine's memory or have a GPU like its GPU. `hotness` is as for `tables_of`. Raises InputError
    with the required memory if the tables do not fit.
    """
    workers = config.scaling.max_workers
    resolved_target = target or Target(workers, workers)
    memory_bytes, notes = target_memory(config, resolved_target)
    tables = tables_of(
        workload,
        config,
        num_embeddings,
        inputs=inputs,
        target=resolved_target,
        memory_bytes=memory_bytes,
        hotness=hotness,
    )
    gpus = (
        resolved_target.gpu_rows_per_s
        and resolved_target.gpu_rows_per_s * resolved_target.num_workers
    )
    exchange = [] if target is None else [tables.traffic.text(target.links, gpus)]
    return "\n".join([tables.text, *exchange, *notes])


def target_memory(config: TrainConfig, target: Target) -> tuple[int, list[str]]:
    """Return the memory limit of one target worker in bytes, and notes about unknowns."""
    if target.memory_bytes is not None:
        return target.memory_bytes, []
    if config.scaling.use_gpu:
        import torch

        if not torch.cuda.is_available():
            return _UNKNOWN_BYTES, [NOT_CHECKED]
    return local_memory(config, workers=target.workers_per_node), []


def local_memory(config: TrainConfig, *, workers: int) -> int:
    """Return each worker's memory limit here in bytes: its GPU, or a share of free memory, minus
    object store and process.
    """
    if config.scaling.use_gpu:
        import torch

        return torch.cuda.get_device_properties(0).total_memory
    free = host_resources.memory().available
    store = config.cluster.object_store_bytes or int(free * _OBJECT_STORE_FRACTION)
    return max(0, (free - store) // workers - PROCESS_BYTES)


def build_model(
    workload: ClickSettings, num_embeddings: list[int], *, inputs: ModelInputs, **settings: Any
) -> ClickModel:
    """Build the model with tables on the meta device and apply their optimizer, so that TorchRec's
    planner includes its state.
    """
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    from rayrec.models.sharded_model import build_click_model

    model = build_click_model(
        workload.model,
        inputs,
        num_embeddings=num_embeddings,
        start=workload.table_start,
        logit_offset=workload.logit_offset,
        **settings,
    )
    optimizer_class, optimizer_arguments = workload.sparse_optimizer.build()
    for tables in model.table_modules():
        apply_optimizer_in_backward(optimizer_class, tables.parameters(), optimizer_arguments)
    return model


def cut_to_fit(
    workload: ClickSettings,
    config: TrainConfig,
    num_embeddings: list[int],
    *,
    inputs: Schema,
    workers: int,
    memory_bytes: int,
) -> list[int]:
    """Cap the rows per table so that all tables fit `workers` on one node. Raises InputError if not
    even one row each fits.
    """
    max_rows = max(num_embeddings, default=1)
    target = Target(workers, workers)
    # Halves the largest tables until all fit. There is no formula, because the planner may choose
    # another sharding for fewer rows.
    while True:
        cut = [min(rows, max_rows) for rows in num_embeddings]
        try:
            tables_of(
                workload, config, cut, inputs=inputs, target=target, memory_bytes=memory_bytes
            )
        except InputError:
            if max_rows == 1:
                raise
            max_rows //= 2
        else:
            return cut


@dataclass(frozen=True)
class Tables:
    """Sharded tables and their costs."""

    text: str
    """Readable plan, with the memory of the fullest worker."""
    worker_bytes: tuple[int, ...]
    """Bytes of tables and optimizer state per worker."""
    memories: tuple[WorkerMemory, ...]
    """Total memory per worker."""
    traffic: CommunicationVolume
    """Communication between workers."""


# A plan combines, in this order:
#
#   build_model              tables on the meta device, without memory
#   plan_sharding            TorchRec's planner: which worker has which part of a table
#   network_cost             weights and activations of the dense network
#   _memories                sum of both per worker, for the largest batch
#   estimate_communication   bytes that a step exchanges
def tables_of(
    workload: ClickSettings,
    config: TrainConfig,
    num_embeddings: list[int],
    *,
    inputs: Schema,
    target: Target,
    memory_bytes: int,
    hotness: Sequence[int | None] | None = None,
    rows: int = _MANY_ROWS,
) -> Tables:
    """Shard the tables over the workers of `target`. Raises InputError if they do not fit.

    Args:
        inputs: Columns of the model. A Preprocessor may have derived them from other columns.
        memory_bytes: Memory limit per worker.
        hotness: Ids per row of each categorical column, None for any number. None for all uses the
            recipe's preset.
        rows: Rows per epoch.
    """
    from rayrec.models.cost import network_cost

    model_inputs = ModelInputs.from_schema(inputs)
    model = build_model(workload, num_embeddings, inputs=model_inputs)
    workers = target.num_workers
    state_bytes = workload.sparse_optimizer.state_bytes
    site = _site_of(target, memory_bytes, use_gpu=config.scaling.use_gpu)
    max_batch = config.worker_batch_size
    sharding_plan = plan_sharding(
        model, site, batch_size=max_batch, config=workload.sharding, state_bytes=state_bytes
    )
    placed = placements(sharding_plan, model, state_bytes=state_bytes)
    cost = network_cost(
        model.head.network, model_inputs, workload.model, num_embeddings=num_embeddings
    )
    table_rows = dict(zip(model_inputs.features, num_embeddings, strict=True))
    full_tables = {name: table_rows[name] for name in workload.model.full_tables(model_inputs)}
    memories = _memories(
        workload, config, model_inputs, placed, cost, full_tables=full_tables, num_workers=workers
    )
    batch_size = config.effective_batch_size(rows=rows, world_size=workers)
    sample = workload.model.table_sample()
    read_tables = full_tables if sample is None else dict.fromkeys(full_tables, sample)
    read_tables = {} if sample == 0 else read_tables
    traffic = estimate_communication(
        placed,
        lookups_of(workload, model_inputs, hotness, tables=read_tables, rows=batch_size),
        num_workers=workers,
        workers_per_node=target.workers_per_node,
        batch_size=batch_size,
        dense_weights=cost.weights,
        exchange_bytes=_EXCHANGE_BYTES[workload.sharding.exchange_precision],
        id_bytes=4 if max(num_embeddings, default=0) <= 2**31 else 8,
    )
    table_bytes = [sum(row.bytes_of_rank.get(rank, 0) for row in placed) for rank in range(workers)]
    text = [
        describe(sharding_plan, model, state_bytes=state_bytes),
        *_cost_lines(memories, cost, site.device),
    ]
    return Tables("\n".join(text), tuple(table_bytes), tuple(memories), traffic)


def _site_of(target: Target, memory_bytes: int, *, use_gpu: bool) -> Site:
    return Site(
        world_size=target.num_workers,
        device="cuda" if use_gpu else "cpu",
        memory_bytes=memory_bytes,
        host_memory_bytes=target.host_memory_bytes,
        nodes=[str(rank // target.workers_per_node) for rank in range(target.num_workers)],
    )


def _cost_lines(memories: Sequence[WorkerMemory], cost: NetworkCost, device: str) -> Iterator[str]:
    fullest = max(memories, key=lambda memory: memory.tables)
    # The fullest worker decides whether the run fits.
    yield f"the fullest worker needs about {fullest.text(device)}"
    if cost.multiply_adds is not None:
        yield f"{cost.multiply_adds:,.0f} multiply-adds a row, forward"


def _memories(
    workload: ClickSettings,
    config: TrainConfig,
    inputs: ModelInputs,
    placed: Sequence[TablePlacement],
    cost: NetworkCost,
    *,
    full_tables: Mapping[str, int],
    num_workers: int,
) -> list[WorkerMemory]:
    """Return the memory of each worker, with the activations of the largest batch."""
    from rayrec.models.cost import sequence_lengths

    lengths = sequence_lengths(workload.model, inputs).values()
    vectors = len(inputs.features) - len(lengths) + sum(lengths)
    width = workload.model.table_width
    constants = sum(full_tables.values()) * width
    return worker_memories(
        placed,
        dense_weights=cost.weights,
        dense_state_bytes=workload.dense_optimizer.state_bytes(cost.weights),
        batch_bytes=batch_bytes(
            workload, config, cost, values=vectors * width, constant_values=constants
        ),
        world_size=num_workers,
    )


def batch_bytes(
    workload: ClickSettings,
    config: TrainConfig,
    cost: NetworkCost,
    *,
    values: int,
    constant_values: int = 0,
) -> int:
    """Return activation bytes of a step, with `values` embedding values per row and
    `constant_values` of full tables. An evaluation keeps nothing for a backward pass, so half of
    its rows count.
    """
    # plus gradients by row
    copies = _COPIES_OF_EMBEDDINGS + workload.sparse_optimizer.has_custom_update
    row_bytes = copies * values * FLOAT_BYTES + _COPIES_OF_ACTIVATIONS * cost.saved_bytes_per_row
    return (
        int(max(config.worker_batch_size, config.eval_batch_size // 2) * row_bytes)
        + copies * constant_values * FLOAT_BYTES
    )


def lookups_of(
    workload: ClickSettings,
    inputs: ModelInputs,
    hotness: Sequence[int | None] | None,
    *,
    tables: Mapping[str, int] | None = None,
    rows: int = 1,
) -> dict[str, list[Lookup]]:
    """Return the lookups of a row in each table. A list of unlimited length counts as its
    max_length, or 20. `tables` has the row counts of full tables. Each of `rows` rows reads its
    share of them.
    """
    from rayrec.models.cost import USUAL_LENGTH

    multi_hot = workload.preset.multi_hot
    lists = dict(inputs.lists)
    if hotness is None:
        hotness = (
            multi_hot.sizes
            if multi_hot
            else [None if name in lists else 1 for name in inputs.features]
        )
    unpooled = unpooled_features(workload.model, inputs)
    lookups = dict[str, list[Lookup]]()
    for name, ids in zip(inputs.features, hotness, strict=True):
        lookup = Lookup(
            ids or lists.get(name) or USUAL_LENGTH, name not in unpooled, inputs.weighted
        )
        lookups.setdefault(inputs.table_of[name], []).append(lookup)
    for name, size in (tables or {}).items():
        lookups[inputs.table_of[name]].append(Lookup(size / rows, pooled=False))
    return lookups


_REPEATS: Final = 10
"""Number of timings of the data stages. The median counts: the fastest is faster than a run's
mean.
"""
_CACHE_BYTES: Final = 64 << 20
"""Memory written before each timing. A run's other work fills the caches, too."""
_MEMORY_FOR_TABLES: Final = 0.9
"""Share of free memory for tables, because less may be free when the workers check."""


@dataclass(frozen=True)
class _Slice:
    """First block of a log."""

    index: LogIndex
    rows_of_log: int
    preprocessor: Preprocessor
    sampled_vocabulary: bool


def probe_speed(
    workload: ClickSettings,
    config: TrainConfig,
    *,
    target: Target,
    local_workers: int,
    cuda: bool,
    train: LocalTrainer,
) -> MeasuredSpeed:
    """Measure the training speed of concurrent `local_workers` on the CPUs or (one worker) the GPU
    of this machine. Does not train if the target's speed is known. Tables that do not fit this
    machine are cut. Takes about 20 seconds. Raises InputError if the log is not text, or if the
    tables do not fit the target.
    """
    log_slice = _read_slice(workload, config)
    times = _time_stages(log_slice, config)
    tables, notes = _target_tables(workload, config, log_slice, target)
    threads = max(1, host_resources.usable_cpus() // local_workers)
    if target.gpu_rows_per_s is not None:
        rows_per_s = local_workers * target.gpu_rows_per_s
        cpu_s_per_row = 0.0
    else:
        embeddings = _fitting_embeddings(workload, config, log_slice, local_workers)
        if embeddings != log_slice.preprocessor.num_embeddings:
            notes.append(
                "The tables do not fit this machine. The model was measured with "
                f"{max(embeddings):,} rows in the largest, "
                "so caches helped more than they will."
            )
        with storage.Scratch("speed-probe") as scratch:
            folder = storage.join(scratch, "preprocessor")
            log_slice.preprocessor.save(folder)
            rows = SliceRows(folder, log_slice.index, embeddings, log_slice.rows_of_log)
            trained = train(config, rows, workers=local_workers, threads=threads, cuda=cuda)
        rows_per_s = sum(rows / seconds for rows, seconds, _ in trained)
        cpu_s_per_row = sum(cpu_s for _, _, cpu_s in trained) / sum(rows for rows, _, _ in trained)
    return MeasuredSpeed(
        num_workers=local_workers,
        threads_per_worker=threads,
        device="cuda" if cuda else "cpu",
        rows_per_s=rows_per_s,
        cpu_s_per_row=cpu_s_per_row,
        stage_wall_s={name: spent / times.rows for name, spent in times.wall_s.items()},
        stage_cpu_s={name: spent / times.rows for name, spent in times.cpu_s.items()},
        rows=log_slice.rows_of_log,
        worker_bytes=tables.worker_bytes,
        sampled_vocabulary=log_slice.sampled_vocabulary,
        plan=tables.text,
        traffic=tables.traffic,
        is_assumed=target.gpu_rows_per_s is not None,
        notes=tuple(notes),
    )


def _fitting_embeddings(
    workload: ClickSettings, config: TrainConfig, log_slice: _Slice, workers: int
) -> list[int]:
    """Return the rows of each table, cut to what the workers of this machine have memory for."""
    return cut_to_fit(
        workload,
        config,
        log_slice.preprocessor.num_embeddings,
        inputs=log_slice.preprocessor.inputs,
        workers=workers,
        memory_bytes=int(local_memory(config, workers=workers) * _MEMORY_FOR_TABLES),
    )


def _target_tables(
    workload: ClickSettings, config: TrainConfig, log_slice: _Slice, target: Target
) -> tuple[Tables, list[str]]:
    """Return the tables sharded over the target's workers, and notes."""
    memory_bytes, notes = target_memory(config, target)
    try:
        tables = tables_of(
            workload,
            config,
            log_slice.preprocessor.num_embeddings,
            inputs=log_slice.preprocessor.inputs,
            target=target,
            memory_bytes=memory_bytes,
            hotness=log_slice.preprocessor.hotness,
            rows=log_slice.rows_of_log,
        )
    except InputError as error:
        if target.memory_bytes is not None:
            raise
        name = "gpu_memory_gb" if config.scaling.use_gpu else "memory_gb"
        raise InputError(
            f"{error}. Assumed the memory of this machine. Set it with {name}=N in --cluster."
        ) from None
    return tables, notes


def _read_slice(workload: ClickSettings, config: TrainConfig) -> _Slice:
    data = config.train_data
    assert data.path is not None
    source = LogSource.at(data.path, data.files)
    source.require_raw("a forecast is made from the raw log")
    files = source.raw_files(workload.schema)
    if source.is_random:
        index = index_random(data.path, workload.schema, segment_bytes=data.segment_bytes)
        index, rows = replace(index, segments=index.segments[: data.segments_per_block]), index.rows
    elif is_table(files, workload.schema) or is_packed(files[0].path):
        raise InputError(f"{files[0].path}: must be plain text in Criteo's format for a forecast")
    else:
        chunk = cut(files, data.block_bytes)[0]
        entries, faults = index_chunk(chunk, workload.schema, data.segment_bytes)
        index = LogIndex(numbered(entries), faults)
        rows = round(
            index.rows * sum(file.size_bytes for file in files) / (chunk.stop - chunk.start)
        )
    if not index.rows:
        raise InputError(f"{files[0].path}: has no valid row at its beginning")
    if workload.preprocessor is not None:
        return _Slice(index, rows, Preprocessor.load(workload.preprocessor), False)
    counting = workload.preset.counting(workload.schema)
    counts = counting.empty()
    counts.add(
        count_parts(
            [SegmentRange(segment, 0, segment.rows) for segment in index.segments],
            counting=counting,
        )
    )
    return _Slice(index, rows, make_preprocessor(workload.preset, workload.schema, counts), True)


def _time_stages(log_slice: _Slice, config: TrainConfig) -> BlockTimes:
    """Measure the stages of one data task on the slice, and add Ray's work on it as stage
    `deliver`.
    """
    from rayrec.ingest.ray_engine import DELIVERY_S, ITEMS_A_TASK
    from rayrec.ingest.stream import encoded_block

    parts = tuple(SegmentRange(segment, 0, segment.rows) for segment in log_slice.index.segments)
    (block, *_) = BlockOrder(parts, config.train_data.shuffle, config.seed, len(parts)).blocks(0)
    assert isinstance(block, Block)
    keep_freed_memory()  # as data tasks do
    trials: list[BlockTimes] = []
    for _ in range(_REPEATS):
        np.ones(_CACHE_BYTES // 8).sum()
        table, times = measured(
            lambda: encoded_block((block, 0, block.rows), log_slice.preprocessor), rows_of=len
        )
        trials.append(times)
    times = sorted(trials, key=lambda trial: sum(trial.wall_s.values()))[_REPEATS // 2]
    deliver = {"deliver": DELIVERY_S[0] / ITEMS_A_TASK + DELIVERY_S[1] * table.nbytes}
    return replace(times, wall_s={**times.wall_s, **deliver}, cpu_s={**times.cpu_s, **deliver})


@dataclass(frozen=True)
class SliceRows:
    """Picklable slice for training processes. See `TrainingRows`."""

    folder: str
    """Preprocessor folder."""
    index: LogIndex
    num_embeddings: list[int]
    """Table rows, possibly fewer than in the Preprocessor."""
    rows_of_log: int

    def set_up(self, context: WorkerContext) -> tuple[WorkerSetup, list[Batch]]:
        workload = context.config.workload
        assert isinstance(workload, ClickSettings)
        preprocessor = Preprocessor.load(self.folder)
        # Only the row count matters.
        order = BlockOrder(
            (SegmentRange(self.index.segments[0], 0, self.rows_of_log),), "none", 0, 1
        )
        shared = InProcess(preprocessor)
        inputs = preprocessor.inputs
        sets = {"train": order}
        prepared = Prepared(
            shared, preprocessor.hash(), inputs, self.num_embeddings, sets, 0, self.folder, None
        )
        setup = workload.set_up(context, prepared)
        return setup, self._batches(
            context, workload, preprocessor, size=setup.described["batch_size"]
        )

    def _batches(
        self,
        context: WorkerContext,
        workload: ClickSettings,
        preprocessor: Preprocessor,
        *,
        size: int,
    ) -> list[Batch]:
        """Return this worker's share of the slice in batches of `size` rows. Repeats rows to fill
        at least one batch.
        """
        from rayrec.data.logs.reading import read_raw
        from rayrec.ingest.batches import BatchSlicer

        raw = read_raw(self.index.segments, preprocessor.schema)
        worker_rows = np.random.default_rng(0).permutation(raw.rows)[
            context.rank :: context.world_size
        ]
        count = max(1, len(worker_rows) // size)
        encoded = preprocessor.encode(raw, np.resize(worker_rows, count * size))
        if self.num_embeddings != preprocessor.num_embeddings:
            encoded = folded(encoded, self.num_embeddings)
        inputs = preprocessor.inputs
        slicer = BatchSlicer(iter([encoded]), inputs, unpooled=workload.unpooled(inputs))
        return [slicer.take(size, loss_weight=1 / size) for _ in range(count)]


def folded(rows: EncodedRows, num_embeddings: list[int]) -> EncodedRows:
    """Wrap ids beyond the end of their table to other rows."""
    ids = [
        replace(column, values=column.values % size)
        if isinstance(column, JaggedIds)
        else column % size
        for column, size in zip(rows.ids, num_embeddings, strict=True)
    ]
    return replace(rows, ids=ids)
