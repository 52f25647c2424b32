"""Logistic regression on hashed categories and standardised logarithms: the model to beat on small
logs.
"""

import gzip
from collections.abc import Sequence

import numpy as np
from scipy import sparse
from sklearn.feature_extraction import FeatureHasher
from sklearn.linear_model import LogisticRegression

from rayrec.metrics.binary import binary_metrics


def read(path: str) -> list[list[str]]:
    opened = gzip.open(path, "rt") if path.endswith(".gz") else open(path)  # noqa: SIM115
    with opened as file:
        return [line.rstrip("\n").split("\t") for line in file]


def fit_and_score(
    rows: Sequence[Sequence[str]], train: int, validation: int, strengths: Sequence[float]
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Train on rows [0, train) for every strength C, and return the one with the best validation
    AUROC, with the metrics of rows [train, validation) and [validation, end).
    """
    labels = np.array([float(row[0]) for row in rows], np.float32)
    dense = np.array(
        [
            [0.0 if v == "" else np.sign(int(v)) * np.log1p(abs(int(v))) for v in row[1:14]]
            for row in rows
        ]
    )
    dense = (dense - dense[:train].mean(axis=0)) / (dense[:train].std(axis=0) + 1e-9)
    tokens = [[f"{column}={token}" for column, token in enumerate(row[14:])] for row in rows]
    hashed = FeatureHasher(2**18, input_type="string").transform(tokens)
    features = sparse.hstack([hashed, dense]).tocsr()
    best = None
    for strength in strengths:
        model = LogisticRegression(C=strength, max_iter=500).fit(features[:train], labels[:train])
        logits = model.decision_function(features[train:]).astype(np.float32)
        validation_logits = logits[: validation - train]
        test = logits[validation - train :]
        result = (
            strength,
            binary_metrics(validation_logits, labels[train:validation]),
            binary_metrics(test, labels[validation:]),
        )
        if best is None or result[1]["auroc"] > best[1]["auroc"]:
            best = result
    assert best is not None
    return best
