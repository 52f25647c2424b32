"""Settings shared by all kinds of training, one class per group."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge

from rayrec.bounds import Amount, Count, Limit, Natural, Positive
from rayrec.cluster.node_storage import RuntimeEnvConfig
from rayrec.config import Config, InputError


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Source and order of data."""

    path: str | None = None
    """File, glob or folder, local or a URL (s3://...): plain or gzip text, Parquet, or the output
    of `rayrec preprocess`.
    """
    files: tuple[str, ...] = ()
    """File names to read from the folder `path`, in this order, each plain, .gz or .parquet. Empty
    reads all files.
    """
    shuffle: Literal["none", "files", "window", "full"] = "window"
    """Order of rows. none: log order; files: shuffle files; window: shuffle segments, and rows
    within each block; full: as window, but requires data fully shuffled by `rayrec preprocess
    --shuffle full`.
    """
    in_memory: bool = False
    """Whether to load local preprocessed data into memory instead of mapping it."""
    cache_bytes: Count | None = None
    """Maximum disk cache per node for each set of token blocks at a URL, in bytes. Evicts least
    recent shards. None keeps all.
    """
    block_bytes: Annotated[int, Ge(1 << 16)] = 32 << 20
    """Text bytes per data task. Its rows are shuffled together."""
    segments_per_block: Count = 16
    """Number of log segments per shuffle block. Higher values shuffle better but read smaller
    ranges.
    """
    prefetch_blocks: Natural = 2
    """Number of blocks to prefetch per worker, in addition to the current block."""

    @property
    def segment_bytes(self) -> int:
        return max(self.block_bytes // self.segments_per_block, 1)


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(Config):
    """Number of training workers and their resources."""

    num_workers: int | tuple[int, int] = 1
    """Number of training workers: one per GPU, or a few per machine on CPU. (min, max) enables
    elastic training: as many workers as fit, which may change during the run.
    """
    batch_policy: Literal["global", "per_worker"] = "global"
    """Batch size to keep when the number of workers changes. global: batch_size times the maximum
    number of workers, split evenly; per_worker: batch_size of each worker.
    """
    learning_rate_policy: Literal["constant", "linear", "sqrt"] = "constant"
    """Learning rate scaling with per_worker, relative to the most workers: constant, linear or root
    in the global batch.
    """
    use_gpu: bool = False
    """Whether to reserve one GPU per worker."""
    cpus_per_worker: float | None = None
    """CPUs reserved per worker. None reserves one with a GPU, else half its share of the cluster.
    The rest is for data tasks.
    """
    resize_interval_s: float = 30.0
    """Minimum training time of an attempt with (min, max) workers, in seconds, before it restarts
    with more workers.
    """
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    """Additional Ray resources per worker, such as {"accelerator": 1}."""
    threads_per_worker: int | None = None
    """CPU operator threads per worker. None uses cpus_per_worker, else its share of the node's
    CPUs, limited by CPU affinity, container quota and Ray's CPUs.
    """
    bind_cores: bool = False
    """Whether to bind each worker to its share of its node's cores, within a NUMA node if
    possible.
    """
    network_interface: str | None = None
    """Network interface for communication between workers, such as eth0. None lets gloo and NCCL
    choose.
    """
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray placement strategy for workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_workers <= self.max_workers:
            raise InputError(
                "scaling.num_workers: must be at least 1, and min at most max, got "
                f"{self.num_workers}"
            )
        if self.batch_policy == "global" and self.learning_rate_policy != "constant":
            raise InputError(
                "scaling.learning_rate_policy: must be constant with batch_policy global, whose "
                f"batch never changes, got {self.learning_rate_policy}. Set constant, or "
                "batch_policy per_worker."
            )

    @property
    def ray_only(self) -> dict[str, bool]:
        """Settings without effect outside Ray, and whether they are set."""
        return {"scaling.resources_per_worker": bool(self.resources_per_worker)}

    @property
    def min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]


