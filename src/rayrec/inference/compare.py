"""Comparison of click models on the same rows of a labelled log: metrics with intervals, costs and differences."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from rayrec import storage
from rayrec.config import InputError
from rayrec.humanize import json_values
from rayrec.inference.config import ComparisonConfig, ComparisonGates
from rayrec.inference.evaluate import ScoredRows, scored_rows
from rayrec.inference.scoring import ScoringJob, ScoringRequest
from rayrec.metrics.binary import binary_metrics
from rayrec.metrics.ranking import gauc
from rayrec.metrics.significance import METRICS, Difference, compare_models
from rayrec.models.base import ModelInputs
from rayrec.models.cost import network_multiply_adds
from rayrec.observe.console import Console
from rayrec.workloads.recsys.baselines import Baselines, Kind, open_baselines
from rayrec.workloads.recsys.scorer import load_preprocessor
from rayrec.workloads.recsys.workload import ClickWorkload
from rayrec.workloads.scoring import PREFIX

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig

_RAW_FIELDS: Final = (
    "label", "dense", "sparse", "tokens", "lists", "weight", "integers", "optional", "delimiter", "list_delimiter", "nan",
)  # fmt: skip
"""Schema fields that determine the rows of a log and their columns."""


def compare(
    checkpoints: Sequence[str],
    path: str,
    *,
    configs: Sequence[TrainConfig],
    options: ComparisonConfig | None = None,
    gates: ComparisonGates | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Score every labelled row with each of two or more click models, and compare their metrics.

    Models are scored sequentially. Each reads and parses the log and loads its weights, which `rows_per_s` includes. Memory on
    the driver: 5 bytes per row, plus 4 per model, plus 8 with a group, and about 70 per row and model to compute intervals.
    `configs` has the configuration of each checkpoint. Raises InputError for a single model, models without clicks, different raw
    schemas or rows, and as in `evaluate`.

    Returns:
        JSON values, None if undefined: `rows`, `label_rate`, `resampling`, `models`, `differences` and `failures` (a line per
        failed gate). `models` has the given models, then baselines, each with `name`, `checkpoint`, the metrics of
        `rayrec.inference.evaluate.evaluate`, their `intervals`, `parameters`, the network's `multiply_adds` per row,
        `rows_per_s`, and for baselines `trained_rows`. `differences` has each pair of models, `model` minus the earlier `other`
        (metric -> difference, low, high, p_value, method)."""
    options, gates, console = options or ComparisonConfig(), gates or ComparisonGates(), console or Console()
    if not checkpoints or len(checkpoints) + len(options.baselines) < 2:
        raise InputError("compare: needs at least two checkpoints, or one and --baselines, and then the path of a labelled log")
    if len(checkpoints) < 2 and gates != ComparisonGates():
        raise InputError("compare: gates need at least two checkpoints. Add another one.")
    _check_schemas(checkpoints, configs)
    # Opens all before scoring the first, so that errors of the last one show up before hours of scoring.
    jobs = [
        ScoringRequest(checkpoint, path, config, options, console).open(evaluating=True, spare_cpus=0)
        for checkpoint, config in zip(checkpoints, configs, strict=True)
    ]
    baselines = None
    if options.baselines:
        baselines = open_baselines(configs[0], jobs[0].checkpoint.path, max_rows=options.baseline_rows, kinds=options.baselines)
    models: list[_Model] = []
    labels, groups, checksums = np.empty(0, np.uint8), None, (0, 0)
    for name, job, config in zip(_names(checkpoints), jobs, configs, strict=True):
        start = time.perf_counter()
        scored = scored_rows(job, console)
        seconds = time.perf_counter() - start
        if not models:
            labels, groups, checksums = scored.labels, scored.groups, scored.checksums
        elif (len(scored.labels), scored.checksums) != (len(labels), checksums):
            raise InputError(f"{name}: rows or labels do not match {models[0].described['name']}. Compare models of one log.")
        models.append(_Model(scored.logits, _described(name, job, config, scored, seconds)))
    last = len(models) - 1
    if baselines is not None:
        models += [_baseline(kind, baselines, path, labels, console) for kind in options.baselines]
    return json_values(_result(models, labels, groups, options, gates, last))


@dataclass(frozen=True)
class _Model:
    logits: np.ndarray
    """Logit of each row, float32 [rows]."""
    described: dict[str, Any]


