"""Benchmark of recipe clicks as it is, on ten logs of numbers and categories, against LightGBM with
its default settings and early stopping, and logistic regression, on the same rows.

Seven logs are generated (own_logs.py). `--criteo PATH` names a sample in Criteo's format, gzip, and
`--movielens PYTHON` an environment with RecBole, whose package has MovieLens-100K
(movielens_benchmark.py); without them, these logs are skipped. `--logs census,bank` limits the
logs, `--seeds N` the seeds of training. `--log-seed N` generates other logs, and holds out other
rows of MovieLens-100K: a setting that was chosen on some needs a proof on others. `--set
FIELD=VALUE` changes the recipe, to compare settings on the validation rows.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import lightgbm
import numpy as np
import own_logs
import pandas as pd
from movielens_benchmark import package_of
from own_logs import Log
from rows import attempt, emit, note, part

import rayrec
from rayrec.metrics.binary import binary_metrics
from rayrec.observe.console import Console
from rayrec.recipes.clicks import clicks
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.baselines import open_baselines

SEEDS: Final = 5
_TREES: Final = 1000
_PATIENCE: Final = 30


@dataclass(frozen=True)
class Files:
    """A log's files. The recipe splits the first in three, and the other is held out."""

    log: Log
    folder: str

    @property
    def train(self) -> str:
        return os.path.join(self.folder, "train.parquet")

    @property
    def test(self) -> str:
        return os.path.join(self.folder, "test.parquet")


@dataclass(frozen=True)
class Metrics:
    """Quality of one training."""

    auroc: float
    logloss: float
    validation: float
    """Log loss of the validation rows."""
    seconds: float


def main(*, quick: bool) -> None:
    seeds = int(_option("--seeds") or (1 if quick else SEEDS))
    logs = _logs()
    selected = _option("--logs")
    for name in selected.split(",") if selected else logs:
        with part("own-logs", name), tempfile.TemporaryDirectory() as folder:
            _compare(name, _write(logs[name](), folder), seeds)


def _option(name: str) -> str | None:
    arguments = sys.argv[1:]
    return arguments[arguments.index(name) + 1] if name in arguments else None


def _log_seed() -> int:
    return int(_option("--log-seed") or 0)


def _logs() -> dict[str, Callable[[], Log]]:
    """Return the maker of each log that the options allow, by name."""
    seed = _log_seed()
    logs: dict[str, Callable[[], Log]] = {
        name: partial(make, seed) for name, make in own_logs.GENERATED.items()
    }
    sample, python = _option("--criteo"), _option("--movielens")
    if sample:
        logs["criteo"] = partial(own_logs.criteo, sample)
    if python:
        package = package_of(python)
        logs["movielens"] = partial(own_logs.movielens, package, seed, sides=False)
        logs["movielens with sides"] = partial(own_logs.movielens, package, seed, sides=True)
    if not (sample and python):
        note("  skipped without --criteo PATH or --movielens PYTHON: their logs")
    return logs


def _write(log: Log, folder: str) -> Files:
    files = Files(log, folder)
    log.train.to_parquet(files.train)
    log.test.to_parquet(files.test)
    return files


def _compare(name: str, files: Files, seeds: int) -> None:
    """Train everything on a log and emit a row for each peer."""
    ours = [_clicks(files, seed) for seed in range(seeds)]
    checkpoint = os.path.join(files.folder, "runs", "seed-0")
    peers: dict[str, Any] = {
        "LightGBM": attempt("LightGBM", lambda: _best_trees(files, checkpoint)),
        "logistic regression": attempt(
            "logistic regression", lambda: _baseline(files, checkpoint, "logistic")
        ),
    }
    auroc = statistics.mean(metrics.auroc for metrics in ours)
    logloss = statistics.mean(metrics.logloss for metrics in ours)
    spread = statistics.stdev(metrics.auroc for metrics in ours) if seeds > 1 else 0.0
    for peer, metrics in peers.items():
        over = getattr(metrics, "auroc", metrics)
        note(f"  {name}: clicks {auroc:.4f} ± {spread:.4f}, {peer} {over:.4f}")
        emit(
            "own-logs",
            peer=peer,
            workload=f"{name}, {len(files.log.train):,} rows, {len(files.log.test):,} held out",
            unit="auroc",
            value=auroc,
            ratio=(auroc - 0.5) / (over - 0.5),
            repeats=seeds,
            log_seed=_log_seed(),
            logloss=round(logloss, 4),
            spread=round(spread, 4),
            validation_logloss=round(statistics.mean(one.validation for one in ours), 4),
            peer_auroc=round(over, 4),
            over_peer=round(auroc - over, 4),
            peer_logloss=round(getattr(metrics, "logloss", metrics), 4),
            seconds=round(statistics.mean(one.seconds for one in ours), 1),
        )


