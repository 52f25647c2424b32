"""What starts a run's worker processes, and what of it the driver knows: Ray, or nothing but the driver's own process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from rayrec.cluster.connection import IN_PROCESS, Layout, is_in_process
from rayrec.config import InputError
from rayrec.data.engine import StreamEngine
from rayrec.observe.console import Console
from rayrec.observe.timing import Stopwatch
from rayrec.training.stop_monitor import Mailbox
from rayrec.workloads.base import TrainConfig, WarmStart

if TYPE_CHECKING:
    from rayrec.cluster.connection import Layout
    from rayrec.observe.events import EventWriter
    from rayrec.training.stop_monitor import Signals


@dataclasses.dataclass(frozen=True)
class Launch:
    """Input of a launcher: a prepared run and where its driver reports."""

    folder: str
    """Absolute path of the run."""
    prepared: Any
    """Result of the workload's `prepare`."""
    shares: Layout
    since_s: float
    """End of the driver's last stage of the start, or of the attempt before, in seconds since 1970."""
    warm_start: WarmStart | None
    """Weights that a run without a checkpoint starts with. None for start values."""
    events: EventWriter
    signals: Signals
    note: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What the driver hands every worker."""

    config: TrainConfig
    prepared: Any
    """Of the workload's `prepare`."""
    folder: str
    """The run's folder, absolute."""
    engine: StreamEngine
    """Runs the data tasks of each worker."""
    mailbox: Mailbox
    """Where the driver leaves its wish to stop."""
    storage_token: str
    """File that the driver has written into the run's folder, for all workers to find."""
    since_s: float
    """When the driver's last stage of the start, or the attempt before, ended, seconds since 1970."""
    warm_start: WarmStart | None = None
    """Of a run that starts with the weights of another one and has no checkpoint yet."""
    pause_at: float | None = None
    """Share of the run's steps after which it pauses; None: at its end."""
    begun_s: float = dataclasses.field(default_factory=time.time)
    """When the driver has begun the attempt, seconds since 1970."""

    @classmethod
    def of(cls, launch: Launch, config: TrainConfig, engine: StreamEngine, mailbox: Mailbox, token: str) -> Assignment:
        """Return what the workers of a launch need."""
        return cls(config, launch.prepared, launch.folder, engine, mailbox, token, launch.since_s, launch.warm_start)

    def stopwatch(self) -> Stopwatch:
        """Times the stages of a worker's start, after that of the driver which begins the attempt."""
        stopwatch = Stopwatch(self.since_s)
        stopwatch.lap("attempt", at_s=self.begun_s)
        return stopwatch


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
