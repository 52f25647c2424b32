"""How long each stage of making rows takes: measured where the rows are made, told where they are used."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Final, TypeVar, final

import pyarrow as pa

STAGES: Final = ("read", "parse", "encode")
"""Bytes from storage; text or columns to raw rows; raw rows to model inputs, permuted. Preprocessed rows are only read."""
_METADATA: Final = b"rayrec.stages"
_local = threading.local()
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class BlockTimes:
    """What it took to make a block of rows."""

    rows: int
    wall_s: Mapping[str, float]
    """By stage."""
    cpu_s: Mapping[str, float]
    """Of it, seconds in which the thread computed."""
    queue_s: Mapping[str, float]
    """Of it, seconds in which it could have computed and had no CPU; for what is left it waited, which is for storage."""
    done_s: float
    """Unix time when the rows were made."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Counts what happens within it, in this thread, for the `measured` around it; costs nothing to speak of without one."""
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
    """Of the thread that makes it. Opening the kernel's file takes longer than all else of a look, so it stays open meanwhile."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        """Seconds gone, computed and queued, by stage."""
        self._schedstat: int | None = None
        with suppress(OSError):
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def now(self) -> tuple[float, float, float]:
        """Seconds gone, computed, and queued for a CPU (0 where the kernel does not tell)."""
        queue_s = 0.0 if self._schedstat is None else int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9
        return time.perf_counter(), time.thread_time(), queue_s

    def close(self) -> None:
        if self._schedstat is not None:
            os.close(self._schedstat)


def measured(make: Callable[[], _Result], *, rows_of: Callable[[_Result], int]) -> tuple[_Result, BlockTimes]:
    """What `make` returns, and the times of the stages in it."""
    _local.clock = clock = _Clock()
    try:
        made = make()
    finally:
        del _local.clock
        clock.close()
    wall_s, cpu_s, queue_s = ({name: seconds[which] for name, seconds in clock.times.items()} for which in range(3))
    return made, BlockTimes(rows_of(made), wall_s, cpu_s, queue_s, time.time())


def with_times(table: pa.Table, times: BlockTimes) -> pa.Table:
    """The table, the times in its metadata, as `times_of` finds them."""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), _METADATA: json.dumps(asdict(times)).encode()})


def times_of(table: pa.Table) -> BlockTimes | None:
    """None where nobody measured."""
    text = (table.schema.metadata or {}).get(_METADATA)
    return None if text is None else BlockTimes(**json.loads(text))


@final
class StageAccount:
    """Adds up the blocks that one worker takes in use. For any threads."""

    FIELDS: Final = (
        "cpus",
        "rows",
        "blocks",
        "waited_row_s",
        "waited_block_s",
        *(f"{name}_{kind}" for name in STAGES for kind in ("wall_s", "cpu_s", "queue_s")),
    )
    """What `take` gives: CPUs of the pipeline; rows and blocks taken in use; the seconds that rows and blocks lay ready,
    summed over them (by the length of an interval this is the mean backlog of it); seconds of each stage."""

    def __init__(self, *, cpus: float) -> None:
        """`cpus`: that may make this worker's rows at once."""
        self.begin_s = time.monotonic()
        self._cpus = cpus
        self._lock = threading.Lock()
        self._sums = self._nothing()

    def _nothing(self) -> dict[str, float]:
        return {**dict.fromkeys(self.FIELDS, 0.0), "cpus": self._cpus}

    def add(self, block: BlockTimes) -> None:
        """A block is taken in use now."""
        waited_s = max(0.0, time.time() - block.done_s)  # clocks of two nodes differ
        with self._lock:
            sums = self._sums
            sums["rows"] += block.rows
            sums["blocks"] += 1
            sums["waited_row_s"] += waited_s * block.rows
            sums["waited_block_s"] += waited_s
            for name in STAGES:
                for kind in ("wall_s", "cpu_s", "queue_s"):
                    sums[f"{name}_{kind}"] += getattr(block, kind).get(name, 0.0)

    def take(self) -> list[float]:
        """What came together since the last call, in the order of FIELDS."""
        with self._lock:
            sums, self._sums = self._sums, self._nothing()
        return list(sums.values())
