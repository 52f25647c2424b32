"""Runs of tests: trained without a word, and what their events tell."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import rayrec
from rayrec import recipes
from rayrec.observe.console import Console
from rayrec.observe.events import read_events
from rayrec.training import trainer
from rayrec.workloads.base import TrainConfig

QUIET = Console(quiet=True)
LEAN: dict[str, Any] = {"trackers": {"prometheus": False, "tensorboard": False}, "observe": {"times": False}}
"""Settings of a run without trackers and step times."""
TWO_WORKERS: dict[str, Any] = {
    "name": "run",
    "eval_batch_size": 20,
    "evaluate_every": 20,
    "log_every": 1,
    "scaling": {"num_workers": 2, "threads_per_worker": 1},
    "cluster": {"num_cpus": 2},
}
"""Settings of runs of some seconds."""


def one_worker(log: Path, storage: Path, **changes: Any) -> TrainConfig:
    """A run of some seconds on FOLDER/train.txt: 20 steps of one worker, evaluated and saved every 8."""
    fields: dict[str, Any] = {
        "storage_path": str(storage),
        "name": "run",
        "steps": 20,
        "batch_size": 128,
        "scaling": {"num_workers": 1},
        "evaluate_every": 8,
        "log_every": 4,
        "early_stopping": {"patience": 0},
        "train_data": {"block_bytes": 1 << 20, "segments_per_block": 4},
    }
    return recipes.criteo_demo(str(log / "train.txt")).replace(**{**fields, **changes})


def train(config: TrainConfig, **changes: Any) -> trainer.Result:
    return trainer.train(config.replace(**changes), console=QUIET)


def events_of(run: str | Path, *kinds: str) -> list[dict[str, Any]]:
    return read_events(f"{run}/events.jsonl", kinds=kinds or None)


def losses(run: str | Path) -> list[float]:
    """Of the steps that were logged."""
    return [event["loss"] for event in events_of(run, "step")]


def check_same_in_two_parts(config: TrainConfig, whole: trainer.Result, *, steps: int) -> None:
    """Train to a step, then to the end: the weights are those of the run in one go, and no row is lost or repeated."""
    train(config, name="parts", steps=steps)
    summary = train(config, name="parts").summary
    assert summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert (summary["rows_lost"], summary["rows_repeated"]) == (0, 0)


def evaluated_and_predicted(checkpoint: str, log: str, out: Path, **options: Any) -> tuple[dict[str, Any], pa.Table]:
    """Return the metrics of a log and its predictions in order, which are written to OUT."""
    metrics = rayrec.evaluate(checkpoint, log, console=QUIET, **options)
    rayrec.predict(checkpoint, log, out=str(out), console=QUIET, **options)
    return metrics, pq.read_table(out).sort_by("row")


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
