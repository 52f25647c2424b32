"""Diagnosis of runs with planted bottlenecks."""

from typing import Any

import pytest

from rayrec.observe.bottleneck import diagnose
from rayrec.observe.data_side import PipelineStats
from rayrec.observe.run_summary import RunSummary
from rayrec.observe.timing import PHASES

INTERVAL_S, ROWS, SHARES = 10.0, 10_000, ("busy", "cpu_share", "queue_share")
SAVED = {"kind": "checkpoint", "stall_s": 1.0, "write_s": 1.0, "bytes": 1}
EVALUATED = {"time": 60.0, "kind": "evaluate", "step": 40, "set": "validation"}


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
    """Return the events of a run whose first interval is all waiting. The others have the given `fractions` by phase, the rest is
    forward. `stages`: fraction of the data CPUs' time, and fractions of it spent computing and queued for a CPU."""
    events: list[dict[str, Any]] = [{"time": 0.0, "kind": "start", "step": 0, "rows": 0, "world_size": 1}]
    for number in range(1, intervals + 1):
        spent = {"data": 1.0} if number == 1 else {"forward": 1 - sum(fractions.values()), **fractions}
        step: dict[str, Any] = {"time": number * INTERVAL_S, "kind": "step", "step": number * 10, "rows": number * ROWS}
        step |= {"rows_per_s": ROWS / INTERVAL_S, "blocked_fraction": spent.get("data", 0.0), "steps": 100, "loss": 0.5}
        if measured:
            step["times_s"] = {name: INTERVAL_S * spent.get(name, 0.0) for name in PHASES}
            step["peak_fraction"] = peak_fraction
        events.append(step)
        if stages is not None:
            told = [{"stage": name, **dict(zip(SHARES, each, strict=True))} for name, each in stages.items()]
            fields = {"seconds": INTERVAL_S, "rows": ROWS, "cpus": cpus, "backlog_rows": 50.0, "stages": told, **data}
            events.append({"time": step["time"], "kind": "data", **fields})
    return events + (then or [])


CPU_BOUND = {"read": (0.05, 0.9, 0.0), "parse": (0.7, 0.98, 0.0), "encode": (0.2, 0.98, 0.0)}


def spilling(spilled_bytes: list[float], *, filled: int) -> list[dict[str, Any]]:
    """Return the events of a data-bound run with these spilled bytes since its start, and a store filled to `filled` percent."""
    store: dict[str, Any] = {"object_store_bytes": filled, "object_store_limit_bytes": 100}
    events = run({"data": 0.3}, stages=CPU_BOUND, intervals=len(spilled_bytes), **store)
    data = [event for event in events if event["kind"] == "data"]
    for event, size in zip(data, spilled_bytes, strict=True):
        event["spilled_bytes"] = int(size)
    return events


def full_for_a_moment() -> list[dict[str, Any]]:
    *events, last = spilling([0, 0, 0, 0], filled=30)
    return [*events, {**last, "object_store_bytes": 99}]


def slowest(**fractions: float) -> list[dict[str, Any]]:
    """Return the events of a run that waits for other workers, given the slowest worker's fractions of some phases."""
    events = run({"data": 0.07, "collectives": 0.52}, stages=CPU_BOUND)
    for event in events:
        if event["kind"] == "step":
            event["times_max_s"] = event["times_s"] | {name: fraction * INTERVAL_S for name, fraction in fractions.items()}
    return events


VERDICTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "data/parse: slow parsing": (
        run({"data": 0.4}, stages=CPU_BOUND),
        "Blocked on data 40 % of the time: the tasks that read and parse are CPU-bound, 74 % of it to parse. 3 more CPUs for "
        "data tasks (now 4) would raise 1,000 rows/s to about 1,700 rows/s. `rayrec preprocess` avoids most of this work.",
    ),
    "data/encode: the stage that takes most": (
        run({"data": 0.2}, stages={"read": (0.1, 0.9, 0.0), "parse": (0.2, 1, 0.0), "encode": (0.6, 1, 0.0)}),
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
        "the object store is 96 % full and 7 MB were spilled to disk. Use a larger --cluster.object-store-bytes",
    ),
    "data/object_store: an object store that spills": (
        spilling([5e6, 6e6, 6e6, 7e6], filled=30),
        ": 2 MB were spilled from the object store to disk. Use a larger --cluster.object-store-bytes",
    ),
    "data/parse: nothing spilled": (spilling([0, 0, 0, 0], filled=30), ""),
    "data/parse: spilled before, or by another job": (spilling([9e9, 9e9, 9e9, 9e9], filled=30), ""),
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
        "The model computes 98 % of the time (forward 43 %, backward 50 %, optimizer 5 %), at 60 % of the device's peak, and "
        "waits for data 2 %. The data pipeline could deliver 10k rows/s, 10.0 times as many.",
    ),
    "model: a peak that was underestimated": (
        run({"data": 0.02, "optimizer": 0.05}, peak_fraction=1.23),
        "optimizer 5 %), faster than the peak measured at the start (a lower bound for the device), and waits",
    ),
    "model: time between the steps": (
        run({"data": 0.02, "other": 0.3, "optimizer": 0.05}),
        "The model computes 68 % of the time (forward 63 %, backward 0 %, optimizer 5 %), at 60 % of the device's peak, and "
        "waits for data 2 %. The other 30 % is Python between the steps.",
    ),
    "model: little time between the steps": (run({"data": 0.02, "other": 0.05}), "peak, and waits for data 2 %."),
    "collectives: waiting for all workers": (run({"data": 0.07, "collectives": 0.52}), "a faster network"),
    "collectives/data: one worker that waits for data": (
        slowest(data=0.6, collectives=0.6),
        "Waiting for other workers 52 % of the time: waiting for data takes one worker 60 % (7 % on average), and the others "
        "wait for it. Its data pipeline is slower. Check the data tasks, storage and CPUs of its node.",
    ),
    "collectives/forward: one worker that computes": (
        slowest(forward=0.9, collectives=0.6),
        "forward pass takes one worker 90 % (41 % on average)",
    ),
    "collectives: one worker that takes less than half of what is waited for": (
        slowest(data=0.3, collectives=0.9),
        "a faster network",
    ),
    "host_to_device: a slow link": (run({"host_to_device": 0.3, "data": 0.05}, stages=CPU_BOUND), "30 %"),
    "checkpoint: slow storage for checkpoints": (
        run(
            {"data": 0.02},
            then=[
                {"time": 41.0, "kind": "checkpoint", "step": 40, "stall_s": 10.0, "bytes": 50_000_000, "write_s": 25.0},
                {"time": 42.0, "kind": "checkpoint_late", "step": 40, "cause": "not through"},
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
    assert (found.bottleneck + (f"/{found.cause}" if found.cause else ""), "\n" in found.text) == (expected, False)
    assert text in found.text


def test_diagnosis_skips_first_interval() -> None:
    events = run({"data": 0.02}, stages=CPU_BOUND)
    told = [diagnose(RunSummary(events[:count])) for count in (0, 1, 2, len(events))]
    assert [found and found.bottleneck for found in told] == [None, None, "data", "model"]


def test_time_breakdown_sums_over_restart_and_without_phases() -> None:
    events = run({"data": 0.2, "backward": 0.3})
    again = [{**events[0], "time": 50.0, "step": 20, "rows": 2 * ROWS}]
    redone = {**events[-1], "step": 30, "rows": 3 * ROWS, "time": 60.0}
    whole = RunSummary([*events, *again, redone])
    split = whole.time
    assert (split.total_s, split.rows) == (pytest.approx(5 * INTERVAL_S), 5 * ROWS)
    assert split.times_s["data"] == pytest.approx(10 + 4 * 2)
    assert sum(split.fractions().values()) == pytest.approx(1.0)
    assert whole.warm_time.training_s == pytest.approx(3 * INTERVAL_S)
    split = RunSummary(run({"data": 0.25}, measured=False)).warm_time
    assert (split.times_s["data"], split.times_s["other"]) == (pytest.approx(7.5), pytest.approx(22.5))
    assert not split.measured


def test_warm_time_excludes_first_interval_with_saves() -> None:
    start, first, second, *_ = run({"data": 0.2})

    def held_up(after: dict[str, Any]) -> list[dict[str, Any]]:
        return [after, {**EVALUATED, "time": after["time"] + 3}, {**SAVED, "time": after["time"] + 4, "step": after["step"]}]

    events = [start, *held_up(first), *held_up(second)]
    summary = RunSummary(events)
    whole, warm = summary.time, summary.warm_time
    assert (whole.evaluation_s, whole.checkpoint_s) == (6.0, 2.0)
    assert (warm.training_s, warm.evaluation_s, warm.checkpoint_s) == (pytest.approx(INTERVAL_S), 3.0, 1.0)
    again = [{**start, "time": 50.0}, {**SAVED, "time": 51.0, "step": 20}, *held_up(first)]
    assert RunSummary([*events, *again]).warm_time == warm


def data_side(events: list[dict[str, Any]]) -> PipelineStats:
    side = RunSummary(events).data.side()
    assert side is not None
    return side


def test_pipeline_stats_sum_stages_and_intervals_without_blocks() -> None:
    assert RunSummary([]).data.side() is None
    side = data_side(run({"data": 0.2}, stages=CPU_BOUND))
    assert (side.busy, side.capacity_rows_per_s) == (pytest.approx(0.95), pytest.approx(1000 / 0.95))
    assert [stage.name for stage in side.stages] == ["read", "parse", "encode"]
    assert [stage.busy for stage in side.stages] == pytest.approx([0.05, 0.7, 0.2])
    assert sum(stage.fraction for stage in side.stages) == pytest.approx(1.0)
    assert side.stages[1].rows_per_s == pytest.approx(1000 / 0.7)
    start, _, first, *_ = run({"data": 0.2}, stages=CPU_BOUND)
    told = [{"stage": "parse", "busy": 0.6, "cpu_share": 1.0, "queue_share": 0.0}]
    block = {**first, "seconds": 10.0, "stages": told}
    nothing = {**block, "rows": 0, "stages": []}
    whole = {**block, "seconds": 30.0, "stages": [{**told[0], "busy": 0.2}]}
    apart, together = data_side([start, first, nothing, nothing, block]), data_side([start, first, whole])
    assert (apart, apart.busy) == (together, pytest.approx(0.2))


def test_pipeline_stats_weigh_attempts_by_cpus() -> None:
    """Eight busy CPUs, then two: no CPU paused."""
    all_busy = {"parse": (1.0, 1.0, 0.0)}
    events = run({"data": 0.2}, stages=all_busy, cpus=8.0, rows=80_000)
    fewer = run({"data": 0.2}, stages=all_busy, cpus=2.0, rows=20_000)
    later = [{**event, "time": event["time"] + events[-1]["time"] + 1} for event in fewer]
    for both, cpus in (([*events, *later], 2.0), ([*later, *events], 8.0)):
        side = data_side(both)
        assert (side.cpus, side.busy, side.stages[0].busy) == (cpus, pytest.approx(1.0), pytest.approx(1.0))
        assert side.rows_per_s == side.capacity_rows_per_s == side.stages[0].rows_per_s == pytest.approx(5000)
    idle = data_side([*events, *run({"data": 0.2}, stages={"parse": (0.1, 1.0, 0.0)}, cpus=2.0, rows=2_000)])
    assert idle.busy == pytest.approx((8 + 0.2) / 10)
