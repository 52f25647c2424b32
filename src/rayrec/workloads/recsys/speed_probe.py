"""Measures a slice of a click model's training: its log is read, parsed and encoded, and its model trained for some steps."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rayrec import machine, storage
from rayrec.config import InputError
from rayrec.data import materialized
from rayrec.data.encoded import Bags, EncodedRows
from rayrec.data.encoding.counts import count_parts
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import make_preprocessor
from rayrec.data.engine import InProcess, ThreadEngine
from rayrec.data.logs.index import Block, LogIndex, Part, cut, index_chunk, is_gzip, numbered
from rayrec.data.logs.table_log import is_table
from rayrec.data.stage_times import BlockTimes, measured
from rayrec.ingest.block_order import BlockOrder
from rayrec.workloads.base import MeasuredSpeed, Target, TrainConfig, WorkerContext
from rayrec.workloads.recsys.planning import Tables, cut_to_fit, memory_here, memory_of_target, tables_of

if TYPE_CHECKING:
    from rayrec.batch import Batch
    from rayrec.workloads.recsys.settings import ClickSettings, Prepared

_REPEATS: Final = 3
"""Of the data stages; the quickest counts."""
_WARM_STEPS: Final = 8
_MEASURED_S: Final = 4.0
_TIMEOUT_S: Final = 300.0
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
    workload: ClickSettings, config: TrainConfig, *, target: Target, local_workers: int, cuda: bool
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
        trained = _train_here(config, piece, held, workers=local_workers, threads=threads, cuda=cuda)
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


# -- training for some steps, a process a worker


def _train_here(
    config: TrainConfig, piece: _Slice, num_embeddings: list[int], *, workers: int, threads: int, cuda: bool
) -> list[tuple[int, float, float]]:
    """(rows, seconds, CPU-seconds) of each worker; tables have `num_embeddings` rows."""
    processes = multiprocessing.get_context("spawn")
    results = processes.Queue()
    with storage.Scratch("speed-probe") as folder:
        piece.preprocessor.save(folder + "/preprocessor")
        arguments = (workers, threads, cuda, folder, config, piece.index, num_embeddings, piece.rows_of_log, results)
        started = [processes.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(workers)]
        with _one_openmp_thread():
            for process in started:
                process.start()
        deadline_s = time.monotonic() + _TIMEOUT_S
        found: list[tuple[int, float, float]] = []
        try:
            while len(found) < workers:
                with contextlib.suppress(queue.Empty):
                    found.append(results.get(timeout=1.0))
                    continue
                if time.monotonic() > deadline_s or any(process.exitcode for process in started):
                    raise InputError(
                        "plan: training for some steps on this machine failed; `rayrec train` with --steps 20 says why"
                    )
        finally:
            for process in started:
                process.join(timeout=10 if len(found) == workers else 0)
                process.kill()
    return found


@contextlib.contextmanager
def _one_openmp_thread() -> Iterator[None]:
    """As Ray starts its workers; torch is told the number of its own later."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def prepared_for_rows(preprocessor: Preprocessor, index: LogIndex, rows: int, *, folder: str) -> Prepared:
    """What a worker is set up with that trains on so many rows, and is handed its batches."""
    from rayrec.workloads.recsys.settings import Prepared

    order = BlockOrder((Part(index.segments[0], 0, rows),), "none", 0, 1)  # only its number of rows is looked at
    return Prepared(
        InProcess(preprocessor),
        preprocessor.hash(),
        preprocessor.inputs,
        preprocessor.num_embeddings,
        {"train": order},
        0,
        folder,
        None,
    )


def _rank(
    rank: int,
    workers: int,
    threads: int,
    cuda: bool,
    folder: str,
    config: TrainConfig,
    index: LogIndex,
    num_embeddings: list[int],
    rows_of_log: int,
    results: Any,
) -> None:
    import torch

    from rayrec.native import keep_freed_memory
    from rayrec.workloads.recsys.settings import ClickSettings

    keep_freed_memory()
    torch.set_num_threads(threads)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # NCCL's collectives of objects use the current device
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=workers
    )
    preprocessor = Preprocessor.load(folder + "/preprocessor")
    prepared = replace(
        prepared_for_rows(preprocessor, index, rows_of_log, folder=folder), num_embeddings=num_embeddings
    )
    context = WorkerContext(config, rank, workers, device, ThreadEngine(1))
    workload = config.workload
    assert isinstance(workload, ClickSettings)
    setup = workload.set_up(context, prepared)
    setup.model.train()
    size = setup.described["batch_size"]
    batches = cycle(
        _batches(
            index,
            preprocessor,
            size=size,
            rank=rank,
            workers=workers,
            num_embeddings=num_embeddings,
            unpooled=workload.unpooled(preprocessor.inputs),
        )
    )
    for step in range(_WARM_STEPS):
        setup.begin_step(step, 1000)
        begin_s = time.perf_counter()
        setup.pipeline.progress(batches)
        step_s = time.perf_counter() - begin_s
    steps = torch.tensor(max(5.0, _MEASURED_S / step_s), device=device)
    torch.distributed.broadcast(steps, src=0)  # so many for all
    begin_s, begin_cpu_s, rows = time.perf_counter(), time.process_time(), 0
    for step in range(int(steps)):
        setup.begin_step(step, 1000)
        output = setup.pipeline.progress(batches)
        rows += setup.described["batch_size"]
    output.loss.item()
    results.put((rows, time.perf_counter() - begin_s, time.process_time() - begin_cpu_s))
    torch.distributed.barrier()


def _batches(
    index: LogIndex,
    preprocessor: Preprocessor,
    *,
    size: int,
    rank: int,
    workers: int,
    num_embeddings: list[int] | None = None,
    unpooled: Sequence[str] = (),
) -> list[Batch]:
    """This worker's share of the slice, in batches of its size; one at least, of rows that repeat where there are too few. Ids
    are folded into tables of `num_embeddings` rows, where these are given."""
    from rayrec.data.logs.reading import read_raw
    from rayrec.ingest.batches import Slicer

    raw = read_raw(index.segments, preprocessor.schema)
    mine = np.random.default_rng(0).permutation(raw.rows)[rank::workers]
    count = max(1, len(mine) // size)
    encoded = preprocessor.encode(raw, np.resize(mine, count * size))
    if num_embeddings is not None and num_embeddings != preprocessor.num_embeddings:
        encoded = folded(encoded, num_embeddings)
    inputs = preprocessor.inputs
    slicer = Slicer(iter([encoded]), inputs, unpooled=unpooled)
    return [slicer.take(size, loss_weight=1 / size) for _ in range(count)]


def folded(rows: EncodedRows, num_embeddings: list[int]) -> EncodedRows:
    """The rows with each id beyond its table's end on another of its rows."""
    ids = [
        replace(column, values=column.values % size) if isinstance(column, Bags) else column % size
        for column, size in zip(rows.ids, num_embeddings, strict=True)
    ]
    return replace(rows, ids=ids)
