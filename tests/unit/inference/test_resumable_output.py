"""Predictions on their way to Parquet: whatever way they come, and whenever their writer is killed, the same bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec import storage
from rayrec.config import InputError
from rayrec.inference import resumable_output as module
from rayrec.inference.resumable_output import COMPLETE, JOB, Parts, resumable_folder

ROWS = 2300
MADE_OF: dict[str, Any] = {"checkpoint": "a", "input": ["log", 3]}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_ROWS", 1000)
    monkeypatch.setattr(module, "GROUP_ROWS", 300)


def _table() -> pa.Table:
    logits = np.random.default_rng(0).normal(size=ROWS).astype(np.float32)
    labels = (logits > 0).astype(np.float32)
    text = [f"text {number % 7}" for number in range(ROWS)]
    return pa.table({"row": np.arange(ROWS), "logit": logits, "label": labels, "text": text})


def _pieces(size: int, start: int = 0) -> Iterator[pa.Table]:
    for begin in range(start, ROWS, size):
        yield _table().slice(begin, size)


def _bytes_of_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*.parquet"))}


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / "expected"
    folder.mkdir()
    with Parts(str(folder)) as parts:
        parts.write(_table())
        assert parts.finish() == [f"part-0000{number}.parquet" for number in range(3)]
    assert pq.read_table(folder).equals(_table())
    found = _bytes_of_files(folder)
    assert [pq.read_metadata(folder / name).num_rows for name in found] == [1000, 1000, 300]
    return found


@pytest.mark.parametrize("size", [1, 7, 300, 999, 1000, 1001, 2300])
def test_bytes_do_not_show_how_rows_came(tmp_path: Path, expected: dict[str, bytes], size: int) -> None:
    with Parts(str(tmp_path)) as parts:
        for piece in _pieces(size):
            parts.write(piece)
        assert parts.rows == ROWS
        parts.finish()
    assert _bytes_of_files(tmp_path) == expected


@pytest.mark.parametrize("killed_after", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("cut_bytes", [0, 1, 5, 400])
def test_going_on(tmp_path: Path, expected: dict[str, bytes], killed_after: int, cut_bytes: int) -> None:
    """Killed after so many tables of 400 rows, so many bytes of the last of which never came to the disk."""
    folder = tmp_path / "work"
    folder.mkdir()
    killed = Parts(str(folder))
    for number, piece in enumerate(_pieces(400)):
        if number < killed_after:
            killed.write(piece)
    journals = list(folder.glob("_journal-*"))
    assert len(journals) == 1
    size = journals[0].stat().st_size
    os.truncate(journals[0], max(0, size - cut_bytes))

    with Parts(str(folder)) as parts:
        written = min(killed_after * 400, ROWS)
        assert written - 400 <= parts.rows <= written
        assert (parts.rows == written) == (not cut_bytes or not size)
        for piece in _pieces(350, parts.rows):
            parts.write(piece)
        parts.finish()
    assert _bytes_of_files(folder) == expected
    killed.__exit__()


def test_a_damaged_entry_ends_the_journal(tmp_path: Path, expected: dict[str, bytes]) -> None:
    with Parts(str(tmp_path)) as parts:
        for piece in _pieces(100):
            if parts.rows < 500:
                parts.write(piece)
    journal = tmp_path / "_journal-00000"
    content = bytearray(journal.read_bytes())
    content[len(content) * 3 // 5] ^= 1  # of the fourth table
    journal.write_bytes(content)
    with Parts(str(tmp_path)) as parts:
        assert parts.rows == 300
        for piece in _pieces(100, 300):
            parts.write(piece)
        parts.finish()
    assert _bytes_of_files(tmp_path) == expected


def test_killed_between_file_and_journal(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module._Journal, "remove", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        killed = Parts(str(tmp_path))
        with pytest.raises(KeyboardInterrupt):
            killed.write(_table())
        killed.__exit__()
    assert {"_journal-00000", "part-00000.parquet"} < set(os.listdir(tmp_path))
    with Parts(str(tmp_path)) as parts:
        assert parts.rows == 1000
        parts.write(_table().slice(1000))
        parts.finish()
    assert _bytes_of_files(tmp_path) == expected


def test_killed_after_the_last_file(tmp_path: Path, expected: dict[str, bytes]) -> None:
    """Which holds fewer rows than the others."""
    with Parts(str(tmp_path)) as parts:
        parts.write(_table())
        names = parts.finish()
    with Parts(str(tmp_path)) as parts:
        assert parts.rows == ROWS
        assert parts.finish() == names
    assert _bytes_of_files(tmp_path) == expected


# -- the folder


def test_the_folder_appears_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with resumable_folder(str(out), MADE_OF) as work:
        assert work.folder == f"{out}.partial"
        Path(work.folder, "a").write_text("1")
        Path(work.folder, "journal").write_text("2")
        assert not out.exists()
        work.files = ["a"]
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("a", "1")]
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(InputError, match="exists already"), resumable_folder(str(out), MADE_OF):
        pass


def test_what_was_begun_stays_and_nothing_else(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt), resumable_folder(out, MADE_OF):
        raise KeyboardInterrupt
    assert not os.listdir(tmp_path)
    killed = resumable_folder(out, MADE_OF)
    Path(killed.__enter__().folder, "journal").write_text("2")
    assert not killed.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    with (
        pytest.raises(InputError, match="left by an unfinished call with another input; give the same"),
        resumable_folder(out, {**MADE_OF, "input": ["log", 4]}),
    ):
        raise AssertionError
    with resumable_folder(out, MADE_OF) as work:
        assert Path(work.folder, "journal").read_text() == "2"
        work.files = ["journal"]
    assert os.listdir(tmp_path) == ["out"]


def test_what_holds_nothing_is_begun_anew(tmp_path: Path) -> None:
    """As a process leaves it that was killed before its first table."""
    work = tmp_path / "out.partial"
    work.mkdir()
    (work / JOB).write_text("{}")
    (work / "_journal-00000").touch()
    with resumable_folder(str(tmp_path / "out"), MADE_OF):
        pass
    assert not os.listdir(tmp_path / "out")


def test_what_nobody_knows_the_origin_of_is_refused(tmp_path: Path) -> None:
    work = tmp_path / "out.partial"
    work.mkdir()
    (work / "part-00000.parquet").write_text("1")
    with pytest.raises(InputError, match=r"out\.partial: holds files, but no _job\.json"):
        resumable_folder(str(tmp_path / "out"), MADE_OF).__enter__()
    (work / "part-00000.parquet").rename(work / f"{JOB}.1234.partial")  # of a process killed while it wrote that
    with resumable_folder(str(tmp_path / "out"), MADE_OF):
        pass


@pytest.mark.parametrize("killed_at", ["rename", "remove"])
def test_killed_while_the_folder_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str) -> None:
    """The same call finds either everything that it needs to resume, or the folder."""
    out, killed = tmp_path / "out", resumable_folder(str(tmp_path / "out"), MADE_OF)
    work = killed.__enter__()
    Path(work.folder, "a").write_text("1")
    work.files = ["a"]
    with monkeypatch.context() as patch:
        patch.setattr(os, killed_at, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            killed.__exit__(None, None, None)
    if killed_at == "remove":
        assert (out / "a").read_text() == "1"
        return
    with resumable_folder(str(out), MADE_OF) as work:
        assert Path(work.folder, "a").read_text() == "1"
        work.files = ["a"]
    assert os.listdir(out) == ["a"]


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_killed_while_it_is_copied_to_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int) -> None:
    """After so many of two files; of both: killed before JOB is gone. The marker comes when all are there."""
    url, copy, done = f"file://{tmp_path}/out", storage.copy_file, []

    def copy_some(source: str, target: str) -> None:
        if len(done) == copies:
            raise KeyboardInterrupt
        done.append(copy(source, target))

    killed = resumable_folder(url, MADE_OF)
    work = killed.__enter__()
    work.files = ["a", "b"]
    for name in work.files:
        storage.write_bytes(storage.join(work.folder, name), name.encode())
    with monkeypatch.context() as patch:
        patch.setattr(storage, "copy_file", copy_some)
        if copies == 2:
            patch.setattr(storage, "remove_file", lambda path: copy_some(path, path))
        with pytest.raises(KeyboardInterrupt):
            killed.__exit__(None, None, None)
    assert (COMPLETE in storage.list_folder(url)) == (copies == 2)

    with resumable_folder(url, MADE_OF) as work:
        work.files = ["a", "b"]
    assert storage.list_folder(url) == [COMPLETE, "a", "b"]
    assert storage.read_json(storage.join(url, COMPLETE)) == {"files": ["a", "b"]}
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(InputError, match="exists already"):
        resumable_folder(url, MADE_OF).__enter__()


def test_killed_while_what_is_copied_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/out"
    killed = resumable_folder(url, MADE_OF)
    work = killed.__enter__()
    storage.write_bytes(storage.join(work.folder, "a"), b"1")
    work.files = ["a"]
    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove_folder", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            killed.__exit__(None, None, None)
    with pytest.raises(InputError, match="exists already"):
        resumable_folder(url, MADE_OF).__enter__()
    storage.remove_folder(url)
    with pytest.raises(InputError, match=r"out\.partial: holds files, but no _job\.json"):
        resumable_folder(url, {**MADE_OF, "checkpoint": "b"}).__enter__()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with (
        resumable_folder(out, MADE_OF),
        pytest.raises(InputError, match="another process is writing there"),
        resumable_folder(out, MADE_OF),
    ):
        raise AssertionError
