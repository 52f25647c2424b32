"""Trials of a search: runs trained in parts, with pauses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayrec import storage
from rayrec.config import InputError, error_line
from rayrec.observe.console import Console
from rayrec.observe.events import read_events
from rayrec.training.trainer import train_until
from rayrec.workloads.base import TrainConfig


@dataclass(frozen=True)
class Job:
    """Part of a trial to train."""

    number: int
    config: TrainConfig
    wave: int
    fraction: float
    """Share of the trial's steps after which it pauses. 1 trains to the end."""
    metric: str


@dataclass(frozen=True)
class PartResult:
    """Result of training a part of a trial."""

    value: float | None = None
    """Metric of the selected weights, None if it is not finite or the part failed."""
    finished: bool = False
    """Whether the trial has trained to its end."""
    error: str | None = None
    can_retry: bool = False
    """Whether the next search retries a failed trial, because its settings did not cause the
    error.
    """


def trial_folder(config: TrainConfig) -> str:
    """Return the run folder of a trial."""
    return storage.join(config.storage_path, str(config.name))


def train_parts(jobs: Iterable[Job]) -> Iterator[tuple[Job, PartResult]]:
    """Train parts sequentially in this process. Signals reach the running trial."""
    for job in jobs:
        yield job, train_part(job)


def train_part(job: Job) -> PartResult:
    """Train a part of a trial in this process. Errors become a failed part. Signals act as in
    `rayrec.training.trainer.train`.
    """
    try:
        result = train_until(job.config, job.fraction, console=Console(quiet=True))
    except Exception as error:
        # Settings cause an InputError, unless it only words an error of storage. Other errors may
        # be those of the machine.
        can_retry = not isinstance(error, InputError) or isinstance(error.__cause__, OSError)
        return PartResult(error=error_line(error), can_retry=can_retry)
    if result is None:
        path = storage.join(trial_folder(job.config), "events.jsonl")
        validations = validations_in(read_events(path))
        return PartResult(selected_metric(validations, job.config, job.metric))
    value = result.summary["validation"][job.metric]
    if value is None or not math.isfinite(value):
        return PartResult(error=f"validation {job.metric} is not finite")
    return PartResult(value, finished=True)


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

    # Stable: of equal ones, the last counts, which is the one that training keeps.
    if config.early_stopping.patience:
        candidates.sort(key=score)
    value = candidates[-1][metric] if candidates else None
    return value if value is not None and math.isfinite(value) else None
