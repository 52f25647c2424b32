"""Benchmark of every model's quality on a small log, compared with LightGBM and logistic regression
at the same tuning budget. `model lightgbm` is `--model lightgbm`, and `lightgbm` the baseline.

`--data PATH` names a log in Criteo's format; without it a synthetic one of 20,000 rows is used. The
log is rotated: each time another fourteenth of its rows is the test, and the one before it
validates. The settings of a model are chosen on the validation rows of the first rotations; test
rows take no part. `default` is the recipe as it is, `dlrm` its DLRM without first_order. `--models
linear,logistic` limits the models, `--rotations N` the rotations, `--settings N` the settings.
`--movielens PYTHON` takes MovieLens-100K from an environment with RecBole, on recipe clicks
(movielens_benchmark.py).
"""

import gzip
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from logs import synthetic_log
from movielens_benchmark import SCHEMA, csv_lines, package_of
from rows import emit, note, part

import rayrec
from rayrec.metrics.binary import binary_metrics
from rayrec.observe.console import Console
from rayrec.recipes import criteo_demo, criteo_ensemble
from rayrec.recipes.clicks import clicks
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.baselines import Kind, open_baselines

MODELS: Final = (
    "default",
    "dlrm",
    "linear",
    "widedeep",
    "deepfm",
    "xdeepfm",
    "autoint",
    "dcnv2",
    "gdcn",
    "dcnv3",
    "masknet",
    "finalmlp",
    "finalnet",
    "wukong",
)
TREES: Final = "model lightgbm"
ROTATIONS: Final = 5
TUNED_ON: Final = 3
"""Rotations whose validation rows choose the settings."""
BUDGET: Final = 6
"""Settings that are tried of every model, its defaults first."""


@dataclass(frozen=True)
class Log:
    """A rotated copy of the log: its rows start at another place."""

    path: str
    test_path: str
    """Path of a log with only the test rows."""
    number: int


@dataclass(frozen=True)
class Metrics:
    """Validation and test quality after one training."""

    validation_logloss: float
    auroc: float
    logloss: float


Fit = Callable[[dict[str, float], Log], Metrics]


def main(*, quick: bool) -> None:
    budget, rotations, models = (2, 2, MODELS[:2]) if quick else (BUDGET, ROTATIONS, MODELS)
    selected = option("--models")
    rotations, budget = int(option("--rotations") or rotations), int(option("--settings") or budget)
    with tempfile.TemporaryDirectory() as folder:
        head, lines, recipe = _log_lines()
        logs = [rotated(head, lines, folder, number, rotations) for number in range(rotations)]
        contests: dict[str, tuple[Fit, list[dict[str, float]]]] = {
            name: (partial(_trained, recipe, folder, name), _model_settings(name, budget))
            for name in models
        }
        contests[TREES] = partial(_trained, recipe, folder, TREES), _tree_settings(budget)
        if recipe is criteo_demo:
            contests["criteo_ensemble"] = (
                partial(_trained, criteo_ensemble, folder, "criteo_ensemble"),
                [{}],
            )
            contests["two members of 8"] = partial(_trained, _two_members, folder, "members"), [{}]
        for kind, settings in _baseline_settings(budget).items():
            contests[kind] = partial(_baseline, recipe, folder, kind), settings
        default: list[Metrics] = []
        for name in selected.split(",") if selected else contests:
            with part("zoo", name):
                fit, settings = contests[name]
                results = _contest(name, fit, settings, logs, default, rows=len(lines))
                default = results if name == "default" else default


def option(name: str) -> str | None:
    """Return the value of an option of this command, or None."""
    arguments = sys.argv[1:]
    return arguments[arguments.index(name) + 1] if name in arguments else None


def _log_lines() -> tuple[list[bytes], list[bytes], Any]:
    """Return the header, the rows and the recipe of the log that the options name."""
    python = option("--movielens")
    if python:
        return *csv_lines(package_of(python)), partial(clicks, schema=SCHEMA)
    return [], lines_of(option("--data") or synthetic_log(20_000)), criteo_demo


