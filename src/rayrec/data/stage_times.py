"""Time of each stage of row production, measured in data tasks and reported where rows are used."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Final, TypeVar, final

import pyarrow as pa

from rayrec.host_resources import this_node

STAGES: Final = ("read", "parse", "encode")
"""Bytes from storage; text or columns to raw rows; raw rows to permuted model inputs. Preprocessed
rows have only read.
"""
_METADATA: Final = b"rayrec.stages"
_local = threading.local()
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class BlockTimes:
    """Times of producing a block of rows."""

    rows: int
    wall_s: Mapping[str, float]
    """Wall time by stage, in seconds."""
    cpu_s: Mapping[str, float]
    """Seconds by stage in which the thread computed."""
    queue_s: Mapping[str, float]
    """Seconds by stage in which the thread was runnable without a CPU. The rest is waiting for
    storage.
    """
    done_s: float
    """Unix time at which the rows were complete."""
    node: str = ""
    """Host name of the machine that made them."""
    node_id: str = ""
    """Beginning of the id of its Ray node. Empty without Ray."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Measure the time within the context, in this thread, for the enclosing `measured`. Costs
    nothing noticeable without one.
    """
    clock: _Clock | None = getattr(_local, "clock", None)
    if clock is None:
        yield
        return
    before = clock.now()
    try:
        yield
    finally:
        seconds = clock.times.setdefault(name, [0.0, 0.0, 0.0])
        for which, (start, stop) in enumerate(zip(before, clock.now(), strict=True)):
            seconds[which] += stop - start


@final
class _Clock:
    """Clock of the current thread. Opening the kernel's file is the slowest part of a measurement,
    so it stays open.
    """

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        """Wall, CPU and queue seconds by stage."""
        self._schedstat: int | None = None
        with suppress(OSError):
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def now(self) -> tuple[float, float, float]:
        """Return wall, CPU and queue seconds (0 if the kernel does not report queueing)."""
        queue_s = (
            0.0
            if self._schedstat is None
            else int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9
        )
        return time.perf_counter(), time.thread_time(), queue_s

    def close(self) -> None:
        if self._schedstat is not None:
            os.close(self._schedstat)


def measured(
    make: Callable[[], _Result], *, rows_of: Callable[[_Result], int]
) -> tuple[_Result, BlockTimes]:
    """Call `make` and return its result with the times of its stages."""
    _local.clock = clock = _Clock()
    try:
        result = make()
    finally:
        del _local.clock
        clock.close()
    wall_s, cpu_s, queue_s = (
        {name: seconds[which] for name, seconds in clock.times.items()} for which in range(3)
    )
    return result, BlockTimes(rows_of(result), wall_s, cpu_s, queue_s, time.time(), *this_node())


def with_times(table: pa.Table, times: BlockTimes) -> pa.Table:
    """Return the table with the times in its metadata, for `read_times`."""
    return table.replace_schema_metadata(
        {**(table.schema.metadata or {}), _METADATA: json.dumps(asdict(times)).encode()}
    )


def read_times(table: pa.Table) -> BlockTimes | None:
    """Return the times in a table's metadata; None if not measured."""
    text = (table.schema.metadata or {}).get(_METADATA)
    return None if text is None else BlockTimes(**json.loads(text))


@final
class StageTimes:
    """Thread-safe sum of the times of the blocks that one worker uses."""

    FIELDS: Final = (
        "cpus",
        "rows",
        "blocks",
        "waited_row_s",
        "waited_block_s",
        "new_nodes",
        *(f"{name}_{kind}" for name in STAGES for kind in ("wall_s", "cpu_s", "queue_s")),
    )
    """Values that `take` returns: CPUs of the pipeline; rows and blocks used; seconds that they
    waited after completion, in sum; seconds of each stage. Waiting seconds per interval are the
    mean backlog. `new_nodes` counts additions to `nodes`.
    """

    def __init__(self, *, cpus: float) -> None:
        """Start with zero sums. `cpus` is the number of CPUs that may produce this worker's rows at
        once.
        """
        self.begin_s = time.monotonic()
        self.nodes: Final[set[tuple[str, str]]] = set()
        """Nodes that made blocks; see `host_resources.this_node`."""
        self._cpus = cpus
        # Blocks arrive in the reader's thread, and the log takes their sums in another one.
        self._lock = threading.Lock()
        self._sums = self._zeros()

    def _zeros(self) -> dict[str, float]:
        return {**dict.fromkeys(self.FIELDS, 0.0), "cpus": self._cpus}

    def add(self, block: BlockTimes) -> None:
        """Add a block that is used from now on."""
        waited_s = max(0.0, time.time() - block.done_s)  # Clocks of two nodes differ
        with self._lock:
            sums = self._sums
            sums["rows"] += block.rows
            sums["blocks"] += 1
            sums["waited_row_s"] += waited_s * block.rows
            sums["waited_block_s"] += waited_s
            node = block.node, block.node_id
            sums["new_nodes"] += node not in self.nodes
            self.nodes.add(node)
            for name in STAGES:
                for kind in ("wall_s", "cpu_s", "queue_s"):
                    sums[f"{name}_{kind}"] += getattr(block, kind).get(name, 0.0)

    def take(self) -> list[float]:
        """Return the sums since the last call, in the order of FIELDS."""
        with self._lock:
            sums, self._sums = self._sums, self._zeros()
        return list(sums.values())
