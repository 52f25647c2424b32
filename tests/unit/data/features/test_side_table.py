"""Side tables: rows are found by key and time, and a table is built once per content."""

import gc
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import time as seconds_now
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.faults import rejects
from hosts.processes import run_command
from hypothesis import example, given
from hypothesis import strategies as st

from rayrec import host_resources, storage
from rayrec.config import InputError
from rayrec.data.features import side_table
from rayrec.data.features.side_table import (
    UNUSED_DAYS,
    VERSION,
    SideTable,
    build,
    copy_built,
    open_content,
    open_table,
    restore,
)
from rayrec.data.logs.table_parser import parse_table
from rayrec.hashing import key_tokens
from rayrec.schema import Schema, TableSource

ITEMS = {
    "item": pa.array([5, 7, 9, -3]),
    "price": pa.array([1.5, None, 3.0, -0.25]),
    "title": pa.array(["pen", "", "Füller", None]),
    "tags": pa.array([["blue", "new"], None, [], ["new"]]),
    "brand": pa.array(["a", "b", "a", "a"]).dictionary_encode(),
    "parts": pa.array(
        [[("ink", 1.0)], None, [], [("cap", 0.5)]],
        pa.map_(pa.string(), pa.float64()),
    ),
    "size": pa.array([{"name": "xl"}, None, {"name": None}, {"name": "s"}]),
    "taste": pa.array([[1, 2], [3, 4], None, [5, 6]], pa.list_(pa.float32(), 2)),
    "new": pa.array([True, False, None, True]),
}
STORED = {
    "price": [1.5, None, 3.0, -0.25],
    "title": [b"pen", None, "Füller".encode(), None],
    "tags": [[b"blue", b"new"], None, [], [b"new"]],
    "brand": [b"a", b"b", b"a", b"a"],
    "parts": [[(b"ink", 1.0)], None, [], [(b"cap", 0.5)]],
    "size": [{"name": b"xl"}, None, {"name": None}, {"name": b"s"}],
    "taste": [[1, 2], [3, 4], None, [5, 6]],
    "new": [True, False, None, True],
}


PAIR = ("shop", "item")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, columns: Mapping[str, Any]) -> str:
    pq.write_table(pa.table(dict(columns)), path)
    return str(path)


def write_csv(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def built(
    path: str,
    *columns: str,
    key: str | tuple[str, ...] = "item",
    **options: Any,
) -> SideTable:
    integer_keys = options.pop("integer_keys", ())
    folder = options.pop("folder", None)
    source = TableSource(path=path, key=key, **options)
    return build(source, columns, integer_keys=integer_keys, folder=folder)


def tokens_of(values: Sequence[Any] | pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, missing) of a log's column with these values."""
    table = pa.table({"id": values})
    block, faults = parse_table(table, Schema(label=None, sparse=("id",)))
    assert faults.total == 0
    return block.categories[:, 0], block.missing[:, 0]


def find(table: SideTable, values: Sequence[Any] | pa.Array) -> list[int]:
    found: list[int] = table.lookup(*tokens_of(values)).tolist()
    return found


def built_files(cache: Path) -> list[Path]:
    return sorted((cache / "tables").glob("*-*/*"))


# -- Values
@pytest.mark.parametrize("name", STORED)
def test_column_returns_stored_values(tmp_path: Path, name: str) -> None:
    table = built(write(tmp_path / "items.parquet", ITEMS), name)
    assert table.column(name, np.arange(4)).to_pylist() == STORED[name]


def test_column_returns_null_for_absent_rows(tmp_path: Path) -> None:
    table = built(write(tmp_path / "items.parquet", ITEMS), "price")
    rows = np.array([2, -1, 0])
    assert table.column("price", rows).to_pylist() == [3.0, None, 1.5]


def test_text_is_large_binary_from_every_format(tmp_path: Path) -> None:
    table = built(write_csv(tmp_path / "items.csv", "item,title,price", "5,Füller,1.50"), "title")
    assert table.types == {"title": pa.large_binary()}
    assert table.column("title", np.array([0])).to_pylist() == ["Füller".encode()]


def test_few_texts_come_as_dictionary_for_more_rows(tmp_path: Path) -> None:
    table = built(write(tmp_path / "items.parquet", ITEMS), "title")
    few = table.column("title", np.array([2, -1]))
    assert (few.type, few.to_pylist()) == (pa.large_binary(), ["Füller".encode(), None])
    many = table.column("title", np.array([2, -1, 0, 1, 2]))
    assert pa.types.is_dictionary(many.type)
    assert many.dictionary.null_count == 0
    assert many.to_pylist() == ["Füller".encode(), None, b"pen", None, "Füller".encode()]


def test_many_texts_have_no_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_table, "_MAX_DISTINCT", 9)
    monkeypatch.setattr(side_table, "_SAMPLE_ROWS", 9)
    texts = [str(min(row, 9)).encode() for row in range(20)]
    table = built(write(tmp_path / "items.parquet", {"item": range(20), "name": texts}), "name")
    values = table.column("name", np.arange(20))
    assert (values.type, values.to_pylist()) == (pa.large_binary(), texts)


