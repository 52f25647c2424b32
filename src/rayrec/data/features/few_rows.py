"""Formulas of a few rows, such as a request's, computed by the definitions of their functions.
Kernels for whole columns would take several times as long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
from pyarrow import types

from rayrec.data.encoding.rules import EPOCH_UNITS
from rayrec.data.features.definitions import (
    INT64_TEXT,
    TRUE_AND_FALSE,
    TableLookup,
    value_of,
)
from rayrec.data.features.inputs import LIST_TYPES
from rayrec.data.logs.column_values import MAX_SECONDS
from rayrec.formula.program import Program
from rayrec.formula.types import Type

MAX_ROWS: Final = 4
"""Maximum number of rows that are computed here."""
_PLAIN_TIME: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?(Z|[+-][0-9]{2}:[0-9]{2})?)?"
)
"""Pattern of ISO 8601 text that Python and Arrow read alike."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def results(
    program: Program, columns: Mapping[str, Sequence[Any]], lookups: Sequence[TableLookup]
) -> dict[str, pa.Array]:
    """Return the columns that formulas compute, canonical arrays [rows].

    Args:
        program: Formulas, all with their constants.
        columns: Values of each input, [rows], as `rayrec.data.features.definitions` takes them.
        lookups: Function of each row that looks up values in side tables.
    """
    rows = [
        {name: values[number] for name, values in columns.items()} for number in range(len(lookups))
    ]
    for step, node in zip(program.steps, program.nodes, strict=True):
        for row, lookup in zip(rows, lookups, strict=True):
            row[step.name] = value_of(node, row, lookup)
    # One array for all columns of a type: to make one costs more than its values.
    arrays: dict[str, pa.Array] = {}
    for kind, names in program.names_by_type.items():
        values = [row[name] for name in names for row in rows]
        lists = LIST_TYPES[kind.kind]
        joined = pa.array(values, lists if kind.is_list else lists.value_type)
        for number, name in enumerate(names):
            arrays[name] = joined.slice(number * len(rows), len(rows))
    return arrays


# What `canonical` makes of these types, without the fixed costs of its kernels. It decides about
# all other types, and about values that may be faults.
def plain_values(array: pa.Array, kind: Type) -> list[Any] | None:
    """Return a column's values as definitions take them, None if `canonical` must convert it."""
    stored = array.type
    is_list = types.is_large_list(stored) or types.is_list(stored)
    if is_list != kind.is_list:
        return None
    convert = _conversion(stored.value_type if is_list else stored, kind)
    if convert is None:
        return None
    values = array.to_pylist()
    try:
        if not is_list:
            return [convert(value) for value in values]
        return [_items([convert(item) for item in value or ()]) for value in values]
    except ValueError:
        return None


def _items(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _conversion(stored: pa.DataType, kind: Type) -> Any:
    """Return the function that converts a value of a type, None if there is none. It raises
    ValueError for a value that may be a fault.
    """
    if kind.kind == "number":
        is_number = types.is_float64(stored) or types.is_int64(stored)
        return _number if is_number else None
    is_text = types.is_large_string(stored) or types.is_large_binary(stored)
    if kind.kind == "time":
        return _time if is_text else None
    if is_text:
        return _text
    return _digits if types.is_int64(stored) else None


def _number(value: float | None) -> float | None:
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        raise ValueError("an infinite number is a fault")
    return float(value)


def _text(value: str | bytes | None) -> str | None:
    if not value:
        return None
    # UnicodeDecodeError is a ValueError.
    text = value.decode() if isinstance(value, bytes) else value
    return str(TRUE_AND_FALSE[text]) if text in TRUE_AND_FALSE else text


def _time(value: str | bytes | None) -> int | None:
    if not value:
        return None
    text = value.decode() if isinstance(value, bytes) else value
    if INT64_TEXT.fullmatch(text):
        number = float(text)
        seconds = number / next(scale for limit, scale in EPOCH_UNITS if abs(number) < limit)
        if abs(seconds) < MAX_SECONDS:
            return round(seconds * 1e6)
    # Raises ValueError for what is no time
    time = datetime.fromisoformat(text if _PLAIN_TIME.fullmatch(text) else "")
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND


def _digits(value: int | None) -> str | None:
    return None if value is None else str(value)
