"""Log files of workers, and data events."""

import contextlib
import io
import logging
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayrec.data.stage_times import BlockTimes, StageTimes
from rayrec.training import step_log
from rayrec.training.launchers import base
from rayrec.training.launchers.base import worker_logs
from rayrec.training.step_log import DataStats, data_fields


def test_worker_log_contains_rank_and_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "logs" / "worker_3.log"
    with worker_logs(str(path), rank=3):
        logging.getLogger("torchrec.plan").warning("tables are large")
        warnings.warn("an odd argument", RuntimeWarning, stacklevel=1)
    words = "[rank 3] WARNING torchrec.plan: tables are large|[rank 3] WARNING py.warnings: |RuntimeWarning: an odd argument"
    assert [text for text in words.split("|") if text not in path.read_text()] == []
    monkeypatch.setattr(base, "_MAX_BYTES", 2000)
    with worker_logs(str(tmp_path / "limited" / "worker_0.log"), rank=0):
        for number in range(200):
            logging.getLogger("x").info("line %d", number)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "limited").iterdir()}
    assert set(sizes) == {"worker_0.log", "worker_0.log.1"}
    assert max(sizes.values()) <= 2000
    assert "line 199" in (tmp_path / "limited" / "worker_0.log").read_text()


def test_worker_starts_without_writable_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    with worker_logs(str(tmp_path / "logs" / "worker_1.log"), rank=1):
        logging.getLogger("x").info("continues")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "[rank 1]" in lines[0]
    assert "logging to standard error instead" in lines[0]
    assert lines[1].endswith("[rank 1] INFO x: continues")


def test_worker_logs_restores_caller_logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in the caller's process: its handlers receive their usual records during and after the context."""
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


# Events of kind data: when there is one, and what it says -------------------------------------------------------------
def test_data_fields_return_shares_of_stages() -> None:
    sums = dict.fromkeys(StageTimes.FIELDS, 0.0)
    sums |= {"cpus": 2.0, "rows": 1000.0, "blocks": 4.0, "waited_row_s": 500.0, "waited_block_s": 2.0}
    sums |= {"read_wall_s": 2.0, "read_cpu_s": 0.5, "read_queue_s": 0.5, "parse_wall_s": 8.0, "parse_cpu_s": 8.0}
    assert data_fields(sums, seconds=10.0) == {
        "seconds": 10.0,
        "rows": 1000,
        "rows_per_s": 100.0,
        "cpus": 2.0,
        "busy": 0.5,
        "capacity_rows_per_s": 200.0,
        "backlog_rows": 50.0,
        "backlog_blocks": 0.2,
        "stages": [
            {"stage": "read", "rows_per_s": 1000.0, "busy": 0.1, "cpu_share": 0.25, "queue_share": 0.25},
            {"stage": "parse", "rows_per_s": 250.0, "busy": 0.4, "cpu_share": 1.0, "queue_share": 0.0},
        ],
    }
    idle = data_fields({**dict.fromkeys(StageTimes.FIELDS, 0.0), "cpus": 1.0}, seconds=10.0)
    assert (idle["stages"], idle["capacity_rows_per_s"], idle["busy"]) == ([], None, 0.0)


def test_data_events_are_throttled_and_need_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    account = StageTimes(cpus=1.0)
    report = DataStats(SimpleNamespace(stages=account))

    def tell(step: int) -> None:
        report.log_means(report.take(), step=step, log=lambda kind, fields: events.append({"kind": kind, **fields}))

    for _ in range(2):
        account.add(BlockTimes(5, {"read": 0.1}, {"read": 0.1}, {"read": 0.0}, time.time(), "node-1"))
        tell(1)
    assert events == [{"kind": "data_nodes", "step": 1, "nodes": ["node-1"]}]  # for the rest too soon, and not forgotten
    events.clear()
    monkeypatch.setattr(step_log, "_MIN_EVENT_S", 0.0)
    tell(2)
    assert [(event["kind"], event["step"], event["rows"]) for event in events] == [("data", 2, 10)]
    tell(3)
    assert len(events) == 1  # nothing happened since
    monkeypatch.setattr(step_log, "_MAX_EVENT_S", 0.0)
    tell(4)
    assert (events[1]["rows"], events[1]["stages"]) == (0, [])
    report = DataStats(SimpleNamespace())
    assert report.take() == []
    report.log_means([], step=1, log=lambda kind, fields: pytest.fail("told"))
