"""Event file: complete lines, detection of damage, hidden secrets, and no effect on training."""

import contextlib
import errno
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.faults import fails_with, raising, rejects, until

from rayrec import storage
from rayrec.config import Config
from rayrec.observe import events as event_files
from rayrec.observe.event_json import command_line, encode_event, events_in
from rayrec.observe.events import EventWriter, follow, merge_events, read_events, readable_events


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


def _write_cut(writer: EventWriter, length: int, kind: str, **fields: Any) -> None:
    """Write an event of which only the first bytes reach the file."""
    write = os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:length]))
        writer.write(kind, **fields)


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _steps(path: Path | str, **options: Any) -> list[int]:
    return [event["step"] for event in read_events(path, **options)]


def test_read_events_returns_written_order(path: Path) -> None:
    before = time.time()
    with EventWriter(path) as writer:
        writer.write("start", world_size=2)
        writer.write("step", step=1, loss=0.5)
        writer.write(
            "step",
            step=2,
            loss=0.25,
            text="zwei\nZeilen ü",
        )
    events = read_events(path)
    assert [event["kind"] for event in events] == ["start", "step", "step"]
    assert before <= events[0]["time"] <= time.time()
    assert (list(events[1]), events[2]["text"]) == (
        ["time", "kind", "step", "loss"],
        "zwei\nZeilen ü",
    )
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
        *(
            (value, None)
            for value in (
                math.nan,
                math.inf,
                -math.inf,
                np.float32("nan"),
                np.float64("inf"),
            )
        ),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor([1, 2]), [1, 2]),
        (torch.float32, "torch.float32"),
    ]
    assert _written(path, values=[value for value, _ in pairs])["values"] == [
        plain for _, plain in pairs
    ]


@dataclass(frozen=True, kw_only=True)
class _Login(Config):
    user: str = "ann"
    """User name."""
    password: str = "hush"
    """Hidden."""


def test_writer_hides_secret_values_and_keeps_token_counts(path: Path) -> None:
    keys = [
        "password",
        "DB_PASSWORD",
        "client_secret",
        "aws_secret_access_key",
        "access_key",
        "accessKey",
        "api-key",
        "token",
        "hf_token",
        "authToken",
        "access_tokens",
        "token_file",
    ]
    assert [_written(path, **{key: "hush"})[key] for key in keys] == ["***"] * len(keys)
    _write(path, config={"storage": [{key: {"inner": "hush"}} for key in keys]})
    config = _written(path, config=_Login())["config"]
    assert (config["user"], config["password"]) == ("ann", "***")
    assert "hush" not in path.read_text()
    counts = {
        "tokens_per_s": 5.5,
        "num_tokens": 7,
        "token_count": 3,
        "tokenizer": "gpt2",
        "password": None,
    }
    text_fields = {
        "tokens": "0f3a9c1b22d4e5f6",
        "schema": {"tokens": "any"},
        "data": {"tokens": [1, 2]},
    }
    assert (
        _written(path, **{**counts, "num_tokens": np.int64(7)}, **text_fields).items()
        >= {**counts, **text_fields}.items()
    )


