"""Permutation importance: the loss of quality of a click model without the information in one
feature.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import numpy as np
import torch

from rayrec import host_resources
from rayrec.config import InputError
from rayrec.data.encoded_rows import (
    EncodedRows,
    Ids,
    JaggedIds,
    concatenate_ids,
    concatenate_optional,
)
from rayrec.data.encoding.encoder import indicator_names
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.inference.config import EvaluationConfig
from rayrec.inference.scoring import ScoringJob
from rayrec.ingest.block_order import spread
from rayrec.metrics.permutation import QualityLoss, auroc_loss, mean_loss
from rayrec.models.heads import BinaryHead, LabelHead
from rayrec.observe.console import Console
from rayrec.storage.range_reader import in_order
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.scorer import ClickScorer, load_preprocessor, load_scorer
from rayrec.workloads.recsys.scoring import cache_folder, encode_parts, open_run_log
from rayrec.workloads.recsys.workload import ClickWorkload

_BATCH_ROWS: Final = 8192
"""Default rows per scored batch."""


@dataclass(frozen=True)
class InputFeature:
    """Inputs that are permuted together.

    They come from one column of the log, or from aligned ones.
    """

    name: str
    kind: str
    """Kind of the column: dense, sparse or list."""
    dense: tuple[int, ...] = ()
    """Positions among the dense inputs."""
    sparse: tuple[int, ...] = ()
    """Positions among the sparse inputs."""


# Inputs that only make sense together are one feature:
#
#   number, and whether it was missing   the preset adds an input for the second
#   list and its weights                 in one array already
#   aligned lists                        networks need equal lengths
#
# Features with one vocabulary stay separate: the table is shared, the values are not.
def input_features(preprocessor: Preprocessor) -> list[InputFeature]:
    """Return the features of a log, in the order of its schema, with their inputs. Aligned lists
    are one feature.
    """
    schema = preprocessor.schema
    inputs = preprocessor.inputs
    indicated = preprocessor.derivation.indicators
    indicator_of = dict(zip(indicated, indicator_names(indicated, schema), strict=True))
    features = []
    for name in schema.dense:
        if name in inputs.sparse:  # A preset makes categories of numbers
            features.append(InputFeature(name, "dense", sparse=(inputs.sparse.index(name),)))
            continue
        names = [name, indicator_of[name]] if name in indicator_of else [name]
        positions = tuple(inputs.dense.index(each) for each in names)
        features.append(InputFeature(name, "dense", dense=positions))
    aligned: dict[str, list[str]] = {}
    for name in schema.sparse:
        aligned.setdefault(schema.feature(name).aligned_with or name, []).append(name)
    for names in aligned.values():
        kind = "list" if names[0] in schema.lists else "sparse"
        positions = tuple(inputs.sparse.index(each) for each in names)
        features.append(InputFeature(" + ".join(names), kind, sparse=positions))
    return features


def measure_importance(
    job: ScoringJob,
    config: TrainConfig,
    options: EvaluationConfig,
    *,
    path: str | None,
    console: Console,
) -> dict[str, Any]:
    """Return how much worse a click model scores the rows of a job if the values of a feature are
    permuted among them.

    At most `options.importance_rows` rows are encoded once, in up to 64 evenly spread ranges. They
    stay in memory, with 4 bytes for each number and 4 or 8 for each id. Each feature is permuted
    `options.importance_repeats` times, and the rows scored by threads of this process. Equal seeds
    give equal permutations, whatever the number of cores.

    Args:
        job: Opened evaluation of a click model (`check_importance`).
        config: Configuration of its checkpoint.
        options: Numbers of rows and permutations, seed, confidence and batch size.
        path: Path of the evaluated rows. None: the run's held-out ones.
        console: Console for the progress.

    Returns:
        JSON values: rows, repeats, seed, confidence and features. The most important feature is the
        first. Each has `feature`, `kind`, and loss, low and high for each metric. These are auroc
        and logloss for clicks, mse and mae for numbers, deviance for counts, else the network's
        measures.
    """
    permuter = _open(job, config, options, path)
    rows = len(permuter.rows)
    repeats = options.importance_repeats
    total = rows * repeats * len(permuter.features)
    reports: list[dict[str, Any]] = []
    done = 0
    with console.preparing():
        before = permuter.score(None, None)
        for number, feature in enumerate(permuter.features):
            permuted = []
            for repeat in range(repeats):
                # Independent of the other features and repeats, and of their number
                generator = np.random.default_rng([options.seed, number, repeat])
                order = generator.permutation(rows)
                permuted.append(permuter.score(feature, order))
                done += rows
                console.progress("importance (rows)", done, total)
            losses = permuter.losses(before, permuted, options.resampling.confidence)
            described = {name: asdict(loss) for name, loss in losses.items()}
            reports.append({"feature": feature.name, "kind": feature.kind, **described})
    reports.sort(key=_by_main_loss)
    return {
        "rows": rows,
        "repeats": repeats,
        "seed": options.seed,
        "confidence": options.resampling.confidence,
        "features": reports,
    }


def _by_main_loss(report: dict[str, Any]) -> float:
    """Return the sort key of a feature: its loss of the first metric, largest first, NaN last."""
    main = next(value for value in report.values() if isinstance(value, dict))
    return math.inf if math.isnan(main["loss"]) else -main["loss"]


def check_importance(job: ScoringJob, config: TrainConfig) -> None:
    """Check that a job's model has several features. Raises InputError."""
    if not isinstance(config.workload, ClickWorkload):
        raise InputError(
            f"importance: recipe {config.recipe} has no features to permute. Remove importance."
        )
    features = input_features(load_preprocessor(job.checkpoint.path))
    if len(features) < 2:
        raise InputError(
            f"importance: {job.checkpoint.path} has a single feature, {features[0].name}, whose "
            "permutation only reorders the rows. Remove importance."
        )