def test_dictionary_keeps_content_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "items.parquet", ITEMS)
    table = built(path, "title", "brand")
    monkeypatch.setattr(side_table, "_MAX_DISTINCT", 0)
    plain = built(path, "title", "brand", folder=str(tmp_path / "other"))
    assert plain.column("title", np.arange(4)).type == pa.large_binary()
    assert plain.content_hash == table.content_hash


def test_copy_of_first_version_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "items.parquet", ITEMS)
    copy = tmp_path / "copy"
    with monkeypatch.context() as first_version:
        first_version.setattr(side_table, "_MAX_DISTINCT", 0)
        table = built(path, "title")
        copy_built(table, str(copy))
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "version": 1}))
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "other"))
    restore(str(copy), table.content_hash, table.source)
    restored = open_content(table.content_hash, table.source)
    assert restored is not None
    assert restored.column("title", np.arange(4)).to_pylist() == STORED["title"]


def test_missing_marker_is_null(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "items.csv", "item,title", "5,NA", "7,pen")
    table = built(path, "title", missing=("NA",))
    assert table.column("title", np.arange(2)).to_pylist() == [None, b"pen"]


def test_form_reads_delimiter_header_and_encoding(tmp_path: Path) -> None:
    path = tmp_path / "movies.dat"
    path.write_bytes("1::Amélie::Comedy\n2::Alien::Horror\n".encode("latin-1"))
    table = built(
        str(path),
        "title",
        key="movie",
        delimiter="::",
        header=("movie", "title", "genre"),
        encoding="latin-1",
    )
    assert table.column("title", np.arange(2)).to_pylist() == ["Amélie".encode(), b"Alien"]


def test_table_may_be_divided_by_bars(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "items.csv", "item|title", "5|pen")
    table = built(path, "title", delimiter="|")
    assert table.column("title", np.array([0])).to_pylist() == [b"pen"]


def test_form_reads_escapes(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "items.csv", "item,title", r'5,"a \"b\""')
    table = built(path, "title", delimiter=",", escape="\\")
    assert table.column("title", np.array([0])).to_pylist() == [b'a "b"']


def test_format_may_be_named(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "items.txt", '{"item": 5, "price": 2}')
    assert built(path, "price", format="jsonl").column("price", np.array([0])).to_pylist() == [2]
    rejects("format must be one of .*, got 'json'", built, path, "price", format="json")


def test_form_is_no_part_of_content(tmp_path: Path) -> None:
    first = built(write_csv(tmp_path / "a.csv", "item,title", "5,pen"), "title")
    path = write_csv(tmp_path / "b.dat", "5::x::pen")
    second = built(path, "title", header=("item", "other", "title"), delimiter="::")
    assert first.content_hash == second.content_hash


def test_folder_of_files_is_one_table(tmp_path: Path) -> None:
    folder = tmp_path / "items"
    folder.mkdir()
    write(folder / "part-0.parquet", {"item": [4, 8], "price": pa.array([1, 2])})
    write(folder / "part-1.parquet", {"item": [6], "price": pa.array([0.5])})
    table = built(str(folder), "price")
    assert find(table, [6, 8, 5]) == [2, 1, -1]
    assert table.column("price", np.arange(3)).to_pylist() == [1.0, 2.0, 0.5]


FILES = {
    "day=2026-01-01/shop=a%20b": ["5,1", "7,2"],
    "day=2026-01-02/shop=a%20b": ["5,3"],
    "day=2026-01-02/shop=c": ["5,4"],
}


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_columns_of_folders_are_read(tmp_path: Path, suffix: str) -> None:
    """As a part of the key, as the time, and as a value that is looked up."""
    for name, lines in FILES.items():
        folder = tmp_path / "offers" / name
        folder.mkdir(parents=True)
        rows = [line.split(",") for line in lines]
        if suffix == "csv":
            write_csv(folder / "x.csv", "item,price", *lines)
        elif suffix == "jsonl":
            texts = [json.dumps({"item": item, "price": price}) for item, price in rows]
            write_csv(folder / "x.jsonl", *texts)
        else:
            columns = {"item": [row[0] for row in rows], "price": [row[1] for row in rows]}
            write(folder / "x.parquet", columns)
    path = str(tmp_path / "offers" / "*" / "*" / f"x.{suffix}")
    table = built(path, "price", "shop", key=PAIR, time="day")
    tokens = [tokens_of(values)[0] for values in (["a b", "a b", "c", "c"], ["5"] * 4)]
    days = np.array(["2026-01-01", "2026-01-02", "2026-01-01", "2026-01-03"])
    rows_found = table.lookup(key_tokens(tokens), None, days.astype("datetime64[us]").view("i8"))
    assert table.column("price", rows_found).to_pylist() == [b"1", b"3", None, b"4"]
    assert table.column("shop", rows_found).to_pylist() == [b"a b", b"a b", None, b"c"]


