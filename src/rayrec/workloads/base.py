"""What every kind of training shares: the configuration of a run, and what a workload supplies to the one loop."""

from __future__ import annotations

import abc
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol

from rayrec import storage
from rayrec.config import Config, InputError
from rayrec.data.engine import Shared, StreamEngine
from rayrec.observe.console import Console
from rayrec.observe.timing import Stopwatch
from rayrec.observe.tracking.config import TrackersConfig
from rayrec.optim.config import PlateauConfig
from rayrec.sharding.communication import Links, Traffic

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
class DataConfig(Config):
    """A log to read and how."""

    path: str | None = None
    """File, glob or folder, local or a URL (s3://...): text, plain or gzip, Parquet, or what `rayrec preprocess` made."""
    files: tuple[str, ...] = ()
    """Where path is a folder: names of its files to read, in this order, each plain, .gz or .parquet; empty: all."""
    shuffle: Literal["none", "files", "window", "full"] = "window"
    """none: order of the log; files: order of files by seed; window: segments by seed, and the rows of every block; full: as
    window, on data that `rayrec preprocess --shuffle full` has mixed as a whole, and refused on other data."""
    in_memory: bool = False
    """Preprocessed data of this machine is read into memory whole, instead of mapped."""
    cache_bytes: int | None = None
    """Blocks of tokens at a URL: disk that a node keeps shards of a set on, those longest unused going first; None: keeps all."""
    block_bytes: int = 32 << 20
    """Text one data task reads, parses and hands on; its rows are shuffled together."""
    segments_per_block: int = 16
    """Places of the log one block is drawn from; more mix better and read smaller ranges."""
    prefetch_blocks: int = 2
    """Blocks held ready for a worker beside the one it uses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.segments_per_block < 1 or self.prefetch_blocks < 0:
            raise InputError("data: segments_per_block must be at least 1 and prefetch_blocks at least 0")
        if self.cache_bytes is not None and self.cache_bytes < 1:
            raise InputError(f"data.cache_bytes: {self.cache_bytes} must be at least 1")
        if self.block_bytes < 1 << 16:
            raise InputError(
                f"data.block_bytes: {self.block_bytes} is below 65536; small blocks cost more than their work"
            )

    @property
    def segment_bytes(self) -> int:
        return max(self.block_bytes // self.segments_per_block, 1)


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(Config):
    """Training workers: how many, and what each reserves of the cluster."""

    num_workers: int | tuple[int, int] = 1
    """Training processes; one per GPU, or a few per machine on CPU. Two numbers, least and most: as many as the cluster has room
    for, which may change during the run."""
    batch_policy: Literal["global", "per_worker"] = "global"
    """What stays when the number of workers changes: global: the global batch, batch_size times the most workers, of which each
    takes its share; per_worker: each worker's batch_size."""
    learning_rate_policy: Literal["constant", "linear", "sqrt"] = "constant"
    """With per_worker: how learning rates follow the global batch, from those of the most workers: not at all, in proportion,
    or with its square root."""
    use_gpu: bool = False
    """Each worker gets one GPU."""
    cpus_per_worker: float | None = None
    """CPUs a worker reserves; None: one with a GPU, else half of its share of the cluster, the rest is for data tasks."""
    resize_interval_s: float = 30.0
    """With (least, most) workers: seconds an attempt trains at least before it ends to go on with more workers."""
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    """Further Ray resources a worker reserves, such as {"accelerator": 1}."""
    threads_per_worker: int | None = None
    """Threads of a worker's CPU operators; None: cpus_per_worker if it is given, else its share of the node's CPUs, within CPU
    affinity, container quota and what Ray was started with."""
    network_interface: str | None = None
    """Network interface through which workers talk to each other, such as eth0; None: what gloo and NCCL choose."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How Ray places workers on nodes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_workers <= self.max_workers:
            raise InputError(
                f"scaling.num_workers: {self.num_workers} must be at least 1, and the least not above the most"
            )
        if self.batch_policy == "global" and self.learning_rate_policy != "constant":
            raise InputError(
                f"scaling.learning_rate_policy: {self.learning_rate_policy}: with batch_policy global the batch never changes; "
                "choose constant, or batch_policy per_worker"
            )

    @property
    def min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]


@dataclass(frozen=True, kw_only=True)
class FailureConfig(Config):
    """What the run survives."""

    max_failures: int = 3
    """Restarts of the workers after failures in a row without a new checkpoint between; -1: without limit."""
    max_outage_s: float = 600.0
    """Seconds for which a save may fail (storage unavailable, disk full) before the run ends; until then saves are late, and
    training continues."""
    node_wait_s: float = 600.0
    """Seconds to wait where there is no room for the (least) workers: nodes were lost, or others hold what they need."""
    collective_timeout_s: float = 1800.0
    """Seconds that a worker waits for the others in a collective operation, beyond max_outage_s, before the attempt fails."""
    grace_s: float = 60.0
    """Seconds the workers have for a last checkpoint after SIGTERM or Ctrl-C; and again as many whenever it makes progress."""
    max_grace_s: float = 600.0
    """Seconds they have in all, where the last checkpoint makes progress but takes longer than grace_s."""
    standby_after_s: float | None = 60.0
    """Seconds of an attempt on Ray after which each worker has an idle process in standby, which has imported what a worker needs
    and takes some 0.4 GB. A restart then takes seconds less. None: never; nor if max_failures is 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_failures < -1 or min(self.max_outage_s, self.node_wait_s, self.grace_s, self.max_grace_s) < 0:
            raise InputError("failure: max_failures must be at least -1, and the times at least 0")
        if self.standby_after_s is not None and self.standby_after_s < 0:
            raise InputError(f"failure.standby_after_s: {self.standby_after_s} must be at least 0")
        if self.collective_timeout_s <= 0:
            raise InputError(f"failure.collective_timeout_s: {self.collective_timeout_s} must be above 0")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """When to save and what to keep."""

    every: int | None = None
    """Steps between checkpoints; None: with every evaluation and at the end."""
    num_to_keep: int = 2
    """Newest checkpoints kept."""
    keep_best: int = 1
    """Kept beside them: those with the best validation scores."""
    keep_every: int | None = None
    """Kept for good: checkpoints of steps that are multiples of this; None: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_to_keep, self.every or 1, self.keep_every or 1) < 1 or self.keep_best < 0:
            raise InputError("checkpoint: every, num_to_keep and keep_every must be at least 1, keep_best at least 0")


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig(Config):
    """When training has learnt all it can."""

    patience: int = 0
    """Evaluations without an improvement before training stops; 0: never stops early."""
    min_improvement: float = 0.0
    """An evaluation improves if its score is higher by more than this than that of the last evaluation that improved."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Config):
    """Which Ray cluster to run on, or none."""

    address: str | None = None
    """HOST:PORT or auto: a running Ray cluster; local: a local Ray for this run; none: no Ray, one worker in this process.
    None: the Ray that this process is connected to or that RAY_ADDRESS names, else this process for one worker, a local Ray for
    several."""
    num_cpus: int | None = None
    """CPUs of a local Ray, or that a run in this process uses at most; None: all of the machine."""
    object_store_bytes: int | None = None
    """Object-store memory of a local Ray, which the run then starts also for one worker; None: Ray's choice."""
    data_nodes: Literal["auto", "any", "separate"] = "auto"
    """Nodes that run data tasks. separate: those without what workers reserve (GPUs, named resources); any: all; auto: separate
    if those have 4 CPUs for each worker, or half of its share of all CPUs, else any."""


