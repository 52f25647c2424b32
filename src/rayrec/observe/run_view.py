"""The state of a run in progress, from its events, and the panel that shows it in a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayrec.observe.bottleneck import Verdict, verdict
from rayrec.observe.timing import PHASES, WORDS
from rayrec.quantities import duration_text, number_text, size_text

Event = Mapping[str, Any]
_SHOWN_METRICS: Final = ("auroc", "logloss", "accuracy", "perplexity")
_KEPT: Final = {"run", "start", "step", "data", "evaluate", "checkpoint", "checkpoint_late"}
"""Kinds that a verdict needs."""
_VERDICT_S: Final = 5.0
"""Between two verdicts on a run in progress: each goes through all its events."""


def metric_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def metrics_text(evaluation: Event) -> str:
    """The metrics a person looks for first."""
    return "  ".join(f"{name} {metric_text(evaluation[name])}" for name in _SHOWN_METRICS if name in evaluation)


def note_of(event: Event, *, verbose: bool = False) -> str | None:
    """What an event is worth telling in a line of its own; None: nothing."""
    kind = event["kind"]
    if kind == "evaluate":
        return f"step {event['step']:,}  {event['set']}  {metrics_text(event)}"
    if kind in ("start", "warm_start"):
        return _note_of_start(event)
    if kind == "failure":
        return event["cause"] if event.get("last") else f"{event['cause']}: starting again"
    if kind == "checkpoint_damaged":
        return f"passed over: {event['cause']}"
    if kind == "checkpoint_repaired":
        return f"{event['path']}: damaged files were written again ({', '.join(event['files'])})"
    if kind == "checkpoint_late":
        return f"step {event['step']:,}  not saved yet: {event['cause']}"
    if kind == "checkpoint_slow":
        return (
            f"step {event['step']:,}  saving took {event['write_s']:.0f} s, longer than failure.grace_s "
            f"({event['grace_s']:.0f} s): raise --failure.grace-s, and give the machines' own notice as long"
        )
    if kind == "cpu_contention":
        return (
            f"rank {event['rank']} on {event['node']}: training is slower, because other processes use its CPUs; a thread waited "
            f"{event['waiting_share']:.0%} of the time. Stop them, or give workers fewer CPUs: --scaling.threads-per-worker"
        )
    if kind == "stop":
        return f"step {event['step']:,}  saved, stopping ({event['cause']})"
    if kind == "checkpoint" and verbose:
        return f"step {event['step']:,}  saved {event['path']} ({size_text(event['bytes'])})"
    if kind == "plateau":
        return f"step {event['step']:,}  no better: learning rates are {event['learning_rate_scale']:.3g} of the schedule's"
    if kind == "early_stop":
        return f"step {event['step']:,}  no better since step {event['best_step']:,}: stopping early"
    return None


def _note_of_start(event: Event) -> str | None:
    if event["kind"] == "warm_start":
        amounts = [f"{event[name]:,} {name}" for name in ("kept", "fresh", "dropped") if name in event]
        return f"starts with {event['checkpoint']}" + (f"; categories: {', '.join(amounts)}" if amounts else "")
    if event["step"]:
        return f"resumes from step {event['step']:,} with {event['world_size']} workers"
    if event.get("damaged"):
        return f"no undamaged checkpoint is left (damaged: {len(event['damaged'])}): training starts again from step 0"
    return None


def _has_ended(event: Event, *, before: bool) -> bool:
    if event["kind"] in ("failure", "stop"):
        return bool(event.get("last"))
    return event["kind"] == "summary" or (before and event["kind"] not in ("run", "attempt", "start"))


@final
@dataclass
class RunView:
    """Fed with a run's events in order; what nothing has told yet is None."""

    keep: bool = False
    """Keep the events that a verdict is computed from, about 500 bytes for each logged step."""
    recipe: str = ""
    name: str = ""
    status: str = "preparing"
    ended: bool = False
    """Finished, stopped or failed for good; a later driver makes it go on."""
    step: int = 0
    steps: int | None = None
    num_workers: int | None = None
    loss: float | None = None
    rows: int = 0
    rows_per_s: float | None = None
    blocked_fraction: float | None = None
    peak_fraction: float | None = None
    learning_rate: float | None = None
    shares: dict[str, float] = field(default_factory=dict)
    """Of the last logged interval, by phase."""
    evaluation: Event | None = None
    """The last one of the validation rows."""
    final: Event | None = None
    """The event of kind finish: the metrics of the chosen weights."""
    planned_steps: int | None = None
    """Steps that the run had been meant to make, if it stopped early."""
    checkpoint: Event | None = None
    data: Event | None = None
    restarts: int = 0
    last_time_s: float | None = None
    """Unix time of the last event."""
    events: list[Event] = field(default_factory=list)
    """Those that are kept."""
    _pace: tuple[int, float] | None = None
    """The first step logged by this attempt, and when."""
    _trained: bool = False
    _verdict: Verdict | None = None
    _verdict_on: int = 0
    """Events that it is computed from."""
    _next_verdict_s: float = 0.0
    """When there may be another, by the monotonic clock."""

    @property
    def finished(self) -> bool:
        return self.status.startswith("finished")

    def update(self, event: Event) -> None:
        """Takes in the next event."""
        kind = event["kind"]
        self.last_time_s = event["time"]
        if self.keep and kind in _KEPT:
            self.events.append(event)
        self.ended = _has_ended(event, before=self.ended)
        if kind == "run":
            self.recipe, self.name, self.status = event.get("recipe", ""), event.get("name", ""), "preparing"
        elif kind in ("prepared", "attempt"):
            self.status = "starting workers"
        elif kind == "start":
            self._begin(event)
        elif kind == "step":
            self._take_step(event)
        elif kind == "data":
            self.data = event
        elif kind == "evaluate" and event["set"] == "validation":
            self.evaluation = event
        elif kind == "checkpoint":
            self.checkpoint = event
        elif kind == "failure":
            self.status = f"failed: {event['cause']}"
        elif kind == "stop":
            self.status = f"stopped: {event['cause']}"
        else:
            self._end(event)

    def _end(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "early_stop":
            self.planned_steps = self.steps
        elif kind == "finish":
            self.status, self.final = "finishing", event
            self.step = self.steps = event["step"]
        elif kind == "summary":
            self.status, self._trained = "finished", False
            if self.planned_steps is not None and self.planned_steps > self.step:
                self.status = f"finished, stopped early at step {self.step:,} of {self.planned_steps:,}"

    def _begin(self, event: Event) -> None:
        self.restarts += self._trained
        self.status, self._trained, self._pace = "training", True, None
        self.final = self.planned_steps = None
        self.step, self.steps, self.num_workers = event["step"], event.get("steps"), event.get("world_size")

    def _take_step(self, event: Event) -> None:
        self.step, self.steps, self.rows, self.loss = event["step"], event["steps"], event["rows"], event["loss"]
        self.rows_per_s, self.blocked_fraction = event["rows_per_s"], event["blocked_fraction"]
        self.peak_fraction, self.learning_rate = event.get("peak_fraction"), event.get("learning_rate")
        self._pace = self._pace or (event["step"], event["time"])
        times_s = event.get("times_s") or {}
        total_s = sum(value or 0.0 for value in times_s.values())
        self.shares = {name: (times_s.get(name) or 0.0) / total_s for name in PHASES} if total_s else {}

    def verdict(self) -> Verdict | None:
        """On the events that are kept, of a run in progress again at most every five seconds; None: nothing to go by."""
        due = self.ended or time.monotonic() >= self._next_verdict_s
        if due and len(self.events) != self._verdict_on:
            self._verdict, self._verdict_on = verdict(self.events), len(self.events)
            self._next_verdict_s = time.monotonic() + _VERDICT_S
        return self._verdict

    def left_s(self) -> float | None:
        """Seconds to the last step at the pace of this attempt, its saves and evaluations included; None: not known yet."""
        if self._pace is None or self.steps is None or self.last_time_s is None:
            return None
        first_step, first_s = self._pace
        if self.step == first_step:
            return None
        return (self.steps - self.step) * (self.last_time_s - first_s) / (self.step - first_step)

    def figures(self) -> list[tuple[str, str]]:
        """(name, value) of all that is known, the most important first."""
        found: list[tuple[str, str]] = []
        if self.loss is not None:
            found.append(("loss", metric_text(self.loss)))
        metrics = (self.final or {}).get("metrics") or self.evaluation or {}
        shown = [name for name in _SHOWN_METRICS if metrics.get(name) is not None][:1]
        found += [(name, metric_text(metrics[name])) for name in shown]
        if self.final is not None and self.final.get("chosen_step") is not None:
            found.append(("weights of", f"step {self.final['chosen_step']:,}"))
        if self.rows_per_s is not None:
            found.append(("rows/s", number_text(round(self.rows_per_s))))
        if self.blocked_fraction is not None:
            found.append(("blocked", f"{self.blocked_fraction:.1%}"))
        if self.peak_fraction is not None:
            # More than all of it means that the peak, measured for some hundredths of a second, was underestimated.
            found.append(
                ("of peak", f"{self.peak_fraction:.0%}" if self.peak_fraction <= 1 else "above the measured one")
            )
        if self.learning_rate is not None:
            found.append(("learning rate", f"{self.learning_rate:.3g}"))
        left_s = self.left_s()
        if left_s is not None and not self.ended:
            found.append(("left", duration_text(round(left_s))))
        if self.checkpoint is not None:
            found.append(("saved", f"step {self.checkpoint['step']:,} ({size_text(self.checkpoint['bytes'])})"))
        if self.restarts:
            found.append(("restarts", str(self.restarts)))
        return found

    def line(self) -> str:
        """The figures in one line."""
        return "  ".join(f"{name} {value}" for name, value in self.figures())


_STYLES: Final = dict(zip(PHASES, ("red", "magenta", "blue", "cyan", "green", "yellow", "bright_black"), strict=True))
_BAR_CELLS: Final = 40
_STALE_S: Final = 60.0
"""After which the age of the last event is worth telling."""


def panel(view: RunView, *, now_s: float | None = None, full: bool = False) -> RenderableType:
    """What is known of a run, in a few lines; `full`: where the time goes, what the data side does and the verdict as well.
    `now_s`: unix time."""
    parts: list[RenderableType] = [_progress(view), _figures(view)]
    if view.shares:
        parts.append(_split(view.shares))
    if full:
        parts += _details(view)
    age_s = (time.time() if now_s is None else now_s) - (view.last_time_s or 0.0)
    status = view.status
    if full and view.last_time_s is not None and age_s > _STALE_S and not view.ended:
        status += f" (nothing told for {duration_text(round(age_s))})"
    title = Text(" ".join(part for part in (view.recipe, view.name) if part) or "run")
    return Panel(Group(*parts), title=title, title_align="left", subtitle=Text(status), subtitle_align="left")


def _progress(view: RunView) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    told = f"step {view.step:,}" + (f" of {view.steps:,}" if view.steps else "")
    grid.add_row(ProgressBar(total=view.steps or 1, completed=view.step, width=_BAR_CELLS), Text(told))
    return grid


def _figures(view: RunView) -> RenderableType:
    text = Text()
    for name, value in view.figures():
        text.append(f"{name} ", style="dim").append(f"{value}   ")
    return text


def _split(shares: Mapping[str, float]) -> RenderableType:
    """A bar of the last interval's phases, and their shares in words."""
    bar, words = Text(), Text()
    for name in PHASES:
        cells = round(shares[name] * _BAR_CELLS)
        bar.append("█" * cells, style=_STYLES[name])
        if shares[name] >= 0.005:
            words.append(" ■ ", style=_STYLES[name]).append(f"{WORDS[name]} {shares[name]:.0%}")
    return Group(bar, words)


def _details(view: RunView) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if view.data is not None and view.data.get("stages"):
        parts.append(_data(view.data))
    found = view.verdict()
    if found is not None:
        parts.append(Text(found.text, style="bold"))
    return parts


def _data(event: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("data", "rows/s it could", "busy", "computing"):
        table.add_column(head, justify="left" if head == "data" else "right")
    for stage in event["stages"]:
        rate = number_text(round(stage["rows_per_s"]))
        table.add_row(stage["stage"], rate, f"{min(1.0, stage['busy']):.0%}", f"{min(1.0, stage['cpu_share']):.0%}")
    told = f"backlog {number_text(round(event['backlog_rows']))} rows"
    if event.get("object_store_bytes") is not None:
        told += (
            f"   object store {size_text(event['object_store_bytes'])} of {size_text(event['object_store_limit_bytes'])}"
            f"   spilled {size_text(event['spilled_bytes'])}"
        )
    return Group(table, Text(told, style="dim"))
