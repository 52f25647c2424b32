"""Measures a slice of a click model's training: its log is read, parsed and encoded, and its model trained for some steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from rayrec import machine, storage
from rayrec.config import InputError
from rayrec.data import materialized
from rayrec.data.encoded import Bags, EncodedRows
from rayrec.data.encoding.counts import count_parts
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import make_preprocessor
from rayrec.data.engine import InProcess
from rayrec.data.logs.index import Block, LogIndex, Part, cut, index_chunk, is_gzip, numbered
from rayrec.data.logs.table_log import is_table
from rayrec.data.stage_times import BlockTimes, measured
from rayrec.ingest.block_order import BlockOrder
from rayrec.workloads.base import MeasuredSpeed, Target, TrainConfig, TrainHere, WorkerContext, WorkerSetup
from rayrec.workloads.recsys.planning import Tables, cut_to_fit, memory_here, memory_of_target, tables_of
from rayrec.workloads.recsys.settings import ClickSettings, Prepared

if TYPE_CHECKING:
    from rayrec.batch import Batch
    from rayrec.workloads.recsys.settings import ClickSettings, Prepared

_REPEATS: Final = 3
"""Of the data stages; the quickest counts."""
_MEMORY_FOR_TABLES: Final = 0.9
"""Of what is free here: less may be when the workers look."""


@dataclass(frozen=True)
class _Slice:
    """The first block of a log."""

    index: LogIndex
    rows_of_log: int
    """About."""
    preprocessor: Preprocessor
    sampled_vocabulary: bool


def probe_speed(
    workload: ClickSettings, config: TrainConfig, *, target: Target, local_workers: int, cuda: bool, train: TrainHere
) -> MeasuredSpeed:
    """`local_workers` train here, side by side, on the CPUs or (one) on this machine's GPU; nobody does where the target's speed
    is known. Tables that are too large for this machine are cut for that.

    Takes some twenty seconds. Raises InputError where the log is not text, or the tables do not fit the target.
    """
    piece = _read_slice(workload, config)
    times = _time_stages(piece, config)
    tables, notes = _tables_there(workload, config, piece, target)
    threads = max(1, machine.usable_cpus() // local_workers)
    if target.gpu_rows_per_s is not None:
        rows_per_s, cpu_s_per_row = local_workers * target.gpu_rows_per_s, 0.0
    else:
        wanted, memory_bytes = piece.preprocessor.num_embeddings, memory_here(config, workers=local_workers)
        held = cut_to_fit(
            workload,
            config,
            wanted,
            inputs=piece.preprocessor.inputs,
            workers=local_workers,
            memory_bytes=int(memory_bytes * _MEMORY_FOR_TABLES),
        )
        if held != wanted:
            notes.append(
                f"The tables do not fit this machine: the model was measured with {max(held):,} rows in the largest, where "
                "caches help more than they will."
            )
        with storage.Scratch("speed-probe") as scratch:
            folder = storage.join(scratch, "preprocessor")
            piece.preprocessor.save(folder)
            rows = SliceRows(folder, piece.index, held, piece.rows_of_log)
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
        rows=piece.rows_of_log,
        worker_bytes=tables.worker_bytes,
        sampled_vocabulary=piece.sampled_vocabulary,
        plan=tables.text,
        traffic=tables.traffic,
        given=target.gpu_rows_per_s is not None,
        notes=tuple(notes),
    )


def _tables_there(
    workload: ClickSettings, config: TrainConfig, piece: _Slice, target: Target
) -> tuple[Tables, list[str]]:
    """The tables over the target's workers, and what is to be said of it."""
    memory_bytes, notes = memory_of_target(config, target)
    try:
        tables = tables_of(
            workload,
            config,
            piece.preprocessor.num_embeddings,
            inputs=piece.preprocessor.inputs,
            target=target,
            memory_bytes=memory_bytes,
            hotness=piece.preprocessor.hotness,
            rows=piece.rows_of_log,
        )
    except InputError as error:
        if target.memory_bytes is not None:
            raise
        name = "gpu_memory_gb" if config.scaling.use_gpu else "memory_gb"
        raise InputError(f"{error}; taken for as large as here, {name}=N in --cluster gives its memory") from None
    return tables, notes


