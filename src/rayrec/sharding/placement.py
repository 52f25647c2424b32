"""Placement and memory of embedding table parts by worker, as `rayrec plan` reports them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rayrec.humanize import aligned, size_text
from rayrec.optim.config import FLOAT_BYTES

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.types import ShardingPlan


StateBytes = Callable[[int, int], int]
"""Function from (rows, columns) of a table, or a part, to its optimizer state size in bytes."""


_CACHED_KERNEL = "fused_uvm_caching"


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Placement of one table."""

    table: str
    num_embeddings: int
    embedding_dim: int
    sharding_type: str
    bytes_of_rank: dict[int, int]
    """Size of weights and optimizer state on each rank with a part of the table."""
    device_share: float = 1.0
    """Fraction of these bytes in a rank's GPU. The rest is in host memory
    (`ShardingConfig.uvm_caching`).
    """

    def host_bytes(self, rank: int) -> int:
        """Return the host memory of the table on `rank`, in bytes: the full size if the GPU only
        has a cache of it.
        """
        return self.bytes_of_rank.get(rank, 0) if self.device_share < 1 else 0

    def device_bytes(self, rank: int) -> int:
        """Return the device memory of the table, or its cache, on `rank`, in bytes."""
        return int(self.bytes_of_rank.get(rank, 0) * self.device_share)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_of_rank.values())

    @property
    def gradient_bytes(self) -> int:
        """Size of the full table's gradient, in bytes, on each rank of a data_parallel table. 0 for
        other tables.
        """
        return (
            self.num_embeddings * self.embedding_dim * FLOAT_BYTES
            if self.sharding_type == "data_parallel"
            else 0
        )


def placements(
    plan: ShardingPlan, model: nn.Module, *, state_bytes: StateBytes
) -> list[TablePlacement]:
    """Return all tables of `plan`, sorted by name, with their size on each rank. `model` must be
    unsharded.
    """
    tables = tables_of(model)
    result = []
    for module_plan in plan.plan.values():
        for table, sharding in module_plan.items():
            rows, dim = tables[table]
            bytes_of_rank: dict[int, int] = Counter()
            if sharding.sharding_type == "data_parallel":  # The plan has no shards for it
                bytes_of_rank = dict.fromkeys(sharding.ranks, table_bytes(rows, dim, state_bytes))
            else:
                for shard in sharding.sharding_spec.shards:
                    shard_rows, shard_columns = shard.shard_sizes
                    bytes_of_rank[shard.placement.rank()] += table_bytes(
                        shard_rows, shard_columns, state_bytes
                    )
            result.append(
                TablePlacement(
                    table=table,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    sharding_type=sharding.sharding_type,
                    bytes_of_rank=dict(bytes_of_rank),
                    device_share=sharding.cache_params.load_factor
                    if sharding.compute_kernel == _CACHED_KERNEL
                    else 1.0,
                )
            )
    return sorted(result, key=lambda placement: _natural(placement.table))


def data_parallel_tables(plan: ShardingPlan) -> list[str]:
    """Return the parameter names of data_parallel tables in the sharded model."""
    return [
        f"{module}.embedding_bags.{table}.weight"
        for module, module_plan in plan.plan.items()
        for table, sharding in module_plan.items()
        if sharding.sharding_type == "data_parallel"
    ]


def describe(plan: ShardingPlan, model: nn.Module, *, state_bytes: StateBytes) -> str:
    """Format the plan: one line per table (rows, dim, sharding, ranks, bytes), the size of all, and
    each worker's total.
    """
    rows = placements(plan, model, state_bytes=state_bytes)
    head = ("table", "rows", "dim", "sharding", "ranks", "weights + optimizer")
    lines = [
        (
            row.table,
            f"{row.num_embeddings:,}",
            str(row.embedding_dim),
            row.sharding_type
            + (f", {row.device_share:.0%} cached" if row.device_share < 1 else ""),
            _ranges(sorted(row.bytes_of_rank)),
            readable(row.total_bytes),
        )
        for row in rows
    ]
    sizes: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        for rank, size in row.bytes_of_rank.items():
            sizes[rank].append(size)
    workers = [
        f"worker {rank}: {len(rank_tables)} table{'s' if len(rank_tables) > 1 else ''}, "
        f"{readable(sum(rank_tables))}"
        for rank, rank_tables in sorted(sizes.items())
    ]
    weight_bytes = sum(row.num_embeddings * row.embedding_dim for row in rows) * FLOAT_BYTES
    total_size = (
        f"{weight_bytes / 2**30:,.2f} GiB" if weight_bytes >= 2**30 else readable(weight_bytes)
    )
    total = f"all tables: {total_size} without optimizer state"
    return "\n".join([*aligned([head, *lines], left={0, 3, 4}), total, *workers])


