"""Clicks whose worker 0 writes down when each step begins and keeps a pace, as a recipe in a file:
what `rayrec train FILE.py:FUNCTION` takes.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable
from typing import Any

import rayrec
from rayrec import recipes
from rayrec.workloads.base import WorkerContext, WorkerSetup
from rayrec.workloads.recsys.workload import ClickWorkload


@dataclasses.dataclass(frozen=True, kw_only=True)
class StampedClicks(ClickWorkload):
    """Clicks, with a line for each step that worker 0 begins, in any attempt."""

    stamps: str = ""
    """Path of the file. A line has the process, a step's number and its Unix time, in the order in
    which steps were begun.
    """
    pace_s: float = 0.0
    """Seconds that a step takes at least."""

    def set_up(self, worker: WorkerContext, prepared: Any) -> WorkerSetup:
        setup = super().set_up(worker, prepared)
        if worker.rank == 0:
            setup.begin_step = _stamped(setup.begin_step, self)
        return setup


def _stamped(
    begin_step: Callable[[int, int], None], workload: StampedClicks
) -> Callable[[int, int], None]:
    last_s = -math.inf

    def begin(step: int, total: int) -> None:
        nonlocal last_s
        time.sleep(max(0.0, last_s + workload.pace_s - time.monotonic()))
        last_s = time.monotonic()
        # closed: it shall be there if the process is killed in this step
        with open(workload.stamps, "a") as file:
            file.write(f"{os.getpid()} {step} {time.time()}\n")
        begin_step(step, total)

    return begin


def stamped() -> rayrec.TrainConfig:
    """Return criteo_demo with stamps."""
    config = recipes.criteo_demo()
    assert isinstance(config.workload, ClickWorkload)
    fields = {
        field.name: getattr(config.workload, field.name)
        for field in dataclasses.fields(config.workload)
    }
    return config.replace(recipe="stamped", workload=StampedClicks(**fields))
