"""Evaluation of a model on labelled rows, and comparison of models on the same rows."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast, final

import numpy as np
import pyarrow as pa
import torch

from rayrec import storage
from rayrec.checkpoint import Checkpoint
from rayrec.config import InputError
from rayrec.data.arrow import as_numpy
from rayrec.data.encoded_rows import EncodedRows
from rayrec.humanize import json_values
from rayrec.inference.config import (
    BaselineKind,
    ComparisonConfig,
    ComparisonGates,
    EvaluationConfig,
)
from rayrec.inference.importance import check_importance, measure_importance
from rayrec.inference.recommendations import (
    Evaluated,
    compare_recommenders,
    recommendation_report,
)
from rayrec.inference.row_slices import SlicedRows
from rayrec.inference.scoring import ScoringJob, ScoringRequest
from rayrec.inference.training_rows import count_training_rows
from rayrec.metrics.binary import binary_metrics
from rayrec.metrics.ranking import DEFAULT_KS, gauc, ranking_metrics
from rayrec.metrics.significance import METRICS, Difference, compare_models, intervals
from rayrec.models.cost import network_multiply_adds
from rayrec.observe.console import Console
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.baselines import CLICK_BASELINES, Baselines, Kind, open_baselines
from rayrec.workloads.recsys.candidates import model_inputs
from rayrec.workloads.recsys.scorer import load_preprocessor
from rayrec.workloads.recsys.workload import ClickWorkload
from rayrec.workloads.scoring import GROUP, PREFIX


def evaluate(
    checkpoint: str,
    path: str | None,
    *,
    config: TrainConfig,
    options: EvaluationConfig | None = None,
    other: TrainConfig | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Score every labelled row of an input exactly once, and compute metrics. Without a `path`,
    scores the held-out rows of the checkpoint's run: its test rows, or its validation rows if it
    has no others.

    Memory on the driver, per row: 5 bytes, 13 more with a group, 20 per slice, 100 for intervals,
    200 for a comparison. `config` is the configuration of the checkpoint, `other` that of
    `options.compare`. Raises InputError for an unusable checkpoint or input, damaged weights, an
    input without labels, an unknown slice, and options that only click models support.

    Returns:
        JSON values, None if undefined (such as auroc of a single class): rows, training_rows,
        checkpoint, and the workload's metrics and additions. `training_rows` of these rows are in
        the run's training set, which a line on standard error reports too; None if unknown (see
        `rayrec.inference.training_rows`). Without a `path`, click models add `set` and `path`.
        Click models have the metrics of `rayrec.metrics.binary.binary_metrics`, and with a group
        those of `rayrec.metrics.ranking.ranking_metrics`.

        Models that rank all known items have the means of their measures, `coverage_at_K`, and
        with readable training rows `popularity_at_K` and the baseline popularity.

        For both kinds, `options` may add `intervals` (metric -> [low, high]) and `slices` (slice_by
        -> slices, each with value, rows and the same metrics). `compared` has the metrics of the
        other checkpoint and `differences`, first minus second (metric -> difference, low, high,
        p_value, method). `baselines` has each baseline's name, trained_rows and metrics. Those of
        ranked items have `intervals` too, and `differences`, the model minus the baseline.
        `importance` is the result of `rayrec.inference.importance.measure_importance`.
    """
    options = options or EvaluationConfig()
    console = console or Console()
    request = ScoringRequest(checkpoint, path, config, options, console)
    opened = request.open(evaluating=True, spare_cpus=0, slice_by=options.slice_by, ks=options.k)
    if options.k or options.asks_for_more:
        _check_supported(opened, config, options)
    if options.importance:
        check_importance(opened, config)
    training_rows = {"training_rows": _training_rows(opened, config, path, console)}
    if opened.scoring.is_ranking:
        result = _recommendation_report(request, options, opened, other, training_rows)
    elif options.asks_for_more:
        result = _click_report(request, options, opened, other, training_rows)
    else:
        result = {**_metrics(opened, console), **training_rows, **opened.described}
    if options.importance:
        result["importance"] = measure_importance(
            opened,
            config,
            options,
            path=path,
            console=console,
        )
    return json_values(result)


