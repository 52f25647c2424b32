"""Profiles of steps: which are recorded, what lies in the folder then, and that no trouble with it reaches training."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec import storage
from rayrec.training import step_profiler
from rayrec.training.step_profiler import StepProfiler, Window, memory_track


class Told:
    """What a profiler said."""

    def __init__(self) -> None:
        self.written: list[Window] = []
        self.failed: list[str] = []

    def profiler(self, folder: Path, *, rank: int = 0, memory: bool = True) -> StepProfiler:
        return StepProfiler(
            str(folder),
            rank=rank,
            device=torch.device("cpu"),
            memory=memory,
            written=self.written.append,
            failed=lambda window, cause: self.failed.append(cause),
        )


def train(profiler: StepProfiler, first: int, end: int) -> None:
    layer = torch.nn.Linear(8, 8)
    for step in range(first, end):
        profiler.begin_step(step)
        layer(torch.ones(4, 8)).sum().backward()


def steps_of(folder: Path) -> list[str]:
    return [event["name"] for event in trace(folder) if event["name"].startswith("step ") and event.get("ph") == "X"]


def trace(folder: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]


def test_a_window_of_steps(tmp_path: Path) -> None:
    told = Told()
    profiler = told.profiler(tmp_path)
    window = Window("first", 3, 6)
    profiler.ask(window)
    train(profiler, 0, 9)
    profiler.close()
    assert (told.written, told.failed) == ([window], [])
    folder = tmp_path / "first" / "rank_0"
    assert sorted(path.name for path in folder.iterdir()) == [
        "operations.txt",
        "trace.json.gz",
    ]
    assert steps_of(folder) == ["step 4", "step 5", "step 6"]  # the ones after three were done
    assert len([event for event in trace(folder) if event["name"] == "aten::addmm"]) == 3
    assert "aten::addmm" in (folder / "operations.txt").read_text()
    counters = [event for event in trace(folder) if event["name"] == "allocated on cpu"]
    assert {event["ph"] for event in counters} == {"C"}
    assert max(event["args"]["bytes"] for event in counters) >= 128


def test_what_is_asked_for_late_slides_on_and_another_may_follow(tmp_path: Path) -> None:
    told = Told()
    profiler = told.profiler(tmp_path, rank=3, memory=False)
    train(profiler, 0, 5)
    profiler.ask(Window("late", 2, 4))
    train(profiler, 5, 9)
    profiler.ask(Window("end", 20, 40))
    train(profiler, 19, 23)  # and no step more
    profiler.close()
    assert {window.name for window in told.written} == {"late", "end"}  # a thread of its own wrote each
    assert steps_of(tmp_path / "late" / "rank_3") == ["step 6", "step 7"]
    assert steps_of(tmp_path / "end" / "rank_3") == ["step 21", "step 22", "step 23"]
    assert not [event for event in trace(tmp_path / "late" / "rank_3") if event.get("ph") == "C"]


def test_a_window_of_a_run_that_goes_on_keeps_its_end(tmp_path: Path) -> None:
    told = Told()
    profiler = told.profiler(tmp_path)
    profiler.ask(Window("configured", 2, 7))
    train(profiler, 5, 9)
    profiler.close()
    assert steps_of(tmp_path / "configured" / "rank_0") == ["step 6", "step 7"]


def test_nothing_is_recorded_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrec.training.step_profiler.profile", None)
    told = Told()
    profiler = told.profiler(tmp_path)
    profiler.ask(Window("never", 100, 110))
    train(profiler, 0, 3)
    assert not told.failed
    profiler.close()
    assert told.failed == ["training ended, or was interrupted, before step 101"]
    assert not list(tmp_path.iterdir())


def test_a_wish_that_another_takes_the_place_of_is_told(tmp_path: Path) -> None:
    told = Told()
    profiler = told.profiler(tmp_path)
    profiler.ask(Window("first", 1, 2))
    profiler.ask(Window("second", 1, 2))
    train(profiler, 0, 3)
    profiler.close()
    assert told.failed == ["another profile was asked for before this one began"]
    assert [window.name for window in told.written] == ["second"]


def test_what_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    profiler = told.profiler(tmp_path)
    profiler.ask(Window("twice", 0, 1))
    train(profiler, 0, 2)
    profiler.close()
    again = told.profiler(tmp_path)
    again.ask(Window("twice", 0, 1))
    train(again, 0, 2)
    again.close()
    assert len(told.failed) == 1
    assert "exists already" in told.failed[0]

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gzip, "open", full)
    third = told.profiler(tmp_path)
    third.ask(Window("full", 0, 1))
    train(third, 0, 2)
    third.close()
    assert "No space left" in told.failed[1]
    assert not any((tmp_path / "full").iterdir())
    assert storage.exists(str(tmp_path / "twice" / "rank_0" / "trace.json.gz"))


def test_a_profiler_that_is_taken_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(**_: Any) -> Any:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr("rayrec.training.step_profiler.profile", taken)
    told = Told()
    profiler = told.profiler(tmp_path)
    profiler.ask(Window("second", 0, 1))
    train(profiler, 0, 2)
    profiler.close()
    assert told.failed == ["Profiler is already enabled on this thread"]
    assert not told.written


def test_more_steps_than_fit_into_memory_are_refused(tmp_path: Path) -> None:
    told = Told()
    profiler = told.profiler(tmp_path)
    profiler.ask(Window("long", 0, 201))
    train(profiler, 0, 2)
    profiler.close()
    assert told.failed == ["201 steps; at most 200 fit into memory"]
    assert not list(tmp_path.iterdir())


class Broken:
    """torch's profiler, which fails in one of its parts as nobody expects."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, *_: Any, **__: Any) -> Broken:
        self.fail("construct")
        return self

    def fail(self, where: str) -> None:
        if where == self.where:
            raise MemoryError(where)

    def start(self) -> None:
        self.fail("start")

    def stop(self) -> None:
        self.fail("stop")


