"""What the events of a run add up to: restarts, attempts, curves, time, starts and cost; what was done again counts once."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import run_events

from rayrec.config import InputError
from rayrec.observe.attempts import Restart
from rayrec.observe.events import EventWriter, metrics_dataframe
from rayrec.observe.run_summary import RunSummary
from rayrec.observe.timing import Interval, in_order

DEFAULTS: dict[str, dict[str, Any]] = {
    "attempt": {"number": 1, "num_workers": 1},
    "start": {"steps": 40, "world_size": 1},
    "step": {"steps": 40, "rows": 0, "rows_per_s": None, "loss": None, "blocked_fraction": None},
    "checkpoint": {"bytes": 0, "stall_s": 0.0, "write_s": 0.0},
    "stop": {"step": 0},
    "finish": {"step": 40},
}


def summary(*described: tuple[float, str, dict[str, Any]]) -> RunSummary:
    return RunSummary(
        {**DEFAULTS.get(kind, {}), "time": time, "kind": kind, **fields} for time, kind, fields in described
    )


BEGIN = ((0, "run", {}), (1, "attempt", {}), (3, "start", {"step": 0}), (5, "step", {"step": 20}))
END = ((30, "finish", {}),)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ((), []),
        (
            (
                (6, "failure", {"cause": "worker 1 died"}),
                (10, "start", {"step": 8}),
                (11, "step", {"step": 20}),
                (13, "step", {"step": 40}),
            ),
            [Restart("worker 1 died", 6, 12)],
        ),
        (
            ((60, "run", {}), (64, "start", {"step": 16}), (65, "step", {"step": 20})),
            [Restart("the driver was lost", 60, 4)],
        ),
        (
            (
                (6, "stop", {"cause": "SIGTERM", "step": 24}),
                (60, "run", {}),
                (64, "start", {"step": 24}),
                (65, "step", {"step": 40}),
            ),
            [Restart("stopped: SIGTERM", 59, 0)],
        ),
        (  # the next driver cannot even prepare, the third goes on
            (
                (6, "failure", {"cause": "the loss is nan", "last": True}),
                (60, "run", {}),
                (61, "failure", {"cause": "no such log", "last": True}),
                (62, "run", {}),
                (64, "start", {"step": 16}),
                (65, "step", {"step": 20}),
            ),
            [Restart("the loss is nan", 60, 4)],
        ),
        (  # fails again before it trains
            (
                (6, "failure", {"cause": "first"}),
                (8, "start", {"step": 8}),
                (9, "failure", {"cause": "second"}),
                (12, "start", {"step": 8}),
                (14, "step", {"step": 20}),
            ),
            [Restart("first", 7, 12), Restart("second", 6, 0)],
        ),
        (  # only the end was left to do
            ((6, "failure", {"cause": "late"}), (9, "start", {"step": 20}), (10, "finish", {})),
            [Restart("late", 5, 0)],
        ),
    ],
)
def test_restarts(between: tuple[Any, ...], expected: list[Restart]) -> None:
    assert summary(*BEGIN, *between, *END).restarts == expected


def test_a_finished_run_that_is_trained_for_longer_was_not_restarted() -> None:
    longer = ((90, "run", {}), (95, "start", {"step": 40}), (97, "step", {"step": 60}))
    whole = (*BEGIN, *END, (31, "summary", {}), *longer)
    assert summary(*whole).restarts == []
    died = ((98, "failure", {"cause": "x"}), (99, "start", {"step": 40}), (100, "step", {"step": 60}))
    assert summary(*whole, *died).restarts == [Restart("x", 3, 20)]
    # Nobody wrote its summary: that driver was lost.
    assert [each.cause for each in summary(*BEGIN, *END, *longer).restarts] == ["the driver was lost"]


def test_a_restart_lasts_until_something_is_trained() -> None:
    again = (*BEGIN, (6, "failure", {"cause": "x"}), (9, "start", {"step": 20}))
    assert summary(*again).restarts == [Restart("x", 4, 0)]
    paused = (12, "stop", {"step": 20, "cause": "a planned pause", "paused": True})
    later = ((60, "run", {}), (62, "start", {"step": 20}), (65, "step", {"step": 40}))
    assert summary(*again, paused, *later).restarts == [Restart("x", 7, 0)]


def test_a_failure_that_no_training_precedes_or_follows_is_no_restart() -> None:
    assert summary(*BEGIN, (6, "failure", {"cause": "the loss is nan", "last": True})).restarts == []
    assert summary((0, "run", {}), (1, "failure", {"cause": "x"}), *BEGIN[2:], *END).restarts == []


def test_costs() -> None:
    told = summary(
        *BEGIN,
        (6, "checkpoint", {"stall_s": 0.5}),
        (7, "failure", {"cause": "worker 0 died"}),
        (9, "start", {"step": 8}),
        (10, "step", {"step": 20}),
        (11, "checkpoint", {"stall_s": 1.5}),
        *END,
    ).costs(train_s=98.0)
    assert told == {
        "restarts": 1,
        "restart_causes": [{"cause": "worker 0 died", "lost_s": 4, "steps_redone": 12}],
        "lost_s": 4,
        "steps_redone": 12,
        "checkpoint_stall_s": 2.0,
        "checkpoint_stall_fraction": 0.02,
    }
    assert RunSummary().costs(train_s=0.0)["checkpoint_stall_fraction"] == 0.0


def test_steps_done_again_appear_once() -> None:
    rows = RunSummary(run_events.run()).curve()
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
    last = RunSummary(events.all).curve()[-1]
    assert (last["validation_loss"], last["rows"]) == (1.0, 40 * 64)
    assert RunSummary([]).curve() == []


def test_epochs_are_counted_in_training_rows() -> None:
    events = run_events.Events()
    events.add("prepared", seconds=1.0, rows_of_sets={"train": 6400, "validation": 640})
    events.add("start", step=0, steps=200, world_size=2, checkpoint=None)
    events.steps(100, 200)
    assert [row["epoch"] for row in RunSummary(events.all).curve()] == [
        1.0,
        *(step / 100 for step in range(110, 201, 10)),
    ]


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
    first, second = RunSummary(run_events.run()).attempts
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
    *_, before, longer = RunSummary(events.all).attempts
    assert (before.end, before.last_step) == ("finished", 200)
    assert (longer.first_step, longer.last_step, longer.end, longer.restart) == (200, 250, None, None)
    run = RunSummary(events.all)
    assert (run.standing(), len(run.restarts), run.finished) == ("not finished at step 250 of 200", 1, False)


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
    found = RunSummary(events.all).attempts
    assert [attempt.end for attempt in found] == ["the driver was lost", "no room", "stopped: SIGTERM"]
    assert [attempt.first_step for attempt in found] == [0, None, 0]
    assert [attempt.restart is not None for attempt in found] == [False, False, True]
    running = run_events.run(finished=False)
    assert RunSummary(running).attempts[-1].end is None


def test_a_pause_is_no_restart() -> None:
    events = run_events.Events()
    run_events.begin(events)
    events.steps(10, 20)
    events.add("stop", step=20, cause="a planned pause", last=True, paused=True)
    events.add("run", recipe="x", name="y", config_hash="", versions={})
    events.add("attempt", number=1, num_workers=2)
    events.add("start", step=20, steps=200, world_size=2, checkpoint=None)
    events.steps(30, 40)
    run = RunSummary(events.all)
    assert run.restarts == []
    assert [(attempt.first_step, attempt.end, attempt.restart) for attempt in run.attempts] == [
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
    run = RunSummary(events.all)
    assert [attempt.end for attempt in run.attempts] == ["stopped: SIGTERM"]
    assert run.standing() == "failed (no such log) at step 20 of 200"


def test_standing() -> None:
    events = run_events.Events()
    run_events.begin(events)
    assert RunSummary(events.all).standing() == "not finished before its first step"
    events.steps(10, 20)
    assert RunSummary(events.all).standing() == "not finished at step 20 of 200"
    events.add("failure", cause="a worker died")
    assert RunSummary(events.all).standing() == "failed (a worker died) at step 20 of 200"
    events.add("stop", step=20, cause="SIGTERM")
    assert RunSummary(events.all).standing() == "stopped (SIGTERM) at step 20 of 200"
    assert RunSummary(run_events.run()).standing() == "finished"


def test_steps_done_again_are_repeats_in_their_series() -> None:
    run, repeats = RunSummary(), []
    for number, (kind, step) in enumerate([("step", 10), ("step", 20), ("evaluate", 20), ("step", 20), ("step", 30)]):
        run.update({**DEFAULTS["step"], "set": "validation", "time": number, "kind": kind, "step": step})
        repeats.append(run.is_repeat)
    assert repeats == [False, False, False, True, False]


def test_intervals_over_a_restart() -> None:
    run = summary((0, "start", {"step": 0}), (1, "step", {"step": 10, "rows": 640, "rows_per_s": 320.0}))
    assert run.interval == Interval(10, 640, 2.0)
    run = summary(
        (0, "start", {"step": 0}), (1, "step", {"step": 20, "rows": 1280}), (2, "start", {"step": 10, "rows": 640})
    )
    assert run.steps_redone == 10
    run.update({**DEFAULTS["step"], "time": 3, "kind": "step", "step": 15, "rows": 960, "rows_per_s": 160.0})
    assert run.interval == Interval(5, 320, 2.0)


def test_each_attempt_and_each_command_has_a_start_of_its_own() -> None:
    def start_up(**stages: float) -> tuple[float, str, dict[str, Any]]:
        return 0, "start_up", {"process": "worker", "stages": stages}

    def attempt(number: int) -> tuple[float, str, dict[str, Any]]:
        return 0, "attempt", {"number": number}

    begun = (0, "run", {})
    first = (begun, start_up(imports=1.0), attempt(1), start_up(set_up=2.0), start_up(first_step=3.0))
    again = ((0, "failure", {"cause": "x"}), attempt(2), attempt(3), start_up(set_up=4.0))
    second = (begun, start_up(imports=5.0), attempt(1), start_up(restore=6.0, imports=0.5))
    found = summary(*first, *again, *second).starts
    assert found == [
        {"imports": 1.0, "set_up": 2.0, "first_step": 3.0},
        {"set_up": 4.0},
        {"imports": 5.5, "restore": 6.0},
    ]
    assert in_order(found) == ["imports", "set_up", "restore", "first_step"]
    assert in_order([{"of a later version": 1.0, "first_step": 1.0}]) == ["first_step", "of a later version"]
    assert summary(begun).starts == []


def test_without_curves_nothing_grows_with_the_steps() -> None:
    events = run_events.run()
    run = RunSummary(events, curves=False)
    assert run.curve() == []
    assert (run.attempts, run.time, run.status) == ((whole := RunSummary(events)).attempts, whole.time, whole.status)