def _metrics(opened: ScoringJob, console: Console) -> dict[str, Any]:
    """Return the workload's metrics of all rows, and their number."""
    totals = opened.scoring.make_totals()
    for table in opened.tables(console):
        totals.update(table)
    rows = totals.rows
    assert rows == opened.scoring.rows, f"{rows} of {opened.scoring.rows} rows were scored"
    return {**totals.compute(), "rows": rows}


def _click_report(
    request: ScoringRequest,
    options: EvaluationConfig,
    opened: ScoringJob,
    other: TrainConfig | None,
    training_rows: dict[str, int | None],
) -> dict[str, Any]:
    """Return the metrics of a click model with everything that the options add. Opens the other
    checkpoint and the baselines before scoring any row, so that errors show up early.
    """
    path = request.path
    compared: ScoringJob | None = None
    if options.compare is not None:
        assert other is not None
        compared = _open_other(request, options, opened, other)
    baselines = _open_baselines(
        _click_baselines(options.baselines),
        request.config,
        opened,
        max_rows=options.baseline_rows,
    )
    scored = scored_rows(opened, request.console, slice_by=options.slice_by)
    other_logits = None
    if compared is not None:
        other_rows = scored_rows(compared, request.console)
        if (other_rows.rows, other_rows.checksums) != (scored.rows, scored.checksums):
            raise InputError(
                f"compare: rows of {path or 'the run'} for {options.compare} do not match "
                f"{request.checkpoint}. Compare checkpoints with one schema."
            )
        other_logits = other_rows.logits
    measured = _Measured(scored.logits, other_logits, scored.labels, scored.groups, options)
    result = {**measured.report(), **training_rows, **opened.described}
    if baselines:
        scores = _baseline_scores(baselines, opened, path, measured.labels, request.console)
        result["baselines"] = [
            {
                "name": described["name"],
                "trained_rows": described["trained_rows"],
                **replace(measured, logits=logits, other_logits=None).report(),
            }
            for logits, described in scores
        ]
    if compared is not None:
        result["compared"] = {**result["compared"], **compared.described}
    if options.confidence is not None or compared is not None:
        result["resampling"] = vars(options.resampling)
    if options.slice_by:
        result["slices"] = _slice_reports(scored, measured, request.console)
    return result


def _slice_reports(
    scored: ScoredRows,
    measured: _Measured,
    console: Console,
) -> dict[str, list[dict[str, Any]]]:
    options = measured.options
    reports: dict[str, list[dict[str, Any]]] = {by: [] for by in options.slice_by}
    for by, row_slice in scored.sliced.slices(console, max_values=options.slice_top):
        report = measured.select(row_slice.rows).report()
        reports[by].append({"value": row_slice.name, **report})
    return reports


def _training_rows(
    job: ScoringJob,
    config: TrainConfig,
    path: str | None,
    console: Console,
) -> int | None:
    """Return how many rows of a job its model was trained on, None if unknown. Warns of any."""
    if path is None:
        return 0
    rows = count_training_rows(config, job.checkpoint.path, path)
    if rows:
        console.warn(
            f"{job.checkpoint.path} was trained on {rows:,} of these {job.scoring.rows:,} rows, so "
            "its metrics are better than on new rows. Leave out the path to score the run's own "
            "test rows"
        )
    return rows


def _check_same_rows(names: Sequence[str], jobs: Sequence[ScoringJob]) -> None:
    """Check that the held-out rows of several runs are equal. Raises InputError."""
    for name, job in zip(names[1:], jobs[1:], strict=True):
        if job.scoring.rows_key != jobs[0].scoring.rows_key:
            raise InputError(
                f"{name}: its {job.scoring.set_name or 'held-out'} rows are not those of "
                f"{names[0]}. Pass the path of rows that no model was trained on"
            )


