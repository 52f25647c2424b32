"""The benchmark of starts reads a run's events into stages that leave no gap, and emits a row for each command and end."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("start_benchmark")


def events() -> list[dict[str, Any]]:
    """Of a command that began at 100 s."""

    def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
        return {"kind": kind, "time": time, **fields}

    def step(time: float, number: int) -> dict[str, Any]:
        return event("step", time, step=number, steps=20, rows=10 * number, rows_per_s=50.0, blocked_fraction=0.0)

    return [
        event("run", 104.0),
        event("prepared", 105.0, seconds=1.0),
        event("start_up", 105.0, process="driver", stages={"imports": 4.0, "index": 1.0}),
        event("attempt", 105.5, number=1),
        event("start", 109.0, step=0, rows=0),
        event("start_up", 109.0, process="worker", stages={"attempt": 0.25, "set_up": 3.0, "process_group": 1.0}),
        event("start_up", 110.0, process="worker", stages={"first_batch": 0.25, "first_step": 0.75}),
        step(112.0, 10),
        step(114.0, 20),
        event("evaluate", 115.5, step=20, set="validation"),
        event("checkpoint", 116.0, step=20, stall_s=0.25),
        event("finish", 118.0, step=20),
        event("samples", 118.0, samples=[]),
        event("summary", 118.5),
    ]


def test_the_stages_add_up_to_the_whole_command(start: Any) -> None:
    stages = start.waterfall(events(), began_s=100.0, ended_s=121.0)
    assert list(stages)[:6] == ["imports", "index", "attempt", "process_group", "set_up", "first_batch"]
    assert sum(stages.values()) == pytest.approx(21.0)
    assert {name: stages[name] for name in ("attempt", "evaluation", "saves", "test", "summary", "shutdown")} == {
        "attempt": 0.25,
        "evaluation": 1.5,
        "saves": 0.25,
        "test": 2.0,
        "summary": 0.5,
        "shutdown": 2.5,
    }
    assert start.first_step_s(stages) == pytest.approx(10.25)


def test_a_save_that_ends_late_leaves_no_gap(start: Any) -> None:
    late = [{**event, "time": 118.25} if event["kind"] == "checkpoint" else event for event in events()]
    stages = start.waterfall(late, began_s=100.0, ended_s=121.0)
    assert stages["test"] == 0.0
    assert sum(stages.values()) == pytest.approx(21.0)


def found_by(start: Any, seconds: float, *, trainings: tuple[str, ...], with_lightgbm: bool = False) -> dict[str, Any]:
    training = {"imports": seconds, "shutdown": 1.0, "first_step_s": seconds, "exit_s": seconds + 1.0, "auroc": 0.7}
    found = {
        "bare Ray": {"first_step_s": 8.0},
        **dict.fromkeys((*trainings, *start.PLAIN.values()), training),
        start.SERVE: {"answer_s": seconds},
        "import torch": {"exit_s": 2.0},
        **{name: {"exit_s": seconds} for name in start.SCORINGS},
    }
    return {**found, "LightGBM": {"exit_s": 10.0, "auroc": 0.6}} if with_lightgbm else found


def report_of(start: Any, *, with_lightgbm: bool = False) -> Any:
    return start.Report(rows=1000, repeats=3, with_lightgbm=with_lightgbm)


def test_a_quick_run_leaves_trainings_out(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report_of(start).print(found_by(start, 3.0, trainings=start.QUICK))
    assert len(capsys.readouterr().out.splitlines()) == 4 * len(start.QUICK) + len(start.SCORINGS) + 1


@pytest.mark.parametrize("with_lightgbm", [True, False])
def test_rows(start: Any, capsys: pytest.CaptureFixture[str], with_lightgbm: bool) -> None:
    rounds = [
        found_by(start, seconds, trainings=tuple(start.TRAININGS), with_lightgbm=with_lightgbm)
        for seconds in (4.0, 40.0, 3.0)
    ]
    found = start.medians_of({name: [of_round[name] for of_round in rounds] for name in rounds[0]})
    report_of(start, with_lightgbm=with_lightgbm).print(found)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 4 * len(start.TRAININGS) + len(start.SCORINGS) + 1
    first, to_plain, whole, to_plain_whole = rows[:4]
    assert (to_plain["peer"], to_plain["ratio"]) == (start.PLAIN[1], 1.0)
    assert (to_plain_whole["peer_s"], to_plain_whole["peer_auroc"]) == (5.0, 0.7)
    assert (first["s"], first["ratio"], first["stages_s"]) == (4.0, 0.5, {"imports": 4.0, "shutdown": 1.0})
    assert (whole["s"], whole["ratio"]) == (5.0, 0.5 if with_lightgbm else None)
    assert ("peer_auroc" in whole) == with_lightgbm
    assert [(row["s"], row["ratio"]) for row in rows[-4:]] == [(4.0, 2.0)] * 4
    assert rows[-1]["workload"].endswith("serve: command -> first answer")


def test_row_prints_once_both_sides_are_known(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A peer that ended with signal 6 leaves all other rows."""
    found = found_by(start, 4.0, trainings=tuple(start.TRAININGS))
    found[start.PLAIN[2]] = importlib.import_module("rows").Failed("RuntimeError: ended with signal 6")
    report, known, counts = report_of(start), dict[str, Any](), []
    rows = []
    for name in found:
        known[name] = found[name]
        report.print(known)
        rows += (new := [json.loads(line) for line in capsys.readouterr().out.splitlines()])
        counts.append(len(new))
    assert counts[:5] == [0, 2, 2, 2, 2]  # against bare Ray, and without a peer
    assert len(rows) == 4 * len(start.TRAININGS) + len(start.SCORINGS) + 1
    failed = [row for row in rows if "error" in row]
    assert {row["peer"] for row in failed} == {start.PLAIN[2]}
    assert len(failed) == 2 * sum("2 workers" in name for name in start.TRAININGS)
    assert all(
        (row["ratio"], row["peer_s"], row["error"]) == (None, None, "RuntimeError: ended with signal 6")
        for row in failed
    )
    assert all(row["s"] for row in failed)
