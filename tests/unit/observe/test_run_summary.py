"""Summary of a run's events: restarts, attempts, curves, starts and cost. Repeated steps count
once.
"""

import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from builders import run_events
from builders.faults import rejects

from rayrec.observe.bottleneck import diagnose
from rayrec.observe.data_side import PipelineStats
from rayrec.observe.events import metrics_dataframe
from rayrec.observe.run_summary import Price, Restart, RunSummary
from rayrec.observe.timing import PHASES, Interval, Stopwatch, in_order, process_age_s

Described = tuple[float, str, dict[str, Any]]
DEFAULTS: dict[str, dict[str, Any]] = {
    "attempt": {"number": 1, "num_workers": 2},
    "start": {"steps": 40, "world_size": 2},
    "step": {"steps": 40},
    "stop": {"step": 20, "last": True},
    "finish": {"step": 40},
}
BEGIN: tuple[Described, ...] = (
    (0, "run", {}),
    (1, "attempt", {}),
    (3, "start", {"step": 0}),
    (5, "step", {"step": 20}),
)
END: tuple[Described, ...] = ((30, "finish", {}),)


def event(time: float, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        **DEFAULTS.get(kind, {}),
        "time": time,
        "kind": kind,
        **fields,
    }


def summary(*described: Described) -> RunSummary:
    return RunSummary(event(*each) for each in described)


def test_restart_has_cause_time_and_steps() -> None:
    for between, expected in (
        ((), []),
        (
            (
                (6, "failure", {"cause": "x"}),
                (10, "start", {"step": 8}),
                (11, "step", {"step": 20}),
            ),
            [Restart("x", 6, 12)],
        ),
        (
            (
                (60, "run", {}),
                (64, "start", {"step": 16}),
                (65, "step", {"step": 20}),
            ),
            [Restart("the driver was lost", 60, 4)],
        ),
        (
            (
                (6, "stop", {"cause": "SIGTERM"}),
                (60, "run", {}),
                (64, "start", {"step": 20}),
                (65, "step", {"step": 40}),
            ),
            [Restart("stopped: SIGTERM", 59, 0)],
        ),
        (  # The next driver fails to prepare, the third continues.
            (
                *((6, "failure", {"cause": "the loss is nan", "last": True}), (60, "run", {})),
                *((61, "failure", {"cause": "no such log", "last": True}), (62, "run", {})),
                *((64, "start", {"step": 16}), (65, "step", {"step": 20})),
            ),
            [Restart("the loss is nan", 60, 4)],
        ),
        (  # Fails again before it trains.
            (
                *((6, "failure", {"cause": "first"}), (8, "start", {"step": 8})),
                *(
                    (9, "failure", {"cause": "second"}),
                    (12, "start", {"step": 8}),
                    (14, "step", {"step": 20}),
                ),
            ),
            [Restart("first", 7, 12), Restart("second", 6, 0)],
        ),
        (  # Only the end was left to do.
            (
                (6, "failure", {"cause": "late"}),
                (9, "start", {"step": 20}),
                (10, "finish", {}),
            ),
            [Restart("late", 5, 0)],
        ),
        (  # Paused before it trained again.
            (
                *((6, "failure", {"cause": "x"}), (9, "start", {"step": 20})),
                *((12, "stop", {"cause": "a planned pause", "paused": True}), (60, "run", {})),
                *((62, "start", {"step": 20}), (65, "step", {"step": 40})),
            ),
            [Restart("x", 7, 0)],
        ),
    ):
        assert summary(*BEGIN, *between, *END).restarts == expected


