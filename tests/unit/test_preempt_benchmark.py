"""What the benchmark of preemptions reads from the steps that were begun."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

STAMPS = "7 0 100.0\n7 1 101.0\n7 2 102.0\n9 1 110.0\n9 2 111.0\n3 3 130.0\n3 4 13"


@pytest.fixture
def preempt(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("preempt_benchmark")


def test_attempts_are_told_apart_by_their_process(preempt: Any) -> None:
    assert preempt.stretches(STAMPS) == [
        preempt.Stretch(0, 3, 100.0, 102.0),
        preempt.Stretch(1, 3, 110.0, 111.0),
        preempt.Stretch(3, 4, 130.0, 130.0),  # the last line is not whole
    ]
    assert preempt.stretches("") == []


def test_a_preemption_costs_what_the_restarts_after_its_notice_cost(preempt: Any) -> None:
    attempts = preempt.stretches(STAMPS)
    killed_in_step_2, ended_before = (101.5, 103.0), (110.5, 125.0)
    assert preempt.losses(attempts, [killed_in_step_2, ended_before]) == [
        preempt.Loss(steps_redone=2, idle_s=8.0, after_kill_s=7.0),
        preempt.Loss(steps_redone=0, idle_s=19.0, after_kill_s=5.0),
    ]
    assert preempt.losses(attempts, [(101.5, 120.0)]) == [
        preempt.Loss(steps_redone=2, idle_s=27.0, after_kill_s=10.0)
    ]  # two restarts
    assert preempt.losses(attempts[:1], [(101.5, 120.0)]) == [
        preempt.Loss(steps_redone=0, idle_s=0.0, after_kill_s=0.0)
    ]


def test_moments_are_random_from_a_seed_and_one_in_each_part(preempt: Any) -> None:
    chosen = preempt.moments(600, 4, seed=0)
    assert chosen == preempt.moments(600, 4, seed=0) != preempt.moments(600, 4, seed=1)
    assert all(150 * part <= step < 150 * part + 60 for part, step in enumerate(chosen))
