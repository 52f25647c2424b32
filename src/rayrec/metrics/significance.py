"""Uncertainty of a model's metrics: bootstrap intervals, and significance tests between
models on the same rows.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final, Literal, Self, final

import numpy as np
import numpy.typing as npt

from rayrec.config import InputError
from rayrec.metrics.binary import Floats, Labels, checked, row_losses
from rayrec.metrics.registry import BINARY_METRICS, Rows, Totals

_METRICS = tuple(metric for metric in BINARY_METRICS if metric.has_interval)
METRICS = tuple(metric.name for metric in _METRICS)
"""Names of the metrics with intervals, in this order."""

Array = npt.NDArray[np.float64]
Placements = tuple[Array, Array]
"""Share of the other class that each row is ordered correctly with, or its difference between
models: positives, negatives.
"""
Method = Literal["delong", "bootstrap", "seeds"]

MIN_ROWS: Final = 30
"""Minimum row count for intervals and p-values. Resampling fewer rows repeats few values and
underestimates the variation.
"""
MIN_CLASS_ROWS: Final = 5
"""Minimum row count of each class for the intervals of metrics that need both classes."""

_ROW_BYTES: Final = 32
"""Working memory of a resample per row, in bytes."""
_WORKING_BYTES: Final = 4 << 30
"""Maximum working memory of concurrent resamples, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """Settings of bootstrap intervals."""

    confidence: float = 0.95
    """Share of all similar logs whose interval contains the true value."""
    resamples: int = 1000
    """Number of bootstrap resamples."""
    seed: int = 0
    """Seed of the resamples. Results do not depend on the number of cores."""

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise InputError(
                f"confidence: must be between 0 and 1, such as 0.95, got {self.confidence}"
            )
        if self.resamples < 2:
            raise InputError(
                f"resamples: must be at least 2, got {self.resamples}. 1000 yield intervals of "
                "two digits."
            )


@dataclass(frozen=True)
class Difference:
    """Difference of a metric between two models on the same rows: first minus second."""

    difference: float
    low: float
    high: float
    """Confidence interval of the difference, [low, high]."""
    p_value: float
    """Two-sided probability of a difference this large between equal models."""
    method: Method

    def reversed(self) -> Difference:
        """Return the difference second minus first."""
        # 0 - x instead of -x avoids -0
        return replace(self, difference=0 - self.difference, low=0 - self.high, high=0 - self.low)


def intervals(logits: Any, labels: Any, resampling: Resampling) -> dict[str, tuple[float, float]]:
    """Return the percentile bootstrap interval (low, high) of each of METRICS. Arguments as in
    `metrics.binary_metrics`. NaN for undefined metrics and with too few rows (MIN_ROWS,
    MIN_CLASS_ROWS). A resample weights each row by a Poisson(1) number, which for some hundred rows
    or more is equivalent to drawing rows with replacement (Chamandy et al. 2012, "Estimating
    Uncertainty for Massive Data Streams"), and its metrics are exact. It takes 20 ns per row and
    core. Resamples run on all cores, limited to 4 GiB, 32 bytes per row each. In addition, 40 bytes
    per row. Method: Efron & Tibshirani 1993, chapter 13.
    """
    return compare_models([logits], labels, resampling).intervals[0]


def compare(
    logits: Any,
    other_logits: Any,
    labels: Any,
    resampling: Resampling,
) -> dict[str, Difference]:
    """Compare two models on the same rows with `compare_models`. NaN for undefined metrics and, as
    in `intervals`, too few rows.
    """
    return compare_models([logits, other_logits], labels, resampling).differences[0, 1]


@dataclass(frozen=True)
class Comparison:
    """Comparison of several models on the same rows."""

    intervals: list[dict[str, tuple[float, float]]]
    """Result of `intervals` for each model."""
    differences: dict[tuple[int, int], dict[str, Difference]]
    """Difference of each metric by model indices (i, j), i < j: first minus second."""