def test_columns_of_files_replace_partitions(tmp_path: Path) -> None:
    folder = tmp_path / "item=9"
    folder.mkdir()
    table = built(write(folder / "x.parquet", {"item": [5], "price": [1]}), "price")
    assert find(table, [5, 9]) == [0, -1]


def test_folders_alone_may_have_all_columns(tmp_path: Path) -> None:
    folder = tmp_path / "item=9"
    folder.mkdir()
    table = built(write_csv(folder / "x.csv", "price", "1"), "item")
    assert find(table, [9]) == [0]


def test_folder_without_time_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "day=soon"
    folder.mkdir()
    path = write(folder / "x.parquet", {"item": [5]})
    rejects("column day is the partition day=soon, which is not a time", built, path, time="day")


def test_json_lines_are_read(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "items.jsonl",
        '{"item": 5, "tags": ["a", "b"]}',
        '{"item": "x"}',
    )
    table = built(path, "tags")
    assert find(table, ["x", "5"]) == [1, 0]
    assert table.column("tags", np.array([1, 0])).to_pylist() == [None, [b"a", b"b"]]


# -- Keys
NUMBERS = [0, 1, -1, 5, 2**53 - 1, -(2**53) + 1, 2**63 - 1, -(2**63)]


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from(NUMBERS), min_size=1, unique=True),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from(NUMBERS), min_size=1),
)
def test_integer_keys_match_dict(keys: list[int], queries: list[int]) -> None:
    rows = {key: row for row, key in enumerate(keys)}
    table = in_memory({"item": pa.array(keys, pa.int64())})
    wanted = [rows.get(query, -1) for query in queries]
    assert find(table, pa.array(queries, pa.int64())) == wanted
    assert find(table, [str(query) for query in queries]) == wanted
    assert find(table, pa.array(keys, pa.int64())) == list(range(len(keys)))


TEXTS = ["5", "05", "5.0", " 5", "5 ", "-0", "+5", "Ä", "A\u0308", "true", "1", "日本", "9" * 25]


@given(
    st.lists(st.text(min_size=1) | st.sampled_from(TEXTS), min_size=1),
    st.lists(st.text() | st.sampled_from(TEXTS), min_size=1),
)
@example(["5", "5.0"], ["5", "5.0", "05", ""])
def test_text_keys_match_dict(keys: list[str], queries: list[str]) -> None:
    keys = [key for key in keys if key.isprintable()]
    # Of the texts, only `true` and `false` in three forms are other keys too.
    same = {"true": "1", "True": "1", "TRUE": "1", "false": "0", "False": "0", "FALSE": "0"}
    rows = {key: row for row, key in enumerate(dict.fromkeys(same.get(key, key) for key in keys))}
    if not rows:
        return
    queries = [query for query in queries if query.isprintable()] or [""]
    table = in_memory({"item": pa.array(list(rows), pa.string())})
    assert find(table, queries) == [rows.get(same.get(query, query), -1) for query in queries]


def in_memory(
    columns: Mapping[str, Any],
    *,
    key: str | tuple[str, ...] = "item",
    time: str | None = None,
) -> SideTable:
    """Build a table in an empty folder, which the next call removes."""
    folder = Path(os.environ["RAYREC_CACHE"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return built(write(folder / "items.parquet", columns), key=key, time=time)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(pa.array([5, -7, 0]), id="integers"),
        pytest.param(pa.array([5, -7, 0], pa.int8()), id="narrow integers"),
        pytest.param(pa.array([5.0, -7.0, 0.0]), id="floats"),
        pytest.param(pa.array(["5", "-7", "0"]), id="text"),
        pytest.param(pa.array(["5", "-7", "0"]).dictionary_encode(), id="dictionary"),
    ],
)
def test_equal_keys_of_all_types_match(tmp_path: Path, values: pa.Array) -> None:
    table = built(write(tmp_path / "items.parquet", {"item": values}))
    for queries in (pa.array([0, 5, -7, 6]), ["0", "5", "-7", "6"], pa.array([0.0, 5, -7, 6])):
        assert find(table, queries) == [2, 0, 1, -1]


def test_large_unsigned_key_matches_text(tmp_path: Path) -> None:
    table = built(write(tmp_path / "items.parquet", {"item": pa.array([2**63, 3], pa.uint64())}))
    assert find(table, [str(2**63), "3", str(-(2**63))]) == [0, 1, -1]


def test_integer_keys_are_parsed_as_integers(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "items.csv", "item,price", "007,1", "8.0,2")
    table = built(path, "price", integer_keys=["item"])
    assert find(table, [7, 8]) == [0, 1]


