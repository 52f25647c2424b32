"""The worker of a run in the driver's own process."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Protocol

import torch
from torch import distributed

from rayrec import storage
from rayrec.checkpoint import write_token
from rayrec.data.engine import STOP_ASKED, StreamEngine
from rayrec.training.launchers.base import Assignment, Launch
from rayrec.training.process_group import group_arguments, use_device
from rayrec.training.profiling import watched_requests
from rayrec.training.stop_monitor import Grace, LocalMailbox, Mailbox, Signals
from rayrec.training.worker import Seat, run_worker
from rayrec.training.worker_logs import worker_logs
from rayrec.workloads.base import TrainConfig

_LOOK_S = 0.1


def train_here(
    config: TrainConfig, launch: Launch, *, engine: StreamEngine, cpus: int, pause_at: float | None = None
) -> dict[str, Any] | None:
    """What `run_worker` returns; None if a signal ended the run and the worker did not save within its `Grace`."""
    device = torch.device("cuda", torch.cuda.current_device()) if config.scaling.use_gpu else torch.device("cpu")
    mailbox = LocalMailbox()
    token = write_token(launch.folder, max_outage_s=config.failure.max_outage_s)
    assignment = dataclasses.replace(Assignment.of(launch, config, engine, mailbox, token), pause_at=pause_at)
    return watched(
        lambda: _work(assignment, device, cpus=cpus), config, launch.folder, mailbox=mailbox, signals=launch.signals
    )


class OwnMailbox(Mailbox, Protocol):
    """A mailbox, as a process that watches a worker has it."""

    def send(self, cause: str) -> None: ...

    def written_bytes(self) -> int: ...


def watched(
    work: Callable[[], dict[str, Any]],
    config: TrainConfig,
    folder: str | None,
    *,
    mailbox: OwnMailbox,
    signals: Signals,
) -> dict[str, Any] | None:
    """What `work` returns, done by a thread, so that this one can pass on signals and the requests of a run's `folder`; None if a
    signal ended it and the worker did not save within its `Grace`."""
    future: Future[dict[str, Any]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="worker", daemon=True).start()
    grace: Grace | None = None
    requests = contextlib.nullcontext() if folder is None else watched_requests(folder, mailbox)
    with signals.held(), requests:
        while not future.done():
            wait([future], timeout=_LOOK_S)
            if signals.cause is not None:
                grace = grace or Grace(config.failure, now_s=time.monotonic())
                mailbox.send(signals.cause)
                if not future.done() and grace.over(time.monotonic(), written_bytes=mailbox.written_bytes()):
                    return None
    return future.result()


def _work(assignment: Assignment, device: torch.device, *, cpus: int) -> dict[str, Any]:
    config = assignment.config
    use_device(device)
    stopwatch = assignment.stopwatch()
    seat = Seat(rank=0, world_size=1, device=device, node=platform.node(), cpus=cpus, stopwatch=stopwatch)
    return work(assignment, seat, lambda: _process_group(config, device))


def work(
    assignment: Assignment, seat: Seat, process_group: Callable[[], contextlib.AbstractContextManager[None]]
) -> dict[str, Any]:
    """A worker in this process and thread."""
    threads = torch.get_num_threads()
    log = storage.join(assignment.folder, "logs", f"worker_{seat.rank}.log")
    try:
        with worker_logs(log, rank=seat.rank), process_group():
            seat.stopwatch.lap("process_group")
            return run_worker(assignment, seat)
    finally:
        torch.set_num_threads(threads)
        STOP_ASKED.clear()  # what this process does next waits for its data


@contextlib.contextmanager
def _process_group(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Of this process alone; that of the caller if it has one."""
    if distributed.is_initialized():
        yield
        return
    distributed.init_process_group(
        store=distributed.HashStore(),
        rank=0,
        world_size=1,
        **group_arguments(device, timeout_s=config.failure.max_outage_s + config.failure.collective_timeout_s),
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()
