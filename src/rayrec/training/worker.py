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

from rayrec import storage
from rayrec.checkpoint import Checkpoint, DamagedError, Retention, Saver, claim, folder_of, newest_good, restore
from rayrec.config import InputError
from rayrec.data.placement import TaskPlacement
from rayrec.native import keep_freed_memory
from rayrec.observe.events import EventWriter
from rayrec.training import loop
from rayrec.training.device_peak import multiply_adds_per_s
from rayrec.training.loop import Progress
from rayrec.training.profiling import make_profiler, profiled
from rayrec.training.state import all_tensors, model_tensors, restore_all
from rayrec.training.stopping import StopWatch
from rayrec.training.store_watch import StoreWatch
from rayrec.workloads.base import TrainConfig, TrainLoader, WorkerContext, WorkerSetup
from rayrec.workloads.phases import waits_noticed

Log = Callable[[str, dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What the driver hands every worker."""

    config: TrainConfig
    prepared: Any
    """Of the workload's `prepare`."""
    folder: str
    """The run's folder, absolute."""
    placement: TaskPlacement
    mailbox: Any
    """Where the driver leaves its wish to stop."""


def train_worker(arguments: dict[str, Assignment]) -> dict[str, Any]:
    """Runs inside Ray Train, once per worker and attempt. Returns what the driver needs of a finished run, or {"stopped":
    cause} where it was asked to end before."""
    assignment = arguments["assignment"]
    config, folder = assignment.config, assignment.folder
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    quiet_logs(storage.join(folder, "logs", f"worker_{rank}.log"))
    keep_freed_memory()
    device = ray.train.torch.get_device() if config.scaling.use_gpu else torch.device("cpu")
    if device.type == "cpu":
        cores = os.cpu_count() or 1
        torch.set_num_threads(config.scaling.threads_per_worker or max(1, cores // context.get_local_world_size()))
    torch.manual_seed(config.seed)
    events = EventWriter(storage.join(folder, "events.jsonl")) if rank == 0 else None

    store = StoreWatch() if rank == 0 and config.observe.times else None

    def log(kind: str, fields: dict[str, Any]) -> None:
        if events is not None:
            events.write(kind, **fields, **(store.latest() if store is not None and kind == "data" else {}))

    try:
        return _train(WorkerContext(config, rank, world_size, device, assignment.placement), assignment, log)
    finally:
        if store is not None:
            store.close()
        if events is not None:
            events.close()


def _train(worker: WorkerContext, assignment: Assignment, log: Log) -> dict[str, Any]:
    config, folder = assignment.config, assignment.folder
    # Before data tasks begin, which compute as well.
    peak = multiply_adds_per_s(worker.device, precision=config.precision) if config.observe.times else None
    mine = claim(folder) if worker.rank == 0 else None
    checkpoint, setup, loader, progress = _resume(worker, assignment, log)
    if peak is not None:
        (mean, *_), _ = loop.over_workers(peak)
        setup.peak_multiply_adds_per_s = mean * worker.world_size
    watch = StopWatch(assignment.mailbox, rank=worker.rank)
    profiler = make_profiler(worker, folder, assignment.mailbox, log)
    setup.begin_step = profiled(setup.begin_step, profiler)
    saver = Saver(
        folder,
        claim=mine,
        retention=Retention(
            num_to_keep=config.checkpoint.num_to_keep,
            keep_best=config.checkpoint.keep_best,
            keep_every=config.checkpoint.keep_every,
        ),
        extra_files=lambda target: _extra_files(target, assignment),
        max_outage_s=config.failure.max_outage_s,
        log=log,
    )
    log(
        "start",
        {
            "step": progress.step,
            "steps": progress.step + loader.steps,
            "rows": progress.rows,
            "world_size": worker.world_size,
            "peak_multiply_adds_per_s": setup.peak_multiply_adds_per_s,
            "checkpoint": checkpoint and checkpoint.path,
            **setup.described,
        },
    )

    def save(
        progress: Progress, loader_state: dict[str, Any], *, score: float | None, needed: bool, complete: bool
    ) -> None:
        state = {"progress": dataclasses.asdict(progress), "loader": loader_state, "recipe": config.recipe}
        if needed:
            saver.wait()
        if not saver.begin(progress.step, all_tensors(setup.model, setup.optimizer), state=state, score=score):
            log("checkpoint_late", {"step": progress.step, "cause": "the save before is not through yet"})
        if complete:
            saver.wait()

    try:
        with waits_noticed(setup.clock):
            finished = _loop(config)(config, setup, loader, progress, log=log, save=save, interruption=watch)
        saver.wait()
    finally:
        profiler.close()
        watch.close()
        saver.close()
        loader.close()
    if finished:
        return _finish(assignment, setup, progress, loader.rows_behind(), log)
    log("stop", {"cause": watch.cause, "step": progress.step})
    return {"stopped": watch.cause}


def _loop(config: TrainConfig) -> Callable[..., bool]:
    """The function that trains; `training.loop.run` says what it is given and gives."""
    if config.loop == "huggingface":
        from rayrec.training.huggingface import run

        return run
    return loop.run


def _resume(
    worker: WorkerContext, assignment: Assignment, log: Log
) -> tuple[Checkpoint | None, WorkerSetup, TrainLoader, Progress]:
    """Everything as the newest good checkpoint left it, or as it is at the start."""
    config, folder = worker.config, assignment.folder
    damaged: set[str] = set()
    while True:
        checkpoint = newest_good(folder, log=log, exclude=damaged)
        state = checkpoint.manifest()["state"] if checkpoint else None
        progress = Progress(**state["progress"]) if state else Progress()
        loader = config.workload.make_loader(
            worker, assignment.prepared, state=state["loader"] if state else None, step=progress.step
        )
        loader.start()  # data tasks get going while the model is built
        setup = config.workload.set_up(worker, assignment.prepared)
        if checkpoint is None:
            return None, setup, loader, progress
        try:
            restore_all(checkpoint, setup.model, setup.optimizer)
        except DamagedError as error:
            log("checkpoint_damaged", {"path": checkpoint.path, "cause": str(error)})
            damaged.add(checkpoint.path)
            loader.close()
            continue
        return checkpoint, setup, loader, progress


def _extra_files(target: str, assignment: Assignment) -> None:
    storage.write_bytes(storage.join(target, "config.yaml"), assignment.config.to_yaml().encode())
    assignment.config.workload.add_files(target, assignment.prepared)


def _finish(
    assignment: Assignment, setup: WorkerSetup, progress: Progress, expected_rows: int, log: Log
) -> dict[str, Any]:
    """Scores the final test with the weights that are to be used, and says so."""
    config = assignment.config
    step = progress.step
    if config.early_stopping.patience and progress.best_step is not None:
        step = progress.best_step
    chosen = Checkpoint(folder_of(assignment.folder, step))
    if step != progress.step:
        try:
            restore(chosen, model_tensors(setup.model))
        except DamagedError as error:
            raise InputError(
                f"{error}; these were the best weights of the run: train it anew under another --name"
            ) from None
    metrics = {name: loop.evaluate(setup, name) for name in setup.eval_batches if name != "validation"}
    finish = {
        "step": progress.step,
        "rows": progress.rows,
        "expected_rows": expected_rows,
        "train_s": progress.train_s,
        "blocked_fraction": progress.blocked_fraction(),
        "chosen_step": step,
        "checkpoint": chosen.path,
        "metrics": metrics.get("test", progress.metrics),
        "validation": progress.metrics if step == progress.step else progress.best_metrics,
    }
    log("finish", finish)
    samples = setup.make_samples()
    if samples:
        log("samples", {"samples": samples})
    return finish


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
    for name in ("torchrec", "fbgemm_gpu", "ray.data", "torch.distributed", "transformers", "accelerate"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
