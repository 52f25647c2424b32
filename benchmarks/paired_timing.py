"""Paired timing of two equivalent functions whose difference is smaller than the machine's
noise.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rows import note

CHECK_EVERY: Final = 50
"""Quartets between two checks of the interval: checking after each, and stopping at a convenient
one, finds false effects.
"""
_NULL_EVERY: Final = 4
"""Number of quartets per quartet that compares a candidate with itself."""
_Z: Final = 1.96
"""Standard deviations that contain 95 % of a normal distribution."""


@dataclass(frozen=True)
class Spent:
    """Time of one piece of work."""

    wall_s: float
    cpu_s: float
    """CPU time of the whole process."""


@dataclass(frozen=True)
class Interval:
    """Interval that contains the median of the sampled distribution in 95 of 100 cases."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median and its interval between two order statistics, valid for any distribution.

    The number of values below the median is binomial with probability one half. Needs at least one
    value.
    """
    ordered = sorted(values)
    n = len(values)
    low = max(1, math.floor((n - _Z * math.sqrt(n)) / 2))
    high = min(n, math.ceil(1 + (n + _Z * math.sqrt(n)) / 2))
    return Interval(statistics.median(ordered), ordered[low - 1], ordered[high - 1])


def speed_ratio(ours_s: Sequence[float], theirs_s: Sequence[float]) -> float:
    """Return our speed relative to theirs, by the geometric means of the times of equal work."""
    return math.exp(
        statistics.fmean(map(math.log, theirs_s)) - statistics.fmean(map(math.log, ours_s))
    )


def quartet(
    ours: Callable[[], Spent], theirs: Callable[[], Spent], *, draw: random.Random
) -> tuple[float, float, list[Spent], list[Spent]]:
    """Run ours, theirs, theirs, ours, or in the opposite random order, so that even drift affects
    both alike. Returns the speed ratios by wall and CPU time, and the times of both.
    """
    order = (ours, theirs, theirs, ours) if draw.random() < 0.5 else (theirs, ours, ours, theirs)
    spent: dict[Callable[[], Spent], list[Spent]] = {ours: [], theirs: []}
    for run in order:
        spent[run].append(run())
    wall, cpu = (
        speed_ratio(
            [getattr(one, kind) for one in spent[ours]],
            [getattr(one, kind) for one in spent[theirs]],
        )
        for kind in ("wall_s", "cpu_s")
    )
    return wall, cpu, spent[ours], spent[theirs]


@dataclass
class Comparison:
    """Ratios of all quartets so far."""

    ratios: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)
    null_ratios: list[float] = field(default_factory=list)
    """Ratios of theirs compared with itself: the noise."""
    ours: list[Spent] = field(default_factory=list)
    theirs: list[Spent] = field(default_factory=list)

    @property
    def quartets(self) -> int:
        return len(self.ratios) + len(self.null_ratios)


def compare(
    ours: Callable[[], Spent],
    theirs: Callable[[], Spent],
    same_as_theirs: Callable[[], Spent],
    *,
    enough: float,
    max_s: float,
    max_quartets: int | None = None,
    seed: int = 0,
) -> Comparison:
    """Run quartets until half the interval of the ratio is `enough`, or the time or the quartets
    are used up. Each call of one of the three has to do as much work as any other.
    """
    comparison = Comparison()
    draw = random.Random(seed)
    end_s = time.monotonic() + max_s
    while max_quartets is None or comparison.quartets < max_quartets:
        if comparison.quartets % _NULL_EVERY == _NULL_EVERY - 1:
            comparison.null_ratios.append(quartet(same_as_theirs, theirs, draw=draw)[0])
        else:
            wall, cpu, our_times, their_times = quartet(ours, theirs, draw=draw)
            comparison.ratios.append(wall)
            comparison.cpu_ratios.append(cpu)
            comparison.ours += our_times
            comparison.theirs += their_times
        if comparison.quartets % CHECK_EVERY == 0:
            interval = median_interval(comparison.ratios)
            note(
                f"  {comparison.quartets} quartets: {interval.median:.4f}, {interval.low:.4f} to "
                f"{interval.high:.4f}"
            )
            if interval.half_width <= enough:
                break
        if time.monotonic() > end_s:
            break
    return comparison