@dataclass(frozen=True, kw_only=True)
class ObserveConfig(Config):
    """What a run finds out about itself while it trains."""

    times: bool = True
    """Split every logged interval into phases, measure the device's peak at the start, and tell what data tasks do (which time
    themselves in any case: four looks at a clock for each segment of a block)."""


MOST_PROFILED_STEPS: Final = 200
"""In one recording, which a worker holds in memory: about a kilobyte for each of a step's thousands of operations."""


MOST_NAME_LETTERS: Final = 128
"""In the name of a run."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Config):
    """What torch.profiler records of a run, into RUN/profile; `rayrec profile RUN` asks a run in progress for more."""

    steps: str | None = None
    """Steps to record, such as 10:20: from the 10th step done to the 20th, on every worker, at most 200; None: none."""
    memory: bool = True
    """Record allocations, for the memory timeline."""
    stack: bool = False
    """Record the Python stack of every operation; costs far more time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.window() is None:
            raise InputError(f"profile.steps: {self.steps!r} is no FIRST:END with FIRST below END, such as 10:20")
        first, end = self.window() or (0, 0)
        if end - first > MOST_PROFILED_STEPS:
            raise InputError(
                f"profile.steps: {self.steps!r} are {end - first:,} steps; at most {MOST_PROFILED_STEPS} fit into memory"
            )

    def window(self) -> tuple[int, int] | None:
        """(first, end) of `steps`, from 0, the end excluded."""
        first, _, end = (self.steps or "").partition(":")
        if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
            return None
        return int(first), int(end)


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
    steps: int | None = None
    """Stop after so many steps; None: after `epochs`."""
    epochs: int = 1
    """Passes over the training rows."""
    batch_size: int = 2048
    """Rows a worker takes in a step; times the number of workers is the global batch."""
    min_steps_per_epoch: int = 1
    """Where the data is so small that an epoch would have fewer steps than this, batches are made smaller."""
    eval_batch_size: int = 8192
    """Rows a worker scores at once."""
    evaluate_every: int | None = None
    """Steps between evaluations; None: by `evaluations_per_epoch`."""
    evaluations_per_epoch: int = 4
    """Evaluations per epoch if `evaluate_every` is not set; the interval is rounded up to whole steps."""
    log_every: int = 20
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
    max_bad_fraction: float = 0.001
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
        for name in ("epochs", "batch_size", "min_steps_per_epoch", "eval_batch_size", "log_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} must be at least 1")
        for name in ("steps", "evaluate_every", "evaluations_per_epoch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: {value} must be at least 1")
        if self.name is not None:
            _check_name(self.name)
        if self.eval_data.shuffle != "none":
            raise InputError(
                f"eval_data.shuffle: {self.eval_data.shuffle!r}; evaluation reads in the log's order, 'none'"
            )
        if not 0 <= self.max_bad_fraction <= 1:
            raise InputError(f"max_bad_fraction: {self.max_bad_fraction} must lie between 0 and 1")
        if self.loop not in self.workload.LOOPS:
            raise InputError(
                f"loop: {self.loop}: recipe {self.recipe} is trained by the loop {' or '.join(self.workload.LOOPS)}"
            )
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


