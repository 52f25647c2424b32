"""Complete runs in this process: their end, their folder, and the restored process."""

import gzip
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from builders.faults import fails_with, raising, rejects, until
from builders.runs import LEAN, QUIET, events_of, train
from hosts.ports import free_ports
from ranks import data_parallel
from torch import distributed
from torch.distributed import DistStoreError, HashStore

from rayrec import recipes, storage
from rayrec.checkpoint import latest
from rayrec.cluster.layout import TorchrunEnv
from rayrec.config import InputError
from rayrec.data.engine import StopToken, ThreadEngine
from rayrec.training import profiling, stop_monitor, trainer
from rayrec.training.launchers import process_worker
from rayrec.training.launchers.process_launcher import ProcessLauncher, fitted
from rayrec.training.launchers.process_worker import (
    StoreControlChannel,
    StoreRendezvous,
    end,
    train_other,
)
from rayrec.training.result import Result
from rayrec.workloads.base import RunContext, TrainConfig, WorkerContext, WorkerSetup

STEPS = 12
WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Small(data_parallel.Small):
    """Model that calls `AT_STEP` in the forward pass of every training step, numbered from 1 in
    this process.
    """

    def prepare(self, context: RunContext) -> None:
        assert isinstance(context.engine, ThreadEngine)

    def set_up(self, context: WorkerContext, prepared: None) -> WorkerSetup:
        STATE.stop = context.engine.stop
        return super().set_up(context, prepared)

    def measure(
        self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        if model.training:
            STATE.number += 1
            STATE.act(STATE.number)
        return super().measure(model, tensors)


STATE = SimpleNamespace(number=0, act=lambda number: None, stop=StopToken())


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forbid Ray, poll quickly, and check that the process is restored."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", raising(AssertionError("a run in this process starts no Ray")))
    monkeypatch.setattr(stop_monitor, "POLL_S", 0.01)
    monkeypatch.setattr(process_worker, "_POLL_S", 0.01)
    monkeypatch.setattr("rayrec.training.launchers.base._POLL_S", 0.01)
    monkeypatch.setattr(process_worker, "_REQUESTS_S", 0.01)
    monkeypatch.setattr(profiling, "_POLL_S", 0.02)
    STATE.number = 0
    STATE.act = lambda number: None
    root = logging.getLogger()
    handlers = root.handlers
    level = root.level
    threads = torch.get_num_threads()
    on_signal = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    assert not distributed.is_initialized()
    assert torch.get_num_threads() == threads
    assert (root.handlers, root.level) == (handlers, level)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == on_signal
    assert not workers()


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "attempt"]


def config(folder: Path, **changes: Any) -> TrainConfig:
    plain = data_parallel.config(1, steps=STEPS)
    workload = Small(
        optimizer=plain.workload.optimizer,  # type: ignore[attr-defined]
        schedule=plain.workload.schedule,  # type: ignore[attr-defined]
    )
    made = plain.replace(
        name="run",
        storage_path=str(folder),
        workload=workload,
        evaluate_every=6,
        scaling={"num_workers": 1, "threads_per_worker": torch.get_num_threads() + 1},
        **LEAN,
    )
    return made.updated(changes)


def run(folder: Path, **changes: Any) -> Result:
    return trainer.train(config(folder, **changes), console=QUIET)


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return events_of(folder / "run", *kinds)


def at(step: int, action: Callable[[], object]) -> None:
    """Act at a step and wait until a stop is requested."""

    def act(number: int) -> None:
        if number == step:
            action()
            assert STATE.stop.wait(WAIT_S)

    STATE.act = act


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("uninterrupted")).summary["weights_sha256"]


