"""Splits cover every row once, in order, with the chunk sizes of the reference implementations."""

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.faults import rejects
from builders.logs import open_index
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import Block, LogIndex, Segment, SegmentRange, numbered
from rayrec.data.logs.reading import (
    distinct_names,
    good_lines,
    line_starts,
    name_slices,
    read_column,
    read_raw,
)
from rayrec.data.logs.splits import MAX_SLICES, Slice, Split, slices_of
from rayrec.data.logs.text_log import Chunk, index_chunk, read_text
from rayrec.schema import Schema


def index_of(*rows: int) -> LogIndex:
    return LogIndex(
        numbered((f"day_{i // 2}", i, i + 1, count) for i, count in enumerate(rows)),
        Faults(),
    )


@given(st.integers(14, 10_000_000_000))
def test_sevenths(rows: int) -> None:
    split = Split(kind="sevenths").rows(index_of(rows))
    last = rows // 7  # the first `rows mod 7` chunks have one more, as in dlrm's data_utils
    middle = rows - last // 2
    assert split == {
        "train": (0, rows - last),
        "validation": (rows - last, middle),
        "test": (middle, rows),
    }


def test_known_logs_are_split_by_sevenths_files_and_fractions() -> None:
    assert [*Split().rows(index_of(45_840_617)).items()] == list(
        zip(
            ("train", "validation", "test"),
            [
                (0, 39_291_958),
                (39_291_958, 42_566_288),
                (42_566_288, 45_840_617),
            ],
            strict=True,
        )
    )
    split = Split(kind="last_file").rows(index_of(10, 5, 0, 7, 3, 4))
    assert split == {"train": (0, 22), "validation": (22, 26), "test": (26, 29)}
    assert Split(kind="fraction", validation=0.29, test=0.0).rows(index_of(60, 40)) == {
        "train": (0, 71),
        "validation": (71, 100),
    }


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        pytest.param("sevenths", (6,), id="sevenths"),
        pytest.param("sevenths", (13,), id="sevenths-13"),
        pytest.param("last_file", (5,), id="last_file"),
        pytest.param("last_file", (5, 5, 1), id="last_file-5-5-1"),
    ],
)
def test_split_rejects_empty_part(kind: str, rows: tuple[Any, ...]) -> None:
    split = Split(kind=kind)  # type: ignore[arg-type]
    rejects(r"leave no rows for .*--eval-data\.path", split.rows, index_of(*rows))


@given(st.integers(20, 10_000_000), st.floats(0.1, 0.4), st.floats(0.1, 0.4), st.booleans())
def test_fractions_cover_every_row_in_order(
    rows: int,
    validation: float,
    test: float,
    test_first: bool,
) -> None:
    ranges = Split(
        kind="fraction",
        validation=validation,
        test=test,
        test_first=test_first,
    ).rows(index_of(rows))
    in_order = sorted(ranges.values())
    assert [start for start, _ in in_order] == [0, *(stop for _, stop in in_order[:-1])]
    assert in_order[-1][1] == rows
    assert list(ranges) == ["train", "validation", "test"]
    assert (ranges["test"] < ranges["validation"]) == test_first
    for name, share in (("validation", validation), ("test", test)):
        assert abs(ranges[name][1] - ranges[name][0] - rows * share) <= 0.5


def days_of(
    *rows: int,
    names: tuple[str, ...] = (
        "day_0",
        "day_1",
        "day_2",
        "day_9",
        "day_10",
    ),
) -> LogIndex:
    return LogIndex(
        numbered(
            (name, i, i + 1, count) for i, (name, count) in enumerate(zip(names, rows, strict=True))
        ),
        Faults(),
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            {},
            {"train": (0, 10), "validation": (10, 14), "test": (14, 19)},
            id="train-0-10-validation-10-14",
        ),
        pytest.param(
            {"test_first": True},
            {"train": (0, 10), "validation": (14, 19), "test": (10, 14)},
            id="test_first-True",
        ),
        pytest.param(
            {"train_days": 1, "test_days": 2},
            {"train": (0, 2), "validation": (5, 10), "test": (10, 19)},
            id="train_days-1-test_days-2",
        ),
        pytest.param(
            {"validation_days": 2, "test_days": 0},
            {"train": (0, 10), "validation": (10, 19)},
            id="validation_days-2-test_days-0",
        ),
    ],
)
def test_days_are_counted(options: dict[str, Any], expected: dict[str, Any]) -> None:
    split = Split(kind="days", **options)  # type: ignore[arg-type]
    assert split.rows(days_of(2, 3, 5, 4, 5)) == expected


