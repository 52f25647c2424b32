"""Counts against collections.Counter; ids and constants depend on the rows alone, not on how they were divided."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.counting import Counts, TokenCounter, VocabularyConfig, count_parts, make_preprocessor
from rayrec.data.log import LogIndex, cut, index_chunk, numbered, read_segments, select
from rayrec.data.parsing import Faults, parse
from rayrec.data.position import Part
from rayrec.data.preprocessor import FIRST_ID, Preprocessor
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.schema import Schema

SCHEMA = Schema(label=None, dense=("d",), sparse=("s", "t"))


def counted(counter: TokenCounter) -> dict[int, int]:
    tokens, amounts = counter.items()
    assert len(tokens) == counter.used
    return dict(zip(tokens.tolist(), amounts.tolist(), strict=True))


def text_of(columns: list[list[int | None]]) -> bytes:
    rows = zip(*columns, strict=True)
    return b"".join(b"\t" + b"\t".join(b"" if x is None else b"%08x" % x for x in row) + b"\n" for row in rows)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.none() | st.integers(0, 30) | st.integers(0, 2**32 - 1), max_size=60), st.sampled_from([2, 4, 16]))
def test_present_tokens_are_counted(tokens: list[int | None], slots: int) -> None:
    raw, _ = parse(SCHEMA, text_of([tokens, tokens[::-1]]))
    for column, values in enumerate((tokens, tokens[::-1])):
        counter = TokenCounter(slots)
        counter.count(raw, column)
        counter.count(raw, column)
        expected = Counter(token for token in values if token is not None)
        assert counted(counter) == {token: 2 * count for token, count in expected.items()}


def test_a_table_grows() -> None:
    rng = random.Random(0)
    tokens: list[int | None] = [int(rng.paretovariate(0.3)) % 2**32 for _ in range(30_000)]
    raw, _ = parse(SCHEMA, text_of([tokens, tokens]))
    counter = TokenCounter()
    counter.count(raw, 1)
    assert counted(counter) == Counter(tokens)
    assert counter.used > 4 * 1024
    other = TokenCounter(2)
    other.merge(*counter.items())
    assert counted(other) == Counter(tokens)


def test_tables_of_counts_add_up() -> None:
    whole = Counts.empty(SCHEMA)
    for part in ([1, 1, None], [2, 1, 7], [None, None, None], []):
        raw, _ = parse(SCHEMA, text_of([part, part]))
        counts = Counts.empty(SCHEMA)
        counts.rows = raw.rows
        for column, counter in enumerate(counts.tokens):
            counter.count(raw, column)
        whole.add(counts.to_table())
    assert whole.rows == 9
    assert [counted(counter) for counter in whole.tokens] == [{1: 3, 2: 1, 7: 1}] * 2


def test_one_kind_of_column_only(tmp_path: Path) -> None:
    for schema, text in (
        (Schema(label=None, dense=(), sparse=("s",)), b"00000001\n00000001\n"),
        (Schema(label=None, dense=("d",), sparse=()), b"1\n1\n"),
    ):
        parts = parts_of(tmp_path, schema, text)
        counts = Counts.empty(schema)
        counts.add(count_parts(parts, schema=schema))
        made = make_preprocessor("p", schema, counts, VocabularyConfig())
        assert made.num_embeddings == [3] * len(schema.sparse)
        assert len(made.dense) == len(schema.dense)


def parts_of(folder: Path, schema: Schema, text: bytes, segment_bytes: int = 5000) -> list[Part]:
    path = folder / "log.txt"
    path.write_bytes(text)
    entries = []
    for chunk in cut([storage.File(str(path), len(text), 0)], 1 << 20):
        entries += index_chunk(chunk, schema, segment_bytes)[0]
    return [Part(segment, 0, segment.rows) for segment in numbered(entries)]


def preprocessor_of(parts: list[Part], parts_per_task: int, schema: Schema, config: VocabularyConfig) -> Preprocessor:
    """As count_log does it, without Ray."""
    total = Counts.empty(schema)
    for i in range(0, len(parts), parts_per_task):
        total.add(count_parts(parts[i : i + parts_per_task], schema=schema))
    return make_preprocessor("p", schema, total, config)


@pytest.mark.parametrize("config", [VocabularyConfig(), VocabularyConfig(min_count=1, max_num_embeddings=500)])
def test_it_does_not_matter_how_the_log_is_divided(click_log: Path, tmp_path: Path, config: VocabularyConfig) -> None:
    text = (click_log / "train.txt").read_bytes()[: 1 << 20]
    text = text[: text.rindex(b"\n") + 1]
    whole = preprocessor_of(parts_of(tmp_path, CRITEO, text, 1 << 21), 1, CRITEO, config)
    for segment_bytes in (20_000, 77_777):
        parts = parts_of(tmp_path, CRITEO, text, segment_bytes)
        assert len(parts) > 10
        for parts_per_task in (1, 2, 7, 1000):
            made = preprocessor_of(parts, parts_per_task, CRITEO, config)
            assert made.dense == whole.dense
            assert (made.tokens == whole.tokens).all()
            assert made.hash() == whole.hash()
        assert preprocessor_of(parts[::-1], 3, CRITEO, config).hash() == whole.hash()


def test_constants_and_ids_of_a_real_log(click_log: Path, tmp_path: Path) -> None:
    text = b"".join((click_log / "train.txt").read_bytes().splitlines(keepends=True)[:2000])
    raw, _ = parse(CRITEO, text)
    made = preprocessor_of(parts_of(tmp_path, CRITEO, text, 50_000), 2, CRITEO, VocabularyConfig(min_count=3))
    for d, column in enumerate(made.dense):
        values = [int(raw.integers[i, d]) for i in range(raw.rows) if not int(raw.missing[i]) >> d & 1]
        logs = np.array([math.copysign(math.log1p(abs(value)), value) for value in values])
        assert column.mean == pytest.approx(logs.mean(), abs=1e-6)
        assert column.scale == pytest.approx(1 / logs.std(), rel=1e-5)
        assert column.missing_value == pytest.approx(-column.mean * column.scale, rel=1e-6)  # as 0
    first = 0
    for s, column in enumerate(made.sparse):
        counts = Counter(int(raw.tokens[i, s]) for i in range(raw.rows) if not int(raw.missing[i]) >> (13 + s) & 1)
        expected = sorted((token for token, count in counts.items() if count >= 3), key=lambda t: (-counts[t], t))
        assert column.num_tokens == len(expected)
        assert column.num_embeddings == FIRST_ID + len(expected)
        assert made.tokens[first : first + len(expected)].tolist() == expected
        first += len(expected)
    assert made.constants == {"min_count": 3, "max_num_embeddings": None, "rows": 2000}


def test_ties_are_broken_by_token_and_rare_ones_left_out() -> None:
    counts = Counts.empty(SCHEMA)
    counts.tokens[0].merge(np.array([9, 3, 2**32 - 1, 7, 1], np.uint32), np.array([2, 2, 5, 2, 1]))
    made = make_preprocessor("p", SCHEMA, counts, VocabularyConfig(min_count=2))
    assert made.tokens.tolist() == [2**32 - 1, 3, 7, 9]
    assert made.num_embeddings == [6, 2]


def test_a_column_that_needs_more_rows_than_allowed_is_taken_modulo() -> None:
    counts = Counts.empty(SCHEMA)
    counts.tokens[0].merge(np.arange(8, dtype=np.uint32), np.full(8, 2))
    counts.tokens[1].merge(np.arange(9, dtype=np.uint32), np.full(9, 2))
    made = make_preprocessor("p", SCHEMA, counts, VocabularyConfig(max_num_embeddings=10))
    assert made.num_embeddings == [10, 10]
    assert [column.num_tokens for column in made.sparse] == [8, None]
    assert made.tokens.tolist() == list(range(8))
    ids = made.encode(parse(SCHEMA, b"\t00000007\t00000011\n")[0]).ids.ravel().tolist()
    assert ids == [FIRST_ID + 7, FIRST_ID + 0x11 % 8]


def test_only_the_chosen_rows_of_a_segment_count(tmp_path: Path) -> None:
    text = b"".join(b"%d\t%08x\t\n" % (i, i) for i in range(100))
    parts = parts_of(tmp_path, SCHEMA, text, 200)
    index = LogIndex(tuple(part.segment for part in parts), Faults())
    chosen = [Part(*part) for part in select(index, 13, 77)]
    counts = Counts.empty(SCHEMA)
    counts.add(count_parts(chosen, schema=SCHEMA))
    assert counts.rows == 64
    assert counted(counts.tokens[0]) == dict.fromkeys(range(13, 77), 1)
    assert counts.dense_moments[0, 0] == 64
    assert read_segments([p.segment for p in parts], SCHEMA).rows == 100


@pytest.mark.parametrize("value", [0, 1, 3, -3, 10**18 - 1])
def test_a_constant_column_is_centred_and_not_scaled(tmp_path: Path, value: int) -> None:
    parts = parts_of(tmp_path, SCHEMA, b"%d\t\t\n" % value * 1000, 300)
    column = preprocessor_of(parts, 3, SCHEMA, VocabularyConfig()).dense[0]
    assert column.scale == 1.0
    assert column.mean == pytest.approx(math.copysign(math.log1p(abs(value)), value), rel=1e-6)


def test_a_column_that_is_never_there(tmp_path: Path) -> None:
    column = preprocessor_of(parts_of(tmp_path, SCHEMA, b"\t\t00000001\n" * 10), 1, SCHEMA, VocabularyConfig()).dense[0]
    assert (column.mean, column.scale, column.missing_value) == (0.0, 1.0, 0.0)


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="min_count: 0"):
        VocabularyConfig(min_count=0)
    with pytest.raises(InputError, match="max_num_embeddings: 2 must be above 2"):
        VocabularyConfig(max_num_embeddings=2)
