"""Invalid lines and rows of a log: counts by kind, first occurrences, and their likely cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

LABEL_FAULT: Final = "label is not 0 or 1"
UTF8_FAULT: Final = "not UTF-8"
TRAILING_FAULT: Final = "text after a closing quote"
_FIXES: Final = {
    UTF8_FAULT: "name the file's encoding in the schema, such as `encoding: latin-1`",
    TRAILING_FAULT: (
        "if the file writes quotes as \\\", name the character in the schema: `escape: '\\'`"
    ),
}
"""Schema fields that remove faults."""
LABEL_LETTERS: Final = 24
"""Maximum letters of a label in a report."""
_MAX_LABELS = 20
_MAX_SHOWN = 8
"""Maximum distinct labels per column, stored and shown in an error."""
_POSITIVE = ("yes", "y", "t", "click", "clicked", "positive", "pos")
"""Texts that mean a click."""


@dataclass(frozen=True)
class Fault:
    """Invalid line of text, or row of a table."""

    path: str
    byte: int | None
    """Start of the line in the (unpacked) file. None in a table."""
    kind: str
    column: str
    """Column name, empty for a fault of the full line."""
    row: int | None = None
    """Row of a table, from 0. None in text."""

    def __str__(self) -> str:
        position = f"byte {self.byte}" if self.row is None else f"row {self.row}"
        return f"{self.path} at {position}: {self.kind}" + (
            f" in column {self.column}" if self.column else ""
        )


@dataclass
class Faults:
    """Counts of invalid lines by kind, and the first few of them."""

    counts: dict[str, int] = field(default_factory=dict)
    first: list[Fault] = field(default_factory=list)
    keep: int = 10
    labels: dict[str, list[str]] = field(default_factory=dict)
    """Distinct values of each label column with values other than 0 and 1."""

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def add(self, other: Faults) -> None:
        """Add faults found later in the log."""
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
        self.first = (self.first + other.first)[: self.keep]
        for column, values in other.labels.items():
            self.labels[column] = distinct_labels([*self.labels.get(column, ()), *values])

    def clear(self) -> None:
        """Forget all faults."""
        self.counts = {}
        self.first = []
        self.labels = {}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        labels = {"labels": self.labels} if self.labels else {}
        return {"counts": self.counts, "first": [vars(fault) for fault in self.first], **labels}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Faults:
        return cls(
            stored["counts"],
            [Fault(**fault) for fault in stored["first"]],
            labels=stored.get("labels", {}),
        )

    def describe(self) -> str:
        """Return one line: each kind with its count, and the first occurrence."""
        if not self.total:
            return "no invalid rows"
        kinds = ", ".join(f"{count:,} x {kind}" for kind, count in sorted(self.counts.items()))
        return f"{self.total:,} invalid rows ({kinds}); first: {self.first[0]}"

    def text_fix(self) -> str:
        """Return a sentence with the schema fields that may make rows of text valid; empty if there
        are none.
        """
        return "; ".join(fix for kind, fix in _FIXES.items() if self.counts.get(kind))

    def wrong_labels(self, *, with_rule: bool = False) -> str | None:
        """Return the problem and its fix if most faults are labels other than 0 and 1, else None.
        `with_rule` names the rule of a schema, which tables may have.
        """
        if not self.labels or 2 * self.counts.get(LABEL_FAULT, 0) <= self.total:
            return None
        column, values = next(iter(self.labels.items()))
        values = [value for value in values if value]
        wrong = [value for value in values if value not in ("0", "1")]
        # A header line, or a placeholder
        if not values or (len(wrong) == 1 and not is_number(wrong[0])):
            return None
        rule, value = label_rule(values)
        if all(map(is_number, values)) and {0.0, 1.0}.issuperset(map(float, values)):
            fix = "write them as 0 and 1"
        else:
            shown_value = value if rule == "at_least" else repr(value)
            fix = (
                f"derive one, such as {column} {'>=' if rule == 'at_least' else '=='} {shown_value}"
            )
            if with_rule:
                stored = value if rule == "at_least" else f"[{value!r}]"
                fix += f", or write in the schema label: {{name: {column}, {rule}: {stored}}}"
        shown = ", ".join(values[:_MAX_SHOWN]) + (" and others" if values[_MAX_SHOWN:] else "")
        return f"labels must be 0 or 1, found {shown} in column {column}; {fix}"


def label_rule(values: Sequence[str]) -> tuple[Literal["at_least", "positive"], str]:
    """Return a rule for distinct labels, sorted as by `distinct_labels`: the smallest number of the
    upper two fifths, or the text that means a click.
    """
    threshold = values[min(len(values) - 1, len(values) * 3 // 5)]
    if all(map(is_number, values)):
        return "at_least", threshold
    return "positive", next((value for value in values if value.lower() in _POSITIVE), threshold)


def is_number(text: str) -> bool:
    """Return whether text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def distinct_labels(values: Iterable[str]) -> list[str]:
    """Return the first distinct values, numbers in order before other texts."""
    texts = {value[:LABEL_LETTERS] for value in values}
    order = {text: (0, float(text), text) if is_number(text) else (1, 0.0, text) for text in texts}
    return sorted(texts, key=order.__getitem__)[:_MAX_LABELS]


HEAD_BYTES = 64 << 10
"""Bytes at the start of a file that reveal its kind."""
_UTF16: Final = "it is UTF-16; convert it (iconv -f UTF-16 -t UTF-8)"
_MARKS: Final = {
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
    b"\xef\xbb\xbf": "it starts with a byte order mark; remove these 3 bytes",
}
"""Marks of encodings at the start of a text file, and what to do with such a file."""


def likely_cause(head: bytes) -> str:
    """Return a sentence on why many lines of a text log are invalid, with the fix, from its first
    bytes; empty if unknown.
    """
    for mark, cause in _MARKS.items():
        if head.startswith(mark):
            return cause
    if b"\0" in head:
        return "it is a binary file or UTF-16, not text; convert it"
    lines = [line.rstrip(b"\r") for line in head.split(b"\n")]
    first = lines[0]
    if b"\t" not in first:
        for separator, name in (
            (b",", "commas"),
            (b";", "semicolons"),
            (b"|", "bars"),
            (b" ", "blanks"),
        ):
            if first.count(separator) >= 2:
                return f"its columns are separated by {name}, not tabs; add a header, or convert it"
        return (
            "its first line has no tab, and columns are separated by tabs; another log needs a "
            "schema: `rayrec schema FILE` drafts one for `rayrec train clicks --schema`"
        )
    fields = first.split(b"\t")
    words = [
        field for field in fields if field.strip() and not field[:1].isdigit() and field[:1] != b"-"
    ]
    if fields[0] and not fields[0].isdigit() and len(words) > len(fields) // 2:
        return (
            "its first line looks like a header; remove it (tail -n +2), or name its columns in "
            "--schema"
        )
    return ""
