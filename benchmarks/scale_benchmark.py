"""Benchmark of time and memory with many tiny files in a slow store, many categories and many row
groups, with limits.

Every case runs in a separate process, to measure its peak resident memory.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.engines import LoopEngine
from hosts.slow_store import SlowStore
from rows import emit, note, part
from subprocesses import check_ended

from rayrec.data.encoding.counts import count_log
from rayrec.data.encoding.presets import ALL
from rayrec.data.engine import TaskContext
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import LogIndex, SegmentRange
from rayrec.data.logs.reading import read_raw
from rayrec.schema import Schema

CLICKS = Schema(label="clicked", dense=("price",), sparse=("shop",), tokens="any")
LATENCY_S = 0.02
MEMORY_BYTES = 2 << 30
"""Allowed to every case: what the driver of a run may take."""


def opened(path: str, cache: str, *, segment_bytes: int = 2 << 20) -> LogIndex:
    return LogSource.at(path).index(
        CLICKS, segment_bytes=segment_bytes, context=TaskContext(LoopEngine(), cache)
    )


def clicks(rows: int, first: int = 0) -> pa.Table:
    numbers = np.arange(first, first + rows)
    shops = pa.array(numbers).cast(pa.string())
    return pa.table({"clicked": numbers % 2, "price": numbers.astype(np.float64), "shop": shops})


Result = tuple[str, float, float]
"""Name, value and limit of a measurement."""


def many_files(folder: Path, size: int) -> Iterator[Result]:
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


def many_row_groups(folder: Path, size: int) -> Iterator[Result]:
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


def many_categories(folder: Path, size: int) -> Iterator[Result]:
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


CASES: dict[str, tuple[Callable[[Path, int], Iterator[Result]], int, int]] = {
    "files": (many_files, 1_000, 100_000),
    "row groups": (many_row_groups, 1_000, 10_000),
    "categories": (many_categories, 1_000_000, 100_000_000),
}
"""Function, size with --quick, and size without, of each case."""


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def run(name: str, size: int) -> list[Result]:
    """Run one case in this process."""
    with tempfile.TemporaryDirectory() as folder:
        results = list(CASES[name][0](Path(folder), size))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [*results, ("peak_rss_bytes", peak_bytes, MEMORY_BYTES)]


def main(*, quick: bool = False) -> None:
    for name, (_, small, large) in CASES.items():
        size = small if quick else large
        note(f"{size:,} {name}")
        with part("scale", f"{size:,} {name}"):
            for measured, value, allowed in _run_separately(name, size):
                unit = measured.rpartition("_")[2] if "_" in measured else "count"
                emit(
                    f"scale: {size:,} {name}: {measured}",
                    peer=None,
                    workload=f"{size:,} {name}",
                    unit=unit,
                    value=value,
                    ratio=None,
                    repeats=1,
                    allowed=allowed,
                    within=value <= allowed,
                )


def _run_separately(name: str, size: int) -> Sequence[Result]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, name, str(size)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    check_ended(f"scale_benchmark.py {name}", result.returncode, result.stderr)
    return [tuple(row) for row in json.loads(result.stdout)]


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]))))
