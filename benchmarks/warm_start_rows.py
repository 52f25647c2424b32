"""Benchmark of incremental training on clicks that drift from day to day.

The candidates train on each new day from the model of the day before, on all days so far, and never
again. All are scored on the next day.
"""

import os
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from logs import dated_log
from rows import emit, note

import rayrec
from rayrec.observe.console import Console
from rayrec.observe.events import read_events
from rayrec.recipes import criteo_demo
from rayrec.storage import read_json

QUIET = Console(quiet=True)
DAYS = 6
ROWS_A_DAY = 80_000
DRIFT = 6


@dataclass(frozen=True)
class Trained:
    """A model, and what it has cost: rows that were read in training, and seconds with the counting
    of categories.
    """

    run: str
    auroc: float
    rows: int
    seconds: float


def main(*, quick: bool) -> None:
    days, rows = (4, 20_000) if quick else (DAYS, ROWS_A_DAY)
    folders = dated_log(rows * days, days, drift=DRIFT)
    truth = read_json(os.path.join(os.path.dirname(folders[0]), "truth.json"))["days_detail"]
    with tempfile.TemporaryDirectory() as storage:
        first = _trained(storage, "full-0", folders[0], folders[1])
        warm = full = first
        note(f"  day 1: {first.auroc:.4f}")
        totals = {"full retraining": first.seconds, "warm start": first.seconds}
        rows_of = {"full retraining": first.rows, "warm start": first.rows}
        for day in range(1, days - 1):
            so_far = f"{folders[0][:-1]}[1-{day + 1}]"  # a glob of the folders up to this day
            full = _trained(storage, f"full-{day}", so_far, folders[day + 1])
            warm = _warm(storage, f"warm-{day}", warm.run, folders[day], folders[day + 1])
            stale = rayrec.evaluate(first.run, folders[day + 1], console=QUIET)["auroc"]
            note(
                f"  day {day + 1}: full {full.auroc:.4f}, warm {warm.auroc:.4f}, stale {stale:.4f}"
            )
            for peer, trained in (("full retraining", full), ("warm start", warm)):
                totals[peer] += trained.seconds
                rows_of[peer] += trained.rows
            emit(
                "warm-start",
                peer="full retraining on all days",
                workload=f"day {day + 2} of {days}, {rows:,} rows a day, drift {DRIFT}",
                unit="auroc",
                value=warm.auroc,
                ratio=warm.seconds / full.seconds,
                repeats=1,
                warm_auroc=round(warm.auroc, 5),
                peer_auroc=round(full.auroc, 5),
                stale_auroc=round(stale, 5),
                best_auroc=round(truth[day + 1]["auroc"], 5),
                rows=warm.rows,
                peer_rows=full.rows,
                seconds=round(warm.seconds, 2),
                peer_seconds=round(full.seconds, 2),
            )
        note(
            f"  rows trained: {rows_of}; seconds: "
            f"{ ({name: round(value, 1) for name, value in totals.items()}) }"
        )


def _config(storage: str, name: str, train: str, evaluate: str) -> rayrec.TrainConfig:
    return criteo_demo(train).replace(
        storage_path=storage,
        name=name,
        eval_data={"path": evaluate},
        epochs=1,
        batch_size=512,
        evaluate_every=1 << 30,
        min_steps_per_epoch=1,
        early_stopping={"patience": 0},
        scaling={"num_workers": 1, "threads_per_worker": 1},
        trackers={"prometheus": False, "tensorboard": False},
        observe={"times": False},
    )


def _trained(storage: str, name: str, train: str, evaluate: str, **changes: Any) -> Trained:
    """Train a model and evaluate it on the next day. The seconds exclude this evaluation, which
    every model needs.
    """
    started_s = time.monotonic()
    config = _config(storage, name, train, evaluate).updated(changes)
    result = rayrec.train(config, console=QUIET)
    seconds = time.monotonic() - started_s
    events = read_events(os.path.join(result.folder, "events.jsonl"))
    evaluation_s = sum(
        after["time"] - event["time"]
        for event, after in pairwise(events)
        if after["kind"] == "evaluate"
    )
    return Trained(
        result.folder, result.metrics["auroc"], result.summary["rows"], seconds - evaluation_s
    )


def _warm(storage: str, name: str, before: str, train: str, evaluate: str) -> Trained:
    started_s = time.monotonic()
    vocabulary = os.path.join(storage, f"{name}-vocabulary")
    rayrec.vocabulary(train, out=vocabulary, extend=before, console=QUIET)
    counting_s = time.monotonic() - started_s
    trained = _trained(
        storage, name, train, evaluate, init_from=before, workload={"preprocessor": vocabulary}
    )
    return Trained(trained.run, trained.auroc, trained.rows, trained.seconds + counting_s)
