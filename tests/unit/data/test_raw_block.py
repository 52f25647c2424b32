"""Encoding of raw columns compared with plain Python, row by row."""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders.raw_blocks import block_of
from builders.same import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data.encoded_rows import EncodedRows, JaggedIds, from_arrow, to_arrow
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.raw_block import RawBlock, category_type
from rayrec.schema import Schema

ANY = Schema(label="y", dense=("a", "b"), sparse=("s", "t", "u", "v"), lists=("t", "v"), tokens="any", weight="w")
HEXADECIMAL = Schema(tokens="hexadecimal", label="y", dense=("a", "b"), sparse=("s", "t", "u"))
KNOWN = {"any": ([5, 2**40, 2**64 - 1, 7], [2**24 + 1, 0]), "hexadecimal": ([5, 0, 2**32 - 1, 7], [*range(1000, 6000)])}
LARGE = 40_000_000
Row = tuple[int, float, list[float | None], list[int | list[int] | None]]


def make(schema: Schema = ANY) -> Preprocessor:
    dense = [DenseColumn(mean=0.5, scale=2.0, missing_value=-7.5), DenseColumn("identity", scale=0.5)]
    sparse = [SparseColumn(6, 4), SparseColumn(5, 2, gap=3, missing_id=3), SparseColumn(LARGE, None)]
    if schema is HEXADECIMAL:
        dense[1], sparse[1] = DenseColumn(mean=-0.25, scale=0.3), SparseColumn(5002, 5000)
    else:
        sparse.append(SparseColumn(10, None, missing_id=1, first_id=2))
    known = np.array([token for column in KNOWN[schema.tokens] for token in column], category_type(schema))
    return Preprocessor("test", schema, (*dense,), (*sparse,), known)


def raw_of(rows: list[Row], schema: Schema = ANY) -> RawBlock:
    columns = {name: [row[2][d] for row in rows] for d, name in enumerate(schema.dense)}
    columns |= {name: [row[3][s] for row in rows] for s, name in enumerate(schema.sparse)}
    return block_of(
        schema,
        columns,
        labels={"y": np.array([row[0] for row in rows], np.float32)} if schema.label else {},
        weights=np.array([row[1] for row in rows], np.float32) if schema.weight else None,
    )


def expected_number(column: DenseColumn, value: float | None) -> float:
    if value is None:
        return column.missing_value
    return ((math.copysign(math.log1p(abs(value)), value) if column.kind == "signed_log" else value) - column.mean) * column.scale


def expected_id(preprocessor: Preprocessor, column: int, token: int) -> int:
    rule, known = preprocessor.sparse[column], KNOWN[preprocessor.schema.tokens]
    if rule.num_tokens is None:
        return rule.first_id + token % (rule.num_embeddings - rule.first_id)
    if token not in known[column]:
        return rule.unknown_id
    place = rule.first_id + known[column].index(token)
    return place + (rule.gap is not None and place >= rule.gap)


def ids_of(encoded: EncodedRows, column: int) -> list[Any]:
    ids = encoded.ids[column]
    if isinstance(ids, JaggedIds):
        assert ids.lengths.dtype == np.int32
        return [part.tolist() for part in np.split(ids.values, np.cumsum(ids.lengths)[:-1])] if len(ids.lengths) else []
    return ids.tolist()


def check(schema: Schema, rows: list[Row], order: list[int] | None) -> None:
    preprocessor = make(schema)
    encoded = preprocessor.encode(raw_of(rows, schema), None if order is None else np.array(order, np.int64))
    rows = rows if order is None else [rows[i] for i in order]
    assert len(encoded) == len(rows)
    assert_same(encoded.label, np.array([row[0] for row in rows], np.float32))
    assert_same(encoded.weights, np.array([row[1] for row in rows], np.float32) if schema.weight else None)
    dense = [[expected_number(column, x) for column, x in zip(preprocessor.dense, row[2], strict=True)] for row in rows]
    np.testing.assert_array_almost_equal_nulp(encoded.dense, np.array(dense, np.float32).reshape(len(rows), 2), 1)
    for s, name in enumerate(schema.sparse):
        missing_id = preprocessor.sparse[s].missing_id
        wanted_ids: list[Any] = []
        for row in rows:
            cell = row[3][s]
            if isinstance(cell, list):
                wanted_ids.append([expected_id(preprocessor, s, token) for token in cell] or [missing_id])
            else:
                wanted_ids.append(missing_id if cell is None else expected_id(preprocessor, s, cell))
        assert ids_of(encoded, s) == wanted_ids, name
        ids = encoded.ids[s]
        assert (ids.values if isinstance(ids, JaggedIds) else ids).dtype == preprocessor.id_dtype == np.int32
    (again,) = from_arrow(to_arrow(encoded)) or [encoded]
    assert [ids_of(again, s) for s in range(len(schema.sparse))] == [ids_of(encoded, s) for s in range(len(schema.sparse))]


