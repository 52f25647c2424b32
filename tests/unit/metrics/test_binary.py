"""Binary metrics match scikit-learn in hard cases, and do not depend on the distribution over processes."""

import math
import subprocess
import sys
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
from sklearn.metrics import log_loss, roc_auc_score

from rayrec.metrics import binary as metrics


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    count = draw(st.integers(2, 60))
    few = st.sampled_from([-3.5, -1.0, -0.0, 0.0, 1e-40, 0.25, 7.0])  # Many ties
    many = st.floats(-12, 12, width=32)  # scikit-learn's probabilities would round to 1 outside
    logits = draw(hnp.arrays(np.float32, count, elements=draw(st.sampled_from([few, many]))))
    labels = draw(hnp.arrays(np.int64, count, elements=st.integers(0, 1)))
    labels[0], labels[1] = 0, 1  # Both classes
    return logits, labels


@settings(max_examples=150, deadline=None)
@given(rows())
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
    assert result["expected_calibration_error"] == pytest.approx(_calibration_error(logits, labels, 15), abs=1e-12)
    assert (result["rows"], result["label_rate"]) == (len(labels), pytest.approx(rate))


@settings(max_examples=100, deadline=None)
@given(rows())
def test_auroc_matches_fraction_of_ordered_pairs(case: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = case
    positives, negatives = logits[labels == 1][:, None], logits[labels == 0][None, :]
    pairs = int(2 * (positives > negatives).sum() + (positives == negatives).sum())
    assert metrics.auroc(logits, labels) == pairs / (2 * positives.size * negatives.size)


def _calibration_error(logits: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """Compute the error from its definition, bin by bin."""
    probability = 1 / (1 + np.exp(-logits.astype(np.float32).astype(np.float64)))
    places = np.minimum(np.floor(probability * bins), bins - 1)
    found = [places == place for place in range(bins)]
    return sum(own.mean() * abs(probability[own].mean() - labels[own].mean()) for own in found if own.any())


def test_expected_calibration_error() -> None:
    def error(logits: Any, labels: list[int]) -> float:
        return metrics.binary_metrics(logits, labels)["expected_calibration_error"]

    assert (error([-np.inf, np.inf], [0, 1]), error([-np.inf, np.inf], [1, 0])) == (0, 1)
    assert error([0.0, 0.0, 0.0, 0.0], [0, 0, 0, 1]) == pytest.approx(0.25)
    # In fifteen bins, opposite errors do not cancel.
    assert error(np.log([1 / 9, 1 / 9, 9.0, 9.0]), [1, 0, 0, 1]) == pytest.approx(0.4)
    assert math.isnan(error([], []))


def test_auroc_and_logloss_of_extreme_logits() -> None:
    values = [-np.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, np.inf]
    for cut in range(1, len(values)):
        assert metrics.auroc(values, [0] * cut + [1] * (len(values) - cut)) == 1.0
    assert metrics.auroc([-0.0, 0.0], [1, 0]) == 0.5

    def logloss(logits: list[float], labels: list[int]) -> float:
        return metrics.binary_metrics(logits, labels)["logloss"]

    assert (logloss([1e30, -1e30], [1, 0]), logloss([1000.0], [0])) == (0.0, 1000.0)
    assert (logloss([np.inf], [1]), logloss([np.inf], [0])) == (0.0, math.inf)
    assert logloss([-100.0], [0]) == pytest.approx(math.exp(-100), rel=1e-12)


def test_block_size_does_not_change_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    logits, labels = generator.normal(size=1000).round(1), generator.integers(0, 2, 1000)
    whole = metrics.binary_metrics(logits, labels)
    monkeypatch.setattr(metrics, "_BLOCK_ROWS", 7)
    blocks = metrics.binary_metrics(logits, labels)
    assert (blocks["auroc"], blocks) == (whole["auroc"], pytest.approx(whole, rel=1e-13))


def test_undefined_metrics_are_nan() -> None:
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


def test_binary_metrics_reject_invalid_rows() -> None:
    rejects("1 of 2 logits are NaN", metrics.auroc, [math.nan, 0.0], [0, 1])
    rejects("labels: must be 0 or 1, got 2 in row 1", metrics.binary_metrics, [0.0, 0.0], [0, 2])
    rejects("got nan in row 0", metrics.binary_metrics, [0.0], [math.nan])
    rejects("labels: must have one per logit", metrics.auroc, [0.0, 0.0], [1])


def test_metrics_do_not_import_torch() -> None:
    code = "import sys, rayrec.metrics.binary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_accumulator_matches_binary_metrics_also_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_BLOCK_ROWS", 16)
    generator = np.random.default_rng(2)
    logits, labels = generator.normal(size=100).astype(np.float32), generator.integers(0, 2, 100)
    accumulator = metrics.BinaryMetricsAccumulator()
    for start, stop in [(0, 5), (5, 5), (5, 60), (60, 100)]:
        part = torch.from_numpy(logits[start:stop]).reshape(-1, 1).requires_grad_()
        accumulator.update(part, torch.from_numpy(labels[start:stop]).float())
    assert (accumulator.rows, accumulator.compute()) == (100, metrics.binary_metrics(logits, labels))
    accumulator.update(torch.tensor([0.5, -0.5], dtype=torch.bfloat16), torch.tensor([True, False]))
    assert accumulator.compute()["auroc"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_distributed_metrics_match_one_process(world_size: int, tmp_path: Path) -> None:
    run_ranks(metric.metrics_of_ranks, world_size, str(tmp_path))
    loaded = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    assert all(refused for refused, _ in loaded)
    results = [result for _, result in loaded]
    cases = ((logits, labels) for logits, labels in metric.cases() for _ in metric.bounds(len(labels), world_size))
    expected = [metrics.binary_metrics(*case) for case in cases]
    assert len(expected) == len(results[0])
    for index, wanted in enumerate(expected):
        for ranks_result in results:
            got = ranks_result[index]
            assert repr(got) == repr(results[0][index])  # Bit-identical on all ranks, including NaN
            for name in ("auroc", "rows", "label_rate"):
                assert repr(got[name]) == repr(wanted[name])
            assert got == pytest.approx(wanted, rel=1e-12, nan_ok=True)
