"""Columns of logs in all formats with their original values, aligned with the valid rows."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.engines import LoopEngine
from builders.faults import rejects
from builders.logs import open_index

from rayrec.data.log_source import LogSource
from rayrec.data.logs.extra_columns import find_types
from rayrec.data.logs.index import Block
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.schema import Schema

CLICKS = Schema(label="click", dense=("age",), sparse=("user",))


def read(
    path: Path,
    names: tuple[str, ...],
    schema: Schema = CLICKS,
    *,
    segment_bytes: int = 20_000,
) -> list[dict[str, Any]]:
    """Return the columns of all valid rows of a log, read in blocks of one segment."""
    LogSource.at(str(path)).check_extra(names, schema)
    cache = path.parent / "cache"
    index = open_index(path, schema, segment_bytes=segment_bytes, cache=cache, extra=names)
    columns = find_types(names, index, LoopEngine())
    blocks = [Block((part,), None) for part in index.parts(0, index.rows)]
    assert sum(block.rows for block in blocks) == index.rows
    tables = [pa.table(columns.read(block, schema), schema=columns.types) for block in blocks]
    return pa.concat_tables(tables).to_pylist()


def test_csv_text_is_unchanged(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text('click,age,user,note\n1,007,ü5,"a ""b"", c"\n0,1.50,,\n1,3e2,u7,NA\n')
    assert read(log, ("note", "age", "user", "click")) == [
        {"note": 'a "b", c', "age": "007", "user": "ü5", "click": "1"},
        {"note": "", "age": "1.50", "user": "", "click": "0"},
        {"note": "NA", "age": "3e2", "user": "u7", "click": "1"},
    ]


def test_invalid_rows_are_skipped(tmp_path: Path) -> None:
    log = tmp_path / "log.csv.gz"
    rows = [f"{row % 2},{'x' if row % 5 == 3 else row},u{row},n{row}" for row in range(3000)]
    log.write_bytes(gzip.compress("\n".join(["click,age,user,note", *rows]).encode()))
    assert [row["note"] for row in read(log, ("note",), segment_bytes=5000)] == [
        f"n{row}" for row in range(3000) if row % 5 != 3
    ]


@pytest.mark.parametrize("group_rows", [100, 1000], ids=["read in place", "rewritten"])
def test_parquet_types_are_unchanged(tmp_path: Path, group_rows: int) -> None:
    table = pa.table(
        {
            "click": [0, 1] * 500,
            "age": np.arange(1000) / 4,
            "user": [f"u{row}" for row in range(1000)],
            "at": pa.array(range(1000), pa.timestamp("ms", "UTC")),
            "ids": pa.array([[row, None] for row in range(1000)], pa.list_(pa.int16())),
            "city": pa.array(["a", None] * 500).dictionary_encode(),
            "raw": pa.array([b"\xff", b""] * 500),
        }
    )
    log = tmp_path / "log.parquet"
    pq.write_table(table, log, row_group_size=group_rows)
    names = ("at", "ids", "city", "raw", "age")
    index = open_index(log, CLICKS, segment_bytes=3000, cache=tmp_path / "cache", extra=names)
    is_in_place = {segment.path for segment in index.segments} == {str(log)}
    assert is_in_place == (group_rows == 100)
    assert find_types(names, index, LoopEngine()).types.types == [
        pa.timestamp("ms", "UTC"),
        pa.list_(pa.int16()),
        pa.string(),
        pa.binary(),
        pa.float64(),
    ]
    assert read(log, names, segment_bytes=3000) == table.select(names).to_pylist()


JSON_ROWS = [
    {"click": 1, "age": 1, "user": "a", "id": 2**60, "tags": ["x"]},
    {"click": 0, "age": 2, "user": "b", "at": "2026-01-02", "tags": "y"},
]


def _jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in JSON_ROWS))


def _npz(path: Path) -> None:
    np.savez(
        path,
        click=np.array([1, 0]),
        age=np.array([1.0, 2.0]),
        user=np.array(["a", "b"]),
        note=np.array([[1, 2], [3, 4]]),
    )


LISTS = Schema(label="label", sparse=("index",), lists=("index",))
FORMATS: dict[str, tuple[Callable[[Path], Any], Schema, list[dict[str, Any]]]] = {
    "log.jsonl": (
        _jsonl,
        CLICKS,
        [
            {"id": 2**60, "tags": ["x"], "at": None},
            {"id": None, "tags": ["y"], "at": "2026-01-02"},
        ],
    ),
    "log.npz": (_npz, CLICKS, [{"note": [1, 2]}, {"note": [3, 4]}]),
    "log.svm": (
        lambda path: path.write_text("1 qid:7 3:0.50\n0 qid:8 4:2 5:1e0\n"),
        LISTS,
        [
            {"value": ["0.50"], "group": "7", "label": "1"},
            {"value": ["2", "1e0"], "group": "8", "label": "0"},
        ],
    ),
    "log.ffm": (
        lambda path: path.write_text("1 0:3:0.5 1:8:1\n0 0:4:1 2:9:1\n"),
        Schema(label="label", sparse=("field_0",), lists=("field_0",)),
        [
            {"field_1": ["8"], "field_2": [], "value_0": ["0.5"]},
            {"field_1": [], "field_2": ["9"], "value_0": ["1"]},
        ],
    ),
    "log.vw": (
        lambda path: path.write_text("1 |u a |i x:2\n0 |u b |j y\n"),
        Schema(label="label", sparse=("u",), lists=("u",)),
        [
            {"i": ["x"], "i_value": ["2"], "j": []},
            {"i": [], "i_value": [], "j": ["y"]},
        ],
    ),
    "slots.txt": (
        lambda path: path.write_text("click:1 user:5 tag:a tag:b note:x\nclick:0 user:6 tag:c\n"),
        Schema(label="click", sparse=("user",)),
        [
            {"tag": ["a", "b"], "note": "x", "user": "5"},
            {"tag": ["c"], "note": None, "user": "6"},
        ],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_format_values_are_unchanged(tmp_path: Path, name: str) -> None:
    write, schema, expected = FORMATS[name]
    write(tmp_path / name)
    assert read(tmp_path / name, tuple(expected[0]), schema) == expected


def test_mixed_json_types_become_lists_of_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    values = [7, 0.5, "x", ["y"], None]
    for number, value in enumerate(values):
        row = {"click": 1, "age": 1, "user": "a", "value": value}
        (log / f"{number}.jsonl").write_text(json.dumps(row) + "\n")
    texts = [["7"], ["0.5"], ["x"], ["y"], None]
    assert [row["value"] for row in read(log, ("value",))] == texts


def test_incompatible_types_are_rejected(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    for number, value in enumerate([{"a": 1}, 5]):
        table = pa.table({"click": [1], "age": [1], "user": ["a"], "value": [value]})
        pq.write_table(table, log / f"{number}.parquet")
    rejects("keep: column value has values of the types struct", read, log, ("value",))


def test_folder_values_are_text(tmp_path: Path) -> None:
    for day, city in (("01", "S%C3%A3o"), ("02", "__HIVE_DEFAULT_PARTITION__")):
        folder = tmp_path / "log" / f"day={day}" / f"age={day}" / f"city={city}"
        folder.mkdir(parents=True)
        (folder / "part.csv").write_text("click,user,note\n1,a,n\n")
    assert read(tmp_path / "log", ("age", "city", "day", "note")) == [
        {"age": "01", "city": "São", "day": "01", "note": "n"},
        {"age": "02", "city": None, "day": "02", "note": "n"},
    ]


def test_criteo_values_are_text(tmp_path: Path) -> None:
    lines = ["\t".join(["1", *[str(row)] * 12, "", *[f"{row:08x}"] * 25, ""]) for row in range(400)]
    lines[7] = lines[7].replace("7", "x")
    lines[9] = "1\t2"
    log = tmp_path / "train.txt"
    log.write_text("\n".join(lines) + "\n")
    rows = read(log, ("cat_0", "int_12", "int_0", "cat_25", "label"), CRITEO, segment_bytes=4000)
    assert rows == [
        {"cat_0": f"{row:08x}", "int_12": "", "int_0": str(row), "cat_25": "", "label": "1"}
        for row in range(400)
        if row not in (7, 9)
    ]


def test_schema_columns_reuse_index(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("click,age,user,note\n1,2,a,b\n")
    for names in ((), ("user",)):
        open_index(log, CLICKS, cache=tmp_path / "cache", extra=names)
    assert len(list((tmp_path / "cache").glob("index-*.json"))) == 1
    open_index(log, CLICKS, cache=tmp_path / "cache", extra=("note",))
    assert len(list((tmp_path / "cache").glob("index-*.json"))) == 2


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_unknown_column_is_rejected_with_nearest(tmp_path: Path, name: str) -> None:
    log = tmp_path / name
    if name == "log.csv":
        log.write_text("click,age,user,user_name\n1,2,a,b\n")
    elif name == "log.jsonl":
        log.write_text('{"click": 1, "age": 1, "user": "a", "user_name": "b"}\n')
    else:
        table = pa.table({"click": [1], "age": [1], "user": ["a"], "user_name": ["b"]})
        pq.write_table(table, log)
    source = LogSource.at(str(log))
    message = "keep: .*log.* has no column user_nam; did you mean user_name or user"
    rejects(message, source.check_extra, ("user_nam",), CLICKS)


def test_file_without_column_is_rejected(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    (log / "1.csv").write_text("click,age,user,note\n1,2,a,b\n")
    (log / "2.csv").write_text("click,age,user\n1,2,a\n")
    rejects("keep: .*2.csv has no column note", read, log, ("note",))


def test_text_must_be_utf8(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_bytes(b"click,age,user,note\n1,2,a,\xff\n")
    rejects("keep: .*log.csv: column note has text that is not UTF-8", read, log, ("note",))


def test_random_rows_are_rejected() -> None:
    source = LogSource.at("random:10")
    rejects("keep: random:10 is made up when it is read", source.check_extra, ("a",), CRITEO)


def test_inexact_values_are_rejected(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    for number, value in enumerate([2**60 + 1, 0.5]):
        row = {"click": 1, "age": 1, "user": "a", "value": value}
        (log / f"{number}.jsonl").write_text(json.dumps(row) + "\n")
    rejects("keep: column value has values of several types", read, log, ("value",))
