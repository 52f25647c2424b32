"""Benchmark of counting categories through Ray, compared with Ray Data, Spark on RayDP, and pyarrow
in one process.

Also measures counting with limited memory, and lookups.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import ray
from logs import synthetic_log
from peers.ray_groupby import DENSE, SPARSE, distinct_tokens
from rows import attempt, emit, interleaved, note, part, timed
from subprocesses import check_ended

import rayrec
from rayrec import storage
from rayrec.cluster import connection
from rayrec.data.encoding.counts import TASK_BYTES, CountingIndexer, CountingJob, count_log
from rayrec.data.encoding.encoder import find_ids
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import SparseColumn
from rayrec.data.engine import TaskContext, TaskPlacement
from rayrec.data.log_source import CHUNK_BYTES, index_log
from rayrec.data.logs.index import LogIndex, SegmentRange, numbered
from rayrec.data.logs.text_log import cut, index_chunk, read_segments
from rayrec.datasets.criteo import SCHEMA
from rayrec.ingest.ray_engine import RayEngine
from rayrec.ingest.spark_engine import environment
from rayrec.native import keep_freed_memory
from rayrec.schema import Schema
from rayrec.storage import cache

SEGMENT_BYTES = 2 << 20
ENGINE = RayEngine(TaskPlacement())
WARM_FILES = storage.list_files(synthetic_log(1000)) * 4


def split_parts(index: LogIndex) -> list[SegmentRange]:
    return [SegmentRange(segment, 0, segment.rows) for segment in index.segments]


def warm() -> None:
    """Start Ray's workers, which end in a pause and take seconds to start."""
    for _ in range(2):
        index_and_count(WARM_FILES, task_bytes=1)


def index_and_count(files: Sequence[storage.File], *, task_bytes: int = TASK_BYTES) -> LogIndex:
    with CountingIndexer(
        CountingJob(SCHEMA), lambda index: (0, index.rows), task_bytes=task_bytes
    ) as indexer:
        index = indexer.index(
            files, SCHEMA, segment_bytes=SEGMENT_BYTES, context=TaskContext(ENGINE, None)
        )
        indexer.counts(index, engine=ENGINE).close()
        return index


def one_pass_rate(path: str) -> float:
    """Measure the rows/s of indexing and counting in one pass."""
    warm()
    files = storage.list_files(path)
    index, seconds = timed(lambda: index_and_count(files))
    return index.rows / seconds


def two_passes_rate(path: str) -> float:
    """Measure the rows/s of the index pass and the counting pass."""

    warm()

    def count() -> int:
        index = index_log(
            storage.list_files(path),
            SCHEMA,
            segment_bytes=SEGMENT_BYTES,
            context=TaskContext(ENGINE, None),
        )
        return count_log(CountingJob(SCHEMA), split_parts(index), engine=ENGINE).rows

    rows, seconds = timed(count)
    return rows / seconds


def kernels_rate(path: str) -> float:
    """Measure the rows/s of reading, parsing and counting on one core, without Ray: the ceiling of
    a core.
    """
    keep_freed_memory()
    entries = []
    for chunk in cut(storage.list_files(path), CHUNK_BYTES)[:8]:
        entries += index_chunk(chunk, SCHEMA, SEGMENT_BYTES)[0]
    segments = numbered(entries)
    counts = CountingJob(SCHEMA).empty()

    def count() -> int:
        for segment in segments:
            raw = read_segments([segment], SCHEMA)
            counts.add_source(raw, segment.path)
            counts.add_rows(raw, segment.first_row)
        return counts.rows

    rows, seconds = timed(count)
    return rows / seconds


def groupby_rate(path: str, rows: int) -> float:
    distinct_tokens(WARM_FILES[0].path)
    _, seconds = timed(lambda: distinct_tokens(path))
    return rows / seconds


