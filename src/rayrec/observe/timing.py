"""Time breakdown of a run, summed over its events, and startup stages from the command to the first
step.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from rayrec.config import packaged_json

PHASES: Final = (
    "data",
    "host_to_device",
    "forward",
    "backward",
    "optimizer",
    "collectives",
    "other",
)
"""Phases of a worker's training time: waiting for the next batch, copying it to the device, forward
pass, backward pass, optimizer, waiting for other workers (including the exchange of ids and
embeddings), and everything else.
"""
_NAMES: Final[dict[str, dict[str, str]]] = packaged_json(__package__, "time_names.json")
WORDS: Final = _NAMES["parts"]
"""Display name of each part of a `TimeBreakdown`."""


@dataclass(frozen=True)
class Interval:
    """Interval between two logs of one attempt."""

    steps: int = 0
    rows: int = 0
    elapsed_s: float = 0.0
    """Zero if the speed is unknown."""


@dataclass
class TimeBreakdown:
    """Training time in seconds, mean over workers, summed over the intervals between logs."""

    times_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    slowest_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Sum over intervals of the slowest worker's time in each phase, or of the mean if not
    reported.
    """
    checkpoint_s: float = 0.0
    """Seconds for which saves blocked training, in addition to the phases."""
    evaluation_s: float = 0.0
    """Seconds in evaluations, in addition to the phases."""
    rows: int = 0
    """Rows trained in that time by all workers."""
    measured: bool = False
    """Whether any interval reported phases. Otherwise, time not blocked on data counts as
    `other`.
    """

    @property
    def training_s(self) -> float:
        return sum(self.times_s.values())

    @property
    def total_s(self) -> float:
        return self.training_s + self.checkpoint_s + self.evaluation_s

    def fractions(self) -> dict[str, float]:
        """Return the share of `total_s` of each phase, `checkpoint` and `evaluation`. All 0 if
        `total_s` is 0.
        """
        total = self.total_s
        return {name: seconds / total if total else 0.0 for name, seconds in self.parts_s().items()}

    def parts_s(self) -> dict[str, float]:
        """Return the seconds of each part named in `WORDS`."""
        return {**self.times_s, "checkpoint": self.checkpoint_s, "evaluation": self.evaluation_s}

    def slowest_fractions(self) -> dict[str, float]:
        """Return the slowest worker's share of `total_s` in each phase."""
        return {
            name: seconds / self.total_s if self.total_s else 0.0
            for name, seconds in self.slowest_s.items()
        }

    def add(self, step: Mapping[str, Any], interval: Interval) -> None:
        """Add the interval that ends with a step event."""
        times_s = step.get("times_s")
        if times_s:
            self.measured = True
        else:
            blocked_s = (step.get("blocked_fraction") or 0.0) * interval.elapsed_s
            times_s = {"data": blocked_s, "other": interval.elapsed_s - blocked_s}
        slowest_s = step.get("times_max_s") or times_s
        for name in PHASES:
            self.times_s[name] += times_s.get(name) or 0.0
            self.slowest_s[name] += slowest_s.get(name) or 0.0
        self.rows += interval.rows


# -- the stages of a start

STAGES: Final = _NAMES["stages"]
"""Display name of each startup stage, in order. Worker stages are measured on rank 0."""


@dataclass
class Stopwatch:
    """Timer of consecutive stages. Each stage starts at the end of the previous one."""

    last_s: float = field(default_factory=time.time)
    """End of the last stage in unix seconds, a clock shared by all processes of a start."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage."""

    @classmethod
    def since_process_start(cls) -> Self:
        """Return a stopwatch that runs since the start of this process, or since this call if the
        system does not report it.
        """
        return cls(time.time() - (process_age_s() or 0.0))

    def lap(self, stage: str, *, at_s: float | None = None) -> None:
        """End the stage now, or at unix time `at_s`. Repeated stages add up. The minimum is 0 s,
        because clocks may differ.
        """
        now_s = time.time() if at_s is None else at_s
        self.stages[stage] = self.stages.get(stage, 0.0) + max(0.0, now_s - self.last_s)
        self.last_s = now_s


def process_age_s(root: Path = Path("/")) -> float | None:
    """Return the seconds since this process started, with a resolution of 0.01, or None without
    /proc. `root` is for tests.
    """
    try:
        after_name = (root / "proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf(
            "SC_CLK_TCK"
        )
    except (OSError, AttributeError, IndexError, ValueError):
        return None


def in_order(starts: Sequence[Mapping[str, float]]) -> list[str]:
    """Return all stages of the starts in the order of `STAGES`, then unknown stages from later
    versions. Pure.
    """
    named = dict.fromkeys(name for stages in starts for name in stages)
    return [
        *(name for name in STAGES if name in named),
        *(name for name in named if name not in STAGES),
    ]