# What is done once, and what is done for each permutation:
#
#   once              the rows are read, parsed and encoded; the weights are loaded
#   each permutation  a batch takes one feature from other rows, and is scored
#
# So importance reads at most 64 ranges of a log again, however many features it has.
#
# All metrics are of these rows, also the one before a permutation: it may differ from that of all
# evaluated rows, which the evaluation reports.
def _open(
    job: ScoringJob, config: TrainConfig, options: EvaluationConfig, path: str | None
) -> _Permuter:
    assert isinstance(config.workload, ClickWorkload)
    checkpoint = job.checkpoint.path
    preprocessor = load_preprocessor(checkpoint)
    data = config.workload.evaluation_data(config)
    if path is not None:
        data = config.eval_data.replace(path=path, files=())
    index = open_run_log(
        data,
        preprocessor,
        cache=cache_folder(checkpoint),
        max_bad_fraction=config.max_bad_fraction,
    )
    first = job.scoring.first_row
    ranges = spread(job.scoring.rows, options.importance_rows)
    parts = [part for start, stop in ranges for part in index.parts(first + start, first + stop)]
    scorer = load_scorer(
        config.workload.model,
        precision=config.precision,
        checkpoint=checkpoint,
        preprocessor=preprocessor,
        device=job.device,
    )
    return _Permuter(
        _concatenated(list(encode_parts(parts, preprocessor))),
        scorer,
        input_features(preprocessor),
        config.workload.objective,
        options.batch_rows or _BATCH_ROWS,
        1 if job.device == "cuda" else host_resources.usable_cpus(granted=config.cluster.num_cpus),
    )


def _concatenated(batches: Sequence[EncodedRows]) -> EncodedRows:
    """Concatenate the inputs and labels of rows, and what measures of a network may read."""
    columns = zip(*(batch.ids for batch in batches), strict=True)
    labels = {
        name: np.concatenate([batch.labels[name] for batch in batches])
        for name in batches[0].labels
    }
    return EncodedRows(
        np.concatenate([batch.dense for batch in batches]),
        [concatenate_ids(column) for column in columns],
        labels,
        groups=concatenate_optional([batch.groups for batch in batches]),
        timestamps=concatenate_optional([batch.timestamps for batch in batches]),
    )


def _take_rows(column: Ids, rows: np.ndarray) -> Ids:
    return column.take(rows) if isinstance(column, JaggedIds) else column[rows]