def arrow_rate(path: str, rows: int) -> float:
    """Measure the rows/s of pyarrow's reader and value_counts on one core, without Ray."""
    types = {name: pa.int64() for name in ["label", *DENSE]} | {
        name: pa.string() for name in SPARSE
    }

    def count() -> int:
        table = arrow_csv.read_csv(
            path,
            read_options=arrow_csv.ReadOptions(
                column_names=["label", *DENSE, *SPARSE], use_threads=False
            ),
            parse_options=arrow_csv.ParseOptions(delimiter="\t"),
            convert_options=arrow_csv.ConvertOptions(column_types=types),
        )
        return sum(len(table.column(name).value_counts()) for name in SPARSE)

    _, seconds = timed(count)
    return rows / seconds


def lookup_ns(entries: int) -> float:
    """Measure the nanoseconds per lookup in a table of `entries` tokens, on one core, best of
    five.
    """
    random = np.random.default_rng(0)
    tokens = (random.permutation(entries).astype(np.uint64) * 2654435761 % (1 << 32)).astype(
        np.uint32
    )
    tokens = np.unique(tokens)
    preprocessor = Preprocessor(
        preset="benchmark",
        schema=Schema(tokens="hexadecimal", label=None, dense=(), sparse=("token",)),
        dense=(),
        sparse=(SparseColumn(len(tokens) + 2, len(tokens), 2, 0, 1),),
        tokens=tokens,
        constants={},
    )
    queries = random.choice(tokens, 4_000_000)
    slots = preprocessor.slots
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        ids = find_ids(queries, slots, 0)
        best = min(best, time.perf_counter() - start)
    assert (tokens[ids - 2] == queries).all()
    return best / len(queries) * 1e9


WIDE = Schema(tokens="hexadecimal", label=None, dense=(), sparse=("token",))


def wide_log(distinct: int) -> str:
    """Generate a log with one column once per machine and return its path. Contains every token
    once, and half of them twice.
    """
    path = synthetic_log(1000).replace("kaggle-1000/train.txt", f"wide-{distinct}.txt")
    if not os.path.exists(path):
        order = np.random.default_rng(0).permutation(distinct + distinct // 2) % distinct
        tokens = order.astype(np.uint32) * np.uint32(2654435761)
        digits = np.frombuffer(b"0123456789abcdef", np.uint8)
        with storage.writing(path) as local, open(local, "wb") as file:
            for start in range(0, len(tokens), 1 << 20):
                part = tokens[start : start + (1 << 20), None] >> np.arange(
                    28, -4, -4, dtype=np.uint32
                )
                lines = np.full((len(part), 9), ord("\n"), np.uint8)
                lines[:, :8] = digits[part & 15]
                file.write(lines.tobytes())
    return path


class PeakMemory:
    """Peak of this process's own memory (not what it shares with the object store) over what it had
    at the start.
    """

    def __enter__(self) -> PeakMemory:
        ctypes.CDLL(None).malloc_trim(0)  # or freed memory that is used again would not count
        self._stop = threading.Event()
        self.start_bytes = self.peak_bytes = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self.peak_bytes - self.start_bytes

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, self._now())

    @staticmethod
    def _now() -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def bounded_counting(distinct: int, memory_bytes: int) -> None:
    """Count more distinct tokens than the memory limit allows, and again without a limit."""
    index = index_log(
        storage.list_files(wide_log(distinct)),
        WIDE,
        segment_bytes=SEGMENT_BYTES,
        context=TaskContext(ENGINE, None),
    )
    parts = split_parts(index)
    counted: dict[str, np.ndarray] = {}
    for min_count in (2, 3):
        for name, bound in (("bounded", memory_bytes), ("unbounded", None)):
            start = time.perf_counter()
            with (
                PeakMemory() as peak,
                count_log(CountingJob(WIDE), parts, engine=ENGINE, memory_bytes=bound) as counts,
            ):
                tokens, amounts, _ = counts.frequent_tokens(0, min_count)
                num_distinct = counts.num_distinct(0)
                spill = counts.spill
            seconds = time.perf_counter() - start
            order = np.argsort(tokens)
            counted[name] = np.stack([tokens[order], amounts[order]])
            del counts, tokens, amounts, order
            assert num_distinct == distinct
            if bound is None:
                assert (counted["bounded"] == counted["unbounded"]).all()
            emit(
                "vocabulary",
                peer=None,
                workload=(
                    f"{distinct:,} distinct tokens of one column, kept from count {min_count} on, "
                    f"{name}"
                ),
                unit="peak_driver_mb",
                value=peak.bytes / 2**20,
                ratio=None,
                repeats=1,
                memory_mb=None if bound is None else bound / 2**20,
                kept=counted[name].shape[1],
                spilled_mb=round(spill.written_bytes / 2**20) if spill else 0,
                rows_per_s=round(index.rows / seconds),
            )


