"""What restarts and saves cost, from made-up events."""

from __future__ import annotations

from typing import Any

import pytest

from rayrec.observe.history import Restart, costs, restarts


def events(*described: tuple[float, str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"time": time, "kind": kind, **fields} for time, kind, fields in described]


BEGIN = ((0, "run", {}), (1, "attempt", {"number": 1}), (3, "start", {"step": 0}), (5, "step", {"step": 20}))
END = ((30, "finish", {"step": 40}),)


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
    assert restarts(events(*BEGIN, *between, *END)) == expected


def test_a_finished_run_that_is_trained_for_longer_was_not_restarted() -> None:
    longer = ((90, "run", {}), (95, "start", {"step": 40}), (97, "step", {"step": 60}))
    whole = (*BEGIN, *END, (31, "summary", {"steps": 40}), *longer)
    assert restarts(events(*whole)) == []
    died = ((98, "failure", {"cause": "x"}), (99, "start", {"step": 40}), (100, "step", {"step": 60}))
    assert restarts(events(*whole, *died)) == [Restart("x", 3, 20)]
    # Nobody wrote its summary: that driver was lost.
    assert [each.cause for each in restarts(events(*BEGIN, *END, *longer))] == ["the driver was lost"]


def test_a_failure_that_nothing_follows_is_no_restart() -> None:
    assert restarts(events(*BEGIN, (6, "failure", {"cause": "the loss is nan", "last": True}))) == []


def test_a_failure_before_anything_was_trained_is_no_restart() -> None:
    assert restarts(events((0, "run", {}), (1, "failure", {"cause": "x"}), *BEGIN[2:], *END)) == []


def test_costs() -> None:
    told = costs(
        events(
            *BEGIN,
            (6, "checkpoint", {"stall_s": 0.5}),
            (7, "failure", {"cause": "worker 0 died"}),
            (9, "start", {"step": 8}),
            (10, "step", {"step": 20}),
            (11, "checkpoint", {"stall_s": 1.5}),
            *END,
        ),
        train_s=98.0,
    )
    assert told == {
        "restarts": 1,
        "restart_causes": [{"cause": "worker 0 died", "lost_s": 4, "steps_redone": 12}],
        "lost_s": 4,
        "steps_redone": 12,
        "checkpoint_stall_s": 2.0,
        "checkpoint_stall_fraction": 0.02,
    }
    assert costs([], train_s=0.0)["checkpoint_stall_fraction"] == 0.0