def test_restart_lasts_until_training_continues_unlike_pauses() -> None:
    begun = (
        *BEGIN,
        (6, "failure", {"cause": "x"}),
        (9, "start", {"step": 20}),
    )
    assert summary(*begun).restarts == [Restart("x", 4, 0)]
    assert summary(*begun, (15, "evaluate", {"step": 20, "set": "test"})).restarts == [
        Restart("x", 10, 0)
    ]
    assert (
        summary(*BEGIN, (6, "failure", {"cause": "the loss is nan", "last": True})).restarts == []
    )
    assert summary((0, "run", {}), (1, "failure", {"cause": "x"}), *BEGIN[2:], *END).restarts == []
    longer = (
        (90, "run", {}),
        (95, "start", {"step": 40, "steps": 60}),
        (97, "step", {"step": 50, "steps": 60}),
    )
    run = summary(*BEGIN, *END, (31, "summary", {}), *longer)
    assert (run.restarts, run.standing()) == ([], "not finished at step 50 of 60")
    first, second = run.attempts
    assert (first.end, first.last_step) == ("finished", 40)
    assert (second.first_step, second.last_step, second.end, second.restart) == (40, 50, None, None)
    assert summary(
        *BEGIN,
        *END,
        (31, "summary", {}),
        *longer,
        (98, "failure", {"cause": "x"}),
        (99, "start", {"step": 40}),
        (100, "step", {"step": 60}),
    ).restarts == [Restart("x", 3, 10)]
    # Without a summary, that driver was lost.
    assert [each.cause for each in summary(*BEGIN, *END, *longer).restarts] == [
        "the driver was lost"
    ]
    pause = (6, "stop", {"cause": "a planned pause", "paused": True})
    run = summary(
        *BEGIN,
        pause,
        (60, "run", {}),
        (61, "attempt", {}),
        (62, "start", {"step": 20}),
        (63, "step", {"step": 30}),
    )
    found = [(each.first_step, each.end, each.restart) for each in run.attempts]
    assert found == [(0, "stopped: a planned pause", None), (20, None, None)]


def test_evaluation_time_uses_event_seconds() -> None:
    prefix = (*BEGIN, (7, "step", {"step": 30}))
    for seconds, expected in (({}, 4.0), ({"seconds": 2.5}, 2.5)):
        run = summary(
            *prefix,
            (
                11,
                "evaluate",
                {
                    "step": 30,
                    "set": "validation",
                    "auroc": 0.5,
                    "best": {"step": 30},
                    **seconds,
                },
            ),
        )
        assert (run.time.evaluation_s, run.warm_time.evaluation_s) == (expected, expected)
        assert [name for name in run.curve()[-1] if name.startswith("validation_")] == [
            "validation_auroc"
        ]


def test_attempts_have_end_and_cost_and_standing_follows_events() -> None:
    first, second = RunSummary(run_events.run()).attempts
    assert (first.num_workers, first.first_step, first.last_step) == (2, 0, 120)
    assert (first.end, first.restart) == ("worker 1 died of SIGKILL & <more>", None)
    assert (second.num_workers, second.first_step, second.last_step, second.end) == (
        1,
        100,
        200,
        "finished",
    )
    # Failure, attempt, damaged checkpoint, 5 s to the start, first step.
    assert second.restart == Restart("worker 1 died of SIGKILL & <more>", 9.0, 20)
    assert second.begin_s - first.begin_s == 19.0
    assert RunSummary(run_events.run(finished=False)).attempts[-1].end is None
    found = summary(
        *BEGIN,
        (10, "run", {}),
        (11, "attempt", {}),
        (12, "failure", {"cause": "no room"}),
        (13, "attempt", {"number": 2}),
        (14, "start", {"step": 0}),
        (15, "stop", {"cause": "SIGTERM"}),
    ).attempts
    assert [(each.end, each.first_step, each.restart is not None) for each in found] == [
        ("the driver was lost", 0, False),
        ("no room", None, False),
        ("stopped: SIGTERM", 0, True),
    ]
    run = summary(
        *BEGIN,
        (6, "stop", {"cause": "SIGTERM"}),
        (60, "run", {}),
        (61, "failure", {"cause": "no such log", "last": True}),
    )
    assert [attempt.end for attempt in run.attempts] == ["stopped: SIGTERM"]
    assert run.standing() == "failed (no such log) at step 20 of 40"
    run = summary(*BEGIN[:3])
    assert run.standing() == "not finished before its first step"
    for described, reported in (
        (BEGIN[3], "not finished at step 20 of 40"),
        ((6, "failure", {"cause": "a worker died"}), "failed (a worker died) at step 20 of 40"),
        ((7, "stop", {"cause": "SIGTERM"}), "stopped (SIGTERM) at step 20 of 40"),
        (END[0], "finished"),
    ):
        run.update(event(*described))
        assert run.standing() == reported


