"""Splits cover every row once, in order, with the chunk sizes of the reference implementations."""

from typing import Any

import pytest
from builders.faults import rejects
from hypothesis import given
from hypothesis import strategies as st

from rayrec.config import InputError
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex, numbered
from rayrec.data.logs.splits import Split


def index_of(*rows: int) -> LogIndex:
    return LogIndex(numbered((f"day_{i // 2}", i, i + 1, count) for i, count in enumerate(rows)), Faults())


@given(st.integers(14, 10_000_000_000))
def test_sevenths(rows: int) -> None:
    split = Split(kind="sevenths").rows(index_of(rows))
    last = rows // 7  # the first `rows mod 7` chunks have one more, as in dlrm's data_utils
    middle = rows - last // 2
    assert split == {"train": (0, rows - last), "validation": (rows - last, middle), "test": (middle, rows)}


def test_known_logs_are_split_by_sevenths_files_and_fractions() -> None:
    ranges = [(0, 39_291_958), (39_291_958, 42_566_288), (42_566_288, 45_840_617)]
    assert [*Split().rows(index_of(45_840_617)).items()] == list(zip(("train", "validation", "test"), ranges, strict=True))
    split = Split(kind="last_file").rows(index_of(10, 5, 0, 7, 3, 4))
    assert split == {"train": (0, 22), "validation": (22, 26), "test": (26, 29)}
    assert Split(kind="fraction", validation=0.29, test=0.0).rows(index_of(60, 40)) == {"train": (0, 71), "validation": (71, 100)}


@pytest.mark.parametrize(
    ("kind", "rows"), [("sevenths", (6,)), ("sevenths", (13,)), ("last_file", (5,)), ("last_file", (5, 5, 1))]
)
def test_split_rejects_empty_part(kind: str, rows: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"leave no rows for .*--eval-data\.path"):
        Split(kind=kind).rows(index_of(*rows))  # type: ignore[arg-type]


@given(st.integers(20, 10_000_000), st.floats(0.1, 0.4), st.floats(0.1, 0.4), st.booleans())
def test_fractions_cover_every_row_in_order(rows: int, validation: float, test: float, test_first: bool) -> None:
    ranges = Split(kind="fraction", validation=validation, test=test, test_first=test_first).rows(index_of(rows))
    in_order = sorted(ranges.values())
    assert [start for start, _ in in_order] == [0, *(stop for _, stop in in_order[:-1])]
    assert in_order[-1][1] == rows
    assert list(ranges) == ["train", "validation", "test"]
    assert (ranges["test"] < ranges["validation"]) == test_first
    for name, share in (("validation", validation), ("test", test)):
        assert abs(ranges[name][1] - ranges[name][0] - rows * share) <= 0.5


def days_of(*rows: int, names: tuple[str, ...] = ("day_0", "day_1", "day_2", "day_9", "day_10")) -> LogIndex:
    return LogIndex(numbered((name, i, i + 1, count) for i, (name, count) in enumerate(zip(names, rows, strict=True))), Faults())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"train": (0, 10), "validation": (10, 14), "test": (14, 19)}),
        ({"test_first": True}, {"train": (0, 10), "validation": (14, 19), "test": (10, 14)}),
        ({"train_days": 1, "test_days": 2}, {"train": (0, 2), "validation": (5, 10), "test": (10, 19)}),
        ({"validation_days": 2, "test_days": 0}, {"train": (0, 10), "validation": (10, 19)}),
    ],
)
def test_days_are_counted(options: dict[str, int], expected: dict[str, tuple[int, int]]) -> None:
    assert Split(kind="days", **options).rows(days_of(2, 3, 5, 4, 5)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"validation": ("day_9",)}, None),  # the others are on both of its sides
        ({"validation": ("day_10",)}, {"train": (0, 14), "validation": (14, 19)}),
        (
            {"train": ("day_1", "day_2"), "validation": ("day_[9]",), "test": ("day_10.gz", "day_10")},
            None,  # no day is named day_10.gz
        ),
        (
            {"train": ("day_1", "day_2"), "validation": ("day_[9]",), "test": ("day_1?",)},
            {"train": (2, 10), "validation": (10, 14), "test": (14, 19)},
        ),
        ({"validation": ("day_0",), "test": ("day_1",)}, {"train": (5, 19), "validation": (0, 2), "test": (2, 5)}),
    ],
)
def test_days_are_named(names: dict[str, tuple[str, ...]], expected: dict[str, tuple[int, int]] | None) -> None:
    split = Split(kind="named_days", **{f"{name}_names": days for name, days in names.items()})  # type: ignore[arg-type]
    if expected is not None:
        assert split.rows(days_of(2, 3, 5, 4, 5)) == expected
    else:
        rejects(r"days of train are not adjacent at day_10|no day is named day_10\.gz", split.rows, days_of(2, 3, 5, 4, 5))


def test_days_are_folders_or_files() -> None:
    folders = days_of(2, 3, 5, 4, 5, names=("l/dt=1/a", "l/dt=1/b", "l/dt=2/a", "l/dt=3/a", "l/dt=3/b"))
    assert Split(kind="days").rows(folders) == {"train": (0, 5), "validation": (5, 10), "test": (10, 19)}
    named = Split(kind="named_days", validation_names=("dt=2",), test_names=("dt=3",))
    assert named.rows(folders) == Split(kind="days").rows(folders)
    files = days_of(2, 3, names=("l/mon.csv.gz", "l/tue.csv.gz"))
    assert Split(kind="named_days", validation_names=("tue",)).rows(files)["validation"] == (2, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "fraction", "validation": 0.0}, "validation must be above 0, .* got 0.0 and 0.1"),
        ({"kind": "fraction", "validation": 0.6, "test": 0.5}, "their sum below 1"),
        ({"kind": "days", "validation_days": 0}, "must be at least 1"),
        ({"kind": "sevenths", "test": 0.2}, "split sevenths: test applies to kind fraction only"),
        ({"kind": "fraction", "test_days": 2}, "split fraction: test_days applies to kind days only"),
        ({"kind": "named_days"}, "validation_names is empty"),
        ({"kind": "days", "test_days": 4}, "the log has 5 days, and 5 held-out ones leave none"),
        ({"kind": "days", "train_days": 4}, "train_days 4 and the held-out days overlap; 3 days are left"),
        ({"kind": "days", "validation_days": 1, "test_days": 2}, "leave no rows for test"),
        ({"kind": "fraction", "validation": 0.1, "test": 0.01}, "leave no rows for test"),
        (
            {"kind": "named_days", "validation_names": ("day_1*",), "test_names": ("day_10",)},
            "day_10 is named for validation and test",
        ),
        ({"kind": "named_days", "validation_names": ("day_9",), "train_names": ("x",)}, "no day is named x; the log has day_0"),
        ({"kind": "named_days", "validation_names": ("day_9",), "train_names": ("day_1",)}, "no rows for validation"),
    ],
)
def test_split_rejects_invalid_parts(options: dict[str, Any], message: str) -> None:
    rows = (2, 3, 5, 1, 5) if "overlap" in message else (2, 3, 5, 0, 0)
    rejects(message, lambda: Split(**options).rows(days_of(*rows)))
