"""Events at a URL: background upload of parts, merging and following, without duplicates or delays."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.faults import rejects, until

from rayrec import storage
from rayrec.observe import event_upload
from rayrec.observe.events import EventWriter, follow, merge_events, read_events


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "events"


@pytest.fixture
def url(folder: Path) -> str:
    return f"file://{folder}.jsonl"


class Store:
    """Object store that can be out and counts uploads."""

    def __init__(self) -> None:
        self.is_out, self.num_uploads, self.num_refused = False, 0, 0
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


def _steps(url: str) -> list[int]:
    return [event["step"] for event in read_events(url)]


def _write(url: str, *steps: int) -> None:
    with EventWriter(url) as writer:
        for step in steps:
            writer.write("step", step=step)


def test_steps_are_batched_and_other_events_sent_at_once(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_upload, "_INTERVAL_S", 600.0)
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
        monkeypatch.setattr(event_upload, "_INTERVAL_S", 0.1)  # Applies after the next upload.
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


def test_long_run_writes_several_parts(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_upload, "PART_BYTES", 500)
    _write(url, *range(40))
    names = sorted(os.listdir(folder))
    assert len(names) > 3
    assert names[1].endswith("-000002.jsonl")
    assert _steps(url) == [*range(40)]


def test_outage_loses_no_events_and_never_blocks(url: str, store: Store, caplog: pytest.LogCaptureFixture) -> None:
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
    url: str, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        writer = EventWriter(url)
        writer.write("start", step=1)
        assert writer.flush()
        store.is_out = True
        writer.write("step", step=2)
        writer.write("finish", step=3)
        monkeypatch.setattr(event_upload, "CLOSE_S", 0.3)
        start = time.monotonic()
        writer.close()
        assert time.monotonic() - start < 5.0
        writer.write("step", step=4)
    assert writer.num_lost == 3
    assert "Lost 2 event(s)" in caplog.text
    assert _steps(url) == [1]


def test_uploader_limits_waiting_bytes(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_upload, "_WAITING_BYTES", 1000)
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
    run = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=True)
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
    _write(url, 20)  # The run continues.
    assert _steps(url) == [*range(21)]
    merge_events(url)
    assert _steps(url) == _steps(f"{folder}.jsonl") == [*range(21)]


def test_interrupted_merge_duplicates_no_events(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(url, 1, 1, 1)
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
    _write(url, 3)
    assert next(events)["step"] == 3
    merge_events(url)
    _write(url, 4)
    stop.set()
    assert [event["step"] for event in events] == [4]


def test_follow_waits_during_store_outage(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(url, 1)
    _write(url, 2)
    read, failures = storage.read_bytes, [False, True, True, True]  # The second part fails after the first was read.

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