def test_nodes_are_of_current_attempt() -> None:
    start = (3, "start", {"step": 0, "nodes": ["a", "a", "b", "a"]})
    run = summary(*BEGIN[:2], start, (4, "data_nodes", {"step": 1, "nodes": ["a", "c"]}))
    assert run.nodes() == {
        "a": ["workers 0 to 1", "worker 3", "data tasks"],
        "b": ["worker 2"],
        "c": ["data tasks"],
    }
    run.update(event(5, "start", {"step": 1, "nodes": ["b"]}))
    assert run.nodes() == {"b": ["worker 0"]}
    assert summary(*BEGIN).nodes() == {}  # of an earlier version


def test_nodes_on_one_host_are_shown_separately() -> None:
    start = (3, "start", {"step": 0, "nodes": ["a", "a", "b"], "node_ids": ["1f", "2e", "3d"]})
    run = summary(
        *BEGIN[:2],
        start,
        (4, "data_nodes", {"step": 1, "nodes": ["a", "b"], "node_ids": ["2e", "3d"]}),
    )
    assert run.nodes() == {
        "a (1f)": ["worker 0"],
        "a (2e)": ["worker 1", "data tasks"],
        "b": ["worker 2", "data tasks"],
    }


def test_cost_counts_restarts_saves_hours_epochs_and_auroc() -> None:
    died = (
        (7, "failure", {"cause": "worker 0 died"}),
        (9, "start", {"step": 8}),
        (10, "step", {"step": 20}),
    )
    first, second = (
        (at, "checkpoint", {"step": 20, "stall_s": stall_s})
        for at, stall_s in ((6, 0.5), (11, 1.5))
    )
    costs = {"lost_s": 4, "steps_redone": 12}
    stalls = {"checkpoint_stall_s": 2.0, "checkpoint_stall_fraction": 0.02}
    found = summary(*BEGIN, first, *died, second, *END).costs(train_s=98.0)
    assert found == {
        "restarts": 1,
        "restart_causes": [{"cause": "worker 0 died", **costs}],
        **costs,
        **stalls,
    }
    assert RunSummary().costs(train_s=0.0)["checkpoint_stall_fraction"] == 0.0
    events = run_events.click_run(seconds=360.0)
    hours = (events[-1]["time"] - events[0]["time"]) / 3600
    spent = RunSummary(events).cost(Price(2.5, nodes=4))
    assert (spent.node_hours, spent.total) == (pytest.approx(4 * hours), pytest.approx(10 * hours))
    assert (spent.per_epoch, spent.per_auroc_point) == (
        pytest.approx(spent.total / 2),
        pytest.approx(spent.total / 28),
    )
    rejects(r"at least 1, got 1\.0 and 0", Price, 1.0, nodes=0)
    again = summary(*BEGIN, (36_005, "run", {}), (39_605, "start", {"step": 20}))
    assert (summary(*BEGIN).working_s, again.working_s) == (5.0, 3605.0)
    spent = again.cost(Price(1.0))
    assert (spent.node_hours, spent.per_epoch, spent.per_auroc_point) == (
        pytest.approx(3605 / 3600),
        None,
        None,
    )


def test_curve_contains_steps_once() -> None:
    rows = RunSummary(run_events.run()).curve()
    assert [row["step"] for row in rows] == list(range(10, 201, 10))
    assert [row["loss"] for row in rows[:10]] == [9.0] * 10
    assert rows[10]["loss"] == math.exp(-1.1)  # Step 110, the second time.
    assert [row["step"] for row in rows if "validation_loss" in row] == [50, 100, 150, 200]
    assert rows[4]["time_s"] == rows[3]["time_s"] + 2  # Logged, then evaluated.
    assert rows[0]["time_s"] == 4
    assert RunSummary(run_events.run(), curves=False).curve() == RunSummary().curve() == []


