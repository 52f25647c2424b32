"""Counting categories through Ray: ours, Ray Data's own groupby, and plain pyarrow in one process; and what a lookup costs."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import ray
from logs import synthetic_log
from peers.ray_groupby import DENSE, SPARSE, distinct_tokens
from rows import emit, interleaved, say, timed

from rayrec.data.counting import count_log
from rayrec.data.ingest import open_log
from rayrec.data.log import select
from rayrec.data.placement import TaskPlacement
from rayrec.data.position import Part
from rayrec.data.preprocessor import Preprocessor, SparseColumn
from rayrec.datasets.criteo import SCHEMA
from rayrec.launch import cluster
from rayrec.native import library
from rayrec.schema import Schema


def counting_rate(path: str) -> float:
    """Rows/s of the counting pass, index included."""
    placement = TaskPlacement()

    def count() -> int:
        index = open_log(
            path,
            SCHEMA,
            segment_bytes=2 << 20,
            placement=placement,
            cache_folder=f"{path}-{time.time_ns()}.cache",  # a new one: the index pass belongs to the figure
            note=say,
            progress=lambda *_: None,
        )
        parts = [Part(segment, start, stop) for segment, start, stop in select(index, 0, index.rows)]
        return count_log(SCHEMA, parts, placement=placement, parts_per_task=8).rows

    rows, seconds = timed(count)
    return rows / seconds


def groupby_rate(path: str, rows: int) -> float:
    _, seconds = timed(lambda: distinct_tokens(path))
    return rows / seconds


def arrow_rate(path: str, rows: int) -> float:
    """Rows/s of pyarrow's reader and value_counts on one core, without Ray."""
    types = {name: pa.int64() for name in ["label", *DENSE]} | {name: pa.string() for name in SPARSE}

    def count() -> int:
        table = arrow_csv.read_csv(
            path,
            read_options=arrow_csv.ReadOptions(column_names=["label", *DENSE, *SPARSE], use_threads=False),
            parse_options=arrow_csv.ParseOptions(delimiter="\t"),
            convert_options=arrow_csv.ConvertOptions(column_types=types),
        )
        return sum(len(table.column(name).value_counts()) for name in SPARSE)

    _, seconds = timed(count)
    return rows / seconds


def lookup_ns(entries: int) -> float:
    """Nanoseconds a lookup in a table of so many tokens, on one core, best of five."""
    random = np.random.default_rng(0)
    tokens = (random.permutation(entries).astype(np.uint64) * 2654435761 % (1 << 32)).astype(np.uint32)
    tokens = np.unique(tokens)
    schema = Schema(label=None, dense=(), sparse=("token",))
    preprocessor = Preprocessor.build(
        profile="benchmark",
        schema=schema,
        dense=[],
        sparse=[SparseColumn(len(tokens) + 2, len(tokens))],
        tokens=tokens,
        constants={},
    )
    wanted, found = random.choice(tokens, 4_000_000), np.empty(4_000_000, np.int32)
    columns = preprocessor.c_sparse_columns()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        library().rayrec_look_up(
            ctypes.c_void_p(wanted.ctypes.data),
            ctypes.c_int64(len(wanted)),
            columns,
            ctypes.c_void_p(found.ctypes.data),
        )
        best = min(best, time.perf_counter() - start)
    assert (tokens[found - 2] == wanted).all()
    return best / len(wanted) * 1e9


def main(*, quick: bool) -> None:
    cluster.connect(None, num_cpus=2, object_store_bytes=2 << 30, log_to_driver=False)
    rows = 200_000 if quick else 800_000
    path = synthetic_log(rows)
    repeats = 1 if quick else 3
    counting_rate(path)  # starts Ray's workers
    rates = interleaved(
        repeats,
        ours=lambda: counting_rate(path),
        groupby=lambda: groupby_rate(path, rows),
        arrow=lambda: arrow_rate(path, rows),
    )
    workload = f"index and count 26 columns of {rows:,} Criteo rows, 2 CPUs"
    for peer, name in (("Ray Data groupby", "groupby"), ("pyarrow on one core, without Ray", "arrow")):
        emit(
            "vocabulary",
            peer=peer,
            workload=workload,
            value=rates["ours"],
            ratio=rates["ours"] / rates[name],
            repeats=repeats,
            peer_rows_per_s=round(rates[name]),
        )
    for entries in (40_000,) if quick else (40_000, 40_000_000):
        nanoseconds = lookup_ns(entries)
        emit(
            "vocabulary",
            peer=None,
            workload=f"lookup, {entries:,} tokens",
            unit="ns",
            value=nanoseconds,
            ratio=None,
            repeats=5,
        )
    ray.shutdown()
