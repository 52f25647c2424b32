"""Which trials train on: synchronous successive halving (Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and
Hyperparameter Optimization", AISTATS 2016).

Trials train in waves. In each, all trials of the wave train up to the same share of their steps and pause there; when the last
has come, the best of them go on to the next wave. So which trials these are depends on no timing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from rayrec.tuning.config import TuneConfig
from rayrec.tuning.trials import Job, Standing, folder_of
from rayrec.workloads.base import TrainConfig

_MOST_COST: Final = 1 / 6
"""Of the steps of all trials, that the waves may train; a fifth is left for rounding up and for the recipe's own settings."""
_ROUNDING: Final = 1e-9


class Pool(Protocol):
    """Trains trials, several at once or one after the other, in the order in which they were submitted."""

    def submit(self, job: Job) -> None: ...

    def next(self) -> Job:
        """Waits for one that has ended, however it has. Raises KeyboardInterrupt or SystemExit for a signal, after all that are
        in progress have saved."""
        ...


def shares_of(options: TuneConfig) -> tuple[float, ...]:
    """The share of a trial's steps at the end of each wave; the last is 1. Each is `keep_fraction` of the next, and there are as
    few as keep the cost without rounding, `keep**n * (1 + n * (1 - keep))` for n waves before the last, to a sixth. Pure."""
    keep = options.keep_fraction
    if not options.stop_early:
        return (1.0,)
    waves = next(n for n in itertools.count(1) if keep**n * (1 + n * (1 - keep)) <= _MOST_COST)
    return tuple(keep**power for power in range(waves, -1, -1))


def num_kept(count: int, keep: float) -> int:
    """How many of `count` trials of a wave go on, at least one. Pure."""
    return max(1, math.ceil(count * keep - _ROUNDING))


def best_of(values: Mapping[int, float | None], keep: float, *, sign: float) -> list[int]:
    """The numbers of the trials that go on, the best first, given the metric of each trial of a wave (None: it has failed); of
    equal ones the lower number is better. `sign`: 1 if more is better, else -1. Pure."""
    known = {number: value for number, value in values.items() if value is not None}
    ranked = sorted(known, key=lambda number: (-sign * known[number], number))
    return ranked[: num_kept(len(values), keep)]


def cost(trials: int, options: TuneConfig) -> float:
    """The share of the steps of `trials` trials that a search trains if none of them fails, the recipe's own settings being one.
    Pure."""
    total, group, before = 1.0, trials - 1, 0.0
    for share in shares_of(options):
        total += group * (share - before)
        group, before = num_kept(group, options.keep_fraction) if group else 0, share
    return total / trials


def order_of_trials(count: int, seed: int) -> list[int]:
    """The numbers of trials in the order in which they start: 0, which trains to its end, then the others at random, so that the
    first ones tell something of all values of a grid. Pure."""
    others = list(range(1, count))
    random.Random(seed).shuffle(others)
    return [0, *others]


def run_waves(
    configs: Sequence[TrainConfig], pool: Callable[[], Pool], options: TuneConfig, *, note: Callable[[str], Any]
) -> dict[int, Standing]:
    """Trains the trials with these configurations, as far as each is to be trained -> how each stands. What was trained before
    is not trained again. Trial 0 has the recipe's own settings and trains to its end. `pool` gives the one that trains; it is not
    called if nothing is left to train."""
    shares, sign = shares_of(options), 1.0 if options.metric == "auroc" else -1.0
    first, *group = order_of_trials(len(configs), options.seed)
    standings = {number: Standing.of(folder_of(config)).reopened() for number, config in enumerate(configs)}
    last = len(shares) - 1

    def submit(number: int, wave: int) -> bool:
        if standings[number].has_ended(wave):
            return False
        pool().submit(Job(number, configs[number], wave, shares[wave], options.metric))
        return True

    def take() -> int:
        job = pool().next()
        found = standings[job.number] = Standing.of(folder_of(job.config))
        value = found.value(job.wave)
        known = "" if value is None else f", {options.metric} {value:.5f}"
        state = found.error or (found.state if job.wave == last else f"{shares[job.wave]:.1%} of its steps")
        note(f"trial {job.number}: {state}{known}")
        return job.number

    own = submit(first, last)
    for wave in range(len(shares)):
        waiting = {number for number in group if submit(number, wave)}
        while waiting:
            number = take()
            waiting.discard(number)
            own = own and number != first
        if wave < last and group:
            values = {number: standings[number].value(wave) for number in group}
            kept = best_of(values, options.keep_fraction, sign=sign)
            note(f"{len(kept)} of {len(group)} trials train on after {shares[wave]:.1%} of their steps")
            group = kept
    if own:
        take()
    return standings
