"""One trial of a search: a run of its own, whose evaluations are reported to Ray Tune."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from rayrec import storage
from rayrec.config import InputError, line_of
from rayrec.observe.console import Console
from rayrec.observe.events import follow
from rayrec.training.trainer import train
from rayrec.workloads.base import TrainConfig

RESULT: Final = "trial.json"
"""File in a trial's folder that says how it ended."""
_STOP_S: Final = 120
"""Seconds that a stopped trial has to save and end; then its process is replaced."""
State = Literal["finished", "stopped", "failed", "interrupted"]


@dataclass(frozen=True)
class Ended:
    """How a trial ended."""

    state: State
    error: str | None = None

    def save(self, folder: str) -> None:
        storage.write_json(storage.join(folder, RESULT), vars(self))

    @classmethod
    def of(cls, folder: str) -> Ended | None:
        """None if the trial is still to be trained, or to be trained on."""
        place = storage.join(folder, RESULT)
        return cls(**storage.read_json(place)) if storage.exists(place) else None


def folder_of(config: TrainConfig) -> str:
    """Of a trial's run."""
    return storage.join(config.storage_path, str(config.name))


def run_trial(number: Mapping[str, int], *, configs: list[TrainConfig]) -> None:
    """The function that Ray Tune calls in a process that trains one trial after another: trains trial `number["trial"]` and
    reports its validations. Ray Tune ends a trial by a SystemExit of `tune.report`."""
    from ray import tune

    config = configs[number["trial"]]
    folder = folder_of(config)
    over, stop = threading.Event(), threading.Event()
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(_STOP_S)
    errors: list[Exception] = []

    def work() -> None:
        try:
            train(config, console=Console(quiet=True), stop=stop)
        except SystemExit:
            pass  # it was stopped
        except Exception as error:
            errors.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=work, name="trial", daemon=True)
    thread.start()
    done = 0
    for event in follow(storage.join(folder, "events.jsonl"), stop=over):
        if event["kind"] == "evaluate" and event["set"] == "validation":
            done += 1
            try:
                tune.report({"evaluation": done, "auroc": event["auroc"], "logloss": event["logloss"]})
            except SystemExit:
                stop.set()
                thread.join()
                raise
    if errors:
        # A wrong setting ends this trial, and no other one: it is not tried again.
        Ended("failed", line_of(errors[0])).save(folder)
        if not isinstance(errors[0], InputError):
            raise errors[0]
        return
    Ended("finished").save(folder)