def test_missing_keys_of_log_have_no_row(tmp_path: Path) -> None:
    table = built(write(tmp_path / "items.parquet", {"item": [0, 1]}))
    tokens, missing = tokens_of(pa.array([0, None, 1]))
    assert tokens[1] == 0
    assert table.lookup(tokens, missing).tolist() == [0, -1, 1]


def test_many_keys_match_rows(tmp_path: Path) -> None:
    keys = np.random.default_rng(4).permutation(70_000) * 4096
    table = built(write(tmp_path / "items.parquet", {"item": keys}))
    rows = np.random.default_rng(5).integers(0, len(keys), 200_000)
    np.testing.assert_array_equal(table.lookup(keys[rows].view(np.uint64)), rows)
    np.testing.assert_array_equal(table.lookup((keys + 1).view(np.uint64)), -1)


# -- Two keys


def find_pairs(table: SideTable, pairs: Sequence[tuple[Any, Any]]) -> list[int]:
    tokens = [tokens_of([pair[side] for pair in pairs])[0] for side in (0, 1)]
    found: list[int] = table.lookup(key_tokens(tokens)).tolist()
    return found


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, unique=True))
def test_pairs_of_integers_match_dict(pairs: list[tuple[int, int]]) -> None:
    columns = {"shop": [a for a, _ in pairs], "item": [b for _, b in pairs]}
    table = in_memory(columns, key=PAIR)
    rows = {pair: row for row, pair in enumerate(pairs)}
    queries = [(a, b) for a in range(-10, 11) for b in range(-10, 11)]
    assert find_pairs(table, queries) == [rows.get(query, -1) for query in queries]


def test_pairs_of_large_regular_ids_have_different_tokens() -> None:
    """Of ids that are multiples of 2^22, as in schemes of ids by time."""
    ids = np.random.default_rng(0).integers(0, 2**41, (2, 1_000_000)).astype(np.uint64)
    tokens = key_tokens(list(ids << np.uint64(22)))
    assert len(np.unique(tokens)) == 1_000_000


def test_order_of_two_keys_counts(tmp_path: Path) -> None:
    table = built(write(tmp_path / "a.parquet", {"shop": ["a", "b"], "item": [1, 2]}), key=PAIR)
    assert find_pairs(table, [("a", "1"), ("1", "a"), ("b", "1"), ("b", "2")]) == [0, -1, -1, 1]


def test_repeated_pair_names_both_values(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "o.csv", "shop,item,price", "a,1,1", "b,1,2", "a,2,3", "b,1,4")
    rejects(
        r"o\.csv: 1 of 4 rows repeat a key; first: shop b and item 1 in row 1 and row 3\. Keep one "
        r"row per shop and item, or name .*`time`$",
        built,
        path,
        "price",
        key=PAIR,
    )


def test_missing_part_of_key_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "o.parquet", {"shop": ["a", "a"], "item": [1, None]})
    rejects("1 of 2 rows have no item, which is a part of the key", built, path, key=PAIR)


def test_absent_second_key_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "o.parquet", {"shop": ["a"], "items": [1]})
    rejects(r"column item not found; did you mean 'items'\?", built, path, key=PAIR)


def test_lookup_returns_newest_row_of_pair(tmp_path: Path) -> None:
    columns = {"shop": [1, 1, 2], "item": [3, 3, 3], "since": [30, 20, 10]}
    table = built(write(tmp_path / "o.parquet", columns), key=PAIR, time="since")
    ones = np.ones(3, np.uint64)
    at = np.array([19, 20, 31]) * 1_000_000
    assert table.lookup(key_tokens([ones, ones * 3]), None, at).tolist() == [-1, 1, 0]


def test_table_of_pairs_is_reopened_and_restored(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write(tmp_path / "o.parquet", {"shop": ["a", "b"], "item": [1, 2], "price": [3, 4]})
    table = built(path, "price", key=PAIR)
    assert open_table(table.path).source.keys == PAIR
    copy_built(table, str(tmp_path / "copy"))
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "other"))
    restore(str(tmp_path / "copy"), table.content_hash, table.source)
    restored = open_content(table.content_hash, table.source)
    assert restored is not None
    assert find_pairs(restored, [("b", 2), ("a", 1)]) == [1, 0]


# -- Times
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, unique=True),
    st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 22)), min_size=1),
)
def test_newest_row_matches_dict(
    pairs: list[tuple[int, int]],
    queries: list[tuple[int, int]],
) -> None:
    start = 1_700_000_000
    keys = [key for key, _ in pairs]
    times = [start + time for _, time in pairs]
    table = in_memory({"user": keys, "since": times}, key="user", time="since")
    wanted = []
    for key, time in queries:
        valid = [row for row, (other, at) in enumerate(pairs) if other == key and at <= time]
        wanted.append(max(valid, key=lambda row: pairs[row][1], default=-1))
    at = np.array([start + time for _, time in queries]) * 1_000_000
    tokens, missing = tokens_of([key for key, _ in queries])
    assert table.lookup(tokens, missing, at).tolist() == wanted


