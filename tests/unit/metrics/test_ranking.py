"""Ranking metrics match scikit-learn for each group, and do not depend on the distribution over processes."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from builders.faults import rejects
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ranks.checkpoint import run_ranks
from sklearn.metrics import ndcg_score, roc_auc_score
from torch import distributed

from rayrec.metrics import ranking
from rayrec.metrics.ranking import NO_GROUP, RankingAccumulator, gauc, ranking_metrics

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    count = draw(st.integers(0, 60))
    groups = draw(hnp.arrays(np.int64, count, elements=st.sampled_from([NO_GROUP, -(2**63), -1, 7, 2**62])))
    scores = draw(hnp.arrays(np.float32, count, elements=st.sampled_from([-3.5, -0.0, 0.0, 0.25, 7.0])))
    return groups, scores, draw(hnp.arrays(np.int64, count, elements=st.integers(0, 1)))


def by_hand(groups: np.ndarray, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    total, counted, found = 0.0, 0, 0
    for group in set(groups.tolist()) - {NO_GROUP}:
        mine = groups == group
        if len(set(labels[mine].tolist())) == 2:
            total += roc_auc_score(labels[mine], logits[mine]) * mine.sum()
            counted, found = counted + int(mine.sum()), found + 1
    return {"gauc": total / counted if counted else math.nan, "gauc_groups": found, "gauc_rows": counted}


def at_k(order: tuple[int, ...], labels: np.ndarray, k: int) -> tuple[float, float, float, float]:
    """Return NDCG, recall, hit rate and reciprocal rank of one order of a group's rows."""
    positives, ranks = int(labels.sum()), [rank for rank, row in enumerate(order, start=1) if labels[row]]
    ideal = sum(1 / math.log2(rank + 1) for rank in range(1, min(k, positives) + 1))
    gain = sum(1 / math.log2(rank + 1) for rank in ranks if rank <= k)
    return gain / ideal, sum(rank <= k for rank in ranks) / positives, float(ranks[0] <= k), 1 / ranks[0]


def over_all_orders(groups: np.ndarray, logits: np.ndarray, labels: np.ndarray, k: int) -> dict[str, float]:
    """Return the metrics at k as the mean over all orders that the scores allow."""
    means = []
    for group in set(groups.tolist()) - {NO_GROUP}:
        mine = groups == group
        if labels[mine].any():
            orders, scores = itertools.permutations(range(int(mine.sum()))), logits[mine]
            allowed = (order for order in orders if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)))
            means.append(np.mean([at_k(order, labels[mine], k) for order in allowed], axis=0))
    names = (f"ndcg_at_{k}", f"recall_at_{k}", f"hit_rate_at_{k}", "mrr")
    values = np.mean(means, axis=0) if means else [math.nan] * 4
    return {**dict(zip(names, map(float, values), strict=True)), "ranked_groups": len(means)}


