"""Runs in the driver's own process: one worker, in a thread, and data tasks as threads. Nothing else is started."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from rayrec import machine
from rayrec.cluster import connection
from rayrec.config import InputError, line_of
from rayrec.data.engine import StreamEngine, ThreadEngine
from rayrec.observe.console import Console
from rayrec.training.launchers.base import Launch
from rayrec.training.preflight import layout_here
from rayrec.training.stop_monitor import unsaved_cause
from rayrec.workloads.base import TrainConfig

_WORKER_MODULE: Final = "rayrec.training.launchers.process_worker"


class InProcessLauncher:
    """See `Launcher`. An error of the worker ends the run and is raised as it is: there is no other process that could fail."""

    on_ray: Final = False

    def __init__(self, config: TrainConfig, *, pause_at: float | None = None) -> None:
        self._config, self._pause_at = config, pause_at

    def connect(self, folder: str, console: Console) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise InputError(
                f"this process is one of {torch.distributed.get_world_size()} of a process group, and rayrec.train starts its "
                "workers itself; call it in a process without one"
            )
        modules = (_WORKER_MODULE, *self._config.workload.WORKER_MODULES)
        # No daemon: a process that ends in the middle of loading a library may crash.
        threading.Thread(target=_load, args=(modules,), name="imports").start()

    def share_out(self, *, goes_on: bool, note: Callable[[str], None]) -> connection.Layout:
        return layout_here(self._config, cpus=self._cpus())

    def engine(self, shares: connection.Layout, *, max_outage_s: float) -> StreamEngine:
        return ThreadEngine(self._cpus(), max_outage_s=max_outage_s)

    def run(self, launch: Launch) -> dict[str, Any] | None:
        from rayrec.training.launchers.process_worker import train_here  # which loads torch

        config = self._config
        launch.events.write("attempt", number=1, num_workers=1)
        engine = ThreadEngine(
            max(1, int(launch.shares.per_worker.max_cpus or 1)), max_outage_s=config.failure.max_outage_s
        )
        outcome = train_here(config, launch, engine=engine, cpus=self._cpus(), pause_at=self._pause_at)
        if outcome is None:
            launch.events.write("failure", cause=unsaved_cause(launch.signals.cause, config.failure), last=True)
            return None
        return None if "stopped" in outcome else outcome

    def cause_of(self, error: BaseException) -> str:
        return line_of(error)

    def _cpus(self) -> int:
        return machine.usable_cpus(granted=self._config.cluster.num_cpus)


def _load(modules: tuple[str, ...]) -> None:
    """Imports what the worker needs while data is prepared. What fails here fails again in the worker, which reports it."""
    with contextlib.suppress(Exception):
        for module in modules:
            importlib.import_module(module)