def _click_baselines(names: Sequence[BaselineKind] | None) -> tuple[Kind, ...]:
    """Return the requested baselines of a click model. Raises InputError for others."""
    if names is None:
        return ()
    unsupported = [name for name in names if name not in CLICK_BASELINES]
    if unsupported:
        raise InputError(
            f"baselines: {unsupported[0]} ranks items. A click model has "
            f"{', '.join(CLICK_BASELINES)}."
        )
    kinds = cast(tuple[Kind, ...], tuple(names))
    return kinds or ("prior", "logistic")


def _open_baselines(
    kinds: tuple[Kind, ...],
    config: TrainConfig,
    job: ScoringJob,
    *,
    max_rows: int,
) -> dict[Kind, Baselines]:
    """Return the training rows of each baseline, which all share. Empty without baselines."""
    if not kinds:
        return {}
    opened = open_baselines(config, job.checkpoint.path, max_rows=max_rows, kinds=kinds)
    return dict.fromkeys(kinds, opened)


def _baseline_scores(
    baselines: dict[Kind, Baselines],
    job: ScoringJob,
    path: str | None,
    labels: np.ndarray,
    console: Console,
) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
    """Train each baseline, score the job's rows, and yield the result of `score_baseline`."""
    for kind, opened in baselines.items():
        if path is None:
            first = job.scoring.first_row
            rows = opened.evaluation_rows(first, first + job.scoring.rows)
        else:
            rows = opened.rows(path)
        yield score_baseline(kind, opened, rows, labels, console)


def _check_supported(opened: ScoringJob, config: TrainConfig, options: EvaluationConfig) -> None:
    """Check that the model predicts clicks or ranks all known items. Raises InputError."""
    if not opened.scoring.is_clicks and not opened.scoring.is_ranking:
        names = ("slice_by", "confidence", "compare", "k", "baselines")
        requested = [
            name for name in names if getattr(options, name) != getattr(EvaluationConfig, name)
        ]
        raise InputError(
            f"{opened.checkpoint.path}: recipe {config.recipe} neither predicts clicks nor ranks "
            f"all known items, which {' and '.join(requested)} need. Remove "
            f"{'it' if len(requested) == 1 else 'them'}."
        )


def _open_other(
    request: ScoringRequest,
    options: EvaluationConfig,
    opened: ScoringJob,
    other: TrainConfig,
) -> ScoringJob:
    """Open the checkpoint to compare with. Raises InputError if it is of another kind."""
    assert options.compare is not None
    compared = replace(request, checkpoint=options.compare, config=other).open(
        evaluating=True,
        spare_cpus=0,
        ks=options.k,
    )
    if compared.scoring.is_ranking != opened.scoring.is_ranking:
        raise InputError(
            f"compare: {options.compare} and {request.checkpoint} must both predict clicks, or "
            "both rank items."
        )
    _check_supported(compared, other, options)
    _check_same_rows([request.checkpoint, options.compare], [opened, compared])
    return compared


def _recommendation_report(
    request: ScoringRequest,
    options: EvaluationConfig,
    opened: ScoringJob,
    other: TrainConfig | None,
    training_rows: dict[str, int | None],
) -> dict[str, Any]:
    """Return the metrics of a retrieval model with everything that the options add. Opens the other
    checkpoint and the baselines before scoring any row, so that errors show up early.
    """
    path = request.path
    console = request.console
    compared: Evaluated | None = None
    if other is not None and options.compare is not None:
        job = _open_other(request, options, opened, other)
        compared = Evaluated(job, None, path, console)
    evaluated = Evaluated.open(
        opened,
        request.config,
        options=options,
        kinds=options.baselines,
        path=path,
        console=console,
    )
    return {**recommendation_report(evaluated, options, compared), **training_rows}


def scored_rows(
    opened: ScoringJob,
    console: Console,
    *,
    slice_by: Sequence[str] = (),
) -> ScoredRows:
    """Score all rows of a click model. Keeps the values to slice by too."""
    scored = ScoredRows(slice_by)
    name = storage.name_of(opened.checkpoint.path.rstrip("/"))
    for table in opened.tables(console, title=f"score {name} (rows)"):
        scored.update(table)
    assert scored.rows == opened.scoring.rows, (
        f"{scored.rows} of {opened.scoring.rows} rows were scored"
    )
    return scored


