"""Which worker would hold which table: the sharding plan of a click model, made before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec.config import InputError
from rayrec.models.dlrm import multiply_adds
from rayrec.sharding import describe, placements, plan_sharding

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig
    from rayrec.workloads.recsys import ClickWorkload


def available_host_bytes() -> int:
    """MemAvailable of /proc/meminfo: what this machine has left for tables."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def plan(workload: ClickWorkload, config: TrainConfig, num_embeddings: list[int]) -> str:
    """The plan as text, for workers that share this machine's memory, or have a GPU like this machine's.

    Raises InputError where the tables do not fit, with what they need.
    """
    workers = config.scaling.max_workers
    described, _ = tables_of(
        workload,
        config,
        num_embeddings,
        workers=workers,
        workers_per_node=workers,
        memory_bytes=memory_here(config, workers=workers),
    )
    return described


def memory_here(config: TrainConfig, *, workers: int) -> int:
    """Bytes that each of so many workers could fill on this machine: its GPU's, or a share of what the host has free."""
    if config.scaling.use_gpu:
        import torch

        return torch.cuda.get_device_properties(0).total_memory
    return available_host_bytes() // workers


def cut_to_fit(
    workload: ClickWorkload, config: TrainConfig, num_embeddings: list[int], *, workers: int, memory_bytes: int
) -> list[int]:
    """The tables' rows, no more in any than lets so many workers of one node, with so much memory each, hold them all. Raises
    InputError where not even tables of one row fit."""
    most = max(num_embeddings)
    while True:
        cut = [min(rows, most) for rows in num_embeddings]
        try:
            tables_of(workload, config, cut, workers=workers, workers_per_node=workers, memory_bytes=memory_bytes)
        except InputError:
            if most == 1:
                raise
            most //= 2
        else:
            return cut


def tables_of(
    workload: ClickWorkload,
    config: TrainConfig,
    num_embeddings: list[int],
    *,
    workers: int,
    workers_per_node: int,
    memory_bytes: int,
) -> tuple[str, tuple[int, ...]]:
    """The plan as text, and the bytes of tables and optimizer state that each worker holds, who may fill `memory_bytes`. Raises
    InputError as `plan`."""
    model = workload.model.build(
        num_embeddings=num_embeddings, num_dense=len(workload.schema.dense), features=workload.schema.sparse
    )
    made = plan_sharding(
        model,
        world_size=workers,
        device="cuda" if config.scaling.use_gpu else "cpu",
        batch_size=config.batch_size,
        memory_bytes=memory_bytes,
        nodes=[str(rank // workers_per_node) for rank in range(workers)],
        config=workload.sharding,
    )
    held = dict.fromkeys(range(workers), 0)
    for placement in placements(made, model, config=workload.sharding):
        for rank, size in placement.bytes_of_rank.items():
            held[rank] += size
    cost = multiply_adds(workload.model, num_dense=len(workload.schema.dense), num_sparse=len(workload.schema.sparse))
    text = f"{describe(made, model, config=workload.sharding)}\n{cost:,} multiply-adds a row, forward"
    return text, tuple(held.values())
