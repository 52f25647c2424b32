"""Storage failures during a save: retries, logs, and one-line errors in the end."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from builders.faults import at_first, raising, rejects, until, watched
from builders.savers import Run, save
from ranks.checkpoint import full, writes

from rayrec import checkpoint, storage
from rayrec.checkpoint import folder_of, save_retry
from rayrec.checkpoint.communicator import Communicator
from rayrec.checkpoint.save_retry import delay
from rayrec.config import InputError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(save_retry, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(save_retry, "LONGEST_DELAY_S", 0.1)
    with closing(Run(tmp_path)) as run:
        yield run


def values(factor: float = 1, num: int = 300_000) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(float(num)) * factor}


def assert_good(run: Run, step: int) -> None:
    found = run.newest()
    assert found.step == step
    checkpoint.verify(found)


def test_retry_delays_double_and_differ_between_ranks() -> None:
    delays = [delay(attempt, seed="a") for attempt in range(20)]
    assert all(0.25 * 2**attempt < delays[attempt] <= 0.5 * 2**attempt for attempt in range(5))
    assert all(7.5 < seconds <= 15 for seconds in delays[5:])
    assert delays == [delay(attempt, seed="a") for attempt in range(20)]
    assert delays[0] != delay(0, seed="b")


def test_transient_write_error_is_logged_once(run: Run) -> None:
    saver = run.saver()
    with writes(at_first([OSError("store\nis out"), OSError("still"), OSError("still")])):
        save(saver, 1, values())
    assert_good(run, 1)
    told = [(kind, fields.get("cause")) for kind, fields in run.events]
    assert told == [("checkpoint_late", "store is out"), ("checkpoint", None)]
    with writes(at_first([OSError("again")])):
        save(saver, 2, values())
    assert [(kind, fields["step"]) for kind, fields in run.events[2:]] == [("checkpoint_late", 2), ("checkpoint", 2)]


@pytest.mark.parametrize("of", ["config.yaml", "manifest.json"])
def test_transient_commit_error_is_retried(run: Run, monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    write = at_first([OSError("out"), OSError("out")], storage.write_stream, end=of)
    for module in (storage, storage.files):
        monkeypatch.setattr(module, "write_stream", write)
    save(run.saver(extra_files={"config.yaml": b"a: 1"}), 1, values())
    assert_good(run, 1)
    assert run.kinds() == ["checkpoint_late", "checkpoint"]


def test_long_outage_raises(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = run.saver(max_outage_s=0.5)
    save(saver, 1, values())
    with writes(raising(OSError("the store was out"))):
        start_s = time.monotonic()
        assert saver.begin(2, values(2), state={}, score=None)
        late = watched(monkeypatch, saver, "begin")
        given_up = r"step_00000002: cannot be written for 0 s \(the store was out\)\. Check"
        rejects(given_up, until, lambda: saver.begin(3, values(), state={}, score=None), pause_s=0.02)
        assert len(late) > 3
        assert time.monotonic() - start_s > 0.3
    assert_good(run, 1)
    assert os.listdir(run.path(2)) == []
    save(saver, 4, values())  # a caller may go on all the same
    assert_good(run, 4)


@pytest.mark.parametrize("error", [InputError("s3://bucket: access denied"), ValueError("a defect"), KeyError("odd")])
def test_permanent_error_raises_at_once(run: Run, error: Exception) -> None:
    saver = run.saver()
    with writes(raising(error)), pytest.raises(Exception, match=r"access denied|a defect|KeyError: 'odd'"):
        save(saver, 1, values())
    assert run.events == []
    saver.wait()  # it was told


def test_close_returns_during_outage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_retry, "FIRST_DELAY_S", 100.0)
    monkeypatch.setattr(save_retry, "LONGEST_DELAY_S", 100.0)
    saver = run.saver(max_outage_s=1000)
    with writes(at_first([OSError("out")] * 10)):
        assert saver.begin(1, values(), state={}, score=None)
        start_s = time.monotonic()
        saver.close()
    assert time.monotonic() - start_s < 25


@pytest.mark.parametrize("small_disk", [4], indirect=True)
def test_full_disk_delays_save_then_raises(run: Run, small_disk: Path) -> None:
    run.folder = str(small_disk)
    saver = run.saver()
    save(saver, 1, values(1))  # 1.2 MB each
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 2_500_000)
    assert saver.begin(2, values(2), state={}, score=None)
    until(lambda: run.kinds()[-1] == "checkpoint_late")
    assert "No space left" in run.events[-1][1]["cause"]
    assert not saver.begin(3, values(3), state={}, score=None)
    assert_good(run, 1)
    ballast.unlink()
    saver.wait()  # it comes by itself
    assert_good(run, 2)
    saver.close()

    ballast.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 500_000))
    with pytest.raises(InputError, match=r"step_00000004: no space left. Free some or choose another --storage-path"):
        save(run.saver(max_outage_s=0.5), 4, values(4))
    assert os.listdir(run.path(4)) == []
    assert_good(run, 2)


def test_file_size_limit_delays_save(run: Run) -> None:
    """Fails in the middle of a write, like a quota."""
    saver = run.saver()
    save(saver, 1, values(1, num=10_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
    try:
        assert saver.begin(2, values(2), state={}, score=None)
        until(lambda: run.kinds()[-1] == "checkpoint_late")
        assert not saver.begin(3, values(3), state={}, score=None)
        assert_good(run, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    saver.wait()
    assert_good(run, 2)


def test_attempt_waits_for_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_retry, "FIRST_DELAY_S", 0.01)
    token, lease = partial(checkpoint.write_token, str(tmp_path)), partial(checkpoint.acquire_lease, str(tmp_path / "run"))
    for name, begin in (("write_bytes", token), ("write_json", partial(save_retry.retry_write, lease, path="run"))):
        no_space = OSError(28, "No space left on device")
        with monkeypatch.context() as patch:
            patch.setattr(storage, name, at_first([no_space] * 2, getattr(storage, name)))
            begun = begin(max_outage_s=30.0)
            patch.setattr(storage, name, raising(no_space))
            rejects(r"no space left\. Free some", begin, max_outage_s=0.1)
        if begin is token:
            checkpoint.check_shared(begun, Communicator.all())
            assert os.listdir(tmp_path) == []
    assert begun.valid()


def test_synchronous_save_is_not_retried(tmp_path: Path) -> None:
    path = folder_of(str(tmp_path), 1)
    with writes(full), pytest.raises(OSError, match="No space left"):
        checkpoint.save(path, values(), state={})
    assert checkpoint.latest(str(tmp_path)) is None
    assert os.listdir(path) == []
