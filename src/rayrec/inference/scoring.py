"""Scoring of an input with a checkpoint, by a pool of threads or Ray actors, with scores in
order.
"""

from __future__ import annotations

import dataclasses
import glob
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, final

import pyarrow as pa

from rayrec import host_resources, storage
from rayrec.checkpoint import Checkpoint, open_checkpoint, verify
from rayrec.checkpoint.discovery import reject_pickles
from rayrec.cluster import connection
from rayrec.cluster.layout import Node
from rayrec.config import InputError
from rayrec.data.encoding.clipping import ClipTotals, clipping_report, clipping_warning
from rayrec.data.engine import StreamEngine, TaskPlacement, ThreadEngine
from rayrec.humanize import size_text
from rayrec.inference.config import PredictionConfig
from rayrec.observe.console import Console
from rayrec.storage.range_reader import in_order
from rayrec.workloads.base import ScoringContext, TrainConfig
from rayrec.workloads.scoring import Device, Scoring

if TYPE_CHECKING:
    import ray.data

    from rayrec.inference.config import ScoringConfig

_PROCESS_BYTES = 1 << 30
"""Memory of a scoring process in addition to its weights: torch, Ray, a block's rows, columns and
activations.
"""


@dataclass(frozen=True)
class Pool:
    """Number and resources of scoring processes, or of threads in this one."""

    num_actors: int
    cpus_per_actor: float
    gpus_per_actor: float


def plan_pool(
    nodes: Sequence[Node],
    *,
    weight_bytes: int,
    blocks: int,
    spare_cpus: int,
    device: Device,
    shared_weights: bool = False,
) -> Pool:
    """Plan the number of scoring processes and their cores: as many processes as memory for the
    weights allows. Pure. Keeps `spare_cpus` cores free for later stages of the caller's Dataset, if
    possible. With `shared_weights`, the members are threads, one per core. Raises InputError if the
    weights fit on no node or, for "cuda", there is no GPU.
    """
    if device == "cuda":
        num_gpus = int(sum(node.resources.get("GPU", 0) for node in nodes))
        if not num_gpus:
            raise InputError("device: GPU for cuda not found. Use cpu.")
        return Pool(max(1, min(num_gpus, blocks)), 1.0, 1.0)
    needed = weight_bytes + _PROCESS_BYTES
    if shared_weights:
        (node,) = nodes
        if node.resources["memory"] < needed:
            raise InputError(
                f"scoring needs {size_text(needed)} of memory for the weights, got "
                f"{size_text(node.resources['memory'])} of free memory. Free some, or use a larger "
                "machine."
            )
        return Pool(max(1, min(int(node.resources["CPU"]), blocks)), 1.0, 0.0)
    num_actors, cpus_each = _plan_processes(nodes, needed, spare_cpus)
    return Pool(max(1, min(num_actors, blocks)), cpus_each, 0.0)


