"""Small runs of tests, trained without a word, and their events and summaries."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import rayrec
from rayrec import recipes
from rayrec.observe.console import Console
from rayrec.observe.events import read_events
from rayrec.training import trainer
from rayrec.training.result import Result
from rayrec.workloads.base import TrainConfig

QUIET = Console(quiet=True)
LEAN: dict[str, Any] = {
    "trackers": {"prometheus": False, "tensorboard": False},
    "observe": {"times": False},
}
"""Settings of a run without trackers and step times."""


def threads_of(workers: int | tuple[int, int]) -> dict[str, Any]:
    """Return the scaling of so many workers of one thread each, so that sums are the same."""
    return {"num_workers": workers, "threads_per_worker": 1}


TWO_WORKERS: dict[str, Any] = {"scaling": threads_of(2), "cluster": {"num_cpus": 2}}


def short_run(
    config: TrainConfig,
    storage: str | Path,
    steps: int | None,
    **changes: Any,
) -> TrainConfig:
    """Return a run of one worker and so many steps, evaluated at the last one."""
    return config.replace(
        **{
            "storage_path": str(storage),
            "name": "run",
            "steps": steps,
            "evaluate_every": steps,
            "scaling": {"num_workers": 1},
            **changes,
        }
    )


def one_worker(log: Path, storage: str | Path, **changes: Any) -> TrainConfig:
    """Return a run of some seconds on LOG/train.txt: 20 steps of one worker, evaluated and saved
    every 8, of a plain DLRM.
    """
    fields: dict[str, Any] = {
        "steps": 20,
        "batch_size": 128,
        "evaluate_every": 8,
        "log_every": 4,
        "workload": {"model": {"first_order": False}},
    }
    fields |= {
        "early_stopping": {"patience": 0},
        "train_data": {"block_bytes": 1 << 20, "segments_per_block": 4},
    }
    return short_run(recipes.criteo_demo(str(log / "train.txt")), storage, **{**fields, **changes})


def small_run(log: Path, storage: str | Path, **changes: Any) -> TrainConfig:
    """Return a run of `one_worker` in two workers of a Ray, on any nodes: 480 steps, saved every
    40, room for several faults.
    """
    return one_worker(
        log,
        storage,
        **{
            **TWO_WORKERS,
            "steps": 480,
            "batch_size": 64,
            "evaluate_every": 160,
            "checkpoint": {"every": 40, "num_to_keep": 5},
            "train_data": {"block_bytes": 1 << 17, "segments_per_block": 4},
            **changes,
        },
    )


def train(config: TrainConfig, **changes: Any) -> Result:
    return trainer.train(config.replace(**changes), console=QUIET)


def events_of(run: str | Path, *kinds: str) -> list[dict[str, Any]]:
    return read_events(f"{run}/events.jsonl", kinds=kinds or None)


def losses(run: str | Path) -> list[float]:
    return [event["loss"] for event in events_of(run, "step")]


def check_no_rows_lost(summary: dict[str, Any], *, restarts: int | None = None) -> None:
    """Check that a run lost and repeated no row, and how often it restarted."""
    assert (summary["rows_lost"], summary["rows_repeated"]) == (0, 0)
    assert restarts in (None, summary["restarts"])


def check_same_run(
    summary: dict[str, Any],
    expected: dict[str, Any],
    *names: str,
    restarts: int | None = None,
) -> None:
    """Check that a run lost and repeated no row, and that its weights and other values equal those
    of another run.
    """
    check_no_rows_lost(summary, restarts=restarts)
    for name in ("weights_sha256", "steps", "rows", *names):
        assert summary[name] == expected[name], name


def check_same_in_two_parts(config: TrainConfig, whole: Result, *, steps: int) -> None:
    """Train to a step, then to the end, and compare with the run in one go."""
    train(config, name="parts", steps=steps)
    check_same_run(train(config, name="parts").summary, whole.summary)


def evaluated_and_predicted(
    checkpoint: str,
    log: str,
    out: Path,
    *,
    exclude_seen: bool = True,
    **options: Any,
) -> tuple[dict[str, Any], pa.Table]:
    """Return the metrics of a log and its predictions in order, which are written to OUT."""
    metrics = rayrec.evaluate(checkpoint, log, console=QUIET, **options)
    rayrec.predict(
        checkpoint,
        log,
        out=str(out),
        console=QUIET,
        exclude_seen=exclude_seen,
        **options,
    )
    return metrics, pq.read_table(out).sort_by("row")


def export(checkpoint: str, out: str | Path, **options: Any) -> dict[str, Any]:
    """Export a checkpoint, and check that the scores match. Returns the report."""
    report = rayrec.export(checkpoint, out=str(out), **options)
    assert report["parity"]["failure"] is None
    return report


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
