"""Which worker would hold which table: the sharding plan of a click model, made before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec.models.dlrm import multiply_adds
from rayrec.sharding import describe, plan_sharding

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
    if config.scaling.use_gpu:
        import torch

        memory_bytes = torch.cuda.get_device_properties(0).total_memory
    else:
        memory_bytes = available_host_bytes() // workers
    model = workload.model.build(
        num_embeddings=num_embeddings, num_dense=len(workload.schema.dense), features=workload.schema.sparse
    )
    made = plan_sharding(
        model,
        world_size=workers,
        device="cuda" if config.scaling.use_gpu else "cpu",
        batch_size=config.batch_size,
        memory_bytes=memory_bytes,
        config=workload.sharding,
    )
    cost = multiply_adds(workload.model, num_dense=len(workload.schema.dense), num_sparse=len(workload.schema.sparse))
    return f"{describe(made, model, config=workload.sharding)}\n{cost:,} multiply-adds a row, forward"
