"""Parser of Arrow tables to raw columns: numbers, categories and lists of many types, counting invalid rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec.data.logs.column_values import (
    EMPTY,
    LIMIT,
    MOST_SECONDS,
    REFUSED,
    VALUE,
    RefuseType,
    Text,
    integer_tokens,
    integers_of,
    is_list,
    is_text,
    numbers_of,
    plain_array,
    resolved,
    text_integers,
    text_tokens,
    times_of,
    type_error,
    whole_tokens,
)
from rayrec.data.logs.csv_reader import FAULT, TOO_FEW, TOO_MANY, UNMATCHED, present_columns
from rayrec.data.logs.faults import LABEL_FAULT, Fault, Faults, distinct_labels
from rayrec.data.raw_block import RawBlock, RawList, category_type, number_type, places_of
from rayrec.schema import Label, Schema

_KINDS = (
    "label is missing",
    LABEL_FAULT,
    "weight is not a number of 0 or more",
    "not a finite number",
    "beyond 10^18",
    "not an integer",
    "not 8 hexadecimal digits",
    "not UTF-8",
    "too few columns",
    "too many columns",
    "unmatched quote",
    "not a whole number in range",
    "weights are not as many numbers as categories",
    "not a time",
    "categories are not at the places of the list that it is aligned with",
    "not a number of 0 or more",
)
(
    NO_LABEL, LABEL, WEIGHT, NOT_FINITE, BEYOND, NOT_AN_INTEGER, NOT_HEXADECIMAL, NOT_UTF8, FEW, MANY, QUOTE, NOT_WHOLE,
    LIST_WEIGHTS, TIME, LIST_PLACES, NEGATIVE,
) = range(len(_KINDS))  # fmt: skip
_WHOLE_ROW = -1
_PLACE_BITS = 32
"""Low bits for a list item's position in its row, below the row number."""


class _Refused:
    """First fault of each row, in the order of the schema's columns."""

    def __init__(self, rows: int) -> None:
        self.kinds = np.full(rows, -1, np.int8)
        self.columns = np.zeros(rows, np.int16)
        self.labels: dict[str, list[str]] = {}

    def add(self, bad: np.ndarray, kind: int, column: int) -> None:
        """Record a fault of the rows `bad`, bool [rows]."""
        if bad.any():
            new = bad & (self.kinds < 0)
            self.kinds[new], self.columns[new] = kind, column

    def add_labels(self, bad: np.ndarray, array: pa.Array, name: str, column: int) -> None:
        """Record labels other than 0 and 1. `array` has all labels of the column."""
        self.add(bad, LABEL, column)
        if bad.any():
            found = pc.unique(array.drop_null())
            found = found if is_text(found.type) else pc.cast(found, pa.string())
            self.labels[name] = distinct_labels(
                text.decode("utf-8", "replace") for text in pc.cast(found, pa.binary()).to_pylist()
            )

    def faults(self, columns: Sequence[str], path: str, first_row: int) -> Faults:
        found = np.flatnonzero(self.kinds >= 0)
        counts = np.bincount(self.kinds[found], minlength=len(_KINDS)).tolist()
        names = [*columns, ""]  # The last one for _WHOLE_ROW
        first = [
            Fault(path, None, _KINDS[self.kinds[row]], names[self.columns[row]], first_row + row)
            for row in found[: Faults.keep].tolist()
        ]
        return Faults({kind: count for kind, count in zip(_KINDS, counts, strict=True) if count}, first, labels=self.labels)


def check_types(table_schema: pa.Schema, schema: Schema, *, path: str) -> None:
    """Check that the types of the columns, which must exist, match the schema. Raises InputError."""
    parse_table(table_schema.empty_table().select(list(present_columns(table_schema.names, schema))), schema, path=path)


def parse_table(table: pa.Table, schema: Schema, *, path: str = "", first_row: int = 0) -> tuple[RawBlock, Faults]:
    """Parse a table with the schema's columns to its valid rows, and its faults, with rows numbered from `first_row`.

    Null and empty text are missing values; such items of a list are dropped. An absent column has missing values only. Raises
    InputError for an unusable type.
    """
    block, refused = _parsed(table, schema, path)
    return block, refused.faults(schema.columns, path, first_row)


def good_rows_of(table: pa.Table, schema: Schema, *, path: str = "") -> np.ndarray:
    """Return the rows that `parse_table` returns, int64."""
    return np.flatnonzero(_parsed(table, schema, path)[1].kinds < 0)


