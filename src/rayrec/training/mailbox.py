"""How the driver of a run and its workers leave messages for each other: a wish to stop, wishes for a profile, bytes saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

Wish = dict[str, Any]
"""For a profile: the fields of `rayrec.training.step_profiler.Window`."""


class Mailbox(Protocol):
    """Of one attempt; picklable if its workers are other processes. A mailbox that cannot be reached any more raises OSError."""

    def read(self) -> str | None:
        """The first reason to stop that the driver gave; None if it gave none."""
        ...

    def wrote(self, rank: int, written_bytes: int) -> None:
        """Reports what a worker's saves have written so far."""
        ...

    def ask(self, wish: Wish) -> None:
        """Asks all workers for a profile."""
        ...

    def watch(self, wished: Callable[[Wish], None]) -> None:
        """Calls `wished`, in some thread, for every wish from now on, until the attempt ends."""
        ...


class LocalMailbox:
    """For a worker in the driver's own process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cause: str | None = None
        self._written: dict[int, int] = {}
        self._watching: list[Callable[[Wish], None]] = []

    def send(self, cause: str) -> None:
        """Asks the worker to save and end; the first cause stays."""
        with self._lock:
            self._cause = self._cause or cause

    def read(self) -> str | None:
        return self._cause

    def wrote(self, rank: int, written_bytes: int) -> None:
        self._written[rank] = written_bytes

    def written_bytes(self) -> int:
        """By the worker's saves."""
        return sum(self._written.values())

    def ask(self, wish: Wish) -> None:
        for wished in list(self._watching):
            wished(wish)

    def watch(self, wished: Callable[[Wish], None]) -> None:
        self._watching.append(wished)
