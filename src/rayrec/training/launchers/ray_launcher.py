"""Launcher on Ray: a running cluster or a local one."""

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

import pyarrow as pa
import ray
import ray.train
from ray.train import ControllerError, PreemptionError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from rayrec import host_resources, storage
from rayrec.checkpoint import latest
from rayrec.cluster import connection, worker_pool
from rayrec.cluster.layout import Layout
from rayrec.cluster.node_storage import require_reachable
from rayrec.compat.ray_compat import (
    WorkerGroupStartupTimeoutError,
    data_parallel_trainer,
)
from rayrec.config import InputError, error_line
from rayrec.data.engine import Shared, StreamEngine, Task, ThreadEngine
from rayrec.ingest.ray_engine import RayEngine, RayShared
from rayrec.observe.console import Console
from rayrec.observe.tracking.config import Makers
from rayrec.process_state import temporary_environment
from rayrec.training.launchers.base import (
    AttemptContext,
    Driver,
    PreparedRun,
    compute_layout,
    follow_attempt,
)
from rayrec.training.launchers.ray_backend import WORKER_MODULE, ProcessGroup, train_worker
from rayrec.training.launchers.ray_control_channel import StopRequest
from rayrec.training.profiling import watched_requests, worker_variables
from rayrec.training.stop_monitor import MORE_WORKERS, NO_DATA_NODES, Signals, unsaved_cause
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.run_config import FailureConfig, ScalingConfig

_DATA_NODES_POLL_S = 5.0
_DATA_NODES_S = 20.0
"""Seconds without a node for data tasks after which an attempt saves and ends."""
_NODES_S = 2.0


def allocate_resources(config: TrainConfig, *, probe: bool = False, free: bool = False) -> Layout:
    """Allocate the current cluster to the run; see `connection.alive_nodes`. Raises InputError if
    it does not fit.
    """
    return compute_layout(config, connection.alive_nodes(probe=probe, free=free))


def wait_for_resources(
    config: TrainConfig, note: Callable[[str], None], *, free: bool = False
) -> Layout:
    """Wait until the run fits on the cluster (with `free`, on unreserved resources). Raises
    InputError after node_wait_s.
    """
    since_s = time.monotonic()
    awaited = "resources in use by other jobs" if free else "nodes"
    is_reported = False
    while True:
        try:
            return allocate_resources(config, probe=True, free=free)
        except InputError as error:
            if 0 <= config.failure.node_wait_s < time.monotonic() - since_s:
                raise InputError(
                    f"waited {config.failure.node_wait_s:.0f} s for {awaited}; {error}"
                ) from None
            if not is_reported:
                note(f"Waiting for {awaited}: {error}")
                is_reported = True
            time.sleep(_NODES_S)


# End of an attempt, and what follows:
#
#   end                                    next
#   finished, with a result                return it
#   stopped after a signal                 return None; the same command resumes
#   not saved within the grace period      end the workers, return None
#   stopped for nodes, workers, data       another attempt; failures so far are forgotten
#   failed after a signal                  return None
#   failed, no room for the workers        wait for resources that others use, then another attempt
#   failed otherwise                       pause, then another attempt, as `FailurePolicy` allows
#   any other exception                    end the workers, raise it
def run_attempts(run: PreparedRun, driver: Driver) -> dict[str, Any] | None:
    """Run attempts until the run finishes, and return worker 0's result, or None after a signal.
    Raises InputError if the user can fix the problem (never retried), and the last attempt's error
    after failure.max_failures, not recorded as an event.
    """
    number = 0
    is_shared = False
    failure = run.config.failure
    events = driver.events
    signals = driver.signals
    tolerance = FailurePolicy(failure)
    groups = _placement_groups()
    while True:
        number += 1
        events.write("attempt", number=number, num_workers=run.layout.num_workers)
        start_s = time.monotonic()
        before = _newest_step(run)
        try:
            outcome = _attempt(run, signals, is_shared=is_shared)
        except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
            attempt_s = time.monotonic() - start_s
            _free_workers(groups)
            if signals.cause is not None:
                cause = f"{cause_of(error)}, before a last checkpoint was made"
                events.write("failure", cause=cause, last=True)
                return None
            # Raises errors that end the run.
            pause_s = tolerance.pause_s(
                error, attempt_s=attempt_s, progressed=_newest_step(run) > before
            )
            _report_failure(error, run, driver, was_shared=is_shared)
            is_shared = lacks_resources(error)
            time.sleep(pause_s)
        except BaseException:  # e.g. a second signal
            _abandon_workers(groups)
            raise
        else:
            if outcome is None:
                _abandon_workers(groups)
                events.write("failure", cause=unsaved_cause(signals.cause, failure), last=True)
                return None
            if "stopped" not in outcome:
                return outcome
            if signals.cause is not None:
                return None
            is_shared = False
            tolerance = FailurePolicy(failure)
        run = _allocated_again(run, driver, free=is_shared)