def _read_slice(workload: ClickSettings, config: TrainConfig) -> _Slice:
    data = config.train_data
    assert data.path is not None
    if materialized.is_preprocessed(data.path):
        raise InputError(f"{data.path}: is preprocessed data; a forecast is made from the raw log")
    files = storage.list_files(data.path, names=data.files)
    if is_table(files, workload.schema) or is_gzip(files[0].path):
        raise InputError(f"{files[0].path}: a forecast measures plain text in Criteo's format, which this is not")
    chunk = cut(files, data.block_bytes)[0]
    entries, faults = index_chunk(chunk, workload.schema, data.segment_bytes)
    index = LogIndex(numbered(entries), faults)
    if not index.rows:
        raise InputError(f"{files[0].path}: has no good row at its beginning")
    rows = round(index.rows * sum(file.size_bytes for file in files) / (chunk.stop - chunk.start))
    if workload.preprocessor is not None:
        return _Slice(index, rows, Preprocessor.load(workload.preprocessor), False)
    counting = workload.preset.counting(workload.schema)
    counts = counting.empty()
    counts.add(count_parts([Part(segment, 0, segment.rows) for segment in index.segments], counting=counting))
    return _Slice(index, rows, make_preprocessor(workload.preset, workload.schema, counts), True)


def _time_stages(piece: _Slice, config: TrainConfig) -> BlockTimes:
    """How long one data task takes for the slice."""
    from rayrec.ingest.stream import encoded_block

    parts = tuple(Part(segment, 0, segment.rows) for segment in piece.index.segments)
    (block, *_) = BlockOrder(parts, config.train_data.shuffle, config.seed, len(parts)).blocks(0)
    assert isinstance(block, Block)
    tables = [
        measured(
            lambda: encoded_block((block, 0, block.rows), piece.preprocessor), rows_of=lambda table: table.num_rows
        )
        for _ in range(_REPEATS)
    ]
    return min((times for _, times in tables), key=lambda times: sum(times.wall_s.values()))


@dataclass(frozen=True)
class SliceRows:
    """What processes that train on a slice are told."""

    folder: str
    """Of its Preprocessor."""
    index: LogIndex
    num_embeddings: list[int]
    """Rows of the tables, which may be fewer than the Preprocessor's."""
    rows_of_log: int

    def set_up(self, context: WorkerContext) -> tuple[WorkerSetup, list[Batch]]:
        """Set up one worker; return its batches too. Collective."""
        workload = context.config.workload
        assert isinstance(workload, ClickSettings)
        preprocessor = Preprocessor.load(self.folder)
        setup = workload.set_up(context, self._prepared(preprocessor))
        return setup, self._batches(context, workload, preprocessor, size=setup.described["batch_size"])

    def _prepared(self, preprocessor: Preprocessor) -> Prepared:
        order = BlockOrder(
            (Part(self.index.segments[0], 0, self.rows_of_log),), "none", 0, 1
        )  # only its number of rows counts
        shared, inputs = InProcess(preprocessor), preprocessor.inputs
        sets = {"train": order}
        return Prepared(shared, preprocessor.hash(), inputs, self.num_embeddings, sets, 0, self.folder, None)

    def _batches(
        self, context: WorkerContext, workload: ClickSettings, preprocessor: Preprocessor, *, size: int
    ) -> list[Batch]:
        """This worker's share of the slice, in batches of its size; one at least, of rows that repeat where there are too few."""
        from rayrec.data.logs.reading import read_raw
        from rayrec.ingest.batches import Slicer

        raw = read_raw(self.index.segments, preprocessor.schema)
        mine = np.random.default_rng(0).permutation(raw.rows)[context.rank :: context.world_size]
        count = max(1, len(mine) // size)
        encoded = preprocessor.encode(raw, np.resize(mine, count * size))
        if self.num_embeddings != preprocessor.num_embeddings:
            encoded = folded(encoded, self.num_embeddings)
        inputs = preprocessor.inputs
        slicer = Slicer(iter([encoded]), inputs, unpooled=workload.unpooled(inputs))
        return [slicer.take(size, loss_weight=1 / size) for _ in range(count)]


def folded(rows: EncodedRows, num_embeddings: list[int]) -> EncodedRows:
    """The rows with each id beyond its table's end on another of its rows."""
    ids = [
        replace(column, values=column.values % size) if isinstance(column, Bags) else column % size
        for column, size in zip(rows.ids, num_embeddings, strict=True)
    ]
    return replace(rows, ids=ids)
