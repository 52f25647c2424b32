"""Stops from outside: SIGTERM and Ctrl-C of a driver, how long a stop waits for the last checkpoint, and when to stop before a
node is preempted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, Self, final

from rayrec.workloads.base import FailureConfig


class Signals:
    """While it is entered (by the main thread; elsewhere it does nothing), SIGTERM raises SystemExit(143) and Ctrl-C
    KeyboardInterrupt; between `held` the first signal is only noted, and the second raises. `asked`, set by another thread,
    counts as a noted SIGTERM."""

    def __init__(self, asked: threading.Event | None = None) -> None:
        self._asked = asked or threading.Event()
        self._noted: str | None = None
        self._held = False
        self._before: dict[int, Any] = {}

    @property
    def cause(self) -> str | None:
        """What was noted: SIGTERM, SIGINT or a request to stop."""
        return self._noted or ("a request to stop" if self._asked.is_set() else None)

    @cause.setter
    def cause(self, noted: str | None) -> None:
        self._noted = noted

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self._noted is None
        self._noted = self._noted or signal.Signals(number).name
        if not (first and self._held):
            self.throw()

    def throw(self) -> None:
        """Raises what the noted signal stands for."""
        if self.cause == "SIGINT":
            raise KeyboardInterrupt
        raise SystemExit(143)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The first signal is noted only."""
        self._held = True
        try:
            yield
        finally:
            self._held = False


_WRITE_MARGIN: Final = 1.5
"""A save may take so many times as long as the one before."""
_MARGIN_S: Final = 2.0


@final
class Grace:
    """The time that workers have to save after a request to stop: failure.grace_s, and again as much after every look at
    which more bytes had been written, failure.max_grace_s in all."""

    def __init__(self, failure: FailureConfig, *, now_s: float) -> None:
        self._grace_s = failure.grace_s
        self._end_s = now_s + max(failure.grace_s, failure.max_grace_s)
        self._deadline_s = now_s + failure.grace_s
        self._written_bytes: int | None = None

    def over(self, now_s: float, *, written_bytes: int) -> bool:
        """Whether the workers are no longer waited for. `written_bytes`: by all saves of the attempt so far."""
        if self._written_bytes is not None and written_bytes > self._written_bytes:
            self._deadline_s = now_s + self._grace_s
        self._written_bytes = written_bytes
        return now_s > min(self._deadline_s, self._end_s)


def unsaved_cause(cause: str | None, failure: FailureConfig) -> str:
    """One line on a stop, for `cause`, that `Grace` was over for. Pure."""
    return (
        f"{cause}, and the last checkpoint made no progress for failure.grace_s ({failure.grace_s:.0f} s) or took longer than "
        f"failure.max_grace_s ({failure.max_grace_s:.0f} s)"
    )


def last_save_s(deadline_s: float, *, write_s: float, between_s: float) -> float:
    """When to save and end before a node is preempted at `deadline_s`. Pure.

    `write_s`: what the last save took; `between_s`: the time between two looks at the clock, which a step may lengthen.
    """
    return deadline_s - (_WRITE_MARGIN * write_s + 2 * between_s + _MARGIN_S)
