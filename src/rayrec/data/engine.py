"""What runs data tasks: the same functions over the same items, whatever distributes them."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from rayrec import storage
from rayrec.config import Config

STOP_ASKED: Final = threading.Event()
"""Set in a worker's process when its run is asked to stop: from then on it does not wait for data tasks that may never run."""
_Value = TypeVar("_Value")
_Held_co = TypeVar("_Held_co", covariant=True)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Engine(Protocol):
    """Runs one function over many items in parallel. Since all engines run the same functions and return their results in
    the items' order, what is made with one is byte for byte what another makes."""

    def run(
        self, name: str, function: Callable[[Any], pa.Table], items: Sequence[Any], *, block_bytes: int = 16 << 20
    ) -> Iterator[pa.Table]:
        """The results, in the order of the items. `function` and items are picklable; `block_bytes` is the expected size of
        a result. Raises the InputError of a task as it was raised there."""
        ...


class Shared(Protocol[_Held_co]):
    """A value that all processes of an engine can read; picklable."""

    def get(self) -> _Held_co: ...


@dataclass(frozen=True)
class InProcess(Generic[_Value]):
    """A value shared by the threads of one process: the value itself."""

    value: _Value

    def get(self) -> _Value:
        return self.value


@runtime_checkable
class StreamEngine(Engine, Protocol):
    """An engine that training reads from while its tasks run."""

    @property
    def cpus(self) -> float:
        """CPUs that the tasks of one stream hold at once."""
        ...

    def stream(
        self, name: str, function: Callable[[Any], pa.Table], items: Iterable[Any], *, block_bytes: int, prefetch_blocks: int
    ) -> Generator[pa.Table, None, None]:
        """As `run`, for a reader that may be slower than the tasks: they run ahead of it by `prefetch_blocks` results and what
        they are at, and end when it closes the generator."""
        ...

    def share(self, value: _Value) -> Shared[_Value]:
        """Makes a value readable in all tasks and workers, stored once a machine."""
        ...


def _ignore(*_: object) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class TaskContext:
    """Who runs tasks, where caches lie, and whom notes and progress go to."""

    engine: Engine
    cache_folder: str | None
    """Of indices and unpacked files; None: indices are not kept."""
    note: Callable[[str], None] = _ignore
    """Tells the user one line."""
    progress: Callable[[str, int, int | None], None] = _ignore
    """Shows a named amount done of an amount in all."""


@dataclass(frozen=True, kw_only=True)
class TaskPlacement(Config):
    """Where data tasks run and how much of the cluster one pipeline of them may use."""

    num_cpus: float = 1.0
    """CPUs one task reserves."""
    max_cpus: float | None = None
    """CPUs that all tasks of this pipeline may hold at once; None leaves it to Ray Data. A stream submits twice as many tasks, so
    that no CPU waits for the next one: while other CPUs are idle, these run too."""
    max_object_store_bytes: int | None = None
    """Object-store memory this pipeline may fill ahead of its reader; None leaves it to Ray Data."""
    label_selector: dict[str, str] | None = None
    """Ray node labels a task's node must have."""
    max_outage_s: float | None = None
    """Seconds for which a task waits for a store that is out; None: as long as its process would by itself."""


@dataclass(frozen=True)
class ThreadEngine:
    """Runs data tasks in threads of this process, which needs no cluster: the kernels and Arrow release the GIL. See `Engine` and
    `StreamEngine`."""

    num_threads: int
    max_outage_s: float | None = None
    """Seconds for which a task waits for a store that is out; None: as long as the caller would."""

    @property
    def cpus(self) -> float:
        return float(self.num_threads)

    def run(
        self, name: str, function: Callable[[Any], pa.Table], items: Sequence[Any], *, block_bytes: int = 16 << 20
    ) -> Iterator[pa.Table]:
        return self._tables(name, function, items, ahead=self.num_threads)

    def stream(
        self, name: str, function: Callable[[Any], pa.Table], items: Iterable[Any], *, block_bytes: int, prefetch_blocks: int
    ) -> Generator[pa.Table, None, None]:
        return self._tables(name, function, items, ahead=prefetch_blocks)

    def share(self, value: _Value) -> Shared[_Value]:
        return InProcess(value)

    def _tables(
        self, name: str, function: Callable[[Any], pa.Table], items: Iterable[Any], *, ahead: int
    ) -> Generator[pa.Table, None, None]:
        patience = contextlib.nullcontext() if self.max_outage_s is None else storage.patience(self.max_outage_s)
        with patience:
            context = copy_context()  # which has the patience

        def task(item: Any) -> pa.Table:
            return context.copy().run(function, item)

        return in_order(task, items, name=name, num_threads=self.num_threads, ahead=ahead)


def grouped(items: Iterable[_Item], size_of: Callable[[_Item], int], *, most_bytes: int, most_items: int) -> list[list[_Item]]:
    """The items in order, small ones together: up to `most_items` of them, of `most_bytes` in all."""
    groups: list[list[_Item]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if not groups or size > room or len(groups[-1]) == most_items:
            groups.append([])
            room = most_bytes
        groups[-1].append(item)
        room -= size
    return groups


def in_order(
    function: Callable[[_Item], _Result], items: Iterable[_Item], *, name: str, num_threads: int, ahead: int
) -> Generator[_Result, None, None]:
    """The function's values for the items, in their order, made by threads; at most `num_threads` + `ahead` values exist or are
    being made beside the one that the reader holds. What the function raises is raised in its place."""
    waiting = iter(items)
    made: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix=name) as pool:
        try:
            for item in waiting:
                made.append(pool.submit(function, item))
                if len(made) >= num_threads + ahead:
                    yield made.popleft().result()
            while made:
                yield made.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