def test_days_are_named() -> None:
    named = {"train": ("day_1", "day_2"), "validation": ("day_[9]",)}
    for names, expected in (
        ({"validation": ("day_9",)}, None),  # the others are on both of its sides
        ({"validation": ("day_10",)}, {"train": (0, 14), "validation": (14, 19)}),
        ({**named, "test": ("day_10.gz", "day_10")}, None),  # no day is named day_10.gz
        (
            {**named, "test": ("day_1?",)},
            {"train": (2, 10), "validation": (10, 14), "test": (14, 19)},
        ),
        (
            {"validation": ("day_0",), "test": ("day_1",)},
            {"train": (5, 19), "validation": (0, 2), "test": (2, 5)},
        ),
    ):
        options = {f"{name}_names": days for name, days in names.items()}
        split = Split(kind="named_days", **options)  # type: ignore[arg-type]
        if expected is not None:
            assert split.rows(days_of(2, 3, 5, 4, 5)) == expected
        else:
            rejects(
                r"days of train are not adjacent at day_10|no day is named day_10\.gz",
                split.rows,
                days_of(2, 3, 5, 4, 5),
            )


def test_days_are_folders_or_files() -> None:
    folders = days_of(
        2,
        3,
        5,
        4,
        5,
        names=(
            "l/dt=1/a",
            "l/dt=1/b",
            "l/dt=2/a",
            "l/dt=3/a",
            "l/dt=3/b",
        ),
    )
    assert Split(kind="days").rows(folders) == {
        "train": (0, 5),
        "validation": (5, 10),
        "test": (10, 19),
    }
    named = Split(kind="named_days", validation_names=("dt=2",), test_names=("dt=3",))
    assert named.rows(folders) == Split(kind="days").rows(folders)
    files = days_of(2, 3, names=("l/mon.csv.gz", "l/tue.csv.gz"))
    assert Split(kind="named_days", validation_names=("tue",)).rows(files)["validation"] == (2, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"kind": "fraction", "validation": 0.0},
            "validation must be above 0, .* got 0.0 and 0.1",
            id="kind-fraction-validation-0.0",
        ),
        pytest.param(
            {"kind": "fraction", "validation": 0.6, "test": 0.5},
            "their sum below 1",
            id="kind-fraction-validation-0.6",
        ),
        pytest.param(
            {"kind": "days", "validation_days": 0},
            "must be at least 1",
            id="kind-days-validation_days-0",
        ),
        pytest.param(
            {"kind": "sevenths", "test": 0.2},
            "split sevenths: test applies to kind fraction only",
            id="kind-sevenths-test-0.2",
        ),
        pytest.param(
            {"kind": "fraction", "test_days": 2},
            "split fraction: test_days applies to kind days only",
            id="kind-fraction-test_days-2",
        ),
        pytest.param({"kind": "named_days"}, "validation_names is empty", id="kind-named_days"),
        pytest.param(
            {"kind": "days", "test_days": 4},
            "the log has 5 days, and 5 held-out ones leave none",
            id="kind-days-test_days-4",
        ),
        pytest.param(
            {"kind": "days", "train_days": 4},
            "train_days 4 and held-out days overlap; 3 days are left",
            id="kind-days-train_days-4",
        ),
        pytest.param(
            {"kind": "days", "validation_days": 1, "test_days": 2},
            "leave no rows for test",
            id="kind-days-validation_days-1",
        ),
        pytest.param(
            {"kind": "fraction", "validation": 0.1, "test": 0.01},
            "leave no rows for test",
            id="kind-fraction-validation-0.1",
        ),
        pytest.param(
            {"kind": "named_days", "validation_names": ("day_1*",), "test_names": ("day_10",)},
            "day_10 is named for validation and test",
            id="kind-named_days-day_10-is-named-for-validation",
        ),
        pytest.param(
            {"kind": "named_days", "validation_names": ("day_9",), "train_names": ("x",)},
            "no day is named x; the log has day_0",
            id="kind-named_days-no-day-is-named-x-the-log-has",
        ),
        pytest.param(
            {"kind": "named_days", "validation_names": ("day_9",), "train_names": ("day_1",)},
            "no rows for validation",
            id="kind-named_days-no-rows-for-validation",
        ),
    ],
)
def test_split_rejects_invalid_parts(options: dict[str, Any], message: str) -> None:
    rows = (2, 3, 5, 1, 5) if "overlap" in message else (2, 3, 5, 0, 0)
    rejects(message, lambda: Split(**options).rows(days_of(*rows)))


