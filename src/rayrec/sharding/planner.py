"""Sharding configuration and plan: TorchRec's planner with memory checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, MinLen, MultipleOf

from rayrec.bounds import Part, Share
from rayrec.config import Config, InputError
from rayrec.sharding.placement import (
    StateBytes,
    TablePlacement,
    placements,
    readable,
    table_bytes,
    tables_of,
)

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.distributed.planner.types import PlannerError
    from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs, ShardingPlan

ShardingType = Literal[
    "table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise", "data_parallel"
]

_CPU_SHARDING_TYPES = {"table_wise", "column_wise", "table_column_wise", "data_parallel"}
_UNSPLIT = {"table_wise", "data_parallel"}  # On one worker, always in full
_BY_ROWS = {"row_wise", "table_row_wise"}
# Unsupported by TorchRec, or wrong (data_parallel): all others
_SEQUENCE_TYPES = {"table_wise", "column_wise", "row_wise"}
_WITHIN_NODES = {"table_row_wise"}  # TorchRec builds one process group per node, all of equal size
_UNKNOWN_BYTES = 2**50  # More than any tables need


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Config):
    """Sharding of embedding tables over the workers."""

    sharding_types: Annotated[tuple[ShardingType, ...], MinLen(1)] = ("table_wise", "row_wise")
    """Allowed table layouts. Ignores those that a device does not support (row_wise and
    table_row_wise on CPU). With column_wise, row-wise Adagrad has one state per row and part, so
    the plan changes results. With data_parallel, every worker stores the full table and its
    gradient, for small tables.
    """
    min_column_width: Annotated[int, Ge(4), MultipleOf(4)] = 32
    """Minimum width of column_wise table parts, a multiple of 4."""
    reserved_fraction: Share = 0.15
    """Fraction of each worker's memory that is reserved for the dense model, activations and
    batches in flight.
    """
    exchange_precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Dtype for exchanges of embeddings and their gradients. fp16 and bf16 halve the traffic but
    round. No bf16 on CPU.
    """
    uvm_caching: bool = False
    """Whether to store tables that exceed GPU memory in host memory, with a GPU cache of recently
    used rows (fbgemm's UVM caching). Lookups outside the cache are slower. Not for
    sparse_optimizer.kind adam, adamw and sparse_adam.
    """
    uvm_cache_fraction: Part = 0.1
    """Fraction of such a table's rows that fit into its cache."""
    optimizer_floats_per_row: int = 1
    """Deprecated and ignored. The optimizer determines the size of its state."""


def embedding_sharders(
    config: ShardingConfig | None = None, *, device: Literal["cpu", "cuda"] = "cpu"
) -> list[ModuleSharder[Any]]:
    """Return the sharders of embeddings for planner and DistributedModelParallel. Raises InputError
    for an unsupported precision.
    """
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    codecs = _exchange_codecs(config.exchange_precision if config else "fp32", device)
    # The default replaces an id outside its table by 0 and trains on that row.
    fused_params: dict[str, Any] = {"bounds_check_mode": BoundsCheckMode.FATAL}
    if config is not None and config.uvm_caching and device == "cuda":
        # Pinned host memory. CUDA's managed memory may move to the GPU and fill it.
        fused_params["uvm_host_mapped"] = True
    return [
        EmbeddingBagCollectionSharder(fused_params=fused_params, qcomm_codecs_registry=codecs),
        EmbeddingCollectionSharder(fused_params=fused_params, qcomm_codecs_registry=codecs),
    ]


def _exchange_codecs(precision: str, device: str) -> dict[str, QuantizedCommCodecs] | None:
    if precision == "fp32":
        return None
    if (precision, device) == ("bf16", "cpu"):
        raise InputError("ShardingConfig.exchange_precision: must be fp16 or fp32 on CPU, got bf16")
    import torch
    from torchrec.distributed.fbgemm_qcomm_codec import (
        CommType,
        QCommsConfig,
        get_qcomm_codecs_registry,
    )

    kind = CommType(precision)
    return get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=kind, backward_precision=kind), device=torch.device(device)
    )


@dataclass(frozen=True)
class Site:
    """Workers of a sharded model."""

    world_size: int
    device: Literal["cpu", "cuda"]
    memory_bytes: int
    """Available memory of one worker: its share of host memory on "cpu", its device's memory on
    "cuda".
    """
    host_memory_bytes: int | None = None
    """Share of host memory of one worker on "cuda". None if unknown, which disables its check."""
    nodes: Sequence[str] | None = None
    """Node of each rank. None for a single node."""
    devices: Sequence[str] | None = None
    """Device of each rank with index, such as cuda:3. None for TorchRec's default, the rank within
    its node.
    """