def _report_failure(
    error: Exception, run: PreparedRun, driver: Driver, *, was_shared: bool
) -> None:
    if not lacks_resources(error):
        driver.events.write("failure", cause=cause_of(error))
    elif not was_shared:  # the attempt never began
        driver.note(
            f"Waiting for resources for {run.layout.num_workers} workers, in use by other jobs"
        )


def _allocated_again(run: PreparedRun, driver: Driver, *, free: bool) -> PreparedRun:
    since_s = time.time()
    layout = wait_for_resources(run.config, driver.note, free=free)
    if layout.num_nodes > 1 and layout.text() != run.layout.text():
        driver.note(layout.text())
    return dataclasses.replace(run, since_s=since_s, layout=layout)


def _newest_step(run: PreparedRun) -> int:
    with storage.retry_timeout(run.config.failure.max_outage_s):
        checkpoint = latest(run.folder)
    return checkpoint.step if checkpoint else 0


def _placement_groups() -> set[str]:
    """Return the names of this driver's placement groups that reserve resources."""
    job = ray.get_runtime_context().get_job_id()
    return {
        name
        for name, group in placement_group_table().items()
        if name.endswith(job) and group["state"] != "REMOVED"
    }


def _free_workers(before: set[str]) -> None:
    """Remove the placement groups of a lost or abandoned controller's workers, which also ends the
    workers.
    """
    for name in _placement_groups() - before:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name))))


def _abandon_workers(before: set[str]) -> None:
    """End workers that would otherwise train for as long as this process, possibly the user's,
    lives.
    """
    with contextlib.suppress(ray.exceptions.RayError):  # the cluster may be gone
        _free_workers(before)


def _attempt(run: PreparedRun, signals: Signals, *, is_shared: bool) -> dict[str, Any] | None:
    """Run one attempt. Returns None after a signal if the workers do not save within their
    `GracePeriod`.
    """
    config = run.config
    request = StopRequest()
    layout = run.layout
    placement = layout.per_worker.replace(max_outage_s=config.failure.max_outage_s)
    task_variables = worker_pool.task_variables(worker_environment(config))
    engine = RayEngine(placement, environment=task_variables)
    attempt = AttemptContext.create(run, engine, request.channel)
    growth = _ScaleUpDetector(config, layout.num_workers, is_shared=is_shared)
    data_nodes = _DataNodes(config, layout)

    def poll() -> str | None:
        # Both look at the cluster. Room for more workers comes first: the attempt that follows
        # also places its data tasks again.
        if growth.possible():
            return MORE_WORKERS
        if data_nodes.are_missing():
            return NO_DATA_NODES
        return None

    try:
        with watched_requests(run.folder, request.channel):
            fit = functools.partial(_fit, attempt)
            send = request.send
            return follow_attempt(
                fit,
                signals,
                config.failure,
                request_stop=send,
                saved_bytes=request.saved_bytes,
                poll=poll,
            )
    finally:  # also after a second signal
        request.close()


def worker_environment(config: TrainConfig) -> dict[str, str]:
    """Return the additional environment variables of Ray Train's workers. Those with GPUs import
    nothing ahead: torch may detect GPUs when imported, but Ray assigns them after the start.
    """
    variables = worker_variables(os.environ, network_interface=config.scaling.network_interface)
    if not config.scaling.use_gpu:
        modules = (WORKER_MODULE, *config.workload.WORKER_MODULES)
        variables.update(worker_pool.worker_variables(os.environ, modules))
    return variables


def start_worker_processes(config: TrainConfig, allocation: Layout) -> None:
    """Start the processes of the first attempt's workers on a local Ray while data is prepared."""
    variables = worker_environment(config)
    if worker_pool.MODULES not in variables:
        return
    # Ray Train adds these to the workers' runtime environment, which must be the same.
    propagated = {name: os.environ[name] for name in _PROPAGATED if name in os.environ}
    worker_pool.start_processes(allocation.num_workers, {**propagated, **variables})