def learning_rate_factor(scaling: ScalingConfig, *, world_size: int) -> float:
    """What learning rates are multiplied by with `world_size` workers. Pure."""
    share = world_size / scaling.max_workers
    return {"constant": 1.0, "linear": share, "sqrt": share**0.5}[scaling.learning_rate_policy]


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


def _no_clock() -> StepClock:
    from rayrec.workloads.step_timer import NoClock  # which needs torch, and a configuration does not

    return NoClock()


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
    clock: StepClock = field(default_factory=_no_clock)
    """Told by pipeline, model and optimizer which phase a step is in; by default nobody tells it, and it measures nothing."""
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
    def make_loader(
        self, context: WorkerContext, prepared: Any, *, state: dict[str, Any] | None, step: int
    ) -> TrainLoader:
        """On each worker: the training data from a stored position on (None: the start), `step` steps being done."""

    @abc.abstractmethod
    def set_up(self, context: WorkerContext, prepared: Any) -> WorkerSetup:
        """On each worker, after its process group is up."""

    def plan(self, config: TrainConfig, *, target: Target | None = None, tables: Sequence[int] | None = None) -> str:
        """How the model is spread over the workers of `target` (None: of this machine), readable; nothing is started. `tables`:
        rows of each table, if they are known without the data. Raises InputError when it does not fit."""
        raise InputError(f"{type(self).__name__} is not sharded; every worker holds the whole model")

    def probe_speed(self, config: TrainConfig, *, target: Target, local_workers: int, cuda: bool) -> MeasuredSpeed:
        """Measures a slice of the real stages on this machine, training with `local_workers` of the target's workers.
        Raises InputError where that cannot be done."""
        raise InputError(
            f"plan: recipe {config.recipe} cannot be measured before it is trained; only click models can yet"
        )

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