def test_writer_hides_keys_of_known_services(path: Path) -> None:
    secrets = [
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + "a1" * 18,
        "hf_" + "aB" * 17,
        "xoxb-1234567890-abc",
        "sk-" + "abcd1234" * 3,
    ]
    for secret in (*secrets, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def_ghi"):
        event = _written(path, cause=f"refused ({secret})", tokens=secret)
        assert (event["cause"], event["tokens"]) == ("refused (***)", "***")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            [
                "train",
                "gpt2",
                "--max-new-tokens=20",
                "--name",
                "a b",
            ],
            "train gpt2 --max-new-tokens=20 --name 'a b'",
            id="train-gpt2-max-new-tokens-20",
        ),
        pytest.param(
            [
                "train",
                "--workload.tokenizer",
                "gpt2",
                "--tokens",
                "x",
            ],
            "train --workload.tokenizer gpt2 --tokens x",
            id="train-workload.tokenizer-gpt2",
        ),
        pytest.param(
            [
                "x",
                "--password",
                "hu sh",
                "--api-key=hush2",
                "--seed",
                "1",
            ],
            "x --password *** --api-key=*** --seed 1",
            id="x-password-hu-sh-api-key-hush2",
        ),
        pytest.param(["x", "--token", "--seed", "1"], "x --token --seed 1", id="x-token-seed-1"),
        pytest.param(
            [
                "x",
                "--cluster.env",
                "A=hush",
                "B",
                "C_D=hu sh",
                "--seed=1",
                "e=f",
            ],
            "x --cluster.env A=*** B C_D=*** --seed=1 e=f",
            id="x-cluster.env-A-hush-B-C_D-hu",
        ),
        pytest.param(
            ["x", "--env=A=hush", "--cluster.env=B=hush"],
            "x --env=A=*** --cluster.env=B=***",
            id="x-env-A-hush-cluster.env-B-hush",
        ),
        pytest.param(
            ["x", "https://me:hush@host/a?X-Amz-Signature=ff00&b=c"],
            "x https://***@host/a?X-Amz-Signature=***&b=c",
            id="x-https-me-hush-host-a-X-Amz",
        ),
    ],
)
def test_command_line_hides_secrets(arguments: list[Any], line: str) -> None:
    assert command_line(arguments) == line


def test_events_in_skips_line_that_grows_while_read() -> None:
    """A reader at the end of a growing file receives the rest of the line as the next line."""
    first, second = (
        f'{{"time": 1.0, "kind": "step", "step": {step}}}\n'.encode() for step in (1, 2)
    )
    assert [
        event["step"] for event in events_in([first, second[:9], second[9:]], "events.jsonl")
    ] == [1]


@pytest.mark.parametrize(
    "line",
    [
        b'{"time": 1.0, "ki\n',
        b"7\n",
        b"{}\n",
        b"\xff\xfe\n",
        b"\x00\x00\n",
    ],
)
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
    path: Path, monkeypatch: Any, caplog: Any, tmp_path: Path
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


def test_writer_repairs_short_writes(path: Path) -> None:
    with EventWriter(path) as writer:
        writer.write("step", step=1)
        for length in (10, 25):  # The second cuts the repair itself.
            _write_cut(writer, length, "step", step=2)
        writer.write("step", step=3)
    assert (writer.num_lost, _steps(path)) == (2, [1, 3])


def test_writer_repairs_line_cut_by_another_writer(path: Path) -> None:
    with EventWriter(path) as worker, EventWriter(path) as driver, EventWriter(path) as third:
        driver.write("run")  # All have the file open.
        third.write("prepared")
        worker.write("step", step=1)
        _write_cut(worker, 10, "step", step=2)
        driver.write("failure", cause="worker 0 died")
        worker.write("step", step=3)
        _write_cut(driver, 10, "failure", cause="lost")
        worker.close()
        with EventWriter(path) as again:
            again.write("step", step=4)
        third.write("summary")
    assert [event["kind"] for event in read_events(path)] == [
        "run",
        "prepared",
        "step",
        "failure",
        "step",
        "step",
        "summary",
    ]
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
    begin_s = time.process_time()
    encode_event({"text": text})
    assert time.process_time() - begin_s < 5


