"""Evaluation reports for click models besides metrics: score reliability and category coverage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from rayrec.batch import DENSE, Batch, StepOutput
from rayrec.collectives import sum_over_workers
from rayrec.data.encoding.clipping import ClipSum, clipping_warning
from rayrec.data.encoding.rules import SparseColumn
from rayrec.metrics.binary import is_correct, reject_nan
from rayrec.metrics.means import RowMetrics
from rayrec.metrics.recommended import RecommendedItems
from rayrec.models.heads import BinaryHead, Head, labels_accumulator
from rayrec.workloads.recsys.candidates import Ranking

_EDGE = 16.0
"""Maximum absolute logit. Larger logits are practically certain and share a bin."""
_BINS_PER_LOGIT = 16
_NUM_BINS = int(2 * _EDGE) * _BINS_PER_LOGIT
_MAX_BINS = 15
"""Maximum number of bins in a reliability diagram, with about equally many rows."""


@final
class EvaluationCounts:
    """Counts of one worker's last evaluation: rows and clicks by logit, unknown and missing values
    by column.
    """

    def __init__(
        self,
        columns: Mapping[str, SparseColumn],
        heads: Sequence[Head],
        *,
        grouped: bool = False,
        clips: ClipSum | None = None,
        training_clips: ClipSum | None = None,
        ranking: Ranking | None = None,
    ) -> None:
        """`columns` by batch key, empty if ids no longer reveal unknown ones. `grouped`: whether
        batches have group keys. `clips` counts the numbers beyond their bounds in evaluations, and
        `training_clips` has counted those of training. `ranking` is that of a retrieval model.
        """
        self._columns = columns
        self.heads = heads
        self.grouped = grouped
        self.ranking = ranking
        self._clips = clips
        self._training_clips = training_clips
        self._start("")

    def _start(self, name: str) -> None:
        self._name = name
        self._by_logit = np.zeros((3, _NUM_BINS))  # rows, clicks, sum of probabilities
        self._by_column = np.zeros((len(self._columns), 3), np.int64)  # values, unknown, missing
        if self._clips is not None:
            self._clips.reset()

    def counted(self, name: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of evaluation set `name` and count their categories. Resets the
        counts.
        """
        self._start(name)
        for batch in batches:
            self._count_categories(batch)
            if self._clips is not None:
                self._clips.add(batch.tensors[DENSE].numpy())
            yield batch

    def _count_categories(self, batch: Batch) -> None:
        if not self._columns:
            return
        ids_of: dict[str, np.ndarray] = {}
        for features in (batch.sparse_features, batch.sequence_features):
            if features is not None:
                values = features.values().numpy()
                offsets = features.offset_per_key()
                ids_of |= {
                    key: values[offsets[number] : offsets[number + 1]]
                    for number, key in enumerate(features.keys())
                }
        for number, (key, column) in enumerate(self._columns.items()):
            ids = ids_of[key]
            unknown = np.count_nonzero(ids == column.unknown_id)
            self._by_column[number] += (
                len(ids),
                unknown,
                np.count_nonzero(ids == column.missing_id),
            )

    def make_metrics(self) -> ClickMetrics:
        return ClickMetrics(self)

    def add(self, output: StepOutput) -> None:
        main = self.heads[0].name
        if not isinstance(self.heads[0], BinaryHead):
            return
        # device sync, as in the metrics
        logits = output.outputs[main].float().cpu().numpy().astype(np.float64)
        reject_nan(int(np.count_nonzero(np.isnan(logits))), logits.size)
        bins = ((np.clip(logits, -_EDGE, _EDGE - 1e-6) + _EDGE) * _BINS_PER_LOGIT).astype(np.int64)
        for row, weights in enumerate(
            (None, output.labels[main].cpu().numpy(), 1 / (1 + np.exp(-logits)))
        ):
            self._by_logit[row] += np.bincount(bins, weights=weights, minlength=_NUM_BINS)

    def shown(self) -> list[dict[str, Any]]:
        """Return the counts of all workers as reports, empty without an evaluation. Collective."""
        by_logit = sum_over_workers(self._by_logit)
        by_column = sum_over_workers(self._by_column)
        numbers = [*_numbers("training", self._training_clips), *_numbers(self._name, self._clips)]
        if not by_logit.any() and not by_column.any():
            return numbers
        columns = [
            {
                "column": key,
                "num_tokens": column.num_tokens,
                "num_embeddings": column.num_embeddings,
                "unknown": _ratio(unknown, values)
                if _is_unambiguous(column, column.unknown_id)
                else None,
                "missing": _ratio(missing, values)
                if _is_unambiguous(column, column.missing_id)
                else None,
            }
            for (key, column), (values, unknown, missing) in zip(
                self._columns.items(),
                by_column.tolist(),
                strict=True,
            )
        ]
        return [
            *(
                [{"kind": "reliability", "set": self._name, "bins": reliability_bins(by_logit)}]
                if by_logit.any()
                else []
            ),
            *([{"kind": "categories", "set": self._name, "columns": columns}] if columns else []),
            *numbers,
        ]