def test_in_process_run_completes(tmp_path: Path, expected: str) -> None:
    inside: list[tuple[int, int, str]] = []

    def act(number: int) -> None:
        logging.getLogger("x").info("step %d", number)
        inside.append(
            (distributed.get_world_size(), torch.get_num_threads(), threading.current_thread().name)
        )

    STATE.act = act
    threads = torch.get_num_threads()
    summary = run(tmp_path).summary
    assert (set(inside), len(inside)) == ({(1, threads + 1, "attempt")}, STEPS)
    assert (summary["steps"], summary["rows_lost"], summary["rows_repeated"]) == (STEPS, 0, 0)
    assert summary["weights_sha256"] == expected
    folder = tmp_path / "run"
    assert storage.read_json(str(folder / "summary.json")) == summary
    assert "<html" in (folder / "report.html").read_text()
    assert "[rank 0] INFO x: step 12" in (folder / "logs" / "worker_0.log").read_text()
    kinds = [event["kind"] for event in events(tmp_path)]
    assert kinds[:5] == ["run", "prepared", "start_up", "attempt", "start"]
    assert "failure" not in kinds
    assert not list((folder / "profile").glob("*"))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            ValueError("shapes\n (3, 4) and (5,) do not match"),
            "ValueError: (3, 4) and (5,) do not match",
        ),
        (InputError("the loss is nan at step 5. Lower the learning rates"), None),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_worker_error_is_raised_unchanged(
    tmp_path: Path, error: Exception, cause: str | None
) -> None:
    def act(number: int) -> None:
        if number == 5:
            raise error

    STATE.act = act
    with pytest.raises(type(error)) as raised:
        run(tmp_path)
    assert raised.value is error
    assert raised.value.__cause__ is None
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)][-2:] == [
        "measure",
        "act",
    ]
    found = events(tmp_path)
    assert (found[-1]["kind"], found[-1]["cause"], found[-1]["last"]) == (
        "failure",
        cause or str(error),
        True,
    )
    assert [event["kind"] for event in found].count("attempt") == 1  # it is not tried again
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("number", "cause", "raised"),
    [
        (signal.SIGTERM, "SIGTERM", SystemExit),
        (signal.SIGINT, "SIGINT", KeyboardInterrupt),
        (None, "a request to stop", SystemExit),
    ],
    ids=["SIGTERM", "SIGINT", "event"],
)
def test_signal_saves_and_same_call_resumes(
    tmp_path: Path,
    expected: str,
    number: signal.Signals | None,
    cause: str,
    raised: type[BaseException],
) -> None:
    stop_event = threading.Event()
    at(3, lambda: stop_event.set() if number is None else os.kill(os.getpid(), number))
    with pytest.raises(raised) as ended:
        trainer.train(config(tmp_path), console=QUIET, stop=stop_event)
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 143
    saved = latest(str(tmp_path / "run"))
    assert 3 <= saved.step < STEPS
    stop = events(tmp_path)[-1]
    assert (stop["kind"], stop["cause"], stop["step"], stop["last"]) == (
        "stop",
        cause,
        saved.step,
        True,
    )
    STATE.act = lambda step: None
    summary = run(tmp_path).summary
    assert STATE.number == STEPS  # no step was trained twice
    assert (summary["weights_sha256"], summary["rows_lost"], summary["rows_repeated"]) == (
        expected,
        0,
        0,
    )
    assert [event["checkpoint"] for event in events(tmp_path, "start")] == [None, saved.path]


def test_paused_run_matches_uninterrupted_run(tmp_path: Path) -> None:
    patient: dict[str, Any] = {"plateau": {"patience": 1, "min_improvement": 1e3, "factor": 0.5}}
    whole = run(tmp_path / "whole", **patient).summary
    STATE.number = 0
    reached = []
    # after 1, 3 and 6 of 12 steps, of which 6 is evaluated in any case
    for share in (1 / 12, 1 / 4, 1 / 4, 1 / 2):
        assert trainer.train_until(config(tmp_path, **patient), share, console=QUIET) is None
        reached.append((STATE.number, latest(str(tmp_path / "run")).step))
    assert reached == [(1, 1), (3, 3), (3, 3), (6, 6)]
    stop = events(tmp_path)[-1]
    assert (stop["kind"], stop["cause"], stop["last"], stop["paused"]) == (
        "stop",
        "a planned pause",
        True,
        True,
    )
    result = trainer.train_until(config(tmp_path, **patient), 1.0, console=QUIET)
    for name in (
        "weights_sha256",
        "steps",
        "rows",
        "restarts",
        "rows_lost",
        "rows_repeated",
        "validation",
    ):
        assert result.summary[name] == whole[name], name
    assert STATE.number == STEPS
    lowered, expected = (
        [event["step"] for event in events(path, "plateau")]
        for path in (tmp_path, tmp_path / "whole")
    )
    assert lowered == expected
    # it is finished
    assert trainer.train_until(config(tmp_path, **patient), 0.5, console=QUIET) == result


