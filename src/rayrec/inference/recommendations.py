"""Evaluation and comparison of retrieval models that rank all known items, on the same rows."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.arrow import as_numpy
from rayrec.inference.config import ComparisonGates
from rayrec.inference.item_baselines import (
    POPULARITY,
    ItemBaselines,
    open_item_baselines,
)
from rayrec.inference.row_slices import SlicedRows
from rayrec.metrics.means import MeasureTotals
from rayrec.metrics.recommended import RECOMMENDED
from rayrec.metrics.significance import Comparison, Difference, compare_means
from rayrec.models.item_baselines import ItemBaselineKind
from rayrec.workloads.recsys.scorer import load_preprocessor
from rayrec.workloads.recsys.scoring import measure_columns
from rayrec.workloads.scoring import KEY

if TYPE_CHECKING:
    from rayrec.inference.config import ComparisonConfig, EvaluationConfig
    from rayrec.inference.scoring import ScoringJob
    from rayrec.observe.console import Console
    from rayrec.workloads.base import TrainConfig


@final
class MeasuredRows:
    """Measures of rows. With `keep`, memory per row: 8 bytes for each measure, and that of
    SlicedRows.
    """

    def __init__(self, totals: MeasureTotals, *, keep: bool, slice_by: Sequence[str] = ()) -> None:
        self._totals = totals
        self._keep = keep
        self._kept: dict[str, list[np.ndarray]] = {}
        self._is_count: dict[str, bool] = {}
        self.sliced = SlicedRows(slice_by)
        self.checksums = (0, 0, 0)
        """CRC-32 of the row numbers, whether rows have targets, and how many.
        Block sizes do not affect it.
        """

    @property
    def rows(self) -> int:
        return self._totals.rows

    def update(self, table: pa.Table) -> None:
        self.sliced.update(table)
        names = [name for name in table.column_names if not name.startswith(KEY)]
        table = table.select(names)
        self._totals.update(table)
        row_checksum, has_checksum, target_checksum = self.checksums
        targets = as_numpy(table.column("targets"))
        self.checksums = (
            zlib.crc32(as_numpy(table.column("row")).data, row_checksum),
            zlib.crc32((targets > 0).data, has_checksum),
            zlib.crc32(targets.data, target_checksum),
        )
        if not self._keep:
            return
        for name in names:
            if name not in ("row", RECOMMENDED):
                column = table.column(name)
                self._is_count[name] = pa.types.is_integer(column.type)
                values = column.to_numpy().astype(np.float64)
                self._kept.setdefault(name, []).append(values)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of all rows, and their number."""
        return {**self._totals.compute(), "rows": self.rows}

    @property
    def values(self) -> dict[str, np.ndarray]:
        """Values of each mean of rows, float64 [rows], NaN in rows without a value."""
        return {name: values for name, values in self._all().items() if not self._is_count[name]}

    def part(self, rows: np.ndarray) -> dict[str, Any]:
        """Return the metrics of some rows, int64 [rows], without those of all rows together."""
        metrics: dict[str, Any] = {}
        for name, values in self._all().items():
            chosen = values[rows]
            if self._is_count[name]:
                metrics[name] = int(chosen.sum())
            else:
                chosen = chosen[~np.isnan(chosen)]
                metrics[name] = float(chosen.mean()) if len(chosen) else math.nan
        return {**metrics, "rows": len(rows)}

    def _all(self) -> dict[str, np.ndarray]:
        for name, chunks in self._kept.items():
            self._kept[name] = [np.concatenate(chunks)]
        return {name: chunks[0] for name, chunks in self._kept.items()}