def _config(files: Files, seed: int) -> TrainConfig:
    config = clicks(files.train, files.log.schema)
    changes = [
        value for flag, value in zip(sys.argv, sys.argv[1:], strict=False) if flag == "--set"
    ]
    for change in changes:
        path, _, text = change.partition("=")
        value: Any = _parsed(text)
        for field in reversed(path.split(".")):
            value = {field: value}
        config = config.replace(**value)
    return config.replace(
        storage_path=os.path.join(files.folder, "runs"),
        name=f"seed-{seed}",
        seed=seed,
        scaling={"num_workers": 1},
        trackers={"prometheus": False, "tensorboard": False},
    )


def _parsed(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def _clicks(files: Files, seed: int) -> Metrics:
    """Train recipe clicks, and score the held-out rows."""
    quiet = Console(quiet=True)
    start = time.perf_counter()
    result = rayrec.train(_config(files, seed), console=quiet)
    seconds = time.perf_counter() - start
    metrics = rayrec.evaluate(result.summary["checkpoint"], files.test, console=quiet)
    validation = result.summary["validation"]["logloss"]
    note(f"    seed {seed}: {metrics['auroc']:.4f}, validation {validation:.4f}, {seconds:.0f} s")
    return Metrics(metrics["auroc"], metrics["logloss"], validation, seconds)


def _baseline(files: Files, checkpoint: str, kind: Any, **settings: Any) -> Metrics:
    """Fit a baseline of `rayrec compare` on a run's rows."""
    start = time.perf_counter()
    rows = open_baselines(_config(files, 0), checkpoint, max_rows=10**7, kinds=(kind,))
    fitted = rows.fit(kind, **settings)
    seconds = time.perf_counter() - start
    test = list(rows.rows(files.test))
    logits = np.concatenate([fitted.logits(part) for part in test])
    labels = np.concatenate([part.label for part in test])
    metrics = binary_metrics(logits, labels)
    validation = binary_metrics(fitted.logits(rows.validation), rows.validation.label)
    return Metrics(metrics["auroc"], metrics["logloss"], validation["logloss"], seconds)


def _best_trees(files: Files, checkpoint: str) -> Metrics:
    """Return LightGBM with default settings, on the categories themselves or on their click rates,
    whichever is better on the validation rows.
    """
    by_rates = _baseline(files, checkpoint, "lightgbm", learning_rate=0.1)
    return min(_trees(files), by_rates, key=lambda metrics: metrics.validation)


def _trees(files: Files) -> Metrics:
    start = time.perf_counter()
    log = files.log
    inputs = _tree_inputs(log, log.train)
    labels = log.train["label"].to_numpy()
    # The split of the recipe: sevenths, the last of which in halves
    first, second = len(labels) * 6 // 7, (len(labels) * 6 // 7 + len(labels)) // 2
    train = lightgbm.Dataset(inputs[:first], labels[:first])
    validation = train.create_valid(inputs[first:second], labels[first:second])
    booster = lightgbm.train(
        {"objective": "binary", "verbosity": -1, "seed": 0, "deterministic": True},
        train,
        _TREES,
        valid_sets=[validation],
        callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False)],
    )
    seconds = time.perf_counter() - start

    def metrics_of(rows: pd.DataFrame, expected: np.ndarray) -> dict[str, float]:
        logits = np.asarray(booster.predict(rows, raw_score=True), np.float32)
        return binary_metrics(logits, expected)

    test = metrics_of(_tree_inputs(log, log.test), log.test["label"].to_numpy())
    validated = metrics_of(inputs[first:second], labels[first:second])
    return Metrics(test["auroc"], test["logloss"], validated["logloss"], seconds)


def _tree_inputs(log: Log, table: pd.DataFrame) -> pd.DataFrame:
    """Return numbers, categories of the training log, and 0 or 1 for each item of a list."""
    columns: dict[str, Any] = {name: table[name].astype(float) for name in log.schema.dense}
    for name in log.schema.sparse:
        if name in log.schema.lists:
            items = sorted({item for row in log.train[name] for item in row.split("|")} - {""})
            marked = "|" + table[name] + "|"
            for item in items:
                columns[f"{name} {item}"] = marked.str.contains(f"|{item}|", regex=False) * 1.0
            continue
        categories = pd.Index(log.train[name].unique())
        codes = categories.get_indexer(table[name])
        columns[name] = pd.Categorical.from_codes(codes, categories)
    return pd.DataFrame(columns)
