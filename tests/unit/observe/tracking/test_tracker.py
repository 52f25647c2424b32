"""Tracker threads: complete delivery despite errors, and no effect on the run. Append files."""

import errno
import json
import math
import os
import re
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from builders import run_events
from builders.faults import fails_with, raising, until
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from rayrec import recipes, storage
from rayrec.observe.events import EventWriter, read_events
from rayrec.observe.run_summary import RunSummary
from rayrec.observe.tracking import tracker as tracking_module
from rayrec.observe.tracking.log_files import IterationTracker, MlLogTracker, optimizer_lines
from rayrec.observe.tracking.tensorboard import TensorBoardTracker
from rayrec.observe.tracking.tracker import AppendFile, scalars, tracking
from rayrec.storage.retry import Backoff


class Recorder:
    """Tracker that records events, and fails or waits on request."""

    def __init__(self, *, failures: int = 0, refuse: str = "", wait_s: float = 0.0) -> None:
        self.taken: list[dict[str, Any]] = []
        self.delivered: list[dict[str, Any]] = []
        self.closed = False
        self._failures = failures
        self._refuse = refuse
        self._wait_s = wait_s

    def update(self, event: dict[str, Any], run: RunSummary) -> None:
        if event["kind"] == self._refuse:
            raise KeyError("loss")
        self.taken.append(event)

    def flush(self) -> None:
        time.sleep(self._wait_s)
        if self._failures:
            self._failures -= 1
            raise ConnectionError("connection\nrefused")
        self.delivered = list(self.taken)

    def close(self) -> None:
        self.flush()
        self.closed = True


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_module, "FLUSH_S", 0.0)
    monkeypatch.setattr(tracking_module, "_BACKOFF", Backoff(first_s=0.01, longest_s=30.0))
    monkeypatch.setattr(tracking_module, "CLOSE_S", 30.0)


def follow(
    path: Path, trackers: dict[str, Recorder], *, events: int = 5, pause_s: float = 0.0
) -> list[str]:
    """Write events while trackers follow them, and return the notes."""
    notes: list[str] = []
    makers = {name: (lambda tracker=tracker: tracker) for name, tracker in trackers.items()}
    with tracking(makers, str(path), note=notes.append), EventWriter(path) as writer:
        for step in range(events):
            writer.write("evaluate", step=step, set="validation")
            time.sleep(pause_s)
    return notes


def test_tracker_receives_each_event_once_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before = {*threading.enumerate()}
    first = Recorder()
    second = Recorder()
    third = Recorder()
    assert follow(path, {"first": first, "second": second}) == []
    assert {*threading.enumerate()} <= before
    assert [event["step"] for event in first.delivered] == list(range(5))
    assert second.delivered == first.delivered
    assert first.closed
    assert follow(path, {"third": third}) == []  # Another driver's tracker receives the full run.
    assert [event["step"] for event in third.delivered] == [*range(5), *range(5)]


def test_failing_tracker_receives_all_events_later(tmp_path: Path) -> None:
    flaky = Recorder(failures=4)
    steady = Recorder()
    notes = follow(tmp_path / "events.jsonl", {"flaky": flaky, "steady": steady}, pause_s=0.05)
    assert notes == ["flaky: connection refused. Retrying while the run continues."]  # once
    assert [event["step"] for event in flaky.delivered] == list(range(5))
    assert steady.delivered == flaky.delivered


