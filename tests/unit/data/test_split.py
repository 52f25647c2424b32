"""Splits cover every row once, in order, with the chunk sizes of the reference implementations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.config import InputError
from rayrec.data.log import LogIndex, numbered
from rayrec.data.parsing import Faults
from rayrec.data.split import Split


def index_of(*rows: int) -> LogIndex:
    return LogIndex(numbered((f"day_{i // 2}", i, i + 1, count) for i, count in enumerate(rows)), Faults())


@given(st.integers(14, 10_000_000_000))
def test_sevenths(rows: int) -> None:
    split = Split(kind="sevenths").rows(index_of(rows))
    assert tuple(split) == ("train", "validation", "test")
    (start, boundary), (again, middle), (and_again, stop) = split.values()
    assert (start, again, and_again, stop) == (0, boundary, middle, rows)
    assert stop - boundary == rows // 7
    assert 0 <= (middle - boundary) - (stop - middle) <= 1


@pytest.mark.parametrize("rows", range(14, 60))
def test_sevenths_are_seven_near_equal_chunks(rows: int) -> None:
    chunks = np.array_split(np.arange(rows), 7)  # the first `rows mod 7` get one more, as in dlrm's data_utils
    split = Split().rows(index_of(rows))
    assert split["train"][1] == chunks[6][0]
    assert [len(half) for half in np.array_split(chunks[6], 2)] == [
        stop - start for start, stop in list(split.values())[1:]
    ]


def test_criteo_kaggle() -> None:
    assert Split().rows(index_of(45_840_617)) == {
        "train": (0, 39_291_958),
        "validation": (39_291_958, 42_566_288),
        "test": (42_566_288, 45_840_617),
    }


def test_the_last_file_is_held_out() -> None:
    split = Split(kind="last_file").rows(index_of(10, 5, 0, 7, 3, 4))
    assert split == {"train": (0, 22), "validation": (22, 26), "test": (26, 29)}


@pytest.mark.parametrize(
    ("kind", "rows"), [("sevenths", (6,)), ("sevenths", (13,)), ("last_file", (5,)), ("last_file", (5, 5, 1))]
)
def test_an_empty_part_is_refused(kind: str, rows: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"leave no rows for .*--eval-data\.path"):
        Split(kind=kind).rows(index_of(*rows))  # type: ignore[arg-type]
