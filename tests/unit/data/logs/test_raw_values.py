"""A column's values row by row as the log has them, whatever its format."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.logs import open_index

from rayrec.data.logs.index import Block, LogIndex, Part
from rayrec.data.logs.raw_values import distinct_names, stretch_of, values_of
from rayrec.data.logs.reading import read_raw
from rayrec.data.logs.splits import Slice, slices_of
from rayrec.schema import Schema

HEXADECIMAL = Schema(tokens="hexadecimal", dense=("i", "j"), sparse=("c", "d"))
ANY = Schema(label="click", dense=("age",), sparse=("user", "tags"), lists=("tags",), tokens="any", delimiter=",")


def _values(
    index: LogIndex, schema: Schema, *columns: str, start: int = 0, stop: int | None = None
) -> list[list[object]]:
    """Of rows [start, stop) of a log of one segment."""
    (segment,) = index.segments
    block = Block((Part(segment, start, segment.rows if stop is None else stop),), None)
    raw = read_raw([segment], schema)
    return [values_of(block, raw, column, schema).to_pylist() for column in columns]


def test_text(tmp_path: Path) -> None:
    lines = ["1\t3\t\t0000000a\t", "0\t-7\t5\t\tffffffff", "nonsense", "0\t\t123456789012\t0000000b\t00000000"]
    (tmp_path / "log.tsv").write_text("\n".join(lines) + "\n")
    index = open_index(tmp_path / "log.tsv", HEXADECIMAL, segment_bytes=1 << 16, cache=tmp_path / "cache")
    assert _values(index, HEXADECIMAL, "i", "j", "c", "d") == [
        [3, -7, None],
        [None, 5, 123456789012],
        [0xA, None, 0xB],
        [None, 0xFFFFFFFF, 0],
    ]
    assert _values(index, HEXADECIMAL, "c", start=1, stop=3) == [[None, 0xB]]


@pytest.mark.parametrize("faulty", [False, True])
def test_csv(tmp_path: Path, faulty: bool) -> None:
    rows = ["1,30,ann,a|b", "0,,bob,", '0,2.5,"x,y",a', *(["7,1,eve,a"] if faulty else []), "1,-1,,b", "0,4,ann,"]
    (tmp_path / "log.csv").write_text("\n".join(["click,age,user,tags", *rows]) + "\n")
    index = open_index(tmp_path / "log.csv", ANY, segment_bytes=1 << 16, cache=tmp_path / "cache")
    assert index.faults.total == faulty
    assert _values(index, ANY, "age", "user") == [
        [30.0, None, 2.5, -1.0, 4.0],
        ["ann", "bob", "x,y", None, "ann"],
    ]
    assert _values(index, ANY, "user", start=2, stop=4) == [["x,y", None]]


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
    assert _values(
        open_index(tmp_path / "log.parquet", ANY, segment_bytes=1 << 16, cache=tmp_path / "cache"), ANY, "user"
    ) == [expected]


def test_stretches(tmp_path: Path) -> None:
    line = "1\t3\t\t0000000a\t\n"
    for day, rows in enumerate([2, 3]):
        (tmp_path / f"day_{day}").write_text(line * rows)
    index = open_index(tmp_path, HEXADECIMAL, segment_bytes=1 << 16, cache=tmp_path / "cache")
    stretches = slices_of(index)[1]
    block = Block(tuple(Part(segment, 0, segment.rows) for segment in index.segments), None)
    assert stretch_of(block, stretches).to_pylist() == ["day_0"] * 2 + ["day_1"] * 3
    sevenths = Block((Part(index.segments[1], 1, 3),), None)
    assert stretch_of(sevenths, [Slice("a", 0, 4), Slice("b", 4, 5)]).to_pylist() == ["a", "b"]
    assert distinct_names([Slice("a", 0, 1), Slice("b", 1, 2), Slice("a", 2, 3)]) == ["a (1)", "b", "a (2)"]