def test_idle_call_delivers_late_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_module, "FLUSH_S", 0.3)
    path = tmp_path / "events.jsonl"
    tracker = Recorder()
    with (
        tracking({"tracker": lambda: tracker}, str(path), note=pytest.fail),
        EventWriter(path) as writer,
    ):
        for step in range(3):
            writer.write("evaluate", step=step, set="validation")
            time.sleep(0.01)
        until(lambda: len(tracker.delivered) > 2)
        assert [event["step"] for event in tracker.delivered] == [0, 1, 2]  # Without another event.


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        (
            "API request to https://me:secret@host/api failed",
            "API request to https://***@host/api failed",
        ),
        ("s3://key:se%2Fcr@t@host:9000/x?a=b@c", "s3://***@host:9000/x?a=b@c"),
        ("https://host/a@b and me@host", "https://host/a@b and me@host"),
        ("No module named 'mlflow'", "No module named 'mlflow'"),
    ],
)
def test_tracker_errors_hide_passwords(tmp_path: Path, message: str, reported: str) -> None:
    make = raising(ConnectionError(message))
    notes = list[str]()
    path = tmp_path / "events.jsonl"
    with tracking({"MLflow": make}, str(path), note=notes.append), EventWriter(path) as writer:
        writer.write("failure", cause=message, causes=[ConnectionError(message)])
    assert notes == [f"MLflow: {reported}. Continuing without it."]
    (event,) = read_events(path)
    assert (event["cause"], event["causes"]) == (reported, [reported])


def test_unreachable_tracker_delays_nothing(tmp_path: Path) -> None:
    gone = Recorder(failures=10**9)
    steady = Recorder()
    begin_s = time.monotonic()
    notes = follow(tmp_path / "events.jsonl", {"gone": gone, "steady": steady})
    assert time.monotonic() - begin_s < 20
    assert (len(notes), len(steady.delivered)) == (1, 5)
    assert not gone.closed


def test_hanging_tracker_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_module, "CLOSE_S", 1.0)
    hanging = Recorder(wait_s=20.0)
    steady = Recorder()
    begin_s = time.monotonic()
    notes = follow(tmp_path / "events.jsonl", {"hanging": hanging, "steady": steady})
    assert 0.5 <= time.monotonic() - begin_s < 15
    assert notes == ["hanging: not finished 1 s after the end. The last events may be missing."]
    assert steady.closed


def test_tracker_skips_unreadable_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:
        writer.write("odd")
        writer.write("odd")
    picky = Recorder(refuse="odd")
    assert follow(path, {"picky": picky}) == [
        "picky: skipping an event of kind odd ('loss'). Later ones are only counted."
    ]
    assert len(picky.delivered) == 5


