"""Trials of a search: runs trained in parts, with pauses, and synchronous successive halving
(Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization",
AISTATS 2016). Trials train in waves. All trials of a wave train to the same share of their steps
and pause. When all have paused, the best continue with the next wave, whatever the timing.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, final

from rayrec import storage
from rayrec.config import InputError, line_of
from rayrec.observe.console import Console
from rayrec.observe.events import read_events
from rayrec.training.trainer import train_until
from rayrec.tuning.space import TuneConfig
from rayrec.workloads.base import TrainConfig

STATE_FILE: Final = "trial.json"
"""File in a trial's folder with its state."""
State = Literal["new", "paused", "finished", "failed"]


@dataclass(frozen=True)
class TrialState:
    """State of a trial after its trained parts."""

    state: State
    values: tuple[float | None, ...] = ()
    """Metric after each wave. For a finished trial, the last one is the metric of the selected
    weights.
    """
    error: str | None = None
    can_retry: bool = False
    """Whether the next search retries a failed trial, because its settings did not cause the
    error.
    """

    def save(self, folder: str) -> None:
        storage.write_json(storage.join(folder, STATE_FILE), vars(self))

    @classmethod
    def of(cls, folder: str) -> TrialState:
        path = storage.join(folder, STATE_FILE)
        if not storage.exists(path):
            return cls("new")
        stored = storage.read_json(path)
        return cls(
            stored["state"], tuple(stored["values"]), stored["error"], stored.get("can_retry", True)
        )

    def reopened(self) -> TrialState:
        """Return the state to resume from in a new search."""
        return (
            TrialState("paused", self.values) if self.state == "failed" and self.can_retry else self
        )

    def has_ended(self, wave: int) -> bool:
        """Return whether this wave is complete for the trial."""
        return self.state in ("finished", "failed") or len(self.values) > wave

    def value(self, wave: int) -> float | None:
        """Return the metric after a wave, or of the selected weights if the trial had finished by
        then. None without metric, or if the trial failed before.
        """
        if wave < len(self.values):
            return self.values[wave]
        return self.values[-1] if self.state == "finished" else None


@dataclass(frozen=True)
class Job:
    """Part of a trial to train."""

    number: int
    config: TrainConfig
    wave: int
    fraction: float
    """Share of the trial's steps after which it pauses. 1 trains to the end."""
    metric: str


def folder_of(config: TrainConfig) -> str:
    """Return the run folder of a trial."""
    return storage.join(config.storage_path, str(config.name))


def train_part(job: Job, *, stop: threading.Event | None = None) -> None:
    """Train a part of a trial in this process and save its state. Errors are saved as a failed
    trial. `stop` and signals act as in `rayrec.training.trainer.train` and save no state.
    """
    folder = folder_of(job.config)
    before = TrialState.of(folder).values[: job.wave]
    try:
        result = train_until(job.config, job.fraction, console=Console(quiet=True), stop=stop)
    except Exception as error:
        failed(
            job,
            line_of(error),
            can_retry=not isinstance(error, InputError) or isinstance(error.__cause__, OSError),
        )
        return
    if result is None:
        value = selected_metric(
            validations_in(read_events(storage.join(folder, "events.jsonl"))),
            job.config,
            job.metric,
        )
    else:
        value = _finite(result.summary["validation"][job.metric])
    TrialState("paused" if result is None else "finished", (*before, value)).save(folder)


def failed(job: Job, error: str, *, can_retry: bool) -> None:
    """Save the state of a failed trial, which this search does not train again."""
    folder = folder_of(job.config)
    TrialState("failed", TrialState.of(folder).values, error, can_retry).save(folder)


