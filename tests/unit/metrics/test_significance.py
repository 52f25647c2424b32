"""Intervals contain the true value as often as their confidence, and comparisons detect real differences only."""

import math

import numpy as np
import pytest
from builders.faults import rejects

from rayrec.metrics.binary import binary_metrics
from rayrec.metrics.significance import METRICS, Resampling, _Model, _poisson_table, compare, intervals

FEW = Resampling(resamples=200)


def _rows(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return calibrated logits, and labels drawn from them."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(-1, 1.2, rows).astype(np.float32)
    return logits, (generator.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.uint8)


def _delong_by_pairs(logits: np.ndarray, others: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return (difference, standard error) by DeLong et al. 1988 directly, over all pairs of rows."""
    placed = []
    for values in (logits, others):
        positives, negatives = values[labels == 1][:, None], values[labels == 0][None, :]
        right = (positives > negatives) + 0.5 * (positives == negatives)
        placed.append((right.mean(axis=1), right.mean(axis=0)))
    (first_positives, first_negatives), (second_positives, second_negatives) = placed
    covariance = np.cov(first_positives, second_positives) / len(first_positives)
    covariance += np.cov(first_negatives, second_negatives) / len(first_negatives)
    contrast = np.array([1, -1])
    return float(first_positives.mean() - second_positives.mean()), math.sqrt(contrast @ covariance @ contrast)


@pytest.mark.parametrize("decimals", [7, 1, 0])
def test_weighted_metrics_match_repeated_rows(decimals: int) -> None:
    logits, labels = _rows(500)
    logits = logits.round(decimals)
    weights = np.random.default_rng(1).integers(0, 4, 500).astype(np.uint8)
    expected = binary_metrics(np.repeat(logits, weights), np.repeat(labels, weights))
    np.testing.assert_allclose(_Model(logits, labels).metrics(weights), [expected[name] for name in METRICS], rtol=1e-12)


def test_resamples_match_poisson_distribution() -> None:
    table = _poisson_table()
    assert (len(table), table.mean()) == (65536, pytest.approx(1, abs=5e-5))
    assert table.var() == pytest.approx(1, abs=5e-4)


def test_intervals_contain_true_value() -> None:
    """Calibrated scores have calibration 1. About 90 intervals of 100 logs with 400 rows should contain it."""
    held = 0
    for seed in range(100):
        low, high = intervals(*_rows(400, seed), Resampling(confidence=0.9, resamples=100, seed=seed))["calibration"]
        held += low <= 1 <= high
    assert 82 <= held <= 97


def test_intervals_shrink_with_rows_and_contain_metric() -> None:
    logits, labels = _rows(20_000)
    found = intervals(logits, labels, FEW)
    metrics = binary_metrics(logits, labels)
    assert list(found) == list(METRICS)
    for name, (low, high) in found.items():
        assert low < metrics[name] < high
    low, high = found["auroc"]
    area, positives = metrics["auroc"], int(labels.sum())
    # Hanley & McNeil 1982, which is slightly too wide.
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    negatives = len(labels) - positives
    variance = area * (1 - area) + (positives - 1) * (first - area**2) + (negatives - 1) * (second - area**2)
    assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(variance / positives / negatives), rel=0.2)
    small = intervals(logits[:1000], labels[:1000], FEW)
    assert all(high - low < small[name][1] - small[name][0] for name, (low, high) in found.items())


def test_intervals_depend_on_seed_only() -> None:
    rows = _rows(1000)
    assert intervals(*rows, FEW) == intervals(*rows, FEW)
    assert intervals(*rows, FEW) != intervals(*rows, Resampling(resamples=200, seed=1))


@pytest.mark.parametrize("decimals", [7, 1])
def test_auroc_difference_matches_delong(decimals: int) -> None:
    logits, labels = _rows(700)
    others = (logits + np.random.default_rng(2).normal(0, 0.8, 700).astype(np.float32)).round(decimals)
    difference, error = _delong_by_pairs(logits, others, labels)
    found = compare(logits, others, labels, FEW)["auroc"]
    assert (found.method, found.difference) == ("delong", pytest.approx(difference, abs=1e-12))
    assert found.high - found.low == pytest.approx(2 * 1.959964 * error, rel=1e-6)
    assert found.p_value == pytest.approx(math.erfc(difference / error / math.sqrt(2)), rel=1e-9)


def test_compare_detects_worse_model() -> None:
    logits, labels = _rows(20_000)
    noise = np.random.default_rng(3).normal(0, 0.5, 20_000).astype(np.float32)
    metrics, others = binary_metrics(logits, labels), binary_metrics(logits + noise, labels)
    for name, found in compare(logits, logits + noise, labels, FEW).items():
        assert found.difference == pytest.approx(metrics[name] - others[name], rel=1e-9), name
        assert found.low < found.difference < found.high
        if name != "calibration":
            assert found.p_value < 0.01
            assert found.low * found.high > 0
    assert compare(logits, logits + noise, labels, FEW)["auroc"].low > 0


def test_compare_finds_no_difference_of_equal_models() -> None:
    logits, labels = _rows(5000)
    noise = np.random.default_rng(4).normal(0, 0.3, (40, 2, 5000)).astype(np.float32)
    found = [compare(*(logits + each), labels, Resampling(resamples=100))["logloss"].p_value for each in noise]
    assert sum(value < 0.1 for value in found) <= 10  # About 4 of 40
    for found in compare(logits, logits, labels, FEW).values():
        assert (found.difference, found.low, found.high, found.p_value) == (0, 0, 0, 1)


def test_single_class_has_no_intervals() -> None:
    found = intervals(np.tile([0.5, 1.0, 2.0], 10), [0] * 30, FEW)
    assert all(map(math.isnan, [*found["auroc"], *found["normalized_entropy"], *found["calibration"]]))
    assert found["logloss"][0] < found["logloss"][1]
    differences = compare(np.tile([0.5, 1.0], 15), np.tile([0.0, 2.0], 15), [1] * 30, FEW)
    assert math.isnan(differences["auroc"].p_value)
    assert 0 < differences["logloss"].p_value <= 1
    assert all(map(math.isnan, intervals([], [], FEW)["logloss"]))


def test_significance_rejects_invalid_arguments() -> None:
    rejects(r"confidence: must be between 0 and 1, .* got 95", Resampling, confidence=95)
    rejects("resamples: must be at least 2, got 1", Resampling, resamples=1)
    rejects("NaN", compare, [0.0, 1.0], [math.nan, 1.0], [0, 1], FEW)
    rejects("labels: must have one per logit", compare, [0.0, 1.0], [1.0], [0, 1], FEW)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("labels", [[], [1], [0, 1], [0, 1, 1], [0] * 12 + [1] * 12])
def test_few_rows_return_no_intervals_without_warning(labels: list[int]) -> None:
    logits = np.linspace(-1, 1, len(labels))
    assert all(math.isnan(end) for ends in intervals(logits, labels, FEW).values() for end in ends)
    for difference in compare(logits, -logits, labels, FEW).values():
        assert all(map(math.isnan, (difference.low, difference.high, difference.p_value)))


@pytest.mark.filterwarnings("error")
def test_few_positives_return_logloss_interval_only() -> None:
    labels, logits = np.repeat([0, 1], [96, 4]), np.linspace(-1, 1, 100)
    found, differences = intervals(logits, labels, FEW), compare(logits, -logits, labels, FEW)
    assert found["logloss"][0] < found["logloss"][1]
    assert differences["logloss"].low < differences["logloss"].high
    for name in ("auroc", "normalized_entropy", "calibration"):
        assert all(map(math.isnan, (*found[name], differences[name].low, differences[name].p_value)))


def test_enough_rows_return_intervals() -> None:
    labels = np.repeat([0, 1], [25, 5])
    low, high = intervals(np.linspace(-1, 1, 30) + labels * 0.5, labels, FEW)["logloss"]
    assert 0 < low < high
