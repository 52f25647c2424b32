"""Encoding and counting of raw columns compared with plain Python, row by row."""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders.raw_blocks import block_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data.encoded_rows import EncodedRows, JaggedIds, from_arrow, to_arrow
from rayrec.data.encoding.counts import CountingJob
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.raw_block import RawBlock
from rayrec.schema import Schema

SCHEMA = Schema(
    label="y", dense=("a", "b"), sparse=("s", "t", "u", "v"), lists=("t", "v"), tokens="any", weight="w", delimiter=","
)
KNOWN = {"s": [5, 2**40, 2**64 - 1, 7], "t": [2**24 + 1, 0]}
LARGE = 40_000_000
Row = tuple[int, float, list[float | None], list[int | list[int] | None]]


def make(num_embeddings: int = LARGE) -> Preprocessor:
    return Preprocessor(
        preset="test",
        schema=SCHEMA,
        dense=(DenseColumn("signed_log", mean=0.5, scale=2.0, missing_value=-7.5), DenseColumn("identity", scale=0.5)),
        sparse=(
            SparseColumn(6, 4),
            SparseColumn(5, 2, gap=3, missing_id=3),
            SparseColumn(num_embeddings, None),
            SparseColumn(10, None, missing_id=1, first_id=2),
        ),
        tokens=np.array(KNOWN["s"] + KNOWN["t"], np.uint64),
    )


def raw_of(rows: list[Row], schema: Schema = SCHEMA) -> RawBlock:
    columns = {name: [row[2][d] for row in rows] for d, name in enumerate(schema.dense)}
    columns |= {name: [row[3][s] for row in rows] for s, name in enumerate(schema.sparse)}
    return block_of(
        schema,
        columns,
        labels={"y": np.array([row[0] for row in rows], np.float32)} if schema.label else {},
        weights=np.array([row[1] for row in rows], np.float32) if schema.weight else None,
    )


def expected_id(preprocessor: Preprocessor, column: int, token: int) -> int:
    rule, known = preprocessor.sparse[column], list(KNOWN.values())
    if rule.num_tokens is None:
        return rule.first_id + token % (rule.num_embeddings - rule.first_id)
    return int(rule.ids()[known[column].index(token)]) if token in known[column] else rule.unknown_id


def ids_of(encoded: EncodedRows, column: int) -> list[Any]:
    ids = encoded.ids[column]
    if isinstance(ids, JaggedIds):
        assert ids.lengths.dtype == np.int32
        ends = np.cumsum(ids.lengths).tolist()
        return [ids.values[end - n : end].tolist() for n, end in zip(ids.lengths.tolist(), ends, strict=True)]
    return ids.tolist()


def check(rows: list[Row], order: list[int] | None, num_embeddings: int = LARGE) -> None:
    preprocessor = make(num_embeddings)
    raw = raw_of(rows)
    encoded = preprocessor.encode(raw, None if order is None else np.array(order, np.int64))
    rows = rows if order is None else [rows[i] for i in order]
    assert len(encoded) == len(rows)
    assert encoded.label.dtype == np.float32
    assert encoded.label.tolist() == [row[0] for row in rows]
    assert encoded.weights.tolist() == [np.float32(row[1]) for row in rows]
    for d, column in enumerate(preprocessor.dense):
        for row, value in zip(rows, encoded.dense[:, d], strict=True):
            x = row[2][d]
            f = 0.0 if x is None else (math.copysign(math.log1p(abs(x)), x) if d == 0 else x)
            wanted = np.float32(column.missing_value if x is None else (f - column.mean) * column.scale)
            assert abs(value - wanted) <= np.spacing(abs(wanted))
    for s, name in enumerate(SCHEMA.sparse):
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
        assert (ids.values if isinstance(ids, JaggedIds) else ids).dtype == preprocessor.id_dtype
    (again,) = from_arrow(to_arrow(encoded)) or [encoded]
    assert [ids_of(again, s) for s in range(4)] == [ids_of(encoded, s) for s in range(4)]


numbers = st.none() | st.floats(-1e18, 1e18) | st.integers(-20, 20).map(float)
tokens = st.sampled_from([*KNOWN["s"], *KNOWN["t"], 1, 8, LARGE - 2, LARGE - 3]) | st.integers(0, 2**64 - 1)
cells = st.tuples(st.none() | tokens, st.lists(tokens, max_size=4), st.none() | tokens, st.lists(tokens, max_size=2))
rows_strategy = st.lists(
    st.tuples(st.integers(0, 1), st.floats(0, 1e6), st.lists(numbers, min_size=2, max_size=2), cells.map(list)), max_size=8
)