def _plan_processes(nodes: Sequence[Node], needed: int, spare_cpus: int) -> tuple[int, float]:
    """Return the number of processes and the CPUs of one. Each has a copy of the weights."""
    usable = [
        (node.resources.get("CPU", 0.0), int(node.resources.get("memory", 0) // needed))
        for node in nodes
    ]
    usable = [(cpus, fitting) for cpus, fitting in usable if cpus > 0 and fitting > 0]
    if not usable:
        largest = max(
            (node.resources.get("memory", 0) for node in nodes if node.resources.get("CPU")),
            default=0,
        )
        raise InputError(
            f"scoring needs {size_text(needed)} of memory on one node with CPUs for the weights, "
            f"got at most {size_text(largest)} from Ray. Use larger nodes."
        )
    # As many processes per node as fit, one per core at most.
    cpus_each = max(
        math.ceil(int(cpus) / min(fitting, int(cpus))) if cpus >= 1 else cpus
        for cpus, fitting in usable
    )
    num_actors = sum(int(cpus // cpus_each) for cpus, _ in usable)
    free = sum(cpus for cpus, _ in usable) - num_actors * cpus_each
    while free < spare_cpus and num_actors > 1:
        num_actors -= 1
        free += cpus_each
    if free < spare_cpus:
        cpus_each = max(cpus_each - spare_cpus, cpus_each / 2)
    return num_actors, cpus_each


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Return the size of all weights, without optimizer state."""
    tensors = checkpoint.manifest()["tensors"]
    return sum(
        chunk["bytes"]
        for name, entry in tensors.items()
        if name.startswith("model.")
        for chunk in entry["chunks"]
    )


@final
class _ScoringProcess:
    """Scoring process. Loads the model with the first block, so that a damaged model fails like a
    task.
    """

    def __init__(
        self,
        load: Callable[[Device], Callable[[int], pa.Table]],
        device: Device,
        threads: int,
    ) -> None:
        import torch

        from rayrec.layers.kernels.kernel_threads import CpuWatch

        torch.set_num_threads(threads)
        self._watch = CpuWatch()
        logging.getLogger("torch").setLevel(logging.ERROR)  # torchrec's import makes torch.fx warn
        self._load = load
        self._device = device

    @cached_property
    def _score(self) -> Callable[[int], pa.Table]:
        return self._load(self._device)

    def __call__(self, numbers: pa.Table) -> pa.Table:
        """Score the blocks with the numbers in column `block`."""
        return pa.concat_tables([self._score(number.as_py()) for number in numbers.column("block")])


def scored_dataset(
    scoring: Scoring,
    *,
    pool: Pool,
    device: Device,
    first_block: int = 0,
) -> ray.data.Dataset:
    """Return a lazy Dataset with the scores of each block of rows, in order, from block
    `first_block`. Its input, the block numbers, is in the object store. No task feeds the pool, so
    it may use all CPUs of a cluster.
    """
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext, ExecutionOptions

    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options = ExecutionOptions(preserve_order=True)
    with DataContext.current(context):
        blocks = [
            pa.table({"block": [number]}) for number in range(first_block, scoring.num_blocks)
        ]
        return ray.data.from_blocks(blocks).map_batches(
            _ScoringProcess,
            fn_constructor_args=(scoring.load, device, max(1, int(pool.cpus_per_actor))),
            batch_size=None,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=pool.num_actors),
            num_cpus=pool.cpus_per_actor,
            num_gpus=pool.gpus_per_actor or None,
        )


def scored_tables(
    scoring: Scoring,
    *,
    pool: Pool,
    device: Device,
    first_block: int = 0,
) -> Iterator[pa.Table]:
    """Yield the scores of each block of rows, in order, from block `first_block`. Equal to those of
    Ray processes.
    """
    import torch

    threads = torch.get_num_threads()
    shared = scoring.load(device) if scoring.thread_safe else None
    thread_state = threading.local()

    def scored(number: int) -> pa.Table:
        if not hasattr(thread_state, "score"):
            # Applies to operators of this thread
            torch.set_num_threads(max(1, int(pool.cpus_per_actor)))
            thread_state.score = shared or scoring.load(device)
        return thread_state.score(number)

    try:
        yield from in_order(
            scored,
            range(first_block, scoring.num_blocks),
            name="score",
            num_threads=pool.num_actors,
            prefetch=2,
        )
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class ScoringJob:
    """Opened input, checkpoint and pool. Reading the scores starts the work."""

    scoring: Scoring
    checkpoint: Checkpoint
    pool: Pool
    device: Device
    on_ray: bool
    """True if the pool consists of Ray processes, False for threads."""

    @cached_property
    def clips(self) -> ClipTotals:
        """Numbers beyond their bounds in the tables so far."""
        return ClipTotals(self.scoring.bounded)

    @property
    def described(self) -> dict[str, Any]:
        """Description of the workload, checkpoint folder, and numbers beyond their bounds in the
        tables so far, if the model has bounds. JSON values.
        """
        clipped = {"clipped": clipping_report(self.clips.counts)} if self.scoring.bounded else {}
        return {**self.scoring.described, **clipped, "checkpoint": self.checkpoint.path}

    def dataset(self, first_block: int = 0) -> ray.data.Dataset:
        """Return the scores from a block on."""
        assert self.on_ray
        pool = dataclasses.replace(
            self.pool,
            num_actors=max(1, min(self.pool.num_actors, self.scoring.num_blocks - first_block)),
        )
        return scored_dataset(self.scoring, first_block=first_block, pool=pool, device=self.device)

    def tables(
        self,
        console: Console,
        *,
        title: str = "score (rows)",
        first_row: int = 0,
    ) -> Iterator[pa.Table]:
        """Yield the scores from a row on, in order, with progress on the console, and a warning if
        many numbers were clipped.
        """
        first_block, begin = self.scoring.find_block(first_row)
        skip = first_row - begin
        done = first_row
        with console.preparing():
            for table in self._tables(first_block):
                yield self.clips.strip(table.slice(skip))
                done += max(0, len(table) - skip)
                skip = max(0, skip - len(table))
                console.progress(title, done, self.scoring.rows)
        if warning := clipping_warning(self.clips.counts):
            console.note(f"Numbers are {warning}")

    def _tables(self, first_block: int) -> Iterator[pa.Table]:
        if not self.on_ray:
            yield from scored_tables(
                self.scoring,
                first_block=first_block,
                pool=self.pool,
                device=self.device,
            )
            return
        from rayrec.ingest.ray_engine import input_errors

        with input_errors():
            for table in self.dataset(first_block).iter_batches(
                batch_size=None,
                batch_format="pyarrow",
                prefetch_batches=2,
            ):
                assert isinstance(table, pa.Table)
                yield table


@dataclass(frozen=True)
class ScoringRequest:
    """Checkpoint, input and settings of a scoring job."""

    checkpoint: str
    path: str | None
    """Path to the rows. None: the held-out rows of the checkpoint's run."""
    config: TrainConfig
    options: ScoringConfig
    console: Console

    def open(
        self,
        *,
        evaluating: bool,
        spare_cpus: int,
        slice_by: tuple[str, ...] = (),
        ks: tuple[int, ...] = (),
        extra_columns: tuple[str, ...] = (),
        predicting: PredictionConfig | None = None,
        as_dataset: bool = False,
    ) -> ScoringJob:
        """Open the checkpoint and the input; keep `spare_cpus` cores free. With `as_dataset`,
        creates a Dataset, which needs Ray. Raises InputError for an unusable checkpoint or input,
        damaged weights, and `predicting` settings that the workload does not have.
        """
        prediction = predicting or PredictionConfig()
        self._check_prediction(prediction)
        checkpoint = open_checkpoint(self.checkpoint)
        reject_pickles(checkpoint.path, checkpoint.manifest()["files"])
        # Not in the actors: a pipeline of Ray Data 2.60 that fails at its first block leaks its
        # actors and their CPUs.
        verify(checkpoint, "model.")
        path = self._path()
        on_ray = as_dataset or not connection.is_in_process(self.config.cluster.address)
        cpus = host_resources.usable_cpus(granted=self.config.cluster.num_cpus)
        engine: Callable[[], StreamEngine] = cache(
            self._engine_on_ray if on_ray else lambda: ThreadEngine(cpus)
        )
        scoring = self.config.workload.open_scoring(
            ScoringContext(
                config=self.config,
                checkpoint=checkpoint.path,
                path=path,
                evaluation_rows=self.path is None,
                evaluating=evaluating,
                batch_rows=self.options.batch_rows,
                engine=engine,
                console=self.console,
                slice_by=slice_by,
                ks=ks,
                extra_columns=(*prediction.keep, *extra_columns),
                k=prediction.k,
                exclude_seen=prediction.exclude_seen,
                counts_clipped=not as_dataset,
            )
        )
        engine()
        if on_ray:
            connection.ship_code(self.config)
        pool = plan_pool(
            connection.alive_nodes() if on_ray else [self._this_machine(cpus)],
            weight_bytes=weight_bytes(checkpoint),
            blocks=scoring.num_blocks,
            spare_cpus=spare_cpus,
            device=self.options.device,
            shared_weights=not on_ray and scoring.thread_safe,
        )
        return ScoringJob(scoring, checkpoint, pool, self.options.device, on_ray)

    def _check_prediction(self, prediction: PredictionConfig) -> None:
        """Check that the workload scores rows with columns, if these settings need it. Raises
        InputError.
        """
        if self.config.workload.table_schema is not None:
            return
        recipe = self.config.recipe
        if prediction.keep:
            raise InputError(
                f"keep: recipe {recipe} does not score rows with columns. Remove keep."
            )
        for name in ("k", "exclude_seen"):
            if getattr(prediction, name) != getattr(PredictionConfig, name):
                raise InputError(
                    f"{name}: recipe {recipe} does not recommend items. Remove {name}."
                )

    def _path(self) -> str:
        """Return the path of the rows. Raises InputError if the run's own is unknown or gone."""
        if self.path is not None:
            return self.path
        path = self.config.workload.evaluation_data(self.config).path
        if path is None:
            raise InputError(
                f"{self.checkpoint}: its config.yaml names no data with held-out rows. Pass the "
                "PATH of rows."
            )
        if not (
            path.startswith("random:")
            or storage.is_url(path)
            or glob.glob(path)
            or storage.exists(path)
        ):
            raise InputError(
                f"{self.checkpoint}: the run's data {path} does not exist from here. Run this in "
                "the folder where it was trained, or pass the PATH of rows that it was not trained "
                "on."
            )
        return path

    def _this_machine(self, cpus: int) -> Node:
        resources = {"CPU": float(cpus), "memory": float(host_resources.memory().available)}
        if self.options.device == "cuda":
            import torch

            resources["GPU"] = float(torch.cuda.is_available())
        return Node("this machine", resources)

    def _engine_on_ray(self) -> StreamEngine:
        from rayrec.cluster.node_storage import require_reachable
        from rayrec.ingest.ray_engine import RayEngine

        cluster = self.config.cluster
        connection.connect(
            cluster.address,
            **cluster.connection,
            log_to_driver=self.console.verbose,
        )
        if not connection.is_local_ray():
            require_reachable((self.checkpoint, self._path()))
        cpus = sum(node.resources.get("CPU", 0.0) for node in connection.alive_nodes())
        return RayEngine(TaskPlacement(num_cpus=min(1.0, cpus)))
