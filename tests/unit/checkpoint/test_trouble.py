"""Storage that fails while a checkpoint is written: it is retried, reported, and in the end given up in one line."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.checkpoint import full, writes

from rayrec import checkpoint, storage
from rayrec.checkpoint import Checkpoint, Retention, Saver, acquire_lease, folder_of, newest_good, save_retry
from rayrec.checkpoint.communicator import Ranks
from rayrec.checkpoint.save_retry import delay
from rayrec.config import InputError

Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
def saver_in(events: Events, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Saver]]:
    monkeypatch.setattr(save_retry, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(save_retry, "LONGEST_DELAY_S", 0.1)
    made: list[Saver] = []

    def make(folder: Path, *, max_outage_s: float = 20.0, extra_files: dict[str, bytes] | None = None) -> Saver:
        saver = Saver(
            str(folder),
            lease=acquire_lease(str(folder)),
            retention=Retention(),
            extra_files=extra_files or {},
            max_outage_s=max_outage_s,
            log=lambda kind, fields: events.append((kind, fields)),
        )
        made.append(saver)
        return saver

    yield make
    for saver in made:
        saver.close()


def values(factor: float = 1, num: int = 300_000) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(float(num)) * factor}


def failing(errors: list[Exception]) -> Callable[[], None]:
    def fail() -> None:
        if errors:
            raise errors.pop(0)

    return fail


def good(folder: Path) -> Checkpoint:
    found = newest_good(str(folder), log=lambda *_: None)
    assert found is not None
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_delays_double_and_differ_between_ranks() -> None:
    delays = [delay(attempt, seed="a") for attempt in range(20)]
    assert all(0.25 * 2**attempt < delays[attempt] <= 0.5 * 2**attempt for attempt in range(5))
    assert all(7.5 < seconds <= 15 for seconds in delays[5:])
    assert delays == [delay(attempt, seed="a") for attempt in range(20)]
    assert delays[0] != delay(0, seed="b")


def test_trouble_that_passes_is_told_once(saver_in: Callable[..., Saver], tmp_path: Path, events: Events) -> None:
    saver = saver_in(tmp_path)
    with writes(failing([OSError("store\nis out"), OSError("still"), OSError("still")])):
        assert saver.begin(1, values(), state={}, score=None)
        saver.wait()
    checkpoint.verify(good(tmp_path))
    assert [(kind, fields.get("cause")) for kind, fields in events] == [
        ("checkpoint_late", "store is out"), ("checkpoint", None)
    ]  # fmt: skip
    with writes(failing([OSError("again")])):
        assert saver.begin(2, values(), state={}, score=None)
        saver.wait()
    assert [(kind, fields["step"]) for kind, fields in events[2:]] == [("checkpoint_late", 2), ("checkpoint", 2)]


@pytest.mark.parametrize("of", ["config.yaml", "manifest.json"])
def test_trouble_of_the_commit_passes_too(
    saver_in: Callable[..., Saver], tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    write_stream, errors = storage.write_stream, [OSError("out"), OSError("out")]

    def write(path: str, pieces: Any) -> int:
        if path.endswith(of) and errors:
            raise errors.pop()
        return write_stream(path, pieces)

    for module in (storage, storage.files):
        monkeypatch.setattr(module, "write_stream", write)
    saver = saver_in(tmp_path, extra_files={"config.yaml": b"a: 1"})
    assert saver.begin(1, values(), state={}, score=None)
    saver.wait()
    assert errors == []
    checkpoint.verify(good(tmp_path))
    assert [kind for kind, _ in events] == ["checkpoint_late", "checkpoint"]


def test_an_outage_that_is_too_long_ends_the_run(saver_in: Callable[..., Saver], tmp_path: Path) -> None:
    saver = saver_in(tmp_path, max_outage_s=0.5)
    assert saver.begin(1, values(), state={}, score=None)
    saver.wait()
    with writes(failing([OSError("the store was out")] * 1000)):
        start_s, late = time.monotonic(), 0
        assert saver.begin(2, values(2), state={}, score=None)

        def train() -> None:
            nonlocal late
            while not saver.begin(3, values(), state={}, score=None):
                late += 1
                time.sleep(0.02)

        with pytest.raises(
            InputError, match=r"step_00000002: cannot be written for 0 s \(the store was out\); see"
        ) as e:
            train()
        assert late > 3
        assert "\n" not in str(e.value)
        assert time.monotonic() - start_s > 0.3
    assert good(tmp_path).step == 1
    assert os.listdir(folder_of(str(tmp_path), 2)) == []
    assert saver.begin(4, values(), state={}, score=None)  # a caller may go on all the same
    saver.wait()
    assert good(tmp_path).step == 4


@pytest.mark.parametrize("error", [InputError("s3://bucket: access denied"), ValueError("a defect"), KeyError("odd")])
def test_what_no_waiting_mends_is_raised_at_once(
    saver_in: Callable[..., Saver], tmp_path: Path, events: Events, error: Exception
) -> None:
    saver = saver_in(tmp_path)
    with writes(failing([error])):
        assert saver.begin(1, values(), state={}, score=None)
        with pytest.raises((InputError, ValueError, RuntimeError), match=r"access denied|a defect|KeyError: 'odd'"):
            saver.wait()
    assert events == []
    saver.wait()  # it was told


def test_closing_in_an_outage(saver_in: Callable[..., Saver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_retry, "FIRST_DELAY_S", 100.0)
    monkeypatch.setattr(save_retry, "LONGEST_DELAY_S", 100.0)
    saver = saver_in(tmp_path, max_outage_s=1000)
    with writes(failing([OSError("out")] * 10)):
        assert saver.begin(1, values(), state={}, score=None)
        start_s = time.monotonic()
        saver.close()
    assert time.monotonic() - start_s < 25


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk(saver_in: Callable[..., Saver], small_disk: Path, events: Events) -> None:
    saver = saver_in(small_disk)
    assert saver.begin(1, values(1), state={}, score=None)  # 1.2 MB each
    saver.wait()
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 2_500_000)
    assert saver.begin(2, values(2), state={}, score=None)
    until(lambda: events[-1][0] == "checkpoint_late")
    assert "No space left" in events[-1][1]["cause"]
    assert not saver.begin(3, values(3), state={}, score=None)
    assert good(small_disk).step == 1
    ballast.unlink()
    saver.wait()  # it comes by itself
    assert good(small_disk).step == 2
    checkpoint.verify(good(small_disk))
    saver.close()

    saver = saver_in(small_disk, max_outage_s=0.5)
    ballast.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 500_000))
    assert saver.begin(4, values(4), state={}, score=None)
    with pytest.raises(InputError, match=r"step_00000004: no space left; free some or choose another --storage-path"):
        saver.wait()
    assert os.listdir(folder_of(str(small_disk), 4)) == []
    assert good(small_disk).step == 2


def test_files_that_may_not_grow(saver_in: Callable[..., Saver], tmp_path: Path, events: Events) -> None:
    """As a quota does: the write itself fails, midway."""
    saver = saver_in(tmp_path)
    assert saver.begin(1, values(1, num=10_000), state={}, score=None)
    saver.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
    try:
        assert saver.begin(2, values(2), state={}, score=None)
        until(lambda: events[-1][0] == "checkpoint_late")
        assert not saver.begin(3, values(3), state={}, score=None)
        assert good(tmp_path).step == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    saver.wait()
    assert good(tmp_path).step == 2
    checkpoint.verify(good(tmp_path))


def test_an_attempt_waits_for_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_retry, "FIRST_DELAY_S", 0.01)
    write_bytes, errors = storage.write_bytes, [OSError(28, "No space left on device")] * 2

    def write(path: str, data: bytes) -> None:
        if errors:
            raise errors.pop()
        write_bytes(path, data)

    monkeypatch.setattr(storage, "write_bytes", write)
    token = checkpoint.write_token(str(tmp_path), max_outage_s=30.0)
    checkpoint.check_shared(token, Ranks.all())
    assert os.listdir(tmp_path) == []
    errors[:] = [OSError(28, "No space left on device")] * 1000
    with pytest.raises(InputError, match="no space left; free some"):
        checkpoint.write_token(str(tmp_path), max_outage_s=0.1)


def test_a_save_at_once_is_not_tried_again(tmp_path: Path) -> None:
    path = folder_of(str(tmp_path), 1)
    with writes(full), pytest.raises(OSError, match="No space left"):
        checkpoint.save(path, values(), state={})
    assert checkpoint.latest(str(tmp_path)) is None
    assert os.listdir(path) == []
