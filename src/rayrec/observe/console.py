"""What a person sees of a run: notes, progress of the preparation, and training as one live panel."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any, cast, final

from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rayrec.config import InputError
from rayrec.observe.panel import line, note_of, panel
from rayrec.observe.run_summary import RunSummary
from rayrec.quantities import number_text

PLAIN_INTERVAL_S = 10.0
"""Seconds between progress lines where standard error is no terminal."""


@final
class _StandardError:
    """Standard error, whichever it is at the moment, as a file of which nothing fails: what a full disk, a pipe that nobody reads
    any more or a closed stream does not take is lost. (Of a broken pipe rich would make the end of the process.)"""

    @property
    def _stream(self) -> Any:
        # While rich shows something live, sys.stderr is rich's own, which would come back here.
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def _try(self, use: Callable[[Any], object]) -> None:
        stream = self._stream
        if stream is None:  # of a process without one
            return
        try:
            use(stream)
        except BrokenPipeError:
            _discard(stream)
        except (OSError, ValueError):  # ValueError: it is closed
            pass

    def isatty(self) -> bool:
        with suppress(ValueError):
            return self._stream is not None and self._stream.isatty()
        return False


def _discard(stream: Any) -> None:
    """Points a stream whose pipe nobody reads to /dev/null: what its buffer holds would fail again, with status 120, when Python
    flushes it at the end."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class Console:
    """Writes to standard error: live lines on a terminal, now and then a plain line elsewhere. Nothing of it fails: what cannot
    be written is lost, and a run continues without being seen."""

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self.verbose = verbose
        # Names of columns, files and runs are shown unchanged: no text is markup.
        self._out = RichConsole(
            file=cast(IO[str], _StandardError()), quiet=quiet, highlight=False, soft_wrap=True, markup=False, emoji=False
        )
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._said: dict[str, float] = {}

    def note(self, text: str) -> None:
        """One line for the user."""
        self._out.print(text)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """While `progress` is called."""
        if not self._out.is_terminal:
            yield
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}", markup=False),
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
        note = note or (f"{number_text(round(rate))}/s" if rate else "")
        if self._progress is not None:
            if what not in self._tasks:
                self._tasks[what] = self._progress.add_task(what, total=total, note=note)
            self._progress.update(self._tasks[what], completed=done, total=total, note=note)
        elif now - self._said.get(what, start) >= PLAIN_INTERVAL_S or (total is not None and done >= total):
            self._said[what] = now
            left = f", {(total - done) / rate:.0f} s left" if total and rate and done < total else ""
            share = f" of {number_text(total)}" if total else ""
            self.note(f"{what}: {number_text(done)}{share}, {note}{left}")

    @contextmanager
    def training(self, follow: Callable[[threading.Event], Iterator[dict[str, Any]]]) -> Iterator[None]:
        """Shows the events of a run while it trains: a live panel on a terminal, else a line now and then."""
        stop = threading.Event()
        since = time.time()
        run = RunSummary(curves=False)

        def show() -> None:
            try:
                for event in follow(stop):
                    run.update(event)
                    if event["time"] >= since:
                        self._show(event, run)
            except (InputError, OSError) as error:  # a damaged line: the run itself does without it
                self.note(f"nothing more can be shown of this run ({error})")

        shown = Live(get_renderable=lambda: panel(run), console=self._out, refresh_per_second=4)
        with shown if self._out.is_terminal and not self._out.quiet else nullcontext():
            thread = threading.Thread(target=show, daemon=True)
            thread.start()
            try:
                yield
            finally:
                stop.set()
                thread.join(timeout=5)

    def _show(self, event: dict[str, Any], run: RunSummary) -> None:
        if event["kind"] == "step" and not self._out.is_terminal:
            now = time.monotonic()
            if now - self._said.get("train", -PLAIN_INTERVAL_S) >= PLAIN_INTERVAL_S or run.step == run.steps:
                self._said["train"] = now
                self.note(f"train: step {run.step:,} of {run.steps:,}  {line(run)}")
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
