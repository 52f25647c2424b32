"""How sure the metrics of a click model are: bootstrap intervals, and whether two models differ on the same rows."""

import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final, Literal, final

import numpy as np
import numpy.typing as npt

from rayrec.config import InputError
from rayrec.metrics.binary import Floats, Labels, checked, row_losses

METRICS = ("auroc", "logloss", "normalized_entropy", "calibration")
"""What is told with an interval, in this order."""

Array = npt.NDArray[np.float64]

LEAST_ROWS: Final = 30
"""Fewer rows have no interval and no p-value: resampling repeats their few values and does not show what others would be like."""
LEAST_OF_A_CLASS: Final = 5
"""Rows of each label that an interval needs, except that of the logloss."""

_ROW_BYTES: Final = 32
"""Working memory of a resample, a row."""
_WORKING_BYTES: Final = 4 << 30
"""Of all resamples that run at a time."""


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """How intervals are made."""

    confidence: float = 0.95
    """Share of all logs like this one whose interval holds the true value."""
    resamples: int = 1000
    """Number of bootstrap resamples."""
    seed: int = 0
    """The same seed gives the same intervals, whatever the number of cores."""

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise InputError(f"confidence: {self.confidence} must lie between 0 and 1, such as 0.95")
        if self.resamples < 2:
            raise InputError(f"resamples: {self.resamples} must be at least 2; 1000 give intervals of two digits")


@dataclass(frozen=True)
class Difference:
    """Of a metric between two models on the same rows: the first one's less the second one's."""

    difference: float
    low: float
    high: float
    """[low, high]: the interval of the difference"""
    p_value: float
    """Two-sided: how often a difference as large comes about where there is none."""
    method: Literal["delong", "bootstrap"]


def intervals(logits: Any, labels: Any, resampling: Resampling) -> dict[str, tuple[float, float]]:
    """(low, high) of each of METRICS by the percentile bootstrap (Efron & Tibshirani 1993, chapter 13); nan where a metric is not
    defined, and for rows fewer than LEAST_ROWS or LEAST_OF_A_CLASS. Arguments as in `metrics.binary_metrics`.

    A resample weighs every row by a Poisson(1) number, which for more than some hundred rows is as good as drawing rows with
    replacement (Chamandy et al. 2012, "Estimating Uncertainty for Massive Data Streams"), and its metrics are exact. It costs
    about 20 ns a row of one core; resamples run on all cores, as far as their working
    memory, 32 bytes a row each, stays within 4 GiB. Memory: that, and about 40 bytes a row.
    """
    flat_logits, flat_labels = checked(logits, labels)
    few = _too_few(flat_labels)
    if len(few) == len(METRICS):
        return dict.fromkeys(METRICS, (math.nan, math.nan))
    drawn = _resampled([_Model(flat_logits, flat_labels)], resampling)[:, 0]
    drawn[:, [METRICS.index(name) for name in few]] = math.nan
    return {name: _percentiles(drawn[:, number], resampling.confidence) for number, name in enumerate(METRICS)}


def compare(logits: Any, other_logits: Any, labels: Any, resampling: Resampling) -> dict[str, Difference]:
    """Whether two models differ on the same rows, a metric each; nan where one is not defined. As few rows as have no interval in
    `intervals` have neither interval nor p-value. See `compare_models`, of which this is the case of two."""
    return compare_models([logits, other_logits], labels, resampling).differences[0, 1]


@dataclass(frozen=True)
class Comparison:
    """Of several models on the same rows."""

    intervals: list[dict[str, tuple[float, float]]]
    """Of each model, as `intervals` gives them."""
    differences: dict[tuple[int, int], dict[str, Difference]]
    """By the places of two models, the first one's before the second one's: each metric's, the first model's less the second
    model's."""


