"""Pool of Ray tasks that train parts of trials."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import ray

from rayrec.cluster import connection
from rayrec.config import InputError, error_line
from rayrec.observe.console import Console
from rayrec.training.stop_monitor import Signals
from rayrec.tuning.space import TuneConfig
from rayrec.tuning.trials import Job, PartResult, train_part
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.run_config import ClusterConfig

_POLL_S: Final = 0.2
_LOST: Final = (
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
)
"""Errors of a task whose process or node was lost."""


@contextlib.contextmanager
def ray_pool(
    cluster: ClusterConfig, options: TuneConfig, config: TrainConfig, *, console: Console
) -> Iterator[RayPool]:
    """Open a pool on the Ray cluster of `cluster`, or a local one, for trials like `config`. Raises
    InputError if none fits.
    """
    connection.connect(cluster.address, **cluster.connection, log_to_driver=console.verbose)
    # A signal must not interrupt Ray's calls halfway: tasks would run on without an owner.
    with Signals() as signals, signals.deferred():
        pool = RayPool(options, signals, max_failures=config.failure.max_failures)
        if not _num_fitting(options, free=True):
            console.note("Waiting for nodes or resources: other jobs use all that fit a trial")
        try:
            yield pool
        finally:
            pool.stop()


@final
# What becomes of a part:
#
#   the task returns          its result, which may be a failure of the trial's settings
#   its process or node dies  the part runs again, before the waiting ones, from its checkpoint
#   too many deaths           given up after `max_failures`; the next search retries it
#   the task cannot start     given up; the next search retries it
#   a signal                  all tasks are canceled and awaited: each saves, as on Ctrl-C
class RayPool:
    """Pool with as many tasks as Ray has room for. If a task's process is killed (out of memory,
    node loss), its trial resumes in another, up to `max_failures` times (-1: any).
    """

    def __init__(
        self,
        options: TuneConfig,
        signals: Signals,
        *,
        max_failures: int,
        train: Callable[[Job], PartResult] = train_part,
    ) -> None:
        if not _num_fitting(options):
            raise InputError(
                f"tune: no node has {options.cpus_per_trial} CPUs and {options.gpus_per_trial:g} "
                "GPUs for a trial. Lower --tune.cpus-per-trial or --tune.gpus-per-trial."
            )
        self._options = options
        self._signals = signals
        self._max_failures = max_failures
        # Retried here, because Ray retries without a limit if a node has too little memory.
        self._task = ray.remote(train).options(
            num_cpus=options.cpus_per_trial, num_gpus=options.gpus_per_trial, max_retries=0
        )
        self._running: dict[Any, Job] = {}
        """Jobs by the reference of their task's result."""
        self._num_kills: Counter[int] = Counter()

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, PartResult]]:
        """Train parts concurrently and return each when it ends. On a signal, raises
        KeyboardInterrupt or SystemExit after all saved.
        """
        waiting = deque(jobs)
        while waiting or self._running:
            # Ray itself waits for resources, so that all jobs are sent without a limit.
            while waiting and len(self._running) < (self._options.concurrent or math.inf):
                job = waiting.popleft()
                connection.ship_code(job.config)
                self._running[self._task.remote(job)] = job
            # A limit, because signals are deferred and looked for here.
            done, _ = ray.wait([*self._running], timeout=_POLL_S)
            if self._signals.cause is not None:
                self.stop()
                self._signals.throw()
            for reference in done:
                job = self._running.pop(reference)
                result = self._result(job, reference)
                if result is None:
                    waiting.appendleft(job)
                else:
                    yield job, result

    def stop(self) -> None:
        """Interrupt all tasks and wait until their trials have saved, which takes at most
        `failure.max_grace_s` seconds.
        """
        # Not `force`: the tasks get a KeyboardInterrupt, and save before they end.
        for reference in self._running:
            ray.cancel(reference)
        if self._running:
            ray.wait([*self._running], num_returns=len(self._running))

    def _result(self, job: Job, reference: Any) -> PartResult | None:
        """Return the result of a completed task, or None if its job is to run again."""
        try:
            result: PartResult = ray.get(reference)
            return result
        except _LOST as error:
            self._num_kills[job.number] += 1
            count = self._num_kills[job.number]
            if 0 <= self._max_failures < count:
                text = f"process killed {count} times ({type(error).__name__})"
                return PartResult(error=text, can_retry=True)
            return None
        except ray.exceptions.RayError as error:  # The task cannot start anywhere.
            return PartResult(error=error_line(error), can_retry=True)


def _num_fitting(options: TuneConfig, *, free: bool = False) -> int:
    """Return the number of nodes with room for a trial. With `free`, beside other jobs."""
    return sum(
        node.resources.get("CPU", 0.0) >= options.cpus_per_trial
        and node.resources.get("GPU", 0.0) >= options.gpus_per_trial
        for node in connection.alive_nodes(free=free)
    )