def tables_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return (rows, dim) of each table in the model, by name."""
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    tables: dict[str, tuple[int, int]] = {}
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection):
            tables |= {
                table.name: (table.num_embeddings, table.embedding_dim)
                for table in module.embedding_bag_configs()
            }
        elif isinstance(module, EmbeddingCollection):
            tables |= {
                table.name: (table.num_embeddings, table.embedding_dim)
                for table in module.embedding_configs()
            }
    return tables


def table_bytes(rows: int, columns: int, state_bytes: StateBytes) -> int:
    """Return the size of weights and optimizer state."""
    return rows * columns * FLOAT_BYTES + state_bytes(rows, columns)


def _natural(name: str) -> tuple[Any, ...]:
    """Return a sort key that puts cat_2 before cat_10."""
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if number.isdigit() else (name, -1)


def _ranges(ranks: list[int]) -> str:
    """Format ranks with consecutive ones joined, such as 0-3,6."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def readable(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


PROCESS_BYTES: Final = 700 << 20
"""Memory of Python, torch, TorchRec and Ray in a worker, without data."""


@dataclass(frozen=True)
class WorkerMemory:
    """Peak memory during training with a save, in bytes."""

    tables: int
    """Embedding tables and their optimizer state, or the GPU's cache of tables in host memory."""
    gradients: int
    """Gradients of data_parallel tables."""
    dense: int
    """Weights, gradients and optimizer state of the dense part."""
    batches: int
    """Activations of a batch and their gradients."""
    checkpoint: int
    """Copy of the worker's part of a save, in host memory."""
    process: int = PROCESS_BYTES
    """Process without data, in host memory."""
    host_tables: int = 0
    """Tables in host memory (`ShardingConfig.uvm_caching`)."""

    def host_bytes(self, device: str) -> int:
        return (
            self.checkpoint
            + self.process
            + self.host_tables
            + (self._trained if device == "cpu" else 0)
        )

    def device_bytes(self, device: str) -> int:
        return 0 if device == "cpu" else self._trained

    @property
    def _trained(self) -> int:
        return self.tables + self.gradients + self.dense + self.batches

    def text(self, device: str) -> str:
        """Format the memory in one line."""
        trained = (
            f"tables with optimizer state {size_text(self.tables)}, "
            + (
                f"gradients of data_parallel tables {size_text(self.gradients)}, "
                if self.gradients
                else ""
            )
            + f"dense part {size_text(self.dense)}, a batch {size_text(self.batches)}"
        )
        host = (
            f"a checkpoint's copy {size_text(self.checkpoint)}, "
            + (f"tables {size_text(self.host_tables)}, " if self.host_tables else "")
            + f"the process {size_text(self.process)}"
        )
        if device == "cpu":
            return f"{size_text(self.host_bytes(device))} of memory: {trained}, {host}"
        return (
            f"{size_text(self.device_bytes(device))} of GPU memory: {trained}; "
            f"{size_text(self.host_bytes(device))} of host memory: {host}"
        )


def worker_memories(
    rows: Sequence[TablePlacement],
    *,
    dense_weights: int,
    dense_state_bytes: int,
    batch_bytes: int,
    world_size: int,
) -> list[WorkerMemory]:
    """Return each worker's memory, by rank, for tables `rows`, a network with its optimizer state,
    and `batch_bytes` per step.
    """
    # Replicated on all ranks, but saved by one
    data_parallel_bytes = sum(
        row.bytes_of_rank[0] for row in rows if row.sharding_type == "data_parallel"
    )
    dense_saved = dense_weights * FLOAT_BYTES + dense_state_bytes
    sharded = [row for row in rows if row.sharding_type != "data_parallel"]
    return [
        WorkerMemory(
            tables=sum(row.device_bytes(rank) for row in rows),
            gradients=sum(row.gradient_bytes for row in rows),
            dense=dense_weights * FLOAT_BYTES + dense_saved,
            batches=batch_bytes,
            checkpoint=sum(row.bytes_of_rank.get(rank, 0) for row in sharded)
            + (data_parallel_bytes + dense_saved) // world_size,
            host_tables=sum(row.host_bytes(rank) for row in rows),
        )
        for rank in range(world_size)
    ]
