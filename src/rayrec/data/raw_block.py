"""Raw columns of any click log: numbers, categories of any kind as 64-bit tokens, lists of them, weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rayrec.data.encoded import Bags, EncodedRows, Ids
from rayrec.data.logs.column_values import look_up
from rayrec.schema import Schema

if TYPE_CHECKING:
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.data.encoding.rules import SparseColumn


@dataclass(frozen=True)
class RawSparse:
    """One sparse column: a token a row, or with `lengths` any number a row."""

    tokens: np.ndarray
    """uint64 (rows), or the tokens of row after row; 0 where missing"""
    missing: np.ndarray | None
    """bool (rows): rows without a value; None for lists, whose empty rows have length 0"""
    lengths: np.ndarray | None = None
    """int32 (rows), for lists"""
    weights: np.ndarray | None = None
    """float32, one for each of `tokens`, for lists whose categories have weights"""

    def take(self, rows: np.ndarray) -> RawSparse:
        """The given rows (int64), in that order."""
        if self.lengths is None:
            assert self.missing is not None
            return RawSparse(self.tokens[rows], self.missing[rows])
        starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        lengths = self.lengths[rows]
        return self._of_places(places_of(starts[rows], lengths), lengths)

    def last(self, most: int) -> RawSparse:
        """Of a column of lists, the last `most` categories of each row."""
        assert self.lengths is not None
        if not len(self.lengths) or self.lengths.max() <= most:
            return self
        ends, lengths = np.cumsum(self.lengths, dtype=np.int64), np.minimum(self.lengths, np.int32(most))
        return self._of_places(places_of(ends - lengths, lengths), lengths)

    def _of_places(self, places: np.ndarray, lengths: np.ndarray) -> RawSparse:
        weights = None if self.weights is None else self.weights[places]
        return RawSparse(self.tokens[places], None, lengths, weights)


def places_of(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: starts[0], starts[0] + 1 ... (lengths[0] of them), starts[1] and so on."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)


@dataclass(frozen=True)
class RawColumns:
    """Raw rows of a log whose schema has tokens "any"."""

    schema: Schema
    rows: int
    dense: tuple[np.ndarray, ...]
    """float64 (rows) each, finite; 0 where missing"""
    dense_missing: tuple[np.ndarray, ...]
    """bool (rows) each"""
    sparse: tuple[RawSparse, ...]
    labels: np.ndarray | None
    """uint8 (rows), 0 or 1"""
    weights: np.ndarray | None
    """float32 (rows)"""
    more_labels: tuple[np.ndarray, ...] = ()
    """float32 (rows) for each of `schema.labels`; NaN if missing"""
    timestamps: np.ndarray | None = None
    """int64 (rows): microseconds since 1970-01-01 00:00 UTC"""

    def take(self, rows: np.ndarray) -> RawColumns:
        """The given rows (int64; any, also repeated), in that order."""
        return RawColumns(
            self.schema,
            len(rows),
            tuple(values[rows] for values in self.dense),
            tuple(missing[rows] for missing in self.dense_missing),
            tuple(column.take(rows) for column in self.sparse),
            None if self.labels is None else self.labels[rows],
            None if self.weights is None else self.weights[rows],
            tuple(values[rows] for values in self.more_labels),
            None if self.timestamps is None else self.timestamps[rows],
        )

    @classmethod
    def concatenated(cls, parts: Sequence[RawColumns]) -> RawColumns:
        """The rows of one or more parts of one schema, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        return cls(
            first.schema,
            sum(part.rows for part in parts),
            tuple(np.concatenate(columns) for columns in zip(*(part.dense for part in parts), strict=True)),
            tuple(np.concatenate(columns) for columns in zip(*(part.dense_missing for part in parts), strict=True)),
            tuple(_concatenated(columns) for columns in zip(*(part.sparse for part in parts), strict=True)),
            _concatenated_or_none([part.labels for part in parts]),
            _concatenated_or_none([part.weights for part in parts]),
            tuple(np.concatenate(columns) for columns in zip(*(part.more_labels for part in parts), strict=True)),
            _concatenated_or_none([part.timestamps for part in parts]),
        )


def _concatenated(columns: Sequence[RawSparse]) -> RawSparse:
    return RawSparse(
        np.concatenate([column.tokens for column in columns]),
        _concatenated_or_none([column.missing for column in columns]),
        _concatenated_or_none([column.lengths for column in columns]),
        _concatenated_or_none([column.weights for column in columns]),
    )


