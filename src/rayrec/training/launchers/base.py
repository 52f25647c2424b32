"""What starts a run's worker processes, and what of it the driver knows: Ray, or nothing but the driver's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rayrec.cluster.connection import IN_PROCESS, Layout, is_in_process
from rayrec.config import InputError
from rayrec.data.engine import StreamEngine
from rayrec.observe.console import Console
from rayrec.training.launchers.assignment import Launch
from rayrec.workloads.base import TrainConfig


class Launcher(Protocol):
    """Of one call of `rayrec.train`."""

    def connect(self, folder: str, console: Console) -> None:
        """Reaches what trains. Raises InputError if it cannot be reached, or cannot reach the run's storage and data."""
        ...

    def share_out(self, *, goes_on: bool, note: Callable[[str], None]) -> Layout:
        """Who gets which CPUs; waits for nodes if the run `goes_on`. Raises InputError if there is no room for the workers."""
        ...

    def engine(self, shares: Layout, *, max_outage_s: float) -> StreamEngine:
        """Runs data tasks of the driver, while no worker runs."""
        ...

    @property
    def on_ray(self) -> bool: ...

    def run(self, launch: Launch) -> dict[str, Any] | None:
        """Trains until the run is through -> what its worker 0 returned; None if a signal ended the run before. Raises what ended
        it otherwise."""
        ...

    def cause_of(self, error: BaseException) -> str:
        """One line on what ended the run."""
        ...


def launcher_of(config: TrainConfig) -> Launcher:
    """What the configuration and the environment ask for. Raises InputError for settings that contradict each other."""
    if trains_in_process(config):
        from rayrec.training.launchers.process_launcher import InProcessLauncher

        return InProcessLauncher(config)
    from rayrec.training.launchers.ray_launcher import RayLauncher

    return RayLauncher(config)


def trains_in_process(config: TrainConfig) -> bool:
    """Whether the run needs no Ray: one worker, nothing that only Ray has, and no address. Raises InputError for the address
    `none` with what only Ray has."""
    wanted = {
        f"scaling.num_workers {config.scaling.max_workers}": config.scaling.max_workers > 1,
        "scaling.resources_per_worker": bool(config.scaling.resources_per_worker),
        "cluster.object_store_bytes": config.cluster.object_store_bytes is not None,
    }
    reasons = [reason for reason, given in wanted.items() if given]
    if config.cluster.address == IN_PROCESS and reasons:
        raise InputError(
            f"{reasons[0]}: needs Ray, and --cluster.address {IN_PROCESS} asks for none; leave one of the two out"
        )
    return not reasons and is_in_process(config.cluster.address)
