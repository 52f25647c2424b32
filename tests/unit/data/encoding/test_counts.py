"""Counts compared with collections.Counter, independent of tasks and spilling."""

import contextlib
import gc
import os
import random
import resource
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from builders.engines import LoopEngine
from builders.faults import fails_with, raising, rejects
from builders.logs import open_index
from builders.raw_blocks import find_block
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec import storage
from rayrec.data.encoding import counts as counting
from rayrec.data.encoding.category_counter import Spill, TokenCounter, count_columns
from rayrec.data.encoding.counts import (
    NO_ROW,
    CountingIndexer,
    CountingJob,
    Counts,
    count_log,
    count_parts,
    find_problems,
)
from rayrec.data.encoding.encoder import Derivation
from rayrec.data.encoding.presets import RAYREC, make_preprocessor
from rayrec.data.engine import TaskContext
from rayrec.data.log_source import index_log
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex, SegmentRange
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.logs.text_parser import parse
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.host_resources import Memory
from rayrec.schema import Schema

SCHEMA = Schema(
    tokens="hexadecimal",
    label=None,
    dense=("d",),
    sparse=("s", "t"),
)
HERE = LoopEngine()
Found = dict[int, tuple[int, int | None]]
"""Token -> its count and its first row."""


def found(items: tuple[np.ndarray, np.ndarray, np.ndarray | None]) -> Found:
    tokens, counts, rows = items
    assert len(set(tokens.tolist())) == len(tokens)
    first = [None] * len(tokens) if rows is None else rows.tolist()
    return dict(
        zip(
            tokens.tolist(),
            zip(counts.tolist(), first, strict=True),
            strict=True,
        )
    )


def expected(values: Sequence[int | None], first_row: int | None) -> Found:
    counts = Counter(value for value in values if value is not None)
    return {
        token: (count, None if first_row is None else first_row + values.index(token))
        for token, count in counts.items()
    }


def counted(counter: TokenCounter) -> dict[int, int]:
    assert len(counter.items()[0]) == counter.used
    return {token: count for token, (count, _) in found(counter.items()).items()}


def text_of(columns: list[list[int | None]]) -> bytes:
    rows = zip(*columns, strict=True)
    return b"".join(
        b"\t" + b"\t".join(b"" if x is None else b"%08x" % x for x in row) + b"\n" for row in rows
    )


def parts_in(
    folder: Path,
    schema: Schema,
    text: bytes,
    segment_bytes: int = 5000,
) -> list[SegmentRange]:
    path = folder / "log.txt"
    path.write_bytes(text)
    index = open_index(path, schema, segment_bytes=segment_bytes)
    return list(index.parts(0, index.rows))


def everything(counts: Counts, min_count: int = 1) -> dict[str, Any]:
    return {
        "rows": counts.rows,
        "tokens": [
            found(counts.frequent_tokens(column, min_count)) for column in range(len(counts.tokens))
        ],
        "distinct": [counts.num_distinct(column) for column in range(len(counts.tokens))],
        "missing": counts.missing.tolist(),
        "dense": counts.dense_moments.tolist(),
        "labels": counts.labels.tolist(),
        "files": counts.file_minimum,
    }


TOKENS = st.lists(st.none() | st.integers(0, 30) | st.integers(0, 2**32 - 1), max_size=60)


@settings(max_examples=60, deadline=None)
@given(
    TOKENS,
    st.sampled_from([2, 4, 16]),
    st.booleans(),
    st.sampled_from([np.uint32, np.uint64]),
)
def test_present_tokens_are_counted(
    tokens: list[int | None],
    slots: int,
    first_rows: bool,
    dtype: Any,
) -> None:
    raw, _ = parse(SCHEMA, text_of([tokens, tokens[::-1]]))
    counters = [
        TokenCounter(
            slots,
            dtype=dtype,
            first_rows=first_rows,
        )
        for _ in range(2)
    ]
    for first_row, times in ((1000, 1), (2000, 2), (7, 3)):
        count_columns(counters, raw, first_row, np.array([[0, NO_ROW]] * 2))
        for counter, values in zip(counters, (tokens, tokens[::-1]), strict=True):
            assert counted(counter) == {
                t: times * n for t, (n, _) in expected(values, None).items()
            }
            if times == 1:
                assert found(counter.items()) == expected(values, 1000 if first_rows else None)
    for counter, values in zip(counters, (tokens, tokens[::-1]), strict=True):
        assert found(counter.items()) == {
            t: (3 * n, row) for t, (n, row) in expected(values, 7 if first_rows else None).items()
        }
        assert counter.items()[0].dtype == dtype


