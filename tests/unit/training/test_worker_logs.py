"""Logs of a worker: what the file contains, how large it becomes, and what the process logs afterwards."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path

import pytest

from rayrec.training import worker_logs as module
from rayrec.training.worker_logs import worker_logs


def test_a_log_names_its_rank(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker_3.log"
    with worker_logs(str(path), rank=3):
        logging.getLogger("torchrec.plan").warning("tables are large")
        warnings.warn("an odd argument", RuntimeWarning, stacklevel=1)
    text = path.read_text()
    assert "[rank 3] WARNING torchrec.plan: tables are large" in text
    assert "[rank 3] WARNING py.warnings: " in text
    assert "RuntimeWarning: an odd argument" in text


def test_a_log_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 2000)
    with worker_logs(str(tmp_path / "worker_0.log"), rank=0):
        for number in range(200):
            logging.getLogger("x").info("line %d", number)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"worker_0.log", "worker_0.log.1"}
    assert max(sizes.values()) <= 2000
    assert "line 199" in (tmp_path / "worker_0.log").read_text()


def test_a_worker_starts_if_its_log_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    with worker_logs(str(tmp_path / "logs" / "worker_1.log"), rank=1):
        logging.getLogger("x").info("continues")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "[rank 1]" in lines[0]
    assert "logs go to standard error instead" in lines[0]
    assert lines[1].endswith("[rank 1] INFO x: continues")


def test_the_logging_of_the_caller_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in the caller's process: handlers of the caller get what they got before, within and afterwards."""
    root, library = logging.getLogger(), logging.getLogger("torchrec")
    callers, librarys = logging.StreamHandler(io.StringIO()), logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(root, "handlers", [callers])
    monkeypatch.setattr(root, "level", logging.WARNING)
    monkeypatch.setattr(library, "handlers", [librarys])
    monkeypatch.setattr(library, "propagate", False)
    logging.captureWarnings(capture=True)  # by the caller, who ends it
    shown = warnings.showwarning
    path = tmp_path / "worker_0.log"
    for error in (None, ValueError("no")):
        with contextlib.suppress(ValueError), worker_logs(str(path), rank=0):
            logging.getLogger("x").info("a detail")
            logging.getLogger("x").warning("within")
            library.warning("a plan")
            if error is not None:
                raise error
        assert (root.handlers, root.level, callers.level) == ([callers], logging.WARNING, logging.NOTSET)
        assert (library.handlers, library.propagate) == ([librarys], False)
        assert warnings.showwarning is shown
    logging.captureWarnings(capture=False)
    assert warnings.showwarning is not shown
    logging.getLogger("x").warning("after")
    library.warning("another")
    assert callers.stream.getvalue().splitlines() == ["within", "a plan"] * 2 + ["after"]
    assert librarys.stream.getvalue().splitlines() == ["another"]
    lines = path.read_text().splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["a detail", "within", "a plan"] * 2
