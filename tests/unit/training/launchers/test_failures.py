"""Failure policy and causes of failed attempts."""

import contextlib
import io
import logging
import platform
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from builders.faults import fails_with, rejects
from builders.runs import events_of
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError
from ray.train.v2.api.preemption import PreemptionInfo

from rayrec.data.stage_times import BlockTimes, StageTimes
from rayrec.training import step_log, worker
from rayrec.training.launchers import base
from rayrec.training.launchers.base import worker_logs
from rayrec.training.launchers.ray_launcher import (
    FailurePolicy,
    cause_of,
    errors_in_code,
    is_preemption,
    lacks_resources,
)
from rayrec.training.step_log import DataStats, data_fields
from rayrec.workloads.run_config import FailureConfig

DIED, GONE_WITH_ITS_NODE = (
    WorkerGroupError(
        "died", {0: ValueError("connection reset"), 1: WorkerHealthCheckFailedError("dead", error)}
    )
    for error in (ray.exceptions.RayActorError(preempted=preempted) for preempted in (False, True))
)
ANNOUNCED = PreemptionError(PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"a": [1]}))
NO_ROOM = ControllerError(WorkerGroupStartupTimeoutError(2))
NOT_STARTED = ControllerError(WorkerGroupStartupFailedError("a worker's node died"))


@pytest.mark.parametrize(
    ("error", "preemption", "without_room", "cause"),
    [
        pytest.param(DIED, False, False, "worker 1 died", id="DIED"),
        pytest.param(
            GONE_WITH_ITS_NODE,
            True,
            False,
            "a node was preempted, as announced",
            id="GONE_WITH_ITS_NODE",
        ),
        pytest.param(ANNOUNCED, True, False, "a node was preempted, as announced", id="ANNOUNCED"),
        pytest.param(
            NO_ROOM,
            False,
            True,
            "WorkerGroupStartupTimeoutError: The worker group startup timed out",
            id="NO_ROOM",
        ),
        pytest.param(
            NOT_STARTED,
            False,
            False,
            "WorkerGroupStartupFailedError: a worker's node died",
            id="NOT_STARTED",
        ),
        pytest.param(
            WorkerGroupError("x", {1: ValueError("a\nb\n")}),
            False,
            False,
            "worker 1: ValueError: b",
            id="WorkerGroupError-x-1-ValueError",
        ),
        pytest.param(
            ray.exceptions.RayActorError(),
            False,
            False,
            "the controller of Ray Train died",
            id="ray.exceptions.RayActorError",
        ),
    ],
)
def test_cause_of_describes_attempt_failure(
    error: Any, preemption: bool, without_room: bool, cause: str
) -> None:
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
        (
            failed({0: TypeError("a"), 1: AttributeError("b")}),
            {"TypeError: a", "AttributeError: b"},
        ),
        (failed({0: ray.exceptions.RayTaskError("f", "", IndexError("c"))}), {"IndexError: c"}),
        (failed({0: CONNECTION}), None),
        (failed({0: OSError("no space left"), 1: MemoryError()}), None),
        (failed({0: ValueError("connection reset"), 1: ray.exceptions.RayActorError()}), None),
        (failed({}), None),
        *(
            (error, None)
            for error in (ANNOUNCED, NO_ROOM, NOT_STARTED, ray.exceptions.RayActorError())
        ),
    ):
        assert errors_in_code(error) == expected


def wrong(message: str = "no column 'items'") -> WorkerGroupError:
    return failed({0: KeyError(message), 1: CONNECTION})


@pytest.mark.parametrize(
    ("between", "progressed", "retries"),
    [
        ([], False, False),
        ([wrong("another")], False, True),
        ([DIED], False, True),
        ([ANNOUNCED], False, True),
        ([], True, True),
    ],
)
def test_failure_policy_rejects_same_code_error_from_same_step(
    between: list[Any], progressed: bool, retries: bool
) -> None:
    tolerance = FailurePolicy(FailureConfig(max_failures=100))
    for error in [wrong(), *between]:
        tolerance.pause_s(error, attempt_s=100.0, progressed=False)
    with nullcontext() if retries else pytest.raises(WorkerGroupError):
        assert tolerance.pause_s(wrong(), attempt_s=100.0, progressed=progressed) == 0.0


