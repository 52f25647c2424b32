"""Ranking metrics match scikit-learn for each group, and do not depend on the distribution over
processes.
"""

import itertools
import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.faults import rejects
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ranks import metric
from ranks.checkpoint import run_ranks
from scipy import stats
from sklearn.metrics import accuracy_score, log_loss, ndcg_score, roc_auc_score
from torch import distributed

from rayrec.metrics import binary as metrics
from rayrec.metrics import ranking, significance
from rayrec.metrics.binary import binary_metrics
from rayrec.metrics.ranking import NO_GROUP, RankingAccumulator, gauc, ranking_metrics
from rayrec.metrics.significance import (
    METRICS,
    Resampling,
    SeededScores,
    _Model,
    _poisson_table,
    compare,
    intervals,
)

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    count = draw(st.integers(0, 60))
    groups = draw(
        hnp.arrays(np.int64, count, elements=st.sampled_from([NO_GROUP, -(2**63), -1, 7, 2**62]))
    )
    scores = draw(
        hnp.arrays(np.float32, count, elements=st.sampled_from([-3.5, -0.0, 0.0, 0.25, 7.0]))
    )
    return groups, scores, draw(hnp.arrays(np.int64, count, elements=st.integers(0, 1)))


def by_hand(groups: np.ndarray, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    total = 0.0
    counted = 0
    found = 0
    for group in set(groups.tolist()) - {NO_GROUP}:
        actual = groups == group
        if len(set(labels[actual].tolist())) == 2:
            total += roc_auc_score(labels[actual], logits[actual]) * actual.sum()
            counted, found = counted + int(actual.sum()), found + 1
    return {
        "gauc": total / counted if counted else math.nan,
        "gauc_groups": found,
        "gauc_rows": counted,
    }


def at_k(order: tuple[int, ...], labels: np.ndarray, k: int) -> tuple[float, float, float, float]:
    """Return NDCG, recall, hit rate and reciprocal rank of one order of a group's rows."""
    positives = int(labels.sum())
    ranks = [rank for rank, row in enumerate(order, start=1) if labels[row]]
    ideal = sum(1 / math.log2(rank + 1) for rank in range(1, min(k, positives) + 1))
    gain = sum(1 / math.log2(rank + 1) for rank in ranks if rank <= k)
    return (
        gain / ideal,
        sum(rank <= k for rank in ranks) / positives,
        float(ranks[0] <= k),
        1 / ranks[0],
    )


def over_all_orders(
    groups: np.ndarray,
    logits: np.ndarray,
    labels: np.ndarray,
    k: int,
) -> dict[str, float]:
    """Return the metrics at k as the mean over all orders that the scores allow."""
    means = []
    for group in set(groups.tolist()) - {NO_GROUP}:
        actual = groups == group
        if labels[actual].any():
            orders = itertools.permutations(range(int(actual.sum())))
            scores = logits[actual]
            allowed = (
                order
                for order in orders
                if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
            )
            means.append(np.mean([at_k(order, labels[actual], k) for order in allowed], axis=0))
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
    group_terms = (groups == group for group in set(groups.tolist()) - {NO_GROUP})
    expected = [
        ndcg_score(labels[None, rows], logits[None, rows], k=k)
        for rows in group_terms
        if labels[rows].any()
    ]
    assert ranking_metrics(groups, logits, labels, ks=(k,))[f"ndcg_at_{k}"] == pytest.approx(
        np.mean(expected)
    )


def test_sums_over_groups_have_no_rounding_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million groups of three rows with one positive, in one part."""
    monkeypatch.setattr(ranking, "_PART_ROWS", 1 << 30)
    num_groups = 1_000_000
    size = 3
    rank = np.random.default_rng(0).integers(1, size + 1, num_groups)
    groups = np.repeat(np.arange(1, num_groups + 1), size)
    logits = np.tile(-np.arange(size), num_groups)
    labels = (np.arange(1, size + 1) == rank[:, None]).reshape(-1)
    metrics = ranking_metrics(groups, logits, labels, ks=(2,))
    group_terms = (2 * (size - 1) - 2 * (rank - 1)) / (2 * (size - 1)) * size
    assert metrics["mrr"] == math.fsum(1 / rank) / num_groups
    assert metrics["gauc"] == math.fsum(group_terms) / (size * num_groups)


def test_spilling_and_rounds_do_not_change_ranking_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(1)
    rows = 100_000
    case = (
        chance.integers(-300, 300, rows),
        chance.integers(-50, 50, rows).astype(np.float32),
        chance.integers(0, 2, rows),
    )
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
    return (
        chance.integers(0, 40, 1000) * 2**40,
        chance.integers(-5, 5, 1000).astype(np.float32),
        chance.integers(0, 2, 1000),
    )


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
    assert json.loads((tmp_path / "found.json").read_text()) == pytest.approx(
        {**ranking_metrics(*many()), **expected}
    )
    assert expected["gauc_groups"] == 39


def test_ranking_metrics_reject_invalid_arguments() -> None:
    rejects(
        "groups: must have one per row, 2, got 3",
        gauc,
        np.zeros(3, np.int64),
        np.zeros(2),
        np.zeros(2),
    )
    for ks, message in (
        ((0,), "must be from 1 to 1,000,000, got 0"),
        ((5, 5), "must be distinct, got 5, 5"),
    ):
        rejects(
            f"k: {message}",
            ranking_metrics,
            np.zeros(3, np.int64),
            np.zeros(3),
            np.zeros(3),
            ks=ks,
        )
    rejects("NaN", gauc, np.zeros(1, np.int64), np.array([np.nan]), np.zeros(1))
    kept = RankingAccumulator()
    rejects(
        "groups: must have one per row, 2, got 3",
        kept.update,
        np.zeros(3, np.int64),
        np.zeros(2),
        np.zeros(2),
    )
    kept.update(np.zeros(1, np.int64), np.array([np.nan]), np.zeros(1))
    rejects("1 of 1 logits are NaN", kept.compute)


# -- Binary metrics match scikit-learn in hard cases, on any number of processes
@st.composite
def two_classes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    count = draw(st.integers(2, 60))
    few = st.sampled_from([-3.5, -1.0, -0.0, 0.0, 1e-40, 0.25, 7.0])  # Many ties
    many = st.floats(-12, 12, width=32)  # scikit-learn's probabilities would round to 1 outside
    logits = draw(hnp.arrays(np.float32, count, elements=draw(st.sampled_from([few, many]))))
    labels = draw(hnp.arrays(np.int64, count, elements=st.integers(0, 1)))
    # Both classes
    labels[0] = 0
    labels[1] = 1
    return logits, labels


@settings(max_examples=150, deadline=None)
@given(two_classes())
def test_binary_metrics_match_scikit_learn(case: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = case
    result = metrics.binary_metrics(logits, labels)
    probability = 1 / (1 + np.exp(-logits.astype(np.float64)))
    rate = labels.mean()
    loss = log_loss(labels, np.stack([1 - probability, probability], 1))
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert result["auroc"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert result["logloss"] == pytest.approx(loss, rel=1e-9)
    assert result["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-9)
    assert result["calibration"] == pytest.approx(probability.sum() / labels.sum(), rel=1e-9)
    bins = np.minimum(15 * probability, 14).astype(int)
    error = np.abs(np.bincount(bins, probability - labels)).sum() / len(labels)
    assert result["expected_calibration_error"] == pytest.approx(error, abs=1e-12)
    assert result["accuracy"] == accuracy_score(labels, logits > 0)
    assert (result["rows"], result["label_rate"]) == (len(labels), pytest.approx(rate))


@given(two_classes())
def test_auroc_matches_fraction_of_ordered_pairs(case: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = case
    positives = logits[labels == 1][:, None]
    negatives = logits[labels == 0][None, :]
    pairs = int(2 * (positives > negatives).sum() + (positives == negatives).sum())
    assert metrics.auroc(logits, labels) == pairs / (2 * positives.size * negatives.size)


def test_calibration_error_auroc_and_logloss_of_extreme_logits() -> None:
    def convert_value(name: str, logits: Any, labels: list[int]) -> float:
        return metrics.binary_metrics(logits, labels)[name]

    error, logloss = (
        partial(convert_value, name) for name in ("expected_calibration_error", "logloss")
    )
    assert (error([-np.inf, np.inf], [0, 1]), error([-np.inf, np.inf], [1, 0])) == (0, 1)
    assert error([0.0, 0.0, 0.0, 0.0], [0, 0, 0, 1]) == pytest.approx(0.25)
    # In fifteen bins, opposite errors do not cancel.
    assert error(np.log([1 / 9, 1 / 9, 9.0, 9.0]), [1, 0, 0, 1]) == pytest.approx(0.4)
    assert math.isnan(error([], []))
    values = [-np.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, np.inf]
    for cut in range(1, len(values)):
        assert metrics.auroc(values, [0] * cut + [1] * (len(values) - cut)) == 1.0
    assert metrics.auroc([-0.0, 0.0], [1, 0]) == 0.5
    assert (logloss([1e30, -1e30], [1, 0]), logloss([1000.0], [0])) == (0.0, 1000.0)
    assert (logloss([np.inf], [1]), logloss([np.inf], [0])) == (0.0, math.inf)
    assert logloss([-100.0], [0]) == pytest.approx(math.exp(-100), rel=1e-12)


def test_undefined_metrics_are_nan_and_invalid_rows_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = np.random.default_rng(1)
    logits = generator.normal(size=1000).round(1)
    labels = generator.integers(0, 2, 1000)
    whole = metrics.binary_metrics(logits, labels)
    monkeypatch.setattr(metrics, "_BLOCK_ROWS", 7)
    blocks = metrics.binary_metrics(logits, labels)
    assert (blocks["auroc"], blocks) == (whole["auroc"], pytest.approx(whole, rel=1e-13))
    negatives = metrics.binary_metrics([1.0, 2.0], [0, 0])
    assert math.isnan(negatives["auroc"])
    assert math.isnan(negatives["calibration"])
    assert math.isnan(negatives["normalized_entropy"])
    assert negatives["logloss"] > 0
    positives = metrics.binary_metrics([1.0, 2.0], [1, 1])
    assert math.isnan(positives["auroc"])
    assert positives["calibration"] < 1
    empty = metrics.binary_metrics([], [])
    assert empty["rows"] == 0
    assert all(math.isnan(value) for name, value in empty.items() if name != "rows")
    rejects("1 of 2 logits are NaN", metrics.auroc, [math.nan, 0.0], [0, 1])
    rejects("labels: must be 0 or 1, got 2 in row 1", metrics.binary_metrics, [0.0, 0.0], [0, 2])
    rejects("got nan in row 0", metrics.binary_metrics, [0.0], [math.nan])
    rejects("labels: must have one per logit", metrics.auroc, [0.0, 0.0], [1])
    code = "import sys, rayrec.metrics.binary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_accumulator_matches_metrics_also_in_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "_BLOCK_ROWS", 16)
    generator = np.random.default_rng(2)
    logits = generator.normal(size=100).astype(np.float32)
    labels = generator.integers(0, 2, 100)
    accumulator = metrics.BinaryMetricsAccumulator()
    for start, stop in [(0, 5), (5, 5), (5, 60), (60, 100)]:
        part = torch.from_numpy(logits[start:stop]).reshape(-1, 1).requires_grad_()
        accumulator.update(part, torch.from_numpy(labels[start:stop]).float())
    assert (accumulator.rows, accumulator.compute()) == (
        100,
        metrics.binary_metrics(logits, labels),
    )
    accumulator = metrics.BinaryMetricsAccumulator()
    accumulator.update(torch.tensor([0.5, -0.5], dtype=torch.bfloat16), torch.tensor([True, False]))
    assert accumulator.compute()["auroc"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_distributed_metrics_match_one_process(world_size: int, tmp_path: Path) -> None:
    run_ranks(metric.metrics_of_ranks, world_size, str(tmp_path))
    loaded = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    assert all(refused for refused, _ in loaded)
    results = [result for _, result in loaded]
    cases = (
        (logits, labels)
        for logits, labels in metric.cases()
        for _ in metric.bounds(len(labels), world_size)
    )
    expected = [metrics.binary_metrics(*case) for case in cases]
    assert len(expected) == len(results[0])
    for index, desired in enumerate(expected):
        for ranks_result in results:
            got = ranks_result[index]
            assert repr(got) == repr(results[0][index])  # Bit-identical on all ranks, including NaN
            for name in ("auroc", "accuracy", "rows", "label_rate"):
                assert repr(got[name]) == repr(desired[name])
            assert got == pytest.approx(desired, rel=1e-12, nan_ok=True)


# -- Intervals contain the true value as often as their confidence; comparisons detect real
# differences only
FEW = Resampling(resamples=200)


def _rows(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return calibrated logits, and labels drawn from them."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(-1, 1.2, rows).astype(np.float32)
    return logits, (generator.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.uint8)


def _delong_by_pairs(models: Any, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (AUROCs, covariance) of several models' logits by DeLong et al. 1988 directly, over
    all pairs of rows.
    """
    order = [
        np.heaviside(row[labels == 1][:, None] - row[labels == 0], 0.5).astype(float)
        for row in models
    ]
    covariance = sum(
        np.cov([each.mean(axis=1 - axis) for each in order]) / order[0].shape[axis]
        for axis in (0, 1)
    )
    return np.array([each.mean() for each in order]), covariance


@pytest.mark.parametrize("decimals", [7, 1, 0])
def test_weighted_metrics_match_repeated_rows(decimals: int) -> None:
    logits, labels = _rows(500)
    logits = logits.round(decimals)
    weights = np.random.default_rng(1).integers(0, 4, 500).astype(np.uint8)
    expected = binary_metrics(np.repeat(logits, weights), np.repeat(labels, weights))
    np.testing.assert_allclose(
        _Model(logits, labels).metrics(weights),
        [expected[name] for name in METRICS],
        rtol=1e-12,
    )


def test_poisson_intervals_contain_true_value_and_shrink() -> None:
    table = _poisson_table()
    assert (len(table), table.mean()) == (65536, pytest.approx(1, abs=5e-5))
    assert table.var() == pytest.approx(1, abs=5e-4)
    # Calibrated scores have calibration 1. About 90 intervals of 100 logs with 400 rows should
    # contain it.
    held = 0
    for seed in range(100):
        low, high = intervals(
            *_rows(400, seed),
            Resampling(confidence=0.9, resamples=100, seed=seed),
        )["calibration"]
        held += low <= 1 <= high
    assert 82 <= held <= 97
    logits, labels = _rows(20_000)
    found = intervals(logits, labels, FEW)
    metrics = binary_metrics(logits, labels)
    assert list(found) == list(METRICS)
    for name, (low, high) in found.items():
        assert low < metrics[name] < high
    low, high = found["auroc"]
    area = metrics["auroc"]
    positives = int(labels.sum())
    # Hanley & McNeil 1982, which is slightly too wide.
    first = area / (2 - area)
    second = 2 * area**2 / (1 + area)
    negatives = len(labels) - positives
    variance = (
        area * (1 - area)
        + (positives - 1) * (first - area**2)
        + (negatives - 1) * (second - area**2)
    )
    assert (high - low) / 2 == pytest.approx(
        1.96 * math.sqrt(variance / positives / negatives),
        rel=0.2,
    )
    small = intervals(logits[:1000], labels[:1000], FEW)
    assert all(high - low < small[name][1] - small[name][0] for name, (low, high) in found.items())


def test_intervals_depend_on_seed_only() -> None:
    rows = _rows(1000)
    assert intervals(*rows, FEW) == intervals(*rows, FEW)
    assert intervals(*rows, FEW) != intervals(*rows, Resampling(resamples=200, seed=1))


@pytest.mark.parametrize("decimals", [7, 1])
def test_auroc_difference_matches_delong(decimals: int) -> None:
    logits, labels = _rows(700)
    others = (logits + np.random.default_rng(2).normal(0, 0.8, 700).astype(np.float32)).round(
        decimals
    )
    aurocs, covariance = _delong_by_pairs((logits, others), labels)
    difference = aurocs[0] - aurocs[1]
    error = math.sqrt(covariance.trace() - 2 * covariance[0, 1])
    found = compare(logits, others, labels, FEW)["auroc"]
    assert (found.method, found.difference) == ("delong", pytest.approx(difference, abs=1e-12))
    assert found.high - found.low == pytest.approx(2 * 1.959964 * error, rel=1e-6)
    assert found.p_value == pytest.approx(math.erfc(difference / error / math.sqrt(2)), rel=1e-9)


def seeded(
    rng: np.random.Generator,
    labels: np.ndarray,
    seeds: int,
    own: float,
    seed_spread: float,
    quality: float,
) -> Any:
    """Logits of each seed: `own` noise of the setting, noise `seed_spread` on rows, and a varying
    `quality`.
    """
    factor = 1 + quality * rng.normal(size=(seeds, 1))
    logits = factor * (2 * labels + own * rng.normal(size=len(labels))) + seed_spread * rng.normal(
        size=(seeds, len(labels))
    )
    return logits.astype(np.float32)


def test_seed_comparison_matches_anova_of_readers() -> None:
    """Obuchowski & Rockette's variance: of seeds, and covariances between seeds of one setting less
    those of two settings.
    """
    rng = np.random.default_rng(0)
    labels = (rng.random(90) < 0.4).astype(np.uint8)
    logits = [seeded(rng, labels, seeds, 2.0, 0.5, 0.1) for seeds in (3, 2)]
    aurocs, covariance = _delong_by_pairs(np.concatenate(logits), labels)
    rows = (
        covariance[[0, 0, 1], [1, 2, 2]].mean() + covariance[3, 4] - 2 * covariance[:3, 3:].mean()
    )
    seed_variances = [aurocs[:3].var(ddof=1) / 3, aurocs[3:].var(ddof=1) / 2]
    variance = sum(seed_variances) + max(0, rows)
    student = stats.t(
        variance**2 / (seed_variances[0] ** 2 / 2 + seed_variances[1] ** 2),
        scale=math.sqrt(variance),
    )
    scores = [SeededScores.from_seeds((row, labels) for row in each) for each in logits]
    found = significance.compare_seeds(*scores, confidence=0.9)
    difference = aurocs[:3].mean() - aurocs[3:].mean()
    assert (found.difference, found.p_value, found.low, found.high) == pytest.approx(
        (
            difference,
            2 * student.sf(abs(difference)),
            difference + student.ppf(0.05),
            difference + student.ppf(0.95),
        ),
        rel=1e-9,
    )
    fixed = [SeededScores.from_seeds([(each[0], labels)] * 2) for each in logits]
    alone = vars(compare(logits[0][0], logits[1][0], labels, FEW)["auroc"])
    assert vars(significance.compare_seeds(*fixed, confidence=0.95)) == pytest.approx(
        {**alone, "method": "seeds"}
    )
    few = SeededScores.from_seeds((row[:29], labels[:29]) for row in logits[0])
    for unknown in (few, SeededScores.from_seeds([(logits[1][0], labels)])):
        assert math.isnan(significance.compare_seeds(unknown, unknown, confidence=0.95).p_value)


@pytest.mark.parametrize(
    "noise",
    [
        (2.0, 0.0, 0.0),
        (0.5, 2.0, 0.0),
        (1.0, 0.5, 0.1),
    ],
)
def test_equal_settings_have_uniform_p_values_over_seeds(noise: tuple[float, float, float]) -> None:
    """Settings that differ at random: by rows, by seeds, or both."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(150):
        labels = (rng.random(300) < 0.3).astype(np.uint8)
        scores = [
            SeededScores.from_seeds((row, labels) for row in seeded(rng, labels, 3, *noise))
            for _ in range(2)
        ]
        found.append(significance.compare_seeds(*scores, confidence=0.95).p_value)
    assert stats.kstest(found, "uniform").pvalue > 0.02
    corrected = significance.holm([0.01, math.nan, 0.04, 0.03, 0.6])
    assert corrected == pytest.approx([0.04, math.nan, 0.09, 0.09, 0.6], nan_ok=True)


def test_compare_detects_worse_but_no_equal_model() -> None:
    logits, labels = _rows(20_000)
    noise = np.random.default_rng(3).normal(0, 0.5, 20_000).astype(np.float32)
    metrics = binary_metrics(logits, labels)
    others = binary_metrics(logits + noise, labels)
    for name, found in compare(logits, logits + noise, labels, FEW).items():
        assert found.difference == pytest.approx(metrics[name] - others[name], rel=1e-9), name
        assert found.low < found.difference < found.high
        if name != "calibration":
            assert found.p_value < 0.01
            assert found.low * found.high > 0
    assert compare(logits, logits + noise, labels, FEW)["auroc"].low > 0
    logits, labels = _rows(5000)
    noise = np.random.default_rng(4).normal(0, 0.3, (40, 2, 5000)).astype(np.float32)
    found = [
        compare(*(logits + each), labels, Resampling(resamples=100))["logloss"].p_value
        for each in noise
    ]
    assert sum(value < 0.1 for value in found) <= 10  # About 4 of 40
    for found in compare(logits, logits, labels, FEW).values():
        assert (found.difference, found.low, found.high, found.p_value) == (0, 0, 0, 1)


def test_single_class_and_invalid_arguments_have_no_intervals() -> None:
    found = intervals(np.tile([0.5, 1.0, 2.0], 10), [0] * 30, FEW)
    assert all(
        map(math.isnan, [*found["auroc"], *found["normalized_entropy"], *found["calibration"]])
    )
    assert found["logloss"][0] < found["logloss"][1]
    differences = compare(np.tile([0.5, 1.0], 15), np.tile([0.0, 2.0], 15), [1] * 30, FEW)
    assert math.isnan(differences["auroc"].p_value)
    assert 0 < differences["logloss"].p_value <= 1
    assert all(map(math.isnan, intervals([], [], FEW)["logloss"]))
    rejects(r"confidence: must be between 0 and 1, .* got 95", Resampling, confidence=95)
    rejects("resamples: must be at least 2, got 1", Resampling, resamples=1)
    rejects("NaN", compare, [0.0, 1.0], [math.nan, 1.0], [0, 1], FEW)
    rejects("labels: must have one per logit", compare, [0.0, 1.0], [1.0], [0, 1], FEW)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("negatives", "positives"),
    [
        (0, 0),
        (0, 1),
        (1, 1),
        (1, 2),
        (12, 12),
        (96, 4),
        (25, 5),
    ],
)
def test_intervals_need_enough_rows_and_positives(negatives: int, positives: int) -> None:
    labels = np.repeat([0, 1], [negatives, positives])
    rows = negatives + positives
    logits = np.linspace(-1, 1, rows)
    found = intervals(logits + 0.5 * labels, labels, FEW)
    differences = compare(logits, -logits, labels, FEW)
    for name, (low, high) in found.items():
        difference = differences[name]
        has_positives = positives >= 5 or name == "logloss"
        numbers = (low, high, difference.low, difference.high, difference.p_value)
        assert [math.isfinite(number) for number in numbers] == [
            rows >= 30 and has_positives
        ] * 5, name
        assert (
            name != "logloss" or rows < 30 or (0 < low < high and difference.low < difference.high)
        )
