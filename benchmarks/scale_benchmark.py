"""Benchmark of time and memory with many tiny files in a slow store, many categories, many row
groups and many events, with limits.

Every case runs in a separate process, to measure its peak resident memory.
"""

import functools
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from builders.engines import LoopEngine
from hosts.slow_store import SlowStore
from rows import emit, note, part
from subprocesses import check_ended

from rayrec.data.encoding.counts import count_log
from rayrec.data.encoding.presets import ALL
from rayrec.data.engine import TaskContext, ThreadEngine
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import LogIndex, SegmentRange
from rayrec.data.logs.reading import read_raw
from rayrec.data.sequences.build import EventsLog, build
from rayrec.schema import Schema, SequenceColumns

CLICKS = Schema(label="clicked", dense=("price",), sparse=("shop",), tokens="any")
LATENCY_S = 0.02
EVENTS = Schema(label=None, sequence=SequenceColumns(user="user", item="item", time="time"))
MEMORY_BYTES = 2 << 30
"""Allowed to most cases: what the driver of a run may take."""
LISTS_BYTES = 4 << 30
"""Allowed to lists of events."""
_TABLE_EVENTS = 1 << 20


def opened(path: str, cache: str, *, segment_bytes: int = 2 << 20) -> LogIndex:
    return LogSource.at(path).index(
        CLICKS, segment_bytes=segment_bytes, context=TaskContext(LoopEngine(), cache)
    )


def clicks(rows: int, first: int = 0) -> pa.Table:
    numbers = np.arange(first, first + rows)
    shops = pa.array(numbers).cast(pa.string())
    return pa.table({"clicked": numbers % 2, "price": numbers.astype(np.float64), "shop": shops})


class Result(NamedTuple):
    """Name, value and limit of a measurement."""

    name: str
    value: float
    limit: float
    """The most, or of a rate the least share of the peer's."""
    peer: float | None = None
    """Rate of a peer."""

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.value / self.peer

    @property
    def is_within(self) -> bool:
        return self.value <= self.limit if self.ratio is None else self.ratio >= self.limit


def many_files(folder: Path, size: int) -> Iterator[tuple[Any, ...]]:
    """Measure `size` Parquet files of three rows: first open, open by a resumed run, and reading
    one block of 256 files.
    """
    log = folder / "log"
    log.mkdir()
    pq.write_table(clicks(3), folder / "one")
    content = (folder / "one").read_bytes()
    for number in range(size):
        (log / f"part-{number}.parquet").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        store = SlowStore(LATENCY_S).installed(patch)
        path = f"slow://{log}"
        cache = f"slow://{folder}/cache"
        took_s, index = timed(lambda: opened(path, cache))
        # Three calls a file, 32 at a time, and the time of the calls themselves.
        yield "start_s", took_s, 3 * size * (LATENCY_S / 16 + 0.002) + 10
        yield "start_calls", store.calls.total(), 3 * size + 30
        store.reset()
        took_s, resumed = timed(lambda: opened(path, cache))
        assert resumed == index
        yield "resume_s", took_s, 5 + size / 10_000
        yield "resume_calls", store.calls.total(), 12
        store.reset()
        took_s, _ = timed(lambda: read_raw(index.segments[:256], CLICKS))
        yield "block_s", took_s, 256 * 2 * LATENCY_S / 8 + 1


def many_row_groups(folder: Path, size: int) -> Iterator[tuple[Any, ...]]:
    """Measure a file of `size` row groups of ten rows: open, then read every segment."""
    with pq.ParquetWriter(folder / "one.parquet", clicks(1).schema) as writer:
        for number in range(size):
            writer.write_table(clicks(10, 10 * number))
    took_s, index = timed(
        lambda: opened(str(folder / "one.parquet"), str(folder / "cache"), segment_bytes=4096)
    )
    yield "start_s", took_s, 0.01 * size + 5
    took_s, _ = timed(lambda: [read_raw([segment], CLICKS) for segment in index.segments])
    yield "read_s", took_s, 0.01 * size + 5


def many_categories(folder: Path, size: int) -> Iterator[tuple[Any, ...]]:
    """Count `size` distinct categories in files of two million rows, with 256 MiB for counts."""
    log = folder / "log"
    log.mkdir()
    rows = 2_000_000
    for number, first in enumerate(range(0, size, rows)):
        pq.write_table(
            clicks(min(rows, size - first), first),
            log / f"part-{number}.parquet",
            row_group_size=50_000,
        )
    index = opened(str(log), str(folder / "cache"))
    parts = [SegmentRange(segment, 0, segment.rows) for segment in index.segments]

    def count() -> int:
        with count_log(
            ALL["rayrec"].counting(CLICKS),
            parts,
            engine=LoopEngine(),
            memory_bytes=256 << 20,
            spill_folder=str(folder),
        ) as counts:
            return counts.rows

    took_s, counted = timed(count)
    assert counted == size
    yield "count_s", took_s, size / 200_000 + 10


