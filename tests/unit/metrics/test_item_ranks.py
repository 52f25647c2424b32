"""Metrics of relevant items against all orders of the candidates, one by one."""

import itertools
import math

import numpy as np
import pytest
import torch

from rayrec.metrics.item_ranks import ItemNumbers, rank_measures

KS = (1, 2, 5)


def naive_metrics(
    scores: list[float], targets: set[int], seen: set[int], k: int
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
            torch.from_numpy(scores)[None], one_row(targets), ks=KS, seen=one_row(seen)
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


def test_lists_of_items_have_the_rows_of_their_lengths() -> None:
    items = ItemNumbers.of_lists(torch.tensor([4, 5, -1]), torch.tensor([0, 2, 0, 1]))
    assert items.rows.tolist() == [1, 1, 3]
    assert items.counts(4).tolist() == [0, 2, 0, 1]
    assert items.known().numbers.tolist() == [4, 5]
