"""Preprocessed rows are the encoded raw rows, bit for bit, in every order; damaged folders are
refused.
"""

import errno
import gzip
import itertools
import json
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from builders.click_models import hashed_preprocessor
from builders.engines import Died, LoopEngine
from builders.faults import at_first, fails_with, flip, raising, rejects
from builders.logs import learn, open_index
from builders.runs import files_in
from builders.same import assert_same
from builders.torchrec_scripts import PARTS, torchrec_criteo
from hypothesis import given
from hypothesis import strategies as st

from rayrec import host_resources, storage
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.encoding.encoder import MultiHot
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import ALL, RAYREC
from rayrec.data.encoding.rules import DenseColumn
from rayrec.data.engine import TaskContext
from rayrec.data.log_source import LogSource
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.reading import read_raw
from rayrec.data.logs.splits import Split
from rayrec.data.materialized import dataset, write_tasks
from rayrec.data.materialized.dataset import PreprocessedDataset, open_preprocessed
from rayrec.data.materialized.dataset import read as read_preprocessed
from rayrec.data.materialized.formats import WRITABLE_FORMATS, combine
from rayrec.data.materialized.write_tasks import Permutation, gather_runs, write_run
from rayrec.data.materialized.writer import preprocess
from rayrec.datasets.criteo import SCHEMA
from rayrec.ingest.block_order import BlockOrder, full_epoch
from rayrec.ingest.stream import MappedSource, RowStream, encode_block
from rayrec.schema import Schema
from rayrec.storage.cache import unpack

ROWS = 3_000
MULTI_HOT = MultiHot(sizes=(3, 1, 5, *(1,) * 22, 2))