def test_times_match_log_times(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "users.csv",
        "user,valid_from,city",
        "1,2026-01-02,b",
        "1,2026-01-01T00:00:00Z,a",
    )
    table = built(path, "city", key="user", time="valid_from")
    days = np.array(["2025-12-31T23:59", "2026-01-01", "2026-01-01T23:59", "2026-01-02"])
    at = days.astype("datetime64[us]").astype(np.int64)
    rows = table.lookup(np.ones(4, np.uint64), None, at)
    assert table.column("city", rows).to_pylist() == [None, b"a", b"a", b"b"]


def test_lookup_without_times_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "users.parquet", {"user": [1], "since": [0]})
    table = built(path, key="user", time="since")
    rejects(r"has time since, so that rows need one", table.lookup, np.ones(1, np.uint64))


def test_times_are_ignored_without_time(tmp_path: Path) -> None:
    table = built(write(tmp_path / "items.parquet", {"item": [5]}))
    assert table.lookup(np.array([5], np.uint64), None, np.array([-1])).tolist() == [0]


# -- Errors
def test_duplicate_keys_name_count_and_rows(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "items.csv", "item,price", "5,1", "pen,2", "7,3", "pen,4", "5,5")
    rejects(
        r"items\.csv: 2 of 5 rows repeat a key; first: item pen in row 1 and row 3\. Keep one row "
        r"per item, or name .*`time`$",
        built,
        path,
        "price",
    )


def test_duplicate_keys_name_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"item": [5, 6]})
    write(tmp_path / "b.parquet", {"item": [7, 6]})
    rejects(r"item 6 in row 1 of \S*a\.parquet and row 1 of \S*b\.parquet", built, str(tmp_path))


def test_equal_times_of_one_key_are_rejected(tmp_path: Path) -> None:
    columns = {"user": [3, 3, 4, 3], "since": [20, 10, 10, 20]}
    rejects(
        r"1 of 4 rows repeat a key; first: user 3 in row 0 and row 3 with the same since",
        built,
        write(tmp_path / "users.parquet", columns),
        key="user",
        time="since",
    )


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(pa.array(["a", "", None]), id="text"),
        pytest.param(pa.array([1, None, None]), id="integers"),
        pytest.param(pa.array([1.0, float("nan"), None]), id="floats"),
    ],
)
def test_missing_key_is_rejected(tmp_path: Path, keys: pa.Array) -> None:
    path = write(tmp_path / "items.parquet", {"item": keys})
    rejects(r"2 of 3 rows have no item, which is the key; first: row 1\.", built, path)


def test_fractional_key_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "items.parquet", {"item": [1.0, 1.5]})
    rejects(r"items\.parquet at row 1: not a whole number in range in column item", built, path)


def test_unreadable_time_is_rejected(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "users.csv", "user,since", "1,2026-01-01", "2,soon")
    rejects(r"row 1: not a time in column since", built, path, key="user", time="since")


@pytest.mark.parametrize(("columns", "key"), [(("prize",), "item"), ((), "items")])
def test_absent_column_is_rejected(tmp_path: Path, columns: tuple[str, ...], key: str) -> None:
    path = write(tmp_path / "items.parquet", {"item": [1], "price": [2]})
    rejects(r"column \w+ not found; did you mean '(price|item)'\?", built, path, *columns, key=key)


def test_unstored_column_is_rejected(tmp_path: Path) -> None:
    table = built(write(tmp_path / "items.parquet", ITEMS), "price")
    rejects(r"column title not found; it has price", table.column, "title", np.arange(1))


@pytest.mark.parametrize("name", ["items.parquet", "items.csv"])
def test_table_without_rows_is_rejected(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("csv"):
        path.write_text("item,price\n")
    else:
        write(path, {"item": pa.array([], pa.int64()), "price": pa.array([], pa.int64())})
    rejects(r": has no rows", built, str(path), "price")


def test_invalid_csv_row_is_rejected(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "items.csv", "item,price", "1,2", "3")
    rejects(r"1 invalid rows \(1 x too few columns\).* row 1", built, path, "price")


def test_conflicting_types_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"item": [1], "price": [1.5]})
    write(tmp_path / "b.parquet", {"item": [2], "price": ["x"]})
    rejects(
        r"column price has values of types double and large_binary",
        built,
        str(tmp_path),
        "price",
    )


def test_table_larger_than_memory_is_rejected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_cache: Path,
) -> None:
    path = write(tmp_path / "items.parquet", {"item": np.arange(1000), "price": np.arange(1000)})
    memory = host_resources.Memory(10**9, 40_000)
    monkeypatch.setattr(host_resources, "memory", lambda: memory)
    rejects(
        r"needs more than 48\.5 kB .* 40 kB are available; join its columns into the log",
        built,
        path,
        "price",
    )
    assert not built_files(own_cache)