@st.composite
def few_rows(draw: st.DrawFn) -> Rows:
    """Draw groups of at most four rows, small enough to list all orders."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    groups = np.repeat(np.array([NO_GROUP, -(2**63), 7, 2**62])[: len(sizes)], sizes)
    scores = draw(hnp.arrays(np.float32, len(groups), elements=st.sampled_from([-3.5, -0.0, 0.0])))
    labels = draw(hnp.arrays(np.int64, len(groups), elements=st.integers(0, 1)))
    order = np.array(draw(st.permutations(range(len(groups)))), np.int64)
    return groups[order], scores[order], labels[order]


@settings(max_examples=30, deadline=None)
@given(few_rows(), st.integers(1, 5))
def test_ties_match_mean_of_orders(case: Rows, k: int) -> None:
    found = ranking_metrics(*case, ks=(k,))
    expected = {**by_hand(*case), **over_all_orders(*case, k)}
    assert (found, set(found)) == (pytest.approx(expected, nan_ok=True), set(expected))


@pytest.mark.parametrize("k", [1, 3, 10, 100])
def test_ndcg_matches_scikit_learn(k: int) -> None:
    groups, logits, labels = many()
    of_groups = (groups == group for group in set(groups.tolist()) - {NO_GROUP})
    expected = [ndcg_score(labels[None, rows], logits[None, rows], k=k) for rows in of_groups if labels[rows].any()]
    assert ranking_metrics(groups, logits, labels, ks=(k,))[f"ndcg_at_{k}"] == pytest.approx(np.mean(expected))


def test_spilling_and_rounds_do_not_change_ranking_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, rows = np.random.default_rng(1), 100_000
    case = chance.integers(-300, 300, rows), chance.integers(-50, 50, rows).astype(np.float32), chance.integers(0, 2, rows)
    expected = ranking_metrics(*case, ks=(2, 10))
    assert expected["ranked_groups"] == 599
    monkeypatch.setattr(ranking, "_PART_ROWS", 1 << 30)  # One part, one thread
    assert ranking_metrics(*case, ks=(2, 10)) == pytest.approx(expected, rel=1e-12)
    rounds = ranking._rounds((case[0], case[1], case[2].astype(np.uint8)), max_rows=30_000)
    assert sum(len(groups) for groups, _, _ in rounds) == 100_000
    kept = RankingAccumulator((2, 10), memory_rows=20_000)
    for first in range(0, 100_000, 7000):
        kept.update(*(values[first : first + 7000] for values in case))
    assert kept._file is not None
    for _ in range(2):  # Rows may follow an evaluation
        assert kept.compute() == pytest.approx(expected, rel=1e-12)


@settings(max_examples=150, deadline=None)
@given(rows())
def test_gauc_matches_weighted_mean_of_groups(case: Rows) -> None:
    assert gauc(*case) == pytest.approx(by_hand(*case), nan_ok=True)


def many() -> Rows:
    chance = np.random.default_rng(0)
    return (chance.integers(0, 40, 1000) * 2**40, chance.integers(-5, 5, 1000).astype(np.float32), chance.integers(0, 2, 1000))


def a_rank(folder: str, rank: int) -> None:
    """Run a rank with a part of unequal size. The last has none."""
    start, stop = ((0, 700), (700, 1000), (1000, 1000))[rank]
    kept = RankingAccumulator(memory_rows=250)  # The first two ranks spill
    for first in range(start, stop, 100):
        kept.update(*(torch.from_numpy(values[first : first + 100]) for values in many()))
    found = kept.compute()
    everyone: list[dict[str, float]] = [{}] * 3
    distributed.all_gather_object(everyone, found)
    assert everyone == [found] * 3
    if rank == 1:
        kept.update(np.array([1]), np.array([math.nan]), np.array([0]))
    rejects("1 of 1001 logits are NaN", kept.compute)  # On all ranks, so that none waits
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_ranking_metrics_do_not_depend_on_row_placement(tmp_path: Path) -> None:
    run_ranks(a_rank, 3, str(tmp_path))
    expected = by_hand(*many())
    assert json.loads((tmp_path / "found.json").read_text()) == pytest.approx({**ranking_metrics(*many()), **expected})
    assert expected["gauc_groups"] == 39


def test_ranking_metrics_reject_invalid_arguments() -> None:
    rejects("groups: must have one per row, 2, got 3", gauc, np.zeros(3, np.int64), np.zeros(2), np.zeros(2))
    for ks, message in (((0,), "must be from 1 to 1,000,000, got 0"), ((5, 5), "must be distinct, got 5, 5")):
        rejects(f"ranking_k: {message}", ranking_metrics, np.zeros(3, np.int64), np.zeros(3), np.zeros(3), ks=ks)
    rejects("NaN", gauc, np.zeros(1, np.int64), np.array([np.nan]), np.zeros(1))
    kept = RankingAccumulator()
    rejects("groups: must have one per row, 2, got 3", kept.update, np.zeros(3, np.int64), np.zeros(2), np.zeros(2))
    kept.update(np.zeros(1, np.int64), np.array([np.nan]), np.zeros(1))
    rejects("1 of 1 logits are NaN", kept.compute)
