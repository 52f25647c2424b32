"""Launcher interface: lays out, starts, watches and logs a run's worker processes, on Ray or in
existing processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING, Any, Final, Protocol

from rayrec.checkpoint import write_token
from rayrec.cluster.layout import Layout, Node, layout
from rayrec.data.engine import StreamEngine
from rayrec.observe.timing import Stopwatch
from rayrec.storage.urls import local_path
from rayrec.training.stop_monitor import ControlChannel, GracePeriod, Signals
from rayrec.workloads.base import TrainConfig, WarmStart
from rayrec.workloads.run_config import FailureConfig

if TYPE_CHECKING:
    from rayrec.observe.console import Console
    from rayrec.observe.events import EventWriter
    from rayrec.observe.tracking.config import Makers


_POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    config: TrainConfig
    folder: str
    """Absolute path of the run."""
    prepared: Any
    """Result of the workload's `prepare`."""
    layout: Layout
    since_s: float
    """End of the driver's last start stage, or of the previous attempt, in seconds since 1970."""
    warm_start: WarmStart | None = None
    """Weights that a run without a checkpoint starts with. None for start values."""


@dataclasses.dataclass(frozen=True)
class Driver:
    """Output of a launcher, and its signals."""

    events: EventWriter
    signals: Signals
    note: Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptContext(PreparedRun):
    """Input of every worker of an attempt; picklable."""

    engine: StreamEngine
    """Runs the data tasks of each worker."""
    channel: ControlChannel
    storage_token: str
    """File in the run's folder that every worker must find."""
    pause_at: float | None = None
    """Share of the run's steps after which it pauses. None for all of them."""
    started_s: float = dataclasses.field(default_factory=time.time)
    """Start of the attempt, in seconds since 1970."""

    @classmethod
    def create(
        cls,
        run: PreparedRun,
        engine: StreamEngine,
        channel: ControlChannel,
        *,
        pause_at: float | None = None,
    ) -> AttemptContext:
        """Return the input of a run's workers, after writing the file that they must find."""
        token = write_token(run.folder, max_outage_s=run.config.failure.max_outage_s)
        return cls(
            **vars(run), engine=engine, channel=channel, storage_token=token, pause_at=pause_at
        )

    def stopwatch(self) -> Stopwatch:
        """Return a stopwatch for a worker's start, beginning after the driver's last stage."""
        stopwatch = Stopwatch(self.since_s)
        stopwatch.lap("attempt", at_s=self.started_s)
        return stopwatch


