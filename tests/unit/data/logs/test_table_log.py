"""Parquet and CSV logs compared with plain Python and with the same log as text; faults are
counted, located and skipped.
"""

import contextlib
import csv
import datetime
import gzip
import io
import math
import os
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from builders.engines import LoopEngine
from builders.faults import rejects
from builders.same import assert_same
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoded_rows import JaggedIds
from rayrec.data.engine import TaskContext, ThreadEngine
from rayrec.data.formats import csv_reader
from rayrec.data.formats import parquet as formats_parquet
from rayrec.data.formats.csv_reader import CsvRange, read_csv, row_start
from rayrec.data.formats.row_faults import FAULT, TOO_FEW, TOO_MANY, TRAILING, UNMATCHED
from rayrec.data.logs import parquet, rewritten, table_log
from rayrec.data.logs.column_values import text_tokens
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.table_log import column_names, good_rows, index_tables, is_table, read_tables
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.logs.text_parser import parse
from rayrec.data.raw_block import RawBlock
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.schema import Schema

GENRES = [
    "Action",
    "Comedy",
    "Film-Noir",
    "Sci-Fi",
    "Children's",
    "Ænima",
    "12",
]
LABELLED = Schema(
    label="y",
    sparse=("s",),
    tokens="any",
    delimiter=",",
)
LISTS = ("genres", "tags")
FILMS = LABELLED.replace(
    label="clicked",
    weight="weight",
    dense=("rating", "age"),
    sparse=("user", "movie", *LISTS),
    lists=LISTS,
)


def index_of(
    paths: Sequence[Path],
    schema: Schema,
    cache: Path,
    segment_bytes: int = 1 << 20,
    engine: Any = None,
) -> LogIndex:
    files = [storage.list_files(str(path))[0] for path in paths]
    assert is_table(files, schema)
    return index_tables(
        files,
        schema,
        segment_bytes=segment_bytes,
        context=TaskContext(engine or LoopEngine(), str(cache)),
    )


def read(
    paths: Sequence[Path],
    schema: Schema,
    cache: Path,
    segment_bytes: int = 1 << 20,
) -> tuple[Any, Faults]:
    index = index_of(paths, schema, cache, segment_bytes)
    return read_tables(index.segments, schema), index.faults


