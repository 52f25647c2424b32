"""Recommenders without a network, on sets of items: popularity, ItemKNN and EASE."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, Self, final

import numpy as np
import torch

from rayrec.config import InputError
from rayrec.imports import require
from rayrec.metrics.item_ranks import ItemNumbers

if TYPE_CHECKING:
    from scipy import sparse

ItemBaselineKind = Literal["popularity", "itemknn", "ease"]

NEIGHBORS: Final = 100
"""Number of similar items that ItemKNN keeps of each item."""
SHRINK: Final = 10.0
"""Number that ItemKNN adds to the divisor of the cosine, against chance in rare items."""
PENALTY: Final = 500.0
"""L2 penalty of EASE."""
MAX_EASE_ITEMS: Final = 20_000
"""Maximum number of items for EASE, whose matrices have items x items numbers."""
_BLOCK_NUMBERS: Final = 1 << 24
"""Maximum number of similarities that are computed at once."""


# Life of a baseline:
#
#   add       a part of the training lists, in any number of calls
#   finish    compute what `scores` needs
#   scores    of all candidates after each history
class ItemBaseline(ABC):
    """Recommender that learns from lists of items, as candidate numbers."""

    keeps_lists = True
    """Whether it keeps the lists in memory until `finish`."""

    def __init__(self, candidates: int) -> None:
        self.candidates = candidates

    @abstractmethod
    def add(self, lists: ItemNumbers, rows: int) -> None:
        """Learn from `rows` training lists."""

    def finish(self) -> None:
        """End the training."""

    def fit(self, parts: Iterable[tuple[ItemNumbers, int]]) -> Self:
        """Learn from parts of the training lists with their numbers of rows. Return self."""
        for lists, rows in parts:
            self.add(lists, rows)
        self.finish()
        return self

    @abstractmethod
    def scores(self, histories: ItemNumbers, rows: int) -> torch.Tensor:
        """Return new scores of all candidates after each history, float32 [rows, candidates]."""


@final
class Popularity(ItemBaseline):
    """Number of training events of each item, equal for all histories."""

    keeps_lists = False

    def __init__(self, candidates: int) -> None:
        super().__init__(candidates)
        self.events = np.zeros(candidates, np.int64)
        """Number of events of each candidate, int64 [candidates]."""

    def add(self, lists: ItemNumbers, rows: int) -> None:
        self.events += np.bincount(lists.numbers.numpy(), minlength=self.candidates)

    def scores(self, histories: ItemNumbers, rows: int) -> torch.Tensor:
        return torch.from_numpy(self.events).float().repeat(rows, 1)


class _SetBaseline(ItemBaseline):
    """Baseline on the set of each list's items. Memory: 8 bytes per item."""

    def __init__(self, candidates: int) -> None:
        require("scipy", extra="baselines")
        super().__init__(candidates)
        self._parts: list[sparse.csr_matrix] = []

    def add(self, lists: ItemNumbers, rows: int) -> None:
        self._parts.append(_as_sets(lists, rows, self.candidates))

    def finish(self) -> None:
        from scipy import sparse

        empty = sparse.csr_matrix((0, self.candidates), dtype=np.float32)
        sets = sparse.vstack([empty, *self._parts], format="csr")
        self._parts = []
        self._learn(sets)

    @abstractmethod
    def _learn(self, sets: sparse.csr_matrix) -> None:
        """Learn from sets, float32 [rows, candidates] of 0 and 1."""


