"""Terminal output of a run: notes, preparation progress, console lines for events, the live panel,
and `rayrec top`.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any, Final, cast, final

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayrec import storage
from rayrec.background import in_background
from rayrec.config import InputError, packaged_json
from rayrec.humanize import duration_text, number_text, size_text
from rayrec.observe.bottleneck import diagnose
from rayrec.observe.events import follow, read_events
from rayrec.observe.run_summary import RunSummary, select_metrics, target_text
from rayrec.observe.timing import PHASES, WORDS

Event = Mapping[str, Any]
_SHOWN_METRICS: Final = ("auroc", "logloss", "accuracy", "perplexity")
_NOTES: Final[dict[str, str]] = packaged_json(__package__, "console_lines.json")
"""Console lines of events with a fixed form."""


def metric_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def metrics_text(evaluation: Event) -> str:
    """Format the main metrics of an evaluation."""
    shown = [name for name in _SHOWN_METRICS if name in evaluation]
    if not shown:  # A custom model.
        shown = [
            name for name, value in select_metrics(evaluation).items() if isinstance(value, float)
        ]
    return "  ".join(f"{name} {metric_text(evaluation[name])}" for name in shown)


def early_stop_text(event: Event) -> str:
    """Describe why a run stopped early."""
    reached = target_text(event) if event.get("target_step") is not None else None
    return reached or f"no improvement since step {event['best_step']:,}"


def console_line(event: Event, *, verbose: bool = False) -> str | None:
    """Return the console line for an event, or None if it is not shown."""
    kind = event["kind"]
    if kind == "evaluate":
        return _evaluation_line(event)
    if kind == "early_stop":
        return f"step {event['step']:,}  {early_stop_text(event)}: stopping early"
    if kind == "warm_start":
        return _warm_start_line(event)
    if kind == "start" and event["step"]:
        return f"resuming from step {event['step']:,} with {event['world_size']} workers"
    if kind == "start" and event.get("damaged"):
        return (
            f"no undamaged checkpoint found (damaged: {len(event['damaged'])}): restarting from "
            "step 0"
        )
    if kind == "failure":
        return event["cause"] if event.get("last") else f"{event['cause']}: restarting"
    if kind == "checkpoint_repaired":
        return f"{event['path']}: rewrote damaged files ({', '.join(event['files'])})"
    if kind == "checkpoint" and verbose:
        return f"step {event['step']:,}  saved {event['path']} ({size_text(event['bytes'])})"
    return _NOTES[kind].format_map(event) if kind in _NOTES else None


def _evaluation_line(event: Event) -> str:
    best = "".join(
        f"  best {name} {metric_text(event['best'][name])}"
        for name in event.get("best", ())
        if name != "step"
    )
    at = f" (step {event['best']['step']:,})" if best else ""
    return f"step {event['step']:,}  {event['set']}  {metrics_text(event)}{best}{at}"


def _warm_start_line(event: Event) -> str:
    amounts = [f"{event[name]:,} {name}" for name in ("kept", "fresh", "dropped") if name in event]
    categories = f"; categories: {', '.join(amounts)}" if amounts else ""
    return f"starting from {event['checkpoint']}{categories}"


def figures(run: RunSummary) -> list[tuple[str, str]]:
    """Return all known figures as (name, value) pairs, the most important first."""
    last = run.latest.get("step", {})
    metrics = (run.final or {}).get("metrics") or run.evaluation or {}
    shown = [name for name in _SHOWN_METRICS if metrics.get(name) is not None][:1]
    formats: list[tuple[str, Any, Callable[[Any], str]]] = [
        ("loss", last.get("loss"), metric_text),
        *((name, metrics[name], metric_text) for name in shown),
        ("weights of", (run.final or {}).get("chosen_step"), "step {:,}".format),
        ("rows/s", last.get("rows_per_s"), lambda rate: number_text(round(rate))),
        ("blocked", last.get("blocked_fraction"), "{:.1%}".format),
        # Above 100 % means that the peak, measured for a few hundredths of a second, was
        # underestimated.
        (
            "of peak",
            last.get("peak_fraction"),
            lambda fraction: f"{fraction:.0%}" if fraction <= 1 else "above measurement",
        ),
        ("learning rate", last.get("learning_rate"), "{:.3g}".format),
        (
            "left",
            None if run.ended else run.left_s(),
            lambda left_s: duration_text(round(left_s)),
        ),
        (
            "saved",
            run.latest.get("checkpoint"),
            lambda saved: f"step {saved['step']:,} ({size_text(saved['bytes'])})",
        ),
        ("restarts", len(run.restarts) or None, str),
    ]
    return [(name, text(value)) for name, value, text in formats if value is not None]


def line(run: RunSummary) -> str:
    """Return the figures in one line."""
    return "  ".join(f"{name} {value}" for name, value in figures(run))


_STYLES: Final = dict(
    zip(
        PHASES,
        ("red", "magenta", "blue", "cyan", "green", "yellow", "bright_black"),
        strict=True,
    )
)
_BAR_CELLS: Final = 40
_STALE_S: Final = 60.0
"""Seconds after which the panel shows the age of the last event."""


def panel(run: RunSummary, *, now_s: float | None = None, full: bool = False) -> RenderableType:
    """Render a run in a few lines. `full` adds the time breakdown, data stages and bottleneck.
    `now_s` is in unix time.
    """
    grid = Table.grid(padding=(0, 1))
    text = f"step {run.step:,}" + (f" of {run.steps:,}" if run.steps else "")
    grid.add_row(
        ProgressBar(total=run.steps or 1, completed=run.step, width=_BAR_CELLS),
        Text(text),
    )
    named = Text()
    for name, value in figures(run):
        named.append(f"{name} ", style="dim").append(f"{value}   ")
    parts: list[RenderableType] = [grid, named]
    times_s = run.latest.get("step", {}).get("times_s") or {}
    if any(times_s.values()):
        parts.append(_split(times_s))
    if full:
        parts += _details(run)
    age_s = (time.time() if now_s is None else now_s) - (run.last_time_s or 0.0)
    status = run.status
    if full and run.last_time_s is not None and age_s > _STALE_S and not run.ended:
        status += f" (no events for {duration_text(round(age_s))})"
    run_event = run.latest.get("run", {})
    title = Text(
        " ".join(part for part in (run_event.get("recipe"), run_event.get("name")) if part) or "run"
    )
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=Text(status),
        subtitle_align="left",
    )


def _details(run: RunSummary) -> list[RenderableType]:
    """Render the data stages, nodes and bottleneck, if known."""
    parts: list[RenderableType] = []
    if run.latest.get("data", {}).get("stages"):
        parts.append(_data(run.latest["data"]))
    nodes = run.nodes()
    if len(nodes) > 1:
        text = "   ".join(f"{node}: {', '.join(runs)}" for node, runs in nodes.items())
        parts.append(Text(text, style="dim"))
    diagnosis = diagnose(run)
    if diagnosis is not None:
        parts.append(Text(diagnosis.text, style="bold"))
    return parts


def _split(times_s: Mapping[str, float | None]) -> RenderableType:
    """Render a bar of the last interval's phases with a legend of their shares."""
    bar = Text()
    words = Text()
    total_s = sum(value or 0.0 for value in times_s.values())
    for name in PHASES:
        fraction = (times_s.get(name) or 0.0) / total_s
        bar.append("█" * round(fraction * _BAR_CELLS), style=_STYLES[name])
        if fraction >= 0.005:
            words.append(" ■ ", style=_STYLES[name]).append(f"{WORDS[name]} {fraction:.0%}")
    return Group(bar, words)


