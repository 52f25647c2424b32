"""Runs in processes that torchrun (or srun) has started, one a worker: the first of them is the driver too. Needs no Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from rayrec import machine
from rayrec.cluster import connection
from rayrec.cluster.connection import is_in_process
from rayrec.cluster.layout import Launched
from rayrec.config import InputError, line_of
from rayrec.data.engine import StreamEngine, ThreadEngine
from rayrec.observe.console import Console
from rayrec.training.launchers.base import Launch
from rayrec.training.preflight import layout_here
from rayrec.training.stop_monitor import unsaved_cause
from rayrec.workloads.base import TrainConfig

if TYPE_CHECKING:
    from rayrec.training.launchers.torchrun_worker import Meeting


def fitted(config: TrainConfig, launched: Launched) -> TrainConfig:
    """The configuration with so many workers as there are processes. Raises InputError for what only Ray has."""
    scaling = config.scaling
    wanted = {
        f"cluster.address {config.cluster.address}": not is_in_process(config.cluster.address),
        "scaling.resources_per_worker": bool(scaling.resources_per_worker),
        "cluster.object_store_bytes": config.cluster.object_store_bytes is not None,
    }
    for reason, given in wanted.items():
        if given:
            raise InputError(f"{reason}: needs Ray, and torchrun has started this process; leave one of the two out")
    return config.replace(scaling=scaling.replace(num_workers=launched.world_size))


class TorchrunLauncher:
    """See `Launcher`; of the first process."""

    on_ray: Final = False

    def __init__(self, config: TrainConfig, launched: Launched, meeting: Meeting) -> None:
        self._config, self._launched, self._meeting = config, launched, meeting

    def connect(self, folder: str, console: Console) -> None:
        pass

    def share_out(self, *, goes_on: bool, note: Callable[[str], None]) -> connection.Layout:
        here = self._config.scaling.replace(num_workers=self._launched.local_world_size)
        return layout_here(self._config.replace(scaling=here), cpus=machine.usable_cpus(granted=None))

    def engine(self, shares: connection.Layout, *, max_outage_s: float) -> StreamEngine:
        # The other processes wait meanwhile.
        return ThreadEngine(machine.usable_cpus(granted=None), max_outage_s=max_outage_s)

    def run(self, launch: Launch) -> dict[str, Any] | None:
        from rayrec.training.launchers.torchrun_worker import train_first

        signals = launch.signals
        launch.events.write("attempt", number=self._launched.restarts + 1, num_workers=self._launched.world_size)
        outcome = train_first(self._config, launch, launched=self._launched, meeting=self._meeting)
        if outcome is None:
            launch.events.write("failure", cause=unsaved_cause(signals.cause, self._config.failure), last=True)
            return None
        if "stopped" in outcome:
            signals.cause = signals.cause or outcome["stopped"]  # of another process
            return None
        return outcome

    def cause_of(self, error: BaseException) -> str:
        return line_of(error)
