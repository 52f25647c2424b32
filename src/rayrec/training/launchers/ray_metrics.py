"""Metrics of a run in Prometheus, exported by Ray's endpoint on the driver's node; and statistics
of Ray's object store.
"""

import logging
import threading
from typing import Any, Final, final

from ray.util.metrics import Counter, Gauge

from rayrec.config import packaged_json
from rayrec.observe.run_summary import RunSummary
from rayrec.observe.tracking.tracker import scalars

METRICS: Final[dict[str, dict[str, str]]] = packaged_json(__package__, "ray_metrics.json")
"""Descriptions of the metrics with the label run, by name: `gauges` and `counters`. Ray prefixes
each name with `ray_`.
"""
_GAUGE_FIELDS: Final = (
    "loss",
    "rows_per_s",
    "blocked_fraction",
    "multiply_adds_per_s",
    "peak_fraction",
)


@final
class PrometheusTracker:
    """Updates live metrics from events after `since_s`. Counters start at 0, and all disappear with
    the driver's process.
    """

    def __init__(self, run: str, *, since_s: float) -> None:
        tags = {"run": run}
        self._since_s = since_s
        self._gauges = {
            name: Gauge(name, description=text, tag_keys=("run",))
            for name, text in METRICS["gauges"].items()
        }
        self._counters = {
            name: Counter(name, description=text, tag_keys=("run",))
            for name, text in METRICS["counters"].items()
        }
        self._metric = Gauge(
            "rayrec_metric",
            description="Metrics of the last evaluation",
            tag_keys=("run", "set", "metric"),
        )
        self._time = Counter(
            "rayrec_time_s_total",
            description="Seconds of training by what they went to",
            tag_keys=("run", "phase"),
        )
        self._data = Gauge(
            "rayrec_data",
            description="What data tasks do, each stage of them and all together",
            tag_keys=("run", "stage", "measure"),
        )
        for metric in (
            *self._gauges.values(),
            *self._counters.values(),
            self._metric,
            self._time,
            self._data,
        ):
            metric.set_default_tags(tags)

    def update(self, event: dict[str, Any], run: RunSummary) -> None:
        kind = event["kind"]
        if event["time"] < self._since_s:
            return
        if kind == "start":
            self._gauges["rayrec_workers"].set(event["world_size"])
            self._count("rayrec_steps_redone_total", run.steps_redone)
        elif kind == "step":
            self._count("rayrec_rows_total", run.interval.rows)
            self._count("rayrec_steps_total", run.interval.steps)
            self._step(event)
        elif kind == "evaluate":
            for name, value in scalars(event).items():
                self._metric.set(
                    value, tags={"set": event["set"], "metric": name.partition("/")[2]}
                )
        elif kind == "checkpoint":
            self._count("rayrec_checkpoints_total", 1)
            self._count("rayrec_checkpoint_stall_s_total", event["stall_s"])
            self._gauges["rayrec_checkpoint_bytes"].set(event["bytes"])
            self._gauges["rayrec_checkpoint_write_s"].set(event["write_s"])
        elif kind == "failure":
            self._count("rayrec_failures_total", 1)
        elif kind == "data":
            for name, value in scalars(event).items():
                *stage, measure = name.split("/")[1:]
                self._data.set(value, tags={"stage": "/".join(stage) or "all", "measure": measure})

    def flush(self) -> None:
        """Do nothing: Ray collects the metrics."""

    def close(self) -> None:
        pass

    def _step(self, event: dict[str, Any]) -> None:
        self._gauges["rayrec_step"].set(event["step"])
        self._gauges["rayrec_goal_steps"].set(event["steps"])
        for name in _GAUGE_FIELDS:
            if event.get(name) is not None:
                self._gauges[f"rayrec_{name}"].set(event[name])
        for phase, seconds in event.get("times_s", {}).items():
            if seconds > 0:  # Ray rejects 0
                self._time.inc(seconds, tags={"phase": phase})

    def _count(self, name: str, amount: float) -> None:
        if amount > 0:
            self._counters[name].inc(amount)


_logger = logging.getLogger(__name__)
_POLL_S: Final = 3.0
_TIMEOUT_S: Final = 5.0
_MAX_FAILURES: Final = 10
"""Maximum number of consecutive failures before polling ends. A busy cluster answers again."""


@final
class ObjectStoreMonitor:
    """Thread that polls Ray's object store every few seconds. Its errors, ten in a row, only end
    the polling.
    """

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}
        self._spilled_before: int | None = None
        self._stop = threading.Event()
        # In a thread, because the call asks all nodes and takes up to its timeout. Daemon, and
        # never joined: it holds nothing that must be closed.
        self._thread = threading.Thread(target=self._watch, name="store-watch", daemon=True)
        self._thread.start()

    def latest(self) -> dict[str, int]:
        """Return `object_store_bytes` in use, `object_store_limit_bytes`, and `spilled_bytes` since
        the start, over all nodes. Empty before the first answer and after a failed poll.
        """
        return dict(self._latest)

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        num_failures = 0
        while num_failures < _MAX_FAILURES:
            try:
                self._latest = self._fields(_store_stats())
                num_failures = 0
            except Exception as error:  # private interface with undocumented errors
                self._latest = {}
                num_failures += 1
                cause = str(error)
            if self._stop.wait(_POLL_S):
                return
        _logger.warning("Stopped polling the object store (%s)", cause)

    def _fields(self, stats: Any) -> dict[str, int]:
        if self._spilled_before is None:
            self._spilled_before = stats.spilled_bytes_total
        return {
            "object_store_bytes": stats.object_store_bytes_used,
            "object_store_limit_bytes": stats.object_store_bytes_avail,
            "spilled_bytes": stats.spilled_bytes_total - self._spilled_before,
        }


def _store_stats() -> Any:
    """Return the statistics of all nodes, as in `ray memory --stats-only`. Ray 2.60 has no public
    function for it.
    """
    from rayrec.compat.ray_compat import internal_api, state

    return internal_api.get_memory_info_reply(state.state, timeout_seconds=_TIMEOUT_S).store_stats
