"""Where the time of a run went, added up from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

PHASES: Final = ("data", "host_to_device", "forward", "backward", "optimizer", "collectives", "other")
"""What a worker's training time is split into: waiting for the next batch, bringing it to the device, the forward pass, the
backward pass, the optimizer, waiting for other workers (also for the exchange of ids and embeddings), all else."""
WORDS: Final = {
    "data": "waiting for data",
    "host_to_device": "copying to the device",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer",
    "collectives": "waiting for other workers",
    "other": "everything else",
    "checkpoint": "held up by checkpoints",
    "evaluation": "evaluation",
}
"""Each part of a `TimeSplit` as a person calls it."""


@dataclass
class TimeSplit:
    """Seconds of training, mean over workers; added up over intervals between two logs."""

    times_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    most_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Of the worker that took longest for a phase, interval by interval; the mean where that was not told."""
    checkpoint_s: float = 0.0
    """That saves held training up for, beside the phases."""
    evaluation_s: float = 0.0
    """Between the last step logged before an evaluation and the evaluation's end, beside the phases."""
    rows: int = 0
    """Trained in that time, by all workers."""
    measured: bool = False
    """Whether any interval was split into phases; else what was not blocked on data is `other`."""

    @property
    def training_s(self) -> float:
        return sum(self.times_s.values())

    @property
    def total_s(self) -> float:
        return self.training_s + self.checkpoint_s + self.evaluation_s

    def shares(self) -> dict[str, float]:
        """Of `total_s`, by phase, and `checkpoint` and `evaluation`; all 0 where there is none."""
        total = self.total_s
        return {name: seconds / total if total else 0.0 for name, seconds in self.parts_s().items()}

    def parts_s(self) -> dict[str, float]:
        """Seconds by phase, and of `checkpoint` and `evaluation`: what `WORDS` names."""
        return {**self.times_s, "checkpoint": self.checkpoint_s, "evaluation": self.evaluation_s}

    def most_shares(self) -> dict[str, float]:
        """Of `total_s`, what the slowest worker spent, by phase."""
        return {name: seconds / self.total_s if self.total_s else 0.0 for name, seconds in self.most_s.items()}


def time_split(events: Iterable[Mapping[str, Any]], *, warm: bool = False) -> TimeSplit:
    """Of all events of a run, steps done again included: they took time as well. `warm`: without the first interval logged
    behind each start, in which the first batch is waited for and nothing is at its speed, and without what was evaluated and
    saved behind it. Pure."""
    split, rows, logged_s, first, counted = TimeSplit(), 0, None, True, not warm
    for event in events:
        kind = event["kind"]
        if kind == "start":
            rows, logged_s, first, counted = event.get("rows", 0), None, True, not warm
        elif kind == "step":
            counted = not (warm and first)
            if counted:
                _add(split, event, interval_s=_interval_s(event, rows))
                split.rows += event["rows"] - rows
            rows, logged_s, first = event["rows"], event["time"], False
        elif kind == "checkpoint" and counted:
            split.checkpoint_s += event["stall_s"]
        elif kind == "evaluate" and logged_s is not None:
            split.evaluation_s += max(0.0, event["time"] - logged_s) if counted else 0.0
            logged_s = None
    return split


def _interval_s(event: Mapping[str, Any], rows_before: int) -> float:
    rows_per_s = event.get("rows_per_s")
    return (event["rows"] - rows_before) / rows_per_s if rows_per_s else 0.0


def _add(split: TimeSplit, event: Mapping[str, Any], *, interval_s: float) -> None:
    times_s = event.get("times_s")
    if times_s:
        split.measured = True
    else:
        blocked_s = (event.get("blocked_fraction") or 0.0) * interval_s
        times_s = {"data": blocked_s, "other": interval_s - blocked_s}
    most_s = event.get("times_max_s") or times_s
    for name in PHASES:
        split.times_s[name] += times_s.get(name) or 0.0
        split.most_s[name] += most_s.get(name) or 0.0
