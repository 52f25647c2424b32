"""Where a worker logs: who says what, how much, and what becomes of it where there is no room."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayrec.training import worker_logs
from rayrec.training.worker_logs import quiet_logs


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level


def test_a_log_names_its_rank(tmp_path: Path, root_logger: logging.Logger) -> None:
    path = tmp_path / "logs" / "worker_3.log"
    quiet_logs(str(path), rank=3)
    logging.getLogger("torchrec.plan").warning("tables are large")
    assert "[rank 3] WARNING torchrec.plan: tables are large" in path.read_text()


def test_a_log_does_not_grow_without_end(
    tmp_path: Path, root_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_logs, "_MOST_BYTES", 2000)
    quiet_logs(str(tmp_path / "worker_0.log"), rank=0)
    for number in range(200):
        logging.getLogger("x").info("line %d", number)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"worker_0.log", "worker_0.log.1"}
    assert max(sizes.values()) <= 2000
    assert "line 199" in (tmp_path / "worker_0.log").read_text()


def test_a_worker_starts_where_its_log_cannot_be_written(
    tmp_path: Path, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    quiet_logs(str(tmp_path / "logs" / "worker_1.log"), rank=1)
    logging.getLogger("x").info("goes on")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "[rank 1]" in lines[0]
    assert "logs go to standard error instead" in lines[0]
    assert lines[1].endswith("[rank 1] INFO x: goes on")
