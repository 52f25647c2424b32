"""Event file: complete lines, detection of damage, hidden secrets, and no effect on training."""

import errno
import logging
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.faults import raising, rejects

from rayrec.config import Config
from rayrec.observe.event_json import command_line, encode_event, events_in
from rayrec.observe.events import EventWriter, follow, read_events, readable_events


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "events.jsonl"  # The folder does not exist yet.


def _write(path: Path, **fields: Any) -> None:
    with EventWriter(path) as writer:
        writer.write("test", **fields)
    assert writer.num_lost == 0


def _written(path: Path, **fields: Any) -> dict[str, Any]:
    _write(path, **fields)
    return read_events(path)[-1]


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _steps(path: Path, **options: Any) -> list[int]:
    return [event["step"] for event in read_events(path, **options)]


def test_read_events_returns_written_order(path: Path) -> None:
    before = time.time()
    with EventWriter(path) as writer:
        writer.write("start", world_size=2)
        writer.write("step", step=1, loss=0.5)
        writer.write("step", step=2, loss=0.25, text="zwei\nZeilen ü")
    events = read_events(path)
    assert [event["kind"] for event in events] == ["start", "step", "step"]
    assert before <= events[0]["time"] <= time.time()
    assert (list(events[1]), events[2]["text"]) == (["time", "kind", "step", "loss"], "zwei\nZeilen ü")
    assert _steps(path, kinds={"step"}) == [1, 2]
    assert read_events(path, kinds=()) == []
    writer.write("step")
    assert (writer.num_lost, len(read_events(path))) == (1, 3)  # Closed.


def test_writer_converts_values_to_json(path: Path) -> None:
    pairs: list[tuple[Any, Any]] = [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.arange(3), [0, 1, 2]),
        (Path("x"), "x"),
        ((1, {"g": None}), [1, {"g": None}]),
        (np.array([1.0, math.nan]), [1.0, None]),
        *((value, None) for value in (math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf"))),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor([1, 2]), [1, 2]),
        (torch.float32, "torch.float32"),
    ]
    assert _written(path, values=[value for value, _ in pairs])["values"] == [plain for _, plain in pairs]


@dataclass(frozen=True, kw_only=True)
class _Login(Config):
    user: str = "ann"
    """User name."""
    password: str = "hush"
    """Hidden."""


def test_writer_hides_values_of_secret_keys_and_keeps_token_counts(path: Path) -> None:
    keys = ["password", "DB_PASSWORD", "client_secret", "aws_secret_access_key", "access_key", "accessKey"]
    keys += ["api-key", "token", "hf_token", "authToken", "access_tokens", "token_file"]
    assert [_written(path, **{key: "hush"})[key] for key in keys] == ["***"] * len(keys)
    _write(path, config={"storage": [{key: {"inner": "hush"}} for key in keys]})
    config = _written(path, config=_Login())["config"]
    assert (config["user"], config["password"]) == ("ann", "***")
    assert "hush" not in path.read_text()
    counts = {"tokens_per_s": 5.5, "num_tokens": 7, "token_count": 3, "tokenizer": "gpt2", "password": None}
    of_texts = {"tokens": "0f3a9c1b22d4e5f6", "schema": {"tokens": "any"}, "data": {"tokens": [1, 2]}}
    assert _written(path, **{**counts, "num_tokens": np.int64(7)}, **of_texts).items() >= {**counts, **of_texts}.items()


@pytest.mark.parametrize(
    "secret",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + "a1" * 18,
        "hf_" + "aB" * 17,
        "xoxb-1234567890-abc",
        "sk-" + "abcd1234" * 3,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def_ghi",
    ],
)
def test_writer_hides_keys_of_known_services(path: Path, secret: str) -> None:
    event = _written(path, cause=f"refused ({secret})", tokens=secret)
    assert (event["cause"], event["tokens"]) == ("refused (***)", "***")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "gpt2", "--max-new-tokens=20", "--name", "a b"], "train gpt2 --max-new-tokens=20 --name 'a b'"),
        (["train", "--workload.tokenizer", "gpt2", "--tokens", "x"], "train --workload.tokenizer gpt2 --tokens x"),
        (["x", "--password", "hu sh", "--api-key=hush2", "--seed", "1"], "x --password *** --api-key=*** --seed 1"),
        (["x", "--token", "--seed", "1"], "x --token --seed 1"),
        (["x", "https://me:hush@host/a?X-Amz-Signature=ff00&b=c"], "x https://***@host/a?X-Amz-Signature=***&b=c"),
    ],
)
def test_command_line_hides_secrets(arguments: list[str], line: str) -> None:
    assert command_line(arguments) == line


def test_events_in_skips_line_that_grows_while_read() -> None:
    """A reader at the end of a growing file receives the rest of the line as the next line."""
    first, second = (f'{{"time": 1.0, "kind": "step", "step": {step}}}\n'.encode() for step in (1, 2))
    assert [event["step"] for event in events_in([first, second[:9], second[9:]], "events.jsonl")] == [1]