# Layouts of a table over workers, and where each works:
#
#   type                 parts                              limits
#   table_wise           one worker has all of it           -
#   column_wise          columns, each on a worker          row-wise Adagrad has a state per part
#   table_column_wise    columns, on workers of one node    not for sequences
#   row_wise             rows, on all workers               GPUs only
#   table_row_wise       rows, on workers of one node       GPUs, equally large nodes
#   data_parallel        a copy on each worker              not for sequences
#
# Memory is checked three times: all tables before planning, which names the fix; each worker by the
# planner; then gradients and host memory, which the planner ignores.
def plan_sharding(
    model: nn.Module,
    site: Site,
    *,
    batch_size: int,
    config: ShardingConfig | None = None,
    state_bytes: StateBytes,
) -> ShardingPlan:
    """Plan the sharding of the tables in `model`, a ClickModel on the meta device, over the workers
    of `site`. One rank must plan for all, because TorchRec breaks ties by workers per node, which
    can differ between ranks. A checkpoint's copy needs as much host memory as the tables and their
    state. On "cpu" it gets half of the usable memory, and on "cuda" the tables are limited to
    `site.host_memory_bytes`. `model` should have its sparse optimizer applied, which determines the
    state size for TorchRec, as `state_bytes` for our checks. `batch_size` is per worker. The fused
    optimizer does not update `data_parallel_tables`. Raises InputError if the tables do not fit, or
    if no allowed sharding type works with these workers.
    """
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import PlannerError

    config = config or ShardingConfig()
    device = site.device
    per_node = workers_per_node(site.nodes or [""] * site.world_size)
    allowed = _allowed_types(config, device=device, per_node=per_node)
    tables = tables_of(model)
    cached = config.uvm_caching and device == "cuda"
    constraints = _constraints(model, config, allowed, device=device, cached=cached)
    limit = _table_memory_limit(config, site)
    host_bytes = site.host_memory_bytes or site.memory_bytes
    total_limit = limit
    if cached:
        host_limit = _host_memory_limit(config, site.host_memory_bytes)
        host_bytes = host_limit.size_bytes
        total_limit = _MemoryLimit(limit.size_bytes + host_bytes, f"{limit}, and {host_limit}")
    sizes = {name: table_bytes(rows, dim, state_bytes) for name, (rows, dim) in tables.items()}
    _check_table_memory(tables, sizes, allowed, world_size=site.world_size, limit=total_limit)
    planner = EmbeddingShardingPlanner(
        topology=_topology(site, per_node, limit.size_bytes, host_bytes),
        batch_size=batch_size,
        # Reserved above, also for host memory
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        constraints=constraints,
        debug=False,
        stats=[],
    )
    try:
        plan = planner.plan(model, embedding_sharders(config, device=device))
    except PlannerError as error:
        raise _no_plan(error, sizes, site, total_limit, batch_size) from error
    rows = placements(plan, model, state_bytes=state_bytes)
    _check_gradient_memory(rows, device=device, limit=limit)
    if cached and site.host_memory_bytes is not None:
        usable_bytes = int(site.host_memory_bytes * (1 - config.reserved_fraction))
        _check_host_memory(rows, host_bytes=usable_bytes)
    if site.devices is not None:
        _set_devices(plan, site.devices)
    return plan


def _no_plan(
    error: PlannerError,
    sizes: dict[str, int],
    site: Site,
    limit: _MemoryLimit,
    batch_size: int,
) -> InputError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    return InputError(
        f"sharding: no plan found for {len(sizes)} tables ({readable(sum(sizes.values()))}) on "
        f"{site.world_size} workers with {limit} each for tables, in addition to batches of "
        f"{batch_size} rows ({reason}). Use more workers or memory, a smaller batch_size or "
        "embedding_dim, or a higher min_count."
    )


def _topology(site: Site, per_node: Sequence[int], limit_bytes: int, host_bytes: int) -> Topology:
    from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig

    on_gpu = {"hbm_cap_bytes": limit_bytes, "ddr_cap_bytes": host_bytes}
    capacity = {"ddr_cap_bytes": limit_bytes} if site.device == "cpu" else on_gpu
    return TopologyFactory.create_topology(
        # With unequal nodes, the greatest common divisor: TorchRec takes one number, and only
        # estimates traffic with it.
        trainer_config=TrainerConfig(
            world_size=site.world_size, local_world_size=math.gcd(*per_node), **capacity
        ),
        kernel_config=KernelConfig(compute_device=site.device),
    )


