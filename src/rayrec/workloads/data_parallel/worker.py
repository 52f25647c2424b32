"""Worker of a data-parallel workload: model under DDP or FSDP, optimizer, steps and batches."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final, final

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rayrec.batch import Batch, StepOutput
from rayrec.data.numbered_rows import RowSource
from rayrec.ingest.batches import ArrayBatches
from rayrec.ingest.block_order import BatchSharding
from rayrec.ingest.loader import Loader
from rayrec.ingest.row_order import RowOrder, RowPlan, RowPosition
from rayrec.layers.mlp import uses_bfloat16
from rayrec.layers.operation_count import counted
from rayrec.metrics.means import RowMetrics
from rayrec.optim.config import NamedOptimizer
from rayrec.workloads.base import WorkerContext, WorkerSetup
from rayrec.workloads.data_parallel.model import DataParallelModel, ParallelOptions
from rayrec.workloads.step_timer import StepTimer, make_step_timer, time_gradient_exchange
from rayrec.workloads.worker_setup import memory_errors, step_start


def train_loader(
    workload: DataParallelModel,
    context: WorkerContext,
    prepared: Any,
    *,
    state: dict[str, Any] | None,
    step: int,
) -> Loader[RowPosition, RowPlan]:
    """Return the training batches from a stored position."""
    config = context.config
    data = context.config.train_data
    source = workload.open_set(context, prepared, "train")
    order = RowOrder(
        tuple(source.chunk_rows),
        data.shuffle,
        config.seed,
        data.segments_per_block,
        data_hash=workload.data_hash(prepared),
    )
    return Loader(
        order,
        ArrayBatches(
            source,
            max_prefetch=data.prefetch_blocks,
            engine=context.engine if workload.data_tasks else None,
        ),
        BatchSharding(context.rank, context.world_size, _batch_size(workload, context, prepared)),
        state=state,
        epochs=None if config.steps is not None else config.epochs,
        max_steps=None if config.steps is None else max(0, config.steps - step),
    )


def _batch_size(workload: DataParallelModel, context: WorkerContext, prepared: Any) -> int:
    return context.config.effective_batch_size(
        rows=workload.set_rows(prepared)["train"], world_size=context.world_size
    )


def set_up(workload: DataParallelModel, context: WorkerContext, prepared: Any) -> WorkerSetup:
    """Set up the model, optimizer and pipeline for the training loop."""
    config = context.config
    torch.manual_seed(config.seed)  # Same initial weights on all workers
    with memory_errors({"parallel": workload.parallel}, rank=context.rank, device=context.device):
        model = workload.build(prepared).to(context.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    sets = {
        name: workload.open_set(context, prepared, name)
        for name in workload.set_rows(prepared)
        if name != "train"
    }
    cost = multiply_adds_per_row(workload, model, sets, context) if config.observe.times else None
    wrapped = parallelize(model, workload, context)
    optimizer = workload.optimizer.build_named(dict(model.named_parameters()))
    clock = make_step_timer(context.device, measure=config.observe.times)
    return WorkerSetup(
        model=model,
        optimizer=optimizer,
        pipeline=RowPipeline(workload, model, wrapped, optimizer, context, clock),
        clock=clock,
        multiply_adds_per_row=cost,
        begin_step=step_start(context, optimizer, workload.schedule),
        eval_batches={
            name: partial(eval_batches, source, context, workload.data_tasks)
            for name, source in sets.items()
        },
        make_metrics=lambda: RowMetrics(workload.metrics),
        described={
            "parallel": workload.parallel,
            "num_parameters": num_parameters,
            "multiply_adds_per_row": cost,
            "batch_size": _batch_size(workload, context, prepared),
        },
        make_samples=lambda: workload.samples(
            wrapped, prepared=prepared, sets=sets, device=context.device
        ),
    )


_logger = logging.getLogger(__name__)
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parallelize(
    model: torch.nn.Module, workload: DataParallelModel, context: WorkerContext
) -> torch.nn.Module:
    """Wrap the model with DDP or FSDP, so that gradients are averaged over all workers."""
    options = workload.parallel_options
    if workload.parallel == "fsdp":
        arguments = _fsdp_arguments(options, context)
        for block in _blocks(model):
            fully_shard(block, **arguments)
        fully_shard(model, **arguments)
        return model
    if context.world_size == 1:
        return model
    devices = [context.device] if context.device.type == "cuda" else None
    arguments = {name: getattr(options, name) for name in options.DDP}
    return DistributedDataParallel(model, device_ids=devices, **arguments)


def _fsdp_arguments(options: ParallelOptions, context: WorkerContext) -> dict[str, Any]:
    """Return the arguments of `fully_shard` that differ from torch's defaults."""
    arguments: dict[str, Any] = {
        "mesh": init_device_mesh(context.device.type, (context.world_size,))
    }
    if "bf16" in (options.param_dtype, options.reduce_dtype):
        # FSDP's default for averaging is the data type of the weights.
        param_dtype = _DTYPES[options.param_dtype]
        reduce_dtype = _DTYPES[options.reduce_dtype]
        arguments["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype
        )
    if not options.reshard_after_forward:
        arguments["reshard_after_forward"] = False
    if options.cpu_offload:
        # Clipping adds up norms in host memory, for which NCCL alone has no collectives.
        group = distributed.new_group(backend="cpu:gloo,cuda:nccl")
        arguments |= {
            "mesh": DeviceMesh.from_group(group, "cuda"),
            "offload_policy": CPUOffloadPolicy(),
        }
    return arguments