def _concatenated_or_none(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    there = [array for array in arrays if array is not None]
    assert len(there) in (0, len(arrays))
    return np.concatenate(there) if there else None


# Encoding ------------------------------------------------------------------------------------------------------------


def encode_columns(preprocessor: Preprocessor, raw: RawColumns, order: np.ndarray | None = None) -> EncodedRows:
    """Encodes rows `order` (int64, default all in order) of `raw`: a one-hot column to (rows) ids, a list to Bags, in which
    a row without a category has the one id missing_id, of weight 1."""
    assert not preprocessor.integer_buckets, "the preset is checked when the preprocessor is built"
    assert preprocessor.file_minimum is None
    if order is not None:
        raw = raw.take(np.asarray(order, np.int64))
    dense = np.empty((raw.rows, len(preprocessor.dense)), np.float32)
    for d, (column, values, missing) in enumerate(zip(preprocessor.dense, raw.dense, raw.dense_missing, strict=True)):
        dense[:, d] = column.encode(values, missing)
    ids: Sequence[Ids] = [
        _encode_sparse(column, preprocessor.slots_of(number), raw_column, preprocessor.id_dtype)
        for number, (column, raw_column) in enumerate(zip(preprocessor.sparse, raw.sparse, strict=True))
    ]
    if preprocessor.multi_hot is not None:
        one_hot = [column for column in ids if isinstance(column, np.ndarray)]
        assert len(one_hot) == len(ids), "the preset is checked when the preprocessor is built"
        ids = preprocessor.multi_hot.expand(one_hot, preprocessor.num_embeddings)
    return EncodedRows(
        dense,
        ids,
        None if raw.labels is None else raw.labels.astype(np.float32),
        raw.weights,
        more_labels=raw.more_labels,
        timestamps=raw.timestamps,
    )


def _encode_sparse(column: SparseColumn, slots: np.ndarray | None, raw: RawSparse, dtype: np.dtype) -> Ids:
    def known(tokens: np.ndarray) -> np.ndarray:
        assert slots is not None
        return look_up(tokens, slots, column.unknown_id)

    ids = column.encode(raw.tokens, raw.missing, known, dtype)
    if raw.lengths is None:
        return ids
    lengths = np.maximum(raw.lengths, 1)
    if len(ids) == lengths.sum():  # no list is empty
        return Bags(ids, lengths, raw.weights)
    values = np.full(lengths.sum(), column.missing_id, dtype)
    places = places_of(np.cumsum(lengths, dtype=np.int64) - lengths, raw.lengths)
    values[places] = ids
    if raw.weights is None:
        return Bags(values, lengths)
    weights = np.ones(len(values), np.float32)
    weights[places] = raw.weights
    return Bags(values, lengths, weights)


# Counting ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnTokens:
    """What there is to count in a sparse column."""

    tokens: np.ndarray
    """uint64, contiguous: all of them, those of lists too"""
    rows: np.ndarray | None
    """int64: the row each is of; None where not asked for"""
    missing: int
    """Rows that have none."""
    first_missing: int | None
    """The first such row."""


def column_tokens(raw: RawColumns, number: int, *, first_row: int = 0, with_rows: bool = False) -> ColumnTokens:
    """The tokens of sparse column `number`; row r is number first_row + r."""
    column = raw.sparse[number]
    absent = column.missing if column.lengths is None else column.lengths == 0
    assert absent is not None
    absent_rows = np.flatnonzero(absent)
    numbers = np.arange(first_row, first_row + raw.rows, dtype=np.int64) if with_rows else None
    if column.lengths is not None:
        tokens = column.tokens
        rows = None if numbers is None else np.repeat(numbers, column.lengths)
    elif len(absent_rows):
        tokens = column.tokens[~absent]
        rows = None if numbers is None else numbers[~absent]
    else:
        tokens, rows = column.tokens, numbers
    first_missing = first_row + int(absent_rows[0]) if len(absent_rows) else None
    return ColumnTokens(np.ascontiguousarray(tokens), rows, len(absent_rows), first_missing)


def dense_moments(raw: RawColumns, *, units: int, low_bits: int) -> np.ndarray:
    """int64 (num_dense, 4): present values, sum of q, and sums of the upper part and of the lower `low_bits` bits of q * q,
    where q = sign(x) ln(1 + |x|), rounded to float32 as for integer columns, in units of 1 / units."""
    moments = np.zeros((len(raw.dense), 4), np.int64)
    for out, values, missing in zip(moments, raw.dense, raw.dense_missing, strict=True):
        x = values[~missing]
        logarithms = np.copysign(np.log1p(np.abs(x)), x).astype(np.float32)
        fixed = np.rint(logarithms.astype(np.float64) * units).astype(np.int64)
        squares = fixed * fixed
        out[:] = len(fixed), fixed.sum(), (squares >> low_bits).sum(), (squares & ((1 << low_bits) - 1)).sum()
    return moments
