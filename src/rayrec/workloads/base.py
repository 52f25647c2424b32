"""Shared interface of all workloads: run configuration, and the parts a workload supplies to the
training loop.
"""

from __future__ import annotations

import abc
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, Self

from rayrec import storage
from rayrec.bounds import Count, Fraction, Rate
from rayrec.config import Config, InputError
from rayrec.data.engine import Shared, StreamEngine
from rayrec.observe.console import Console
from rayrec.observe.timing import Stopwatch
from rayrec.observe.tracking.config import TrackersConfig
from rayrec.optim.config import PlateauConfig
from rayrec.sharding.communication import CommunicationVolume, LinkBandwidth
from rayrec.workloads.run_config import (
    MAX_NAME_LETTERS,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    EarlyStoppingConfig,
    FailureConfig,
    ObserveConfig,
    ProfileConfig,
    ScalingConfig,
)

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.train_pipeline import TrainPipeline

    from rayrec.checkpoint import Checkpoint
    from rayrec.checkpoint.state import RowMap
    from rayrec.schema import Schema
    from rayrec.trained_rows import TrainedRows
    from rayrec.workloads.scoring import Scoring
    from rayrec.workloads.step_timer import StepTimer


_BATCH_SIZE: Final = 2048


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Complete configuration of a training run, returned by a recipe."""

    recipe: str
    """Name of the recipe that created this configuration."""
    workload: Workload
    """Model, optimizers and batch construction."""
    train_data: DataConfig = field(default_factory=DataConfig)
    """Training data."""
    eval_data: DataConfig = field(default_factory=lambda: DataConfig(shuffle="none"))
    """Evaluation data. Without a path, the recipe splits the training data by time."""
    steps: Count | None = None
    """Number of training steps. None trains for `epochs`."""
    epochs: Count = 1
    """Number of epochs over the training rows."""
    batch_size: Count | None = None
    """Rows per worker and step, by default 2048. The global batch is this times the number of
    workers. None with `global_batch_size`.
    """
    global_batch_size: Count | None = None
    """Rows per step over all workers, instead of `batch_size`. Each worker takes an equal share,
    and the number of workers does not change it. None uses `batch_size`.
    """
    min_steps_per_epoch: Count = 1
    """Minimum number of steps per epoch. Batches are made smaller on small data to reach it."""
    eval_batch_size: Count = 8192
    """Rows per worker and evaluation batch."""
    eval_rows: Count | None = None
    """Maximum rows of an evaluation during training, evenly spread over the validation rows and
    always the same. The last evaluation, of the selected weights, and the final test use all rows.
    None always uses all.
    """
    evaluate_every: Count | None = None
    """How often to evaluate, in steps. None uses `evaluations_per_epoch`."""
    evaluations_per_epoch: Rate = 4
    """Evaluations per epoch if `evaluate_every` is not set. 0.5 evaluates after every second epoch.
    The interval is rounded up to whole steps.
    """
    log_every: Count = 20
    """How often to log progress, in steps."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Compute precision of the dense part. Weights, optimizers and embeddings are always fp32."""
    tf32: bool = False
    """Whether to use TF32 on NVIDIA GPUs for fp32 matrix products and convolutions: faster but less
    exact (10-bit mantissa).
    """
    loop: Literal["rayrec", "huggingface"] = "rayrec"
    """Training loop: rayrec's own or, for language models, HuggingFace's Trainer. Everything else
    is the same.
    """
    seed: int = 0
    """Random seed for initial weights and row order."""
    init_from: str | None = None
    """Run or checkpoint, local or a URL, that supplies weights and optimizer state of a new run.
    None initializes by `seed`.
    """
    max_bad_fraction: Fraction = 0.001
    """Maximum fraction of invalid lines in a log. The run fails above it."""
    storage_path: str = "runs"
    """Storage folder for runs, local or a URL. Every node must reach it."""
    name: str | None = None
    """Run name: up to 128 letters, digits, '.', '_' and '-'. An existing name resumes its run.
    None: recipe name and time.
    """
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    """Number and resources of training workers."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoint interval and retention."""
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    """Criteria for stopping before the last step."""
    plateau: PlateauConfig = field(default_factory=PlateauConfig)
    """Learning rate reduction when evaluations stop improving."""
    failure: FailureConfig = field(default_factory=FailureConfig)
    """Fault tolerance."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Ray cluster of the run."""
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    """Performance measurements during the run."""
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    """Experiment trackers."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Steps to record with torch.profiler."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # It becomes a single folder in the storage path.
        if self.name is not None and not (
            re.fullmatch(r"\w[\w.-]*", self.name) and len(self.name) <= MAX_NAME_LETTERS
        ):
            raise InputError(
                f"name: must have 1 to {MAX_NAME_LETTERS} letters, digits, '.', '_' and '-', and "
                f"start with a letter, a digit or '_', got {self.name!r}"
            )
        if self.eval_data.shuffle != "none":
            raise InputError(
                "eval_data.shuffle: must be 'none', as evaluation reads in order, got "
                f"{self.eval_data.shuffle!r}"
            )
        self._check_batch_sizes()
        if self.loop not in self.workload.LOOPS:
            raise InputError(
                f"loop: must be {' or '.join(self.workload.LOOPS)} for recipe {self.recipe}, got "
                f"{self.loop}"
            )
        if self.eval_rows is not None and not self.workload.SHORT_EVALUATIONS:
            raise InputError(
                f"eval_rows: recipe {self.recipe} can only evaluate all rows, got "
                f"{self.eval_rows}. Leave it out."
            )
        if self.early_stopping.patience and not self.checkpoint.keep_best:
            raise InputError(
                "checkpoint.keep_best: must be at least 1, because early stopping uses the best "
                "weights, got 0"
            )

    def _check_batch_sizes(self) -> None:
        """Set the default batch size, and check batch sizes against each other and the workers."""
        if self.batch_size is None and self.global_batch_size is None:
            object.__setattr__(self, "batch_size", _BATCH_SIZE)
        rows = self.global_batch_size
        workers = self.scaling.max_workers
        if rows is not None and self.batch_size is not None:
            raise InputError(
                f"batch_size and global_batch_size: set only one, got {self.batch_size} and {rows}"
            )
        if rows is not None and rows % workers:
            multiple = -(-rows // workers) * workers
            raise InputError(
                f"global_batch_size: must be a multiple of the {workers} workers, got {rows}. Use "
                f"{multiple}."
            )
        if rows is not None and self.scaling.batch_policy == "per_worker":
            raise InputError(
                "scaling.batch_policy: must be global with global_batch_size, got per_worker. Set "
                "one of the two."
            )

    def updated(self, changes: Mapping[str, Any], *, where: str = "") -> Self:
        for name, other in (
            ("batch_size", "global_batch_size"),
            ("global_batch_size", "batch_size"),
        ):
            if changes.get(name) is not None and other not in changes:
                changes = {**changes, other: None}
        return super().updated(changes, where=where)

    @property
    def worker_batch_size(self) -> int:
        """Rows per worker and step with the maximum number of workers."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.global_batch_size is not None
        return self.global_batch_size // self.scaling.max_workers

    @property
    def evaluated_data(self) -> DataConfig:
        """Data with the held-out rows: those for evaluation, else a part of the training data."""
        return self.train_data if self.eval_data.path is None else self.eval_data

    def effective_batch_size(self, *, rows: int, world_size: int) -> int:
        """Return the rows per worker and step for a given epoch size."""
        max_workers = self.scaling.max_workers
        per_worker = max(
            1,
            min(self.worker_batch_size, rows // (max_workers * self.min_steps_per_epoch)),
        )
        return (
            per_worker
            if self.scaling.batch_policy == "per_worker"
            else -(-per_worker * max_workers // world_size)
        )


@dataclass(frozen=True)
class RunContext:
    """Driver context for `Workload.prepare`."""

    config: TrainConfig
    folder: str
    """Storage folder of the run."""
    engine: StreamEngine
    """Engine for data tasks on the driver, while no workers run."""
    note: Callable[[str], None]
    """Log one line."""
    progress: Callable[[str, int, int | None], None]
    """Report progress: name, amount done, total amount if known."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    """Stopwatch for named stages of `prepare`. The remaining time counts as the stage `prepare`."""
    warn: Callable[[str], None] = lambda text: None
    """Log one line, even with -q."""


@dataclass(frozen=True)
class WorkerContext:
    """Worker context for `Workload.set_up`."""

    config: TrainConfig
    rank: int
    world_size: int
    device: torch.device
    engine: StreamEngine
    """Engine for data tasks of this worker's pipeline."""
    node: str = ""
    """Host name. Workers with the same name share memory. Tests use it to simulate unequal
    hosts.
    """
    cpus: int = 1
    """CPUs of the host that this worker may use, the default number of operator threads."""
    object_store_bytes: int = 0
    """Remaining memory for Ray's object store on its node, in bytes."""


@dataclass(frozen=True)
class WarmStart:
    """Worker input for starting a new run from the weights and optimizer state of another run.
    Picklable.
    """

    checkpoint: str
    """Checkpoint folder of the other run."""
    tables: Shared[Mapping[str, RowMap]]
    """Source row of each row of the new run's embedding tables, by weight name."""
    report: dict[str, Any]
    """JSON values for the event `warm_start`."""


@dataclass(frozen=True)
class ScoringContext:
    """Input of `Workload.open_scoring`: rows to score with a checkpoint."""

    config: TrainConfig
    """The checkpoint's config.yaml with the caller's overrides."""
    checkpoint: str
    """Checkpoint folder with verified weights, reachable from every node."""
    path: str
    """Path to the rows, as passed by the user."""
    evaluating: bool
    """Whether to evaluate the rows against their labels. Otherwise they are predicted."""
    batch_rows: int | None
    """Batch size. None lets the workload choose."""
    engine: Callable[[], StreamEngine]
    """Factory of the engine for data tasks. Connects to Ray if needed."""
    console: Console
    slice_by: tuple[str, ...] = ()
    """Slices to report metrics for: day, COLUMN, frequency:COLUMN, length:COLUMN. Click and
    retrieval models only.
    """
    ks: tuple[int, ...] = ()
    """Ranks k of metrics@k for click models with groups, by default 10, and for retrieval models,
    by default their own k.
    """
    extra_columns: tuple[str, ...] = ()
    """Columns of the raw rows to return unchanged, next to the predictions. Click models only."""
    k: int | None = None
    """Number of items that a retrieval model predicts. None: that of the model."""
    exclude_seen: bool = True
    """Whether a retrieval model predicts no items that a row has already."""
    counts_clipped: bool = False
    """Whether tables tell which numbers are beyond their bounds (`Scoring.bounded`)."""
    evaluation_rows: bool = False
    """Whether `path` is that of `Workload.evaluation_data`, of which only the run's held-out rows
    are scored.
    """


class TrainLoader(Protocol):
    """Training batches of one worker, from a position to the end of the last epoch. Batches have an
    attribute `row_numbers` (`rayrec.trained_rows.RowNumbers`). Without it, lost rows cannot be
    detected.
    """

    @property
    def steps(self) -> int:
        """Number of batches from the start position to the end, equal on all workers."""

    @property
    def steps_per_epoch(self) -> int: ...

    def start(self) -> None:
        """Start data tasks. Their output waits for the first `next`."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def rows(self, batches: int) -> int:
        """Return the rows of all workers in the first `batches` batches."""

    def trained_rows(self) -> TrainedRows:
        """Return the rows that the run must have trained at the current position, with any number
        of workers, computed from the data. They are compared with the trained rows.
        """

    def state(self) -> dict[str, Any]:
        """Return the position after the batches returned so far, as JSON values, equal on all
        workers.
        """

    def close(self) -> None: ...


class Metrics(Protocol):
    """Metrics over the outputs of an evaluation pipeline. `compute` is collective."""

    def update(self, output: Any) -> None: ...

    def compute(self) -> dict[str, float]: ...


@dataclass
class WorkerSetup:
    """Parts of a workload that the training loop uses on one worker."""

    model: torch.nn.Module
    """Model with state dict names independent of sharding plan and wrappers."""
    optimizer: Any
    """KeyedOptimizer or NamedOptimizer of all parameters without a fused update."""
    pipeline: TrainPipeline
    """Pipeline that trains the model, or scores with it in eval mode. `progress` returns an output
    with a scalar `loss`.
    """
    begin_step: Callable[[int, int], None]
    """Callback before each step, with the step (from 0) and the total steps. Sets learning rates
    and random seeds.
    """
    eval_batches: dict[str, Callable[..., Iterator[Any]]]
    """Evaluation sets by name. Each call returns this worker's batches: every row once over all
    workers, equally many batches on each. With `Workload.SHORT_EVALUATIONS`, the argument is the
    maximum number of rows (`rayrec.ingest.block_order.spread`).
    """
    make_metrics: Callable[[], Metrics]
    described: dict[str, Any]
    """Description of the model for reports: tables, sharding, sizes."""
    clock: StepTimer
    """Timer of step phases, driven by the pipeline, model and optimizer."""
    multiply_adds_per_row: float | None = None
    """Multiply-adds in one row's forward pass (products, convolutions), or None if unknown.
    Training takes three times that.
    """
    peak_multiply_adds_per_s: float | None = None
    """Peak multiply-adds per second of all devices together in a matrix product, or None if not
    measured.
    """
    count_correct: Callable[[Any], torch.Tensor] | None = None
    """Count the rows of a training step's output whose label the threshold 0.5 predicts, on its
    device. None without clicks.
    """
    make_samples: Callable[[], list[dict[str, Any]]] = list
    """Create sample outputs of the final weights for reports, as JSON values. A `warning` among
    them is shown to the user. Collective.
    """


# Life of a workload. Methods run on the driver (D), on each worker (W), or where scores are made
# (S):
#
#   D   adapted, check         settings, before anything expensive
#   D   prepare                index, vocabularies; its result is shared with all workers
#   W   set_up, make_loader    model and batches, collective
#   W   score, metrics         evaluations
#   D   summarize              summary.json
#   S   open_scoring           predict, evaluate
#   D   export                 files for other programs
@dataclass(frozen=True, kw_only=True)
class Workload(Config, abc.ABC):
    """Base class for workloads: configuration and implementation of one kind of training."""

    LOOPS: ClassVar[tuple[str, ...]] = ("rayrec",)
    """Supported values of `TrainConfig.loop`."""
    WORKER_MODULES: ClassVar[tuple[str, ...]] = ()
    """Modules needed by workers but not by `prepare`. In-process runs import them while data is
    prepared.
    """
    SHORT_EVALUATIONS: ClassVar[bool] = False
    """Whether `WorkerSetup.eval_batches` take a maximum number of rows."""
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = ()
    """Fields or dotted groups of fields that may change when a run resumes, because they do not
    affect later steps.
    """

    @property
    def table_schema(self) -> Schema | None:
        """Columns of tabular training data, or None for other data."""
        return None

    def evaluation_data(self, config: TrainConfig) -> DataConfig:
        """Return the data with the run's held-out rows, of which `open_scoring` takes no others.
        Its path may be None.
        """
        return config.eval_data

    @abc.abstractmethod
    def score(self, metrics: dict[str, float]) -> float:
        """Return a finite validation score for the metrics. Higher is better."""

    def objective(self, metrics: Mapping[str, float]) -> str:
        """Return the name of the metric behind `score`, after a minus sign if lower is better.
        Default: "", the score itself.
        """
        return ""

    def objective_value(self, metrics: dict[str, float]) -> tuple[str, float, int]:
        """Return the metric behind `score`: its name, its value, and 1 if higher is better, else
        -1.
        """
        name = self.objective(metrics)
        value = metrics[name.removeprefix("-")] if name else self.score(metrics)
        return name.removeprefix("-") or "score", value, -1 if name.startswith("-") else 1

    def target_value(self, metrics: dict[str, float]) -> tuple[str, float, int]:
        """Return the metric of `early_stopping.target`, as `objective_value` does. Default: the
        same.
        """
        return self.objective_value(metrics)

    def adapted(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration adapted to its data, such as adopted columns. Runs on the driver
        first. Reads little.
        """
        return config

    def check(self, config: TrainConfig) -> None:
        """Check for missing requirements on the driver before anything starts. Raises
        InputError.
        """

    def check_data(self, config: TrainConfig) -> None:
        """Check on the driver, before Ray starts, that the data can be used. Reads little. Raises
        InputError.
        """
        for data in (config.train_data, config.eval_data):
            if data.path is not None and storage.is_url(data.path):
                storage.resolve(data.path)
            elif (
                data.path is not None
                and not os.path.exists(data.path)
                and not re.search(r"[*?\[,]", data.path)
            ):
                raise InputError(f"{data.path}: no such file or folder")

    def list_data(self, path: str, names: Sequence[str]) -> list[storage.File]:
        """List the files of a data path, or the named files in a folder. Reads no data. Names,
        sizes and times identify the data of a finished run. Raises InputError for a path without
        files.
        """
        return storage.list_files(path, names=names)

    @abc.abstractmethod
    def prepare(self, context: RunContext) -> Any:
        """Prepare the shared input of all workers on the driver, picklable. Raises InputError for
        unusable input.
        """

    def discard(self, folder: str) -> None:
        """Remove files that `prepare` stored in a run folder, when a run without checkpoints
        restarts with changed settings.
        """

    def warm_start(self, context: RunContext, prepared: Any, checkpoint: Checkpoint) -> WarmStart:
        """Prepare starting a new run from a checkpoint of another run. Runs on the driver after
        `prepare` and reads no weights. Raises InputError for an incompatible checkpoint.
        """
        raise InputError(
            f"init_from: recipe {context.config.recipe} cannot start from another run. Leave it "
            "out."
        )

    @abc.abstractmethod
    def make_loader(
        self,
        context: WorkerContext,
        prepared: Any,
        *,
        state: dict[str, Any] | None,
        step: int,
    ) -> TrainLoader:
        """Return the training data of a worker from a stored position (None: the start), after
        `step` completed steps.
        """

    @abc.abstractmethod
    def set_up(self, context: WorkerContext, prepared: Any) -> WorkerSetup:
        """Set up training on a worker, after its process group is initialized."""

    def plan(
        self,
        config: TrainConfig,
        *,
        target: Target | None = None,
        tables: Sequence[int] | None = None,
    ) -> str:
        """Describe the sharding over the workers of `target` (None: this machine) without starting
        anything. `tables` has the row counts of the tables if known without data. Raises InputError
        if the model does not fit.
        """
        raise InputError(
            f"plan: {type(self).__name__} is not sharded. Each worker has the full model."
        )

    def probe_speed(
        self,
        config: TrainConfig,
        *,
        target: Target,
        local_workers: int,
        cuda: bool,
        train: LocalTrainer,
    ) -> MeasuredSpeed:
        """Measure a slice of the stages here, training with `local_workers` of the target's by
        `train`. May raise InputError.
        """
        raise InputError(
            f"plan: recipe {config.recipe} cannot be measured before training. Only click models "
            "can."
        )

    def checkpoint_files(self, prepared: Any) -> dict[str, bytes | str]:
        """Return extra files of a checkpoint on rank 0, by name: the content, or the path of a file
        constant during the run.
        """
        return {}

    def open_scoring(self, context: ScoringContext) -> Scoring:
        """Open the rows of a path for scoring with a checkpoint. Raises InputError for an unusable
        path, missing labels if they are needed, and a checkpoint of another model.
        """
        raise InputError(f"{context.checkpoint}: recipe {context.config.recipe} cannot score rows")

    def export(self, config: TrainConfig, *, checkpoint: str, out: str) -> dict[str, Any]:
        """Export the model of a checkpoint into the empty folder `out` in a format for other tools.
        Return a report as JSON values. Raises InputError if the model cannot be exported.
        """
        raise InputError(
            f"{checkpoint}: recipe {config.recipe} cannot be exported. Use `rayrec predict` to "
            "score with it."
        )

    def summarize(self, prepared: Any, metrics: dict[str, float]) -> dict[str, Any]:
        """Return entries of the run summary, from the prepared data and the final metrics."""
        return {}


@dataclass(frozen=True)
class Target:
    """Target cluster of a performance forecast."""

    num_workers: int
    workers_per_node: int
    memory_bytes: int | None = None
    """Memory for tables per worker, on its device if it has one. None assumes a node like this
    machine.
    """
    gpu_rows_per_s: float | None = None
    """Training throughput of one GPU. None measures it."""
    host_memory_bytes: int | None = None
    """Host memory per GPU worker, including a checkpoint copy. None if unknown."""
    links: LinkBandwidth = field(default_factory=LinkBandwidth)
    """LinkBandwidth between workers."""


@dataclass(frozen=True)
class MeasuredSpeed:
    """Speed measured on this machine, without Ray."""

    num_workers: int
    """Number of concurrent workers in the measurement."""
    threads_per_worker: int
    device: str
    """Training device: cpu or cuda."""
    rows_per_s: float
    """Total throughput of these workers on batches that were ready."""
    cpu_s_per_row: float
    """CPU time of the worker processes per row."""
    stage_wall_s: Mapping[str, float]
    """Wall time of a task per row, by stage."""
    stage_cpu_s: Mapping[str, float]
    """CPU time of a task per row, by stage."""
    rows: int
    """Approximate row count of the log."""
    worker_bytes: tuple[int, ...]
    """Memory of tables and their optimizer state on each worker of the run."""
    sampled_vocabulary: bool
    """Flag for table sizes taken from the slice without a Preprocessor. The real tables are
    larger.
    """
    plan: str
    """Readable assignment of tables to workers."""
    traffic: CommunicationVolume | None = None
    """Communication between workers of the run, or None if unknown."""
    is_assumed: bool = False
    """Flag for a `rows_per_s` that was passed instead of measured."""
    notes: tuple[str, ...] = ()
    """Differences between this measurement and the run, one sentence each."""


class TrainingRows(Protocol):
    """Picklable slice of a log for training processes."""

    def set_up(self, context: WorkerContext) -> tuple[WorkerSetup, Sequence[Any]]:
        """Set up one worker and return it with its batches. Collective."""


class LocalTrainer(Protocol):
    """Function that trains a few steps on this machine, with one process per worker."""

    def __call__(
        self,
        config: TrainConfig,
        rows: TrainingRows,
        *,
        workers: int,
        threads: int,
        cuda: bool,
    ) -> list[tuple[float, float, float]]:
        """Return (rows, seconds, CPU seconds) of each worker."""
