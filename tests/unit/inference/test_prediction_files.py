"""Parquet files of predictions, with equal bytes for all table sizes and after kills."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.faults import fails_with, flip, raising

from rayrec.data.job import JobFolder
from rayrec.inference import prediction_files as module
from rayrec.inference.prediction_files import Parts

ROWS = 2300


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_ROWS", 1000)
    monkeypatch.setattr(module, "GROUP_ROWS", 300)


def _table() -> pa.Table:
    logits, text = np.random.default_rng(0).normal(size=ROWS).astype(np.float32), [f"text {n % 7}" for n in range(ROWS)]
    return pa.table({"row": np.arange(ROWS), "logit": logits, "label": (logits > 0).astype(np.float32), "text": text})


def _pieces(size: int, start: int = 0) -> Iterator[pa.Table]:
    for begin in range(start, ROWS, size):
        yield _table().slice(begin, size)


def _complete(folder: Path, size: int = ROWS, *, start: int = 0) -> dict[str, bytes]:
    """Write the rows from `start` in tables of `size`. Returns the files."""
    with Parts(JobFolder(str(folder))) as parts:
        assert parts.rows == start
        for chunk in _pieces(size, start):
            parts.write(chunk)
        assert parts.rows == ROWS
        parts.finish()
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*.parquet"))}


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / "expected"
    folder.mkdir()
    result = _complete(folder)
    assert pq.read_table(folder).equals(_table())
    assert list(result) == [f"part-0000{number}.parquet" for number in range(3)]
    assert [pq.read_metadata(folder / name).num_rows for name in result] == [1000, 1000, 300]
    return result


@pytest.mark.parametrize("size", [1, 7, 300, 999, 1000, 1001, 2300])
def test_bytes_are_independent_of_table_sizes(tmp_path: Path, expected: dict[str, bytes], size: int) -> None:
    assert _complete(tmp_path, size) == expected


@pytest.mark.parametrize("killed_after", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("cut_bytes", [0, 1, 5, 400])
def test_interrupted_writer_resumes(tmp_path: Path, expected: dict[str, bytes], killed_after: int, cut_bytes: int) -> None:
    """Killed after some tables of 400 rows, with bytes of the last one missing on disk."""
    folder = tmp_path / "work"
    folder.mkdir()
    killed = Parts(JobFolder(str(folder)))
    for chunk in itertools.islice(_pieces(400), killed_after):
        killed.write(chunk)
    (journal,) = folder.glob("_job/journal-*")
    size = journal.stat().st_size
    os.truncate(journal, max(0, size - cut_bytes))
    with Parts(JobFolder(str(folder))) as parts:
        written = min(killed_after * 400, ROWS)
        assert written - 400 <= parts.rows <= written
        assert (parts.rows == written) == (not cut_bytes or not size)
    assert _complete(folder, 350, start=parts.rows) == expected
    killed.__exit__()


def test_damaged_entry_ends_journal(tmp_path: Path, expected: dict[str, bytes]) -> None:
    with Parts(JobFolder(str(tmp_path))) as parts:
        for chunk in itertools.islice(_pieces(100), 5):
            parts.write(chunk)
    journal = tmp_path / "_job" / "journal-00000"
    flip(journal, journal.stat().st_size * 3 // 5)  # in the fourth table
    assert _complete(tmp_path, 100, start=300) == expected


def test_resumes_after_kill_between_file_and_journal(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module._Journal, "remove", raising(KeyboardInterrupt()))
        killed = Parts(JobFolder(str(tmp_path)))
        fails_with(KeyboardInterrupt, "", killed.write, _table())
        killed.__exit__()
    assert (tmp_path / "_job" / "journal-00000").exists()
    assert (tmp_path / "part-00000.parquet").exists()
    assert _complete(tmp_path, start=1000) == expected


def test_resumes_after_kill_behind_last_file(tmp_path: Path, expected: dict[str, bytes]) -> None:
    """The last file has fewer rows than the others."""
    _complete(tmp_path)
    assert _complete(tmp_path, start=ROWS) == expected
