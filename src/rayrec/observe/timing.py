"""Where the time of a run went, added up from its events, and the stages of its start, from the command to the first step."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

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


@dataclass(frozen=True)
class Interval:
    """What lies between two logs of one attempt."""

    steps: int = 0
    rows: int = 0
    elapsed_s: float = 0.0
    """Zero where the speed is not known."""


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

    def add(self, step: Mapping[str, Any], interval: Interval) -> None:
        """Takes in the interval that an event of kind step closed."""
        times_s = step.get("times_s")
        if times_s:
            self.measured = True
        else:
            blocked_s = (step.get("blocked_fraction") or 0.0) * interval.elapsed_s
            times_s = {"data": blocked_s, "other": interval.elapsed_s - blocked_s}
        most_s = step.get("times_max_s") or times_s
        for name in PHASES:
            self.times_s[name] += times_s.get(name) or 0.0
            self.most_s[name] += most_s.get(name) or 0.0
        self.rows += interval.rows


# -- the stages of a start

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


def in_order(starts: Sequence[Mapping[str, float]]) -> list[str]:
    """The stages that any of the starts has, as `STAGES` orders them; others, of later versions, last. Pure."""
    named = dict.fromkeys(name for stages in starts for name in stages)
    return [*(name for name in STAGES if name in named), *(name for name in named if name not in STAGES)]
