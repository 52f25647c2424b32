"""The arithmetic of a data report: rates, distances, how well a column predicts, what a vocabulary knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import DENSE_LOW_BITS, DENSE_UNITS
from rayrec.data.encoding.rules import SparseColumn
from rayrec.prepare.log_statistics import TOP, Tally
from rayrec.schema import Schema

_PRIOR_ROWS = 10.0
"""Rows of average click rate that every group of values is given beforehand."""
_LEAST_OUTCOMES = 20
"""Held-out rows of either label below which nothing is said of how well a column predicts."""


def share(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None


def wilson_interval(hits: int, rows: int) -> tuple[float, float] | None:
    """The 95% confidence interval of a rate (Wilson, 1927); None of no rows."""
    if not rows:
        return None
    z = 1.959963984540054
    rate, spread = hits / rows, z * z / rows
    centre = rate + spread / 2
    radius = z * math.sqrt(rate * (1 - rate) / rows + spread / rows / 4)
    return max(0.0, (centre - radius) / (1 + spread)), min(1.0, (centre + radius) / (1 + spread))


def total_variation(first: np.ndarray, second: np.ndarray) -> tuple[float, float] | None:
    """Half the sum of the differences of two distributions, given as counts; and what to expect of it, about, if both were
    samples of one distribution. None where one is of no rows."""
    n, m = int(first.sum()), int(second.sum())
    if not n or not m:
        return None
    pooled = (first + second) / (n + m)
    deviations = np.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    distance = 0.5 * float(np.abs(first / n - second / m).sum())
    return distance, min(1.0, 0.5 * math.sqrt(2 / math.pi) * float(deviations.sum()))


def mean_and_deviation(moments: Sequence[int]) -> tuple[float, float] | None:
    """Of sign(x) ln(1 + |x|), from one row of Tally.moments; None of no values."""
    present, total, high, low = (int(value) for value in moments)
    if not present:
        return None
    variance = (present * ((high << DENSE_LOW_BITS) + low) - total * total) / (present * DENSE_UNITS) ** 2
    return total / (present * DENSE_UNITS), math.sqrt(variance)


def auroc_of_rates(outcomes: np.ndarray) -> float | None:
    """AUROC on the held-out rows, each scored with the click rate that its value has among the other rows; `outcomes`
    int64 (values, 4) by label + 2 * held out. None where few rows of a label are held out."""
    misses, clicks, held_misses, held_clicks = outcomes.T.astype(np.float64)
    if min(held_misses.sum(), held_clicks.sum()) < _LEAST_OUTCOMES or not clicks.sum():
        return None
    average = clicks.sum() / (misses.sum() + clicks.sum())
    rates = (clicks + _PRIOR_ROWS * average) / (misses + clicks + _PRIOR_ROWS)
    distinct, place = np.unique(rates, return_inverse=True)
    misses_at = np.bincount(place, held_misses, len(distinct))
    clicks_at = np.bincount(place, held_clicks, len(distinct))
    below = np.cumsum(misses_at) - misses_at / 2  # equal scores count half
    return float((clicks_at * below).sum() / (clicks_at.sum() * misses_at.sum()))


@dataclass(frozen=True)
class Concentration:
    """How the values of a sparse column are spread over its categories."""

    values: int
    distinct: int
    top: dict[int, float | None]
    """Share of the values that the so many most frequent categories hold."""
    once: float | None
    """Share of the values whose category comes once in the log."""


def concentration(values: int, distinct: int, repeated: np.ndarray) -> Concentration:
    """`repeated`: counts of the categories that come twice or more."""
    largest = np.sort(np.partition(repeated, len(repeated) - TOP)[-TOP:] if len(repeated) > TOP else repeated)[::-1]
    once = distinct - len(repeated)
    held = {n: int(largest[:n].sum()) + max(0, min(n - len(largest), once)) for n in (1, 10, 100)}
    return Concentration(values, distinct, {n: share(rows, values) for n, rows in held.items()}, share(once, values))


def most_frequent(tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """uint64 (at most TOP): the tokens with the largest counts; among equals, the smallest."""
    if len(tokens) > TOP:
        least = np.partition(counts, len(counts) - TOP)[-TOP]
        tokens, counts = tokens[counts >= least], counts[counts >= least]
    return tokens[np.lexsort((tokens, -counts))[:TOP]].astype(np.uint64)


def merged(tokens: np.ndarray, counts: np.ndarray, modulo: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in rising order, taken modulo a number first where there is one, and their counts."""
    if modulo:
        tokens = tokens % tokens.dtype.type(modulo)
    order = np.argsort(tokens)
    tokens, counts = tokens[order], counts[order]
    starts = np.flatnonzero(np.concatenate([[True], tokens[1:] != tokens[:-1]])) if len(tokens) else order
    return tokens[starts], np.add.reduceat(counts, starts) if len(starts) else counts


def unknown_rate(tokens: np.ndarray, counts: np.ndarray, vocabulary: np.ndarray) -> float | None:
    """Share of the values whose token the vocabulary (in rising order) does not hold."""
    place = np.searchsorted(vocabulary, tokens)
    known = np.zeros(len(tokens), bool)
    inside = place < len(vocabulary)
    known[inside] = vocabulary[place[inside]] == tokens[inside]
    return share(counts[~known].sum(), counts.sum())