def process_group(config: TrainConfig) -> ProcessGroup:
    """Return the configuration of the workers' process group. Its timeout includes a store outage.
    Pure.
    """
    timeout_s = math.ceil(config.failure.max_outage_s + config.failure.collective_timeout_s)
    return ProcessGroup(backend="nccl" if config.scaling.use_gpu else "gloo", timeout_s=timeout_s)


@final
class RayrecTrainer(data_parallel_trainer.DataParallelTrainer):
    """Trainer of one attempt, without two callbacks of Ray Train, for which it has no setting. On
    clusters without a dashboard, the placement group cleaner is useless and blocks for 12 s after
    each attempt; `_free_workers` replaces it. The callback for Datasets starts a process, but an
    attempt has none.
    """

    def _create_default_callbacks(self) -> list[Any]:
        left_out = (
            data_parallel_trainer.PlacementGroupCleanerCallback,
            data_parallel_trainer.DatasetsCallback,
        )
        return [
            callback
            for callback in super()._create_default_callbacks()
            if not isinstance(callback, left_out)
        ]


def worker_group(scaling: ScalingConfig, layout: Layout) -> ray.train.ScalingConfig:
    """Return Ray Train's options for the workers of an attempt. Pure."""
    return ray.train.ScalingConfig(
        num_workers=layout.num_workers,
        use_gpu=scaling.use_gpu,
        resources_per_worker=layout.worker_resources,
        placement_strategy=scaling.placement_strategy,
    )


def _fit(attempt: AttemptContext) -> dict[str, Any]:
    config = attempt.config
    # By reference: otherwise the controller would unpickle it, and import torch, before it starts a
    # worker.
    reference = ray.put(attempt)
    with storage.Scratch("attempt") as scratch:  # Ray Train gets no checkpoint
        trainer = RayrecTrainer(
            train_worker,  # type: ignore[arg-type]  # its value is returned
            train_loop_config={"attempt": reference},
            backend_config=process_group(config),
            scaling_config=worker_group(config.scaling, attempt.layout),
            run_config=ray.train.RunConfig(  # type: ignore[call-arg]  # typed as Train V1's
                name=config.name,
                storage_path=scratch,
                # Its own retries keep the number of workers, and some have no limit. The class is
                # typed as Train V1's.
                failure_config=ray.train.FailureConfig(  # type: ignore[call-arg]
                    max_failures=0, max_preemption_failures=0, controller_failure_limit=0
                ),
                logging_config=ray.train.LoggingConfig(log_level="ERROR"),
                worker_runtime_env={"env_vars": worker_environment(config)},
            ),
        )
        try:
            return trainer.fit().return_value  # type: ignore[attr-defined]  # typed as Train V1's
        except ray.train.TrainingFailedError as error:
            for failure in worker_failures(error).values():
                if isinstance(failure, InputError):
                    raise InputError(str(failure)) from None
            raise


# -- Failed attempts: their causes, and how many a run may have

_QUICK_S = 60.0
"""Attempts that end sooner count as quick; the pause before the next one grows."""
_LONGEST_PAUSE_S = 30.0


@final
class FailurePolicy:
    """Limit of failed attempts, and the pauses between attempts."""

    def __init__(self, failure: FailureConfig) -> None:
        self._failure = failure
        self._failures = self._quick = 0
        self._repeatable: frozenset[str] | None = None
        self._waited_s = 0.0

    def pause_s(self, error: Exception, *, attempt_s: float, progressed: bool) -> float:
        """Return the seconds to wait after a failed attempt of `attempt_s`. `progressed`: whether
        it made a new checkpoint. Raises `error` if failure.max_failures are exceeded, or if code or
        data failed twice in the same way from the same step; InputError if there was no room for
        the workers for failure.node_wait_s.
        """
        if lacks_resources(error):
            self._waited_s += attempt_s
            if 0 <= self._failure.node_wait_s < self._waited_s:
                raise InputError(
                    f"scaling: no room for the workers for {self._waited_s:.0f} s: other jobs use "
                    "the resources, or scaling.placement_strategy cannot be met. Lower "
                    "--scaling.num-workers, wait, or raise --failure.node-wait-s"
                )
            return 0.0
        self._waited_s = 0.0
        before, self._repeatable = self._repeatable, errors_in_code(error)
        if before is not None and before == self._repeatable and not progressed:
            raise error
        if not is_preemption(error):
            # A run of weeks may lose any number of nodes, as long as it progresses in between.
            self._failures = 1 if progressed else self._failures + 1
            if 0 <= self._failure.max_failures < self._failures:
                raise error
        self._quick = self._quick + 1 if attempt_s < _QUICK_S else 0
        return min(2.0 ** (self._quick - 2), _LONGEST_PAUSE_S) if self._quick > 1 else 0.0


