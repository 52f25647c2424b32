"""Data pipeline statistics of a run, from its data events. Pure."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class StageStats:
    """Statistics of one data stage."""

    name: str
    rows_per_s: float
    """Rows per second if all CPUs ran only this stage."""
    busy: float
    """Share of the CPU time that this stage takes."""
    fraction: float
    """Share of the work of all stages."""
    cpu_fraction: float
    """Share of the stage's work spent computing."""
    queue_fraction: float
    """Share of the stage's work spent waiting for a CPU. The rest is waiting for storage."""


@dataclass(frozen=True)
class PipelineStats:
    """Data pipeline statistics over all data events of a run."""

    cpus: float
    """Number of CPUs that can process rows concurrently, in the last attempt."""
    rows_per_s: float
    """Rows consumed per second."""
    busy: float
    """Share of CPU time with active stages."""
    stages: tuple[StageStats, ...]
    """Stages in pipeline order."""
    storage_fraction: float
    """Share of the stages' work spent waiting for storage reads."""
    contention: float
    """Share of a CPU that stages got while able to compute. 1 means exclusive CPUs."""
    backlog_rows: float
    """Mean number of rows ready for training."""
    store_fill: float | None
    """Median share of the object store in use. None if not measured."""
    spilled_bytes: int
    """Bytes spilled from the object store to disk by all jobs during this time."""
    spilling_fraction: float
    """Share of events with new spilling since the previous event."""

    @property
    def capacity_rows_per_s(self) -> float | None:
        """Rows per second if the CPUs never paused. None if not measured."""
        return self.rows_per_s / self.busy if self.busy else None


@dataclass
class _Sums:
    """Sums over some data events."""

    count: int = 0
    seconds: float = 0.0
    rows: int = 0
    cpus: float = 0.0
    possible_s: float = 0.0
    """CPU-seconds available. The number of CPUs may differ between attempts."""
    backlog: float = 0.0
    """Backlog in rows times seconds."""
    wall_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Active CPU-seconds of each stage."""
    cpu_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    queue_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    fills: Counter[float] = field(default_factory=Counter)
    """Number of events by used share of the object store, rounded to three digits."""

    def add(self, event: Event) -> None:
        self.count += 1
        self.seconds += event["seconds"]
        self.rows += event["rows"]
        self.cpus = event["cpus"]
        self.possible_s += event["seconds"] * event["cpus"]
        self.backlog += event["backlog_rows"] * event["seconds"]
        for stage in event["stages"]:
            name = stage["stage"]
            spent_s = stage["busy"] * event["seconds"] * event["cpus"]
            self.wall_s[name] += spent_s
            self.cpu_s[name] += spent_s * stage.get("cpu_share", 0.0)
            self.queue_s[name] += spent_s * stage.get("queue_share", 0.0)
        if event.get("object_store_limit_bytes"):
            self.fills[
                round(event["object_store_bytes"] / event["object_store_limit_bytes"], 3)
            ] += 1


class DataSums:
    """Sums over the data events of a run."""

    def __init__(self) -> None:
        self._all = _Sums()
        self._warm = _Sums()
        self._before: Event | None = None
        self._spilled_bytes = self._spills = 0

    def begin(self) -> None:
        """Start a new attempt."""
        self._before = None

    def add(self, event: Event) -> None:
        if event.get("stages") is None:
            return
        self._all.add(event)
        if self._before is not None:
            self._warm.add(event)
            # Spilled bytes count from the start of the attempt, so compare consecutive events.
            grown = (event.get("spilled_bytes") or 0) - (self._before.get("spilled_bytes") or 0)
            self._spilled_bytes += max(0, grown)
            self._spills += grown > 0
        self._before = event

    def side(self) -> PipelineStats | None:
        """Return the statistics, or None without data events. Skips the first event after each
        start, which measures startup, unless no other has rows. Events without a consumed block
        count with their time, as the next was made in it.
        """
        used = self._warm if self._warm.rows else self._all
        if not used.count:
            return None
        total_s, computed_s, queued_s = (
            sum(spent.values()) for spent in (used.wall_s, used.cpu_s, used.queue_s)
        )
        waited_s = max(0.0, used.wall_s["read"] - used.cpu_s["read"] - used.queue_s["read"])
        return PipelineStats(
            cpus=used.cpus,
            rows_per_s=used.rows / used.seconds,
            busy=min(1.0, total_s / used.possible_s),
            stages=tuple(
                StageStats(
                    name=name,
                    rows_per_s=used.rows * used.possible_s / used.seconds / spent_s,
                    busy=min(1.0, spent_s / used.possible_s),
                    fraction=spent_s / total_s,
                    cpu_fraction=min(1.0, used.cpu_s[name] / spent_s),
                    queue_fraction=min(1.0, used.queue_s[name] / spent_s),
                )
                for name, spent_s in used.wall_s.items()
                if spent_s
            ),
            storage_fraction=waited_s / total_s if total_s else 0.0,
            contention=computed_s / (computed_s + queued_s) if computed_s else 1.0,
            backlog_rows=used.backlog / used.seconds,
            store_fill=statistics.median_low(used.fills.elements()) if used.fills else None,
            spilled_bytes=self._spilled_bytes,
            spilling_fraction=self._spills / self._warm.count if self._warm.count else 0.0,
        )
