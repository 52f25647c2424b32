"""Texts of categories that are found in a log, whatever the tasks."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data.encoding import name_search
from rayrec.data.encoding.category_names import CategoryNames
from rayrec.data.encoding.known_categories import UserIds, ValueTokens, ids_by_row
from rayrec.data.encoding.name_search import find_names
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import SparseColumn
from rayrec.data.engine import TaskContext, ThreadEngine
from rayrec.data.log_source import LogSource
from rayrec.schema import Feature, Schema

LISTS = Schema(label=None, sparse=("item",), lists=("item",))


def make_preprocessor(values: pa.Array, schema: Schema = LISTS) -> Preprocessor:
    """Return a Preprocessor whose vocabulary has the values, in order."""
    tokens, present = ValueTokens("item", schema).read(values)
    assert present.all()
    column = SparseColumn(len(tokens) + 2, len(tokens))
    return Preprocessor("test", schema, (), (column,) * len(schema.sparse), tokens)


def search(
    folder: Path,
    tables: list[pa.Table],
    own: Preprocessor,
    *,
    threads: int = 1,
) -> CategoryNames | None:
    log = folder / "log"
    log.mkdir(exist_ok=True)
    for number, table in enumerate(tables):
        pq.write_table(table, log / f"part-{number}.parquet", row_group_size=2)
    engine = ThreadEngine(threads)
    context = TaskContext(engine, str(folder / "cache"))
    index = LogSource.at(str(log)).index(own.schema, segment_bytes=16, context=context)
    parts = tuple(index.parts(0, index.rows))
    return find_names(own, "item", parts, engine=engine)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param(pa.array(["ü", "5", "05", "true"]), ["ü", "5", "05", "1"], id="text"),
        pytest.param(pa.array([7, -3]), [7, -3], id="integers"),
        pytest.param(pa.array([7.0, -3.0]), [7, -3], id="floats"),
        pytest.param(pa.array([7, 2**64 - 1], pa.uint64()), ["7", str(2**64 - 1)], id="unsigned"),
        pytest.param(pa.array([b"a", b"b"]), ["a", "b"], id="bytes"),
        pytest.param(pa.array([datetime.date(2026, 1, 2)]), ["2026-01-02"], id="dates"),
        pytest.param(pa.array(["a", "b"]).dictionary_encode(), ["a", "b"], id="dictionary"),
    ],
)
def test_ids_match_file(values: pa.Array, expected: list[Any], tmp_path: Path) -> None:
    plain = values.dictionary_decode() if isinstance(values, pa.DictionaryArray) else values
    own = make_preprocessor(plain)
    lists = pa.ListArray.from_arrays(pa.array([0, 1, len(values)], pa.int32()), values)
    names = search(tmp_path, [pa.table({"item": lists})], own)
    assert names is not None
    named = own.with_names(names)
    assert UserIds(named, "item").values.to_pylist() == expected
    assert named.hash() == own.hash()
    named.save(str(tmp_path / "saved"))
    loaded = Preprocessor.load(str(tmp_path / "saved"))
    assert UserIds(loaded, "item").values.to_pylist() == expected
    missing = -1 if type(expected[0]) is int else None
    assert ids_by_row(loaded, "item").tolist() == [missing, missing, *expected]


@pytest.mark.parametrize(("rows", "threads"), [(1, 3), (3, 2), (1 << 20, 1)])
def test_first_text_in_file_order_counts(
    rows: int,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts share a token only at random, so this vocabulary claims it."""
    monkeypatch.setattr(name_search, "_TASK_ROWS", rows)
    own = make_preprocessor(pa.array(["same", "b"]))

    def one_token(part: Any, column: str, schema: Schema) -> Any:
        found = read(part, column, schema)
        is_same = np.array([text.startswith("same") for text in found.items.to_pylist()], bool)
        tokens = np.where(is_same, own.tokens[0], found.tokens)
        return type(found)(found.items, tokens, found.lengths)

    read = name_search.read_categories
    monkeypatch.setattr(name_search, "read_categories", one_token)
    tables = [
        pa.table({"item": lists})
        for lists in ([["b"], ["same 2", "b"]], [["same 1"], ["same 3"], ["b", "same 4"]])
    ]
    names = search(tmp_path, tables, own, threads=threads)
    assert names is not None
    assert names.texts is not None
    assert names.texts.to_pylist() == ["same 2", "b"]


def test_shared_vocabulary_is_searched_in_all_columns(tmp_path: Path) -> None:
    schema = Schema(
        label=None,
        sparse=("item", "liked"),
        lists=("item", "liked"),
        features=(Feature(name="liked", vocabulary="item"),),
    )
    own = make_preprocessor(pa.array(["a", "b"]), schema)
    table = pa.table({"item": [["a"]], "liked": [["b", "unknown"]]})
    names = search(tmp_path, [table], own)
    assert names is not None
    assert names.texts is not None
    assert names.texts.to_pylist() == ["a", "b"]


def test_incomplete_log_has_no_names(tmp_path: Path) -> None:
    own = make_preprocessor(pa.array(["a", "b"]))
    assert search(tmp_path, [pa.table({"item": [["a"]]})], own) is None


def test_extended_vocabulary_keeps_names(tmp_path: Path) -> None:
    """Those of before are kept, if the new log lacks them, too."""
    own = make_preprocessor(pa.array(["old", "5", "new"]))
    own = own.with_names(CategoryNames("item", 2, pa.array(["old", None], pa.large_string())))
    assert not UserIds(own, "item").is_known
    names = search(tmp_path, [pa.table({"item": [["new"]]})], own)
    assert names is not None
    found = UserIds(own.with_names(names), "item")
    assert (found.is_known, found.values.to_pylist()) == (True, ["old", "5", "new"])
