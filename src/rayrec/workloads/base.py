"""What every kind of training shares: the configuration of a run, and what a workload supplies to the one loop."""

from __future__ import annotations

import abc
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from rayrec import storage
from rayrec.bounds import Count, Fraction
from rayrec.config import Config, InputError
from rayrec.data.engine import Shared, StreamEngine
from rayrec.observe.console import Console
from rayrec.observe.timing import Stopwatch
from rayrec.observe.tracking.config import TrackersConfig
from rayrec.optim.config import PlateauConfig
from rayrec.sharding.communication import Links, Traffic
from rayrec.workloads.run_config import (
    MOST_NAME_LETTERS,
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
    from rayrec.checkpoint.row_map import RowMap
    from rayrec.row_tally import RowTally
    from rayrec.schema import Schema
    from rayrec.workloads.scoring import Scoring
    from rayrec.workloads.step_timer import StepClock


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """One training run, complete: what a recipe returns."""

    recipe: str
    """Name of the recipe the run started from."""
    workload: Workload
    """What is trained: model, optimizers and how the data becomes batches."""
    train_data: DataConfig = field(default_factory=DataConfig)
    """What to train on."""
    eval_data: DataConfig = field(default_factory=lambda: DataConfig(shuffle="none"))
    """What to evaluate on; without a path the recipe's own split, by time, of the training data."""
    steps: Count | None = None
    """Stop after so many steps; None: after `epochs`."""
    epochs: Count = 1
    """Passes over the training rows."""
    batch_size: Count = 2048
    """Rows a worker takes in a step; times the number of workers is the global batch."""
    min_steps_per_epoch: Count = 1
    """Where the data is so small that an epoch would have fewer steps than this, batches are made smaller."""
    eval_batch_size: Count = 8192
    """Rows a worker scores at once."""
    evaluate_every: Count | None = None
    """Steps between evaluations; None: by `evaluations_per_epoch`."""
    evaluations_per_epoch: Count = 4
    """Evaluations per epoch if `evaluate_every` is not set; the interval is rounded up to whole steps."""
    log_every: Count = 20
    """Steps between progress events."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the dense part; weights, optimizers and embeddings are always fp32."""
    tf32: bool = False
    """Let NVIDIA GPUs round the factors of fp32 matrix products and convolutions to 10 bits (TF32): faster, less exact."""
    loop: Literal["rayrec", "huggingface"] = "rayrec"
    """What drives the steps: rayrec's own loop or, for language models, HuggingFace's Trainer; all around them is the same."""
    seed: int = 0
    """Of initial weights and of the order of rows."""
    init_from: str | None = None
    """Run or checkpoint, local or a URL, whose weights and optimizer state a new run starts with; None: start values by
    `seed`."""
    max_bad_fraction: Fraction = 0.001
    """Share of faulty lines above which the run refuses a log."""
    storage_path: str = "runs"
    """Where runs are kept, local or a URL; must be reachable from every node."""
    name: str | None = None
    """Name of the run: up to 128 letters, digits, '.', '_' and '-'. None: the recipe's name and the time. A run of the same name
    is resumed."""
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    """Training workers."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and keeping."""
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    """When to stop before the last step."""
    plateau: PlateauConfig = field(default_factory=PlateauConfig)
    """When to lower the learning rates because evaluations get no better."""
    failure: FailureConfig = field(default_factory=FailureConfig)
    """What the run survives."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where to run."""
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    """What the run finds out about itself."""
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    """Where else the run can be looked at."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """What torch.profiler records of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None:
            _check_name(self.name)
        if self.eval_data.shuffle != "none":
            raise InputError(f"eval_data.shuffle: {self.eval_data.shuffle!r}; evaluation reads in the log's order, 'none'")
        if self.loop not in self.workload.LOOPS:
            raise InputError(f"loop: {self.loop}: recipe {self.recipe} is trained by the loop {' or '.join(self.workload.LOOPS)}")
        if self.early_stopping.patience and not self.checkpoint.keep_best:
            raise InputError("checkpoint.keep_best: early stopping ends with the best weights; keep at least 1")


def _check_name(name: str) -> None:
    """A name is one folder of the storage path."""
    if not re.fullmatch(r"\w[\w.-]*", name) or len(name) > MOST_NAME_LETTERS:
        raise InputError(
            f"name: {name!r} is no name of a run; give 1 to {MOST_NAME_LETTERS} letters, digits, '.', '_' and '-', the first a "
            "letter, a digit or '_'"
        )


def effective_batch_size(config: TrainConfig, *, rows: int, world_size: int) -> int:
    """Rows each of `world_size` workers takes in a step, given the rows of an epoch. Pure."""
    most = config.scaling.max_workers
    per_worker = max(1, min(config.batch_size, rows // (most * config.min_steps_per_epoch)))
    return per_worker if config.scaling.batch_policy == "per_worker" else -(-per_worker * most // world_size)


@dataclass(frozen=True)
class RunContext:
    """What the driver knows when a workload prepares its data."""

    config: TrainConfig
    folder: str
    """The run's folder."""
    engine: StreamEngine
    """Runs data tasks of the driver, while no worker runs."""
    note: Callable[[str], None]
    """Tells the user one line."""
    progress: Callable[[str, int, int | None], None]
    """Shows a named amount done of an amount in all."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    """Times the stages of `prepare` that have names; the rest of it is the stage `prepare`."""


@dataclass(frozen=True)
class WorkerContext:
    """What one worker knows when a workload sets it up."""

    config: TrainConfig
    rank: int
    world_size: int
    device: torch.device
    engine: StreamEngine
    """Runs the data tasks of this worker's own pipeline."""
    node: str = ""
    """Name of the machine; workers with the same name share its memory. Tests set it to place workers on unequal machines."""
    cpus: int = 1
    """Of the machine that this worker may use; its operators' threads, unless the configuration says otherwise."""
    object_store_bytes: int = 0
    """Memory of its node that Ray's object store may still take."""


@dataclass(frozen=True)
class WarmStart:
    """What workers need to start a new run with the weights and optimizer state of another one; picklable."""

    checkpoint: str
    """Folder of the other run's checkpoint."""
    tables: Shared[Mapping[str, RowMap]]
    """Of embedding tables, by name of their weights: which row each of the new run's rows starts with."""
    report: dict[str, Any]
    """Plain JSON values for the event `warm_start`."""


@dataclass(frozen=True)
class ScoringContext:
    """What a workload is told when rows are to be scored with a checkpoint."""

    config: TrainConfig
    """The checkpoint's config.yaml, with the caller's changes."""
    checkpoint: str
    """The checkpoint's folder, its weights verified, reachable from every node."""
    path: str
    """Of the rows; as the user gave it."""
    evaluating: bool
    """Whether the rows are to be compared with their labels, else they are predicted."""
    batch_rows: int | None
    """Rows the model takes at once; None: the workload's choice."""
    engine: Callable[[], StreamEngine]
    """What runs data tasks, Ray being reached first if it is Ray."""
    console: Console
    slice_by: tuple[str, ...] = ()
    """What metrics are to be told by, beside all rows: day, COLUMN, frequency:COLUMN; only a click model's are."""
    ranking_k: tuple[int, ...] = ()
    """Ranks k of the metrics at k of a click model with groups; none: 10."""


class TrainLoader(Protocol):
    """The training batches of one worker, from a position on to the end of the last epoch. A batch has an attribute
    `row_numbers` (`rayrec.row_tally.RowNumbers`); of batches without one nobody can tell whether rows were lost."""

    @property
    def steps(self) -> int:
        """Batches from the start position to the end; the same on every worker."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    def start(self) -> None:
        """Lets data tasks begin; what they make waits for the first `next`."""
        ...

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def rows(self, batches: int) -> int:
        """Rows of all workers in the first `batches` batches."""
        ...

    def rows_behind(self) -> RowTally:
        """The rows that a run has to have trained at the present position, by any number of workers: what the data holds, not
        what this loader gave. What was trained is compared with it."""
        ...

    def state(self) -> dict[str, Any]:
        """The position behind the batches handed out so far: plain JSON values, the same on every worker."""
        ...

    def close(self) -> None: ...


class Metrics(Protocol):
    """Gathers outputs of an evaluation, as the workload's pipeline gives them; `compute` is collective."""

    def update(self, output: Any) -> None: ...

    def compute(self) -> dict[str, float]: ...


@dataclass
class WorkerSetup:
    """All the loop needs of a workload on one worker."""

    model: torch.nn.Module
    """Its state dict has names that no plan and no wrapper shows in."""
    optimizer: Any
    """A KeyedOptimizer or NamedOptimizer over all parameters that do not update themselves."""
    pipeline: TrainPipeline
    """Over the model: trains it, or, while it is in eval mode, scores with it. What `progress` gives has a scalar `loss`."""
    begin_step: Callable[[int, int], None]
    """Called before each step (from 0) of a run of so many: sets its learning rates and, where chance has a part in it, the
    seed of that."""
    eval_batches: dict[str, Callable[[], Iterator[Any]]]
    """Named evaluation sets; each call gives this worker's share of every row once, the same number on every worker."""
    make_metrics: Callable[[], Metrics]
    described: dict[str, Any]
    """What a reader of the run may want to know: tables, sharding, sizes."""
    clock: StepClock
    """Told by pipeline, model and optimizer which phase a step is in."""
    multiply_adds_per_row: float | None = None
    """Of one row's forward pass, in matrix products and convolutions; None: not known. Training costs three times as many."""
    peak_multiply_adds_per_s: float | None = None
    """That the devices of all workers reach together in a matrix product; None: not measured."""
    make_samples: Callable[[], list[dict[str, Any]]] = list
    """What the final weights make of a few rows, for people to look at: plain JSON values; collective."""


@dataclass(frozen=True, kw_only=True)
class Workload(Config, abc.ABC):
    """A kind of training. Configuration and recipe of everything specific to it."""

    LOOPS: ClassVar[tuple[str, ...]] = ("rayrec",)
    """Loops that can train it: `TrainConfig.loop`."""
    WORKER_MODULES: ClassVar[tuple[str, ...]] = ()
    """Modules that its workers need and its `prepare` does not: a run in one process imports them while data is prepared."""
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = ()
    """Own fields, or groups of them (dotted), that may be others when a run resumes, since they change no step to come."""

    @property
    def table_schema(self) -> Schema | None:
        """The columns of the tables that it trains on; None: it trains on other data."""
        return None

    @abc.abstractmethod
    def score(self, metrics: dict[str, float]) -> float:
        """A finite number that says how good the weights are that gave these metrics; higher is better."""

    def adapted(self, config: TrainConfig) -> TrainConfig:
        """On the driver, before anything is started: the configuration with what its data brings in place of the recipe's own,
        such as the columns of adopted data. Reads little."""
        return config

    def check(self, config: TrainConfig) -> None:
        """On the driver, before anything is started: raises InputError for what can be seen to be missing."""

    def check_data(self, config: TrainConfig) -> None:
        """On the driver, before Ray starts: raises InputError for data that certainly cannot be trained on. Reads little."""
        for data in (config.train_data, config.eval_data):
            if data.path is not None and storage.is_url(data.path):
                storage.resolve(data.path)
            elif data.path is not None and not os.path.exists(data.path) and not re.search(r"[*?\[,]", data.path):
                raise InputError(f"{data.path}: no such file or folder")

    def list_data(self, path: str, names: Sequence[str]) -> list[storage.File]:
        """List the files of a data path, or those that are named of a folder. Their names, sizes and times identify the data of a
        finished run. Reads no data. Raises InputError for a path without files."""
        return storage.list_files(path, names=names)

    @abc.abstractmethod
    def prepare(self, context: RunContext) -> Any:
        """On the driver, before workers start: whatever they share, picklable. Raises InputError for unusable input."""

    def discard(self, folder: str) -> None:
        """On the driver: removes what `prepare` has stored in a run's folder. Called before a run of which nothing is saved yet
        starts again with other settings."""

    def warm_start(self, context: RunContext, prepared: Any, checkpoint: Checkpoint) -> WarmStart:
        """On the driver, after `prepare`: how a new run starts with a checkpoint of another one. Raises InputError for a
        checkpoint that does not fit. Reads no weights."""
        raise InputError(f"init_from: recipe {context.config.recipe} cannot start with the weights of another run")

    @abc.abstractmethod
    def make_loader(self, context: WorkerContext, prepared: Any, *, state: dict[str, Any] | None, step: int) -> TrainLoader:
        """On each worker: the training data from a stored position on (None: the start), `step` steps being done."""

    @abc.abstractmethod
    def set_up(self, context: WorkerContext, prepared: Any) -> WorkerSetup:
        """On each worker, after its process group is up."""

    def plan(self, config: TrainConfig, *, target: Target | None = None, tables: Sequence[int] | None = None) -> str:
        """How the model is spread over the workers of `target` (None: of this machine), readable; nothing is started. `tables`:
        rows of each table, if they are known without the data. Raises InputError when it does not fit."""
        raise InputError(f"{type(self).__name__} is not sharded; every worker holds the whole model")

    def probe_speed(
        self, config: TrainConfig, *, target: Target, local_workers: int, cuda: bool, train: TrainHere
    ) -> MeasuredSpeed:
        """Measures a slice of the real stages on this machine, training with `local_workers` of the target's workers by `train`.
        Raises InputError where that cannot be done."""
        raise InputError(f"plan: recipe {config.recipe} cannot be measured before it is trained; only click models can yet")

    def checkpoint_files(self, prepared: Any) -> dict[str, bytes | str]:
        """On rank 0: what must travel with the weights, by name in a checkpoint's folder: the content, or the path of a file
        that stays as it is during the run."""
        return {}

    def open_scoring(self, context: ScoringContext) -> Scoring:
        """The rows of a path, ready to be scored with a checkpoint. Raises InputError for an unusable path, labels that are
        missing where they are needed, and a checkpoint of another model."""
        raise InputError(f"{context.checkpoint}: recipe {context.config.recipe} has nothing to score rows with")

    def export(self, config: TrainConfig, *, checkpoint: str, out: str) -> dict[str, Any]:
        """Writes the model of a checkpoint's folder into the empty folder `out` as other tools read it -> what to
        report of it, plain JSON values. Raises InputError where that cannot be done."""
        raise InputError(
            f"{checkpoint}: recipe {config.recipe} has a model that cannot be exported yet; `rayrec predict` scores with it"
        )

    def summarize(self, prepared: Any, metrics: dict[str, float]) -> dict[str, Any]:
        """What of the preparation, and of it in the light of the final metrics, belongs into the run's summary."""
        return {}


@dataclass(frozen=True)
class Target:
    """The cluster that a forecast is made for, as far as the measurement needs it."""

    num_workers: int
    workers_per_node: int
    memory_bytes: int | None = None
    """That one worker may fill with tables, of its device where it has one; None: as on a node like this machine."""
    gpu_rows_per_s: float | None = None
    """That one GPU trains, known from elsewhere; None: it is measured."""
    host_memory_bytes: int | None = None
    """With GPUs: host memory that one worker may fill, with a checkpoint's copy; None: not known."""
    links: Links = field(default_factory=Links)
    """Between its workers."""


@dataclass(frozen=True)
class MeasuredSpeed:
    """Measured on this machine, without Ray."""

    num_workers: int
    """That trained side by side."""
    threads_per_worker: int
    device: str
    """What they trained on: cpu or cuda."""
    rows_per_s: float
    """Of all of them together, on batches that were ready."""
    cpu_s_per_row: float
    """Of their processes."""
    stage_wall_s: Mapping[str, float]
    """Seconds one task takes for a row, by stage."""
    stage_cpu_s: Mapping[str, float]
    """Of it, computing."""
    rows: int
    """Of the log, about."""
    worker_bytes: tuple[int, ...]
    """Tables with their optimizer state that each worker of the run would hold."""
    sampled_vocabulary: bool
    """The tables' sizes are those of the slice, because there is no Preprocessor: real ones are larger."""
    plan: str
    """Which worker holds which table, readable."""
    traffic: Traffic | None = None
    """What workers of the run would send each other; None: not known."""
    given: bool = False
    """Whether `rows_per_s` was told and not measured."""
    notes: tuple[str, ...] = ()
    """What was otherwise here than it will be there, a sentence each."""


class TrainingRows(Protocol):
    """A slice of a log, picklable, that processes can be set up with to train on it."""

    def set_up(self, context: WorkerContext) -> tuple[WorkerSetup, Sequence[Any]]:
        """Set up one worker; return its batches too. Collective."""
        ...


class TrainHere(Protocol):
    """Trains for some steps on this machine, with a process for each worker."""

    def __call__(
        self, config: TrainConfig, rows: TrainingRows, *, workers: int, threads: int, cuda: bool
    ) -> list[tuple[float, float, float]]:
        """Return (rows, seconds, CPU-seconds) of each worker."""
        ...
