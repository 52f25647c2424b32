"""Console output of a run: notes, preparation progress, and a live training panel."""

import os
import signal
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
from rayrec.humanize import number_text
from rayrec.observe.panel import console_line, line, panel
from rayrec.observe.run_summary import RunSummary

PLAIN_INTERVAL_S = 10.0
"""Seconds between progress lines if standard error is not a terminal."""


@contextmanager
def handling_signals(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handle` for Ctrl-C and SIGTERM (in the main thread only), replacing other handlers."""
    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@final
class _StandardError:
    """Standard error as a file that never raises, for which rich would end: output to a full disk or closed pipe is lost."""

    @property
    def _stream(self) -> Any:
        # During a live display, sys.stderr is rich's proxy, which would call this object again.
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
        if stream is None:  # The process has no standard error.
            return
        try:
            use(stream)
        except BrokenPipeError:
            # Redirect the stream to /dev/null. Otherwise Python fails to flush its buffer at exit, with status 120.
            with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), stream.fileno())
        except (OSError, ValueError):  # ValueError: closed stream
            pass

    def isatty(self) -> bool:
        with suppress(ValueError):
            return self._stream is not None and self._stream.isatty()
        return False


class Console:
    """Output on standard error: live displays on a terminal, else occasional plain lines. Output errors never stop a run."""

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self.verbose = verbose
        # Show names of columns, files and runs unchanged, without markup.
        self._out = RichConsole(
            file=cast(IO[str], _StandardError()), quiet=quiet, highlight=False, soft_wrap=True, markup=False, emoji=False
        )
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._last_line_s: dict[str, float] = {}

    def note(self, text: str) -> None:
        """Print one line."""
        self._out.print(text)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Show progress bars for the `progress` calls inside this context."""
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

    def progress(self, label: str, done: int, total: int | None, note: str = "") -> None:
        """Report that `done` of `total` items of `what` are done."""
        now = time.monotonic()
        start = self._started.setdefault(label, now)
        rate = done / (now - start) if now > start else 0.0
        note = note or (f"{number_text(round(rate))}/s" if rate else "")
        if self._progress is not None:
            if label not in self._tasks:
                self._tasks[label] = self._progress.add_task(label, total=total, note=note)
            self._progress.update(self._tasks[label], completed=done, total=total, note=note)
        elif now - self._last_line_s.get(label, start) >= PLAIN_INTERVAL_S or (total is not None and done >= total):
            self._last_line_s[label] = now
            left = f", {(total - done) / rate:.0f} s left" if total and rate and done < total else ""
            of_total = f" of {number_text(total)}" if total else ""
            self.note(f"{label}: {number_text(done)}{of_total}, {note}{left}")

    @contextmanager
    def training(self, follow: Callable[[threading.Event], Iterator[dict[str, Any]]]) -> Iterator[None]:
        """Show the events of a run while it trains: a live panel on a terminal, else occasional lines."""
        stop = threading.Event()
        since = time.time()
        run = RunSummary(curves=False)

        def show() -> None:
            try:
                for event in follow(stop):
                    run.update(event)
                    if event["time"] >= since:
                        self._show(event, run)
            except (InputError, OSError) as error:  # A damaged line does not stop the run.
                self.note(f"Stopping the display of this run: {error}")

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
            if now - self._last_line_s.get("train", -PLAIN_INTERVAL_S) >= PLAIN_INTERVAL_S or run.step == run.steps:
                self._last_line_s["train"] = now
                self.note(f"train: step {run.step:,} of {run.steps:,}  {line(run)}")
        note = console_line(event, verbose=self.verbose)
        if note is not None:
            self.note(note)

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Print a table with two columns."""
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._out.print(table)
