"""Statistics compared with plain Python for any division of the rows, and figures compared with manual results."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from builders.raw_blocks import block_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from rayrec.data.encoding.presets import merged
from rayrec.data.encoding.rules import SparseColumn
from rayrec.data.logs.text_parser import parse
from rayrec.data.raw_block import RawBlock
from rayrec.hashing import murmur3
from rayrec.prepare import data_report
from rayrec.prepare.log_statistics import DECILES, TOP, ColumnStats, StatsJob, quantile_edges, row_hashes
from rayrec.schema import Schema

SCHEMA = Schema(tokens="hexadecimal", label="y", dense=("a", "b"), sparse=("s",))
LISTS = Schema(label="y", dense=("a",), sparse=("s", "tags"), tokens="any", lists=("tags",), weight="w")
Row = tuple[int, float | None, int | None, Sequence[int], float]
"""Label, a, s, tags, weight of LISTS."""
ROWS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.none() | st.sampled_from([-3.0, -0.5, 0.0, 0.25, 1.0, 7.0, 1e17]),
        st.none() | st.integers(0, 6),
        st.lists(st.integers(0, 5), max_size=4),
        st.sampled_from([0.0, 0.5, 2.0]),
    ),
    min_size=1,
    max_size=60,
)


def block_of_rows(rows: Sequence[Row]) -> RawBlock:
    labels, a, s, tags, weights = zip(*rows, strict=True)
    others = {"labels": {"y": np.array(labels, np.float32)}, "weights": np.array(weights, np.float32)}
    return block_of(LISTS, {"a": a, "s": s, "tags": tags}, **others)


def job_of(schema: Schema, num_slices: int = 1, *, top: Sequence[Sequence[int]], hash_shift: int = 0) -> StatsJob:
    edges = quantile_edges([np.arange(1.0, 41.0)] * len(schema.dense))  # 1, 2 ... 39
    return StatsJob(schema, num_slices, edges, tuple(np.array(t, np.uint64) for t in top), hash_shift)


JOB = job_of(LISTS, 2, top=[[3, 1], [2]])


@settings(max_examples=60, deadline=None)
@given(ROWS, st.data())
def test_stats_match_plain_python(rows: list[Row], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(rows)))
    tally = ColumnStats.empty(JOB)
    for number, part, first_row in ((0, rows[:cut], 0), (1, rows[cut:], cut)):
        if part:
            tally.count(block_of_rows(part), JOB, number, first_row)
    slices = [rows[:cut], rows[cut:]]
    assert tally.rows.tolist() == [len(part) for part in slices]
    assert tally.clicks.tolist() == [sum(row[0] for row in part) for part in slices]
    absent = [[sum(row[1] is None for row in p), sum(row[2] is None for row in p), sum(not row[3] for row in p)] for p in slices]
    assert tally.missing.tolist() == absent
    present = [row[1] for row in rows if row[1] is not None]
    assert tally.signs.tolist() == [[sum(x < 0 for x in present), present.count(0)], [0, sum(row[4] == 0 for row in rows)]]
    assert tally.limits[0].tolist() == ([min(present), -max(present)] if present else [math.inf, math.inf])
    assert tally.limits[1].tolist() == [min(row[4] for row in rows), -max(row[4] for row in rows)]
    for part, dense, sparse in zip(slices, tally.dense_bins, tally.sparse_bins, strict=True):
        deciles = Counter(DECILES if x is None else sum(x > 4 * k for k in range(1, 10)) for _, x, *_ in part)
        assert dense[0].tolist() == [deciles[k] for k in range(DECILES + 1)]
        for column, top in ((2, [3, 1]), (3, [2])):
            values = [x for row in part for x in ([row[2]] if column == 2 else row[3] or [None])]
            counts = Counter(values)
            rest = len(values) - counts[None] - sum(counts[t] for t in top)
            expected = [counts[t] for t in top] + [0] * (TOP - len(top)) + [rest, counts[None]]
            assert sparse[column - 2].tolist() == expected
    logs = [math.copysign(math.log1p(abs(x)), x) for x in present]
    found = data_report.mean_and_deviation(tally.moments[0].tolist())
    assert found == (None if not logs else pytest.approx((np.mean(logs), np.std(logs)), abs=2e-6))
    assert tally.sparse_outcomes[0, :-1, [1, 3]].sum() == sum(row[0] for row in rows if row[2] is not None)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.data())
def test_stats_ignore_log_division(rows: list[Row], data: st.DataObject) -> None:
    whole = ColumnStats.empty(JOB)
    whole.count(block_of_rows(rows), JOB, 0, 17)
    total, hashes, start = ColumnStats.empty(JOB), [], 0
    while start < len(rows):
        stop = data.draw(st.integers(start + 1, len(rows)))
        part = ColumnStats.empty(JOB)
        part.count(block_of_rows(rows[start:stop]), JOB, 0, 17 + start)
        hashes.append(total.add(part.to_table()))
        start = stop
    total.hashes = np.concatenate(hashes)
    for field in fields(ColumnStats):
        np.testing.assert_array_equal(getattr(total, field.name), getattr(whole, field.name), err_msg=field.name)


def test_stats_of_text_and_columns_match() -> None:
    raw, _ = parse(SCHEMA, b"1\t5\t\t0000000a\n0\t-7\t1\t\n0\t0\t999999999\tffffffff\n")
    values = {"a": [5, -7, 0], "b": [None, 1, 999999999], "s": [10, None, 2**32 - 1]}
    columns = block_of(SCHEMA.replace(tokens="any"), values, labels={"y": np.array([1, 0, 0], np.float32)})
    job = job_of(SCHEMA, top=[[10]])
    one, other = ColumnStats.empty(job), ColumnStats.empty(job)
    one.count(raw, job, 0, 0)
    other.count(columns, job, 0, 0)
    assert one.to_table() == other.to_table()


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_equal_rows_have_equal_hashes(rows: list[Row]) -> None:
    hashes = row_hashes(block_of_rows(rows)).tolist()
    plain = [(*row[:3], tuple(row[3]), row[4]) for row in rows]
    assert len(set(hashes)) == len(set(plain))
    assert len(set(zip(plain, hashes, strict=True))) == len(set(plain))


def test_row_hashes_distinguish_columns_and_sample_keeps_all_copies() -> None:
    rows: list[Row] = [(label, a, s, [], 0.0) for label, a, s in ((0, None, None), (0, 0.0, None), (0, None, 0), (1, None, None))]
    rows += [(0, None, None, tags, 0.0) for tags in ([0], [0, 0], [1, 2], [2, 1])]
    hashes = row_hashes(block_of_rows(rows)).tolist()
    assert len(set(hashes)) == len(rows)
    assert row_hashes(block_of_rows([(0, -0.0, None, [], 0.0)])) == hashes[1]
    rows: list[Row] = [(0, float(i % 500), None, [], 1.0) for i in range(2000)]
    job = job_of(LISTS, top=[[], []], hash_shift=2)
    tally = ColumnStats.empty(job)
    tally.count(block_of_rows(rows), job, 0, 0)
    assert 300 < len(tally.hashes) < 700  # a quarter
    assert set(Counter(tally.hashes.tolist()).values()) == {4}
    assert data_report.duplicate_rate(tally.hashes) == 0.75


def test_quantile_edges_are_column_values() -> None:
    edges = quantile_edges([np.arange(1000.0), np.zeros(0), np.array([5.0])])
    assert edges.shape == (3, 39)
    assert edges[0, [3, 19, 35]].tolist() == [99, 499, 899]
    assert not edges[1].any()
    assert set(edges[2]) == {5.0}


@pytest.mark.parametrize(
    ("clicks", "rows", "expected"),
    [(10, 100, (0.05523, 0.17437)), (0, 10, (0.0, 0.27753)), (10, 10, (0.72247, 1.0)), (0, 0, None)],
)
def test_wilson_interval_matches_reference(clicks: int, rows: int, expected: tuple[float, float] | None) -> None:
    assert data_report.wilson_interval(clicks, rows) == (expected and pytest.approx(expected, abs=1e-5))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([1, 1, 0], [2, 2, 0], 0), ([4, 0], [0, 9], 1), ([3, 1], [1, 3], 0.5), ([0, 0], [1, 3], None)],
)
def test_total_variation_matches_reference(first: list[int], second: list[int], expected: float | None) -> None:
    found = data_report.total_variation(np.array(first), np.array(second))
    assert (found and found[0]) == expected


def test_total_variation_expectation_matches_samples() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(50, 0.5))
    drawn = [data_report.total_variation(rng.multinomial(2000, shares), rng.multinomial(500, shares)) for _ in range(200)]
    distances, by_chance = np.array(drawn).T
    assert by_chance.mean() == pytest.approx(distances.mean(), rel=0.05)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_auroc_of_rates_matches_scored_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    outcomes = rng.poisson(rng.exponential(20, (12, 4))).astype(np.int64)
    misses, clicks, held_misses, held_clicks = outcomes.T
    average = clicks.sum() / (misses + clicks).sum()
    scores = (clicks + 10 * average) / (misses + clicks + 10)
    labels = np.repeat([0, 1], [held_misses.sum(), held_clicks.sum()])
    of_rows = np.concatenate([np.repeat(scores, held_misses), np.repeat(scores, held_clicks)])
    if min(held_misses.sum(), held_clicks.sum()) >= 20:
        assert data_report.auroc_of_rates(outcomes) == pytest.approx(roc_auc_score(labels, of_rows))


def test_auroc_of_rates_handles_leak_and_few_rows() -> None:
    assert data_report.auroc_of_rates(np.array([[300, 0, 100, 0], [0, 300, 0, 100]])) == 1
    assert data_report.auroc_of_rates(np.full((2, 4), 100)) == 0.5
    assert data_report.auroc_of_rates(np.array([[300, 0, 19, 0], [0, 300, 0, 100]])) is None
    assert data_report.auroc_of_rates(np.zeros((2, 4), np.int64)) is None


def test_concentration_matches_reference() -> None:
    def rates(repeated: list[int], distinct: int) -> list[float | None]:
        found = data_report.concentration(np.array(repeated, np.int64), distinct)
        return [found[f"{name}_rate"] for name in ("top_1", "top_10", "top_100", "once")]

    assert rates([2, 9, 4], 8) == [0.45, 1.0, 1.0, 0.25]  # and 5 that come once
    assert rates([3] * 250 + [100] * 2, 302) == [0.1, (200 + 24) / 1000, (200 + 98 * 3) / 1000, 0.05]
    assert rates([], 0) == [None] * 4


def test_top_categories_ignore_order() -> None:
    rng = np.random.default_rng(3)
    tokens, counts = rng.permutation(1000).astype(np.uint32), rng.integers(1, 20, 1000)
    expected = tokens[np.lexsort((tokens, -counts))][:TOP]
    for _ in range(3):
        order = rng.permutation(1000)
        found = data_report.top_categories(tokens[order], counts[order])
        assert (found.dtype, found.tolist()) == (np.uint64, expected.tolist())


def test_unknown_rate_counts_merged_categories() -> None:
    tokens, counts = np.array([12, 2, 7], np.uint32), np.array([5, 1, 3])
    assert [x.tolist() for x in merged(tokens, counts)[:2]] == [[2, 7, 12], [1, 3, 5]]
    assert [x.tolist() for x in merged(tokens % 10, counts)[:2]] == [[2, 7], [6, 3]]
    assert [x.tolist() for x in merged(tokens[:0], counts[:0])[:2]] == [[], []]
    assert data_report.unknown_rate(tokens, counts, np.array([2, 12], np.uint32)) == 3 / 9
    assert data_report.unknown_rate(tokens, counts, tokens[:0]) == 1
    assert data_report.unknown_rate(tokens[:0], counts[:0], tokens) is None


FOUR = SparseColumn(num_embeddings=4, num_tokens=4)  # ids 2, 3, 4 % 4 = 0, 5 % 4 = 1
THREE = SparseColumn(num_embeddings=3, num_tokens=4)  # 2, 0, 1, 2
HASHED = SparseColumn(num_embeddings=12, num_tokens=None)  # 2 + token mod 10
KNOWN, SOME = [70, 50, 60, 90], {50: 1, 60: 2, 70: 3, 90: 4, 13: 50, 14: 50}


@pytest.mark.parametrize(
    ("column", "vocabulary", "counts", "expected"),
    [(FOUR, KNOWN, SOME, 0), (THREE, KNOWN, SOME, 0.7), (HASHED, [], {1: 3, 11: 2, 5: 4, 7: 1}, 0.5), (HASHED, [], {}, None)],
)
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_collision_rate_matches_encoder(
    column: SparseColumn, vocabulary: list[int], counts: dict[int, int], expected: Any, dtype: type
) -> None:
    known, tokens = np.array(vocabulary, dtype), np.array(list(counts), dtype)
    assert data_report.collision_rate(column, known, tokens, np.array(list(counts.values()), np.int64)) == expected


def test_collision_rate_supports_murmur3() -> None:
    column = SparseColumn(10, None, first_id=0, murmur3=True)
    tokens, counts = np.arange(1, 16, dtype=np.uint32), np.arange(1, 16)
    places = (murmur3(np.arange(16, dtype=np.uint32)) % 10).tolist()
    expected = sum(token for token in range(1, 16) if places[1:].count(places[token]) > 1) / sum(range(1, 16))
    assert data_report.collision_rate(column, np.zeros(0, np.uint32), tokens, counts) == expected
