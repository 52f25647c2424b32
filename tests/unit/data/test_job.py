"""Resumable jobs: the folder is complete or absent, resumed after a kill, and never written by two processes."""

import errno
import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from builders.engines import Died, LoopEngine
from builders.faults import at_first, fails_with, raising, rejects

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.job import COMPLETE, JobFolder, resumable_job

MADE_OF: dict[str, Any] = {"checkpoint": "a", "input": ["log", 3]}
ITEMS = [SimpleNamespace(number=number) for number in range(5)]


def _write(item: SimpleNamespace, *, folder: JobFolder) -> pa.Table:
    folder.require()
    storage.write_bytes(storage.join(folder.path, f"file-{item.number}"), b"%d" % item.number)
    return folder.done("write", item.number, {"square": item.number**2})


def _make(out: str, *, last_file: str | None, engine: LoopEngine | None = None) -> None:
    with resumable_job(out, MADE_OF, last_file=last_file) as job:
        list(job.run("write", functools.partial(_write, folder=job.folder), ITEMS, engine or LoopEngine()))
        if last_file is not None:
            storage.write_bytes(storage.join(job.folder.path, last_file), b"whole")


def _begun(out: str, *, last_file: str | None = None, names: tuple[str, ...] = ("a",)) -> Any:
    """Enter a context in which one task is finished."""
    context = resumable_job(out, MADE_OF, last_file=last_file)
    job = context.__enter__()
    for name in names:
        storage.write_bytes(storage.join(job.folder.path, name), name.encode())
    job.folder.done("write", 0, {})
    return context


@pytest.mark.parametrize("place", ["", "file://"])
@pytest.mark.parametrize("last_file", ["last", None])
@pytest.mark.parametrize("tasks", range(5))
def test_job_resumes_after_kill(tmp_path: Path, place: str, last_file: str | None, tasks: int) -> None:
    out, engine, progress = f"{place}{tmp_path}/out", LoopEngine(), []
    fails_with(Died, "", _make, out, last_file=last_file, engine=LoopEngine(tasks))
    assert storage.exists(out) == (place == "file://" and last_file is not None and tasks > 0)
    with resumable_job(out, MADE_OF, last_file=last_file) as job:
        assert job.resumed == (tasks > 0)
        assert list(job.finished("write", ITEMS)) == list(range(tasks))
        task = functools.partial(_write, folder=job.folder)
        found = list(job.run("write", task, ITEMS, engine, lambda done, items: progress.append((done, items))))
    assert engine.tasks == 5 - tasks
    assert [each["square"] for each in found] == [0, 1, 4, 9, 16]
    assert progress == [(done, 5) for done in range(1, 6)]
    complete = [COMPLETE] if place and last_file is None else []
    assert storage.list_folder(out) == [*complete, *(f"file-{number}" for number in range(5))]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("place", ["", "file://"])
@pytest.mark.parametrize("last_file", ["last", None])
def test_job_rejects_complete_folder(tmp_path: Path, place: str, last_file: str | None) -> None:
    _make(f"{place}{tmp_path}/out", last_file=last_file)
    rejects(r"out: exists already; remove it or choose another place", _make, f"{place}{tmp_path}/out", last_file=last_file)


def test_files_of_killed_tasks_are_removed(tmp_path: Path) -> None:
    with resumable_job(str(tmp_path / "out"), MADE_OF, last_file="last") as job:
        inside = Path(job.folder.path, "train")
        inside.mkdir()
        (inside / f"shard.{'0f' * 16}.partial").write_text("of a killed task")
        (inside / "shard").write_text("whole")
    assert os.listdir(tmp_path / "out" / "train") == ["shard"]


