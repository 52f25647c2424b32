"""Background saves of one process: content, late saves, retention, invalid values."""

import errno
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from builders.faults import at_first, fails_with, flip, raising, rejects, unreadable, until, watched
from builders.savers import Run, save
from hosts.slow_store import SlowStore
from ranks.checkpoint import raised, run_ranks, same, whole, writes

from rayrec import checkpoint, storage
from rayrec.checkpoint import (
    Checkpoint,
    DamagedError,
    Retention,
    Saver,
    acquire_lease,
    reader,
    save_retry,
    saver,
    step_folder,
)
from rayrec.checkpoint.communicator import Communicator
from rayrec.config import InputError
from rayrec.storage.retry import Backoff


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with closing(Run(tmp_path)) as run:
        yield run


def values(factor: float = 1) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.arange(10.0) * factor,
        "model.b": torch.ones(2, 2, dtype=torch.int64) * int(factor),
    }


def save_all(saver: Saver, *steps: int) -> None:
    for step in steps:
        save(saver, step, values(step))
    saver.close()


def restored(saved: Checkpoint | None) -> dict[str, torch.Tensor]:
    target = values(0)
    checkpoint.restore(saved, target)
    return target


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


def test_saver_logs_events_and_stall(run: Run, gate: threading.Event) -> None:
    saver = run.saver()

    def open_late() -> None:
        until(lambda: saver._stall_so_far[1] is not None)
        time.sleep(0.5)
        gate.set()

    assert saver.stalled_s == 0
    with writes(gate.wait):
        assert saver.begin(1, values(), state={}, score=None)
        begun_s = saver.stalled_s
        assert begun_s > 0
        opener = threading.Thread(target=open_late)
        opener.start()
        saver.wait()
        opener.join()
    assert saver.stalled_s > begun_s + 0.45
    save(saver, 2, values())
    assert run.kinds() == ["checkpoint", "checkpoint"]
    first, second = (fields for _, fields in run.events)
    size_bytes = sum(file.stat().st_size for file in Path(first["path"]).glob("data_*"))
    assert (first["step"], first["path"], first["bytes"]) == (1, run.at(1).path, size_bytes)
    assert first["write_s"] > 0.45
    assert first["stall_s"] > 0.45  # which was waited for
    assert second["stall_s"] > 0
    assert first["stall_s"] + second["stall_s"] <= saver.stalled_s


def test_saver_replans_only_if_tensors_change(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = watched(monkeypatch, saver, "make_plan")
    one = run.saver()
    for step, live in enumerate(
        (values(), values(2), {**values(3), "model.c": torch.zeros(3)}, values(4)), 1
    ):
        assert same(dict(checkpoint.full_tensors(save(one, step, live))), live)
        assert len(made) == [1, 1, 2, 3][step - 1]


def test_saver_writes_extra_files_and_removes_stale_data(run: Run) -> None:
    folder = run.path(1)
    successor_file = "data_00000-000009-aaaaaaaa-0001.safetensors"
    left = [
        "data_00000.safetensors",
        "data_00007-000000-aaaaaaaa-0001.safetensors",
        "data_00001.safetensors.ab.partial",
    ]
    saver = run.saver(extra_files={"more/words.txt": b"abc"})
    save(saver, 0, values())  # after it, the saver removes no uncommitted folder
    folder.mkdir(parents=True)
    for name in (*left, successor_file):
        (folder / name).write_bytes(b"abc")
    files = save(saver, 1, values()).manifest()["files"]
    (data,) = (name for name in files if name.startswith("data_00000-000001-"))
    assert files.keys() == {data, "more/words.txt"}
    saver.close()  # rank 0 cleans after all know that the save is through
    assert sorted(os.listdir(folder)) == sorted([data, successor_file, "more", "manifest.json"])
    checkpoint.verify(run.at(1))


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_saver_applies_retention(tmp_path: Path, scheme: str) -> None:
    run = Run(f"{scheme}{tmp_path}")
    kept = []
    for step, score in (
        (1, 0.5),
        (2, 0.9),
        (3, None),
        (4, 0.8),
        (5, None),
        (6, 0.9),
        (7, None),
        (8, 0.1),
    ):
        # A saver for each, so that the cleaning is over, and the next attempt learns the scores
        # again.
        with closing(
            run.saver(retention=Retention(num_to_keep=2, keep_best=1, keep_every=4))
        ) as saver:
            save(saver, step, values(step), score=score)
        kept.append(run.steps())
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [4, 5, 6], [4, 6, 7], [4, 6, 7, 8]]
    assert len(os.listdir(tmp_path / "checkpoints")) == 4
    assert same(restored(run.at(6)), values(6))