@dataclass(frozen=True)
class Evaluated:
    """Opened evaluation of a retrieval model."""

    job: ScoringJob
    baselines: ItemBaselines | None
    """None if the training rows are gone."""
    path: str | None
    console: Console

    @classmethod
    def open(
        cls,
        job: ScoringJob,
        config: TrainConfig,
        *,
        options: EvaluationConfig | ComparisonConfig,
        kinds: Sequence[str] | None,
        path: str | None,
        console: Console,
    ) -> Evaluated:
        """Open the baselines, before any row is scored. `kinds` None: only popularity, and a log
        that cannot be read is a note; empty: the default ones. Raises InputError.
        """
        requested = (POPULARITY, "itemknn") if kinds == () else kinds or ()
        baselines = None
        try:
            baselines = open_item_baselines(
                config,
                job.checkpoint.path,
                kinds=requested,
                ks=options.k,
                max_rows=options.baseline_rows,
            )
        except InputError as error:
            if kinds is not None:
                raise
            console.note(f"No {POPULARITY} beside, as the training rows cannot be read: {error}")
        return cls(job, baselines, path, console)

    def fit(self) -> None:
        """Train the baselines."""
        if self.baselines is not None:
            with self.console.preparing():
                self.baselines.fit(self.console.progress)

    def scored(self, *, keep: bool, slice_by: Sequence[str] = ()) -> MeasuredRows:
        """Score all rows with the model."""
        name = storage.name_of(self.job.checkpoint.path.rstrip("/"))
        measured = MeasuredRows(self._totals(), keep=keep, slice_by=slice_by)
        for table in self.job.tables(self.console, title=f"score {name} (rows)"):
            measured.update(table)
        assert measured.rows == self.job.scoring.rows, (
            f"{measured.rows} of {self.job.scoring.rows} rows were scored"
        )
        return measured

    def measured_baselines(self, *, keep: bool) -> dict[ItemBaselineKind, MeasuredRows]:
        """Score all rows with each baseline."""
        baselines = self.baselines
        if baselines is None:
            return {}
        measured = {
            kind: MeasuredRows(baselines.totals(baselines.preprocessor), keep=keep)
            for kind in baselines.models
        }
        first = self.job.scoring.first_row
        rows = self.job.scoring.rows
        done = 0
        with self.console.preparing():
            for items in baselines.rows(self.path, first, first + rows):
                numbers = {"row": np.arange(done, done + items.rows)}
                for kind, each in measured.items():
                    values = {**numbers, **baselines.measures(kind, items)}
                    each.update(pa.table(measure_columns(values)))
                done += items.rows
                self.console.progress("score baselines (rows)", done, rows)
        return measured

    def described(self, kind: ItemBaselineKind) -> dict[str, Any]:
        """Return the name of a baseline and its number of training rows."""
        assert self.baselines is not None
        return {"name": kind, "trained_rows": self.baselines.trained_rows(kind)}

    # The baselines may be those of another model. Its candidate numbers are of its vocabulary.
    def _totals(self) -> MeasureTotals:
        """Return totals of the job's rows, with the popularity of its own items."""
        make_totals: Any = self.job.scoring.make_totals
        if self.baselines is None:
            return make_totals()
        return self.baselines.totals(load_preprocessor(self.job.checkpoint.path))


def recommendation_report(
    evaluated: Evaluated,
    options: EvaluationConfig,
    other: Evaluated | None,
) -> dict[str, Any]:
    """Return the metrics of a retrieval model with everything that the options add, and baselines.
    Raises InputError if the other model's rows have other targets.
    """
    keep = options.needs_rows
    evaluated.fit()
    measured = evaluated.scored(keep=keep, slice_by=options.slice_by)
    models = [measured]
    result = {**measured.metrics(), **evaluated.job.described}
    if other is not None:
        with_popularity = replace(other, baselines=evaluated.baselines)
        models.append(with_popularity.scored(keep=True))
        _check_same_targets(models, [evaluated.job, other.job])
        result["compared"] = {**models[1].metrics(), **other.job.described}
    baselines = evaluated.measured_baselines(keep=keep)
    if baselines:
        result["baselines"] = [
            {**evaluated.described(kind), **each.metrics()} for kind, each in baselines.items()
        ]
    if options.confidence is not None or other is not None:
        compared = compare_means(
            [each.values for each in (*models, *baselines.values())],
            options.resampling,
        )
        _add_differences(result, compared, options)
        result["resampling"] = vars(options.resampling)
    if options.slice_by:
        result["slices"] = _slice_reports(models, options, evaluated.console)
    return result


def _add_differences(
    result: dict[str, Any],
    compared: Comparison,
    options: EvaluationConfig,
) -> None:
    """Add the intervals of the model, and those of its difference to others: to another model, and
    to baselines.
    """
    compared_reports = [result["compared"]] if "compared" in result else []
    if options.confidence is not None:
        result["intervals"] = compared.intervals[0]
        compared_reports += result.get("baselines", [])
    for number, other in enumerate(compared_reports, start=1):
        other["differences"] = as_json(compared.differences[0, number])
        if options.confidence is not None:
            other["intervals"] = compared.intervals[number]