def _constraints(
    model: nn.Module,
    config: ShardingConfig,
    allowed: Sequence[ShardingType],
    *,
    device: str,
    cached: bool,
) -> dict[str, ParameterConstraints]:
    """Return the layouts and kernels that the planner may choose from, for each table of `model`.
    Raises InputError without one for a table of sequences.
    """
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.types import CacheParams
    from torchrec.modules.embedding_modules import EmbeddingCollection

    unpooled = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
    one_by_one = {table.name for module in unpooled for table in module.embedding_configs()}
    sequence_types = [kind for kind in allowed if kind in _SEQUENCE_TYPES]
    if one_by_one and not sequence_types:
        raise InputError(
            "ShardingConfig.sharding_types: must have a type for sequences "
            f"({', '.join(sorted(one_by_one))}) on {device}, got "
            f"{', '.join(config.sharding_types)}. Add table_wise."
        )
    kernels = [EmbeddingComputeKernel.FUSED.value]
    if cached:
        kernels.append(EmbeddingComputeKernel.FUSED_UVM_CACHING.value)
    if "data_parallel" in allowed:
        # TorchRec offers it only for this sharding type
        kernels.append(EmbeddingComputeKernel.DENSE.value)
    return {
        name: ParameterConstraints(
            sharding_types=list(sequence_types if name in one_by_one else allowed),
            compute_kernels=kernels,
            min_partition=min(config.min_column_width, dim),
            cache_params=CacheParams(load_factor=config.uvm_cache_fraction) if cached else None,
        )
        for name, (_, dim) in tables_of(model).items()
    }


@dataclass(frozen=True)
class _MemoryLimit:
    """Memory of one worker for tables and their optimizer state."""

    size_bytes: int
    reason: str
    """Reason for the difference from free memory."""

    def __str__(self) -> str:
        return f"{readable(self.size_bytes)} ({self.reason})"


# Memory of a worker, without `reserved_fraction` for the dense part, activations and batches:
#
#   cpu                 half for tables, half for the copy of a save
#   cuda                device memory for tables; host memory for the copy limits them too
#   cuda, uvm_caching   a cache on the device; host memory: half tables, half copy
def _table_memory_limit(config: ShardingConfig, site: Site) -> _MemoryLimit:
    reserved = f"{config.reserved_fraction:.0%} kept free"
    usable = int(site.memory_bytes * (1 - config.reserved_fraction))
    if site.device == "cpu":
        return _MemoryLimit(
            usable // 2,
            f"{readable(site.memory_bytes)} are free, {reserved}, half of the rest for checkpoints",
        )
    limit = _MemoryLimit(usable, f"of its device's {readable(site.memory_bytes)}, {reserved}")
    if site.host_memory_bytes is None or config.uvm_caching:
        return limit
    host = int(site.host_memory_bytes * (1 - config.reserved_fraction))
    if host >= usable:
        return limit
    return _MemoryLimit(
        host,
        f"{readable(site.host_memory_bytes)} of host memory, {reserved}, for a checkpoint's copy "
        "of them",
    )


def _host_memory_limit(config: ShardingConfig, host_memory_bytes: int | None) -> _MemoryLimit:
    """Return one worker's host memory for tables with a GPU cache."""
    if host_memory_bytes is None:
        return _MemoryLimit(_UNKNOWN_BYTES, "of host memory, whose size is not known")
    usable = int(host_memory_bytes * (1 - config.reserved_fraction))
    return _MemoryLimit(
        usable // 2,
        f"of host memory, half of {readable(usable)}, whose other half is for a checkpoint's copy",
    )


def _check_host_memory(rows: list[TablePlacement], *, host_bytes: int) -> None:
    """Check host memory for tables in it and a checkpoint's copy of all tables, also on the GPU."""
    for rank in sorted({rank for row in rows for rank in row.bytes_of_rank}):
        cached = sum(row.host_bytes(rank) for row in rows)
        copy = sum(row.bytes_of_rank.get(rank, 0) for row in rows)
        if cached and cached + copy > host_bytes:
            raise InputError(
                f"sharding: worker {rank} needs {readable(cached + copy)} of host memory, "
                f"{readable(cached)} for tables (uvm_caching) and {readable(copy)} for a "
                f"checkpoint's copy of all its tables, but has {readable(host_bytes)}. Use more "
                "workers or memory, a smaller embedding_dim, or a higher min_count."
            )


