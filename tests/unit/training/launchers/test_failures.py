"""Failure policy and causes of failed attempts."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import ray
from builders.faults import fails_with, rejects
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError
from ray.train.v2.api.preemption import PreemptionInfo

from rayrec.training.launchers.ray_launcher import FailurePolicy, cause_of, errors_in_code, is_preemption, lacks_resources
from rayrec.workloads.run_config import FailureConfig

DIED, GONE_WITH_ITS_NODE = (
    WorkerGroupError("died", {0: ValueError("connection reset"), 1: WorkerHealthCheckFailedError("dead", error)})
    for error in (ray.exceptions.RayActorError(preempted=preempted) for preempted in (False, True))
)
ANNOUNCED = PreemptionError(PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"a": [1]}))
NO_ROOM = ControllerError(WorkerGroupStartupTimeoutError(2))
NOT_STARTED = ControllerError(WorkerGroupStartupFailedError("a worker's node died"))


def test_cause_of_describes_attempt_failure() -> None:
    for error, preemption, without_room, cause in (
        (DIED, False, False, "worker 1 died"),
        (GONE_WITH_ITS_NODE, True, False, "a node was preempted, as announced"),
        (ANNOUNCED, True, False, "a node was preempted, as announced"),
        (NO_ROOM, False, True, "WorkerGroupStartupTimeoutError: The worker group startup timed out"),
        (NOT_STARTED, False, False, "WorkerGroupStartupFailedError: a worker's node died"),
        (WorkerGroupError("x", {1: ValueError("a\nb\n")}), False, False, "worker 1: ValueError: b"),
        (ray.exceptions.RayActorError(), False, False, "the controller of Ray Train died"),
    ):
        assert (is_preemption(error), lacks_resources(error)) == (preemption, without_room)
        assert cause_of(error).startswith(cause)
        assert "\n" not in cause_of(error)


CONNECTION = RuntimeError("connection closed by peer")
failed = partial(WorkerGroupError, "failed")


def test_errors_in_code_returns_repeatable_errors() -> None:
    for error, expected in (
        (failed({0: KeyError("items")}), {"KeyError: 'items'"}),
        (failed({0: TypeError("a"), 1: CONNECTION}), {"TypeError: a"}),
        (failed({0: ValueError("x\ny"), 1: ValueError("x\ny")}), {"ValueError: y"}),
        (failed({0: TypeError("a"), 1: AttributeError("b")}), {"TypeError: a", "AttributeError: b"}),
        (failed({0: ray.exceptions.RayTaskError("f", "", IndexError("c"))}), {"IndexError: c"}),
        (failed({0: CONNECTION}), None),
        (failed({0: OSError("no space left"), 1: MemoryError()}), None),
        (failed({0: ValueError("connection reset"), 1: ray.exceptions.RayActorError()}), None),
        (failed({}), None),
        *((error, None) for error in (ANNOUNCED, NO_ROOM, NOT_STARTED, ray.exceptions.RayActorError())),
    ):
        assert errors_in_code(error) == expected


def wrong(message: str = "no column 'items'") -> WorkerGroupError:
    return failed({0: KeyError(message), 1: CONNECTION})


@pytest.mark.parametrize(
    ("between", "progressed", "retries"),
    [([], False, False), ([wrong("another")], False, True), ([DIED], False, True), ([ANNOUNCED], False, True), ([], True, True)],
)
def test_failure_policy_rejects_same_code_error_from_same_step(between: list[Any], progressed: bool, retries: bool) -> None:
    tolerance = FailurePolicy(FailureConfig(max_failures=100))
    for error in [wrong(), *between]:
        tolerance.pause_s(error, attempt_s=100.0, progressed=False)
    with nullcontext() if retries else pytest.raises(WorkerGroupError):
        assert tolerance.pause_s(wrong(), attempt_s=100.0, progressed=progressed) == 0.0


@pytest.fixture
def after() -> Callable[..., float]:
    tolerance = FailurePolicy(FailureConfig(max_failures=2, node_wait_s=100))

    def pause(error: Exception = DIED, *, attempt_s: float = 100.0, progressed: bool = False) -> float:
        return tolerance.pause_s(error, attempt_s=attempt_s, progressed=progressed)

    return pause


def test_failure_policy_retries_forever_with_progress(after: Callable[..., float]) -> None:
    for _ in range(20):
        assert (after(progressed=True), after()) == (0, 0)
    fails_with(WorkerGroupError, "", after)


def test_failure_policy_counts_failures_without_progress(after: Callable[..., float]) -> None:
    assert after() == after(NOT_STARTED) == 0
    fails_with(WorkerGroupError, "", after)


@pytest.mark.parametrize("error", [ANNOUNCED, GONE_WITH_ITS_NODE])
def test_failure_policy_ignores_preemptions(after: Callable[..., float], error: Exception) -> None:
    for _ in range(10):
        after(error)
    assert after() == 0


def test_failure_policy_backs_off_after_quick_failures(after: Callable[..., float]) -> None:
    assert [after(ANNOUNCED, attempt_s=1) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert after(ANNOUNCED, attempt_s=61) == 0


def test_failure_policy_limits_wait_for_resources(after: Callable[..., float]) -> None:
    for _ in range(5):
        assert (after(NO_ROOM, attempt_s=99), after(ANNOUNCED, attempt_s=99)) == (0, 0)
    assert after(NO_ROOM, attempt_s=60) == 0
    rejects("no room for the workers for 120 s: other jobs use", after, NO_ROOM, attempt_s=60)


def test_failure_policy_accepts_zero_or_unlimited_failures() -> None:
    unlimited, none = (FailurePolicy(FailureConfig(max_failures=number, node_wait_s=number)) for number in (-1, 0))
    for error in (DIED, NO_ROOM) * 50:
        unlimited.pause_s(error, attempt_s=100.0, progressed=False)
    fails_with(WorkerGroupError, "", none.pause_s, DIED, attempt_s=100.0, progressed=True)
