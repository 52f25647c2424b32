"""What a server counts, and how the counts of all its replicas become one Prometheus text."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple, final

import numpy as np

SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROWS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384)
DIFFERENCES: Final = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


class Metric(NamedTuple):
    """A family of samples; all of them add up over replicas."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    buckets: tuple[float, ...] = ()


METRICS: Final = {
    "rayrec_serve_replicas": Metric("gauge", "Replicas that serve a model, by its version and Preprocessor."),
    "rayrec_serve_requests_total": Metric("counter", "Requests answered, by path and status."),
    "rayrec_serve_request_seconds": Metric("histogram", "From a scoring request's last byte to its answer.", SECONDS),
    "rayrec_serve_rows_total": Metric("counter", "Rows scored, by the model's version."),
    "rayrec_serve_batch_rows": Metric("histogram", "Rows the model took at once.", ROWS),
    "rayrec_serve_forward_seconds": Metric(
        "histogram", "Reading, encoding and scoring of what went together.", SECONDS
    ),
    "rayrec_serve_waiting_rows": Metric("gauge", "Rows that wait for the model."),
    "rayrec_serve_waiting_requests": Metric("gauge", "Requests that wait for the model."),
    "rayrec_serve_unknown_total": Metric("counter", "Categories that the vocabulary does not hold, by column."),
    "rayrec_serve_swaps_total": Metric("counter", "Changes of the model, by outcome."),
    "rayrec_serve_shadow_rows_total": Metric("counter", "Rows scored with the shadow model, too, by its version."),
    "rayrec_serve_shadow_dropped_rows_total": Metric("counter", "Rows the shadow model was too slow for."),
    "rayrec_serve_shadow_failures_total": Metric("counter", "Batches the shadow model failed at."),
    "rayrec_serve_shadow_score_difference": Metric(
        "histogram", "|score of the shadow model - score that was answered|, a row each.", DIFFERENCES
    ),
}

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its labels."""
Snapshot = dict[Key, list[float]]
"""[value], or of a histogram its buckets' counts (not added up), those beyond the last, and the sum."""


@final
class Counters:
    """What one replica counts. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Snapshot = {}

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        key = (name, tuple(labels.items()))
        with self._lock:
            self._values.setdefault(key, [0.0])[0] += value

    def set(self, name: str, value: float, **labels: str) -> None:
        with self._lock:
            self._values[name, tuple(labels.items())] = [value]

    def observe(self, name: str, values: Sequence[float] | np.ndarray) -> None:
        """`values`: of a histogram, in any order."""
        buckets = METRICS[name].buckets
        if len(values) == 1:
            places, counts = [bisect_left(buckets, values[0])], [1]
        else:
            found = np.bincount(np.searchsorted(buckets, values), minlength=1)
            places = np.flatnonzero(found).tolist()
            counts = found[places].tolist()
        total = float(np.sum(values))
        with self._lock:
            sample = self._values.setdefault((name, ()), [0.0] * (len(buckets) + 2))
            for place, count in zip(places, counts, strict=True):
                sample[place] += count
            sample[-1] += total

    def remove(self, name: str) -> None:
        """Forgets all samples of a gauge."""
        with self._lock:
            for key in [key for key in self._values if key[0] == name]:
                del self._values[key]

    def snapshot(self) -> Snapshot:
        with self._lock:
            return {key: list(value) for key, value in self._values.items()}


def summed(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Sample by sample."""
    total: Snapshot = {}
    for snapshot in snapshots:
        for key, values in snapshot.items():
            before = total.get(key)
            total[key] = list(values) if before is None else [a + b for a, b in zip(before, values, strict=True)]
    return total


def without_gauges(snapshot: Snapshot) -> Snapshot:
    """What stays true of a replica that is gone."""
    return {key: values for key, values in snapshot.items() if METRICS[key[0]].kind != "gauge"}


def render(snapshot: Snapshot) -> str:
    """Prometheus' text format 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/)."""
    lines = []
    for name, metric in METRICS.items():
        samples = sorted((labels, values) for (found, labels), values in snapshot.items() if found == name)
        if not samples:
            continue
        lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
        for labels, values in samples:
            if metric.kind == "histogram":
                lines += _histogram(name, metric.buckets, labels, values)
            else:
                lines.append(f"{name}{_labels(labels)} {values[0]:.17g}")
    return "\n".join(lines) + "\n"


def _histogram(
    name: str, buckets: tuple[float, ...], labels: tuple[tuple[str, str], ...], values: list[float]
) -> list[str]:
    lines, count = [], 0.0
    for bound, value in zip([*map(str, buckets), "+Inf"], values, strict=False):
        count += value
        lines.append(f"{name}_bucket{_labels((*labels, ('le', bound)))} {count:.17g}")
    return [*lines, f"{name}_sum{_labels(labels)} {values[-1]:.17g}", f"{name}_count{_labels(labels)} {count:.17g}"]


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
