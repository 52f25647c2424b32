"""Turns the bytes of a click log into raw columns, counting every line that is refused."""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayrec.native import library
from rayrec.schema import Schema

FAULT_KINDS = (
    "empty line",
    "too few columns",
    "too many columns",
    "label is not 0 or 1",
    "not an integer",
    "not 8 hexadecimal digits",
    "line too long",
)
"""In the order of rayrec_fault_kind in native/kernels.h."""
LABEL_FAULT = FAULT_KINDS[3]
_MOST_LABELS, _MOST_SHOWN, _LABEL_LETTERS = 20, 8, 24
"""Distinct labels that are kept of a column and shown in an error, and the letters of each."""
_POSITIVE = ("yes", "y", "t", "click", "clicked", "positive", "pos")
"""Texts that stand for a click."""

MAX_LINE_BYTES = 4096
PADDING_BYTES = 64  # RAYREC_TEXT_PADDING


class CLayout(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("has_label", "num_dense", "num_sparse", "max_line_bytes")]


class CRawRows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("integers", "tokens", "missing", "labels")),
        ("capacity", ctypes.c_int64),
    ]


_FAULT_DTYPE = np.dtype([("byte", np.int64), ("kind", np.int32), ("column", np.int32)])


@dataclass(frozen=True)
class Fault:
    """One refused line of text, or row of a table."""

    path: str
    byte: int | None
    """Where the line starts in the (unpacked) file; None in a table."""
    kind: str
    column: str
    """Name of the column at fault, empty where the whole line is meant."""
    row: int | None = None
    """Of a table, the first being 0."""

    def __str__(self) -> str:
        where = f"byte {self.byte}" if self.row is None else f"row {self.row}"
        return f"{self.path} at {where}: {self.kind}" + (f" in column {self.column}" if self.column else "")


