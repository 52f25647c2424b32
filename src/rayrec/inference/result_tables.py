"""Console tables of evaluation and comparison results."""

import math
from collections.abc import Sequence
from typing import Any

from rayrec.humanize import aligned
from rayrec.metrics.registry import BINARY_METRICS

_TEXT = ("set", "path", "checkpoint", "preprocessor", "request_time")
_COLUMNS = (
    "rows",
    "label_rate",
    *(metric.name for metric in BINARY_METRICS if metric.has_interval),
)
"""Metrics of slices."""
_COMPARED = ("other", "difference", "its interval", "p")
_COSTS = (
    ("parameters", "parameters"),
    ("multiply_adds", "multiply-adds"),
    ("rows_per_s", "rows/s"),
)
_SPREADS = ("auroc", "logloss", "validation")
_TEST = ("difference", "low", "high", "corrected_p_value")
SEEDS_NOTE = (
    "Mean ± standard deviation over seeds; AUROC difference from the first row, 95% interval, p "
    "with Holm correction"
)


def evaluation_text(result: dict[str, Any]) -> str:
    """Format the result of `evaluate`: a line per metric with interval and comparison, then a table
    per slice_by.
    """
    metrics = metric_rows(result)
    lines = aligned(metrics if len(metrics[0]) > 2 else metrics[1:])
    if "resampling" in result:
        lines.append(resampling_note(result["resampling"]))
    lines += [f"{name}: {value}" for name, value in source_facts(result)]
    if baselines := result.get("baselines"):
        lines += ["", "baselines:", *aligned(baseline_rows(baselines))]
    if "importance" in result:
        importance = result["importance"]
        lines += ["", f"{importance_note(importance)}:", *aligned(importance_rows(importance))]
    for by, slices in result.get("slices", {}).items():
        lines += ["", f"by {by}:", *aligned(slice_rows(slices))]
    return "\n".join(lines)


def source_facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what an evaluation read, as names and values."""
    named = [(name, str(result[name])) for name in _TEXT if name in result]
    if "compared" in result:
        compared = result["compared"]
        named.append(("other checkpoint", compared["checkpoint"]))
        if "request_time" in compared:
            named.append(("request_time of the other", compared["request_time"]))
    return named


def resampling_note(resampling: dict[str, Any]) -> str:
    """Return a note on how intervals were computed."""
    return f"intervals of {resampling['confidence']:.0%}, {resampling['resamples']:,} resamples"


# Columns of a metric's line. Brackets: only with resampling, or only with another checkpoint.
#
#   name | value | [interval] | [other | difference | its interval | p]
def metric_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the cells of an evaluation's metrics: heads, then a row per metric."""
    compared = result.get("compared")
    intervals = result.get("intervals", {})
    rows = [["", "value", *(["interval"] if intervals else []), *(_COMPARED if compared else [])]]
    for name, value in result.items():
        if isinstance(value, dict | list | str):
            continue
        row = [name, _number(value)]
        if intervals:
            row.append(_interval(intervals.get(name)))
        if compared:
            row.append(_number(compared[name]) if name in compared else "")
            row += _difference(compared["differences"].get(name))
        rows.append(row)
    return rows