def _data(event: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("data", "rows/s it could", "busy", "computing"):
        table.add_column(head, justify="left" if head == "data" else "right")
    for stage in event["stages"]:
        rate = number_text(round(stage["rows_per_s"]))
        table.add_row(
            stage["stage"],
            rate,
            f"{min(1.0, stage['busy']):.0%}",
            f"{min(1.0, stage['cpu_share']):.0%}",
        )
    text = f"backlog {number_text(round(event['backlog_rows']))} rows"
    if event.get("object_store_bytes") is not None:
        text += (
            f"   object store {size_text(event['object_store_bytes'])} of "
            f"{size_text(event['object_store_limit_bytes'])}"
            f"   spilled {size_text(event['spilled_bytes'])}"
        )
    return Group(table, Text(text, style="dim"))


# -- rayrec top


def top(run: str, *, once: bool = False, console: RichConsole | None = None) -> RunSummary:
    """Show the run in a folder, local or a URL, until it ends or Ctrl-C. Without a terminal, or
    with `once`, show it once. Returns the last shown state. Raises InputError if the folder
    contains no run.
    """
    folder = storage.absolute(run).rstrip("/")
    if not storage.exists(storage.join(folder, "config.yaml")):
        raise InputError(
            f"{run}: not a run folder (config.yaml not found). Set storage_path/name of a run."
        )
    console = console or RichConsole(highlight=False, markup=False, emoji=False)
    path = storage.join(folder, "events.jsonl")
    view = RunSummary(curves=False)
    if once or not console.is_terminal:
        for event in read_events(path):
            view.update(event)
        console.print(panel(view, full=True))
        return view
    _watch(path, view, console)
    return view


def _watch(path: str, run: RunSummary, console: RichConsole) -> None:
    # Print no console lines for past events.
    stop = threading.Event()
    caught_up = False

    def idle() -> None:
        nonlocal caught_up
        caught_up = True
        live.refresh()
        if run.ended:  # Checked here, because events of a later driver may follow an old end.
            stop.set()

    live = Live(
        get_renderable=lambda: panel(run, full=True),
        console=console,
        auto_refresh=False,
    )
    with suppress(KeyboardInterrupt), live:
        for event in follow(path, stop=stop, idle=idle):
            run.update(event)
            note = console_line(event) if caught_up else None
            if note is not None:
                console.print(note, markup=False)
        live.refresh()


PLAIN_INTERVAL_S = 10.0
"""Seconds between progress lines if standard error is not a terminal."""


@contextmanager
def handling_signals(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handle` for Ctrl-C, SIGTERM and, unless it is ignored (nohup), SIGHUP of a closed
    terminal, in the main thread only. Replaces other handlers within the context.
    """
    numbers = (
        [signal.SIGTERM, signal.SIGINT]
        if threading.current_thread() is threading.main_thread()
        else []
    )
    if numbers and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@final
class _StandardError:
    """Standard error as a file that never raises, for which rich would end: output to a full disk
    or closed pipe is lost.
    """

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
            # Redirect the stream to /dev/null. Otherwise Python fails to flush its buffer at exit,
            # with status 120.
            with (
                suppress(OSError, ValueError, AttributeError),
                open(os.devnull, "wb") as null,
            ):
                os.dup2(null.fileno(), stream.fileno())
        except (OSError, ValueError):  # ValueError: closed stream
            pass

    def isatty(self) -> bool:
        with suppress(ValueError):
            return self._stream is not None and self._stream.isatty()
        return False


class Console:
    """Output on standard error: live displays on a terminal, else occasional plain lines. Output
    errors never stop a run.
    """

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self.verbose = verbose
        # Show names of columns, files and runs unchanged, without markup.
        self._out = RichConsole(
            file=cast(IO[str], _StandardError()),
            quiet=quiet,
            highlight=False,
            soft_wrap=True,
            markup=False,
            emoji=False,
        )
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._last_line_s: dict[str, float] = {}

    def note(self, text: str) -> None:
        """Print one line."""
        self._out.print(text)

    def warn(self, text: str) -> None:
        """Print one line even if quiet: without it, a user would misread the result."""
        quiet = self._out.quiet
        self._out.quiet = False
        self._out.print(f"warning: {text}")
        self._out.quiet = quiet

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
        """Report that `done` of `total` items of `label` are done."""
        now = time.monotonic()
        start = self._started.setdefault(label, now)
        rate = done / (now - start) if now > start else 0.0
        note = note or (f"{number_text(round(rate))}/s" if rate else "")
        if self._progress is not None:
            if label not in self._tasks:
                self._tasks[label] = self._progress.add_task(label, total=total, note=note)
            self._progress.update(self._tasks[label], completed=done, total=total, note=note)
        elif now - self._last_line_s.get(label, start) >= PLAIN_INTERVAL_S or (
            total is not None and done >= total
        ):
            self._last_line_s[label] = now
            left = (
                f", {(total - done) / rate:.0f} s left" if total and rate and done < total else ""
            )
            total_text = f" of {number_text(total)}" if total else ""
            self.note(f"{label}: {number_text(done)}{total_text}, {note}{left}")

    @contextmanager
    def training(
        self, follow: Callable[[threading.Event], Iterator[dict[str, Any]]]
    ) -> Iterator[None]:
        """Show the events of a run while it trains: a live panel on a terminal, else occasional
        lines.
        """
        since = time.time()
        run = RunSummary(curves=False)

        def show(stop: threading.Event) -> None:
            try:
                for event in follow(stop):
                    run.update(event)
                    if event["time"] >= since:
                        self._show(event, run)
            except (
                InputError,
                OSError,
            ) as error:  # A damaged line does not stop the run.
                self.note(f"Stopping the display of this run: {error}")

        shown = Live(get_renderable=lambda: panel(run), console=self._out, refresh_per_second=4)
        with (
            shown if self._out.is_terminal and not self._out.quiet else nullcontext(),
            in_background(show, name="events"),
        ):
            yield

    def _show(self, event: dict[str, Any], run: RunSummary) -> None:
        if event["kind"] == "step" and not self._out.is_terminal:
            now = time.monotonic()
            if (
                now - self._last_line_s.get("train", -PLAIN_INTERVAL_S) >= PLAIN_INTERVAL_S
                or run.step == run.steps
            ):
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
