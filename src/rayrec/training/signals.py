"""SIGTERM and Ctrl-C of a driver: noted while workers can still save, else raised at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self


class Signals:
    """While it is entered (by the main thread; elsewhere it does nothing), SIGTERM raises SystemExit(143) and Ctrl-C
    KeyboardInterrupt; between `held` the first signal is only noted, and the second raises."""

    def __init__(self) -> None:
        self.cause: str | None = None
        """What was noted: SIGTERM or SIGINT."""
        self._held = False
        self._before: dict[int, Any] = {}

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
        first = self.cause is None
        self.cause = self.cause or signal.Signals(number).name
        if not (first and self._held):
            self.throw()

    def throw(self) -> None:
        """Raises what the noted signal stands for."""
        if self.cause == "SIGTERM":
            raise SystemExit(143)
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The first signal is noted only."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