@final
class ItemKNN(_SetBaseline):
    """Similarity to the items in the history, added up. An item is similar to its nearest
    neighbors: the shrunk cosine between the sets of rows that have either. Sources: Deshpande &
    Karypis 2004, "Item-Based Top-N Recommendation Algorithms"; for the shrinkage, Dacrema et al.
    2019, "Are We Really Making Much Progress?".
    """

    def _learn(self, sets: sparse.csr_matrix) -> None:
        from scipy import sparse

        transposed = sets.T.tocsr()
        norms = np.sqrt(np.diff(transposed.indptr)).astype(np.float32)
        step = max(1, _BLOCK_NUMBERS // max(1, self.candidates))
        blocks = [sparse.csr_matrix((0, self.candidates), dtype=np.float32)]
        for start in range(0, self.candidates, step):
            block = (transposed[start : start + step] @ sets).tocoo()
            row = block.row + start
            is_other = row != block.col
            divisor = norms[row] * norms[block.col] + np.float32(SHRINK)
            values = np.where(is_other, block.data / divisor, np.float32(0))
            blocks.append(_largest(block.row, block.col, values, block.shape))
        self.similarity = sparse.vstack(blocks, format="csr")
        """Similarity of each item's neighbors, float32 [candidates, candidates]."""

    def scores(self, histories: ItemNumbers, rows: int) -> torch.Tensor:
        sets = _as_sets(histories, rows, self.candidates)
        return torch.from_numpy((sets @ self.similarity).toarray())


@final
class EASE(_SetBaseline):
    """Linear model of each item by all others, with a closed-form solution (Steck 2019,
    "Embarrassingly Shallow Autoencoders for Sparse Data"). Memory: 8 bytes per pair of items.
    """

    def __init__(self, candidates: int) -> None:
        super().__init__(candidates)
        if candidates > MAX_EASE_ITEMS:
            raise InputError(
                f"baselines: ease needs a matrix of all pairs of items, at most "
                f"{MAX_EASE_ITEMS:,} items, got {candidates:,}. Leave it out, or raise "
                "preset.min_count."
            )

    def _learn(self, sets: sparse.csr_matrix) -> None:
        from scipy.linalg import lapack

        transposed = sets.T.tocsr()
        products = torch.zeros(self.candidates, self.candidates)
        step = max(1, _BLOCK_NUMBERS // max(1, self.candidates))
        for start in range(0, self.candidates, step):
            block = (transposed[start : start + step] @ sets).toarray()
            products[start : start + step] = torch.from_numpy(block)
        products.diagonal().add_(PENALTY)
        # In place, and faster than torch's inverse. The lower triangle in the order of columns is
        # the upper one in the order of rows.
        matrix = products.numpy().T
        factor, failed = lapack.spotrf(matrix, lower=1, clean=0, overwrite_a=1)
        assert not failed, "the penalty makes it positive definite"
        inverse, failed = lapack.spotri(factor, lower=1, overwrite_c=1)
        assert not failed
        upper = torch.from_numpy(inverse.T).triu_()
        diagonal = upper.diagonal().clone()
        weights = (upper + upper.T).div_(-diagonal)
        weights.fill_diagonal_(0)
        self.weights = weights
        """Weight of each item of a history for each candidate, float32 [candidates, candidates]."""

    def scores(self, histories: ItemNumbers, rows: int) -> torch.Tensor:
        sets = _as_sets(histories, rows, self.candidates)
        return torch.from_numpy(sets @ self.weights.numpy())


ITEM_BASELINES: Final[dict[ItemBaselineKind, type[ItemBaseline]]] = {
    "popularity": Popularity,
    "itemknn": ItemKNN,
    "ease": EASE,
}
"""Baselines by name."""


def _as_sets(lists: ItemNumbers, rows: int, candidates: int) -> sparse.csr_matrix:
    """Return the set of each list's items, float32 [rows, candidates], 0 or 1."""
    from scipy import sparse

    coordinates = (lists.rows.numpy(), lists.numbers.numpy())
    ones = np.ones(len(coordinates[0]), np.float32)
    sets = sparse.csr_matrix((ones, coordinates), shape=(rows, candidates))
    # Repeated items were added up
    sets.data[:] = 1
    return sets


def _largest(
    rows: np.ndarray,
    columns: np.ndarray,
    values: np.ndarray,
    shape: Any,
) -> sparse.csr_matrix:
    """Return a matrix with the `NEIGHBORS` largest positive values in each row, among equal ones
    those in the first columns.
    """
    from scipy import sparse

    is_positive = values > 0
    order = np.lexsort((columns[is_positive], -values[is_positive], rows[is_positive]))
    sorted_rows = rows[is_positive][order]
    starts = np.searchsorted(sorted_rows, np.arange(shape[0]))
    is_neighbor = np.arange(len(order)) - starts[sorted_rows] < NEIGHBORS
    chosen = np.flatnonzero(is_positive)[order[is_neighbor]]
    return sparse.csr_matrix((values[chosen], (rows[chosen], columns[chosen])), shape=shape)
