"""A data report, for programs and for people: the gates that a log must pass, and warnings."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console as RichConsole
from rich.table import Table

from rayrec.config import Config, InputError
from rayrec.data.logs.faults import Fault, Faults
from rayrec.observe.console import Console

SUSPICIOUS_AUROC = 0.85
"""What no single honest column reaches: the best of Criteo's are near 0.7."""


@dataclass(frozen=True, kw_only=True)
class Gates(Config):
    """Limits that a log must meet. Those of rates apply to each file too, not only to the whole log."""

    max_bad_fraction: float | None = None
    """Share of faulty rows; None: as max_bad_fraction of the preparation says."""
    min_rows: int = 1
    """Good rows."""
    min_label_rate: float = 0.0
    """Least share of clicks."""
    max_label_rate: float = 1.0
    """Greatest share of clicks."""
    max_missing_rate: float = 1.0
    """Share of rows that lack a value, of any column."""
    max_unknown_rate: float = 1.0
    """Share of values that the vocabulary does not know, of any column."""
    max_drift: float = 1.0
    """Distance in total variation of a file from the first one, of any column or the label: 0 equal, 1 nothing in common."""
    max_duplicate_rate: float = 1.0
    """Share of rows that repeat an earlier one in every column."""
    allow_constant_columns: bool = False
    """Whether columns, the label too, may hold one and the same value in all rows, or none at all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():
            if isinstance(value, float) and not 0 <= value <= 1:
                raise InputError(f"gates.{name}: {value} must lie between 0 and 1")
        if self.min_label_rate > self.max_label_rate:
            raise InputError(
                f"gates: min_label_rate {self.min_label_rate} is above max_label_rate {self.max_label_rate}"
            )


@dataclass(frozen=True)
class Failure:
    """A gate that the log does not pass."""

    gate: str
    where: str
    """The log, or the file of it that is worst."""
    column: str | None
    """The worst column, where the gate is about columns."""
    value: float
    limit: float
    message: str
    """One line: where, what, the limit, the remedy."""


@dataclass(frozen=True)
class _Value:
    """Something that a gate limits."""

    value: float | None
    where: str
    column: str | None = None


def constant_columns(content: dict[str, Any]) -> list[str]:
    """Columns that hold one value in all rows, the label too, or none."""
    label = content["label"]
    found = [label["name"]] if label and label["rate"] in (0.0, 1.0) else []
    for name, column in _columns(content).items():
        one = column["distinct"] == 1 if "distinct" in column else column["min"] == column["max"]
        if column["missing_rate"] == 1 or (column["missing_rate"] == 0 and one):
            found.append(name)
    return found


def _columns(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {**content["dense"], **content["sparse"]}


def warnings_of(content: dict[str, Any]) -> Iterator[str]:
    """What looks wrong though no gate forbids it, a line each. `content` as in Report."""
    for name in constant_columns(content):
        yield f"column {name} is empty or always the same: check the source, or leave it out of the schema"
    for name, column in _columns(content).items():
        if (column["auroc"] or 0) > SUSPICIOUS_AUROC:
            yield (
                f"column {name} alone predicts the label with AUROC {column['auroc']:.3f} on held-out rows: leakage is "
                "likely; see whether it is known before the click, or leave it out of the schema"
            )
    sampled = content["duplicates"]["sampled"]
    if sampled < 1:
        yield (
            f"duplicate rows were looked for among {sampled:.3%} of the different rows, to limit memory; raise "
            "--memory-bytes to look at more"
        )


def failures_of(content: dict[str, Any], gates: Gates) -> list[Failure]:
    """A failure a gate that `content`, as in Report, does not pass: the worst value of all."""
    path, label = content["path"], content["label"]
    files = [] if content["slices_by"] == "seventh" else content["slices"]
    rates = [_Value(label["rate"], path), *(_Value(row["label_rate"], row["name"]) for row in files)] if label else []
    missing = [_Value(column["missing_rate"], path, name) for name, column in _columns(content).items()]
    missing += [_Value(rate, row["name"], name) for row in files for name, rate in row["missing_rate"].items()]
    unknown = [_Value(column.get("unknown_rate"), path, name) for name, column in _columns(content).items()]
    drift = [_Value(rate, row["name"], name) for row in content["slices"] for name, rate in row["drift"].items()]
    first = content["faults"]["first"]
    example = f" (first: {Fault(**first[0])})" if first else ""
    wrong_labels = Faults(content["faults"]["by_kind"], labels=content["faults"].get("labels", {})).wrong_labels()
    checks: list[tuple[str, list[_Value], str, str]] = [
        (
            "max_bad_fraction",
            [_Value(content["bad_fraction"], path)],
            f"{{:.3%}} of the rows are faulty{example}",
            wrong_labels or "fix the log",
        ),
        ("min_rows", [_Value(content["rows"], path)], "{:,} good rows", "give more data"),
        ("min_label_rate", rates, "{:.3%} of the labels are clicks", "see how the log was sampled"),
        ("max_label_rate", rates, "{:.3%} of the labels are clicks", "see how the log was sampled"),
        ("max_missing_rate", missing, "{:.3%} of the rows lack a value", "fix the source, leave the column out"),
        ("max_unknown_rate", unknown, "{:.3%} of the values are unknown", "make the vocabulary from newer rows"),
        ("max_drift", drift, "{:.4f} in total variation from the first slice", "see what changed, train on newer rows"),
        (
            "max_duplicate_rate",
            [_Value(content["duplicates"]["rate"], path)],
            "{:.3%} of the rows repeat an earlier one",
            "drop them",
        ),
    ]
    failures = [
        failure
        for gate, values, what, remedy in checks
        if (failure := _check(gate, getattr(gates, gate), values, what, remedy))
    ]
    constant = constant_columns(content)
    if constant and not gates.allow_constant_columns:
        names = ", ".join(constant)
        message = f"{path}: empty or always the same: {names}; leave them out, or give --gates.allow-constant-columns"
        failures.append(Failure("allow_constant_columns", path, constant[0], len(constant), 0, message))
    return failures


def _check(gate: str, limit: float, values: Sequence[_Value], what: str, remedy: str) -> Failure | None:
    """The gate's failure at its worst value, where it does not pass."""
    sign = -1 if gate.startswith("min_") else 1
    failing = [item for item in values if item.value is not None and sign * item.value > sign * limit]
    if not failing:
        return None
    worst = max(failing, key=lambda item: sign * (item.value or 0.0))
    assert worst.value is not None
    others = len({item.column for item in failing}) - 1
    column = f", column {worst.column}" + (f" (and {others} more columns)" if others else "") if worst.column else ""
    side, change = ("below", "lower") if sign < 0 else ("above", "raise")
    shown = f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
    message = (
        f"{worst.where}{column}: {what.format(worst.value)}, {side} {gate} {shown}; {remedy}, or {change} "
        f"--gates.{gate.replace('_', '-')}"
    )
    return Failure(gate, worst.where, worst.column, worst.value, limit, message)


