"""Columns of a log as formulas take them: numbers, texts and times of one Arrow type each, whatever
the type in the file.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec.data.logs.column_values import (
    EMPTY,
    MAX_SECONDS,
    REJECTED,
    VALUE,
    MakeError,
    Markers,
    Text,
    decimal_digits,
    epoch_seconds,
    float_tokens,
    is_text,
    parse_numbers,
    read_times,
)
from rayrec.formula.types import Type

Canonical = tuple[pa.Array, np.ndarray]
"""Values as formulas take them, null if missing or rejected, and which are rejected, bool."""

LIST_TYPES: Final = {
    "number": pa.large_list(pa.float64()),
    "category": pa.large_list(pa.large_string()),
    "text": pa.large_list(pa.large_string()),
    "time": pa.large_list(pa.int64()),
}
"""Arrow types of lists, by the type of their items."""
# rayrec_text_kind in native/kernels.h
_TRUE: Final = 4
_FALSE: Final = 5


def as_text(array: pa.Array) -> pa.Array:
    """Return categories of any form, or lists of them, as large_string."""
    lists = LIST_TYPES["text"]
    is_list = types.is_large_list(array.type)
    return pc.cast(array, lists if is_list else lists.value_type)


def for_definitions(array: pa.Array, kind: Type) -> pa.Array:
    """Return a column of formulas with the values that definitions take: all categories as text."""
    return as_text(array) if kind.kind in ("category", "text") else array


def canonical(
    array: pa.Array,
    kind: Type,
    name: str,
    make_error: MakeError,
    markers: Markers,
) -> Canonical:
    """Return a column's values, or its lists' items, by the kind of a type."""
    conversions = {"number": _numbers, "time": _times}
    convert = conversions.get(kind.kind, _texts)
    if not types.is_dictionary(array.type):
        return convert(array, name, make_error, markers)
    values, _ = convert(array.dictionary, name, make_error, markers)
    if values.null_count:
        return convert(array.dictionary_decode(), name, make_error, markers)
    # Nulls are among the numbers alone, as of all dictionaries that kernels get.
    result = pa.DictionaryArray.from_arrays(array.indices, values)
    if not types.is_large_string(values.type):
        result = result.dictionary_decode()
    return result, np.zeros(len(array), bool)


# An empty field of CSV is an empty list, so null is one too: the formats must not differ. Only a
# lookup without a row has no list.
def lists_of(items: pa.Array, lengths: np.ndarray) -> pa.Array:
    """Return lists without missing items, empty ones for rows without items.

    Args:
        items: Items of all lists.
        lengths: Number of items of each list, int64 [rows].
    """
    if items.null_count:
        present = items.is_valid()
        lengths = counts_by_row(present.to_numpy(zero_copy_only=False), lengths)
        items = items.filter(present)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return pa.LargeListArray.from_arrays(pa.array(offsets), items)


def counts_by_row(mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return how many items of each list a mask selects, int64 [rows].

    Args:
        mask: Items of all lists, bool [items].
        lengths: Number of items of each list, int64 [rows].
    """
    if not mask.any():
        return np.zeros(len(lengths), np.int64)
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(row_of[mask], minlength=len(lengths))


def empty_lists(kind: Type, rows: int) -> pa.Array:
    """Return an empty list for each row."""
    items = pa.array([], LIST_TYPES[kind.kind].value_type)
    return lists_of(items, np.zeros(rows, np.int64))


def _numbers(
    array: pa.Array,
    name: str,
    make_error: MakeError,
    markers: Markers,
) -> Canonical:
    """Return numbers as float64. NaN is missing, infinities are rejected."""
    if types.is_float64(array.type) and not len(markers.numbers):
        # The most frequent type. Null is NaN here.
        numbers = array.to_numpy(zero_copy_only=False)
        finite = np.isfinite(numbers)
        if finite.all():
            return pa.array(numbers), np.zeros(len(array), bool)
        return pa.array(numbers, mask=~finite), np.isinf(numbers)
    values, status = parse_numbers(markers.to_null(array), name, make_error, times=True)
    status = markers.mark_numbers(values, status)
    missing = (status == EMPTY) | np.isnan(values)
    rejected = ~missing & ((status == REJECTED) | ~np.isfinite(values))
    return pa.array(values, pa.float64(), mask=missing | rejected), rejected


