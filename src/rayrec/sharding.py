"""Which worker holds which embedding table: TorchRec's planner behind settings, a refusal and a table one can read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from rayrec.config import Config, InputError

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.types import ModuleSharder, ShardingPlan

ShardingType = Literal["table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise", "data_parallel"]

_CPU_SHARDING_TYPES = {"table_wise", "column_wise", "table_column_wise", "data_parallel"}
_WHOLE = {"table_wise", "data_parallel"}  # a worker that holds any of a table holds all of it
_WITHIN_NODES = {"table_row_wise"}  # TorchRec builds process groups of one node each, all of the same size
_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Config):
    """How embedding tables are spread over the workers."""

    sharding_types: tuple[ShardingType, ...] = ("table_wise", "row_wise")
    """Ways a table may be laid out; those a device cannot do are left out (CPU has no row_wise or table_row_wise).
    With column_wise, row-wise Adagrad keeps one state per row and part: the plan then changes what is learnt.
    With data_parallel, every worker holds the whole table, and once more as its gradient: for small tables."""
    min_column_width: int = 32
    """Narrowest part of a table under column_wise sharding; a multiple of 4."""
    reserved_fraction: float = 0.15
    """Part of each worker's memory kept free for the dense model, activations and batches in flight."""
    optimizer_floats_per_row: int = 1
    """Optimizer state per table row, in float32 values: 1 for row-wise Adagrad, 0 for SGD, 2 * dim for Adam."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sharding_types:
            raise InputError("ShardingConfig.sharding_types: empty; give at least one, such as table_wise")
        if not 0 <= self.reserved_fraction < 1:
            raise InputError(f"ShardingConfig.reserved_fraction: {self.reserved_fraction} must be in [0, 1)")
        if self.min_column_width < 4 or self.min_column_width % 4:
            raise InputError(f"ShardingConfig.min_column_width: {self.min_column_width} must be a multiple of 4")


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Where one table lies."""

    table: str
    num_embeddings: int
    embedding_dim: int
    sharding_type: str
    bytes_of_rank: dict[int, int]
    """Weights and optimizer state, by the ranks that hold a part of the table."""

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_of_rank.values())