def collision_rate(
    column: SparseColumn, vocabulary: np.ndarray, tokens: np.ndarray, counts: np.ndarray
) -> float | None:
    """Share of the values whose category has an id that another category of the log has, too, unknown ones left out; by the
    Preprocessor's own rule. `vocabulary`: the column's tokens in id order; `tokens`: distinct ones."""
    wide = tokens.dtype == np.uint64
    schema = Schema(label=None, sparse=("column",), tokens="any" if wide else "hexadecimal")
    encoder = Preprocessor("report", schema, (), (column,), vocabulary).encoder
    ids = encoder.ids(tokens, 0)
    if column.num_tokens is not None:
        known = np.isin(column.looked_up(tokens), vocabulary)
        ids, counts = ids[known], counts[known]
    _, place, categories = np.unique(ids, return_inverse=True, return_counts=True)
    return share(counts[categories[place] > 1].sum(), counts.sum())


def duplicate_rate(hashes: np.ndarray) -> float | None:
    """Share of the rows that repeat an earlier one, from their hashes, which are sorted in place."""
    hashes.sort()
    return share(np.count_nonzero(hashes[1:] == hashes[:-1]), len(hashes))


# What a tally says ---------------------------------------------------------------------------------------------------

Drift = list[dict[str, tuple[float, float] | None]]
"""A slice each: column, the label too -> distance from the first slice with rows, and its expectation for equal distributions."""


def drift_of(tally: Tally, schema: Schema) -> Drift:
    filled = np.flatnonzero(tally.rows)
    first = int(filled[0]) if len(filled) else 0
    labels = np.stack([tally.rows - tally.clicks, tally.clicks], axis=1)
    columns = [(schema.label, labels)] if schema.label else []
    columns += [(name, tally.dense_bins[:, d]) for d, name in enumerate(schema.dense)]
    columns += [(name, tally.sparse_bins[:, s]) for s, name in enumerate(schema.sparse)]
    return [
        {name: total_variation(bins[first], bins[n]) for name, bins in columns} if n > first else {}
        for n in range(len(tally.rows))
    ]


def _largest(name: str, drift: Drift) -> dict[str, float | None]:
    """The largest distance of a column."""
    distance, by_chance = max((found for piece in drift if (found := piece.get(name))), default=(None, None))
    return {"drift": distance, "drift_by_chance": by_chance}


def label_of(tally: Tally, name: str) -> dict[str, Any]:
    rows, clicks = int(tally.rows.sum()), int(tally.clicks.sum())
    low, high = wilson_interval(clicks, rows) or (None, None)
    return {"name": name, "clicks": clicks, "rate": share(clicks, rows), "low": low, "high": high}


def weight_of(tally: Tally) -> dict[str, Any]:
    low, high = _range(tally, -1)
    return {"min": low, "max": high, "zero_rate": share(tally.signs[-1, 1], tally.rows.sum())}


def _range(tally: Tally, place: int) -> list[Any]:
    """Least and greatest value, ints where they are ones; None of no values."""
    low, high = tally.limits[place, 0], -tally.limits[place, 1]
    return [int(x) if x == int(x) else float(x) for x in (low, high)] if low <= high else [None, None]


def dense_columns(tally: Tally, schema: Schema, drift: Drift) -> dict[str, dict[str, Any]]:
    columns = {}
    for d, name in enumerate(schema.dense):
        present = int(tally.moments[d, 0])
        low, high = _range(tally, d)
        mean, deviation = mean_and_deviation(tally.moments[d].tolist()) or (None, None)
        columns[name] = {
            "missing_rate": share(tally.missing[:, d].sum(), tally.rows.sum()),
            "min": low,
            "max": high,
            "negative_rate": share(tally.signs[d, 0], present),
            "zero_rate": share(tally.signs[d, 1], present),
            "log_mean": mean,
            "log_deviation": deviation,
            **_largest(name, drift),
            "auroc": auroc_of_rates(tally.dense_outcomes[d]) if schema.label else None,
        }
    return columns


def sparse_columns(
    tally: Tally, schema: Schema, drift: Drift, counted: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """`counted`: what is known of each column by counting its categories."""
    return {
        name: {
            "missing_rate": share(tally.missing[:, len(schema.dense) + s].sum(), tally.rows.sum()),
            **counted[name],
            **_largest(name, drift),
            "auroc": auroc_of_rates(tally.sparse_outcomes[s]) if schema.label else None,
        }
        for s, name in enumerate(schema.sparse)
    }


def slices_of(tally: Tally, schema: Schema, names: Sequence[str], drift: Drift) -> list[dict[str, Any]]:
    columns = [*schema.dense, *schema.sparse]
    return [
        {
            "name": name,
            "rows": int(tally.rows[n]),
            "label_rate": share(tally.clicks[n], tally.rows[n]) if schema.label else None,
            "missing_rate": {column: share(tally.missing[n, c], tally.rows[n]) for c, column in enumerate(columns)},
            "drift": {column: found[0] for column, found in drift[n].items() if found},
        }
        for n, name in enumerate(names)
    ]