@pytest.fixture
def after() -> Callable[..., float]:
    tolerance = FailurePolicy(FailureConfig(max_failures=2, node_wait_s=100))

    def pause(
        error: Exception = DIED, *, attempt_s: float = 100.0, progressed: bool = False
    ) -> float:
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
    unlimited, none = (
        FailurePolicy(FailureConfig(max_failures=number, node_wait_s=number)) for number in (-1, 0)
    )
    for error in (DIED, NO_ROOM) * 50:
        unlimited.pause_s(error, attempt_s=100.0, progressed=False)
    fails_with(WorkerGroupError, "", none.pause_s, DIED, attempt_s=100.0, progressed=True)


# -- Log files of workers, and data events
def test_worker_log_contains_rank_and_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "logs" / "worker_3.log"
    with worker_logs(str(path), rank=3):
        logging.getLogger("torchrec.plan").warning("tables are large")
        warnings.warn("an odd argument", RuntimeWarning, stacklevel=1)
    words = (
        "[rank 3] WARNING torchrec.plan: tables are large|[rank 3] WARNING py.warnings: "
        "|RuntimeWarning: an odd argument"
    )
    assert [text for text in words.split("|") if text not in path.read_text()] == []
    monkeypatch.setattr(base, "_MAX_BYTES", 2000)
    with worker_logs(str(tmp_path / "limited" / "worker_0.log"), rank=0):
        for number in range(200):
            logging.getLogger("x").info("line %d", number)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "limited").iterdir()}
    assert set(sizes) == {"worker_0.log", "worker_0.log.1"}
    assert max(sizes.values()) <= 2000
    assert "line 199" in (tmp_path / "limited" / "worker_0.log").read_text()


