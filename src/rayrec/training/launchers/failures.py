"""Causes of failed attempts, and the limit of failed attempts per run."""

from typing import final

import ray
import ray.train
from ray.train import ControllerError, PreemptionError

from rayrec.compat.ray_compat import WorkerGroupStartupTimeoutError
from rayrec.config import InputError, line_of
from rayrec.workloads.run_config import FailureConfig

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
        """Return the seconds to wait after a failed attempt of `attempt_s`. `progressed`: whether it made a new checkpoint.
        Raises `error` if failure.max_failures are exceeded, or if code or data failed twice in the same way from the same step;
        InputError if there was no room for the workers for failure.node_wait_s."""
        if lacks_resources(error):
            self._waited_s += attempt_s
            if 0 <= self._failure.node_wait_s < self._waited_s:
                raise InputError(
                    f"scaling: no room for the workers for {self._waited_s:.0f} s: other jobs use the resources, or "
                    "scaling.placement_strategy cannot be met. Lower --scaling.num-workers, wait, or raise --failure.node-wait-s"
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


_IN_CODE = (TypeError, ValueError, LookupError, AttributeError, NameError, AssertionError, ArithmeticError, ImportError)
"""Errors raised by code for its input. Machines, networks and stores raise OSError, RuntimeError or Ray's errors."""


def errors_in_code(error: BaseException) -> frozenset[str] | None:
    """Return the errors, one line each, of an attempt that failed in its code or data and would fail again from the same step.
    None if a worker was killed, or no worker failed with such an error. Pure."""
    failures = worker_failures(error).values()
    if any(isinstance(failure, ray.exceptions.RayActorError) for failure in failures):
        return None
    # Other workers fail with connection errors to the failed worker.
    return frozenset(line_of(failure) for failure in failures if isinstance(failure, _IN_CODE)) or None


def is_preemption(error: BaseException) -> bool:
    """Return whether the attempt ended due to an announced preemption, in any process."""
    return isinstance(error, PreemptionError) or any(
        getattr(failure, "preempted", False) for failure in worker_failures(error).values()
    )


def lacks_resources(error: BaseException) -> bool:
    """Return whether Ray Train timed out placing the workers, because other jobs use the resources."""
    return isinstance(error, ControllerError) and isinstance(error.controller_failure, WorkerGroupStartupTimeoutError)


def worker_failures(error: BaseException) -> dict[int, BaseException]:
    """Return the error of each failed worker by rank; empty if no worker failed."""
    return {rank: _unwrapped(failure) for rank, failure in getattr(error, "worker_failures", {}).items()}


def _unwrapped(error: BaseException) -> BaseException:
    inner = getattr(error, "cause", None) or getattr(error, "health_check_failure", None)
    return _unwrapped(inner) if isinstance(inner, BaseException) else error


def cause_of(error: BaseException) -> str:
    """Describe in one line why an attempt or run failed."""
    if isinstance(error, InputError):
        return line_of(error)
    if is_preemption(error):
        return "a node was preempted, as announced"
    failures = worker_failures(error)
    # If a worker is killed, the others fail too.
    dead = sorted(rank for rank, failure in failures.items() if isinstance(failure, ray.exceptions.RayActorError))
    if dead:
        return f"worker {', '.join(map(str, dead))} died"
    if failures:
        rank, failure = min(failures.items())
        return f"worker {rank}: {line_of(failure)}"
    if isinstance(error, ControllerError):
        return line_of(error.controller_failure)
    return "the controller of Ray Train died" if isinstance(error, ray.exceptions.RayActorError) else line_of(error)
