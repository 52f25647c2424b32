"""What one training worker does, from its process group being up to its last checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import ray.train
import torch
from ray.train import CheckpointUploadMode

from rayrec import storage
from rayrec.checkpoint import Checkpoint, folder_of, latest, restore, save
from rayrec.data.placement import TaskPlacement
from rayrec.native import keep_freed_memory
from rayrec.observe.events import EventWriter
from rayrec.training import loop
from rayrec.training.loop import Progress
from rayrec.training.state import all_tensors, make_state, model_tensors
from rayrec.workloads.base import TrainConfig, WorkerContext, WorkerSetup

NOT_EVALUATED = -1e30
"""Score of a checkpoint whose weights were not evaluated."""


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What the driver hands every worker."""

    config: TrainConfig
    prepared: Any
    """Of the workload's `prepare`."""
    folder: str
    """The run's folder, absolute."""
    placement: TaskPlacement
    threads: int | None


def train_worker(arguments: dict[str, Assignment]) -> None:
    """Runs inside Ray Train, once per worker and restart."""
    assignment = arguments["assignment"]
    config, folder = assignment.config, assignment.folder
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    quiet_logs(storage.join(folder, "logs", f"worker_{rank}.log"))
    keep_freed_memory()
    device = ray.train.torch.get_device() if config.scaling.use_gpu else torch.device("cpu")
    if device.type == "cpu":
        cores = os.cpu_count() or 1
        torch.set_num_threads(assignment.threads or max(1, cores // context.get_local_world_size()))
    torch.manual_seed(config.seed)
    events = EventWriter(storage.join(folder, "events.jsonl")) if rank == 0 else None

    def log(kind: str, fields: dict[str, Any]) -> None:
        if events is not None:
            events.write(kind, **fields)

    worker = WorkerContext(config, rank, world_size, device, assignment.placement)
    checkpoint = latest(folder)
    state = checkpoint.manifest()["state"] if checkpoint else None
    progress = Progress(**state["progress"]) if state else Progress()
    loader = config.workload.make_loader(
        worker, assignment.prepared, state=state["loader"] if state else None, step=progress.step
    )
    loader.start()  # data tasks get going while the model is built
    setup = config.workload.set_up(worker, assignment.prepared)
    if checkpoint:
        make_state(setup.optimizer)
        restore(checkpoint, all_tensors(setup.model, setup.optimizer))
    log(
        "start",
        {"step": progress.step, "steps": progress.step + loader.steps, "world_size": world_size, **setup.described},
    )

    def save_checkpoint(progress: Progress, loader_state: dict[str, Any], score: float | None) -> None:
        path = folder_of(folder, progress.step)
        state = {"progress": dataclasses.asdict(progress), "loader": loader_state, "recipe": config.recipe}
        size = save(
            path,
            all_tensors(setup.model, setup.optimizer),
            state=state,
            extra_files=lambda target: _extra_files(target, assignment),
        )
        # Weights that were not evaluated must not push out those that were.
        report = {"score": NOT_EVALUATED if score is None else score, "step": progress.step}
        ray.train.report(
            report, checkpoint=ray.train.Checkpoint(path), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
        )
        log("checkpoint", {"step": progress.step, "path": path, "bytes": size})

    try:
        loop.run(config, setup, loader, progress, log=log, save=save_checkpoint)
    finally:
        loader.close()
    _finish(assignment, setup, progress, loader.rows_behind(), log)


def _extra_files(target: str, assignment: Assignment) -> None:
    storage.write_bytes(storage.join(target, "config.yaml"), assignment.config.to_yaml().encode())
    assignment.config.workload.add_files(target, assignment.prepared)


def _finish(
    assignment: Assignment,
    setup: WorkerSetup,
    progress: Progress,
    expected_rows: int,
    log: Callable[[str, dict[str, Any]], None],
) -> None:
    """Scores the final test with the weights that are to be used, and says so."""
    config = assignment.config
    step = progress.step
    if config.early_stopping.patience and progress.best_step is not None:
        step = progress.best_step
    chosen = Checkpoint(folder_of(assignment.folder, step))
    if step != progress.step:
        restore(chosen, model_tensors(setup.model))
    metrics = {name: loop.evaluate(setup, name) for name in setup.eval_batches if name != "validation"}
    log(
        "finish",
        {
            "step": progress.step,
            "rows": progress.rows,
            "expected_rows": expected_rows,
            "train_s": progress.train_s,
            "blocked_fraction": progress.blocked_fraction(),
            "chosen_step": step,
            "checkpoint": chosen.path,
            "metrics": metrics.get("test", progress.metrics),
            "validation": progress.metrics if step == progress.step else progress.best_metrics,
        },
    )


def quiet_logs(path: str) -> None:
    """Sends what Python code and native code of torchrec, fbgemm and Ray write into a file of the run, when local."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    if storage.is_url(path):
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.handlers = [handler]
    for name in ("torchrec", "fbgemm_gpu", "ray.data", "torch.distributed"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