def test_counts_exceed_32_bits_and_cover_one_kind_or_no_rows(tmp_path: Path) -> None:
    whole = Counts.empty(0, 1)
    counts = Counts.empty(0, 1)
    for _ in range(3):
        counts.tokens[0].merge(np.array([7, 8], np.uint32), np.array([2**32 - 1, 1]))
    whole.add(counts.to_table())
    assert counted(whole.tokens[0]) == {7: 3 * (2**32 - 1), 8: 3}
    for schema, text in (
        (
            Schema(
                tokens="hexadecimal",
                label=None,
                dense=(),
                sparse=("s",),
            ),
            b"00000001\n00000001\n",
        ),
        (
            Schema(
                tokens="hexadecimal",
                label=None,
                dense=("d",),
                sparse=(),
            ),
            b"1\n1\n",
        ),
    ):
        counts = count_log(
            CountingJob(schema),
            parts_in(tmp_path, schema, text),
            engine=HERE,
        )
        assert [counted(counter) for counter in counts.tokens] == [{1: 2}] * len(schema.sparse)
        assert counts.dense_moments[:, 0].tolist() == [2] * len(schema.dense)
        assert counts.file_minimum == ({"log.txt": 1} if schema.dense else {})
    counts = count_log(CountingJob(SCHEMA), [], engine=HERE)
    assert (everything(counts)["tokens"], counts.file_minimum) == ([{}, {}], {})


def moments(values: Sequence[float]) -> list[int]:
    logs = (
        np.copysign(np.log1p(np.abs(np.array(values, np.float64))), values)
        .astype(np.float32)
        .astype(np.float64)
    )
    fixed = [int(q) for q in np.rint(logs * counting.DENSE_UNITS)]
    squares = [q * q for q in fixed]
    low = sum(q & ((1 << counting.DENSE_LOW_BITS) - 1) for q in squares)
    return [
        len(fixed),
        sum(fixed),
        sum(q >> counting.DENSE_LOW_BITS for q in squares),
        low,
    ]


@pytest.mark.parametrize("kind", ["hexadecimal", "any"])
@given(data=st.data())
def test_moments_match_exact_integer_sums(kind: Any, data: st.DataObject) -> None:
    numbers = (
        st.none()
        | st.integers(-20, 20)
        | st.integers(16300, 16400)
        | st.integers(-(10**18) + 1, 10**18 - 1)
    )
    values = data.draw(st.lists(numbers | st.floats(-1e18, 1e18) if kind == "any" else numbers))
    schema = Schema(tokens=kind, label=None, dense=("d", "e", "f"))
    counts = CountingJob(schema).empty()
    counts.add_rows(
        find_block(schema, {"d": values, "e": [3] * len(values), "f": [None] * len(values)}),
        0,
    )
    there = [value for value in values if value is not None]
    (first, *others), desired = counts.dense_moments.tolist(), moments(there)
    assert others == [moments([3] * len(values)), [0, 0, 0, 0]]
    assert first[0] == desired[0]
    # last bit of NumPy's log1p
    assert first[1] == pytest.approx(desired[1], abs=len(there) * (4 if kind == "any" else 1))


