"""The data side of a run: what its events of kind data add up to, and what each stage of making rows did and could do. Pure."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class StageSide:
    """One stage of making rows."""

    name: str
    rows_per_s: float
    """Of all the CPUs, were they at this stage alone."""
    busy: float
    """Share of the CPUs' time that it took."""
    share: float
    """Of the work of all stages."""
    cpu_share: float
    """Of its own work: what it computed in."""
    queue_share: float
    """Of its own work: what it could have computed in and had no CPU for; for the rest it waited for storage."""


@dataclass(frozen=True)
class DataSide:
    """Sums and means over the events of kind data."""

    cpus: float
    """That may make rows at once, in the last attempt."""
    rows_per_s: float
    """Rows taken in use."""
    busy: float
    """Share of the CPUs' time in which stages were at work."""
    stages: tuple[StageSide, ...]
    """In their order."""
    storage_share: float
    """Of the stages' work: what reading waited for storage."""
    contention: float
    """Share of a CPU that stages got when they could compute: 1 where each had its CPU to itself."""
    backlog_rows: float
    """Mean."""
    store_fill: float | None
    """Share of the object store in use, half of the time at least; None where it was not watched."""
    spilled_bytes: int
    """Bytes that went from the object store to disk, of all its users, in this time."""
    spilling_share: float
    """Of the events, those in which more was spilled than in the one before."""

    @property
    def capacity_rows_per_s(self) -> float | None:
        """Rows the CPUs would make a second if they never paused; None where nothing was measured."""
        return self.rows_per_s / self.busy if self.busy else None


@dataclass
class _Sums:
    """Over some events of kind data."""

    count: int = 0
    seconds: float = 0.0
    rows: int = 0
    cpus: float = 0.0
    """Of the last one."""
    possible_s: float = 0.0
    """CPU-seconds; attempts may have had different numbers of CPUs."""
    backlog: float = 0.0
    """Rows times seconds."""
    wall_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """CPU-seconds that each stage was at work."""
    cpu_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    queue_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    fills: Counter[float] = field(default_factory=Counter)
    """Events by the share of the object store in use, to a thousandth."""

    def add(self, event: Event) -> None:
        self.count += 1
        self.seconds += event["seconds"]
        self.rows += event["rows"]
        self.cpus = event["cpus"]
        self.possible_s += event["seconds"] * event["cpus"]
        self.backlog += event["backlog_rows"] * event["seconds"]
        for stage in event["stages"]:
            name, spent_s = stage["stage"], stage["busy"] * event["seconds"] * event["cpus"]
            self.wall_s[name] += spent_s
            self.cpu_s[name] += spent_s * stage.get("cpu_share", 0.0)
            self.queue_s[name] += spent_s * stage.get("queue_share", 0.0)
        if event.get("object_store_limit_bytes"):
            self.fills[round(event["object_store_bytes"] / event["object_store_limit_bytes"], 3)] += 1


class DataSums:
    """Takes the events of kind data of a run, and keeps sums."""

    def __init__(self) -> None:
        self._all, self._warm = _Sums(), _Sums()
        self._before: Event | None = None
        self._spilled_bytes = self._spills = 0

    def begin(self) -> None:
        """An attempt starts."""
        self._before = None

    def add(self, event: Event) -> None:
        if event.get("stages") is None:
            return
        self._all.add(event)
        if self._before is not None:
            self._warm.add(event)
            # What was spilled is told since the attempt began, so each event has to be held against the one before.
            grown = (event.get("spilled_bytes") or 0) - (self._before.get("spilled_bytes") or 0)
            self._spilled_bytes += max(0, grown)
            self._spills += grown > 0
        self._before = event

    def side(self) -> DataSide | None:
        """Of all data events but the first behind each start (if others contain rows): its time is that of the start. Those in
        which no block was taken in use count with their time: the next block was made in it. None without any."""
        used = self._warm if self._warm.rows else self._all
        if not used.count:
            return None
        total_s, computed_s, queued_s = (sum(spent.values()) for spent in (used.wall_s, used.cpu_s, used.queue_s))
        waited_s = max(0.0, used.wall_s["read"] - used.cpu_s["read"] - used.queue_s["read"])
        return DataSide(
            cpus=used.cpus,
            rows_per_s=used.rows / used.seconds,
            busy=min(1.0, total_s / used.possible_s),
            stages=tuple(
                StageSide(
                    name=name,
                    rows_per_s=used.rows * used.possible_s / used.seconds / spent_s,
                    busy=min(1.0, spent_s / used.possible_s),
                    share=spent_s / total_s,
                    cpu_share=min(1.0, used.cpu_s[name] / spent_s),
                    queue_share=min(1.0, used.queue_s[name] / spent_s),
                )
                for name, spent_s in used.wall_s.items()
                if spent_s
            ),
            storage_share=waited_s / total_s if total_s else 0.0,
            contention=computed_s / (computed_s + queued_s) if computed_s else 1.0,
            backlog_rows=used.backlog / used.seconds,
            store_fill=statistics.median_low(used.fills.elements()) if used.fills else None,
            spilled_bytes=self._spilled_bytes,
            spilling_share=self._spills / self._warm.count if self._warm.count else 0.0,
        )