# -- Line numbers of valid rows, and the values of a column
SCHEMA = Schema(
    tokens="hexadecimal",
    label="y",
    dense=("i",),
    sparse=("c",),
)
GOOD = b"1\t3\t0000000a"
LINES = [GOOD, b"", b"1\t2", b"2\t3\t0000000a", b"1\t3\t0a", b"x" * 5000]


@pytest.mark.parametrize("ending", [b"\n", b""])
@settings(max_examples=40, deadline=None)
@given(kinds=st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5]), min_size=1, max_size=80))
def test_good_lines_of_any_mixture(
    tmp_path_factory: pytest.TempPathFactory,
    ending: bytes,
    kinds: list[int],
) -> None:
    if not ending and LINES[kinds[-1]] == b"":
        kinds = [*kinds, 0]  # an empty last line without a newline is no line
    path = tmp_path_factory.getbasetemp() / "mixture.tsv"
    content = b"\n".join(LINES[kind] for kind in kinds) + ending
    path.write_bytes(content)
    expected = [place for place, kind in enumerate(kinds) if kind == 0]
    entries, faults = index_chunk(Chunk(str(path), 0, len(content), len(content)), SCHEMA, 200)
    segments = numbered(entries)
    assert faults.total == len(kinds) - len(expected)
    got = []
    first = 0
    for segment in segments:
        got += [first + int(line) for line in good_lines(segment, SCHEMA)]
        first += len(line_starts(read_text(segment), segment.stop - segment.start))
    assert (got, first) == (expected, len(kinds))


def test_many_faults(tmp_path: Path) -> None:
    content = b"".join((GOOD if place % 3 else b"bad") + b"\n" for place in range(1000))
    (tmp_path / "log.tsv").write_bytes(content)
    segment = Segment(str(tmp_path / "log.tsv"), 0, len(content), 0, 666)
    assert good_lines(segment, SCHEMA).tolist() == [place for place in range(1000) if place % 3]


HEXADECIMAL = Schema(tokens="hexadecimal", dense=("i", "j"), sparse=("c", "d"))
ANY = Schema(
    label="click",
    dense=("age",),
    sparse=("user", "tags"),
    lists=("tags",),
    tokens="any",
    delimiter=",",
)


def _values(
    path: Path,
    schema: Schema,
    *columns: str,
    start: int = 0,
    stop: int | None = None,
) -> list[list[object]]:
    with tempfile.TemporaryDirectory() as cache:
        (segment,) = open_index(path, schema, segment_bytes=1 << 16, cache=cache).segments
        block = Block((SegmentRange(segment, start, segment.rows if stop is None else stop),), None)
        raw = read_raw([segment], schema)
        return [read_column(block, raw, column, schema).to_pylist() for column in columns]


