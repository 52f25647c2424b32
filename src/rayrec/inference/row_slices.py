"""Slices of evaluated rows by their values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
import pyarrow as pa

from rayrec.workloads.recsys.scoring import DAY, FREQUENCY, LENGTH
from rayrec.workloads.scoring import KEY

if TYPE_CHECKING:
    from rayrec.observe.console import Console

MISSING = "(missing)"
OTHER_VALUES = "(others)"


def _without_shared_memory(values: pa.Array) -> pa.Array:
    """Return a copy in memory of its own, because the object store could not contain all rows."""
    if pa.types.is_dictionary(values.type):
        dictionary = pa.array(values.dictionary.to_pylist(), values.dictionary.type)
        return pa.DictionaryArray.from_arrays(_without_shared_memory(values.indices), dictionary)
    missing = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    return pa.array(
        values.fill_null(0).to_numpy(zero_copy_only=False).copy(),
        values.type,
        mask=missing,
    )


@dataclass(frozen=True)
class RowSlice:
    """Rows of one slice."""

    name: str
    rows: np.ndarray
    """Ascending row numbers, int64 [rows]."""


@final
class SlicedRows:
    """Values by which all rows are sliced. Memory per row: 4 bytes for each `slice_by` (8 for
    numbers), and distinct texts.
    """

    def __init__(self, slice_by: Sequence[str]) -> None:
        self._chunks: dict[str, list[pa.Array]] = {by: [] for by in slice_by}

    def update(self, table: pa.Table) -> None:
        """Append the rows of a scored table."""
        for by, chunks in self._chunks.items():
            chunks += [_without_shared_memory(chunk) for chunk in table.column(KEY + by).chunks]

    def values(self, by: str) -> pa.ChunkedArray:
        """Return the value of each row, null if missing."""
        return pa.chunked_array(self._chunks[by])

    def slices(self, console: Console, *, max_values: int) -> Iterator[tuple[str, RowSlice]]:
        """Yield each `slice_by` with each of its slices (`slices_of`), with progress."""
        total = sum(len(chunk) for chunks in self._chunks.values() for chunk in chunks)
        done = 0
        with console.preparing():
            for by in self._chunks:
                for row_slice in slices_of(by, self.values(by), max_values=max_values):
                    yield by, row_slice
                    done += len(row_slice.rows)
                    console.progress("slices (rows)", done, total)


# Codes are small integers even for text, so that slices of a large log cost a few bytes per row.
def slices_of(by: str, values: pa.ChunkedArray, *, max_values: int) -> list[RowSlice]:
    """Assign each row, by its value, to a slice; return nonempty ones. Memory: 12 bytes per row.
    day: the log's files or sevenths, in order. COLUMN: the `max_values` values with most rows (of
    equal ones the first), then OTHER_VALUES and MISSING. frequency:COLUMN: values counted in 1,
    2-9, 10-99, ... rows of the vocabulary's data, unknown values, then MISSING. length:COLUMN:
    lists of 0, 1, 2-4, 5-9, ... values.
    """
    codes, names = _encoded(values)
    if by == DAY or by.startswith((FREQUENCY, LENGTH)):
        return _grouped(np.where(codes < 0, len(names), codes), [*names, MISSING])
    counts = np.bincount(codes[codes >= 0], minlength=len(names))
    top = np.lexsort((np.arange(len(names)), -counts))[:max_values]
    group_of = np.full(len(names), len(top))
    group_of[top] = np.arange(len(top))
    top_names = [names[index] for index in top.tolist()]
    # The code -1 of missing values selects the last one
    groups = np.append(group_of, len(top) + 1)[codes]
    return _grouped(groups, [*top_names, OTHER_VALUES, MISSING])


def _encoded(values: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """Return the name index of each row, -1 if missing, int32 [rows], and the names, in their
    original order.
    """
    is_dictionary = pa.types.is_dictionary(values.type)
    encoded = (
        values.unify_dictionaries() if is_dictionary else values.dictionary_encode()
    ).combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):  # Without rows, there are no chunks
        encoded = pa.concat_arrays(encoded.chunks)
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
    form = "{:08x}" if pa.types.is_uint32(encoded.dictionary.type) else "{}"
    return codes, [form.format(value) for value in encoded.dictionary.to_pylist()]


def _grouped(groups: np.ndarray, names: list[str]) -> list[RowSlice]:
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups, minlength=len(names)))
    return [
        RowSlice(name, rows)
        for name, rows in zip(names, np.split(order, ends[:-1]), strict=True)
        if len(rows)
    ]
