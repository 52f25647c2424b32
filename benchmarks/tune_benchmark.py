"""Benchmark of successive halving, compared with a full grid of 48 trials.

Measures its share of rows and seconds, whether it finds the grid's best trial, and the AUROC lost
if not. Also measures the cost of resuming a paused trial and of reading the log.
"""

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from logs import synthetic_log
from rows import emit, note, part

import rayrec
from rayrec.observe.console import Console
from rayrec.observe.events import read_events
from rayrec.recipes import criteo_demo
from rayrec.storage import read_json
from rayrec.tuning import search

GRID: dict[str, Any] = {
    "workload.dense_optimizer.learning_rate": {"grid": [0.0003, 0.001, 0.003, 0.01]},
    "workload.sparse_optimizer.learning_rate": {"grid": [0.01, 0.03, 0.1, 0.3]},
    "workload.model.embedding_penalty": {"grid": [0.0, 3e-4, 1e-3]},
}
LOGS = ((120_000, 0), (120_000, 1), (120_000, 2))
"""Rows and seed."""
ROWS_OF_INGEST = 600_000
EVALUATIONS = 27


@dataclass(frozen=True)
class Searched:
    """A search, with the metrics of its best trial's weights on the test rows."""

    summary: dict[str, Any]
    folder: str
    test_auroc: float
    prepare_s: float
    """Seconds in which the log was indexed, counted and parsed."""

    @property
    def seconds(self) -> float:
        """Seconds of all trials, without their pauses."""
        return sum(trial["seconds"] for trial in self.summary["trials"])

    @property
    def rows(self) -> int:
        return sum(trial["rows"] for trial in self.summary["trials"])

    def events(self) -> list[list[dict[str, Any]]]:
        """Return the events of each trial."""
        trials = (f"trial_{trial['number']:04d}" for trial in self.summary["trials"])
        return [
            read_events(os.path.join(self.folder, "trials", name, "events.jsonl"))
            for name in trials
        ]


def main(*, quick: bool) -> None:
    for rows, seed in ((20_000, 0),) if quick else LOGS:
        path = synthetic_log(rows, seed=seed)
        with part("tune", f"{rows:,} rows, seed {seed}"), tempfile.TemporaryDirectory() as storage:
            halving = _searched(path, storage, "halving", GRID, stop_early=True)
            full = _searched(path, storage, "full", GRID, stop_early=False)
            _report(f"{rows:,} rows, seed {seed}", halving, full)
    rows = 20_000 if quick else ROWS_OF_INGEST
    with part("tune", f"{rows:,} rows, ingest"), tempfile.TemporaryDirectory() as storage:
        short = _searched(
            synthetic_log(rows), storage, "short", GRID, stop_early=True, steps=EVALUATIONS
        )
        _report_ingest(f"{rows:,} rows", short)


def _searched(
    path: str, storage: str, name: str, grid: dict[str, Any], *, stop_early: bool, **changes: Any
) -> Searched:
    config = criteo_demo(path).replace(
        storage_path=storage,
        name=name,
        early_stopping={"patience": 0},
        trackers={"prometheus": False, "tensorboard": False},
        cluster={"address": "local", "num_cpus": 2},
        **changes,
    )
    config = config.replace(evaluate_every=_steps(config, path) // EVALUATIONS)
    seconds: list[float] = []
    prepared: Any = search._prepare  # nothing else says what it takes

    def timed(*arguments: Any) -> Any:
        start_s = time.perf_counter()
        result = prepared(*arguments)
        seconds.append(time.perf_counter() - start_s)
        return result

    search._prepare = timed  # type: ignore[assignment]
    try:
        summary = rayrec.tune(
            config, search=grid, stop_early=stop_early, console=Console(quiet=True)
        )
    finally:
        search._prepare = prepared
    folder = summary["folder"]
    best = os.path.join(folder, "trials", f"trial_{summary['best']['number']:04d}", "summary.json")
    searched = Searched(summary, folder, read_json(best)["metrics"]["auroc"], seconds[0])
    note(
        f"  {name}: best {summary['best']['values']}, validation {summary['best']['auroc']:.5f}, "
        f"test {searched.test_auroc:.5f}, {searched.rows:,} rows, {searched.seconds:.0f} s"
    )
    return searched


def _steps(config: rayrec.TrainConfig, path: str) -> int:
    """Return the approximate step count of a trial, which trains on twelve fourteenths of the
    log.
    """
    if config.steps is not None:
        return config.steps
    with open(path, "rb") as file:
        rows = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 24), b"")) * 12 // 14
    size = min(config.worker_batch_size, rows // config.min_steps_per_epoch)
    return config.epochs * -(-rows // size)


def _report(workload: str, halving: Searched, full: Searched) -> None:
    trials = full.summary["trials"]
    ranked = {trial["number"]: rank for rank, trial in enumerate(trials)}
    best = halving.summary["best"]["number"]
    emit(
        "tune",
        peer=f"full grid of {len(trials)} trials",
        workload=workload,
        unit="trained_share",
        value=halving.rows / full.rows,
        ratio=halving.seconds / full.seconds,
        repeats=1,
        same_best=best == full.summary["best"]["number"],
        place_in_grid=1 + ranked[best],
        validation_auroc=round(halving.summary["best"]["auroc"], 5),
        peer_validation_auroc=round(full.summary["best"]["auroc"], 5),
        test_auroc=round(halving.test_auroc, 5),
        peer_test_auroc=round(full.test_auroc, 5),
        worst_validation_auroc=round(
            min(trial["best"] for trial in trials if trial["best"] is not None), 5
        ),
    )
    resumed = [start for events in halving.events() for start in _starts(events)[1:]]
    emit(
        "tune",
        peer=None,
        workload=f"{workload}, a paused trial resumes",
        unit="seconds",
        value=statistics.median(resumed),
        ratio=None,
        repeats=len(resumed),
        longest_s=round(max(resumed), 2),
    )


def _report_ingest(workload: str, searched: Searched) -> None:
    """Print the ingest time of all trials, which read the log once, relative to one trial."""
    opened = [_opened_s(events) for events in searched.events()]
    alone = searched.prepare_s + statistics.median(opened)
    # The first ones in a process import modules too
    ingest = searched.prepare_s + len(opened) * statistics.median(opened)
    emit(
        "tune",
        peer="one trial",
        workload=f"{workload}, ingest of {len(opened)} trials",
        unit="seconds",
        value=ingest,
        ratio=ingest / alone,
        repeats=1,
        peer_seconds=round(alone, 3),
        opened_s=round(statistics.median(opened), 4),
    )


def _starts(events: list[dict[str, Any]]) -> list[float]:
    """Return the seconds from the start to the end of the first step, for each part of a trial."""
    seconds = []
    began_s = 0.0
    for event in events:
        if event["kind"] == "run":
            began_s = event["time"]
        elif event["kind"] == "start_up" and "first_step" in event["stages"]:
            seconds.append(event["time"] - began_s)
    return seconds


def _opened_s(events: list[dict[str, Any]]) -> float:
    """Sum the seconds in which the parts of a trial opened the preprocessed rows."""
    stages = [event["stages"] for event in events if event["kind"] == "start_up"]
    return sum(
        part.get(name, 0.0)
        for part in stages
        for name in ("index", "vocabulary", "prepare", "loader")
    )
