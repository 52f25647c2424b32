"""Report sections about training: curves, time, attempts, checkpoints, cost. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from markupsafe import Markup

from rayrec.config import packaged_json
from rayrec.humanize import TIME_UNITS, clock_text, duration_text, number_text, size_text
from rayrec.observe.console import console_line
from rayrec.observe.data_side import PipelineStats
from rayrec.observe.report.charts import (
    Bar,
    Line,
    Mark,
    Moment,
    Span,
    line_chart,
    stacked_bars,
    timeline,
)
from rayrec.observe.report.page import Section, charts, facts, table
from rayrec.observe.run_summary import VALIDATION, Attempt, Cost, Event, RunSummary
from rayrec.observe.timing import STAGES, WORDS, in_order

UNDRAWN = {"rows", "label_rate"}
"""Validation metrics that describe the data, not the model."""
_NUM_LAST_STARTS = 4
"""Number of last starts shown, in addition to the first."""
_NUM_PARTS = 5
"""Number of run parts with separate time breakdowns."""


STEP_CHARTS: Final[dict[str, str]] = packaged_json(__package__, "step_charts.json")
"""Title and step-event field of each chart over time."""


def curves(sums: RunSummary, events: Sequence[Event], summary: Mapping[str, Any] | None) -> Section:
    """Plot loss and metrics by step, speed and waiting by time."""
    rows = sums.curve()
    by_step, by_time, (unit, unit_s) = *_marks(sums.attempts, summary), time_unit(events)
    by_time = [replace(mark, x=mark.x / unit_s) for mark in by_time]
    losses = [Line("training", points(rows, "loss"))]
    if any(f"{VALIDATION}loss" in row for row in rows):
        losses.append(Line("validation", points(rows, f"{VALIDATION}loss")))
    figures = [
        line_chart("Loss" if losses[1:] else "Training loss", losses, x_label="step", marks=by_step)
    ]
    for name in plotted_metrics(rows):
        line = Line(name.removeprefix(VALIDATION), points(rows, name))
        figures.append(line_chart(f"Validation {line.name}", [line], x_label="step", marks=by_step))
    # A start breaks the line.
    steps = [event for event in events if event["kind"] in ("step", "start")]
    for title, name in STEP_CHARTS.items():
        if any(name in event for event in steps):
            line = Line(
                title,
                [
                    ((event["time"] - events[0]["time"]) / unit_s, event.get(name))
                    for event in steps
                ],
            )
            figures.append(
                line_chart(title, [line], x_label=f"time ({unit})", marks=by_time, from_zero=True)
            )
    return Section("Curves", charts(figures))


def plotted_metrics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the row fields of the validation metrics with their own charts."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(VALIDATION))
    return [name for name in names if name.removeprefix(VALIDATION) not in {*UNDRAWN, "loss"}]


def points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float | None]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def _marks(
    attempts: Sequence[Attempt], summary: Mapping[str, Any] | None
) -> tuple[list[Mark], list[Mark]]:
    """Return annotations of restarts and selected weights, by step and by seconds since the run
    began.
    """
    restarted = [attempt for attempt in attempts if attempt.restart is not None]
    by_step = []
    by_time = []
    for number, attempt in enumerate(restarted, start=1):
        assert attempt.restart is not None
        text = f"restart {number} from step {attempt.first_step:,}: {attempt.restart.cause}"
        by_step.append(Mark(attempt.first_step or 0, f"↻{number}", text))
        by_time.append(Mark(attempt.begin_s, f"↻{number}", text))
    if summary is not None and summary["chosen_step"] != summary["steps"]:
        step = summary["chosen_step"]
        by_step.append(Mark(step, "★", f"the weights to use: step {step:,}"))
    return by_step, by_time


def time_unit(events: Sequence[Event]) -> tuple[str, float]:
    """Return a suitable time unit for the length of the run, and its seconds."""
    seconds = events[-1]["time"] - events[0]["time"] if events else 0.0
    return next((unit, size) for unit, size, limit in TIME_UNITS if seconds < limit)


def time_split(events: Sequence[Event]) -> Section | None:
    """Show how the time was spent, over the full run and over fifths of its logged steps."""
    steps = [index for index, event in enumerate(events) if event["kind"] == "step"]
    edges = sorted({round(number * len(steps) / _NUM_PARTS) for number in range(_NUM_PARTS + 1)})
    # Saves and evaluations after a step belong to its fifth. Cumulative sums, because step rows
    # count from the start.
    bounds = [[*steps, len(events)][edge] for edge in edges]
    run = RunSummary(curves=False)
    sums = []
    for begin, end in pairwise([0, *bounds]):
        for event in events[begin:end]:
            run.update(event)
        # One summary for all fifths, since an event's times depend on the events before it.
        sums.append(run.time.parts_s())
    spent = sums[-1]
    names = [name for name in WORDS if spent[name]]
    if not names:
        return None
    shown = [WORDS[name] for name in names]
    total = stacked_bars(
        "Full run", shown, [Bar("total", [spent[name] for name in names])], text=duration_text
    )
    if len(edges) < 3:
        return Section("Where the time went", total)
    bars = []
    for edge, (before, after) in zip(edges[1:], pairwise(sums), strict=True):
        seconds = [after[name] - before[name] for name in names]
        last = events[steps[edge - 1]]["step"]
        bars.append(Bar(f"to step {last:,}", [part / max(sum(seconds), 1e-12) for part in seconds]))
    return Section(
        "Where the time went",
        total + stacked_bars("Over the run", shown, bars, text=lambda value: f"{value:.1%}"),
    )


def stages(side: PipelineStats | None) -> Section | None:
    """Show the measured and possible speed of each data stage."""
    if side is None or not side.stages:
        return None
    heads = ["stage", "possible rows/s", "busy", "computing", "queued for a CPU"]
    rows = []
    for stage in side.stages:
        fractions = [
            f"{fraction:.1%}" for fraction in (stage.busy, stage.cpu_fraction, stage.queue_fraction)
        ]
        rows.append([stage.name, number_text(round(stage.rows_per_s)), *fractions])
    named = [
        ("data CPUs", f"{side.cpus:g}, busy {side.busy:.1%} of the time"),
        ("rows/s", number_text(round(side.rows_per_s))),
        ("possible rows/s", number_text(round(side.capacity_rows_per_s or 0.0))),
        ("rows ready", number_text(round(side.backlog_rows))),
    ]
    if side.store_fill is not None:
        spilled = f", {size_text(side.spilled_bytes)} spilled to disk" if side.spilled_bytes else ""
        named.append(("object store", f"{side.store_fill:.1%} in use{spilled}"))
    name = "Stages of the data pipeline, over the run"
    return Section("Data pipeline, over the run", table(heads, rows, name=name) + facts(named))


def nodes(on: Mapping[str, Sequence[str]]) -> Section | None:
    """List what runs on each node in the last attempt. None without nodes in the events."""
    rows = [[node, ", ".join(runs)] for node, runs in on.items()]
    return (
        Section("Nodes of the last attempt", table(["node", "runs"], rows, name="Nodes"))
        if rows
        else None
    )


def start_up(starts: Sequence[Mapping[str, float]]) -> Section | None:
    """Show the time of each startup stage, for the first start and the last restarts."""
    shown = list(enumerate(starts, start=1))
    shown = shown[:1] + shown[1:][-_NUM_LAST_STARTS:]
    stages_of = [stages for _, stages in shown]
    rows = [
        [
            STAGES.get(name, name),
            *(duration_text(stages[name]) if name in stages else "" for stages in stages_of),
        ]
        for name in in_order(stages_of)
    ]
    if not rows:
        return None
    rows.append(["total", *(duration_text(sum(stages.values())) for stages in stages_of)])
    return Section(
        "Start-up",
        table(
            ["stage", *(f"start {number}" for number, _ in shown)], rows, name="Stages of the start"
        ),
    )


def course(events: Sequence[Event], attempts: Sequence[Attempt]) -> Section | None:
    """Show training, downtime, evaluations and saves on a timeline, and list the attempts."""
    if not attempts:
        return None
    lasts = [*(attempt.begin_s for attempt in attempts[1:]), _since(events, events[-1])]
    trained = []
    down = []
    for number, (attempt, next_s) in enumerate(zip(attempts, lasts, strict=True), start=1):
        # An attempt's first and last sign of life. Its begin is when it was started, which on a
        # full cluster is long before.
        alive = [
            _since(events, event)
            for event in events
            if event["kind"] in ("start", "step", "evaluate", "checkpoint", "stop", "finish")
            and attempt.begin_s <= _since(events, event) <= next_s
        ]
        if not alive:
            continue
        text = (
            f"attempt {number}, {attempt.num_workers} workers: {clock_text(alive[0])} to "
            f"{clock_text(alive[-1])}"
        )
        trained.append(Span(alive[0], alive[-1], f"{text}, {attempt.end or 'in progress'}"))
        cost = attempt.restart
        if cost is not None:
            text = f"{duration_text(cost.lost_s)}: {cost.cause}"
            down.append(Span(max(0.0, alive[0] - cost.lost_s), alive[0], text, lost=True))
    moments = [
        (
            name,
            [
                Moment(_since(events, event), f"step {event['step']:,}")
                for event in events
                if event["kind"] == kind
            ],
        )
        for name, kind in (("evaluations", "evaluate"), ("checkpoints", "checkpoint"))
    ]
    return Section(
        "Attempts",
        timeline("Timeline", [("training", trained), ("restarts", down)], moments)
        + _attempts(attempts),
    )


def _attempts(attempts: Sequence[Attempt]) -> Markup:
    rows = []
    for number, attempt in enumerate(attempts, start=1):
        steps = [
            "-" if step is None else f"{step:,}" for step in (attempt.first_step, attempt.last_step)
        ]
        end = attempt.end or "in progress, or unknown"
        cost = attempt.restart
        lost = [duration_text(cost.lost_s), f"{cost.steps_redone:,}"] if cost else ["", ""]
        rows.append(
            [
                str(number),
                clock_text(attempt.begin_s),
                str(attempt.num_workers or "-"),
                *steps,
                end,
                *lost,
            ]
        )
    heads = [
        "attempt",
        "after",
        "workers",
        "from step",
        "to step",
        "ended",
        "time lost before",
        "repeated steps",
    ]
    return table(heads, rows, name="Attempts")


def checkpoints(events: Sequence[Event]) -> Section:
    """List all saves, including late and damaged ones."""
    rows: list[list[str]] = []
    for event in events:
        kind = event["kind"]
        saved = ["", "", ""]
        problem = ""
        if kind == "checkpoint":
            saved = [
                size_text(event["bytes"]),
                duration_text(event["stall_s"]),
                duration_text(event["write_s"]),
            ]
        elif kind == "checkpoint_late":
            problem = f"not saved: {event['cause']}"
        elif kind in ("checkpoint_damaged", "checkpoint_repaired"):
            problem = console_line(event) or ""
        else:
            continue
        step = f"{event['step']:,}" if kind in ("checkpoint", "checkpoint_late") else ""
        rows.append([clock_text(_since(events, event)), step, *saved, problem])
    heads = ["after", "step", "size", "training blocked", "written in", "problem"]
    return Section("Checkpoints", table(heads, rows, name="Checkpoints") if rows else Markup())


def profiles(events: Sequence[Event]) -> Section:
    """List the recorded profiles and the failed ones."""
    rows = [
        [
            clock_text(_since(events, event)),
            f"{event['step']:,}",
            event.get("path", ""),
            event.get("cause", ""),
        ]
        for event in events
        if event["kind"] in ("profile", "profile_failed")
    ]
    return Section(
        "Profiles",
        table(["after", "step", "folder", "problem"], rows, name="Profiles") if rows else Markup(),
    )


def costs(cost: Cost | None) -> Section | None:
    """Show the cost. None without a price."""
    if cost is None:
        return None
    unit = f" {cost.currency}"
    named = [("node hours", f"{cost.node_hours:.3g}"), ("cost", f"{cost.total:.4g}{unit}")]
    if cost.per_epoch is not None:
        named.append(("per epoch", f"{cost.per_epoch:.4g}{unit}"))
    if cost.per_auroc_point is not None:
        named.append(("per 0.01 of AUROC above 0.5", f"{cost.per_auroc_point:.4g}{unit}"))
    return Section("Cost", facts(named))


def _since(events: Sequence[Event], event: Event) -> float:
    return event["time"] - events[0]["time"]
