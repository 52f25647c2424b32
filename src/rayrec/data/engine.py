"""What runs data tasks: the same functions over the same items, whatever distributes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

STOP_ASKED: Final = threading.Event()
"""Set in a worker's process when its run is asked to stop: from then on it does not wait for data tasks that may never run."""
_Value = TypeVar("_Value")
_Held_co = TypeVar("_Held_co", covariant=True)


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
        self,
        name: str,
        function: Callable[[Any], pa.Table],
        items: Iterable[Any],
        *,
        block_bytes: int,
        prefetch_blocks: int,
    ) -> Generator[pa.Table, None, None]:
        """As `run`, for a reader that may be slower than the tasks: they run ahead of it by `prefetch_blocks` results and what
        they are at, and end when it closes the generator."""
        ...

    def share(self, value: _Value) -> Shared[_Value]:
        """Makes a value readable in all tasks and workers, stored once a machine."""
        ...