def embedding_sharders() -> list[ModuleSharder[Any]]:
    """The sharders of our embedding modules, for the planner and for DistributedModelParallel alike."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    # The default sets an id outside its table to 0 and trains on that row.
    return [EmbeddingBagCollectionSharder(fused_params={"bounds_check_mode": BoundsCheckMode.FATAL})]


def plan_sharding(
    model: nn.Module,
    *,
    world_size: int,
    device: Literal["cpu", "cuda"],
    batch_size: int,
    memory_bytes: int,
    host_memory_bytes: int | None = None,
    nodes: Sequence[str] | None = None,
    devices: Sequence[str] | None = None,
    config: ShardingConfig | None = None,
) -> ShardingPlan:
    """Spread the tables of `model` (its EmbeddingBagCollections, as on the meta device) over `world_size` workers.

    One rank makes the plan and shares it with the others: TorchRec breaks ties by the number of workers per node, which can
    differ between ranks. `nodes` names the node of each rank (None: one node has them all), and `devices` the device of each
    rank with its index, such as cuda:3 (None: TorchRec's guess, the rank's number within its node). `memory_bytes` is what one
    worker may fill: its share of host memory on "cpu", its device's memory on "cuda" (`host_memory_bytes` is then its share of
    the host's, used for nothing but the planner's book-keeping). `batch_size` is per worker. Tables are data_parallel
    only where the settings allow it; `replicated_tables` names those, which the fused optimizer leaves out.
    Raises InputError when the tables do not fit, or when no allowed sharding type runs on these workers.
    """
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import KernelConfig, PlannerError, TopologyFactory, TrainerConfig

    config = config or ShardingConfig()
    per_node = workers_per_node(nodes or [""] * world_size)
    allowed = _allowed_types(config, device=device, per_node=per_node)
    tables = _tables(model)
    usable_bytes = int(memory_bytes * (1 - config.reserved_fraction))
    _refuse_what_cannot_fit(tables, allowed, config=config, world_size=world_size, usable_bytes=usable_bytes)
    kernels = [EmbeddingComputeKernel.FUSED.value]
    if "data_parallel" in allowed:
        kernels.append(EmbeddingComputeKernel.DENSE.value)  # which TorchRec offers for no other sharding type
    constraints = {
        name: ParameterConstraints(
            sharding_types=list(allowed),
            compute_kernels=kernels,
            min_partition=min(config.min_column_width, dim),
        )
        for name, (_, dim) in tables.items()
    }
    if device == "cpu":
        capacity = {"ddr_cap_bytes": usable_bytes}
    else:
        capacity = {"hbm_cap_bytes": usable_bytes, "ddr_cap_bytes": host_memory_bytes or memory_bytes}
    planner = EmbeddingShardingPlanner(
        topology=TopologyFactory.create_topology(
            # With unequal nodes the largest number that divides all: TorchRec takes one number, and only estimates traffic by it.
            trainer_config=TrainerConfig(world_size=world_size, local_world_size=math.gcd(*per_node), **capacity),
            kernel_config=KernelConfig(compute_device=device),
        ),
        batch_size=batch_size,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),  # reserved above, for host memory too
        constraints=constraints,
        debug=False,
        stats=[],
    )
    try:
        made = planner.plan(model, embedding_sharders())
    except PlannerError as error:
        need = _readable(sum(_table_bytes(rows, dim, config) for rows, dim in tables.values()))
        raise InputError(
            f"sharding: no plan puts {len(tables)} tables ({need}) on {world_size} workers with "
            f"{_readable(usable_bytes)} each for tables, beside the buffers of batches of {batch_size} rows; use more "
            "workers, more memory, a smaller batch_size or embedding_dim, or a higher min_count "
            f"(planner: {_first_line(error)})"
        ) from error
    if devices is not None:
        _place_on(made, devices)
    return made


def workers_per_node(nodes: Sequence[str]) -> list[int]:
    """Workers of each node, in the order of their ranks, given the node of each rank. A node whose ranks do not follow one
    another counts several times: what TorchRec does within a node assumes consecutive ranks."""
    return [len(list(ranks)) for _, ranks in groupby(nodes)]


def _allowed_types(config: ShardingConfig, *, device: str, per_node: list[int]) -> list[ShardingType]:
    allowed = [kind for kind in config.sharding_types if device != "cpu" or kind in _CPU_SHARDING_TYPES]
    if not allowed:
        raise InputError(
            f"ShardingConfig.sharding_types: none of {', '.join(config.sharding_types)} runs on cpu; add table_wise"
        )
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
    from torch.distributed.remote_device import _remote_device

    for module_plan in plan.plan.values():
        for sharding in module_plan.values():
            for shard in sharding.sharding_spec.shards if sharding.sharding_spec is not None else ():
                rank = shard.placement.rank()
                shard.placement = _remote_device(f"rank:{rank}/{devices[rank]}")


def placements(plan: ShardingPlan, model: nn.Module, *, config: ShardingConfig | None = None) -> list[TablePlacement]:
    """Every table of `plan` in the order of `model` (before it is sharded), with the bytes it takes on each rank."""
    config = config or ShardingConfig()
    tables = _tables(model)
    found = []
    for module_plan in plan.plan.values():
        for table, sharding in module_plan.items():
            rows, dim = tables[table]
            bytes_of_rank: dict[int, int] = {}
            if sharding.sharding_type == "data_parallel":  # the plan says no more of it
                bytes_of_rank = dict.fromkeys(sharding.ranks, _table_bytes(rows, dim, config))
            else:
                for shard in sharding.sharding_spec.shards:
                    rank, (held_rows, held_columns) = shard.placement.rank(), shard.shard_sizes
                    bytes_of_rank[rank] = bytes_of_rank.get(rank, 0) + _table_bytes(held_rows, held_columns, config)
            found.append(
                TablePlacement(
                    table=table,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    sharding_type=sharding.sharding_type,
                    bytes_of_rank=bytes_of_rank,
                )
            )
    return sorted(found, key=lambda placement: _natural(placement.table))


def replicated_tables(plan: ShardingPlan) -> list[str]:
    """The data_parallel tables' parameters, as the sharded model names them."""
    return [
        f"{module}.embedding_bags.{table}.weight"
        for module, module_plan in plan.plan.items()
        for table, sharding in module_plan.items()
        if sharding.sharding_type == "data_parallel"
    ]


