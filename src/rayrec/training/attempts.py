"""Attempts of a run: each trains with the workers there is room for, from the newest good checkpoint on, until one is through."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import ray
import ray.train
from ray._raylet import PlacementGroupID
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2.api import data_parallel_trainer
from ray.train.v2.api.exceptions import PreemptionError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from rayrec.config import InputError
from rayrec.launch import cluster
from rayrec.observe.events import EventWriter
from rayrec.training.profiling import watched_requests, worker_runtime_env
from rayrec.training.signals import Signals
from rayrec.training.stopping import StopRequest
from rayrec.training.worker import Assignment, train_worker
from rayrec.workloads.base import TrainConfig

MORE_WORKERS = "there is room for more workers"
_LOOK_S = 0.1
_NODES_S = 2.0
"""Seconds between two looks at the nodes."""
_QUICK_S = 60.0
"""An attempt that ends sooner was no good one: the next waits a little longer."""
_LONGEST_PAUSE_S = 30.0
_CLEANER_S = 0.2
"""For which Ray Train may wait for its helper that frees what a dead controller leaves. It blocks for 12 s where the cluster has
no dashboard, at the end of every attempt, and is no use there; `_free_workers` does its work."""


def share_out(config: TrainConfig, *, probe: bool = False) -> cluster.Layout:
    """How the run shares out the cluster as it is now; `probe` does not believe Ray that nodes are alive. Raises InputError
    where it does not fit."""
    return cluster.layout(
        cluster.alive_nodes(probe=probe),
        num_workers=config.scaling.num_workers,
        use_gpu=config.scaling.use_gpu,
        cpus_per_worker=config.scaling.cpus_per_worker,
        resources_per_worker=config.scaling.resources_per_worker,
        keep_data_off_workers=config.cluster.data_nodes == "auto",
    )


def wait_for_room(config: TrainConfig, note: Callable[[str], None]) -> cluster.Layout:
    """How the run shares out the cluster, once it has room. Raises InputError after failure.node_wait_s."""
    deadline_s = time.monotonic() + config.failure.node_wait_s
    said = False
    while True:
        try:
            return share_out(config, probe=True)
        except InputError as error:
            if time.monotonic() > deadline_s:
                raise InputError(f"waited {config.failure.node_wait_s:.0f} s for nodes; {error}") from None
            if not said:
                note(f"waiting for nodes: {error}")
                said = True
            time.sleep(_NODES_S)


def run_attempts(
    config: TrainConfig,
    folder: str,
    prepared: Any,
    shares: cluster.Layout,
    *,
    events: EventWriter,
    signals: Signals,
    note: Callable[[str], None],
) -> dict[str, Any] | None:
    """What a finished run's worker 0 returned; None where a signal ended the run before.

    Raises InputError for what the user can mend (never tried again), and what the last attempt failed with where
    failure.max_failures are used up.
    """
    failures = quick = number = 0
    groups = _placement_groups()
    while True:
        number += 1
        events.write("attempt", number=number, num_workers=shares.num_workers)
        start_s = time.monotonic()
        try:
            outcome = _attempt(config, folder, prepared, shares, signals)
        except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
            cause = cause_of(error)
            events.write("failure", cause=cause)
            _free_workers(groups)
            if signals.cause is not None:
                note(f"{cause}, before a last checkpoint was made")
                return None
            if not isinstance(error, PreemptionError):
                failures += 1
            if 0 <= config.failure.max_failures < failures:
                raise
            quick = quick + 1 if time.monotonic() - start_s < _QUICK_S else 0
            time.sleep(min(2.0 ** (quick - 2), _LONGEST_PAUSE_S) if quick > 1 else 0.0)
        else:
            if outcome is None or "stopped" not in outcome:
                return outcome
            if signals.cause is not None:
                return None
        shares = wait_for_room(config, note)


def _placement_groups() -> set[str]:
    """Of this driver, those that hold resources."""
    job = ray.get_runtime_context().get_job_id()
    return {
        name for name, group in placement_group_table().items() if name.endswith(job) and group["state"] != "REMOVED"
    }


def _free_workers(before: set[str]) -> None:
    """Gives back what a controller that died had reserved for its workers, and with it ends them."""
    for name in _placement_groups() - before:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))


def _attempt(
    config: TrainConfig, folder: str, prepared: Any, shares: cluster.Layout, signals: Signals
) -> dict[str, Any] | None:
    """One attempt; None where a signal ended it and the workers took longer than failure.grace_s to save."""
    request = StopRequest()
    assignment = Assignment(config, prepared, folder, shares.per_worker, request.mailbox)
    future: Future[dict[str, Any]] = Future()

    def fit() -> None:
        try:
            future.set_result(_fit(config, assignment, shares))
        except BaseException as error:
            future.set_exception(error)

    # In a thread of its own, so that this one can look around, and Ray Train leaves the signals alone.
    threading.Thread(target=fit, name="attempt", daemon=True).start()
    growth = _Growth(config, shares.num_workers)
    deadline_s = None
    with signals.held(), watched_requests(folder, request.mailbox):
        while not future.done():
            wait([future], timeout=_LOOK_S)
            if signals.cause is not None:
                deadline_s = deadline_s or time.monotonic() + config.failure.grace_s
                request.send(signals.cause)
                if time.monotonic() > deadline_s:
                    return None
            elif growth.possible():
                request.send(MORE_WORKERS)
    request.close()
    return future.result()


def _fit(config: TrainConfig, assignment: Assignment, shares: cluster.Layout) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rayrec-attempt-") as scratch:  # Ray Train is told of no checkpoint
        trainer = TorchTrainer(
            train_worker,  # type: ignore[arg-type]  # its value is handed on
            train_loop_config={"assignment": assignment},
            torch_config=TorchConfig(backend="nccl" if config.scaling.use_gpu else "gloo"),
            scaling_config=ray.train.ScalingConfig(
                num_workers=shares.num_workers,
                use_gpu=config.scaling.use_gpu,
                resources_per_worker=shares.worker_resources,
                placement_strategy=config.scaling.placement_strategy,
            ),
            run_config=ray.train.RunConfig(  # type: ignore[call-arg]  # typed as Train V1's
                name=config.name,
                storage_path=scratch,
                failure_config=ray.train.FailureConfig(max_failures=0),
                logging_config=ray.train.LoggingConfig(log_level="ERROR"),
                worker_runtime_env=worker_runtime_env(os.environ),
            ),
        )
        data_parallel_trainer.PlacementGroupCleanerCallback = functools.partial(  # type: ignore[misc,assignment]
            PlacementGroupCleanerCallback, stop_timeout=_CLEANER_S
        )
        try:
            return trainer.fit().return_value  # type: ignore[attr-defined]  # typed as Train V1's
        except ray.train.TrainingFailedError as error:
            for failure in _failures(error).values():
                if isinstance(failure, InputError):
                    raise InputError(str(failure)) from None
            raise


def _failures(error: BaseException) -> dict[int, BaseException]:
    """What each worker failed with, where it was the workers that did."""
    wrapped = getattr(error, "worker_failures", {})
    return {rank: _unwrapped(failure) for rank, failure in wrapped.items()}


def _unwrapped(error: BaseException) -> BaseException:
    inner = getattr(error, "cause", None) or getattr(error, "health_check_failure", None)
    return _unwrapped(inner) if isinstance(inner, BaseException) else error


def cause_of(error: BaseException) -> str:
    """One line on why an attempt failed."""
    if isinstance(error, PreemptionError):
        return "a node was taken away, as announced"
    failures = _failures(error)
    # Where a worker died the others fail too, for want of it.
    dead = sorted(rank for rank, failure in failures.items() if isinstance(failure, ray.exceptions.RayActorError))
    if dead:
        return f"worker {', '.join(map(str, dead))} died"
    if failures:
        rank, failure = min(failures.items())
        return f"worker {rank}: {_line(failure)}"
    return "the controller of Ray Train died" if isinstance(error, ray.exceptions.RayActorError) else _line(error)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


class _Growth:
    """Whether nodes that joined have given room for more workers, twice in a row and not too soon."""

    def __init__(self, config: TrainConfig, num_workers: int) -> None:
        self._config, self._num_workers = config, num_workers
        self._next_look_s = time.monotonic() + config.scaling.resize_interval_s
        self._seen = False

    def possible(self) -> bool:
        if self._num_workers == self._config.scaling.max_workers or time.monotonic() < self._next_look_s:
            return False
        self._next_look_s = time.monotonic() + _NODES_S
        try:
            more = share_out(self._config).num_workers > self._num_workers
        except InputError:  # nodes were lost: the attempt is about to fail
            more = False
        before, self._seen = self._seen, more
        return before and more