def follow_attempt(
    work: Callable[[], dict[str, Any]],
    signals: Signals,
    failure: FailureConfig,
    *,
    request_stop: Callable[[str], None],
    saved_bytes: Callable[[], int],
    poll: Callable[[], str | None] = lambda: None,
) -> dict[str, Any] | None:
    """Run an attempt in a thread, and request a stop after a signal or when `poll` returns a
    reason. Returns None after a signal if the workers do not save within their `GracePeriod`.
    """
    # A Future instead of the thread's end: it also carries the error, and can be waited for with a
    # timeout while signals arrive.
    future: Future[dict[str, Any]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    # The attempt runs in a thread, since Python handles signals between the bytecodes of the main
    # thread only: a main thread inside Ray would not see them. Daemon, because after the grace
    # period the process ends without it.
    thread = threading.Thread(target=run, name="attempt", daemon=True)
    thread.start()
    grace: GracePeriod | None = None
    with signals.deferred():
        while not future.done():
            wait([future], timeout=_POLL_S)
            if signals.cause is not None:
                grace = grace or GracePeriod(failure, now_s=time.monotonic())
                request_stop(signals.cause)
                if not future.done() and grace.expired(time.monotonic(), saved_bytes=saved_bytes()):
                    return None
            elif (reason := poll()) is not None:
                request_stop(reason)
    thread.join()
    return future.result()


class Launcher(Protocol):
    """Launcher of one `rayrec.train` call: RayLauncher or ProcessLauncher."""

    def connect(self, folder: str, console: Console) -> None:
        """Reach the workers' machines. Raises InputError if they, or the run's storage and data,
        cannot be reached.
        """

    def allocate_resources(self, *, resumes: bool, note: Callable[[str], None]) -> Layout:
        """Assign CPUs; wait for nodes if the run `resumes`. Raises InputError if the workers do not
        fit.
        """

    def engine(self, layout: Layout, *, max_outage_s: float) -> StreamEngine:
        """Return the engine of the driver's data tasks while no worker runs."""

    def trackers(self) -> Makers:
        """Return trackers specific to this launcher."""

    def run(self, run: PreparedRun, driver: Driver) -> dict[str, Any] | None:
        """Train until the run ends; return worker 0's result, or None after a signal or pause.
        Raises the run's error.
        """

    def cause_of(self, error: BaseException) -> str:
        """Describe the error that ended the run in one line."""

    def close(self) -> None:
        """End what `connect` began for this run, also after an error. The connection to Ray
        stays.
        """


def local_layout(config: TrainConfig, *, cpus: int) -> Layout:
    """Allocate `cpus` of this machine to the run. Raises InputError if its workers do not fit."""
    resources = {"CPU": float(cpus)}
    if config.scaling.use_gpu:
        import torch

        resources["GPU"] = float(torch.cuda.device_count())
    return compute_layout(config, [Node("this machine", resources)])


def compute_layout(config: TrainConfig, nodes: list[Node]) -> Layout:
    scaling = config.scaling
    return layout(
        nodes,
        num_workers=scaling.num_workers,
        use_gpu=scaling.use_gpu,
        cpus_per_worker=scaling.cpus_per_worker,
        resources_per_worker=scaling.resources_per_worker,
        data_nodes=config.cluster.data_nodes,
        task_memory_bytes=config.cluster.data_task_memory_bytes,
    )


# -- A worker's library logs, in a file instead of the terminal

_MAX_BYTES: Final = 64 << 20
"""Maximum size of a log file. One previous file is kept."""
_LOGGERS: Final = (
    "torchrec",
    "fbgemm_gpu",
    "ray.data",
    "torch",
    "torch.distributed",
    "transformers",
    "accelerate",
)
"""Loggers with their own handlers."""

_logger = logging.getLogger(__name__)
_warnings_logger = logging.getLogger("py.warnings")


# Runs of several threads share the root logger. The first one redirects it, and the last one
# restores it, so opening and closing are atomic, and wait for imports.
_open_lock: Final = threading.Lock()
_open_logs: Final[list[logging.Handler]] = []
_restore_logging: Callable[[], None] | None = None


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Keep libraries that are imported within the context from adding a handler to the root logger,
    through which all their warnings would go to the terminal: `logging.info` of a module
    (fbgemm_gpu) adds one if there is none.
    """
    root = logging.getLogger()
    # What a root logger without handlers uses, so that records of other threads are not lost
    handler = logging.lastResort or logging.NullHandler()
    with _open_lock:
        root.addHandler(handler)
        try:
            yield
        finally:
            root.removeHandler(handler)


@contextlib.contextmanager
def worker_logs(path: str, *, rank: int) -> Iterator[None]:
    """Write this process's Python logs and warnings to a local file of the run within the context.
    If `path` cannot be opened, they go to standard error; if it is in a store, only warnings and
    errors do. Existing handlers still receive their records. Native code always writes to standard
    error. Runs in several threads of a process log to all their files, and the last one restores
    the caller's logging.
    """
    global _restore_logging
    handler, error = _handler(path)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    with _open_lock:
        if not _open_logs:
            _restore_logging = _redirect_logging()
        _open_logs.append(handler)
        root.handlers = [*root.handlers, handler]
    if error is not None:
        _logger.warning("Cannot open %s, logging to standard error instead (%s)", path, error)
    try:
        yield
    finally:
        with _open_lock:
            _open_logs.remove(handler)
            root.handlers = [other for other in root.handlers if other is not handler]
            if not _open_logs and _restore_logging is not None:
                _restore_logging()
        handler.close()


def _redirect_logging() -> Callable[[], None]:
    """Make all loggers pass their records to the root logger, and warnings too. Returns a function
    that undoes it.
    """
    root = logging.getLogger()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    level = root.level
    handlers = root.handlers
    levels = [other.level for other in handlers]
    for other in handlers:
        other.setLevel(max(other.level, level))
    root.setLevel(logging.INFO)
    for logger in loggers:
        logger.handlers = []
        logger.propagate = True
    shown = warnings.showwarning
    # As logging.captureWarnings, which would not restore the caller's function.
    warnings.showwarning = lambda *warning: _warnings_logger.warning(
        "%s", warnings.formatwarning(*warning[:4], *warning[5:])
    )

    def restore() -> None:
        warnings.showwarning = shown
        root.setLevel(level)
        root.handlers = handlers
        for other, its in zip(handlers, levels, strict=True):
            other.setLevel(its)
        for logger, its_handlers, propagate in before:
            logger.handlers = its_handlers
            logger.propagate = propagate

    return restore


def _handler(path: str) -> tuple[logging.Handler, OSError | None]:
    """Return the file's handler, or one for standard error and the reason, if any."""
    terminal = logging.StreamHandler(sys.stderr)
    file = local_path(path)
    if file is None:
        # Libraries log some 60 lines of level INFO in each process, too many for a terminal
        terminal.setLevel(logging.WARNING)
        return terminal, None
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        return RotatingFileHandler(file, maxBytes=_MAX_BYTES, backupCount=1), None
    except OSError as error:  # e.g. a full disk, which fails the run by itself if it matters
        return terminal, error
