"""Data report as JSON and text, with gates that a log must pass, and warnings."""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from rich.console import Console as RichConsole
from rich.table import Table

from rayrec.bounds import Fraction
from rayrec.config import Config, InputError, packaged_json
from rayrec.data.encoding.clipping import MAX_CLIPPED_FRACTION
from rayrec.data.encoding.counts import mean_and_variance
from rayrec.data.encoding.growth import MIN_SPANS, find_trend, number_warning
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.logs.faults import Fault, Faults
from rayrec.observe.console import Console
from rayrec.prepare.log_statistics import TOP, ColumnStats
from rayrec.schema import Schema

_PRIOR_ROWS = 10.0
"""Rows with the average click rate that are added to every group of values, as a prior."""
_UNKNOWN_RATE = 0.9
"""Fraction of new categories in the last slice from which on a column has none that return."""
_MIN_OUTCOMES = 20
"""Minimum number of held-out rows of either label for a column's AUROC."""


def fraction(part: Any, total: Any) -> float | None:
    return float(part) / float(total) if total else None


def wilson_interval(hits: int, rows: int) -> tuple[float, float] | None:
    """Return the 95% confidence interval of a rate (Wilson, 1927), or None without rows."""
    if not rows:
        return None
    z = 1.959963984540054
    rate = hits / rows
    spread = z * z / rows
    centre = rate + spread / 2
    radius = z * math.sqrt(rate * (1 - rate) / rows + spread / rows / 4)
    return max(0.0, (centre - radius) / (1 + spread)), min(1.0, (centre + radius) / (1 + spread))


# The expectation for samples of one distribution is a sum of half-normal means, one per value:
#
#   E |p1 - p2| = sqrt(2 / pi) * deviation,  deviation^2 = p (1 - p) (1 / n + 1 / m)
def total_variation(first: np.ndarray, second: np.ndarray) -> tuple[float, float] | None:
    """Return the total variation distance of two distributions given as counts, and its approximate
    expectation for two samples of one distribution. None if either has no rows.
    """
    n = int(first.sum())
    m = int(second.sum())
    if not n or not m:
        return None
    pooled = (first + second) / (n + m)
    deviations = np.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    distance = 0.5 * float(np.abs(first / n - second / m).sum())
    return distance, min(1.0, 0.5 * math.sqrt(2 / math.pi) * float(deviations.sum()))


def mean_and_deviation(moments: Sequence[int]) -> tuple[float, float] | None:
    """Return mean and standard deviation of sign(x) ln(1 + |x|) from a row of
    `ColumnStats.moments`, or None without values.
    """
    if not moments[0]:
        return None
    mean, variance = mean_and_variance(moments)
    return mean, math.sqrt(variance)


# A prior of `_PRIOR_ROWS` rows pulls rare values towards the average: without it, a value seen once
# would look like a perfect predictor.
def rate_auroc(outcomes: np.ndarray) -> float | None:
    """Return the AUROC on held-out rows, scored by the click rate of their value among the other
    rows. None if few rows of a label are held out. `outcomes` counts by label + 2 * held out, int64
    [values, 4].
    """
    misses, clicks, test_misses, test_clicks = outcomes.T.astype(np.float64)
    if min(test_misses.sum(), test_clicks.sum()) < _MIN_OUTCOMES or not clicks.sum():
        return None
    average = clicks.sum() / (misses.sum() + clicks.sum())
    rates = (clicks + _PRIOR_ROWS * average) / (misses + clicks + _PRIOR_ROWS)
    distinct, index = np.unique(rates, return_inverse=True)
    misses_at = np.bincount(index, test_misses, len(distinct))
    clicks_at = np.bincount(index, test_clicks, len(distinct))
    below = np.cumsum(misses_at) - misses_at / 2  # equal scores count half
    return float((clicks_at * below).sum() / (clicks_at.sum() * misses_at.sum()))


