"""Which checkpoints of a run are kept: a pure decision by step and score."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """What is kept of a run's checkpoints, beside those in use."""

    num_to_keep: int = 2
    """Newest ones."""
    keep_best: int = 1
    """Those with the best scores."""
    keep_every: int | None = None
    """Steps whose multiples are kept for good; None: none."""


def to_remove(saved: Sequence[tuple[int, float | None]], retention: Retention, *, in_use: Collection[int]) -> list[int]:
    """The steps to remove, lowest first, of (step, score) of the checkpoints there are.

    Higher scores are better, of equal ones the later is; None (or NaN) was not evaluated and is never among the best.
    """
    newest = sorted(step for step, _ in saved)[-retention.num_to_keep :] if retention.num_to_keep else []
    scored = sorted((score, step) for step, score in saved if score is not None and not math.isnan(score))
    best = [step for _, step in scored[-retention.keep_best :]] if retention.keep_best else []
    kept = {*newest, *best, *in_use}
    return sorted(
        step
        for step, _ in saved
        if step not in kept and (retention.keep_every is None or step % retention.keep_every != 0)
    )
