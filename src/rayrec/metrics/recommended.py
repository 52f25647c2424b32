"""Counts of recommended items over all rows: how many of the candidates are recommended at all, and
how popular they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, final

import numpy as np
import numpy.typing as npt

from rayrec.collectives import sum_over_workers

RECOMMENDED: Final = "recommended"
"""Measure with the candidate numbers of each row's best items, int32 [rows, items]."""


@final
class RecommendedItems:
    """Number of rows that each candidate is recommended to, within the first k for each k. Memory:
    8 bytes per candidate and k.
    """

    def __init__(
        self,
        candidates: int,
        ks: Sequence[int],
        popularity: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """`popularity` is the number of training events of each candidate, int64 [candidates]."""
        self._ks = tuple(ks)
        self._counts = np.zeros((len(self._ks), candidates), np.int64)
        self._popularity = popularity

    def update(self, numbers: npt.NDArray[np.int32]) -> None:
        """Append rows of candidate numbers in the order of their scores, [rows, items], -1 for no
        item. Rows have items up to the largest k, if there are so many candidates.
        """
        for number, k in enumerate(self._ks):
            first = numbers[:, :k]
            self._counts[number] += np.bincount(first[first >= 0], minlength=self._counts.shape[1])

    def compute(self) -> dict[str, float]:
        """Return `coverage_at_K` for each k: the share of candidates that any row is recommended,
        NaN without candidates. With `popularity`, also return `popularity_at_K`, the mean number of
        training events over the recommended items. Collective.
        """
        counts = sum_over_workers(self._counts)
        metrics = {}
        for k, row in zip(self._ks, counts, strict=True):
            recommended = int(np.count_nonzero(row))
            metrics[f"coverage_at_{k}"] = recommended / len(row) if len(row) else math.nan
            if self._popularity is not None:
                total = int(row.sum())
                events = float(row.astype(np.float64) @ self._popularity)
                metrics[f"popularity_at_{k}"] = events / total if total else math.nan
        return metrics
