"""Caller's process after runs and other commands in it: nothing of theirs stays, and runs in two
threads stop separately.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders.faults import fails_with, raising
from builders.process_state import unchanged_process
from builders.runs import LEAN, QUIET, events_of, one_worker
from ranks import data_parallel

import rayrec
from rayrec.checkpoint import latest
from rayrec.config import InputError
from rayrec.training import trainer
from rayrec.training.stop_monitor import Signals
from rayrec.workloads.base import TrainConfig, Workload
from rayrec.workloads.recsys.workload import ClickWorkload

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the caller's state as in a script: without Ray, and without what earlier tests left."""
    for name in ("RAY_ADDRESS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(click_log: Path, tmp_path: Path) -> TrainConfig:
    small: dict[str, Any] = {
        "steps": 4,
        "evaluate_every": 4,
        "batch_size": 64,
        "name": "run",
        "seed": 7,
        "tf32": True,
        **LEAN,
    }
    return one_worker(click_log, tmp_path).replace(cluster={"address": "none"}, **small)


def test_run_leaves_callers_process_unchanged(config: TrainConfig) -> None:
    with unchanged_process():
        trainer.train(config, console=QUIET)


def test_scoring_commands_leave_callers_process_unchanged(
    config: TrainConfig, click_log: Path, tmp_path: Path
) -> None:
    run = trainer.train(config, console=QUIET).folder
    with unchanged_process():
        log = str(click_log / "train.txt")
        rayrec.evaluate(run, log, console=QUIET)
        rayrec.predict_to(run, log, out=str(tmp_path / "scores"), console=QUIET)
        rayrec.export(run, out=str(tmp_path / "export"))
        # The schema of a click model.
        schema = config.workload.schema  # type: ignore[attr-defined]
        rayrec.plan(config, tables=[100] * len(schema.sparse))


@pytest.mark.parametrize("part", ["prepare", "make_loader", "set_up", "checkpoint_files"])
def test_failed_start_leaves_callers_process_unchanged(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    trainer.train(config.replace(name="first"), console=QUIET)  # what is loaded once stays loaded
    monkeypatch.setattr(ClickWorkload, part, raising(InputError("no room for the tables")))
    with unchanged_process():
        for _ in range(2):
            fails_with(InputError, "no room for the tables", trainer.train, config, console=QUIET)


def test_failed_step_leaves_callers_process_unchanged(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up = ClickWorkload.set_up

    def set_up_badly(self: Any, *arguments: Any) -> Any:
        setup = set_up(self, *arguments)
        monkeypatch.setattr(setup.pipeline, "progress", raising(ValueError("shapes do not match")))
        return setup

    monkeypatch.setattr(ClickWorkload, "set_up", set_up_badly)
    with unchanged_process():
        fails_with(ValueError, "shapes do not match", trainer.train, config, console=QUIET)


def test_rejected_run_leaves_callers_process_unchanged(config: TrainConfig) -> None:
    with unchanged_process():
        fails_with(
            InputError,
            "",
            trainer.train,
            config.updated({"train_data": {"path": "/nowhere.txt"}}),
            console=QUIET,
        )


# -- Runs in two threads


class Waiting:
    """Two runs of a tiny model in two threads, each of which waits in its third step until it is
    released.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arrived = {name: threading.Event() for name in "ab"}
        self.released = {name: threading.Event() for name in "ab"}
        self.stop = {name: threading.Event() for name in "ab"}
        self.results: dict[str, Any] = {}
        self.threads = {name: threading.Thread(target=self._run, args=(name,)) for name in "ab"}

    def _run(self, name: str) -> None:
        settings: dict[str, Any] = {
            "name": name,
            "storage_path": str(self.folder),
            "log_every": 1,
            **LEAN,
        }
        config = data_parallel.config(1, steps=6).replace(**settings)
        try:
            self.results[name] = trainer.train(config, console=QUIET, stop=self.stop[name]).summary[
                "steps"
            ]
        except BaseException as error:
            self.results[name] = error

    def begin(self, name: str) -> None:
        self.threads[name].start()
        assert self.arrived[name].wait(WAIT_S)

    def end(self, name: str) -> Any:
        self.released[name].set()
        self.threads[name].join(WAIT_S)
        return self.results[name]


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    runs = Waiting(tmp_path)
    set_up = data_parallel.Small.set_up

    def set_up_waiting(self: Workload, context: Any, prepared: Any) -> Any:
        setup = set_up(self, context, prepared)  # type: ignore[arg-type]
        name = str(context.config.name)
        begin_step = setup.begin_step

        def begin(step: int, total: int) -> None:
            if step == 2:
                runs.arrived[name].set()
                assert runs.released[name].wait(WAIT_S)
                if runs.stop[name].is_set() or name in stopped:
                    assert context.engine.stop.wait(WAIT_S)
            begin_step(step, total)

        setup.begin_step = begin
        return setup

    stopped: set[str] = set()
    monkeypatch.setattr(data_parallel.Small, "set_up", set_up_waiting)
    monkeypatch.setattr(runs, "stopped", stopped, raising=False)
    return runs


def test_stop_request_ends_one_run(waiting: Waiting) -> None:
    with unchanged_process():
        waiting.begin("a")
        waiting.begin("b")
        waiting.stop["a"].set()
        stopped = waiting.end("a")
        assert (type(stopped), stopped.code) == (SystemExit, 143)
        assert waiting.end("b") == 6
        assert 2 < latest(str(waiting.folder / "a")).step < 6
        assert [event["cause"] for event in events_of(waiting.folder / "a", "stop")] == [
            "a request to stop"
        ]


@pytest.fixture
def heeded_hangup() -> Iterator[None]:
    """Set the default of SIGHUP, which nohup ignores."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.usefixtures("heeded_hangup")
def test_signal_stops_runs_of_all_threads(waiting: Waiting, number: signal.Signals) -> None:
    waiting.stopped.update("ab")  # type: ignore[attr-defined]  # set by the fixture
    with Signals() as signals, signals.deferred():
        waiting.begin("a")
        waiting.begin("b")
        os.kill(os.getpid(), number)
        assert {type(waiting.end(name)) for name in "ab"} == {
            KeyboardInterrupt if number == signal.SIGINT else SystemExit
        }
        assert signals.cause == number.name


def test_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals, signals.deferred():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signals.cause is None
    finally:
        signal.signal(signal.SIGHUP, before)
