"""What the driver hands the workers of an attempt; does not import torch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rayrec.data.engine import StreamEngine
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
