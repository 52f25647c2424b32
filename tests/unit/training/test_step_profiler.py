"""Step profiles: recorded windows, files, and isolation of errors from training."""

from __future__ import annotations

import gzip
import json
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.faults import raising

from rayrec import storage
from rayrec.training import step_profiler
from rayrec.training.step_profiler import StepProfiler, Window


class Recorded:
    """Profiler in a folder, with its successes and failures."""

    def __init__(self, folder: Path, *, rank: int = 0, memory: bool = True) -> None:
        self.written: list[Window] = []
        self.failed: list[str] = []
        make = partial(StepProfiler, str(folder), rank=rank, device=torch.device("cpu"), memory=memory)
        self.profiler = make(on_saved=self.written.append, on_failed=lambda window, cause: self.failed.append(cause))

    def record(self, window: Window, first: int, end: int) -> Recorded:
        """Request a window, train some steps and close."""
        self.profiler.request(window)
        train(self.profiler, first, end)
        self.profiler.close()
        return self

    def names(self) -> list[str]:
        return [window.name for window in self.written]


def train(profiler: StepProfiler, first: int, end: int) -> None:
    layer = torch.nn.Linear(8, 8)
    for step in range(first, end):
        profiler.begin_step(step)
        layer(torch.ones(4, 8)).sum().backward()


def steps_of(folder: Path) -> list[str]:
    return [event["name"] for event in trace(folder) if event["name"].startswith("step ") and event.get("ph") == "X"]


def trace(folder: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]


def test_profiler_records_window(tmp_path: Path) -> None:
    window = Window("first", 3, 6)
    run = Recorded(tmp_path).record(window, 0, 9)
    assert (run.written, run.failed) == ([window], [])
    folder = tmp_path / "first" / "rank_0"
    assert [path.name for path in folder.iterdir()] == ["trace.json.gz"]
    assert steps_of(folder) == ["step 4", "step 5", "step 6"]  # the ones after three were done
    assert len([event for event in trace(folder) if event["name"] == "aten::addmm"]) == 3
    assert any(event["name"] == "[memory]" for event in trace(folder))


def test_late_window_is_shifted_and_window_of_resumed_run_keeps_end(tmp_path: Path) -> None:
    run = Recorded(tmp_path, rank=3, memory=False)
    train(run.profiler, 0, 5)
    run.profiler.request(Window("late", 2, 4))
    train(run.profiler, 5, 9)
    run.record(Window("end", 20, 40), 19, 23)  # and no step more
    assert set(run.names()) == {"late", "end"}  # a thread of its own wrote each
    assert steps_of(tmp_path / "late" / "rank_3") == ["step 6", "step 7"]
    assert steps_of(tmp_path / "end" / "rank_3") == ["step 21", "step 22", "step 23"]
    assert not [event for event in trace(tmp_path / "late" / "rank_3") if event.get("ph") == "C"]
    Recorded(tmp_path).record(Window("configured", 2, 7), 5, 9)
    assert steps_of(tmp_path / "configured" / "rank_0") == ["step 6", "step 7"]


def test_profiler_records_nothing_without_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrec.training.step_profiler.profile", None)
    run = Recorded(tmp_path)
    run.profiler.request(Window("never", 100, 110))
    train(run.profiler, 0, 3)
    assert not run.failed
    run.profiler.close()
    assert run.failed == ["training ended, or was interrupted, before step 101"]
    assert not list(tmp_path.iterdir())


def test_replaced_profile_request_fails(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.profiler.request(Window("first", 1, 2))
    run.record(Window("second", 1, 2), 0, 3)
    assert (run.failed, run.names()) == (["another profile was requested before this one began"], ["second"])


def test_unwritable_profile_fails_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = Window("twice", 0, 1)
    assert not Recorded(tmp_path).record(twice, 0, 2).failed
    (cause,) = Recorded(tmp_path).record(twice, 0, 2).failed
    assert "exists already" in cause
    monkeypatch.setattr(gzip, "open", raising(OSError(28, "No space left on device")))
    (cause,) = Recorded(tmp_path).record(Window("full", 0, 1), 0, 2).failed
    assert "No space left" in cause
    assert not any((tmp_path / "full").iterdir())
    assert storage.exists(str(tmp_path / "twice" / "rank_0" / "trace.json.gz"))


def test_profiler_rejects_too_many_steps(tmp_path: Path) -> None:
    assert Recorded(tmp_path).record(Window("long", 0, 201), 0, 2).failed == ["201 steps; at most 200 fit into memory"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["construct", "start", "stop"])
def test_recording_error_does_not_reach_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    parts = {"start": lambda: None, "stop": lambda: None} | {where: raising(MemoryError(where))}
    monkeypatch.setattr(step_profiler, "profile", parts.get("construct", lambda **_: SimpleNamespace(**parts)))
    run = Recorded(tmp_path).record(Window("broken", 0, 1), 0, 3)
    assert (run.failed, run.written) == ([where], [])


def test_failed_mark_ends_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(name: str) -> Any:
        if name == "step 2":
            raise KeyError("no such callback")
        return torch.profiler.record_function(name)

    monkeypatch.setattr(step_profiler, "record_function", mark)
    run = Recorded(tmp_path)
    run.profiler.request(Window("marked", 0, 9))
    train(run.profiler, 0, 3)
    run.record(Window("next", 3, 4), 3, 5)
    assert (len(run.failed), run.names()) == (1, ["next"])  # torch's profiler was let go


def test_profile_fails_without_writer_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Recorded(tmp_path)
    run.profiler.request(Window("unwritten", 0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        train(run.profiler, 0, 2)
    run.profiler.close()
    assert run.failed == ["can't start new thread"]
