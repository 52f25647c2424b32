"""Clicks on an accelerator that takes a fixed time for each step, as a recipe in a file, for
`rayrec train FILE.py:FUNCTION`. Nothing is learned, so that the input pipeline can be measured
against any speed of a device.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch

import rayrec
from rayrec import recipes
from rayrec.batch import StepOutput
from rayrec.workloads.base import WorkerContext, WorkerSetup
from rayrec.workloads.recsys.workload import ClickWorkload


@dataclasses.dataclass(frozen=True, kw_only=True)
class PacedClicks(ClickWorkload):
    """Clicks whose steps take `pace_s` and train nothing."""

    pace_s: float = 0.05
    """Seconds that the device takes for a step once its batch is there."""

    def set_up(self, worker: WorkerContext, prepared: Any) -> WorkerSetup:
        setup = super().set_up(worker, prepared)
        setup.pipeline = Accelerator(self.pace_s)
        setup.count_correct = None
        return setup


class Accelerator:
    """Pipeline of a device that takes `pace_s` for each batch. The host asks for the next batch in
    the middle of a step. As in a GPU's pipeline, its work on a batch then does not delay the
    device.
    """

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._end_s = 0.0
        """End of the device's last step."""

    def progress(self, batches: Iterator[Any]) -> StepOutput:
        next(batches)
        self._end_s = max(self._end_s, time.monotonic()) + self._pace_s
        time.sleep(max(0.0, self._end_s - self._pace_s / 2 - time.monotonic()))
        return StepOutput(torch.zeros(()))

    def reset(self) -> None: ...


def paced() -> rayrec.TrainConfig:
    """Return criteo_demo on such an accelerator."""
    config = recipes.criteo_demo()
    assert isinstance(config.workload, ClickWorkload)
    fields = {
        field.name: getattr(config.workload, field.name)
        for field in dataclasses.fields(config.workload)
    }
    return config.replace(recipe="paced", workload=PacedClicks(**fields))