def test_text(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text(
        "\n".join(
            [
                "1\t3\t\t0000000a\t",
                "0\t-7\t5\t\tffffffff",
                "nonsense",
                "0\t\t123456789012\t0000000b\t00000000",
            ]
        )
        + "\n"
    )
    assert _values(tmp_path / "log.tsv", HEXADECIMAL, "i", "j", "c", "d") == [
        [3, -7, None],
        [None, 5, 123456789012],
        [0xA, None, 0xB],
        [None, 0xFFFFFFFF, 0],
    ]
    assert _values(tmp_path / "log.tsv", HEXADECIMAL, "c", start=1, stop=3) == [[None, 0xB]]


@pytest.mark.parametrize("faulty", [False, True])
def test_csv(tmp_path: Path, faulty: bool) -> None:
    (tmp_path / "log.csv").write_text(
        "\n".join(
            [
                "click,age,user,tags",
                "1,30,ann,a|b",
                "0,,bob,",
                '0,2.5,"x,y",a',
                *(["7,1,eve,a"] if faulty else []),
                "1,-1,,b",
                "0,4,ann,",
            ]
        )
        + "\n"
    )
    assert open_index(tmp_path / "log.csv", ANY).faults.total == faulty
    ages = [30.0, None, 2.5, -1.0, 4.0]
    users = ["ann", "bob", "x,y", None, "ann"]
    assert _values(tmp_path / "log.csv", ANY, "age", "user") == [ages, users]
    assert _values(tmp_path / "log.csv", ANY, "user", start=2, stop=4) == [["x,y", None]]


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        pytest.param(
            pa.array([5, None, 2**62]),
            ["5", None, str(2**62)],
            id="pa.array-5-None-2-62",
        ),
        pytest.param(pa.array(["a", "", None]), ["a", None, None], id="pa.array-a-None"),
        pytest.param(
            pa.array(["b", None, "b"]).dictionary_encode(),
            ["b", None, "b"],
            id="pa.array-b-None-b",
        ),
        pytest.param(
            pa.array([True, False, None]),
            ["1", "0", None],
            id="pa.array-True-False-None",
        ),
        pytest.param(pa.array([b"a", b"", None]), ["a", None, None], id="pa.array-b-a-b-None"),
        pytest.param(
            pa.array([None, None, None]),
            [None, None, None],
            id="pa.array-None-None-None",
        ),
    ],
)
def test_parquet(users: Any, expected: list[Any], tmp_path: Path) -> None:
    table = pa.table(
        {
            "click": [1, 0, 1],
            "age": [1, 2, 3],
            "user": users,
            "tags": [["a"], [], None],
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    assert _values(tmp_path / "log.parquet", ANY, "user") == [expected]


def test_slice_of_names_rows(tmp_path: Path) -> None:
    for day, rows in enumerate([2, 3]):
        (tmp_path / f"day_{day}").write_text("1\t3\t\t0000000a\t\n" * rows)
    index = open_index(tmp_path, HEXADECIMAL, segment_bytes=1 << 16, cache=tmp_path / "cache")
    stretches = slices_of(index)[1]
    block = Block(tuple(SegmentRange(segment, 0, segment.rows) for segment in index.segments), None)
    assert name_slices(block, stretches).to_pylist() == ["day_0"] * 2 + ["day_1"] * 3
    sevenths = Block((SegmentRange(index.segments[1], 1, 3),), None)
    assert name_slices(sevenths, [Slice("a", 0, 4), Slice("b", 4, 5)]).to_pylist() == ["a", "b"]
    assert distinct_names(
        [
            Slice("a", 0, 1),
            Slice("b", 1, 2),
            Slice("a", 2, 3),
        ]
    ) == [
        "a (1)",
        "b",
        "a (2)",
    ]


@pytest.mark.parametrize(
    ("num_files", "kind", "last"),
    [
        pytest.param(MAX_SLICES, "file", f"day_{MAX_SLICES - 1}", id="most"),
        pytest.param(
            MAX_SLICES + 1,
            "files",
            f"day_{MAX_SLICES - 1} ... day_{MAX_SLICES}",
            id="one more",
        ),
    ],
)
def test_files_are_combined_above_largest_number(num_files: int, kind: str, last: str) -> None:
    index = LogIndex(numbered((f"day_{number}", 0, 2, 2) for number in range(num_files)), Faults())
    unit, slices = slices_of(index)
    assert (unit, len(slices)) == (kind, MAX_SLICES)
    assert (slices[-1].name, slices[-1].stop) == (last, 2 * num_files)
