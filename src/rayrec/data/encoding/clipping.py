"""Counts of numbers beyond the bounds of a Preprocessor, from encoded rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.config import first_of
from rayrec.data.arrow import arrow_numbers
from rayrec.data.encoding.preprocessor import Preprocessor

MAX_CLIPPED_FRACTION: Final = 0.01
"""Fraction of a column's values beyond its bounds above which there is a warning."""
COLUMN: Final = "clipped:"
"""Prefix of the columns of `ClipCounter.columns`."""


@final
class ClipCounter:
    """Finder of the numbers that the bounds of the rules changed. Thread-safe. A bound is never the
    input of a counted row (`rayrec.data.encoding.presets`), so an input equal to a bound is beyond
    it, in preprocessed data, too.
    """

    def __init__(self, preprocessor: Preprocessor) -> None:
        rules = [
            (index, name, rule)
            for index, (name, rule) in enumerate(
                zip(preprocessor.dense_names, preprocessor.dense, strict=True)
            )
            if rule.lower is not None
        ]
        self.names = tuple(name for _, name, _ in rules)
        """Columns with bounds. Empty for Criteo's logs, and for a Preprocessor of an earlier
        version.
        """
        with_indicator = [
            name
            for name, rule in zip(preprocessor.dense_names, preprocessor.dense, strict=True)
            if rule.indicator
        ]
        first = len(preprocessor.dense)
        self._indices = np.array([index for index, _, _ in rules], np.intp)
        self._indicators = {
            number: first + with_indicator.index(name)
            for number, name in enumerate(self.names)
            if name in with_indicator
        }
        self._lower = np.array([rule.lower for _, _, rule in rules], np.float32)
        self._upper = np.array([rule.upper for _, _, rule in rules], np.float32)

    def _clipped(self, dense: np.ndarray) -> np.ndarray:
        inputs = dense.take(self._indices, axis=1)
        return (inputs <= self._lower) | (inputs >= self._upper)

    # What tells a value beyond its bound from others, without the original number:
    #
    #   input equal to a bound   beyond it, because no row in between has that input
    #   indicator set            missing, if the column has an indicator
    #   otherwise                within the bounds
    def count(self, dense: np.ndarray) -> np.ndarray:
        """Return the values, and those beyond the bounds, of each column in `names`: int64
        [columns, 2], from model inputs, float32 [rows, num_dense]. Without an indicator, a missing
        number counts as a value.
        """
        counts = np.empty((len(self.names), 2), np.int64)
        if not self.names:
            return counts
        counts[:, 0] = len(dense)
        counts[:, 1] = np.count_nonzero(self._clipped(dense), axis=0)
        for number, indicator in self._indicators.items():
            counts[number, 0] -= np.count_nonzero(dense[:, indicator])
        return counts

    def columns(self, dense: np.ndarray) -> dict[str, np.ndarray]:
        """Return for each column in `names`, after a prefix, 1 if the value is beyond the bounds, 0
        if not, and -1 if it is missing, int8 [rows].
        """
        clipped = self._clipped(dense).astype(np.int8)
        for number, indicator in self._indicators.items():
            clipped[dense[:, indicator] != 0, number] = -1
        return {
            COLUMN + name: np.ascontiguousarray(clipped[:, number])
            for number, name in enumerate(self.names)
        }


@final
class ClipSum:
    """Sum of the counts of many batches."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        self._counter = ClipCounter(preprocessor)
        self.names = self._counter.names
        self.reset()

    def reset(self) -> None:
        """Start again from 0."""
        self.counts = np.zeros((len(self.names), 2), np.int64)

    def add(self, dense: np.ndarray) -> None:
        """Add the model inputs of a batch, float32 [rows, num_dense]."""
        if self.names:
            self.counts += self._counter.count(dense)


def arrow_flags(flags: np.ndarray) -> pa.Array:
    """Return a column of `ClipCounter.columns` as an Arrow array of booleans, a bit each, null if
    missing.
    """
    return pc.cast(arrow_numbers(flags, flags < 0), pa.bool_())


@final
class ClipTotals:
    """Totals of scored tables with columns of `arrow_flags`."""

    def __init__(self, names: Sequence[str]) -> None:
        self.counts = {name: [0, 0] for name in names}
        """Values, and those beyond the bounds, by column."""

    def strip(self, table: pa.Table) -> pa.Table:
        """Add the rows of a table and return it without the counted columns."""
        for name, counts in self.counts.items():
            flags = table.column(COLUMN + name)
            counts[0] += len(flags) - flags.null_count
            counts[1] += pc.sum(flags).as_py() or 0
        return table.drop_columns([COLUMN + name for name in self.counts])


def clipping_report(counts: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """Return the columns with values beyond their bounds, each with the number of these values,
    `clipped`, and their `share` of all values. `counts` has both numbers by column, the values
    first.
    """
    return {
        name: {"clipped": int(clipped), "share": int(clipped) / int(values)}
        for name, (values, clipped) in counts.items()
        if clipped
    }


def clipping_warning(counts: Mapping[str, Sequence[int]]) -> str:
    """Return a sentence that names the columns with more than 1 % of their values beyond the
    bounds. Empty without such.
    """
    fractions = {
        name: clipped / values
        for name, (values, clipped) in counts.items()
        if clipped > MAX_CLIPPED_FRACTION * values
    }
    if not fractions:
        return ""
    worst = sorted(fractions, key=lambda name: -fractions[name])
    shown = first_of([f"{name} ({fractions[name]:.1%} of its values)" for name in worst], 8)
    return (
        f"beyond the range of the training rows, and used as its end: {shown}. Train again "
        "on newer rows; declare a time as `timestamp`, and leave numbers that only grow out of the "
        "schema."
    )
