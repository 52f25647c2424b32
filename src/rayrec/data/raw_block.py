"""Rows of a click log as read by all readers: numbers, categories, lists of categories, labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from rayrec.data.encoded_rows import JaggedIds, concatenate_optional
from rayrec.hashing import mix64
from rayrec.schema import Schema

_OFFSET: Final = np.uint64(0x5851F42D4C957F2D)
"""Offset that moves the one category with key 0 to a value that no integer in a log has."""


def number_type(schema: Schema) -> np.dtype:
    """Return the dtype of a block's numbers: int64 in a log of hexadecimal tokens, else float64."""
    return np.dtype(np.int64 if schema.tokens == "hexadecimal" else np.float64)


def category_type(schema: Schema) -> np.dtype:
    """Return the dtype of a block's categories: uint32 in a log of hexadecimal tokens, else
    uint64.
    """
    return np.dtype(np.uint32 if schema.tokens == "hexadecimal" else np.uint64)


def packed_bits(missing: np.ndarray) -> np.ndarray:
    """Pack a matrix of bool [rows, columns] into bits of uint64 [rows]; the first column is the
    lowest bit.
    """
    packed = np.zeros((len(missing), 8), np.uint8)
    bits = np.packbits(missing, axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    return packed.view(np.uint64).ravel()


# Memory layouts of a block, by schema.tokens:
#
#   tokens        numbers    categories   matrices       missing
#   hexadecimal   int64      uint32       row-major      one bit per column, uint64 [rows]
#   any           float64    uint64       column-major   bool [rows, columns]
#
# All rows of one log have one layout, and kernels are chosen by it.
@dataclass(frozen=True)
class RawBlock:
    """Rows with the values of a log. Matrices have one row per log row. In a log of hexadecimal
    tokens they are row-major, because kernels gather random rows, and `missing` has one bit per
    column. Other logs are read and encoded by column, so that matrices are column-major, and
    `missing` is bool.
    """

    schema: Schema
    numbers: np.ndarray
    """Values of schema.dense, 0 if missing, `number_type` [rows, columns]."""
    categories: np.ndarray
    """Values of schema.singles, 0 if missing, `category_type` [rows, columns]."""
    missing: np.ndarray
    """Mask of missing values in schema.dense, then schema.singles: bits of uint64 [rows], or bool
    [rows, columns].
    """
    lists: tuple[JaggedIds, ...] = ()
    """Categories of the list columns, in the order of schema.sparse. Weights None if the column has
    none.
    """
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    """Labels by name, float32 [rows], NaN where missing. Empty for an unlabelled log."""
    weights: np.ndarray | None = None
    """Weight of each row, float32 [rows]. None if the log has no weights."""
    times: np.ndarray | None = None
    """Microseconds since 1970-01-01 00:00 UTC, int64 [rows]."""
    files: tuple[tuple[str, int, int], ...] = ()
    """Row ranges of the files: (path, first row, end). Empty if unknown."""

    @classmethod
    def empty(cls, schema: Schema) -> RawBlock:
        """Return no rows of an unlabelled log."""
        columns = len(schema.dense) + len(schema.singles)
        hexadecimal = schema.tokens == "hexadecimal"
        return cls(
            schema,
            np.zeros((0, len(schema.dense)), number_type(schema)),
            np.zeros((0, len(schema.singles)), category_type(schema)),
            np.zeros(0, np.uint64) if hexadecimal else np.zeros((0, columns), bool),
            (JaggedIds(np.zeros(0, np.uint64), np.zeros(0, np.int32)),) * len(schema.lists),
        )

    @property
    def rows(self) -> int:
        return len(self.missing)

    @property
    def nbytes(self) -> int:
        """Total size of all arrays."""
        list_arrays = [
            array for each in self.lists for array in (each.values, each.lengths, each.weights)
        ]
        arrays = (
            self.numbers,
            self.categories,
            self.missing,
            *list_arrays,
            *self.labels.values(),
            self.weights,
            self.times,
        )
        return sum(array.nbytes for array in arrays if array is not None)

    def column(self, name: str) -> np.ndarray | JaggedIds:
        """Return the values of a column of schema.dense or schema.sparse, 0 if missing: [rows], or
        lists.
        """
        index = self.schema.positions.get(name)
        first = len(self.schema.dense)
        if index is None:
            return self.lists[
                [each for each in self.schema.sparse if each in self.schema.lists].index(name)
            ]
        return self.numbers[:, index] if index < first else self.categories[:, index - first]

    def is_missing(self, name: str) -> np.ndarray:
        """Return which rows lack a value in a column of schema.dense or schema.sparse, bool
        [rows].
        """
        index = self.schema.positions.get(name)
        if index is None:
            column = self.column(name)
            assert isinstance(column, JaggedIds)
            return column.lengths == 0
        if self.missing.ndim == 2:
            return self.missing[:, index]
        return self.missing & np.uint64(1 << index) != 0

    def singles_missing(self) -> np.ndarray:
        """Return which rows lack a value in each column of schema.singles, bool [rows, columns]."""
        first = len(self.schema.dense)
        if self.missing.ndim == 2:
            return self.missing[:, first:]
        bits = np.arange(first, first + len(self.schema.singles), dtype=np.uint64)
        return self.missing[:, None] >> bits & np.uint64(1) != 0

    def take(self, rows: np.ndarray) -> RawBlock:
        """Return the given rows (int64; any, also repeated), in that order. Their files are
        unknown.
        """
        return self._selected(rows, tuple(each.take(rows) for each in self.lists), ())

    def subset(self, rows: np.ndarray) -> RawBlock:
        """Return the given rows (int64, ascending), with their files."""
        bounds = (
            (path, *np.searchsorted(rows, (low, high)).tolist()) for path, low, high in self.files
        )
        files = tuple(run for run in bounds if run[1] < run[2])
        return self._selected(rows, tuple(each.take(rows) for each in self.lists), files)

    def cut(self, start: int, stop: int) -> RawBlock:
        """Return rows [start, stop) without copying values."""
        if (start, stop) == (0, self.rows):
            return self
        rows = slice(start, stop)
        files = (
            (path, max(low - start, 0), min(high, stop) - start) for path, low, high in self.files
        )
        lists = tuple(each.cut(start, stop) for each in self.lists)
        return self._selected(rows, lists, tuple(run for run in files if run[1] < run[2]))

    def _selected(
        self,
        rows: np.ndarray | slice,
        lists: tuple[JaggedIds, ...],
        files: tuple[tuple[str, int, int], ...],
    ) -> RawBlock:
        """Return the rows, with matrices in the same memory layout."""

        # Indexing a column-major matrix by rows would return a row-major one, which the encoders of
        # columns would have to stride through.
        def matrix_rows(matrix: np.ndarray) -> np.ndarray:
            return (
                matrix[rows]
                if isinstance(rows, slice) or self.missing.ndim == 1
                else np.take(matrix.T, rows, axis=1).T
            )

        return replace(
            self,
            numbers=matrix_rows(self.numbers),
            categories=matrix_rows(self.categories),
            missing=matrix_rows(self.missing),
            lists=lists,
            labels={name: values[rows] for name, values in self.labels.items()},
            weights=None if self.weights is None else self.weights[rows],
            times=None if self.times is None else self.times[rows],
            files=files,
        )

    @classmethod
    def concatenated(cls, blocks: Sequence[RawBlock]) -> RawBlock:
        """Concatenate the rows of one or more blocks with one schema."""
        if len(blocks) == 1:
            return blocks[0]
        starts = np.cumsum([0, *(block.rows for block in blocks)]).tolist()
        return cls(
            blocks[0].schema,
            np.concatenate([block.numbers for block in blocks]),
            np.concatenate([block.categories for block in blocks]),
            np.concatenate([block.missing for block in blocks]),
            tuple(
                map(JaggedIds.concatenated, zip(*(block.lists for block in blocks), strict=True))
            ),
            {
                name: np.concatenate([block.labels[name] for block in blocks])
                for name in blocks[0].labels
            },
            concatenate_optional([block.weights for block in blocks]),
            concatenate_optional([block.times for block in blocks]),
            tuple(
                (path, start + low, start + high)
                for start, block in zip(starts, blocks, strict=False)
                for path, low, high in block.files
            ),
        )

    def group_keys(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the group keys of `rows` (int64; None: all), int64 [rows]. Values of column
        `schema.group` have equal keys if equal, missing ones 0. Keys come from raw values, so rare
        categories are separate groups.
        """
        name = self.schema.group
        assert name is not None
        categories = self.column(name)
        missing = self.is_missing(name)
        assert isinstance(categories, np.ndarray), "schema.group is refused for lists"
        if rows is not None:
            categories, missing = categories[rows], missing[rows]
        return np.where(missing, np.uint64(0), mix64(categories.astype(np.uint64) + _OFFSET)).view(
            np.int64
        )
