"""The driver of a run: reaches the cluster, prepares the data, starts the workers, and tells how it went."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rayrec import storage
from rayrec.config import InputError
from rayrec.launch import cluster
from rayrec.launch.versions import versions
from rayrec.observe.console import Console
from rayrec.observe.events import EventWriter, follow, read_events
from rayrec.workloads.base import ClusterConfig, RunContext, TrainConfig


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: str
    checkpoint: str
    """Folder of the checkpoint to use."""
    summary: dict[str, Any]
    """What summary.json holds."""

    @property
    def metrics(self) -> dict[str, float]:
        return self.summary["metrics"]


def train(config: TrainConfig, *, console: Console | None = None) -> Result:
    """Trains a recipe on the Ray cluster that the configuration, or RAY_ADDRESS, names; else on a local one.

    A second call with the same storage_path and name goes on from the newest complete checkpoint; a finished run is not
    trained again. Raises InputError for what the user can mend.
    """
    console = console or Console()
    if config.train_data.path is None:
        raise InputError(
            "train_data.path: no training log given; pass --train-data.path PATH (rayrec generate makes one)"
        )
    name = config.name or f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not re.fullmatch(r"[\w.-]+", name):
        raise InputError(f"name: {name!r} may hold letters, digits, '.', '_' and '-' only")
    config = config.replace(name=name)
    if storage.is_url(config.storage_path):
        raise InputError(
            f"storage_path: {config.storage_path}: runs are kept in a folder, local or shared by all nodes; only logs may be URLs"
        )
    root = storage.absolute(config.storage_path)
    folder = storage.join(root, name)
    finished = _finished(folder, config)
    if finished is not None:
        console.note(f"{folder} is finished already; its result follows (choose another --name to train anew)")
        return finished
    _set_environment()
    started_s = time.monotonic()
    with _signals():
        cluster.connect(
            config.cluster.address,
            num_cpus=config.cluster.num_cpus,
            object_store_bytes=config.cluster.object_store_bytes,
            log_to_driver=console.verbose,
        )
        shares = cluster.layout(
            cluster.alive_nodes(),
            num_workers=config.scaling.num_workers,
            use_gpu=config.scaling.use_gpu,
            cpus_per_worker=config.scaling.cpus_per_worker,
            resources_per_worker=config.scaling.resources_per_worker,
            keep_data_off_workers=config.cluster.data_nodes == "auto",
        )
        storage.make_folder(folder)
        config_path = storage.join(folder, "config.yaml")
        head = f"# rayrec {versions()['rayrec']}, config hash {run_hash(config)}\n"
        storage.write_bytes(config_path, (head + config.to_yaml()).encode())
        with EventWriter(storage.join(folder, "events.jsonl")) as events:
            events.write("run", recipe=config.recipe, name=name, config_hash=run_hash(config), versions=versions())
            with console.preparing():
                context = RunContext(config, folder, shares.driver, console.note, console.progress)
                prepared = config.workload.prepare(context)
            prepared_s = time.monotonic() - started_s
            events.write("prepared", seconds=prepared_s, **config.workload.summarize(prepared, {}))
            with console.training(lambda stop: follow(storage.join(folder, "events.jsonl"), stop=stop)):
                _fit(config, root, folder, prepared, shares)
            return _summarize(config, folder, prepared, wall_s=time.monotonic() - started_s, events=events)


def run_hash(config: TrainConfig) -> str:
    """The hash of what decides a run's result: the configuration without names and places of this one run."""
    return config.replace(name=None, storage_path="", cluster=ClusterConfig()).config_hash()


def _set_environment() -> None:
    # Before Ray starts: its workers inherit these.
    defaults = {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how soon a checkpoint is registered and a dead worker seen
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)


def _fit(config: TrainConfig, root: str, folder: str, prepared: Any, shares: cluster.Layout) -> None:
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    from rayrec.training.worker import Assignment, train_worker

    assignment = Assignment(config, prepared, folder, shares.per_worker, config.scaling.threads_per_worker)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"assignment": assignment},
        torch_config=TorchConfig(backend="nccl" if config.scaling.use_gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.scaling.num_workers,
            use_gpu=config.scaling.use_gpu,
            resources_per_worker=shares.worker_resources,
            placement_strategy=config.scaling.placement_strategy,
        ),
        run_config=ray.train.RunConfig(  # type: ignore[call-arg]  # typed as Train V1's
            name=config.name,
            storage_path=root,
            failure_config=ray.train.FailureConfig(max_failures=config.failure.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=config.checkpoint.num_to_keep,
                checkpoint_score_attribute="score",
                checkpoint_score_order="max",
            ),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        for failure in getattr(error, "worker_failures", {}).values():
            cause = getattr(failure, "cause", failure)
            for candidate in (failure, cause, getattr(cause, "cause", None)):
                if isinstance(candidate, InputError):
                    raise InputError(str(candidate)) from None
        raise


def _finished(folder: str, config: TrainConfig) -> Result | None:
    """The result of a run that ended before. Raises InputError where its configuration was another one."""
    path = storage.join(folder, "summary.json")
    if not storage.exists(path):
        return None
    summary = storage.read_json(path)
    if summary["config_hash"] != run_hash(config):
        raise InputError(f"{folder}: finished with another configuration (see its config.yaml); choose another --name")
    return Result(folder, summary["checkpoint"], summary)


def _summarize(config: TrainConfig, folder: str, prepared: Any, *, wall_s: float, events: EventWriter) -> Result:
    from rayrec.checkpoint import Checkpoint, weights_sha256

    history = read_events(storage.join(folder, "events.jsonl"))
    finish = [event for event in history if event["kind"] == "finish"][-1]
    starts = [event for event in history if event["kind"] == "start"]
    summary = {
        "recipe": config.recipe,
        "name": config.name,
        "config_hash": run_hash(config),
        "steps": finish["step"],
        "chosen_step": finish["chosen_step"],
        "epochs": config.epochs,
        "rows": finish["rows"],
        "wall_s": wall_s,
        "train_s": finish["train_s"],
        "rows_per_s": finish["rows"] / finish["train_s"] if finish["train_s"] else 0.0,
        "blocked_fraction": finish["blocked_fraction"],
        "rows_repeated": max(0, finish["rows"] - finish["expected_rows"]),
        "rows_lost": max(0, finish["expected_rows"] - finish["rows"]),
        "metrics": finish["metrics"],
        "validation": finish["validation"],
        "checkpoint": finish["checkpoint"],
        "restarts": len(starts) - 1,
        "weights_sha256": weights_sha256(Checkpoint(finish["checkpoint"])),
        **config.workload.summarize(prepared, finish["metrics"]),
        "versions": versions(),
    }
    storage.write_json(storage.join(folder, "summary.json"), summary)
    events.write("summary", **summary)
    return Result(folder, finish["checkpoint"], summary)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that whatever this process started is left in order."""
    import signal

    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
