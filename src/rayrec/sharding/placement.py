"""Which worker holds which part of which table, and what its memory is filled with: what `rayrec plan` forecasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rayrec.optim.config import FLOAT_BYTES
from rayrec.quantities import size_text

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.types import ParameterSharding, ShardingPlan


StateBytes = Callable[[int, int], int]
"""(rows, columns) of a table or a part of it -> bytes of state that its optimizer keeps."""


_CACHED_KERNEL = "fused_uvm_caching"


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Where one table lies."""

    table: str
    num_embeddings: int
    embedding_dim: int
    sharding_type: str
    bytes_of_rank: dict[int, int]
    """Weights and optimizer state, by the ranks that hold a part of the table."""
    device_share: float = 1.0
    """Share of these bytes that a rank's GPU has; the rest is in host memory (`ShardingConfig.uvm_caching`)."""

    def host_bytes(self, rank: int) -> int:
        """Bytes of host memory next to the GPU that `rank` keeps the table in: all of it, of which the GPU has a cache."""
        return self.bytes_of_rank.get(rank, 0) if self.device_share < 1 else 0

    def device_bytes(self, rank: int) -> int:
        """Bytes of the device's own memory that `rank` keeps the table, or its cache, in."""
        return int(self.bytes_of_rank.get(rank, 0) * self.device_share)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_of_rank.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the whole table's gradient, which every rank that holds a data_parallel table has; others have none."""
        return self.num_embeddings * self.embedding_dim * FLOAT_BYTES if self.sharding_type == "data_parallel" else 0


def placements(plan: ShardingPlan, model: nn.Module, *, state_bytes: StateBytes) -> list[TablePlacement]:
    """Every table of `plan` in the order of `model` (before it is sharded), with the bytes it takes on each rank."""
    tables = tables_of(model)
    found = []
    for module_plan in plan.plan.values():
        for table, sharding in module_plan.items():
            rows, dim = tables[table]
            bytes_of_rank: dict[int, int] = {}
            if sharding.sharding_type == "data_parallel":  # the plan says no more of it
                bytes_of_rank = dict.fromkeys(sharding.ranks, table_bytes(rows, dim, state_bytes))
            else:
                for shard in sharding.sharding_spec.shards:
                    rank, (held_rows, held_columns) = shard.placement.rank(), shard.shard_sizes
                    size = table_bytes(held_rows, held_columns, state_bytes)
                    bytes_of_rank[rank] = bytes_of_rank.get(rank, 0) + size
            found.append(
                TablePlacement(
                    table=table,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    sharding_type=sharding.sharding_type,
                    bytes_of_rank=bytes_of_rank,
                    device_share=_device_share(sharding),
                )
            )
    return sorted(found, key=lambda placement: _natural(placement.table))


def _device_share(sharding: ParameterSharding) -> float:
    if sharding.compute_kernel != _CACHED_KERNEL:
        return 1.0
    factor = sharding.cache_params.load_factor if sharding.cache_params else None
    assert factor is not None
    return factor


def data_parallel_tables(plan: ShardingPlan) -> list[str]:
    """The data_parallel tables' parameters, as the sharded model names them."""
    return [
        f"{module}.embedding_bags.{table}.weight"
        for module, module_plan in plan.plan.items()
        for table, sharding in module_plan.items()
        if sharding.sharding_type == "data_parallel"
    ]


def describe(plan: ShardingPlan, model: nn.Module, *, state_bytes: StateBytes) -> str:
    """The plan as text: one line a table (rows, dim, how, where, bytes), then what each worker holds in all."""
    rows = placements(plan, model, state_bytes=state_bytes)
    head = ("table", "rows", "dim", "sharding", "ranks", "weights + optimizer")
    lines = [
        (
            row.table,
            f"{row.num_embeddings:,}",
            str(row.embedding_dim),
            row.sharding_type + (f", {row.device_share:.0%} cached" if row.device_share < 1 else ""),
            _ranges(sorted(row.bytes_of_rank)),
            readable(row.total_bytes),
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
        f"worker {rank}: {count} table{'s' if count > 1 else ''}, {readable(total)}"
        for rank, (count, total) in sorted(totals.items())
    ]
    return "\n".join([layout(head), *map(layout, lines), *workers])


def tables_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(rows, dim) of every table in the model, by name."""
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    found: dict[str, tuple[int, int]] = {}
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection):
            found |= {table.name: (table.num_embeddings, table.embedding_dim) for table in module.embedding_bag_configs()}
        elif isinstance(module, EmbeddingCollection):
            found |= {table.name: (table.num_embeddings, table.embedding_dim) for table in module.embedding_configs()}
    return found


def table_bytes(rows: int, columns: int, state_bytes: StateBytes) -> int:
    """Weights and optimizer state."""
    return rows * columns * FLOAT_BYTES + state_bytes(rows, columns)


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


def readable(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


PROCESS_BYTES: Final = 700 << 20
"""Python, torch, TorchRec and Ray in a worker, before it holds any data."""


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes at the peak of training with a save."""

    tables: int
    """Embedding tables and their optimizer state; of tables in host memory, the GPU's cache."""
    gradients: int
    """Of data_parallel tables."""
    dense: int
    """The dense part: weights, gradients and optimizer state."""
    batches: int
    """Activations of a batch and their gradients."""
    checkpoint: int
    """Copy of what the worker saves, in host memory."""
    process: int = PROCESS_BYTES
    """The process itself, in host memory."""
    host_tables: int = 0
    """Tables in host memory (`ShardingConfig.uvm_caching`)."""

    def host_bytes(self, device: str) -> int:
        return self.checkpoint + self.process + self.host_tables + (self._trained if device == "cpu" else 0)

    def device_bytes(self, device: str) -> int:
        return 0 if device == "cpu" else self._trained

    @property
    def _trained(self) -> int:
        return self.tables + self.gradients + self.dense + self.batches

    def text(self, device: str) -> str:
        """One line for people."""
        trained = (
            f"tables with optimizer state {size_text(self.tables)}, "
            + (f"gradients of data_parallel tables {size_text(self.gradients)}, " if self.gradients else "")
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
    rows: Sequence[TablePlacement], *, dense_weights: int, dense_state_bytes: int, batch_bytes: int, world_size: int
) -> list[WorkerMemory]:
    """The memory of every worker, by rank, that holds its part of the tables `rows`, a network of so many weights, the state of
    its optimizer, and `batch_bytes` for a step's rows."""
    # Every rank holds them all; one rank saves each
    data_parallel_bytes = sum(row.bytes_of_rank[0] for row in rows if row.sharding_type == "data_parallel")
    dense_saved = dense_weights * FLOAT_BYTES + dense_state_bytes
    found = []
    for rank in range(world_size):
        own = sum(row.bytes_of_rank.get(rank, 0) for row in rows if row.sharding_type != "data_parallel")
        found.append(
            WorkerMemory(
                tables=sum(row.device_bytes(rank) for row in rows),
                gradients=sum(row.gradient_bytes for row in rows),
                dense=dense_weights * FLOAT_BYTES + dense_saved,
                batches=batch_bytes,
                checkpoint=own + (data_parallel_bytes + dense_saved) // world_size,
                host_tables=sum(row.host_bytes(rank) for row in rows),
            )
        )
    return found