def test_curve_keeps_evaluations_after_resume() -> None:
    late = [
        (7, "evaluate", {"step": 20, "set": name, "loss": loss})
        for name, loss in (("validation", 1.0), ("test", 7.0))
    ]
    run = summary(
        *BEGIN[:3], (5, "step", {"step": 20, "rows": 640}), (6, "start", {"step": 20}), *late
    )
    assert run.curve() == [
        {
            "step": 20,
            "rows": 640,
            "validation_loss": 1.0,
            "time_s": 7,
        }
    ]


def test_curve_counts_epochs() -> None:
    prepared = (1, "prepared", {"rows_of_sets": {"train": 6400, "validation": 640}})
    steps = [(step, "step", {"step": step, "rows": step * 64}) for step in (50, 100, 150)]
    assert [
        row["epoch"] for row in summary(prepared, (2, "start", {"step": 0}), *steps).curve()
    ] == [0.5, 1.0, 1.5]


def test_dataframe_has_one_row_per_step_and_needs_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = metrics_dataframe(f"{run_events.write_run(tmp_path, run_events.run())}/events.jsonl")
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
    assert frame["epoch"].isna().all()  # The events lack the number of training rows.
    assert frame.set_index("step")["validation_perplexity"].dropna().to_dict() == dict.fromkeys(
        (50, 100, 150, 200), 2.0
    )
    assert frame["time_s"].is_monotonic_increasing
    unlogged = metrics_dataframe(
        f"{run_events.write_run(tmp_path, run_events.run()[:1])}/events.jsonl"
    )
    assert (len(unlogged), "loss" in unlogged.columns) == (0, True)
    rejects("event file not found", metrics_dataframe, tmp_path / "other.jsonl")
    monkeypatch.setitem(sys.modules, "pandas", None)
    rejects("pip install pandas", metrics_dataframe, "events.jsonl")


def test_interval_restarts_and_repeated_steps_are_marked() -> None:
    log = (1, "step", {"step": 20, "rows": 1280, "rows_per_s": 320.0})
    run = summary((0, "start", {"step": 0}), log)
    assert (run.interval, run.steps_redone) == (Interval(20, 1280, 4.0), 0)
    run = summary(
        (0, "start", {"step": 0}),
        log,
        (2, "start", {"step": 10, "rows": 640}),
        (3, "step", {"step": 15, "rows": 960, "rows_per_s": 160.0}),
    )
    assert (run.interval, run.steps_redone) == (Interval(5, 320, 2.0), 10)
    run = RunSummary()
    for kind, step, is_repeat in (
        ("step", 10, 0),
        ("step", 20, 0),
        ("evaluate", 20, 0),
        ("step", 20, 1),
        ("step", 30, 0),
    ):
        run.update(
            {
                "set": "validation",
                "time": step,
                "kind": kind,
                "step": step,
            }
        )
        assert run.is_repeat == is_repeat


def test_startup_times_group_by_attempt_and_stages_are_timed() -> None:
    def start_up(**stages: float) -> Described:
        return 0, "start_up", {"process": "worker", "stages": stages}

    first = (
        (0, "run", {}),
        start_up(imports=1.0),
        (0, "attempt", {}),
        start_up(set_up=2.0),
        start_up(first_step=3.0),
    )
    attempts = [(0, "attempt", {"number": number}) for number in (2, 3)]
    found = summary(
        *first,
        (0, "failure", {"cause": "x"}),
        *attempts,
        start_up(set_up=4.0),
        (0, "run", {}),
        start_up(imports=5.0),
        (0, "attempt", {}),
        start_up(restore=6.0, imports=0.5),
    ).starts
    assert found == [
        {"imports": 1.0, "set_up": 2.0, "first_step": 3.0},
        {"set_up": 4.0},
        {"imports": 5.5, "restore": 6.0},
    ]
    assert in_order(found) == ["imports", "set_up", "restore", "first_step"]
    assert in_order([{"of a later version": 1.0, "first_step": 1.0}]) == [
        "first_step",
        "of a later version",
    ]
    assert summary((0, "run", {})).starts == []
    watch = Stopwatch(last_s=100.0)
    laps = (
        ("imports", 102.5),
        ("index", 103.0),
        ("imports", 104.0),
        ("clock of another machine", 103.0),
        ("folder", 103.5),
    )
    for name, at_s in laps:
        watch.lap(name, at_s=at_s)
    assert watch.stages == {
        "imports": 3.5,
        "index": 0.5,
        "clock of another machine": 0.0,
        "folder": 0.5,
    }
    watch = Stopwatch(time.time() - 2.0)
    watch.lap("a")
    watch.lap("b")
    assert 2.0 <= watch.stages["a"] < 60.0
    assert 0.0 <= watch.stages["b"] < 60.0