def compare_models(models: Sequence[Any], labels: Any, resampling: Resampling) -> Comparison:
    """Return the intervals of each model's metrics and the significance of differences between all
    pairs, on the same rows. `models` contains the logits of each model, [rows]. `labels` as in
    `metrics.binary_metrics`. AUROC uses DeLong, DeLong & Clarke-Pearson 1988 ("Comparing the Areas
    under Two or More Correlated Receiver Operating Characteristic Curves"), computed by ranks as in
    Sun & Xu 2014. Other metrics use the bootstrap of `intervals` with equal weights for all models,
    so that the difficulty of rows cancels. Memory: about 70 bytes per row and model, and 32 per row
    and concurrent resample.
    """
    checked_models = [checked(logits, labels) for logits in models]
    flat_labels = checked_models[0][1]
    sorted_models = [_Model(flat_logits, flat_labels) for flat_logits, _ in checked_models]
    ones = np.ones(len(flat_labels), np.uint8)
    observed = [model.metrics(ones) for model in sorted_models]
    few = _too_few(flat_labels)
    if few == METRICS:
        resampled = np.full((1, len(sorted_models), len(METRICS)), math.nan)
    else:
        resampled = _resampled(sorted_models, resampling)
    resampled[:, :, [METRICS.index(name) for name in few]] = math.nan
    placements = [] if "auroc" in few else [model.placements() for model in sorted_models]
    differences = {}
    for one, other in itertools.combinations(range(len(sorted_models)), 2):
        pair = {}
        for number, name in enumerate(METRICS):
            if name == "auroc" and placements:
                pair[name] = _delong(placements[one], placements[other], resampling.confidence)
                continue
            difference = float(observed[one][number] - observed[other][number])
            resampled_difference = resampled[:, one, number] - resampled[:, other, number]
            low, high = _percentiles(resampled_difference, resampling.confidence)
            method: Method = "delong" if name == "auroc" else "bootstrap"
            pair[name] = Difference(
                difference,
                low,
                high,
                _bootstrap_p_value(resampled_difference),
                method,
            )
        differences[one, other] = pair
    model_intervals = [
        {
            name: _percentiles(resampled[:, index, number], resampling.confidence)
            for number, name in enumerate(METRICS)
        }
        for index in range(len(sorted_models))
    ]
    return Comparison(model_intervals, differences)


def _too_few(labels: Labels) -> tuple[str, ...]:
    """Return the metrics for which there are too few rows."""
    positives = int(np.count_nonzero(labels))
    if len(labels) < MIN_ROWS:
        return METRICS
    too_few = min(positives, len(labels) - positives) < MIN_CLASS_ROWS
    return tuple(metric.name for metric in _METRICS if metric.needs_both_classes and too_few)


# A resample only changes weights, so the order by logit is computed once. Its AUROC is then two
# cumulative sums.
@final
class _Model:
    """Rows of one model, sorted once for all resamples."""

    def __init__(self, logits: Floats, labels: Labels) -> None:
        self.rows = len(labels)
        rows = Rows(logits, labels, *row_losses(logits, labels))
        self._row_values = {
            metric.name: metric.row_values(rows).astype(np.float64, copy=False)
            for metric in _METRICS
            if metric.row_values
        }
        is_positive = labels.astype(bool)
        self.positives, sorted_positives = _sorted_rows(logits, np.flatnonzero(is_positive))
        self.negatives, sorted_negatives = _sorted_rows(logits, np.flatnonzero(~is_positive))
        self.below, self.upto = _count_below(sorted_negatives, sorted_positives)
        """Number of negatives below, and not above, each positive, int64 [positives]."""
        self._sorted = sorted_negatives, sorted_positives

    def metrics(self, weights: npt.NDArray[np.uint8]) -> Array:
        """Return METRICS of the rows with these weights. Ties count one half."""
        positives = weights[self.positives].astype(np.float64)
        negatives_upto = np.concatenate(
            [[0.0], np.cumsum(weights[self.negatives], dtype=np.float64)]
        )
        num_positives = float(positives.sum())
        num_negatives = float(negatives_upto[-1])
        ranks = negatives_upto[self.below] + negatives_upto[self.upto]
        with np.errstate(invalid="ignore", divide="ignore"):
            auroc = _product(positives, ranks) / (2 * np.float64(num_positives) * num_negatives)
            all_weights = weights.astype(np.float64)
            rows = np.float64(num_positives + num_negatives)
            rate = num_positives / rows
            totals = Totals(
                rows=rows,
                positives=np.float64(num_positives),
                auroc=auroc,
                entropy=-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)),
                sums={
                    name: _product(all_weights, values) for name, values in self._row_values.items()
                },
            )
            return np.array([metric.compute(totals) for metric in _METRICS])

    def placements(self) -> Placements:
        """Return the placements in row order: for positives the negatives below, for negatives the
        positives above. Ties count one half.
        """
        sorted_negatives, sorted_positives = self._sorted
        positive_placements = _unsorted(
            self.positives,
            (self.below + self.upto) / (2 * max(1, len(self.negatives))),
        )
        below, upto = _count_below(sorted_positives, sorted_negatives)
        num_positives = max(1, len(self.positives))
        return positive_placements, _unsorted(
            self.negatives,
            1 - (below + upto) / (2 * num_positives),
        )


def auroc_placements(logits: Floats, labels: Labels) -> Placements:
    """Return the placements of rows. Their mean in either class is the AUROC."""
    return _Model(logits, labels).placements()


def _product(first: Array, second: Array) -> np.float64:
    # Not np.dot: BLAS would use separate threads, which slow these down, and sum in another order.
    return np.float64(np.einsum("i,i->", first, second))


