"""A comparison of two ways of doing the same finds a small difference in large noise, and none where there is none."""

from __future__ import annotations

import importlib
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NOISE, DRIFT, COST = 0.05, 0.3, 0.01
"""Standard deviation of the logarithm of a time; by how much all is slower at the end; what one of two ways costs."""


@pytest.fixture
def paired(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("paired")


def noisy(paired: Any, *, seed: int, blocks: int) -> Callable[[float], Callable[[], Any]]:
    """What makes a way that is slower by so much, on a machine that gets slower as time goes by."""
    draw, done = random.Random(seed), 0

    def way(cost: float) -> Callable[[], Any]:
        def run() -> Any:
            nonlocal done
            done += 1
            drift = 1 + DRIFT * done / blocks
            return paired.Spent(0.5 * drift * (1 + cost) * draw.lognormvariate(0, NOISE), 1.0 + cost)

        return run

    return way


def compared(paired: Any, *, seed: int, quartets: int = 400) -> Any:
    way = noisy(paired, seed=seed, blocks=4 * quartets)
    found = paired.compare(way(COST), way(0.0), way(0.0), enough=0.0, most_s=60.0, most_quartets=quartets, seed=seed)
    assert found.quartets == quartets
    return found


def test_the_interval_holds_the_effect_as_often_as_it_says(paired: Any) -> None:
    runs = [compared(paired, seed=seed) for seed in range(40)]
    intervals = [paired.median_interval(found.ratios) for found in runs]
    nothing = [paired.median_interval(found.null_ratios) for found in runs]
    assert sum(1 / (1 + COST) in interval for interval in intervals) >= 36
    assert sum(1.0 in interval for interval in nothing) >= 36
    assert sum(1.0 in interval for interval in intervals) < 20  # an effect of 1 % is seen in a noise of 5 %
    assert statistics.fmean(interval.median for interval in intervals) == pytest.approx(1 / (1 + COST), abs=0.001)
    assert statistics.fmean(interval.half_width for interval in intervals) < 0.008


def test_cpu_time_is_compared_too(paired: Any) -> None:
    found = compared(paired, seed=0, quartets=8)
    assert (len(found.ratios), len(found.null_ratios)) == (6, 2)
    assert found.cpu_ratios == pytest.approx([1 / (1 + COST)] * 6)
    assert (len(found.ours), len(found.theirs)) == (12, 12)


def test_the_interval_is_that_of_order_statistics(paired: Any) -> None:
    found = paired.median_interval([float(value) for value in range(1, 101)])
    assert (found.median, found.low, found.high) == (50.5, 40.0, 61.0)
    for few in ([1.0], [2.0, 1.0], [3.0, 1.0, 2.0]):
        found = paired.median_interval(few)
        assert (found.low, found.high) == (min(few), max(few))


def test_it_stops_once_it_knows_enough_and_looks_seldom(paired: Any) -> None:
    way = noisy(paired, seed=1, blocks=1000)
    found = paired.compare(way(COST), way(0.0), way(0.0), enough=0.02, most_s=60.0)
    assert found.quartets % paired.LOOK_EVERY == 0
    assert paired.median_interval(found.ratios).half_width <= 0.02
    assert paired.compare(way(0.0), way(0.0), way(0.0), enough=0.0, most_s=0.0).quartets == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_quartet_takes_drift_away_in_both_orders(paired: Any, seed: int) -> None:
    times = iter((1.0, 1.1, 1.21, 1.331))  # each block is a tenth slower than the one before

    def ours() -> Any:
        return paired.Spent(next(times), 1.0)

    def theirs() -> Any:
        return paired.Spent(next(times), 2.0)

    wall, cpu, mine, other = paired.quartet(ours, theirs, draw=random.Random(seed))
    assert (wall, cpu) == pytest.approx((1.0, 2.0))
    assert {tuple(spent.wall_s for spent in mine), tuple(spent.wall_s for spent in other)} == {
        (1.0, 1.331),
        (1.1, 1.21),
    }
