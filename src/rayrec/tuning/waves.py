"""Synchronous successive halving of trials, which train in waves (Jamieson and Talwalkar,
"Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016). All trials
of a wave train to the same share of their steps and pause. When all have paused, the best continue
with the next wave, whatever the timing. Optuna's pruners decide when one trial reports, so that
their choice depends on timing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rayrec.tuning.space import TuneConfig
from rayrec.tuning.study import Study
from rayrec.tuning.trials import Job, PartResult
from rayrec.workloads.base import TrainConfig

TrainParts = Callable[[Sequence[Job]], Iterator[tuple[Job, PartResult]]]
"""Training of parts of trials, concurrently or sequentially."""
_MAX_COST: Final = 1 / 6
"""Maximum share of all steps trained in the waves. A fifth is left for rounding and the recipe's
own settings.
"""
_ROUNDING: Final = 1e-9
_TPE_GROUPS: Final = 5
"""Number of groups of a TPE search. More would learn from more results, but train fewer trials at
once.
"""


def wave_fractions(options: TuneConfig) -> tuple[float, ...]:
    """Return the share of a trial's steps at each wave's end; the last is 1. Each is
    `keep_fraction` of the next. Uses the fewest waves whose cost without rounding, `keep**n * (1 +
    n * (1 - keep))` for n waves before the last, is at most a sixth. Pure.
    """
    if not options.stop_early or options.seeds > 1:
        return (1.0,)
    keep = options.keep_fraction
    waves = next(n for n in itertools.count(1) if keep**n * (1 + n * (1 - keep)) <= _MAX_COST)
    return tuple(keep**power for power in range(waves, -1, -1))


def rank_best(values: Mapping[int, float | None], keep: float, *, sign: float) -> list[int]:
    """Return the trials to continue, at least one, the best first, given each trial's metric (None
    if it failed). Ties go to the lower number. `sign` is 1 if more is better, else -1. Pure.
    """
    count = max(1, math.ceil(len(values) * keep - _ROUNDING))
    scored = {number: value for number, value in values.items() if value is not None}
    return sorted(scored, key=lambda number: (-sign * scored[number], number))[:count]


def groups_of(num_trials: int, options: TuneConfig) -> list[list[int]]:
    """Split trials into the groups that train and are compared in turn, each in its start order.
    One group, shuffled to sample a grid evenly, unless the values of a group depend on the results
    of those before. Trial 0, with the recipe's own settings, is the first one. Pure.
    """
    size = num_trials
    if options.algorithm == "tpe":
        size = math.ceil((num_trials - 1) / _TPE_GROUPS)
    groups = []
    for start in range(1, num_trials, size):
        group = list(range(start, min(start + size, num_trials)))
        random.Random(options.seed).shuffle(group)
        groups.append(group)
    groups[0].insert(0, 0)
    return groups


# Waves of a group, with keep_fraction 1/3 and 28 trials:
#
#   wave   share of steps   trained                    then
#   0      1/27             all 28                     the best 9 of 27 continue, and trial 0
#   1      1/9              10                         the best 3 of 9 continue, and trial 0
#   2      1/3              4                          the best of 3 continues, and trial 0
#   3      1                2                          both are finished
#
# A wave is over when all its trials have paused, so that who continues depends on the metrics only.
def train_waves(
    group: Sequence[int],
    configs: Sequence[TrainConfig],
    study: Study,
    pool: Callable[[], TrainParts],
    *,
    options: TuneConfig,
    note: Callable[[str], Any],
) -> None:
    """Train a group of trials and record their results in the study. Skips parts that are already
    trained. `pool` opens the training processes and is not called if nothing is left to train.
    """
    sign = 1.0 if options.metric == "auroc" else -1.0
    for wave, fraction in enumerate(wave_fractions(options)):
        jobs = [
            Job(number, configs[number], wave, fraction, options.metric)
            for number in group
            if not study.has_ended(number, wave)
        ]
        if jobs:
            for job, result in pool()(jobs):
                study.record(job.number, wave, result)
                progress = "finished" if result.finished else f"{fraction:.1%} of its steps"
                value = "" if result.value is None else f", {options.metric} {result.value:.5f}"
                note(f"trial {job.number}: {result.error or progress}{value}")
        # Read from the study, not from the results above: a resumed search skips what is trained.
        if fraction < 1:
            metrics = {number: study.metric(number, wave) for number in group if number}
            best = rank_best(metrics, options.keep_fraction, sign=sign)
            note(
                f"Continuing {len(best)} of {len(metrics)} trials after {fraction:.1%} of their "
                "steps"
            )
            # Trial 0, with the recipe's own settings, trains to its end.
            group = [number for number in group if number == 0] + best
