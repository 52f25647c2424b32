"""What a user supplies to train any PyTorch model that fits the common mould: rows in, a loss for each row out."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rayrec.bounds import Count
from rayrec.config import InputError
from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule
from rayrec.workloads.base import RunContext, TrainConfig, WorkerContext, Workload

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rayrec.data.numbered_rows import RowSource


@dataclass(frozen=True, kw_only=True)
class DataParallelModel(Workload, abc.ABC):
    """Settings, rows, network and measures of a `DataParallelWorkload`, which the modules that it calls take."""

    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = ("parallel", "accumulate")
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: every worker holds the whole model; fsdp: weights, gradients and optimizer state are split over the workers."""
    accumulate: Count = 1
    """Parts a worker's batch is computed in, one after the other, which takes less memory; the step stays one."""
    optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    """Update rule."""
    schedule: LearningRateSchedule = field(default_factory=LearningRateSchedule)
    """Learning rate over the steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel == "fsdp" and self.optimizer.needs_whole_parameters:
            raise InputError(
                f"workload.optimizer.kind: {self.optimizer.kind} needs norms of whole parameters, which workload.parallel fsdp "
                "splits; choose parallel ddp, or kind adamw"
            )

    # -- to be supplied

    @abc.abstractmethod
    def prepare(self, context: RunContext) -> Any: ...

    @abc.abstractmethod
    def set_rows(self, prepared: Any) -> dict[str, int]:
        """Rows of each set: `train`, `validation` and, where there is one, `test`."""

    @abc.abstractmethod
    def open_set(self, context: WorkerContext, prepared: Any, name: str) -> RowSource:
        """The rows of a set, on one worker."""

    @abc.abstractmethod
    def build(self, prepared: Any) -> torch.nn.Module:
        """The model on the CPU in fp32; initial weights come of torch's global generator, which is seeded before."""

    @abc.abstractmethod
    def measure(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Named (rows,) numbers, `loss` among them: training minimises its mean, evaluation gives the means of all.

        `model` may be wrapped: call it, and reach for nothing inside. With precision bf16 this runs under autocast.
        """

    @abc.abstractmethod
    def score(self, metrics: dict[str, float]) -> float: ...

    # -- may be supplied

    def data_hash(self, prepared: Any) -> str | None:
        """A hash of all rows, so that a run resumes with the same rows only; None: only their number is compared."""
        return None

    def augment(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A training batch, changed at random by torch's global generator, on its device."""
        return tensors

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """What is reported of an evaluation, from the means over its rows."""
        return means

    def samples(
        self, model: torch.nn.Module, *, prepared: Any, sets: Mapping[str, RowSource], device: torch.device
    ) -> list[dict[str, Any]]:
        """What the final weights make of a few rows of the evaluation sets; the same calls of `model` on every worker."""
        return []

    # -- for checkpoints that are to be used

    def open_labelled(self, config: TrainConfig, *, checkpoint: str, path: str) -> RowSource:
        """The rows of a path as `measure` takes them, to be evaluated."""
        raise InputError(f"{checkpoint}: recipe {config.recipe} cannot be evaluated on other data")

    def open_inputs(self, config: TrainConfig, *, checkpoint: str, path: str) -> RowSource:
        """The rows of a path as `predict` takes them."""
        raise InputError(f"{checkpoint}: recipe {config.recipe} makes no predictions")

    def build_from(self, config: TrainConfig, *, checkpoint: str) -> torch.nn.Module:
        """A model for the weights of a checkpoint's folder, whatever it holds now."""
        raise InputError(f"{checkpoint}: recipe {config.recipe} does not say how its model is built for use")

    def predict(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, np.ndarray | list[str]]:
        """Named columns of predictions, one value a row."""
        raise InputError(f"{type(self).__name__} makes no predictions")
