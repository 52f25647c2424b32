"""Memory of one worker that trains a click model, by what it is for: what `rayrec plan` forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rayrec.optim.config import FLOAT_BYTES
from rayrec.quantities import size_text
from rayrec.sharding.planner import TablePlacement

if TYPE_CHECKING:
    from rayrec.models.cost import NetworkCost
    from rayrec.workloads.base import TrainConfig
    from rayrec.workloads.recsys.workload import ClickWorkload

PROCESS_BYTES: Final = 700 << 20
"""Python, torch, TorchRec and Ray in a worker, before it holds any data."""
_COPIES_OF_EMBEDDINGS: Final = 6
"""Pooled embeddings of a batch: looked up, exchanged, in the interaction, and the gradient of each."""
_COPIES_OF_ACTIVATIONS: Final = 2
"""With the gradient."""


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
    workload: ClickWorkload,
    config: TrainConfig,
    rows: Sequence[TablePlacement],
    *,
    cost: NetworkCost,
    num_vectors: int,
    batch_size: int,
    world_size: int,
) -> list[WorkerMemory]:
    """The memory of every worker, by rank, that holds its part of the tables `rows` and a network of this cost, and takes so many
    rows a step, each with `num_vectors` embeddings that tables give."""
    data_parallel_bytes = sum(
        row.bytes_of_rank[0] for row in rows if row.sharding_type == "data_parallel"
    )  # every rank holds them all; one rank saves each
    dense_weights = cost.weights
    dense_state = workload.dense_optimizer.state_bytes(dense_weights)
    dense_saved = dense_weights * FLOAT_BYTES + dense_state
    found = []
    for rank in range(world_size):
        held = sum(row.device_bytes(rank) for row in rows)
        own = sum(row.bytes_of_rank.get(rank, 0) for row in rows if row.sharding_type != "data_parallel")
        found.append(
            WorkerMemory(
                tables=held,
                gradients=sum(row.gradient_bytes for row in rows),
                dense=2 * dense_weights * FLOAT_BYTES + dense_state,
                batches=_batch_bytes(
                    cost,
                    num_vectors * workload.model.table_width,
                    max(batch_size, config.eval_batch_size // 2),
                    copies=_COPIES_OF_EMBEDDINGS + workload.sparse_optimizer.own_rule,  # gradients by row
                ),
                checkpoint=own + (data_parallel_bytes + dense_saved) // world_size,
                host_tables=sum(row.host_bytes(rank) for row in rows),
            )
        )
    return found


def _batch_bytes(cost: NetworkCost, width: int, rows: int, *, copies: int) -> int:
    """Activations of a step; an evaluation keeps none for a backward pass, so that half of its rows count. `width`: of a row's
    embeddings side by side; `copies`: of these that exist at once."""
    embeddings = copies * width * FLOAT_BYTES
    return int(rows * (embeddings + _COPIES_OF_ACTIVATIONS * cost.saved_bytes_per_row))