def test_damaged_checkpoints_do_not_count_for_retention(run: Run) -> None:
    save_all(run.saver(), 1, 2, 3)
    for step in (2, 3):
        os.truncate(
            run.path(step, "manifest.json"), run.path(step, "manifest.json").stat().st_size - 10
        )
    assert run.steps() == [2, 3]
    saver = run.saver(retention=Retention(num_to_keep=1))
    save(saver, 2, values(20))  # over the damaged one; 3 is still to come again
    saver.close()
    assert (run.steps(), run.newest()) == ([2, 3], saver.last)
    save_all(saver := run.saver(), 4, 5)
    assert run.steps() == [4, 5]
    assert same(restored(saver.last), values(5))


def test_saver_overwrites_same_step(run: Run) -> None:
    """Overwritten by one process and by the next, with a valid checkpoint at all times and no
    leftovers.
    """
    for _ in range(2):
        saver = run.saver()
        gate = threading.Event()
        for factor in (2, 3):
            before = run.steps()
            gate.clear()
            with writes(gate.wait):
                assert saver.begin(1, values(factor), state={}, score=None)
                assert run.steps() == before
                if before:
                    assert same(restored(run.at(1)), values(3 if factor == 2 else 2))
                gate.set()
                saver.wait()
            assert same(restored(saver.last), values(factor))
        saver.close()
        assert len(os.listdir(run.path(1))) == 2


def test_saver_without_lease_cannot_commit(run: Run, gate: threading.Event) -> None:
    zombie = run.saver()
    save(zombie, 1, values(1))
    with writes(gate.wait):
        assert zombie.begin(2, values(2), state={}, score=None)
        heir = acquire_lease(run.folder)
        gate.set()
        rejects(r"another process acquired the lease of this run", zombie.wait)
    assert run.steps() == [1]
    successor = run.saver(lease=heir)
    with writes(gate.wait):  # both at once, at the same step
        gate.clear()
        assert successor.begin(2, values(20), state={}, score=None)
        assert zombie.begin(2, values(2), state={}, score=None)
        gate.set()
        successor.wait()
        assert "acquired the lease" in raised(zombie.wait)
    assert same(restored(successor.last), values(20))
    checkpoint.verify(run.at(2))
    run.close()
    assert len(os.listdir(run.path(2))) == 2


def test_lease_is_checked_right_before_commit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes = storage.write_bytes

    def write_and_lose(path: str, data: bytes) -> None:
        write_bytes(path, data)
        acquire_lease(run.folder)

    monkeypatch.setattr(storage, "write_bytes", write_and_lose)
    rejects(
        r"another process acquired the lease",
        save,
        run.saver(extra_files={"config.yaml": b"a: 1"}),
        1,
        values(),
    )
    assert run.steps() == []


def test_uncommitted_saves_are_removed(run: Run) -> None:
    save_all(run.saver(), 1, 3)
    for step in (2, 4):
        run.path(step).mkdir()
        run.path(step, "data_00000.safetensors").touch()
    names = sorted(os.listdir(run.path(1).parent))
    lost = acquire_lease(run.folder)
    acquire_lease(run.folder)
    run.saver(lease=lost).close()
    assert sorted(os.listdir(run.path(1).parent)) == names
    run.saver().close()
    assert sorted(os.listdir(run.path(1).parent)) == ["step_00000001", "step_00000003"]


def test_begin_rejects_invalid_values(run: Run) -> None:
    saver = run.saver()
    for tensors, state, message in (
        ({"rates": [1.0]}, {}, "rates: must be a tensor"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, {}, "not supported in checkpoints"),
        (values(), {"a": object()}, "not JSON serializable"),
    ):
        fails_with(TypeError, message, saver.begin, 1, tensors, state=state, score=None)
    save(saver, 1, values())
    assert run.steps() == [1]