# One category has one text, as it has one token:
#
#   text          as it is; true and false, and 1 and 0 of booleans, are the integers 1 and 0
#   integers      their digits
#   floats        the digits of integral ones; others are rejected
#   dates         ISO 8601
#
# Text of a dictionary stays one, so that a block looks at each distinct value once.
# Integers stay int64, which stands for their digits: most categories are only needed as tokens, and
# the token of an integer is the integer. `as_text` writes the digits for functions that read them.
def _texts(
    array: pa.Array,
    name: str,
    make_error: MakeError,
    markers: Markers,
) -> Canonical:
    """Return categories as large_string or int64. Text that is not UTF-8 is rejected, and so are
    fractions.
    """
    array = markers.to_null(array)
    rejected = np.zeros(len(array), bool)
    if types.is_null(array.type):
        return pa.nulls(len(array), pa.large_string()), rejected
    if types.is_floating(array.type):
        integers = np.zeros(len(array), np.uint64)
        status = float_tokens(array, integers)
        values = pa.array(integers.view(np.int64), mask=status != VALUE)
        return _without_markers(values, markers), status == REJECTED
    if types.is_decimal(array.type):
        text, integral = decimal_digits(array)
        text = pc.if_else(
            pa.array(integral),
            text,
            pa.scalar(None, pa.large_string()),
        )
        return _without_markers(text, markers), ~integral
    if is_text(array.type):
        text, rejected = _utf8(pc.cast(array, pa.large_binary()))
        return _without_markers(text, markers), rejected
    if types.is_boolean(array.type):
        array = pc.cast(array, pa.uint8())
    elif types.is_date(array.type):
        array = pc.cast(array, pa.date32())
    elif not types.is_integer(array.type):
        raise make_error(name, "text or integers are needed; convert it")
    is_int64 = not types.is_date(array.type) and not _has_larger(array)
    values = pc.cast(array, pa.int64() if is_int64 else pa.large_string())
    return _without_markers(values, markers), rejected


def _has_larger(array: pa.Array) -> bool:
    """Return whether integers are beyond the range of int64."""
    if not types.is_uint64(array.type):
        return False
    largest = pc.max(array).as_py()
    return largest is not None and largest >= 2**63


def _utf8(array: pa.Array) -> Canonical:
    """Convert bytes to text. Empty ones are missing."""
    text = Text.from_array(array)
    kinds = text.call("rayrec_text_kinds")
    rejected = kinds == REJECTED
    array = _from_zero(array, text)
    if kinds.any():
        missing = rejected | (kinds == EMPTY)
        null = pa.scalar(None, array.type)
        array = pc.if_else(pa.array(missing), null, array) if missing.any() else array
        for kind, digit in ((_TRUE, b"1"), (_FALSE, b"0")):
            is_word = kinds == kind
            if is_word.any():
                array = pc.if_else(pa.array(is_word), pa.scalar(digit, array.type), array)
    # All that is left is UTF-8, so that nothing needs to be checked or copied.
    return array.view(pa.large_string()), rejected


# Arrow 26's ascii_lower and ascii_trim break arrays without an offset whose first value does not
# begin at byte 0. A cast to large_binary makes such an array from a slice.
def _from_zero(array: pa.Array, text: Text) -> pa.Array:
    """Return an array of large_binary whose first value begins at byte 0."""
    start = int(text.offsets[0])
    if not start:
        return array
    validity = None if text.null is None else pa.array(~text.null).buffers()[1]
    offsets = pa.py_buffer(text.offsets - start)
    data = pa.py_buffer(text.data[start:])
    return pa.Array.from_buffers(array.type, len(array), [validity, offsets, data])


def _without_markers(values: pa.Array, markers: Markers) -> pa.Array:
    """Replace the integers among the markers of missing values by null."""
    if not len(markers.integers):
        return values
    integers = pc.cast(pa.array(markers.integers.view(np.int64)), values.type)
    is_marker = pc.is_in(values, value_set=integers)
    null = pa.scalar(None, values.type)
    return pc.if_else(is_marker, null, values)


def _times(
    array: pa.Array,
    name: str,
    make_error: MakeError,
    markers: Markers,
) -> Canonical:
    """Return times as int64 microseconds since 1970-01-01 00:00 UTC."""
    array = markers.to_null(array)
    rejected = np.zeros(len(array), bool)
    if types.is_null(array.type):
        return pa.nulls(len(array), pa.int64()), rejected
    if is_text(array.type):
        binary = pc.cast(array, pa.large_binary())
        missing = pc.fill_null(pc.equal(pc.binary_length(binary), 0), True)
        missing = missing.to_numpy(zero_copy_only=False)
        values, status = read_times(array)
        rejected = ~missing & (status != VALUE)
        return pa.array(values, mask=missing | rejected), rejected
    if types.is_boolean(array.type):
        raise make_error(
            name,
            "a time must be a date, a timestamp, ISO 8601 text, or seconds since 1970",
        )
    if types.is_timestamp(array.type):
        return pc.cast(pc.cast(array, pa.timestamp("us"), safe=False), pa.int64()), rejected
    numbers, status = parse_numbers(array, name, make_error, times=True)
    values = numbers if types.is_temporal(array.type) else epoch_seconds(numbers)
    missing = (status == EMPTY) | np.isnan(values)
    good = ~missing & (status == VALUE) & np.isfinite(values) & (np.abs(values) < MAX_SECONDS)
    microseconds = np.rint(np.where(good, values, 0) * 1e6).astype(np.int64)
    return pa.array(microseconds, mask=~good), ~missing & ~good
