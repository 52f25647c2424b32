"""Report that compares several runs: metrics in columns, overlaid curves, and configuration
differences.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import yaml
from markupsafe import Markup

from rayrec.config import InputError
from rayrec.humanize import durations_text, number_text, value_text
from rayrec.metrics.registry import BINARY_METRICS
from rayrec.observe.report.charts import NUM_SERIES, Line, line_chart
from rayrec.observe.report.page import (
    BEST,
    Section,
    charts,
    document,
    draw,
    join_parts,
    paragraph,
    table,
)
from rayrec.observe.report.run import Run, read, save
from rayrec.observe.report.training import plotted_metrics, points
from rayrec.observe.run_summary import VALIDATION, Cost, Price

_BETTER: dict[str, Callable[[Iterable[float]], float]] = {
    **{
        metric.name: max if metric.better == "higher" else min
        for metric in BINARY_METRICS
        if metric.better
    },
    **dict.fromkeys(("loss", "perplexity"), min),
}
"""Function that selects the better of two values, by metric."""


def write(folders: Sequence[str], *, out: str, price: Price | None = None) -> str:
    """Write the comparison report to the file or folder `out` and return its path. Raises
    InputError if a folder contains no run, or for more runs than the charts can distinguish.
    """
    if len(folders) > NUM_SERIES:
        raise InputError(
            f"runs: must be at most {NUM_SERIES}, to be distinguishable, got {len(folders)}"
        )
    return save(render([read(folder) for folder in folders], price=price), out)


def render(runs: Sequence[Run], *, price: Price | None = None) -> str:
    """Render the page. Pure."""
    names = _names(runs)
    return document(
        f"{len(runs)} runs",
        (
            Section(
                "Results",
                join_parts((_results(runs, names, price), draw("parts.html", "significance"))),
            ),
            Section("Mean over seeds", _seed_statistics(runs)),
            Section("Curves", _curves(names, [run.sums.curve() for run in runs])),
            Section("Configurations", _differences(runs, names)),
        ),
        wide=True,
    )


def _names(runs: Sequence[Run]) -> list[str]:
    plain = [str(run.run_event.get("name") or "run") for run in runs]
    return [
        name if plain.count(name) == 1 else f"{name} ({number})"
        for number, name in enumerate(plain, start=1)
    ]


def _results(runs: Sequence[Run], names: Sequence[str], price: Price | None) -> Markup:
    columns = [_column(run, run.sums.cost(price) if price is not None else None) for run in runs]
    seconds = [run.summary["train_s"] if run.summary else None for run in runs]
    texts = iter(durations_text([value for value in seconds if value is not None]))
    for column, value in zip(columns, seconds, strict=True):
        if value is not None:
            column["training"] = next(texts)
    rows = [
        [head, *_best_marked(head, [column.get(head, "-") for column in columns], runs)]
        for head in dict.fromkeys(name for column in columns for name in column)
    ]
    return table(
        ["", *names], [row for row in rows if set(row[1:]) != {"-"}], name="Results", unfolded=True
    )


def _best_marked(head: str, cells: list[str], runs: Sequence[Run]) -> list[str]:
    """Mark the best cell in a row of test metrics. Other rows, and rows of equal values, stay
    unchanged.
    """
    name = head.removeprefix("test ")
    values = {
        index: value
        for index, run in enumerate(runs)
        if run.summary
        and isinstance(value := run.summary["metrics"].get(name), float)
        and math.isfinite(value)
    }
    if not head.startswith("test ") or name not in _BETTER or len(set(values.values())) < 2:
        return cells
    best = _BETTER[name](values.values())
    return [BEST + cell if values.get(index) == best else cell for index, cell in enumerate(cells)]


def _seed_statistics(runs: Sequence[Run]) -> Markup:
    """Tabulate mean and standard deviation of test metrics over finished runs that differ only in
    seed and name.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    recipes: dict[str, str] = {}
    for run in runs:
        if run.summary:
            fields = _flat(yaml.safe_load(run.config) or {})
            key = str(
                sorted(
                    (name, value) for name, value in fields.items() if name not in ("seed", "name")
                )
            )
            groups.setdefault(key, []).append(run.summary["metrics"])
            recipes.setdefault(
                key, f"{run.run_event.get('recipe', 'run')} ({run.run_event.get('name', '')}, ...)"
            )
    repeated = {key: group for key, group in groups.items() if group[1:]}
    names = dict.fromkeys(
        name for group in repeated.values() for metrics in group for name in metrics
    )
    names = {name: None for name in names if name in _BETTER}
    rows = [
        [
            recipes[key],
            str(len(group)),
            *(_mean_text([metrics.get(name) for metrics in group]) for name in names),
        ]
        for key, group in repeated.items()
    ]
    heads = [
        "runs that differ only in seed",
        "runs",
        *(f"test {name}, mean ± sd" for name in names),
    ]
    return table(heads, rows, name="Mean over seeds", unfolded=True) if rows else Markup()