def _numbers(name: str, clips: ClipSum | None) -> list[dict[str, Any]]:
    """Return the report on the numbers of rows `name` beyond their bounds, empty without bounds or
    rows. Collective.
    """
    if clips is None or not clips.names:
        return []
    counts = dict(zip(clips.names, sum_over_workers(clips.counts).tolist(), strict=True))
    if not any(values for values, _ in counts.values()):
        return []
    columns = [
        {"column": column, "values": values, "clipped": clipped}
        for column, (values, clipped) in counts.items()
    ]
    warning = clipping_warning(counts)
    report = {"kind": "numbers", "set": name, "columns": columns}
    return [
        {**report, "warning": f"Numbers of the {name} rows are {warning}"} if warning else report
    ]


def count_correct(output: StepOutput) -> torch.Tensor:
    """Count the rows whose main label the threshold 0.5 predicts, a scalar on their device."""
    logits, labels = (next(iter(values.values())) for values in (output.outputs, output.labels))
    return is_correct(logits, labels).sum()


def counted_columns(
    keys: Sequence[str],
    columns: Sequence[SparseColumn],
    *,
    expanded: bool,
) -> dict[str, SparseColumn]:
    """Return the columns for EvaluationCounts, none if ids are `expanded` into others before
    batching.
    """
    return {} if expanded else dict(zip(keys, columns, strict=True))


def reliability_bins(by_logit: np.ndarray) -> list[dict[str, float]]:
    """Group rows by score into up to 15 bins of equal size for a reliability diagram
    (Niculescu-Mizil & Caruana 2005). Pure. `by_logit` [3, bins] has rows, clicks and summed
    probabilities of narrow logit bins. Each result has `rows`, `predicted` (mean probability) and
    `observed` (share of clicks).
    """
    rows = by_logit[0]
    group = np.minimum((np.cumsum(rows) - rows / 2) * _MAX_BINS / rows.sum(), _MAX_BINS - 1).astype(
        np.int64
    )
    return [
        {
            "rows": int(count),
            "predicted": float(probability / count),
            "observed": float(clicks / count),
        }
        for count, clicks, probability in np.stack(
            [np.bincount(group, weights=row, minlength=_MAX_BINS) for row in by_logit]
        ).T
        if count
    ]


@final
class ClickMetrics:
    """Accumulator of logits, labels and network measures of an evaluation."""

    def __init__(self, counts: EvaluationCounts) -> None:
        self._labels = labels_accumulator(counts.heads, grouped=counts.grouped)
        ranking = counts.ranking
        recommended = None
        if ranking is not None:
            recommended = RecommendedItems(ranking.candidates, ranking.ks)
        self._measures = RowMetrics(recommended=recommended)
        self._counts = counts

    def update(self, output: StepOutput) -> None:
        if self._labels is not None:
            self._labels.update(output.outputs, output.labels, output.groups)
            self._counts.add(output)
        self._measures.update(output)

    def compute(self) -> dict[str, float]:
        label_metrics = {} if self._labels is None else self._labels.compute()
        return {**label_metrics, **self._measures.compute()}


def _is_unambiguous(column: SparseColumn, reserved_id: int) -> bool:
    """Return whether the reserved id of a column is used only for unknown, or only for missing
    values.
    """
    if column.num_tokens is None:  # Any token can have any id from first_id, and none is unknown.
        return reserved_id == column.missing_id and reserved_id < column.first_id
    last_id = column.first_id + column.num_tokens - (column.gap is None)
    return column.unknown_id != column.missing_id and last_id < column.num_embeddings


def _ratio(count: int, total: int) -> float:
    return count / total if total else 0.0
