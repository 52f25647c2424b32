"""Events of kind data: when there is one, and what it says."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from rayrec.data.stage_times import BlockTimes, StageAccount
from rayrec.training import step_log
from rayrec.training.step_log import DataReport, data_fields


def test_fields() -> None:
    sums = dict.fromkeys(StageAccount.FIELDS, 0.0)
    sums |= {"cpus": 2.0, "rows": 1000.0, "blocks": 4.0, "waited_row_s": 500.0, "waited_block_s": 2.0}
    sums |= {"read_wall_s": 2.0, "read_cpu_s": 0.5, "read_queue_s": 0.5, "parse_wall_s": 8.0, "parse_cpu_s": 8.0}
    fields = data_fields(sums, seconds=10.0)
    assert fields == {
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
    idle = data_fields({**dict.fromkeys(StageAccount.FIELDS, 0.0), "cpus": 1.0}, seconds=10.0)
    assert (idle["stages"], idle["capacity_rows_per_s"], idle["busy"]) == ([], None, 0.0)


def test_an_event_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    account = StageAccount(cpus=1.0)
    report = DataReport(SimpleNamespace(stages=account))

    def tell(step: int) -> None:
        report.tell(report.take(), step=step, log=lambda kind, fields: events.append({"kind": kind, **fields}))

    account.add(BlockTimes(10, {"read": 0.1}, {"read": 0.1}, {"read": 0.0}, time.time()))
    tell(1)
    assert events == []  # too soon, and not forgotten
    monkeypatch.setattr(step_log, "_LEAST_S", 0.0)
    tell(2)
    assert [(event["kind"], event["step"], event["rows"]) for event in events] == [("data", 2, 10)]
    tell(3)
    assert len(events) == 1  # nothing happened since
    monkeypatch.setattr(step_log, "_MOST_S", 0.0)
    tell(4)
    assert (events[1]["rows"], events[1]["stages"]) == (0, [])


def test_a_loader_without_stages_is_passed_over() -> None:
    report = DataReport(SimpleNamespace())
    assert report.take() == []
    report.tell([], step=1, log=lambda kind, fields: pytest.fail("told"))
