"""Which worker holds which embedding table: TorchRec's planner behind settings, a refusal and a table one can read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, MinLen, MultipleOf

from rayrec.bounds import Part, Share
from rayrec.config import Config, InputError
from rayrec.sharding.placement import StateBytes, TablePlacement, placements, readable, table_bytes, tables_of

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs, ShardingPlan

ShardingType = Literal["table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise", "data_parallel"]

_CPU_SHARDING_TYPES = {"table_wise", "column_wise", "table_column_wise", "data_parallel"}
_WHOLE = {"table_wise", "data_parallel"}  # a worker that holds any of a table holds all of it
_BY_ROWS = {"row_wise", "table_row_wise"}
_OF_SEQUENCES = {"table_wise", "column_wise", "row_wise"}  # the others TorchRec lacks, or gets wrong (data_parallel)
_WITHIN_NODES = {"table_row_wise"}  # TorchRec builds process groups of one node each, all of the same size
_UNKNOWN_BYTES = 2**50  # more than any tables take


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Config):
    """How embedding tables are spread over the workers."""

    sharding_types: Annotated[tuple[ShardingType, ...], MinLen(1)] = ("table_wise", "row_wise")
    """Ways a table may be laid out; those a device cannot do are left out (CPU has no row_wise or table_row_wise).
    With column_wise, row-wise Adagrad keeps one state per row and part: the plan then changes what is learnt.
    With data_parallel, every worker holds the whole table, and once more as its gradient: for small tables."""
    min_column_width: Annotated[int, Ge(4), MultipleOf(4)] = 32
    """Narrowest part of a table under column_wise sharding; a multiple of 4."""
    reserved_fraction: Share = 0.15
    """Part of each worker's memory kept free for the dense model, activations and batches in flight."""
    exchange_precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Type in which workers exchange embeddings and their gradients; fp16 and bf16 halve the traffic and round. CPU: no bf16."""
    uvm_caching: bool = False
    """GPUs: tables that the GPUs have no room for are stored in host memory, and a GPU keeps a cache of the rows used last
    (fbgemm's UVM caching). Lookups outside the cache are slower. Not for sparse_optimizer.kind adam, adamw and sparse_adam."""
    uvm_cache_fraction: Part = 0.1
    """Share of the rows of such a table that its cache has room for."""
    optimizer_floats_per_row: int = 1
    """Deprecated and ignored: the optimizer knows the size of its state."""


def embedding_sharders(
    config: ShardingConfig | None = None, *, device: Literal["cpu", "cuda"] = "cpu"
) -> list[ModuleSharder[Any]]:
    """The sharders of our embedding modules, for the planner and for DistributedModelParallel alike. Raises InputError for a
    precision of the exchange that the device does not have."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    codecs = _exchange_codecs(config.exchange_precision if config else "fp32", device)
    # The default sets an id outside its table to 0 and trains on that row.
    fused_params: dict[str, Any] = {"bounds_check_mode": BoundsCheckMode.FATAL}
    if config is not None and config.uvm_caching and device == "cuda":
        fused_params["uvm_host_mapped"] = True  # pinned host memory; CUDA's managed memory may move to the GPU and fill it
    return [
        EmbeddingBagCollectionSharder(fused_params=fused_params, qcomm_codecs_registry=codecs),
        EmbeddingCollectionSharder(fused_params=fused_params, qcomm_codecs_registry=codecs),
    ]


def _exchange_codecs(precision: str, device: str) -> dict[str, QuantizedCommCodecs] | None:
    if precision == "fp32":
        return None
    if (precision, device) == ("bf16", "cpu"):
        raise InputError("ShardingConfig.exchange_precision: gloo exchanges no bf16 on CPU; choose fp16 or fp32")
    import torch
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

    kind = CommType(precision)
    return get_qcomm_codecs_registry(QCommsConfig(forward_precision=kind, backward_precision=kind), device=torch.device(device))


@dataclass(frozen=True)
class Site:
    """The workers that tables are spread over."""

    world_size: int
    device: Literal["cpu", "cuda"]
    memory_bytes: int
    """That one worker may fill: its share of host memory on "cpu", its device's memory on "cuda"."""
    host_memory_bytes: int | None = None
    """On "cuda" the worker's share of the host's memory; None: not known, and not checked."""
    nodes: Sequence[str] | None = None
    """The node of each rank; None: one node has them all."""
    devices: Sequence[str] | None = None
    """The device of each rank with its index, such as cuda:3; None: TorchRec's guess, the rank's number within its node."""


def plan_sharding(
    model: nn.Module, site: Site, *, batch_size: int, config: ShardingConfig | None = None, state_bytes: StateBytes
) -> ShardingPlan:
    """Spread the tables of `model` (a ClickModel, its tables on the meta device) over the workers of `site`.

    One rank makes the plan and shares it with the others: TorchRec breaks ties by the number of workers per node, which can
    differ between ranks. A checkpoint's copy takes as much host memory as the tables and their state: on "cpu" half of what is
    usable is for it, on "cuda" tables fill no more than `site.host_memory_bytes`. `batch_size` is per worker.
    `model` should have its sparse optimizer applied, from which TorchRec computes the state's size; `state_bytes` is the same
    for ours. Tables are data_parallel only where the settings allow it; `data_parallel_tables` names those, which the fused
    optimizer leaves out. Raises InputError when the tables do not fit, or when no allowed sharding type runs on these workers.
    """
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import KernelConfig, PlannerError, TopologyFactory, TrainerConfig
    from torchrec.distributed.types import CacheParams

    config, device = config or ShardingConfig(), site.device
    per_node = workers_per_node(site.nodes or [""] * site.world_size)
    allowed = _allowed_types(config, device=device, per_node=per_node)
    tables, one_by_one = tables_of(model), _unpooled_tables(model)
    if one_by_one and not _OF_SEQUENCES & set(allowed):
        raise InputError(
            f"ShardingConfig.sharding_types: {', '.join(config.sharding_types)} is not for tables of sequences "
            f"({', '.join(sorted(one_by_one))}) on {device}; add table_wise"
        )
    cached = config.uvm_caching and device == "cuda"
    room = _room_for_tables(config, site)
    host_room = _host_room(config, site.host_memory_bytes) if cached else None
    sizes = {name: table_bytes(rows, dim, state_bytes) for name, (rows, dim) in tables.items()}
    most = room if host_room is None else room.together_with(host_room)
    _refuse_what_cannot_fit(tables, sizes, allowed, world_size=site.world_size, room=most)
    kernels = [EmbeddingComputeKernel.FUSED.value]
    if cached:
        kernels.append(EmbeddingComputeKernel.FUSED_UVM_CACHING.value)
    if "data_parallel" in allowed:
        kernels.append(EmbeddingComputeKernel.DENSE.value)  # which TorchRec offers for no other sharding type
    constraints = {
        name: ParameterConstraints(
            sharding_types=[kind for kind in allowed if name not in one_by_one or kind in _OF_SEQUENCES],
            compute_kernels=kernels,
            min_partition=min(config.min_column_width, dim),
            cache_params=CacheParams(load_factor=config.uvm_cache_fraction) if cached else None,
        )
        for name, (_, dim) in tables.items()
    }
    if device == "cpu":
        capacity = {"ddr_cap_bytes": room.size_bytes}
    else:
        host_bytes = site.host_memory_bytes or site.memory_bytes
        capacity = {"hbm_cap_bytes": room.size_bytes, "ddr_cap_bytes": host_room.size_bytes if host_room else host_bytes}
    planner = EmbeddingShardingPlanner(
        topology=TopologyFactory.create_topology(
            # With unequal nodes the largest number that divides all: TorchRec takes one number, and only estimates traffic by it.
            trainer_config=TrainerConfig(world_size=site.world_size, local_world_size=math.gcd(*per_node), **capacity),
            kernel_config=KernelConfig(compute_device=device),
        ),
        batch_size=batch_size,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),  # reserved above, for host memory too
        constraints=constraints,
        debug=False,
        stats=[],
    )
    try:
        made = planner.plan(model, embedding_sharders(config, device=device))
    except PlannerError as error:
        need = readable(sum(sizes.values()))
        raise InputError(
            f"sharding: no plan puts {len(tables)} tables ({need}) on {site.world_size} workers with "
            f"{most} each for tables, next to the buffers of batches of {batch_size} rows; use more "
            "workers, more memory, a smaller batch_size or embedding_dim, or a higher min_count "
            f"(planner: {_first_line(error)})"
        ) from error
    rows = placements(made, model, state_bytes=state_bytes)
    _refuse_overfull(rows, device=device, room=room)
    if cached and site.host_memory_bytes is not None:
        _refuse_overfull_host(rows, host_bytes=int(site.host_memory_bytes * (1 - config.reserved_fraction)))
    if site.devices is not None:
        _place_on(made, site.devices)
    return made