# -- Stopwatch of startup stages, and process age
def test_process_age_counts_from_start(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    stat = tmp_path / "proc/self/stat"
    # Started with the machine.
    stat.write_text("7 (a (strange) name) S " + " ".join(["0"] * 18) + " 0 9 9")
    assert process_age_s(tmp_path) == pytest.approx(
        time.clock_gettime(time.CLOCK_BOOTTIME), abs=5.0
    )
    stat.write_text("7 (short) S")
    assert process_age_s(tmp_path) is None
    assert process_age_s(tmp_path / "nothing") is None
    age_s = process_age_s()
    assert age_s is not None
    assert Stopwatch.since_process_start().last_s == pytest.approx(time.time() - age_s, abs=1.0)


# -- Diagnosis of runs with planted bottlenecks
INTERVAL_S = 10.0
ROWS = 10_000
SHARES = ("busy", "cpu_share", "queue_share")
SAVED = {
    "kind": "checkpoint",
    "stall_s": 1.0,
    "write_s": 1.0,
    "bytes": 1,
}
EVALUATED = {
    "time": 60.0,
    "kind": "evaluate",
    "step": 40,
    "set": "validation",
}


def run(
    fractions: dict[str, float],
    *,
    stages: dict[str, tuple[float, float, float]] | None = None,
    cpus: float = 4.0,
    measured: bool = True,
    peak_fraction: float = 0.6,
    intervals: int = 4,
    then: list[dict[str, Any]] | None = None,
    **data: Any,
) -> list[dict[str, Any]]:
    """Return the events of a run whose first interval is all waiting. The others have the given
    `fractions` by phase, the rest is forward. `stages`: fraction of the data CPUs' time, and
    fractions of it spent computing and queued for a CPU.
    """
    events: list[dict[str, Any]] = [
        {
            "time": 0.0,
            "kind": "start",
            "step": 0,
            "rows": 0,
            "world_size": 1,
        }
    ]
    for number in range(1, intervals + 1):
        spent = (
            {"data": 1.0} if number == 1 else {"forward": 1 - sum(fractions.values()), **fractions}
        )
        step: dict[str, Any] = {
            "time": number * INTERVAL_S,
            "kind": "step",
            "step": number * 10,
            "rows": number * ROWS,
            "rows_per_s": ROWS / INTERVAL_S,
            "blocked_fraction": spent.get("data", 0.0),
            "steps": 100,
            "loss": 0.5,
        }
        if measured:
            step["times_s"] = {name: INTERVAL_S * spent.get(name, 0.0) for name in PHASES}
            step["peak_fraction"] = peak_fraction
        events.append(step)
        if stages is not None:
            reported = [
                {"stage": name, **dict(zip(SHARES, each, strict=True))}
                for name, each in stages.items()
            ]
            events.append(
                {
                    "time": step["time"],
                    "kind": "data",
                    "seconds": INTERVAL_S,
                    "rows": ROWS,
                    "cpus": cpus,
                    "backlog_rows": 50.0,
                    "stages": reported,
                    **data,
                }
            )
    return events + (then or [])


CPU_BOUND = {"read": (0.05, 0.9, 0.0), "parse": (0.7, 0.98, 0.0), "encode": (0.2, 0.98, 0.0)}


def spilling(spilled_bytes: list[float], *, filled: int) -> list[dict[str, Any]]:
    """Return the events of a data-bound run with these spilled bytes since its start, and a store
    filled to `filled` percent.
    """
    events = run(
        {"data": 0.3},
        stages=CPU_BOUND,
        intervals=len(spilled_bytes),
        object_store_bytes=filled,
        object_store_limit_bytes=100,
    )
    data = [event for event in events if event["kind"] == "data"]
    for event, size in zip(data, spilled_bytes, strict=True):
        event["spilled_bytes"] = int(size)
    return events


def full_for_a_moment() -> list[dict[str, Any]]:
    *events, last = spilling([0, 0, 0, 0], filled=30)
    return [*events, {**last, "object_store_bytes": 99}]


def slowest(**fractions: float) -> list[dict[str, Any]]:
    """Return the events of a run that waits for other workers, given the slowest worker's fractions
    of some phases.
    """
    events = run({"data": 0.07, "collectives": 0.52}, stages=CPU_BOUND)
    for event in events:
        if event["kind"] == "step":
            event["times_max_s"] = event["times_s"] | {
                name: fraction * INTERVAL_S for name, fraction in fractions.items()
            }
    return events


VERDICTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "data/parse: slow parsing": (
        run({"data": 0.4}, stages=CPU_BOUND),
        "Blocked on data 40 % of the time: the tasks that read and parse are CPU-bound, 74 % of it "
        "to parse. 3 more CPUs for data tasks (now 4) would raise 1,000 rows/s to about 1,700 "
        "rows/s. `rayrec preprocess` avoids most of this work.",
    ),
    "data/encode: the stage that takes most": (
        run(
            {"data": 0.2},
            stages={"read": (0.1, 0.9, 0.0), "parse": (0.2, 1, 0.0), "encode": (0.6, 1, 0.0)},
        ),
        "1 more CPU for data tasks",
    ),
    "data/storage: slow storage of the log": (
        run({"data": 0.6}, stages={"read": (0.8, 0.05, 0.0), "parse": (0.1, 0.95, 0.0)}),
        "waiting for storage is 84 % of the data work. Use faster storage, or more CPUs: ",
    ),
    "data/read: reading that waits for a CPU": (
        run({"data": 0.5}, stages={"read": (0.5, 0.3, 0.68), "parse": (0.45, 0.3, 0.69)}),
        "get only 30 % of a CPU each",
    ),
    "data/object_store: a full object store": (
        spilling([0, 2e6, 2e6, 7e6], filled=96),
        "the object store is 96 % full and 7 MB were spilled to disk. Use a larger "
        "--cluster.object-store-bytes",
    ),
    "data/object_store: an object store that spills": (
        spilling([5e6, 6e6, 6e6, 7e6], filled=30),
        ": 2 MB were spilled from the object store to disk. Use a larger "
        "--cluster.object-store-bytes",
    ),
    "data/parse: nothing spilled": (spilling([0, 0, 0, 0], filled=30), ""),
    "data/parse: spilled before, or by another job": (
        spilling([9e9, 9e9, 9e9, 9e9], filled=30),
        "",
    ),
    "data/parse: spilled once": (spilling([0, *[0] * 4, *[9e9] * 5], filled=30), ""),
    "data/parse: a store that is full for a moment": (full_for_a_moment(), ""),
    "data/delivery: rows that come late though nobody is busy": (
        run({"data": 0.3}, stages={"read": (0.02, 0.9, 0.0), "parse": (0.1, 0.9, 0.0)}),
        "rows are made in time but delivered late",
    ),
    "data/read: a thread that reads, which needs no CPUs": (
        run({"data": 0.3}, stages={"read": (0.95, 0.99, 0.0)}, cpus=2.0),
        "is always busy, at 1,000 rows/s in total. Use more workers, or less work per row.",
    ),
    "data/unknown: data that was not measured": (run({"data": 0.3}), ""),
    "data/unknown: phases that were not measured": (run({"data": 0.3}, measured=False), ""),
    "model: a slow model": (
        run({"data": 0.02, "backward": 0.5, "optimizer": 0.05}, stages={"parse": (0.1, 1.0, 0.0)}),
        "The model computes 98 % of the time (forward 43 %, backward 50 %, optimizer 5 %), at 60 % "
        "of the device's peak, and waits for data 2 %. The data pipeline could deliver 10k rows/s, "
        "10.0 times as many.",
    ),
    "model: a peak that was underestimated": (
        run({"data": 0.02, "optimizer": 0.05}, peak_fraction=1.23),
        "optimizer 5 %), faster than the peak measured at the start (a lower bound for the "
        "device), and waits",
    ),
    "model: time between the steps": (
        run({"data": 0.02, "other": 0.3, "optimizer": 0.05}),
        "The model computes 68 % of the time (forward 63 %, backward 0 %, optimizer 5 %), at 60 % "
        "of the device's peak, and waits for data 2 %. The other 30 % is Python between the steps.",
    ),
    "model: little time between the steps": (
        run({"data": 0.02, "other": 0.05}),
        "peak, and waits for data 2 %.",
    ),
    "collectives: waiting for all workers": (
        run({"data": 0.07, "collectives": 0.52}),
        "a faster network",
    ),
    "collectives/data: one worker that waits for data": (
        slowest(data=0.6, collectives=0.6),
        "Waiting for other workers 52 % of the time: waiting for data takes one worker 60 % (7 % "
        "on average), and the others wait for it. Its data pipeline is slower. Check the data "
        "tasks, storage and CPUs of its node.",
    ),
    "collectives/forward: one worker that computes": (
        slowest(forward=0.9, collectives=0.6),
        "forward pass takes one worker 90 % (41 % on average)",
    ),
    "collectives: one worker that takes less than half of the wait": (
        slowest(data=0.3, collectives=0.9),
        "a faster network",
    ),
    "host_to_device: a slow link": (
        run({"host_to_device": 0.3, "data": 0.05}, stages=CPU_BOUND),
        "30 %",
    ),
    "checkpoint: slow storage for checkpoints": (
        run(
            {"data": 0.02},
            then=[
                {
                    "time": 41.0,
                    "kind": "checkpoint",
                    "step": 40,
                    "stall_s": 10.0,
                    "bytes": 50_000_000,
                    "write_s": 25.0,
                },
                {
                    "time": 42.0,
                    "kind": "checkpoint_late",
                    "step": 40,
                    "cause": "not through",
                },
            ],
        ),
        "25 % of the time: storage writes them at 2 MB/s, and 1 save was skipped",
    ),
    "evaluation: evaluation that takes over": (
        run({"data": 0.02}, then=[EVALUATED]),
        "Use a larger --evaluate-every, or a smaller log for --eval-data.path.",
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_diagnosis_matches_planted_bottleneck(case: str) -> None:
    (expected, _, _), (events, text) = case.partition(": "), VERDICTS[case]
    found = diagnose(RunSummary(events))
    assert found is not None
    assert (found.bottleneck + (f"/{found.cause}" if found.cause else ""), "\n" in found.text) == (
        expected,
        False,
    )
    assert text in found.text


def test_diagnosis_skips_first_interval_and_sums_restarts() -> None:
    events = run({"data": 0.02}, stages=CPU_BOUND)
    reported = [diagnose(RunSummary(events[:count])) for count in (0, 1, 2, len(events))]
    assert [found and found.bottleneck for found in reported] == [None, None, "data", "model"]
    events = run({"data": 0.2, "backward": 0.3})
    whole = RunSummary(
        [
            *events,
            {
                **events[0],
                "time": 50.0,
                "step": 20,
                "rows": 2 * ROWS,
            },
            {
                **events[-1],
                "step": 30,
                "rows": 3 * ROWS,
                "time": 60.0,
            },
        ]
    )
    split = whole.time
    assert (split.total_s, split.rows) == (pytest.approx(5 * INTERVAL_S), 5 * ROWS)
    assert split.times_s["data"] == pytest.approx(10 + 4 * 2)
    assert sum(split.fractions().values()) == pytest.approx(1.0)
    assert whole.warm_time.training_s == pytest.approx(3 * INTERVAL_S)
    split = RunSummary(run({"data": 0.25}, measured=False)).warm_time
    assert (split.times_s["data"], split.times_s["other"]) == (
        pytest.approx(7.5),
        pytest.approx(22.5),
    )
    assert not split.measured


def test_warm_time_excludes_first_interval_with_saves() -> None:
    start, first, second, *_ = run({"data": 0.2})

    def held_up(after: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            after,
            {**EVALUATED, "time": after["time"] + 3},
            {**SAVED, "time": after["time"] + 4, "step": after["step"]},
        ]

    events = [start, *held_up(first), *held_up(second)]
    summary = RunSummary(events)
    whole = summary.time
    warm = summary.warm_time
    assert (whole.evaluation_s, whole.checkpoint_s) == (6.0, 2.0)
    assert (warm.training_s, warm.evaluation_s, warm.checkpoint_s) == (
        pytest.approx(INTERVAL_S),
        3.0,
        1.0,
    )
    assert (
        RunSummary(
            [*events, {**start, "time": 50.0}, {**SAVED, "time": 51.0, "step": 20}, *held_up(first)]
        ).warm_time
        == warm
    )


def data_side(events: list[dict[str, Any]]) -> PipelineStats:
    side = RunSummary(events).data.side()
    assert side is not None
    return side


def test_pipeline_stats_contain_stages() -> None:
    assert RunSummary([]).data.side() is None
    side = data_side(run({"data": 0.2}, stages=CPU_BOUND))
    assert (side.busy, side.capacity_rows_per_s) == (
        pytest.approx(0.95),
        pytest.approx(1000 / 0.95),
    )
    assert [stage.name for stage in side.stages] == ["read", "parse", "encode"]
    assert [stage.busy for stage in side.stages] == pytest.approx([0.05, 0.7, 0.2])
    assert sum(stage.fraction for stage in side.stages) == pytest.approx(1.0)
    assert side.stages[1].rows_per_s == pytest.approx(1000 / 0.7)


def test_pipeline_stats_sum_blocks() -> None:
    start, _, first, *_ = run({"data": 0.2}, stages=CPU_BOUND)
    reported = [
        {
            "stage": "parse",
            "busy": 0.6,
            "cpu_share": 1.0,
            "queue_share": 0.0,
        }
    ]
    block = {**first, "seconds": 10.0, "stages": reported}
    nothing = {**block, "rows": 0, "stages": []}
    whole = {**block, "seconds": 30.0, "stages": [{**reported[0], "busy": 0.2}]}
    apart = data_side([start, first, nothing, nothing, block])
    together = data_side([start, first, whole])
    assert (apart, apart.busy) == (together, pytest.approx(0.2))


def test_pipeline_stats_weigh_attempts_by_cpus() -> None:
    # Eight busy CPUs, then two: no CPU paused.
    all_busy = {"parse": (1.0, 1.0, 0.0)}
    events = run(
        {"data": 0.2},
        stages=all_busy,
        cpus=8.0,
        rows=80_000,
    )
    fewer = run(
        {"data": 0.2},
        stages=all_busy,
        cpus=2.0,
        rows=20_000,
    )
    later = [{**event, "time": event["time"] + events[-1]["time"] + 1} for event in fewer]
    for both, cpus in (([*events, *later], 2.0), ([*later, *events], 8.0)):
        side = data_side(both)
        assert (side.cpus, side.busy, side.stages[0].busy) == (
            cpus,
            pytest.approx(1.0),
            pytest.approx(1.0),
        )
        assert (
            side.rows_per_s
            == side.capacity_rows_per_s
            == side.stages[0].rows_per_s
            == pytest.approx(5000)
        )
    idle = data_side(
        [
            *events,
            *run(
                {"data": 0.2},
                stages={"parse": (0.1, 1.0, 0.0)},
                cpus=2.0,
                rows=2_000,
            ),
        ]
    )
    assert idle.busy == pytest.approx((8 + 0.2) / 10)
