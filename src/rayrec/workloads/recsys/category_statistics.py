"""Statistics of categories in training rows: the effect of each on the label, and its row count
(target encoding: Micci-Barreca, "A Preprocessing Scheme for High-Cardinality Categorical
Attributes", SIGKDD Explorations 2001).

Without smoothing, and with a mean label of 0.5:

    user  click        user  rows  clicks  effect                logarithm
    u1    1            u1    3     2       logit(2/3) - logit(1/2)  log(1 + 3)
    u1    1            u2    1     0       ...
    u2    0
    u1    0

`smoothing` more rows with the mean label bring the effects of rare categories near 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, final

import numpy as np

from rayrec.data.encoded_rows import JaggedIds
from rayrec.hashing import mix64

FOLDS: Final = 5
"""Parts of the training rows. The rows of each get statistics of the other parts."""
_CHUNK_ROWS: Final = 1 << 18
"""Rows of a table that are computed at once."""


def folds(row_numbers: np.ndarray) -> np.ndarray:
    """Return the fold of each row from its number in the log, int64 [rows], whatever the order."""
    return (mix64(row_numbers.astype(np.uint64)) % np.uint64(FOLDS)).astype(np.int64)


class _Table:
    """Sums of a table's categories, by fold."""

    def __init__(self, num_embeddings: int) -> None:
        self.weight = np.zeros((FOLDS, num_embeddings), np.float32)
        self.label = np.zeros((FOLDS, num_embeddings), np.float32)

    def add(self, ids: np.ndarray, fold: np.ndarray, weight: np.ndarray, label: np.ndarray) -> None:
        # Sorted, because adding one by one takes ten times as long
        slots, inverse = np.unique(fold * self.weight.shape[1] + ids, return_inverse=True)
        for table, values in (
            (self.weight, weight),
            (self.label, weight * label),
        ):
            sums = np.bincount(inverse, values)
            table.reshape(-1)[slots] += sums.astype(np.float32)

    def without(self, fold: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return weight and label sum of each id in the other folds, float32 [ids]."""
        weight = self.weight[:, ids].sum(0)
        label = self.label[:, ids].sum(0)
        weight -= self.weight[fold, ids]
        label -= self.label[fold, ids]
        return weight.clip(0), label


# A category's mean includes the row's own label, which trees would learn to read:
#
#   training row    statistics of the four folds without it (`summed`)
#   any other row   statistics of all folds (`fill`), which are the model's tables
#
# A fold depends on the row's number in the log alone, so that a resumed run has the same.
@final
class CategoryStatistics:
    """Sums of the label and the weights of all categories, over training rows. A table that several
    features share counts those with one id per row, or lists if there are no others. Memory: 40
    bytes per table row.
    """

    def __init__(
        self,
        table_of: Mapping[str, str],
        num_embeddings: Sequence[int],
        *,
        lists: Sequence[str],
        smoothing: float,
        is_binary: bool,
    ) -> None:
        """Create without rows.

        Args:
            table_of: Table of each feature.
            num_embeddings: Number of table rows of each feature.
            lists: Features with any number of ids per row.
            smoothing: Rows with the mean label that are added to each category.
            is_binary: Whether effects are differences of logits, instead of labels.
        """
        self._smoothing = smoothing
        self._is_binary = is_binary
        self._table_of = list(table_of.values())
        sizes = dict(zip(self._table_of, num_embeddings, strict=True))
        self._tables = {table: _Table(size) for table, size in sizes.items()}
        single = {table for feature, table in table_of.items() if feature not in lists}
        self._counted = [
            feature not in lists or table not in single for feature, table in table_of.items()
        ]
        self._weight = np.zeros(FOLDS)
        self._label = np.zeros(FOLDS)

    def add(
        self, columns: Sequence[JaggedIds], fold: np.ndarray, weight: np.ndarray, label: np.ndarray
    ) -> None:
        """Add rows: ids of each feature, and the fold, weight and label of each row."""
        self._weight += np.bincount(fold, weight, minlength=FOLDS)
        self._label += np.bincount(fold, weight * label, minlength=FOLDS)
        for table, ids, counted in zip(self._table_of, columns, self._counted, strict=True):
            if not counted:
                continue
            each = (np.repeat(values, ids.lengths) for values in (fold, weight, label))
            self._tables[table].add(ids.values, *each)

    def summed(self, columns: Sequence[JaggedIds], fold: np.ndarray) -> np.ndarray:
        """Return sums over each row's ids, float32 [rows, features, 3]: effects and logarithms,
        both from rows of other folds, and how many ids there are.
        """
        rows = len(fold)
        total = self._weight.sum()
        # Counts as if from all rows, like those of the table
        scale = total / np.maximum(total - self._weight, 1e-9)
        sums = np.empty((rows, len(columns), 3), np.float32)
        for number, (table, ids) in enumerate(zip(self._table_of, columns, strict=True)):
            row = np.repeat(np.arange(rows), ids.lengths)
            row_fold = fold[row]
            weight, label = self._tables[table].without(row_fold, ids.values)
            ones = np.ones(len(row), np.float32)
            factor = ones if ids.weights is None else ids.weights
            values = (
                self._effect(weight, label),
                np.log1p(weight * scale[row_fold]),
                ones,
            )
            for column, value in enumerate(values):
                summed = np.bincount(row, value * factor, minlength=rows)
                sums[:, number, column] = summed
        return sums

    def fill(self, table: str, values: np.ndarray) -> None:
        """Write the statistics of all folds into a table, float32 [num_embeddings, 4 or more]."""
        sums = self._tables[table]
        for start in range(0, len(values), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            weight = sums.weight[:, rows].sum(0)
            values[rows, 0] = self._effect(weight, sums.label[:, rows].sum(0))
            values[rows, 1] = np.log1p(weight)
            values[rows, 2] = 1.0
            values[rows, 3:] = 0.0

    def _effect(self, weight: np.ndarray, label: np.ndarray) -> np.ndarray:
        # One more row of each class keeps the logit finite if all labels are equal
        extra = 1.0 if self._is_binary else 0.0
        mean = (self._label.sum() + extra) / (self._weight.sum() + 2 * extra)
        rows = weight.astype(np.float64) + self._smoothing
        smoothed = (label + self._smoothing * mean) / rows
        if not self._is_binary:
            effect = smoothed - mean
            return effect.astype(np.float32)
        inside = smoothed.clip(1e-6, 1 - 1e-6)
        logit = np.log(inside / (1 - inside))
        effect = logit - np.log(mean / (1 - mean))
        return effect.astype(np.float32)
