"""Metrics of an evaluation for each label, which rows may lack, and exact means of numbers and
measures.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from rayrec.collectives import Collectives, gathered
from rayrec.metrics.binary import flat_array, reject_nan
from rayrec.metrics.ranking import DEFAULT_KS, RankingAccumulator
from rayrec.metrics.recommended import RECOMMENDED, RecommendedItems

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from torch.distributed import ProcessGroup

    from rayrec.batch import StepOutput


class Accumulator(Protocol):
    """Accumulator of an evaluation's rows for metrics: over all ranks from predictions and labels,
    or of tables.
    """

    @property
    def rows(self) -> int:
        """Number of rows so far on this rank."""

    def update(self, *rows: Any, **named: Any) -> None: ...

    def compute(self) -> dict[str, float]: ...


@final
class LabelsAccumulator:
    """Accumulator of all labels: 5 bytes per row and binary label, with `grouped` 13 more for
    groups.
    """

    def __init__(
        self,
        by_label: Mapping[str, Accumulator],
        *,
        grouped: bool = False,
        ks: Sequence[int] = DEFAULT_KS,
    ) -> None:
        """`by_label`: accumulators by label name, the main one first. `ks`: ranks k of the metrics
        at k, with `grouped`.
        """
        (self._main_name, self._main), *other_labels = by_label.items()
        self._ranking = RankingAccumulator(ks) if grouped else None
        self._others = dict(other_labels)

    @property
    def rows(self) -> int:
        return self._main.rows

    def update(
        self,
        logits: Mapping[str, Any],
        labels: Mapping[str, Any],
        groups: Any = None,
    ) -> None:
        """Append a batch: [rows] each by label name. Missing labels are NaN, except the main one.
        `groups`: None if no rows.
        """
        main = self._main_name
        self._main.update(logits[main], labels[main])
        if self._ranking is not None and len(labels[main]):
            assert groups is not None, "data without groups is refused before"
            self._ranking.update(groups, logits[main], labels[main])
        for name, accumulator in self._others.items():
            values = flat_array(labels[name])
            has_label = ~np.isnan(values)
            accumulator.update(flat_array(logits[name])[has_label], values[has_label])

    def compute(self) -> dict[str, float]:
        """Return the metrics over all ranks. Collective. Those of other labels L are `L.auroc`
        etc., with `L.rows` for their rows.
        """
        metrics = self._main.compute()
        if self._ranking is not None:
            metrics.update(self._ranking.compute())
        for name, accumulator in self._others.items():
            metrics.update(
                {f"{name}.{metric}": value for metric, value in accumulator.compute().items()}
            )
        return metrics


# Sums of ranks are added by fsum, whose result is correctly rounded in any order. Metrics thus do
# not depend on which rank gathered first.
class SumsAccumulator(ABC):
    """Sums of row terms, exact over all ranks."""

    def __init__(self) -> None:
        self._sums = np.zeros(len(self.terms(np.zeros(0), np.zeros(0))))
        self.rows = 0

    def update(self, predicted: Any, labels: Any) -> None:
        """Append rows, [rows] each."""
        terms = self.terms(flat_array(predicted).astype(np.float64), flat_array(labels))
        self._sums = self._sums + [term.sum() for term in terms]
        self.rows += len(terms[0])

    def compute(self, *, process_group: ProcessGroup | None = None) -> dict[str, float]:
        """Return the metrics, NaN without rows, and `rows`. Collective if distributed. Raises
        InputError on every rank for a NaN.
        """
        rank_sums = Collectives(process_group).gather_floats([self.rows, *self._sums.tolist()])
        rows, *sums = (math.fsum(values) for values in zip(*rank_sums, strict=True))
        reject_nan(int(math.isnan(sums[0])), int(rows))
        return {**self._metrics(rows or math.nan, *sums), "rows": rows}

    @abstractmethod
    def terms(self, predicted: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the terms of each row, float64 [rows] each."""

    @abstractmethod
    def _metrics(self, rows: float, *sums: float) -> dict[str, float]: ...


