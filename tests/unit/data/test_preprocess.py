"""Preprocessing resumes where it stopped, with the same bytes, and says what stands in its way."""

import errno
import gzip
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders.click_models import hashed_preprocessor
from builders.engines import Died, LoopEngine
from builders.faults import at_first, fails_with, raising, rejects
from builders.logs import open_index
from builders.runs import files_in
from hypothesis import given
from hypothesis import strategies as st

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoding.encoder import MultiHot
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn
from rayrec.data.log_source import LogSource
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.splits import Split
from rayrec.data.materialized.dataset import open_preprocessed
from rayrec.data.materialized.dataset import read as read_preprocessed
from rayrec.data.materialized.formats import WRITABLE_FORMATS, combine
from rayrec.data.materialized.writer import preprocess
from rayrec.storage.cache import unpack

ROWS = 2_000


def make(multi_hot: MultiHot | None = None) -> Preprocessor:
    return hashed_preprocessor([2**28] * 26, dense=(DenseColumn(),) * 13, multi_hot=multi_hot)


@pytest.fixture
def log(click_log: Path, tmp_path: Path) -> Path:
    lines = (click_log / "train.txt").read_bytes().splitlines(keepends=True)[:ROWS]
    folder = tmp_path / "log"
    folder.mkdir()
    for day in range(2):
        (folder / f"day_{day}").write_bytes(b"".join(lines[day * 1000 : day * 1000 + 1000]))
    return folder


def run(log: Path | str, out: Path | str, **changes: Any) -> dict[str, Any]:
    index = open_index(log)
    sets = changes.pop("sets") if "sets" in changes else Split(kind="last_file").rows(index)
    arguments: dict[str, Any] = {"preprocessor": make(), "format": "binary", "engine": LoopEngine(), "segments_per_task": 2}
    return preprocess(index, out=str(out), sets=sets, **{**arguments, **changes})


