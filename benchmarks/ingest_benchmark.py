"""Benchmark of ingest, from a raw log to training batches for a null trainer.

Candidates: Ray Data, threads of one process, the same kernels without either, and the notebook's
pipeline for Criteo's TSV. A log of any tokens is read as Parquet and as CSV.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow.csv
import pyarrow.parquet
import ray
from logs import ANY, any_log, synthetic_log
from peers.notebook_ingest import batches as notebook_batches
from peers.notebook_ingest import vocabularies_of
from rows import emit, interleaved, note, part, timed

from rayrec.cluster import connection
from rayrec.data.encoded_rows import from_arrow
from rayrec.data.encoding.counts import count_log
from rayrec.data.encoding.preprocessor import Preprocessor, put_preprocessor
from rayrec.data.encoding.presets import ALL, RAYREC, Preset, make_preprocessor
from rayrec.data.engine import (
    InProcess,
    Shared,
    StreamEngine,
    TaskContext,
    TaskPlacement,
    ThreadEngine,
)
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import LogIndex
from rayrec.datasets.criteo import SCHEMA
from rayrec.ingest.batches import BatchSlicer, ClickBatches
from rayrec.ingest.block_order import BatchSharding, Block, BlockOrder
from rayrec.ingest.loader import Loader
from rayrec.ingest.ray_engine import (
    ITEMS_A_TASK,
    ConcurrencyLimits,
    RayEngine,
    group_items,
    merge_tables,
    split_table,
    tables,
    tasks_dataset,
)
from rayrec.ingest.stream import TaskSource, encode_block, encode_task
from rayrec.native import keep_freed_memory
from rayrec.schema import Schema

BATCH_SIZE = 2048
EPOCHS = 3
"""Number of timed epochs. More than one makes the start of a stream count little, as in a training
run.
"""
STEPS_BETWEEN_STATES = 50
"""Steps between position reads, as in a run that saves very often."""


def resident_bytes() -> int:
    """Return the memory of all Ray processes without shared pages, in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read()
            with open(f"/proc/{name}/statm") as file:
                resident, shared = (int(field) for field in file.read().split()[1:3])
        except OSError:
            continue
        if b"ray" in command:
            total += (resident - shared) * page
    return total