def _check_schemas(checkpoints: Sequence[str], configs: Sequence[TrainConfig]) -> None:
    schemas = []
    for checkpoint, config in zip(checkpoints, configs, strict=True):
        if not isinstance(config.workload, ClickWorkload) or not config.workload.predicts_clicks:
            raise InputError(f"{checkpoint}: recipe {config.recipe} does not predict clicks. Only click models can be compared.")
        schemas.append(config.workload.schema)
    for checkpoint, schema in zip(checkpoints[1:], schemas[1:], strict=True):
        for name in _RAW_FIELDS:
            if getattr(schema, name) != getattr(schemas[0], name):
                raise InputError(f"{checkpoint}: schema's '{name}' does not match {checkpoints[0]}. Compare models of one log.")


def _names(checkpoints: Sequence[str]) -> list[str]:
    """Return the last component of each path if they differ, else the paths."""
    short = [storage.name_of(checkpoint.rstrip("/")) for checkpoint in checkpoints]
    names = short if len(set(short)) == len(short) else list(checkpoints)
    if len(set(names)) < len(names):
        return [f"{number}: {name}" for number, name in enumerate(names, start=1)]
    return names


def _described(name: str, job: ScoringJob, config: TrainConfig, scored: ScoredRows, seconds: float) -> dict[str, Any]:
    assert isinstance(config.workload, ClickWorkload)
    parameters = sum(
        math.prod(entry["shape"])
        for tensor, entry in job.checkpoint.manifest()["tensors"].items()
        if tensor.startswith(PREFIX) and entry["dtype"].startswith(("F", "BF"))  # Skips index buffers
    )
    inputs = ModelInputs.of(load_preprocessor(job.checkpoint.path).inputs)
    with torch.random.fork_rng(devices=[]):
        network = config.workload.model.build(inputs, precision=config.precision).eval()
    return {
        "name": name,
        **job.described,
        "parameters": parameters,
        "multiply_adds": network_multiply_adds(network, inputs, config.workload.model),
        "rows_per_s": scored.rows / seconds if seconds else math.nan,
    }


def _baseline(kind: Kind, baselines: Baselines, path: str, labels: np.ndarray, console: Console) -> _Model:
    console.note(f"Training {kind} on {len(baselines.train):,} rows")
    scorer = baselines.fit(kind)
    start, done = time.perf_counter(), 0
    logits, scored_labels = [], []
    with console.preparing():
        for rows in baselines.rows(path):
            logits.append(scorer.logits(rows))
            scored_labels.append(rows.label)
            done += len(rows)
            console.progress(f"score {kind} (rows)", done, len(labels))
    seconds = time.perf_counter() - start
    assert np.array_equal(np.concatenate(scored_labels).astype(np.uint8), labels), "rows in the order that models scored"
    described = {
        "name": kind,
        "checkpoint": None,
        "trained_rows": len(baselines.train),
        "parameters": scorer.parameters,
        "multiply_adds": None,
        "rows_per_s": done / seconds if seconds else math.nan,
    }
    return _Model(np.concatenate(logits), described)


def _result(
    models: Sequence[_Model],
    labels: np.ndarray,
    groups: np.ndarray | None,
    options: ComparisonConfig,
    gates: ComparisonGates,
    last: int,
) -> dict[str, Any]:
    compared = compare_models([model.logits for model in models], labels, options.resampling)
    described = []
    for model, intervals in zip(models, compared.intervals, strict=True):
        ranking = {} if groups is None else gauc(groups, model.logits, labels)
        described.append({**model.described, **binary_metrics(model.logits, labels), **ranking, "intervals": intervals})
    names = [model.described["name"] for model in models]
    gains = {  # 0 - x instead of -x avoids -0
        pair: {
            name: replace(difference, difference=0 - difference.difference, low=0 - difference.high, high=0 - difference.low)
            for name, difference in of_pair.items()
        }
        for pair, of_pair in compared.differences.items()
    }
    return {
        "rows": len(labels),
        "label_rate": described[0]["label_rate"],
        "models": described,
        "differences": [
            {"model": names[later], "other": names[earlier], **{name: vars(difference[name]) for name in METRICS}}
            for (earlier, later), difference in gains.items()
        ],
        "resampling": vars(options.resampling),
        "failures": _failures(gates, names[0], names[last], gains[0, last]["auroc"]) if last else [],
    }


def _failures(gates: ComparisonGates, first: str, last: str, gain: Difference) -> list[str]:
    """Return failed gates on the AUROC difference of the last and first model, a line each."""
    failures = []
    min_gain, max_p_value = gates.min_auroc_gain, gates.max_p_value
    summary = f"{last} gains {gain.difference:+.5f} AUROC over {first}"
    if min_gain is not None and not gain.difference >= min_gain:  # NaN fails too
        failures.append(f"gates.min_auroc_gain: {summary}, less than {min_gain}")
    if max_p_value is not None and not gain.p_value <= max_p_value:
        failures.append(f"gates.max_p_value: {summary} with p = {gain.p_value:.3g}, more than {max_p_value}")
    return failures