_IN_CODE = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    NameError,
    AssertionError,
    ArithmeticError,
    ImportError,
)
"""Errors raised by code for its input. Machines, networks and stores raise OSError, RuntimeError or
Ray's errors.
"""


def errors_in_code(error: BaseException) -> frozenset[str] | None:
    """Return the errors, one line each, of an attempt that failed in its code or data and would
    fail again from the same step. None if a worker was killed, or no worker failed with such an
    error. Pure.
    """
    failures = worker_failures(error).values()
    if any(isinstance(failure, ray.exceptions.RayActorError) for failure in failures):
        return None
    # Other workers fail with connection errors to the failed worker.
    return (
        frozenset(error_line(failure) for failure in failures if isinstance(failure, _IN_CODE))
        or None
    )


def is_preemption(error: BaseException) -> bool:
    """Return whether the attempt ended due to an announced preemption, in any process."""
    return isinstance(error, PreemptionError) or any(
        getattr(failure, "preempted", False) for failure in worker_failures(error).values()
    )


def lacks_resources(error: BaseException) -> bool:
    """Return whether Ray Train timed out placing the workers, because other jobs use the
    resources.
    """
    return isinstance(error, ControllerError) and isinstance(
        error.controller_failure, WorkerGroupStartupTimeoutError
    )


def worker_failures(error: BaseException) -> dict[int, BaseException]:
    """Return the error of each failed worker by rank; empty if no worker failed."""
    return {
        rank: _unwrapped(failure) for rank, failure in getattr(error, "worker_failures", {}).items()
    }


def _unwrapped(error: BaseException) -> BaseException:
    inner = getattr(error, "cause", None) or getattr(error, "health_check_failure", None)
    return _unwrapped(inner) if isinstance(inner, BaseException) else error


def cause_of(error: BaseException) -> str:
    """Describe in one line why an attempt or run failed."""
    if isinstance(error, InputError):
        return error_line(error)
    if is_preemption(error):
        return "a node was preempted, as announced"
    failures = worker_failures(error)
    # If a worker is killed, the others fail too.
    dead = sorted(
        rank
        for rank, failure in failures.items()
        if isinstance(failure, ray.exceptions.RayActorError)
    )
    if dead:
        return f"worker {', '.join(map(str, dead))} died"
    if failures:
        rank, failure = min(failures.items())
        return f"worker {rank}: {error_line(failure)}"
    if isinstance(error, ControllerError):
        return error_line(error.controller_failure)
    return (
        "the controller of Ray Train died"
        if isinstance(error, ray.exceptions.RayActorError)
        else error_line(error)
    )


class _DataNodes:
    """Detects that no node can run an attempt's data tasks while another layout of the cluster has
    such nodes.
    """

    def __init__(self, config: TrainConfig, allocation: Layout) -> None:
        self._config = config
        self._allocation = allocation
        self._next_poll_s = time.monotonic() + _DATA_NODES_POLL_S
        self._missing_since_s: float | None = None

    def are_missing(self) -> bool:
        """Return whether the nodes have been missing for `_DATA_NODES_S`. Ray would queue the tasks
        forever.
        """
        now_s = time.monotonic()
        if now_s < self._next_poll_s:
            return False
        self._next_poll_s = now_s + _DATA_NODES_POLL_S
        try:
            is_available = connection.data_nodes(self._allocation) or not self._another_layout()
        except ray.exceptions.RayError:  # no answer from the head
            is_available = True
        if is_available:
            self._missing_since_s = None
            return False
        self._missing_since_s = self._missing_since_s or now_s
        return now_s - self._missing_since_s >= _DATA_NODES_S

    def _another_layout(self) -> bool:
        try:
            return (
                allocate_resources(self._config).per_worker.label_selector
                != self._allocation.per_worker.label_selector
            )
        except InputError:  # without room for the workers, the next attempt would wait
            return False


