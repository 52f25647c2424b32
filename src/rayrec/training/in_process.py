"""Runs in the driver's own process: one worker, in a thread, and data tasks as threads. Nothing else is started."""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed

from rayrec import machine, storage
from rayrec.checkpoint import write_token
from rayrec.config import InputError
from rayrec.data.engine import StreamEngine
from rayrec.data.threads import ThreadEngine
from rayrec.launch import cluster
from rayrec.observe.console import Console
from rayrec.observe.events import EventWriter
from rayrec.observe.start_up import Stopwatch
from rayrec.training.grace import Grace, unsaved_cause
from rayrec.training.mailbox import LocalMailbox
from rayrec.training.preflight import layout_here
from rayrec.training.profiling import watched_requests
from rayrec.training.signals import Signals
from rayrec.training.worker import Assignment, Seat, run_worker
from rayrec.training.worker_logs import worker_logs
from rayrec.workloads.base import TrainConfig

_LOOK_S = 0.1


class InProcessLauncher:
    """See `Launcher`. An error of the worker ends the run and is raised as it is: there is no other process that could fail."""

    on_ray: Final = False

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def connect(self, folder: str, console: Console) -> None:
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            raise InputError(
                f"this process is one of {distributed.get_world_size()} of a process group, and rayrec.train starts its workers "
                "itself; call it in a process without one"
            )

    def share_out(self, *, goes_on: bool, note: Callable[[str], None]) -> cluster.Layout:
        return layout_here(self._config)

    def engine(self, shares: cluster.Layout, *, max_outage_s: float) -> StreamEngine:
        return ThreadEngine(self._cpus(), max_outage_s=max_outage_s)

    def run(
        self,
        folder: str,
        prepared: Any,
        shares: cluster.Layout,
        *,
        events: EventWriter,
        signals: Signals,
        note: Callable[[str], None],
    ) -> dict[str, Any] | None:
        config = self._config
        events.write("attempt", number=1, num_workers=1)
        mailbox = LocalMailbox()
        data_threads = max(1, int(shares.per_worker.max_cpus or 1))
        assignment = Assignment(
            config,
            prepared,
            folder,
            ThreadEngine(data_threads, max_outage_s=config.failure.max_outage_s),
            mailbox,
            write_token(folder, max_outage_s=config.failure.max_outage_s),
        )
        outcome = _watched(
            lambda: _work(assignment, cpus=self._cpus()), config, folder, mailbox=mailbox, signals=signals
        )
        if outcome is None:
            events.write("failure", cause=unsaved_cause(signals.cause, config.failure), last=True)
            return None
        return None if "stopped" in outcome else outcome

    def cause_of(self, error: BaseException) -> str:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if isinstance(error, InputError):
            return " ".join(lines)
        return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__

    def _cpus(self) -> int:
        return machine.usable_cpus(granted=self._config.cluster.num_cpus)


def _watched(
    work: Callable[[], dict[str, Any]], config: TrainConfig, folder: str, *, mailbox: LocalMailbox, signals: Signals
) -> dict[str, Any] | None:
    """What `work` returns, done by a thread, so that this one can pass on signals and requests; None if a signal ended it and the
    worker did not save within its `Grace`."""
    future: Future[dict[str, Any]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="worker", daemon=True).start()
    grace: Grace | None = None
    with signals.held(), watched_requests(folder, mailbox):
        while not future.done():
            wait([future], timeout=_LOOK_S)
            if signals.cause is not None:
                grace = grace or Grace(config.failure, now_s=time.monotonic())
                mailbox.send(signals.cause)
                if not future.done() and grace.over(time.monotonic(), written_bytes=mailbox.written_bytes()):
                    return None
    return future.result()


def _work(assignment: Assignment, *, cpus: int) -> dict[str, Any]:
    config = assignment.config
    device = torch.device("cuda", torch.cuda.current_device()) if config.scaling.use_gpu else torch.device("cpu")
    stopwatch = Stopwatch(assignment.begun_s)
    seat = Seat(rank=0, world_size=1, device=device, node=platform.node(), cpus=cpus, stopwatch=stopwatch)
    threads = torch.get_num_threads()
    log = storage.join(assignment.folder, "logs", "worker_0.log")
    try:
        with worker_logs(log, rank=0), _process_group(config):
            stopwatch.lap("process_group")
            return run_worker(assignment, seat)
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _process_group(config: TrainConfig) -> Iterator[None]:
    """Of this process alone; that of the caller if it has one."""
    if distributed.is_initialized():
        yield
        return
    distributed.init_process_group(
        "nccl" if config.scaling.use_gpu else "gloo",
        store=distributed.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=config.failure.max_outage_s + config.failure.collective_timeout_s),
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()