def test_resumed_run_keeps_plateau_learning_rates(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "evaluate_every": 3,
        "log_every": 1,
        "early_stopping": {"patience": 0},
        "plateau": {"patience": 1, "min_improvement": 1e3, "factor": 0.5},
    }
    whole = run(tmp_path / "whole", **settings).summary["weights_sha256"]
    STATE.number = 0
    at(7, terminate)
    fails_with(SystemExit, "", run, tmp_path / "cut", **settings)
    STATE.act = lambda step: None
    assert run(tmp_path / "cut", **settings).summary["weights_sha256"] == whole
    rates = {event["step"]: event["learning_rate"] for event in events(tmp_path / "cut", "step")}
    assert [rates[step] / rates[3] for step in (3, 6, 7, 9, 10, 12)] == pytest.approx(
        [1, 1, 0.5, 0.5, 0.25, 0.25]
    )


def test_worker_without_save_in_grace_period_is_abandoned(tmp_path: Path) -> None:
    freed = threading.Event()

    def act(step: int) -> None:
        if step == 3:
            terminate()
            freed.wait(WAIT_S)
            raise ValueError("nobody waits for this")

    STATE.act = act
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, failure={"grace_s": 0.05, "max_grace_s": 0.05})
    (worker,) = workers()
    freed.set()
    worker.join(WAIT_S)
    assert ended.value.code == 143
    failure, *_ = events(tmp_path, "failure")
    assert failure["cause"].startswith(
        "SIGTERM, and the last checkpoint made no progress for failure.grace_s (0 s)"
    )
    assert failure["last"]
    assert latest(str(tmp_path / "run")) is None


