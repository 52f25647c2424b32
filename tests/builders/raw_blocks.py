"""Blocks of raw rows made of plain Python values."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayrec.data.encoded_rows import JaggedIds
from rayrec.data.raw_block import RawBlock, category_type, number_type
from rayrec.schema import Schema


def find_block(schema: Schema, columns: Mapping[str, Sequence[Any]], **others: Any) -> RawBlock:
    """Return the rows of columns of values, None where missing, or of lists. `others` are further
    fields of RawBlock.
    """
    hexadecimal = schema.tokens == "hexadecimal"
    names = (*schema.dense, *schema.singles)
    rows = len(next(iter(columns.values())))
    missing = np.array(
        [[value is None for value in columns[name]] for name in names], bool
    ).reshape(len(names), rows)

    def matrix(names: Sequence[str], dtype: np.dtype) -> np.ndarray:
        made = np.zeros((rows, len(names)), dtype, "C" if hexadecimal else "F")
        for place, name in enumerate(names):
            made[:, place] = np.array([value or 0 for value in columns[name]], dtype)
        return made

    flags = sum(
        (missing[c].astype(np.uint64) << np.uint64(c) for c in range(len(names))),
        np.zeros(rows, np.uint64),
    )
    lists = tuple(jagged(columns[name]) for name in schema.sparse if name in schema.lists)
    numbers = matrix(schema.dense, number_type(schema))
    categories = matrix(schema.singles, category_type(schema))
    return RawBlock(
        schema, numbers, categories, flags if hexadecimal else missing.T, lists, **others
    )


def jagged(rows: Sequence[Sequence[int]]) -> JaggedIds:
    """Return lists of categories as one array."""
    values = np.array([category for row in rows for category in row], np.uint64)
    return JaggedIds(values, np.array([len(row) for row in rows], np.int32))