class _ScaleUpDetector:
    """Detects room for more workers on nodes that joined, in two consecutive polls after the resize
    interval.
    """

    def __init__(self, config: TrainConfig, num_workers: int, *, is_shared: bool) -> None:
        """Start polling. With `is_shared`, resources that other jobs use now do not count as
        new.
        """
        self._config = config
        self._room = max(num_workers, self._num_workers()) if is_shared else num_workers
        self._next_look_s = time.monotonic() + config.scaling.resize_interval_s
        self._seen = False

    def possible(self) -> bool:
        if self._room >= self._config.scaling.max_workers or time.monotonic() < self._next_look_s:
            return False
        self._next_look_s = time.monotonic() + _NODES_S
        before, self._seen = self._seen, self._num_workers() > self._room
        return before and self._seen

    def _num_workers(self) -> int:
        try:
            return allocate_resources(self._config).num_workers
        except InputError:  # nodes were lost: the attempt is about to fail
            return 0


_FEW_TASKS: Final = 8
"""Number of log blocks that one thread indexes in about a second."""
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class _DriverEngine(ThreadEngine):
    """Data tasks of a local Ray's driver, run as threads: they start at once and use the same CPUs
    and files.
    """

    def share(self, value: _Value) -> Shared[_Value]:
        return RayShared(ray.put(value))


@dataclass(frozen=True)
class _SingleNodeEngine(RayEngine):
    """Data tasks of a driver on a running cluster with only its node. A few tasks run in a thread,
    because a process takes seconds to start; more run on Ray, which knows the load of other
    jobs.
    """

    max_outage_s: float = 0.0

    def run(
        self, name: str, function: Task, items: Sequence[Any], *, block_bytes: int = 16 << 20
    ) -> Iterator[pa.Table]:
        if len(items) > _FEW_TASKS:
            return super().run(name, function, items, block_bytes=block_bytes)
        return ThreadEngine(1, max_outage_s=self.max_outage_s).run(
            name, function, items, block_bytes=block_bytes
        )


_ENVIRONMENT: Final = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # delay to detect a dead worker
    # delay to detect a preemption; clouds announce it as late as 30 s before
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",  # as Ray Train sets it by default
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Variables during a run, unless the caller sets them."""
_PROPAGATED: Final = (
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC",
)
"""Variables that rayrec sets and Ray Train passes on to its controller and workers. It passes on
others that a caller may set, and then starts all workers on demand.
"""


class RayLauncher:
    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._environment = contextlib.ExitStack()

    def connect(self, folder: str, console: Console) -> None:
        config = self._config
        # before Ray starts
        self._environment.enter_context(temporary_environment(_ENVIRONMENT, override=False))
        cluster = config.cluster
        connection.connect(cluster.address, **cluster.connection, log_to_driver=console.verbose)
        if connection.is_local_ray():
            tokens = self._environment.enter_context(storage.Scratch("workers"))
            self._environment.enter_context(temporary_environment({worker_pool.TOKENS: tokens}))
            # Its only node is never drained, so no process needs to watch for preemption.
            variables = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
        else:
            variables = {"RAY_TRAIN_ENABLE_STATE_TRACKING": "1"}  # on the dashboard's Train page
            paths = (folder, config.train_data.path, config.eval_data.path, config.init_from)
            require_reachable(paths)
        self._environment.enter_context(temporary_environment(variables, override=False))
        connection.ship_code(config)

    def allocate_resources(self, *, resumes: bool, note: Callable[[str], None]) -> Layout:
        # Nodes may still be joining when a run resumes. A new run fails at once.
        allocation = (
            wait_for_resources(self._config, note) if resumes else allocate_resources(self._config)
        )
        if allocation.num_nodes > 1:
            note(allocation.text())
        start_worker_processes(self._config, allocation)
        return allocation

    def engine(self, layout: Layout, *, max_outage_s: float) -> StreamEngine:
        if connection.is_local_ray():
            return _DriverEngine(
                host_resources.usable_cpus(granted=self._config.cluster.num_cpus),
                max_outage_s=max_outage_s,
            )
        placement = layout.driver.replace(max_outage_s=max_outage_s)
        owner = str(self._config.name)
        if layout.num_nodes == 1:
            return _SingleNodeEngine(placement, owner=owner, max_outage_s=max_outage_s)
        return RayEngine(placement, owner=owner)

    def trackers(self) -> Makers:
        if not self._config.trackers.prometheus:
            return {}
        from rayrec.training.launchers.ray_metrics import PrometheusTracker

        return {
            "Prometheus": functools.partial(
                PrometheusTracker, str(self._config.name), since_s=time.time()
            )
        }

    def run(self, run: PreparedRun, driver: Driver) -> dict[str, Any] | None:
        return run_attempts(run, driver)

    def cause_of(self, error: BaseException) -> str:
        return cause_of(error)

    def close(self) -> None:
        self._environment.close()