def test_worker_starts_without_writable_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    with worker_logs(str(tmp_path / "logs" / "worker_1.log"), rank=1):
        logging.getLogger("x").info("continues")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "[rank 1]" in lines[0]
    assert "logging to standard error instead" in lines[0]
    assert lines[1].endswith("[rank 1] INFO x: continues")


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("file://{}/worker 0%25.log", id="file"),
        pytest.param("s3://bucket{}", id="store"),
    ],
)
def test_worker_logs_of_urls_show_no_details(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    with worker_logs(url.format(tmp_path), rank=0):
        logging.getLogger("torchrec.plan").info("a detail")
    assert capsys.readouterr().err == ""
    if url.startswith("file"):
        assert (
            (tmp_path / "worker 0%.log")
            .read_text()
            .endswith("[rank 0] INFO torchrec.plan: a detail\n")
        )


def test_worker_logs_of_stores_show_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with worker_logs("s3://bucket/runs/a/logs/worker_2.log", rank=2):
        logging.getLogger("torchrec.plan").warning("tables are large")
    assert capsys.readouterr().err.endswith("[rank 2] WARNING torchrec.plan: tables are large\n")


def test_worker_logs_restores_caller_logging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker in the caller's process: its handlers receive their usual records during and after
    the context.
    """
    root = logging.getLogger()
    library = logging.getLogger("torchrec")
    callers = logging.StreamHandler(io.StringIO())
    librarys = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(root, "handlers", [callers])
    monkeypatch.setattr(root, "level", logging.WARNING)
    monkeypatch.setattr(library, "handlers", [librarys])
    monkeypatch.setattr(library, "propagate", False)
    logging.captureWarnings(capture=True)  # by the caller, who ends it
    shown = warnings.showwarning
    path = tmp_path / "worker_0.log"
    for error in (None, ValueError("no")):
        with contextlib.suppress(ValueError), worker_logs(str(path), rank=0):
            logging.getLogger("x").info("a detail")
            logging.getLogger("x").warning("within")
            library.warning("a plan")
            if error is not None:
                raise error
        assert (root.handlers, root.level, callers.level) == (
            [callers],
            logging.WARNING,
            logging.NOTSET,
        )
        assert (library.handlers, library.propagate) == ([librarys], False)
        assert warnings.showwarning is shown
    logging.captureWarnings(capture=False)
    assert warnings.showwarning is not shown
    logging.getLogger("x").warning("after")
    library.warning("another")
    assert callers.stream.getvalue().splitlines() == ["within", "a plan"] * 2 + ["after"]
    assert librarys.stream.getvalue().splitlines() == ["another"]
    lines = path.read_text().splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["a detail", "within", "a plan"] * 2


# -- Events of kind data: when there is one, and what it says
def test_data_fields_return_shares_of_stages() -> None:
    sums = dict.fromkeys(StageTimes.FIELDS, 0.0)
    sums |= {
        "cpus": 2.0,
        "rows": 1000.0,
        "blocks": 4.0,
        "waited_row_s": 500.0,
        "waited_block_s": 2.0,
    }
    sums |= {
        "read_wall_s": 2.0,
        "read_cpu_s": 0.5,
        "read_queue_s": 0.5,
        "parse_wall_s": 8.0,
        "parse_cpu_s": 8.0,
    }
    assert data_fields(sums, seconds=10.0) == {
        "seconds": 10.0,
        "rows": 1000,
        "rows_per_s": 100.0,
        "cpus": 2.0,
        "busy": 0.5,
        "capacity_rows_per_s": 200.0,
        "backlog_rows": 50.0,
        "backlog_blocks": 0.2,
        "stages": [
            {
                "stage": "read",
                "rows_per_s": 1000.0,
                "busy": 0.1,
                "cpu_share": 0.25,
                "queue_share": 0.25,
            },
            {
                "stage": "parse",
                "rows_per_s": 250.0,
                "busy": 0.4,
                "cpu_share": 1.0,
                "queue_share": 0.0,
            },
        ],
    }
    idle = data_fields({**dict.fromkeys(StageTimes.FIELDS, 0.0), "cpus": 1.0}, seconds=10.0)
    assert (idle["stages"], idle["capacity_rows_per_s"], idle["busy"]) == ([], None, 0.0)


def test_cpu_contention_names_host(tmp_path: Path) -> None:
    on_ray: Any = SimpleNamespace(rank=1, node="f" * 56)  # of which nobody knows the machine
    worker._log_contention(str(tmp_path), on_ray, 0.9)
    (event,) = events_of(tmp_path, "cpu_contention")
    assert (event["rank"], event["node"], event["waiting_share"]) == (1, platform.node(), 0.9)


def test_data_nodes_on_one_host_are_separate() -> None:
    account = StageTimes(cpus=1.0)
    for node_id in ("2e", "1f", "2e"):
        account.add(BlockTimes(5, {}, {}, {}, time.time(), "host", node_id))
    events: list[dict[str, Any]] = []
    report = DataStats(SimpleNamespace(stages=account))
    report.log_means(
        report.take(), step=1, log=lambda kind, fields: events.append({"kind": kind, **fields})
    )
    assert events == [
        {"kind": "data_nodes", "step": 1, "nodes": ["host", "host"], "node_ids": ["1f", "2e"]}
    ]


def test_data_events_are_throttled_and_need_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    account = StageTimes(cpus=1.0)
    report = DataStats(SimpleNamespace(stages=account))

    def tell(step: int) -> None:
        report.log_means(
            report.take(),
            step=step,
            log=lambda kind, fields: events.append({"kind": kind, **fields}),
        )

    for _ in range(2):
        account.add(
            BlockTimes(5, {"read": 0.1}, {"read": 0.1}, {"read": 0.0}, time.time(), "node-1")
        )
        tell(1)
    # for the rest too soon, and not forgotten
    assert events == [{"kind": "data_nodes", "step": 1, "nodes": ["node-1"]}]
    events.clear()
    monkeypatch.setattr(step_log, "_MIN_EVENT_S", 0.0)
    tell(2)
    assert [(event["kind"], event["step"], event["rows"]) for event in events] == [("data", 2, 10)]
    tell(3)
    assert len(events) == 1  # nothing happened since
    monkeypatch.setattr(step_log, "_MAX_EVENT_S", 0.0)
    tell(4)
    assert (events[1]["rows"], events[1]["stages"]) == (0, [])
    report = DataStats(SimpleNamespace())
    assert report.take() == []
    report.log_means([], step=1, log=lambda kind, fields: pytest.fail("told"))
