"""Worker of the click workload: sharded model, optimizers, pipeline and batches."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, final

import torch

# TorchRec imports it when sharding tables. Imported here for worker templates.
import torch.distributed.optim
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from torchrec.distributed.train_pipeline import (
    TrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.types import ShardedModule, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

from rayrec import host_resources, storage
from rayrec.batch import Batch
from rayrec.checkpoint.communicator import Communicator
from rayrec.compat.torch_compat import move_wrapped_module
from rayrec.config import InputError
from rayrec.data.encoding.clipping import ClipSum
from rayrec.ingest.batches import ClickBatches
from rayrec.ingest.block_order import BatchSharding, BlockOrder, BlockPlan, Position
from rayrec.ingest.loader import Loader
from rayrec.ingest.stream import MappedSource, TaskSource
from rayrec.models.base import ModelInputs, table_key
from rayrec.models.cost import network_multiply_adds
from rayrec.models.sharded_model import ClickModel, initialize_shards, saved_name
from rayrec.optim.config import DenseOptimizerConfig, SparseOptimizerConfig
from rayrec.optim.optimizer import JointlyClippedOptimizer, data_parallel_optimizer
from rayrec.optim.table_adam import TableAdam, disable_fused_update
from rayrec.sharding.placement import data_parallel_tables, describe, placements
from rayrec.sharding.planner import Site, embedding_sharders, plan_sharding, workers_per_node
from rayrec.workloads.base import TrainLoader, WorkerContext, WorkerSetup
from rayrec.workloads.recsys.candidates import (
    SampledRows,
    bin_ends,
    candidate_rows,
    frequencies,
    ranking_of,
)
from rayrec.workloads.recsys.distillation import load_targets
from rayrec.workloads.recsys.evaluation import EvaluationCounts, count_correct, counted_columns
from rayrec.workloads.recsys.planning import build_model
from rayrec.workloads.recsys.settings import ClickSettings, Prepared
from rayrec.workloads.step_timer import (
    StepTimer,
    TimedOptimizer,
    make_step_timer,
    time_forward,
    time_gradient_exchange,
    timed,
)
from rayrec.workloads.worker_setup import memory_errors, step_start

_MEMORY_WAIT_S: Final = 60.0
"""Maximum wait for memory of other processes. A failed attempt takes some seconds to end."""
_NUM_PINNED_BATCHES: Final = 2
"""Number of batches a thread slices and pins ahead for a GPU, because the kernel-launching thread
has no time for it.
"""
_MEMORY_POLL_S: Final = 1.0


@dataclasses.dataclass(frozen=True)
class RankResources:
    """Node, device and memory limits of one rank."""

    node: str
    device: str
    """Device with index, such as cpu or cuda:0."""
    host_bytes: int
    """Share of the host's free memory."""
    max_host_bytes: int
    """Share of the host's memory if no other process used any."""
    device_bytes: int | None
    """GPU memory available to torch, None on CPU."""


def _device_bytes(device: torch.device) -> int:
    total_bytes: int = torch.cuda.get_device_properties(device).total_memory
    return int(total_bytes * torch.cuda.get_per_process_memory_fraction(device))


def gather_rank_resources(context: WorkerContext, ranks: Communicator) -> list[RankResources]:
    """Return the `RankResources` of each rank. Collective."""
    # Workers of one node share its memory, so each counts them.
    workers = ranks.all_gather(context.node).count(context.node)
    store = context.object_store_bytes
    memory = host_resources.memory()
    resources = RankResources(
        context.node,
        str(context.device),
        max(0, memory.available - store) // workers,
        max(0, memory.total - store) // workers,
        _device_bytes(context.device) if context.device.type == "cuda" else None,
    )
    # Each rank plans alone and must plan the same, so that all need all resources.
    return ranks.all_gather(resources)