def event_tables(size: int, form: str) -> Iterator[pa.Table]:
    """Yield events in order of time, 100 a user, whose users and items are integers or text."""
    random = np.random.default_rng(0)
    for first in range(0, size, _TABLE_EVENTS):
        count = min(_TABLE_EVENTS, size - first)
        users = pa.array(random.integers(0, max(size // 100, 1), count))
        items = pa.array(np.minimum(random.exponential(4000, count).astype(np.int64), 50_000))
        if form == "text":
            users = pc.binary_join_element_wise("user-", users.cast(pa.string()), "")
            items = pc.binary_join_element_wise("item-", items.cast(pa.string()), "")
        times = 1_500_000_000 + np.arange(first, first + count) * (200_000_000 // size)
        yield pa.table({"user": users, "item": items, "time": times})


def many_events(folder: Path, size: int, *, form: str) -> Iterator[tuple[Any, ...]]:
    """Measure lists of `size` events by two threads, and their ingest: the index, and reading all
    rows.
    """
    tables = event_tables(size, form)
    first = next(tables)
    path = str(folder / ("events.csv" if form == "csv" else "events.parquet"))
    writer = pyarrow.csv.CSVWriter if form == "csv" else pq.ParquetWriter
    with writer(path, first.schema) as file:
        for table in itertools.chain([first], tables):
            file.write_table(table)
    context = TaskContext(ThreadEngine(2), str(folder / "cache"))

    def ingest() -> int:
        index = LogSource.at(path).index(EVENTS.events, segment_bytes=2 << 20, context=context)
        with ThreadPoolExecutor(2) as threads:
            read = threads.map(lambda each: read_raw([each], EVENTS.events).rows, index.segments)
            return sum(read)

    def lists() -> int:
        log = EventsLog(path, tuple(LogSource.at(path).event_files(EVENTS)), EVENTS)
        return build(log, out=str(folder / "lists"), context=context)["events"]

    ingest_s, read = timed(ingest)
    lists_s, built = timed(lists)
    assert read == built == size
    yield "rows_per_s", size / lists_s, 0.5, size / ingest_s


CASES: dict[str, tuple[Callable[[Path, int], Iterator[tuple[Any, ...]]], int, int, int]] = {
    "files": (many_files, 1_000, 100_000, MEMORY_BYTES),
    "row groups": (many_row_groups, 1_000, 10_000, MEMORY_BYTES),
    "categories": (many_categories, 1_000_000, 100_000_000, MEMORY_BYTES),
    "events": (
        functools.partial(many_events, form="integers"),
        1_000_000,
        100_000_000,
        LISTS_BYTES,
    ),
    "events of text": (
        functools.partial(many_events, form="text"),
        1_000_000,
        100_000_000,
        LISTS_BYTES,
    ),
    "events in CSV": (
        functools.partial(many_events, form="csv"),
        1_000_000,
        100_000_000,
        LISTS_BYTES,
    ),
}
"""Function, size with --quick, and size without, and bytes of memory of each case."""


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def run(name: str, size: int) -> list[Result]:
    """Run one case in this process."""
    function, *_, memory_bytes = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        results = [Result(*each) for each in function(Path(folder), size)]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [*results, Result("peak_rss_bytes", peak_bytes, memory_bytes)]


def main(*, quick: bool = False) -> None:
    for name, (_, small, large, _) in CASES.items():
        size = small if quick else large
        note(f"{size:,} {name}")
        with part("scale", f"{size:,} {name}"):
            for result in _run_separately(name, size):
                unit = result.name.rpartition("_")[2] if "_" in result.name else "count"
                peer_fields = {}
                if result.peer is not None:
                    unit = result.name
                    peer_fields = {f"peer_{unit}": round(result.peer)}
                emit(
                    f"scale: {size:,} {name}: {result.name}",
                    peer=None if result.peer is None else "ingest of the same columns",
                    workload=f"{size:,} {name}",
                    unit=unit,
                    value=result.value,
                    ratio=result.ratio,
                    repeats=1,
                    allowed=result.limit,
                    within=result.is_within,
                    **peer_fields,
                )


def _run_separately(name: str, size: int) -> Sequence[Result]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, name, str(size)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    check_ended(f"scale_benchmark.py {name}", result.returncode, result.stderr)
    return [Result(*row) for row in json.loads(result.stdout)]


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]))))