def test_byte_count_grows_during_save_also_of_empty_model(run: Run, gate: threading.Event) -> None:
    saver = run.saver()
    block = checkpoint.writer.BLOCK_BYTES
    with writes(gate.wait):
        assert saver.begin(
            1, {"a": torch.zeros(3 * block, dtype=torch.uint8)}, state={}, score=None
        )
        # all were asked for when the gate holds the last one back
        until(lambda: saver.stats.written_bytes >= 3 * block)
        assert (saver.stats.written_bytes, saver.stats.write_s) == (3 * block, 0.0)
        gate.set()
        saver.wait()
    assert saver.stats.written_bytes == 3 * block
    assert saver.stats.write_s > 0
    saved = save(run.saver(), 1, {}, a=1)
    assert os.listdir(saved.path) == ["manifest.json"]
    assert saved.manifest()["state"] == {"a": 1}


def test_saves_do_not_change_random_state(run: Run) -> None:
    drawn = []
    for saves in (False, True):
        torch.manual_seed(1)
        random.seed(1)
        if saves:
            with writes(at_first([OSError("once")])):
                save_all(run.saver(), 1)
        drawn.append((torch.rand(3).tolist(), random.random()))
    assert drawn[0] == drawn[1]


def test_close_waits_for_current_save(run: Run, gate: threading.Event) -> None:
    run.saver().close()
    saver = run.saver()
    with writes(gate.wait):
        assert saver.begin(1, values(), state={}, score=None)
        threading.Timer(0.2, gate.set).start()
        saver.close()  # the save under way is brought to its end
    assert run.steps() == [1]
    saver.close()


def test_skipped_checkpoints_are_removed_first(run: Run) -> None:
    save_all(run.saver(retention=Retention(num_to_keep=10, keep_best=0)), 1, 2, 3, 4)
    save_all(
        run.saver(retention=Retention(num_to_keep=2, keep_best=0, keep_every=2), damaged={2, 3, 4}),
        3,
    )
    # 1 is kept, where 2 would have taken its place; 3 was written again, 4 is yet to be.
    assert run.steps() == [1, 3, 4]
    save_all(run.saver(retention=Retention(num_to_keep=2, keep_best=0), damaged={4}), 5)
    assert run.steps() == [3, 5]


def test_unreadable_checkpoints_are_not_removed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(run.saver(), 1)
    unreadable(
        monkeypatch, f"{run.at(1).path}/manifest.json", OSError(errno.EIO, "Input/output error")
    )
    save_all(run.saver(retention=Retention(num_to_keep=1, keep_best=0)), 2)
    assert run.steps() == [1, 2]


# -- Files that every checkpoint has, which are the same in all of a run
@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_bytes(b"abc")
    return path


def inode(run: Run, step: int, name: str = "words.txt") -> int:
    return run.path(step, name).stat().st_ino


