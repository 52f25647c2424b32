"""Launcher without Ray, in threads of this process or in one process per worker, started by
torchrun or srun.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from rayrec.cluster.connection import is_in_process
from rayrec.cluster.layout import Layout, TorchrunEnv
from rayrec.config import InputError, error_line
from rayrec.data.engine import StreamEngine, ThreadEngine
from rayrec.observe.console import Console
from rayrec.training.launchers.base import Driver, PreparedRun, local_layout, quiet_imports
from rayrec.training.stop_monitor import unsaved_cause
from rayrec.workloads.base import TrainConfig

if TYPE_CHECKING:
    from rayrec.observe.tracking.config import Makers
    from rayrec.training.launchers.process_worker import StoreRendezvous

_WORKER_MODULE: Final = "rayrec.training.launchers.process_worker"


def fitted(config: TrainConfig, torchrun: TorchrunEnv) -> TrainConfig:
    """Return the configuration with one worker per process. Raises InputError for Ray-only
    settings.
    """
    scaling = config.scaling
    requires_ray = {
        f"cluster.address {config.cluster.address}": not is_in_process(config.cluster.address),
        **scaling.ray_only,
        **config.cluster.ray_only,
    }
    for reason, is_set in requires_ray.items():
        if is_set:
            raise InputError(
                f"{reason}: needs Ray, but torchrun has started this process. Omit one of the two"
            )
    return config.replace(scaling=scaling.replace(num_workers=torchrun.world_size))


class ProcessLauncher:
    """Launcher in the first process. A worker's error ends the run unchanged, because no other
    process could restart it.
    """

    def __init__(
        self,
        config: TrainConfig,
        rendezvous: StoreRendezvous | None = None,
        *,
        pause_at: float | None = None,
    ) -> None:
        """Create the launcher. `rendezvous`: of torchrun's processes; None to train alone."""
        self._config = config
        self._rendezvous = rendezvous
        self._pause_at = pause_at
        self._env = (
            TorchrunEnv.alone(config.cluster.num_cpus) if rendezvous is None else rendezvous.env
        )
        self._imports: threading.Thread | None = None

    def connect(self, folder: str, console: Console) -> None:
        if self._rendezvous is not None:
            return
        torch = sys.modules.get("torch")
        if (
            torch is not None
            and torch.distributed.is_initialized()
            and torch.distributed.get_world_size() > 1
        ):
            raise InputError(
                f"this process is one of {torch.distributed.get_world_size()} of a process group, "
                "but rayrec.train starts its workers itself. Call it in a process without a group"
            )

        def load() -> None:
            # an error occurs again in the worker, which reports it
            with contextlib.suppress(Exception), quiet_imports():
                for module in (_WORKER_MODULE, *self._config.workload.WORKER_MODULES):
                    importlib.import_module(module)

        # While data is prepared. Not a daemon: a process that exits while loading a library may
        # crash.
        self._imports = threading.Thread(target=load, name="imports")
        self._imports.start()

    def allocate_resources(self, *, resumes: bool, note: Callable[[str], None]) -> Layout:
        scaling = self._config.scaling.replace(num_workers=self._env.local_world_size)
        return local_layout(self._config.replace(scaling=scaling), cpus=self._env.usable_cpus)

    def engine(self, layout: Layout, *, max_outage_s: float) -> StreamEngine:
        # Other processes are idle meanwhile.
        return ThreadEngine(self._env.usable_cpus, max_outage_s=max_outage_s)

    def trackers(self) -> Makers:
        return {}

    def run(self, run: PreparedRun, driver: Driver) -> dict[str, Any] | None:
        # imports torch
        from rayrec.training.launchers.process_worker import StoreRendezvous, train_first

        signals = driver.signals
        env = self._env
        driver.events.write("attempt", number=env.restarts + 1, num_workers=env.world_size)
        with contextlib.ExitStack() as stack:
            rendezvous = self._rendezvous or stack.enter_context(
                contextlib.closing(StoreRendezvous.join(env))
            )
            outcome = train_first(run, signals, rendezvous, pause_at=self._pause_at)
        if outcome is None:
            driver.events.write(
                "failure", cause=unsaved_cause(signals.cause, run.config.failure), last=True
            )
            return None
        if "stopped" not in outcome:
            return outcome
        if not outcome.get("paused"):
            signals.cause = signals.cause or outcome["stopped"]  # stopped by another process
        return None

    def cause_of(self, error: BaseException) -> str:
        return error_line(error)

    def close(self) -> None:
        if self._imports is not None:  # still running after an error of `prepare`
            self._imports.join()
