"""Several runs on one page: numbers side by side, curves over each other, and what differs in the configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rayrec import storage
from rayrec.config import InputError
from rayrec.observe.charts import Line, line_chart
from rayrec.observe.cost import Cost, Price, cost
from rayrec.observe.history import VALIDATION, attempts, logged, standing
from rayrec.observe.page import document, section, table
from rayrec.observe.quantities import duration_text, number_text, value_text
from rayrec.observe.report import Run, read
from rayrec.observe.report_course import drawn_metrics, points
from rayrec.observe.report_style import NUM_SERIES


def write(folders: Sequence[str], *, out: str, price: Price | None = None) -> str:
    """Writes the report on the runs in `folders` to `out` and returns where it is. Raises InputError where one holds no run, and
    for more runs than can be told apart."""
    if len(folders) > NUM_SERIES:
        raise InputError(f"{len(folders)} runs: at most {NUM_SERIES} can be told apart on one page")
    page = render([read(folder) for folder in folders], price=price)
    storage.write_bytes(out, page.encode())
    return storage.absolute(out)


def render(runs: Sequence[Run], *, price: Price | None = None) -> str:
    """The page on several runs. Pure."""
    names = _names(runs)
    rows = [logged(run.events) for run in runs]
    return document(
        f"{len(runs)} runs",
        (
            section("Results", _results(runs, names, price)),
            section("Curves", _curves(names, rows)),
            section("Configurations", _differences(runs, names)),
        ),
    )


def _names(runs: Sequence[Run]) -> list[str]:
    """A name for each, none twice."""
    plain = [str(run.begun.get("name") or "run") for run in runs]
    return [name if plain.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(plain, start=1)]


def _results(runs: Sequence[Run], names: Sequence[str], price: Price | None) -> str:
    columns = [_column(run, cost(run.events, price) if price is not None else None) for run in runs]
    heads = list(dict.fromkeys(name for column in columns for name in column))
    return table(
        ["", *names],
        [[head, *(column.get(head, "-") for column in columns)] for head in heads],
        name="Results",
        unfolded=True,
    )


def _column(run: Run, spent: Cost | None) -> dict[str, str]:
    last = next((event for event in reversed(run.events) if event["kind"] == "step"), None)
    told: Mapping[str, Any] = run.summary or last or {}
    column = {"recipe": str(run.begun.get("recipe", "-")), "status": standing(run.events)}
    if told:
        column["steps"] = f"{told['steps'] if run.summary else told['step']:,}"
        column["rows trained"] = number_text(told["rows"])
        column["rows/s"] = number_text(round(told["rows_per_s"]))
        column["blocked on data"] = f"{told['blocked_fraction']:.1%}"
    if run.summary:
        column["training"] = duration_text(run.summary["train_s"])
        column |= {f"test {name}": value_text(value) for name, value in run.summary["metrics"].items()}
    column["restarts"] = str(sum(attempt.restart is not None for attempt in attempts(run.events)))
    if spent is not None:
        column["cost"] = f"{spent.total:.4g}"
        column["cost per epoch"] = "-" if spent.per_epoch is None else f"{spent.per_epoch:.4g}"
        column["cost per 0.01 of AUROC above 0.5"] = (
            "-" if spent.per_auroc_point is None else f"{spent.per_auroc_point:.4g}"
        )
    column["config hash"] = str(run.begun.get("config_hash", "-"))
    return column


def _curves(names: Sequence[str], rows: Sequence[list[dict[str, Any]]]) -> str:
    metrics = dict.fromkeys(name for each in rows for name in drawn_metrics(each))
    titles = {
        "loss": "Training loss",
        f"{VALIDATION}loss": "Validation loss",
        **{name: f"Validation {name.removeprefix(VALIDATION)}" for name in metrics},
        "rows_per_s": "Rows per second",
        "blocked_fraction": "Share of time blocked on data",
    }
    charts = [
        line_chart(
            title,
            [Line(name, points(each, field)) for name, each in zip(names, rows, strict=True)],
            x_label="step",
            from_zero=field in ("rows_per_s", "blocked_fraction"),
        )
        for field, title in titles.items()
    ]
    drawn = "".join(charts)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _differences(runs: Sequence[Run], names: Sequence[str]) -> str:
    flat = [_flat(yaml.safe_load(run.config) or {}) for run in runs]
    keys = dict.fromkeys(key for fields in flat for key in fields)
    rows = [
        [key, *(fields.get(key, "-") for fields in flat)]
        for key in keys
        if len({fields.get(key, "-") for fields in flat}) > 1
    ]
    if not rows:
        return "<p>They are the same.</p>"
    return table(["field", *names], rows, name="What differs in the configurations", unfolded=True)


def _flat(fields: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(fields, dict) and fields:
        parts = [_flat(value, f"{prefix}{key}.") for key, value in fields.items()]
        return {key: value for part in parts for key, value in part.items()}
    return {prefix.removesuffix("."): str(fields)}