def _parsed(table: pa.Table, schema: Schema, path: str) -> tuple[RawBlock, _Refused]:
    refused = _Refused(table.num_rows)
    if FAULT in table.column_names:
        fault = table.column(FAULT).to_numpy()
        refused.add(fault == TOO_FEW, FEW, _WHOLE_ROW)
        refused.add(fault == TOO_MANY, MANY, _WHOLE_ROW)
        refused.add(fault == UNMATCHED, QUOTE, _WHOLE_ROW)
    arrays = {
        name: plain_array(table.column(name)) if name in table.column_names else pa.nulls(table.num_rows)
        for name in schema.columns
    }
    refuse_type = type_error(table.schema, path)
    labels: dict[str, np.ndarray] = {}
    weights = None
    if schema.label is not None:
        labels[schema.label] = _clicks(arrays[schema.label], schema.label, refused, refuse_type)
    if schema.weight is not None:
        values, status = numbers_of(arrays[schema.weight], schema.weight, refuse_type)
        good = (status == VALUE) & (values >= 0) & (values <= LIMIT)
        refused.add(~good, WEIGHT, schema.columns.index(schema.weight))
        weights = np.where(good, values, 0).astype(np.float32)
    rows, hexadecimal = table.num_rows, schema.tokens == "hexadecimal"
    order: Literal["C", "F"] = "C" if hexadecimal else "F"
    block = RawBlock(
        schema,
        np.empty((rows, len(schema.dense)), number_type(schema), order),
        np.empty((rows, len(schema.singles)), category_type(schema), order),
        np.zeros((rows, len(schema.dense) + len(schema.singles)), bool, "F"),
    )
    first = _first_feature(schema)
    for place, name in enumerate(schema.dense):
        values, missing = _values_of(arrays[name], name, schema, refused, refuse_type, number=first + place)
        block.numbers[:, place], block.missing[:, place] = values, missing
    lists = _fill_categories(block, arrays, refused, refuse_type)
    labels |= {label.name: _label(arrays[label.name], label, schema, refused, refuse_type) for label in schema.labels}
    block = replace(
        block,
        missing=_bits(block.missing) if hexadecimal else block.missing,
        lists=lists,
        labels=labels,
        weights=weights,
        times=_timestamps(arrays, schema, refused, refuse_type),
    )
    keep = np.flatnonzero(refused.kinds < 0)
    block = block if len(keep) == rows else block.take(keep)
    return replace(block, files=((path, 0, block.rows),)), refused


def _bits(missing: np.ndarray) -> np.ndarray:
    """Pack a matrix of bool [rows, columns] into bits of uint64 [rows]."""
    bits = np.zeros(len(missing), np.uint64)
    for place, column in enumerate(missing.T):
        bits |= column.astype(np.uint64) << np.uint64(place)
    return bits


def _fill_categories(
    block: RawBlock, arrays: dict[str, pa.Array], refused: _Refused, refuse_type: RefuseType
) -> tuple[RawList, ...]:
    """Fill the block's categories and their missing mask; return the list columns."""
    schema, lists, places = block.schema, [], dict[str, np.ndarray]()
    first = _first_feature(schema) + len(schema.dense)
    for number, name in enumerate(schema.sparse, first):
        if name in schema.lists:
            column, bad, kind, places[name] = _lists(arrays, name, schema, refuse_type)
            lists.append(column)
        else:
            if is_list(arrays[name].type) and schema.tokens == "any":
                raise refuse_type(name, "name it in the schema's lists, or leave it out")
            place = schema.places[name] - len(schema.dense)
            status, kind = _categories(arrays[name], name, schema, refuse_type, block.categories[:, place])
            block.missing[:, len(schema.dense) + place] = status == EMPTY
            bad = status == REFUSED
        refused.add(bad, kind, number)
    for number, name in enumerate(schema.sparse, first):
        other = schema.feature(name).aligned_with
        if other is not None:
            bad = np.zeros(block.rows, bool)
            bad[np.setxor1d(places[name], places[other], assume_unique=True) >> _PLACE_BITS] = True
            refused.add(bad, LIST_PLACES, number)
    return tuple(lists)


def _first_feature(schema: Schema) -> int:
    """Return the index of the first dense column in `schema.columns`; sparse columns follow the dense ones."""
    return int(schema.label is not None) + int(schema.weight is not None)


