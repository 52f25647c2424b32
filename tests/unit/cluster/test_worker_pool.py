"""Processes with a train worker's modules that Ray starts ahead of the worker."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray

from rayrec.cluster import worker_pool
from rayrec.cluster.worker_pool import MODULES, TOKENS, standby, task_variables, worker_variables


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for tokens."""
    (folder := tmp_path / "tokens").mkdir()
    monkeypatch.setenv(TOKENS, str(folder))
    return folder


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules to import, of which only imported_ahead can be imported."""
    (tmp_path / "breaks_when_imported.py").write_text("raise RuntimeError('broken')")
    (tmp_path / "imported_ahead.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(MODULES, "breaks_when_imported,no_such_module,imported_ahead")
    yield
    sys.modules.pop("imported_ahead", None)


@pytest.mark.usefixtures("modules")
def test_hook_imports_modules_once_per_token(tokens: Path, tmp_path: Path) -> None:
    worker_pool.import_modules()
    assert "imported_ahead" not in sys.modules
    (tokens / "token").touch()
    worker_pool.import_modules()
    assert sys.modules["imported_ahead"].__file__ == str(tmp_path / "imported_ahead.py")
    assert not list(tokens.iterdir())


def test_hook_ignores_processes_without_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TOKENS, MODULES):
        monkeypatch.delenv(name, raising=False)
    worker_pool.import_modules()
    monkeypatch.setenv(MODULES, "")  # a data task's
    worker_pool.import_modules()


def test_variables_of_workers_and_tasks() -> None:
    variables = worker_variables({TOKENS: "/tokens", "HOME": "/"}, ["torch", "numpy"])
    assert variables == {TOKENS: "/tokens", MODULES: "torch,numpy"}
    assert task_variables(variables) == {MODULES: ""}
    assert worker_variables({}, ["torch"]) == {}
    assert task_variables({}) == {}


class Pool:
    """Fake of Ray that calls `run` with the number of each created actor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Callable[[int], None]) -> None:
        self.killed: list[int] = []
        self.given: dict[str, object] = {}
        self._number = 0
        self._run = run
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "kill", self.killed.append)
        monkeypatch.setattr(ray, "remote", self._remote)
        for name in ("_KILL_S", "_START_S", "_POLL_S"):
            monkeypatch.setattr(worker_pool, name, 0.001)

    def _remote(self, **options: object) -> Callable[[object], "Pool"]:
        self.given |= options
        return lambda actor: self

    def options(self, **options: object) -> "Pool":
        self.given |= options
        return self

    def remote(self) -> int:
        self._number += 1
        self._run(self._number - 1)
        return self._number - 1


def start_and_wait(number: int, variables: dict[str, str]) -> None:
    worker_pool.start_processes(number, variables)
    for thread in threading.enumerate():
        if thread.name == "worker-pool":
            thread.join(60)


def test_creation_repeats_for_remaining_tokens(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []

    def run(number: int) -> None:
        left.append(len(os.listdir(tokens)))
        if number != 1:  # An idle process becomes that one, and no process starts.
            worker_pool.import_modules()

    monkeypatch.setenv(MODULES, "sys")
    variables = {TOKENS: str(tokens), MODULES: "sys"}
    pool = Pool(monkeypatch, run)
    start_and_wait(2, variables)
    assert left == [2, 1, 1]
    assert pool.killed == [0, 1, 2]
    assert pool.given["runtime_env"] == {"env_vars": variables}


def test_creation_ends_without_processes(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, lambda number: None)
    start_and_wait(1, {TOKENS: str(tokens)})
    assert len(pool.killed) == 10


@pytest.mark.parametrize(
    ("after_s", "names", "starts"),
    [
        pytest.param(0.0, "torch", True, id="kept"),
        pytest.param(None, "torch", False, id="off"),
        pytest.param(600.0, "torch", False, id="ends before"),
        pytest.param(0.0, "", False, id="no modules"),
    ],
)
def test_standby_starts_once_after_delay(
    monkeypatch: pytest.MonkeyPatch, after_s: float | None, names: str, starts: bool
) -> None:
    started = threading.Event()
    start = Mock(side_effect=lambda number: started.set())
    monkeypatch.setattr(worker_pool, "start_processes", start)
    monkeypatch.setenv(MODULES, names)
    with standby(after_s, num_processes=3):
        assert not starts or started.wait(60)
    if starts:
        start.assert_called_once_with(3)
    else:
        start.assert_not_called()
