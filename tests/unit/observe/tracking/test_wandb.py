"""Weights & Biases tracker: offline runs read back from their files, and online runs with a fake
client.
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import run_events
from builders.faults import fails_with
from hosts.ports import free_ports

from rayrec import recipes

wandb = pytest.importorskip("wandb")
BLOCK_BYTES = 32 << 10
FULL = 1
LAST = 4
CONFIG = recipes.gpt2_tiny().replace(name="run").to_dict()


def track(folder: Path, events: list[dict[str, Any]]) -> None:
    from rayrec.observe.tracking.wandb import WandbTracker

    run_events.feed(
        WandbTracker(
            str(folder),
            project="rayrec",
            offline=True,
            config=CONFIG,
        ),
        events,
        close=True,
    )


def scanned(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log file with blocks of 32 KiB, after W&B's seven-byte
    header.
    """
    place = 7
    parts = b""
    while place + 7 <= len(data):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def kept(folder: Path) -> tuple[Any, list[dict[str, float]]]:
    """Return the run record and the history of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    run = None
    rows = []
    for data in scanned(path.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("run"):
            run = record.run
        if record.HasField("history"):
            items = {
                "/".join(item.nested_key) or item.key: item.value_json
                for item in record.history.item
            }
            rows.append(
                {
                    name: json.loads(value)
                    for name, value in items.items()
                    if not name.startswith("_")
                }
            )
    return run, rows


@pytest.mark.extended
def test_resuming_driver_replaces_offline_run(tmp_path: Path) -> None:
    events = run_events.run()
    track(tmp_path, events[: run_events.cut(events) + 1])
    first, rows = kept(tmp_path)
    assert [row["step"] for row in rows if "train/loss" in row][-1] == 120
    track(tmp_path, run_events.ended(events, loss=0.5))
    run, rows = kept(tmp_path)  # One folder: the first is deleted.
    assert (run.run_id, run.project, run.display_name) == (first.run_id, "rayrec", "run")
    assert run.host == ""
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["recipe"], config["config_hash"]) == ("gpt2_tiny", "0123456789abcdef")
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(10, 201, 10))
    assert [row["step"] for row in rows if "validation/loss" in row] == [50, 100, 150, 200]
    assert rows[-1] == {"step": 200, "final/loss": 0.5}
    assert b"WANDB_API_KEY" not in b"".join(
        path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    )


class OnlineRun:
    """Fake of wandb's Run that fails the first `refusals` log calls."""

    def __init__(self, summary: dict[str, Any], *, resumed: bool, refusals: int = 0) -> None:
        self.summary = summary
        self.resumed = resumed
        self.sent = list[dict[str, Any]]()
        self._refusals = refusals

    def log(self, row: dict[str, Any]) -> None:
        if self._refusals:
            self._refusals -= 1
            raise ConnectionError("gone for a moment")
        self.sent.append(row)

    def define_metric(self, *arguments: Any, **named: Any) -> None:
        pass

    def finish(self, *, exit_code: int) -> None:
        self.exit_code = exit_code


def online(run: OnlineRun, monkeypatch: pytest.MonkeyPatch) -> Any:
    from rayrec.observe.tracking.wandb import WandbTracker

    monkeypatch.setattr("wandb.init", lambda **settings: run)
    return WandbTracker(
        "folder",
        project="rayrec",
        offline=False,
        config=CONFIG,
    )


STEP_100 = {
    "kind": "step",
    "time": 1.0,
    "step": 100,
    "steps": 200,
    "loss": 0.5,
}
EVALUATION_100 = {
    "kind": "evaluate",
    "time": 2.0,
    "step": 100,
    "set": "validation",
    "loss": 0.6,
}


def test_unsent_measures_are_sent_later_or_by_resuming_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = OnlineRun({}, resumed=False, refusals=1)
    tracker = online(run, monkeypatch)
    run_events.feed(tracker, [STEP_100, EVALUATION_100], flush=False)
    fails_with(ConnectionError, "", tracker.flush)
    tracker.flush()
    assert run.sent == [{"step": 100, "train/loss": 0.5}, {"step": 100, "validation/loss": 0.6}]
    before = OnlineRun({}, resumed=False)
    # The driver is killed before it sends the evaluation of this step.
    run_events.feed(online(before, monkeypatch), [STEP_100])
    after = OnlineRun(before.summary, resumed=True)
    tracker = online(after, monkeypatch)
    run_events.feed(tracker, [STEP_100, EVALUATION_100, {**STEP_100, "step": 110}], flush=False)
    tracker.flush()
    assert after.sent == [{"step": 100, "validation/loss": 0.6}, {"step": 110, "train/loss": 0.5}]
    assert after.summary == {"last_step/step": 110, "last_step/evaluate/validation": 100}


def test_exit_code_follows_last_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandb.teardown", lambda: None)
    begun = {"kind": "run", "time": 3.0, "config_hash": "x"}
    stopped = [
        begun,
        STEP_100,
        {
            "kind": "stop",
            "time": 4.0,
            "step": 100,
            "cause": "SIGTERM",
        },
    ]
    failed = [
        *stopped,
        begun,
        {
            "kind": "failure",
            "time": 5.0,
            "cause": "no such log",
            "last": True,
        },
    ]
    finished = [
        *failed,
        begun,
        STEP_100,
        {
            "kind": "finish",
            "time": 6.0,
            "step": 100,
            "metrics": {},
        },
    ]
    for events, exit_code in ((stopped, 0), (failed, 1), (finished, 0)):
        run = OnlineRun({}, resumed=False)
        run_events.feed(online(run, monkeypatch), events, flush=False, close=True)
        assert run.exit_code == exit_code


UNREACHABLE = """
import sys, threading, time
from rayrec.observe.events import EventWriter
from rayrec.observe.tracking import tracker
from rayrec.observe.tracking.wandb import WandbTracker, children_named

folder = sys.argv[1]
tracker.CLOSE_S = 1.0
make = lambda: WandbTracker(folder, project="project", offline=False, config={"name": "run"})
path = folder + "/events.jsonl"
with tracker.tracking({"W&B": make}, path, note=print), EventWriter(path) as events:
    events.write("run", config_hash="0")
    events.write("step", step=1, loss=1.0, rows=1)
    while not children_named("wandb-core"):
        time.sleep(0.1)
names = [thread.name for thread in threading.enumerate()]
print("threads", [name for name in names if name.startswith("tracker")])
"""


def test_unreachable_server_does_not_block_exit(tmp_path: Path) -> None:
    # No server listens there, and W&B would retry for a day.
    unreachable = {
        "WANDB_BASE_URL": f"http://127.0.0.1:{free_ports(1)}",
        "WANDB_INIT_TIMEOUT": "86400",
    }
    environment = {**os.environ, **unreachable, "WANDB_API_KEY": "0" * 40}
    command = [sys.executable, "-c", UNREACHABLE, str(tmp_path)]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "not finished" in run.stdout
    assert "threads []" in run.stdout  # No thread inside W&B's code at interpreter exit.