@settings(max_examples=200, deadline=None)
@given(rows_strategy, st.randoms(use_true_random=False))
def test_encode(rows: list[Row], rng: random.Random) -> None:
    check(rows, None)
    check(rows, [rng.randrange(len(rows)) for _ in range(rng.randrange(12))] if rows else [])


def test_unlabelled_rows_have_neither_labels_nor_weights() -> None:
    encoded = make().encode(raw_of([(0, 1.0, [1.0, None], [5, [], None, [3, 4]])], SCHEMA.unlabelled()))
    assert (encoded.labels, encoded.weights) == ({}, None)


@settings(max_examples=100, deadline=None)
@given(rows_strategy, st.integers(0, 8), st.integers(0, 8), st.randoms(use_true_random=False))
def test_take_and_concatenate(rows: list[Row], low: int, high: int, rng: random.Random) -> None:
    low, high = sorted((min(low, len(rows)), min(high, len(rows))))
    joined = RawBlock.concatenated([raw_of(rows[:low]), raw_of(rows[low:high]), raw_of(rows[high:])])
    same(joined, raw_of(rows))
    same(joined.cut(low, high), raw_of(rows[low:high]))
    order = [rng.randrange(len(rows)) for _ in range(5)] if rows else []
    same(joined.take(np.array(order, np.int64)), raw_of([rows[i] for i in order]))


def test_files_follow_their_rows() -> None:
    rows: list[Row] = [(0, 1.0, [1.0, None], [5, [], None, [3, 4]])] * 3
    first = replace(raw_of(rows), files=(("a", 0, 2), ("b", 2, 3)))
    joined = RawBlock.concatenated([first, replace(raw_of(rows), files=(("c", 0, 3),))])
    assert joined.files == (("a", 0, 2), ("b", 2, 3), ("c", 3, 6))
    assert joined.cut(1, 4).files == (("a", 0, 1), ("b", 1, 2), ("c", 2, 3))
    assert joined.cut(3, 5).files == (("c", 0, 2),)


def same(one: RawBlock, other: RawBlock) -> None:
    assert one.rows == other.rows
    pairs: list[tuple[Any, Any]] = [(getattr(one, name), getattr(other, name)) for name in ("numbers", "categories")]
    pairs += [(one.missing, other.missing), (one.labels["y"], other.labels["y"]), (one.weights, other.weights)]
    for a, b in zip(one.lists, other.lists, strict=True):
        pairs += [(a.values, b.values), (a.lengths, b.lengths)]
    for left, right in pairs:
        assert left.dtype == right.dtype
        assert left.tolist() == right.tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(numbers))
def test_dense_moments(values: list[float | None]) -> None:
    raw = raw_of([(0, 1.0, [x, None], [None, [], None, []]) for x in values])
    present = [x for x in values if x is not None]
    logs = np.array([math.copysign(math.log1p(abs(x)), x) for x in present]).astype(np.float32).astype(float)
    q = [round(x * 2**20) for x in logs]
    wanted = [len(q), sum(q), sum(x * x >> 26 for x in q), sum(x * x & (2**26 - 1) for x in q)]
    counts = CountingJob(SCHEMA).empty()
    counts.add_rows(raw, 0)
    found = counts.dense_moments
    assert found.dtype == np.int64
    assert found[1].tolist() == [0, 0, 0, 0]
    if wanted[0] == 0 or found[0].tolist() == wanted:
        return
    assert found[0, 0] == wanted[0]  # math.log1p and numpy's may differ in the last bit
    assert abs(int(found[0, 1]) - wanted[1]) <= 4 * len(q)


def test_integer_moments_match_kernel() -> None:
    chance = random.Random(0)
    kinds = (None, 20_000, 10**6, -(10**17))
    values = [kind and round(chance.random() * kind) - 20 for kind in chance.choices(kinds, k=3000)]
    found = []
    for schema in (Schema(label=None, dense=("a",), tokens=tokens) for tokens in ("hexadecimal", "any")):
        counts = CountingJob(schema).empty()
        counts.add_rows(block_of(schema, {"a": values}), 0)
        found.append(counts.dense_moments.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [0, 1, 5000])
def test_many_rows(rows: int) -> None:
    rng = random.Random(rows)

    def cell() -> int:
        return rng.choice([*KNOWN["s"], *KNOWN["t"], rng.getrandbits(64)])

    made: list[Row] = [
        (
            rng.randrange(2),
            rng.random(),
            [rng.choice([None, rng.uniform(-1e3, 1e3)]) for _ in range(2)],
            [rng.choice([None, cell()]), [cell() for _ in range(rng.randrange(4))], cell(), [cell()]],
        )
        for _ in range(rows)
    ]
    check(made, rng.sample(range(rows), rows))