@pytest.fixture(scope="module")
def days(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> LogIndex:
    """Three days, named so that the order of paths is not that of days, with a faulty line and a
    file of nothing else.
    """
    lines = (click_log / "train.txt").read_bytes().splitlines(keepends=True)[:ROWS]
    lines[700] = b"a bad line\n"
    folder = tmp_path_factory.mktemp("days")
    for name, start, stop in (
        ("day_2", 0, 900),
        ("day_9.txt", 900, 1700),
        ("day_10", 1700, ROWS),
    ):
        (folder / name).write_bytes(b"".join(lines[start:stop]))
    (folder / "day_3").write_bytes(b"nothing\n")
    index = open_index(folder)
    assert index.rows == ROWS - 1
    return index


@pytest.fixture(scope="module")
def preprocessor(days: LogIndex) -> Preprocessor:
    return learn(days)


def hashed(schema: Schema, num_embeddings: int, multi_hot: MultiHot | None = None) -> Preprocessor:
    """Ids up to num_embeddings, or to the 32 bits of tokens."""
    dense = (DenseColumn(mean=0.5, scale=2.0, missing_value=-1.0),) * len(schema.dense)
    return hashed_preprocessor(
        [num_embeddings] * len(schema.sparse),
        schema,
        dense=dense,
        multi_hot=multi_hot,
    )


def write(
    index: LogIndex,
    preprocessor: Preprocessor,
    out: Path,
    format: str,
    **changes: Any,
) -> PreprocessedDataset:
    arguments: dict[str, Any] = {"engine": LoopEngine(), "segments_per_task": 3, **changes}
    result = preprocess(
        index,
        preprocessor=preprocessor,
        out=str(out),
        format=format,
        **arguments,
    )
    dataset = open_preprocessed(str(out), verify=True)
    assert (result["rows"], result["out"], result["format"]) == (index.rows, str(out), format)
    assert result["bytes"] == dataset.size_bytes
    assert not Path(f"{out}.partial").exists()
    assert {path.name for path in out.iterdir()}.isdisjoint({"job.json", "done", "shuffle"})
    return dataset


def order_of(index: LogIndex, start: int, stop: int, shuffle: str = "none") -> BlockOrder:
    return BlockOrder(tuple(index.parts(start, stop)), shuffle, 5, 4)


def assert_same_epochs(
    raw: LogIndex,
    made: LogIndex,
    preprocessor: Preprocessor,
    rows: tuple[int, int],
    **how: bool,
) -> None:
    """All blocks of some epochs, in every order."""
    for shuffle, epoch in (
        ("none", 0),
        ("files", 0),
        ("files", 1),
        ("window", 0),
        ("window", 1),
    ):
        for pair in zip(
            *[order_of(index, *rows, shuffle).blocks(epoch) for index in (raw, made)],
            strict=True,
        ):
            assert (pair[0].rows, pair[0].seed) == (pair[1].rows, pair[1].seed)
            cut_at = pair[0].rows // 3  # as pieces are dealt
            for start, stop in ((0, cut_at), (cut_at, pair[0].rows)):
                assert_same(
                    *(encode_block(block, start, stop, preprocessor, **how) for block in pair)
                )


@pytest.mark.parametrize("format", WRITABLE_FORMATS)
def test_every_order_returns_equal_rows(
    days: LogIndex,
    preprocessor: Preprocessor,
    tmp_path: Path,
    format: str,
) -> None:
    sets = Split(kind="last_file").rows(days)
    write(days, preprocessor, tmp_path / "out", format, sets=sets)
    (tmp_path / "out").rename(tmp_path / "moved")
    dataset = open_preprocessed(str(tmp_path / "moved"))
    assert (dataset.index.format, dataset.index.faults) == (format, days.faults)
    assert [s.rows for s in dataset.index.segments] == [s.rows for s in days.segments]
    assert Split(kind="last_file").rows(dataset.index) == sets == dataset.sets
    for rows in ((0, days.rows), sets["train"], sets["test"]):
        assert_same_epochs(days, dataset.index, preprocessor, rows)
    assert (
        Preprocessor.load(dataset.preprocessor).hash()
        == preprocessor.hash()
        == dataset.manifest["preprocessor"]
    )
    # the empty share of a worker
    none = read_preprocessed(dataset.index.segments[:2], np.arange(0), preprocessor)
    assert_same(
        none,
        preprocessor.encode(read_raw(days.segments[:1], SCHEMA), np.arange(0)),
        ignored="row_numbers",
    )


OTHER_PROFILES = [
    ("parquet", "multi-hot"),
    ("binary", "wide table"),
    ("npy", "wide table"),
]


@pytest.mark.parametrize(
    ("format", "name"),
    [*itertools.product(WRITABLE_FORMATS, ALL), *OTHER_PROFILES],
)
def test_every_profile(days: LogIndex, tmp_path: Path, format: str, name: str) -> None:
    profiled = learn(
        days,
        SCHEMA,
        RAYREC.replace(multi_hot=MULTI_HOT) if name == "multi-hot" else ALL.get(name, RAYREC),
    )
    if name == "wide table":  # its 64-bit ids still fit
        first, *others = profiled.sparse
        profiled = replace(profiled, sparse=(replace(first, num_embeddings=2**32), *others))
        assert profiled.id_dtype == np.int64
    assert_same_epochs(
        days,
        write(days, profiled, tmp_path / "out", format).index,
        profiled,
        (100, 2000),
    )


@pytest.mark.parametrize("format", WRITABLE_FORMATS)
def test_unlabelled(
    click_log: Path,
    tmp_path: Path,
    format: str,
    preprocessor: Preprocessor,
) -> None:
    lines = (click_log / "train.txt").read_bytes().splitlines(keepends=True)[:500]
    (tmp_path / "test.txt").write_bytes(b"".join(line.partition(b"\t")[2] for line in lines))
    index = open_index(tmp_path / "test.txt", SCHEMA.unlabelled())
    assert index.rows == 500
    dataset = write(index, preprocessor, tmp_path / "out", format, labelled=False)
    assert not dataset.labelled
    assert_same_epochs(index, dataset.index, preprocessor, (0, 500), labelled=False)


@pytest.mark.parametrize(
    ("format", "rows"),
    [
        *((name, 2**31) for name in WRITABLE_FORMATS),
        ("npy", 2**40),
        ("parquet", 2**40),
    ],
)
def test_large_ids(days: LogIndex, tmp_path: Path, format: str, rows: int) -> None:
    large = hashed(SCHEMA, rows)
    assert large.id_dtype == (np.int32 if rows == 2**31 else np.int64)
    dataset = write(days, large, tmp_path / "out", format)
    assert_same_epochs(days, dataset.index, large, (0, 800))
    ids = np.stack(encode_block(order_of(dataset.index, 0, 80).blocks(0)[0], 0, 80, large).ids)
    assert ids.max() > 2**30
    assert (ids.astype(np.float32).astype(np.int64) != ids).any()


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> tuple[LogIndex, Preprocessor]:
    """A log of lists and weights, some empty."""
    rng = np.random.default_rng(0)
    rows = 500
    folder = tmp_path_factory.mktemp("lists")
    table = pa.table(
        {
            "clicked": rng.integers(0, 2, rows),
            "w": rng.random(rows).astype(np.float32),
            "price": pa.array(rng.normal(size=rows), mask=rng.random(rows) < 0.2),
            "shop": pa.array([f"shop {i}" if i else None for i in rng.integers(0, 9, rows)]),
            "seen": pa.array(
                [[f"item {i}" for i in rng.integers(0, 50, n)] for n in rng.integers(0, 5, rows)]
            ),
        }
    )
    for number in range(2):
        rows_of = table.slice(number * 250, 250)
        pq.write_table(rows_of, folder / f"{number}.parquet", row_group_size=40, compression="none")
    schema = Schema(
        label="clicked",
        weight="w",
        tokens="any",
        dense=("price",),
        sparse=("shop", "seen"),
        lists=("seen",),
    )
    return open_index(
        folder,
        schema,
        segment_bytes=2000,
        cache=tmp_path_factory.mktemp("cache"),
    ), hashed(schema, 2**28)


def test_parquet_stores_lists_and_weights(
    tmp_path: Path,
    lists: tuple[LogIndex, Preprocessor],
) -> None:
    index, preprocessor = lists
    dataset = write(index, preprocessor, tmp_path / "out", "parquet", sets=Split().rows(index))
    assert_same_epochs(index, dataset.index, preprocessor, (0, 500))
    assert_same_epochs(index, dataset.index, preprocessor, Split().rows(index)["validation"])
    read = pyarrow.dataset.dataset(
        tmp_path / "out",
        partitioning="hive",
        exclude_invalid_files=True,
    ).to_table()
    assert set(read.column_names) == {
        "clicked",
        "w",
        "price",
        "shop",
        "seen",
        "set",
    }


def test_write_rejects_unsupported_columns(
    days: LogIndex,
    lists: Any,
    preprocessor: Preprocessor,
    tmp_path: Path,
) -> None:
    unweighted = lists[1].schema.replace(weight=None)
    single = Schema(
        label="clicked",
        dense=("price",),
        sparse=("shop",),
        tokens="any",
    )
    missing = replace(hashed(SCHEMA, 9), dense=(DenseColumn(missing_value=3.0),) * 13)
    cases = [
        (
            days,
            missing,
            "binary",
            r"as 0, but in column int_0 0 becomes 0\.0 and missing 3\.0\. Use --format npy",
        ),
        (lists[0], lists[1], "npy", "cannot store the weights of column w. Use --format parquet"),
        (
            lists[0],
            hashed(unweighted, 9),
            "npy",
            "cannot store the lists of column seen. Use --format parquet",
        ),
        (
            lists[0],
            hashed(single, 9),
            "binary",
            "stores integers, but tokens: any .* Use --format npy or parquet",
        ),
        (
            days,
            hashed(SCHEMA, 9, MULTI_HOT),
            "npy",
            "stores one id per column, cat_0 has 3. Use --format parquet",
        ),
        (days, hashed(SCHEMA, 9, MULTI_HOT), "binary", "stores one id per column, cat_0 has 3"),
        (days, preprocessor, "csv", "format: must be one of binary, npy, parquet, got 'csv'"),
    ]
    for index, made, format, message in cases:
        rejects(message, write, index, made, tmp_path / "out", format)
    assert not list(tmp_path.iterdir())


def test_binary_rejects_wide_numbers(
    days: LogIndex,
    tmp_path: Path,
    click_log: Path,
    preprocessor: Preprocessor,
) -> None:
    lines = (click_log / "train.txt").read_bytes().splitlines(keepends=True)[:300]
    columns = lines[123].split(b"\t")
    columns[5] = b"2147483648"
    lines[123] = b"\t".join(columns)
    (tmp_path / "log.txt").write_bytes(b"".join(lines))
    index = open_index(tmp_path / "log.txt")
    wide = "must be a 32-bit number for format binary"
    rejects(
        rf"log\.txt: row 123 column int_4: {wide}.*npy",
        write,
        index,
        preprocessor,
        tmp_path / "out",
        "binary",
    )
    write(index, preprocessor, tmp_path / "good", "npy")
    rejects(
        rf"day_\d+(\.txt)?: row 0 column cat_\d+: {wide}",
        write,
        days,
        hashed(SCHEMA, 2**40),
        tmp_path / "packed",
        "binary",
    )


def test_binary_rows_are_labels_integers_and_ids(days: LogIndex, tmp_path: Path) -> None:
    v1 = learn(days, SCHEMA, ALL["mlperf-v1"])
    write(days, v1, tmp_path / "out", "binary")
    rows = np.fromfile(tmp_path / "out" / "day_2.bin", np.int32).reshape(-1, 40)
    raw = read_raw([segment for segment in days.segments if segment.path.endswith("day_2")], SCHEMA)
    assert (rows[:, 0] == raw.labels["label"]).all()
    assert (rows[:, 1:14] == np.maximum(raw.numbers, 0)).all()
    assert (rows[:, 14:] == np.stack(v1.encode(raw).ids).T).all()


@pytest.mark.parametrize("mapped", [False, True])
def test_torchrec_reads_npy(
    days: LogIndex,
    preprocessor: Preprocessor,
    tmp_path: Path,
    mapped: bool,
) -> None:
    write(days, preprocessor, tmp_path / "out", "npy")
    paths = [
        [f"{tmp_path}/out/{day}_{part}.npy" for day in ("day_2", "day_9", "day_10")]
        for part in PARTS
    ]
    with torchrec_criteo() as criteo:
        reader = criteo.InMemoryBinaryCriteoIterDataPipe
        batches = list(
            reader(
                "train",
                *paths,
                batch_size=128,
                rank=0,
                world_size=1,
                mmap_mode=mapped,
            )
        )
    whole_log = preprocessor.encode(read_raw(days.segments, SCHEMA))
    assert sum(len(batch.labels) for batch in batches) == days.rows
    assert (
        np.concatenate([batch.dense_features.numpy() for batch in batches]) == whole_log.dense
    ).all()
    assert (np.concatenate([batch.labels.numpy() for batch in batches]) == whole_log.label).all()
    for number in (0, 7, 25):
        got = np.concatenate(
            [batch.sparse_features[f"cat_{number}"].values().numpy() for batch in batches]
        )
        assert (got == whole_log.ids[number]).all()


def test_parquet_has_row_group_per_segment(
    days: LogIndex,
    preprocessor: Preprocessor,
    tmp_path: Path,
) -> None:
    sets = Split().rows(days)
    dataset = write(days, preprocessor, tmp_path / "out", "parquet", sets=sets)
    for name, (start, stop) in sets.items():
        groups = []
        for file in sorted((tmp_path / "out" / f"set={name}").iterdir()):
            metadata = pq.read_metadata(file)
            groups += [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            column = metadata.row_group(0).column(3)
            assert (column.statistics.has_min_max, column.compression) == (True, "ZSTD")
            assert metadata.schema.names == list(SCHEMA.columns)
        assert groups == [part.stop - part.start for part in days.parts(start, stop)]
    table = pyarrow.dataset.dataset(
        tmp_path / "out",
        partitioning="hive",
        exclude_invalid_files=True,
    ).to_table()
    assert table.num_rows == days.rows == dataset.index.rows


def test_row_stream_reads_mapped_rows(
    days: LogIndex,
    preprocessor: Preprocessor,
    tmp_path: Path,
) -> None:
    blocks = order_of(
        write(days, preprocessor, tmp_path / "out", "binary").index,
        0,
        days.rows,
        "window",
    ).blocks(0)
    block_ranges = [(blocks[block_range.block], block_range) for block_range in full_epoch(blocks)]
    expected = [
        encode_block(block, 0, block_range.rows, preprocessor)
        for block, block_range in block_ranges
    ]
    for in_memory in (False, True):
        for prefetch_blocks in (0, 1, 9):
            got = RowStream(MappedSource(preprocessor, in_memory, prefetch_blocks), block_ranges)
            for one, other in zip(got, expected, strict=True):
                assert_same(one, other)
    early = RowStream(MappedSource(preprocessor), block_ranges)
    next(early)
    early.close()
    assert list(RowStream(MappedSource(preprocessor), [])) == []
    for file in (tmp_path / "out").glob("*.bin"):
        file.unlink()  # what is in memory needs no files
    assert_same(
        next(RowStream(MappedSource(preprocessor, in_memory=True), block_ranges)),
        expected[0],
    )


def test_load_rejects_rows_beyond_memory(
    days: Any,
    preprocessor: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = write(days, preprocessor, tmp_path / "out", "binary")
    monkeypatch.setattr(host_resources, "memory", lambda: host_resources.Memory(2000, 1000))
    (block,) = order_of(made.index, 0, 5).blocks(0)
    stream = RowStream(
        MappedSource(preprocessor, in_memory=True),
        [(block, full_epoch([block])[0])],
    )
    rejects(r"do not fit into .* free memory\. Set in_memory off", next, stream)


def test_read_rejects_other_preprocessor(
    days: LogIndex,
    preprocessor: Preprocessor,
    tmp_path: Path,
) -> None:
    made = write(days, preprocessor, tmp_path / "out", "npy")
    other = learn(days, SCHEMA, RAYREC.replace(min_count=5))
    message = f"made with Preprocessor {preprocessor.hash()}, not with {other.hash()}. Use"
    rejects(message, read_preprocessed, made.index.segments[:1], np.arange(3), other)


@pytest.mark.parametrize("format", WRITABLE_FORMATS)
def test_damaged_files_raise(
    days: LogIndex,
    preprocessor: Preprocessor,
    tmp_path: Path,
    format: str,
) -> None:
    out = tmp_path / "out"
    made = write(days, preprocessor, out, format)
    name = made.manifest["files"][1]["name"]
    content = (out / name).read_bytes()
    size = len(content)
    flip(out / name)
    open_preprocessed(str(out))
    rejects(
        f"{name}: checksum does not match: the dataset is damaged. Copy it again",
        open_preprocessed,
        str(out),
        verify=True,
    )
    (out / name).write_bytes(content[:-5])
    reported = (
        f"{name}: size must be {size} bytes, got {size - 5}: .* again with `rayrec preprocess`"
    )
    rejects(reported, open_preprocessed, str(out))
    (out / name).unlink()
    rejects(f"{name}: not found", open_preprocessed, str(out))
    (out / name).write_bytes(content)
    for file in made.manifest["files"]:  # and after the dataset was opened
        (out / file["name"]).write_bytes((out / file["name"]).read_bytes()[:-9])
    rejects(
        r"the dataset is damaged\. Copy it again",
        read_preprocessed,
        made.index.segments[:1],
        np.arange(3),
        preprocessor,
    )


def test_open_rejects_invalid_manifest(
    days: LogIndex,
    preprocessor: Preprocessor,
    tmp_path: Path,
) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        assert not LogSource.at(str(place)).is_preprocessed
    out = tmp_path / "out"
    write(days, preprocessor, out, "npy")
    manifest = out / "dataset.json"
    for content, why in (
        (
            json.dumps({**json.loads(manifest.read_text()), "version": 99}),
            "must have version 1, got 99. Run `rayrec preprocess`",
        ),
        ("{", r"dataset\.json: damaged, not JSON"),
        (
            None,
            r"dataset\.json not found\. Make a preprocessed dataset with `rayrec preprocess LOG",
        ),
    ):
        manifest.write_text(content) if content else manifest.unlink()
        rejects(why, open_preprocessed, str(out))


@pytest.mark.parametrize("format", WRITABLE_FORMATS)
def test_read_rejects_ids_outside_table(days: LogIndex, tmp_path: Path, format: str) -> None:
    """By file, row, column, id and table size, in an order of rows that is not the log's."""
    preprocessor = hashed(SCHEMA, 1 << 20)
    made = write(days, preprocessor, tmp_path / "out", format)
    raw, segments = (
        [s for s in index.segments if s.path.endswith("day_9.txt")] for index in (days, made.index)
    )
    ids = np.asarray(preprocessor.encode(read_raw(raw, SCHEMA)).ids[3])
    row = int(ids.argmax())
    preprocessor.__dict__["num_embeddings"] = [1 << 20] * 3 + [int(ids.max())] + [1 << 20] * 22
    order = np.arange(len(ids))[::-1]
    assert len(read_preprocessed(segments, order[order != row], preprocessor)) == len(ids) - 1
    line = rejects("", read_preprocessed, segments, order, preprocessor)
    file, number = re.search(r"/out/([^:]*): row (\d+) column cat_3: id", line).groups()
    assert f"id {ids.max()} is outside its table of {ids.max():,} rows: " in line
    if format == "parquet":
        assert pq.read_table(tmp_path / "out" / file)["cat_3"][int(number)].as_py() == ids.max()
    else:
        assert (file, int(number)) == (
            {"binary": "day_9.bin", "npy": "day_9_sparse.npy"}[format],
            row,
        )


def test_ids_of_bags_and_negative_ids_are_checked() -> None:
    dense = np.zeros((3, 0), np.float32)
    bags = JaggedIds(np.array([1, 2, 9, 0], np.int32), np.array([2, 0, 2], np.int32))
    one = EncodedRows(
        dense,
        [
            np.array([0, 1, -1], np.int64),
            np.array([[0, 1], [2, 3], [4, 4]]),
            bags,
        ],
    )
    assert dataset.find_invalid_id(one, [2, 5, 10]) == (2, 0, -1)
    one.ids[0][2] = 1  # type: ignore[index]
    assert dataset.find_invalid_id(one, [2, 5, 10]) is None
    assert dataset.find_invalid_id(one, [2, 4, 10]) == (2, 1, 4)
    assert dataset.find_invalid_id(one, [2, 5, 9]) == (2, 2, 9)


@pytest.mark.parametrize("format", WRITABLE_FORMATS)
def test_checksums_are_compared_once(
    days: LogIndex,
    preprocessor: Preprocessor,
    tmp_path: Path,
    format: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dataset, "_TASK_BYTES", 50_000)  # so that files are split, and share tasks
    out = tmp_path / "out"
    made = write(days, preprocessor, out, format)
    done: list[tuple[int, int | None]] = []

    def opened() -> LogIndex:
        context = TaskContext(
            LoopEngine(),
            str(tmp_path / "cache"),
            progress=lambda _, *byte_counts: done.append(byte_counts),
        )
        return LogSource.at(str(out)).index(SCHEMA, segment_bytes=1, context=context)

    assert opened() == made.index
    assert done[-1] == (made.size_bytes, made.size_bytes)
    assert len(done) > 2
    done.clear()
    assert opened() == made.index
    assert not done
    flip(path := out / made.manifest["files"][1]["name"], -1)
    rejects(rf"{path.name}: checksum does not match: the dataset is damaged", opened)


# -- Preprocessing resumes where it stopped, with the same bytes, and says what stands in its way
LOG_ROWS = 2_000
HASHED = hashed(SCHEMA, 2**28)


@pytest.fixture
def log(click_log: Path, tmp_path: Path) -> Path:
    lines = (click_log / "train.txt").read_bytes().splitlines(keepends=True)[:LOG_ROWS]
    folder = tmp_path / "log"
    folder.mkdir()
    for day in range(2):
        (folder / f"day_{day}").write_bytes(b"".join(lines[day * 1000 : day * 1000 + 1000]))
    return folder


def run(log: Path | str, out: Path | str, **changes: Any) -> dict[str, Any]:
    index = open_index(log)
    sets = changes.pop("sets") if "sets" in changes else Split(kind="last_file").rows(index)
    return preprocess(
        index,
        out=str(out),
        sets=sets,
        **{
            "preprocessor": HASHED,
            "format": "binary",
            "engine": LoopEngine(),
            "segments_per_task": 2,
            **changes,
        },
    )


@given(st.binary(), st.binary())
def test_combining_checksums(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("format", WRITABLE_FORMATS)
@pytest.mark.parametrize("shuffle", ["none", "full"])
def test_interrupted_job_resumes(log: Path, tmp_path: Path, format: str, shuffle: str) -> None:
    settings = {"format": format, "shuffle": shuffle, "seed": 4}
    if format == "parquet":
        settings["preprocessor"] = hashed(SCHEMA, 2**28, MultiHot(sizes=(2, 3, *(1,) * 24)))
    whole_engine = LoopEngine()
    whole = run(log, tmp_path / "whole", engine=whole_engine, **settings)
    expected = files_in(tmp_path / "whole")
    for tasks in range(0, whole_engine.tasks, 3):
        out = tmp_path / f"after-{tasks}"
        fails_with(Died, "", run, log, out, engine=LoopEngine(tasks), **settings)
        assert not out.exists()
        done = []
        notes = []
        engine = LoopEngine()
        again = run(
            log,
            out,
            engine=engine,
            progress=done.append,
            note=notes.append,
            **settings,
        )
        assert (engine.tasks, done[-1], files_in(out)) == (
            whole_engine.tasks - tasks,
            LOG_ROWS,
            expected,
        )
        assert (again["hash"], again["bytes"]) == (whole["hash"], whole["bytes"])
        assert [note for note in notes if note.startswith("Resuming ")] == notes[: tasks > 0]
        assert not Path(f"{out}.partial").exists()


def test_kill_after_last_task_resumes(
    log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        storage,
        "write_bytes",
        at_first([Died()], storage.write_bytes, end="dataset.json"),
    )
    fails_with(Died, "", run, log, tmp_path / "out", format="npy")
    engine = LoopEngine()
    run(log, tmp_path / "out", format="npy", engine=engine)
    assert engine.tasks == 0
    open_preprocessed(str(tmp_path / "out"), verify=True)


def test_repeated_task_writes_equal_bytes(log: Path, tmp_path: Path) -> None:
    class Twice(LoopEngine):
        def run(
            self,
            name: str,
            function: Any,
            items: Sequence[Any],
            *,
            block_bytes: int = 0,
        ) -> Iterator[pa.Table]:
            for item in [*items[::-1], *items]:
                function(item)
            yield from super().run(name, function, items)

    for format in WRITABLE_FORMATS:
        run(log, tmp_path / format, format=format)
        run(log, tmp_path / f"{format}-twice", format=format, engine=Twice())
        assert files_in(tmp_path / format) == files_in(tmp_path / f"{format}-twice")


def test_resume_rejects_other_inputs(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fails_with(Died, "", run, log, out, engine=LoopEngine(2))
    for changes, named in (
        ({"format": "npy"}, "format"),
        ({"sets": None}, "sets"),
        ({"segments_per_task": 3, "shuffle": "full"}, "shuffle, seed, segments_per_task"),
        ({"preprocessor": hashed(SCHEMA, 2**28, MultiHot(sizes=(1,) * 26))}, "preprocessor"),
    ):
        rejects(
            rf"incomplete output of a call with a different {named}; use the same .* remove",
            run,
            log,
            out,
            **changes,
        )
    day = log / "day_1"
    day.write_bytes(day.read_bytes() + day.read_bytes())
    rejects("with a different sets, log;", run, log, out)
    shutil.rmtree(f"{out}.partial")
    run(log, out)
    assert open_preprocessed(str(out)).index.rows == 3000


def test_preprocess_rejects_invalid_logs(log: Path, tmp_path: Path) -> None:
    run(log, tmp_path / "out")
    made = open_preprocessed(str(tmp_path / "out"))
    arguments = {
        "preprocessor": HASHED,
        "out": str(tmp_path / "b"),
        "format": "npy",
        "engine": LoopEngine(),
    }
    rejects(
        "preprocessed already, in format binary. Use the raw log",
        preprocess,
        made.index,
        **arguments,
    )
    rejects("no rows to write", preprocess, LogIndex((), Faults()), **arguments)
    overlapping = {"a": (0, 5), "b": (4, 9)}
    rejects(
        "rows 4-9 of b overlap other sets or exceed the log of 2000 rows",
        run,
        log,
        tmp_path / "b",
        sets=overlapping,
    )


def test_rows_outside_sets_are_stored(log: Path, tmp_path: Path) -> None:
    run(log, tmp_path / "out", format="parquet", sets={"train": (100, 1500), "test": (1600, 1999)})
    assert {path.name for path in (tmp_path / "out").glob("set=*")} == {
        "set=train",
        "set=test",
        "set=other",
    }
    assert open_preprocessed(str(tmp_path / "out")).sets == {
        "train": (100, 1500),
        "test": (1600, 1999),
    }


def test_preprocess_writes_to_urls_and_small_disk_raises(
    log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = f"file://{tmp_path}/remote"
    for format in ("binary", "npy"):
        rejects(
            rf"remote: format {format} is written in place.*a folder and copy it",
            run,
            log,
            out,
            format=format,
        )
    rejects("a full shuffle needs a file system", run, log, out, format="parquet", shuffle="full")
    fails_with(Died, "", run, log, out, format="parquet", engine=LoopEngine(3))
    assert not LogSource.at(out).is_preprocessed
    run(log, out, format="parquet")
    run(log, tmp_path / "local", format="parquet")
    assert files_in(tmp_path / "remote") == files_in(tmp_path / "local")
    assert (
        len(
            read_preprocessed(
                open_preprocessed(out, verify=True).index.segments,
                np.arange(LOG_ROWS),
                HASHED,
            )
        )
        == LOG_ROWS
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    rejects(
        r"out\.partial: about 0\.0 GB are needed, 0\.0 GB are free\. Free space or",
        run,
        log,
        tmp_path / "out",
    )
    assert not Path(f"{tmp_path / 'out'}.partial").exists()


def test_full_disk_resumes_and_partial_writes_continue(
    log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", raising(OSError(errno.ENOSPC, "No space left on device")))
        rejects(
            r"out\.partial: No space left on device; make room there and run the same",
            run,
            log,
            tmp_path / "out",
        )
    run(log, tmp_path / "out")
    pwrite = os.pwrite
    monkeypatch.setattr(
        os,
        "pwrite",
        lambda descriptor, data, start: pwrite(descriptor, data[:1000], start),
    )
    run(log, tmp_path / "pieces")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "pieces")


def test_invisible_folder_raises(log: Path, tmp_path: Path) -> None:
    class Elsewhere(LoopEngine):
        def run(
            self,
            name: str,
            function: Any,
            items: Sequence[Any],
            *,
            block_bytes: int = 0,
        ) -> Iterator[pa.Table]:
            (tmp_path / "out.partial").rename(tmp_path / "away")
            return super().run(name, function, items)

    rejects(
        r"out\.partial: not visible to tasks on .*; choose an --out that all",
        run,
        log,
        tmp_path / "out",
        engine=Elsewhere(),
    )


def test_names_of_files(log: Path, tmp_path: Path) -> None:
    """A packed file's are those of the plain one; files of one name in two folders get numbers."""
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "train.txt.gz").write_bytes(gzip.compress((log / "day_0").read_bytes()))
    plain = unpack(storage.list_files(str(tmp_path / "packed"))[0], str(tmp_path / "cache"))
    shutil.copytree(log, tmp_path / "log2")
    for place, format, names in (
        (plain.path, "npy", ["train_dense.npy", "train_labels.npy", "train_sparse.npy"]),
        (f"{tmp_path}/log*/*", "binary", ["day_0-2.bin", "day_0.bin", "day_1-2.bin", "day_1.bin"]),
    ):
        run(place, tmp_path / format, format=format, sets=None)
        assert sorted(path.name for path in (tmp_path / format).glob("*.[nb]*")) == names


def test_manifest_contents(log: Path, tmp_path: Path) -> None:
    result = run(
        log,
        tmp_path / "out",
        format="npy",
        shuffle="full",
        seed=9,
    )
    assert set(result) == {
        "rows",
        "out",
        "format",
        "hash",
        "bytes",
        "seconds",
        "rows_per_s",
    }
    manifest = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert (manifest["rows"], manifest["shuffle"], manifest["seed"]) == (LOG_ROWS, "full", 9)
    assert manifest["sets"] == {
        "train": [0, 1000],
        "validation": [1000, 1500],
        "test": [1500, 2000],
    }
    assert manifest["raw_files"] == ["day_0", "day_1"]
    assert manifest["source"] == [
        {"path": str(day), "bytes": day.stat().st_size} for day in sorted(log.iterdir())
    ]
    for file in manifest["files"]:
        assert zlib.crc32((tmp_path / "out" / file["name"]).read_bytes()) == int(file["crc32"], 16)


# -- A full shuffle is one permutation of the training rows, in any portions
def keys(dataset: PreprocessedDataset) -> list[bytes]:
    rows = read_preprocessed(dataset.index.segments, np.arange(LOG_ROWS), HASHED)
    ids = np.stack(rows.ids, 1)
    return [
        a.tobytes() + b.tobytes() + c.tobytes()
        for a, b, c in zip(rows.dense, ids, rows.label, strict=True)
    ]


def shuffled(log: Path, out: Path, **changes: Any) -> PreprocessedDataset:
    run(log, out, **{"shuffle": "full", "seed": 1, **changes})
    return open_preprocessed(str(out), verify=True)


@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_permutation_is_bijective(size: int, seed: int) -> None:
    places = Permutation(size, seed=seed)(np.arange(size))
    assert places.dtype == np.int64
    assert (np.sort(places) == np.arange(size)).all()


def test_permutations_are_uniform_for_distant_and_near_rows() -> None:
    large = Permutation(4_195_197_692, seed=7)
    rows = np.array([0, 1, 2**31, 4_195_197_691])
    places = large(rows)
    assert len(set(places.tolist())) == 4
    assert (places < 4_195_197_692).all()
    assert (large(rows[::-1]) == places[::-1]).all()
    assert (Permutation(4_195_197_692, seed=8)(rows) != places).any()
    # chi-squared with 23 degrees of freedom: 49.7 at p = 0.001.
    tries = 12_000
    counts = Counter(
        tuple(Permutation(4, seed=seed)(np.arange(4)).tolist()) for seed in range(tries)
    )
    assert len(counts) == 24
    assert sum((count - tries / 24) ** 2 / (tries / 24) for count in counts.values()) < 49.7
    places = Permutation(1_000_000, seed=0)(np.arange(1_000_000))
    assert abs(np.corrcoef(np.arange(len(places)), places)[0, 1]) < 0.005
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.005
    steps = np.bincount(np.abs(np.diff(places)) * 20 // 1_000_000, minlength=20)
    expected = np.diff(1 - (1 - np.arange(21) / 20) ** 2) * 999_999  # of two independent places
    assert (np.abs(steps - expected) < 6 * np.sqrt(expected)).all()


def test_gather_runs_restores_positions(tmp_path: Path) -> None:
    places = np.random.default_rng(0).permutation(1000)
    lists = pa.array([[i] * (i % 3) for i in range(1000)], pa.large_list(pa.int32()))
    table = pa.table(
        {"lists": lists, "pairs": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2000)), 2)}
    )
    paths = []
    for number, start in enumerate(range(0, 1000, 250)):
        paths.append(str(tmp_path / f"{number}.arrow"))
        write_run(
            [table.slice(start, 100), table.slice(start + 100, 150)],
            places[start : start + 250],
            paths[-1],
        )
    for start, stop in (
        (0, 1000),
        (0, 1),
        (333, 650),
        (999, 1000),
    ):
        assert gather_runs(paths, start, stop).equals(
            table.take(pa.array(np.argsort(places)[start:stop]))
        )


def test_shuffle_moves_training_rows_only(log: Path, tmp_path: Path) -> None:
    plain = shuffled(log, tmp_path / "plain", shuffle="none")
    mixed = shuffled(log, tmp_path / "mixed")
    start, stop = mixed.sets["train"]
    assert (start, stop) == (0, 1000)
    before = keys(plain)
    after = keys(mixed)
    assert (before[stop:], sorted(before[:stop])) == (after[stop:], sorted(after[:stop]))
    assert [after[place] for place in Permutation(1000, seed=1)(np.arange(1000))] == before[:stop]
    sizes = [[(s.start, s.stop, s.rows) for s in made.index.segments] for made in (plain, mixed)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("format", WRITABLE_FORMATS)
def test_shuffle_matches_for_any_tasks(
    log: Path,
    tmp_path: Path,
    format: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = keys(shuffled(log, tmp_path / "expected"))
    for segments_per_task in (1, 4, 1000):
        made = shuffled(
            log,
            tmp_path / str(segments_per_task),
            format=format,
            segments_per_task=segments_per_task,
        )
        assert keys(made) == expected
    monkeypatch.setattr("rayrec.data.materialized.writer.MAX_SHUFFLE_TASKS", 2)
    assert keys(shuffled(log, tmp_path / "few", format=format, segments_per_task=1)) == expected
    assert keys(shuffled(log, tmp_path / "other", format=format, seed=2)) != expected


def test_gather_reads_needed_pages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 500_000
    places = np.random.default_rng(0).permutation(rows)
    path = str(tmp_path / "run.arrow")
    write_run([pa.table({"value": places})], places, path)
    allocated: list[int] = []

    def searchsorted(*arguments: Any) -> Any:
        allocated.append(pa.total_allocated_bytes())
        return np.searchsorted(*arguments)

    monkeypatch.setattr(
        write_tasks,
        "np",
        SimpleNamespace(**{**vars(np), "searchsorted": searchsorted}),
    )
    before = pa.total_allocated_bytes()
    assert gather_runs([path], 1000, 1100).column("value").to_pylist() == list(range(1000, 1100))
    assert len(allocated) == 1
    assert allocated[0] - before < 8 * rows // 4