def test_built_table_larger_than_machine_is_rejected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = built(write(tmp_path / "items.parquet", ITEMS), "price")
    monkeypatch.setattr(host_resources, "memory", lambda: host_resources.Memory(1000, 1000))
    rejects(r"this machine has 1 kB of memory; join its columns", open_table, table.path)


# -- Content
def test_content_hash_is_equal_for_csv_and_parquet(tmp_path: Path) -> None:
    csv = write_csv(tmp_path / "items.csv", "item,title,brand", "5,Füller,a", "7,,b", "8,pen,")
    columns = {
        "brand": pa.array(["a", "b", None]),
        "item": [5, 7, 8],
        "title": pa.array(["Füller", None, "pen"]).dictionary_encode(),
    }
    parquet = write(tmp_path / "items.parquet", columns)
    first = built(csv, "title", "brand")
    second = built(parquet, "brand", "title")
    assert first.content_hash == second.content_hash
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("item", pa.array([5, 7, 9, -4])),
        ("price", pa.array([1.5, 0.0, 3.0, -0.25])),
        ("title", pa.array(["pen", "", "Füller", "x"])),
        ("title", pa.array(["penF", "", "üller", None])),
        ("tags", pa.array([["blue"], None, ["new"], ["new"]])),
        ("tags", pa.array([["blue", "new"], [], None, ["new"]])),
        ("size", pa.array([{"name": "xl"}, {"name": None}, None, {"name": "s"}])),
        ("parts", pa.array([[("ink", 2.0)], None, [], [("cap", 0.5)]], ITEMS["parts"].type)),
        ("new", pa.array([True, False, False, True])),
    ],
)
def test_content_hash_covers_every_value(tmp_path: Path, name: str, value: pa.Array) -> None:
    table = built(write(tmp_path / "items.parquet", ITEMS), *STORED)
    other = built(write(tmp_path / "other.parquet", {**ITEMS, name: value}), *STORED)
    assert table != other