@given(st.binary(), st.binary())
def test_combining_checksums(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("format", WRITABLE_FORMATS)
@pytest.mark.parametrize("shuffle", ["none", "full"])
def test_interrupted_job_resumes(log: Path, tmp_path: Path, format: str, shuffle: str) -> None:
    settings = {"format": format, "shuffle": shuffle, "seed": 4}
    if format == "parquet":
        settings["preprocessor"] = make(MultiHot(sizes=(2, 3, *(1,) * 24)))
    whole_engine = LoopEngine()
    whole = run(log, tmp_path / "whole", engine=whole_engine, **settings)
    expected = files_in(tmp_path / "whole")
    for tasks in range(0, whole_engine.tasks, 3):
        out = tmp_path / f"after-{tasks}"
        fails_with(Died, "", run, log, out, engine=LoopEngine(tasks), **settings)
        assert not out.exists()
        done, notes, engine = [], [], LoopEngine()
        again = run(log, out, engine=engine, progress=done.append, note=notes.append, **settings)
        assert (engine.tasks, done[-1], files_in(out)) == (whole_engine.tasks - tasks, ROWS, expected)
        assert (again["hash"], again["bytes"]) == (whole["hash"], whole["bytes"])
        assert [note for note in notes if note.startswith("Resuming ")] == notes[: tasks > 0]
        assert not Path(f"{out}.partial").exists()


def test_kill_after_last_task_resumes(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "write_bytes", at_first([Died()], storage.write_bytes, end="dataset.json"))
    fails_with(Died, "", run, log, tmp_path / "out", format="npy")
    engine = LoopEngine()
    run(log, tmp_path / "out", format="npy", engine=engine)
    assert engine.tasks == 0
    open_preprocessed(str(tmp_path / "out"), verify=True)


def test_repeated_task_writes_equal_bytes(log: Path, tmp_path: Path) -> None:
    class Twice(LoopEngine):
        def run(self, name: str, function: Any, items: Sequence[Any], *, block_bytes: int = 0) -> Iterator[pa.Table]:
            for item in [*items[::-1], *items]:
                function(item)
            yield from super().run(name, function, items)

    for format in WRITABLE_FORMATS:
        run(log, tmp_path / format, format=format)
        run(log, tmp_path / f"{format}-twice", format=format, engine=Twice())
        assert files_in(tmp_path / format) == files_in(tmp_path / f"{format}-twice")


def test_resume_rejects_other_inputs(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fails_with(Died, "", run, log, out, engine=LoopEngine(2))
    for changes, named in (
        ({"format": "npy"}, "format"),
        ({"sets": None}, "sets"),
        ({"segments_per_task": 3, "shuffle": "full"}, "shuffle, seed, segments_per_task"),
        ({"preprocessor": make(MultiHot(sizes=(1,) * 26))}, "preprocessor"),
    ):
        rejects(rf"incomplete output of a call with a different {named}; use the same .* remove", run, log, out, **changes)
    day = log / "day_1"
    day.write_bytes(day.read_bytes() + day.read_bytes())
    rejects("with a different sets, log;", run, log, out)
    shutil.rmtree(f"{out}.partial")
    run(log, out)
    assert open_preprocessed(str(out)).index.rows == 3000


def test_preprocess_rejects_invalid_logs(log: Path, tmp_path: Path) -> None:
    run(log, tmp_path / "out")
    made, arguments = open_preprocessed(str(tmp_path / "out")), {"preprocessor": make(), "out": str(tmp_path / "b")}
    for index, why in (
        (made.index, "preprocessed already, in format binary. Use the raw log"),
        (LogIndex((), Faults()), "no rows to write"),
    ):
        rejects(why, preprocess, index, format="npy", engine=LoopEngine(), **arguments)
    with pytest.raises(InputError, match=r"sets: rows 4-9 of b overlap other sets or exceed the log of 2000 rows"):
        run(log, tmp_path / "b", sets={"a": (0, 5), "b": (4, 9)})


def test_rows_outside_sets_are_stored(log: Path, tmp_path: Path) -> None:
    run(log, tmp_path / "out", format="parquet", sets={"train": (100, 1500), "test": (1600, 1999)})
    assert {path.name for path in (tmp_path / "out").glob("set=*")} == {"set=train", "set=test", "set=other"}
    assert open_preprocessed(str(tmp_path / "out")).sets == {"train": (100, 1500), "test": (1600, 1999)}


def test_preprocess_writes_to_urls(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """file:// stands for any URL: parquet goes straight below it, dataset.json last."""
    out = f"file://{tmp_path}/remote"
    for format in ("binary", "npy"):
        rejects(rf"remote: format {format} is written in place.*a folder and copy it", run, log, out, format=format)
    rejects("a full shuffle needs a file system", run, log, out, format="parquet", shuffle="full")
    fails_with(Died, "", run, log, out, format="parquet", engine=LoopEngine(3))
    assert not LogSource.at(out).is_preprocessed
    run(log, out, format="parquet")
    run(log, tmp_path / "local", format="parquet")
    assert files_in(tmp_path / "remote") == files_in(tmp_path / "local")
    assert len(read_preprocessed(open_preprocessed(out, verify=True).index.segments, np.arange(ROWS), make())) == ROWS


def test_small_disk_raises(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    rejects(r"out\.partial: about 0\.0 GB are needed and 0\.0 GB are free there\. Free space or", run, log, tmp_path / "out")
    assert not Path(f"{tmp_path / 'out'}.partial").exists()


def test_full_disk_resumes_and_partial_writes_continue(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", raising(OSError(errno.ENOSPC, "No space left on device")))
        rejects(r"out\.partial: No space left on device; make room there and run the same", run, log, tmp_path / "out")
    run(log, tmp_path / "out")
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, start: pwrite(descriptor, data[:1000], start))
    run(log, tmp_path / "pieces")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "pieces")


def test_invisible_folder_raises(log: Path, tmp_path: Path) -> None:
    class Elsewhere(LoopEngine):
        def run(self, name: str, function: Any, items: Sequence[Any], *, block_bytes: int = 0) -> Iterator[pa.Table]:
            (tmp_path / "out.partial").rename(tmp_path / "away")
            return super().run(name, function, items)

    with pytest.raises(InputError, match=r"out\.partial: not visible from a data task on .*; choose an --out that all"):
        run(log, tmp_path / "out", engine=Elsewhere())


def test_names_of_files(log: Path, tmp_path: Path) -> None:
    """A packed file's are those of the plain one; files of one name in two folders get numbers."""
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "train.txt.gz").write_bytes(gzip.compress((log / "day_0").read_bytes()))
    plain = unpack(storage.list_files(str(tmp_path / "packed"))[0], str(tmp_path / "cache"))
    shutil.copytree(log, tmp_path / "log2")
    for place, format, names in (
        (plain.path, "npy", ["train_dense.npy", "train_labels.npy", "train_sparse.npy"]),
        (f"{tmp_path}/log*/*", "binary", ["day_0-2.bin", "day_0.bin", "day_1-2.bin", "day_1.bin"]),
    ):
        run(place, tmp_path / format, format=format, sets=None)
        assert sorted(path.name for path in (tmp_path / format).glob("*.[nb]*")) == names


def test_manifest_contents(log: Path, tmp_path: Path) -> None:
    result = run(log, tmp_path / "out", format="npy", shuffle="full", seed=9)
    assert set(result) == {"rows", "out", "format", "hash", "bytes", "seconds", "rows_per_s"}
    manifest = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert (manifest["rows"], manifest["shuffle"], manifest["seed"]) == (ROWS, "full", 9)
    assert manifest["sets"] == {"train": [0, 1000], "validation": [1000, 1500], "test": [1500, 2000]}
    assert manifest["raw_files"] == ["day_0", "day_1"]
    assert manifest["source"] == [{"path": str(day), "bytes": day.stat().st_size} for day in sorted(log.iterdir())]
    for file in manifest["files"]:
        assert zlib.crc32((tmp_path / "out" / file["name"]).read_bytes()) == int(file["crc32"], 16)
