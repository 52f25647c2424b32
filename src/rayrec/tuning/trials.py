"""One trial of a search: a run of its own, which trains in parts, pauses between them, and notes how it stands."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rayrec import storage
from rayrec.config import InputError, line_of
from rayrec.observe.console import Console
from rayrec.observe.events import read_events
from rayrec.training.trainer import train_until
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
    metrics = {
        name: math.nan if value is None else value for name, value in event.items() if name in ("auroc", "logloss")
    }
    return config.workload.score(metrics)
