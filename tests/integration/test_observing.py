"""Trackers and profiles of real runs, including a profile requested while a run trains."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from builders.faults import rejects
from builders.runs import events_of, one_worker, small_run
from hosts.processes import RAYREC, Run, run_command

from rayrec.training.resume import run_hash
from rayrec.training.trainer import train
from rayrec.workloads.base import TrainConfig

pytestmark = pytest.mark.slow


def small(log: Path, storage: Path, **changes: Any) -> TrainConfig:
    return one_worker(log, storage, steps=12, evaluate_every=12, **changes)


@pytest.mark.extended
def test_run_writes_trackers_and_profile_window(click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    trackers = {"mlflow": True, "mlflow_uri": (tmp_path / "mlruns").as_uri(), "wandb": "offline"}
    trackers |= {"mllog": True, "iteration_lines": True}
    config = small(click_log, tmp_path, trackers=trackers, profile={"steps": "5:8"})
    folder = Path(train(config).folder)
    for pattern in ("run/tensorboard/*tfevents*", "run/wandb/offline-run-*/run-*.wandb", "mlruns/*/*/metrics/train/loss"):
        assert list(tmp_path.glob(pattern)), pattern
    lines = (folder / "mllog.log").read_text().splitlines()
    assert json.loads(lines[-1].removeprefix(":::MLLOG "))["metadata"]["status"] == "success"
    assert "Finished training it 12/" in (folder / "iterations.log").read_text()
    (profile,) = events_of(folder, "profile")
    assert (profile["step"], profile["end"], profile["ranks"]) == (5, 8, 1)
    window = folder / "profile" / "step_00000005"
    assert profile["path"] == str(window)
    trace = json.loads(gzip.decompress((window / "rank_0" / "trace.json.gz").read_bytes()))
    assert {"step 6", "step 7", "step 8"} <= {event["name"] for event in trace["traceEvents"]}
    assert not (window / "ray_timeline.json").exists()  # Without Ray.
    assert run_hash(config) == run_hash(small(click_log, tmp_path))  # Trackers and profiles do not change the result.


def test_missing_tracker_settings_raise_before_start(click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    rejects(r"missing server", train, small(click_log, tmp_path, trackers={"mlflow": True}))
    rejects("MLFLOW_TRACKING_PASSWORD", small, click_log, tmp_path, trackers={"mlflow_uri": "https://me:secret@host"})
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_profile_command_records_running_job(click_log: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"steps": 100_000, "evaluate_every": 50_000, "checkpoint": {"every": 50_000}}
    # The first recorded step depends on the speed between two logs, which must not be too close.
    config = small_run(click_log, tmp_path, log_every=50, **fields)
    with Run(config, tmp_path / "asked", cache=tmp_path, KINETO_USE_DAEMON="1").start() as run:
        run.wait_for_step(100)
        (worker, *_) = run.session.find("train worker")
        assert b"KINETO_USE_DAEMON=1" in Path(f"/proc/{worker.pid}/environ").read_bytes()
        command = (*RAYREC, "profile", run.path, "--steps", "3")
        told = json.loads(run_command(*command).stdout)
        assert told["ranks"] == 2
        starts = set()
        for rank in range(2):
            trace = gzip.decompress(Path(told["profile"], f"rank_{rank}", "trace.json.gz").read_bytes())
            names = {event["name"] for event in json.loads(trace)["traceEvents"]}
            starts.add(min(int(name[5:]) for name in names if name.startswith("step ")))
        assert starts == {told["first_step"] + 1}  # Equal on both ranks.
        assert run.wait_for("profile")["path"] == told["profile"]
        assert json.loads(Path(told["profile"], "ray_timeline.json").read_bytes())
        run.session.process.terminate()
        assert run.exit_status() == 143
    assert "is not training" in run_command(*command, status=2).stderr
