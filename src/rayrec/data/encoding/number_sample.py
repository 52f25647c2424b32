"""Sample of a log's rows for quantiles of numbers. Does not depend on how rows are divided into
tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Self, final

import numpy as np

from rayrec.data.encoded_rows import JaggedIds
from rayrec.data.raw_block import RawBlock
from rayrec.hashing import GOLDEN, mix64

MAX_ROWS: Final = 8192
"""Maximum number of distinct rows of a sample. Of more rows, a quantile's rank is off by about half
a percent.
"""
NUM_BINS: Final = 32
"""Maximum number of bins between the values of `NumberSample.quantiles`."""
QUANTILES: Final = "number_quantiles"
"""Key in a Preprocessor's constants: for each dense column with values, those of
`NumberSample.quantiles`, before any transform.
"""
_ROUNDS: Final = 20
"""Rounds of limiting the weights of frequent values. Each lowers the limit of the next."""
_SKEWED: Final = 5.0
"""Minimum spread of a skewed column's middle 98 %, relative to its middle half. A normal
distribution has 3.4, an exponential one 4.2, a log-normal one 7.
"""


# Quantiles of a log that no machine has in memory, bit by bit the same for any number of tasks:
#
#   key       hash of a row's numbers and single categories; equal rows have one key
#   sample    rows with the lowest keys, each with the number of equal rows
#   merge     keys of both, the lowest of them again
#
# Each part's sample has all its rows that are in the whole log's sample, because no more keys are
# lower in the part. So no count is lost, and parts are merged in any order.
#
# Samples of two other kinds do not serve:
#
#   by row number    needs the number of all rows before, which the pass that indexes a log does not
#                    know
#   by value         may lack a frequent value, such as 0
#
# Two quantile rules use it:
#
#   is_skewed    ranks of rows: how far the outer values are, seen from the middle half
#   quantiles    ends of bins: a frequent value is limited to one bin. If nine in ten rows are 0,
#                plain quantiles would leave three of 32 bins to all others.
#
# Limiting a weight lowers the sum, and so the limit itself. Some rounds come close to the weights
# where the limit is 1 / NUM_BINS of their own sum.
@final
class NumberSample:
    """Rows with the lowest keys, each with the number of equal rows."""

    def __init__(self, num_dense: int) -> None:
        self.keys = np.zeros(0, np.uint64)
        """Key of each row, ascending, uint64 [rows]."""
        self.amounts = np.zeros(0, np.int64)
        """Number of log rows with the key, int64 [rows]."""
        self.numbers = np.zeros((0, num_dense))
        """Numbers of each row, NaN if missing, float64 [rows, num_dense]."""

    def add_block(self, block: RawBlock) -> None:
        """Add rows of a log."""
        numbers = np.array(block.numbers, np.float64)
        for number, name in enumerate(block.schema.dense):
            numbers[block.is_missing(name), number] = np.nan
        keys = _keys(numbers, block)
        if len(self.keys) == MAX_ROWS:
            low = np.flatnonzero(keys <= self.keys[-1])
            keys = keys[low]
            numbers = numbers[low]
        self._add(keys, np.ones(len(keys), np.int64), numbers)

    def merge(self, other: Self) -> None:
        """Add the rows of another sample."""
        self._add(other.keys, other.amounts, other.numbers)

    def _add(self, keys: np.ndarray, amounts: np.ndarray, numbers: np.ndarray) -> None:
        keys = np.concatenate([self.keys, keys])
        amounts = np.concatenate([self.amounts, amounts])
        numbers = np.concatenate([self.numbers, numbers])
        unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        total = np.zeros(len(unique), np.int64)
        np.add.at(total, inverse, amounts)
        self.keys = unique[:MAX_ROWS]
        self.amounts = total[:MAX_ROWS]
        self.numbers = numbers[first[:MAX_ROWS]]

    def quantiles(self, column: int) -> list[float]:
        """Return at most NUM_BINS + 1 values of a dense column, ascending: all distinct ones, or
        those that divide the present rows equally. A value counts for at most one bin, so that
        columns of mostly 0 have bins for other values. Empty without values.
        """
        values, amounts = self._distinct(column)
        if len(values) <= NUM_BINS + 1:
            return values.tolist()
        weights = amounts.astype(np.float64)
        for _ in range(_ROUNDS):
            limit = weights.sum() / NUM_BINS
            weights = np.minimum(weights, limit)
        levels = np.arange(NUM_BINS + 1) / NUM_BINS
        return _at(values, weights, levels)

    def is_skewed(self, column: int) -> bool:
        """Return whether the middle 98 % of a column's values spread over more than 5 times the
        middle half.
        """
        values, amounts = self._distinct(column)
        if not len(values):
            return False
        levels = np.array([0.01, 0.25, 0.75, 0.99])
        low, first, third, high = _at(values, amounts, levels)
        return high - low > _SKEWED * (third - first)

    def _distinct(self, column: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a column's distinct values in order, and the rows with each."""
        numbers = self.numbers[:, column]
        present = np.isfinite(numbers)
        values, inverse = np.unique(numbers[present], return_inverse=True)
        amounts = np.zeros(len(values), np.int64)
        np.add.at(amounts, inverse, self.amounts[present])
        return values, amounts

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the fields by name."""
        return {
            "keys": self.keys,
            "amounts": self.amounts,
            "numbers": self.numbers,
        }

    @classmethod
    def from_buffers(cls, buffers: Mapping[str, Any], num_dense: int) -> Self:
        """Inverse of `to_arrays`, of the arrays' bytes."""
        sample = cls(num_dense)
        sample.keys = np.frombuffer(buffers["keys"], np.uint64)
        sample.amounts = np.frombuffer(buffers["amounts"], np.int64)
        numbers = np.frombuffer(buffers["numbers"], np.float64)
        sample.numbers = numbers.reshape(len(sample.keys), num_dense)
        return sample


def _at(values: np.ndarray, weights: np.ndarray, levels: np.ndarray) -> list[float]:
    """Return of each level the lowest value with at least that share of all weight up to it."""
    ends = np.cumsum(weights)
    indices = np.searchsorted(ends, levels * ends[-1])
    last = len(values) - 1
    quantiles: list[float] = values[np.minimum(indices, last)].tolist()
    return quantiles


def _keys(numbers: np.ndarray, block: RawBlock) -> np.ndarray:
    """Return a hash of each row's numbers and single categories, uint64 [rows]."""
    keys = np.zeros(len(numbers), np.uint64)
    for values in _words(numbers, block):
        keys ^= values
        keys *= np.uint64(GOLDEN)
        keys ^= keys >> np.uint64(32)
    return mix64(keys)


def _words(numbers: np.ndarray, block: RawBlock) -> Iterator[np.ndarray]:
    """Yield the columns as uint64 [rows]."""
    for column in numbers.T:
        # -0 and 0 are equal,
        # and a sum turns the one into the other.
        values = np.ascontiguousarray(column)
        values = values + 0.0
        yield values.view(np.uint64)
    for name in block.schema.sparse:
        tokens = block.column(name)
        if not isinstance(tokens, JaggedIds):
            yield tokens.astype(np.uint64)
