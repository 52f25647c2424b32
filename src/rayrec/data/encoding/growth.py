"""Columns whose values only grow, or never return, over the rows of a log: a model learns nothing
about those of later rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

_SPANS_PER_BLOCK: Final = 8
_MAX_SPANS: Final = 64
MIN_SPANS: Final = 8
"""Fewer spans in order may be chance: of one row each, one in 40,320 is."""
_TOLERANCE: Final = 0.01
"""Overlap allowed between consecutive spans, as a share of the column's range: clocks of several
servers differ.
"""
MIN_CATEGORIES: Final = 20
"""Categories in order that are no chance."""

Trend = Literal["grows", "falls"]


def find_trend(limits: Sequence[tuple[float, float]]) -> Trend | None:
    """Return the trend of a column from its minimum and maximum over consecutive rows, in row
    order. None without a trend.
    """
    if not limits:
        return None
    low, high = np.array(limits, np.float64).T
    tolerance = _TOLERANCE * (high.max() - low.min())
    if not tolerance > 0:
        return None
    # A flag that is set in the last rows only moves one of the two limits, once.
    if (low[1:] >= high[:-1] - tolerance).all() and np.count_nonzero(low[1:] > low[:-1]) > 1:
        return "grows"
    if (high[1:] <= low[:-1] + tolerance).all() and np.count_nonzero(high[1:] < high[:-1]) > 1:
        return "falls"
    return None


@dataclass
class RowOrder:
    """Limits of a column's values over up to 64 spans of consecutive rows, which may come in any
    order.
    """

    spans: list[tuple[int, float, float]] = field(default_factory=list)
    """First row, minimum and maximum of each span."""

    def add(self, values: np.ndarray, first_row: int) -> None:
        """Add the present values of consecutive rows, float64. Missing ones make row numbers
        approximate.
        """
        for part in np.array_split(np.arange(len(values)), min(_SPANS_PER_BLOCK, len(values)) or 1):
            if len(part):
                cut = values[part[0] : part[-1] + 1]
                self.spans.append((first_row + int(part[0]), float(cut.min()), float(cut.max())))
        self._thin()

    def merge(self, spans: Sequence[Sequence[Any]], shift_rows: int) -> None:
        """Add spans of other rows, whose row numbers start at `shift_rows`."""
        self.spans += [(int(row) + shift_rows, low, high) for row, low, high in spans]
        self._thin()

    def _thin(self) -> None:
        self.spans.sort()
        while len(self.spans) > _MAX_SPANS:
            pairs = [self.spans[index : index + 2] for index in range(0, len(self.spans), 2)]
            self.spans = [
                (pair[0][0], min(low for _, low, _ in pair), max(high for _, _, high in pair))
                for pair in pairs
            ]

    @property
    def trend(self) -> Trend | None:
        """Trend of the values. None without one, or with few rows."""
        return (
            find_trend([(low, high) for _, low, high in self.spans])
            if len(self.spans) >= MIN_SPANS
            else None
        )


def num_changes(values: np.ndarray) -> int:
    """Return the number of values that differ from the one before."""
    return int(np.count_nonzero(values[1:] != values[:-1]))


def number_warning(name: str, trend: Trend) -> str:
    """Return a sentence on a dense column with a trend."""
    return (
        f"column {name} only {trend} from row to row, so later rows are beyond the range that a "
        "model learns about; declare a time as `timestamp`, leave it and row numbers out of "
        "`dense`, or use a difference of times, such as an age"
    )


def category_warning(name: str) -> str:
    """Return a sentence on a sparse column whose categories come one after another."""
    return (
        f"the categories of column {name} come one after another and never return, like times and "
        "row numbers, so those of later rows are unknown; leave it out of `sparse`, or if the log "
        "is sorted by it, shuffle or split the log by another column"
    )
