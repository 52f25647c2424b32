"""Which checkpoints are kept."""

from __future__ import annotations

import pytest

from rayrec.checkpoint import Retention, to_remove

NAN = float("nan")
STEPS = [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("scores", "retention", "in_use", "removed"),
    [
        ([None] * 5, Retention(), [], [10, 20, 30]),
        ([None] * 5, Retention(num_to_keep=1), [], [10, 20, 30, 40]),
        ([None] * 5, Retention(num_to_keep=9), [], []),
        ([None] * 5, Retention(num_to_keep=1), [20], [10, 30, 40]),
        ([0.9, 0.1, 0.2, 0.3, 0.4], Retention(), [], [20, 30]),
        ([0.1, 0.9, 0.9, 0.3, 0.4], Retention(), [], [10, 20]),  # of equal ones the later
        ([0.1, None, 0.0, NAN, None], Retention(num_to_keep=1), [], [20, 30, 40]),
        ([0.5, 0.4, 0.3, 0.2, 0.1], Retention(num_to_keep=1, keep_best=2), [], [30, 40]),
        ([0.5, 0.4, 0.3, 0.2, 0.1], Retention(num_to_keep=1, keep_best=0), [], [10, 20, 30, 40]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], Retention(num_to_keep=1, keep_best=1), [], [10, 20, 30, 40]),
        ([None] * 5, Retention(num_to_keep=1, keep_every=20), [], [10, 30]),
        ([None] * 5, Retention(num_to_keep=1, keep_every=100), [], [10, 20, 30, 40]),
    ],
)
def test_what_is_removed(
    scores: list[float | None], retention: Retention, in_use: list[int], removed: list[int]
) -> None:
    saved = list(zip(STEPS, scores, strict=True))
    assert to_remove(saved, retention, in_use=in_use) == removed
    assert to_remove(saved[::-1], retention, in_use=in_use) == removed


def test_nothing_saved() -> None:
    assert to_remove([], Retention(keep_every=1), in_use=[5]) == []
