"""Pool of Ray actors, each of which trains parts of trials sequentially."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import ray

from rayrec.cluster import connection
from rayrec.config import InputError
from rayrec.observe.console import Console
from rayrec.training.stop_monitor import Signals
from rayrec.tuning.space import TuneConfig
from rayrec.tuning.trials import Job, failed, train_part
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.run_config import ClusterConfig

_POLL_S: Final = 0.2
_NOTE_S: Final = 30.0
"""Seconds without a training process before a note."""
_MAX_FAILED_STARTS: Final = 10
_NODES_POLL_S: Final = 10.0
"""Seconds between polls for new nodes."""


@contextlib.contextmanager
def ray_pool(
    cluster: ClusterConfig, options: TuneConfig, config: TrainConfig, *, console: Console
) -> Iterator[RayPool]:
    """Open a pool on the Ray cluster of `cluster`, or a local one, for trials like `config`. Raises
    InputError if none fits.
    """
    connection.connect(cluster.address, **cluster.connection, log_to_driver=console.verbose)
    with Signals() as signals, signals.deferred():
        pool = RayPool(
            options, signals, max_failures=config.failure.max_failures, note=console.note
        )
        try:
            yield pool
        finally:
            pool.close()


@final
class RayPool:
    """Trial pool (see `rayrec.tuning.trials.Pool`) with as many processes as the cluster has room
    for, kept until the end. If a process is killed (out of memory, node loss), its trial resumes in
    another, up to `max_failures` times (-1: any).
    """

    def __init__(
        self,
        options: TuneConfig,
        signals: Signals,
        *,
        max_failures: int,
        note: Callable[[str], Any],
        train: Callable[..., None] = train_part,
    ) -> None:
        self._options = options
        self._signals = signals
        self._max_failures = max_failures
        self._train = train
        self._note = note
        self._queue: deque[Job] = deque()
        self._num_kills: Counter[int] = Counter()
        self._starting: dict[Any, Any] = {}
        """Starting processes, by the reference of their `ready` call."""
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, Job]] = {}
        """Processes and their jobs, by the reference of their `run` call."""
        self._failed_starts = 0
        self._num_fitting = 0
        self._polled_s = -_NODES_POLL_S
        if not self._capacity():
            raise InputError(
                f"tune: no node has {options.cpus_per_trial} CPUs and {options.gpus_per_trial:g} "
                "GPUs for a trial. Lower --tune.cpus-per-trial or --tune.gpus-per-trial."
            )

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def next(self) -> Job:
        note_s = time.monotonic() + _NOTE_S
        while True:
            if not self._busy and time.monotonic() > note_s:
                self._note("Waiting for nodes or resources: no trial process has started")
                note_s = math.inf
            self._start_processes()
            while self._queue and self._idle:
                process = self._idle.pop()
                job = self._queue.popleft()
                self._busy[process.run.remote(job)] = process, job
            awaited = [*self._busy, *self._starting]
            done, _ = ray.wait(awaited, num_returns=1, timeout=_POLL_S) if awaited else ([], [])
            if not awaited:  # All nodes were lost.
                time.sleep(_POLL_S)
            if self._signals.cause is not None:
                self._stop()
                self._signals.throw()
            for reference in done:
                job_done = self._take(reference)
                if job_done is not None:
                    return job_done

    def close(self) -> None:
        """Kill all processes."""
        for process in [
            *self._idle,
            *self._starting.values(),
            *(process for process, _ in self._busy.values()),
        ]:
            ray.kill(process)

    def _start_processes(self) -> None:
        num_processes = len(self._idle) + len(self._starting) + len(self._busy)
        for _ in range(
            min(
                self._capacity() - num_processes,
                len(self._queue) - len(self._idle) - len(self._starting),
            )
        ):
            process = _Process.options(  # type: ignore[attr-defined]  # an actor's class
                num_cpus=self._options.cpus_per_trial,
                num_gpus=self._options.gpus_per_trial,
                max_concurrency=2,
            ).remote(self._train)
            self._starting[process.ready.remote()] = process

    def _capacity(self) -> int:
        """Return the number of processes that fit on the cluster, ignoring resources in use by
        other jobs.
        """
        if time.monotonic() - self._polled_s >= _NODES_POLL_S:
            self._polled_s = time.monotonic()
            cpus = self._options.cpus_per_trial
            gpus = self._options.gpus_per_trial
            self._num_fitting = sum(
                _num_fitting(node.resources, cpus=cpus, gpus=gpus)
                for node in connection.alive_nodes()
            )
        return (
            self._num_fitting
            if self._options.concurrent is None
            else min(self._num_fitting, self._options.concurrent)
        )

    def _take(self, reference: Any) -> Job | None:
        """Process a completed call. Returns its job, or None if a process has started or the job is
        retried.
        """
        starting = self._starting.pop(reference, None)
        process, job = (starting, None) if starting is not None else self._busy.pop(reference)
        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            ray.kill(process)
            if job is None:
                self._failed_starts += 1
                if self._failed_starts >= _MAX_FAILED_STARTS:
                    raise InputError(
                        f"tune: {self._failed_starts} trial processes in a row failed to start "
                        f"({' '.join(str(error).split())[-200:]}). See Ray's worker logs."
                    ) from None
                return None  # Another process replaces it.
            self._num_kills[job.number] += 1
            if 0 <= self._max_failures < self._num_kills[job.number]:
                failed(
                    job,
                    f"process killed {self._num_kills[job.number]} times ({type(error).__name__})",
                    can_retry=True,
                )
                return job
            self._queue.appendleft(job)
            return None
        self._failed_starts = 0
        self._idle.append(process)
        return job

    def _stop(self) -> None:
        """Stop all running trials after they save. They take at most `failure.max_grace_s`
        seconds.
        """
        for process, _ in self._busy.values():
            process.stop.remote()
        if self._busy:
            ray.wait([*self._busy], num_returns=len(self._busy))


@ray.remote
class _Process:
    """Actor that trains parts of trials."""

    def __init__(self, train: Callable[..., None]) -> None:
        self._train = train
        self._stop = threading.Event()

    def ready(self) -> None:
        pass

    def run(self, job: Job) -> None:
        with contextlib.suppress(SystemExit):  # The trial was stopped.
            self._train(job, stop=self._stop)

    def stop(self) -> None:
        self._stop.set()


def _num_fitting(resources: dict[str, float], *, cpus: int, gpus: float) -> int:
    """Return the number of trials that fit on a node with these resources."""
    return int(
        min(
            [
                resources.get(name, 0.0) / each
                for name, each in (("CPU", cpus), ("GPU", gpus))
                if each
            ]
        )
        + 1e-9
    )
