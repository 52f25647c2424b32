"""Supervisor with a fake Ray Jobs server that loses answers, forgets jobs and rejects requests."""

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from builders.faults import fails_with, raising, rejects

import rayrec
from rayrec import recipes, storage
from rayrec.cluster import restart_policy, supervisor
from rayrec.cluster.restart_policy import (
    AttemptHistory,
    AttemptResult,
    Policy,
    Quit,
    SuperviseConfig,
    describe,
    judge,
)
from rayrec.cluster.supervisor import (
    CONFIG_KEY,
    RUN_KEY,
    Outcome,
    dashboard_url,
    find_summary,
    state_path,
)

SUMMARY = {"name": "run", "steps": 20, "weights_sha256": "00ff", "metrics": {"auroc": 0.75}}


UNSUBMITTED = {"type": "DRIVER", "entrypoint": "", "submission_id": None, "status": "RUNNING"}
"""Driver that was started without Ray Jobs."""


class Handler(BaseHTTPRequestHandler):
    server: "FakeHead"

    def do_GET(self) -> None:
        head = self.server
        name = self.path.removeprefix("/api/jobs/")
        if head.busy and head.submitted:
            head.busy -= 1
            return self.answer("try again later", status=500)
        if not name:
            return self.answer([*head.jobs.values(), UNSUBMITTED])
        if name.endswith("/logs"):
            return self.answer({"logs": head.logs.get(name.removesuffix("/logs"), "")})
        if name.endswith("/tail") or name not in head.jobs:
            return self.answer(f"Job {name} does not exist", status=404)
        job = dict(head.jobs[name])
        if head.ends and job["status"] == "RUNNING":
            end = head.ends.pop(0)
            head.jobs.clear() if end.get("forget") else head.jobs[name].update(end)
        return self.answer(job)

    def do_POST(self) -> None:
        head = self.server
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if self.path.endswith("/stop"):
            name = self.path.split("/")[-2]
            head.stopped.append(name)
            head.jobs[name]["status"] = "STOPPED"
            return self.answer({"stopped": True})
        name = body["submission_id"]
        if name in head.jobs:
            return self.answer("ValueError: already exists", status=500)
        head.submitted.append(body)
        head.add(name, metadata=body["metadata"])
        if head.lose_answers:
            head.lose_answers -= 1
            return self.connection.close()
        return self.answer({"job_id": name, "submission_id": name})

    def answer(self, value: Any, *, status: int = 200) -> None:
        body = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(status)
        self.send_header(
            "Content-Type", "text/plain" if isinstance(value, str) else "application/json"
        )
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class FakeHead(ThreadingHTTPServer):
    """Fake REST API of Ray Jobs, whose state tests can change."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.jobs: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.submitted: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.notes: list[str] = []  # of the supervisor
        self.ends: list[dict[str, Any]] = []  # results of future jobs; later jobs keep running
        self.lose_answers = 0  # submissions that are accepted before the connection breaks
        self.busy = 0  # requests after the first submission that fail with status 500
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def add(
        self, submission_id: str, *, run: str = "run", config_hash: str = "c0ffee", **fields: Any
    ) -> None:
        job = {
            "type": "SUBMISSION",
            "entrypoint": "exec python",
            "submission_id": submission_id,
            "status": "RUNNING",
            "driver_exit_code": None,
            "message": "",
        }
        self.jobs[submission_id] = {
            **job,
            "metadata": {RUN_KEY: run, CONFIG_KEY: config_hash},
            **fields,
        }


SUCCESS: dict[str, Any] = {"status": "SUCCEEDED", "driver_exit_code": 0}


def failure(status: int, message: str = "") -> dict[str, Any]:
    return {"status": "FAILED", "driver_exit_code": status, "message": message}


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHead]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(supervisor, "_POLL_S", 0.01)
    monkeypatch.setattr("rayrec.cluster.supervisor._FIRST_PROBE_S", 0.01)
    monkeypatch.setattr("rayrec.cluster.restart_policy.FIRST_PAUSE_S", 0.01)
    fake = FakeHead()
    yield fake
    fake.shutdown()
    fake.server_close()


Supervise = Callable[..., Outcome]


@pytest.fixture
def supervise(head: FakeHead, tmp_path: Path) -> Supervise:
    def run(
        *,
        policy: Policy | None = None,
        config_hash: str = "c0ffee",
        show: Callable[[str], None] | None = None,
        **changes: Any,
    ) -> Outcome:
        settings = {
            "address": head.url,
            "state": str(tmp_path / "run.json"),
            "policy": policy or Policy(),
            **changes,
        }
        arguments = ["criteo_demo", "--name", "run", "--train-data.path", "a log's name"]
        fixed: dict[str, Any] = {
            "name": "run",
            "stop_wait_s": 90.0,
            "note": head.notes.append,
            "show": show,
        }
        return supervisor.supervise(
            arguments, config_hash=config_hash, config=SuperviseConfig(**settings), **fixed
        )

    return run


def test_supervise_returns_summary_after_success(head: FakeHead, supervise: Supervise) -> None:
    head.ends = [SUCCESS]
    head.logs["run-0001"] = (
        f"step 1\n{{\n  a table\n{json.dumps(SUMMARY, indent=2)}\nsome thread died"
    )
    assert supervise() == Outcome("run", 0, "finished", 1, SUMMARY)
    [job] = head.submitted
    assert job["entrypoint"] == (
        "exec python -m rayrec train criteo_demo --name run --train-data.path 'a log'\"'\"'s name'"
    )
    assert job["metadata"] == {RUN_KEY: "run", CONFIG_KEY: "c0ffee"}
    assert job["runtime_env"] == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "90"}}
    assert any("finished, as run-0001" in note for note in head.notes)


def test_supervise_after_success_submits_data_check(head: FakeHead, supervise: Supervise) -> None:
    """A supervisor cannot see the data, which may differ from the finished run's. A rejection is
    not retried.
    """
    head.ends = [SUCCESS, SUCCESS]
    assert (supervise().attempts, supervise().attempts) == (1, 2)
    refusal = "rayrec train: /runs/run: finished already, with other data: train_data has 4 files"
    head.ends = [failure(2, refusal), SUCCESS]
    outcome = supervise()
    assert (outcome.status, outcome.cause, outcome.attempts) == (
        2,
        refusal.removeprefix("rayrec train: "),
        3,
    )
    # also if an attempt before had good flags
    head.ends = [failure(143), failure(2, refusal), SUCCESS]
    assert (supervise().status, len(head.submitted)) == (2, 5)


def test_supervise_retries_failures_but_not_user_errors(
    head: FakeHead, supervise: Supervise, tmp_path: Path
) -> None:
    head.ends = [
        failure(
            2,
            "a table\nrayrec train: steps: -1 makes no sense; give more\nException ignored in a "
            "thread",
        )
    ]
    outcome = supervise()
    assert (outcome.status, outcome.cause) == (2, "steps: -1 makes no sense; give more")
    head.ends = [failure(143), failure(1), failure(-9), SUCCESS]
    assert supervise() == Outcome("run", 0, "finished", 5)
    assert [job["submission_id"] for job in head.submitted] == [
        f"run-000{number}" for number in range(1, 6)
    ]
    log = (tmp_path / "run.log").read_text()
    assert "    rayrec train: steps: -1 makes no sense" in log
    assert "run-0004 was killed by SIGKILL" in log


def test_supervise_gives_up_after_max_failures(head: FakeHead, supervise: Supervise) -> None:
    head.ends = [failure(1)] * 9
    outcome = supervise(policy=Policy(max_failures=2))
    assert (outcome.status, outcome.attempts) == (1, 3)
    head.ends = [{"status": "STOPPED"}]
    assert supervise().status == 130


def test_job_without_record_is_resubmitted(head: FakeHead, supervise: Supervise) -> None:
    head.ends = [{"forget": True}, SUCCESS]
    assert supervise().attempts == 2
    head.jobs.clear()
    head.ends = [SUCCESS]
    assert supervise().attempts == 3  # a supervisor that comes later finds that out as well
    assert any("run-0001 was lost with the head" in note for note in head.notes)


def test_lost_answer_creates_no_second_job(head: FakeHead, supervise: Supervise) -> None:
    head.lose_answers = 1
    head.ends = [SUCCESS]
    assert supervise() == Outcome("run", 0, "finished", 1)
    assert len(head.submitted) == 1


def test_supervise_waits_for_unhealthy_head(head: FakeHead, supervise: Supervise) -> None:
    head.busy = 3
    head.ends = [SUCCESS]
    assert (supervise().status, len(head.submitted)) == (0, 1)
    assert any("head lost" in note and "try again later" in note for note in head.notes)
    assert any("head is back" in note for note in head.notes)


def test_supervisor_gives_up_lost_head_and_keeps_job(head: FakeHead, supervise: Supervise) -> None:
    head.busy = 1_000_000
    outcome = supervise(policy=Policy(max_wait_s=0.2))
    assert outcome.status == 1
    assert head.url in outcome.cause
    head.busy = 0
    head.ends = [SUCCESS]
    assert supervise() == Outcome("run", 0, "finished", 1)
    assert len(head.submitted) == 1


def test_dead_address_is_detected_at_once(supervise: Supervise) -> None:
    start_s = time.monotonic()
    assert supervise(address="http://127.0.0.1:9", policy=Policy(max_wait_s=0.1)).status == 1
    assert time.monotonic() - start_s < 30


def test_live_job_is_followed_without_state_file(head: FakeHead, supervise: Supervise) -> None:
    head.add("run-0006", status="FAILED")
    head.add("run-0007")
    head.add("other-0001", run="other")
    head.ends = [failure(1), SUCCESS]
    assert supervise() == Outcome("run", 0, "finished", 8)
    assert [job["submission_id"] for job in head.submitted] == ["run-0008"]


def test_live_job_with_other_flags_is_rejected(head: FakeHead, supervise: Supervise) -> None:
    head.add("run-0001", config_hash="another")
    rejects("job run-0001 trains run run with other flags", supervise)
    assert head.submitted == []


def test_other_flags_start_new_state(head: FakeHead, supervise: Supervise) -> None:
    head.ends = [SUCCESS, SUCCESS]
    supervise()
    assert supervise(config_hash="another").attempts == 2
    assert len(head.submitted) == 2


def test_second_supervisor_is_rejected(
    head: FakeHead, supervise: Supervise, tmp_path: Path
) -> None:
    with storage.locked(str(tmp_path / "run.log"), "busy"):
        rejects("another supervisor of run run is running", supervise)


def test_environment_variables_are_passed_but_not_logged(
    head: FakeHead, supervise: Supervise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejects("env SECRET: not set", supervise, env=("SECRET",))
    monkeypatch.setenv("SECRET", "open sesame")
    head.ends = [failure(1), SUCCESS]
    runtime_env = {
        "pip": ["polars"],
        "env_vars": {"A": "0", "B": "1"},
        "working_dir": "https://host/code.zip",
    }
    (tmp_path / "env.json").write_text(json.dumps(runtime_env))
    supervise(env=("SECRET", "A=sesame"), runtime_env=str(tmp_path / "env.json"))
    sent = head.submitted[-1]["runtime_env"]
    assert sent["env_vars"] == {
        "RAY_JOB_STOP_WAIT_TIME_S": "90",
        "SECRET": "open sesame",
        "A": "sesame",
        "B": "1",
    }
    assert (sent["pip"]["packages"], sent["working_dir"]) == (["polars"], "https://host/code.zip")
    with_value = recipes.criteo_demo("log").replace(
        storage_path="/runs", cluster={"env": ("A=sesame",)}
    )
    assert "sesame" not in rejects(
        "cluster.env: .*Use --env NAME=VALUE before the --", rayrec.supervise, with_value, []
    )
    assert "sesame" not in "\n".join(
        [*head.notes, *(file.read_text() for file in tmp_path.iterdir())]
    )


@pytest.mark.parametrize("detach", [False, True])
def test_ctrl_c_stops_attached_job(
    head: FakeHead, supervise: Supervise, monkeypatch: pytest.MonkeyPatch, detach: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(supervisor._Supervisor, "_see", raising(KeyboardInterrupt()))
        fails_with(KeyboardInterrupt, "", supervise, detach_on_signal=detach)
    assert head.stopped == ([] if detach else ["run-0001"])
    head.ends = [SUCCESS]
    assert supervise().attempts == (1 if detach else 2)


def test_interrupted_stop_resubmits_job(
    head: FakeHead, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def interrupt(_: Any) -> None:
            # the second, when the job has ended
            patch.setattr(supervisor._Jobs, "find", raising(KeyboardInterrupt()))
            raise KeyboardInterrupt

        patch.setattr(supervisor._Supervisor, "_see", interrupt)
        fails_with(KeyboardInterrupt, "", supervise)
    assert head.jobs["run-0001"]["status"] == "STOPPED"
    head.ends = [{"status": "STOPPED"}]
    outcome = supervise()
    assert any("run-0001 had been told to stop" in note for note in head.notes)
    assert (outcome.status, outcome.attempts) == (130, 2)  # the second job was stopped by someone


def test_state_file_and_dashboard_url_are_checked(
    supervise: Supervise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text('{"steps": 3}')
    rejects("must be a supervisor's state file", supervise)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    assert dashboard_url(None) == "http://127.0.0.1:8265"
    assert dashboard_url("head:8265") == "http://head:8265"
    assert dashboard_url("https://head/ray/") == "https://head/ray"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://there:1")
    assert dashboard_url(None) == "http://there:1"
    for wrong in ("ray://head:10001", "http://", "http://head:port"):
        rejects("must be the URL of a Ray dashboard", dashboard_url, wrong)
    monkeypatch.setenv("RAYREC_CACHE", "/there")
    assert state_path("run") == "/there/supervise/run.json"


@pytest.mark.parametrize("log", ["", "no braces", "\n{\n cut short", '{\n  "other": 1\n}\n'])
def test_summary_of_returns_none_without_summary(log: str) -> None:
    assert find_summary(log) is None


# -- Restart policy for each result of an attempt
POLICY = Policy(max_failures=2, healthy_after_s=100.0)


def ended(status: int | None, *, duration_s: float = 1.0) -> AttemptResult:
    return AttemptResult("failed", status=status, duration_s=duration_s, ran=status is not None)


def test_judge_quits_after_final_results() -> None:
    stopped = AttemptResult("stopped", duration_s=1000.0, ran=True)
    interrupted = [(stopped, 130), (ended(130, duration_s=1000.0), 130)]
    succeeded = (AttemptResult("succeeded", status=0, duration_s=1.0, ran=True), 0)
    for ending, status in (
        succeeded,
        *interrupted,
        *((ended(status), 2) for status in (2, 126, 127)),
    ):
        tally, decision = judge(POLICY, AttemptHistory(attempts=1), ending, jitter=0.5)
        assert (decision.status, tally) == (status, AttemptHistory(attempts=1))


@pytest.mark.parametrize("status", [1, 137, 139, 143, 255, None])
@pytest.mark.parametrize(
    ("duration_s", "wait_s", "short_lived"), [(1.0, 5.0, 1), (99.9, 5.0, 1), (100.0, 0.0, 0)]
)
def test_judge_retries_other_results(
    status: int | None, duration_s: float, wait_s: float, short_lived: int
) -> None:
    tally, decision = judge(
        POLICY, AttemptHistory(attempts=3), ended(status, duration_s=duration_s), jitter=0.5
    )
    assert decision == wait_s
    assert tally == AttemptHistory(
        attempts=3, short_lived=short_lived, accepted=status is not None or not short_lived
    )


def test_judge_retries_lost_head_and_stop_of_earlier_supervisor() -> None:
    lost = AttemptResult("lost", duration_s=5000.0, ran=True)
    assert judge(POLICY, AttemptHistory(1, short_lived=2), lost, jitter=0.0) == (
        AttemptHistory(1, 0, True),
        0.0,
    )
    short = AttemptResult("lost", duration_s=5.0, ran=True)
    assert judge(POLICY, AttemptHistory(1, short_lived=1), short, jitter=0.5) == (
        AttemptHistory(1, 2, True),
        10.0,
    )
    assert judge(POLICY, AttemptHistory(1), AttemptResult("lost"), jitter=0.5)[0] == AttemptHistory(
        1, 1, accepted=False
    )
    stopped = AttemptResult("stopped", duration_s=5.0, ran=True, stop_requested=True)
    assert judge(POLICY, AttemptHistory(3, short_lived=2), stopped, jitter=0.5) == (
        AttemptHistory(3),
        0.0,
    )
    failed = AttemptResult("failed", status=1, duration_s=5.0, ran=True, stop_requested=True)
    assert judge(POLICY, AttemptHistory(3), failed, jitter=0.5)[0].short_lived == 1


def run_through(policy: Policy, endings: list[AttemptResult]) -> tuple[int, Quit | None]:
    tally = AttemptHistory()
    for number, ending in enumerate(endings, start=1):
        tally, decision = judge(policy, tally, ending, jitter=0.5)
        if isinstance(decision, Quit):
            return number, decision
    return len(endings), None


def test_judge_quits_after_short_attempts_or_with_other_data() -> None:
    attempts, decision = run_through(POLICY, [ended(1)] * 10)
    assert attempts == 3
    failed = "ran for less than 100 s or ended with an error of yours"
    assert decision == Quit(1, f"3 attempts in a row {failed}; the last ended with exit status 1")
    assert run_through(Policy(max_failures=0), [ended(137)] * 10)[0] == 1
    assert run_through(Policy(max_failures=-1), [ended(1)] * 1000) == (1000, None)
    healthy = ended(1, duration_s=200.0)
    short = ended(1)
    assert run_through(POLICY, [short, short, healthy] * 50) == (150, None)
    # A recovering cluster may lack nodes or file systems, which fails an attempt like an invalid
    # flag.
    attempts, decision = run_through(POLICY, [ended(143, duration_s=500.0), *[ended(2)] * 10])
    assert (attempts, decision.status) == (4, 2)
    # Ray ended the first before the command ran
    assert run_through(POLICY, [ended(None), ended(2)])[0] == 2
    changed = AttemptResult("failed", status=2, duration_s=500.0, ran=True, run_finished=True)
    assert judge(POLICY, AttemptHistory(attempts=2, accepted=True), changed, jitter=0.5)[1] == Quit(
        2, describe(changed)
    )
    # A remaining problem, such as a full disk, either disappears or ends every attempt after hours
    # of training.
    late = ended(2, duration_s=500.0)
    tally, decision = judge(POLICY, AttemptHistory(attempts=1), late, jitter=0.5)
    assert (tally, decision) == (AttemptHistory(1, short_lived=1, accepted=True), 5.0)
    attempts, quit_ = run_through(POLICY, [late] * 10)
    assert (attempts, quit_ and quit_.status) == (3, 2)
    assert run_through(POLICY, [late, late, ended(1, duration_s=500.0)] * 5) == (15, None)


def test_pauses_double_and_exit_statuses_are_described() -> None:
    def pauses(jitter: float) -> list[float]:
        return [restart_policy.pause_s(times, jitter=jitter) for times in range(7)]

    assert pauses(0.5) == [0.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert (pauses(0.0)[1:3], pauses(1.0)[1:3]) == ([3.75, 7.5], [6.25, 12.5])
    assert all(before <= after for before, after in itertools.pairwise(pauses(0.3)))
    assert restart_policy.pause_s(100_000, jitter=0.5) == 60.0
    assert [restart_policy.shell_status(status) for status in (None, 0, 2, -9, -15, 143)] == [
        None,
        0,
        2,
        137,
        143,
        143,
    ]
    assert describe(ended(137)) == "was killed by SIGKILL"
    assert describe(ended(143)) == "was preempted (exit status 143)"
    assert describe(ended(255)) == "ended with exit status 255"
    assert "--python" in describe(ended(127))
    assert describe(AttemptResult("lost")) == "was lost with the head"
    for wrong in ({"max_failures": -2}, {"healthy_after_s": -1.0}, {"max_wait_s": -1.0}):
        rejects("", Policy, **wrong)


@pytest.mark.parametrize(("max_wait_s", "longest_s"), [(86_400.0, 1.25), (0.25, 0.25)])
def test_pause_in_outage_is_short_and_within_limit(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch, max_wait_s: float, longest_s: float
) -> None:
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        raise EOFError

    monkeypatch.setattr(supervisor, "_FIRST_PROBE_S", 1.0)
    monkeypatch.setattr(supervisor.time, "sleep", sleep)
    fails_with(
        EOFError, "", supervise, address="http://127.0.0.1:9", policy=Policy(max_wait_s=max_wait_s)
    )
    assert len(pauses) == 1
    assert 0.0 <= pauses[0] <= longest_s


def test_job_output_is_shown_once(head: FakeHead, supervise: Supervise) -> None:
    shown: list[str] = []
    head.logs["run-0001"] = "first job\n"
    head.logs["run-0002"] = "second job\n"
    head.ends = [failure(1), SUCCESS]
    supervise(show=shown.append)
    assert shown == ["first job\n", "second job\n"]


@pytest.mark.parametrize("name", [None, "mine"])
def test_supervised_run_has_name(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    run = Mock()
    monkeypatch.setattr(supervisor, "supervise", run)
    config = recipes.criteo_demo("log").replace(storage_path="/runs", name=name)
    rayrec.supervise(config, ["criteo_demo"])
    name_of_run = run.call_args.kwargs["name"]
    assert re.fullmatch(r"criteo_demo-\d{8}-\d{6}" if name is None else name, name_of_run)
    assert run.call_args.args[0] == (
        ["criteo_demo", "--name", name_of_run] if name is None else ["criteo_demo"]
    )