def test_append_file_writes_later_after_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AppendFile(str(tmp_path / "new" / "file"))
    write = os.write
    room = 3

    def little_room(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(descriptor, bytes(data[:room]))
        room -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", little_room)
        file.write(b"abcdef")
        fails_with(OSError, "No space", file.flush)
    assert not os.path.exists(file.path)  # An older file would still exist.
    again = AppendFile(file.path)
    steps = (
        (file, b"gh", file.flush),
        (file, b"i", file.close),
        (again, b"again", again.close),
    )
    for (appended, data, end), expected in zip(
        steps, (b"abcdefgh", b"abcdefghi", b"again"), strict=True
    ):
        appended.write(data)
        end()
        assert Path(file.path).read_bytes() == expected
    assert os.listdir(tmp_path / "new") == ["file"]


def test_append_file_uploads_all_and_scalars_match_events(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(storage, "write_bytes", lambda path, data: sent.append(bytes(data)))
    file = AppendFile("s3://bucket/run/file")
    file.write(b"a")
    file.flush()
    file.write(b"b")
    file.flush()  # Too soon.
    assert sent == [b"a"]
    monkeypatch.setattr(tracking_module, "UPLOAD_S", 0.0)
    file.close()
    file.close()  # Nothing new.
    assert sent == [b"a", b"ab"]
    step = {
        "kind": "step",
        "time": 1.0,
        "step": 3,
        "steps": 9,
        "loss": 0.5,
        "times_s": {"data": 1, "other": None},
    }
    assert scalars(step) == {"train/loss": 0.5, "train/times_s/data": 1.0}
    evaluation = {
        "kind": "evaluate",
        "time": 1.0,
        "step": 3,
        "set": "validation",
        "auroc": 0.75,
        "exact": True,
    }
    assert scalars(evaluation) == {"validation/auroc": 0.75}
    assert scalars(
        {
            "kind": "finish",
            "time": 1.0,
            "step": 9,
            "metrics": {"auroc": 0.8},
        }
    ) == {"final/auroc": 0.8}
    data = {
        "kind": "data",
        "time": 1.0,
        "backlog_rows": 7,
        "stages": [{"stage": "read", "busy": 0.5}],
    }
    assert scalars(data) == {"data/backlog_rows": 7.0, "data/read/busy": 0.5}
    assert scalars({"kind": "start", "time": 1.0, "step": 9}) == {}


# -- TensorBoard: its files contain the curves of the event file once, from any driver
def records(path: Path) -> list[Event]:
    """Read a TFRecord file and check its checksums."""
    data = path.read_bytes()
    found = []
    while data:
        length, checksum = struct.unpack_from("<QI", data)
        assert checksum == masked_crc32c(data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack_from("<I", data, 12 + length)[0] == masked_crc32c(body)
        found.append(Event.FromString(body))
        data = data[16 + length :]
    return found


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """Return the values by tag and step as TensorBoard shows them, without points purged by a
    SessionLog START.
    """
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
    run_events.feed(
        TensorBoardTracker(str(folder), config="recipe: x\nseed: 0\n"), events, close=True
    )


def test_curves_match_events(tmp_path: Path) -> None:
    events = run_events.run()
    track(tmp_path, [event for event in events if event["kind"] != "finish"])
    shown = curves(tmp_path)
    loss = {row["step"]: row["loss"] for row in RunSummary(events).curve()}
    assert shown["train/loss"].keys() == loss.keys()
    assert all(
        math.isclose(shown["train/loss"][step], value, rel_tol=1e-6) for step, value in loss.items()
    )
    assert list(shown["validation/loss"]) == [50, 100, 150, 200]
    assert shown["checkpoint/stall_s"] == dict.fromkeys((50, 100, 150, 200), 0.25)
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert path.name.startswith("events.out.tfevents.")  # The prefix expected by TensorBoard.
    version, *_ = records(path)
    assert version.file_version == "brain.Event:2"
    (text,) = [
        value
        for record in records(path)
        for value in record.summary.value
        if value.HasField("tensor")
    ]
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
    assert (list(shown["train/loss"]), shown["final/auroc"]) == (
        list(range(10, 201, 10)),
        {200: 0.5},
    )


def test_old_file_stays_until_new_one_exists(tmp_path: Path, monkeypatch: Any) -> None:
    events = run_events.run(finished=False)
    track(tmp_path, events[:20])
    before = list((tmp_path / "tensorboard").iterdir())
    tracker = TensorBoardTracker(str(tmp_path), config="")
    run_events.feed(tracker, events[:1], flush=False)
    assert list((tmp_path / "tensorboard").iterdir()) == before
    tracker.close()
    assert list((tmp_path / "tensorboard").iterdir()) != before


# -- MLPerf log and DLRM iteration lines, checked with the grammar and rules of their parsers
VALUES: dict[str, object] = {
    "submission_division": "open",
    "submission_benchmark": "dlrm_dcnv2",
    "opt_name": "adagrad",
}
ZERO = [
    "weight_decay",
    "adagrad_learning_rate_decay",
    "adagrad_initial_accumulator_value",
    "learning_rate_warmup_steps",
    "learning_rate_decay_start_step",
    "learning_rate_decay_steps",
]
VALUES |= {f"opt_{name}": 0 for name in ZERO} | {
    "opt_adagrad_epsilon": 1e-8,
    "gradient_accumulation_steps": 1,
}
VALUES |= {"global_batch_size": 64, "train_samples": 6400, "eval_samples": 640}
"""Values required by closed_dlrm_dcnv2 of the rules 6.0, as far as the fake run fulfils them."""
EXACTLY_ONE = [
    *VALUES,
    "submission_org",
    "submission_platform",
    "init_stop",
    "run_start",
    "run_stop",
    "seed",
    "opt_base_learning_rate",
]


def parse(path: Path) -> list[dict[str, Any]]:
    """Parse a log with the grammar of mlperf-logging: token, one JSON object, these fields."""
    found = []
    for line in path.read_text(encoding="latin-1").splitlines():
        assert line.startswith(":::MLLOG ")
        record = json.loads(line.removeprefix(":::MLLOG "))
        assert list(record) == [
            "namespace",
            "time_ms",
            "event_type",
            "key",
            "value",
            "metadata",
        ]
        assert isinstance(record["time_ms"], int)
        assert record["event_type"] in ("POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END")
        assert {"file", "lineno"} <= record["metadata"].keys()
        found.append(record)
    return found


AT_LEAST_ONE = {
    "cache_clear",
    "init_start",
    "eval_accuracy",
    "eval_start",
    "eval_stop",
    "epoch_start",
    "epoch_stop",
}


def check(records: list[dict[str, Any]]) -> None:
    """Check the rules for any benchmark (common.yaml of 6.0)."""
    keys = [record["key"] for record in records]
    for key in EXACTLY_ONE:
        assert keys.count(key) == 1, key
    assert set(keys) >= AT_LEAST_ONE
    assert (
        keys.index("init_start")
        < keys.index("init_stop")
        < keys.index("run_start")
        < keys.index("epoch_start")
    )
    assert keys[-1] == "run_stop"
    for record in records:
        check_metadata(record)
    times = [record["time_ms"] for record in records]
    assert times == sorted(times)
    for name in ("init", "run", "block", "epoch", "eval"):  # Each opened interval is closed.
        interval = (f"{name}_start", f"{name}_stop")
        opened = [record["event_type"] for record in records if record["key"] in interval]
        assert opened == ["INTERVAL_START", "INTERVAL_END"] * (len(opened) // 2), name


def check_metadata(record: dict[str, Any]) -> None:
    metadata = record["metadata"]
    key = record["key"]
    if re.match("(epoch|eval)_", key) and key != "eval_samples":
        assert "epoch_num" in metadata or "samples_count" in metadata
    if key == "run_stop":
        assert {"status", "epoch_num"} <= metadata.keys()
    if key == "block_start":
        assert metadata["epoch_count"] > 0
    if key.startswith("block_"):
        assert "first_epoch_num" in metadata
    if key == "eval_accuracy":
        assert record["value"] <= 1.0
        assert "epoch_num" in metadata


def run(*, finished: bool = True) -> list[dict[str, Any]]:
    """Return a fake run of a click model: 200 steps of 64 rows, two epochs, resumed from step 100
    after a failure.
    """
    events = run_events.run(finished=finished)
    for event in events:
        if event["kind"] == "prepared":
            event["rows_of_sets"] = {"train": 6400, "validation": 640}
        elif event["kind"] == "start":
            event |= {"batch_size": 64 // event["world_size"], "rows": event["step"] * 64}
        elif event["kind"] == "evaluate":
            event["auroc"] = 0.7 + event["step"] / 10_000
        elif event["kind"] == "finish":
            event["metrics"] = {"auroc": 0.72}
    return events


def write(folder: Path, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    run_events.feed(
        MlLogTracker(str(folder), config=recipes.mlperf_dcnv2().to_dict()), events, close=True
    )
    return parse(folder / "mllog.log")


def test_mllog_of_restarted_run_follows_rules(tmp_path: Path) -> None:
    write(tmp_path, run()[:20])  # A lost driver. The next one rewrites the file.
    records = write(tmp_path, run())
    check(records)
    values = {record["key"]: record["value"] for record in records}
    assert {key: values[key] for key in VALUES} == VALUES
    assert records[-1]["metadata"]["status"] == "success"
    scores = [
        (record["metadata"]["epoch_num"], record["value"])
        for record in records
        if record["key"] == "eval_accuracy"
    ]
    assert scores == [
        (0.5, 0.705),
        (1.0, 0.71),
        (1.5, 0.715),
        (2.0, 0.72),
    ]
    assert [
        record["metadata"]["epoch_num"] for record in records if record["key"] == "epoch_start"
    ] == [0, 1]
    assert [
        record["metadata"]["first_epoch_num"] for record in records if record["key"] == "block_stop"
    ] == [0, 1]


@pytest.mark.parametrize(
    ("step", "status", "epoch"), [(150, "success", 1.5), (None, "aborted", 2.0)]
)
def test_run_stop_reports_whether_target_was_reached(
    tmp_path: Path, step: int | None, status: str, epoch: float
) -> None:
    fields = {"target": 0.715, "target_metric": "auroc", "target_step": step}
    events = run()
    if step is not None:
        end = (
            next(
                n
                for n, event in enumerate(events)
                if event["kind"] == "evaluate" and event["step"] == step
            )
            + 1
        )
        end_s = events[end - 1]["time"] + 0.25
        stop = {
            "kind": "early_stop",
            "time": end_s,
            "step": step,
            "best_step": step,
            "best_score": 0.715,
            **fields,
        }
        events = [
            *events[:end],
            stop,
            *({**event, "step": step} for event in events if event["kind"] == "finish"),
        ]
    events = [{**event, **fields} if event["kind"] == "finish" else event for event in events]
    records = write(tmp_path, events)
    check(records)
    assert (
        records[-1]["metadata"] | {"status": status, "epoch_num": epoch} == records[-1]["metadata"]
    )
    if step is not None:  # the end of training, not of the final test
        assert records[-1]["time_ms"] == int(1000 * end_s)


def test_mllog_of_stopped_run_is_aborted(tmp_path: Path) -> None:
    events = run(finished=False)
    assert "run_stop" not in [record["key"] for record in write(tmp_path, events)]
    events.append(
        {
            "kind": "stop",
            "time": events[-1]["time"] + 1,
            "step": 150,
            "cause": "SIGTERM",
        }
    )
    records = write(tmp_path, events)
    check(records)
    assert records[-1]["metadata"]["status"] == "aborted"


@pytest.mark.parametrize("name", list(recipes.ALL))
def test_optimizer_lines_of_all_recipes(name: str) -> None:
    assert (
        dict(optimizer_lines(recipes.ALL[name]().to_dict()["workload"]))["opt_base_learning_rate"]
        > 0
    )


def iteration_lines(folder: Path, events: list[dict[str, Any]]) -> list[str]:
    run_events.feed(IterationTracker(str(folder)), events, close=True)
    return (folder / "iterations.log").read_text().splitlines()


ORIGINAL = """Finished training it 16/150 of epoch 0, 439.75 ms/it, loss 0.561402, accuracy 74.972 %
[1] Finished training it 16/150 of epoch 0, 439.75 ms/it, loss 0.561402, accuracy 74.972 %
Testing at - 150/150 of epoch 0, loss 0.463800, auc 0.7926, best auc 0.7926, \
accuracy 78.221 %, best accuracy 78.221 %
Test time:1.9705123901367188"""
"""Lines of e2eAIOK's DLRM, whose launcher puts the rank before them."""
LINE = re.compile(
    r"(?:\[(?P<rank>\d+)\] )?Finished training it (?P<it>\d+)/(?P<its>\d+) of epoch "
    r"(?P<epoch>\d+), (?P<ms>\d+\.\d\d) ms/it, "
    r"loss (?P<loss>\d\.\d{6})(?:, accuracy (?P<accuracy>\d+\.\d{3}) %)?"
    r"|Testing at - (?P<test_it>\d+)/(?P<test_its>\d+) of epoch (?P<test_epoch>\d+), loss "
    r"(?P<test_loss>\d\.\d{6}), "
    r"auc (?P<auc>\d\.\d{4}), best auc (?P<best_auc>\d\.\d{4}), "
    r"accuracy (?P<test_accuracy>\d+\.\d{3}) %, best accuracy (?P<best_accuracy>\d+\.\d{3}) %"
    r"|Test time:(?P<seconds>\d+\.\d+)"
)


def parsed(lines: list[str]) -> list[dict[str, str]]:
    matches = [LINE.fullmatch(line) for line in lines]
    return [
        {name: value for name, value in match.groupdict().items() if value is not None}
        for match in matches
        if match
    ]


def test_iteration_lines_match_original(tmp_path: Path) -> None:
    original = parsed(ORIGINAL.splitlines())
    assert len(original) == 4
    events = [dict(event) for event in run_events.click_run()]
    for event in events:
        if event["kind"] == "step":
            workers = [
                {"loss": event["loss"] + change, "accuracy": 0.7 + change} for change in (-0.1, 0.1)
            ]
            event |= {"accuracy": 0.7, "workers": workers}
        elif event["kind"] == "evaluate":
            event |= {
                "accuracy": 0.8 - event["step"] / 1000,
                "seconds": 1.25,
                "best": {"step": 50, "auroc": 0.76},
            }
    lines = iteration_lines(tmp_path, events)
    matched = parsed(lines)
    assert len(matched) == len(lines) == 10 * 3 + 2 * 2
    assert {tuple(fields) for fields in matched} == {tuple(fields) for fields in original} | {
        tuple(original[1])
    }
    assert matched[1] | {"rank": "0", "loss": "0.490000", "accuracy": "60.000"} == matched[1]
    tested = {
        "test_loss": "0.500000",
        "auc": "0.7700",
        "best_auc": "0.7700",
        "test_accuracy": "70.000",
        "best_accuracy": "75.000",
    }
    assert matched[-2] | tested == matched[-2]
    assert matched[-1] == {"seconds": "1.2500"}


def test_iteration_lines_repeat_steps_and_list_metrics(tmp_path: Path) -> None:
    lines = iteration_lines(tmp_path, run())
    matched = [fields for fields in parsed(lines) if "it" in fields]
    assert len(matched) == 12 + 10  # Repeated steps appear again.
    positions = [(fields["it"], fields["its"], fields["epoch"]) for fields in matched]
    assert (positions[0], positions[12], positions[-1]) == (
        ("10", "100", "0"),
        ("10", "100", "1"),
        ("100", "100", "1"),
    )
    assert (matched[0]["ms"], matched[0]["loss"]) == (f"{1000 * 640 / 1010 / 10:.2f}", "9.000000")
    assert (
        "Testing at - 50/100 of epoch 0, loss 0.573753, perplexity 2.000000, auroc 0.705000"
        in lines
    )
    assert len(lines) == len(matched) + 4


def resized() -> list[dict[str, Any]]:
    """Return a run of two workers with 64 rows per step, and of one from step 25: an epoch of 6400
    rows ends at step 75.
    """
    events = run_events.Events()
    events.add(
        "run",
        recipe="x",
        name="y",
        config_hash="",
        versions={},
    )
    events.add("prepared", seconds=1.0, rows_of_sets={"train": 6400})
    for first, end, workers, rows in ((0, 25, 2, 0), (25, 100, 1, 3200)):
        events.add(
            "start",
            step=first,
            steps=200,
            rows=rows,
            world_size=workers,
            batch_size=64,
        )
        for step in range(first + 25, end + 1, 25):
            done = rows + (step - first) * 64 * workers
            events.add(
                "step",
                step=step,
                steps=200,
                loss=0.5,
                rows=done,
                rows_per_s=1000.0,
                blocked_fraction=0.0,
            )
            events.add(
                "evaluate",
                step=step,
                set="validation",
                auroc=0.7,
                rows=640,
            )
    return events.all


def test_epochs_count_rows_after_resize_and_default_to_full_run(tmp_path: Path) -> None:
    records = write(tmp_path, resized())
    places = [record["metadata"] for record in records if record["key"] == "eval_start"]
    assert [place["samples_count"] for place in places] == [3200, 4800, 6400, 8000]
    assert [place["epoch_num"] for place in places] == [0.5, 0.75, 1.0, 1.25]
    assert [
        record["metadata"]["epoch_num"] for record in records if record["key"] == "epoch_start"
    ] == [0, 1]
    places = re.findall(
        r"Testing at - (\d+/\d+ of epoch \d+)", "\n".join(iteration_lines(tmp_path, resized()))
    )
    assert places == [
        "25/50 of epoch 0",
        "75/100 of epoch 0",
        "100/100 of epoch 0",
        "25/100 of epoch 1",
    ]
    run = RunSummary(
        [
            {
                "time": 0.0,
                "kind": "start",
                "step": 0,
                "steps": 150,
                "world_size": 2,
            }
        ]
    )
    assert run.epoch_at(16) == (0, 16)
    assert run.steps_per_epoch == 150
    assert run.epoch_at(0) == (0, 1)
