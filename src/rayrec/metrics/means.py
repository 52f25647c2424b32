"""Metrics of a click model's labels: the main one, its groups, and others, which some rows may lack."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from rayrec.metrics.binary import BinaryMetricsAccumulator, Collectives, refuse_nan
from rayrec.metrics.ranking import DEFAULT_KS, RankingAccumulator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rayrec.schema import Label


@final
class LabelsAccumulator:
    """Keeps what an evaluation needs of its rows: 5 bytes for each binary label, with `grouped` 13 more for groups."""

    def __init__(
        self, more_labels: Sequence[Label] = (), *, grouped: bool = False, ks: Sequence[int] = DEFAULT_KS
    ) -> None:
        """`more_labels`: those after the main label. `ks`: ranks k of the metrics at k, with `grouped`."""
        self._main = BinaryMetricsAccumulator()
        self._ranking = RankingAccumulator(ks) if grouped else None
        self._others: dict[str, BinaryMetricsAccumulator | NumberAccumulator] = {
            label.name: BinaryMetricsAccumulator() if label.kind == "binary" else NumberAccumulator()
            for label in more_labels
        }

    @property
    def rows(self) -> int:
        return self._main.rows

    def update(self, logits: Mapping[str, Any], labels: Mapping[str, Any], groups: Any = None) -> None:
        """Appends a batch: (rows,) each by the label's name, the main one first. A label other than the main one is NaN in rows
        that lack it. `groups` may be None for a batch without rows."""
        main = next(iter(logits))
        self._main.update(logits[main], labels[main])
        if self._ranking is not None and len(labels[main]):
            assert groups is not None, "data without groups is refused before"
            self._ranking.update(groups, logits[main], labels[main])
        for name, accumulator in self._others.items():
            values = _array(labels[name])
            there = ~np.isnan(values)
            accumulator.update(_array(logits[name])[there], values[there])

    def compute(self) -> dict[str, float]:
        """Over the rows of all ranks; collective. The main label's metrics by their names, those of a label L as
        `L.auroc` and so on; `L.rows`: the rows that have it."""
        found = self._main.compute()
        if self._ranking is not None:
            found.update(self._ranking.compute())
        for name, accumulator in self._others.items():
            found.update({f"{name}.{metric}": value for metric, value in accumulator.compute().items()})
        return found


def _array(values: Any) -> np.ndarray:
    return values.detach().float().cpu().numpy() if hasattr(values, "cpu") else np.asarray(values)


@final
class NumberAccumulator:
    """Sums the errors of predicted numbers."""

    def __init__(self) -> None:
        self._sums = np.zeros(3)  # rows, squared errors, absolute errors

    def update(self, predicted: np.ndarray, labels: np.ndarray) -> None:
        """Appends rows: (rows,) each."""
        errors = predicted.astype(np.float64) - labels
        self._sums += len(errors), np.square(errors).sum(), np.abs(errors).sum()

    def compute(self, *, process_group: ProcessGroup | None = None) -> dict[str, float]:
        """Mean squared error `mse`, mean absolute error `mae`, `rows`; nan without rows. A collective of the group; local without
        torch.distributed. Raises InputError on every rank if a prediction of any is NaN."""
        import torch.distributed as dist

        sums = self._sums.tolist()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
            sums = [math.fsum(values) for values in zip(*Collectives(process_group).gather_floats(sums), strict=True)]
        rows, squared, absolute = sums
        refuse_nan(int(math.isnan(squared)), int(rows))
        return {"mse": squared / rows if rows else math.nan, "mae": absolute / rows if rows else math.nan, "rows": rows}
