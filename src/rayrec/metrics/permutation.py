"""Loss of quality when a feature is permuted, with intervals (Breiman 2001, "Random Forests",
section 10; Fisher, Rudin & Dominici 2019, "All Models are Wrong, but Many are Useful").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from rayrec.metrics.binary import checked
from rayrec.metrics.significance import MIN_ROWS, Placements, auroc_placements, placement_variance

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class QualityLoss:
    """Mean loss over the permutations of a feature. NaN if undefined.

    Positive if the feature helps the model. A loss below 0 is chance, or a feature that misleads
    the model on these rows.
    """

    loss: float
    low: float
    high: float
    """Confidence interval of the loss, [low, high]."""


# Two variances are added: that of the rows, as if others had been drawn, and that of a mean over
# few permutations.
def _with_interval(losses: Sequence[float], variance: float, confidence: float) -> QualityLoss:
    """Return the mean loss and its normal interval.

    Args:
        losses: Loss of each permutation.
        variance: Variance of the mean loss over draws of the rows, for these permutations.
        confidence: Share of all similar rows whose interval contains the true loss.
    """
    mean = float(np.mean(losses))
    if len(losses) > 1:
        variance += float(np.var(losses, ddof=1)) / len(losses)
    width = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(variance)
    return QualityLoss(mean, mean - width, mean + width)


def auroc_loss(
    logits: Any, permuted: Sequence[Any], labels: Any, *, confidence: float
) -> QualityLoss:
    """Return the drop of the AUROC. NaN if all rows have one label.

    The AUROC is a mean of placements. So the mean AUROC over permutations comes from each row's
    mean placement. The variance over rows is therefore DeLong's for two models, if the second one
    has these mean placements (see `rayrec.metrics.significance.compare_models`).

    Args:
        logits: Logits of the rows as they are, [rows].
        permuted: Logits for each permutation, [rows] each.
        labels: Labels of the rows, 0 or 1, [rows].
        confidence: Confidence level of the interval, such as 0.95.
    """
    checked_logits, checked_labels = checked(logits, labels)
    before = auroc_placements(checked_logits, checked_labels)
    if not min(map(len, before)):
        return QualityLoss(math.nan, math.nan, math.nan)
    losses = []
    total: Placements = (np.zeros_like(before[0]), np.zeros_like(before[1]))
    for values in permuted:
        after = auroc_placements(checked(values, labels)[0], checked_labels)
        losses.append(float(np.mean(before[0]) - np.mean(after[0])))
        total = (total[0] + after[0], total[1] + after[1])
    changes = (before[0] - total[0] / len(losses), before[1] - total[1] / len(losses))
    return _with_interval(losses, placement_variance(changes), confidence)


def mean_loss(values: Array, permuted: Sequence[Array], *, confidence: float) -> QualityLoss:
    """Return the increase of a mean of row values, such as log losses. NaN without rows, and an
    interval of NaN with fewer than `MIN_ROWS`.

    Rows are paired: each has a mean change over the permutations, so that its difficulty cancels.
    The variance over rows is the variance of these changes, divided by the row count.

    Args:
        values: Value of each row, float64 [rows]. NaN excludes a row.
        permuted: Values for each permutation, float64 [rows] each. NaN in one excludes a row.
        confidence: Confidence level of the interval, such as 0.95.
    """
    changes = np.stack([each - values for each in permuted])
    changes = changes[:, ~np.isnan(changes).any(axis=0)]
    rows = changes.shape[1]
    if not rows:
        return QualityLoss(math.nan, math.nan, math.nan)
    variance = math.nan if rows < MIN_ROWS else float(np.var(changes.mean(axis=0), ddof=1)) / rows
    return _with_interval(changes.mean(axis=1).tolist(), variance, confidence)
