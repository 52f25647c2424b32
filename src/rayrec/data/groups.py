"""Which rows belong together, such as those of one user: keys of the values of `Schema.group`."""

from __future__ import annotations

from typing import Final

import numpy as np

from rayrec.data.logs.text_parser import RawRows
from rayrec.data.raw_block import RawColumns
from rayrec.hashing import mix64

_OFFSET: Final = np.uint64(0x5851F42D4C957F2D)
"""Moves the one category whose key would be 0 to where no integer of a log is."""


def group_keys(raw: RawRows | RawColumns, rows: np.ndarray) -> np.ndarray:
    """int64: for each of `rows` (int64) of `raw`, a key of its value in column `schema.group`: equal values have equal keys,
    different ones different keys, and a missing value has 0. Keys are of the raw values, so that categories too rare for the
    vocabulary are groups of their own."""
    schema = raw.schema
    assert schema.group is not None
    number = schema.sparse.index(schema.group)
    if isinstance(raw, RawRows):
        place = np.uint64(len(schema.dense) + number)
        tokens = raw.tokens[rows, number].astype(np.uint64)
        missing = (raw.missing[rows] >> place) & np.uint64(1) == 1
    else:
        column = raw.sparse[number]
        assert column.missing is not None, "schema.group is refused for lists"
        tokens, missing = column.tokens[rows], column.missing[rows]
    return np.where(missing, np.uint64(0), mix64(tokens + _OFFSET)).view(np.int64)
