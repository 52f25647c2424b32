"""What the events say of the data side of a run: how busy it was, at what, and what it could do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DataSide:
    """Sums and means over the events of kind data."""

    cpus: float
    """That may make rows at once."""
    rows_per_s: float
    """Rows taken in use."""
    busy: float
    """Share of the CPUs' time in which stages were at work."""
    shares: Mapping[str, float]
    """Of that work, by stage."""
    storage_share: float
    """Of that work: what reading waited for storage."""
    contention: float
    """Share of a CPU that stages got when they could compute: 1 where each had its CPU to itself."""
    backlog_rows: float
    """Mean."""
    store_fill: float | None
    """Largest share of the object store in use; None where it was not watched."""
    spilled_bytes: int
    """From the object store to disk."""
    names: tuple[str, ...] = field(default=())
    """Of the stages, in their order."""

    @property
    def capacity_rows_per_s(self) -> float | None:
        """Rows the CPUs would make a second if they never paused; None where nothing was measured."""
        return self.rows_per_s / self.busy if self.busy else None


def data_side(events: Iterable[Mapping[str, Any]]) -> DataSide | None:
    """Of all data events but the first behind each start (where there are others): its time is that of the start. None
    without any."""
    told: list[tuple[bool, Mapping[str, Any]]] = []
    fresh = True
    for event in events:
        if event["kind"] == "start":
            fresh = True
        elif event["kind"] == "data" and event.get("stages") is not None:
            told.append((fresh, event))
            fresh = False
    used = [event for first, event in told if not first and event["rows"]] or [event for _, event in told]
    if not used:
        return None
    seconds = sum(event["seconds"] for event in used)
    wall_s, cpu_s, queue_s = (_stage_seconds(used, kind) for kind in (None, "cpu_share", "queue_share"))
    total_s, computed_s, queued_s = (sum(seconds.values()) for seconds in (wall_s, cpu_s, queue_s))
    contention = computed_s / (computed_s + queued_s) if computed_s else 1.0
    waited_s = max(0.0, sum(spent.get("read", 0.0) * sign for spent, sign in ((wall_s, 1), (cpu_s, -1), (queue_s, -1))))
    everything = [event for _, event in told]
    fills = [
        event["object_store_bytes"] / event["object_store_limit_bytes"]
        for event in everything
        if event.get("object_store_limit_bytes")
    ]
    cpus = used[-1]["cpus"]
    return DataSide(
        cpus=cpus,
        rows_per_s=sum(event["rows"] for event in used) / seconds,
        busy=min(1.0, total_s / (seconds * cpus)),
        shares={name: spent / total_s for name, spent in wall_s.items()} if total_s else {},
        storage_share=waited_s / total_s if total_s else 0.0,
        contention=contention,
        backlog_rows=sum(event["backlog_rows"] * event["seconds"] for event in used) / seconds,
        store_fill=max(fills, default=None),
        spilled_bytes=max((event.get("spilled_bytes") or 0 for event in everything), default=0),
        names=tuple(wall_s),
    )


def _stage_seconds(events: Iterable[Mapping[str, Any]], share: str | None) -> dict[str, float]:
    """CPU-seconds that each stage was at work, or the share of them that a field names."""
    seconds: dict[str, float] = {}
    for event in events:
        for stage in event["stages"]:
            spent = stage["busy"] * event["seconds"] * event["cpus"] * (stage.get(share, 0.0) if share else 1.0)
            seconds[stage["stage"]] = seconds.get(stage["stage"], 0.0) + spent
    return seconds
