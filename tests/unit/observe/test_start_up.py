"""The stages of a start are consecutive, and belong to the start that they are of."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from builders import run_events

from rayrec.observe.report import training
from rayrec.observe.timing import Stopwatch, in_order, process_age_s, starts


def test_stages_are_consecutive() -> None:
    watch = Stopwatch(last_s=100.0)
    watch.lap("imports", at_s=102.5)
    watch.lap("index", at_s=103.0)
    watch.lap("imports", at_s=104.0)
    watch.lap("clock of another machine", at_s=103.0)
    watch.lap("folder", at_s=103.5)
    assert watch.stages == {"imports": 3.5, "index": 0.5, "clock of another machine": 0.0, "folder": 0.5}


def test_a_lap_without_a_time_ends_now() -> None:
    watch = Stopwatch(time.time() - 2.0)
    watch.lap("a")
    watch.lap("b")
    assert 2.0 <= watch.stages["a"] < 60.0
    assert 0.0 <= watch.stages["b"] < 60.0


def test_the_age_of_a_process_counts_from_its_start(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    stat = tmp_path / "proc/self/stat"
    stat.write_text("7 (a (strange) name) S " + " ".join(["0"] * 18) + " 0 9 9")  # started with the machine
    assert process_age_s(tmp_path) == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=5.0)
    stat.write_text("7 (short) S")
    assert process_age_s(tmp_path) is None
    assert process_age_s(tmp_path / "nothing") is None
    age_s = process_age_s()
    assert age_s is not None
    assert Stopwatch.of_process().last_s == pytest.approx(time.time() - age_s, abs=1.0)


def test_each_attempt_and_each_command_has_a_start_of_its_own() -> None:
    def event(kind: str, **fields: object) -> dict[str, object]:
        return {"time": 0.0, "kind": kind, **fields}

    def start_up(**stages: float) -> dict[str, object]:
        return event("start_up", process="worker", stages=stages)

    first = [
        event("run"),
        start_up(imports=1.0),
        event("attempt", number=1),
        start_up(set_up=2.0),
        start_up(first_step=3.0),
    ]
    again = [event("failure"), event("attempt", number=2), event("attempt", number=3), start_up(set_up=4.0)]
    second = [event("run"), start_up(imports=5.0), event("attempt", number=1), start_up(restore=6.0, imports=0.5)]
    found = starts([*first, *again, *second])
    assert found == [
        {"imports": 1.0, "set_up": 2.0, "first_step": 3.0},
        {"set_up": 4.0},
        {"imports": 5.5, "restore": 6.0},
    ]
    assert in_order(found) == ["imports", "set_up", "restore", "first_step"]
    assert in_order([{"of a later version": 1.0, "first_step": 1.0}]) == ["first_step", "of a later version"]
    assert starts([event("run")]) == []


def test_the_report_shows_the_first_start_and_the_last_ones() -> None:
    page = _page(run_events.run())
    assert "<th>start 2" in page.replace(' scope="col"', "")
    for text in ("interpreter and imports", "restoring the checkpoint", "later_stage", "together", "16 s", "10 s"):
        assert text in page, text
    assert training.start_up([]) is None
    many = [{"time": 0.0, "kind": "run"}]
    for number in range(1, 10):
        many.append({"time": 0.0, "kind": "attempt", "number": number})
        many.append({"time": 0.0, "kind": "start_up", "process": "worker", "stages": {"set_up": float(number)}})
    shown = _page(many)
    assert [f"start {number}" in shown for number in range(1, 10)] == [True, *[False] * 4, *[True] * 4]


def _page(events: list[dict[str, object]]) -> str:
    section = training.start_up(events)
    assert section is not None
    return section.body