class Peak:
    """Highest private memory of Ray's processes, without the object store, while the context is
    active.
    """

    def __enter__(self) -> Peak:
        self.bytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.bytes = max(self.bytes, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def indexed(path: str, schema: Schema, engine: StreamEngine, cache: str) -> LogIndex:
    return LogSource.at(path).index(
        schema, segment_bytes=2 << 20, context=TaskContext(engine, cache, note)
    )


def prepare(
    path: str, preset: Preset = RAYREC, schema: Schema = SCHEMA
) -> tuple[BlockOrder, Shared[Preprocessor], Preprocessor]:
    engine = RayEngine(TaskPlacement())
    index = indexed(path, schema, engine, os.path.dirname(path) + "/.cache")
    parts = tuple(index.parts(0, index.rows))
    with count_log(preset.counting(schema), parts, engine=engine) as counts:
        preprocessor = make_preprocessor(preset, schema, counts)
    return BlockOrder(parts, "window", 0, 16), put_preprocessor(preprocessor, engine), preprocessor


def through(engine: StreamEngine, order: BlockOrder, preprocessor: Shared[Preprocessor]) -> float:
    """Measure the rows/s of one worker's loader with all cores for its data tasks."""
    inputs = preprocessor.get().inputs  # With indicators of missing numbers

    def read() -> int:
        source = TaskSource(preprocessor, engine, inputs, order.max_block_rows)
        loader = Loader(
            order, ClickBatches(source, inputs), BatchSharding(0, 1, BATCH_SIZE), epochs=EPOCHS
        )
        rows = 0
        for number, batch in enumerate(loader):
            rows += len(batch)
            if number % STEPS_BETWEEN_STATES == 0:
                loader.state()
        return rows

    rows, seconds = timed(read)
    assert rows == EPOCHS * order.rows
    return rows / seconds


def without_position(order: BlockOrder, preprocessor: Shared[Preprocessor]) -> float:
    """Measure the rows/s of the same tasks and batches in completion order, which allows no exact
    resume.
    """
    items = [(block, 0, block.rows) for epoch in range(EPOCHS) for block in order.blocks(epoch)]
    inputs = RAYREC.inputs(SCHEMA)

    def read() -> int:
        task = functools.partial(
            merge_tables, functools.partial(encode_task, preprocessor=preprocessor)
        )
        size = ITEMS_A_TASK
        block_bytes = size * 4 * len(inputs.columns) * max(rows for _, _, rows in items)
        placement = TaskPlacement()
        limits = ConcurrencyLimits.compute(placement, block_bytes=block_bytes, prefetch_blocks=1)
        tasks = group_items(items, first=limits.tasks, size=size)
        dataset = tasks_dataset(
            "ingest", task, tasks, placement=placement, block_bytes=block_bytes, limits=limits
        )
        dataset.context.execution_options.preserve_order = False
        encoded = (
            rows
            for several in tables(dataset)
            for table in split_table(several)
            for rows in from_arrow(table)
        )
        slicer = BatchSlicer(encoded, inputs)
        left = EPOCHS * order.rows
        while left:
            left -= len(slicer.take(min(BATCH_SIZE, left), loss_weight=1.0))
        return EPOCHS * order.rows

    rows, seconds = timed(read)
    return rows / seconds


def without_ray(order: BlockOrder, preprocessor: Preprocessor) -> float:
    """Measure the rows/s of reading, parsing, encoding and shuffling in two threads of this
    process.
    """
    keep_freed_memory()

    def encoded(block: Block) -> int:
        return len(encode_block(block, 0, block.rows, preprocessor))

    with ThreadPoolExecutor(2) as threads:
        rows, seconds = timed(lambda: sum(threads.map(encoded, order.blocks(0))))
    return rows / seconds


def main(*, quick: bool) -> None:
    connection.connect(None, num_cpus=2, object_store_bytes=2 << 30, log_to_driver=False)
    on_ray = RayEngine(TaskPlacement())
    rows = 500_000 if quick else 3_000_000
    peer_rows = 50_000 if quick else 200_000
    order, shared, preprocessor = prepare(synthetic_log(rows))
    peer_path = synthetic_log(peer_rows)
    vocabularies = vocabularies_of(peer_path, peer_rows)

    def peer_rate() -> float:
        read, seconds = timed(
            lambda: sum(
                len(b["labels"]) for b in notebook_batches(peer_path, vocabularies, BATCH_SIZE)
            )
        )
        assert read == peer_rows
        return read / seconds

    through(on_ray, order, shared)  # starts Ray's workers
    repeats = 2 if quick else 5
    rates = interleaved(
        repeats,
        ours=lambda: through(on_ray, order, shared),
        threads=lambda: through(ThreadEngine(2), order, InProcess(preprocessor)),
        any_order=lambda: without_position(order, shared),
        kernels=lambda: without_ray(order, preprocessor),
        notebook=peer_rate,
    )
    workload = f"criteo kaggle TSV -> shuffled batches of {BATCH_SIZE}, 2 CPUs"
    emit(
        "ingest",
        peer="Ray DLRM notebook's pipeline",
        workload=workload,
        value=rates["ours"],
        ratio=rates["ours"] / rates["notebook"],
        repeats=repeats,
        peer_rows_per_s=round(rates["notebook"]),
    )
    emit(
        "ingest",
        peer="the same kernels in two threads",
        workload=workload,
        value=rates["ours"],
        ratio=rates["ours"] / rates["kernels"],
        repeats=repeats,
        peer_rows_per_s=round(rates["kernels"]),
    )
    emit(
        "ingest",
        peer="the same kernels in two threads",
        workload=f"{workload}, threads of one process",
        value=rates["threads"],
        ratio=rates["threads"] / rates["kernels"],
        repeats=repeats,
        peer_rows_per_s=round(rates["kernels"]),
    )
    emit(
        "ingest",
        peer="the same tasks and batches without positions, in any order",
        workload=f"{workload}, position read every {STEPS_BETWEEN_STATES} batches",
        value=rates["ours"],
        ratio=rates["ours"] / rates["any_order"],
        repeats=repeats,
        peer_rows_per_s=round(rates["any_order"]),
    )
    with part("ingest", f"{workload}, by preset"):
        by_preset(on_ray, workload, rows=rows, repeats=2 if quick else 3)
    with part("ingest", "any tokens"):
        any_tokens(on_ray, rows=rows // 10, repeats=repeats)
    with part("ingest", "peak private memory of all Ray processes"):
        memory(on_ray, rows)
    ray.shutdown()


def by_preset(engine: StreamEngine, workload: str, *, rows: int, repeats: int) -> None:
    prepared = {name: prepare(synthetic_log(rows), preset) for name, preset in ALL.items()}
    by_profile = interleaved(
        repeats,
        **{
            name: lambda name=name: through(engine, prepared[name][0], prepared[name][1])
            for name in ALL
        },
    )
    for name, rate in by_profile.items():
        emit(
            "ingest",
            peer="preset rayrec",
            workload=f"{workload}, preset {name}",
            value=rate,
            ratio=rate / by_profile["rayrec"],
            repeats=repeats,
            peer_rows_per_s=round(by_profile["rayrec"]),
        )


def any_tokens(engine: StreamEngine, *, rows: int, repeats: int) -> None:
    """Measure a log of strings, integers and floats, read as Parquet, and as CSV opened for the
    first time (later it is Parquet). Arrow reads the same columns and files.
    """
    parquet = any_log(rows, ".parquet")
    order, shared, preprocessor = prepare(parquet, schema=ANY)
    path = any_log(rows, ".csv")
    processor_s: dict[str, list[float]] = {"opened": [], "arrow": []}

    def opened() -> float:
        with tempfile.TemporaryDirectory() as cache:
            start = time.process_time()
            index, seconds = timed(lambda: indexed(path, ANY, ThreadEngine(2), cache))
            processor_s["opened"].append(time.process_time() - start)
        assert index.rows == rows
        return rows / seconds

    def arrow() -> float:
        start = time.process_time()
        _, seconds = timed(lambda: pyarrow.csv.read_csv(path))
        processor_s["arrow"].append(time.process_time() - start)
        return rows / seconds

    def arrow_parquet() -> float:
        columns = [*ANY.columns]
        return rows / timed(lambda: pyarrow.parquet.read_table(parquet, columns=columns))[1]

    rates = interleaved(
        repeats,
        ours=lambda: through(engine, order, shared),
        threads=lambda: through(ThreadEngine(2), order, InProcess(preprocessor)),
        kernels=lambda: without_ray(order, preprocessor),
        arrow_parquet=arrow_parquet,
    )
    # On their own: Ray's processes are busy for a while after each of its rounds
    rates |= interleaved(repeats, opened=opened, arrow=arrow)
    workload = f"any tokens, Parquet -> shuffled batches of {BATCH_SIZE}, 2 CPUs"
    for ours, peer, our_workload, peer_text in (
        ("ours", "kernels", workload, "the same kernels in two threads"),
        (
            "threads",
            "kernels",
            f"{workload}, threads of one process",
            "the same kernels in two threads",
        ),
        (
            "kernels",
            "arrow_parquet",
            "any tokens, Parquet -> model inputs, 2 threads",
            "pyarrow.parquet reads the columns",
        ),
        (
            "opened",
            "arrow",
            "any tokens, CSV opened for the first time, 2 threads",
            "pyarrow.csv reads the file",
        ),
    ):
        emit(
            "ingest",
            peer=peer_text,
            workload=our_workload,
            value=rates[ours],
            ratio=rates[ours] / rates[peer],
            repeats=repeats,
            peer_rows_per_s=round(rates[peer]),
        )
    processor = {name: statistics.median(seconds) for name, seconds in processor_s.items()}
    emit(
        "ingest",
        peer="pyarrow.csv reads the file",
        workload="any tokens, CSV opened for the first time, processor time",
        unit="rows_per_cpu_s",
        value=rows / processor["opened"],
        ratio=processor["arrow"] / processor["opened"],
        repeats=repeats,
    )


def memory(engine: StreamEngine, rows: int) -> None:
    peaks = {}
    for size in (rows // 4, rows):
        small, small_shared, _ = prepare(synthetic_log(size))
        time.sleep(1)
        with Peak() as peak:
            through(engine, small, small_shared)
        peaks[size] = peak.bytes
    emit(
        "ingest",
        peer="a quarter of the log",
        workload="peak private memory of all Ray processes",
        unit="bytes",
        value=float(peaks[rows]),
        ratio=peaks[rows] / peaks[rows // 4],
        repeats=1,
        rows=rows,
    )
