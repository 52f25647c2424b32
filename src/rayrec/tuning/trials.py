"""Trials of a search: runs trained in parts, with pauses, and synchronous successive halving (Jamieson and Talwalkar,
"Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016).

Trials train in waves. All trials of a wave train to the same share of their steps and pause. When all have paused, the best
of them continue with the next wave, so the selection does not depend on timing.
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
"""File in a trial's folder with its state."""
State = Literal["new", "paused", "finished", "failed"]


@dataclass(frozen=True)
class Standing:
    """State of a trial after its trained parts."""

    state: State
    values: tuple[float | None, ...] = ()
    """Metric after each wave. For a finished trial, the last one is the metric of the selected weights."""
    error: str | None = None
    can_retry: bool = False
    """Whether the next search retries a failed trial, because its settings did not cause the error."""

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
        """Return the state to resume from in a new search."""
        return Standing("paused", self.values) if self.state == "failed" and self.can_retry else self

    def has_ended(self, wave: int) -> bool:
        """Return whether this wave is complete for the trial."""
        return self.state in ("finished", "failed") or len(self.values) > wave

    def value(self, wave: int) -> float | None:
        """Return the metric after a wave, or of the selected weights if the trial had finished by then. None
        without metric, or if the trial failed before."""
        if wave < len(self.values):
            return self.values[wave]
        return self.values[-1] if self.state == "finished" else None


@dataclass(frozen=True)
class Job:
    """Part of a trial to train."""

    number: int
    config: TrainConfig
    wave: int
    share: float
    """Share of the trial's steps after which it pauses. 1 trains to the end."""
    metric: str


def folder_of(config: TrainConfig) -> str:
    """Return the run folder of a trial."""
    return storage.join(config.storage_path, str(config.name))


def train_part(job: Job, *, stop: threading.Event | None = None) -> None:
    """Train a part of a trial in this process and save its state. Errors are saved as a failed trial. `stop` and signals act as
    in `rayrec.training.trainer.train` and save no state."""
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
    """Save the state of a failed trial, which this search does not train again."""
    folder = folder_of(job.config)
    Standing("failed", Standing.of(folder).values, error, can_retry).save(folder)


def validations_in(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the validation evaluations among a run's events."""
    return [event for event in events if event["kind"] == "evaluate" and event["set"] == "validation"]


def chosen(evaluations: Sequence[Mapping[str, Any]], config: TrainConfig, metric: str) -> float | None:
    """Return the metric of the weights selected if the run ended here, or None if absent or not finite. Pure.

    These are the weights of the last evaluation, or of the best one with early stopping. Earlier pauses, which early stopping
    does not count, kept no weights.
    """
    kept = [*(event for event in evaluations[:-1] if event.get("counted", True)), *evaluations[-1:]]

    def score(event: Mapping[str, Any]) -> float:
        metrics = {name: math.nan if value is None else value for name, value in event.items() if name in ("auroc", "logloss")}
        return config.workload.score(metrics)

    if config.early_stopping.patience:
        kept.sort(key=score)
    return _finite(kept[-1][metric]) if kept else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@final
class HerePool:
    """Pool that trains sequentially in this process (see `rayrec.tuning.trials.Pool`). Signals reach the running trial."""

    def __init__(self) -> None:
        self._queue: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def next(self) -> Job:
        job = self._queue.popleft()
        train_part(job)
        return job


_MOST_COST: Final = 1 / 6
"""Maximum share of all steps trained in the waves. A fifth is left for rounding and the recipe's own settings."""
_ROUNDING: Final = 1e-9


class Pool(Protocol):
    """Pool that trains trials concurrently or sequentially, in submission order."""

    def submit(self, job: Job) -> None: ...

    def next(self) -> Job:
        """Wait for a job to end or fail and return it. On a signal, raises KeyboardInterrupt or SystemExit after all running
        jobs have saved."""
        ...


def shares_of(options: TuneConfig) -> tuple[float, ...]:
    """Return the share of a trial's steps at the end of each wave; the last is 1. Each is `keep_fraction` of the next. Uses the
    fewest waves for which the cost without rounding, `keep**n * (1 + n * (1 - keep))` for n waves before the last, is at most
    a sixth. Pure."""
    if not options.stop_early:
        return (1.0,)
    keep = options.keep_fraction
    waves = next(n for n in itertools.count(1) if keep**n * (1 + n * (1 - keep)) <= _MOST_COST)
    return tuple(keep**power for power in range(waves, -1, -1))


def num_kept(count: int, keep: float) -> int:
    """Return how many of `count` trials continue, at least one. Pure."""
    return max(1, math.ceil(count * keep - _ROUNDING))


def best_of(values: Mapping[int, float | None], keep: float, *, sign: float) -> list[int]:
    """Return the trials to continue, the best first, given each trial's metric (None if it failed). Ties go to the lower number.
    `sign` is 1 if more is better, else -1. Pure."""
    known = {number: value for number, value in values.items() if value is not None}
    ranked = sorted(known, key=lambda number: (-sign * known[number], number))
    return ranked[: num_kept(len(values), keep)]


def cost(trials: int, options: TuneConfig) -> float:
    """Return the share of all steps trained in a search of `trials` trials without failures, including the recipe's own settings.
    Pure."""
    total, group, before = 1.0, trials - 1, 0.0
    for share in shares_of(options):
        total += group * (share - before)
        group, before = num_kept(group, options.keep_fraction) if group else 0, share
    return total / trials


def order_of_trials(count: int, seed: int) -> list[int]:
    """Return the start order: trial 0, which trains to its end, then the others shuffled, so that the first ones sample all
    values of a grid. Pure."""
    others = list(range(1, count))
    random.Random(seed).shuffle(others)
    return [0, *others]


def run_waves(
    configs: Sequence[TrainConfig], pool: Callable[[], Pool], options: TuneConfig, *, note: Callable[[str], Any]
) -> dict[int, Standing]:
    """Train the trials and return their states. Skips parts that are already trained. Trial 0 has the recipe's own settings and
    trains to its end. `pool` creates the pool and is not called if nothing is left to train."""
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
            note(f"Continuing {len(kept)} of {len(group)} trials after {shares[wave]:.1%} of their steps")
            group = kept
    if own:
        take()
    return standings