def test_imports_leave_root_logger_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logging.info` adds a handler to a root logger without any."""
    (tmp_path / "noisy_library.py").write_text("import logging\nlogging.info('loaded')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Small, "WORKER_MODULES", ("noisy_library",))
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])
        launcher = ProcessLauncher(config(tmp_path))
        launcher.connect(str(tmp_path), QUIET)
        launcher.close()
        assert logging.getLogger().handlers == []
    assert sys.modules.pop("noisy_library")


def test_profile_request_reaches_in_process_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_LEAD_S", 0.0)
    folder = str(tmp_path / "run")
    reported = list[dict[str, Any]]()
    request = tmp_path / "run" / "profile" / "request.json"
    asked = threading.Event()

    def ask() -> None:
        so_far = events_of(folder)
        reported.append(
            profiling.request_profile(
                folder, so_far, steps=2, note=lambda text: asked.set(), timeout_s=WAIT_S
            )
        )

    asking = threading.Thread(target=ask)

    def act(step: int) -> None:
        if step == 3:
            asking.start()
            assert asked.wait(WAIT_S)
        if step > 3:
            pause = threading.Event()
            while request.exists():
                pause.wait(0.01)
            pause.wait(0.02)

    STATE.act = act
    run(tmp_path)
    asking.join(WAIT_S)
    (profile,) = reported
    assert (profile["steps"], profile["ranks"]) == (2, 1)
    trace = Path(profile["profile"], "rank_0", "trace.json.gz").read_bytes()
    assert b"aten::" in gzip.decompress(trace)  # of the worker's thread
    assert [event["path"] for event in events(tmp_path, "profile")] == [profile["profile"]]


def test_process_group_of_caller_is_reused_unless_larger(
    tmp_path: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        assert run(tmp_path).summary["weights_sha256"] == expected
        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "is_initialized", lambda: True)
        patch.setattr(distributed, "get_world_size", lambda: 4)
        rejects("this process is one of 4 of a process group", run, tmp_path / "larger")
    assert not (tmp_path / "larger" / "run").exists()


# -- Processes started by torchrun: their ranks, their messages, and a run with one process
FOUND = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node", "MASTER_PORT": "1"}


def test_torchrun_env_is_read_and_config_fits_processes() -> None:
    assert TorchrunEnv.from_environment({}) is None
    assert TorchrunEnv.from_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None  # nobody to meet
    torchrun_variables = {
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "5",
    }
    assert TorchrunEnv.from_environment(FOUND | torchrun_variables) == TorchrunEnv(3, 4, 1, 2, 5)
    assert TorchrunEnv.from_environment(FOUND) == TorchrunEnv(3, 4, 0, 1, 0)
    for wrong, message in (
        (
            {"RANK": "4"},
            "RANK=4 of WORLD_SIZE=4, .*: a rank must be below the number of processes. With srun",
        ),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 of LOCAL_WORLD_SIZE=1"),
        (
            {"LOCAL_WORLD_SIZE": "8(x2)"},
            r"RANK=3, WORLD_SIZE=4, LOCAL_WORLD_SIZE=8\(x2\): .* must be integers",
        ),
    ):
        rejects(message, TorchrunEnv.from_environment, FOUND | wrong)
    launched = TorchrunEnv(0, 4, 0, 2, 0)
    config = recipes.criteo_demo()
    assert fitted(config, launched).scaling.num_workers == 4
    assert launched.cpus >= 1
    for changes, message in (
        ({"cluster": {"address": "auto"}}, "cluster.address auto: needs Ray"),
        (
            {"scaling": {"resources_per_worker": {"x": 1.0}}},
            "scaling.resources_per_worker: needs Ray",
        ),
        ({"cluster": {"object_store_bytes": 1 << 30}}, "cluster.object_store_bytes: needs Ray"),
    ):
        rejects(message, fitted, config.replace(**changes), launched)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> TorchrunEnv:
    found = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)),
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return TorchrunEnv.from_environment()


def meetings(*ranks: int) -> list[StoreRendezvous]:
    """Return the rendezvous of two ranks in one store of this process."""
    store = HashStore()
    return [StoreRendezvous(TorchrunEnv(rank, 2, 0, 1, 0), store) for rank in ranks]


def test_store_channel_delivers_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_worker, "_REQUESTS_S", 0.01)
    meeting, other_rendezvous = meetings(0, 1)
    channel = StoreControlChannel(meeting)
    other = StoreControlChannel(other_rendezvous)
    assert (channel.stop_reason(), channel.saved_bytes()) == (None, 0)
    other.request_stop("SIGTERM")
    channel.request_stop("SIGINT")
    assert (channel.stop_reason(), other.stop_reason()) == ("SIGTERM", "SIGTERM")
    other.report_saved_bytes(1, 7)
    channel.report_saved_bytes(0, 3)
    other.report_saved_bytes(1, 9)
    assert channel.saved_bytes() == 12
    requests: list[Any] = []
    channel.send_profile_request({"steps": 1})
    other.subscribe(requests.append)
    channel.send_profile_request({"steps": 2})
    until(lambda: len(requests) > 1)
    assert requests == [{"steps": 1}, {"steps": 2}]
    monkeypatch.setattr(meeting, "get", raising(DistStoreError("Connection reset")))
    fails_with(OSError, "the store of the run's processes is gone", channel.stop_reason)


def test_store_publishes_large_values(alone: TorchrunEnv) -> None:
    meeting = StoreRendezvous.join(alone)
    assert meeting.get("large") is None
    # the last one is 20 MiB; a message to the store is 8 at most
    for value in (b"", b"small", bytes(range(256)) * (80 << 10)):
        meeting.publish("large", value)
        assert meeting.get("large") == value
    meeting.remove("large")
    assert meeting.get("large") is None
    assert meeting._store.num_keys() == 1  # no piece is left; one key is the store's own


def test_other_processes_receive_run_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_worker, "_LEAVE_S", 0.2)
    meeting, other = meetings(0, 1)
    end(meeting, {"status": 143})  # one that is waited for in vain
    assert train_other(recipes.criteo_demo(), other) == {"status": 143}
    monkeypatch.setattr(process_worker, "_LEAVE_S", 60.0)
    end(meeting, {"status": 143})  # which comes back: it has left


def test_torchrun_with_one_process_matches_plain_run(
    click_log: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = recipes.criteo_demo(str(click_log / "train.txt")).replace(
        steps=4,
        evaluate_every=4,
        batch_size=64,
        storage_path=str(tmp_path),
        scaling={"num_workers": 1},
    )
    plain = train(config, name="plain", cluster={"address": "none"})
    request.getfixturevalue("alone")
    launched = train(config, name="launched", scaling={"num_workers": 2})
    assert launched.summary["weights_sha256"] == plain.summary["weights_sha256"]
    rejects(
        r"train_data\.path: must be a training log",
        train,
        config,
        name="other",
        train_data={"path": None},
    )
    assert json.loads((tmp_path / "launched" / "summary.json").read_text()) == launched.summary


def test_closed_rendezvous_raises_in_threads(
    alone: TorchrunEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_worker, "_REQUESTS_S", 0.0)
    meeting = StoreRendezvous.join(alone)
    before = set(threading.enumerate())
    StoreControlChannel(meeting).subscribe(lambda request: None)
    (watching,) = set(threading.enumerate()) - before
    meeting.close()
    watching.join(10)
    assert not watching.is_alive()
    fails_with(OSError, "has ended", meeting.get, "anything")
