"""Profile requests to a run in progress, and the answer to the caller."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.faults import at_first, rejects, until

from rayrec import recipes, storage
from rayrec.observe.events import EventWriter, read_events
from rayrec.training import profiling, step_profiler
from rayrec.training.profiling import request_profile, watched_requests, worker_variables
from rayrec.workloads.base import WorkerContext
from rayrec.workloads.run_config import ProfileConfig


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


def request(folder: Path, train: Callable[[Any], object] | None = None, **changes: Any) -> dict[str, Any]:
    """Request a profile from a run whose driver, if there is one, trains."""
    settings: dict[str, Any] = {"steps": 2, "note": print, "timeout_s": 120.0 if train else 0.0, **changes}
    with watched_requests(str(folder), SimpleNamespace(send_profile_request=train)) if train else contextlib.nullcontext():
        return request_profile(str(folder), settings.pop("events", events()), **settings)


def test_profile_request_waits_for_all_workers(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []

    def write(wish: dict[str, Any]) -> None:
        heard.append(wish)
        write_traces(tmp_path, wish, 0.0, 0.1)

    told = request(tmp_path, write, steps=5)
    (wish,) = heard
    assert (wish["first"], wish["end"]) == (40, 45)
    assert told == {"profile": str(tmp_path / "profile" / wish["name"]), "first_step": 40, "steps": 5, "ranks": 2}
    assert (tmp_path / "profile" / wish["name"] / "rank_1" / "trace.json.gz").exists()
    assert not (tmp_path / "profile" / "request.json").exists()


def test_first_profiled_step_is_ahead_of_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_LEAD_S", 2.0)
    monkeypatch.setattr(profiling, "_POLL_S", 0.0)
    monkeypatch.setattr(time, "time", lambda: 1_790_000_000.0)
    notes: list[str] = []
    rejects("The run has no running driver", request, tmp_path, events=events(rate=4), steps=5, note=notes.append)
    assert notes == ["Requested 5 steps from step 48"]
    rejects("The run has no running driver", request, tmp_path, events=events(rate=40), steps=30, note=notes.append)
    assert notes[1] == "Requested 30 steps from step 70"  # the last there are
    assert not (tmp_path / "profile" / "request.json").exists()


@pytest.mark.parametrize("steps", [0, 201, 100_000])
def test_profile_request_rejects_invalid_steps(tmp_path: Path, steps: int) -> None:
    rejects(rf"^steps: must be between 1 and 200, .* got {steps:,}$", request, tmp_path, steps=steps)
    assert not (tmp_path / "profile").exists()


def test_profile_request_reports_worker_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full disk on rank 1, the caller and the events get the error at once."""
    full = at_first([OSError(28, "No space left on device")], storage.writing_folder, end="rank_1")
    monkeypatch.setattr(storage, "writing_folder", full)
    place, config = tmp_path / "events.jsonl", recipes.criteo_demo("none")

    def train(wish: dict[str, Any]) -> None:
        with EventWriter(place) as log_of_first:
            for rank in range(2):
                write: Any = (lambda kind, fields: log_of_first.write(kind, **fields)) if rank == 0 else lambda *_: None
                worker: Any = WorkerContext(config, rank, 2, torch.device("cpu"), None)  # type: ignore[arg-type]
                profiler = step_profiler.make_profiler(worker, str(tmp_path), SimpleNamespace(subscribe=id), write)
                profiler.request(profiling.Window(**wish))
                for step in range(40, 50):
                    profiler.begin_step(step)
                profiler.close()

    rejects(r"no profile\. worker 1: .*No space left on device", request, tmp_path, train)
    written = {event["kind"]: event for event in read_events(place)}
    assert (written["profile"]["rank"], written["profile_failed"]["rank"]) == (0, 1)
    assert written["profile"]["name"] == written["profile_failed"]["name"] == Path(written["profile"]["path"]).name


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("failure", {"cause": "worker 1 died"}, "worker 1 died"),
        ("stop", {"cause": "SIGTERM", "step": 44}, "SIGTERM"),
        ("finish", {"step": 100}, "finished"),
        ("run", {}, "another driver began"),
    ],
)
def test_profile_request_reports_end_of_training(tmp_path: Path, kind: str, fields: dict[str, Any], told: str) -> None:
    place = tmp_path / "events.jsonl"
    so_far = [{"kind": "run", "time": time.time() - 100}, {"kind": "failure", "time": time.time() - 60, "cause": "old"}]
    place.write_text("".join(json.dumps(event) + "\n" for event in so_far))

    def end(wish: dict[str, Any]) -> None:
        with EventWriter(place) as log:
            log.write(kind, **fields)

    ended = rf"no profile\. training ended before the profile was complete \({told}\)"
    rejects(ended, request, tmp_path, end, events=[*so_far, *events()])


def test_profile_written_at_training_end_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_profile_request_rejects_idle_run(tmp_path: Path) -> None:
    for of in ([*events(), {"kind": "finish", "time": time.time(), "step": 100}], events()[:1], []):
        rejects("is not training", request, tmp_path, events=of)
    assert not (tmp_path / "profile").exists()


OTHER_REQUESTS: list[Any] = [{"name": name, "first": 1, "end": 2} for name in ("../../elsewhere", "/etc", "..")]
OTHER_REQUESTS += [{"name": "x", "first": first, "end": end} for first, end in ((2, 2), (2, 203), ("many", 2))]


@pytest.mark.parametrize("request_", ["no JSON", "[]", *map(json.dumps, OTHER_REQUESTS)])
def test_invalid_profile_request_is_removed(tmp_path: Path, request_: str) -> None:
    heard: list[dict[str, Any]] = []
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / "request.json").write_text(request_)
    with watched_requests(str(tmp_path), SimpleNamespace(send_profile_request=heard.append)):
        until(lambda: not (folder / "request.json").exists())
        storage.write_json(str(folder / "request.json"), {"name": "good", "first": 1, "end": 2})  # whole or not at all
        until(lambda: heard)
    assert heard == [{"name": "good", "first": 1, "end": 2}]


def test_kineto_variables_reach_workers() -> None:
    passed = {"KINETO_USE_DAEMON": "1", "KINETO_DAEMON_INIT_DELAY_S": "3"}
    environment = {**passed, "HOME": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    assert worker_variables(environment) == passed
    assert worker_variables({"KINETO_DAEMON_INIT_DELAY_S": "3"}) == {}
    interface = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}
    assert worker_variables(environment, network_interface="eth1") == passed | interface


def test_profile_configuration_is_checked() -> None:
    assert ProfileConfig(steps="10:20").window() == (10, 20)
    assert ProfileConfig().window() is None
    assert ProfileConfig(steps="10:210").window() == (10, 210)
    rejects(r"^profile\.steps: must be at most 200 steps to fit in memory, got '10:211' \(201\)$", ProfileConfig, steps="10:211")
    for steps in ("10", "20:10", "10:10", ":5", "a:b", "-1:5", "1:2:3"):
        rejects(r"profile\.steps", ProfileConfig, steps=steps)
    config = recipes.criteo_demo().replace(profile={"steps": "1:2"}, trackers={"wandb": "offline"})
    assert recipes.load_config(config.to_yaml()) == config
