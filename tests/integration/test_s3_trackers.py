"""Files that are made of a run's events, and requests for a profile, where the run lies in an S3 store that may be out."""

import time
from pathlib import Path
from typing import Any

import pytest
from builders import run_events

from rayrec import recipes, storage
from rayrec.observe.tracking.tensorboard import TensorBoardTracker
from rayrec.training import profiling
from rayrec.training.profiling import request_profile, watched_requests

pytestmark = [pytest.mark.extended, pytest.mark.exhaustive]


@pytest.fixture
def folder(bucket: str, request: pytest.FixtureRequest) -> str:
    return f"{bucket}/{request.node.name}"


def test_curves_in_a_store_that_was_out(folder: str, s3_server: Any) -> None:
    events = [event for event in run_events.run() if event["kind"] != "finish"]
    first = TensorBoardTracker(folder, config="seed: 0\n")
    run_events.feed(first, events[:20], flush=False)
    first.close()
    (before,) = storage.files_in(f"{folder}/tensorboard")
    second = TensorBoardTracker(folder, config="seed: 0\n")
    s3_server.kill()
    try:
        run_events.feed(second, events, flush=False)
        with pytest.raises(OSError):  # noqa: PT011
            second.flush()
    finally:
        s3_server.start()
    assert storage.files_in(f"{folder}/tensorboard") == [before]
    second.close()
    (after,) = storage.files_in(f"{folder}/tensorboard")
    assert after.path != before.path
    assert after.size_bytes > before.size_bytes


def test_an_offline_run_lies_in_the_store(folder: str) -> None:
    pytest.importorskip("wandb")
    from rayrec.observe.tracking.wandb import WandbTracker

    config = recipes.gpt2_tiny().replace(name="run").to_dict()
    for events in (run_events.run()[:20], run_events.run(finished=False)):
        tracker = WandbTracker(folder, project="rayrec", offline=True, config=config)
        run_events.feed(tracker, events)
        tracker.close()
    (run,) = storage.list_folder(f"{folder}/wandb")
    assert run.startswith("offline-run-")
    assert any(name.endswith(".wandb") for name in storage.list_folder(f"{folder}/wandb/{run}"))


def test_a_request_for_a_profile(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_URL_POLL_S", 0.2)
    monkeypatch.setattr(profiling, "_POLL_S", 0.2)

    class Channel:
        @staticmethod
        def send_profile_request(wish: dict[str, Any]) -> None:
            storage.write_bytes(f"{folder}/profile/{wish['name']}/rank_0/trace.json.gz", b"[]")

    now = time.time()
    events = [
        {"kind": "start", "time": now - 10, "step": 0, "steps": 100, "world_size": 1},
        {"kind": "step", "time": now, "step": 40, "steps": 100},
    ]
    with watched_requests(folder, Channel):
        told = request_profile(folder, events, steps=2, note=lambda text: None, timeout_s=60.0)
    assert told["profile"].startswith(f"{folder}/profile/step_")
    assert not storage.exists(f"{folder}/profile/request.json")
