"""Forecast of a recipe's training speed on a cluster, its bottleneck, and the CPUs that keep its
devices busy.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from rayrec import host_resources, storage
from rayrec.cluster.layout import Layout, Node
from rayrec.config import InputError
from rayrec.humanize import duration_text, estimate_text, size_text
from rayrec.process_state import temporary_environment
from rayrec.sharding.communication import LinkBandwidth
from rayrec.trained_rows import TrainedRows
from rayrec.training.launchers.base import compute_layout
from rayrec.workloads.base import MeasuredSpeed, Target, TrainConfig, TrainingRows, WorkerContext

Limit = Literal["model", "network", "data", "cpus"]
_TIMEOUT_S: Final = 300.0
_STEPS_AT_ONCE: Final = 8
"""Steps between two clock readings. The first ones are not measured."""
_MEASURED_S: Final = 4.0
_OPTIONAL: Final = ("memory_gb", "gpu_memory_gb", "gpu_rows_per_s", "network_gbit", "inside_gbit")
"""Optional fields of a cluster."""


@dataclass(frozen=True)
class ClusterShape:
    """Cluster of identical nodes."""

    cpus: float
    gpus: float = 0.0
    """GPUs of each node with GPUs."""
    nodes: int = 1
    """Number of nodes; if there are GPUs, of nodes with GPUs."""
    cpu_nodes: int = 0
    """Number of additional nodes without GPUs; 0 for clusters without GPUs."""
    memory_gb: float | None = None
    """Memory for workers on each of their nodes. None for the memory of this machine."""
    gpu_memory_gb: float | None = None
    """Memory of each GPU. None for the memory of this machine's GPU."""
    gpu_rows_per_s: float | None = None
    """Training speed of one GPU. None to measure it on this machine."""
    network_gbit: float | None = None
    """Bandwidth between nodes in Gbit/s per node and direction. None for no limit."""
    inside_gbit: float | None = None
    """Bandwidth between the workers of a node in Gbit/s per worker and direction. None for no
    limit.
    """

    @classmethod
    def parse(cls, text: str) -> ClusterShape:
        """Parse `cpus=16,gpus=1,nodes=2,cpu_nodes=3`. Raises InputError."""
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            try:
                values[name] = float(number)
            except ValueError:
                values[name] = -1.0
            if name not in cls.__dataclass_fields__ or not 0 <= values[name] < math.inf:
                raise InputError(
                    f"--cluster: must be {'=N, '.join(cls.__dataclass_fields__)}=N, such as "
                    f"cpus=16,gpus=1,nodes=2, got {part!r}"
                )
        if not values.get("cpus") or values.get("nodes", 1) < 1:
            raise InputError(
                f"--cluster: must have cpus=N, of each node, and at least one node, got {text!r}"
            )
        gpus = values.get("gpus", 0.0)
        nodes = int(values.get("nodes", 1))
        cpu_nodes = int(values.get("cpu_nodes", 0))
        options = {name: values.get(name) for name in _OPTIONAL}
        for name, value in options.items():
            if value == 0 or (value and name.startswith("gpu_") and not gpus):
                raise InputError(
                    f"--cluster: {name} must be more than 0, and gpu_ fields need gpus=N, got "
                    f"{text!r}"
                )
        if not gpus:  # all nodes are then equal
            nodes, cpu_nodes = nodes + cpu_nodes, 0
        return cls(values["cpus"], gpus, nodes, cpu_nodes, **options)

    def target(self, num_workers: int) -> Target:
        workers_per_node = -(-num_workers // self.nodes)
        host_gb = self.memory_gb and self.memory_gb / workers_per_node
        memory_gb = self.gpu_memory_gb if self.gpus else host_gb
        return Target(
            num_workers,
            workers_per_node,
            None if memory_gb is None else int(memory_gb * 1e9),
            self.gpu_rows_per_s,
            int(host_gb * 1e9) if self.gpus and host_gb else None,
            self.links,
        )

    @property
    def links(self) -> LinkBandwidth:
        return LinkBandwidth(self.network_gbit, self.inside_gbit)

    def resources(self) -> list[Node]:
        gpu = {"GPU": self.gpus} if self.gpus else {}
        return [
            *(Node(f"node-{number}", {"CPU": self.cpus, **gpu}) for number in range(self.nodes)),
            *(Node(f"cpu-node-{number}", {"CPU": self.cpus}) for number in range(self.cpu_nodes)),
        ]


@dataclass(frozen=True)
class Forecast:
    """Forecast of a warmed-up run."""

    shape: ClusterShape
    num_workers: int
    data_cpus: float
    """CPUs of all workers' pipelines."""
    model_rows_per_s: float
    """Speed of all workers if rows were always available."""
    data_rows_per_s: float
    """Speed of data tasks if they had their CPUs to themselves."""
    cpu_rows_per_s: float | None
    """Speed limit by CPU time for all work on a row. None if devices train."""
    cpus_per_gpu: float | None
    """CPUs that keep one GPU busy. None without GPUs."""
    measured_speed: MeasuredSpeed

    @property
    def rows_per_s(self) -> float:
        return self._limits()[0][0]

    @property
    def bottleneck(self) -> Limit:
        """Limiting resource: the model, the network between workers, data tasks, or CPUs shared by
        workers and data tasks.
        """
        return self._limits()[0][1]

    def _limits(self) -> list[tuple[float, Limit]]:
        traffic = self.measured_speed.traffic
        steps: tuple[float, Limit] = self.model_rows_per_s, "model"
        if traffic is not None:
            steps = traffic.limit(self.model_rows_per_s, self.shape.links)
        limits: list[tuple[float, Limit]] = [steps, (self.data_rows_per_s, "data")]
        if self.cpu_rows_per_s is not None:
            limits.append((self.cpu_rows_per_s, "cpus"))
        return sorted(limits)

    def text(self) -> str:
        measured_speed = self.measured_speed
        shape = self.shape
        nodes_text = f"{shape.nodes} node{'s' if shape.nodes > 1 else ''} of {shape.cpus:g} CPUs"
        nodes_text += (
            f" and {shape.gpus:g} GPU{'s' if shape.gpus > 1 else ''}" if shape.gpus else ""
        )
        nodes_text += f", {shape.cpu_nodes} more without" if shape.cpu_nodes else ""
        lines = [
            measured_speed.plan,
            "",
            f"On {nodes_text}: {self.num_workers} workers; data tasks get {self.data_cpus:g} CPUs.",
        ]
        for name, wall_s in measured_speed.stage_wall_s.items():
            lines.append(f"  {name:8} {estimate_text(1 / wall_s)} rows/s a CPU")
        lines.append(f"  {'data':8} {estimate_text(self.data_rows_per_s)} rows/s in all")
        note = ", by gpu_rows_per_s: given, not measured" if measured_speed.is_assumed else ""
        lines.append(f"  {'model':8} {estimate_text(self.model_rows_per_s)} rows/s in all{note}")
        if self.cpu_rows_per_s is not None:
            lines.append(
                f"  {'CPUs':8} {estimate_text(self.cpu_rows_per_s)} rows/s, all work on a row "
                "counted"
            )
        if measured_speed.traffic is not None:
            lines.append(measured_speed.traffic.text(shape.links))
        why = {
            "model": "the model",
            "network": "the network between workers",
            "data": "data tasks",
            "cpus": "the CPUs, which workers and data tasks share",
        }
        lines.append(
            f"About {estimate_text(self.rows_per_s)} rows/s, limited by {why[self.bottleneck]}; an "
            f"epoch of about {estimate_text(measured_speed.rows)} rows takes "
            f"{duration_text(measured_speed.rows / self.rows_per_s)}."
        )
        if self.cpus_per_gpu is not None:
            nodes = math.ceil(self.cpus_per_gpu / shape.cpus)
            lines.append(
                f"{math.ceil(self.cpus_per_gpu)} CPUs for data tasks keep one GPU busy: {nodes} "
                f"CPU node{'s' if nodes > 1 else ''} of this size a GPU."
            )
        lines.append(
            f"Tables and their optimizer state: {size_text(max(measured_speed.worker_bytes))} on "
            "the worker with most."
        )
        if measured_speed.sampled_vocabulary:
            lines.append(
                "The tables are those of a slice of the log, and smaller than they will be: "
                "`rayrec vocabulary` and --workload.preprocessor DIR give real ones."
            )
        return "\n".join([*lines, *measured_speed.notes])


def forecast(config: TrainConfig, shape: ClusterShape) -> Forecast:
    """Measure a slice of the recipe's stages on this machine (some 20 s) and extrapolate to the
    cluster. Raises InputError if the recipe does not fit, has no log, or needs a GPU of unknown
    speed and none is here to measure.
    """
    config.workload.check(config)
    config, allocation = _layout_on(config, shape)
    if config.scaling.use_gpu:
        local_workers = 1
        if shape.gpu_rows_per_s is None:
            import torch

            if not torch.cuda.is_available():
                raise InputError(
                    "plan: no GPU found on this machine to measure the model. Run it on a node "
                    "with a GPU, set gpu_rows_per_s=N in --cluster, or omit gpus there"
                )
    else:
        # Two workers show the cost of an exchange
        per_node = max(-(-allocation.num_workers // shape.nodes), min(2, allocation.num_workers))
        local_workers = min(per_node, host_resources.usable_cpus())
    measured_speed = config.workload.probe_speed(
        config,
        target=shape.target(allocation.num_workers),
        local_workers=local_workers,
        cuda=config.scaling.use_gpu,
        train=train_locally,
    )
    return extrapolate(
        measured_speed, shape, allocation, threads_per_worker=config.scaling.threads_per_worker
    )


def train_locally(
    config: TrainConfig, rows: TrainingRows, *, workers: int, threads: int, cuda: bool
) -> list[tuple[float, float, float]]:
    """Train some steps in local processes with the regular training loop; see `LocalTrainer`."""
    # Spawned, not forked: torch's and Arrow's threads of this process would not exist in a fork,
    # but their locks would.
    processes = multiprocessing.get_context("spawn")
    results = processes.Queue()
    with storage.Scratch("speed-probe") as folder:
        arguments = (f"file://{folder}/rendezvous", config, rows, workers, threads, cuda, results)
        started = [
            processes.Process(target=_train_rank, args=(rank, *arguments), daemon=True)
            for rank in range(workers)
        ]
        # As Ray does; torch gets its own number later.
        with temporary_environment({"OMP_NUM_THREADS": "1"}):
            for process in started:
                process.start()
        deadline_s = time.monotonic() + _TIMEOUT_S
        measured: list[tuple[float, float, float]] = []
        try:
            # A process that fails sends nothing. So this waits with a timeout and looks at the exit
            # statuses.
            while len(measured) < workers:
                with contextlib.suppress(queue.Empty):
                    measured.append(results.get(timeout=1.0))
                    continue
                if time.monotonic() > deadline_s or any(process.exitcode for process in started):
                    raise InputError(
                        "plan: cannot train on this machine. Run `rayrec train` with --steps 20 "
                        "to see the error"
                    )
        finally:
            for process in started:
                process.join(timeout=10 if len(measured) == workers else 0)
                process.kill()
    return measured


def _train_rank(
    rank: int,
    rendezvous: str,
    config: TrainConfig,
    rows: TrainingRows,
    workers: int,
    threads: int,
    cuda: bool,
    results: Any,
) -> None:
    import torch

    from rayrec.collectives import group_arguments, use_device
    from rayrec.data.engine import ThreadEngine
    from rayrec.native import keep_freed_memory
    from rayrec.training import loop
    from rayrec.training.progress import Progress, Training

    keep_freed_memory()
    torch.set_num_threads(threads)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    use_device(device)  # NCCL's collectives of objects use the current device
    arguments = group_arguments(device, timeout_s=_TIMEOUT_S)
    torch.distributed.init_process_group(
        init_method=rendezvous, rank=rank, world_size=workers, **arguments
    )
    config = config.replace(log_every=_STEPS_AT_ONCE)
    setup, batches = rows.set_up(WorkerContext(config, rank, workers, device, ThreadEngine(1)))
    measured = _MeasuredSteps()
    loop.run(
        Training(
            config=config,
            setup=setup,
            loader=_ReadyBatches(batches, rows_of_step=setup.described["batch_size"] * workers),
            progress=Progress(),
            log=measured.log,
            save=lambda *_, **__: None,
            stop_signal=measured,
        )
    )
    results.put((measured.rows / workers, measured.seconds, measured.cpu_s))
    # A rank that ends first closes its connections while others are in their last collective.
    torch.distributed.barrier()


@final
class _MeasuredSteps:
    """Log and stop signal of a loop that skips the first steps, measures the next ones, and then
    stops.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.seconds = 0.0
        self.cpu_s = 0.0
        self._since: tuple[int, float, float] | None = None

    def log(self, kind: str, fields: dict[str, Any]) -> None:
        if kind != "step":
            return
        now = (fields["rows"], time.perf_counter(), time.process_time())
        if self._since is None:
            self._since = now
        self.rows, self.seconds, self.cpu_s = (
            after - before for after, before in zip(now, self._since, strict=True)
        )

    def poll(self) -> tuple[bool, bool]:
        return self._since is not None and time.perf_counter() - self._since[
            1
        ] >= _MEASURED_S, False

    def preempted(self) -> bool:
        return False

    def urgent(self) -> bool:
        return False


@final
class _ReadyBatches:
    """Loader that repeats prepared batches."""

    steps = steps_per_epoch = 1 << 40

    def __init__(self, batches: Sequence[Any], *, rows_of_step: int) -> None:
        self._batches = itertools.cycle(batches)
        self._rows_of_step = rows_of_step

    def start(self) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def rows(self, batches: int) -> int:
        return batches * self._rows_of_step

    def trained_rows(self) -> TrainedRows:
        return TrainedRows()

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def plan_for(config: TrainConfig, shape: ClusterShape, *, tables: Sequence[int] | None) -> str:
    """Return the sharding plan of `tables` (rows of each; None: the Preprocessor's or preset's) on
    a cluster, without reading or measuring. Raises InputError if they do not fit.
    """
    config, allocation = _layout_on(config, shape)
    return config.workload.plan(config, target=shape.target(allocation.num_workers), tables=tables)


def _layout_on(config: TrainConfig, shape: ClusterShape) -> tuple[TrainConfig, Layout]:
    """Return the configuration for the cluster's device type, and the run's resource allocation."""
    if shape.gpus and not config.scaling.use_gpu:
        config = config.replace(scaling={"use_gpu": True})
    return config, compute_layout(config, shape.resources())


def extrapolate(
    measured_speed: MeasuredSpeed,
    shape: ClusterShape,
    allocation: Layout,
    *,
    threads_per_worker: int | None,
) -> Forecast:
    """Extrapolate local measurements to a cluster with equally fast CPUs or GPUs and the links of
    its shape. Pure.
    """
    workers = allocation.num_workers
    if measured_speed.device == "cuda":
        model = measured_speed.rows_per_s * workers / measured_speed.num_workers
    else:
        # Assumes that speed scales with threads, in one process or several.
        threads = threads_per_worker or max(
            1, int(shape.cpus) // max(1, -(-workers // shape.nodes))
        )
        model = (
            measured_speed.rows_per_s
            * workers
            * threads
            / (measured_speed.num_workers * measured_speed.threads_per_worker)
        )
    task_s = sum(measured_speed.stage_wall_s.values())
    task_cpu_s = sum(measured_speed.stage_cpu_s.values())
    placement = allocation.per_worker
    cpus_per_worker = placement.max_cpus or placement.num_cpus
    tasks = max(1, math.floor(cpus_per_worker / placement.num_cpus + 1e-9))
    gpu_rows_per_s = model / workers if measured_speed.device == "cuda" else None
    return Forecast(
        shape=shape,
        num_workers=workers,
        data_cpus=cpus_per_worker * workers,
        model_rows_per_s=model,
        data_rows_per_s=workers * tasks / task_s,
        cpu_rows_per_s=None
        if gpu_rows_per_s is not None
        else shape.cpus * shape.nodes / (measured_speed.cpu_s_per_row + task_cpu_s),
        cpus_per_gpu=None if gpu_rows_per_s is None else gpu_rows_per_s * task_s,
        measured_speed=measured_speed,
    )