def concentration(repeated: np.ndarray, distinct: int) -> dict[str, Any]:
    """Return the values of a sparse column, and the fractions of them in its top categories and in
    categories that occur once. `repeated`: counts of the categories that occur more than once.
    `distinct`: number of categories.
    """
    once = distinct - len(repeated)
    values = int(repeated.sum()) + once
    largest = np.sort(
        np.partition(repeated, len(repeated) - TOP)[-TOP:] if len(repeated) > TOP else repeated
    )[::-1]
    top = {n: int(largest[:n].sum()) + max(0, min(n - len(largest), once)) for n in (1, 10, 100)}
    rates = {f"top_{n}_rate": fraction(rows, values) for n, rows in top.items()}
    return {"values": values, "distinct": distinct, **rates, "once_rate": fraction(once, values)}


def top_categories(tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the tokens with the largest counts, the smallest first among equal counts, uint64 [at
    most TOP].
    """
    if len(tokens) > TOP:
        min_count = np.partition(counts, len(counts) - TOP)[-TOP]
        tokens, counts = tokens[counts >= min_count], counts[counts >= min_count]
    return tokens[np.lexsort((tokens, -counts))[:TOP]].astype(np.uint64)


def unknown_rate(tokens: np.ndarray, counts: np.ndarray, vocabulary: np.ndarray) -> float | None:
    """Return the fraction of values whose token is not in the vocabulary, which must be sorted."""
    index = np.searchsorted(vocabulary, tokens)
    in_vocabulary = np.zeros(len(tokens), bool)
    inside = index < len(vocabulary)
    in_vocabulary[inside] = vocabulary[index[inside]] == tokens[inside]
    return fraction(counts[~in_vocabulary].sum(), counts.sum())


def collision_rate(
    column: SparseColumn, vocabulary: np.ndarray, tokens: np.ndarray, counts: np.ndarray
) -> float | None:
    """Return the fraction of known values whose category shares its ID with another category of the
    log, by the Preprocessor's own rule. `vocabulary`: the column's tokens in ID order. `tokens`:
    distinct tokens.
    """
    wide = tokens.dtype == np.uint64
    schema = Schema(label=None, sparse=("column",), tokens="any" if wide else "hexadecimal")
    encoder = Preprocessor("report", schema, (), (column,), vocabulary).encoder
    ids = encoder.ids(tokens, 0)
    if column.num_tokens is not None:
        in_vocabulary = np.isin(column.apply_modulo(tokens), vocabulary)
        # Unknown values share an id on purpose.
        ids, counts = ids[in_vocabulary], counts[in_vocabulary]
    _, index, categories = np.unique(ids, return_inverse=True, return_counts=True)
    return fraction(counts[categories[index] > 1].sum(), counts.sum())


def duplicate_rate(hashes: np.ndarray) -> float | None:
    """Return the fraction of rows that repeat an earlier one, given their hashes, which are sorted
    in place.
    """
    hashes.sort()
    return fraction(np.count_nonzero(hashes[1:] == hashes[:-1]), len(hashes))


Drift = list[dict[str, tuple[float, float] | None]]
"""Distance from the first slice with rows and its expectation for equal distributions, by column
and label, for each slice.
"""


def describe_drift(stats: ColumnStats, schema: Schema) -> Drift:
    filled = np.flatnonzero(stats.rows)
    first = int(filled[0]) if len(filled) else 0
    labels = np.stack([stats.rows - stats.clicks, stats.clicks], axis=1)
    columns = [(schema.label, labels)] if schema.label else []
    columns += [(name, stats.dense_bins[:, d]) for d, name in enumerate(schema.dense)]
    columns += [(name, stats.sparse_bins[:, s]) for s, name in enumerate(schema.sparse)]
    return [
        {name: total_variation(bins[first], bins[n]) for name, bins in columns} if n > first else {}
        for n in range(len(stats.rows))
    ]


def _max_drift(name: str, drift: Drift) -> dict[str, float | None]:
    distance, by_chance = max(
        (distances for slice_drift in drift if (distances := slice_drift.get(name))),
        default=(None, None),
    )
    return {"drift": distance, "drift_by_chance": by_chance}


def describe_label(stats: ColumnStats, name: str) -> dict[str, Any]:
    rows = int(stats.rows.sum())
    clicks = int(stats.clicks.sum())
    low, high = wilson_interval(clicks, rows) or (None, None)
    return {
        "name": name,
        "clicks": clicks,
        "rate": fraction(clicks, rows),
        "low": low,
        "high": high,
    }


def describe_weight(stats: ColumnStats) -> dict[str, Any]:
    low, high = _range(stats, -1)
    return {"min": low, "max": high, "zero_rate": fraction(stats.signs[-1, 1], stats.rows.sum())}


def _range(stats: ColumnStats, index: int) -> list[Any]:
    """Return the minimum and maximum, as ints if integral, or None without values."""
    low = stats.limits[index, 0]
    high = -stats.limits[index, 1]
    return (
        [int(x) if x == int(x) else float(x) for x in (low, high)] if low <= high else [None, None]
    )


def dense_columns(
    stats: ColumnStats, schema: Schema, drift: Drift, rules: Sequence[DenseColumn] = ()
) -> dict[str, dict[str, Any]]:
    """Build the report of each dense column. `rules` are those of a Preprocessor, if there is
    one.
    """
    columns: dict[str, dict[str, Any]] = {}
    for d, name in enumerate(schema.dense):
        present = int(stats.moments[d, 0])
        low, high = _range(stats, d)
        mean, deviation = mean_and_deviation(stats.moments[d].tolist()) or (None, None)
        columns[name] = {
            "missing_rate": fraction(stats.missing[:, d].sum(), stats.rows.sum()),
            "min": low,
            "max": high,
            "negative_rate": fraction(stats.signs[d, 0], present),
            "zero_rate": fraction(stats.signs[d, 1], present),
            "log_mean": mean,
            "log_deviation": deviation,
            **_max_drift(name, drift),
            "auroc": rate_auroc(stats.dense_outcomes[d]) if schema.label else None,
            **_tables(name, schema),
        }
        if rules and rules[d].lower is not None:
            columns[name]["clipped_rate"] = fraction(stats.clipped[d], present)
        filled = stats.part_limits[np.isfinite(stats.part_limits[:, d, 0]), d]
        trend = (
            find_trend([(low, -negated) for low, negated in filled.tolist()])
            if len(filled) >= MIN_SPANS
            else None
        )
        if trend is not None:
            columns[name]["trend"] = trend
    return columns


def _tables(name: str, schema: Schema) -> dict[str, list[str]]:
    """Return the side tables without times that a column depends on, as its `tables`, if any."""
    looked_up = schema.program.tables.get(name, frozenset())
    untimed = [each for each in sorted(looked_up) if schema.table(each).time is None]
    return {"tables": untimed} if untimed else {}


def sparse_columns(
    stats: ColumnStats, schema: Schema, drift: Drift, counted: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Build the report of each sparse column; `counted` has the figures from its category
    counts.
    """
    return {
        name: {
            "missing_rate": fraction(
                stats.missing[:, len(schema.dense) + s].sum(), stats.rows.sum()
            ),
            **counted[name],
            **_max_drift(name, drift),
            "auroc": rate_auroc(stats.sparse_outcomes[s]) if schema.label else None,
            **_tables(name, schema),
        }
        for s, name in enumerate(schema.sparse)
    }


def slices_of(
    stats: ColumnStats, schema: Schema, names: Sequence[str], drift: Drift
) -> list[dict[str, Any]]:
    columns = [*schema.dense, *schema.sparse]
    return [
        {
            "name": name,
            "rows": int(stats.rows[n]),
            "label_rate": fraction(stats.clicks[n], stats.rows[n]) if schema.label else None,
            "missing_rate": {
                column: fraction(stats.missing[n, c], stats.rows[n])
                for c, column in enumerate(columns)
            },
            "drift": {column: distances[0] for column, distances in drift[n].items() if distances},
        }
        for n, name in enumerate(names)
    ]


SUSPICIOUS_AUROC = 0.85
"""AUROC that no single honest column reaches: the best of Criteo's are near 0.7."""


@dataclass(frozen=True, kw_only=True)
class Gates(Config):
    """Limits that a log must meet. Rate limits apply to each file and to the full log."""

    max_bad_fraction: Fraction | None = None
    """Maximum fraction of invalid rows. None: max_bad_fraction of the preparation."""
    min_rows: int = 1
    """Minimum number of valid rows."""
    min_label_rate: Fraction = 0.0
    """Minimum fraction of clicks."""
    max_label_rate: Fraction = 1.0
    """Maximum fraction of clicks."""
    max_missing_rate: Fraction = 1.0
    """Maximum fraction of rows without a value, in any column."""
    max_unknown_rate: Fraction = 1.0
    """Maximum fraction of values not in the vocabulary, in any column."""
    max_drift: Fraction = 1.0
    """Maximum total variation distance between a file and the first one, in any column or the
    label: 0 equal, 1 disjoint.
    """
    max_duplicate_rate: Fraction = 1.0
    """Maximum fraction of rows that repeat an earlier row in every column."""
    allow_constant_columns: bool = False
    """Whether to accept columns, or a label, with a single value in all rows, or no values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_label_rate > self.max_label_rate:
            raise InputError(
                f"gates: min_label_rate must be at most max_label_rate {self.max_label_rate}, got "
                f"{self.min_label_rate}"
            )


@dataclass(frozen=True)
class Failure:
    """Gate that the log does not pass."""

    gate: str
    where: str
    """Path of the log, or the worst file in it."""
    column: str | None
    """Worst column, for gates on columns."""
    value: float
    limit: float
    message: str
    """One line: location, value, limit and fix."""


_Value = tuple[float | None, str, str | None]
"""Value limited by a gate, path of the log or file, and column."""


def constant_columns(content: dict[str, Any]) -> list[str]:
    """Return the columns with a single value in all rows, or no values, including the label."""
    label = content["label"]
    names = [label["name"]] if label and label["rate"] in (0.0, 1.0) else []
    for name, column in _columns(content).items():
        one = column["distinct"] == 1 if "distinct" in column else column["min"] == column["max"]
        if column["missing_rate"] == 1 or (column["missing_rate"] == 0 and one):
            names.append(name)
    return names


def _columns(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {**content["dense"], **content["sparse"]}


def find_warnings(content: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each suspicious finding without a gate. `content` as in Report."""
    for name in constant_columns(content):
        yield (
            f"column {name} is empty or always the same: check the source, or leave it out of the "
            "schema"
        )
    for name, column in _columns(content).items():
        if (column["auroc"] or 0) > SUSPICIOUS_AUROC:
            yield (
                f"column {name} alone predicts the label with AUROC {column['auroc']:.3f} on "
                f"held-out rows: leakage is likely; {_leak_fix(column.get('tables', ()))}, or "
                "leave it out of the schema"
            )
        if "trend" in column:
            yield number_warning(name, column["trend"])
        elif (column.get("clipped_rate") or 0) > MAX_CLIPPED_FRACTION:
            yield (
                f"column {name}: {column['clipped_rate']:.1%} of its values are beyond the range "
                "of the Preprocessor's rows; count newer rows, or declare a time as `timestamp`"
            )
        if (column.get("unknown_rate") or 0) >= _UNKNOWN_RATE and content["unknown_to"]:
            yield (
                f"column {name}: {column['unknown_rate']:.1%} of its values are unknown to "
                f"{content['unknown_to']}; times and row numbers never return: leave them out of "
                "`sparse`"
            )
    sampled = content["duplicates"]["sampled"]
    if sampled < 1:
        yield (
            f"duplicate rows were looked for among {sampled:.3%} of the different rows, to limit "
            "memory; raise --memory-bytes to look at more"
        )


def _leak_fix(tables: Sequence[str]) -> str:
    """Return what to do about a column that predicts the label, of these tables without times."""
    if not tables:
        return "see whether it is known before the click"
    noun = "table" if len(tables) == 1 else "tables"
    return (
        f"the {noun} {', '.join(tables)} may have values from after the click: give rows the time "
        "from which they are valid, and name its column in `time` of the table"
    )


def find_failures(content: dict[str, Any], gates: Gates) -> list[Failure]:
    """Return the failed gates of `content`, as in Report, each with its worst value."""
    path = content["path"]
    values = _limited(content)
    first = content["faults"]["first"]
    example = f" (first: {Fault(**first[0])})" if first else ""
    wrong_labels = Faults(
        content["faults"]["by_kind"], labels=content["faults"].get("labels", {})
    ).wrong_labels()
    texts = {
        **_GATE_TEXTS,
        "max_bad_fraction": (
            f"{{:.3%}} of the rows are faulty{example}",
            wrong_labels or "fix the log",
        ),
    }
    failures = [
        failure
        for gate, (text, fix) in texts.items()
        if (failure := _check(gate, getattr(gates, gate), values[gate], text, fix))
    ]
    constant = constant_columns(content)
    if constant and not gates.allow_constant_columns:
        names = ", ".join(constant)
        message = (
            f"{path}: empty or always the same: {names}; leave them out, or give "
            "--gates.allow-constant-columns"
        )
        failures.append(
            Failure("allow_constant_columns", path, constant[0], len(constant), 0, message)
        )
    return failures


_GATE_TEXTS: Final[dict[str, tuple[str, str]]] = {
    "max_bad_fraction": ("", ""),  # With an example of the log
    "min_rows": ("{:,} good rows", "give more data"),
    "min_label_rate": ("{:.3%} of the labels are clicks", "see how the log was sampled"),
    "max_label_rate": ("{:.3%} of the labels are clicks", "see how the log was sampled"),
    "max_missing_rate": (
        "{:.3%} of the rows lack a value",
        "fix the source, leave the column out",
    ),
    "max_unknown_rate": (
        "{:.3%} of the values are unknown",
        "make the vocabulary from newer rows",
    ),
    "max_drift": (
        "{:.4f} in total variation from the first slice",
        "see what changed, train on newer rows",
    ),
    "max_duplicate_rate": ("{:.3%} of the rows repeat an earlier one", "drop them"),
}
"""Meaning of each gate's value, and the fix, in report order."""


def _limited(content: dict[str, Any]) -> dict[str, list[_Value]]:
    """Return the values that each gate limits."""
    path = content["path"]
    label = content["label"]
    files = [] if content["slices_by"] == "seventh" else content["slices"]
    columns = _columns(content)
    rates: list[_Value] = []
    if label:
        rates = [(label["rate"], path, None)]
        rates += [(row["label_rate"], row["name"], None) for row in files]
    missing: list[_Value] = [
        (column["missing_rate"], path, name) for name, column in columns.items()
    ]
    missing += [
        (rate, row["name"], name) for row in files for name, rate in row["missing_rate"].items()
    ]
    return {
        "max_bad_fraction": [(content["bad_fraction"], path, None)],
        "min_rows": [(content["rows"], path, None)],
        "min_label_rate": rates,
        "max_label_rate": rates,
        "max_missing_rate": missing,
        "max_unknown_rate": [
            (column.get("unknown_rate"), path, name) for name, column in columns.items()
        ],
        "max_drift": [
            (rate, row["name"], name)
            for row in content["slices"]
            for name, rate in row["drift"].items()
        ],
        "max_duplicate_rate": [(content["duplicates"]["rate"], path, None)],
    }


# A gate's limit applies to each value alone, and the worst one is reported:
#
#   min_...    the lowest value below the limit fails
#   max_...    the highest value above the limit fails
#   None       not measured, such as the drift of the first file; passes
def _check(
    gate: str, limit: float, values: Sequence[_Value], text: str, fix: str
) -> Failure | None:
    """Return the gate's failure at its worst value, or None if it passes."""
    sign = -1 if gate.startswith("min_") else 1
    failing = [
        (value, path, column)
        for value, path, column in values
        if value is not None and sign * value > sign * limit
    ]
    if not failing:
        return None
    value, path, column = max(failing, key=lambda item: sign * item[0])
    num_more = len({column for *_, column in failing}) - 1
    named = (
        f", column {column}" + (f" (and {num_more} more columns)" if num_more else "")
        if column
        else ""
    )
    side, change = ("below", "lower") if sign < 0 else ("above", "raise")
    shown = f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
    message = (
        f"{path}{named}: {text.format(value)}, {side} {gate} {shown}; {fix}, or {change} "
        f"--gates.{gate.replace('_', '-')}"
    )
    return Failure(gate, path, column, value, limit, message)


@dataclass(frozen=True)
class Report:
    """Results of validating a log."""

    content: dict[str, Any]
    """Plain values, described in docs/validate.md."""
    warnings: tuple[str, ...]
    """One line for each warning."""
    failed: tuple[Failure, ...]

    @property
    def failures(self) -> list[str]:
        """One line for each failed gate."""
        return [failure.message for failure in self.failed]

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        failures = [vars(failure) for failure in self.failed]
        return {
            **self.content,
            "warnings": list(self.warnings),
            "failures": failures,
            "passed": not failures,
        }

    def tables(self) -> list[Table]:
        """Build the tables of the report, without warnings and failures."""
        content = self.content
        tables = [_table(content["path"], [], _overview(content))]
        tables.append(
            _table(
                f"by {content['slices_by']}",
                _SLICE_HEADS,
                [_slice_row(row) for row in content["slices"]],
            )
        )
        for kind, heads in _HEADS.items():
            rows = [
                [name, *(_format_value(values.get(key), key) for key in heads.values())]
                for name, values in content[kind].items()
            ]
            tables.append(_table(f"{kind} columns", [kind, *heads], rows))
        return [table for table in tables if table.row_count]

    def lines(self, width: int = 120) -> list[str]:
        """Format the report as plain text."""
        out = io.StringIO()
        console = RichConsole(
            file=out, width=width, highlight=False, color_system=None, markup=False, emoji=False
        )
        for table in self.tables():
            console.print(table)
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
        return [
            *lines,
            *(f"warning: {text}" for text in self.warnings),
            *(f"failed: {text}" for text in self.failures),
        ]

    def show(self, console: Console) -> None:
        """Write the report to standard error."""
        for line in self.lines():
            console.note(line)


_SLICE_HEADS = ["name", "rows", "label rate", "most missing", "", "largest drift", ""]
_HEADS: dict[str, dict[str, str]] = packaged_json(__package__, "report_heads.json")
"""Head and key of each cell of dense and sparse columns."""


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=bool(heads))
    for i in range(len(rows[0]) if rows else 0):
        right = bool(heads) and i > 0
        table.add_column(
            heads[i] if heads else "", justify="right" if right else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    return table


def _format_value(value: float | None, name: str = "") -> str:
    if value is None:
        return "-"
    if name.endswith("_rate"):
        return f"{value:.2%}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.4g}"


def _slice_row(row: dict[str, Any]) -> list[str]:
    cells = [
        row["name"],
        _format_value(row["rows"]),
        _format_value(row["label_rate"], "label_rate"),
    ]
    for key, rates in (("missing_rate", row["missing_rate"]), ("drift", row["drift"])):
        nonzero = {name: value for name, value in rates.items() if value}
        name = max(nonzero, key=lambda name: nonzero[name], default=None)
        cells += [name or "-", _format_value(nonzero[name] if name else None, key)]
    return cells


def _overview(content: dict[str, Any]) -> list[list[str]]:
    faults = content["faults"]
    label = content["label"]
    duplicates = content["duplicates"]
    rows = [
        ["rows", _format_value(content["rows"])],
        ["faulty rows", f"{content['bad_rows']:,} ({content['bad_fraction']:.3%})"],
    ]
    for kind, count in faults["by_kind"].items():
        columns = ", ".join(
            f"{column} {n:,}" for column, n in faults["by_column"].get(kind, {}).items()
        )
        rows.append(["", f"{count:,} x {kind}" + (f": {columns}" if columns else "")])
    rows += [["", f"first: {Fault(**fault)}"] for fault in faults["first"][:3]]
    if label and label["rate"] is not None:
        rows.append(
            ["label rate", f"{label['rate']:.3%} (95%: {label['low']:.3%} to {label['high']:.3%})"]
        )
    if duplicates["rate"] is not None:
        sample = (
            "" if duplicates["sampled"] == 1 else f" (of a sample of {duplicates['rows']:,} rows)"
        )
        rows.append(["duplicate rows", f"{duplicates['rate']:.3%}{sample}"])
    if content["weight"]:
        rows.append(
            [
                "weight",
                ", ".join(
                    f"{name} {_format_value(value, name)}"
                    for name, value in content["weight"].items()
                ),
            ]
        )
    if content["unknown_to"]:
        rows.append(["unknown", f"to {content['unknown_to']}"])
    return rows
