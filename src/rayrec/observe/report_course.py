"""Sections of a report on how a run went: curves, where its time went, attempts, checkpoints, what it cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rayrec.observe.bars import Bar, Moment, Span, stacked_bars, timeline
from rayrec.observe.charts import Line, Mark, line_chart
from rayrec.observe.cost import Cost
from rayrec.observe.history import VALIDATION, Attempt, Event
from rayrec.observe.page import facts, section, table
from rayrec.observe.quantities import clock_text, duration_text, number_text, size_text

UNDRAWN = {"rows", "label_rate"}
"""Validation metrics that tell of the data, not of the model."""
_UNITS = (("s", 1.0, 300.0), ("min", 60.0, 3 * 3600.0), ("h", 3600.0, float("inf")))
_PARTS_OF_RUN = 5
"""That the time split is shown for, beside the whole."""
_PARTS_OF_TIME = {
    "data": "waiting for data",
    "host_to_device": "host to device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "collectives": "collectives",
    "other": "other",
}


def curves(
    rows: list[dict[str, Any]], events: Sequence[Event], tried: Sequence[Attempt], summary: Mapping[str, Any] | None
) -> str:
    """Loss and metrics by step, speed and waiting by time."""
    by_step, by_time, (unit, unit_s) = *_marks(tried, summary), time_unit(events)
    by_time = [Mark(mark.x / unit_s, mark.label, mark.text) for mark in by_time]
    losses = [Line("training", points(rows, "loss"))]
    if any(f"{VALIDATION}loss" in row for row in rows):
        losses.append(Line("validation", points(rows, f"{VALIDATION}loss")))
    charts = [line_chart("Loss" if losses[1:] else "Training loss", losses, x_label="step", marks=by_step)]
    for name in drawn_metrics(rows):
        line = Line(name.removeprefix(VALIDATION), points(rows, name))
        charts.append(line_chart(f"Validation {line.name}", [line], x_label="step", marks=by_step))
    steps = [event for event in events if event["kind"] in ("step", "start")]  # a start breaks the line
    for title, name in (
        ("Rows per second", "rows_per_s"),
        ("Share of time blocked on data", "blocked_fraction"),
        ("Share of the device's measured peak", "peak_fraction"),
    ):
        if any(name in event for event in steps):
            line = Line(title, [((event["time"] - events[0]["time"]) / unit_s, event.get(name)) for event in steps])
            charts.append(line_chart(title, [line], x_label=f"time ({unit})", marks=by_time, from_zero=True))
    drawn = "".join(charts)
    return section("Curves", f'<div class="charts">{drawn}</div>' if drawn else "")


def drawn_metrics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of validation metrics, as in the rows, that have a chart of their own."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(VALIDATION))
    return [name for name in names if name.removeprefix(VALIDATION) not in {*UNDRAWN, "loss"}]


def points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float | None]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def _marks(tried: Sequence[Attempt], summary: Mapping[str, Any] | None) -> tuple[list[Mark], list[Mark]]:
    """What happened, by step and by seconds since the run began."""
    again = [attempt for attempt in tried if attempt.restart is not None]
    by_step, by_time = [], []
    for number, attempt in enumerate(again, start=1):
        assert attempt.restart is not None
        text = f"restart {number} from step {attempt.first_step:,}: {attempt.restart.cause}"
        by_step.append(Mark(attempt.first_step or 0, f"↻{number}", text))
        by_time.append(Mark(attempt.begin_s, f"↻{number}", text))
    if summary is not None and summary["chosen_step"] != summary["steps"]:
        by_step.append(Mark(summary["chosen_step"], "★", f"the weights to use: step {summary['chosen_step']:,}"))
    return by_step, by_time


def time_unit(events: Sequence[Event]) -> tuple[str, float]:
    """The unit that suits the length of the run, and its seconds."""
    seconds = events[-1]["time"] - events[0]["time"] if events else 0.0
    return next((unit, size) for unit, size, most in _UNITS if seconds < most)


# -- where the time went


def time_split(events: Sequence[Event]) -> str:
    """Seconds of training by what they were spent on, over the whole run and over fifths of its logged steps."""
    steps = [event for event in events if event["kind"] == "step" and event.get("times_s")]
    names = [name for name in _PARTS_OF_TIME if any(name in event["times_s"] for event in steps)]
    if not steps:
        return ""

    def seconds(part: Sequence[Event]) -> list[float]:
        return [sum(event["times_s"].get(name) or 0.0 for event in part) for name in names]

    shown = [_PARTS_OF_TIME[name] for name in names]
    whole = stacked_bars("Training as a whole", shown, [Bar("all steps", seconds(steps))], text=duration_text)
    edges = [round(number * len(steps) / _PARTS_OF_RUN) for number in range(_PARTS_OF_RUN + 1)]
    pieces = [steps[start:stop] for start, stop in pairwise(edges) if stop > start]
    if len(pieces) == 1:
        return section("Where the time went", whole)
    bars = []
    for piece in pieces:
        spent = seconds(piece)
        bars.append(Bar(f"to step {piece[-1]['step']:,}", [part / max(sum(spent), 1e-12) for part in spent]))
    shares = stacked_bars("In the course of the run", shown, bars, text=lambda value: f"{value:.1%}")
    return section("Where the time went", whole + shares)


def stages(events: Sequence[Event]) -> str:
    """Speed and backlog of each stage of the data pipeline, as last told."""
    last = next((event for event in reversed(events) if event["kind"] == "data" and event.get("stages")), None)
    if last is None:
        return ""
    told = last["stages"]
    heads = list(dict.fromkeys(name for stage in told for name in stage))
    rows = [["" if stage.get(name) is None else _cell(name, stage[name]) for name in heads] for stage in told]
    store = [
        (name.removesuffix("_bytes").replace("_", " "), size_text(last[name]))
        for name in last
        if name.endswith("_bytes") and last[name] is not None
    ]
    return section(
        "Data pipeline",
        table([name.replace("_", " ") for name in heads], rows, name="Stages of the data pipeline")
        + (facts(store) if store else ""),
    )


def _cell(name: str, value: Any) -> str:
    if name == "busy" or name.endswith("_share"):
        return f"{value:.1%}"
    return number_text(round(value)) if isinstance(value, int | float) else str(value)


# -- attempts, checkpoints, cost


def course(events: Sequence[Event], tried: Sequence[Attempt]) -> str:
    """When it trained, when it was down, evaluated and saved; and its attempts."""
    if not tried:
        return ""
    lasts = [*(attempt.begin_s for attempt in tried[1:]), _since(events, events[-1])]
    trained, down = [], []
    for number, (attempt, next_s) in enumerate(zip(tried, lasts, strict=True), start=1):
        alive = [
            _since(events, event)
            for event in events
            if event["kind"] in ("start", "step", "evaluate", "checkpoint", "stop", "finish")
            and attempt.begin_s <= _since(events, event) <= next_s
        ]
        if not alive:
            continue
        text = f"attempt {number}, {attempt.num_workers} workers: {clock_text(alive[0])} to {clock_text(alive[-1])}"
        trained.append(Span(alive[0], alive[-1], f"{text}, {attempt.end or 'under way'}"))
        cost = attempt.restart
        if cost is not None:
            down.append(
                Span(
                    max(0.0, alive[0] - cost.lost_s), alive[0], f"{duration_text(cost.lost_s)}: {cost.cause}", lost=True
                )
            )
    moments = [
        (
            name,
            [Moment(_since(events, event), f"step {event['step']:,}") for event in events if event["kind"] == kind],
        )
        for name, kind in (("evaluations", "evaluate"), ("checkpoints", "checkpoint"))
    ]
    drawn = timeline("What happened when", [("training", trained), ("restarts", down)], moments)
    return section("Attempts", drawn + _attempts(tried))


def _attempts(tried: Sequence[Attempt]) -> str:
    rows = []
    for number, attempt in enumerate(tried, start=1):
        cost = attempt.restart
        began = "-" if attempt.first_step is None else f"{attempt.first_step:,}"
        reached = "-" if attempt.last_step is None else f"{attempt.last_step:,}"
        rows.append(
            [
                str(number),
                clock_text(attempt.begin_s),
                str(attempt.num_workers or "-"),
                began,
                reached,
                attempt.end or "under way, or its end was not told",
                duration_text(cost.lost_s) if cost else "",
                f"{cost.steps_redone:,}" if cost else "",
            ]
        )
    heads = ["attempt", "after", "workers", "from step", "to step", "ended", "time lost before", "steps done again"]
    return table(heads, rows, name="Attempts")


def checkpoints(events: Sequence[Event]) -> str:
    """Every save, late and damaged ones too."""
    rows: list[list[str]] = []
    for event in events:
        after = clock_text(_since(events, event))
        if event["kind"] == "checkpoint":
            cells = [size_text(event["bytes"]), duration_text(event["stall_s"]), duration_text(event["write_s"])]
            rows.append([after, f"{event['step']:,}", *cells, ""])
        elif event["kind"] == "checkpoint_late":
            rows.append([after, f"{event['step']:,}", "", "", "", f"not saved: {event['cause']}"])
        elif event["kind"] == "checkpoint_damaged":
            rows.append([after, "", "", "", "", f"passed over: {event['cause']}"])
    heads = ["after", "step", "size", "training held up", "written in", "trouble"]
    return section("Checkpoints", table(heads, rows, name="Checkpoints") if rows else "")


def profiles(events: Sequence[Event]) -> str:
    """Where the steps that were recorded lie, and what could not be."""
    rows = [
        [clock_text(_since(events, event)), f"{event['step']:,}", event.get("path", ""), event.get("cause", "")]
        for event in events
        if event["kind"] in ("profile", "profile_failed")
    ]
    return section("Profiles", table(["after", "step", "folder", "trouble"], rows, name="Profiles") if rows else "")


def costs(cost: Cost | None) -> str:
    """In money; nothing where no price was given."""
    if cost is None:
        return ""
    named = [("node hours", f"{cost.node_hours:.3g}"), ("cost", f"{cost.total:.4g}")]
    if cost.per_epoch is not None:
        named.append(("per epoch", f"{cost.per_epoch:.4g}"))
    if cost.per_auroc_point is not None:
        named.append(("per 0.01 of AUROC above 0.5", f"{cost.per_auroc_point:.4g}"))
    return section("Cost", facts(named))


def _since(events: Sequence[Event], event: Event) -> float:
    return event["time"] - events[0]["time"]