def lines_of(path: str) -> list[bytes]:
    """Read the lines of a log, plain or gzip."""
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
        return file.readlines()


def _contest(
    name: str,
    fit: Fit,
    settings: list[dict[str, float]],
    logs: list[Log],
    default: list[Metrics],
    *,
    rows: int,
) -> list[Metrics]:
    """Tune, train on every rotation, and emit a row. Return the metrics of each rotation.
    `default`: metrics of the recipe as it is, or empty.
    """
    tuning = logs[: TUNED_ON if len(settings) > 1 else 0]
    tried = [[fit(candidate, log) for log in tuning] for candidate in settings]
    best = min(
        range(len(settings)),
        key=lambda number: _mean("validation_logloss", tried[number]) if tuning else 0,
    )
    results = tried[best] + [fit(settings[best], log) for log in logs[len(tuning) :]]
    better = [
        one.auroc - other.auroc for one, other in zip(results, default or results, strict=True)
    ]
    auroc = _mean("auroc", results)
    peer = _mean("auroc", default or results)
    error = statistics.stdev(better) / math.sqrt(len(better)) if len(better) > 1 else 0.0
    best_settings = {field: float(f"{value:.3g}") for field, value in settings[best].items()}
    over = f"over the default {auroc - peer:+.4f} ± {error:.4f}"
    note(f"  {name}: {auroc:.4f} {_mean('logloss', results):.4f}, {over}, {best_settings}")
    emit(
        "zoo",
        peer="default" if default else None,
        workload=(
            f"{name}, {rows:,} rows, {len(settings)} settings tried on {len(tuning)} rotations"
        ),
        unit="auroc",
        value=auroc,
        ratio=(auroc - 0.5) / (peer - 0.5) if default else None,
        repeats=len(results),
        logloss=round(_mean("logloss", results), 4),
        over_default=round(auroc - peer, 4),
        standard_error=round(error, 4),
        settings=best_settings,
    )
    return results


def _mean(name: str, results: Sequence[Metrics]) -> float:
    return statistics.mean(getattr(one, name) for one in results)