def validations_in(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the validation evaluations among a run's events."""
    return [
        event for event in events if event["kind"] == "evaluate" and event["set"] == "validation"
    ]


def selected_metric(
    evaluations: Sequence[Mapping[str, Any]], config: TrainConfig, metric: str
) -> float | None:
    """Return the metric of the weights selected if the run ended here, or None if absent or not
    finite. Pure. These are the weights of the last evaluation, or of the best one with early
    stopping. Earlier pauses kept no weights.
    """
    candidates = [
        *(event for event in evaluations[:-1] if event.get("counted", True)),
        *evaluations[-1:],
    ]

    def score(event: Mapping[str, Any]) -> float:
        metrics = {
            name: math.nan if value is None else value
            for name, value in event.items()
            if name in ("auroc", "logloss")
        }
        return config.workload.score(metrics)

    if config.early_stopping.patience:
        candidates.sort(key=score)
    return _finite(candidates[-1][metric]) if candidates else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@final
class InProcessPool:
    """Pool that trains sequentially in this process (see `rayrec.tuning.trials.Pool`). Signals
    reach the running trial.
    """

    def __init__(self) -> None:
        self._queue: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def next(self) -> Job:
        job = self._queue.popleft()
        train_part(job)
        return job


_MAX_COST: Final = 1 / 6
"""Maximum share of all steps trained in the waves. A fifth is left for rounding and the recipe's
own settings.
"""
_ROUNDING: Final = 1e-9


class Pool(Protocol):
    """Pool that trains trials concurrently or sequentially, in submission order."""

    def submit(self, job: Job) -> None: ...

    def next(self) -> Job:
        """Wait for a job to end or fail and return it. On a signal, raises KeyboardInterrupt or
        SystemExit after all saved.
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


def num_continued(count: int, keep: float) -> int:
    """Return how many of `count` trials continue, at least one. Pure."""
    return max(1, math.ceil(count * keep - _ROUNDING))


def rank_best(values: Mapping[int, float | None], keep: float, *, sign: float) -> list[int]:
    """Return the trials to continue, the best first, given each trial's metric (None if it failed).
    Ties go to the lower number. `sign` is 1 if more is better, else -1. Pure.
    """
    scored = {number: value for number, value in values.items() if value is not None}
    return sorted(scored, key=lambda number: (-sign * scored[number], number))[
        : num_continued(len(values), keep)
    ]


def cost(trials: int, options: TuneConfig) -> float:
    """Return the share of all steps trained in a search of `trials` trials, including the recipe's
    own settings. Pure.
    """
    total = 1.0
    group = trials - 1
    before = 0.0
    for fraction in wave_fractions(options):
        total += group * (fraction - before)
        group, before = num_continued(group, options.keep_fraction) if group else 0, fraction
    return total / trials


def order_of_trials(count: int, seed: int) -> list[int]:
    """Return the start order: trial 0, which trains to its end, then the others shuffled, to sample
    a grid evenly. Pure.
    """
    order = list(range(1, count))
    random.Random(seed).shuffle(order)
    return [0, *order]


def run_waves(
    configs: Sequence[TrainConfig],
    pool: Callable[[], Pool],
    options: TuneConfig,
    *,
    note: Callable[[str], Any],
) -> dict[int, TrialState]:
    """Train the trials and return their states. Skips parts that are already trained. Trial 0 has
    the recipe's own settings and trains to its end. `pool` creates the pool and is not called if
    nothing is left to train.
    """
    fractions = wave_fractions(options)
    sign = 1.0 if options.metric == "auroc" else -1.0
    first, *group = order_of_trials(len(configs), options.seed)
    states = {
        number: TrialState.of(folder_of(config)).reopened() for number, config in enumerate(configs)
    }
    last = len(fractions) - 1

    def submit(number: int, wave: int) -> bool:
        if states[number].has_ended(wave):
            return False
        pool().submit(Job(number, configs[number], wave, fractions[wave], options.metric))
        return True

    def take() -> int:
        job = pool().next()
        stored = states[job.number] = TrialState.of(folder_of(job.config))
        value = stored.value(job.wave)
        metric_text = "" if value is None else f", {options.metric} {value:.5f}"
        state = stored.error or (
            stored.state if job.wave == last else f"{fractions[job.wave]:.1%} of its steps"
        )
        note(f"trial {job.number}: {state}{metric_text}")
        return job.number

    is_baseline_pending = submit(first, last)
    for wave in range(len(fractions)):
        waiting = {number for number in group if submit(number, wave)}
        while waiting:
            number = take()
            waiting.discard(number)
            is_baseline_pending = is_baseline_pending and number != first
        if wave < last and group:
            candidates = rank_best(
                {number: states[number].value(wave) for number in group},
                options.keep_fraction,
                sign=sign,
            )
            note(
                f"Continuing {len(candidates)} of {len(group)} trials after {fractions[wave]:.1%} "
                "of their steps"
            )
            group = candidates
    if is_baseline_pending:
        take()
    return states
