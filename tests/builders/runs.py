"""Runs of tests: trained without a word, and what their events tell."""

from pathlib import Path
from typing import Any

from rayrec.observe.console import Console
from rayrec.observe.events import read_events
from rayrec.training import trainer
from rayrec.workloads.base import TrainConfig

QUIET = Console(quiet=True)
LEAN: dict[str, Any] = {"trackers": {"prometheus": False, "tensorboard": False}, "observe": {"times": False}}
"""Settings of a run without trackers and step times."""


def train(config: TrainConfig, **changes: Any) -> trainer.Result:
    return trainer.train(config.replace(**changes), console=QUIET)


def events_of(run: str | Path, *kinds: str) -> list[dict[str, Any]]:
    return read_events(f"{run}/events.jsonl", kinds=kinds or None)


def losses(run: str | Path) -> list[float]:
    """Of the steps that were logged."""
    return [event["loss"] for event in events_of(run, "step")]