@dataclass(frozen=True)
class Report:
    """What was found of a log."""

    content: dict[str, Any]
    """Plain values; docs/validate.md says what they are."""
    warnings: tuple[str, ...]
    """A line each."""
    failed: tuple[Failure, ...]

    @property
    def failures(self) -> list[str]:
        """A line a gate that failed."""
        return [failure.message for failure in self.failed]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        failures = [vars(failure) for failure in self.failed]
        return {**self.content, "warnings": list(self.warnings), "failures": failures, "passed": not failures}

    def tables(self) -> list[Table]:
        """The whole report but warnings and failures."""
        content = self.content
        made = [_table(content["path"], [], _overview(content))]
        made.append(_table(f"by {content['slices_by']}", _SLICE_HEADS, [_slice_row(row) for row in content["slices"]]))
        for kind, heads in (("dense", _DENSE_HEADS), ("sparse", _SPARSE_HEADS)):
            rows = [
                [name, *(_shown(column.get(key), key) for key in heads.values())]
                for name, column in content[kind].items()
            ]
            made.append(_table(f"{kind} columns", [kind, *heads], rows))
        return [table for table in made if table.row_count]

    def lines(self, width: int = 120) -> list[str]:
        """The report as plain text."""
        out = io.StringIO()
        console = RichConsole(file=out, width=width, highlight=False, color_system=None, markup=False, emoji=False)
        for table in self.tables():
            console.print(table)
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
        return [
            *lines,
            *(f"warning: {text}" for text in self.warnings),
            *(f"failed: {text}" for text in self.failures),
        ]

    def show(self, console: Console) -> None:
        """Writes the lines to standard error."""
        for line in self.lines():
            console.note(line)