def baseline_rows(baselines: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of baselines: heads, then a row per baseline. Those of retrieval models,
    with many metrics, have a row per metric.
    """
    if "auroc" not in baselines[0]:
        return _item_baseline_rows(baselines)
    with_intervals = "intervals" in baselines[0]
    rows = [["", *_COLUMNS[2:], *(["auroc interval"] if with_intervals else []), "trained rows"]]
    for baseline in baselines:
        row = [baseline["name"], *(_number(baseline[name]) for name in _COLUMNS[2:])]
        if with_intervals:
            row.append(_interval(baseline["intervals"]["auroc"]))
        rows.append([*row, _number(baseline["trained_rows"])])
    return rows


def _item_baseline_rows(baselines: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the heads, then a row per metric, with a column per baseline. With intervals, the
    difference of the model to each is beside.
    """
    head = [""]
    for baseline in baselines:
        head.append(baseline["name"])
        if "differences" in baseline:
            head += ["model less this", "its interval", "p"]
    rows = [head]
    for name in _at_names(baselines[0]):
        row = [name]
        for baseline in baselines:
            row.append(_number(baseline[name]))
            if "differences" in baseline:
                row += _difference(baseline["differences"].get(name))
        rows.append(row)
    return rows


def _is_main(name: str) -> bool:
    return name.startswith(("ndcg_at_", "recall_at_"))


def _at_names(report: dict[str, Any]) -> list[str]:
    """Return the metrics at k of a report on ranked items."""
    return [name for name in report if "_at_" in name]


def importance_note(importance: dict[str, Any]) -> str:
    """Return a note on how importance was measured."""
    return (
        f"importance on {importance['rows']:,} rows, {importance['repeats']} permutations of each "
        f"feature, intervals of {importance['confidence']:.0%}"
    )


def importance_metrics(importance: dict[str, Any]) -> list[str]:
    """Return the metrics whose loss is reported, the main one first."""
    return [name for name in importance["features"][0] if name not in ("feature", "kind")]


def importance_rows(importance: dict[str, Any]) -> list[list[str]]:
    """Return the cells of the importance of features: heads, then a row per feature."""
    metrics = importance_metrics(importance)
    head = ["", "kind"]
    for name in metrics:
        head += [f"{name} loss", "its interval"]
    rows = [head]
    for feature in importance["features"]:
        row = [feature["feature"], feature["kind"]]
        for name in metrics:
            loss = feature[name]
            row += [_number(loss["loss"], signed=True)]
            row += [_interval([loss["low"], loss["high"]], signed=True)]
        rows.append(row)
    return rows


def slice_rows(slices: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of slices: heads, then a row per slice."""
    if "auroc" not in slices[0]:
        return _item_slice_rows(slices)
    with_intervals = "intervals" in slices[0]
    compared = "compared" in slices[0]
    header = ["", *_COLUMNS]
    if with_intervals:
        header.insert(header.index("auroc") + 1, "its interval")
    rows = [header + (["auroc less the other's", "p"] if compared else [])]
    for row_slice in slices:
        row = [row_slice["value"], *(_number(row_slice[name]) for name in _COLUMNS)]
        if with_intervals:
            row.insert(header.index("its interval"), _interval(row_slice["intervals"]["auroc"]))
        if compared:
            difference = row_slice["compared"]["differences"]["auroc"]
            row += [_number(difference["difference"], signed=True), _number(difference["p_value"])]
        rows.append(row)
    return rows


def _item_slice_rows(slices: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the heads, then a row per slice of a retrieval model: rows, targets, NDCG and recall
    at the first k with intervals, and differences to another model.
    """
    names = list(filter(_is_main, _at_names(slices[0])))[:2]
    head = ["", "rows", "targets"]
    for name in names:
        head.append(name)
        if "intervals" in slices[0]:
            head.append("its interval")
        if "compared" in slices[0]:
            head += ["less the other's", "its interval", "p"]
    rows = [head]
    for row_slice in slices:
        row = [row_slice["value"], _number(row_slice["rows"]), _number(row_slice["targets"])]
        for name in names:
            row.append(_number(row_slice[name]))
            if "intervals" in row_slice:
                row.append(_interval(row_slice["intervals"][name]))
            if "compared" in row_slice:
                row += _difference(row_slice["compared"]["differences"].get(name))
        rows.append(row)
    return rows


def _item_comparison_text(result: dict[str, Any]) -> str:
    """Format the comparison of retrieval models: a line per metric with each model, then a line per
    pair of models and metric.
    """
    head = [f"{result['rows']:,} rows"]
    for model in result["models"]:
        head += [model["name"], ""]
    rows = [head]
    for name in _at_names(result["models"][0]):
        row = [name]
        for model in result["models"]:
            row += [_number(model[name]), _interval(model["intervals"].get(name))]
        rows.append(row)
    for name, title in _COSTS:
        row = [title]
        for model in result["models"]:
            value = model[name]
            row += ["-" if value is None else f"{value:,.0f}", ""]
        rows.append(row)
    pairs = [["difference", "metric", "", "its interval", "p"]]
    for pair in result["differences"]:
        for name in filter(_is_main, _at_names(pair)):
            title = f"{pair['model']} less {pair['other']}"
            pairs.append([title, name, *_difference(pair[name])])
    return "\n".join([*aligned(rows), "", *aligned(pairs), resampling_note(result["resampling"])])


def comparison_text(result: dict[str, Any]) -> str:
    """Format the result of `compare`: a line per model, then a line per pair of models. Those of
    retrieval models have a line per metric.
    """
    if "label_rate" not in result:
        return _item_comparison_text(result)
    metrics = [name for name in (*_COLUMNS[2:], "gauc") if name in result["models"][0]]
    header = [f"{result['rows']:,} rows, label rate {result['label_rate']:.5f}"]
    for name in metrics:
        header += [name, ""] if name in ("auroc", "logloss") else [name]
    rows = [header + [title for _, title in _COSTS]]
    for model in result["models"]:
        row = [model["name"]]
        for name in metrics:
            row.append(_number(model[name]))
            if name in ("auroc", "logloss"):
                row.append(_interval(model["intervals"][name]))
        rows.append(
            row + ["-" if model[name] is None else f"{model[name]:,.0f}" for name, _ in _COSTS]
        )
    pairs = [["difference", "auroc", "", "p", "logloss", "", "p"]]
    for pair in result["differences"]:
        pairs.append(
            [
                f"{pair['model']} less {pair['other']}",
                *_difference(pair["auroc"]),
                *_difference(pair["logloss"]),
            ]
        )
    resampling = result["resampling"]
    return "\n".join(
        [
            *aligned(rows),
            "",
            *aligned(pairs),
            f"{resampling_note(resampling)}; AUROC by DeLong's test",
        ]
    )


def seeded_rows(groups: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of a comparison over seeds (see `rayrec.tuning.search.tune`): heads, then a
    row per setting.
    """
    costs = ("seconds", "parameters", "multiply_adds")
    rows = [["", "seeds", *_SPREADS, *costs, *_TEST]]
    for group in groups:
        row = [group["name"], _number(group.get("seeds"))]
        row += [_spread(group.get(name), group.get(f"{name}_std")) for name in _SPREADS]
        row += ["-" if group.get(name) is None else f"{group[name]:,.0f}" for name in costs]
        rows.append([*row, *(_number(group.get(name)) for name in _TEST)])
    return rows


def _spread(mean: float | None, deviation: float | None) -> str:
    """Return a mean with its standard deviation over seeds, or alone if one seed was trained."""
    has_deviation = deviation is not None and math.isfinite(deviation)
    return f"{_number(mean)} ± {_number(deviation)}" if has_deviation else _number(mean)


def _difference(difference: dict[str, Any] | None) -> list[str]:
    if difference is None:
        return ["", "", ""]
    ends = _interval([difference["low"], difference["high"]], signed=True)
    return [_number(difference["difference"], signed=True), ends, _number(difference["p_value"])]


def _interval(ends: Sequence[float | None] | None, *, signed: bool = False) -> str:
    return (
        ""
        if ends is None or None in ends
        else " to ".join(_number(end, signed=signed) for end in ends)
    )


def _number(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:+.5f}" if signed else f"{value:.5f}"
