"""Order within groups: as scikit-learn has it group by group, and the same however rows are split over processes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import roc_auc_score
from torch import distributed

from rayrec.config import InputError
from rayrec.metrics.ranking import NO_GROUP, GaucAccumulator, gauc

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    count = draw(st.integers(0, 60))
    groups = draw(hnp.arrays(np.int64, count, elements=st.sampled_from([NO_GROUP, -(2**63), -1, 7, 2**62])))
    scores = draw(hnp.arrays(np.float32, count, elements=st.sampled_from([-3.5, -0.0, 0.0, 0.25, 7.0])))
    return groups, scores, draw(hnp.arrays(np.int64, count, elements=st.integers(0, 1)))


def by_hand(groups: np.ndarray, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    total, counted, found = 0.0, 0, 0
    for group in set(groups.tolist()) - {NO_GROUP}:
        mine = groups == group
        if len(set(labels[mine].tolist())) == 2:
            total += roc_auc_score(labels[mine], logits[mine]) * mine.sum()
            counted, found = counted + int(mine.sum()), found + 1
    return {"gauc": total / counted if counted else math.nan, "gauc_groups": found, "gauc_rows": counted}


@settings(max_examples=150, deadline=None)
@given(rows())
def test_it_is_the_mean_of_the_groups_own(case: Rows) -> None:
    assert gauc(*case) == pytest.approx(by_hand(*case), nan_ok=True)


def many() -> Rows:
    chance = np.random.default_rng(0)
    return (
        chance.integers(0, 40, 1000) * 2**40,
        chance.integers(-5, 5, 1000).astype(np.float32),
        chance.integers(0, 2, 1000),
    )


def a_rank(folder: str, rank: int) -> None:
    """Holds a part of unequal size; the last has none."""
    start, stop = ((0, 700), (700, 1000), (1000, 1000))[rank]
    kept = GaucAccumulator()
    for first in range(start, stop, 100):
        kept.update(*(torch.from_numpy(values[first : first + 100]) for values in many()))
    found = kept.compute()
    everyone: list[dict[str, float]] = [{}] * 3
    distributed.all_gather_object(everyone, found)
    assert everyone == [found] * 3
    if rank == 1:
        kept.update(np.array([1]), np.array([math.nan]), np.array([0]))
    with pytest.raises(InputError, match="1 of 1001 logits are NaN"):  # by every rank, so that none waits
        kept.compute()
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_it_does_not_depend_on_who_holds_which_rows(tmp_path: Path) -> None:
    run_ranks(a_rank, 3, str(tmp_path))
    expected = by_hand(*many())
    assert json.loads((tmp_path / "found.json").read_text()) == pytest.approx(expected)
    assert expected["gauc_groups"] == 39


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="3 groups and 2 logits"):
        gauc(np.zeros(3, np.int64), np.zeros(2), np.zeros(2))
    with pytest.raises(InputError, match="NaN"):
        gauc(np.zeros(1, np.int64), np.array([np.nan]), np.zeros(1))
    kept = GaucAccumulator()
    with pytest.raises(InputError, match="3 groups and 2 logits"):
        kept.update(np.zeros(3, np.int64), np.zeros(2), np.zeros(2))
    kept.update(np.zeros(1, np.int64), np.array([np.nan]), np.zeros(1))
    with pytest.raises(InputError, match="1 of 1 logits are NaN"):
        kept.compute()