def rotated(head: list[bytes], lines: list[bytes], folder: str, number: int, rotations: int) -> Log:
    """Write the log whose rows start at another place, and its test rows alone."""
    first = len(lines) * number // max(rotations, 7)
    rotated = lines[first:] + lines[:first]
    ending = "csv" if head else "txt"
    log = Log(
        os.path.join(folder, f"log-{number}.{ending}"),
        os.path.join(folder, f"test-{number}.{ending}"),
        number,
    )
    begin = (len(lines) * 6 // 7 + len(lines)) // 2
    for path, rows in ((log.path, rotated), (log.test_path, rotated[begin:])):
        with open(path, "wb") as file:
            file.writelines(head + rows)
    return log


def _model_settings(name: str, budget: int) -> list[dict[str, float]]:
    # One setting decides how far weights of rare categories move, as the penalty of logistic
    # regression does
    if name == "linear":
        return [
            {},
            *({"category_scale": float(scale)} for scale in np.geomspace(0.6, 2.4, budget - 1)),
        ]
    draw = np.random.default_rng(0)
    ranges = {"network": (3e-4, 1e-2), "tables": (0.01, 0.3), "penalty": (3e-5, 3e-3)}
    return [
        {},
        *(
            {name: _log_uniform(draw, *ends) for name, ends in ranges.items()}
            for _ in range(budget - 1)
        ),
    ]


def _tree_settings(budget: int) -> list[dict[str, float]]:
    draw = np.random.default_rng(0)
    ranges = {
        "learning_rate": (0.01, 0.1),
        "leaves": (4, 63),
        "min_leaf_rows": (10, 300),
        "l2": (0.1, 100),
        "columns_per_tree": (0.3, 1),
        "rows_per_tree": (0.5, 1),
    }
    return [
        {},
        *(
            {name: _log_uniform(draw, *ends) for name, ends in ranges.items()}
            for _ in range(budget - 1)
        ),
    ]


def _baseline_settings(budget: int) -> dict[Kind, list[dict[str, float]]]:
    draw = np.random.default_rng(0)
    ranges = {
        "learning_rate": (0.01, 0.1),
        "num_leaves": (4, 63),
        "min_data_in_leaf": (10, 300),
        "lambda_l2": (0.1, 100),
        "feature_fraction": (0.3, 1),
        "bagging_fraction": (0.5, 1),
    }
    trees = [
        {name: _log_uniform(draw, *ends) for name, ends in ranges.items()}
        for _ in range(budget - 1)
    ]
    return {
        "lightgbm": [{}, *trees],
        "logistic": [{"strength": float(c)} for c in np.geomspace(0.003, 1, budget)],
    }


def _log_uniform(draw: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(draw.uniform(np.log(low), np.log(high))))


def _two_members(path: str) -> TrainConfig:
    return criteo_demo(path).replace(workload={"model": {"embedding_dim": 8, "members": 2}})


def _trained(recipe: Any, folder: str, model: str, settings: dict[str, float], log: Log) -> Metrics:
    summary = rayrec.train(
        _config(recipe, folder, model, settings, log), console=Console(quiet=True)
    ).summary
    metrics = summary["metrics"]
    return Metrics(summary["validation"]["logloss"], metrics["auroc"], metrics["logloss"])


def _config(
    recipe: Any, folder: str, model: str, settings: dict[str, float], log: Log
) -> TrainConfig:
    config = recipe(log.path)
    workload = config.workload
    if model == "dlrm":
        workload = workload.replace(model=workload.model.replace(first_order=False))
    elif model in MODELS[2:]:
        workload = workload.replace(model=workload.model.with_class(model))
    if model == TREES:
        integers = {name: round(settings[name]) for name in ("leaves", "min_leaf_rows") if settings}
        trees = workload.model.with_class("lightgbm").replace(**{**settings, **integers})
        workload = workload.replace(model=trees)
    elif "category_scale" in settings:
        workload = workload.replace(model=workload.model.replace(**settings))
    elif settings:
        workload = workload.replace(
            model=workload.model.replace(embedding_penalty=settings["penalty"]),
            dense_optimizer=workload.dense_optimizer.replace(learning_rate=settings["network"]),
            sparse_optimizer=workload.sparse_optimizer.replace(learning_rate=settings["tables"]),
        )
    values = (f"{value:.6g}" for value in settings.values())
    new_config: TrainConfig = config.replace(
        workload=workload,
        storage_path=os.path.join(folder, "runs"),
        name="-".join([model, str(log.number), *values]).replace(" ", "-"),
        seed=log.number,
        scaling={"num_workers": 1},
        trackers={"prometheus": False, "tensorboard": False},
    )
    return new_config


def _baseline(
    recipe: Any, folder: str, kind: Kind, settings: dict[str, float], log: Log
) -> Metrics:
    """Fit a baseline on the Preprocessor and split of the default run, which ends at once if it
    exists.
    """
    config = _config(recipe, folder, "default", {}, log)
    checkpoint = rayrec.train(config, console=Console(quiet=True)).summary["checkpoint"]
    baselines = open_baselines(config, checkpoint, max_rows=10**7, kinds=(kind,))
    if kind == "logistic":
        fitted = baselines.fit(kind, strengths=tuple(settings.values()))
    else:
        integers: dict[str, Any] = {
            name: round(settings[name])
            for name in ("num_leaves", "min_data_in_leaf")
            if name in settings
        }
        parameters: dict[str, Any] = {"bagging_freq": 1, **settings, **integers} if settings else {}
        fitted = baselines.fit(kind, **parameters)
    test = list(baselines.rows(log.test_path))
    logits, labels = (
        np.concatenate(parts)
        for parts in zip(*((fitted.logits(r), r.label) for r in test), strict=True)
    )
    metrics = binary_metrics(logits, labels)
    validation = binary_metrics(fitted.logits(baselines.validation), baselines.validation.label)
    return Metrics(validation["logloss"], metrics["auroc"], metrics["logloss"])