def _check_gradient_memory(rows: list[TablePlacement], *, device: str, limit: _MemoryLimit) -> None:
    """Check memory for the gradients of data_parallel tables, which TorchRec's planner ignores."""
    for rank in sorted({rank for row in rows for rank in row.bytes_of_rank}):
        table_size = sum(row.bytes_of_rank.get(rank, 0) for row in rows)
        gradients = sum(row.gradient_bytes for row in rows if rank in row.bytes_of_rank)
        copies = 2 if device == "cpu" else 1  # With a checkpoint's copy
        if gradients and copies * table_size + gradients > copies * limit.size_bytes:
            raise InputError(
                f"sharding: data_parallel tables need {readable(table_size)} on worker {rank}, "
                f"{readable(gradients)} for their gradients, but it has {limit} for tables. Remove "
                "data_parallel from ShardingConfig.sharding_types."
            )


def workers_per_node(nodes: Sequence[str]) -> list[int]:
    """Return the worker count of each node in rank order, from the node of each rank. Nodes with
    nonconsecutive ranks count several times, because TorchRec assumes consecutive ranks in a
    node.
    """
    return [len(list(ranks)) for _, ranks in groupby(nodes)]


def _allowed_types(
    config: ShardingConfig, *, device: str, per_node: list[int]
) -> list[ShardingType]:
    allowed = [
        kind for kind in config.sharding_types if device != "cpu" or kind in _CPU_SHARDING_TYPES
    ]
    if not allowed:
        raise InputError(
            "ShardingConfig.sharding_types: no support on CPU for "
            f"{', '.join(config.sharding_types)}. Add table_wise."
        )
    # No worker to share rows with, and sorting ids by part takes time
    if per_node == [1] and "table_wise" in allowed:
        allowed = [kind for kind in allowed if kind not in _BY_ROWS]
    if len(set(per_node)) > 1:
        allowed = [kind for kind in allowed if kind not in _WITHIN_NODES]
        if not allowed:
            raise InputError(
                f"ShardingConfig.sharding_types: {', '.join(config.sharding_types)} needs equally "
                f"many workers on each node, got {', '.join(map(str, per_node))}. Add table_wise "
                "or row_wise."
            )
    return allowed


def _set_devices(plan: ShardingPlan, devices: Sequence[str]) -> None:
    """Set the devices of the ranks in a plan. TorchRec assumes the rank within nodes of equal
    size.
    """
    from rayrec.compat.torch_compat import remote_device

    for module_plan in plan.plan.values():
        for sharding in module_plan.values():
            for shard in (
                sharding.sharding_spec.shards if sharding.sharding_spec is not None else ()
            ):
                rank = shard.placement.rank()
                shard.placement = remote_device(f"rank:{rank}/{devices[rank]}")


def _check_table_memory(
    tables: dict[str, tuple[int, int]],
    sizes: dict[str, int],
    allowed: list[ShardingType],
    *,
    world_size: int,
    limit: _MemoryLimit,
) -> None:
    usable_bytes = limit.size_bytes
    total = sum(sizes.values())
    if set(allowed) == {"data_parallel"} and total > usable_bytes:
        raise InputError(
            f"sharding: {len(tables)} tables need {readable(total)} on each worker, which has "
            f"{limit}. Add table_wise to ShardingConfig.sharding_types."
        )
    if total > usable_bytes * world_size:
        raise InputError(
            f"sharding: {len(tables)} tables need {readable(total)} (weights and optimizer state), "
            f"but {world_size} workers have {limit} each, {readable(usable_bytes * world_size)} in "
            f"all. Use at least {-(-total // max(usable_bytes, 1))} workers, a smaller "
            "embedding_dim, or a higher min_count."
        )
    largest = max(sizes, key=sizes.__getitem__, default=None)
    if largest is not None and set(allowed) <= _UNSPLIT and sizes[largest] > usable_bytes:
        rows, dim = tables[largest]
        raise InputError(
            f"sharding: table {largest} ({rows:,} rows x {dim}) needs {readable(sizes[largest])} "
            f"on one worker, which has {limit}. Use more memory, or add row_wise (GPUs) or "
            "column_wise (changes row-wise Adagrad) to ShardingConfig.sharding_types."
        )