Values = Mapping[str, np.ndarray]
"""Values of all rows by name: logits or predicted numbers of heads, or the network's measures."""


@final
@dataclass(frozen=True)
class _Permuter:
    """Rows in memory, scored with one feature permuted. The rows are never changed: a batch is a
    copy of its numbers, and shares the ids of the other features.
    """

    rows: EncodedRows
    scorer: ClickScorer
    features: Sequence[InputFeature]
    objective: Callable[[Mapping[str, float]], str]
    """Function from metrics to the name of the metric that selects the model's weights, after a
    minus sign if lower is better.
    """
    batch_rows: int
    num_threads: int

    def score(self, feature: InputFeature | None, order: np.ndarray | None) -> Values:
        """Score all rows, with the values that the feature has in rows `order`.

        Args:
            feature: Feature to permute. None scores the rows unchanged.
            order: Row whose values each row gets, int64 [rows]. None with no feature.
        """
        threads = torch.get_num_threads()
        state = threading.local()

        def scored(start: int) -> Values:
            if not hasattr(state, "is_set"):
                torch.set_num_threads(1)  # Of operators of this thread
                state.is_set = True
            rows = self._batch(start, feature, order)
            measures = not isinstance(self.scorer.heads[0], LabelHead)
            return self.scorer.measure(rows) if measures else self.scorer.predict(rows)

        try:
            batches = list(
                in_order(
                    scored,
                    range(0, len(self.rows), self.batch_rows),
                    name="importance",
                    num_threads=self.num_threads,
                    prefetch=1,
                )
            )
        finally:
            torch.set_num_threads(threads)
        return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}

    def _batch(
        self, start: int, feature: InputFeature | None, order: np.ndarray | None
    ) -> EncodedRows:
        rows = self.rows
        stop = min(start + self.batch_rows, len(rows))
        dense = rows.dense[start:stop].copy()
        ids = [
            column.cut(start, stop) if isinstance(column, JaggedIds) else column[start:stop]
            for column in rows.ids
        ]
        if feature is not None and order is not None:
            sources = order[start:stop]
            for position in feature.dense:
                dense[:, position] = rows.dense[sources, position]
            for position in feature.sparse:
                ids[position] = _take_rows(rows.ids[position], sources)
        labels = {name: values[start:stop] for name, values in rows.labels.items()}
        groups = None if rows.groups is None else rows.groups[start:stop]
        times = None if rows.timestamps is None else rows.timestamps[start:stop]
        return EncodedRows(dense, ids, labels, groups=groups, timestamps=times)

    def losses(
        self, before: Values, permuted: Sequence[Values], confidence: float
    ) -> dict[str, QualityLoss]:
        """Return the loss of each metric, the main one first."""
        head = self.scorer.heads[0]
        losses: dict[str, QualityLoss] = {}
        if isinstance(head, BinaryHead):
            logits = [values[head.name] for values in permuted]
            labels = self.rows.labels[head.name]
            losses["auroc"] = auroc_loss(before[head.name], logits, labels, confidence=confidence)
        rows_after = [self._row_losses(values) for values in permuted]
        for name, row_values in self._row_losses(before).items():
            after = [each[name] for each in rows_after]
            losses[name] = mean_loss(row_values, after, confidence=confidence)
        return losses

    def _row_losses(self, values: Values) -> dict[str, np.ndarray]:
        """Return the metrics that are means over rows, lower is better, float64 [rows] each. Of a
        network's own measures, these are its loss and the metric that selects its weights.
        """
        head = self.scorer.heads[0]
        if isinstance(head, LabelHead):
            return head.row_losses(values[head.name], self.rows.labels[head.name])
        objective = self.objective(dict.fromkeys(values, 0.0))
        name = objective.removeprefix("-")
        losses = {}
        if name in values:
            losses[name] = values[name] if objective.startswith("-") else -values[name]
        if "loss" in values:
            losses["loss"] = values["loss"]
        if not losses:
            raise InputError(
                "importance: the network's measures have no loss, and its configuration names no "
                "metric in `objective`. Define one."
            )
        return losses
