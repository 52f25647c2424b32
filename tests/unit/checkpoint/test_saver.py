"""Saving while training continues, by one process: what is saved, what is late, what is removed, what is refused."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts.slow_store import SlowStore
from ranks.checkpoint import raised, same, writes

from rayrec import checkpoint, storage
from rayrec.checkpoint import (
    Checkpoint,
    DamagedError,
    Lease,
    Retention,
    Saver,
    acquire_lease,
    folder_of,
    newest_good,
    saver,
)
from rayrec.config import InputError

MakeSaver = Callable[..., Saver]


@pytest.fixture
def events() -> list[tuple[str, dict[str, Any]]]:
    return []


@pytest.fixture
def make_saver(tmp_path: Path, events: list[tuple[str, dict[str, Any]]]) -> Iterator[MakeSaver]:
    made: list[Saver] = []

    def make(**arguments: Any) -> Saver:
        folder = arguments.pop("folder", str(tmp_path))
        given = {
            "lease": arguments.pop("lease", None) or acquire_lease(folder),
            "retention": Retention(),
            "extra_files": {},
            "max_outage_s": 20.0,
            "log": lambda kind, fields: events.append((kind, fields)),
        }
        made.append(Saver(folder, **{**given, **arguments}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def values(factor: float = 1) -> dict[str, torch.Tensor]:
    return {"model.a": torch.arange(10.0) * factor, "model.b": torch.ones(2, 2, dtype=torch.int64) * int(factor)}


def restored(saved: Checkpoint | None) -> dict[str, torch.Tensor]:
    assert saved is not None
    target = values(0)
    checkpoint.restore(saved, target)
    return target


def steps(folder: Path) -> list[int]:
    return [found.step for found in checkpoint.committed(str(folder))]


def test_what_changes_after_begin_is_not_saved(make_saver: MakeSaver, tmp_path: Path) -> None:
    saver, live, gate, state = make_saver(), values(), threading.Event(), {"rows": [1]}
    with writes(gate.wait):
        assert saver.begin(5, live, state=state, score=0.25)
        for tensor in live.values():
            tensor.zero_()
        state["rows"].append(2)
        assert (saver.last, steps(tmp_path)) == (None, [])
        gate.set()
        saver.wait()
    assert saver.last == Checkpoint(folder_of(str(tmp_path), 5))
    assert same(restored(saver.last), values())
    manifest = saver.last.manifest()
    assert (manifest["state"], manifest["score"]) == ({"rows": [1]}, 0.25)


def test_a_save_is_late_while_the_one_before_is_under_way(make_saver: MakeSaver, tmp_path: Path) -> None:
    saver, gate = make_saver(), threading.Event()
    with writes(gate.wait):
        assert saver.begin(1, values(), state={}, score=None)
        assert [saver.begin(step, values(2), state={}, score=None) for step in (2, 3)] == [False, False]
        gate.set()
        saver.wait()
    assert saver.begin(4, values(3), state={}, score=None)
    saver.wait()
    assert steps(tmp_path) == [1, 4]
    assert same(restored(saver.last), values(3))


def test_events_and_the_stall(make_saver: MakeSaver, tmp_path: Path, events: list[tuple[str, dict[str, Any]]]) -> None:
    saver, gate = make_saver(), threading.Event()

    def open_late() -> None:
        while saver._stall_so_far[1] is None:
            time.sleep(0.01)
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
    assert saver.begin(2, values(), state={}, score=None)
    saver.wait()
    assert [kind for kind, _ in events] == ["checkpoint", "checkpoint"]
    first, second = (fields for _, fields in events)
    size_bytes = sum(file.stat().st_size for file in Path(first["path"]).glob("data_*"))
    assert {key: first[key] for key in ("step", "path", "bytes")} == {
        "step": 1, "path": folder_of(str(tmp_path), 1), "bytes": size_bytes
    }  # fmt: skip
    assert first["write_s"] > 0.45
    assert first["stall_s"] > 0.45  # which was waited for
    assert second["stall_s"] > 0
    assert first["stall_s"] + second["stall_s"] <= saver.stalled_s


def test_the_plan_is_made_once_and_again_where_tensors_change(
    make_saver: MakeSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make_plan = saver.make_plan
    monkeypatch.setattr(saver, "make_plan", lambda *arguments: made.append(1) or make_plan(*arguments))
    one = make_saver()
    for step, live in enumerate((values(), values(2), {**values(3), "model.c": torch.zeros(3)}, values(4)), 1):
        assert one.begin(step, live, state={}, score=None)
        one.wait()
        assert same(dict(checkpoint.full_tensors(one.last)), live)  # type: ignore[arg-type]
        assert len(made) == [1, 1, 2, 3][step - 1]


def test_what_belongs_with_the_weights(make_saver: MakeSaver, tmp_path: Path) -> None:
    folder = Path(folder_of(str(tmp_path), 1))
    left = [
        "data_00000.safetensors",
        "data_00007-000000-aaaaaaaa-0001.safetensors",
        "data_00001.safetensors.ab.partial",
    ]
    of_a_successor = "data_00000-000009-aaaaaaaa-0001.safetensors"
    folder.mkdir(parents=True)
    for name in (*left, of_a_successor):
        (folder / name).write_bytes(b"abc")
    saver = make_saver(extra_files={"more/words.txt": b"abc"}, sweep=False)
    assert saver.begin(1, values(), state={}, score=None)
    saver.wait()
    files = Checkpoint(str(folder)).manifest()["files"]
    (data,) = (name for name in files if name.startswith("data_00000-000001-"))
    assert files.keys() == {data, "more/words.txt"}
    saver.close()  # rank 0 cleans after all know that the save is through
    assert sorted(os.listdir(folder)) == sorted([data, of_a_successor, "more", "manifest.json"])
    checkpoint.verify(Checkpoint(str(folder)))


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_what_retention_does_not_keep_goes(make_saver: MakeSaver, tmp_path: Path, scheme: str) -> None:
    run = f"{scheme}{tmp_path}"
    saver = make_saver(folder=run, retention=Retention(num_to_keep=2, keep_best=1, keep_every=4))
    kept = []
    for step, score in ((1, 0.5), (2, 0.9), (3, None), (4, 0.8), (5, None), (6, 0.9), (7, None), (8, 0.1)):
        assert saver.begin(step, values(step), state={}, score=score)
        saver.wait()
        saver.close()  # so that the cleaning is over; and the next attempt learns the scores again
        saver = make_saver(folder=run, retention=Retention(num_to_keep=2, keep_best=1, keep_every=4))
        kept.append(steps(tmp_path))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [4, 5, 6], [4, 6, 7], [4, 6, 7, 8]]
    assert len(os.listdir(tmp_path / "checkpoints")) == 4
    assert same(restored(Checkpoint(folder_of(run, 6))), values(6))


def test_damaged_ones_do_not_take_the_place_of_good_ones(make_saver: MakeSaver, tmp_path: Path) -> None:
    saver = make_saver()
    for step in (1, 2, 3):
        assert saver.begin(step, values(step), state={}, score=None)
        saver.wait()
    saver.close()
    for step in (2, 3):
        manifest = Path(folder_of(str(tmp_path), step), "manifest.json")
        manifest.write_bytes(manifest.read_bytes()[:-10])
    assert steps(tmp_path) == [2, 3]
    saver = make_saver(retention=Retention(num_to_keep=1))
    assert saver.begin(2, values(20), state={}, score=None)  # over the damaged one; 3 is still to come again
    saver.wait()
    saver.close()
    assert steps(tmp_path) == [2, 3]
    assert newest_good(str(tmp_path), log=lambda *_: None) == saver.last
    saver = make_saver()
    for step in (4, 5):
        assert saver.begin(step, values(step), state={}, score=None)
        saver.wait()
    saver.close()
    assert steps(tmp_path) == [4, 5]
    assert same(restored(saver.last), values(5))


def test_the_same_step_again(make_saver: MakeSaver, tmp_path: Path) -> None:
    """By one process and by the next: there is a checkpoint all the time, and nothing of the older is left."""
    for _ in range(2):
        saver, gate = make_saver(), threading.Event()
        for factor in (2, 3):
            before = steps(tmp_path)
            gate.clear()
            with writes(gate.wait):
                assert saver.begin(1, values(factor), state={}, score=None)
                assert steps(tmp_path) == before
                if before:
                    assert same(restored(Checkpoint(folder_of(str(tmp_path), 1))), values(3 if factor == 2 else 2))
                gate.set()
                saver.wait()
            assert same(restored(saver.last), values(factor))
        saver.close()
        assert len(os.listdir(folder_of(str(tmp_path), 1))) == 2


def test_a_run_that_was_taken_over_commits_nothing_more(make_saver: MakeSaver, tmp_path: Path) -> None:
    zombie, gate = make_saver(), threading.Event()
    assert zombie.begin(1, values(1), state={}, score=None)
    zombie.wait()
    with writes(gate.wait):
        assert zombie.begin(2, values(2), state={}, score=None)
        heir = acquire_lease(str(tmp_path))
        gate.set()
        with pytest.raises(InputError, match=r"another process has taken over this run"):
            zombie.wait()
    assert steps(tmp_path) == [1]
    successor = make_saver(lease=heir)
    with writes(gate.wait):  # both at once, at the same step
        gate.clear()
        assert successor.begin(2, values(20), state={}, score=None)
        assert zombie.begin(2, values(2), state={}, score=None)
        gate.set()
        successor.wait()
        assert "taken over" in raised(zombie.wait)
    assert same(restored(successor.last), values(20))
    checkpoint.verify(Checkpoint(folder_of(str(tmp_path), 2)))
    zombie.close()
    successor.close()
    assert len(os.listdir(folder_of(str(tmp_path), 2))) == 2


def test_the_claim_is_looked_at_last_of_all(
    make_saver: MakeSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bytes = storage.write_bytes

    def write_and_lose(path: str, data: bytes) -> None:
        write_bytes(path, data)
        acquire_lease(str(tmp_path))

    monkeypatch.setattr(storage, "write_bytes", write_and_lose)
    saver = make_saver(extra_files={"config.yaml": b"a: 1"})
    assert saver.begin(1, values(1), state={}, score=None)
    with pytest.raises(InputError, match=r"another process has taken over"):
        saver.wait()
    assert steps(tmp_path) == []


def test_torn_saves_are_swept(make_saver: MakeSaver, tmp_path: Path) -> None:
    saver = make_saver()
    for step in (1, 3):
        assert saver.begin(step, values(), state={}, score=None)
        saver.wait()
    saver.close()
    for step in (2, 4):
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir()
        (tmp_path / "checkpoints" / f"step_{step:08d}" / "data_00000.safetensors").touch()
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    make_saver(sweep=False).close()
    lost = acquire_lease(str(tmp_path))
    acquire_lease(str(tmp_path))
    make_saver(lease=lost).close()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == names
    make_saver().close()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_00000001", "step_00000003"]


def test_what_cannot_be_saved_is_refused_at_once(make_saver: MakeSaver, tmp_path: Path) -> None:
    saver = make_saver()
    with pytest.raises(TypeError, match="rates is no tensor"):
        saver.begin(1, {"rates": [1.0]}, state={}, score=None)
    with pytest.raises(TypeError, match="which no checkpoint holds"):
        saver.begin(1, {"a": torch.zeros(1, dtype=torch.complex64)}, state={}, score=None)
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.begin(1, values(), state={"a": object()}, score=None)
    assert saver.begin(1, values(), state={}, score=None)
    saver.wait()
    assert steps(tmp_path) == [1]


def test_what_a_save_has_written_is_counted_while_it_is_under_way(make_saver: MakeSaver) -> None:
    saver, gate = make_saver(), threading.Event()
    block = checkpoint.writer.BLOCK_BYTES
    with writes(gate.wait):
        assert saver.begin(1, {"a": torch.zeros(3 * block, dtype=torch.uint8)}, state={}, score=None)
        deadline_s = time.monotonic() + 30
        while saver.written_bytes < 3 * block:  # all have been asked for when the gate holds the last one back
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert (saver.written_bytes, saver.write_s) == (3 * block, 0.0)
        gate.set()
        saver.wait()
    assert saver.written_bytes == 3 * block
    assert saver.write_s > 0


def test_nothing_to_save(make_saver: MakeSaver) -> None:
    saver = make_saver()
    assert saver.begin(1, {}, state={"a": 1}, score=None)
    saver.wait()
    assert saver.last is not None
    assert os.listdir(saver.last.path) == ["manifest.json"]
    assert saver.last.manifest()["state"] == {"a": 1}


def test_training_draws_the_same_numbers_with_and_without_saves(make_saver: MakeSaver, tmp_path: Path) -> None:
    torch.manual_seed(1)
    random.seed(1)
    expected = (torch.rand(3).tolist(), random.random())
    torch.manual_seed(1)
    random.seed(1)
    saver, causes = make_saver(), [OSError("once")]

    def fail_once() -> None:
        if causes:
            raise causes.pop()

    with writes(fail_once):
        assert saver.begin(1, values(), state={}, score=None)
        saver.wait()
    saver.close()
    assert (torch.rand(3).tolist(), random.random()) == expected


def test_closing(make_saver: MakeSaver, tmp_path: Path) -> None:
    make_saver().close()
    saver, gate = make_saver(), threading.Event()
    with writes(gate.wait):
        assert saver.begin(1, values(), state={}, score=None)
        threading.Timer(0.2, gate.set).start()
        saver.close()  # the save under way is brought to its end
    assert steps(tmp_path) == [1]
    saver.close()


def test_a_claim_is_a_plain_value(tmp_path: Path) -> None:
    assert acquire_lease(str(tmp_path)) == Lease(str(tmp_path), os.listdir(tmp_path / "claims")[0])


def test_what_a_start_passed_over_goes_first_and_stands_in_for_no_good_one(
    make_saver: MakeSaver, tmp_path: Path
) -> None:
    saver = make_saver(retention=Retention(num_to_keep=10, keep_best=0))
    for step in (1, 2, 3, 4):
        assert saver.begin(step, values(step), state={}, score=None)
        saver.wait()
    saver.close()
    saver = make_saver(retention=Retention(num_to_keep=2, keep_best=0, keep_every=2), damaged={2, 3, 4})
    assert saver.begin(3, values(3), state={}, score=None)  # written again
    saver.wait()
    saver.close()
    # 1 is kept, where 2 would have taken its place; 4 is yet to be written again.
    assert steps(tmp_path) == [1, 3, 4]
    saver = make_saver(retention=Retention(num_to_keep=2, keep_best=0), damaged={4})
    assert saver.begin(5, values(5), state={}, score=None)
    saver.wait()
    saver.close()
    assert steps(tmp_path) == [3, 5]


def test_what_cannot_be_read_just_now_is_not_removed(
    make_saver: MakeSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make_saver()
    assert saver.begin(1, values(), state={}, score=0.5)
    saver.wait()
    saver.close()
    read_bytes, place = storage.read_bytes, folder_of(str(tmp_path), 1)

    def fails(path: str) -> bytes:
        if path.startswith(place):
            raise OSError(errno.EIO, "Input/output error")
        return read_bytes(path)

    monkeypatch.setattr(storage, "read_json", fails)
    saver = make_saver(retention=Retention(num_to_keep=1, keep_best=0))
    assert saver.begin(2, values(), state={}, score=None)
    saver.wait()
    saver.close()
    assert steps(tmp_path) == [1, 2]


def test_files_are_hashed_where_they_come_from_and_once(
    make_saver: MakeSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[tuple[str, dict[str, Any]]]
) -> None:
    source = tmp_path / "words.txt"
    source.write_bytes(b"abc")
    streamed: list[str] = []
    read_stream, copy_file = storage.read_stream, storage.copy_file

    def read(path: str) -> Iterator[bytes]:
        streamed.append(path)
        return read_stream(path)

    def copy(path: str, target: str) -> None:
        copy_file(path, target)
        if target.startswith(folder_of(str(tmp_path), 2)):  # a bit of it turns
            Path(target).write_bytes(b"xyz")

    monkeypatch.setattr(storage, "read_stream", read)
    monkeypatch.setattr(storage, "copy_file", copy)
    monkeypatch.setattr(storage, "clone_file", lambda *_: False)
    saver = make_saver(
        retention=Retention(num_to_keep=9), extra_files={"more/words.txt": str(source), "config.yaml": b"a: 1"}
    )
    for step in (1, 2, 3):
        assert saver.begin(step, values(), state={}, score=None)
        saver.wait()
    saver.close()
    assert [path for path in streamed if "words" in path] == [str(source)]
    for step in (1, 3):
        checkpoint.verify(Checkpoint(folder_of(str(tmp_path), step)))
    with pytest.raises(DamagedError, match=r"words\.txt: damaged, its checksum does not fit"):
        checkpoint.verify(Checkpoint(folder_of(str(tmp_path), 2)))
    assert [kind for kind, _ in events] == ["checkpoint"] * 3


def inode(folder: Path, step: int, name: str = "words.txt") -> int:
    return Path(folder_of(str(folder), step), name).stat().st_ino


def test_later_checkpoints_share_the_files_of_the_first_but_not_the_source(
    make_saver: MakeSaver, tmp_path: Path
) -> None:
    source = tmp_path / "words.txt"
    source.write_bytes(b"abc")
    saver = make_saver(
        retention=Retention(num_to_keep=2), extra_files={"more/words.txt": str(source), "config.yaml": b"a: 1"}
    )
    for step in (1, 2, 3, 3, 4):  # a step may be saved twice
        assert saver.begin(step, values(step), state={}, score=None)
        saver.wait()
        source.write_bytes(b"xyz")  # what the user does with it is of no concern
    saver.close()
    assert steps(tmp_path) == [3, 4]  # removal of the first took nothing from the others
    assert inode(tmp_path, 3, "more/words.txt") == inode(tmp_path, 4, "more/words.txt") != source.stat().st_ino
    assert inode(tmp_path, 3, "config.yaml") != inode(tmp_path, 4, "config.yaml")
    assert not list(tmp_path.glob("checkpoints/**/*.partial"))
    for step in (3, 4):
        checkpoint.verify(Checkpoint(folder_of(str(tmp_path), step)))
        assert Path(folder_of(str(tmp_path), step), "more/words.txt").read_bytes() == b"abc"
    # A later attempt hashes the source again, and shares nothing with the earlier one.
    saver = make_saver(retention=Retention(num_to_keep=2), extra_files={"more/words.txt": str(source)})
    assert saver.begin(5, values(), state={}, score=None)
    saver.wait()
    assert inode(tmp_path, 5, "more/words.txt") != inode(tmp_path, 4, "more/words.txt")
    assert [Path(folder_of(str(tmp_path), step), "more/words.txt").read_bytes() for step in (4, 5)] == [b"abc", b"xyz"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS])
def test_without_hard_links_files_are_copied(
    make_saver: MakeSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source, refused = tmp_path / "words.txt", []

    def link(*paths: str) -> None:
        refused.append(paths)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    source.write_bytes(b"abc")
    saver = make_saver(extra_files={"words.txt": str(source)})
    for step in (1, 2):
        assert saver.begin(step, values(), state={}, score=None)
        saver.wait()
        checkpoint.verify(Checkpoint(folder_of(str(tmp_path), step)))
    assert len(refused) == 1
    assert inode(tmp_path, 1) != inode(tmp_path, 2)


@pytest.mark.parametrize("largest", [1 << 30, 2])
def test_a_store_copies_files_from_the_checkpoint_before_itself(
    make_saver: MakeSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    """But not files that are too long for it; these come from their source again."""
    store = SlowStore(latency_s=0).installed(monkeypatch)
    monkeypatch.setattr(storage.files, "same_store", lambda *urls: all(url.startswith("slow://") for url in urls))
    monkeypatch.setattr(storage.files, "_LARGEST_COPY_BYTES", largest)
    source = tmp_path / "words.txt"
    source.write_bytes(b"abc")
    saver = make_saver(folder=f"slow://{tmp_path}", extra_files={"words.txt": str(source)})
    for step in (1, 2, 3):
        store.reset()
        assert saver.begin(step, values(), state={}, score=None)
        saver.wait()
        assert store.calls["copy"] == (1 if step > 1 and largest > 2 else 0)
        checkpoint.verify(Checkpoint(folder_of(f"slow://{tmp_path}", step)))


def test_a_disk_that_fails_at_a_link_makes_the_save_late(
    make_saver: MakeSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[tuple[str, dict[str, Any]]]
) -> None:
    source, link, failing = tmp_path / "words.txt", os.link, [OSError(errno.EIO, "Input/output error")]

    def link_later(source: str, target: str) -> None:
        if failing:
            raise failing.pop()
        link(source, target)

    monkeypatch.setattr(os, "link", link_later)
    source.write_bytes(b"abc")
    saver = make_saver(extra_files={"words.txt": str(source)})
    for step in (1, 2):
        assert saver.begin(step, values(), state={}, score=None)
        saver.wait()
    assert [kind for kind, _ in events] == ["checkpoint", "checkpoint_late", "checkpoint"]
    assert inode(tmp_path, 1) == inode(tmp_path, 2)


@pytest.mark.parametrize("fault", ["cut short", "removed by hand", "removed by retention"])
def test_a_file_that_the_checkpoint_before_lacks_is_copied_from_its_source(
    make_saver: MakeSaver, tmp_path: Path, fault: str
) -> None:
    source = tmp_path / "words.txt"
    source.write_bytes(b"abc")
    saver = make_saver(extra_files={"words.txt": str(source)})
    assert saver.begin(1, values(), state={}, score=None)
    saver.wait()
    saved = Path(folder_of(str(tmp_path), 1))
    if fault == "cut short":
        os.truncate(saved / "words.txt", 2)
    elif fault == "removed by hand":
        (saved / "words.txt").unlink()
    else:
        storage.remove_folder(str(saved))
    assert saver.begin(2, values(), state={}, score=None)
    saver.wait()
    checkpoint.verify(Checkpoint(folder_of(str(tmp_path), 2)))


def test_a_save_at_a_step_that_is_saved_leaves_its_checkpoint_whole_until_the_manifest(
    make_saver: MakeSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a run was stopped before an evaluation, and resumes with another --checkpoint.every."""
    saver = make_saver(extra_files={"config.yaml": b"every: 5"})
    assert saver.begin(1, values(), state={}, score=None)
    saver.wait()
    saver.close()
    saved = Checkpoint(folder_of(str(tmp_path), 1))
    saver = make_saver(extra_files={"config.yaml": b"every: 7", "more.txt": b"x"})
    write_json = storage.write_json

    def check_and_write(path: str, value: Any) -> None:
        if path.endswith("manifest.json"):
            checkpoint.verify(saved)
        write_json(path, value)

    monkeypatch.setattr(storage, "write_json", check_and_write)
    assert saver.begin(1, values(), state={}, score=0.5)
    saver.wait()
    checkpoint.verify(saved)
    assert (saved.manifest()["score"], Path(saved.path, "config.yaml").read_bytes()) == (0.5, b"every: 5")
    Path(saved.path, "config.yaml").write_bytes(b"every: 6")  # damaged: it is of no use
    monkeypatch.setattr(storage, "write_json", write_json)
    assert saver.begin(1, values(), state={}, score=0.6)
    saver.wait()
    checkpoint.verify(saved)
    assert Path(saved.path, "config.yaml").read_bytes() == b"every: 7"


def test_a_copy_of_another_length_is_made_again(
    make_saver: MakeSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[tuple[str, dict[str, Any]]]
) -> None:
    source = tmp_path / "words.txt"
    source.write_bytes(b"abc")
    copy_file, lengths = storage.copy_file, [2, 3]

    def copy(path: str, target: str) -> None:
        copy_file(path, target)
        os.truncate(target, lengths.pop(0))

    monkeypatch.setattr(storage, "copy_file", copy)
    saver = make_saver(extra_files={"words.txt": str(source)})
    assert saver.begin(1, values(), state={}, score=None)
    saver.wait()
    assert [kind for kind, _ in events] == ["checkpoint_late", "checkpoint"]
    assert events[0][1]["cause"].endswith(
        "words.txt: damaged, has 2 bytes instead of 3 after it was written; storage_path must be storage that all workers share"
    )
    checkpoint.verify(Checkpoint(folder_of(str(tmp_path), 1)))
