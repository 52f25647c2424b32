"""Metrics of relevant items against all orders of the candidates, one by one."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks.checkpoint import run_ranks
from ranks.metric import recommended_of_ranks

from rayrec.metrics import item_ranks
from rayrec.metrics.item_ranks import (
    CandidateScores,
    ItemNumbers,
    rank_measures,
    tiled_rank_measures,
    top_items,
)
from rayrec.metrics.recommended import RECOMMENDED, RecommendedItems

KS = (1, 2, 5)


def naive_metrics(
    scores: list[float],
    targets: set[int],
    seen: set[int],
    k: int,
) -> tuple[float, ...]:
    """Return NDCG, recall, hit rate and MRR at k: means over all orders of tied candidates."""
    candidates = [number for number in range(len(scores)) if number not in seen]
    orders = [
        order
        for order in itertools.permutations(candidates)
        if all(scores[first] >= scores[second] for first, second in itertools.pairwise(order))
    ]
    ideal = sum(1 / math.log2(rank + 2) for rank in range(min(k, len(targets))))
    totals = np.zeros(4)
    for order in orders:
        hits = [rank for rank, number in enumerate(order[:k]) if number in targets]
        gain = sum(1 / math.log2(rank + 2) for rank in hits)
        first = 1 / (hits[0] + 1) if hits else 0.0
        totals += [gain / ideal, len(hits) / len(targets), bool(hits), first]
    return tuple(totals / len(orders))


def one_row(items: set[int]) -> ItemNumbers:
    numbers = torch.tensor(sorted(items), dtype=torch.int64)
    return ItemNumbers(torch.zeros_like(numbers), numbers)


@pytest.mark.parametrize("seed", range(8))
def test_metrics_match_all_orders_of_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        candidates = int(rng.integers(1, 7))
        scores = rng.integers(0, 3, candidates).astype(np.float32)
        targets = set(rng.choice(candidates, rng.integers(1, candidates + 1), replace=False))
        seen = set(rng.choice(candidates, rng.integers(0, candidates), replace=False))
        if rng.integers(0, 2):
            targets.add(-1)  # An unknown item
        measures = rank_measures(
            torch.from_numpy(scores)[None],
            one_row(targets),
            ks=KS,
            seen=one_row(seen),
        )
        assert measures["targets"].tolist() == [len(targets)]
        assert measures["unknown_targets"].tolist() == [int(-1 in targets)]
        assert measures["seen_targets"].tolist() == [len(targets & seen)]
        for k in KS:
            found = [
                measures[f"{name}_at_{k}"].item() for name in ("ndcg", "recall", "hit_rate", "mrr")
            ]
            expected = naive_metrics(scores.tolist(), targets, seen, k)
            np.testing.assert_allclose(found, expected, atol=1e-12)


def test_rows_without_relevant_items_have_no_metrics() -> None:
    targets = ItemNumbers(torch.tensor([1]), torch.tensor([0]))
    measures = rank_measures(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), targets, ks=(1,))
    np.testing.assert_array_equal(measures["mrr_at_1"], [np.nan, 1.0])
    assert measures["targets"].tolist() == [0, 1]


def test_lists_of_items_have_rows_by_length() -> None:
    items = ItemNumbers.from_lists(torch.tensor([4, 5, -1]), torch.tensor([0, 2, 0, 1]))
    assert items.rows.tolist() == [1, 1, 3]
    assert items.counts(4).tolist() == [0, 2, 0, 1]
    assert items.candidates_only().numbers.tolist() == [4, 5]


def random_items(rng: np.random.Generator, rows: int, candidates: int, most: int) -> ItemNumbers:
    """Return up to `most` distinct items per row, some of them unknown, rows in any order."""
    lists = [
        (row, number - 1)
        for row in range(rows)
        for number in rng.choice(candidates + 1, rng.integers(0, most + 1), replace=False)
    ]
    rng.shuffle(lists)
    columns = torch.tensor(lists, dtype=torch.int64).reshape(-1, 2)
    return ItemNumbers(columns[:, 0], columns[:, 1])


def test_larger_k_changes_no_smaller_one() -> None:
    """With ties beyond the largest k, which all candidates are searched for."""
    rng = np.random.default_rng(2)
    # The highest scores are rare, and the last of the best ones is tied
    logits = torch.from_numpy(rng.geometric(0.4, (40, 33)).astype(np.float32))
    targets = random_items(rng, 40, 33, 3)
    all_ranks = rank_measures(logits, targets, ks=(*KS, 33))
    for name, values in rank_measures(logits, targets, ks=KS).items():
        np.testing.assert_array_equal(values, all_ranks[name])


def test_unknown_target_is_not_seen_item_of_row_before() -> None:
    targets = ItemNumbers(torch.tensor([0, 1]), torch.tensor([0, -1]))
    measures = rank_measures(torch.zeros(2, 3), targets, ks=(1,), seen=one_row({2}))
    assert measures["seen_targets"].tolist() == [0, 0]


# -- Tiles
@pytest.mark.parametrize("numbers", [1, 40, 100, 1 << 23])
def test_tiles_change_no_measure(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_ranks, "_TILE_NUMBERS", numbers)
    rng = np.random.default_rng(0)
    vectors = torch.from_numpy(rng.integers(-2, 3, (33, 4)).astype(np.float32))
    queries = torch.from_numpy(rng.integers(-2, 3, (23, 4)).astype(np.float32))
    targets = random_items(rng, 23, 33, 3)
    seen = random_items(rng, 23, 33, 12)
    scores = CandidateScores(queries, vectors)
    tiled = tiled_rank_measures(scores, targets, shape=scores.shape, ks=KS, seen=seen)
    whole = rank_measures(queries @ vectors.T, targets, ks=KS, seen=seen)
    best = tiled.pop(RECOMMENDED)
    for name, values in whole.items():
        np.testing.assert_array_equal(tiled[name], values)
    logits = item_ranks.without_items(queries @ vectors.T, seen)
    np.testing.assert_array_equal(best, top_items(logits, max(KS))[1])
    assert set(tiled) == set(whole)


@pytest.mark.parametrize(
    ("numbers", "is_stored"),
    [
        pytest.param(23 * 33 - 1, False, id="two_tiles"),
        pytest.param(23 * 33, True, id="one_tile"),
    ],
)
def test_single_tile_is_stored(
    numbers: int, is_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_ranks, "_TILE_NUMBERS", numbers)
    queries = torch.randn(23, 4)
    vectors = torch.randn(33, 4)
    scores = CandidateScores(queries, vectors)
    expected = queries @ vectors.T
    torch.testing.assert_close(scores.map_rows(lambda part: part.amax(1)), expected.amax(1))
    assert (scores.stored is not None) == is_stored
    items = ItemNumbers(torch.tensor([22, 0]), torch.tensor([32, 5]))
    torch.testing.assert_close(scores.at_items(items), expected[items.rows, items.numbers])
    stored = CandidateScores(queries, vectors, stored=torch.ones(23, 33))
    assert stored(2, 4).eq(1).all()


def test_million_candidates_are_ranked_in_tiles_of_memory() -> None:
    candidates = 1_000_000
    sizes = []

    def scores(start: int, stop: int) -> torch.Tensor:
        sizes.append(4 * candidates * (stop - start))
        logits = torch.zeros(stop - start, candidates)
        for row in range(start, stop):
            logits[row - start, row : row + 3] = torch.tensor([1.0, 3.0, 2.0])
        return logits

    targets = ItemNumbers.one_each(torch.arange(20) + 2)
    measures = tiled_rank_measures(scores, targets, shape=(20, candidates), ks=(1, 2))
    assert measures["mrr_at_2"].tolist() == [0.5] * 20
    assert measures["recall_at_1"].tolist() == [0.0] * 20
    np.testing.assert_array_equal(
        measures[RECOMMENDED],
        np.arange(20)[:, None] + np.array([[1, 2]]),
    )
    assert max(sizes) <= 32 << 20


def test_measures_of_no_rows_and_of_no_candidates() -> None:
    nothing = ItemNumbers(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    for shape, targets in (
        ((0, 3), nothing),
        ((2, 0), ItemNumbers.one_each(torch.tensor([-1, -1]))),
    ):
        measures = tiled_rank_measures(
            lambda start, stop, shape=shape: torch.zeros(stop - start, shape[1]),
            targets,
            shape=shape,
            ks=(2,),
            seen=nothing,
        )
        assert measures["mrr_at_2"].tolist() == [0.0] * shape[0]
        assert measures["unknown_targets"].tolist() == [1] * shape[0]
        assert measures[RECOMMENDED].tolist() == [[-1]] * shape[0]


def test_target_of_lowest_score_is_not_seen() -> None:
    measures = rank_measures(
        torch.tensor([[1.0, -torch.inf]]),
        one_row({1}),
        ks=(2,),
        seen=one_row(set()),
    )
    assert (measures["seen_targets"].item(), measures["recall_at_2"].item()) == (0, 1.0)


# -- Best items
def test_best_items_are_in_order_of_score_and_number() -> None:
    rng = np.random.default_rng(1)
    for candidates, k in itertools.product((1, 2, 7, 40), (1, 3, 10)):
        logits = rng.integers(0, 4, (60, candidates)).astype(np.float32)
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        scores, numbers = top_items(torch.from_numpy(logits), k)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        expected = np.take_along_axis(logits, order, 1)
        np.testing.assert_array_equal(scores, expected)
        np.testing.assert_array_equal(numbers, np.where(np.isneginf(expected), -1, order))


def test_nan_is_best_item() -> None:
    _, numbers = top_items(torch.tensor([[1.0, torch.nan, 2.0, torch.nan]]), 3)
    assert numbers.tolist() == [[1, 3, 2]]


def test_distinct_items_keep_first_and_all_unknown() -> None:
    items = ItemNumbers(torch.tensor([0, 1, 0, 0, 0]), torch.tensor([3, 3, -1, 3, -1])).distinct()
    assert (items.rows.tolist(), items.numbers.tolist()) == ([0, 1, 0, 0], [3, 3, -1, -1])


def test_unknown_item_hides_no_item_of_row_before() -> None:
    items = ItemNumbers(torch.tensor([1, 0]), torch.tensor([-1, 3])).distinct()
    assert items.numbers.tolist() == [-1, 3]


# -- All rows together
def test_coverage_and_popularity_count_items_of_all_rows() -> None:
    popularity = np.array([10, 0, 5, 1, 4])
    items = RecommendedItems(5, (1, 2), popularity)
    items.update(np.array([[0, 2], [0, -1]], np.int32))
    items.update(np.array([[2, 3]], np.int32))
    items.update(np.zeros((0, 2), np.int32))
    assert items.compute() == {
        "coverage_at_1": 2 / 5,
        "popularity_at_1": 25 / 3,
        "coverage_at_2": 3 / 5,
        "popularity_at_2": 31 / 5,
    }


def test_coverage_counts_all_workers(tmp_path: Path) -> None:
    run_ranks(recommended_of_ranks, 3, str(tmp_path))


def test_coverage_without_rows_or_candidates() -> None:
    assert RecommendedItems(3, (1,)).compute() == {"coverage_at_1": 0.0}
    assert math.isnan(RecommendedItems(0, (1,)).compute()["coverage_at_1"])
