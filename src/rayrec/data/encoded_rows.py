"""Model inputs of rows as NumPy arrays, and their conversion to and from Arrow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa

from rayrec.data.arrow import arrow_numbers, arrow_rows, as_numpy, numpy_rows
from rayrec.native import call


@dataclass(frozen=True)
class JaggedIds:
    """Any number of ids per row, or of categories in a RawBlock."""

    values: np.ndarray
    """Concatenated ids of the rows, int32 or int64, or categories, uint64."""
    lengths: np.ndarray
    """Number of ids of each row, int32 [rows]."""
    weights: np.ndarray | None = None
    """Weight of each id, float32, None: 1 each. In a column with `Feature.ages`, the seconds from
    each id to the next one, from the last one to the row's time.
    """

    @cached_property
    def offsets(self) -> np.ndarray:
        """First id of each row and the total, int64 [rows + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def cut(self, start: int, stop: int) -> JaggedIds:
        """Return rows [start, stop) without a copy."""
        ids = slice(self.offsets[start], self.offsets[stop])
        return self._part(ids, self.lengths[start:stop])

    def take(self, rows: np.ndarray) -> JaggedIds:
        """Return the given rows (int64), in that order."""
        lengths = self.lengths[rows]
        return self._part(expand_ranges(self.offsets[rows], lengths), lengths)

    def last(self, length: int) -> JaggedIds:
        """Return the last `length` ids of each row."""
        if not len(self.lengths) or self.lengths.max() <= length:
            return self
        lengths = np.minimum(self.lengths, np.int32(length))
        return self._part(expand_ranges(self.offsets[1:] - lengths, lengths), lengths)

    def _part(self, ids: np.ndarray | slice, lengths: np.ndarray) -> JaggedIds:
        return JaggedIds(
            self.values[ids], lengths, None if self.weights is None else self.weights[ids]
        )

    @classmethod
    def concatenated(cls, parts: Sequence[JaggedIds]) -> JaggedIds:
        """Concatenate the rows of one or more parts, which all have weights or none."""
        return cls(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            concatenate_optional([part.weights for part in parts]),
        )


# One cumulative count replaces a loop over rows: within each range the count rises by 1, and the
# repeated difference moves the range to its start.
def expand_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the ranges starts[i], ..., starts[i] + lengths[i] - 1 concatenated, int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(
        ends[-1] if len(ends) else 0, dtype=np.int64
    )


def take_ranges(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges [starts[i], starts[i] + lengths[i]) of values. Both are int64."""
    out = np.empty(int(lengths.sum()), values.dtype)
    call(
        "rayrec_take_ranges",
        values,
        values.itemsize,
        starts,
        lengths,
        len(starts),
        out,
    )
    return out


def concatenate_optional(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Concatenate arrays, of which all or none are present."""
    present = [array for array in arrays if array is not None]
    assert len(present) in (0, len(arrays))
    return np.concatenate(present) if present else None


@dataclass(frozen=True)
class FixedColumns:
    """Columns with the same rows and type, and where their bytes are."""

    columns: Sequence[np.ndarray]
    """One value per row [rows], or a fixed number [rows, size], contiguous."""
    addresses: np.ndarray
    """First byte of each column, int64. `columns` keeps the memory."""
    row_bytes: np.ndarray
    """Bytes of each column in one row, int64."""

    @classmethod
    def from_arrays(cls, columns: Sequence[np.ndarray]) -> FixedColumns:
        assert len({column.dtype for column in columns}) <= 1
        return cls(
            columns,
            np.array([column.ctypes.data for column in columns], np.int64),
            np.array(
                [math.prod((column.itemsize, *column.shape[1:])) for column in columns], np.int64
            ),
        )


# A batch has dozens of columns, so that a NumPy call for each would take longer than the copy.
def join_columns(parts: Sequence[tuple[FixedColumns, slice]]) -> np.ndarray:
    """Concatenate rows from one or more parts: all values of the first column, then those of the
    next, one-dimensional.
    """
    first = parts[0][0]
    rows = np.array([part.stop - part.start for _, part in parts], np.int64)
    sizes = np.multiply.outer(first.row_bytes, rows)
    starts = np.stack(
        [each.addresses + part.start * each.row_bytes for each, part in parts],
        axis=1,
    )
    dtype = first.columns[0].dtype if first.columns else np.dtype(np.int32)
    out = np.empty(int(sizes.sum()) // dtype.itemsize, dtype)
    call("rayrec_join_ranges", starts, sizes, starts.size, out)
    return out


Ids = np.ndarray | JaggedIds
"""Ids of one sparse column: one per row [rows], a fixed number per row [rows, size], or
JaggedIds.
"""


@dataclass(frozen=True)
class EncodedRows:
    """Model inputs of some rows."""

    dense: np.ndarray
    """Dense features, float32 [rows, num_dense]."""
    ids: Sequence[Ids]
    """Ids of each sparse column, int32 or int64."""
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    """Labels by name in the order of `Schema.label_names`, NaN if missing, float32 [rows]. Empty
    for an unlabelled log.
    """
    weights: np.ndarray | None = None
    """Row weights, float32 [rows]. None: 1 each."""
    row_numbers: np.ndarray | None = None
    """Log position of each row, int64 [rows]. None if not requested."""
    groups: np.ndarray | None = None
    """Group key of each row (`RawBlock.group_keys`), int64 [rows]. None if the schema has no
    group.
    """
    timestamps: np.ndarray | None = None
    """Microseconds since 1970-01-01 00:00 UTC, int64 [rows]. None if the schema has no
    timestamp.
    """

    def __len__(self) -> int:
        return len(self.dense)

    @cached_property
    def fixed_columns(self) -> FixedColumns | None:
        """Ids in columns with a fixed number per row. None if others have lists."""
        if any(isinstance(column, JaggedIds) for column in self.ids):
            return None
        return FixedColumns.from_arrays([np.ascontiguousarray(column) for column in self.ids])

    @property
    def label(self) -> np.ndarray:
        """First label of the rows of a labelled log."""
        return next(iter(self.labels.values()))


def concatenate_ids(parts: Sequence[Ids]) -> Ids:
    """Concatenate the ids of one column, which are lists in all parts or in none."""
    lists = [part for part in parts if isinstance(part, JaggedIds)]
    if lists:
        return JaggedIds.concatenated(lists)
    return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])


# Encoded rows travel between processes as Arrow tables, because Ray stores Arrow buffers in shared
# memory: a reader on the same node maps them and copies nothing. `from_arrow` must therefore not
# write to its arrays.
def to_arrow(rows: EncodedRows) -> pa.Table:
    """Convert rows to a table without copies. Columns: `dense`, fixed-size lists of float32, if
    any. `id_s`, integers or lists, for sparse column s, `of_s`, its weights. `label:NAME`,
    `weight`, `row`, `group` and `time` if present.
    """
    arrays: dict[str, pa.Array] = {}
    if rows.dense.shape[1]:
        arrays["dense"] = arrow_rows(rows.dense)
    for s, ids in enumerate(rows.ids):
        arrays[f"id_{s}"] = ids_to_arrow(ids)
        if isinstance(ids, JaggedIds) and ids.weights is not None:
            arrays[f"of_{s}"] = ids_to_arrow(ids, ids.weights)
    for name, values in (
        *((f"label:{name}", values) for name, values in rows.labels.items()),
        ("weight", rows.weights),
        ("row", rows.row_numbers),
        ("group", rows.groups),
        ("time", rows.timestamps),
    ):
        if values is not None:
            arrays[name] = arrow_numbers(values)
    return pa.table(arrays)


def ids_to_arrow(ids: Ids, weights: np.ndarray | None = None) -> pa.Array:
    """Convert the ids of one column to integers, or lists of them. `weights` replaces the ids in
    lists.
    """
    if isinstance(ids, JaggedIds):
        values = ids.values if weights is None else weights
        return pa.LargeListArray.from_arrays(arrow_numbers(ids.offsets), arrow_numbers(values))
    return arrow_rows(ids)


def from_arrow(table: pa.Table) -> list[EncodedRows]:
    """Convert a table of `to_arrow` back: one EncodedRows per chunk, with arrays that share Arrow's
    memory.
    """
    return [_from_batch(batch) for batch in table.to_batches() if batch.num_rows]


def _from_batch(batch: pa.RecordBatch) -> EncodedRows:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    dense = (
        numpy_rows(columns["dense"])
        if "dense" in columns
        else np.empty((batch.num_rows, 0), np.float32)
    )
    ids = [
        ids_from_arrow(column, columns.get(f"of_{name[3:]}"))
        for name, column in columns.items()
        if name.startswith("id_")
    ]
    labels = {
        name[6:]: as_numpy(column) for name, column in columns.items() if name.startswith("label:")
    }
    optional = (
        as_numpy(columns[name]) if name in columns else None
        for name in ("weight", "row", "group", "time")
    )
    return EncodedRows(dense, ids, labels, *optional)


def ids_from_arrow(column: pa.Array, weights: pa.Array | None = None) -> Ids:
    """Invert `ids_to_arrow`, for lists with weights given both results."""
    if pa.types.is_large_list(column.type):
        lengths = np.diff(as_numpy(column.offsets)).astype(np.int32)
        return JaggedIds(
            as_numpy(column.flatten()),
            lengths,
            None if weights is None else as_numpy(weights.flatten()),
        )
    return numpy_rows(column)
