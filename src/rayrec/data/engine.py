"""Engines that run data tasks: the same functions over the same items, in threads or on a
cluster.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, final, runtime_checkable

import pyarrow as pa

from rayrec import storage
from rayrec.config import Config
from rayrec.storage.range_reader import in_order

_Value = TypeVar("_Value")
_Shared_co = TypeVar("_Shared_co", covariant=True)
_Item = TypeVar("_Item")
Task = Callable[[Any], pa.Table]
"""Picklable function of one item."""
Tables = Generator[pa.Table, None, None]


@final
class StopToken:
    """Stop request to the readers of one attempt in one process. Once it is set, they stop waiting
    for data tasks that may never run. A pickled token arrives as a new one, because every worker
    learns of the request itself.
    """

    def __init__(self) -> None:
        # An event: readers wait for it with a timeout, instead of polling a flag.
        self._event = threading.Event()

    def __reduce__(self) -> tuple[type[StopToken], tuple[()]]:
        return StopToken, ()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds. Returns whether the token is set."""
        return self._event.wait(timeout_s)


class Engine(Protocol):
    """Parallel execution of one function over many items. All engines produce byte-identical
    results in the items' order.
    """

    def run(
        self, name: str, function: Task, items: Sequence[Any], *, block_bytes: int = 16 << 20
    ) -> Iterator[pa.Table]:
        """Run the function over the items and yield its results in their order. `function` and
        items are picklable; `block_bytes` is the expected size of a result. Raises the InputError
        of a task unchanged.
        """


class Shared(Protocol[_Shared_co]):
    """Picklable value that all processes of an engine can read."""

    def get(self) -> _Shared_co: ...


@dataclass(frozen=True)
class InProcess(Generic[_Value]):
    value: _Value

    def get(self) -> _Value:
        return self.value


@runtime_checkable
class StreamEngine(Engine, Protocol):
    """Engine whose results training reads while its tasks run."""

    @property
    def cpus(self) -> float:
        """CPUs that the tasks of one stream use at once."""

    @property
    def stop(self) -> StopToken:
        """Token that ends the readers' waits for tasks."""

    def stream(
        self,
        name: str,
        function: Task,
        items: Iterable[Any],
        *,
        block_bytes: int,
        prefetch_blocks: int,
    ) -> Tables:
        """Run like `run`, but only `prefetch_blocks` results ahead of the reader, until it closes
        the generator.
        """

    def share(self, value: _Value) -> Shared[_Value]:
        """Make a value readable in all tasks and workers, stored once per machine."""


@dataclass(frozen=True)
class TaskContext:
    """Engine, cache folder, and receivers of notes and progress."""

    engine: Engine
    cache_folder: str | None
    """Folder for indices and unpacked files. None: indices are not cached."""
    note: Callable[[str], None] = lambda text: None
    """Show one line to the user."""
    progress: Callable[[str, int, int | None], None] = lambda name, done, total: None
    """Report (name, amount done, total or None)."""
    warn: Callable[[str], None] = lambda text: None
    """Show one line to the user, even with -q."""


@dataclass(frozen=True, kw_only=True)
class TaskPlacement(Config):
    """Placement of data tasks and the resources of one pipeline."""

    num_cpus: float = 1.0
    """CPUs reserved by one task."""
    memory_bytes: int | None = None
    """Memory reserved by one task, in bytes. None reserves none."""
    max_cpus: float | None = None
    """Maximum CPUs that all tasks of this pipeline use at once. None leaves it to Ray Data. A
    stream submits twice as many tasks, so that no CPU waits for the next one; on idle CPUs, these
    run too.
    """
    max_object_store_bytes: int | None = None
    """Maximum object-store memory that this pipeline fills ahead of its reader, in bytes. None
    leaves it to Ray Data.
    """
    label_selector: dict[str, str] | None = None
    """Ray node labels required of the nodes that run tasks."""
    max_outage_s: float | None = None
    """Maximum storage outage that a task waits for, in seconds. None: the limit of its process."""


@dataclass(frozen=True)
class ThreadEngine:
    """`StreamEngine` with threads of this process, which needs no cluster: the kernels and Arrow
    release the GIL.
    """

    num_threads: int
    max_outage_s: float | None = None
    """Maximum storage outage that a task waits for, in seconds. None: the limit of the caller."""
    stop: StopToken = field(default_factory=StopToken, compare=False)

    @property
    def cpus(self) -> float:
        return float(self.num_threads)

    def run(
        self, name: str, function: Task, items: Sequence[Any], *, block_bytes: int = 16 << 20
    ) -> Iterator[pa.Table]:
        return self.stream(
            name, function, items, block_bytes=block_bytes, prefetch_blocks=self.num_threads
        )

    def stream(
        self,
        name: str,
        function: Task,
        items: Iterable[Any],
        *,
        block_bytes: int,
        prefetch_blocks: int,
    ) -> Tables:
        with (
            contextlib.nullcontext()
            if self.max_outage_s is None
            else storage.retry_timeout(self.max_outage_s)
        ):
            return in_order(
                function, items, name=name, num_threads=self.num_threads, prefetch=prefetch_blocks
            )

    def share(self, value: _Value) -> Shared[_Value]:
        return InProcess(value)


def grouped(
    items: Iterable[_Item],
    size_of: Callable[[_Item], int],
    *,
    max_bytes: int,
    max_items: int = sys.maxsize,
    overflows: bool = False,
) -> list[list[_Item]]:
    """Combine consecutive items into groups of up to `max_items` items and `max_bytes` in total. If
    `overflows`, the last item of a group may exceed `max_bytes`.
    """
    groups: list[list[_Item]] = []
    remaining = 0
    for item in items:
        size = size_of(item)
        is_full = remaining <= 0 if overflows else size > remaining
        if not groups or is_full or len(groups[-1]) == max_items:
            groups.append([])
            remaining = max_bytes
        groups[-1].append(item)
        remaining -= size
    return groups