def test_partial_folder_is_kept_after_first_task(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    failed = resumable_job(out, MADE_OF, last_file=None)
    Path(failed.__enter__().folder.path, "prepared").write_text("1")
    assert not failed.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not os.listdir(tmp_path)
    assert not _begun(out).__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    other = resumable_job(out, {**MADE_OF, "input": ["log", 4]}, last_file=None)
    rejects(r"incomplete output of a call with a different input; use the same .* remove that", other.__enter__)
    with resumable_job(out, MADE_OF, last_file=None) as job:
        assert Path(job.folder.path, "a").read_text() == "a"
    assert (os.listdir(tmp_path), os.listdir(out)) == (["out"], ["a"])


@pytest.mark.parametrize("place", ["", "file://"])
def test_job_without_finished_tasks_restarts(tmp_path: Path, place: str) -> None:
    """The state after a kill before the first task is finished."""
    work = tmp_path / ("out" if place else "out.partial")
    (work / "_job" / "keys").mkdir(parents=True)
    (work / "half").mkdir()
    (work / "a").write_text("1")
    (work / "_job" / "made_of.json").write_text('{"input": "another"}')
    with resumable_job(f"{place}{tmp_path}/out", MADE_OF, last_file="last") as job:
        assert not job.resumed
        assert storage.read_json(job.folder.aid("made_of.json")) == MADE_OF
    assert not os.listdir(tmp_path / "out")


@pytest.mark.parametrize("place", ["", "file://"])
def test_job_rejects_foreign_folder(tmp_path: Path, place: str) -> None:
    work = tmp_path / ("out" if place else "out.partial")
    work.mkdir()
    (work / "a").write_text("1")
    with pytest.raises(InputError, match=r"out(\.partial)?: has files, but no _job/made_of\.json"):
        resumable_job(f"{place}{tmp_path}/out", MADE_OF, last_file="last").__enter__()
    assert (work / "a").read_text() == "1"


@pytest.mark.parametrize("killed_at", ["rename", "remove"])
def test_kill_while_folder_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str) -> None:
    """The same call finds either all that it needs to resume, or the folder."""
    out, killed = tmp_path / "out", _begun(str(tmp_path / "out"))
    with monkeypatch.context() as patch:
        patch.setattr(*{"rename": (os, "rename"), "remove": (storage, "remove_folder")}[killed_at], raising(KeyboardInterrupt()))
        fails_with(KeyboardInterrupt, "", killed.__exit__, None, None, None)
    if killed_at == "remove":
        assert (out / "a").read_text() == "a"
        return
    with resumable_job(str(out), MADE_OF, last_file=None) as job:
        assert job.resumed
    assert os.listdir(out) == ["a"]


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_job_resumes_copy_to_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int) -> None:
    """Killed after some of two files, or after both, before the job's inputs are removed."""
    url, copy, done = f"file://{tmp_path}/out", storage.copy_file, []

    def copy_some(source: str, target: str) -> None:
        if len(done) == copies:
            raise KeyboardInterrupt
        done.append(copy(source, target))

    killed = _begun(url, names=("a", "b"))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "copy_file", copy_some)
        if copies == 2:
            patch.setattr(storage, "remove_file", lambda path: copy_some(path, path))
        fails_with(KeyboardInterrupt, "", killed.__exit__, None, None, None)
    assert (COMPLETE in storage.list_folder(url)) == (copies == 2)

    with resumable_job(url, MADE_OF, last_file=None) as job:
        assert job.resumed
    assert storage.list_folder(url) == [COMPLETE, "a", "b"]
    assert storage.read_json(storage.join(url, COMPLETE)) == {"files": ["a", "b"]}
    assert os.listdir(tmp_path) == ["out"]


def test_job_resumes_removal_after_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/out"
    killed = _begun(url)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove_folder", raising(KeyboardInterrupt()))
        fails_with(KeyboardInterrupt, "", killed.__exit__, None, None, None)
    rejects("exists already", resumable_job(url, MADE_OF, last_file=None).__enter__)
    storage.remove_folder(url)
    rejects(r"out\.partial: has files, but no _job/made_of\.json", resumable_job(url, MADE_OF, last_file=None).__enter__)


def test_job_rejects_second_writer(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with resumable_job(out, MADE_OF, last_file=None):
        rejects("another process is writing there", resumable_job(out, MADE_OF, last_file=None).__enter__)


def test_job_errors_name_fix_and_are_raised_while_tasks_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = JobFolder(str(tmp_path / "gone"))
    rejects(r"gone: not visible from a data task on .*choose an --out that all nodes share", folder.require)
    with pytest.raises(InputError, match=r"gone: No space left .*make room there and run the same command"), folder.disk_errors():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), folder.disk_errors():
        raise PermissionError(errno.EPERM, "no")
    monkeypatch.setattr(storage, "remove_folder", at_first([OSError(errno.ENOTEMPTY, "not empty")] * 2, storage.remove_folder))
    with pytest.raises(InputError, match=r"^bad rows$"), resumable_job(str(tmp_path / "out"), MADE_OF, last_file="last"):
        raise InputError("bad rows")
    assert os.listdir(tmp_path) == []
