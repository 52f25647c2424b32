"""Model interface of data-parallel training: rows in, a loss for each row out."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rayrec.bounds import Count, Positive
from rayrec.config import Config, InputError
from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule
from rayrec.workloads.base import TrainConfig, WorkerContext, Workload

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rayrec.data.numbered_rows import RowSource


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(Config):
    """Arguments of DDP or FSDP2, by torch's names. Those of the other one must keep their
    defaults.
    """

    DDP: ClassVar[tuple[str, ...]] = (
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "static_graph",
        "bucket_cap_mb",
    )
    """DDP's options. The others are FSDP's."""
    MEMORY: ClassVar[tuple[str, ...]] = ("reshard_after_forward", "cpu_offload")
    """FSDP's options that change no result."""

    find_unused_parameters: bool = False
    """DDP: whether a step may leave parameters without a gradient. Slower."""
    gradient_as_bucket_view: bool = True
    """DDP: whether gradients share memory with the buckets of their exchange."""
    static_graph: bool = False
    """DDP: whether each step uses the same parameters in the same way. Not for several accumulation
    parts.
    """
    bucket_cap_mb: Positive | None = None
    """DDP: size of an exchange bucket, in MiB. None uses torch's default, 25."""
    reshard_after_forward: bool = True
    """FSDP: whether to free gathered weights after the forward pass. False uses more memory and
    communicates less.
    """
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """FSDP: data type of gathered weights and of computation. The optimizer's weights are always
    fp32.
    """
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """FSDP: data type for averaging gradients."""
    cpu_offload: bool = False
    """FSDP: whether to keep sharded weights, gradients and optimizer state in host memory. Requires
    scaling.use_gpu.
    """

    def check(self, parallel: str) -> None:
        """Check that no option of the other kind of parallelism is set. Raises InputError."""
        defaults = type(self)()
        for name in self.to_dict():
            value = getattr(self, name)
            default = getattr(defaults, name)
            kind = "ddp" if name in self.DDP else "fsdp"
            if value != default and kind != parallel:
                raise InputError(
                    f"workload.parallel_options.{name}: must be {default} with workload.parallel "
                    f"{parallel}, got {value}. It is an option of {kind}."
                )


TRAINER_ARGUMENTS = (
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "neftune_noise_alpha",
    "torch_empty_cache_steps",
)
"""TrainingArguments that a workload may set. rayrec's configuration determines the others."""


@dataclass(frozen=True, kw_only=True)
class DataParallelModel(Workload, abc.ABC):
    """Settings, rows, network and measures of a `DataParallelWorkload`."""

    SHORT_EVALUATIONS: ClassVar[bool] = True
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = (
        "parallel",
        "accumulate",
        "data_tasks",
        *(f"parallel_options.{name}" for name in (*ParallelOptions.DDP, *ParallelOptions.MEMORY)),
    )
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Parallelism. ddp: each worker has the full model; fsdp: weights, gradients and optimizer
    state are sharded.
    """
    parallel_options: ParallelOptions = field(default_factory=ParallelOptions)
    """Arguments of DDP or FSDP."""
    accumulate: Count = 1
    """Number of gradient accumulation parts per batch. More parts use less memory. The step stays
    the same.
    """
    data_tasks: bool = False
    """Whether data tasks read and decode rows, on data nodes if the cluster has any. Otherwise a
    thread of each worker does.
    """
    optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    """Optimizer."""
    schedule: LearningRateSchedule = field(default_factory=LearningRateSchedule)
    """Learning rate schedule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel == "fsdp" and self.optimizer.needs_full_parameters:
            raise InputError(
                f"workload.optimizer.kind: {self.optimizer.kind} requires norms of full "
                "parameters, which workload.parallel fsdp shards. Use parallel ddp, or kind adamw."
            )
        self.parallel_options.check(self.parallel)
        if self.parallel_options.static_graph and self.accumulate > 1:
            raise InputError(
                "workload.parallel_options.static_graph: requires workload.accumulate 1, because "
                f"only the last part of a batch exchanges gradients, got {self.accumulate}. Set "
                "only one of the two."
            )

    def check(self, config: TrainConfig) -> None:
        if self.parallel_options.cpu_offload and not config.scaling.use_gpu:
            raise InputError(
                "workload.parallel_options.cpu_offload: requires scaling.use_gpu. Set it, or omit "
                "cpu_offload."
            )
        options = self.trainer_options()
        if options and config.loop != "huggingface":
            raise InputError(
                f"trainer_options: must be used with loop huggingface, got {config.loop}. Set it."
            )
        names = {*options} - {"arguments", "callbacks", "data_collator"} | {
            *options.get("arguments", {})
        } - {*TRAINER_ARGUMENTS}
        if names:
            raise InputError(
                f"trainer_options: {min(names)} is not supported. Use arguments "
                f"({', '.join(TRAINER_ARGUMENTS)}), callbacks and "
                "data_collator, and rayrec's settings for the rest."
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
        """Build the fp32 model on CPU with initial values from torch's global generator, which is
        seeded before.
        """

    @abc.abstractmethod
    def measure(
        self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Compute named measures of each row, [rows]. Training minimizes the mean `loss`.
        Evaluation reports the means of all. `model` may be wrapped, so only call it. With precision
        bf16, this runs under autocast.
        """

    # -- optional

    def data_hash(self, prepared: Any) -> str | None:
        """Return a hash of all rows to verify on resume. None compares only the row count."""
        return None

    def augment(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Randomly augment a training batch on its device with torch's global generator."""
        return tensors

    def trainer_options(self) -> Mapping[str, Any]:
        """Return options for `--loop huggingface`: a dict `arguments` with some of
        `TRAINER_ARGUMENTS`, a list `callbacks` with instances of transformers.TrainerCallback, and
        `data_collator`. It gets rows as a list of dicts, and returns the tensors for `measure` in
        training. Called on the driver and on each worker.
        """
        return {}

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Return the evaluation metrics, given the means of the measures."""
        return means

    def samples(
        self,
        model: torch.nn.Module,
        *,
        prepared: Any,
        sets: Mapping[str, RowSource],
        device: torch.device,
    ) -> list[dict[str, Any]]:
        """Create sample outputs of the final weights for a few evaluation rows. All workers must
        call `model` equally.
        """
        return []

    # -- scoring

    def open_labelled(self, config: TrainConfig, *, checkpoint: str, path: str) -> RowSource:
        """Open the rows of a path as input of `measure`, for evaluation."""
        raise InputError(f"{checkpoint}: recipe {config.recipe} cannot be evaluated on other data")

    def open_inputs(self, config: TrainConfig, *, checkpoint: str, path: str) -> RowSource:
        """Open the rows of a path as input of `predict`."""
        raise InputError(f"{checkpoint}: recipe {config.recipe} does not support predictions")

    def build_from(self, config: TrainConfig, *, checkpoint: str) -> torch.nn.Module:
        """Build the model for a checkpoint folder. Its values are replaced by the stored
        weights.
        """
        raise InputError(
            f"{checkpoint}: recipe {config.recipe} does not define build_from, so its model "
            "cannot be used"
        )

    def predict(
        self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, np.ndarray | list[str]]:
        """Return named prediction columns with one value per row."""
        raise InputError(f"{type(self).__name__} does not support predictions")
