"""Line numbers of valid rows, and the values of a column."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.logs import open_index
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data.logs.index import Block, Segment, SegmentRange, numbered
from rayrec.data.logs.reading import distinct_names, good_lines, line_starts, read_raw, slice_of, values_of
from rayrec.data.logs.splits import Slice, slices_of
from rayrec.data.logs.text_log import Chunk, index_chunk, read_text
from rayrec.schema import Schema

SCHEMA = Schema(tokens="hexadecimal", label="y", dense=("i",), sparse=("c",))
GOOD = b"1\t3\t0000000a"
LINES = [GOOD, b"", b"1\t2", b"2\t3\t0000000a", b"1\t3\t0a", b"x" * 5000]


@pytest.mark.parametrize("ending", [b"\n", b""])
@settings(max_examples=40, deadline=None)
@given(kinds=st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5]), min_size=1, max_size=80))
def test_good_lines_of_any_mixture(tmp_path_factory: pytest.TempPathFactory, ending: bytes, kinds: list[int]) -> None:
    if not ending and LINES[kinds[-1]] == b"":
        kinds = [*kinds, 0]  # an empty last line without a newline is no line
    path = tmp_path_factory.getbasetemp() / "mixture.tsv"
    content = b"\n".join(LINES[kind] for kind in kinds) + ending
    path.write_bytes(content)
    expected = [place for place, kind in enumerate(kinds) if kind == 0]

    entries, faults = index_chunk(Chunk(str(path), 0, len(content), len(content)), SCHEMA, 200)
    segments = numbered(entries)
    assert faults.total == len(kinds) - len(expected)
    got, first = [], 0
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
ANY = Schema(label="click", dense=("age",), sparse=("user", "tags"), lists=("tags",), tokens="any", delimiter=",")


def _values(path: Path, schema: Schema, *columns: str, start: int = 0, stop: int | None = None) -> list[list[object]]:
    """Return the values of rows [start, stop) in a log of one segment."""
    with tempfile.TemporaryDirectory() as cache:
        (segment,) = open_index(path, schema, segment_bytes=1 << 16, cache=cache).segments
        block = Block((SegmentRange(segment, start, segment.rows if stop is None else stop),), None)
        raw = read_raw([segment], schema)
        return [values_of(block, raw, column, schema).to_pylist() for column in columns]


def test_text(tmp_path: Path) -> None:
    lines = ["1\t3\t\t0000000a\t", "0\t-7\t5\t\tffffffff", "nonsense", "0\t\t123456789012\t0000000b\t00000000"]
    (tmp_path / "log.tsv").write_text("\n".join(lines) + "\n")
    assert _values(tmp_path / "log.tsv", HEXADECIMAL, "i", "j", "c", "d") == [
        [3, -7, None],
        [None, 5, 123456789012],
        [0xA, None, 0xB],
        [None, 0xFFFFFFFF, 0],
    ]
    assert _values(tmp_path / "log.tsv", HEXADECIMAL, "c", start=1, stop=3) == [[None, 0xB]]


@pytest.mark.parametrize("faulty", [False, True])
def test_csv(tmp_path: Path, faulty: bool) -> None:
    rows = ["1,30,ann,a|b", "0,,bob,", '0,2.5,"x,y",a', *(["7,1,eve,a"] if faulty else []), "1,-1,,b", "0,4,ann,"]
    (tmp_path / "log.csv").write_text("\n".join(["click,age,user,tags", *rows]) + "\n")
    assert open_index(tmp_path / "log.csv", ANY).faults.total == faulty
    ages, users = [30.0, None, 2.5, -1.0, 4.0], ["ann", "bob", "x,y", None, "ann"]
    assert _values(tmp_path / "log.csv", ANY, "age", "user") == [ages, users]
    assert _values(tmp_path / "log.csv", ANY, "user", start=2, stop=4) == [["x,y", None]]


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        (pa.array([5, None, 2**62]), ["5", None, str(2**62)]),
        (pa.array(["a", "", None]), ["a", None, None]),
        (pa.array(["b", None, "b"]).dictionary_encode(), ["b", None, "b"]),
        (pa.array([True, False, None]), ["1", "0", None]),
        (pa.array([b"a", b"", None]), ["a", None, None]),
        (pa.array([None, None, None]), [None, None, None]),
    ],
)
def test_parquet(tmp_path: Path, users: pa.Array, expected: list[str | None]) -> None:
    table = pa.table({"click": [1, 0, 1], "age": [1, 2, 3], "user": users, "tags": [["a"], [], None]})
    pq.write_table(table, tmp_path / "log.parquet")
    assert _values(tmp_path / "log.parquet", ANY, "user") == [expected]


def test_slice_of_names_rows(tmp_path: Path) -> None:
    for day, rows in enumerate([2, 3]):
        (tmp_path / f"day_{day}").write_text("1\t3\t\t0000000a\t\n" * rows)
    index = open_index(tmp_path, HEXADECIMAL, segment_bytes=1 << 16, cache=tmp_path / "cache")
    stretches = slices_of(index)[1]
    block = Block(tuple(SegmentRange(segment, 0, segment.rows) for segment in index.segments), None)
    assert slice_of(block, stretches).to_pylist() == ["day_0"] * 2 + ["day_1"] * 3
    sevenths = Block((SegmentRange(index.segments[1], 1, 3),), None)
    assert slice_of(sevenths, [Slice("a", 0, 4), Slice("b", 4, 5)]).to_pylist() == ["a", "b"]
    assert distinct_names([Slice("a", 0, 1), Slice("b", 1, 2), Slice("a", 2, 3)]) == ["a (1)", "b", "a (2)"]
