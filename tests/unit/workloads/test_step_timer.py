"""Tests of step timers: phases are exclusive, complete, and exclude other threads."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from ranks.checkpoint import run_ranks
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from rayrec.observe.timing import PHASES
from rayrec.workloads import step_timer

SHORT_S = 0.02
ROUNDING_S = 1e-6


def test_phases_are_exclusive_and_add_up() -> None:
    clock = step_timer.HostTimer()
    outer_s = time.perf_counter()
    clock.start()
    inner_s = time.perf_counter()
    with clock.phase("backward"):
        time.sleep(SHORT_S)
        with clock.phase("collectives"):
            time.sleep(2 * SHORT_S)
        time.sleep(SHORT_S)
    time.sleep(SHORT_S)
    last_s = time.perf_counter()
    clock.cut()
    end_s = time.perf_counter()
    times_s = clock.read()
    assert list(times_s) == list(PHASES)
    assert last_s - inner_s - ROUNDING_S <= sum(times_s.values()) <= end_s - outer_s + ROUNDING_S
    assert min(times_s["backward"], times_s["collectives"]) >= 2 * SHORT_S
    assert times_s["other"] >= SHORT_S
    assert times_s["data"] == 0.0
    clock.cut()
    next_s = time.perf_counter() - last_s
    assert sum(clock.read().values()) <= next_s + ROUNDING_S  # the next interval begins at the cut


def test_time_outside_start_and_stop_and_errors_do_not_count() -> None:
    clock = step_timer.HostTimer()
    begin_s = time.perf_counter()
    clock.start()
    clock.stop()
    first_s = time.perf_counter() - begin_s
    with clock.phase("forward"):
        time.sleep(SHORT_S)
    begin_s = time.perf_counter()
    clock.start()
    clock.cut()
    assert sum(clock.read().values()) <= first_s + time.perf_counter() - begin_s + ROUNDING_S
    with pytest.raises(StopIteration), clock.phase("data"):
        raise StopIteration
    assert clock.now == "other"


class FakeEvent:
    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = float("nan")

    def record(self, stream: object) -> None:
        assert stream == "computing"
        self.at_ms = FakeEvent.now_ms

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at_ms - self.at_ms


def test_device_timer_uses_events_in_compute_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "computing")
    monkeypatch.setattr(torch.cuda, "Event", made := Mock(side_effect=FakeEvent))
    clock = step_timer.DeviceTimer(torch.device("cuda"))

    def passes(milliseconds: float) -> None:
        FakeEvent.now_ms += milliseconds

    for _ in range(3):  # stretches; what lies between them, evaluation say, is not marked
        clock.enter("forward")
        clock.enter("other")
        passes(1000)
        clock.start()
        for interval in range(1, 3):
            passes(1)
            with clock.phase("backward"):
                passes(10 * interval)
                with clock.phase("collectives"):
                    passes(5)
                passes(10)
            passes(2)
            clock.cut()
            times_s = clock.read()
            expected = {"other": 3e-3, "backward": (10 * interval + 10) / 1e3, "collectives": 5e-3}
            assert {name: seconds for name, seconds in times_s.items() if seconds} == pytest.approx(expected)
        clock.stop()
    assert made.call_count < 15  # they are used again


def test_model_and_optimizer_phases_are_timed_unless_disabled() -> None:
    clock = step_timer.HostTimer()
    model = torch.nn.Linear(4, 1)
    optimizer = step_timer.TimedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), clock)
    step_timer.time_forward(model, clock)
    clock.start()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    clock.cut()
    times_s = clock.read()
    assert times_s["forward"] > 0
    assert times_s["optimizer"] > 0
    assert not torch.equal(before, model.weight)
    clock = step_timer.make_step_timer(torch.device("cpu"), measure=False)
    assert type(clock) is step_timer.StepTimer
    model = torch.nn.Linear(4, 1)
    step_timer.time_forward(model, clock)
    assert not model._forward_hooks
    plain = distributed.Work.wait
    with step_timer.time_collective_waits(clock):
        assert distributed.Work.wait is plain
    assert clock.read() == {}


def test_collective_waits_exclude_saving_thread(single_rank: None) -> None:
    clock = step_timer.HostTimer()
    plain = distributed.Work.wait
    with step_timer.time_collective_waits(clock):
        clock.start()
        distributed.all_reduce(torch.ones(3))
        clock.cut()
        assert clock.read()["collectives"] > 0
        thread = threading.Thread(target=lambda: distributed.all_reduce(torch.ones(3)))
        thread.start()
        thread.join()
        clock.cut()
        assert clock.read()["collectives"] == 0.0
    assert distributed.Work.wait is plain


SLEEP_S = 1.5


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(SLEEP_S if distributed.get_rank() == 1 else 0.0)
        return gradient


def backward_passes(folder: str, rank: int) -> None:
    """Run a rank and write the phase times of its second step to FOLDER/RANK.json."""
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    clock = step_timer.HostTimer()
    with step_timer.time_collective_waits(clock):
        for _ in range(2):
            clock.start()
            loss = Slow.apply(model(torch.ones(2, 4))).sum()
            step_timer.time_gradient_exchange(clock, loss)
            with clock.phase("backward"):
                loss.backward()
            clock.cut()
    Path(folder, f"{rank}.json").write_text(json.dumps(clock.read()))


def test_backward_end_waits_for_slowest_worker(tmp_path: Path) -> None:
    """A longer computation on rank 1 counts as backward there, and as collectives on rank 0, though DDP waits in C++."""
    run_ranks(backward_passes, 2, str(tmp_path))
    quick, slow = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert quick["collectives"] > SLEEP_S / 2
    assert quick["backward"] < SLEEP_S / 2
    assert slow["backward"] >= SLEEP_S * 0.93
    assert slow["collectives"] < SLEEP_S / 2
