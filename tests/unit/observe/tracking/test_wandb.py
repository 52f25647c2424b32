"""A run of Weights & Biases that is kept offline, read back from the file that `wandb sync` would send."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_up_run
import pytest

from rayrec import recipes

wandb = pytest.importorskip("wandb")
BLOCK_BYTES = 32 << 10
FULL, LAST = 1, 4


def track(folder: Path, events: list[dict[str, Any]]) -> None:
    from rayrec.observe.tracking.wandb import WandbTracker

    config = recipes.gpt2_tiny().replace(name="run").to_dict()
    tracker = WandbTracker(str(folder), project="rayrec", offline=True, config=config)
    for event in events:
        tracker.update(event)
        tracker.flush()
    tracker.close()


def scanned(data: bytes) -> Iterator[bytes]:
    """The records of a file of LevelDB's log format, in blocks of 32 KiB, behind seven bytes of W&B's own."""
    place, parts = 7, b""
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
    """The record of the run, and its history."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    run, rows = None, []
    for data in scanned(path.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("run"):
            run = record.run
        if record.HasField("history"):
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            rows.append({name: json.loads(value) for name, value in items.items() if not name.startswith("_")})
    return run, rows


def test_an_offline_run_and_the_driver_that_went_on(tmp_path: Path) -> None:
    events = [event for event in made_up_run.run() if event["kind"] != "finish"]
    cut = next(number for number, event in enumerate(events) if event["kind"] == "failure")
    track(tmp_path, events[: cut + 1])
    first, rows = kept(tmp_path)
    assert [row["step"] for row in rows if "train/loss" in row][-1] == 120
    end = {"kind": "finish", "time": events[-1]["time"], "step": 200, "metrics": {"loss": 0.5}}
    track(tmp_path, [*events, end])
    run, rows = kept(tmp_path)  # one folder: the first is gone
    assert run.run_id == first.run_id
    assert (run.project, run.display_name) == ("rayrec", "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["recipe"] == "gpt2_tiny"
    assert config["config_hash"] == "0123456789abcdef"
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(10, 201, 10))
    assert [row["step"] for row in rows if "validation/loss" in row] == [50, 100, 150, 200]
    assert rows[-1] == {"step": 200, "final/loss": 0.5}
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"WANDB_API_KEY" not in written