def _mean_text(values: Sequence[float | None]) -> str:
    present = [value for value in values if value is not None]
    return (
        "-"
        if len(present) < 2
        else f"{statistics.fmean(present):.5f} ± {statistics.stdev(present):.5f}"
    )


def _column(run: Run, spent: Cost | None) -> dict[str, str]:
    source: Mapping[str, Any] = run.summary or run.sums.latest.get("step") or {}
    column = {"recipe": str(run.run_event.get("recipe", "-")), "status": run.sums.standing()}
    if source:
        column["steps"] = f"{source['steps'] if run.summary else source['step']:,}"
        column["rows trained"] = number_text(source["rows"])
        column["rows/s"] = number_text(round(source["rows_per_s"]))
        column["blocked on data"] = f"{source['blocked_fraction']:.1%}"
    if run.summary:
        column["training"] = "-"
        column |= {
            f"test {name}": value_text(value) for name, value in run.summary["metrics"].items()
        }
    column["restarts"] = str(len(run.sums.restarts))
    if spent is not None:
        costs = {
            "": spent.total,
            " per epoch": spent.per_epoch,
            " per 0.01 of AUROC above 0.5": spent.per_auroc_point,
        }
        for name, value in costs.items():
            column[f"cost{name} ({spent.currency})"] = "-" if value is None else f"{value:.4g}"
    column["config hash"] = str(run.run_event.get("config_hash", "-"))
    return column


def _curves(names: Sequence[str], rows: Sequence[list[dict[str, Any]]]) -> Markup:
    metrics = dict.fromkeys(name for each in rows for name in plotted_metrics(each))
    titles = {
        "loss": "Training loss",
        f"{VALIDATION}loss": "Validation loss",
        **{name: f"Validation {name.removeprefix(VALIDATION)}" for name in metrics},
        "rows_per_s": "Rows per second",
        "blocked_fraction": "Share of time blocked on data",
    }
    figures = []
    for field, title in titles.items():
        lines = [Line(name, points(each, field)) for name, each in zip(names, rows, strict=True)]
        figures.append(
            line_chart(
                title, lines, x_label="step", from_zero=field in ("rows_per_s", "blocked_fraction")
            )
        )
    return charts(figures)


def _differences(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    flat = [_flat(yaml.safe_load(run.config) or {}) for run in runs]
    keys = dict.fromkeys(key for fields in flat for key in fields)
    rows = [
        [key, *(fields.get(key, "-") for fields in flat)]
        for key in keys
        if len({fields.get(key, "-") for fields in flat}) > 1
    ]
    if not rows:
        return paragraph("All configurations are equal.")
    return table(["field", *names], rows, name="Configuration differences", unfolded=True)


def _flat(fields: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(fields, dict) and fields:
        parts = [_flat(value, f"{prefix}{key}.") for key, value in fields.items()]
        return {key: value for part in parts for key, value in part.items()}
    return {prefix.removesuffix("."): str(fields)}
