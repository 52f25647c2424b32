"""Curves and attempts of a run from made-up events: what was done again counts once, and each attempt has its end."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from builders import run_events

from rayrec.config import InputError
from rayrec.observe.events import EventWriter, metrics_dataframe
from rayrec.observe.history import attempts, logged, restarts, standing
from rayrec.observe.run_view import RunView


def test_steps_done_again_appear_once() -> None:
    rows = logged(run_events.run())
    assert [row["step"] for row in rows] == list(range(10, 201, 10))
    assert [row["loss"] for row in rows[:10]] == [9.0] * 10
    assert rows[10]["loss"] == math.exp(-1.1)  # step 110, as it was the second time
    assert [row["step"] for row in rows if "validation_loss" in row] == [50, 100, 150, 200]
    assert rows[4]["time_s"] == rows[3]["time_s"] + 2  # logged, then evaluated
    assert rows[0]["time_s"] == 4


def test_an_evaluation_that_was_still_due_joins_its_step() -> None:
    events = run_events.Events()
    run_events.begin(events)
    events.steps(10, 40)
    events.add("start", step=40, steps=200, world_size=2, checkpoint="x")
    events.add("evaluate", step=40, set="validation", loss=1.0)
    events.add("evaluate", step=40, set="test", loss=7.0)
    assert logged(events.all)[-1]["validation_loss"] == 1.0
    assert logged(events.all)[-1]["rows"] == 40 * 64
    assert logged([]) == []


def test_epochs_are_counted_in_training_rows() -> None:
    events = run_events.Events()
    events.add("prepared", seconds=1.0, rows_of_sets={"train": 6400, "validation": 640})
    events.add("start", step=0, steps=200, world_size=2, checkpoint=None)
    events.steps(100, 200)
    assert [row["epoch"] for row in logged(events.all)] == [row["rows"] / 6400 for row in logged(events.all)]


def test_dataframe(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:
        for event in run_events.run():
            writer.write(
                event["kind"], **{name: value for name, value in event.items() if name not in ("time", "kind")}
            )
    frame = metrics_dataframe(path)
    assert list(frame.columns) == [
        "step",
        "epoch",
        "rows",
        "loss",
        "rows_per_s",
        "blocked_fraction",
        "validation_loss",
        "validation_perplexity",
        "validation_rows",
        "time_s",
    ]
    assert frame["step"].tolist() == list(range(10, 201, 10))
    assert frame["epoch"].isna().all()  # this run does not tell how many training rows there are
    assert frame.set_index("step")["validation_perplexity"].dropna().to_dict() == dict.fromkeys(
        (50, 100, 150, 200), 2.0
    )
    assert frame["time_s"].is_monotonic_increasing
    with pytest.raises(InputError, match="no such event file"):
        metrics_dataframe(tmp_path / "other.jsonl")


def test_dataframe_of_a_run_that_logged_nothing(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events.jsonl") as writer:
        writer.write("run", recipe="x")
    frame = metrics_dataframe(tmp_path / "events.jsonl")
    assert len(frame) == 0
    assert "loss" in frame.columns


def test_dataframe_needs_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas"):
        metrics_dataframe(tmp_path / "events.jsonl")


def test_attempts_have_ends_and_costs() -> None:
    first, second = attempts(run_events.run())
    assert (first.num_workers, first.first_step, first.last_step) == (2, 0, 120)
    assert first.end == "worker 1 died of SIGKILL & <more>"
    assert first.restart is None
    assert (second.num_workers, second.first_step, second.last_step, second.end) == (1, 100, 200, "finished")
    assert second.restart is not None
    assert second.restart.steps_redone == 20
    assert second.restart.lost_s == 9.0  # failure, attempt, damaged, 5 s to the start, the first step
    assert second.begin_s - first.begin_s == 19.0


def test_a_finished_run_may_be_trained_for_longer() -> None:
    events = run_events.Events()
    events.all = run_events.run()
    events.add("run", recipe="x", name="y", config_hash="", versions={})
    events.add("attempt", number=1, num_workers=1)
    events.add("start", step=200, steps=300, world_size=1, checkpoint="x")
    events.steps(210, 250)
    *_, before, longer = attempts(events.all)
    assert (before.end, before.last_step) == ("finished", 200)
    assert (longer.first_step, longer.last_step, longer.end, longer.restart) == (200, 250, None, None)
    assert standing(events.all) == "not finished at step 250 of 200"
    view = RunView()
    for event in events.all:
        view.update(event)
    assert (view.restarts, view.finished) == (1, False)


def test_attempts_nobody_told_the_end_of() -> None:
    events = run_events.Events()
    run_events.begin(events)
    events.steps(10, 20)
    events.add("run", recipe="x", name="y", config_hash="", versions={})
    events.add("attempt", number=1, num_workers=2)
    events.add("failure", cause="no room")
    events.add("attempt", number=2, num_workers=2)
    events.add("start", step=0, steps=200, world_size=2, checkpoint=None)
    events.add("stop", step=10, cause="SIGTERM")
    found = attempts(events.all)
    assert [attempt.end for attempt in found] == ["the driver was lost", "no room", "stopped: SIGTERM"]
    assert [attempt.first_step for attempt in found] == [0, None, 0]
    assert [attempt.restart is not None for attempt in found] == [False, False, True]
    running = run_events.run(finished=False)
    assert attempts(running)[-1].end is None


def test_a_pause_is_no_restart() -> None:
    events = run_events.Events()
    run_events.begin(events)
    events.steps(10, 20)
    events.add("stop", step=20, cause="a planned pause", last=True, paused=True)
    events.add("run", recipe="x", name="y", config_hash="", versions={})
    events.add("attempt", number=1, num_workers=2)
    events.add("start", step=20, steps=200, world_size=2, checkpoint=None)
    events.steps(30, 40)
    assert restarts(events.all) == []
    assert [(attempt.first_step, attempt.end, attempt.restart) for attempt in attempts(events.all)] == [
        (0, "stopped: a planned pause", None),
        (20, None, None),
    ]


def test_an_error_of_a_driver_is_not_that_of_the_attempt_before() -> None:
    events = run_events.Events()
    run_events.begin(events)
    events.steps(10, 20)
    events.add("stop", step=20, cause="SIGTERM", last=True)
    events.add("run", recipe="x", name="y", config_hash="", versions={})
    events.add("failure", cause="no such log", last=True)
    assert [attempt.end for attempt in attempts(events.all)] == ["stopped: SIGTERM"]
    assert standing(events.all) == "failed (no such log) at step 20 of 200"


def test_standing() -> None:
    events = run_events.Events()
    run_events.begin(events)
    assert standing(events.all) == "not finished before its first step"
    events.steps(10, 20)
    assert standing(events.all) == "not finished at step 20 of 200"
    events.add("failure", cause="a worker died")
    assert standing(events.all) == "failed (a worker died) at step 20 of 200"
    events.add("stop", step=20, cause="SIGTERM")
    assert standing(events.all) == "stopped (SIGTERM) at step 20 of 200"
    assert standing(run_events.run()) == "finished"
