"""Metrics of one server process, and their sum over all replicas as Prometheus text."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROWS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384)
DIFFERENCES: Final = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True)
class Snapshot(Collector):
    """Metric families with samples of one moment. Picklable."""

    families: tuple[Metric, ...]

    def collect(self) -> Iterator[Metric]:
        return iter(self.families)


@final
class Counters:
    """Metrics of one replica in a separate registry. Thread-safe."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        common: dict[str, Any] = {"namespace": "rayrec", "subsystem": "serve", "registry": registry}
        gauge: Callable[..., Gauge] = partial(Gauge, **common)
        counter: Callable[..., Counter] = partial(Counter, **common)
        histogram: Callable[..., Histogram] = partial(Histogram, **common)
        models = "Replicas that serve a model, by its version and Preprocessor."
        self.replicas = gauge("replicas", models, ["model", "preprocessor"])
        tables = (
            "Replicas that serve a side table, by its name and the start of its content's hash."
        )
        self.tables = gauge("tables", tables, ["table", "content"])
        self.requests = counter(
            "requests_total", "Answered requests, by path and status.", ["path", "status"]
        )
        seconds = "From the last byte of a scoring request to its answer."
        self.request_seconds = histogram("request_seconds", seconds, buckets=SECONDS)
        self.rows = counter("rows_total", "Scored rows, by the version of the model.", ["model"])
        self.batch_rows = histogram(
            "batch_rows", "Rows the model scored in one batch.", buckets=ROWS
        )
        self.forward_seconds = histogram(
            "forward_seconds", "Reading, encoding and scoring of one batch.", buckets=SECONDS
        )
        self.waiting_rows = gauge("waiting_rows", "Rows that wait for the model.")
        self.waiting_requests = gauge("waiting_requests", "Requests that wait for the model.")
        self.unknown = counter(
            "unknown_total",
            "Categories that the vocabulary does not contain, by column.",
            ["column"],
        )
        self.numbers = counter(
            "numbers_total", "Numbers of columns with bounds, by column.", ["column"]
        )
        help_text = "Numbers beyond the range of the training rows, used as its end, by column."
        self.clipped = counter("clipped_total", help_text, ["column"])
        swaps = (
            "Model changes of replicas: done (swapped), rolled_back, or failed (a model could not "
            "be loaded)."
        )
        self.swaps = counter("swaps_total", swaps, ["outcome"])
        self.shadow_rows = counter(
            "shadow_rows_total", "Rows scored with the shadow model too, by its version.", ["model"]
        )
        self.shadow_dropped_rows = counter(
            "shadow_dropped_rows_total", "Rows the shadow model was too slow for."
        )
        self.shadow_failures = counter(
            "shadow_failures_total", "Batches the shadow model failed at."
        )
        self.shadow_score_difference = _BulkHistogram(
            "rayrec_serve_shadow_score_difference",
            "|score of the shadow model - score in the answer|, one for each row.",
            DIFFERENCES,
        )
        registry.register(self.shadow_score_difference)

    def snapshot(self) -> Snapshot:
        families = tuple(self._registry.collect())
        for family in families:  # Creation times cannot be summed over replicas
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
        return Snapshot(families)


@final
class _BulkHistogram(Collector):
    """Histogram that observes arrays: prometheus_client's needs 1.2 µs per value, with the GIL."""

    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        # Several threads observe values, and `collect` needs counts and a sum of the same ones.
        self._lock = threading.Lock()
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def observe(self, values: np.ndarray) -> None:
        """Count values, float64 [any shape]. NaN counts as above all bounds and is left out of the
        sum.
        """
        counts = np.bincount(
            np.searchsorted(self._bounds, values.ravel()), minlength=len(self._counts)
        )
        total = float(np.nansum(values))
        with self._lock:
            self._counts += counts
            self._sum += total

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counts = np.cumsum(self._counts).tolist()
            total = self._sum
        buckets = list(zip([*map(str, self._bounds), "+Inf"], map(float, counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, total)


def sum_snapshots(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Sum each sample over the snapshots."""
    families: dict[str, Metric] = {}
    totals: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for family in (family for snapshot in snapshots for family in snapshot.families):
        families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            totals[family.name, sample.name, tuple(sample.labels.items())] += sample.value
    for (name, sample_name, labels), value in totals.items():
        families[name].add_sample(sample_name, dict(labels), value)
    return Snapshot(tuple(families.values()))


def without_gauges(snapshot: Snapshot) -> Snapshot:
    """Return the metrics that stay valid after the replica is gone."""
    return Snapshot(tuple(family for family in snapshot.families if family.type != "gauge"))