@final
class NumberAccumulator(SumsAccumulator):
    """Mean squared error `mse` and mean absolute error `mae` of predicted numbers."""

    def terms(self, predicted: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, ...]:
        errors = predicted - labels
        return np.square(errors), np.abs(errors)

    def _metrics(self, rows: float, *sums: float) -> dict[str, float]:
        squared, absolute = sums
        return {"mse": squared / rows, "mae": absolute / rows}


@final
class CountAccumulator(SumsAccumulator):
    """Mean Poisson `deviance` of predicted log means, and `calibration`, the total predicted mean
    divided by the total count.
    """

    def terms(self, predicted: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, ...]:
        means = np.exp(predicted)
        counts = labels.astype(np.float64)
        deviances = 2 * (counts * (np.log(np.maximum(counts, 1e-300)) - predicted) - counts + means)
        return deviances, means, counts

    def _metrics(self, rows: float, *sums: float) -> dict[str, float]:
        deviance, means, counts = sums
        return {"deviance": deviance / rows, "calibration": means / (counts or math.nan)}


@final
class RowMetrics:
    """Means of measures over all workers' rows, and totals of integer measures, summed in
    float64.
    """

    def __init__(
        self,
        finish: Callable[[dict[str, float]], dict[str, float]] = dict,
        recommended: RecommendedItems | None = None,
    ) -> None:
        """`recommended` counts the items of the measure `RECOMMENDED`."""
        self._finish = finish
        self._recommended = recommended
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: set[str] = set()

    def update(self, output: StepOutput) -> None:
        """Append a batch. A measure may have fewer values than others. Its mean only includes rows
        with a value.
        """
        import torch

        for name, values in output.measures.items():
            if name == RECOMMENDED:
                if self._recommended is not None:
                    self._recommended.update(values.cpu().numpy())  # device sync
                continue
            if not values.is_floating_point():
                self._counts.add(name)
            total = torch.stack(
                [values.double().sum(), values.new_tensor(len(values), dtype=torch.float64)]
            )
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def compute(self) -> dict[str, float]:
        """Return the means and counts. Collective. Sums the parts in worker order."""
        import torch

        names = sorted(self._sums)
        # Workers evaluate equal numbers of batches, so that either all or none of them have
        # measures, and all or none enter the collective.
        if not names:  # On every worker
            return self._finish({})
        results = (
            torch.stack(gathered(torch.stack([self._sums[name] for name in names])))
            .sum(dim=0)
            .tolist()
        )
        metrics = {
            name: _result(name in self._counts, *result)
            for name, result in zip(names, results, strict=True)
        }
        if self._recommended is not None:
            metrics |= self._recommended.compute()
        return self._finish(metrics)


def _result(is_count: bool, total: float, rows: float) -> float:
    """Return the total of a count, and otherwise the mean, NaN without rows."""
    if is_count:
        return int(total)
    return total / rows if rows else math.nan


@final
class MeasureTotals:
    """Means of measures over the rows with a value, summed in float64, in row order, and totals of
    integer measures.
    """

    def __init__(
        self,
        finish: Callable[[dict[str, float]], dict[str, float]] = dict,
        recommended: RecommendedItems | None = None,
    ) -> None:
        """`recommended` counts the items of the measure `RECOMMENDED`."""
        self._finish = finish
        self._recommended = recommended
        self._sums: dict[str, np.ndarray] = {}
        self._counts: set[str] = set()
        self.rows = 0

    def update(self, table: pa.Table) -> None:
        if self._recommended is not None and RECOMMENDED in table.column_names:
            for chunk in table.column(RECOMMENDED).chunks:
                numbers = chunk.flatten().to_numpy()
                self._recommended.update(numbers.reshape(-1, chunk.type.list_size))
        for name in table.column_names:
            if name not in ("row", RECOMMENDED):
                values = table.column(name).drop_null().to_numpy()
                if values.dtype.kind != "f":
                    self._counts.add(name)
                self._sums[name] = self._sums.get(name, np.zeros(2)) + np.array(
                    [values.sum(), len(values)]
                )
        self.rows += len(table)

    def compute(self) -> dict[str, float]:
        metrics = {
            name: _result(name in self._counts, *sums.tolist()) for name, sums in self._sums.items()
        }
        if self._recommended is not None:
            metrics |= self._recommended.compute()
        return self._finish(metrics)
