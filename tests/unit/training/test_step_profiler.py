"""Step profiles: recorded windows, files, and isolation of errors from training."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.faults import at_first, raising, rejects, until

from rayrec import recipes, storage
from rayrec.observe.events import EventWriter, read_events
from rayrec.training import profiling, step_profiler
from rayrec.training.profiling import request_profile, watched_requests, worker_variables
from rayrec.training.step_profiler import StepProfiler, Window
from rayrec.workloads.base import WorkerContext
from rayrec.workloads.run_config import ProfileConfig


class Recorded:
    """Profiler in a folder, with its successes and failures."""

    def __init__(self, folder: Path, *, rank: int = 0, memory: bool = True) -> None:
        self.written: list[Window] = []
        self.failed: list[str] = []
        make = partial(
            StepProfiler, str(folder), rank=rank, device=torch.device("cpu"), memory=memory
        )
        self.profiler = make(
            on_saved=self.written.append, on_failed=lambda window, cause: self.failed.append(cause)
        )

    def record(self, window: Window, first: int, end: int) -> Recorded:
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
    return [
        event["name"]
        for event in trace(folder)
        if event["name"].startswith("step ") and event.get("ph") == "X"
    ]


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


def test_profiler_records_nothing_without_request_or_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayrec.training.step_profiler.profile", None)
    run = Recorded(tmp_path)
    run.profiler.request(Window("never", 100, 110))
    train(run.profiler, 0, 3)
    assert not run.failed
    run.profiler.close()
    assert run.failed == ["training ended, or was interrupted, before step 101"]
    assert Recorded(tmp_path).record(Window("long", 0, 201), 0, 2).failed == [
        "201 steps; at most 200 fit into memory"
    ]
    assert not list(tmp_path.iterdir())


def test_replaced_profile_request_fails(tmp_path: Path) -> None:
    run = Recorded(tmp_path)
    run.profiler.request(Window("first", 1, 2))
    run.record(Window("second", 1, 2), 0, 3)
    assert (run.failed, run.names()) == (
        ["another profile was requested before this one began"],
        ["second"],
    )


def test_unwritable_profile_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = Window("twice", 0, 1)
    assert not Recorded(tmp_path).record(twice, 0, 2).failed
    (cause,) = Recorded(tmp_path).record(twice, 0, 2).failed
    assert "exists already" in cause
    monkeypatch.setattr(gzip, "open", raising(OSError(28, "No space left on device")))
    (cause,) = Recorded(tmp_path).record(Window("full", 0, 1), 0, 2).failed
    assert "No space left" in cause
    assert not any((tmp_path / "full").iterdir())
    assert storage.exists(str(tmp_path / "twice" / "rank_0" / "trace.json.gz"))


@pytest.mark.parametrize("where", ["construct", "start", "stop"])
def test_recording_error_does_not_reach_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    parts = {"start": lambda: None, "stop": lambda: None} | {where: raising(MemoryError(where))}
    monkeypatch.setattr(
        step_profiler, "profile", parts.get("construct", lambda **_: SimpleNamespace(**parts))
    )
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


def test_profile_fails_without_writer_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Recorded(tmp_path)
    run.profiler.request(Window("unwritten", 0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        train(run.profiler, 0, 2)
    run.profiler.close()
    assert run.failed == ["can't start new thread"]


# -- Profile requests to a run in progress, and the answer to the caller
def write_traces(folder: Path, wish: dict[str, Any], *delays_s: float) -> None:
    """Write the trace of each rank after a delay."""
    for rank, delay_s in enumerate(delays_s):
        target = folder / "profile" / wish["name"] / f"rank_{rank}"
        target.mkdir(parents=True)
        threading.Timer(delay_s, (target / "trace.json.gz").write_text, args=["[]"]).start()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_POLL_S", 0.02)
    monkeypatch.setattr(profiling, "_LEAD_S", 0.0)
    monkeypatch.setattr(profiling, "_WRITING_S", 0.1)


def events(*, rate: float = 0.0) -> list[dict[str, Any]]:
    """Return the events of a run in progress at step 40 of 100 with two workers."""
    now = time.time()
    return [
        {"kind": "run", "time": now - 50},
        {"kind": "start", "time": now - 40, "step": 0, "steps": 100, "world_size": 2},
        {"kind": "step", "time": now - 1, "step": 40 - round(rate), "steps": 100},
        {"kind": "step", "time": now, "step": 40, "steps": 100},
    ]


def request(
    folder: Path, train: Callable[[Any], object] | None = None, **changes: Any
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "steps": 2,
        "note": print,
        "timeout_s": 120.0 if train else 0.0,
        **changes,
    }
    with (
        watched_requests(str(folder), SimpleNamespace(send_profile_request=train))
        if train
        else contextlib.nullcontext()
    ):
        return request_profile(str(folder), settings.pop("events", events()), **settings)


def test_profile_request_waits_for_all_workers(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []

    def write(wish: dict[str, Any]) -> None:
        heard.append(wish)
        write_traces(tmp_path, wish, 0.0, 0.1)

    reported = request(tmp_path, write, steps=5)
    (wish,) = heard
    assert (wish["first"], wish["end"]) == (40, 45)
    assert reported == {
        "profile": str(tmp_path / "profile" / wish["name"]),
        "first_step": 40,
        "steps": 5,
        "ranks": 2,
    }
    assert (tmp_path / "profile" / wish["name"] / "rank_1" / "trace.json.gz").exists()
    assert not (tmp_path / "profile" / "request.json").exists()


def test_first_profiled_step_is_ahead_of_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_LEAD_S", 2.0)
    monkeypatch.setattr(profiling, "_POLL_S", 0.0)
    monkeypatch.setattr(time, "time", lambda: 1_790_000_000.0)
    notes: list[str] = []
    rejects(
        "The run has no running driver",
        request,
        tmp_path,
        events=events(rate=4),
        steps=5,
        note=notes.append,
    )
    assert notes == ["Requested 5 steps from step 48"]
    rejects(
        "The run has no running driver",
        request,
        tmp_path,
        events=events(rate=40),
        steps=30,
        note=notes.append,
    )
    assert notes[1] == "Requested 30 steps from step 70"  # the last there are
    assert not (tmp_path / "profile" / "request.json").exists()


def test_profile_request_reports_worker_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = at_first([OSError(28, "No space left on device")], storage.writing_folder, end="rank_1")
    monkeypatch.setattr(storage, "writing_folder", full)
    place = tmp_path / "events.jsonl"
    config = recipes.criteo_demo("none")

    def train(wish: dict[str, Any]) -> None:
        with EventWriter(place) as log_of_first:
            for rank in range(2):
                write: Any = (
                    (lambda kind, fields: log_of_first.write(kind, **fields))
                    if rank == 0
                    else lambda *_: None
                )
                engine: Any = None
                worker = WorkerContext(config, rank, 2, torch.device("cpu"), engine)
                profiler = step_profiler.make_profiler(
                    worker, str(tmp_path), SimpleNamespace(subscribe=id), write
                )
                profiler.request(profiling.Window(**wish))
                for step in range(40, 50):
                    profiler.begin_step(step)
                profiler.close()

    rejects(r"no profile\. worker 1: .*No space left on device", request, tmp_path, train)
    written = {event["kind"]: event for event in read_events(place)}
    assert (written["profile"]["rank"], written["profile_failed"]["rank"]) == (0, 1)
    assert (
        written["profile"]["name"]
        == written["profile_failed"]["name"]
        == Path(written["profile"]["path"]).name
    )


@pytest.mark.parametrize(
    ("kind", "fields", "reported"),
    [
        ("failure", {"cause": "worker 1 died"}, "worker 1 died"),
        ("stop", {"cause": "SIGTERM", "step": 44}, "SIGTERM"),
        ("finish", {"step": 100}, "finished"),
        ("run", {}, "another driver began"),
    ],
)
def test_profile_request_reports_end_of_training(
    tmp_path: Path, kind: str, fields: dict[str, Any], reported: str
) -> None:
    place = tmp_path / "events.jsonl"
    so_far = [
        {"kind": "run", "time": time.time() - 100},
        {"kind": "failure", "time": time.time() - 60, "cause": "old"},
    ]
    place.write_text("".join(json.dumps(event) + "\n" for event in so_far))

    def end(wish: dict[str, Any]) -> None:
        with EventWriter(place) as log:
            log.write(kind, **fields)

    ended = rf"no profile\. training ended before the profile was complete \({reported}\)"
    rejects(ended, request, tmp_path, end, events=[*so_far, *events()])


def test_profile_written_at_training_end_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_WRITING_S", 60.0)

    def end(wish: dict[str, Any]) -> None:
        with EventWriter(tmp_path / "events.jsonl") as log:
            log.write("finish", step=100)
        write_traces(tmp_path, wish, 0.3, 0.3)

    assert request(tmp_path, end)["ranks"] == 2


def test_foreign_profile_request_is_kept(tmp_path: Path) -> None:
    other = {"name": "other", "first": 50, "end": 52}

    def note(text: str) -> None:  # once it is asked for, another asks too
        storage.write_json(str(tmp_path / "profile" / "request.json"), other)

    rejects("Training is slow, or has ended", request, tmp_path, note=note)
    assert storage.read_json(str(tmp_path / "profile" / "request.json")) == other


def test_profile_request_rejects_invalid_steps_and_idle_run(tmp_path: Path) -> None:
    for steps in (0, 201, 100_000):
        rejects(
            rf"^steps: must be between 1 and 200, .* got {steps:,}$", request, tmp_path, steps=steps
        )
    for history in (
        [*events(), {"kind": "finish", "time": time.time(), "step": 100}],
        events()[:1],
        [],
    ):
        rejects("is not training", request, tmp_path, events=history)
    assert not (tmp_path / "profile").exists()


OTHER_REQUESTS: list[Any] = [
    {"name": name, "first": 1, "end": 2} for name in ("../../elsewhere", "/etc", "..")
]
OTHER_REQUESTS += [
    {"name": "x", "first": first, "end": end} for first, end in ((2, 2), (2, 203), ("many", 2))
]


@pytest.mark.parametrize("request_", ["no JSON", "[]", *map(json.dumps, OTHER_REQUESTS)])
def test_invalid_profile_request_is_removed(tmp_path: Path, request_: str) -> None:
    heard: list[dict[str, Any]] = []
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / "request.json").write_text(request_)
    with watched_requests(str(tmp_path), SimpleNamespace(send_profile_request=heard.append)):
        until(lambda: not (folder / "request.json").exists())
        # whole or not at all
        storage.write_json(str(folder / "request.json"), {"name": "good", "first": 1, "end": 2})
        until(lambda: heard)
    assert heard == [{"name": "good", "first": 1, "end": 2}]


def test_kineto_variables_reach_workers_and_settings_are_checked() -> None:
    passed = {"KINETO_USE_DAEMON": "1", "KINETO_DAEMON_INIT_DELAY_S": "3"}
    environment = {**passed, "HOME": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    assert worker_variables(environment) == passed
    assert worker_variables({"KINETO_DAEMON_INIT_DELAY_S": "3"}) == {}
    interface = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}
    assert worker_variables(environment, network_interface="eth1") == passed | interface
    assert ProfileConfig(steps="10:20").window() == (10, 20)
    assert ProfileConfig().window() is None
    assert ProfileConfig(steps="10:210").window() == (10, 210)
    rejects(
        r"^profile\.steps: at most 200 steps fit in memory, got '10:211' \(201\)$",
        ProfileConfig,
        steps="10:211",
    )
    for steps in ("10", "20:10", "10:10", ":5", "a:b", "-1:5", "1:2:3"):
        rejects(r"profile\.steps", ProfileConfig, steps=steps)
    config = recipes.criteo_demo().replace(profile={"steps": "1:2"}, trackers={"wandb": "offline"})
    assert recipes.load_config(config.to_yaml()) == config
