"""What a person sees of a run: notes, progress of the preparation, and training as one live panel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rayrec.observe.panel import panel
from rayrec.observe.run_view import RunView, count_text, note_of

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
        note = note or (f"{count_text(rate)}/s" if rate else "")
        if self._progress is not None:
            if what not in self._tasks:
                self._tasks[what] = self._progress.add_task(what, total=total, note=note)
            self._progress.update(self._tasks[what], completed=done, total=total, note=note)
        elif now - self._said.get(what, start) >= _PLAIN_INTERVAL_S or (total is not None and done >= total):
            self._said[what] = now
            left = f", {(total - done) / rate:.0f} s left" if total and rate and done < total else ""
            share = f" of {count_text(total)}" if total else ""
            self.note(f"{what}: {count_text(done)}{share}, {note}{left}")

    @contextmanager
    def training(self, follow: Callable[[threading.Event], Iterator[dict[str, Any]]]) -> Iterator[None]:
        """Shows the events of a run while it trains: a live panel on a terminal, else a line now and then."""
        stop = threading.Event()
        since = time.time()
        view = RunView()

        def show() -> None:
            for event in follow(stop):
                view.update(event)
                if event["time"] >= since:
                    self._show(event, view)

        with self._panel(view):
            thread = threading.Thread(target=show, daemon=True)
            thread.start()
            try:
                yield
            finally:
                stop.set()
                thread.join(timeout=5)

    @contextmanager
    def _panel(self, view: RunView) -> Iterator[None]:
        if not self._out.is_terminal or self._out.quiet:
            yield
            return
        with Live(get_renderable=lambda: panel(view), console=self._out, refresh_per_second=4):
            yield

    def _show(self, event: dict[str, Any], view: RunView) -> None:
        if event["kind"] == "step" and not self._out.is_terminal:
            now = time.monotonic()
            if now - self._said.get("train", -_PLAIN_INTERVAL_S) >= _PLAIN_INTERVAL_S or view.step == view.steps:
                self._said["train"] = now
                self.note(f"train: step {view.step:,} of {view.steps:,}  {view.line()}")
        note = note_of(event, verbose=self.verbose)
        if note is not None:
            self.note(note)

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Two columns."""
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._out.print(table)