def _values_of(
    array: pa.Array, name: str, schema: Schema, refused: _Refused, refuse_type: RefuseType, *, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers, `number_type`, 0 if missing or rejected, and which are missing. Adds faults to column `number`."""
    if schema.tokens == "hexadecimal":
        values, status = integers_of(array, name, refuse_type)
        refused.add(status == REFUSED, NOT_AN_INTEGER, number)
        return values, status == EMPTY
    values, status = numbers_of(array, name, refuse_type, times=True)
    if schema.nan == "missing":
        status = np.where(np.isnan(values), EMPTY, status)
        values = np.where(status == EMPTY, 0.0, values)
    finite = np.isfinite(values)
    refused.add((status == REFUSED) | ~finite, NOT_FINITE, number)
    refused.add(np.abs(values) > LIMIT, BEYOND, number)
    good = finite & (status == VALUE)
    return values if good.all() else np.where(good, values, 0.0), status == EMPTY


def label_faults(table: pa.Table, label: str, *, path: str) -> Faults:
    """Return the faults of the label column."""
    refused = _Refused(table.num_rows)
    _clicks(plain_array(table.column(label)), label, refused, type_error(table.schema, path))
    return refused.faults([label], path, 0)


def _clicks(array: pa.Array, name: str, refused: _Refused, refuse_type: RefuseType) -> np.ndarray:
    """Return `Schema.label`, the first column, float32 [rows]."""
    values, status = numbers_of(array, name, refuse_type)
    refused.add(status == EMPTY, NO_LABEL, 0)
    wrong = (status != EMPTY) & ((status != VALUE) | ((values != 0) & (values != 1)))
    refused.add_labels(wrong, array, name, 0)
    return (values == 1).astype(np.float32)


def _label(array: pa.Array, label: Label, schema: Schema, refused: _Refused, refuse_type: RefuseType) -> np.ndarray:
    """Return an additional label, NaN if missing (the missing number of pandas), float32 [rows]."""
    number = schema.columns.index(label.name)
    values, status = numbers_of(array, label.name, refuse_type)
    missing = (status == EMPTY) | np.isnan(values)
    if label.missing == "fault":
        refused.add(missing, NO_LABEL, number)
    if label.kind == "binary":
        wrong = ~missing & ((status != VALUE) | ((values != 0) & (values != 1)))
        refused.add_labels(wrong, array, label.name, number)
    else:
        refused.add(~missing & ((status != VALUE) | ~np.isfinite(values)), NOT_FINITE, number)
        refused.add(~missing & (np.abs(values) > LIMIT), BEYOND, number)
        if label.kind == "count":
            refused.add(~missing & (values < 0), NEGATIVE, number)
    return np.where(missing, np.nan, values).astype(np.float32)


def _timestamps(arrays: dict[str, pa.Array], schema: Schema, refused: _Refused, refuse_type: RefuseType) -> np.ndarray | None:
    """Return microseconds since 1970-01-01 00:00 UTC, int64 [rows]; None if the schema has no timestamp."""
    name = schema.timestamp
    if name is None:
        return None
    array = arrays[name]
    if is_text(array.type):
        values, status = times_of(array)
    else:
        if types.is_boolean(array.type):
            raise refuse_type(name, "a time is a date, a timestamp, its text in ISO 8601, or seconds since 1970")
        seconds, status = numbers_of(array, name, refuse_type, times=True)
        good = np.isfinite(seconds) & (np.abs(seconds) < MOST_SECONDS) & (status == VALUE)
        values, status = np.rint(np.where(good, seconds, 0) * 1e6).astype(np.int64), np.where(good, VALUE, REFUSED)
    refused.add(status != VALUE, TIME, schema.columns.index(name))
    return values


def _categories(array: pa.Array, name: str, schema: Schema, refuse_type: RefuseType, out: np.ndarray) -> tuple[np.ndarray, int]:
    """Write categories to `out`, 0 if missing or rejected; return (status, fault kind of REFUSED), see column_values."""
    if types.is_null(array.type):
        out[:] = 0
        return np.full(len(array), EMPTY, np.uint8), NOT_UTF8
    if schema.tokens == "hexadecimal":
        if not is_text(array.type):
            raise refuse_type(name, "8 hexadecimal digits as text are needed; set tokens: any in the schema for other categories")
        values = np.empty(len(array), np.uint32)
        status = Text.of(array).call("rayrec_text_hexadecimal", values)
        out[:] = values
        return status, NOT_HEXADECIMAL
    if types.is_date(array.type) and name not in schema.integers:
        array = pc.cast(pc.cast(array, pa.date32()), pa.large_string())
    if is_text(array.type):
        if name in schema.integers:
            return text_integers(array, out), NOT_WHOLE
        return text_tokens(array, out, booleans=schema.category_rules >= 2), NOT_UTF8
    if types.is_integer(array.type) or types.is_boolean(array.type):
        return integer_tokens(array, out), NOT_WHOLE
    if types.is_floating(array.type) or types.is_decimal(array.type):
        return whole_tokens(array, out), NOT_WHOLE
    if types.is_timestamp(array.type):
        raise refuse_type(
            name,
            "text or integers are needed: convert it to text, or to the part that tells rows apart, such as the date "
            "(pandas: .dt.date) or the hour (.dt.hour)",
        )
    raise refuse_type(name, "text or integers are needed; convert it, or leave it out of the schema")


def _lists(
    arrays: dict[str, pa.Array], name: str, schema: Schema, refuse_type: RefuseType
) -> tuple[RawList, np.ndarray, int, np.ndarray]:
    """Return (column, rejected rows bool [rows], their fault kind, row and position of each category int64)."""
    feature, array = schema.feature(name), arrays[name]
    rows = len(array)
    if types.is_null(array.type):
        nothing = None if feature.weights is None else np.zeros(0, np.float32)
        return (
            RawList(np.zeros(0, np.uint64), np.zeros(rows, np.int32), nothing),
            np.zeros(rows, bool),
            NOT_UTF8,
            np.zeros(0, np.int64),
        )
    array = _as_lists(array, name, schema, refuse_type)
    lengths = _list_lengths(array)
    items = resolved(pc.list_flatten(array))
    tokens = np.empty(len(items), np.uint64)
    status, kind = _categories(items, name, schema, refuse_type, tokens)
    bad, weights = np.zeros(rows, bool), None
    if feature.weights is not None:
        weights, bad = _list_weights(arrays[feature.weights], feature.weights, lengths, status != EMPTY, schema, refuse_type)
        kind = LIST_WEIGHTS if bad.any() else kind
    there, row_of = status != EMPTY, np.repeat(np.arange(rows), lengths)
    places = ((row_of << _PLACE_BITS) + places_of(np.zeros(rows, np.int64), lengths))[there]
    if status.any():
        lengths = np.bincount(row_of[there], minlength=rows)
        bad |= np.bincount(row_of[status == REFUSED], minlength=rows) > 0
        tokens = np.ascontiguousarray(tokens[there])
        weights = None if weights is None else weights[there]
    column = RawList(tokens, lengths.astype(np.int32), weights)
    return column if feature.max_length is None else column.last(feature.max_length), bad, kind, places


def _as_lists(array: pa.Array, name: str, schema: Schema, refuse_type: RefuseType) -> pa.Array:
    if is_text(array.type):
        return pc.split_pattern(pc.cast(array, pa.large_binary()), pattern=schema.list_delimiter)
    if not is_list(array.type):
        raise refuse_type(name, "a list is needed, or text with the schema's list_delimiter; take it out of lists")
    return array


def _list_lengths(array: pa.Array) -> np.ndarray:
    """Return the item count of each list, 0 if missing, int64 [rows]."""
    return pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _list_weights(
    array: pa.Array, name: str, lengths: np.ndarray, there: np.ndarray, schema: Schema, refuse_type: RefuseType
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight of each list item, float32 [sum(lengths)], and the rejected rows, bool [rows].

    `there` marks the items that are categories, bool. A row is rejected if its weight and item counts differ, or if a category's
    weight is not a finite number. A row without categories may also have no weights.
    """
    weights = np.zeros(len(there), np.float32)
    given = np.zeros(len(lengths), np.int64)
    values, status = np.zeros(0), np.zeros(0, np.uint8)
    if not types.is_null(array.type):
        array = _as_lists(array, name, schema, refuse_type)
        given = _list_lengths(array)
        values, status = numbers_of(resolved(pc.list_flatten(array)), name, refuse_type)
    good = (status == VALUE) & np.isfinite(values) & (np.abs(values) <= LIMIT)
    fits = given == lengths
    items = places_of(np.cumsum(lengths)[fits] - lengths[fits], lengths[fits])
    sources = places_of(np.cumsum(given)[fits] - given[fits], given[fits])
    weights[items] = np.where(good[sources], values[sources], 0)
    wrong = np.zeros(len(there), bool)
    wrong[items] = ~good[sources] & there[items]
    row_of, rows = np.repeat(np.arange(len(lengths)), lengths), len(lengths)
    empty = np.bincount(row_of[there], minlength=rows) == 0
    empty &= np.bincount(np.repeat(np.arange(rows), given)[status != EMPTY], minlength=rows) == 0
    return weights, (~fits & ~empty) | (np.bincount(row_of[wrong], minlength=rows) > 0)