def _blocks(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the repeated blocks of a model, the units that FSDP gathers and frees."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            for block in module:
                # Skip modules without parameters, and bare layers.
                if any(True for _ in block.parameters()) and any(True for _ in block.children()):
                    yield block


def eval_batches(
    source: RowSource, context: WorkerContext, data_tasks: bool = False, max_rows: int | None = None
) -> Iterator[Batch]:
    """Yield evaluation batches: each of up to `max_rows` rows once over all workers, equally many
    batches per worker.
    """
    config = context.config
    chunk_rows = tuple(source.chunk_rows)
    window = config.eval_data.segments_per_block
    order = RowOrder(chunk_rows, "none", 0, window, small_steps=True, max_rows=max_rows)
    reader = ArrayBatches(source, engine=context.engine if data_tasks else None)
    sharding = BatchSharding(context.rank, context.world_size, config.eval_batch_size)
    try:
        yield from Loader(order, reader, sharding, epochs=1)
    finally:
        reader.stop()  # the next evaluation uses the source again


# A step on a GPU, on two streams:
#
#   copy stream       batch n + 1: pinned memory -> device, while batch n computes
#   compute stream    waits for the copy of its batch; then forward, backward and optimizer
#
# `record_stream` keeps the allocator from reusing a batch's memory before the compute stream is
# done. With `accumulate`, only the last part exchanges gradients.
@final
class RowPipeline:
    """Pipeline of training steps. On a GPU, the next batch is copied while the current one
    computes.
    """

    def __init__(
        self,
        workload: DataParallelModel,
        model: torch.nn.Module,
        wrapped: torch.nn.Module,
        optimizer: NamedOptimizer,
        context: WorkerContext,
        clock: StepTimer | None = None,
    ) -> None:
        self.wrapped = wrapped
        self.device = context.device
        self.clock = clock or StepTimer()
        self._workload = workload
        self._model = model
        self._optimizer = optimizer
        self._world_size = context.world_size
        self._bf16 = uses_bfloat16(context.config.precision, context.device)
        if context.config.precision == "bf16" and not self._bf16 and context.rank == 0:
            _logger.warning(
                "precision: bf16 is computed in fp32, because this CPU has no instructions for it"
            )
        self._stream = torch.cuda.Stream(context.device) if context.device.type == "cuda" else None
        self._next: Batch | None = None

    def progress(self, batches: Iterator[Batch]) -> StepOutput:
        """Train on the next batch, or measure it in eval mode. Raises StopIteration at the end."""
        batch = self._next if self._next is not None else self._fetch(batches)
        self._next = None
        if self._stream is not None:
            with self.clock.phase("host_to_device"):
                torch.cuda.current_stream(self.device).wait_stream(self._stream)
            batch.record_stream(torch.cuda.current_stream(self.device))
        output = self._train(batch) if self._model.training else self._measure(batch)
        if self._stream is not None:
            with contextlib.suppress(StopIteration):
                self._next = self._fetch(batches)
        return output

    def reset(self) -> None:
        """Discard prefetched batches and broadcast buffers (batch norm statistics) from worker 0,
        as DDP does.
        """
        self._next = None
        if self._world_size > 1:
            for buffer in self._model.buffers():
                distributed.broadcast(buffer, src=0)

    def _fetch(self, batches: Iterator[Batch]) -> Batch:
        batch = next(batches)
        if self._stream is None:
            return batch
        with self.clock.phase("host_to_device"), torch.cuda.stream(self._stream):
            return batch.pin_memory().to(self.device, non_blocking=True)

    def _train(self, batch: Batch) -> StepOutput:
        self._optimizer.zero_grad()
        # On the device, so that adding the parts' losses does not wait for it.
        total = torch.zeros((), device=self.device)
        parts = batch.parts(self._workload.accumulate)
        for number, part in enumerate(parts):
            with self.exchange(number == len(parts) - 1):
                loss = self.loss(part)
                with self.clock.phase("backward"):
                    loss.backward()
            total += loss.detach()
        with self.clock.phase("optimizer"):
            if self._workload.optimizer.max_gradient_norm is not None:
                torch.nn.utils.clip_grad_norm_(
                    self.wrapped.parameters(), self._workload.optimizer.max_gradient_norm
                )
            self._optimizer.step()
        return StepOutput(total)

    def loss(self, part: Batch) -> torch.Tensor:
        """Compute the loss of a batch part on the device. The losses of all parts add up to the
        batch loss.
        """
        with self.clock.phase("forward"):
            with self._autocast():
                losses = self._workload.measure(self.wrapped, self._workload.augment(part.tensors))[
                    "loss"
                ]
            # The factor is 1 if all workers have equally many rows in one part.
            loss = losses.float().mean() * (len(part) * part.loss_weight)
        if self._world_size > 1:
            time_gradient_exchange(self.clock, loss)
        return loss

    def exchange(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context that enables or disables averaging gradients over the workers. FSDP
        keeps the last setting.
        """
        if isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_gradient_sync(enabled)
        if isinstance(self.wrapped, DistributedDataParallel) and not enabled:
            return self.wrapped.no_sync()
        return contextlib.nullcontext()

    @torch.no_grad()
    def _measure(self, batch: Batch) -> StepOutput:
        with self._autocast():
            measures = self._workload.measure(self.wrapped, batch.tensors)
        if not batch.loss_weight:
            measures = {name: values[:0] for name, values in measures.items()}
        return StepOutput(measures["loss"].sum() * batch.loss_weight, measures=measures)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16)


@torch.no_grad()
def multiply_adds_per_row(
    workload: DataParallelModel,
    model: torch.nn.Module,
    sets: Mapping[str, RowSource],
    context: WorkerContext,
) -> float | None:
    """Return multiply-adds of one row's forward pass in matrix products, convolutions and
    attention, as counted by torch. Returns None if no evaluation set has rows, or, with a warning,
    if torch cannot count.
    """
    source = next((source for source in sets.values() if len(source)), None)
    if source is None:
        return None
    row = Batch(
        {
            name: torch.from_numpy(array)
            for name, array in source.read(np.zeros(1, np.int64)).items()
        },
        1.0,
    ).to(context.device)
    return counted(model, lambda: workload.measure(model, row.tensors))
