"""Data tasks as threads of this process, which needs no cluster: the kernels and Arrow release the GIL."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from rayrec import storage
from rayrec.data.engine import InProcess, Shared

_Value = TypeVar("_Value")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ThreadEngine:
    """Runs data tasks in threads of this process; see `Engine` and `StreamEngine`."""

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
        self,
        name: str,
        function: Callable[[Any], pa.Table],
        items: Iterable[Any],
        *,
        block_bytes: int,
        prefetch_blocks: int,
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
