"""Popularity, ItemKNN and EASE against plain NumPy on dense matrices."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from builders.faults import rejects

from rayrec.metrics.item_ranks import ItemNumbers
from rayrec.models import item_baselines
from rayrec.models.item_baselines import EASE, ItemKNN, Popularity

CANDIDATES = 12


def items_of(lists: Sequence[Sequence[int]]) -> ItemNumbers:
    numbers = torch.tensor([item for items in lists for item in items], dtype=torch.int64)
    lengths = torch.tensor([len(items) for items in lists], dtype=torch.int64)
    return ItemNumbers.from_lists(numbers, lengths)


def random_lists(seed: int, rows: int) -> list[list[int]]:
    """Return lists of up to 6 items with repetitions. Item 11 is in none."""
    rng = np.random.default_rng(seed)
    return [(11 * rng.random(size) ** 2).astype(int).tolist() for size in rng.integers(0, 7, rows)]


def dense(lists: Sequence[Sequence[int]]) -> np.ndarray:
    sets = np.zeros((len(lists), CANDIDATES))
    for row, items in enumerate(lists):
        sets[row, items] = 1
    return sets


LISTS = random_lists(0, 80)
HISTORIES = [*random_lists(1, 9), [], [11]]


def parts() -> list[tuple[ItemNumbers, int]]:
    return [(items_of(LISTS[:30]), 30), (items_of([]), 0), (items_of(LISTS[30:]), 50)]


def test_popularity_counts_all_events() -> None:
    popularity = Popularity(CANDIDATES).fit(parts())
    counts = np.bincount(np.concatenate(LISTS).astype(int), minlength=CANDIDATES)
    np.testing.assert_array_equal(popularity.events, counts)
    scores = popularity.scores(items_of(HISTORIES), len(HISTORIES))
    np.testing.assert_array_equal(scores, np.tile(counts, (len(HISTORIES), 1)))
    scores[0] = -1
    assert scores[1, 0] == counts[0]


@pytest.mark.parametrize("neighbors", [1, 3, 100])
@pytest.mark.parametrize("block", [1, 1 << 24])
def test_itemknn_sums_shrunk_cosines_of_nearest_items(
    neighbors: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(item_baselines, "NEIGHBORS", neighbors)
    monkeypatch.setattr(item_baselines, "_BLOCK_NUMBERS", block)
    sets = dense(LISTS)
    products = sets.T @ sets
    norms = np.sqrt(np.diag(products))
    cosine = products / (np.outer(norms, norms) + item_baselines.SHRINK)
    np.fill_diagonal(cosine, 0)
    order = np.argsort(-cosine.astype(np.float32), axis=1, kind="stable")[:, neighbors:]
    np.put_along_axis(cosine, order, 0, axis=1)
    knn = ItemKNN(CANDIDATES).fit(parts())
    scores = knn.scores(items_of(HISTORIES), len(HISTORIES))
    np.testing.assert_allclose(scores, dense(HISTORIES) @ cosine, rtol=1e-5, atol=1e-7)
    assert np.count_nonzero(scores) > 10


def test_knn_keeps_first_of_equal_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_baselines, "NEIGHBORS", 1)
    knn = ItemKNN(3).fit([(items_of([[0, 1], [0, 2]]), 2)])
    assert np.flatnonzero(knn.scores(items_of([[0]]), 1)[0]).tolist() == [1]


@pytest.mark.parametrize("block", [1, 1 << 24])
def test_ease_solves_ridge_regression_without_diagonal(
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(item_baselines, "PENALTY", 2.0)
    monkeypatch.setattr(item_baselines, "_BLOCK_NUMBERS", block)
    sets = dense(LISTS)
    inverse = np.linalg.inv(sets.T @ sets + 2.0 * np.eye(CANDIDATES))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    ease = EASE(CANDIDATES).fit(parts())
    scores = ease.scores(items_of(HISTORIES), len(HISTORIES))
    np.testing.assert_allclose(scores, dense(HISTORIES) @ weights, rtol=1e-4, atol=1e-6)
    # The column of an item is the ridge regression on all others
    others = np.delete(np.arange(CANDIDATES), 3)
    left = sets[:, others].T @ sets[:, others] + 2.0 * np.eye(CANDIDATES - 1)
    ridge = np.linalg.solve(left, sets[:, others].T @ sets[:, 3])
    np.testing.assert_allclose(ease.weights[others, 3], ridge, rtol=1e-4, atol=1e-6)


def test_ease_rejects_too_many_items() -> None:
    rejects(
        r"baselines: ease needs .* at most 20,000 items, got 20,001\. Leave it out",
        EASE,
        20_001,
    )


def test_untrained_baselines_have_zero_scores() -> None:
    for kind in (ItemKNN, EASE, Popularity):
        scores = kind(3).fit([]).scores(items_of([[0, 1]]), 1)
        assert scores.tolist() == [[0, 0, 0]]