@dataclass(frozen=True)
class _Measured:
    """Scored rows, all or those of a slice."""

    logits: np.ndarray
    other_logits: np.ndarray | None
    labels: np.ndarray
    groups: np.ndarray | None
    options: EvaluationConfig

    def select(self, rows: np.ndarray) -> _Measured:
        other_logits = None if self.other_logits is None else self.other_logits[rows]
        groups = None if self.groups is None else self.groups[rows]
        return _Measured(self.logits[rows], other_logits, self.labels[rows], groups, self.options)

    def _metrics(self, logits: np.ndarray) -> dict[str, Any]:
        metrics = binary_metrics(logits, self.labels)
        if self.groups is None:
            return metrics
        return {
            **metrics,
            **ranking_metrics(self.groups, logits, self.labels, ks=self.options.k or DEFAULT_KS),
        }

    def report(self) -> dict[str, Any]:
        result = self._metrics(self.logits)
        if self.options.confidence is not None:
            result["intervals"] = intervals(self.logits, self.labels, self.options.resampling)
        if self.other_logits is not None:
            both = [self.logits, self.other_logits]
            compared = compare_models(both, self.labels, self.options.resampling)
            differences = compared.differences[0, 1]
            result["compared"] = {
                **self._metrics(self.other_logits),
                "differences": {name: vars(difference) for name, difference in differences.items()},
            }
        return result


@final
class ScoredRows:
    """Scores for a log. Memory per row: 5 bytes, 13 with groups, and that of SlicedRows."""

    def __init__(self, slice_by: Sequence[str] = ()) -> None:
        self._logits: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []
        self._groups: list[np.ndarray] = []
        self.sliced = SlicedRows(slice_by)
        self.rows = 0
        self.checksums = (0, 0)
        """CRC-32 of the row numbers and of the labels. Block sizes do not affect it."""

    def update(self, table: pa.Table) -> None:
        # Copies, because tables are in the object store, which could not contain all of them.
        logits = as_numpy(table.column("logit")).astype(np.float32)
        labels = as_numpy(table.column("label")).astype(np.uint8)
        self._logits.append(logits)
        self._labels.append(labels)
        if GROUP in table.column_names:
            self._groups.append(as_numpy(table.column(GROUP)).copy())
        self.sliced.update(table)
        self.rows += len(table)
        row_checksum, label_checksum = self.checksums
        self.checksums = (
            zlib.crc32(as_numpy(table.column("row")).data, row_checksum),
            zlib.crc32(labels.data, label_checksum),
        )

    @property
    def logits(self) -> np.ndarray:
        """Logit of each row, float32 [rows]."""
        return np.concatenate([np.empty(0, np.float32), *self._logits])

    @property
    def labels(self) -> np.ndarray:
        """Label of each row, uint8 [rows]."""
        return np.concatenate([np.empty(0, np.uint8), *self._labels])

    @property
    def groups(self) -> np.ndarray | None:
        """Group key of each row, int64 [rows]. None without groups."""
        return np.concatenate(self._groups) if self._groups else None


_RAW_FIELDS: Final = (
    "label",
    "dense",
    "sparse",
    "tokens",
    "lists",
    "weight",
    "integers",
    "optional",
    "delimiter",
    "list_delimiter",
    "nan",
    "label_rule",
    "missing",
)
"""Schema fields that determine the rows of a log and their columns."""