@dataclass
class Faults:
    """Refused lines of some text: how many of each kind, and the first few of them."""

    counts: dict[str, int] = field(default_factory=dict)
    first: list[Fault] = field(default_factory=list)
    keep: int = 10
    labels: dict[str, list[str]] = field(default_factory=dict)
    """Distinct values of each label column that has other values than 0 and 1."""

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def add(self, other: Faults) -> None:
        """Adds faults found further on in the log."""
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
        self.first = (self.first + other.first)[: self.keep]
        for column, values in other.labels.items():
            self.labels[column] = distinct_labels([*self.labels.get(column, ()), *values])

    @classmethod
    def merged(cls, parts: Iterable[Faults]) -> Faults:
        total = cls()
        for part in parts:
            total.add(part)
        return total

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        labels = {"labels": self.labels} if self.labels else {}
        return {"counts": self.counts, "first": [vars(fault) for fault in self.first], **labels}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Faults:
        return cls(stored["counts"], [Fault(**fault) for fault in stored["first"]], labels=stored.get("labels", {}))

    def describe(self) -> str:
        """One line: each kind with its count, and where the first one is."""
        if not self.total:
            return "no faulty rows"
        kinds = ", ".join(f"{count:,} x {kind}" for kind, count in sorted(self.counts.items()))
        return f"{self.total:,} faulty rows ({kinds}); first: {self.first[0]}"

    def wrong_labels(self) -> str | None:
        """Return the problem and its fix if most faults are labels other than 0 and 1; None if they are not."""
        if not self.labels or 2 * self.counts.get(LABEL_FAULT, 0) <= self.total:
            return None
        column, values = next(iter(self.labels.items()))
        wrong = [value for value in values if value not in ("0", "1")]
        if len(wrong) == 1 and not _is_number(wrong[0]):  # a header's line, or a placeholder
            return None
        numbers = [float(value) for value in values] if all(map(_is_number, values)) else None
        chosen = values[min(len(values) - 1, len(values) * 3 // 5)]
        if numbers and {0.0, 1.0}.issuperset(numbers):
            fix = "write them as 0 and 1"
        elif numbers:
            fix = f"derive one, such as {column} >= {chosen}"
        else:
            positive = next((value for value in values if value.lower() in _POSITIVE), chosen)
            fix = f"derive one, such as {column} == {positive!r}"
        shown = ", ".join(values[:_MOST_SHOWN]) + (" and others" if values[_MOST_SHOWN:] else "")
        return f"labels must be 0 or 1, found {shown} in column {column}; {fix}"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def distinct_labels(values: Iterable[str]) -> list[str]:
    """Return the first distinct values, numbers in their order before other texts."""
    texts = {value[:_LABEL_LETTERS] for value in values}
    order = {text: (0, float(text), text) if _is_number(text) else (1, 0.0, text) for text in texts}
    return sorted(texts, key=order.__getitem__)[:_MOST_LABELS]


class RawRows:
    """Raw columns of parsed rows: integers int64 (rows, num_dense), tokens uint32 (rows, num_sparse), missing uint64
    (rows) with a bit a feature column in schema order, labels uint8 (rows)."""

    def __init__(self, schema: Schema, capacity: int) -> None:
        self.schema = schema
        self.capacity = capacity
        self.rows = 0
        # np.empty: pages that no row reaches are never touched, so a generous capacity costs nothing.
        self.integers = np.empty((capacity, len(schema.dense)), np.int64)
        self.tokens = np.empty((capacity, len(schema.sparse)), np.uint32)
        self.missing = np.empty(capacity, np.uint64)
        self.labels = np.empty(capacity, np.uint8)
        self._files: list[tuple[str, int]] = []

    def begin_file(self, path: str) -> None:
        """The rows that follow are of this file."""
        self._files.append((path, self.rows))

    def files(self) -> list[tuple[str, int, int]]:
        """(path, first row, row behind the last) of each run of rows of one file; path "" where none was named."""
        begun = self._files or [("", 0)]
        stops = [start for _, start in begun[1:]] + [self.rows]
        return [(path, start, stop) for (path, start), stop in zip(begun, stops, strict=True)]

    def with_columns(self, schema: Schema, **arrays: np.ndarray) -> RawRows:
        """The same rows with other columns; arrays that are not given are shared with these rows."""
        other = copy.copy(self)
        other.schema, other.capacity = schema, self.rows
        for name, array in arrays.items():
            setattr(other, name, array)
        return other

    @property
    def layout(self) -> CLayout:
        return CLayout(
            int(self.schema.label is not None), len(self.schema.dense), len(self.schema.sparse), MAX_LINE_BYTES
        )

    def c_rows(self, start: int = 0) -> CRawRows:
        return CRawRows(
            *(array[start:].ctypes.data for array in (self.integers, self.tokens, self.missing, self.labels)),
            self.capacity - start,
        )


def max_rows_in(schema: Schema, length: int) -> int:
    """How many rows `length` bytes can hold at most: a row has a byte a separator and one for its label."""
    shortest = len(schema.columns) + (1 if schema.label else 0)
    return length // shortest + 1


def padded(text: bytes | bytearray | memoryview | np.ndarray) -> np.ndarray:
    """A copy of the text with the padding behind it that the parser may read."""
    source = text if isinstance(text, np.ndarray) else np.frombuffer(text, np.uint8)
    out = np.zeros(len(source) + PADDING_BYTES, np.uint8)
    out[: len(source)] = source
    return out


def parse_into(raw: RawRows, text: np.ndarray, length: int, *, path: str = "", first_byte: int = 0) -> Faults:
    """Appends the rows of text[:length] to `raw` and returns the faults among its lines.

    `text` is uint8 with PADDING_BYTES behind `length`; it starts at a line's start, at `first_byte` of file `path`.
    """
    before = raw.rows
    counts, details = _parsed(raw, text, length, most_faults=Faults.keep)
    names = raw.schema.columns
    wrong = [
        text[begin : begin + _LABEL_LETTERS].tobytes().partition(b"\t")[0].decode("utf-8", "replace")
        for begin, kind in zip(details["byte"].tolist(), details["kind"].tolist(), strict=True)
        if FAULT_KINDS[kind] == LABEL_FAULT
    ]
    good = map(str, np.unique(raw.labels[before : raw.rows]).tolist()) if wrong else ()
    return Faults(
        labels={names[0]: distinct_labels([*wrong, *good])} if wrong else {},
        counts={kind: int(count) for kind, count in zip(FAULT_KINDS, counts, strict=True) if count},
        first=[
            Fault(
                path,
                first_byte + int(d["byte"]),
                FAULT_KINDS[d["kind"]],
                names[d["column"]] if d["column"] >= 0 else "",
            )
            for d in details
        ],
    )


def parse_lines(raw: RawRows, text: np.ndarray, length: int, *, most_faults: int) -> np.ndarray:
    """Appends the rows of text[:length] to `raw` as `parse_into` does; returns where in it refused lines start: int64, at most
    `most_faults`."""
    _, details = _parsed(raw, text, length, most_faults=most_faults)
    return details["byte"].astype(np.int64)


def _parsed(raw: RawRows, text: np.ndarray, length: int, *, most_faults: int) -> tuple[np.ndarray, np.ndarray]:
    """Appends the rows; returns the number of faults of each kind, and the first faults (_FAULT_DTYPE)."""
    assert text.dtype == np.uint8
    assert text.flags.c_contiguous
    assert len(text) >= length + PADDING_BYTES
    counts = np.zeros(len(FAULT_KINDS), np.int64)
    details = np.zeros(most_faults, _FAULT_DTYPE)
    num_details = ctypes.c_int64()
    rows = _parse()(
        text.ctypes.data,
        length,
        ctypes.byref(raw.layout),
        ctypes.byref(raw.c_rows(raw.rows)),
        counts.ctypes.data,
        details.ctypes.data,
        len(details),
        ctypes.byref(num_details),
    )
    assert rows >= 0, "capacity is derived from the shortest possible row"
    raw.rows += rows
    return counts, details[: num_details.value]


def parse(schema: Schema, text: bytes, *, path: str = "") -> tuple[RawRows, Faults]:
    """Parses a small text held in memory."""
    raw = RawRows(schema, max_rows_in(schema, len(text)))
    faults = parse_into(raw, padded(text), len(text), path=path)
    return raw, faults


def _parse() -> ctypes._NamedFuncPointer:
    function = library().rayrec_parse
    function.restype = ctypes.c_int64
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        *[ctypes.c_void_p] * 4,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return function


HEAD_BYTES = 64 << 10
"""Bytes of a file's start that tell its kind."""
_MAGIC = {
    b"\xff\xfe": "it is UTF-16; convert it (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "it is UTF-16; convert it (iconv -f UTF-16 -t UTF-8)",
    b"\xef\xbb\xbf": "it starts with a byte order mark; remove these 3 bytes",
    b"PAR1": "it is Parquet; give it a name that ends in .parquet",
    b"\x28\xb5\x2f\xfd": "it is compressed with zstd; unpack it",
    b"BZh": "it is compressed with bzip2; unpack it",
    b"\xfd7zXZ": "it is compressed with xz; unpack it",
    b"PK\x03\x04": "it is a zip archive; unpack it",
    b"\x1f\x8b": "it is compressed with gzip; unpack it",
    b"ARROW1": "it is an Arrow file; write it as Parquet",
}


def likely_cause(head: bytes) -> str:
    """One sentence on the first bytes of a text log in which many lines are faulty, with the remedy; empty if nothing is
    conspicuous."""
    for magic, cause in _MAGIC.items():
        if head.startswith(magic):
            return cause
    if b"\0" in head:
        return "it is a binary file or UTF-16, not text; convert it"
    lines = [line.rstrip(b"\r") for line in head.split(b"\n")]
    first = lines[0]
    if b"\t" not in first:
        for separator, name in ((b",", "commas"), (b";", "semicolons"), (b"|", "bars"), (b" ", "blanks")):
            if first.count(separator) >= 2:
                return f"its columns are separated by {name}, not tabs; add a header and name it .csv, or convert it"
        return "its first line has no tab, and columns are separated by tabs"
    fields = first.split(b"\t")
    words = [field for field in fields if field.strip() and not field[:1].isdigit() and field[:1] != b"-"]
    if fields[0] and not fields[0].isdigit() and len(words) > len(fields) // 2:
        return "its first line looks like a header; remove it (tail -n +2)"
    return ""
