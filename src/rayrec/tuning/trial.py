"""One trial of a search: a run of its own, whose evaluations are reported to Ray Tune."""

from __future__ import annotations

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
    """The function that Ray Tune calls in a process of its own: trains trial `number["trial"]` and reports its validations."""
    from ray import tune

    config = configs[number["trial"]]
    folder = folder_of(config)
    over = threading.Event()
    errors: list[Exception] = []

    def work() -> None:
        try:
            train(config, console=Console(quiet=True))
        except Exception as error:
            errors.append(error)
        finally:
            over.set()

    threading.Thread(target=work, name="trial", daemon=True).start()
    done = 0
    for event in follow(storage.join(folder, "events.jsonl"), stop=over):
        if event["kind"] == "evaluate" and event["set"] == "validation":
            done += 1
            tune.report({"evaluation": done, "auroc": event["auroc"], "logloss": event["logloss"]})
    if errors:
        # A wrong setting ends this trial, and no other one: it is not tried again.
        Ended("failed", line_of(errors[0])).save(folder)
        if not isinstance(errors[0], InputError):
            raise errors[0]
        return
    Ended("finished").save(folder)