def compare_models(models: Sequence[Any], labels: Any, resampling: Resampling) -> Comparison:
    """Intervals of each model's metrics, and whether each two of the models differ on the same rows. `models` holds the logits of
    each, shape (rows,); `labels` as in `metrics.binary_metrics`.

    AUROC by DeLong, DeLong & Clarke-Pearson 1988 ("Comparing the Areas under Two or More Correlated Receiver Operating
    Characteristic Curves"), computed by ranks as in Sun & Xu 2014; the others by the bootstrap of `intervals` with the same
    weights for all models, so that what all find hard cancels. Cost: that of `intervals`, once a model. Memory: about 70 bytes a
    row and model, and 32 a row for each resample that runs.
    """
    given = [checked(logits, labels) for logits in models]
    flat_labels = given[0][1]
    sorted_models = [_Model(flat_logits, flat_labels) for flat_logits, _ in given]
    whole = np.ones(len(flat_labels), np.uint8)
    observed = [model.metrics(whole) for model in sorted_models]
    few = _too_few(flat_labels)
    pairs = list(itertools.combinations(range(len(sorted_models)), 2))
    if len(few) == len(METRICS):
        return Comparison(
            [dict.fromkeys(METRICS, (math.nan, math.nan)) for _ in sorted_models],
            {(one, other): _undrawn(observed[one] - observed[other]) for one, other in pairs},
        )
    drawn = _resampled(sorted_models, resampling)
    placements = [] if "auroc" in few else [model.placements() for model in sorted_models]
    differences = {}
    for one, other in pairs:
        found = _undrawn(observed[one] - observed[other])
        for number, name in enumerate(METRICS):
            if name in few:
                continue
            if name == "auroc":
                found[name] = _delong(placements[one], placements[other], resampling.confidence)
                continue
            of_resamples = drawn[:, one, number] - drawn[:, other, number]
            low, high = _percentiles(of_resamples, resampling.confidence)
            p_value = _bootstrap_p_value(of_resamples)
            found[name] = Difference(found[name].difference, low, high, p_value, "bootstrap")
        differences[one, other] = found
    drawn[:, :, [METRICS.index(name) for name in few]] = math.nan
    of_models = [
        {name: _percentiles(drawn[:, place, number], resampling.confidence) for number, name in enumerate(METRICS)}
        for place in range(len(sorted_models))
    ]
    return Comparison(of_models, differences)


def _undrawn(differences: Array) -> dict[str, Difference]:
    """Differences of METRICS without interval and p-value."""
    return {
        name: Difference(float(value), math.nan, math.nan, math.nan, "delong" if name == "auroc" else "bootstrap")
        for name, value in zip(METRICS, differences, strict=True)
    }


def _too_few(labels: Labels) -> tuple[str, ...]:
    """The metrics that these rows are too few for."""
    positives = int(np.count_nonzero(labels))
    if len(labels) < LEAST_ROWS:
        return METRICS
    too_few = min(positives, len(labels) - positives) < LEAST_OF_A_CLASS
    return ("auroc", "normalized_entropy", "calibration") if too_few else ()


@final
class _Model:
    """One model's rows, sorted once for all resamples."""

    def __init__(self, logits: Floats, labels: Labels) -> None:
        self.losses, self.probabilities = row_losses(logits, labels)
        is_positive = labels.astype(bool)
        self.positives, sorted_positives = _sorted_rows(logits, np.flatnonzero(is_positive))
        self.negatives, sorted_negatives = _sorted_rows(logits, np.flatnonzero(~is_positive))
        self.below, self.upto = _places(sorted_negatives, sorted_positives)
        """int64 (positives): negatives that are below each, and those that are not above it"""
        self._sorted = sorted_negatives, sorted_positives

    def metrics(self, weights: npt.NDArray[np.uint8]) -> Array:
        """METRICS of the rows, each counted so many times. A tie counts one half."""
        positives = weights[self.positives].astype(np.float64)
        negatives_upto = np.concatenate([[0.0], np.cumsum(weights[self.negatives], dtype=np.float64)])
        num_positives, num_negatives = float(positives.sum()), float(negatives_upto[-1])
        ranks = negatives_upto[self.below] + negatives_upto[self.upto]
        with np.errstate(invalid="ignore", divide="ignore"):
            auroc = _product(positives, ranks) / (2 * np.float64(num_positives) * num_negatives)
            all_weights = weights.astype(np.float64)
            rows = np.float64(num_positives + num_negatives)
            logloss = _product(all_weights, self.losses) / rows
            rate = num_positives / rows
            entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
            calibration = _product(all_weights, self.probabilities) / np.float64(num_positives)
            return np.array([auroc, logloss, logloss / entropy, calibration])

    def placements(self) -> tuple[Array, Array]:
        """Of each row of a class, in the order of the rows, the share of the other class that it is right of: of the positives
        the negatives below, of the negatives the positives above. A tie counts one half."""
        sorted_negatives, sorted_positives = self._sorted
        of_positives = _unsorted(self.positives, (self.below + self.upto) / (2 * max(1, len(self.negatives))))
        below, upto = _places(sorted_positives, sorted_negatives)
        num_positives = max(1, len(self.positives))
        return of_positives, _unsorted(self.negatives, 1 - (below + upto) / (2 * num_positives))


