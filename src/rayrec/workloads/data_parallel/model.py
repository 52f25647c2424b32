"""Model interface of data-parallel training: rows in, a loss for each row out."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rayrec.bounds import Count
from rayrec.config import InputError
from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule
from rayrec.workloads.base import TrainConfig, WorkerContext, Workload

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rayrec.data.numbered_rows import RowSource


@dataclass(frozen=True, kw_only=True)
class DataParallelModel(Workload, abc.ABC):
    """Settings, rows, network and measures of a `DataParallelWorkload`."""

    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = ("parallel", "accumulate")
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Parallelism. ddp: each worker has the full model; fsdp: weights, gradients and optimizer state are sharded."""
    accumulate: Count = 1
    """Number of gradient accumulation parts per batch. More parts use less memory. The step stays the same."""
    optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    """Optimizer."""
    schedule: LearningRateSchedule = field(default_factory=LearningRateSchedule)
    """Learning rate schedule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel == "fsdp" and self.optimizer.needs_full_parameters:
            raise InputError(
                f"workload.optimizer.kind: {self.optimizer.kind} requires norms of full parameters, which workload.parallel fsdp "
                "shards. Use parallel ddp, or kind adamw."
            )

    # -- required, in addition to `prepare` and `score`

    @abc.abstractmethod
    def set_rows(self, prepared: Any) -> dict[str, int]:
        """Return the row count of each set: `train`, `validation` and optionally `test`."""

    @abc.abstractmethod
    def open_set(self, context: WorkerContext, prepared: Any, name: str) -> RowSource:
        """Open the rows of a set on a worker."""

    @abc.abstractmethod
    def build(self, prepared: Any) -> torch.nn.Module:
        """Build the fp32 model on CPU with initial values from torch's global generator, which is seeded before."""

    @abc.abstractmethod
    def measure(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute named measures of each row, [rows]. Training minimizes the mean `loss`. Evaluation reports the means of all.
        `model` may be wrapped, so only call it. With precision bf16, this runs under autocast."""

    # -- optional

    def data_hash(self, prepared: Any) -> str | None:
        """Return a hash of all rows to verify on resume. None compares only the row count."""
        return None

    def augment(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Randomly augment a training batch on its device with torch's global generator."""
        return tensors

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Return the evaluation metrics, given the means of the measures."""
        return means

    def samples(
        self, model: torch.nn.Module, *, prepared: Any, sets: Mapping[str, RowSource], device: torch.device
    ) -> list[dict[str, Any]]:
        """Create sample outputs of the final weights for a few evaluation rows. All workers must call `model` equally."""
        return []

    # -- scoring

    def open_labelled(self, config: TrainConfig, *, checkpoint: str, path: str) -> RowSource:
        """Open the rows of a path as input of `measure`, for evaluation."""
        raise InputError(f"{checkpoint}: recipe {config.recipe} cannot be evaluated on other data")

    def open_inputs(self, config: TrainConfig, *, checkpoint: str, path: str) -> RowSource:
        """Open the rows of a path as input of `predict`."""
        raise InputError(f"{checkpoint}: recipe {config.recipe} does not support predictions")

    def build_from(self, config: TrainConfig, *, checkpoint: str) -> torch.nn.Module:
        """Build the model for a checkpoint folder. Its values are replaced by the stored weights."""
        raise InputError(f"{checkpoint}: recipe {config.recipe} does not define build_from, so its model cannot be used")

    def predict(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, np.ndarray | list[str]]:
        """Return named prediction columns with one value per row."""
        raise InputError(f"{type(self).__name__} does not support predictions")