@dataclass(frozen=True, kw_only=True)
class FailureConfig(Config):
    """Fault tolerance: retries, timeouts and grace periods."""

    max_failures: Limit = 3
    """Maximum number of consecutive worker restarts without a new checkpoint. -1 means
    unlimited.
    """
    max_outage_s: Amount = 600.0
    """Maximum storage outage in seconds (store unavailable, disk full) before the run fails. Until
    then, saves are delayed.
    """
    node_wait_s: Annotated[float, Ge(-1)] = 600.0
    """Maximum wait for the minimum number of workers, in seconds, after nodes are lost or while
    other jobs use them. -1 means unlimited.
    """
    collective_timeout_s: Positive = 1800.0
    """Timeout of collective operations in seconds, in addition to max_outage_s. The attempt fails
    after it.
    """
    grace_s: Amount = 60.0
    """Time for a last checkpoint after SIGTERM or Ctrl-C, in seconds. Restarts whenever the
    checkpoint makes progress.
    """
    max_grace_s: Amount = 600.0
    """Maximum total time for a last checkpoint that makes progress, in seconds."""
    standby_after_s: Amount | None = 60.0
    """Time in an attempt on a local Ray before an idle standby process starts for each worker, in
    seconds. It has imported all modules and takes about 0.4 GB. Restarts are seconds faster. None
    disables it, as does max_failures 0.
    """


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """Checkpoint interval and retention."""

    every: Count | None = None
    """How often to save a checkpoint, in steps. None saves at each evaluation and at the end."""
    num_to_keep: Count = 2
    """Number of latest checkpoints to keep."""
    keep_best: Natural = 1
    """Number of checkpoints with the best validation scores to keep in addition."""
    keep_every: Count | None = None
    """Interval in steps of checkpoints to keep permanently. None keeps none."""


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig(Config):
    """Early stopping criteria."""

    patience: int = 0
    """Number of evaluations without improvement before training stops. 0 never stops for that
    reason.
    """
    min_improvement: float = 0.0
    """Minimum increase in score over the last improvement to count as an improvement."""
    target: float | None = None
    """Metric value that ends training, at the first evaluation to reach it. AUROC for click models,
    `best_metric` at K for retrieval, accuracy for images, a loss as low for language models. None:
    no target.
    """


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(RuntimeEnvConfig):
    """Ray cluster, or none."""

    address: str | None = None
    """HOST:PORT or auto: a running Ray cluster; local: a local Ray for this run; none: no Ray, one
    worker in this process. None: the connected Ray or RAY_ADDRESS, else this process for one worker
    and a local Ray for several.
    """
    num_cpus: int | None = None
    """Maximum CPUs of a local Ray or an in-process run. None uses all CPUs of the machine."""
    object_store_bytes: int | None = None
    """Object store memory of a local Ray, in bytes. If set, even one worker runs on Ray. None lets
    Ray choose.
    """
    data_nodes: Literal["auto", "any", "separate"] = "auto"
    """Nodes that run data tasks. separate: nodes without worker resources (GPUs, named resources);
    any: all nodes. auto: separate if those nodes have 4 CPUs per worker or half of its share of all
    CPUs, else any.
    """
    data_task_memory_bytes: Count | None = None
    """Memory that Ray reserves for each data task, in bytes. None reserves none."""

    @property
    def ray_only(self) -> dict[str, bool]:
        """Settings without effect outside Ray, and whether they are set."""
        names = ("object_store_bytes", "data_task_memory_bytes", "env", "runtime_env")
        return {f"cluster.{name}": getattr(self, name) not in (None, ()) for name in names}

    @property
    def connection(self) -> dict[str, Any]:
        """Arguments of `rayrec.cluster.connection.connect`, besides the address."""
        return {
            "num_cpus": self.num_cpus,
            "object_store_bytes": self.object_store_bytes,
            "environment": self,
        }


@dataclass(frozen=True, kw_only=True)
class ObserveConfig(Config):
    """Performance measurements during training."""

    times: bool = True
    """Whether to split each logged interval into phases, measure the device's peak at the start,
    and report data task times. Data tasks always time themselves: four clock reads per segment of a
    block.
    """
    accuracy: bool = False
    """Whether step events have the accuracy of a click model in training, with threshold 0.5. A few
    operations per step.
    """
    by_worker: bool = False
    """Whether step events have the loss (and accuracy) of each worker, in `workers`."""


MAX_PROFILED_STEPS: Final = 200
"""Maximum steps per recording, kept in worker memory: about a kilobyte for each of the thousands of
operations in a step.
"""


MAX_NAME_LETTERS: Final = 128
"""Maximum length of a run name."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Config):
    """Recording of steps with torch.profiler, into RUN/profile. `rayrec profile RUN` records
    further steps of an active run.
    """

    steps: str | None = None
    """Steps to record on every worker, such as 10:20 (after step 10 to step 20), at most 200. None
    records none.
    """
    memory: bool = True
    """Whether to record allocations for the memory timeline."""
    stack: bool = False
    """Whether to record the Python stack of each operation. Much slower."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.window() is None:
            raise InputError(
                "profile.steps: must be FIRST:END with FIRST < END, such as 10:20, got "
                f"{self.steps!r}"
            )
        first, end = self.window() or (0, 0)
        if end - first > MAX_PROFILED_STEPS:
            raise InputError(
                f"profile.steps: at most {MAX_PROFILED_STEPS} steps fit in memory, got "
                f"{self.steps!r} ({end - first:,})"
            )

    def window(self) -> tuple[int, int] | None:
        """Return (first, end) of `steps`, from 0 and exclusive of end, or None if invalid."""
        first, _, end = (self.steps or "").partition(":")
        if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
            return None
        return int(first), int(end)
