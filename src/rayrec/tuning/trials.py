"""Trials of a search: runs that train in parts, pause between them, and note how they stand; and which of them train on:
synchronous successive halving (Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization",
AISTATS 2016).

Trials train in waves. In each, all trials of the wave train up to the same share of their steps and pause there; when the last
has come, the best of them go on to the next wave. So which trials these are depends on no timing.
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

STANDING: Final = "trial.json"
"""File in a trial's folder that says how it stands."""
State = Literal["new", "paused", "finished", "failed"]


@dataclass(frozen=True)
class Standing:
    """How a trial stands after the parts that it has trained."""

    state: State
    values: tuple[float | None, ...] = ()
    """The metric after each wave that it was in; of a finished trial the last one is that of its weights to use."""
    error: str | None = None
    can_retry: bool = False
    """Whether the next search trains a failed trial again, because its settings did not cause the error."""

    def save(self, folder: str) -> None:
        storage.write_json(storage.join(folder, STANDING), vars(self))

    @classmethod
    def of(cls, folder: str) -> Standing:
        place = storage.join(folder, STANDING)
        if not storage.exists(place):
            return cls("new")
        found = storage.read_json(place)
        return cls(found["state"], tuple(found["values"]), found["error"], found.get("can_retry", True))

    def reopened(self) -> Standing:
        """Return the standing to resume from in a new search."""
        return Standing("paused", self.values) if self.state == "failed" and self.can_retry else self

    def has_ended(self, wave: int) -> bool:
        """Whether nothing is left to train in this wave."""
        return self.state in ("finished", "failed") or len(self.values) > wave

    def value(self, wave: int) -> float | None:
        """The metric after a wave; of a trial that had finished by then, that of its weights to use. None if it has none, or
        failed before."""
        if wave < len(self.values):
            return self.values[wave]
        return self.values[-1] if self.state == "finished" else None


@dataclass(frozen=True)
class Job:
    """A part of a trial that is to be trained."""

    number: int
    config: TrainConfig
    wave: int
    share: float
    """Of the trial's steps, after which it pauses; 1: it trains to its end."""
    metric: str


def folder_of(config: TrainConfig) -> str:
    """Of a trial's run."""
    return storage.join(config.storage_path, str(config.name))


def train_part(job: Job, *, stop: threading.Event | None = None) -> None:
    """Trains a part of a trial in this process and writes down how it stands then. An error ends the trial, and is written down;
    `stop` and signals are as for `rayrec.training.trainer.train`, and write nothing."""
    folder = folder_of(job.config)
    before = Standing.of(folder).values[: job.wave]
    try:
        result = train_until(job.config, job.share, console=Console(quiet=True), stop=stop)
    except Exception as error:
        failed(job, line_of(error), can_retry=not isinstance(error, InputError) or isinstance(error.__cause__, OSError))
        return
    if result is None:
        value = chosen(validations_in(read_events(storage.join(folder, "events.jsonl"))), job.config, job.metric)
    else:
        value = _finite(result.summary["validation"][job.metric])
    Standing("paused" if result is None else "finished", (*before, value)).save(folder)


def failed(job: Job, error: str, *, can_retry: bool) -> None:
    """Save the standing of a failed trial, which this search does not train again."""
    folder = folder_of(job.config)
    Standing("failed", Standing.of(folder).values, error, can_retry).save(folder)


def validations_in(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The evaluations of the validation rows among a run's events."""
    return [event for event in events if event["kind"] == "evaluate" and event["set"] == "validation"]


def chosen(evaluations: Sequence[Mapping[str, Any]], config: TrainConfig, metric: str) -> float | None:
    """Return the metric of the weights that a run which ended here would have, None if there is none or it is not finite. Pure.

    These are the weights of the last evaluation, with early stopping those of the best one. Earlier pauses, which early stopping
    does not count, kept no weights.
    """
    kept = [*(event for event in evaluations[:-1] if event.get("counted", True)), *evaluations[-1:]]
    if config.early_stopping.patience:
        kept.sort(key=lambda event: _score(event, config))
    return _finite(kept[-1][metric]) if kept else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _score(event: Mapping[str, Any], config: TrainConfig) -> float:
    metrics = {name: math.nan if value is None else value for name, value in event.items() if name in ("auroc", "logloss")}
    return config.workload.score(metrics)


@final
class HerePool:
    """See `rayrec.tuning.trials.Pool`. A signal reaches the trial that trains."""

    def __init__(self) -> None:
        self._queue: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def next(self) -> Job:
        job = self._queue.popleft()
        train_part(job)
        return job


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