def shared_plan(
    workload: ClickSettings,
    context: WorkerContext,
    model: torch.nn.Module,
    *,
    batch_size: int,
) -> ShardingPlan:
    """Create the sharding plan on rank 0 and broadcast it. Collective. If tables fit the machine
    but not its free memory, waits up to a minute for processes of a previous attempt to end. Raises
    InputError on all ranks if the tables do not fit.
    """
    ranks = Communicator.all()
    deadline_s = time.monotonic() + _MEMORY_WAIT_S
    # The previous attempt's processes may take seconds to free their memory. All ranks share one
    # clock's decision, that of rank 0.
    while True:
        resources = gather_rank_resources(context, ranks)
        # TorchRec builds its process groups from this number, which must be equal on all ranks.
        os.environ["LOCAL_WORLD_SIZE"] = str(
            math.gcd(*workers_per_node([rank.node for rank in resources]))
        )
        sharding_plan = ranks.run_on_rank0(
            partial(
                _plan_or_wait,
                workload,
                model,
                resources,
                batch_size=batch_size,
                can_wait=time.monotonic() < deadline_s,
            )
        )
        if sharding_plan is not None:
            return sharding_plan
        time.sleep(_MEMORY_POLL_S)


def _plan_or_wait(
    workload: ClickSettings,
    model: torch.nn.Module,
    resources: list[RankResources],
    *,
    batch_size: int,
    can_wait: bool,
) -> ShardingPlan | None:
    """Return the plan, or None if tables would fit once other processes free their memory."""

    def planned(host_bytes: int) -> ShardingPlan:
        device_bytes = [rank.device_bytes for rank in resources if rank.device_bytes is not None]
        site = Site(
            world_size=len(resources),
            device="cuda" if device_bytes else "cpu",
            memory_bytes=min(device_bytes, default=host_bytes),
            host_memory_bytes=host_bytes,
            nodes=[rank.node for rank in resources],
            devices=[rank.device for rank in resources],
        )
        state_bytes = workload.sparse_optimizer.state_bytes
        return plan_sharding(
            model,
            site,
            batch_size=batch_size,
            config=workload.sharding,
            state_bytes=state_bytes,
        )

    try:
        return planned(min(rank.host_bytes for rank in resources))
    except InputError:
        if not can_wait:
            raise
        planned(min(rank.max_host_bytes for rank in resources))  # raises if waiting cannot help
        return None


def set_up(workload: ClickSettings, context: WorkerContext, prepared: Prepared) -> WorkerSetup:
    """Set up the model, optimizer and pipeline for the training loop. Collective."""
    config = context.config
    inputs = prepared.inputs
    preprocessor = prepared.preprocessor.get()
    model_inputs = ModelInputs.from_schema(
        inputs,
        candidates=candidate_rows(preprocessor),
        bin_ends=bin_ends(preprocessor),
        frequencies=frequencies(preprocessor),
    )
    clock = make_step_timer(context.device, measure=config.observe.times)
    learner = (_boosted if workload.model.BOOSTED else _sharded)(
        workload,
        context,
        prepared,
        model_inputs,
        clock,
    )
    columns = counted_columns(
        inputs.sparse,
        preprocessor.sparse,
        expanded=preprocessor.multi_hot is not None,
    )
    counts = EvaluationCounts(
        columns,
        workload.model.output_heads(model_inputs),
        grouped=inputs.group is not None,
        clips=ClipSum(preprocessor),
        training_clips=prepared.training_clips,
        ranking=ranking_of(workload.model, model_inputs),
    )
    return WorkerSetup(
        model=learner.model,
        optimizer=learner.optimizer,
        pipeline=learner.pipeline,
        clock=clock,
        multiply_adds_per_row=learner.multiply_adds_per_row,
        begin_step=learner.begin_step,
        eval_batches={
            name: partial(_eval_batches, context, prepared, counts, name)
            for name in prepared.sets
            if name != "train"
        },
        make_metrics=counts.make_metrics,
        make_samples=counts.shown,
        # A round of boosting has no outputs
        count_correct=count_correct
        if workload.predicts_clicks and not workload.model.BOOSTED
        else None,
        described=learner.described,
    )


@dataclasses.dataclass(frozen=True)
class _Learner:
    """Model, and what trains it."""

    model: torch.nn.Module
    optimizer: Any
    pipeline: Any
    begin_step: Callable[[int, int], None]
    described: dict[str, Any]
    multiply_adds_per_row: float | None = None


