"""Rows as a model takes them, before they become tensors, and their way through Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rayrec.data.arrow_arrays import arrow_numbers, numpy_of


@dataclass(frozen=True)
class Bags:
    """Any number of ids a row."""

    values: np.ndarray
    """int32 or int64: the ids, row after row"""
    lengths: np.ndarray
    """int32 (rows)"""

    def take(self, start: int, stop: int, offsets: np.ndarray) -> Bags:
        """Rows [start, stop); `offsets` int64 (rows + 1) as `self.offsets()` gives them."""
        return Bags(self.values[offsets[start] : offsets[stop]], self.lengths[start:stop])

    def offsets(self) -> np.ndarray:
        """int64 (rows + 1): where each row's ids start."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])


Ids = np.ndarray | Bags
"""Of one sparse column: (rows) one id a row, (rows, size) so many a row, or Bags."""


@dataclass(frozen=True)
class EncodedRows:
    """Model inputs of some rows."""

    dense: np.ndarray
    """float32 (rows, num_dense)"""
    ids: Sequence[Ids]
    """int32 or int64, a sparse column each"""
    labels: np.ndarray | None
    """float32 (rows), None for an unlabelled log"""
    weights: np.ndarray | None = None
    """float32 (rows), None where all rows weigh the same"""
    row_numbers: np.ndarray | None = None
    """int64 (rows): each row's number in the log, given to it where it was read; None if nobody asked for it"""
    groups: np.ndarray | None = None
    """int64 (rows): keys of the rows' groups (`rayrec.data.groups`), None where the schema has no group"""

    def __len__(self) -> int:
        return len(self.dense)


def to_arrow(rows: EncodedRows) -> pa.Table:
    """Columnar and zero-copy both ways: `dense` fixed-size list of float (absent without dense columns, as Arrow has no
    list of nothing), `id_s` a sparse column (integers, or lists of them); `label`, `weight`, `row` (row numbers) and
    `group` if the rows have them."""
    arrays: dict[str, pa.Array] = {}
    if rows.dense.shape[1]:
        arrays["dense"] = pa.FixedSizeListArray.from_arrays(arrow_numbers(rows.dense.reshape(-1)), rows.dense.shape[1])
    arrays.update((f"id_{s}", _ids_to_arrow(ids)) for s, ids in enumerate(rows.ids))
    for name, values in (
        ("label", rows.labels),
        ("weight", rows.weights),
        ("row", rows.row_numbers),
        ("group", rows.groups),
    ):
        if values is not None:
            arrays[name] = arrow_numbers(values)
    return pa.table(arrays)


def _ids_to_arrow(ids: Ids) -> pa.Array:
    if isinstance(ids, Bags):
        return pa.LargeListArray.from_arrays(arrow_numbers(ids.offsets()), arrow_numbers(ids.values))
    if ids.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(arrow_numbers(ids.reshape(-1)), ids.shape[1])
    return arrow_numbers(ids)


def from_arrow(table: pa.Table) -> list[EncodedRows]:
    """The rows of a table as `to_arrow` made it, one EncodedRows a chunk, its arrays pointing into Arrow's memory."""
    return [_from_batch(batch) for batch in table.to_batches() if batch.num_rows]


def _from_batch(batch: pa.RecordBatch) -> EncodedRows:
    dense = np.empty((batch.num_rows, 0), np.float32)
    if "dense" in batch.schema.names:
        dense_list = batch.column("dense")
        dense = numpy_of(dense_list.flatten()).reshape(-1, dense_list.type.list_size)
    ids = [_ids_from_arrow(batch.column(name)) for name in batch.schema.names if name.startswith("id_")]
    labels, weights, row_numbers, groups = (
        numpy_of(batch.column(name)) if name in batch.schema.names else None
        for name in ("label", "weight", "row", "group")
    )
    return EncodedRows(dense, ids, labels, weights, row_numbers, groups)


def _ids_from_arrow(column: pa.Array) -> Ids:
    if pa.types.is_large_list(column.type):
        lengths = np.diff(numpy_of(column.offsets)).astype(np.int32)
        return Bags(numpy_of(column.flatten()), lengths)
    if pa.types.is_fixed_size_list(column.type):
        return numpy_of(column.flatten()).reshape(-1, column.type.list_size)
    return numpy_of(column)
