"""Tells rows apart by what people know them by: which rows belong to each slice, and its name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rayrec.workloads.recsys.scoring import DAY, FREQUENCY

MISSING, OTHERS = "(missing)", "(others)"


@dataclass(frozen=True)
class RowSlice:
    """Rows whose metrics are told together."""

    name: str
    rows: np.ndarray
    """int64, rising: their numbers"""


def slices_of(by: str, values: pa.ChunkedArray, *, most: int) -> list[RowSlice]:
    """The slices of some rows, each row in one, empty ones left out.

    day: the log's files or sevenths, in their order. COLUMN: the `most` values with the most rows (of as many, those that are
    first in order), then OTHERS and MISSING. frequency:COLUMN: rows whose value was counted in 1, 2-9, 10-99, ... rows when the
    vocabulary was made, those it does not hold, then MISSING.
    `values` holds one a row, null where missing. Memory: 12 bytes a row; time: that of sorting.
    """
    codes, names = _encoded(values)
    if by == DAY or by.startswith(FREQUENCY):
        return _grouped(np.where(codes < 0, len(names), codes), [*names, MISSING])
    counts = np.bincount(codes[codes >= 0], minlength=len(names))
    top = np.lexsort((np.arange(len(names)), -counts))[:most]
    group_of = np.full(len(names), len(top))
    group_of[top] = np.arange(len(top))
    top_names = [names[place] for place in top.tolist()]
    return _grouped(_looked_up(codes, group_of, len(top) + 1), [*top_names, OTHERS, MISSING])


def _encoded(values: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """int32 (rows): which of the names each row has, -1 where missing; and the names, in order of the values, or as they are
    of stretches of the log."""
    if pa.types.is_dictionary(values.type):
        encoded = values.unify_dictionaries().combine_chunks()
    else:
        encoded = values.dictionary_encode().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):  # without rows there is no chunk
        encoded = pa.concat_arrays(encoded.chunks)
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
    distinct = encoded.dictionary
    return codes, [_name(value, distinct.type) for value in distinct.to_pylist()]


def _name(value: object, kind: pa.DataType) -> str:
    """As the log has it."""
    return f"{value:08x}" if pa.types.is_uint32(kind) else str(value)


def _looked_up(codes: np.ndarray, group_of: np.ndarray, missing: int) -> np.ndarray:
    """int (rows): the group of each row's value; `missing` where it has none."""
    return np.append(group_of, missing)[codes]  # -1 is the last one


def _grouped(groups: np.ndarray, names: list[str]) -> list[RowSlice]:
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups, minlength=len(names)))
    found = zip(names, np.split(order, ends[:-1]), strict=True)
    return [RowSlice(name, rows) for name, rows in found if len(rows)]