def test_content_hash_is_independent_of_blocks_and_other_columns(tmp_path: Path) -> None:
    rows = 3 * 2**15 + 5
    columns = {
        "item": np.arange(rows),
        "tags": pa.array([["a"], None, ["b", "c"]] * (rows // 3 + 1))[:rows],
    }
    table = built(write(tmp_path / "items.parquet", columns), "tags")
    folder = tmp_path / "parts"
    folder.mkdir()
    whole = pa.table(columns | {"unused": np.ones(rows)})
    for number, start in enumerate(range(0, rows, 40_001)):
        pq.write_table(whole.slice(start, 40_001), folder / f"{number}.parquet")
    assert built(str(folder), "tags") == table


def test_changed_table_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "items.parquet"
    first = built(write(path, {"item": [1, 2], "price": [3, 4]}), "price")
    first.check_content(first.content_hash)
    second = built(write(path, {"item": [1, 2], "price": [3, 5]}), "price")
    rejects(
        r"items\.parquet: changed since the model was trained",
        second.check_content,
        first.content_hash,
    )


# -- Built files
def test_copied_table_is_restored(
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same files come of a copy, of a table with and without times."""
    items = built(write(tmp_path / "items.parquet", ITEMS), *STORED)
    days = pa.array([3, 1, 2], pa.timestamp("s"))
    timed = {"item": ["b", "a", "b"], "price": [1, 2, 3], "since": days}
    source = TableSource(path=write(tmp_path / "prices.parquet", timed), key="item", time="since")
    prices = build(source, ["price"])
    content = {file.relative_to(own_cache): file.read_bytes() for file in built_files(own_cache)}
    assert len(content) == 6
    for table in (items, prices):
        copy_built(table, str(tmp_path / table.content_hash))
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "other"))
    for table in (items, prices):
        assert open_content(table.content_hash, table.source) is None
        restore(str(tmp_path / table.content_hash), table.content_hash, table.source)
        assert open_content(table.content_hash, table.source) == table
    restored = built_files(tmp_path / "other")
    assert {file.relative_to(tmp_path / "other"): file.read_bytes() for file in restored} == content


def test_copy_with_other_content_is_rejected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = built(write(tmp_path / "items.parquet", {"item": [1, 2], "price": [3, 4]}), "price")
    other = built(write(tmp_path / "other.parquet", {"item": [1, 2], "price": [3, 5]}), "price")
    copy = str(tmp_path / "copy")
    copy_built(other, copy)
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache 2"))
    rejects("copy: damaged, another content", restore, copy, table.content_hash, table.source)
    (tmp_path / "copy" / "rows.arrow").write_bytes(b"ARROW1 and nothing else")
    rejects("copy: damaged", restore, copy, other.content_hash, table.source)
    assert not list(tmp_path.glob(f"cache 2/tables/*-{VERSION}"))
    storage.write_json(f"{copy}/manifest.json", {"version": 0})
    restore(copy, other.content_hash, table.source)  # Of another version, which is ignored


def test_touched_and_copied_tables_are_not_written_again(tmp_path: Path, own_cache: Path) -> None:
    path = write(tmp_path / "items.parquet", ITEMS)
    table = built(path, "price")
    before = {file: file.stat().st_ino for file in built_files(own_cache)}
    assert len(before) == 3
    os.utime(path, (1, 1))
    shutil.copy(path, tmp_path / "copy.parquet")
    assert built(path, "price").path == table.path
    copy = built(str(tmp_path / "copy.parquet"), "price")
    assert copy.path == table.path
    assert copy.source.path.endswith("copy.parquet")
    assert {file: file.stat().st_ino for file in built_files(own_cache)} == before


def test_unchanged_table_is_not_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "items.parquet", ITEMS)
    first = built(path, "price")
    before = os.stat(path)
    Path(path).write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert built(path, "price") == first


def test_edited_table_is_built_again_beside_mapped_one(tmp_path: Path) -> None:
    path = tmp_path / "items.parquet"
    first = built(write(path, {"item": [1, 2], "price": [3, 4]}), "price")
    second = built(write(path, {"item": [2, 1, 3], "price": [3, 4, 5]}), "price")
    assert find(first, [1, 2, 3]) == [0, 1, -1]
    assert find(second, [1, 2, 3]) == [1, 0, 2]
    assert open_table(first.path) == first


def aged(table: SideTable, days: float) -> None:
    """Make a built table one that was last opened before so many days."""
    set_age(Path(table.path) / "manifest.json", days)


def set_age(file: Path, days: float) -> None:
    changed_s = seconds_now() - days * 86400
    os.utime(file, (changed_s, changed_s))


def built_prices(folder: Path, *prices: int) -> list[SideTable]:
    """Build a table with each of these prices."""
    return [
        built(write(folder / f"{price}.parquet", {"item": [1], "price": [price]}), "price")
        for price in prices
    ]


def test_build_removes_unused_tables(tmp_path: Path, own_cache: Path) -> None:
    old, new = built_prices(tmp_path, 1, 2)
    aged(old, UNUSED_DAYS + 0.1)
    aged(new, UNUSED_DAYS - 0.1)
    old_folder = Path(old.path)
    new_folder = Path(new.path)
    del old, new
    gc.collect()
    built_prices(tmp_path, 3)
    assert (old_folder.exists(), new_folder.exists()) == (False, True)
    assert len(list((own_cache / "tables" / "sources").iterdir())) == 2
    (again,) = built_prices(tmp_path, 1)
    assert again.column("price", np.array([0])).to_pylist() == [1]


def test_build_keeps_mapped_table(tmp_path: Path) -> None:
    (old,) = built_prices(tmp_path, 1)
    aged(old, 1000)
    built_prices(tmp_path, 2)
    assert open_content(old.content_hash, old.source) == old


def test_build_leaves_opened_table(tmp_path: Path) -> None:
    path = built_prices(tmp_path, 1)[0].path
    gc.collect()
    table = open_table(path)
    aged(table, 1000)
    del table
    gc.collect()
    open_table(path)  # As a replica that restarts
    gc.collect()
    built_prices(tmp_path, 2)
    assert Path(path).exists()


def test_table_removed_while_opened_is_rejected(tmp_path: Path) -> None:
    (table,) = built_prices(tmp_path, 1)
    manifest = storage.read_json(f"{table.path}/manifest.json")
    (Path(table.path) / "manifest.json").unlink()
    rejects("built side table not found", SideTable, table.path, table.source, table.path, manifest)


def test_pickle_contains_path_only(tmp_path: Path) -> None:
    columns = {"item": np.arange(100_000), "price": np.random.default_rng(0).random(100_000)}
    table = built(write(tmp_path / "items.parquet", columns), "price")
    data = pickle.dumps(table)
    assert len(data) < 1000
    copy = pickle.loads(data)
    assert copy == table
    assert copy.source == table.source
    np.testing.assert_array_equal(copy.column("price", np.array([7])), columns["price"][7])


def test_columns_are_mapped(tmp_path: Path, own_cache: Path) -> None:
    columns = {"item": np.arange(1_000_000), "price": np.arange(1_000_000)}
    path = write(tmp_path / "items.parquet", columns)
    allocated = pa.total_allocated_bytes()
    table = built(path, "price")
    assert pa.total_allocated_bytes() - allocated < 1_000_000
    table.lookup(np.arange(10, dtype=np.uint64))
    values = table.column("price", np.array([999_999]))
    assert values.to_pylist() == [999_999]
    assert pa.total_allocated_bytes() - allocated < 1_000_000
    maps = Path("/proc/self/maps").read_text()
    assert str(own_cache) in maps


def test_missing_built_table_is_rejected(tmp_path: Path) -> None:
    rejects(r"built side table not found", open_table, str(tmp_path / "gone"))


def test_cut_file_is_rejected(tmp_path: Path) -> None:
    table = built(write(tmp_path / "items.parquet", ITEMS), "price")
    rows = Path(table.path) / "rows.arrow"
    rows.write_bytes(rows.read_bytes()[:-8])
    rejects(r"damaged, a file has another size: .*rows\.arrow", open_table, table.path)


def test_table_of_another_version_is_rejected(tmp_path: Path) -> None:
    table = built(write(tmp_path / "items.parquet", ITEMS), "price")
    manifest = Path(table.path) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 0}))
    rejects(r"built by another version", open_table, table.path)


def test_removed_built_table_is_built_again(tmp_path: Path) -> None:
    path = write(tmp_path / "items.parquet", ITEMS)
    table = built(path, "price")
    shutil.rmtree(table.path)
    assert built(path, "price").column("price", np.array([0])).to_pylist() == [1.5]


def test_unwritable_cache_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "items.parquet", ITEMS)
    rejects(r"cannot be written there \(Not a directory\)", built, path, "price", folder=path)


def test_full_disk_is_rejected(tmp_path: Path, own_cache: Path) -> None:
    path = write(tmp_path / "items.parquet", {"item": np.arange(100_000)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        rejects(r"index\.arrow: side table cannot be written there", built, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [file.name for file in built_files(own_cache)] == ["rows.arrow"]
    assert find(built(path), [99_999]) == [99_999]


BUILDER = """
import sys
from rayrec.data.features.side_table import build
from rayrec.schema import TableSource
print("ready", flush=True)
sys.stdin.readline()
table = build(TableSource(path=sys.argv[1], key="item"), ["price"])
print(table.path)
"""


@pytest.mark.slow
def test_two_processes_build_table_once(tmp_path: Path, own_cache: Path) -> None:
    columns = {"item": np.arange(200_000), "price": np.arange(200_000) / 7}
    path = write(tmp_path / "items.parquet", columns)
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for builder in builders:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "ready\n"
    for builder in builders:
        print(file=builder.stdin, flush=True)
    paths = {builder.communicate(timeout=60)[0].strip() for builder in builders}
    assert len(paths) == 1
    assert find(open_table(paths.pop()), [0, 199_999]) == [0, 199_999]
    assert len(built_files(own_cache)) == 3


KILLED = """
import os, signal, sys
import pyarrow as pa
from rayrec.data.features import side_table
from rayrec.schema import TableSource
write = side_table._write_batch
def killed(path, batch):
    if path.endswith(sys.argv[2]):
        with side_table.storage.writing(path) as local:
            open(local, "wb").write(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    return write(path, batch)
side_table._write_batch = killed
side_table.build(TableSource(path=sys.argv[1], key="item"), ["price"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", ["rows.arrow", "index.arrow"])
def test_killed_build_is_removed_and_repeated(tmp_path: Path, own_cache: Path, file: str) -> None:
    path = write(tmp_path / "items.parquet", ITEMS)
    run_command(sys.executable, "-c", KILLED, path, file, status=-signal.SIGKILL)
    assert any(each.name.endswith(".partial") for each in built_files(own_cache))
    other = write(tmp_path / "other.parquet", {"item": [1]})
    built(other)
    assert len(built_files(own_cache)) == 3
    table = built(path, "price")
    assert table.column("price", np.arange(2)).to_pylist() == [1.5, None]


# -- Source
def test_source_with_one_column_as_key_and_time_is_rejected() -> None:
    with pytest.raises(InputError, match="key and time must differ, got user for both"):
        TableSource(path="users.csv", key="user", time="user")


# -- Stores
@pytest.mark.extended
def test_table_of_store_is_fetched_once(bucket: str, tmp_path: Path, own_cache: Path) -> None:
    path = f"{bucket}/side-tables/items.parquet"
    storage.write_bytes(path, Path(write(tmp_path / "items.parquet", ITEMS)).read_bytes())
    table = built(path, "title", folder=f"{bucket}/side-tables/cache")
    assert table.path.startswith(bucket)
    fetched = {file: file.stat().st_ino for file in own_cache.rglob("*.arrow")}
    assert len(fetched) == 2
    copy = pickle.loads(pickle.dumps(table))
    assert copy.column("title", copy.lookup(np.array([9, 5], np.uint64))).to_pylist() == [
        "Füller".encode(),
        b"pen",
    ]
    assert built(path, "title", folder=f"{bucket}/side-tables/cache") == table
    assert {file: file.stat().st_ino for file in own_cache.rglob("*.arrow")} == fetched
    (rows,) = own_cache.rglob("rows.arrow")
    set_age(rows, 1000)
    other = built(path, "price", folder=f"{bucket}/side-tables/cache")
    assert rows.exists()
    set_age(rows, 1000)
    del table, copy
    gc.collect()
    built(path, "tags", folder=f"{bucket}/side-tables/cache")
    kept = [file.parent.name for file in own_cache.rglob("rows.arrow")]
    assert rows.parent.name not in kept
    assert len(kept) == 2
    assert other.column("price", np.array([0])).to_pylist() == [1.5]