@dataclass(frozen=True)
class _Room:
    """Memory of one worker for tables and their optimizer state."""

    size_bytes: int
    reason: str
    """Why it is not all memory that is free."""

    def __str__(self) -> str:
        return f"{readable(self.size_bytes)} ({self.reason})"

    def together_with(self, other: _Room) -> _Room:
        return _Room(self.size_bytes + other.size_bytes, f"{self}, and {other}")


def _room_for_tables(config: ShardingConfig, site: Site) -> _Room:
    kept = f"{config.reserved_fraction:.0%} kept free"
    usable = int(site.memory_bytes * (1 - config.reserved_fraction))
    if site.device == "cpu":
        return _Room(usable // 2, f"{readable(site.memory_bytes)} are free, {kept}, half of the rest for a checkpoint's copy")
    room = _Room(usable, f"of its device's {readable(site.memory_bytes)}, {kept}")
    if site.host_memory_bytes is None or config.uvm_caching:
        return room
    host = int(site.host_memory_bytes * (1 - config.reserved_fraction))
    if host >= usable:
        return room
    return _Room(host, f"{readable(site.host_memory_bytes)} of host memory, {kept}, must hold a checkpoint's copy of them")


def _host_room(config: ShardingConfig, host_memory_bytes: int | None) -> _Room:
    """Host memory of one worker for tables of which its GPU has a cache."""
    if host_memory_bytes is None:
        return _Room(_UNKNOWN_BYTES, "of host memory, whose size is not known")
    usable = int(host_memory_bytes * (1 - config.reserved_fraction))
    return _Room(usable // 2, f"of host memory, half of {readable(usable)}, whose other half is for a checkpoint's copy")


def _refuse_overfull_host(rows: list[TablePlacement], *, host_bytes: int) -> None:
    """Tables in host memory and a checkpoint's copy of all tables, those of the GPU included."""
    for rank in sorted({rank for row in rows for rank in row.bytes_of_rank}):
        cached = sum(row.host_bytes(rank) for row in rows)
        copy = sum(row.bytes_of_rank.get(rank, 0) for row in rows)
        if cached and cached + copy > host_bytes:
            raise InputError(
                f"sharding: worker {rank} needs {readable(cached + copy)} of host memory, {readable(cached)} for tables "
                f"(uvm_caching) and {readable(copy)} for a checkpoint's copy of all its tables, and has "
                f"{readable(host_bytes)}; use more workers, more memory, a smaller embedding_dim, or a higher min_count"
            )


def _refuse_overfull(rows: list[TablePlacement], *, device: str, room: _Room) -> None:
    """Gradients of data_parallel tables, which TorchRec's planner leaves out."""
    for rank in sorted({rank for row in rows for rank in row.bytes_of_rank}):
        held = sum(row.bytes_of_rank.get(rank, 0) for row in rows)
        gradients = sum(row.gradient_bytes for row in rows if rank in row.bytes_of_rank)
        room_bytes = room.size_bytes * (2 if device == "cpu" else 1)
        need = held * (2 if device == "cpu" else 1) + gradients
        if gradients and need > room_bytes:
            raise InputError(
                f"sharding: data_parallel tables need {readable(held)} on worker {rank}, {readable(gradients)} for their "
                f"gradients, and it has {room} for tables; allow table_wise without data_parallel in "
                "ShardingConfig.sharding_types"
            )


def workers_per_node(nodes: Sequence[str]) -> list[int]:
    """Workers of each node, in the order of their ranks, given the node of each rank. A node whose ranks do not follow one
    another counts several times: what TorchRec does within a node assumes consecutive ranks."""
    return [len(list(ranks)) for _, ranks in groupby(nodes)]


def _allowed_types(config: ShardingConfig, *, device: str, per_node: list[int]) -> list[ShardingType]:
    allowed = [kind for kind in config.sharding_types if device != "cpu" or kind in _CPU_SHARDING_TYPES]
    if not allowed:
        raise InputError(f"ShardingConfig.sharding_types: none of {', '.join(config.sharding_types)} runs on cpu; add table_wise")
    if per_node == [1] and "table_wise" in allowed:  # nobody to split rows with, and what sorts ids by part takes time
        allowed = [kind for kind in allowed if kind not in _BY_ROWS]
    if len(set(per_node)) > 1:
        allowed = [kind for kind in allowed if kind not in _WITHIN_NODES]
        if not allowed:
            raise InputError(
                f"ShardingConfig.sharding_types: {', '.join(config.sharding_types)} needs the same number of workers on every "
                f"node, and the nodes have {', '.join(map(str, per_node))}; add table_wise or row_wise"
            )
    return allowed


def _place_on(plan: ShardingPlan, devices: Sequence[str]) -> None:
    """Names the ranks' own devices in a plan; TorchRec names them by the rank's number within a node of equal size."""
    from rayrec.compat.torch_compat import remote_device

    for module_plan in plan.plan.values():
        for sharding in module_plan.values():
            for shard in sharding.sharding_spec.shards if sharding.sharding_spec is not None else ():
                rank = shard.placement.rank()
                shard.placement = remote_device(f"rank:{rank}/{devices[rank]}")


def _unpooled_tables(model: nn.Module) -> set[str]:
    """The tables whose embeddings are given one by one."""
    from torchrec.modules.embedding_modules import EmbeddingCollection

    modules = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
    return {table.name for module in modules for table in module.embedding_configs()}


def _refuse_what_cannot_fit(
    tables: dict[str, tuple[int, int]], sizes: dict[str, int], allowed: list[ShardingType], *, world_size: int, room: _Room
) -> None:
    usable_bytes = room.size_bytes
    total = sum(sizes.values())
    if set(allowed) == {"data_parallel"} and total > usable_bytes:
        raise InputError(
            f"sharding: {len(tables)} tables need {readable(total)} on each worker, which has {room}; "
            "allow table_wise beside data_parallel in ShardingConfig.sharding_types"
        )
    if total > usable_bytes * world_size:
        raise InputError(
            f"sharding: {len(tables)} tables need {readable(total)} (weights and optimizer state), but {world_size} "
            f"workers have {room} each, {readable(usable_bytes * world_size)} in all; "
            f"use at least {-(-total // max(usable_bytes, 1))} workers, or "
            "a smaller embedding_dim, or a higher min_count"
        )
    largest = max(sizes, key=sizes.__getitem__, default=None)
    if largest is not None and set(allowed) <= _WHOLE and sizes[largest] > usable_bytes:
        rows, dim = tables[largest]
        raise InputError(
            f"sharding: table {largest} ({rows:,} rows x {dim}) needs {readable(sizes[largest])} on one worker, "
            f"which has {room}; give workers more memory, or allow row_wise (GPUs) or column_wise "
            "(changes row-wise Adagrad) in ShardingConfig.sharding_types"
        )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
