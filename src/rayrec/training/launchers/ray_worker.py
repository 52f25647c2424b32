"""Training worker inside Ray Train."""

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

from rayrec import host_resources, storage
from rayrec.cluster import worker_pool
from rayrec.collectives import use_device
from rayrec.ingest.ray_engine import RayEngine
from rayrec.observe.timing import process_age_s
from rayrec.training.launchers.base import AttemptContext, worker_logs
from rayrec.training.launchers.ray_metrics import ObjectStoreMonitor
from rayrec.training.worker import run_worker
from rayrec.workloads.base import WorkerContext


def train_worker(arguments: dict[str, ray.ObjectRef]) -> dict[str, Any]:
    """Train as one worker of one attempt, given a reference to its AttemptContext; see
    `run_worker`.
    """
    entered_s = time.time()  # the process group exists
    attempt: AttemptContext = ray.get(arguments["attempt"])
    stopwatch = attempt.stopwatch()
    process_s = time.time() - (process_age_s() or 0.0)
    if attempt.started_s < process_s < entered_s:  # not started ahead
        stopwatch.lap("worker_process", at_s=process_s)
    stopwatch.lap("process_group", at_s=entered_s)
    stopwatch.lap("worker_imports")
    context = ray.train.get_context()
    rank = context.get_world_rank()
    node_id = ray.get_runtime_context().get_node_id()
    node: dict[str, Any] = next((node for node in ray.nodes() if node["NodeID"] == node_id), {})
    resources: dict[str, float] = node.get("Resources", {})
    used_bytes = shutil.disk_usage("/dev/shm").used if os.path.isdir("/dev/shm") else 0
    store = int(resources.get("object_store_memory", 0))
    cpus = host_resources.usable_cpus(granted=float(resources.get("CPU", 0)))
    device = ray.train.torch.get_device() if attempt.config.scaling.use_gpu else torch.device("cpu")
    use_device(device)
    assert isinstance(attempt.engine, RayEngine)
    worker = WorkerContext(
        attempt.config,
        rank,
        context.get_world_size(),
        device,
        dataclasses.replace(attempt.engine, owner=f"{attempt.config.name}_worker_{rank}"),
        node=node_id,
        cpus=cpus // context.get_local_world_size(),
        object_store_bytes=max(0, store - used_bytes),
    )
    log = storage.join(attempt.folder, "logs", f"worker_{rank}.log")
    with contextlib.ExitStack() as within:
        if attempt.config.scaling.bind_cores:
            within.enter_context(
                host_resources.bound_to_cores(
                    context.get_local_rank(), context.get_local_world_size()
                )
            )
        within.enter_context(worker_logs(log, rank=rank))
        failure = attempt.config.failure
        if failure.max_failures != 0 and rank == 0:
            within.enter_context(
                worker_pool.standby(failure.standby_after_s, num_processes=worker.world_size)
            )
        object_store: Callable[[], dict[str, int]] = dict
        if rank == 0 and attempt.config.observe.times:
            object_store = within.enter_context(contextlib.closing(ObjectStoreMonitor())).latest
        preemption = ray.train.get_preemption_info
        return run_worker(
            attempt, worker, stopwatch=stopwatch, preemption=preemption, object_store=object_store
        )