def _boosted(
    workload: ClickSettings,
    context: WorkerContext,
    prepared: Prepared,
    inputs: ModelInputs,
    clock: StepTimer,
) -> _Learner:
    """Set up trees, which one worker trains on the CPU."""
    from rayrec.workloads.recsys import boosting

    made = boosting.make_model(workload, context, prepared, inputs, clock)
    return _Learner(*made, begin_step=lambda step, total: None, described={})


def _sharded(
    workload: ClickSettings,
    context: WorkerContext,
    prepared: Prepared,
    model_inputs: ModelInputs,
    clock: StepTimer,
) -> _Learner:
    """Set up a network with sharded tables. Collective."""
    config = context.config
    batch_size = config.effective_batch_size(
        rows=prepared.sets["train"].rows,
        world_size=context.world_size,
    )
    model = build_model(
        workload,
        prepared.num_embeddings,
        inputs=model_inputs,
        precision=config.precision,
        seed=config.seed,
    )
    cost = network_multiply_adds(
        model.head.network,
        model_inputs,
        workload.model,
        num_embeddings=prepared.num_embeddings,
    )
    plan = shared_plan(workload, context, model, batch_size=batch_size)
    state_bytes = workload.sparse_optimizer.state_bytes
    described = {
        "tables": [
            dataclasses.asdict(row) for row in placements(plan, model, state_bytes=state_bytes)
        ],
        "plan": describe(plan, model, state_bytes=state_bytes),
        "batch_size": batch_size,
        "multiply_adds_per_row": cost,
    }
    with memory_errors(described, rank=context.rank, device=context.device):
        sharded, optimizer = _shard(workload, context, model, plan)
    return _Learner(
        sharded,
        optimizer,
        pipeline=make_pipeline(sharded, optimizer, context, clock),
        begin_step=step_start(context, optimizer, workload.schedule),
        described=described,
        multiply_adds_per_row=cost,
    )