def movies(rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw plain rows of a log like MovieLens; None or [] is a missing value."""
    rng = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.1 else value

    return [
        {
            "clicked": rng.randrange(2),
            "weight": rng.randrange(5) / 2,
            "rating": maybe(rng.randrange(1, 11) / 2),
            "age": maybe(rng.randrange(-3, 100)),
            "user": maybe(rng.choice([rng.randrange(10_000), 2**24 + 1, 2**40, -5])),
            "movie": maybe(
                rng.choice(
                    [
                        "Toy Story (1995)",
                        'Say "yes", or no',
                        "two\nlines",
                        "Amélie",
                        "ünï\r\ncode",
                        "x" * 50,
                    ]
                )
            ),
            "genres": rng.sample(GENRES, rng.randrange(4)),
            "tags": [rng.randrange(2**41) for _ in range(rng.randrange(3))],
        }
        for _ in range(rows)
    ]


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",", **changes: Any) -> bytes:
    out = io.StringIO(newline="")
    names = [*FILMS.columns[::-1], "unused"]  # by name, not by place
    writer = csv.writer(out, delimiter=delimiter, **{"lineterminator": "\n", **changes})
    writer.writerow(names)
    for row in rows:
        cells = [row.get(name, "any") for name in names]
        writer.writerow(
            [
                "|".join(map(str, x)) if isinstance(x, list) else x
                for x in ("" if x is None else x for x in cells)
            ]
        )
    return out.getvalue().encode()


def as_table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.table({name: [row[name] for row in rows] for name in [*FILMS.columns, "clicked"][1:]})


def tokens_in(array: pa.Array, **how: bool) -> np.ndarray:
    out = np.empty(len(array), np.uint64)
    text_tokens(array, out, **how)
    return out


@cache
def token(value: Any) -> int:
    return value % 2**64 if isinstance(value, int) else int(tokens_in(pa.array([value]))[0])


def check_movies(raw: Any, rows: list[dict[str, Any]]) -> None:
    assert raw.rows == len(rows)
    assert_same(raw.labels["clicked"], np.array([row["clicked"] for row in rows], np.float32))
    assert_same(raw.weights, np.array([row["weight"] for row in rows], np.float32))
    for name, values in zip(raw.schema.dense, raw.numbers.T, strict=True):
        assert_same(values, np.array([row[name] or 0 for row in rows], np.float64))
        assert raw.is_missing(name).tolist() == [row[name] is None for row in rows]
    for name in raw.schema.sparse:
        check_categories(raw, name, [row[name] for row in rows])


def check_categories(raw: Any, name: str, cells: list[Any]) -> None:
    if name in raw.schema.lists:
        assert_same(raw.column(name), jagged(cells))
    else:
        categories = [0 if cell is None else token(cell) for cell in cells]
        assert_same(raw.column(name), np.array(categories, np.uint64))
        assert raw.is_missing(name).tolist() == [cell is None for cell in cells]


def jagged(cells: list[list[Any]]) -> JaggedIds:
    categories = [token(12 if x == "12" else x) for cell in cells for x in cell]
    lengths = [len(cell) for cell in cells]
    return JaggedIds(np.array(categories, np.uint64), np.array(lengths, np.int32))


@pytest.mark.parametrize("seed", range(3))
def test_any_log_comes_out_alike_of_parquet_and_csv(tmp_path: Path, seed: int) -> None:
    rows = movies(200, seed)
    pq.write_table(as_table(rows), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_bytes(as_csv(rows))
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(as_csv(rows, lineterminator="\r\n")))
    (tmp_path / "d.CSV").write_bytes(
        b"\xef\xbb\xbf" + as_csv(rows, quoting=csv.QUOTE_ALL).rstrip(b"\n")
    )
    for name in sorted(os.listdir(tmp_path)):
        for segment_bytes in (1 << 20, 3000):
            raw, faults = read([tmp_path / name], FILMS, tmp_path / "cache", segment_bytes)
            assert faults.total == 0
            check_movies(raw, rows)


@pytest.mark.parametrize(("written", "declared"), [*[(c, c) for c in ";\t^ :"], (",", "\t")])
def test_delimiters(tmp_path: Path, written: str, declared: str) -> None:
    rows = movies(30)
    (tmp_path / "a.csv").write_bytes(as_csv(rows, written))
    check_movies(read([tmp_path / "a.csv"], FILMS.replace(delimiter=declared), tmp_path)[0], rows)


def test_several_files_are_one_log(tmp_path: Path) -> None:
    rows = movies(100)
    (tmp_path / "a.csv").write_bytes(as_csv(rows[:30]))
    (tmp_path / "empty.csv").write_bytes(b"")
    (tmp_path / "header.csv").write_bytes(as_csv([]))
    pq.write_table(as_table(rows[30:]), tmp_path / "b.parquet")
    pq.write_table(as_table(rows[:0]).cast(as_table(rows).schema), tmp_path / "none.parquet")
    paths = [
        tmp_path / name
        for name in (
            "a.csv",
            "empty.csv",
            "header.csv",
            "b.parquet",
            "none.parquet",
        )
    ]
    index = index_of(paths, FILMS, tmp_path / "cache", 2000)
    check_movies(read_tables(index.segments, FILMS), rows)
    assert index.format == "table"
    assert sum(segment.rows for segment in index.segments) == 100
    for segment in index.segments:  # each also alone
        check_movies(
            read_tables([segment], FILMS),
            rows[segment.first_row : segment.first_row + segment.rows],
        )
    shuffled = random.Random(0).sample(index.segments, len(index.segments))
    check_movies(
        read_tables(shuffled, FILMS),
        [row for s in shuffled for row in rows[s.first_row : s.first_row + s.rows]],
    )
    assert len(list(index.parts(0, 100))) == len(index.segments)
    assert LogIndex.from_dict(index.to_dict()) == index


# -- Criteo
def criteo_text(rows: int, seed: int) -> bytes:
    rng = random.Random(seed)
    lines = []
    for _ in range(rows):
        dense = [
            rng.choice(["", rng.randrange(-3, 100), 10**18 - 1, 1 - 10**18, 2**53 + 1])
            for _ in CRITEO.dense
        ]
        sparse = [
            rng.choice(["", f"{rng.getrandbits(32):08x}", f"{rng.getrandbits(32):08X}"])
            for _ in CRITEO.sparse
        ]
        lines.append("\t".join(map(str, [rng.randrange(2), *dense, *sparse])))
    return "\n".join(lines).encode() + b"\n"


def criteo_table(text: bytes, *, has_nulls: bool = True) -> pa.Table:
    kinds = dict.fromkeys(CRITEO.columns, pa.int64()) | dict.fromkeys(CRITEO.sparse, pa.string())
    converted = arrow_csv.ConvertOptions(
        column_types=kinds,
        null_values=[""],
        strings_can_be_null=has_nulls,
    )
    tabs = arrow_csv.ParseOptions(delimiter="\t")
    named = arrow_csv.ReadOptions(column_names=CRITEO.columns)
    return arrow_csv.read_csv(io.BytesIO(text), named, tabs, converted)


def tokens_of(raw: RawBlock, number: int) -> list[int]:
    column = raw.column(raw.schema.sparse[number])
    return (column.values if isinstance(column, JaggedIds) else column).tolist()


def missing_of(raw: RawBlock, number: int) -> list[bool]:
    return raw.is_missing(raw.schema.sparse[number]).tolist()


@pytest.mark.parametrize("labelled", [True, False])
def test_criteo_s_columns_come_out_as_of_text(tmp_path: Path, labelled: bool) -> None:
    text = criteo_text(300, 0)
    schema = CRITEO if labelled else CRITEO.unlabelled()
    expected, _ = parse(
        schema,
        text if labelled else b"\n".join(line[2:] for line in text.splitlines()),
    )
    header = "\t".join(CRITEO.columns).encode() + b"\n"
    (tmp_path / "a.csv").write_bytes((header + text).replace(b"\t", b","))
    (tmp_path / "b.csv").write_bytes(header + text)
    table = criteo_table(text)
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=50)
    pq.write_table(criteo_table(text, has_nulls=False), tmp_path / "d.parquet")
    encoded = [table[name].dictionary_encode() for name in table.column_names]
    pq.write_table(pa.table(encoded, table.column_names), tmp_path / "e.parquet")
    for path in sorted(tmp_path.glob("?.*")):
        for segment_bytes in (1 << 20, 10_000):
            raw, faults = read([path], schema, tmp_path / "cache", segment_bytes)
            assert faults.total == 0
            assert_same(raw, expected, ignored="files")


def test_criteo_s_numbers_may_be_floats_with_gaps(tmp_path: Path) -> None:
    table = pa.table(
        {
            "d": pa.array([1.0, None, -3.0, 2.0**40, 0.5, math.inf, math.nan, 1e18], pa.float64()),
            "s": ["0000000a"] * 8,
        }
    )
    raw, faults = parse_table(
        table,
        Schema(
            tokens="hexadecimal",
            label=None,
            dense=("d",),
            sparse=("s",),
        ),
        path="p",
    )
    assert (raw.numbers[:, 0].tolist(), raw.missing.tolist()) == ([1, 0, -3, 2**40], [0, 1, 0, 0])
    assert faults.counts == {"not an integer": 4}
    assert [fault.row for fault in faults.first] == [4, 5, 6, 7]


def test_table_sources_match_text(tmp_path: Path) -> None:
    pq.write_table(criteo_table(criteo_text(20, 0)), tmp_path / "day_0.parquet")
    (tmp_path / "day_1.csv").write_bytes(
        ("\t".join(CRITEO.columns).encode() + b"\n" + criteo_text(9, 1)).replace(b"\t", b",")
    )
    raw, _ = read(
        [tmp_path / "day_0.parquet", tmp_path / "day_1.csv"],
        CRITEO,
        tmp_path / "cache",
        2000,
    )
    ranges: dict[str, list[int]] = {}
    for path, start, stop in raw.files:
        ranges.setdefault(os.path.basename(path).removesuffix(".parquet"), []).extend(
            range(start, stop)
        )
    assert ranges == {"day_0": list(range(20)), "day_1.csv": list(range(20, 29))}


# -- Segments
def test_small_row_groups_are_joined_and_large_ones_rewritten(tmp_path: Path) -> None:
    pq.write_table(as_table(movies(1000)), tmp_path / "a.parquet", row_group_size=10)
    index = index_of([tmp_path / "a.parquet"], FILMS, tmp_path / "cache", 10_000)
    assert {segment.path for segment in index.segments} == {str(tmp_path / "a.parquet")}
    assert 5 < len(index.segments) < 50
    assert all(segment.start % 10 == 0 for segment in index.segments)
    assert not (tmp_path / "cache" / "tables").exists()
    rows = movies(20_000)
    pq.write_table(as_table(rows), tmp_path / "a.parquet")
    index = index_of([tmp_path / "a.parquet"], FILMS, tmp_path / "cache", 10_000)
    paths = {segment.path for segment in index.segments}
    assert {os.path.basename(path) for path in paths} == {"a.parquet"}
    assert len(paths - {str(tmp_path / "a.parquet")}) == len(paths) > 1  # several parts
    sizes = [segment.rows for segment in index.segments]
    assert max(sizes) < 3 * 20_000 / len(sizes)
    check_movies(read_tables(index.segments, FILMS), rows)


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_rewritten_rows_keep_numbers(tmp_path: Path, name: str) -> None:
    rows = [{**GOOD, "y": "5" if i % 1000 == 999 else "1", "s": f"s{i}"} for i in range(9000)]
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        (tmp_path / name).write_text(
            "\n".join(["y,w,d,s,l", *(",".join(row.values()) for row in rows)])
        )
    index = index_of([tmp_path / name], ANY, tmp_path / "cache", 2000)
    assert len({segment.path for segment in index.segments}) > 1
    assert [fault.row for fault in index.faults.first] == list(range(999, 9000, 1000))
    assert {fault.path for fault in index.faults.first} == {str(tmp_path / name)}
    first = 0
    places = []
    for segment in index.segments:
        places += (first + good_rows(segment, ANY)).tolist()
        first += segment.stop - segment.start
    assert first == 9000
    assert places == [i for i in range(9000) if i % 1000 != 999]


def test_tasks_rewrite_large_csv_file_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = movies(400)
    faulty = range(49, len(rows), 50)
    path = tmp_path / "a.csv"
    # Many cuts are before a line end in quotes, where a task cannot know that no row begins
    content = as_csv([{**row, "clicked": 2} if i in faulty else row for i, row in enumerate(rows)])
    path.write_bytes(content)
    monkeypatch.setattr(table_log, "_TASK_BYTES", len(content) // 40)
    cache = tmp_path / "cache"
    engine = LoopEngine()
    index = index_of([path], FILMS, cache, 1000, engine)
    assert engine.tasks > 41
    good = [row for i, row in enumerate(rows) if i not in faulty]
    check_movies(read_tables(index.segments, FILMS), good)
    assert [fault.row for fault in index.faults.first] == list(faulty)
    (manifest,) = cache.rglob("manifest.json")
    for lost in ([], [manifest]):
        for stored in (*lost, *cache.glob("index-*.json")):
            stored.unlink()
        assert index_of([path], FILMS, cache, 1000) == index
    index_of([path], FILMS, tmp_path / "by threads", 1000, ThreadEngine(2))
    made, again = (
        {file.relative_to(at): file.read_bytes() for file in at.rglob("*.parquet")}
        for at in (cache, tmp_path / "by threads")
    )
    assert len(made) >= 40
    assert made == again


def test_second_index_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = movies(50)
    (tmp_path / "a.csv").write_bytes(as_csv(rows))
    engine = LoopEngine()
    cache = tmp_path / "cache"
    index = index_of([tmp_path / "a.csv"], FILMS, cache, engine=engine)
    done = engine.tasks
    assert index_of([tmp_path / "a.csv"], FILMS, cache, engine=engine) == index
    assert engine.tasks == done
    (index_file,) = cache.glob("index-*.json")
    index_file.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(rewritten, "read_file", None)  # the Parquet files are still there
        assert index_of([tmp_path / "a.csv"], FILMS, cache, engine=engine) == index
    shutil.rmtree(cache / "tables")
    assert index_of([tmp_path / "a.csv"], FILMS, cache, engine=engine) == index
    (tmp_path / "a.csv").write_bytes(as_csv(rows[:20]))
    assert index_of([tmp_path / "a.csv"], FILMS, cache, engine=engine).rows == 20


@pytest.mark.parametrize("segment_bytes", [1, 1000])
def test_checks_while_writing_match_checks_of_stored_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    segment_bytes: int,
) -> None:
    monkeypatch.setattr(rewritten, "PART_GROUPS", 3)
    good = ",".join(GOOD.values()).encode()
    bad = [good + b",", b"9" + good[1:], good.replace(GOOD["s"].encode(), b"\xff")]
    lines = [b"y,w,d,s,l", *[good] * 5, *bad, *[good] * 30]
    paths = [tmp_path / f"{name}.csv" for name in "abc"]
    for count, path in zip((39, 20, 8), paths, strict=True):
        path.write_bytes(b"\n".join([*lines[:count], b""]))
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(table_log, "read_rows", None)  # Written rows are not read back
        index = index_of(paths, ANY, cache, segment_bytes)
    assert index.faults.total == 3 + 3 + 2
    assert index.rows == 38 + 19 + 7 - 8
    for folder in sorted((cache / "tables").iterdir())[1:]:
        shutil.rmtree(folder)
    for path in cache.glob("index-*.json"):
        path.unlink()
    again = index_of(paths, ANY, cache, segment_bytes)
    assert again.segments == index.segments
    assert again.faults.counts == index.faults.counts


def test_changed_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = movies(100)
    pq.write_table(as_table(rows), path, row_group_size=20)
    segments = index_of([path], FILMS, tmp_path, 1000).segments
    for changed, row_group_size in (
        (rows[:90], 20),
        (rows[:0], 20),
        (rows, 30),
        ([*rows[:40], {**rows[40], "clicked": 2}, *rows[41:]], 20),
        ([{**row, "clicked": 1 - row["clicked"]} for row in rows], 20),
    ):
        pq.write_table(
            as_table(changed).cast(as_table(rows).schema),
            path,
            row_group_size=row_group_size,
        )
        rejects(
            r"a\.parquet: rows \d+-\d+ changed since the log was indexed",
            read_tables,
            segments,
            FILMS,
        )
    pq.write_table(as_table(rows).drop_columns("user"), path, row_group_size=20)
    rejects("no column named user", read_tables, segments, FILMS)
    path.write_bytes(path.read_bytes()[:-100])
    rejects("cannot be read as Parquet", read_tables, segments, FILMS)
    path.unlink()
    rejects("no such file", read_tables, segments, FILMS)


# -- Faults
GOOD = {
    "y": "1",
    "w": "1.5",
    "d": "2.5",
    "s": "a",
    "l": "b|c",
}
ANY = Schema(
    label="y",
    weight="w",
    dense=("d",),
    sparse=("s", "l"),
    lists=("l",),
    tokens="any",
    delimiter=",",
)
BAD_CELLS: list[tuple[str, str, list[bytes]]] = [
    ("y", "label is missing", [b""]),
    ("y", "label is not 0 or 1", [b"1 1", *b"2 x -1 0.5 nan tRUE 0x1 \xff".split()]),
    (
        "w",
        "weight is not a number of 0 or more",
        [b"", *b"-1 nan inf x 1e400 -0.0001 2e18".split()],
    ),
    (
        "d",
        "not a finite number",
        [b"1 2", *b"nan inf -Infinity x 1e400 --1 1e . e5 - 1_0 \xff".split()],
    ),
    ("d", "beyond 10^18", b"1000000000000000256 -1e19 1e300".split()),
    ("s", "not UTF-8", b"\xff a\xc3 \xed\xa0\x80".split()),
    ("l", "not UTF-8", b"\xff a|b\xc3|c".split()),
]


@pytest.mark.parametrize(
    ("column", "kind", "cell"),
    [(column, kind, cell) for column, kind, many in BAD_CELLS for cell in many],
)
@pytest.mark.parametrize("parquet", [False, True])
def test_bad_cells(tmp_path: Path, parquet: bool, column: str, kind: str, cell: bytes) -> None:
    good = {name: value.encode() for name, value in GOOD.items()}
    rows = [good, good, {**good, column: cell}, good]
    path = tmp_path / ("a.parquet" if parquet else "a.csv")
    if parquet:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    else:
        path.write_bytes(
            b"\n".join([b"y,w,d,s,l", *(b",".join(row.values()) for row in rows), b""])
        )
    raw, faults = read([path], ANY, tmp_path, 16)
    assert (
        raw.numbers[:, 0].tolist(),
        raw.lists[0].lengths.tolist(),
        faults.counts,
    ) == (
        [2.5] * 3,
        [2] * 3,
        {kind: 1},
    )
    (fault,) = faults.first
    assert (fault.path, fault.row, fault.byte, fault.kind, fault.column) == (
        str(path),
        2,
        None,
        kind,
        column,
    )
    assert faults.describe().endswith(f"first: {path} at row 2: {kind} in column {column}")


@settings(max_examples=300, deadline=None)
@example(
    [
        "1",
        "+1",
        "1.",
        ".5",
        "-.5e-3",
        "1E5",
        "1e+18",
        "-1e18",
        "00012",
        "-0",
        "1e-400",
        "0.1",
        "0" * 30 + "7",
    ]
)
@given(
    st.lists(
        st.from_regex(r"[-+]?[0-9]{0,25}\.?[0-9]{0,4}([eE][-+]?[0-9]{0,3})?", fullmatch=True)
        | st.text("01.eE+- x", max_size=5)
    )
)
def test_numbers_in_text(cells: list[str]) -> None:
    raw, faults = parse_table(
        pa.table({"d": pa.array(cells, pa.string())}),
        Schema(label=None, dense=("d",), tokens="any"),
    )
    desired = []
    missing = []
    for cell in cells:
        try:
            value = float(cell) if cell else 0.0
            assert cell == cell.strip()
        except (ValueError, AssertionError):
            value = math.nan
        if abs(value) <= 1e18:
            desired.append(value)
            missing.append(not cell)
    assert (raw.numbers[:, 0].tolist(), raw.missing[:, 0].tolist()) == (desired, missing)
    assert faults.total == len(cells) - len(desired)


OTHER_BYTES = [b for b in range(256) if b not in b"\t\n\r"]


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        pytest.param("d", [b"1%c2" % b for b in OTHER_BYTES], id="bytes in a number"),
        pytest.param("s", [b"12c%cEF9a" % b for b in OTHER_BYTES], id="bytes in a category"),
        pytest.param(
            "d",
            [b"1" * 19, b" 3", b"3\0", *b"x 1.0 +3 - --3 nan 0x3".split()],
            id="invalid numbers",
        ),
        pytest.param(
            "s",
            [b" eadbeef", *b"deadbee deadbeef0 deadbeeg \xffeadbee".split()],
            id="invalid categories",
        ),
    ],
)
def test_hexadecimal_tables_match_text(name: str, cells: list[bytes]) -> None:
    schema = Schema(
        tokens="hexadecimal",
        label=None,
        dense=("d",),
        sparse=("s",),
    )
    columns = {"d": [b"5"] * len(cells), "s": [b"00000000"] * len(cells), name: cells}
    raw, faults = parse_table(pa.table(columns), schema)
    expected, found = parse(
        schema,
        b"\n".join(map(b"\t".join, zip(*columns.values(), strict=True))),
    )
    assert_same(raw, expected, ignored="files")
    assert faults.counts == found.counts
    assert raw.rows == 0 or len(cells) > 200


@pytest.mark.parametrize("segment_bytes", [1, 1000])
def test_invalid_csv_rows_are_reported_and_skipped(tmp_path: Path, segment_bytes: int) -> None:
    good = ",".join(GOOD.values())
    lines = [
        "y,w,d,s,l",
        good,
        good + ",",
        "1",
        "",
        "9" + good[1:],
        "",
        good,
        "\xff,\xff",
        good,
        "",
    ]
    (tmp_path / "a.csv").write_bytes("\r\n".join(lines).encode("latin1"))
    wrong = [
        (1, "too many columns"),
        (2, "too few columns"),
        (3, "label is not 0 or 1"),
        (5, "too few columns"),
    ]
    index = index_of([tmp_path / "a.csv"], ANY, tmp_path, segment_bytes)
    assert (read_tables(index.segments, ANY).rows, index.faults.total) == (3, 4)
    assert [(fault.row, fault.kind) for fault in index.faults.first] == wrong
    places = [
        segment.start + row
        for segment in index.segments
        for row in good_rows(segment, ANY).tolist()
    ]
    assert places == [0, 4, 6]
    assert sum(segment.stop - segment.start for segment in index.segments) == 7


def test_first_fault_per_row_is_counted(tmp_path: Path) -> None:
    rows = [{**GOOD, "y": "7", "d": "x", "s": "ok"}] * 25 + [GOOD]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=3)
    raw, faults = read([tmp_path / "a.parquet"], ANY, tmp_path, 10)
    assert (raw.rows, faults.counts) == (1, {"label is not 0 or 1": 25})
    assert [fault.row for fault in faults.first] == list(range(10))
    rejects(
        r"96\.15%.*25 x label is not 0 or 1",
        index_of([tmp_path / "a.parquet"], ANY, tmp_path, 10).check,
        0.5,
        "log",
    )


# -- Types
def one_column(array: pa.Array, role: str, **changes: Any) -> tuple[Any, Faults]:
    return parse_table(
        pa.table({"c": array}),
        Schema(
            **{
                "label": None,
                "tokens": "any",
                role: ("c",),
                **changes,
            }
        ),
        path="p",
    )


NUMBERS = [
    *[
        pa.array([1, None, 0], kind)
        for kind in (
            pa.int8(),
            pa.uint64(),
            pa.float32(),
            pa.float16(),
        )
    ],
    pa.array([True, None, False]),
    pa.array([Decimal("1.00"), None, Decimal("0.00")]),
    pa.array(["1", None, "0.0"]),
    pa.array(["1", "", "0e5"], pa.large_string()),
    pa.array(["1", None, "0"], pa.string_view()),
    pa.array(["True", None, "FALSE"]),
    pa.array(["true", "", "False"]),
    pa.array([1, None, 0]).dictionary_encode(),
    pa.array(["1", None, "0"]).dictionary_encode(),
]


@pytest.mark.parametrize("array", NUMBERS, ids=lambda array: str(array.type))
def test_types_of_numbers(array: pa.Array) -> None:
    raw, faults = one_column(array, "dense")
    assert (
        faults.total,
        raw.numbers[:, 0].tolist(),
        raw.missing[:, 0].tolist(),
    ) == (
        0,
        [1, 0, 0],
        [False, True, False],
    )
    schema = Schema(
        label="y",
        weight="w",
        dense=("c",),
        tokens="any",
    )
    raw, faults = parse_table(pa.table({"y": array, "c": [1, 2, 3], "w": [1, 1, 1]}), schema)
    assert (raw.labels["y"].tolist(), faults.counts) == ([1, 0], {"label is missing": 1})
    raw, faults = parse_table(pa.table({"y": [1, 1, 1], "c": [1, 2, 3], "w": array}), schema)
    assert (raw.weights.tolist(), faults.counts) == (
        [1, 0],
        {"weight is not a number of 0 or more": 1},
    )


CATEGORIES = [
    ([5, None, -1, 2**40], pa.int64()),
    ([5, None, 2**24 + 1, 7], pa.int32()),
    ([5, None, 2**63 - 1, 2**64 - 1], pa.uint64()),
    ([5, None, 255, 0], pa.uint8()),
    (["5", None, "-1", "x"], pa.string()),
    (["5", None, "äh", "x y"], pa.large_string()),
    (["5", None, "", "x"], pa.string_view()),
    ([b"5", None, b"x", b"\xc3\xa4"], pa.binary()),
]


@pytest.mark.parametrize(
    ("values", "kind"),
    CATEGORIES,
    ids=lambda x: str(x) if isinstance(x, pa.DataType) else "",
)
@pytest.mark.parametrize("dictionary", [False, True])
def test_types_of_categories(values: list[Any], kind: pa.DataType, dictionary: bool) -> None:
    array = pa.array(values, kind)
    if dictionary and "view" not in str(kind):
        array = array.dictionary_encode()
    texts = [
        v if isinstance(v, bytes) else str(v).encode()
        for v in (b"" if v is None else v for v in values)
    ]
    raw, faults = one_column(array, "sparse")
    assert (faults.total, tokens_of(raw, 0)) == (
        0,
        tokens_in(pa.array(texts, pa.binary())).tolist(),
    )
    assert missing_of(raw, 0) == [not text for text in texts]


LIST_VALUES = [
    ["a", "b"],
    None,
    [],
    ["", "c", None],
    ["12"],
]


def test_types_of_lists_and_null_columns() -> None:
    for array in (
        pa.array(LIST_VALUES, pa.list_(pa.string())),
        pa.array(LIST_VALUES, pa.large_list(pa.large_string())),
        pa.array(LIST_VALUES, pa.list_view(pa.string())),
        pa.array([["zz"], *LIST_VALUES], pa.list_(pa.string())).slice(1),
        pa.array(["a|b", None, "", "|c|", "12"]),
        pa.array(["a|b", None, "", "|c|", "12"]).dictionary_encode(),
        pa.ListArray.from_arrays(
            pa.array([0, 2, 2, 2, 5, 6]),
            pa.array(["a", "b", "", "c", None, "12"]).dictionary_encode(),
        ),
        pa.ListArray.from_arrays(  # a null that hides values
            pa.array([0, 2, 4, 4, 5, 6]),
            pa.array(["a", "b", "hidden", "hidden", "c", "12"]),
            mask=pa.array([False, True, False, False, False]),
        ),
    ):
        raw, faults = one_column(array, "sparse", lists=("c",))
        assert (faults.total, raw.lists[0].lengths.tolist()) == (0, [2, 0, 0, 1, 1])
        assert tokens_of(raw, 0) == [token("a"), token("b"), token("c"), 12]
    raw, _ = one_column(
        pa.array([[1, 2], None, [3, None]], pa.list_(pa.int32(), 2)),
        "sparse",
        lists=("c",),
    )
    assert (raw.lists[0].lengths.tolist(), tokens_of(raw, 0)) == ([2, 0, 1], [1, 2, 3])
    for role, lists in (
        ("dense", ()),
        ("sparse", ()),
        ("sparse", ("c",)),
    ):
        raw, faults = one_column(pa.nulls(2), role, lists=lists)
        assert (faults.total, raw.is_missing("c").tolist()) == (0, [True, True])


REJECTED = [
    (
        pa.array([0], pa.timestamp("us")),
        "sparse",
        {},
        "text or integers are needed",
    ),
    (
        pa.array([0], pa.time32("s")),
        "dense",
        {},
        "numbers are needed",
    ),
    (
        pa.array([0], pa.duration("us")),
        "dense",
        {},
        "numbers are needed",
    ),
    (
        pa.array([0], pa.date32()),
        "sparse",
        {"integers": ("c",)},
        "text or integers are needed",
    ),
    (
        pa.array([{"a": 1}]),
        "sparse",
        {},
        "text or integers are needed",
    ),
    (
        pa.array([{"a": 1}]),
        "dense",
        {},
        "numbers are needed",
    ),
    (
        pa.array([[1]]),
        "dense",
        {},
        "numbers are needed",
    ),
    (
        pa.array([[1]]),
        "sparse",
        {},
        "name it in the schema's lists",
    ),
    (
        pa.array([1]),
        "sparse",
        {"lists": ("c",)},
        "a list is needed",
    ),
    (
        pa.array([[[1]]]),
        "sparse",
        {"lists": ("c",)},
        "text or integers are needed",
    ),
    (
        pa.array([[{"a": 1}]]),
        "sparse",
        {"lists": ("c",)},
        "text or integers are needed",
    ),
    (
        pa.array([1]),
        "sparse",
        {"tokens": "hexadecimal"},
        "needs 8 hexadecimal digits as text",
    ),
]


@pytest.mark.parametrize(("array", "role", "changes", "why"), REJECTED)
def test_parse_table_rejects_wrong_types(
    tmp_path: Path,
    array: pa.Array,
    role: str,
    changes: dict[str, Any],
    why: str,
) -> None:
    pq.write_table(pa.table({"c": array}), tmp_path / "a.parquet")
    schema = Schema(
        **{
            "label": None,
            "tokens": "any",
            role: ("c",),
            **changes,
        }
    )
    rejects(
        rf"a\.parquet: column c is of type .*; {re.escape(why)}",
        index_of,
        [tmp_path / "a.parquet"],
        schema,
        tmp_path,
    )


SAME_CATEGORIES = [
    # (values, Arrow types that hold them, texts that a CSV file or JSON has for them)
    (
        [7, None, 9],
        [
            pa.int8(),
            pa.uint64(),
            pa.float64(),
            pa.float32(),
            pa.decimal128(28, 2),
        ],
        ["7", "", "9"],
    ),
    (
        [2**53 - 1, None, -(2**53) + 1],
        [pa.int64(), pa.float64()],
        [str(2**53 - 1), "", str(-(2**53) + 1)],
    ),
    (
        [True, None, False],
        [pa.bool_()],
        ["True", "", "False"],
    ),
    (
        [True, None, False],
        [pa.bool_()],
        ["true", "", "FALSE"],
    ),
    (
        [1, None, 0],
        [pa.bool_(), pa.int64(), pa.float64()],
        ["1", "", "0"],
    ),
    (
        [datetime.date(2024, 2, 29), None],
        [pa.date32(), pa.date64()],
        ["2024-02-29", ""],
    ),
]


@pytest.mark.parametrize(("values", "kinds", "texts"), SAME_CATEGORIES)
@pytest.mark.parametrize("lists", [False, True])
def test_categories_match_in_formats(
    tmp_path: Path,
    values: list[Any],
    kinds: list[Any],
    texts: list[str],
    lists: bool,
) -> None:
    schema = Schema(
        label=None,
        sparse=("c",),
        lists=("c",) * lists,
        tokens="any",
        delimiter=",",
    )
    (tmp_path / "a.csv").write_text("c,d\n" + "".join(f" {text}\t,0\n" for text in texts))
    expected, faults = read([tmp_path / "a.csv"], schema, tmp_path)
    assert faults.total == 0
    for kind in kinds:
        array = pa.array(values).cast(kind)
        if lists:
            array = pa.ListArray.from_arrays(np.arange(len(values) + 1, dtype=np.int32), array)
        raw, faults = parse_table(pa.table({"c": array}), schema)
        assert faults.total == 0
        assert (tokens_of(raw, 0), missing_of(raw, 0)) == (
            tokens_of(expected, 0),
            missing_of(expected, 0),
        )
        assert [list(column.lengths) for column in raw.lists] == [
            list(column.lengths) for column in expected.lists
        ]


def test_category_rules_read_floats_texts_and_plain_text(tmp_path: Path) -> None:
    nan = math.nan
    inf = math.inf
    for kind, beyond in ((pa.float64(), 2.0**53), (pa.float32(), 2.0**24)):
        raw, faults = one_column(
            pa.array([1.0, nan, -0.0, beyond - 1, beyond, 0.5, inf], kind, from_pandas=False),
            "sparse",
        )
        assert (tokens_of(raw, 0), missing_of(raw, 0)) == (
            [1, 0, 0, int(beyond) - 1],
            [False, True, False, False],
        )
        assert faults.counts == {"not a whole number in range": 3}
    texts = [
        "7",
        "07",
        "+7",
        "7.0",
        " 7. ",
        "-7",
        "True",
        "nan",
        "",
        "-9223372036854775808",
        "9223372036854775807",
    ]
    bad = [
        "7.5",
        "7a",
        "+",
        ".",
        "-",
        "1e3",
        "9223372036854775808",
        "-9223372036854775809",
        "99999999999999999999",
    ]
    schema = Schema(
        label=None,
        sparse=("c",),
        integers=("c",),
        tokens="any",
    )
    raw, faults = parse_table(pa.table({"c": texts + bad}), schema)
    assert np.array(tokens_of(raw, 0), np.uint64).view(np.int64).tolist() == [7] * 5 + [
        -7,
        1,
        0,
        0,
        -(2**63),
        2**63 - 1,
    ]
    assert np.flatnonzero(missing_of(raw, 0)).tolist() == [7, 8]
    assert faults.counts == {"not a whole number in range": len(bad)}
    raw, _ = parse_table(pa.table({"c": ["7", "07", "7.0"]}), schema.replace(integers=()))
    assert len(set(tokens_of(raw, 0))) == 3
    (tmp_path / "a.csv").write_bytes(b"c,d\n True,0\nTrue,0\n")

    def plain(text: str) -> int:
        return int(tokens_in(pa.array([text]), booleans=False)[0])

    assert plain("True") != 1
    schema = Schema(
        label=None,
        sparse=("c",),
        tokens="any",
        delimiter=",",
        category_rules=1,
    )
    raw, _ = read([tmp_path / "a.csv"], schema, tmp_path)
    assert tokens_of(raw, 0) == [plain(" True"), plain("True")]
    raw, _ = read([tmp_path / "a.csv"], schema.replace(category_rules=2), tmp_path)
    assert tokens_of(raw, 0) == [1, 1]


def test_nan_setting_is_applied_and_dates_are_seconds(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"d,e\n1,0\nnan,0\nNaN,0\ninf,0\n")
    arrow = pa.table({"d": pa.array([1, math.nan, math.nan, math.inf], from_pandas=False)})
    for nan, rows, bad in (("fault", [1.0], 3), ("missing", [1.0, 0.0, 0.0], 1)):
        schema = Schema(
            label=None,
            dense=("d",),
            tokens="any",
            delimiter=",",
            nan=nan,
        )
        for raw, faults in (
            read([tmp_path / "a.csv"], schema, tmp_path),
            parse_table(arrow, schema),
        ):
            assert (raw.numbers[:, 0].tolist(), faults.counts) == (
                rows,
                {"not a finite number": bad},
            )
            assert raw.missing[:, 0].tolist() == [False, True, True][: len(rows)]
    moment = datetime.datetime(2024, 2, 29, 12, 30, 0, 500_000)
    seconds = (moment - datetime.datetime(1970, 1, 1)).total_seconds()
    for unit in ("ms", "us", "ns"):
        raw, _ = one_column(pa.array([moment, None], pa.timestamp(unit)), "dense")
        assert (raw.numbers[:, 0].tolist(), raw.missing[:, 0].tolist()) == (
            [seconds, 0],
            [False, True],
        )
    zoned = pa.array([moment], pa.timestamp("us")).cast(pa.timestamp("us", "Europe/Berlin"))
    assert one_column(zoned, "dense")[0].numbers[:, 0].tolist() == [seconds]
    for kind in (pa.date32(), pa.date64()):
        raw, _ = one_column(pa.array([datetime.date(2024, 2, 29)], kind), "dense")
        assert raw.numbers[:, 0].tolist() == [seconds // 86400 * 86400]


def test_optional_columns_may_be_absent(tmp_path: Path) -> None:
    schema = Schema(
        label="y",
        dense=("d", "e"),
        sparse=("s", "l"),
        lists=("l",),
        delimiter=",",
        optional=("e", "s", "l"),
    )
    (tmp_path / "a.csv").write_bytes(b"d,y\n1,1\n2,0\n")
    (tmp_path / "b.csv").write_bytes(b"s,l,d,e,y\nx,1|2,3,4,1\n")
    pq.write_table(pa.table({"e": [8.0], "y": [1], "d": [7.0]}), tmp_path / "c.parquet")
    raw, faults = read(
        [tmp_path / name for name in ("a.csv", "b.csv", "c.parquet")],
        schema,
        tmp_path,
    )
    assert faults.total == 0
    assert [values.tolist() for values in raw.numbers.T] == [[1, 2, 3, 7], [0, 0, 4, 8]]
    assert raw.missing[:, 1].tolist() == [True, True, False, False]
    assert missing_of(raw, 0) == [True, True, False, True]
    assert raw.lists[0].lengths.tolist() == [0, 0, 2, 0]
    rejects(
        r"a\.csv: has no column named s",
        index_of,
        [tmp_path / "a.csv"],
        schema.replace(optional=("e",)),
        tmp_path,
    )
    rejects("optional names z, which must be in dense or sparse", schema.replace, optional=("z",))


@pytest.mark.parametrize(
    ("name", "columns", "why"),
    [
        ("a.csv", ["y", "t"], r"a\.csv: has no column named s; it has y, t \(split at ','\); fix"),
        ("a.csv", ["y", "s", "s"], "2 columns named s"),
        ("a.csv", ["y", "s", "t", "t"], None),
        ("a.parquet", ["y", "s", "s"], "2 columns named s"),
        (
            "a.parquet",
            [f"c{i}" for i in range(20)],
            "has no column named y; it has c0, c1.* and 8 more",
        ),
    ],
)
def test_missing_and_repeated_columns(
    tmp_path: Path,
    name: str,
    columns: list[str],
    why: str | None,
) -> None:
    table = pa.table([[1]] * len(columns), names=columns)
    (pq.write_table if name.endswith("parquet") else arrow_csv.write_csv)(table, tmp_path / name)
    with pytest.raises(InputError, match=why) if why else contextlib.nullcontext():
        assert index_of([tmp_path / name], LABELLED, tmp_path).rows == 1


def test_column_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf"y, or n",b\n1,2\n'))
    (tmp_path / "b.csv").write_bytes(b"")
    (tmp_path / "c.csv").write_bytes(b"a\tb")
    pq.write_table(pa.table({"x": [1], "y": [{"z": 1}]}), tmp_path / "d.parquet")
    files = storage.list_files(str(tmp_path))
    assert [column_names(file, CRITEO) for file in files] == [
        ("y, or n", "b"),
        (),
        ("a", "b"),
        ("x", "y"),
    ]


def test_names_with_dots_and_nested_neighbours(tmp_path: Path) -> None:
    schema = Schema(
        label="y",
        sparse=("user.id", "l"),
        lists=("l",),
        tokens="any",
    )
    table = pa.table(
        {
            "y": [1, 0],
            "user.id": [5, 6],
            "l": [[1], [2, 3]],
            "user": [{"id": 1, "l": 2}] * 2,
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    raw, _ = read([tmp_path / "a.parquet"], schema, tmp_path)
    assert tokens_of(raw, 0) == [5, 6]
    assert raw.lists[0].lengths.tolist() == [1, 2]


def test_first_file_decides_whether_files_are_tables(tmp_path: Path) -> None:
    def files(*contents: bytes) -> list[storage.File]:
        paths = [tmp_path / f"{number}.csv" for number in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        return [storage.File(str(path), len(path.read_bytes()), 0) for path in paths]

    header = "\t".join(CRITEO.columns).encode() + b"\n"
    assert is_table(files(b"", header), CRITEO)
    assert not is_table(files(b"1\t2", header), CRITEO)
    assert is_table(files(b"1\t2"), ANY)


def test_damaged_files_are_rejected(tmp_path: Path) -> None:
    packed = gzip.compress(b"y,s\n" + b"".join(b"1,%d\n" % i for i in range(10_000)))
    for name, data, why in [
        ("a.parquet", b"", "cannot be read as Parquet"),
        ("a.parquet", b"y,s\n1,2\n", "cannot be read as Parquet"),
        ("a.csv.gz", packed[: len(packed) // 2], "cannot be read to its end"),
        ("a.csv", "y,s\n1,2\n".encode("utf-16"), "is UTF-16"),
        ("a.csv", b"y,s\n1,2" + b"2" * (65 << 20), "row 0 exceeds 64 MiB, so it is not a CSV file"),
        ("a.csv", b'"y,s\n1,2\n1,2\n', "no column named y"),
        ("a.csv", b"\0" * 5000, "no column named y"),
    ]:
        (tmp_path / name).write_bytes(data)
        rejects(re.escape(why), index_of, [tmp_path / name], LABELLED, tmp_path / "cache")
        assert not list(tmp_path.rglob("*.partial"))
        assert not list(tmp_path.rglob("manifest.json"))


# -- Splitting CSV against Python's reader
@dataclass(frozen=True)
class RowSplitter:
    """Splitter of CSV text into rows by the documented rule."""

    columns: int
    trim: bool
    max_bytes: int
    max_lines: int
    escape: str | None

    def rows(self, text: str) -> Iterator[tuple[int, list[str]]]:
        """Yield the kind (0, TOO_FEW, TOO_MANY, UNMATCHED, TRAILING) and fields of every row."""
        position = 0
        while position < len(text):
            if text[position] in "\r\n":
                position += 1
                continue
            kind, fields, end = self._row(text, position)
            yield kind, fields
            # A row whose quotes do not match ends with its first line.
            position = (
                re.compile("[^\r\n]*").match(text, position).end() if kind == UNMATCHED else end
            )

    def _row(self, text: str, position: int) -> tuple[int, list[str], int]:
        fields = []
        spans = False
        trails = False
        while True:
            value = None
            if text[position : position + 1] == '"':
                value, num_lines, position = self._quoted(text, position)
                has_text = text[position : position + 1] not in ("", ",", "\r", "\n")
                if value is None or (num_lines > 0 and has_text):
                    return UNMATCHED, [], position
                spans |= num_lines > 0
                trails |= has_text
            rest = re.compile("[^,\r\n]*").match(text, position)
            position = rest.end()
            if value is None:
                value = rest[0].strip(" \t") if self.trim else rest[0]
            fields.append(value)
            if text[position : position + 1] != ",":
                break
            position += 1
        if spans and len(fields) != self.columns:
            return UNMATCHED, [], position
        if trails:
            return TRAILING, [], position
        if len(fields) == self.columns:
            return 0, fields, position
        return TOO_FEW if len(fields) < self.columns else TOO_MANY, fields, position

    def _quoted(self, text: str, position: int) -> tuple[str | None, int, int]:
        """Return the value, or None if its quotes do not match, its line breaks and its end with
        blanks.
        """
        pair = r'""' if self.escape is None else r'""|\\["\\]'
        inside = re.compile(rf'"((?:{pair}|[^"])*+)"').match(text, position)
        if inside is None or len(inside[1]) > self.max_bytes:
            return None, 0, position
        num_lines = len(re.findall("\r\n|\r|\n", inside[1]))
        if num_lines > self.max_lines:
            return None, 0, position
        end = re.compile("[ \t]*").match(text, inside.end()).end()
        return re.sub(pair, lambda match: match[0][1], inside[1]), num_lines, end


def rows_of_tables(tables: list[pa.Table]) -> list[tuple[int, bytes, bytes]]:
    return [
        row
        for table in tables
        for row in zip(*(table.column(name).to_pylist() for name in (FAULT, "a", "c")), strict=True)
    ]


def rows_of_ranges(path: Path, schema: Schema, range_bytes: int) -> list[tuple[int, bytes, bytes]]:
    rows = []
    begin = 0
    size = path.stat().st_size
    with mock.patch.multiple(csv_reader, READ_BYTES=range_bytes // 2 + 1, _SEARCHED_BYTES=3):
        for start in range(0, size, range_bytes):
            part = CsvRange(
                str(path),
                schema,
                schema.columns,
                begin,
                min(start + range_bytes, size),
            )
            rows += rows_of_tables(list(part))
            assert begin <= part.end <= size
            begin = part.end
    return rows


def check_split(
    path: Path,
    text: bytes,
    read_bytes: int,
    *,
    max_bytes: int,
    max_lines: int,
    rules: Literal[1, 2],
    escape: str | None,
) -> None:
    path.write_bytes(text)
    header = next(csv.reader(io.StringIO(text.decode("latin1"), newline="")))
    splitter = RowSplitter(len(header), rules == 2, max_bytes, max_lines, escape)
    split = list(splitter.rows(text.decode("latin1")))
    schema = Schema(
        label=None,
        sparse=("a", "c"),
        tokens="any",
        delimiter=",",
        category_rules=rules,
        escape=escape,
    )
    with mock.patch.multiple(csv_reader, MAX_QUOTED_BYTES=max_bytes, MAX_QUOTED_LINES=max_lines):
        if split[0][0]:
            rejects(
                "first row must be a header",
                list,
                read_csv(str(path), schema, read_bytes=read_bytes),
            )
            return
        tables = list(read_csv(str(path), schema, read_bytes=read_bytes))
        assert rows_of_ranges(path, schema, max(read_bytes, len(text) // 9 + 1)) == rows_of_tables(
            tables
        )
    found = rows_of_tables(tables)
    places = [header.index(name) for name in ("a", "c")]
    expected = [
        (kind, *(b"" if kind else row[place].encode("latin1") for place in places))
        for kind, row in split[1:]
    ]
    assert found == expected
    plain = rules == 1 and escape is None and b'" ' not in text
    if plain and {UNMATCHED, TRAILING}.isdisjoint(kind for kind, _ in split):
        reader = csv.reader(io.StringIO(text.decode("latin1"), newline=""))
        assert [row for _, row in split] == list(filter(None, reader))


PIECES = [
    "x",
    "yz",
    ",",
    ",",
    ",",
    '"',
    '""',
    "\n",
    "\r\n",
    "\r",
    "\xff",
    "12",
    " ",
    '"q,\n"',
    '"a ""b"" c"',
    "0" * 40,
    "\\",
    '\\"',
    '"a \\"b\\\\"',
]


@settings(max_examples=600, deadline=None)
@given(
    header=st.sampled_from(["a,b,c", "c,a", '"c","a","d\n""e"', "b,a,b,c,b"]),
    rows=st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), max_size=6),
    good=st.integers(0, 3),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
    last=st.booleans(),
    read_bytes=st.sampled_from([1, 2, 3, 7, 16, 64, 1 << 20]),
    limits=st.sampled_from(
        [
            (1 << 20, 100),
            (1 << 20, 2),
            (8, 100),
            (30, 1),
        ]
    ),
    rules=st.sampled_from([1, 2]),
    escape=st.sampled_from([None, "\\"]),
)
def test_csv_splitting_matches_python(
    *,
    tmp_path_factory: Any,
    header: str,
    rows: Any,
    good: int,
    ending: str,
    last: bool,
    read_bytes: int,
    limits: Any,
    rules: Any,
    escape: str | None,
) -> None:
    width = len(next(csv.reader(io.StringIO(header, newline=""))))
    lines = [header, *rows]
    for i in range(good):
        lines.insert(
            1 + i * 2,
            ",".join(
                ['"a ""x"", b"', "z", "", "\xe4", '"\r\n"'][(i + k) % 5] for k in range(width)
            ),
        )
    text = ending.join(lines) + (ending if last else "")
    path = tmp_path_factory.getbasetemp() / "split.csv"
    check_split(
        path,
        text.encode("latin1"),
        read_bytes,
        max_bytes=limits[0],
        max_lines=limits[1],
        rules=rules,
        escape=escape,
    )


@pytest.mark.parametrize("read_bytes", [1000, 1 << 20])
def test_two_stray_quotes_lose_two_rows(tmp_path: Path, read_bytes: int) -> None:
    lines = [f"1,{row}" for row in range(50_000)]
    lines[1000] = '1,"1000'
    lines[41_000] = '1,41"'
    lines[41_001] = '1,"41001'  # closes nothing: the first quote is too far away
    (tmp_path / "a.csv").write_text("\n".join(["y,s", *lines, ""]))
    tables = pa.concat_tables(read_csv(str(tmp_path / "a.csv"), LABELLED, read_bytes=read_bytes))
    assert np.flatnonzero(tables.column(FAULT).to_numpy()).tolist() == [1000, 41_001]
    raw, faults = parse_table(tables, LABELLED)
    assert (raw.rows, faults.counts) == (49_998, {"unmatched quote": 2})
    assert [str(fault) for fault in faults.first] == [
        " at row 1000: unmatched quote",
        " at row 41001: unmatched quote",
    ]


@pytest.mark.parametrize(
    ("text", "starts"),
    [("a,b\r\n1,2\r\n\r\n3,4", [0, 5, 12, 15]), ('a\n"x\ny"\nz', [0, 2, 5, 8, 9])],
)
def test_row_start_returns_next_line(tmp_path: Path, text: str, starts: list[int]) -> None:
    (tmp_path / "a.csv").write_bytes(text.encode())
    for place in range(1, len(text)):
        expected = next(
            start for start in [*starts, len(text)] if start >= place or start == len(text)
        )
        assert row_start(str(tmp_path / "a.csv"), place) == expected


def test_shortened_parquet_file_is_rejected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that became shorter between its footer and its rows would give uninitialized memory as
    rows.
    """
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"x": [1] * 9}), path)
    complete = storage.read_into
    monkeypatch.setattr(
        storage,
        "read_into",
        lambda path, start, buffer: complete(path, start, buffer[:-1]),
    )
    rejects("is shorter than its footer says", parquet._read_span, str(path), (0, 100))