def test_concurrent_writers_never_interleave(path: Path) -> None:
    code = (
        "import sys, threading; from rayrec.observe.events import EventWriter\n"
        "writer = EventWriter(sys.argv[1])\n"
        "def run(name):\n"
        "    for step in range(150): writer.write('step', name=name, step=step, text='x' * (step "
        "* 37 % 9000))\n"
        "threads = [threading.Thread(target=run, args=(sys.argv[2] + part,)) for part in 'ab']\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "12"]
    assert [process.wait() for process in processes] == [0, 0]
    events = read_events(path)
    for name in ("1a", "1b", "2a", "2b"):
        assert [event["step"] for event in events if event["name"] == name] == [*range(150)]


def test_first_lines_of_two_threads_open_file_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open
    opened = list[int]()
    both = threading.Barrier(2)

    def open_slowly(*arguments: Any, **options: Any) -> int:
        opened.append(open_file(*arguments, **options))
        # the other thread waits for this one
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return opened[-1]

    monkeypatch.setattr(os, "open", open_slowly)
    with EventWriter(path) as writer:
        threads = [
            threading.Thread(target=writer.write, args=("step",), kwargs={"step": step})
            for step in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(_steps(path)) == [0, 1]
    (descriptor,) = opened
    fails_with(OSError, "Bad file descriptor", os.fstat, descriptor)


def test_follow_yields_events_of_growing_file(path: Path) -> None:
    stop = threading.Event()
    line = b'{"time": 1.0, "kind": "step", "step": 2}\n'
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


# -- Events at a URL: background upload of parts, merging and following, without duplicates or
# delays
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "events"


@pytest.fixture
def url(folder: Path) -> str:
    return f"file://{folder}.jsonl"


class Store:
    def __init__(self) -> None:
        self.is_out = False
        self.num_uploads = 0
        self.num_refused = 0
        self._write = storage.write_bytes

    def write_bytes(self, path: str, data: bytes) -> None:
        if self.is_out:
            self.num_refused += 1
            raise OSError(f"{path}: the store was out")
        self._write(path, data)
        self.num_uploads += 1


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store()
    monkeypatch.setattr(storage, "write_bytes", store.write_bytes)
    return store


def _write_steps(url: str, *steps: int) -> None:
    with EventWriter(url) as writer:
        for step in steps:
            writer.write("step", step=step)


def test_steps_are_batched_and_other_events_sent_at_once(
    url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_files, "_INTERVAL_S", 600.0)
    with EventWriter(url) as writer:
        writer.write("start", step=0)
        until(lambda: store.num_uploads == 1)
        for step in range(1, 50):
            writer.write("step", step=step)
        time.sleep(0.2)
        assert store.num_uploads == 1  # Steps wait after an upload.
        writer.write("evaluate", step=50)
        until(lambda: store.num_uploads == 2)
        assert _steps(url) == [*range(51)]
        monkeypatch.setattr(event_files, "_INTERVAL_S", 0.1)  # Applies after the next upload.
        for kind, step in (("evaluate", 51), ("step", 52)):
            writer.write(kind, step=step)
            until(lambda step=step: store.num_uploads == step - 48)
        assert _steps(url) == [*range(53)]
    assert (_steps(url), writer.num_lost) == ([*range(53)], 0)


def test_flush_uploads_and_returns_success(url: str, store: Store) -> None:
    writer = EventWriter(url)
    assert writer.flush()
    for kind, step in (("start", 1), ("step", 2)):
        writer.write(kind, step=step)
        assert writer.flush()
    assert _steps(url) == [1, 2]
    store.is_out = True
    writer.write("step", step=3)
    assert not writer.flush(timeout_s=0.1)
    store.is_out = False
    assert writer.flush(timeout_s=60)
    assert _steps(url) == [1, 2, 3]
    writer.close()


def test_long_run_writes_several_parts(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_files, "PART_BYTES", 500)
    _write_steps(url, *range(40))
    names = sorted(os.listdir(folder))
    assert len(names) > 3
    assert names[1].endswith("-000002.jsonl")
    assert _steps(url) == [*range(40)]


def test_outage_loses_no_events_and_never_blocks(
    url: str, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), EventWriter(url) as writer:
        store.is_out = True
        start = time.monotonic()
        for step in range(1000):
            writer.write("evaluate", step=step)
        assert time.monotonic() - start < 30
        until(lambda: store.num_refused >= 2)
        store.is_out = False
        assert writer.flush(timeout_s=60)
    assert (writer.num_lost, _steps(url)) == (0, list(range(1000)))
    assert len(caplog.records) == 1
    assert "the store was out" in caplog.text


def test_close_counts_losses_of_long_outage(
    url: str, store: Store, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        writer = EventWriter(url)
        writer.write("start", step=1)
        assert writer.flush()
        store.is_out = True
        writer.write("step", step=2)
        writer.write("finish", step=3)
        monkeypatch.setattr(event_files, "CLOSE_S", 0.3)
        start = time.monotonic()
        writer.close()
        assert time.monotonic() - start < 5.0
        writer.write("step", step=4)
    assert writer.num_lost == 3
    assert "Lost 2 event(s)" in caplog.text
    assert _steps(url) == [1]


def test_uploader_limits_waiting_bytes(
    url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_files, "_WAITING_BYTES", 1000)
    store.is_out = True
    writer = EventWriter(url)
    for step in range(100):
        writer.write("step", step=step)
    assert 70 < (lost := writer.num_lost) < 100
    store.is_out = False
    assert writer.flush(timeout_s=60)
    assert _steps(url) == list(range(100 - lost))
    writer.write("step", step=7)  # There is room again.
    writer.close()
    assert writer.num_lost == lost


def test_interpreter_exit_flushes_events(url: str) -> None:
    code = (
        "import sys; from rayrec.observe.events import EventWriter\n"
        "writer = EventWriter(sys.argv[1])\n"
        "for step in range(5): writer.write('step', step=step)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, url], capture_output=True, text=True, check=True
    )
    assert (run.stderr, _steps(url)) == ("", list(range(5)))


def test_forked_process_writes_separate_parts(url: str, folder: Path) -> None:
    writer = EventWriter(url)
    writer.write("step", step=1)
    child = os.fork()
    if not child:
        try:
            writer.write("step", step=2)
            writer.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    writer.close()
    assert (_steps(url), len(os.listdir(folder))) == ([1, 2], 2)


def test_merge_events_orders_writers_by_time(url: str, folder: Path) -> None:
    with EventWriter(url) as one, EventWriter(url) as other:
        for step in range(0, 20, 2):
            one.write("step", step=step)
            other.write("step", step=step + 1)
    assert _steps(url) == [*range(20)]
    for _ in range(2):
        merge_events(url)
        assert not folder.exists()
        assert _steps(url) == [*range(20)]
    _write_steps(url, 20)  # The run continues.
    assert _steps(url) == [*range(21)]
    merge_events(url)
    assert _steps(url) == _steps(f"{folder}.jsonl") == [*range(21)]


def test_interrupted_merge_duplicates_no_events(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_steps(url, 1, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove_folder", lambda path: None)
        merge_events(url)
    assert (folder.exists(), _steps(url)) == (True, [1, 1, 1])
    merge_events(url)
    assert (folder.exists(), _steps(url)) == (False, [1, 1, 1])


def test_merge_keeps_growing_part(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = EventWriter(url)
    writer.write("start", step=1)
    assert writer.flush()
    write_bytes = storage.write_bytes

    def write_and_grow(path: str, data: bytes) -> None:
        write_bytes(path, data)
        if path == url:
            writer.write("finish", step=2)
            assert writer.flush()

    monkeypatch.setattr(storage, "write_bytes", write_and_grow)
    merge_events(url)
    assert _steps(url) == [1, 2]
    writer.close()


def test_follow_yields_each_event_once(url: str) -> None:
    stop = threading.Event()
    events = follow(url, stop=stop, poll_s=0.01)
    with EventWriter(url) as writer:
        writer.write("start", step=1)
        assert next(events)["step"] == 1
        writer.write("step", step=2)
        assert writer.flush()
        assert next(events)["step"] == 2
    merge_events(url)
    _write_steps(url, 3)
    assert next(events)["step"] == 3
    merge_events(url)
    _write_steps(url, 4)
    stop.set()
    assert [event["step"] for event in events] == [4]


def test_follow_waits_during_store_outage(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_steps(url, 1)
    _write_steps(url, 2)
    # The second part fails after the first was read.
    read = storage.read_bytes
    failures = [False, True, True, True]

    def fail(path: str) -> bytes:
        if failures and failures.pop(0):
            raise OSError("the store was out")
        return read(path)

    monkeypatch.setattr(storage, "read_bytes", fail)
    stop = threading.Event()
    events = follow(url, stop=stop, poll_s=0.01)
    assert [next(events)["step"], next(events)["step"]] == [1, 2]
    stop.set()
    assert list(events) == []


def test_read_events_rejects_missing_url(url: str) -> None:
    rejects("event file not found", read_events, url)
    merge_events(url)
    assert not storage.exists(url)
