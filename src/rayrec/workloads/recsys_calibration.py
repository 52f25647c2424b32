"""Measures a slice of a click model's training: its log is read, parsed and encoded, and its model trained for some steps."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.data import ready
from rayrec.data.counting import count_parts
from rayrec.data.encoded import EncodedRows, from_arrow
from rayrec.data.log import LogIndex, cut, index_chunk, is_gzip, numbered
from rayrec.data.placement import TaskPlacement
from rayrec.data.position import Block, EpochOrder, Part
from rayrec.data.preprocessor import Preprocessor
from rayrec.data.profiles import make_preprocessor
from rayrec.data.stages import BlockTimes, measured
from rayrec.data.tables import is_table
from rayrec.workloads.base import TrainConfig, WorkerContext
from rayrec.workloads.calibration import Calibration
from rayrec.workloads.recsys_plan import tables_of

if TYPE_CHECKING:
    from rayrec.click_batch import ClickBatch
    from rayrec.workloads.recsys import ClickWorkload, Prepared

_REPEATS: Final = 3
"""Of the data stages; the quickest counts."""
_WARM_STEPS: Final = 8
_MEASURED_S: Final = 4.0
_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True)
class _Slice:
    """The first block of a log."""

    index: LogIndex
    rows_of_log: int
    """About."""
    preprocessor: Preprocessor
    sampled_vocabulary: bool


def calibrate(
    workload: ClickWorkload, config: TrainConfig, *, num_workers: int, local_workers: int, cuda: bool
) -> Calibration:
    """`num_workers` of the run; `local_workers` that train here, side by side, on the CPUs or (one) on this machine's GPU.

    Takes some twenty seconds. Raises InputError where the log is not text, or the tables do not fit.
    """
    piece = _read_slice(workload, config)
    encoded, times = _time_stages(piece, config)
    described, worker_bytes = tables_of(workload, config, piece.preprocessor.num_embeddings, workers=num_workers)
    threads = max(1, (os.cpu_count() or 1) // local_workers)
    trained = _train_here(config, piece, encoded, workers=local_workers, threads=threads, cuda=cuda)
    return Calibration(
        num_workers=local_workers,
        threads_per_worker=threads,
        device="cuda" if cuda else "cpu",
        rows_per_s=sum(rows / seconds for rows, seconds, _ in trained),
        cpu_s_per_row=sum(cpu_s for _, _, cpu_s in trained) / sum(rows for rows, _, _ in trained),
        stage_wall_s={name: spent / times.rows for name, spent in times.wall_s.items()},
        stage_cpu_s={name: spent / times.rows for name, spent in times.cpu_s.items()},
        rows=piece.rows_of_log,
        worker_bytes=worker_bytes,
        sampled_vocabulary=piece.sampled_vocabulary,
        plan=described,
    )


def _read_slice(workload: ClickWorkload, config: TrainConfig) -> _Slice:
    data = config.train_data
    assert data.path is not None
    if ready.is_ready(data.path):
        raise InputError(f"{data.path}: is ready-made data; a forecast is made from the raw log")
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
    counting = workload.profile.counting(workload.schema)
    counts = counting.empty()
    counts.add(count_parts([Part(segment, 0, segment.rows) for segment in index.segments], counting=counting))
    return _Slice(index, rows, make_preprocessor(workload.profile, workload.schema, counts), True)


def _time_stages(piece: _Slice, config: TrainConfig) -> tuple[list[EncodedRows], BlockTimes]:
    """What one data task makes of the slice, and how long that takes it."""
    from rayrec.data.ingest import encoded_block

    parts = tuple(Part(segment, 0, segment.rows) for segment in piece.index.segments)
    (block, *_) = EpochOrder(parts, config.train_data.shuffle, config.seed, len(parts)).blocks(0)
    assert isinstance(block, Block)
    tables = [
        measured(
            lambda: encoded_block((block, 0, block.rows), piece.preprocessor), rows_of=lambda table: table.num_rows
        )
        for _ in range(_REPEATS)
    ]
    table, times = min(tables, key=lambda one: sum(one[1].wall_s.values()))
    return from_arrow(table), times


# -- training for some steps, a process a worker


def _train_here(
    config: TrainConfig, piece: _Slice, encoded: list[EncodedRows], *, workers: int, threads: int, cuda: bool
) -> list[tuple[int, float, float]]:
    """(rows, seconds, CPU-seconds) of each worker."""
    processes = multiprocessing.get_context("spawn")
    results = processes.Queue()
    with tempfile.TemporaryDirectory(prefix="rayrec-calibration-") as folder:
        piece.preprocessor.save(folder + "/preprocessor")
        arguments = (workers, threads, cuda, folder, config, piece.index, piece.rows_of_log, results)
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
    from rayrec.workloads.recsys import Prepared

    order = EpochOrder((Part(index.segments[0], 0, rows),), "none", 0, 1)  # only its number of rows is looked at
    return Prepared(
        preprocessor,
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
    rows_of_log: int,
    results: Any,
) -> None:
    import torch

    from rayrec.native import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(threads)
    device = torch.device("cuda" if cuda else "cpu")
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=workers
    )
    preprocessor = Preprocessor.load(folder + "/preprocessor")
    prepared = prepared_for_rows(preprocessor, index, rows_of_log, folder=folder)
    context = WorkerContext(config, rank, workers, device, TaskPlacement())
    setup = config.workload.set_up(context, prepared)
    setup.model.train()
    batches = cycle(_batches(index, preprocessor, size=setup.described["batch_size"], rank=rank, workers=workers))
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


def _batches(index: LogIndex, preprocessor: Preprocessor, *, size: int, rank: int, workers: int) -> list[ClickBatch]:
    """This worker's share of the slice, in batches of its size; one at least, of rows that repeat where there are too few."""
    from rayrec.data.loader import Slicer
    from rayrec.data.reading import read_raw

    raw = read_raw(index.segments, preprocessor.schema)
    mine = np.random.default_rng(0).permutation(raw.rows)[rank::workers]
    count = max(1, len(mine) // size)
    encoded = preprocessor.encode(raw, np.resize(mine, count * size))
    inputs = preprocessor.inputs
    slicer = Slicer(iter([encoded]), num_dense=len(inputs.dense), keys=inputs.sparse)
    return [slicer.take(size, loss_weight=1 / size) for _ in range(count)]