@pytest.mark.parametrize("where", ["construct", "start", "stop"])
def test_whatever_fails_in_a_recording_is_told_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(step_profiler, "profile", Broken(where))
    told = Told()
    profiler = told.profiler(tmp_path)
    profiler.ask(Window("broken", 0, 1))
    train(profiler, 0, 3)
    profiler.close()
    assert told.failed == [where]


def test_a_mark_that_fails_ends_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(name: str) -> Any:
        if name == "step 2":
            raise KeyError("no such callback")
        return torch.profiler.record_function(name)

    monkeypatch.setattr(step_profiler, "record_function", mark)
    told = Told()
    profiler = told.profiler(tmp_path)
    profiler.ask(Window("marked", 0, 9))
    train(profiler, 0, 3)
    profiler.ask(Window("next", 3, 4))
    train(profiler, 3, 5)
    profiler.close()
    assert len(told.failed) == 1
    assert [window.name for window in told.written] == ["next"]  # torch's profiler was let go


def test_no_thread_to_write_with_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told = Told()
    profiler = told.profiler(tmp_path)
    profiler.ask(Window("unwritten", 0, 1))
    monkeypatch.setattr(threading.Thread, "start", start)
    train(profiler, 0, 2)
    monkeypatch.undo()
    profiler.close()
    assert told.failed == ["can't start new thread"]


def test_memory_by_device() -> None:
    def event(time_us: float, device: int, number: int, size_bytes: int) -> dict[str, Any]:
        arguments = {"Device Type": device, "Device Id": number, "Total Allocated": size_bytes, "Bytes": 1}
        return {"name": "[memory]", "ts": time_us, "args": arguments}

    events = [event(2.0, 0, -1, 20), event(1.0, 0, -1, 10), event(3.0, 1, 2, 30), {"name": "aten::mm", "ts": 0.0}]
    track = [(counter["ts"], counter["name"], counter["args"]["bytes"]) for counter in memory_track(events)]
    assert track == [(1.0, "allocated on cpu", 10), (2.0, "allocated on cpu", 20), (3.0, "allocated on gpu 2", 30)]