def test_extra_files_are_hashed_once(
    run: Run, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed = watched(monkeypatch, storage, "read_stream")
    copy_file = storage.copy_file

    def copy(path: str, target: str) -> None:
        copy_file(path, target)
        if target.startswith(run.at(2).path):  # a bit of it turns
            Path(target).write_bytes(b"xyz")

    monkeypatch.setattr(storage, "copy_file", copy)
    monkeypatch.setattr(storage, "clone_file", lambda *_: False)
    files = {"more/words.txt": str(source), "config.yaml": b"a: 1"}
    save_all(run.saver(retention=Retention(num_to_keep=9), extra_files=files), 1, 2, 3)
    assert [path for path, _ in streamed if "words" in path] == [str(source)]
    for step in (1, 3):
        checkpoint.verify(run.at(step))
    fails_with(
        DamagedError,
        r"words\.txt: damaged, its checksum does not match",
        checkpoint.verify,
        run.at(2),
    )
    assert run.kinds() == ["checkpoint"] * 3


def test_later_checkpoints_link_extra_files(run: Run, source: Path) -> None:
    name = "more/words.txt"
    files = {"more/words.txt": str(source), "config.yaml": b"a: 1"}
    saver = run.saver(extra_files=files)
    for step in (1, 2, 3, 3, 4):  # a step may be saved twice
        save(saver, step, values(step))
        source.write_bytes(b"xyz")  # what the user does with it is of no concern
    saver.close()
    assert run.steps() == [3, 4]  # removal of the first took nothing from the others
    assert inode(run, 3, name) == inode(run, 4, name) != source.stat().st_ino
    assert inode(run, 3, "config.yaml") != inode(run, 4, "config.yaml")
    assert not list(source.parent.glob("checkpoints/**/*.partial"))
    for step in (3, 4):
        checkpoint.verify(run.at(step))
        assert run.path(step, name).read_bytes() == b"abc"
    # A later attempt hashes the source again, and shares nothing with the earlier one.
    save_all(run.saver(extra_files={name: str(source)}), 5)
    assert inode(run, 5, name) != inode(run, 4, name)
    assert [run.path(step, name).read_bytes() for step in (4, 5)] == [b"abc", b"xyz"]


@pytest.mark.parametrize(
    "number", [errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS]
)
def test_extra_files_are_copied_without_hard_links(
    run: Run, source: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", link := Mock(side_effect=OSError(number, os.strerror(number))))
    saver = run.saver(extra_files={"words.txt": str(source)})
    for step in (1, 2):
        checkpoint.verify(save(saver, step, values()))
    assert link.call_count == 1
    assert inode(run, 1) != inode(run, 2)


@pytest.mark.parametrize("largest", [1 << 30, 2])
def test_store_copies_extra_files_internally(
    source: Path, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    store = SlowStore(latency_s=0).installed(monkeypatch)
    monkeypatch.setattr(
        storage.files, "same_store", lambda *urls: all(url.startswith("slow://") for url in urls)
    )
    monkeypatch.setattr(storage.files, "_LARGEST_COPY_BYTES", largest)
    with closing(Run(f"slow://{source.parent}")) as run:
        saver = run.saver(extra_files={"words.txt": str(source)})
        for step in (1, 2, 3):
            store.reset()
            saved = save(saver, step, values())
            assert store.calls["copy"] == (1 if step > 1 and largest > 2 else 0)
            checkpoint.verify(saved)


def test_failing_link_delays_save(run: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", at_first([OSError(errno.EIO, "Input/output error")], os.link))
    save_all(run.saver(extra_files={"words.txt": str(source)}), 1, 2)
    assert run.kinds() == ["checkpoint", "checkpoint_late", "checkpoint"]
    assert inode(run, 1) == inode(run, 2)


@pytest.mark.parametrize(
    "harm",
    [
        lambda saved: os.truncate(saved / "words.txt", 2),
        lambda saved: (saved / "words.txt").unlink(),
        lambda saved: storage.remove_folder(str(saved)),
    ],
    ids=["cut short", "removed by hand", "removed by retention"],
)
def test_missing_extra_file_is_copied_from_source(
    run: Run, source: Path, harm: Callable[[Path], None]
) -> None:
    saver = run.saver(extra_files={"words.txt": str(source)})
    save(saver, 1, values())
    harm(run.path(1))
    checkpoint.verify(save(saver, 2, values()))


def test_overwriting_save_keeps_checkpoint_valid_until_commit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Happens if a run is stopped before an evaluation, and resumes with another
    --checkpoint.every.
    """
    save_all(run.saver(extra_files={"config.yaml": b"every: 5"}), 1)
    saved = run.at(1)
    stored = run.path(1, "config.yaml")
    saver = run.saver(extra_files={"config.yaml": b"every: 7", "more.txt": b"x"})
    write_json = storage.write_json

    def check_and_write(path: str, value: Any) -> None:
        if path.endswith("manifest.json"):
            checkpoint.verify(saved)
        write_json(path, value)

    monkeypatch.setattr(storage, "write_json", check_and_write)
    checkpoint.verify(save(saver, 1, values(), score=0.5))
    assert (saved.manifest()["score"], stored.read_bytes()) == (0.5, b"every: 5")
    stored.write_bytes(b"every: 6")  # damaged: it is of no use
    monkeypatch.setattr(storage, "write_json", write_json)
    checkpoint.verify(save(saver, 1, values(), score=0.6))
    assert stored.read_bytes() == b"every: 7"


def test_copy_of_wrong_size_is_repeated(
    run: Run, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_file = storage.copy_file
    lengths = [2, 3]

    def copy(path: str, target: str) -> None:
        copy_file(path, target)
        os.truncate(target, lengths.pop(0))

    monkeypatch.setattr(storage, "copy_file", copy)
    saved = save(run.saver(extra_files={"words.txt": str(source)}), 1, values())
    assert run.kinds() == ["checkpoint_late", "checkpoint"]
    damage = (
        "words.txt: damaged, has 2 bytes instead of 3 after it was written. storage_path must be "
        "shared by all workers"
    )
    assert run.events[0][1]["cause"].endswith(damage)
    checkpoint.verify(saved)


# -- Storage failures during a save: retries, logs, and one-line errors in the end
@pytest.fixture
def hurried(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(save_retry, "BACKOFF", Backoff(first_s=0.02, longest_s=0.1))
    return run


def many(factor: float = 1, num: int = 300_000) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(float(num)) * factor}


def assert_good(hurried: Run, step: int) -> None:
    found = hurried.newest()
    assert found.step == step
    checkpoint.verify(found)


def test_retry_delays_double_and_differ_between_ranks() -> None:
    delays = [save_retry.BACKOFF.wait_s(attempt) for attempt in range(20)]
    assert all(0.25 * 2**attempt < delays[attempt] <= 0.5 * 2**attempt for attempt in range(5))
    assert all(7.5 < seconds <= 15 for seconds in delays[5:])
    assert delays != [save_retry.BACKOFF.wait_s(attempt) for attempt in range(20)]


def test_transient_write_error_is_logged_once(hurried: Run) -> None:
    saver = hurried.saver()
    with writes(at_first([OSError("store\nis out"), OSError("still"), OSError("still")])):
        save(saver, 1, many())
    assert_good(hurried, 1)
    reported = [(kind, fields.get("cause")) for kind, fields in hurried.events]
    assert reported == [("checkpoint_late", "store is out"), ("checkpoint", None)]
    with writes(at_first([OSError("again")])):
        save(saver, 2, many())
    assert [(kind, fields["step"]) for kind, fields in hurried.events[2:]] == [
        ("checkpoint_late", 2),
        ("checkpoint", 2),
    ]


@pytest.mark.parametrize("failing_file", ["config.yaml", "manifest.json"])
def test_transient_commit_error_is_retried(
    hurried: Run, monkeypatch: pytest.MonkeyPatch, failing_file: str
) -> None:
    write = at_first([OSError("out"), OSError("out")], storage.write_stream, end=failing_file)
    for module in (storage, storage.files):
        monkeypatch.setattr(module, "write_stream", write)
    save(hurried.saver(extra_files={"config.yaml": b"a: 1"}), 1, many())
    assert_good(hurried, 1)
    assert hurried.kinds() == ["checkpoint_late", "checkpoint"]


def test_long_outage_raises(hurried: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = hurried.saver(max_outage_s=0.5)
    save(saver, 1, many())
    with writes(raising(OSError("the store was out"))):
        start_s = time.monotonic()
        assert saver.begin(2, many(2), state={}, score=None)
        late = watched(monkeypatch, saver, "begin")
        given_up = r"step_00000002: cannot be written for 0 s \(the store was out\)\. Check"
        rejects(given_up, until, lambda: saver.begin(3, many(), state={}, score=None), pause_s=0.02)
        assert len(late) > 3
        assert time.monotonic() - start_s > 0.3
    assert_good(hurried, 1)
    assert os.listdir(hurried.path(2)) == []
    save(saver, 4, many())  # a caller may go on all the same
    assert_good(hurried, 4)


@pytest.mark.parametrize(
    "error", [InputError("s3://bucket: access denied"), ValueError("a defect"), KeyError("odd")]
)
def test_permanent_error_raises_at_once(hurried: Run, error: Exception) -> None:
    saver = hurried.saver()
    with (
        writes(raising(error)),
        pytest.raises(Exception, match=r"access denied|a defect|KeyError: 'odd'"),
    ):
        save(saver, 1, many())
    assert hurried.events == []
    saver.wait()  # it was told


def test_close_returns_during_outage(hurried: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_retry, "BACKOFF", Backoff(first_s=100.0, longest_s=100.0))
    saver = hurried.saver(max_outage_s=1000)
    with writes(at_first([OSError("out")] * 10)):
        assert saver.begin(1, many(), state={}, score=None)
        start_s = time.monotonic()
        saver.close()
    assert time.monotonic() - start_s < 25


@pytest.mark.parametrize("small_disk", [4], indirect=True)
def test_full_disk_delays_save_then_raises(hurried: Run, small_disk: Path) -> None:
    hurried.folder = str(small_disk)
    saver = hurried.saver()
    save(saver, 1, many(1))  # 1.2 MB each
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 2_500_000)
    assert saver.begin(2, many(2), state={}, score=None)
    until(lambda: hurried.kinds()[-1] == "checkpoint_late")
    assert "No space left" in hurried.events[-1][1]["cause"]
    assert not saver.begin(3, many(3), state={}, score=None)
    assert_good(hurried, 1)
    ballast.unlink()
    saver.wait()  # it comes by itself
    assert_good(hurried, 2)
    saver.close()
    ballast.write_bytes(
        b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 500_000)
    )
    no_space = r"step_00000004: no space left. Free some or choose another --storage-path"
    rejects(no_space, save, hurried.saver(max_outage_s=0.5), 4, many(4))
    assert os.listdir(hurried.path(4)) == []
    assert_good(hurried, 2)


def test_file_size_limit_delays_save(hurried: Run) -> None:
    saver = hurried.saver()
    save(saver, 1, many(1, num=10_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
    try:
        assert saver.begin(2, many(2), state={}, score=None)
        until(lambda: hurried.kinds()[-1] == "checkpoint_late")
        assert not saver.begin(3, many(3), state={}, score=None)
        assert_good(hurried, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    saver.wait()
    assert_good(hurried, 2)


def test_retry_ends_before_delay_exceeds_outage() -> None:
    causes: list[str] = []
    policy = save_retry.RetryPolicy("run", 0.1, ended=threading.Event(), on_failure=causes.append)
    # Waits 2.5 to 5 s
    with mock.patch.object(save_retry, "BACKOFF", Backoff(first_s=5.0, longest_s=5.0)):
        rejects("run: cannot be written for 0 s .busy.", policy.run, raising(OSError("busy")))
    assert causes == ["busy"]


def test_attempt_waits_for_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_retry, "BACKOFF", Backoff(first_s=0.01, longest_s=15.0))
    token = partial(checkpoint.write_token, str(tmp_path))
    lease = partial(checkpoint.acquire_lease, str(tmp_path / "run"))
    for name, begin in (
        ("write_bytes", token),
        ("write_json", partial(save_retry.retry_write, lease, path="run")),
    ):
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


# -- Saves and restores of several processes, asynchronous saves and failing ranks
def test_checkpoint_restores_at_other_world_sizes(tmp_path: Path) -> None:
    folder = str(tmp_path)
    one, two, three = (Checkpoint(step_folder(folder, step)) for step in (1, 2, 3))
    run_ranks("save", 2, folder)
    assert sorted(os.listdir(one.path)) == [
        "data_00000.safetensors",
        "data_00001.safetensors",
        "manifest.json",
    ]
    assert one.manifest()["state"] == {"rank": 0}
    checkpoint.restore(one, target := whole(0))
    assert same(target, whole())
    checkpoint.save(two.path, target, state={})
    run_ranks("reshard", 3, folder)
    assert len(os.listdir(three.path)) == 4
    assert same(dict(checkpoint.full_tensors(three)), whole())
    assert (
        checkpoint.weights_sha256(one)
        == checkpoint.weights_sha256(two)
        == checkpoint.weights_sha256(three)
    )
    # a range of rows then lies in several chunks
    with mock.patch.object(reader, "_WINDOW_BYTES", 24):
        assert (
            checkpoint.weights_sha256(one)
            == checkpoint.weights_sha256(two)
            == checkpoint.weights_sha256(three)
        )
    shutil.copytree(two.path, step_folder(folder, 4))
    (chunk,) = two.manifest()["tensors"]["model.rows"]["chunks"]
    harmed = Path(step_folder(folder, 4), chunk["file"])
    flip(harmed, chunk["start"] + chunk["bytes"] - 1)  # whichever rank reads it, all are to know
    shutil.copytree(two.path, step_folder(folder, 5))
    Path(step_folder(folder, 5), chunk["file"]).unlink()
    outputs = run_ranks("restore", 2, folder)
    expected = f"damaged: {harmed}: damaged, the checksum of model.rows does not match"
    assert all(expected in output for output in outputs), outputs


@pytest.mark.parametrize("case", ["read_some", "read_once", "save_in_background", "save_apart"])
def test_two_ranks_agree(tmp_path: Path, case: str) -> None:
    run_ranks(case, 2, str(tmp_path))


def test_rank_killed_during_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    run_ranks("die_saving", 2, str(tmp_path), killed=1)
    with closing(Run(tmp_path)) as run:
        assert list(run.path(2).glob("*.partial"))
        assert run.newest() == run.at(1)
        checkpoint.restore(run.at(1), target := whole(0))
        assert same(target, whole())
        save(run.saver(), 3, target)  # the next attempt sweeps, and saves
    assert not run.path(2).exists()
    assert run.steps() == [1, 3]