def _shard(
    workload: ClickSettings,
    context: WorkerContext,
    model: ClickModel,
    plan: ShardingPlan,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Shard the tables, draw the weights of this rank's shards, and create the optimizer.
    Collective.
    """
    process_group = torch.distributed.group.WORLD
    assert process_group is not None
    for tables in model.table_modules():
        disable_fused_update(tables, workload.sparse_optimizer)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(process_group),
        device=context.device,
        plan=plan,
        sharders=embedding_sharders(
            workload.sharding,
            device="cuda" if context.device.type == "cuda" else "cpu",
        ),
        data_parallel_wrapper=gradient_exchange(context),
    )
    initialize_shards(sharded, seed=context.config.seed, start=workload.table_start)
    optimizer = make_optimizer(
        sharded,
        plan,
        sparse=workload.sparse_optimizer,
        dense=workload.dense_optimizer,
        max_gradient_norm=workload.max_gradient_norm,
    )
    return sharded, optimizer


def make_optimizer(
    sharded: DistributedModelParallel,
    plan: ShardingPlan,
    *,
    sparse: SparseOptimizerConfig,
    dense: DenseOptimizerConfig,
    max_gradient_norm: float | None = None,
) -> CombinedOptimizer:
    """Create the optimizer of all parameters: sharded tables, replicated tables (with the same
    rule), and the network. `max_gradient_norm` is the joint 2-norm limit of all gradients, for
    `sparse` with `has_custom_update`.
    """
    remaining = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    replicated_tables = {name: remaining.pop(name) for name in data_parallel_tables(plan)}
    network = dense.build_keyed(
        {saved_name(name): parameter for name, parameter in remaining.items()}
    )
    if not sparse.has_custom_update:
        replicated = (
            [data_parallel_optimizer(sparse, replicated_tables)] if replicated_tables else []
        )
        return CombinedOptimizer([sharded.fused_optimizer, *replicated, network])
    tables = TableAdam.from_sharded(sparse, sharded)
    replicated_adam = (
        [TableAdam.from_parameters(sparse, replicated_tables)] if replicated_tables else []
    )
    if max_gradient_norm is None:
        return CombinedOptimizer([tables, *replicated_adam, network])
    return JointlyClippedOptimizer(tables, replicated_adam, network, max_norm=max_gradient_norm)


def train_loader(
    context: WorkerContext,
    prepared: Prepared,
    *,
    state: dict[str, Any] | None,
    step: int,
) -> TrainLoader:
    """Return the training batches from a stored position."""
    config = context.config
    workload = config.workload
    assert isinstance(workload, ClickSettings)
    if workload.model.BOOSTED:
        from rayrec.workloads.recsys import boosting

        open_rows = partial(
            _loader,
            context,
            prepared,
            "train",
            batch_size=boosting.BATCH_ROWS,
            epochs=1,
        )
        return boosting.make_loader(context, prepared, open_rows, state=state, step=step)
    rows = prepared.sets["train"].rows
    return _loader(
        context,
        prepared,
        "train",
        batch_size=config.effective_batch_size(rows=rows, world_size=context.world_size),
        state=state,
        epochs=None if config.steps is not None else config.epochs,
        max_steps=None if config.steps is None else max(0, config.steps - step),
    )


def _eval_batches(
    context: WorkerContext,
    prepared: Prepared,
    counts: EvaluationCounts,
    name: str,
    max_rows: int | None = None,
) -> Iterator[Any]:
    batch_size = context.config.eval_batch_size
    loader = _loader(context, prepared, name, batch_size=batch_size, epochs=1, max_rows=max_rows)
    try:
        yield from counts.counted(name, loader)
    finally:
        loader.close()  # stops the batch thread of an interrupted evaluation


def _loader(
    context: WorkerContext,
    prepared: Prepared,
    name: str,
    *,
    batch_size: int,
    epochs: int | None,
    state: dict[str, Any] | None = None,
    max_steps: int | None = None,
    max_rows: int | None = None,
) -> Loader[Position, BlockPlan]:
    workload = context.config.workload
    assert isinstance(workload, ClickSettings)
    learns = name == "train"
    # Trees are read twice, and count their numbers themselves
    counts_clips = learns and not workload.model.BOOSTED
    data = context.config.train_data if learns else context.config.eval_data
    order = prepared.sets[name]
    prefetch_blocks = context.config.train_data.prefetch_blocks
    order = order if max_rows is None else order.limited(max_rows)
    source: TaskSource | MappedSource
    if is_mapped(order):
        source = MappedSource(prepared.preprocessor.get(), data.in_memory, prefetch_blocks)
    else:
        source = TaskSource(
            prepared.preprocessor,
            context.engine,
            prepared.inputs,
            order.max_block_rows,
            prefetch_blocks,
        )
    reader = ClickBatches(
        source,
        prepared.inputs,
        targets=load_targets(
            prepared.teacher,
            prepared.preprocessor.get(),
            logit_offset=workload.logit_offset,
        )
        if prepared.teacher and learns
        else None,
        unpooled=workload.unpooled(prepared.inputs),
        tables=_full_tables(workload, prepared, seed=context.config.seed, learns=learns),
        pinned=_NUM_PINNED_BATCHES if context.device.type == "cuda" else 0,
        watch_dense=prepared.training_clips.add if counts_clips else None,
    )
    sharding = BatchSharding(context.rank, context.world_size, batch_size)
    return Loader(order, reader, sharding, state=state, epochs=epochs, max_steps=max_steps)


def _full_tables(
    workload: ClickSettings,
    prepared: Prepared,
    *,
    seed: int,
    learns: bool,
) -> dict[str, int | SampledRows]:
    """Return the rows that a step reads from each full table, by lookup key."""
    preprocessor = prepared.preprocessor.get()
    inputs = ModelInputs.from_schema(prepared.inputs, candidates=candidate_rows(preprocessor))
    rows_of = dict(zip(inputs.features, prepared.num_embeddings, strict=True))
    sample = workload.model.table_sample() if learns else None
    tables: dict[str, int | SampledRows] = {}
    for name in workload.model.full_tables(inputs):
        rows: int | SampledRows = rows_of[name]
        if sample is not None:
            candidates = inputs.candidates_of(name)
            rows = SampledRows(candidates, rows_of[name], sample, seed)
        tables[table_key(name)] = rows
    return tables


def is_mapped(order: BlockOrder) -> bool:
    """Return whether the rows are local preprocessed files, which workers read themselves."""
    first = order.parts[0].segment if order.parts else None
    return first is not None and first.is_mapped and not storage.is_url(first.path)


class Unwrapped(DataParallelWrapper):
    """Wrapper that only moves the replicated part to the device. A single worker averages no
    gradients.
    """

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        move_wrapped_module(dmp, device)


def gradient_exchange(context: WorkerContext) -> DataParallelWrapper | None:
    """Return the wrapper that averages the replicated part's gradients, or None for TorchRec's
    default. On CPU, sums do not change when a run restarts. By default, DDP rebuilds its buckets
    after the first step in the order of gradients, and the position in a bucket decides how three
    or more add up. It keeps its buckets with `find_unused_parameters`.
    """
    if context.world_size == 1:
        return Unwrapped()
    # bit-identical results are guaranteed only on CPU
    if context.world_size == 2 or context.device.type == "cuda":
        return None
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
    return DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True)


def make_pipeline(
    model: torch.nn.Module,
    optimizer: Any,
    context: WorkerContext,
    clock: StepTimer | None = None,
) -> TrainPipeline:
    """Create the pipeline. With several workers, it exchanges ids and copies the next batch while
    the current one computes. One worker exchanges nothing. TorchRec's exchange would cost it time,
    on a GPU by blocking the host several times per step. The base pipeline also prefetches the next
    batch to a GPU.
    """
    # Without sharded tables there are no ids to exchange, and TorchRec would trace the network in
    # search of some.
    exchanges = context.world_size > 1 and any(
        isinstance(module, ShardedModule) for module in model.modules()
    )
    pipeline: Callable[..., TrainPipeline] = TimedSparseDist if exchanges else TimedBase
    return pipeline(model, optimizer, context.device, clock or StepTimer())


Pipelineable.register(Batch)  # has its methods, but TorchRec checks the class


@final
class TimedBase(TrainPipelineBase):
    """Sequential pipeline with phase timing."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        device: torch.device,
        clock: StepTimer,
    ) -> None:
        time_forward(model, clock)
        timed: Any = TimedOptimizer(optimizer, clock)  # The pipeline uses step and zero_grad alone
        super().__init__(model, timed, device)
        self._clock = clock

    def _wait_for_batch(self, cur_batch: Any) -> None:
        with self._clock.phase("host_to_device"):
            super()._wait_for_batch(cur_batch)

    def _copy_batch_to_gpu(self, cur_batch: Any) -> None:
        with self._clock.phase("host_to_device"):
            super()._copy_batch_to_gpu(cur_batch)

    _backward = timed(TrainPipelineBase._backward, "backward")


@final
class TimedSparseDist(TrainPipelineSparseDist):
    """Pipeline with phase timing that exchanges the ids of the next batch while the current one
    computes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        device: torch.device,
        clock: StepTimer,
    ) -> None:
        time_forward(model, clock)
        timed_optimizer: Any = TimedOptimizer(optimizer, clock)
        super().__init__(model, timed_optimizer, device, execute_all_batches=True)
        self._clock = clock

    def _wait_for_batch(self) -> None:
        with self._clock.phase("host_to_device"):
            super()._wait_for_batch()

    # waiting is a nested phase
    copy_batch_to_gpu = timed(TrainPipelineSparseDist.copy_batch_to_gpu, "host_to_device")
    start_sparse_data_dist = timed(TrainPipelineSparseDist.start_sparse_data_dist, "collectives")
    wait_sparse_data_dist = timed(TrainPipelineSparseDist.wait_sparse_data_dist, "collectives")

    def _backward(self, losses: torch.Tensor) -> None:
        time_gradient_exchange(self._clock, losses)
        with self._clock.phase("backward"):
            super()._backward(losses)