small = st.none() | st.integers(-20, 20) | st.integers(2000, 2100)
numbers = {"any": small | st.floats(-1e18, 1e18), "hexadecimal": small | st.integers(1 - 10**18, 10**18 - 1)}
tokens = st.sampled_from([5, 2**40, 2**64 - 1, 7, 2**24 + 1, 0, 1, 8, LARGE - 2, LARGE - 3]) | st.integers(0, 2**64 - 1)
short = st.sampled_from([0, 5, 7, 8, 2**32 - 1, 999, 1000, 5999, 6000, LARGE - 3, LARGE - 2]) | st.integers(0, 2**32 - 1)
cells = {
    "any": st.tuples(st.none() | tokens, st.lists(tokens, max_size=4), st.none() | tokens, st.lists(tokens, max_size=2)),
    "hexadecimal": st.tuples(*[st.none() | short] * 3),
}


def rows_strategy(kind: str) -> st.SearchStrategy[list[Row]]:
    dense = st.lists(numbers[kind], min_size=2, max_size=2)
    return st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1e6), dense, cells[kind].map(list)), max_size=8)


@pytest.mark.parametrize("schema", [ANY, HEXADECIMAL], ids=KNOWN)
@settings(max_examples=200, deadline=None)
@given(data=st.data(), rng=st.randoms(use_true_random=False))
def test_encode(schema: Schema, data: st.DataObject, rng: random.Random) -> None:
    rows = data.draw(rows_strategy(schema.tokens))
    check(schema, rows, None)
    check(schema, rows, [rng.randrange(len(rows)) for _ in range(rng.randrange(12))] if rows else [])


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 257, 5000])
@pytest.mark.parametrize("schema", [ANY, HEXADECIMAL], ids=KNOWN)
def test_encode_many_rows(schema: Schema, rows: int) -> None:
    """More rows than a tile and, with 5,000, than the table of small logarithms pays for."""
    rng = random.Random(rows)
    (first, second), bits = KNOWN[schema.tokens], 64 if schema is ANY else 32

    def cell() -> int:
        return rng.choice([*first, rng.choice(second), rng.randrange(900, 6100), rng.getrandbits(bits)])

    def number() -> float | None:
        return rng.choice([None, rng.randrange(-30, 3000), rng.randrange(10**9), *[rng.uniform(-1e3, 1e3)] * (schema is ANY)])

    def cells() -> list[Any]:
        single = [rng.choice([None, cell()]) for _ in range(3)]
        return [single[0], [cell() for _ in range(rng.randrange(4))], single[1], [cell()]] if schema is ANY else single

    made: list[Row] = [(rng.randrange(2), rng.random(), [number(), number()], cells()) for _ in range(rows)]
    check(schema, made, None)
    check(schema, made, rng.sample(range(rows), rows))


def test_small_integer_table_matches_computation() -> None:
    """A row is encoded alike alone (as when serving) and among thousands (as when training)."""
    raw = block_of(HEXADECIMAL, {"a": range(-20, 3000), "b": range(20, -3000, -1), **dict.fromkeys("stu", [None] * 3020)})
    preprocessor = make(HEXADECIMAL)
    alone = np.concatenate([preprocessor.encode(raw, np.array([i])).dense for i in range(raw.rows)])
    assert (preprocessor.encode(raw).dense == alone).all()


@pytest.mark.parametrize(("schema", "cells"), [(ANY, [5, [], None, [3, 4]]), (HEXADECIMAL, [5, None, None])], ids=KNOWN)
def test_unlabelled_rows_have_neither_labels_nor_weights(schema: Schema, cells: list[Any]) -> None:
    encoded = make(schema).encode(raw_of([(0, 1.0, [1.0, None], cells)], schema.unlabelled()))
    assert (encoded.labels, encoded.weights) == ({}, None)


@settings(max_examples=100, deadline=None)
@given(rows_strategy("any"), st.integers(0, 8), st.integers(0, 8), st.randoms(use_true_random=False))
def test_take_and_concatenate(rows: list[Row], low: int, high: int, rng: random.Random) -> None:
    low, high = sorted((min(low, len(rows)), min(high, len(rows))))
    joined = RawBlock.concatenated([raw_of(rows[:low]), raw_of(rows[low:high]), raw_of(rows[high:])])
    assert_same(joined, raw_of(rows))
    assert_same(joined.cut(low, high), raw_of(rows[low:high]))
    order = [rng.randrange(len(rows)) for _ in range(5)] if rows else []
    assert_same(joined.take(np.array(order, np.int64)), raw_of([rows[i] for i in order]))


def test_files_follow_their_rows() -> None:
    rows: list[Row] = [(0, 1.0, [1.0, None], [5, [], None, [3, 4]])] * 3
    first = replace(raw_of(rows), files=(("a", 0, 2), ("b", 2, 3)))
    joined = RawBlock.concatenated([first, replace(raw_of(rows), files=(("c", 0, 3),))])
    assert joined.files == (("a", 0, 2), ("b", 2, 3), ("c", 3, 6))
    assert joined.cut(1, 4).files == (("a", 0, 1), ("b", 1, 2), ("c", 2, 3))
    assert joined.cut(3, 5).files == (("c", 0, 2),)
