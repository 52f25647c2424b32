"""Stop requests to a worker: grace period, preemption and signals."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from builders.faults import fails_with
from ray.train import PreemptionInfo

from rayrec.training.stop_monitor import MORE_WORKERS, NODE_PREEMPTED, RESUMES, GracePeriod, Signals, StopMonitor, last_save_s
from rayrec.workloads.run_config import FailureConfig


@pytest.mark.parametrize(
    ("grace_s", "written", "over_at"),
    [
        (60.0, {}, 61),  # nothing was written
        (60.0, {0: 5}, 61),  # before the stop
        (60.0, {0: 5, 50: 6}, 111),
        (60.0, {10: 1, 75: 2}, 71),  # a stall longer than grace_s
        (60.0, {10 + 30 * number: number for number in range(1, 100)}, 301),  # progress without an end
        (0.0, {1: 1}, 1),
    ],
)
def test_grace_period_extends_while_save_progresses(grace_s: float, written: dict[int, int], over_at: int) -> None:
    grace = GracePeriod(FailureConfig(grace_s=grace_s, max_grace_s=5 * grace_s), now_s=1000.0)
    so_far = 0
    for second in range(1000):
        so_far = written.get(second, so_far)
        if grace.expired(1000.0 + second, saved_bytes=so_far):
            assert second == over_at
            return
    raise AssertionError("it was waited for without an end")


@pytest.mark.parametrize("write_s", [0.0, 0.1, 3.0, 40.0])
@pytest.mark.parametrize("step_s", [0.001, 0.2, 5.0, 30.0])
def test_last_save_ends_shortly_before_preemption(write_s: float, step_s: float) -> None:
    deadline_s, between_s = 120.0, max(step_s, 1.0)
    begin_s = last_save_s(deadline_s, write_s=write_s, between_s=between_s)
    saved_s = 0.0
    while saved_s < begin_s:  # the first look behind the moment, after which the step is ended
        saved_s += between_s
    assert saved_s + step_s + write_s <= deadline_s
    assert deadline_s - (saved_s + write_s) <= 0.5 * write_s + 2 * between_s + 2.0  # what is not used


@pytest.mark.parametrize(
    ("deadline_s", "save_s", "ended_at"),
    [
        (100, 0, 81),  # 100 - (1.5 * 10 + 2 * 1 + 2) = 81
        (100, 30, 81),  # the save at the notice is no step
        (100, 70, 90),  # the first look after that save
        (30, 0, 21),  # too near for another save than the one at the notice
        (None, 0, None),  # nobody knows when the node goes
    ],
)
def test_preemption_notice_saves_and_ends_before_deadline(
    monkeypatch: pytest.MonkeyPatch, deadline_s: int | None, save_s: int, ended_at: int | None
) -> None:
    now: dict[str, Any] = {"s": 5000.0, "info": None}
    monkeypatch.setattr(time, "time", lambda: now["s"])
    monkeypatch.setattr(time, "monotonic", lambda: now["s"])
    watch, other = (StopMonitor(None, rank=1, preemption=lambda: now["info"]) for _ in range(2))
    watch._first = True  # as rank 0, without the thread that asks the driver
    watch.write_s = lambda: 10.0
    saves, ended, second = [], None, 0
    while second < 200 and ended is None:
        now["s"] = 5000.0 + second
        if second >= 20:
            deadline_ms = None if deadline_s is None else 5_000_000 + 1000 * deadline_s
            now["info"] = PreemptionInfo(deadline_ms=deadline_ms, preempted_node_to_ranks={"a": [1]})
        asked, look = watch.poll()
        assert other.poll() == (False, False)  # only rank 0 looks at the clock
        if asked:
            ended = second
        elif look:
            cut = watch.preempted()
            assert other.preempted() == cut
            saves += [second] if cut else []
            second += save_s if cut else 0
        second += 1
    assert (saves, ended) == ([20], None if ended_at is None else max(ended_at, 21 + save_s))
    assert watch.cause == (None if ended_at is None else NODE_PREEMPTED)
    assert watch.urgent() == (ended_at is not None)  # an evaluation is not waited for


def test_preemption_overrides_scale_up_which_waits() -> None:
    for cause, expected in ((MORE_WORKERS, NODE_PREEMPTED), ("SIGTERM", "SIGTERM")):
        info = PreemptionInfo(deadline_ms=1, preempted_node_to_ranks={"a": [1]})
        watch = StopMonitor(None, rank=0, preemption=lambda info=info: info)  # type: ignore[misc]
        assert watch.preempted()
        watch.cause = cause
        assert watch.poll()[0]
        assert watch.cause == expected
    assert NODE_PREEMPTED in RESUMES  # the driver starts another attempt
    watch = StopMonitor(None, rank=1)
    for cause, expected in ((None, (False, False)), (MORE_WORKERS, (True, False)), ("SIGTERM", (True, True))):
        watch.cause = cause
        assert (watch.poll()[0], watch.urgent()) == expected


# SIGTERM and Ctrl-C: at once, or noted while workers save -------------------------------------------------------------
@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_signals_raise_or_are_noted(number: signal.Signals, error: type[BaseException]) -> None:
    before = signal.getsignal(number)
    with Signals(), pytest.raises(error) as caught:
        signal.raise_signal(number)
    assert getattr(caught.value, "code", None) == (143 if number is signal.SIGTERM else None)
    with Signals() as signals:
        with signals.deferred():
            signal.raise_signal(number)
            assert signals.cause == number.name
            fails_with(error, "", signal.raise_signal, number)  # the second
        fails_with(error, "", signals.throw)
    assert signal.getsignal(number) is before


def test_signals_ignores_other_threads() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def within() -> Any:
        with Signals():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor() as pool:
        assert pool.submit(within).result() is before
