"""The stages of a run's start, from the command to the first step: how long each took, as events of kind start_up."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

KIND: Final = "start_up"
"""Events of this kind have `process` (driver or worker) and `stages`, seconds by name. Stages of one start are consecutive."""
DRIVER: Final = "driver"
WORKER: Final = "worker"
STAGES: Final = {
    "imports": "interpreter and imports",
    "checks": "checks of settings and input",
    "connect": "connecting (starting a local Ray)",
    "folder": "run folder",
    "index": "index of the log",
    "vocabulary": "vocabulary",
    "prepare": "other preparation",
    "warm_start": "comparison with the checkpoint to start with",
    "attempt": "beginning the attempt",
    "worker_process": "Ray Train's controller, until it starts a worker's process",
    "process_group": "worker's process, process group",
    "worker_imports": "worker imports",
    "speed_probe": "measuring the device's peak",
    "storage": "check of the storage",
    "loader": "data pipeline, model imports",
    "set_up": "model, planner and sharding",
    "restore": "restoring the checkpoint",
    "begin": "other set-up of the worker",
    "first_batch": "first batch",
    "first_step": "first step",
}
"""Each stage in words, in the order in which they run. Stages of the worker are those of rank 0."""


@dataclass
class Stopwatch:
    """Times consecutive stages: each lasts from the end of the one before."""

    last_s: float = field(default_factory=time.time)
    """End of the last stage, seconds since 1970: processes of one start share this clock."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage."""

    @classmethod
    def of_process(cls) -> Self:
        """A stopwatch that runs since this process was started, or, if the system does not report that, since this call."""
        now_s = time.time()
        return cls(now_s - (process_age_s() or 0.0))

    def lap(self, stage: str, *, at_s: float | None = None) -> None:
        """The stage ends now, or at a time in seconds since 1970. A stage that ends twice lasts for the sum. Clocks of two
        machines may differ, so a stage lasts 0 s at least."""
        now_s = time.time() if at_s is None else at_s
        self.stages[stage] = self.stages.get(stage, 0.0) + max(0.0, now_s - self.last_s)
        self.last_s = now_s


def process_age_s(root: Path = Path("/")) -> float | None:
    """Seconds since this process was started, to a hundredth; None if the system has no /proc. `root` is where /proc is, for
    tests."""
    try:
        after_name = (root / "proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return None


def fields(process: str, stages: Mapping[str, float]) -> dict[str, Any]:
    """The fields of an event of kind start_up."""
    return {"process": process, "stages": dict(stages)}


def starts(events: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Seconds by stage of every start of a run, in order: that of the command with its first attempt, then one for each further
    attempt or command. Pure."""
    found: list[dict[str, float]] = []
    open_start = False
    for event in events:
        if event["kind"] == "run" or (event["kind"] == "attempt" and event["number"] > 1):
            open_start = False
        elif event["kind"] == KIND:
            if not open_start:
                found.append({})
                open_start = True
            stages = found[-1]
            for name, seconds in event["stages"].items():
                stages[name] = stages.get(name, 0.0) + seconds
    return found


def in_order(starts: Sequence[Mapping[str, float]]) -> list[str]:
    """The stages that any of the starts has, as `STAGES` orders them; others, of later versions, last. Pure."""
    named = dict.fromkeys(name for stages in starts for name in stages)
    return [*(name for name in STAGES if name in named), *(name for name in named if name not in STAGES)]