@pytest.mark.parametrize(
    "span",
    [
        (0, 10),
        (15, 20),
        (95, 99),
        (40, 60),
        (60, 61),
        (90, 95),
        (0, 99),
    ],
    ids=str,
)
def test_bytes_outside_fetched_spans_are_read(tmp_path: Path, span: tuple[int, int]) -> None:
    path = tmp_path / "log.parquet"
    content = bytes(range(99))
    path.write_bytes(content)
    spans = [(20, 60), (80, 95)]
    file = parquet._Spans(
        str(path),
        len(content),
        spans,
        [parquet._read_span(str(path), each) for each in spans],
    )
    assert file.span_bytes(*span).tobytes() == content[slice(*span)]


def test_parquet_columns_are_checked_before_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": [1], "x": [["a"]]}), tmp_path / "log.parquet")
    (file,) = storage.list_files(str(tmp_path))
    for column, message in (("z", "has no column named z"), ("x", "column x ")):
        schema = Schema(label="y", dense=(column,), tokens="any")
        how = rewritten.Rewriting(schema, 1 << 20, str(tmp_path / "made"))
        part = rewritten.FileRange(0, file.path, version=file)
        rejects(message, rewritten.prepared, part, how)


def test_rewritten_csv_has_dictionaries_of_few_values(tmp_path: Path) -> None:
    lines = [f"{row % 2},u{row},c{row % 7}\n" for row in range(1000)]
    (tmp_path / "a.csv").write_text("click,user,code\n" + "".join(lines))
    schema = Schema(label="click", sparse=("user", "code"), delimiter=",")
    index = index_of([tmp_path / "a.csv"], schema, tmp_path / "cache")
    (path,) = {segment.path for segment in index.segments}
    with pq.ParquetFile(path) as parquet:
        group = parquet.metadata.row_group(0)
        columns = {group.column(i).path_in_schema: group.column(i) for i in range(4)}
        nullable = {each.name for each in parquet.schema_arrow if each.nullable}
    assert {name: each.has_dictionary_page for name, each in columns.items()} == {
        "click": False,
        "user": False,
        "code": True,
        FAULT: True,
    }
    assert not nullable


