"""Metrics of binary labels. Evaluations, intervals, comparisons, tables and reports read this list:
a new metric is one entry here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

Number = float | np.float64


@dataclass(frozen=True)
class Rows:
    """Scored rows, [rows] each."""

    logits: npt.NDArray[np.float32]
    labels: npt.NDArray[np.uint8]
    losses: npt.NDArray[np.float64]
    """Binary cross entropies in nats."""
    probabilities: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Totals:
    """Sums over all rows, or over the weighted rows of a resample. Divisors are NaN instead of 0 if
    all rows count once.
    """

    rows: Number
    positives: Number
    auroc: Number
    entropy: Number
    """Entropy of the label rate in nats, NaN or 0 with only one class."""
    sums: Mapping[str, Number]
    """Sum of each metric's `row_values`, by the metric's name."""
    bin_gaps: Number = math.nan
    """Sum of |probability - label| over the calibration bins. NaN in a resample."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Metric of a binary label."""

    name: str
    compute: Callable[[Totals], Number]
    row_values: Callable[[Rows], npt.NDArray[Any]] | None = None
    """Function from rows to the values that `Totals.sums` adds, [rows]."""
    better: Literal["higher", "lower"] | None = None
    """Direction of improvement. None has no direction, such as for a ratio."""
    has_interval: bool = False
    """Whether it has bootstrap intervals, significance tests, and columns in all tables."""
    needs_both_classes: bool = False
    """Whether an interval needs several rows of each class."""


BINARY_METRICS: Final = (
    # Area under the ROC curve, see `metrics.binary.auroc`. NaN with only one class.
    Metric(
        name="auroc",
        compute=lambda totals: totals.auroc,
        better="higher",
        has_interval=True,
        needs_both_classes=True,
    ),
    # Mean binary cross entropy in nats, from float32 logits without overflow, in float64.
    Metric(
        name="logloss",
        compute=lambda totals: totals.sums["logloss"] / totals.rows,
        row_values=lambda rows: rows.losses,
        better="lower",
        has_interval=True,
    ),
    # Log loss divided by the entropy of the label rate, so that below 1 is better than always
    # predicting the rate (He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at
    # Facebook", section 3). NaN with only one class, whose entropy is 0.
    Metric(
        name="normalized_entropy",
        compute=lambda totals: totals.sums["logloss"] / totals.rows / totals.entropy,
        better="lower",
        has_interval=True,
        needs_both_classes=True,
    ),
    # Sum of probabilities divided by the sum of labels, 1 if calibrated (He et al. 2014). NaN
    # without positives.
    Metric(
        name="calibration",
        compute=lambda totals: totals.sums["calibration"] / totals.positives,
        row_values=lambda rows: rows.probabilities,
        has_interval=True,
        needs_both_classes=True,
    ),
    # Row mean of |mean probability - label rate| in the row's bin, among CALIBRATION_BINS bins with
    # equal widths, 0 if calibrated (Naeini et al. 2015).
    Metric(name="expected_calibration_error", compute=lambda totals: totals.bin_gaps / totals.rows),
    # Share of rows whose label the threshold 0.5 of the probability predicts. 0.5 itself predicts
    # 0.
    Metric(
        name="accuracy",
        compute=lambda totals: totals.sums["accuracy"] / totals.rows,
        row_values=lambda rows: (rows.logits > 0) == (rows.labels == 1),
        better="higher",
    ),
)
"""All metrics, in the order of reports."""