def raydp_rate(path: str, rows: int, rounds: int) -> float:
    """Measure the rows/s of Spark's groupBy on one executor of two cores inside the Ray cluster,
    without start-up and first round.
    """
    python = environment("raydp", folder=os.path.join(cache.folder(), "environments"), note=note)
    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(os.path.dirname(__file__), "peers", "raydp_groupby.py")
        source = os.path.dirname(os.path.dirname(rayrec.__file__))
        done = subprocess.run(
            [python, script, ray.get_runtime_context().gcs_address, path, str(rounds + 1)],
            capture_output=True,
            text=True,
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": source,
                "PYSPARK_PYTHON": python,
                "RAYDP_FOLDER": folder,
            },
        )
    check_ended("raydp_groupby.py", done.returncode, done.stderr)
    return rows / statistics.median(json.loads(done.stdout.strip().splitlines()[-1])[1:])


def main(*, quick: bool) -> None:
    connection.connect(None, num_cpus=2, object_store_bytes=2 << 30, log_to_driver=False)
    rows = 200_000 if quick else 800_000
    path = synthetic_log(rows)
    repeats = 1 if quick else 3
    rates = interleaved(
        repeats,
        ours=lambda: one_pass_rate(path),
        two_passes=lambda: two_passes_rate(path),
        kernels=lambda: 2 * kernels_rate(path),
        groupby=lambda: groupby_rate(path, rows),
        arrow=lambda: arrow_rate(path, rows),
    )
    rates["raydp"] = attempt("raydp", lambda: raydp_rate(path, rows, repeats))
    workload = f"index and count 26 columns of {rows:,} Criteo rows, 2 CPUs"
    for peer, name in (
        ("Ray Data groupby", "groupby"),
        ("Spark groupBy on RayDP, start-up left out", "raydp"),
        ("pyarrow on one core, without Ray", "arrow"),
        ("ours in two passes", "two_passes"),
        ("our kernels without Ray: read, parse, count, one core, times two", "kernels"),
    ):
        emit(
            "vocabulary",
            peer=peer,
            workload=workload,
            value=rates["ours"],
            ratio=rates["ours"] / rates[name],
            repeats=repeats,
            peer_rows_per_s=round(rates[name]),
        )
    if not quick:
        path = synthetic_log(5_000_000)
        rates = interleaved(
            repeats, ours=lambda: one_pass_rate(path), kernels=lambda: 2 * kernels_rate(path)
        )
        emit(
            "vocabulary",
            peer="our kernels without Ray: read, parse, count, one core, times two",
            workload="index and count 26 columns of 5,000,000 Criteo rows, 2 CPUs",
            value=rates["ours"],
            ratio=rates["ours"] / rates["kernels"],
            repeats=repeats,
            peer_rows_per_s=round(rates["kernels"]),
        )
    with part("vocabulary", "counting in bounded memory"):
        bounded_counting(1_000_000 if quick else 8_000_000, 32 << 20)
    for entries in (40_000,) if quick else (40_000, 40_000_000):
        nanoseconds = attempt("lookup", partial(lookup_ns, entries))
        emit(
            "vocabulary",
            peer=None,
            workload=f"lookup, {entries:,} tokens",
            unit="ns",
            value=nanoseconds,
            ratio=None,
            repeats=5,
        )
    ray.shutdown()