def _slice_reports(
    models: Sequence[MeasuredRows],
    options: EvaluationConfig,
    console: Console,
) -> dict[str, list[dict[str, Any]]]:
    """Return the slices of each `slice_by` with the metrics of the model, and their differences to
    another model.
    """
    reports: dict[str, list[dict[str, Any]]] = {by: [] for by in options.slice_by}
    values = [each.values for each in models]
    for by, row_slice in models[0].sliced.slices(console, max_values=options.slice_top):
        rows = row_slice.rows
        report: dict[str, Any] = {"value": row_slice.name, **models[0].part(rows)}
        if len(models) > 1:
            report["compared"] = models[1].part(rows)
        if options.confidence is not None or len(models) > 1:
            parts = [{name: each[rows] for name, each in model.items()} for model in values]
            _add_differences(report, compare_means(parts, options.resampling), options)
        reports[by].append(report)
    return reports


def as_json(differences: Mapping[str, Difference]) -> dict[str, dict[str, Any]]:
    """Return differences as JSON values."""
    return {name: vars(difference) for name, difference in differences.items()}


def _check_same_targets(models: Sequence[MeasuredRows], jobs: Sequence[ScoringJob]) -> None:
    """Check that models were measured on the same rows with as many targets. Raises InputError."""
    first = jobs[0].scoring.described["preprocessor"]
    for model, job in zip(models[1:], jobs[1:], strict=True):
        # Items that a vocabulary lacks count each time that a row has them, known ones once
        stop = 3 if job.scoring.described["preprocessor"] == first else 2
        checked = [(each.rows, *each.checksums[:stop]) for each in (model, models[0])]
        if checked[0] != checked[1]:
            raise InputError(
                f"{job.checkpoint.path}: its rows or their targets are not those of "
                f"{jobs[0].checkpoint.path}. Compare models of one log, with one schema."
            )


def compare_recommenders(
    evaluated: Sequence[Evaluated],
    described: Sequence[dict[str, Any]],
    options: ComparisonConfig,
    gates: ComparisonGates,
) -> dict[str, Any]:
    """Return the result of `rayrec.inference.evaluate.compare` for retrieval models. The first one
    has the baselines. `described` has each model's name and costs. Raises InputError if rows or
    targets differ.
    """
    first = evaluated[0]
    first.fit()
    models = []
    reports = []
    for model, description in zip(evaluated, described, strict=True):
        start = time.perf_counter()
        measured = replace(model, baselines=first.baselines).scored(keep=True)
        seconds = time.perf_counter() - start
        speed = measured.rows / seconds if seconds else math.nan
        models.append(measured)
        reports.append({**description, **model.job.described, "rows_per_s": speed})
    _check_same_targets(models, [each.job for each in evaluated])
    baselines = first.measured_baselines(keep=True) if options.baselines else {}
    for kind, measured in baselines.items():
        models.append(measured)
        reports.append({**first.described(kind), **dict.fromkeys(_COSTS)})
    compared = compare_means([each.values for each in models], options.resampling)
    for report, measured, intervals in zip(reports, models, compared.intervals, strict=True):
        report |= {**measured.metrics(), "intervals": intervals}
    pairs = [
        {
            "model": reports[later]["name"],
            "other": reports[earlier]["name"],
            **as_json({name: each.reversed() for name, each in differences.items()}),
        }
        for (earlier, later), differences in compared.differences.items()
    ]
    return {
        "rows": models[0].rows,
        "models": reports,
        "differences": pairs,
        "resampling": vars(options.resampling),
        "failures": _failures(gates, reports, compared, len(evaluated) - 1),
    }


_COSTS: Final = ("checkpoint", "parameters", "multiply_adds", "rows_per_s")
"""Fields without a value in reports on baselines."""


def _failures(
    gates: ComparisonGates,
    reports: Sequence[dict[str, Any]],
    compared: Comparison,
    last: int,
) -> list[str]:
    """Return failed gates on the NDCG difference of the last and first model at the first k, a line
    each.
    """
    if not last or gates == ComparisonGates():
        return []
    name = next(name for name in compared.differences[0, last] if name.startswith("ndcg_at_"))
    gain = compared.differences[0, last][name].reversed()
    summary = (
        f"{reports[last]['name']} gains {gain.difference:+.5f} {name} over {reports[0]['name']}"
    )
    failures = []
    min_gain = gates.min_ndcg_gain
    if min_gain is not None and not gain.difference >= min_gain:  # NaN fails too
        failures.append(f"gates.min_ndcg_gain: {summary}, less than {min_gain}")
    max_p_value = gates.max_p_value
    if max_p_value is not None and not gain.p_value <= max_p_value:
        failures.append(
            f"gates.max_p_value: {summary} with p = {gain.p_value:.3g}, more than {max_p_value}"
        )
    return failures