@pytest.mark.parametrize("line", [b'{"time": 1.0, "ki\n', b"7\n", b"{}\n", b"\xff\xfe\n", b"\x00\x00\n"])
def test_read_events_rejects_invalid_lines(path: Path, line: bytes) -> None:
    _written(path, step=1)
    _append(path, line)
    for step in (2, 3):
        rejects(r"events\.jsonl, line 2: not an event", read_events, path)
        _write(path, step=step)  # The writer cannot repair it: the line has an end.


def test_writer_repairs_end_after_crash(path: Path) -> None:
    _write(path, step=1)
    _append(path, b'{"time": 1.0, "kind": "st')
    assert _steps(path) == [1]
    _write(path, step=2)
    assert _steps(path) == [1, 2]
    assert path.read_bytes().count(b"torn_line") == 1


def test_writer_counts_losses_also_without_file_and_warns_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING), EventWriter(path) as writer:
        writer.write("step", step=1)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", raising(OSError(errno.ENOSPC, "No space left on device")))
            writer.write("step", step=2)
            writer.write("step", step=3)
        writer.write("step", step=4)
    assert (writer.num_lost, len(caplog.records)) == (2, 1)
    assert "No space left" in caplog.text
    assert _steps(path) == [1, 4]
    (tmp_path / "file").write_text("")
    with EventWriter(tmp_path / "file" / "events.jsonl") as writer:
        writer.write("step")
    assert writer.num_lost == 1


def test_writer_repairs_short_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with EventWriter(path) as writer:
        writer.write("step", step=1)
        for length in (10, 25):  # The second cuts the repair itself.
            with monkeypatch.context() as patched:
                patched.setattr(os, "write", lambda descriptor, line, length=length: write(descriptor, line[:length]))
                writer.write("step", step=2)
        writer.write("step", step=3)
    assert (writer.num_lost, _steps(path)) == (2, [1, 3])


def test_writer_repairs_line_cut_by_another_writer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def cut(writer: EventWriter, kind: str, **fields: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:10]))
            writer.write(kind, **fields)

    with EventWriter(path) as worker, EventWriter(path) as driver, EventWriter(path) as third:
        driver.write("run")  # All have the file open.
        third.write("prepared")
        worker.write("step", step=1)
        cut(worker, "step", step=2)
        driver.write("failure", cause="worker 0 died")
        worker.write("step", step=3)
        cut(driver, "failure", cause="lost")
        worker.close()
        with EventWriter(path) as again:
            again.write("step", step=4)
        third.write("summary")
    assert [event["kind"] for event in read_events(path)] == ["run", "prepared", "step", "failure", "step", "step", "summary"]
    assert path.read_bytes().count(b"torn_line") == 2


def test_readable_events_skips_damaged_lines(path: Path) -> None:
    _write(path, step=1)
    _append(path, b'{"time": 1.0, "ki{"time": 2.0, "kind": "failure"}\n')
    _write(path, step=2)
    rejects("line 2", read_events, path)
    assert [event["step"] for event in readable_events(path)] == [1, 2]
    assert readable_events(path.parent / "none.jsonl") == []


@pytest.mark.parametrize("text", ["x" * 200_000, "-" * 200_000, "a=" * 100_000, "s3://" * 40_000])
def test_encoding_time_is_linear_in_text_length(text: str) -> None:
    """A quadratic search for secrets would take minutes."""
    begin_s = time.process_time()
    encode_event({"text": text})
    assert time.process_time() - begin_s < 5


def test_concurrent_writers_never_interleave(path: Path) -> None:
    code = (
        "import sys, threading; from rayrec.observe.events import EventWriter\n"
        "writer = EventWriter(sys.argv[1])\n"
        "def run(name):\n"
        "    for step in range(150): writer.write('step', name=name, step=step, text='x' * (step * 37 % 9000))\n"
        "threads = [threading.Thread(target=run, args=(sys.argv[2] + part,)) for part in 'ab']\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "12"]
    assert [process.wait() for process in processes] == [0, 0]
    events = read_events(path)
    for name in ("1a", "1b", "2a", "2b"):
        assert [event["step"] for event in events if event["name"] == name] == [*range(150)]


def test_follow_yields_events_of_growing_file(path: Path) -> None:
    stop, line = threading.Event(), b'{"time": 1.0, "kind": "step", "step": 2}\n'
    events = follow(path, stop=stop, poll_s=0.005)
    threading.Timer(0.03, _write, (path,), {"step": 0}).start()  # The file does not exist yet.
    assert next(events)["step"] == 0
    _write(path, step=1)
    assert next(events)["step"] == 1
    _append(path, line[:20])
    threading.Timer(0.03, _append, (path, line[20:] + line.replace(b"2", b"3")[:10])).start()
    assert next(events)["step"] == 2
    _append(path, line.replace(b"2", b"3")[10:] + line[:10])
    stop.set()
    assert [event["step"] for event in events] == [3]


def test_follow_returns_at_stop_and_rejects_invalid_line(path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert list(follow(path, stop=stop, poll_s=0.005)) == []
    path.parent.mkdir()
    path.write_bytes(b'{"kind": "a"}\nrubbish\n{"kind": "b"}\n')
    rejects("line 2", list, follow(path, stop=stop))
