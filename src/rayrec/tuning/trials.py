"""Trials of a search: runs trained in parts, with pauses, and synchronous successive halving
(Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization",
AISTATS 2016). Trials train in waves. All trials of a wave train to the same share of their steps
and pause. When all have paused, the best continue with the next wave, whatever the timing.
"""

from __future__ import annotations

import itertools
import math
import random
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
    before: tuple[float | None, ...]
    """Metric after each earlier wave."""

    def failed(self, error: str, *, can_retry: bool) -> TrialState:
        """Return the state of the trial after an error, which this search does not train again."""
        return TrialState("failed", self.before, error, can_retry)


def folder_of(config: TrainConfig) -> str:
    """Return the run folder of a trial."""
    return storage.join(config.storage_path, str(config.name))


def train_part(job: Job) -> TrialState:
    """Train a part of a trial in this process and return its state. Errors become a failed trial.
    Signals act as in `rayrec.training.trainer.train`.
    """
    try:
        result = train_until(job.config, job.fraction, console=Console(quiet=True))
    except Exception as error:
        can_retry = not isinstance(error, InputError) or isinstance(error.__cause__, OSError)
        return job.failed(line_of(error), can_retry=can_retry)
    if result is None:
        path = storage.join(folder_of(job.config), "events.jsonl")
        validations = validations_in(read_events(path))
        value = selected_metric(validations, job.config, job.metric)
        return TrialState("paused", (*job.before, value))
    value = _finite(result.summary["validation"][job.metric])
    return TrialState("finished", (*job.before, value))


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

    def next(self) -> tuple[Job, TrialState]:
        job = self._queue.popleft()
        return job, train_part(job)


_MAX_COST: Final = 1 / 6
"""Maximum share of all steps trained in the waves. A fifth is left for rounding and the recipe's
own settings.
"""
_ROUNDING: Final = 1e-9
_TPE_GROUPS: Final = 5
"""Number of groups of a TPE search. More would learn from more results, but train fewer trials at
once.
"""


class Pool(Protocol):
    """Pool that trains trials concurrently or sequentially, in submission order."""

    def submit(self, job: Job) -> None: ...

    def next(self) -> tuple[Job, TrialState]:
        """Wait for a job to end or fail and return it with the trial's state. On a signal, raises
        KeyboardInterrupt or SystemExit after all saved.
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


def groups_of(numbers: Sequence[int], options: TuneConfig) -> list[list[int]]:
    """Split trials into the groups that train and are compared in turn, each in its start order.
    One group, shuffled to sample a grid evenly, unless the values of a group depend on the results
    of those before. Pure.
    """
    size = max(1, len(numbers))
    if options.algorithm == "tpe":
        size = math.ceil(size / _TPE_GROUPS)
    groups = [list(numbers[start : start + size]) for start in range(0, len(numbers), size)]
    for group in groups:
        random.Random(options.seed).shuffle(group)
    return groups


@final
class Waves:
    """Waves of the groups of a search, and the states of their trials. `pool` creates the pool and
    is not called if nothing is left to train. `record` saves a trial's new state.
    """

    def __init__(
        self,
        pool: Callable[[], Pool],
        options: TuneConfig,
        *,
        record: Callable[[int, TrialState], None],
        note: Callable[[str], Any],
    ) -> None:
        self.states: dict[int, TrialState] = {}
        self._pool = pool
        self._options = options
        self._record = record
        self._note = note
        self._fractions = wave_fractions(options)
        self._last = len(self._fractions) - 1
        self._configs: dict[int, TrainConfig] = {}
        self._submitted: set[int] = set()

    def add(self, number: int, config: TrainConfig, state: TrialState) -> None:
        """Add a trial with its state in the journal."""
        self._configs[number] = config
        self.states[number] = state.reopened()

    def start(self, number: int) -> None:
        """Start a trial that trains to its end, beside the groups."""
        self._submit(number, self._last)

    def train(self, group: Sequence[int]) -> None:
        """Train a group in waves. Skips parts that are already trained."""
        sign = 1.0 if self._options.metric == "auroc" else -1.0
        for wave, fraction in enumerate(self._fractions):
            for number in group:
                self._submit(number, wave)
            # All must have paused before the best are chosen, so that timing does not matter.
            self.wait(group)
            if wave < self._last and group:
                values = {number: self.states[number].value(wave) for number in group}
                best = rank_best(values, self._options.keep_fraction, sign=sign)
                self._note(
                    f"Continuing {len(best)} of {len(group)} trials after {fraction:.1%} of their "
                    "steps"
                )
                group = best

    def wait(self, numbers: Iterable[int]) -> None:
        """Wait until none of these trials is training."""
        while not self._submitted.isdisjoint(numbers):
            job, state = self._pool().next()
            self._submitted.discard(job.number)
            self.states[job.number] = state
            self._record(job.number, state)
            value = state.value(job.wave)
            metric = "" if value is None else f", {self._options.metric} {value:.5f}"
            progress = f"{job.fraction:.1%} of its steps"
            outcome = state.error or (state.state if job.wave == self._last else progress)
            self._note(f"trial {job.number}: {outcome}{metric}")

    def _submit(self, number: int, wave: int) -> None:
        state = self.states[number]
        if state.has_ended(wave):
            return
        job = Job(
            number,
            self._configs[number],
            wave,
            self._fractions[wave],
            self._options.metric,
            state.values[:wave],
        )
        self._pool().submit(job)
        self._submitted.add(number)