def _product(first: Array, second: Array) -> np.float64:
    # Not np.dot: BLAS would split it over threads of its own, which get in the way of those here, and sum in another order.
    return np.float64(np.einsum("i,i->", first, second))


def _sorted_rows(logits: Floats, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Floats]:
    """The given rows by rising logit, and these logits."""
    order = rows[np.argsort(logits[rows], kind="stable")]
    return order, logits[order]


def _places(others: Floats, values: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How many of the sorted `others` are below each of the sorted values, and how many are not above."""
    return np.searchsorted(others, values, side="left"), np.searchsorted(others, values, side="right")


def _unsorted(rows: npt.NDArray[np.int64], values: Array) -> Array:
    """The values, one a row, by rising row."""
    return values[np.argsort(rows, kind="stable")]


# Bootstrap -----------------------------------------------------------------------------------------------------------


def _poisson_table() -> npt.NDArray[np.uint8]:
    """uint8 (65536): Poisson(1) numbers, each as often as 16 bits can tell; their mean is 1 to 2e-5."""
    probabilities = [math.exp(-1) / math.factorial(count) for count in range(10)]
    ends = np.rint(np.cumsum(probabilities) * 65536).astype(np.int64)
    ends[-1] = 65536
    return np.repeat(np.arange(10, dtype=np.uint8), np.diff(ends, prepend=0))


def _resampled(models: Sequence[_Model], resampling: Resampling) -> Array:
    """float64 (resamples, models, metrics), the same rows for all models."""
    table, rows = _poisson_table(), len(models[0].losses)

    def resample(number: int) -> Array:
        generator = np.random.Generator(np.random.PCG64([resampling.seed, number]))
        weights = table[np.frombuffer(generator.bytes(2 * rows), np.uint16)]
        return np.stack([model.metrics(weights) for model in models])

    return np.stack(_on_cores(resample, resampling.resamples, most=_WORKING_BYTES // (_ROW_BYTES * max(1, rows))))


def _on_cores(function: Callable[[int], Array], count: int, *, most: int) -> list[Array]:
    """On all cores, but at most so many at a time, and one at least."""
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, min(cores, most))) as pool:  # NumPy lets go of the GIL in all that takes time here
        return list(pool.map(function, range(count)))


def _percentiles(values: Array, confidence: float) -> tuple[float, float]:
    """nan where hardly any resample has a value, as with rows of one class."""
    finite = values[np.isfinite(values)]
    if len(finite) < len(values) / 2:
        return math.nan, math.nan
    low, high = np.quantile(finite, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _bootstrap_p_value(differences: Array) -> float:
    """Twice the share of resamples on the rarer side of 0, that of the log itself counted in (Davison & Hinkley 1997, 4.2)."""
    finite = differences[np.isfinite(differences)]
    if len(finite) < len(differences) / 2:
        return math.nan
    rarer = min(np.count_nonzero(finite <= 0), np.count_nonzero(finite >= 0))
    return min(1.0, 2 * (rarer + 1) / (len(finite) + 1))


# DeLong --------------------------------------------------------------------------------------------------------------


def _delong(first: tuple[Array, Array], second: tuple[Array, Array], confidence: float) -> Difference:
    """From the placements of two models."""
    on_positives, on_negatives = (a - b for a, b in zip(first, second, strict=True))
    num_positives, num_negatives = len(on_positives), len(on_negatives)
    if num_positives < 2 or num_negatives < 2:
        return Difference(math.nan, math.nan, math.nan, math.nan, "delong")
    difference = float(np.mean(on_positives))
    variance = np.var(on_positives, ddof=1) / num_positives + np.var(on_negatives, ddof=1) / num_negatives
    error = math.sqrt(variance)
    if not error:
        return Difference(difference, difference, difference, 1.0 if not difference else 0.0, "delong")
    width = NormalDist().inv_cdf((1 + confidence) / 2) * error
    p_value = math.erfc(abs(difference) / error / math.sqrt(2))
    return Difference(difference, difference - width, difference + width, p_value, "delong")
