"""A training worker inside Ray Train."""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

from rayrec import machine, storage
from rayrec.observe.start_up import Stopwatch
from rayrec.training.worker import Assignment, Seat, run_worker
from rayrec.training.worker_logs import worker_logs


def train_worker(arguments: dict[str, ray.ObjectRef]) -> dict[str, Any]:
    """Runs once per worker and attempt, with a reference to its Assignment; see `rayrec.training.worker.run_worker`."""
    entered_s = time.time()  # the process group is up
    assignment: Assignment = ray.get(arguments["assignment"])
    stopwatch = Stopwatch(assignment.begun_s)
    stopwatch.lap("process_group", at_s=entered_s)
    stopwatch.lap("worker_imports")
    context = ray.train.get_context()
    rank = context.get_world_rank()
    node_id = ray.get_runtime_context().get_node_id()
    resources: dict[str, float] = next((node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id), {})
    taken = shutil.disk_usage("/dev/shm").used if os.path.isdir("/dev/shm") else 0
    store = int(resources.get("object_store_memory", 0))
    cpus = machine.usable_cpus(granted=float(resources.get("CPU", 0)))
    seat = Seat(
        rank=rank,
        world_size=context.get_world_size(),
        device=ray.train.torch.get_device() if assignment.config.scaling.use_gpu else torch.device("cpu"),
        node=node_id,
        cpus=cpus // context.get_local_world_size(),
        object_store_bytes=max(0, store - taken),
        on_ray=True,
        preemption=ray.train.get_preemption_info,
        stopwatch=stopwatch,
    )
    with worker_logs(storage.join(assignment.folder, "logs", f"worker_{rank}.log"), rank=rank):
        return run_worker(assignment, seat)