def test_rewritten_csv_compresses_long_text(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = [f"{row % 2},https://example.org/{row},{rng.random():.9f}\n" for row in range(4000)]
    (tmp_path / "a.csv").write_text("click,page,number\n" + "".join(lines))
    schema = Schema(label="click", dense=("number",), sparse=("page",), delimiter=",")
    index = index_of([tmp_path / "a.csv"], schema, tmp_path / "cache", 1 << 24)
    (path,) = {segment.path for segment in index.segments}
    group = pq.read_metadata(path).row_group(0)
    codecs = {group.column(i).path_in_schema: group.column(i).compression for i in range(3)}
    assert codecs == {"click": "LZ4", "page": "LZ4", "number": "UNCOMPRESSED"}


def coded_log(folder: Path, *, rows: int, group_rows: int) -> tuple[LogIndex, Schema]:
    """Write a log with text of few values, many values and lists, and index it."""
    rng = random.Random(0)
    table = pa.table(
        {
            "y": [row % 2 for row in range(rows)],
            "few": [rng.choice(["a", "12", "", "none", "true", None]) for _ in range(rows)],
            "many": [f"https://example.org/{row}" for row in range(rows)],
            "tags": [[rng.choice("ab")] * (row % 3) for row in range(rows)],
            "user": [rng.choice([1, None]) for _ in range(rows)],
        }
    )
    schema = LABELLED.replace(
        sparse=("few", "many", "tags", "user"), lists=("tags",), missing=("none", "NA")
    )
    pq.write_table(table, folder / "a.parquet", row_group_size=group_rows)
    return index_of([folder / "a.parquet"], schema, folder / "cache", 1 << 15), schema


@pytest.mark.parametrize("group_rows", [100, 1000])
def test_repeated_text_is_read_as_dictionaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int
) -> None:
    index, schema = coded_log(tmp_path, rows=3000, group_rows=group_rows)
    (first, *_) = index.segments
    table, _ = parquet.read_rows(first.path, first.start, first.stop, schema, dictionaries=True)
    coded = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
    assert coded == ["few", "many"]
    raw = read_tables(index.segments, schema)
    monkeypatch.setattr(parquet, "decode_chunks", lambda _: {})  # Arrow reads them
    assert_same(read_tables(index.segments, schema), raw)
    monkeypatch.setattr(formats_parquet, "_CODED_BYTES", 0)
    assert_same(read_tables(index.segments, schema), raw)


def test_segments_of_one_file_are_parsed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, schema = coded_log(tmp_path, rows=3000, group_rows=1000)
    assert len(index.segments) == 3
    together = read_tables(index.segments, schema)
    alone = RawBlock.concatenated([read_tables([each], schema) for each in index.segments])
    assert_same(together, alone, ignored="files")
    parsed = mock.Mock(wraps=parse_table)
    monkeypatch.setattr(table_log, "parse_table", parsed)
    read_tables(index.segments, schema)
    parsed.assert_called_once()
    last = replace(index.segments[-1], rows=999)
    rejects("a.parquet: rows 2000-3000", read_tables, [*index.segments[:-1], last], schema)
