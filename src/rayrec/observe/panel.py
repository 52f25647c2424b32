"""Terminal view of a run: console lines for events, the live panel, and `rayrec top`."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayrec import storage
from rayrec.config import InputError, packaged_json
from rayrec.humanize import duration_text, number_text, size_text
from rayrec.observe.bottleneck import diagnose
from rayrec.observe.events import follow, read_events
from rayrec.observe.run_summary import RunSummary, metrics_of, target_text
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
        shown = [name for name, value in metrics_of(evaluation).items() if isinstance(value, float)]
    return "  ".join(f"{name} {metric_text(evaluation[name])}" for name in shown)


def early_stop_text(event: Event) -> str:
    """Describe why a run stopped early."""
    reached = target_text(event) if event.get("target_step") is not None else None
    return reached or f"no improvement since step {event['best_step']:,}"


def console_line(event: Event, *, verbose: bool = False) -> str | None:
    """Return the console line for an event, or None if it is not shown."""
    kind = event["kind"]
    if kind == "evaluate":
        best = "".join(f"  best {name} {metric_text(event['best'][name])}" for name in event.get("best", ()) if name != "step")
        at = f" (step {event['best']['step']:,})" if best else ""
        return f"step {event['step']:,}  {event['set']}  {metrics_text(event)}{best}{at}"
    if kind == "early_stop":
        return f"step {event['step']:,}  {early_stop_text(event)}: stopping early"
    if kind == "warm_start":
        amounts = [f"{event[name]:,} {name}" for name in ("kept", "fresh", "dropped") if name in event]
        return f"starting from {event['checkpoint']}" + (f"; categories: {', '.join(amounts)}" if amounts else "")
    if kind == "start" and event["step"]:
        return f"resuming from step {event['step']:,} with {event['world_size']} workers"
    if kind == "start" and event.get("damaged"):
        return f"no undamaged checkpoint found (damaged: {len(event['damaged'])}): restarting from step 0"
    if kind == "failure":
        return event["cause"] if event.get("last") else f"{event['cause']}: restarting"
    if kind == "checkpoint_repaired":
        return f"{event['path']}: rewrote damaged files ({', '.join(event['files'])})"
    if kind == "checkpoint" and verbose:
        return f"step {event['step']:,}  saved {event['path']} ({size_text(event['bytes'])})"
    return _NOTES[kind].format_map(event) if kind in _NOTES else None


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
        # Above 100 % means that the peak, measured for a few hundredths of a second, was underestimated.
        ("of peak", last.get("peak_fraction"), lambda fraction: f"{fraction:.0%}" if fraction <= 1 else "above measurement"),
        ("learning rate", last.get("learning_rate"), "{:.3g}".format),
        ("left", None if run.ended else run.left_s(), lambda left_s: duration_text(round(left_s))),
        ("saved", run.latest.get("checkpoint"), lambda saved: f"step {saved['step']:,} ({size_text(saved['bytes'])})"),
        ("restarts", len(run.restarts) or None, str),
    ]
    return [(name, text(value)) for name, value, text in formats if value is not None]


def line(run: RunSummary) -> str:
    """Return the figures in one line."""
    return "  ".join(f"{name} {value}" for name, value in figures(run))


_STYLES: Final = dict(zip(PHASES, ("red", "magenta", "blue", "cyan", "green", "yellow", "bright_black"), strict=True))
_BAR_CELLS: Final = 40
_STALE_S: Final = 60.0
"""Seconds after which the panel shows the age of the last event."""


def panel(run: RunSummary, *, now_s: float | None = None, full: bool = False) -> RenderableType:
    """Render a run in a few lines. `full` adds the time breakdown, data stages and bottleneck. `now_s` is in unix time."""
    grid = Table.grid(padding=(0, 1))
    text = f"step {run.step:,}" + (f" of {run.steps:,}" if run.steps else "")
    grid.add_row(ProgressBar(total=run.steps or 1, completed=run.step, width=_BAR_CELLS), Text(text))
    named = Text()
    for name, value in figures(run):
        named.append(f"{name} ", style="dim").append(f"{value}   ")
    parts: list[RenderableType] = [grid, named]
    times_s = run.latest.get("step", {}).get("times_s") or {}
    if any(times_s.values()):
        parts.append(_split(times_s))
    if full and run.latest.get("data", {}).get("stages"):
        parts.append(_data(run.latest["data"]))
    if full and len(nodes := run.nodes()) > 1:
        parts.append(Text("   ".join(f"{node}: {', '.join(runs)}" for node, runs in nodes.items()), style="dim"))
    diagnosis = diagnose(run) if full else None
    if diagnosis is not None:
        parts.append(Text(diagnosis.text, style="bold"))
    age_s = (time.time() if now_s is None else now_s) - (run.last_time_s or 0.0)
    status = run.status
    if full and run.last_time_s is not None and age_s > _STALE_S and not run.ended:
        status += f" (no events for {duration_text(round(age_s))})"
    run_event = run.latest.get("run", {})
    title = Text(" ".join(part for part in (run_event.get("recipe"), run_event.get("name")) if part) or "run")
    return Panel(Group(*parts), title=title, title_align="left", subtitle=Text(status), subtitle_align="left")


def _split(times_s: Mapping[str, float | None]) -> RenderableType:
    """Render a bar of the last interval's phases with a legend of their shares."""
    bar, words = Text(), Text()
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
        table.add_row(stage["stage"], rate, f"{min(1.0, stage['busy']):.0%}", f"{min(1.0, stage['cpu_share']):.0%}")
    text = f"backlog {number_text(round(event['backlog_rows']))} rows"
    if event.get("object_store_bytes") is not None:
        text += (
            f"   object store {size_text(event['object_store_bytes'])} of {size_text(event['object_store_limit_bytes'])}"
            f"   spilled {size_text(event['spilled_bytes'])}"
        )
    return Group(table, Text(text, style="dim"))


# -- rayrec top


def top(run: str, *, once: bool = False, console: Console | None = None) -> RunSummary:
    """Show the run in a folder, local or a URL, until it ends or Ctrl-C. Without a terminal, or with `once`, show it once.
    Returns the last shown state. Raises InputError if the folder contains no run."""
    folder = storage.absolute(run).rstrip("/")
    if not storage.exists(storage.join(folder, "config.yaml")):
        raise InputError(f"{run}: not a run folder (config.yaml not found). Set storage_path/name of a run.")
    console = console or Console(highlight=False, markup=False, emoji=False)
    path, view = storage.join(folder, "events.jsonl"), RunSummary(curves=False)
    if once or not console.is_terminal:
        for event in read_events(path):
            view.update(event)
        console.print(panel(view, full=True))
        return view
    _watch(path, view, console)
    return view


def _watch(path: str, run: RunSummary, console: Console) -> None:
    stop, caught_up = threading.Event(), False  # Print no console lines for past events.

    def idle() -> None:
        nonlocal caught_up
        caught_up = True
        live.refresh()
        if run.ended:  # Checked here, because events of a later driver may follow an old end.
            stop.set()

    live = Live(get_renderable=lambda: panel(run, full=True), console=console, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), live:
        for event in follow(path, stop=stop, idle=idle):
            run.update(event)
            note = console_line(event) if caught_up else None
            if note is not None:
                console.print(note, markup=False)
        live.refresh()
