"""TensorBoard tracker: its files contain the curves of the event file once, from any driver."""

import math
import struct
from pathlib import Path
from typing import Any

from builders import run_events
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from rayrec.observe.run_summary import RunSummary
from rayrec.observe.tracking.tensorboard import TensorBoardTracker


def records(path: Path) -> list[Event]:
    """Read a TFRecord file and check its checksums."""
    data, found = path.read_bytes(), []
    while data:
        length, checksum = struct.unpack_from("<QI", data)
        assert checksum == masked_crc32c(data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack_from("<I", data, 12 + length)[0] == masked_crc32c(body)
        found.append(Event.FromString(body))
        data = data[16 + length :]
    return found


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """Return the values by tag and step as TensorBoard shows them, without points purged by a SessionLog START."""
    shown: dict[str, dict[int, float]] = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        for record in records(path):
            if record.session_log.status == SessionLog.START:
                for points in shown.values():
                    for step in [step for step in points if step >= record.step]:
                        del points[step]
            for value in record.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    points = shown.setdefault(value.tag, {})
                    assert record.step not in points, "doubled"
                    points[record.step] = value.simple_value
    return shown


def track(folder: Path, events: list[dict[str, Any]]) -> None:
    run_events.feed(TensorBoardTracker(str(folder), config="recipe: x\nseed: 0\n"), events, close=True)


def test_curves_match_events(tmp_path: Path) -> None:
    events = run_events.run()
    track(tmp_path, [event for event in events if event["kind"] != "finish"])
    shown = curves(tmp_path)
    loss = {row["step"]: row["loss"] for row in RunSummary(events).curve()}
    assert shown["train/loss"].keys() == loss.keys()
    assert all(math.isclose(shown["train/loss"][step], value, rel_tol=1e-6) for step, value in loss.items())
    assert list(shown["validation/loss"]) == [50, 100, 150, 200]
    assert shown["checkpoint/stall_s"] == dict.fromkeys((50, 100, 150, 200), 0.25)
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert path.name.startswith("events.out.tfevents.")  # The prefix expected by TensorBoard.
    version, *_ = records(path)
    assert version.file_version == "brain.Event:2"
    (text,) = [value for record in records(path) for value in record.summary.value if value.HasField("tensor")]
    assert text.tensor.string_val[0] == b"    recipe: x\n    seed: 0"
    assert [record.wall_time for record in records(path)][-1] == events[-4]["time"]


def test_resuming_driver_duplicates_no_points(tmp_path: Path) -> None:
    events = run_events.run()
    track(tmp_path, events[: run_events.cut(events)])
    other = tmp_path / "tensorboard" / "events.out.tfevents.of.somebody"
    other.write_bytes(b"")
    before = set((tmp_path / "tensorboard").iterdir())
    track(tmp_path, run_events.ended(events, auroc=0.5))
    after = set((tmp_path / "tensorboard").iterdir())
    assert len(before) == len(after) == 2
    assert before & after == {other}
    shown = curves(tmp_path)
    assert (list(shown["train/loss"]), shown["final/auroc"]) == (list(range(10, 201, 10)), {200: 0.5})


def test_old_file_stays_until_new_one_exists(tmp_path: Path, monkeypatch: Any) -> None:
    events = run_events.run(finished=False)
    track(tmp_path, events[:20])
    before = list((tmp_path / "tensorboard").iterdir())
    tracker = TensorBoardTracker(str(tmp_path), config="")
    run_events.feed(tracker, events[:1], flush=False)
    assert list((tmp_path / "tensorboard").iterdir()) == before
    tracker.close()
    assert list((tmp_path / "tensorboard").iterdir()) != before
