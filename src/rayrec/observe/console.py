"""What a person sees of a run: notes, progress of the preparation, and training as one live line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_PLAIN_INTERVAL_S = 10.0
"""Seconds between progress lines where standard error is no terminal."""


class Console:
    """Writes to standard error: live lines on a terminal, now and then a plain line elsewhere."""

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self.verbose = verbose
        self._out = RichConsole(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._said: dict[str, float] = {}

    def note(self, text: str) -> None:
        """One line for the user."""
        self._out.print(text, markup=False)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """While `progress` is called."""
        with self._live():
            yield

    @contextmanager
    def _live(self) -> Iterator[None]:
        if not self._out.is_terminal:
            yield
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._out, transient=False) as self._progress:
            yield
        self._progress = None
        self._tasks = {}

    def progress(self, what: str, done: int, total: int | None, note: str = "") -> None:
        """`done` of `total` of something has been done."""
        now = time.monotonic()
        start = self._started.setdefault(what, now)
        rate = done / (now - start) if now > start else 0.0
        note = note or (f"{_count(rate)}/s" if rate else "")
        if self._progress is not None:
            if what not in self._tasks:
                self._tasks[what] = self._progress.add_task(what, total=total, note=note)
            self._progress.update(self._tasks[what], completed=done, total=total, note=note)
        elif now - self._said.get(what, start) >= _PLAIN_INTERVAL_S or (total is not None and done >= total):
            self._said[what] = now
            left = f", {(total - done) / rate:.0f} s left" if total and rate and done < total else ""
            share = f" of {_count(total)}" if total else ""
            self.note(f"{what}: {_count(done)}{share}, {note}{left}")

    @contextmanager
    def training(self, follow: Callable[[threading.Event], Iterator[dict[str, Any]]]) -> Iterator[None]:
        """Shows the events of a run while it trains."""
        stop = threading.Event()
        since = time.time()

        def show() -> None:
            for event in follow(stop):
                if event["time"] >= since:
                    self._show(event)

        with self._live():
            thread = threading.Thread(target=show, daemon=True)
            thread.start()
            try:
                yield
            finally:
                stop.set()
                thread.join(timeout=5)

    def _show(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "step":
            note = (
                f"loss {_number(event['loss'])}  "
                f"{_count(event['rows_per_s'])} rows/s  blocked {event['blocked_fraction'] or 0:.1%}"
            )
            self.progress("train", event["step"], event["steps"], note)
        elif kind == "evaluate":
            values = "  ".join(
                f"{name} {_number(event[name])}" for name in ("auroc", "logloss", "accuracy") if name in event
            )
            self.note(f"step {event['step']:,}  {event['set']}  {values}")
        elif kind == "start" and event["step"]:
            self.note(f"goes on from step {event['step']:,} with {event['world_size']} workers")
        elif kind == "failure":
            self.note(f"{event['cause']}: starting again")
        elif kind == "checkpoint_damaged":
            self.note(f"passed over: {event['cause']}")
        elif kind == "checkpoint_late":
            self.note(f"step {event['step']:,}  not saved yet: {event['cause']}")
        elif kind == "stop":
            self.note(f"step {event['step']:,}  saved, stopping ({event['cause']})")
        elif kind == "checkpoint" and self.verbose:
            self.note(f"step {event['step']:,}  saved {event['path']} ({event['bytes'] / 1e6:.1f} MB)")
        elif kind == "early_stop":
            self.note(f"step {event['step']:,}  no better since step {event['best_step']:,}: stopping early")

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Two columns."""
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._out.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.0f}"
