"""JSON lines: an object with the columns by name in each line (https://jsonlines.org).

    {"click": 1, "user": "u5", "tags": ["a", "b"]}
    {"click": 0, "user": "u7", "price": 0.5}

becomes

    click  user  tags  price
    1      u5    a, b
    0      u7          0.5
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from pyarrow import types

from rayrec.data.formats.base import LineFormat
from rayrec.data.formats.tokens import table_of

_START: Final = re.compile(rb'\s*\{\s*(?:"[^"\n]*"\s*:|\})')
_EXACT: Final = 2**53
"""Largest integer up to which all are float64 numbers."""


# Arrow reads a block of lines at once and gives each column one type. It cannot do so if
#
#   a line is no object                    that row is a fault
#   a column has numbers and texts         all become texts
#   an integer has more than 63 bits       it would be rounded: it becomes text
#   a text looks like a time               it would become one, and no category: it stays text
#
# Such blocks are read row by row.
@final
class JsonLines(LineFormat):
    """Columns of an object's names. Nested objects are left out."""

    name: ClassVar[str] = "jsonl"
    is_sparse: ClassVar[bool] = True

    def recognizes(self, start: bytes) -> bool:
        return _START.match(start) is not None

    def parse(self, text: bytes, columns: Sequence[str] | None, lists: Collection[str]) -> pa.Table:
        read, malformed = _read_block(text)
        arrays: dict[str, pa.Array] = dict.fromkeys(columns or (), pa.nulls(len(malformed)))
        for name, column in read.items():
            if _is_nested(column.type):
                arrays.pop(name, None)
            else:
                arrays[name] = column
        return table_of(arrays, malformed, columns)


def _is_nested(kind: pa.DataType) -> bool:
    return types.is_struct(kind) or (types.is_list(kind) and types.is_nested(kind.value_type))


def _read_block(text: bytes) -> tuple[dict[str, pa.Array], np.ndarray]:
    """Return the columns of lines by name, and which lines are malformed, bool."""
    options = pa.json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    try:
        table = pa.json.read_json(io.BytesIO(text), options)
        times = [field.name for field in table.schema if types.is_timestamp(_item_type(field.type))]
        if times:
            explicit = pa.schema(
                [(name, _as_text(table.schema.field(name).type)) for name in times]
            )
            parse = pa.json.ParseOptions(explicit_schema=explicit)
            names = table.column_names
            table = pa.json.read_json(io.BytesIO(text), options, parse).select(names)
    except pa.ArrowInvalid:
        return _read_rows(text)
    if any(map(_is_rounded, table.columns)):
        return _read_rows(text)
    columns = dict(zip(table.column_names, table.columns, strict=True))
    return columns, np.zeros(len(table), bool)


def _item_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if types.is_list(kind) else kind


def _as_text(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.string()) if types.is_list(kind) else pa.string()


def _is_rounded(column: pa.ChunkedArray) -> bool:
    """Return whether a column of floats may have integers that no float has."""
    if not types.is_floating(_item_type(column.type)):
        return False
    values = pc.list_flatten(column) if types.is_list(column.type) else column
    return bool(pc.any(pc.greater_equal(pc.abs(values), _EXACT)).as_py())


def _read_rows(text: bytes) -> tuple[dict[str, pa.Array], np.ndarray]:
    """Return the same of lines that are parsed one by one."""
    rows = list(_parsed(text))
    names = dict.fromkeys(name for row in rows if row is not None for name in row)
    arrays = {
        name: _to_array([None if row is None else row.get(name) for row in rows]) for name in names
    }
    return arrays, np.array([row is None for row in rows], bool)


def _parsed(text: bytes) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line that is not empty, None for a line without one."""
    for line in text.split(b"\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # Also text that is not UTF-8
            row = None
        yield row if isinstance(row, dict) else None


def _to_array(values: list[Any]) -> pa.Array:
    """Return values of one kind as they are, and of several kinds as text."""
    present = [value for value in values if value is not None]
    if any(isinstance(value, list) for value in present):
        items = [item for value in present if isinstance(value, list) for item in value]
        if not _has_one_kind(items):
            values = [
                [_text(item) for item in value] if isinstance(value, list) else value
                for value in values
            ]
        # A single value is a list of one.
        return pa.array(
            [value if value is None or isinstance(value, list) else [value] for value in values]
        )
    return pa.array(values if _has_one_kind(present) else [_text(value) for value in values])


def _has_one_kind(values: list[Any]) -> bool:
    """Return whether values have one Arrow type that keeps them exactly."""
    kinds = {type(value) for value in values}
    if kinds == {int}:
        return all(-(2**63) <= value < 2**63 for value in values)
    if kinds == {int, float}:
        return all(abs(value) < _EXACT for value in values)
    return len(kinds) <= 1


def _text(value: Any) -> str | None:
    """Return a value as text: numbers in their shortest form, true and false, JSON of others."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
