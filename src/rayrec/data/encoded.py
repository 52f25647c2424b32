"""Rows as a model takes them, before they become tensors, and their way through Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from rayrec.data.arrow import arrow_numbers, numpy_of


@dataclass(frozen=True)
class Bags:
    """Any number of ids a row."""

    values: np.ndarray
    """int32 or int64: the ids, row after row"""
    lengths: np.ndarray
    """int32 (rows)"""
    weights: np.ndarray | None = None
    """float32, one for each of `values`; None: 1 each"""

    def take(self, start: int, stop: int, offsets: np.ndarray) -> Bags:
        """Rows [start, stop); `offsets` int64 (rows + 1) as `self.offsets()` gives them."""
        places = slice(offsets[start], offsets[stop])
        weights = None if self.weights is None else self.weights[places]
        return Bags(self.values[places], self.lengths[start:stop], weights)

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
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    """float32 (rows) by name, NaN if missing, in the order of the schema's `label_names`; none for an unlabelled log"""
    weights: np.ndarray | None = None
    """float32 (rows), None where all rows weigh the same"""
    row_numbers: np.ndarray | None = None
    """int64 (rows): each row's number in the log, given to it where it was read; None if nobody asked for it"""
    groups: np.ndarray | None = None
    """int64 (rows): keys of the rows' groups (`RawBlock.group_keys`), None where the schema has no group"""
    timestamps: np.ndarray | None = None
    """int64 (rows): microseconds since 1970-01-01 00:00 UTC, None if the schema has no timestamp"""

    def __len__(self) -> int:
        return len(self.dense)

    @property
    def label(self) -> np.ndarray:
        """The first label of a labelled log's rows."""
        return next(iter(self.labels.values()))


def to_arrow(rows: EncodedRows) -> pa.Table:
    """Columnar and zero-copy both ways: `dense` fixed-size list of float (absent without dense columns, as Arrow has no
    list of nothing), `id_s` a sparse column (integers, or lists of them), `of_s` the weights of its ids (lists);
    `label:NAME` a label, `weight`, `row` (row numbers), `group` and `time` if the rows have them."""
    arrays: dict[str, pa.Array] = {}
    if rows.dense.shape[1]:
        arrays["dense"] = pa.FixedSizeListArray.from_arrays(arrow_numbers(rows.dense.reshape(-1)), rows.dense.shape[1])
    for s, ids in enumerate(rows.ids):
        arrays[f"id_{s}"] = ids_to_arrow(ids)
        if isinstance(ids, Bags) and ids.weights is not None:
            arrays[f"of_{s}"] = weights_to_arrow(ids)
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


def ids_to_arrow(ids: Ids) -> pa.Array:
    """Ids of one column: integers, or lists of them."""
    if isinstance(ids, Bags):
        return pa.LargeListArray.from_arrays(arrow_numbers(ids.offsets()), arrow_numbers(ids.values))
    if ids.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(arrow_numbers(ids.reshape(-1)), ids.shape[1])
    return arrow_numbers(ids)


def weights_to_arrow(bags: Bags) -> pa.Array:
    """A list of float32 for each row: the weights of its ids."""
    assert bags.weights is not None
    return pa.LargeListArray.from_arrays(arrow_numbers(bags.offsets()), arrow_numbers(bags.weights))


def from_arrow(table: pa.Table) -> list[EncodedRows]:
    """The rows of a table as `to_arrow` made it, one EncodedRows a chunk, its arrays pointing into Arrow's memory."""
    return [_from_batch(batch) for batch in table.to_batches() if batch.num_rows]


def _from_batch(batch: pa.RecordBatch) -> EncodedRows:
    dense = np.empty((batch.num_rows, 0), np.float32)
    if "dense" in batch.schema.names:
        dense_list = batch.column("dense")
        dense = numpy_of(dense_list.flatten()).reshape(-1, dense_list.type.list_size)
    names = batch.schema.names
    ids = [
        ids_from_arrow(batch.column(name), batch.column(f"of_{name[3:]}") if f"of_{name[3:]}" in names else None)
        for name in names
        if name.startswith("id_")
    ]
    labels = {name[6:]: numpy_of(batch.column(name)) for name in names if name.startswith("label:")}
    weights, row_numbers, groups, timestamps = (
        numpy_of(batch.column(name)) if name in names else None for name in ("weight", "row", "group", "time")
    )
    return EncodedRows(dense, ids, labels, weights, row_numbers, groups, timestamps)


def ids_from_arrow(column: pa.Array, weights: pa.Array | None = None) -> Ids:
    """The inverse of `ids_to_arrow` and, for lists with weights, `weights_to_arrow`."""
    if pa.types.is_large_list(column.type):
        lengths = np.diff(numpy_of(column.offsets)).astype(np.int32)
        return Bags(numpy_of(column.flatten()), lengths, None if weights is None else numpy_of(weights.flatten()))
    if pa.types.is_fixed_size_list(column.type):
        return numpy_of(column.flatten()).reshape(-1, column.type.list_size)
    return numpy_of(column)
