"""Tests of evaluation reports over batches and reserved ids."""

import numpy as np
import pytest
import torch

from rayrec.batch import Batch, StepOutput
from rayrec.data.encoding.rules import SparseColumn
from rayrec.ingest.batches import sparse_features
from rayrec.models.heads import label_heads
from rayrec.workloads.recsys.evaluation import EvaluationCounts, counted_columns, reliability_bins

KEYS = ("colour", "size", "hashed")
ONE_ID = SparseColumn(num_embeddings=10, num_tokens=9, first_id=1, unknown_id=0, missing_id=0)
COLUMNS = (SparseColumn(num_embeddings=10, num_tokens=8), ONE_ID, SparseColumn(num_embeddings=10, num_tokens=None))


def batch(ids: np.ndarray) -> Batch:
    rows, features = ids.shape[1], sparse_features(KEYS[: len(ids)], list(ids), ids.shape[1])
    return Batch({"dense": torch.zeros(rows, 0)}, 1.0, features, {"label": torch.zeros(rows)})


def evaluated(counts: EvaluationCounts, name: str, ids: np.ndarray, logits: np.ndarray, labels: np.ndarray) -> None:
    metrics = counts.make_metrics()
    for place, one in enumerate(counts.counted(name, iter([batch(ids[:, :30]), batch(ids[:, 30:])]))):
        part = slice(0, 30) if place == 0 else slice(30, None)
        assert len(one) == len(labels[part])
        predicted, expected = ({"label": torch.tensor(values[part])} for values in (logits, labels))
        metrics.update(StepOutput(torch.tensor(0.0), predicted, expected))
    assert metrics.compute()["rows"] == len(labels)


def test_counts_show_last_evaluation_only() -> None:
    random = np.random.default_rng(0)
    counts = EvaluationCounts(counted_columns(KEYS, COLUMNS, expanded=False), label_heads("label"))
    assert counts.shown() == []
    for name in ("validation", "test"):
        ids = random.integers(0, 10, (3, 100)).astype(np.int32)
        logits = random.normal(size=100).astype(np.float32)
        labels = (random.random(100) < 0.3).astype(np.float32)
        evaluated(counts, name, ids, logits, labels)
    reliability, categories = counts.shown()
    assert (reliability["kind"], reliability["set"], categories["set"]) == ("reliability", "test", "test")
    bins = reliability["bins"]
    assert sum(group["rows"] for group in bins) == 100
    assert sum(group["rows"] * group["observed"] for group in bins) == pytest.approx(labels.sum())
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert sum(group["rows"] * group["predicted"] for group in bins) == pytest.approx(probabilities.sum())
    predicted = [group["predicted"] for group in bins]
    assert predicted == sorted(predicted)
    told = {column["column"]: (column["unknown"], column["missing"]) for column in categories["columns"]}
    assert told["colour"] == (np.mean(ids[0] == 0), np.mean(ids[0] == 1))
    assert told["size"] == (None, None)  # one id for both
    assert told["hashed"] == (None, np.mean(ids[2] == 1))


def test_wrapped_ids_report_no_unknown() -> None:
    counts = EvaluationCounts({"colour": SparseColumn(num_embeddings=10, num_tokens=9)}, label_heads("label"))
    metrics, logits = counts.make_metrics(), torch.tensor([-40.0, 0.0, 0.0, 40.0])
    for _ in counts.counted("test", iter([batch(np.zeros((1, 4), np.int32))])):
        metrics.update(StepOutput(torch.tensor(0.0), {"label": logits}, {"label": torch.ones(4)}))
    _, categories = counts.shown()
    assert categories["columns"][0]["unknown"] is None


def test_expanded_ids_are_not_counted() -> None:
    assert counted_columns(KEYS, COLUMNS, expanded=True) == {}


def test_reliability_bins_have_equal_rows() -> None:
    by_logit = np.zeros((3, 512))
    by_logit[0] = 100
    by_logit[2] = np.linspace(0, 100, 512)
    bins = reliability_bins(by_logit)
    assert len(bins) == 15
    assert max(group["rows"] for group in bins) - min(group["rows"] for group in bins) <= 100