_SLICE_HEADS = ["name", "rows", "label rate", "most missing", "", "largest drift", ""]
_DENSE_HEADS = {
    **{"missing": "missing_rate", "min": "min", "max": "max", "negative": "negative_rate", "zero": "zero_rate"},
    **{"mean log": "log_mean", "deviation": "log_deviation", "drift": "drift", "AUROC": "auroc"},
}
_SPARSE_HEADS = {
    **{"missing": "missing_rate", "distinct": "distinct", "top 1": "top_1_rate", "top 10": "top_10_rate"},
    **{"top 100": "top_100_rate", "once": "once_rate", "unknown": "unknown_rate", "collide": "collision_rate"},
    **{"drift": "drift", "AUROC": "auroc"},
}


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=bool(heads))
    for i in range(len(rows[0]) if rows else 0):
        right = bool(heads) and i > 0
        table.add_column(heads[i] if heads else "", justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _shown(value: float | None, name: str = "") -> str:
    if value is None:
        return "-"
    if name.endswith("_rate"):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if abs(value) < 1e4 else f"{value:.4g}"


def _slice_row(row: dict[str, Any]) -> list[str]:
    cells = [row["name"], _shown(row["rows"]), _shown(row["label_rate"], "label_rate")]
    for key, rates in (("missing_rate", row["missing_rate"]), ("drift", row["drift"])):
        known = {name: value for name, value in rates.items() if value}
        name = max(known, key=lambda name: known[name], default=None)
        cells += [name or "-", _shown(known[name] if name else None, key)]
    return cells


def _overview(content: dict[str, Any]) -> list[list[str]]:
    faults, label, duplicates = content["faults"], content["label"], content["duplicates"]
    rows = [
        ["rows", _shown(content["rows"])],
        ["faulty rows", f"{content['bad_rows']:,} ({content['bad_fraction']:.3%})"],
    ]
    for kind, count in faults["by_kind"].items():
        columns = ", ".join(f"{column} {n:,}" for column, n in faults["by_column"].get(kind, {}).items())
        rows.append(["", f"{count:,} x {kind}" + (f": {columns}" if columns else "")])
    rows += [["", f"first: {Fault(**fault)}"] for fault in faults["first"][:3]]
    if label and label["rate"] is not None:
        rows.append(["label rate", f"{label['rate']:.3%} (95%: {label['low']:.3%} to {label['high']:.3%})"])
    if duplicates["rate"] is not None:
        sample = "" if duplicates["sampled"] == 1 else f" (of a sample of {duplicates['rows']:,} rows)"
        rows.append(["duplicate rows", f"{duplicates['rate']:.3%}{sample}"])
    if content["weight"]:
        rows.append(["weight", ", ".join(f"{name} {_shown(value, name)}" for name, value in content["weight"].items())])
    if content["unknown_to"]:
        rows.append(["unknown", f"to {content['unknown_to']}"])
    return rows
