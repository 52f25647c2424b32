"""Losses of quality by permutation, and their intervals."""

import math

import numpy as np
import pytest

from rayrec.metrics.binary import binary_metrics
from rayrec.metrics.permutation import auroc_loss, mean_loss
from rayrec.metrics.significance import Resampling, compare


def _rows(rows: int, seed: int = 0) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Return logits, logits of three permutations, and labels that follow the logits."""
    rng = np.random.default_rng(seed)
    known = rng.normal(size=rows)
    other = rng.normal(size=rows)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-known - other))).astype(np.float32)
    permuted = [known[rng.permutation(rows)] + other for _ in range(3)]
    return known + other, permuted, labels


def test_auroc_loss_is_mean_over_permutations() -> None:
    logits, permuted, labels = _rows(2000)
    aurocs = [binary_metrics(each, labels)["auroc"] for each in permuted]
    loss = auroc_loss(logits, permuted, labels, confidence=0.95)
    assert loss.loss == pytest.approx(binary_metrics(logits, labels)["auroc"] - np.mean(aurocs))
    assert loss.loss > 0.05
    assert loss.low < loss.loss < loss.high


def test_interval_of_one_permutation_is_delongs() -> None:
    logits, permuted, labels = _rows(2000)
    loss = auroc_loss(logits, permuted[:1], labels, confidence=0.9)
    expected = compare(logits, permuted[0], labels, Resampling(confidence=0.9, resamples=2))
    assert (loss.low, loss.high) == pytest.approx((expected["auroc"].low, expected["auroc"].high))


def test_intervals_contain_true_loss() -> None:
    true = auroc_loss(*_rows(100_000, seed=99), confidence=0.9).loss
    losses = [auroc_loss(*_rows(400, seed), confidence=0.9) for seed in range(200)]
    assert 0.82 < np.mean([loss.low < true < loss.high for loss in losses]) < 0.97


def test_mean_loss_excludes_rows_without_value() -> None:
    rng = np.random.default_rng(0)
    values = rng.random(100)
    permuted = [values + 1, values + 3]
    permuted[0][:50] = math.nan
    loss = mean_loss(values, permuted, confidence=0.95)
    assert loss.loss == pytest.approx(2)
    assert loss.high - loss.low == pytest.approx(2 * 1.959964, rel=1e-5)  # Deviation 1


def test_unchanged_scores_have_zero_loss() -> None:
    logits, _, labels = _rows(500)
    same = auroc_loss(logits, [logits, logits], labels, confidence=0.95)
    assert (same.loss, same.low, same.high) == (0, 0, 0)


def test_single_class_has_no_loss() -> None:
    loss = auroc_loss(np.arange(50.0), [np.arange(50.0)], np.ones(50), confidence=0.95)
    assert math.isnan(loss.loss)