def _sorted_rows(
    logits: Floats,
    rows: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return the rows by ascending logit, and these logits."""
    order = rows[np.argsort(logits[rows], kind="stable")]
    return order, logits[order]


def _count_below(
    sorted_values: Floats,
    values: Floats,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the number of `sorted_values` below, and not above, each of the sorted `values`."""
    return np.searchsorted(sorted_values, values, side="left"), np.searchsorted(
        sorted_values,
        values,
        side="right",
    )


def _unsorted(rows: npt.NDArray[np.int64], values: Array) -> Array:
    return values[np.argsort(rows, kind="stable")]


def _poisson_table() -> npt.NDArray[np.uint8]:
    """Return Poisson(1) numbers in proportion to their probability, uint8 [65536]. Their mean is 1
    within 2e-5.
    """
    probabilities = [math.exp(-1) / math.factorial(count) for count in range(10)]
    ends = np.rint(np.cumsum(probabilities) * 65536).astype(np.int64)
    ends[-1] = 65536
    return np.repeat(np.arange(10, dtype=np.uint8), np.diff(ends, prepend=0))


def _resampled(models: Sequence[_Model], resampling: Resampling) -> Array:
    """Return the metrics of each resample with equal rows for all models, float64 [resamples,
    models, metrics].
    """

    def metrics(weights: npt.NDArray[np.uint8]) -> Array:
        return np.stack([model.metrics(weights) for model in models])

    return _resample(metrics, models[0].rows, resampling)


def _resample(
    metrics: Callable[[npt.NDArray[np.uint8]], Array],
    rows: int,
    resampling: Resampling,
) -> Array:
    """Return the metrics for the row weights of each resample, float64 [resamples, ...]."""
    table = _poisson_table()

    def resample(number: int) -> Array:
        generator = np.random.Generator(np.random.PCG64([resampling.seed, number]))
        return metrics(table[np.frombuffer(generator.bytes(2 * rows), np.uint16)])

    max_threads = _WORKING_BYTES // (_ROW_BYTES * max(1, rows))
    # NumPy releases the GIL in all slow parts.
    # Limited by memory: each thread has copies of all rows for one resample.
    with ThreadPoolExecutor(max(1, min(len(os.sched_getaffinity(0)), max_threads))) as pool:
        return np.stack(list(pool.map(resample, range(resampling.resamples))))


def compare_means(models: Sequence[Mapping[str, Array]], resampling: Resampling) -> Comparison:
    """Return the intervals of means over rows, and the differences between all pairs of models in
    the values that both have. Method: the bootstrap of `intervals`, with equal weights for all
    models. NaN with too few rows (MIN_ROWS).

    `models` contains the values of each model by name, float64 [rows], NaN in rows without a value.
    Memory: 16 bytes per row, model and value.
    """
    columns = [(number, name) for number, model in enumerate(models) for name in model]
    if not columns:
        return Comparison([{} for _ in models], {})
    values = np.stack([models[number][name] for number, name in columns])
    has_value = (~np.isnan(values)).astype(np.float64)
    values = np.nan_to_num(values)

    def means(weights: npt.NDArray[np.uint8]) -> Array:
        row_weights = weights.astype(np.float64)
        # Not a product of matrices, for the same sums with any number of threads
        total = np.einsum("r,cr->c", row_weights, values)
        with np.errstate(invalid="ignore", divide="ignore"):
            return total / np.einsum("r,cr->c", row_weights, has_value)

    rows = values.shape[1]
    observed = dict(zip(columns, means(np.ones(rows, np.uint8)).tolist(), strict=True))
    resampled = _resample(means, rows, resampling)
    resampled[:, has_value.sum(1) < MIN_ROWS] = math.nan
    by_column = dict(zip(columns, resampled.T, strict=True))
    model_intervals = [
        {name: _percentiles(by_column[number, name], resampling.confidence) for name in model}
        for number, model in enumerate(models)
    ]
    differences = {}
    for one, other in itertools.combinations(range(len(models)), 2):
        pair = {}
        for name in models[one]:
            if name in models[other]:
                change = by_column[one, name] - by_column[other, name]
                difference = observed[one, name] - observed[other, name]
                low, high = _percentiles(change, resampling.confidence)
                p_value = _bootstrap_p_value(change)
                pair[name] = Difference(difference, low, high, p_value, "bootstrap")
        differences[one, other] = pair
    return Comparison(model_intervals, differences)


def _percentiles(values: Array, confidence: float) -> tuple[float, float]:
    """Return the confidence interval, NaN if most resamples have no value, as with one class."""
    finite = values[np.isfinite(values)]
    if len(finite) < len(values) / 2:
        return math.nan, math.nan
    low, high = np.quantile(finite, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _bootstrap_p_value(differences: Array) -> float:
    """Return twice the share of resamples on the rarer side of 0, including the log itself (Davison
    & Hinkley 1997, 4.2).
    """
    finite = differences[np.isfinite(differences)]
    if len(finite) < len(differences) / 2:
        return math.nan
    rarer = min(np.count_nonzero(finite <= 0), np.count_nonzero(finite >= 0))
    return min(1.0, 2 * (rarer + 1) / (len(finite) + 1))


def _delong(first: Placements, second: Placements, confidence: float) -> Difference:
    """Return the AUROC difference from the placements of two models."""
    differences = first[0] - second[0], first[1] - second[1]
    difference = float(np.mean(differences[0]))
    error = math.sqrt(placement_variance(differences))
    if not error:
        return Difference(
            difference,
            difference,
            difference,
            1.0 if not difference else 0.0,
            "delong",
        )
    width = NormalDist().inv_cdf((1 + confidence) / 2) * error
    p_value = math.erfc(abs(difference) / error / math.sqrt(2))
    return Difference(difference, difference - width, difference + width, p_value, "delong")


def placement_variance(placements: Placements) -> float:
    """Return DeLong's variance. NaN with too few rows."""
    if min(map(len, placements)) < MIN_CLASS_ROWS or sum(map(len, placements)) < MIN_ROWS:
        return math.nan
    return float(
        sum(np.var(class_values, ddof=1) / len(class_values) for class_values in placements)
    )


@dataclass(frozen=True)
class SeededScores:
    """Metrics of one setting, trained with several seeds and scored on the same rows."""

    aurocs: Array
    """AUROC of each seed, [seeds]."""
    loglosses: Array
    """Log loss of each seed, [seeds]."""
    placements: Placements
    """Mean placements over the seeds."""
    row_variance: float
    """Mean over the seeds of the AUROC's variance over rows."""

    @classmethod
    def from_seeds(cls, seeds: Iterable[tuple[Any, Any]]) -> Self:
        """Return the scores for the logits and labels of each seed, read in turn. Memory: 8 bytes
        per row and seed.
        """
        metrics = []
        placements = []
        for logits, labels in seeds:
            model = _Model(*checked(logits, labels))
            metrics.append(model.metrics(np.ones(model.rows, np.uint8)))
            placements.append(model.placements())
        by_name = dict(zip(METRICS, np.stack(metrics, axis=1), strict=True))
        positives, negatives = (
            np.mean(class_values, axis=0) for class_values in zip(*placements, strict=True)
        )
        return cls(
            by_name["auroc"],
            by_name["logloss"],
            (positives, negatives),
            float(np.mean([placement_variance(each) for each in placements])),
        )


def compare_seeds(first: SeededScores, second: SeededScores, *, confidence: float) -> Difference:
    """Compare the mean AUROC over seeds of two settings on the same rows: first minus second. NaN
    with one seed or too few rows.

    This is the analysis of Obuchowski & Rockette 1995 ("Hypothesis testing of diagnostic accuracy
    for multiple readers and multiple tests"). Seeds are readers nested in settings (Hillis 2014,
    Statistics in Medicine 33). The variance has two parts: that of both means over seeds, and
    DeLong's over rows, minus what the first has of it already because seeds order rows differently.
    Degrees of freedom are Satterthwaite's. Requires scipy.
    """
    from scipy import stats

    if min(len(first.aurocs), len(second.aurocs)) < 2:
        return Difference(math.nan, math.nan, math.nan, math.nan, "seeds")
    row_variance = placement_variance(
        (first.placements[0] - second.placements[0], first.placements[1] - second.placements[1])
    )
    variance = spread = 0.0
    for scores in (first, second):
        degrees = len(scores.aurocs) - 1
        seed_variance = float(np.var(scores.aurocs, ddof=1)) / len(scores.aurocs)
        row_variance -= (scores.row_variance - placement_variance(scores.placements)) / degrees
        variance, spread = variance + seed_variance, spread + seed_variance**2 / degrees
    variance += float(np.maximum(0, row_variance))  # NaN stays
    difference = float(np.mean(first.aurocs) - np.mean(second.aurocs))
    student = stats.t(variance**2 / spread if spread else math.inf, scale=math.sqrt(variance))
    low, high = difference + student.ppf([(1 - confidence) / 2, (1 + confidence) / 2])
    return Difference(
        difference,
        float(low),
        float(high),
        float(2 * student.sf(abs(difference))),
        "seeds",
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979). NaN stays and does not count.
    Pure.
    """
    values = np.asarray(p_values, np.float64)
    # NaN comes last
    order = np.argsort(values)
    count = np.count_nonzero(~np.isnan(values))
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(
        1,
        np.maximum.accumulate(values[order] * (count - np.arange(len(values)))),
    )
    return corrected.tolist()