def describe(plan: ShardingPlan, model: nn.Module, *, config: ShardingConfig | None = None) -> str:
    """The plan as text: one line a table (rows, dim, how, where, bytes), then what each worker holds in all."""
    rows = placements(plan, model, config=config)
    head = ("table", "rows", "dim", "sharding", "ranks", "weights + optimizer")
    lines = [
        (
            row.table,
            f"{row.num_embeddings:,}",
            str(row.embedding_dim),
            row.sharding_type,
            _ranges(sorted(row.bytes_of_rank)),
            _readable(row.total_bytes),
        )
        for row in rows
    ]
    totals: dict[int, tuple[int, int]] = {}
    for row in rows:
        for rank, size in row.bytes_of_rank.items():
            count, total = totals.get(rank, (0, 0))
            totals[rank] = count + 1, total + size
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    left = {0, 3, 4}

    def layout(line: tuple[str, ...]) -> str:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    workers = [
        f"worker {rank}: {count} table{'s' if count > 1 else ''}, {_readable(total)}"
        for rank, (count, total) in sorted(totals.items())
    ]
    return "\n".join([layout(head), *map(layout, lines), *workers])


def _tables(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(rows, dim) of every table in the model, by name."""
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    return {
        table.name: (table.num_embeddings, table.embedding_dim)
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection)
        for table in module.embedding_bag_configs()
    }


def _refuse_what_cannot_fit(
    tables: dict[str, tuple[int, int]],
    allowed: list[ShardingType],
    *,
    config: ShardingConfig,
    world_size: int,
    usable_bytes: int,
) -> None:
    sizes = {name: _table_bytes(rows, dim, config) for name, (rows, dim) in tables.items()}
    total = sum(sizes.values())
    if set(allowed) == {"data_parallel"} and total > usable_bytes:
        raise InputError(
            f"sharding: {len(tables)} tables need {_readable(total)} on each worker, which has {_readable(usable_bytes)}; "
            "allow table_wise beside data_parallel in ShardingConfig.sharding_types"
        )
    if total > usable_bytes * world_size:
        raise InputError(
            f"sharding: {len(tables)} tables need {_readable(total)} (weights and optimizer state), but {world_size} "
            f"workers have {_readable(usable_bytes)} each, {_readable(usable_bytes * world_size)} in all, after "
            f"{config.reserved_fraction:.0%} kept free; use at least {-(-total // max(usable_bytes, 1))} workers, or "
            "a smaller embedding_dim, or a higher min_count"
        )
    largest = max(sizes, key=sizes.__getitem__, default=None)
    if largest is not None and set(allowed) <= _WHOLE and sizes[largest] > usable_bytes:
        rows, dim = tables[largest]
        raise InputError(
            f"sharding: table {largest} ({rows:,} rows x {dim}) needs {_readable(sizes[largest])} on one worker, "
            f"which has {_readable(usable_bytes)}; give workers more memory, or allow row_wise (GPUs) or column_wise "
            "(changes row-wise Adagrad) in ShardingConfig.sharding_types"
        )


def _table_bytes(rows: int, columns: int, config: ShardingConfig) -> int:
    return rows * (columns + config.optimizer_floats_per_row) * _FLOAT_BYTES


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _natural(name: str) -> tuple[Any, ...]:
    """cat_2 before cat_10."""
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if number.isdigit() else (name, -1)


def _ranges(ranks: list[int]) -> str:
    """0-3,6: consecutive ranks drawn together."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _readable(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
