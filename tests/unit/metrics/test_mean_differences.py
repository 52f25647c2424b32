"""Bootstrap intervals of means over rows, and of their differences between models."""

import math

import numpy as np
import pytest

from rayrec.metrics.significance import Resampling, compare_means


def test_intervals_of_means_are_normal() -> None:
    values = np.random.default_rng(0).random(4000)
    compared = compare_means([{"recall": values}], Resampling(resamples=2000))
    error = 1.96 * values.std() / math.sqrt(4000)
    low, high = compared.intervals[0]["recall"]
    assert low == pytest.approx(values.mean() - error, abs=error / 8)
    assert high == pytest.approx(values.mean() + error, abs=error / 8)


def test_paired_rows_have_narrow_differences() -> None:
    rng = np.random.default_rng(1)
    one = rng.random(1000)
    other = one - 0.001 * rng.random(1000)
    compared = compare_means([{"ndcg": one}, {"ndcg": other}], Resampling(resamples=200))
    found = compared.differences[0, 1]["ndcg"]
    assert found.difference == pytest.approx((one - other).mean())
    assert 0 < found.low < found.difference < found.high < 0.001
    assert found.p_value == pytest.approx(2 / 201)
    back = found.reversed()
    assert (back.difference, back.low, back.high) == (
        -found.difference,
        -found.high,
        -found.low,
    )


def test_rows_without_value_do_not_count() -> None:
    rng = np.random.default_rng(2)
    values = rng.random(500)
    gaps = np.full(1000, np.nan)
    gaps[::2] = values
    found = compare_means([{"mrr": gaps}, {"mrr": gaps}], Resampling(resamples=50))
    low, high = found.intervals[0]["mrr"]
    assert low < values.mean() < high
    assert high - low < 0.1
    assert vars(found.differences[0, 1]["mrr"]) == {
        "difference": 0.0,
        "low": 0.0,
        "high": 0.0,
        "p_value": 1.0,
        "method": "bootstrap",
    }


def test_few_values_have_no_interval() -> None:
    values = np.full(100, np.nan)
    values[:29] = 1.0
    found = compare_means([{"mrr": values}, {"mrr": values * 0}], Resampling(resamples=20))
    difference = found.differences[0, 1]["mrr"]
    assert difference.difference == 1.0
    ends = (*found.intervals[0]["mrr"], difference.low, difference.p_value)
    assert np.isnan(ends).all()


def test_only_shared_values_are_compared() -> None:
    ones = np.ones(40)
    found = compare_means([{"loss": ones, "ndcg": ones}, {"ndcg": ones}], Resampling(resamples=5))
    assert set(found.differences[0, 1]) == {"ndcg"}
    assert set(found.intervals[0]) == {"loss", "ndcg"}
