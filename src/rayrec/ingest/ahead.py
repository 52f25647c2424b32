"""Values of an iterator, made ahead of the reader in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from contextvars import copy_context
from typing import Final, Generic, TypeVar, final

T = TypeVar("T")
_POLL_S: Final = 0.1
"""Seconds between two looks of the thread at whether the reader has gone."""


@final
class Ahead(Generic[T]):
    """Iterates over `prepare(value)` for each value of a generator, of which a thread makes at most `most` ahead.

    An error of the generator or of `prepare` reaches the reader where its value would be. `close` ends the thread and then closes
    the generator, which it owns.
    """

    def __init__(self, values: Generator[T, None, None], *, most: int, prepare: Callable[[T], T] | None = None) -> None:
        self._values, self._prepare = values, prepare
        self._made: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(most)
        self._closed = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=copy_context().run, args=(self._make,), name="ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._over:
            raise StopIteration
        value, error = self._made.get()
        if error is not None:
            self._over = True
            raise error
        return value  # type: ignore[return-value]  # None only with an error

    def close(self) -> None:
        """Waits for the value that is being made."""
        self._over = True
        self._closed.set()
        self._thread.join()
        self._values.close()

    def _make(self) -> None:
        try:
            while not self._closed.is_set():
                value = next(self._values)
                self._put(value if self._prepare is None else self._prepare(value), None)
        except BaseException as error:  # StopIteration too: the reader gets it in its place
            self._put(None, error)

    def _put(self, value: T | None, error: BaseException | None) -> None:
        while not self._closed.is_set():
            try:
                self._made.put((value, error), timeout=_POLL_S)
            except queue.Full:
                continue
            return
