"""Settings of a run that every kind of training has, one class for each group."""

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from annotated_types import Ge

from rayrec.bounds import Amount, Count, Limit, Natural, Positive
from rayrec.config import Config, InputError


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
    cache_bytes: Count | None = None
    """Blocks of tokens at a URL: disk that a node keeps shards of a set on, those longest unused going first; None: keeps all."""
    block_bytes: Annotated[int, Ge(1 << 16)] = 32 << 20
    """Text one data task reads, parses and hands on; its rows are shuffled together."""
    segments_per_block: Count = 16
    """Places of the log one block is drawn from; more mix better and read smaller ranges."""
    prefetch_blocks: Natural = 2
    """Blocks held ready for a worker beside the one it uses."""

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
            raise InputError(f"scaling.num_workers: {self.num_workers} must be at least 1, and the least not above the most")
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

    max_failures: Limit = 3
    """Restarts of the workers after failures in a row without a new checkpoint between; -1: without limit."""
    max_outage_s: Amount = 600.0
    """Seconds for which a save may fail (storage unavailable, disk full) before the run ends; until then saves are late, and
    training continues."""
    node_wait_s: Amount = 600.0
    """Seconds to wait where there is no room for the (least) workers: nodes were lost, or others hold what they need."""
    collective_timeout_s: Positive = 1800.0
    """Seconds that a worker waits for the others in a collective operation, beyond max_outage_s, before the attempt fails."""
    grace_s: Amount = 60.0
    """Seconds the workers have for a last checkpoint after SIGTERM or Ctrl-C; and again as many whenever it makes progress."""
    max_grace_s: Amount = 600.0
    """Seconds they have in all, where the last checkpoint makes progress but takes longer than grace_s."""
    standby_after_s: Amount | None = 60.0
    """Seconds of an attempt on Ray after which each worker has an idle process in standby, which has imported what a worker needs
    and takes some 0.4 GB. A restart then takes seconds less. None: never; nor if max_failures is 0."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """When to save and what to keep."""

    every: Count | None = None
    """Steps between checkpoints; None: with every evaluation and at the end."""
    num_to_keep: Count = 2
    """Newest checkpoints kept."""
    keep_best: Natural = 1
    """Kept beside them: those with the best validation scores."""
    keep_every: Count | None = None
    """Kept for good: checkpoints of steps that are multiples of this; None: none."""


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
