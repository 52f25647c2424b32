"""A finished data report, for programs and for people."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console as RichConsole
from rich.table import Table

from rayrec.data.parsing import Fault
from rayrec.observe.console import Console
from rayrec.prepare.gates import Failure


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
