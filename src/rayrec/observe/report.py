"""A run on one page: everything its events tell, as an HTML file that needs no other file and runs no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from rayrec import storage
from rayrec.config import InputError
from rayrec.observe.charts import Line, Mark, line_chart
from rayrec.observe.events import read_events
from rayrec.observe.history import VALIDATION, Attempt, Event, attempts, logged, metrics_of, standing
from rayrec.observe.pictures import data_url
from rayrec.observe.quantities import clock_text, date_text, duration_text, number_text, size_text, value_text
from rayrec.observe.report_style import STYLE

_LONG_TABLE = 12
"""Rows beyond which a table is folded."""
_UNDRAWN = {"rows", "label_rate"}
"""Validation metrics that tell of the data, not of the model."""


def write(folder: str, *, out: str | None = None) -> str:
    """Writes the report on the run in `folder`, local or a URL, to `out` (None: report.html in it) and returns where it is.

    Raises InputError where `folder` holds no run.
    """
    config, summary = storage.join(folder, "config.yaml"), storage.join(folder, "summary.json")
    if not storage.exists(config):
        raise InputError(f"{folder}: not the folder of a run, which holds a config.yaml; give storage_path/name of one")
    page = render(
        storage.read_bytes(config).decode(),
        read_events(storage.join(folder, "events.jsonl")),
        storage.read_json(summary) if storage.exists(summary) else None,
    )
    out = out or storage.join(folder, "report.html")
    storage.write_bytes(out, page.encode())
    return storage.absolute(out)


def write_or_note(folder: str, *, note: Callable[[str], None]) -> None:
    """`write`, for the end of a run, which no trouble with its report shall spoil: that is noted in one line."""
    try:
        write(folder)
    except Exception as error:
        note(f"{folder}: no report could be written ({' '.join(str(error).split())}); `rayrec report` tries again")


def render(config: str, events: Sequence[Event], summary: Mapping[str, Any] | None) -> str:
    """The page on a run: its config.yaml, its events by time, and its summary.json (None: it is not finished). Pure."""
    run = next((event for event in reversed(events) if event["kind"] == "run"), {})
    title = f"{run.get('recipe', 'run')}: {run.get('name', '')}"
    rows, tried = logged(events), attempts(events)
    sections = (
        _facts(run, events),
        _figures(events, summary, rows, tried),
        _metrics(events, summary),
        _curves(rows, events, tried, summary),
        _samples(events),
        _attempts(tried),
        _checkpoints(events),
        f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>",
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n"
    )


# -- what it is and how it went


def _facts(run: Event, events: Sequence[Event]) -> str:
    facts = [("status", standing(events))]
    if events:
        began_s, ended_s = events[0]["time"], events[-1]["time"]
        facts += [
            ("began", date_text(began_s)),
            ("last event", f"{date_text(ended_s)}, {duration_text(ended_s - began_s)} later"),
        ]
    if run:
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        facts += [("config hash", run["config_hash"]), ("versions", versions)]
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts)
    return f"<dl>{items}</dl>"


def _figures(
    events: Sequence[Event], summary: Mapping[str, Any] | None, rows: list[dict[str, Any]], tried: Sequence[Attempt]
) -> str:
    """The numbers to see first."""
    last = next((event for event in reversed(events) if event["kind"] == "step"), None)
    figures: list[tuple[str, str]] = []
    if summary is not None:
        figures = [
            ("steps", f"{summary['steps']:,}"),
            ("rows trained", number_text(summary["rows"])),
            ("rows/s", number_text(round(summary["rows_per_s"]))),
            ("blocked on data", f"{summary['blocked_fraction']:.1%}"),
            ("training", duration_text(summary["train_s"])),
            ("held up by saves", f"{summary['checkpoint_stall_fraction']:.1%}"),
        ]
    elif last is not None:
        figures = [
            ("steps", f"{last['step']:,} of {last['steps']:,}"),
            ("rows trained", number_text(last["rows"])),
            ("rows/s", number_text(round(last["rows_per_s"]))),
            ("blocked on data", f"{last['blocked_fraction']:.1%}"),
        ]
    costs = [attempt.restart for attempt in tried if attempt.restart is not None]
    if rows:
        figures.append(("restarts", str(len(costs))))
    if costs:
        figures += [
            ("lost to restarts", duration_text(sum(cost.lost_s for cost in costs))),
            ("steps done again", f"{sum(cost.steps_redone for cost in costs):,}"),
        ]
    tiles = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in figures)
    return f'<section class="figures">{tiles}</section>' if tiles else ""


def _metrics(events: Sequence[Event], summary: Mapping[str, Any] | None) -> str:
    if summary is not None:
        sets = {"test": summary["metrics"], "validation": summary["validation"]}
        if summary["metrics"] == summary["validation"]:  # without test rows, or with the same
            sets = {"validation": summary["validation"]}
    else:
        evaluation = next((event for event in reversed(events) if event["kind"] == "evaluate"), None)
        if evaluation is None:
            return ""
        sets = {f"{evaluation['set']} at step {evaluation['step']:,}": metrics_of(evaluation)}
    names = list(dict.fromkeys(name for metrics in sets.values() for name in metrics))
    table = [[name, *(value_text(metrics.get(name)) for metrics in sets.values())] for name in names]
    return _section("Metrics", _table(["", *sets], table))


# -- curves


def _curves(
    rows: list[dict[str, Any]], events: Sequence[Event], tried: Sequence[Attempt], summary: Mapping[str, Any] | None
) -> str:
    metrics = list(dict.fromkeys(name for row in rows for name in row if name.startswith(VALIDATION)))
    by_step, by_time, unit, unit_s = *_marks(tried, summary), *_time_unit(events)
    by_time = [Mark(mark.x / unit_s, mark.label, mark.text) for mark in by_time]
    losses = [Line("training", _points(rows, "loss"))]
    if f"{VALIDATION}loss" in metrics:
        losses.append(Line("validation", _points(rows, f"{VALIDATION}loss")))
    charts = [line_chart("Loss" if losses[1:] else "Training loss", losses, x_label="step", marks=by_step)]
    for name in metrics:
        title = name.removeprefix(VALIDATION)
        if title not in _UNDRAWN and title != "loss":
            line = Line(title, _points(rows, name))
            charts.append(line_chart(f"Validation {title}", [line], x_label="step", marks=by_step))
    steps = [
        event for event in events if event["kind"] in ("step", "start")
    ]  # a start has no speed and breaks the line
    for title, name in (("Rows per second", "rows_per_s"), ("Share of time blocked on data", "blocked_fraction")):
        line = Line(title, [((event["time"] - events[0]["time"]) / unit_s, event.get(name)) for event in steps])
        charts.append(line_chart(title, [line], x_label=f"time ({unit})", marks=by_time, from_zero=True))
    drawn = "".join(charts)
    return _section("Curves", f'<div class="charts">{drawn}</div>') if drawn else ""


def _points(rows: list[dict[str, Any]], name: str) -> list[tuple[float, float | None]]:
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


def _time_unit(events: Sequence[Event]) -> tuple[str, float]:
    seconds = events[-1]["time"] - events[0]["time"] if events else 0.0
    return next((unit, size) for unit, size, most in _UNITS if seconds < most)


_UNITS = (("s", 1.0, 300.0), ("min", 60.0, 3 * 3600.0), ("h", 3600.0, float("inf")))


# -- samples


def _samples(events: Sequence[Event]) -> str:
    drawn: list[Mapping[str, Any]] = next(
        (event["samples"] for event in reversed(events) if event["kind"] == "samples"), []
    )
    images = "".join(_image(sample) for sample in drawn if sample["kind"] == "image")
    texts = "".join(_text(sample) for sample in drawn if sample["kind"] == "text")
    body = (f'<div class="images">{images}</div>' if images else "") + texts
    return _section("Samples, by the final weights", body) if body else ""


def _image(sample: Mapping[str, Any]) -> str:
    label, prediction = str(sample["label"]), str(sample["prediction"])
    wrong = label != prediction
    sure = f" ({sample['probability']:.0%})" if sample.get("probability") is not None else ""
    verdict = f"✗ {prediction}{sure}, is {label}" if wrong else f"✓ {prediction}{sure}"
    shown = escape(f"label {label}, prediction {prediction}")
    return (
        f'<figure class="{"wrong" if wrong else "right"}"><img src="{data_url(sample["pixels"])}" alt="{shown}" title="{shown}">'
        f"<figcaption>{escape(verdict)}</figcaption></figure>"
    )


def _text(sample: Mapping[str, Any]) -> str:
    return f'<p class="text"><b>{escape(str(sample["prompt"]))}</b>{escape(str(sample["text"]))}</p>'


# -- tables


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
    return _section("Attempts", _table(heads, rows)) if rows else ""


def _checkpoints(events: Sequence[Event]) -> str:
    rows: list[list[str]] = []
    for event in events:
        after = clock_text(event["time"] - events[0]["time"])
        if event["kind"] == "checkpoint":
            cells = [size_text(event["bytes"]), duration_text(event["stall_s"]), duration_text(event["write_s"])]
            rows.append([after, f"{event['step']:,}", *cells, ""])
        elif event["kind"] == "checkpoint_late":
            rows.append([after, f"{event['step']:,}", "", "", "", f"not saved: {event['cause']}"])
        elif event["kind"] == "checkpoint_damaged":
            rows.append([after, "", "", "", "", f"passed over: {event['cause']}"])
    heads = ["after", "step", "size", "training held up", "written in", ""]
    return _section("Checkpoints", _table(heads, rows)) if rows else ""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<details><summary>{len(rows)} rows</summary>{table}</details>" if len(rows) > _LONG_TABLE else table