def test_moments_labels_and_file_minimums_are_counted(tmp_path: Path) -> None:
    chance = random.Random(0)
    kinds = (None, 20_000, 10**6, -(10**17))
    values = [kind and round(chance.random() * kind) - 20 for kind in chance.choices(kinds, k=3000)]
    found = []
    for schema in (
        Schema(
            label=None,
            dense=("a",),
            tokens=tokens,
        )
        for tokens in ("hexadecimal", "any")
    ):
        counts = CountingJob(schema).empty()
        counts.add_rows(find_block(schema, {"a": values}), 0)
        found.append(counts.dense_moments.tolist())
    assert found[0] == found[1]
    schema = Schema(
        tokens="hexadecimal",
        label="l",
        dense=("d", "e"),
        sparse=("s",),
    )
    texts = {
        "b.txt": b"1\t5\t3\t\n0\t9\t4\t\n",
        "a.txt": b"1\t5\t\t\n",
        "c.txt": b"1\t7\t-2\t\n1\t\t8\t\n0\t7\t7\t\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    index = open_index(tmp_path, schema)
    for start, least, labels in (
        (
            0,
            {"a.txt": 0, "b.txt": 3, "c.txt": -2},
            [2, 4],
        ),
        (4, {"c.txt": 0}, [1, 1]),
    ):
        counts = count_log(
            CountingJob(schema),
            list(index.parts(start, 6)),
            engine=HERE,
        )
        assert (counts.file_minimum, counts.labels.tolist()) == (least, labels)


def test_count_log_counts_only_requested_rows(tmp_path: Path) -> None:
    text = b"".join(b"%d\t%08x\t\n" % (i, i) for i in range(100))
    index = LogIndex(
        tuple(part.segment for part in parts_in(tmp_path, SCHEMA, text, 200)),
        Faults(),
    )
    job = CountingJob(SCHEMA, first_rows=True)
    counts = job.empty()
    counts.add(count_parts(list(index.parts(13, 77)), counting=job))
    assert (counts.rows, counts.dense_moments[0, 0], counts.missing.tolist()) == (
        64,
        64,
        [[0, NO_ROW], [64, 13]],
    )
    assert found(counts.frequent_tokens(0)) == {i: (1, i) for i in range(13, 77)}


def test_rows_may_be_prepared_before(tmp_path: Path) -> None:
    text = b"".join(
        b"%d\t%08x\t\n" % (i % 3, i) if i % 4 else b"\t%08x\t\n" % i for i in range(100)
    )
    job = CountingJob(SCHEMA, derivation=Derivation(buckets=True))
    counts = count_log(job, parts_in(tmp_path, SCHEMA, text, 200), engine=HERE)
    numbers = [i % 3 if i % 4 else 0 for i in range(100)]  # 0 is no category
    assert counted(counts.tokens[0]) == Counter(number + 2**31 for number in numbers if number)
    assert counted(counts.tokens[1]) == dict.fromkeys(range(100), 1)
    assert counts.missing.tolist() == [
        [numbers.count(0), 0],
        [0, NO_ROW],
        [100, 0],
    ]
    assert counts.dense_moments.shape == (0, 4)
    assert counts.file_minimum == {"log.txt": 0}


def expected_of_lists(bags: list[list[int]], first_row: int) -> dict[int, tuple[int, int]]:
    """Return the count and first row of each token."""
    listed = [(token, row) for row, bag in enumerate(bags, first_row) for token in bag]
    first = dict(reversed(listed))
    number = Counter(token for token, _ in listed)
    return {token: (number[token], first[token]) for token in number}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.none() | st.integers(0, 9), st.lists(st.integers(0, 2**64 - 1), max_size=3)),
        max_size=30,
    )
)
def test_columns_of_any_log_are_counted(rows: list[tuple[int | None, list[int]]]) -> None:
    schema = Schema(
        label="l",
        dense=("d",),
        sparse=("s", "t"),
        lists=("t",),
        tokens="any",
    )
    columns = {
        "d": [token for token, _ in rows],
        "s": [token for token, _ in rows],
        "t": [bag for _, bag in rows],
    }
    raw = find_block(
        schema,
        columns,
        labels={"l": np.array([len(tokens) > 0 for _, tokens in rows], np.float32)},
    )
    counts = CountingJob(schema, first_rows=True).empty()
    counts.add_source(raw, "a.csv")
    for start in (0, len(rows)):  # in two halves
        counts.add_rows(raw.cut(start // 2, (start + len(rows)) // 2), 100 + start // 2)
    assert counts.rows == len(rows)
    assert found(counts.frequent_tokens(0)) == expected(columns["d"], 100)
    assert found(counts.frequent_tokens(1)) == expected_of_lists(columns["t"], 100)
    empty = [row for row, tokens in enumerate(columns["t"], 100) if not tokens]
    none = [row for row, token in enumerate(columns["d"], 100) if token is None]
    assert counts.missing.tolist() == [
        [len(none), min(none, default=NO_ROW)],
        [len(empty), min(empty, default=NO_ROW)],
    ]
    assert counts.labels.tolist() == [len(empty), len(rows) - len(empty)]
    assert (counts.dense_moments[0, 0], counts.file_minimum) == (len(rows) - len(none), {})


@pytest.fixture(scope="module")
def log_text(click_log: Path) -> bytes:
    """About 1 MiB of a log."""
    text = (click_log / "train.txt").read_bytes()[: 1 << 20]
    return text[: text.rindex(b"\n") + 1]


def count_rows(parts: list[SegmentRange], first_rows: bool, **settings: Any) -> Counts:
    return count_log(
        CountingJob(CRITEO, first_rows=first_rows),
        parts,
        engine=HERE,
        **settings,
    )


@pytest.mark.parametrize("first_rows", [False, True])
def test_counts_match_values_of_log(log_text: bytes, tmp_path: Path, first_rows: bool) -> None:
    whole = everything(
        count_rows(
            parts_in(
                tmp_path,
                CRITEO,
                log_text,
                1 << 21,
            ),
            first_rows,
        )
    )
    rows = [line.split(b"\t") for line in log_text.splitlines()]
    for column in (0, 2, 25):
        values = [int(row[14 + column], 16) if row[14 + column] else None for row in rows]
        assert whole["tokens"][column] == expected(values, 0 if first_rows else None)
        absent = [i for i, value in enumerate(values) if value is None]
        assert whole["missing"][column] == [len(absent), absent[0] if absent else NO_ROW]


@pytest.mark.parametrize("first_rows", [False, True])
@pytest.mark.parametrize("segment_bytes", [20_000, 77_777])
def test_counts_are_independent_of_tasks(
    log_text: bytes,
    tmp_path: Path,
    first_rows: bool,
    segment_bytes: int,
) -> None:
    expected = everything(
        count_rows(
            parts_in(
                tmp_path,
                CRITEO,
                log_text,
                1 << 21,
            ),
            first_rows,
        )
    )
    parts = parts_in(tmp_path, CRITEO, log_text, segment_bytes)
    assert len(parts) > 10
    for task_bytes in (1, 100_000, 1 << 30):
        for order in (parts, parts[::-1]):
            assert (
                everything(
                    count_rows(
                        order,
                        first_rows,
                        task_bytes=task_bytes,
                    )
                )
                == expected
            )
    for memory_bytes in (1, 300_000, 1 << 30):
        limits = {"memory_bytes": memory_bytes, "spill_folder": str(tmp_path)}
        with count_rows(parts, first_rows, **limits) as counts:
            assert counts.spill.has_spilled == (memory_bytes < 1 << 30)
            assert everything(counts) == expected


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_many_distinct_tokens_in_little_memory(dtype: Any, tmp_path: Path) -> None:
    """Includes a partition that exceeds memory alone, and tokens that a weak hash function would
    cluster.
    """
    rng = np.random.default_rng(0)
    shift = np.uint64(0 if dtype == np.uint32 else 40)
    spills = (None, Spill(str(tmp_path), 1 << 16))
    whole, spilled = (
        Counts.empty(
            0,
            1,
            dtype=dtype,
            first_rows=True,
            spill=spill,
        )
        for spill in spills
    )
    for number in range(4):
        part = Counts.empty(0, 1, dtype=dtype, first_rows=True)
        tokens = (
            rng.integers(
                0,
                20_000,
                12_000,
            ).astype(np.uint64)
            << shift
        ).astype(dtype)
        part.tokens[0].count_values(tokens, np.arange(number * 12_000, (number + 1) * 12_000))
        for counts in (whole, spilled):
            counts.add(part.to_table())
            assert counts is whole or counts.table_bytes <= 1 << 17
    assert spilled.num_distinct(0) == whole.num_distinct(0)
    for min_count in (1, 3):
        assert found(spilled.frequent_tokens(0, min_count)) == found(
            whole.frequent_tokens(0, min_count)
        )


def open_spill_files(folder: Path) -> int:
    gc.collect()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += str(folder) in os.readlink(f"/proc/self/fd/{name}")
    return found


@pytest.fixture
def clicks(click_log: Path) -> list[SegmentRange]:
    index = open_index(click_log / "train.txt", segment_bytes=1 << 20)
    return list(index.parts(0, index.rows))


def spilled(parts: Sequence[SegmentRange], folder: Path) -> Counts:
    return count_log(
        CountingJob(CRITEO),
        parts,
        engine=HERE,
        memory_bytes=1 << 20,
        spill_folder=str(folder),
    )


def test_spill_files_are_removed(clicks: list[SegmentRange], tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    with spilled(clicks, folder) as counts:
        assert counts.spill.written_bytes > 100_000
        # it has no name, so even a killed process leaves nothing
        assert list(folder.iterdir()) == []
        assert open_spill_files(folder) == 1
    assert open_spill_files(folder) == 0
    counts = spilled(clicks, folder)
    del counts
    assert open_spill_files(folder) == 0
    broken = SegmentRange(replace(clicks[-1].segment, rows=1), 0, 1)
    rejects(
        "changed since the log was indexed",
        spilled,
        [*clicks, broken],
        folder,
    )
    assert open_spill_files(folder) == 0


def test_spill_rejects_full_disk_and_url_and_creates_folder(
    clicks: list[SegmentRange],
    tmp_path: Path,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a disk as small as that
    try:
        rejects(
            r"cannot write spilled counts .*File too large.*spill_folder",
            spilled,
            clicks,
            tmp_path,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert open_spill_files(tmp_path) == 0
    rejects("must be local", Spill, "s3://bucket/x", 1)
    (tmp_path / "file").write_bytes(b"")
    rejects(
        "Not a directory",
        Spill(str(tmp_path / "file" / "folder"), 1).write,
        [],
    )


@pytest.mark.parametrize("task_bytes", [1, 1 << 30])
@pytest.mark.parametrize(
    ("chosen", "read_again"),
    [
        (lambda index: (0, index.rows), 0),
        (lambda index: (0, index.rows - index.rows // 7), None),  # all but the margin and a segment
        (lambda index: (index.rows // 2, index.rows), None),
        (
            lambda index: (
                next(s.first_row for s in index.segments if s.path == index.segments[-1].path),
                index.rows,
            ),
            0,
        ),
        # guessed wrong: all of it again
        (lambda index: (0, 100 if index.rows == 3000 else index.rows), 100),
        (lambda index: (2000, 3000) if index.rows == 3000 else (0, index.segments[0].rows), 1000),
    ],
)
@pytest.mark.parametrize("first_rows", [False, True])
def test_counting_indexer_matches_count_log(
    click_log: Path,
    tmp_path: Path,
    monkeypatch: Any,
    chosen: Any,
    read_again: int | None,
    first_rows: bool,
    task_bytes: int,
) -> None:
    lines = (click_log / "train.txt").read_bytes().splitlines(keepends=True)
    for number in range(3):
        (tmp_path / f"day_{number}").write_bytes(
            b"".join(lines[number * 1000 : (number + 1) * 1000]) + b"not a row\n" * number
        )
    files = storage.list_files(str(tmp_path))
    job = CountingJob(CRITEO, first_rows=first_rows)
    again: list[SegmentRange] = []

    def noted(parts: Sequence[SegmentRange], *, counting: CountingJob) -> pa.Table:
        again.extend(parts)
        return count_parts(parts, counting=counting)

    monkeypatch.setattr(counting, "count_parts", noted)
    cache = str(tmp_path / "cache")
    shown: list[tuple[str, int, int | None]] = []

    def counted() -> tuple[LogIndex, dict[str, Any], int]:
        again.clear()
        with CountingIndexer(job, chosen, task_bytes=task_bytes) as indexer:
            context = TaskContext(
                HERE,
                cache,
                progress=lambda *call: shown.append(call),
            )
            index = indexer.index(
                files,
                CRITEO,
                segment_bytes=20_000,
                context=context,
            )
            with indexer.counts(index, engine=HERE) as counts:
                return index, everything(counts), sum(part.stop - part.start for part in again)

    index, made, rows_again = counted()
    assert (index.rows, index.faults.total) == (3000, 3)
    size = sum(file.size_bytes for file in files)
    assert shown[-1] == ("index (bytes)", size, size)
    for place in (None, cache):
        assert index == index_log(
            files,
            CRITEO,
            segment_bytes=20_000,
            context=TaskContext(HERE, place),
        )
    start, stop = chosen(index)
    assert rows_again < (stop - start) / 4 if read_again is None else rows_again == read_again
    assert made == everything(
        count_log(
            job,
            list(index.parts(start, stop)),
            engine=HERE,
        )
    )
    # the index is in the cache now, so all rows are counted from it
    assert counted() == (index, made, stop - start)


def test_counting_indexer_passes_on_errors_and_ends_spill(
    click_log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = mock.Mock()
    monkeypatch.setattr(Counts, "close", closed)
    context = TaskContext(
        HERE,
        str(tmp_path),
        progress=raising(OSError("progress failed")),
    )
    with CountingIndexer(CountingJob(CRITEO), lambda index: (0, index.rows)) as indexer:
        fails_with(
            OSError,
            "progress failed",
            indexer.index,
            storage.list_files(str(click_log / "train.txt")),
            CRITEO,
            segment_bytes=1 << 20,
            context=context,
        )
        closed.assert_called_once()


def test_problems_of_counted_rows() -> None:
    schema = Schema(
        label="y",
        dense=("d", "e"),
        sparse=("s", "t", "l"),
        lists=("l",),
        tokens="any",
    )
    table = pa.table(
        {
            "y": [1, 1],
            "d": [1, 2],
            "e": [None, None],
            "s": ["a", ""],
            "t": ["", None],
            "l": [[], None],
        }
    )
    for labels, expected in (([1, 1], True), ([0, 1], False)):
        raw, _ = parse_table(table.set_column(0, "y", pa.array(labels)), schema)
        counts = CountingJob(schema).empty()
        counts.add_source(raw, "")
        counts.add_rows(raw, 0)
        *one_class, empty = find_problems(counts, schema)
        assert empty.startswith("no training row has a value in e, t, l;")
        *_, empty = find_problems(counts, schema.replace(optional=("e", "l")))
        assert empty.startswith("no training row has a value in t;")
        assert [text.partition(",")[0] for text in one_class] == [
            "all 2 training rows have label 1"
        ] * expected
    assert find_problems(CountingJob(schema).empty(), schema) == []


@pytest.mark.parametrize(
    "changes",
    [{"missing": "zero"}, {"missing": "zero", "token_modulo": 2**31}],
)
def test_counting_memory_is_bounded_for_all_presets(
    changes: dict[str, Any],
    tmp_path: Path,
) -> None:
    schema = Schema(tokens="hexadecimal", label=None, sparse=("s",))
    preset = RAYREC.replace(min_count=3, **changes)
    # 0 and all others once
    raw = find_block(schema, {"s": [*range(299_994), None, None, 7, 7, 7, 7]})
    job = preset.counting(schema)
    task = job.empty()
    task.add_rows(job.derivation.counted(raw), 0)
    preprocessors = []
    for memory_bytes in (1 << 20, None):
        with job.total(memory_bytes, str(tmp_path)) as counts:
            counts.add(task.to_table())
            gc.collect()
            tracemalloc.start()
            preprocessors.append(make_preprocessor(preset, schema, counts))
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert bool(counts.spilled()) == (memory_bytes is not None)
            assert memory_bytes is None or peak < 2 << 20
    assert preprocessors[0].hash() == preprocessors[1].hash()
    assert preprocessors[0].tokens.tolist() == [7, 0]  # five times; once and two empty fields


def test_default_memory_limit_is_quarter_of_available() -> None:
    with mock.patch(
        "rayrec.host_resources.memory",
        return_value=Memory(total=64 << 30, available=8 << 30),
    ):
        counts = CountingJob(SCHEMA).total(None, None)
    assert counts.spill.memory_bytes == 2 << 30
