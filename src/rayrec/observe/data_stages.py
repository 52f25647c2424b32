"""What the events say of the data side of a run: how busy it was, at what, and what it could do. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    """From the object store to disk, by whoever uses it, in the time looked at."""
    spilling_share: float
    """Of the events, those in which more was spilled than in the one before."""

    @property
    def capacity_rows_per_s(self) -> float | None:
        """Rows the CPUs would make a second if they never paused; None where nothing was measured."""
        return self.rows_per_s / self.busy if self.busy else None


def data_side(events: Iterable[Event]) -> DataSide | None:
    """Of all data events but the first behind each start (where others tell of rows): its time is that of the start. Those in
    which no block was taken in use count with their time: the next block was made in it. None without any."""
    attempts = list(_attempts(events))
    # What was spilled is told since the attempt began, so each event has to be held against the one before.
    behind = [(before, event) for told in attempts for before, event in pairwise(told)]
    used = [event for _, event in behind]
    if not any(event["rows"] for event in used):
        used = [event for told in attempts for event in told]
    if not used:
        return None
    seconds = sum(event["seconds"] for event in used)
    rows = sum(event["rows"] for event in used)
    # Attempts may have had different numbers of CPUs.
    possible_s = sum(event["seconds"] * event["cpus"] for event in used)
    wall_s, cpu_s, queue_s = (_stage_seconds(used, kind) for kind in (None, "cpu_share", "queue_share"))
    total_s, computed_s, queued_s = (sum(spent.values()) for spent in (wall_s, cpu_s, queue_s))
    waited_s = max(0.0, sum(spent.get("read", 0.0) * sign for spent, sign in ((wall_s, 1), (cpu_s, -1), (queue_s, -1))))
    spilled = [
        max(0, (event.get("spilled_bytes") or 0) - (before.get("spilled_bytes") or 0)) for before, event in behind
    ]
    fills = [
        event["object_store_bytes"] / event["object_store_limit_bytes"]
        for event in used
        if event.get("object_store_limit_bytes")
    ]
    return DataSide(
        cpus=used[-1]["cpus"],
        rows_per_s=rows / seconds,
        busy=min(1.0, total_s / possible_s),
        stages=tuple(
            StageSide(
                name=name,
                rows_per_s=rows * possible_s / seconds / spent_s,
                busy=min(1.0, spent_s / possible_s),
                share=spent_s / total_s,
                cpu_share=min(1.0, cpu_s[name] / spent_s),
                queue_share=min(1.0, queue_s[name] / spent_s),
            )
            for name, spent_s in wall_s.items()
            if spent_s
        ),
        storage_share=waited_s / total_s if total_s else 0.0,
        contention=computed_s / (computed_s + queued_s) if computed_s else 1.0,
        backlog_rows=sum(event["backlog_rows"] * event["seconds"] for event in used) / seconds,
        store_fill=statistics.median_low(fills) if fills else None,
        spilled_bytes=sum(spilled),
        spilling_share=sum(grown > 0 for grown in spilled) / len(spilled) if spilled else 0.0,
    )


def _attempts(events: Iterable[Event]) -> Iterator[Sequence[Event]]:
    """The data events of each attempt that has some."""
    told: list[Event] = []
    for event in events:
        if event["kind"] == "start" and told:
            yield told
            told = []
        elif event["kind"] == "data" and event.get("stages") is not None:
            told.append(event)
    if told:
        yield told


def _stage_seconds(events: Iterable[Event], share: str | None) -> dict[str, float]:
    """CPU-seconds that each stage was at work, or the share of them that a field names."""
    seconds: dict[str, float] = {}
    for event in events:
        for stage in event["stages"]:
            spent = stage["busy"] * event["seconds"] * event["cpus"] * (stage.get(share, 0.0) if share else 1.0)
            seconds[stage["stage"]] = seconds.get(stage["stage"], 0.0) + spent
    return seconds