def compare(
    checkpoints: Sequence[str],
    path: str | None,
    *,
    configs: Sequence[TrainConfig],
    options: ComparisonConfig | None = None,
    gates: ComparisonGates | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Score every labelled row with each of two or more click models, or models that rank all known
    items, and compare their metrics. Without a `path`, scores the held-out rows of the first
    model's run, which must be those of the others.

    Models are scored sequentially. Each reads and parses the log and loads its weights, which
    `rows_per_s` includes. Memory on the driver: 5 bytes per row, plus 4 per model, plus 8 with a
    group, and about 70 per row and model to compute intervals. Models that rank items need 8 per
    row and metric. `configs` has the configuration of each checkpoint. Raises InputError for a
    single model, models of other or different kinds, different raw schemas or rows, and as in
    `evaluate`.

    Returns:
        JSON values, None if undefined: `rows`, `label_rate`, `resampling`, `models`, `differences`
        and `failures` (a line per failed gate). `models` has the given models, then baselines, each
        with `name`, `checkpoint`, the metrics of `rayrec.inference.evaluate.evaluate`, their
        `intervals`, `parameters`, the network's `multiply_adds` per row, `rows_per_s`, and for
        baselines `trained_rows`. Given models have `training_rows` as in `evaluate`. `label_rate`
        is that of click models. `differences`
        has each pair of models, `model` minus the earlier `other` (metric -> difference, low, high,
        p_value, method).
    """
    options = options or ComparisonConfig()
    gates = gates or ComparisonGates()
    console = console or Console()
    _check_comparison(checkpoints, configs, options, gates)
    requests = [
        ScoringRequest(checkpoint, path, config, options, console)
        for checkpoint, config in zip(checkpoints, configs, strict=True)
    ]
    jobs, training_rows = _open_models(requests)
    names = _names(checkpoints)
    if not _predicts_clicks(configs[0]):
        return json_values(
            _compare_recommenders(names, jobs, configs, training_rows, requests[0], gates)
        )
    baselines = _open_baselines(
        _click_baselines(options.baselines or None),
        configs[0],
        jobs[0],
        max_rows=options.baseline_rows,
    )
    models, labels, groups = _score_models(names, jobs, configs, training_rows, console)
    models += _baseline_scores(baselines, jobs[0], path, labels, console)
    return json_values(_result(models, labels, groups, options, gates, len(jobs) - 1))


def _open_models(
    requests: Sequence[ScoringRequest],
) -> tuple[list[ScoringJob], list[int | None]]:
    """Open models to compare, and return their numbers of training rows too. Opens all before
    scoring the first, so that errors of the last one show up before hours of scoring. Raises
    InputError.
    """
    options = requests[0].options
    assert isinstance(options, ComparisonConfig)
    jobs = [each.open(evaluating=True, spare_cpus=0, ks=options.k) for each in requests]
    if requests[0].path is None:
        _check_same_rows([each.checkpoint for each in requests], jobs)
    training_rows = [
        _training_rows(job, each.config, each.path, each.console)
        for job, each in zip(jobs, requests, strict=True)
    ]
    return jobs, training_rows


def _score_models(
    names: Sequence[str],
    jobs: Sequence[ScoringJob],
    configs: Sequence[TrainConfig],
    training_rows: Sequence[int | None],
    console: Console,
) -> tuple[list[tuple[np.ndarray, dict[str, Any]]], np.ndarray, np.ndarray | None]:
    """Return the logits and description of each model, and the labels and groups of all rows.
    Raises InputError if models did not score the same rows.
    """
    models = []
    first_checksums = None
    for name, job, config, trained in zip(names, jobs, configs, training_rows, strict=True):
        start = time.perf_counter()
        scored = scored_rows(job, console)
        seconds = time.perf_counter() - start
        if first_checksums is None:
            first_checksums = scored.checksums
            labels = scored.labels
            groups = scored.groups
        elif (scored.rows, scored.checksums) != (len(labels), first_checksums):
            raise InputError(
                f"{name}: rows or labels do not match {names[0]}. Compare models of one log."
            )
        described = {
            "name": name,
            "training_rows": trained,
            **job.described,
            **model_cost(job.checkpoint, config),
            "rows_per_s": scored.rows / seconds if seconds else math.nan,
        }
        models.append((scored.logits, described))
    return models, labels, groups


def _check_comparison(
    checkpoints: Sequence[str],
    configs: Sequence[TrainConfig],
    options: ComparisonConfig,
    gates: ComparisonGates,
) -> None:
    """Check the number of models, and that all are click models of one log. Raises InputError."""
    if not checkpoints or len(checkpoints) + len(options.baselines) < 2:
        raise InputError(
            "compare: needs at least two checkpoints, or one and --baselines, and then, if any, a "
            "labelled log"
        )
    if len(checkpoints) < 2 and gates != ComparisonGates():
        raise InputError("compare: gates need at least two checkpoints. Add another one.")
    schemas = []
    for checkpoint, config in zip(checkpoints, configs, strict=True):
        if not isinstance(config.workload, ClickWorkload) or _predicts_clicks(
            config
        ) != _predicts_clicks(configs[0]):
            raise InputError(
                f"{checkpoint}: recipe {config.recipe} cannot be compared. Compare click models, "
                "or models that rank all known items."
            )
        schemas.append(config.workload.schema)
    _check_gates(gates, ranking=not _predicts_clicks(configs[0]))
    for checkpoint, schema in zip(checkpoints[1:], schemas[1:], strict=True):
        for name in _RAW_FIELDS:
            if getattr(schema, name) != getattr(schemas[0], name):
                raise InputError(
                    f"{checkpoint}: schema's '{name}' does not match {checkpoints[0]}. Compare "
                    "models of one log."
                )


def _predicts_clicks(config: TrainConfig) -> bool:
    return isinstance(config.workload, ClickWorkload) and config.workload.predicts_clicks


def _check_gates(gates: ComparisonGates, *, ranking: bool) -> None:
    """Check that gates are on metrics of the models. Raises InputError."""
    wrong = gates.min_auroc_gain if ranking else gates.min_ndcg_gain
    if wrong is not None:
        name, metric = ("min_auroc_gain", "AUROC") if ranking else ("min_ndcg_gain", "NDCG")
        raise InputError(f"gates.{name}: the models have no {metric}. Remove it.")


def _compare_recommenders(
    names: Sequence[str],
    jobs: Sequence[ScoringJob],
    configs: Sequence[TrainConfig],
    training_rows: Sequence[int | None],
    request: ScoringRequest,
    gates: ComparisonGates,
) -> dict[str, Any]:
    """Return the comparison of models that rank all known items. Raises InputError for others."""
    options = request.options
    assert isinstance(options, ComparisonConfig)
    for name, job, config in zip(names, jobs, configs, strict=True):
        if not job.scoring.is_ranking:
            raise InputError(
                f"{name}: recipe {config.recipe} neither predicts clicks nor ranks all known "
                "items. Only such models can be compared."
            )
    if gates != ComparisonGates() and not options.k:
        _check_ks(configs)
    path = request.path
    first = Evaluated.open(
        jobs[0],
        configs[0],
        options=options,
        kinds=options.baselines or None,
        path=path,
        console=request.console,
    )
    later = [Evaluated(job, None, path, request.console) for job in jobs[1:]]
    described = [
        {"name": name, "training_rows": trained, **model_cost(job.checkpoint, config)}
        for name, job, config, trained in zip(names, jobs, configs, training_rows, strict=True)
    ]
    return compare_recommenders([first, *later], described, options, gates)


def _check_ks(configs: Sequence[TrainConfig]) -> None:
    """Check that models have one own rank k, at which gates compare them. Raises InputError."""
    ks = set()
    for config in configs:
        assert isinstance(config.workload, ClickWorkload)
        ks.add(getattr(config.workload.model, "k", 0))
    if len(ks) > 1:
        raise InputError(
            "gates: the models must have metrics at the same k, got "
            f"{' and '.join(map(str, sorted(ks)))}. Choose one by --k."
        )


def _names(checkpoints: Sequence[str]) -> list[str]:
    """Return the last component of each path if they differ, else the paths."""
    short = [storage.name_of(checkpoint.rstrip("/")) for checkpoint in checkpoints]
    names = short if len(set(short)) == len(short) else list(checkpoints)
    if len(set(names)) < len(names):
        return [f"{number}: {name}" for number, name in enumerate(names, start=1)]
    return names


def model_cost(checkpoint: Checkpoint, config: TrainConfig) -> dict[str, Any]:
    """Return the `parameters` of a click model's checkpoint, and the network's `multiply_adds` per
    row.
    """
    assert isinstance(config.workload, ClickWorkload)
    parameters = sum(
        math.prod(entry["shape"])
        for tensor, entry in checkpoint.manifest()["tensors"].items()
        # Skips index buffers
        if tensor.startswith(PREFIX) and entry["dtype"].startswith(("F", "BF"))
    )
    preprocessor = load_preprocessor(checkpoint.path)
    inputs = model_inputs(preprocessor)
    with torch.random.fork_rng(devices=[]):
        network = config.workload.model.build(inputs, precision=config.precision).eval()
    return {
        "parameters": parameters,
        "multiply_adds": network_multiply_adds(
            network,
            inputs,
            config.workload.model,
            num_embeddings=preprocessor.num_embeddings,
        ),
    }


def score_baseline(
    kind: Kind,
    baselines: Baselines,
    rows: Iterable[EncodedRows],
    labels: np.ndarray,
    console: Console,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Train a baseline and score rows. Return the logits, float32 [rows], and the baseline as in
    the `models` of `compare`.
    """
    console.note(f"Training {kind} on {len(baselines.train):,} rows")
    scorer = baselines.fit(kind)
    start = time.perf_counter()
    done = 0
    logits = []
    scored_labels = []
    with console.preparing():
        for part in rows:
            logits.append(scorer.logits(part))
            scored_labels.append(part.label)
            done += len(part)
            console.progress(f"score {kind} (rows)", done, len(labels))
    seconds = time.perf_counter() - start
    assert np.array_equal(np.concatenate(scored_labels).astype(np.uint8), labels), (
        "rows in the order that models scored"
    )
    described = {
        "name": kind,
        "checkpoint": None,
        "trained_rows": len(baselines.train),
        "parameters": scorer.parameters,
        "multiply_adds": None,
        "rows_per_s": done / seconds if seconds else math.nan,
    }
    return np.concatenate(logits), described


def _result(
    models: Sequence[tuple[np.ndarray, dict[str, Any]]],
    labels: np.ndarray,
    groups: np.ndarray | None,
    options: ComparisonConfig,
    gates: ComparisonGates,
    last: int,
) -> dict[str, Any]:
    compared = compare_models([logits for logits, _ in models], labels, options.resampling)
    described = []
    for (logits, model), model_intervals in zip(models, compared.intervals, strict=True):
        ranking = {} if groups is None else gauc(groups, logits, labels)
        described.append(
            {**model, **binary_metrics(logits, labels), **ranking, "intervals": model_intervals}
        )
    names = [model["name"] for model in described]
    gains = {
        pair: {name: difference.reversed() for name, difference in differences.items()}
        for pair, differences in compared.differences.items()
    }
    return {
        "rows": len(labels),
        "label_rate": described[0]["label_rate"],
        "models": described,
        "differences": [
            {
                "model": names[later],
                "other": names[earlier],
                **{name: vars(difference[name]) for name in METRICS},
            }
            for (earlier, later), difference in gains.items()
        ],
        "resampling": vars(options.resampling),
        "failures": _failures(gates, names[0], names[last], gains[0, last]["auroc"])
        if last
        else [],
    }


def _failures(gates: ComparisonGates, first: str, last: str, gain: Difference) -> list[str]:
    """Return failed gates on the AUROC difference of the last and first model, a line each."""
    failures = []
    min_gain = gates.min_auroc_gain
    max_p_value = gates.max_p_value
    summary = f"{last} gains {gain.difference:+.5f} AUROC over {first}"
    if min_gain is not None and not gain.difference >= min_gain:  # NaN fails too
        failures.append(f"gates.min_auroc_gain: {summary}, less than {min_gain}")
    if max_p_value is not None and not gain.p_value <= max_p_value:
        failures.append(
            f"gates.max_p_value: {summary} with p = {gain.p_value:.3g}, more than {max_p_value}"
        )
    return failures
