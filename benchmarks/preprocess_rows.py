"""Benchmark of preprocessing raw TSV: every format, bytes written relative to a plain copy, one
core and two, one Ray node and two.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import ray
from logs import synthetic_log
from ray.cluster_utils import Cluster
from rows import attempt, emit, interleaved, note, timed

import rayrec
from rayrec.cluster import connection
from rayrec.observe.console import Console

MEMORY = "/dev/shm"
FULL_ROWS = 4_373_472_329
"""Rows of all 24 days of Criteo 1TB."""


@contextmanager
def local(num_cpus: int) -> Iterator[None]:
    connection.connect(None, num_cpus=num_cpus, object_store_bytes=2 << 30, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def two_nodes() -> Iterator[None]:
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 1 << 30}
    )
    nodes.add_node(num_cpus=1, object_store_memory=1 << 30)
    nodes.wait_for_nodes()
    connection.connect(nodes.address, num_cpus=None, object_store_bytes=None, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


def rate(path: str, preprocessor: str, format: str, *, target: str | None = None) -> float:
    with tempfile.TemporaryDirectory(dir=target or os.path.dirname(path)) as folder:
        result = rayrec.preprocess(
            path,
            out=os.path.join(folder, "out"),
            format=format,  # type: ignore[arg-type]
            preprocessor=preprocessor,
            console=Console(quiet=True),
        )
    return result["rows_per_s"]


def scaled_rate(
    cluster_of: Callable[[], AbstractContextManager[None]],
    repeats: int,
    path: str,
    preprocessor: str,
) -> Any:
    """Measure the median rows/s on this cluster."""
    with cluster_of():
        rate(path, preprocessor, "binary", target=MEMORY)  # warms up
        return interleaved(
            repeats, binary=lambda: rate(path, preprocessor, "binary", target=MEMORY)
        )["binary"]


def copy_rate(path: str, row_bytes: int, rows: int) -> float:
    """Measure the rows/s of copying as many bytes from one file to another, synced."""
    source = path + ".copy-source"
    target = path + ".copy-target"
    with open(path, "rb") as read, open(source, "wb") as write:
        write.write(read.read(row_bytes * rows))

    def copy() -> int:
        with open(source, "rb") as read, open(target, "wb") as write:
            shutil.copyfileobj(read, write, 8 << 20)
            write.flush()
            os.fsync(write.fileno())
        return os.path.getsize(target)

    size, seconds = timed(copy)
    os.remove(source)
    os.remove(target)
    return size / row_bytes / seconds


def main(*, quick: bool) -> None:
    rows = 500_000 if quick else 3_000_000
    path = synthetic_log(rows)
    repeats = 1 if quick else 3
    preprocessor = os.path.join(os.path.dirname(path), "preprocessor-of-all")
    with local(2):
        if not os.path.exists(preprocessor):
            rayrec.vocabulary(path, out=preprocessor, min_count=5, console=Console(quiet=True))
        rate(path, preprocessor, "binary")  # starts Ray's workers, indexes the log
        rates = interleaved(
            repeats,
            binary=lambda: rate(path, preprocessor, "binary"),
            npy=lambda: rate(path, preprocessor, "npy"),
            parquet=lambda: rate(path, preprocessor, "parquet"),
            copy=lambda: copy_rate(path, 160, rows),
        )
    for format in ("binary", "npy", "parquet"):
        emit(
            "preprocess",
            peer="copying 160 bytes a row to the same disk",
            workload=f"criteo kaggle TSV, indexed -> {format}, 2 CPUs",
            value=rates[format],
            ratio=rates[format] / rates["copy"],
            repeats=repeats,
            peer_rows_per_s=round(rates["copy"]),
        )
    # The disk limits the rates above, so measure scaling with files in memory.
    note("scaling:")
    scaled: dict[str, Any] = {}
    for name, cluster_of in (
        ("one", lambda: local(1)),
        ("two", lambda: local(2)),
        ("nodes", two_nodes),
    ):
        scaled[name] = attempt(name, partial(scaled_rate, cluster_of, repeats, path, preprocessor))
    for workload, peer, name, other in (
        ("one node, 2 CPUs", "one node, 1 CPU", "two", "one"),
        ("two nodes, 1 CPU each", "one node, 2 CPUs", "nodes", "two"),
    ):
        emit(
            "preprocess",
            peer=peer,
            workload=f"criteo kaggle TSV, indexed -> binary in memory, {workload}",
            value=scaled[name],
            ratio=scaled[name] / scaled[other],
            repeats=repeats,
            peer_rows_per_s=round(scaled[other]),
        )
    emit(
        "preprocess",
        peer=None,
        workload=(
            f"{FULL_ROWS:,} rows (Criteo 1TB) to binary on 64 cores, if 32 times as fast as two "
            "here, disks apart"
        ),
        unit="minutes",
        value=FULL_ROWS / (32 * scaled["two"]) / 60,
        ratio=None,
        repeats=repeats,
        bytes_read=FULL_ROWS * 243,
        bytes_written=FULL_ROWS * 160,
    )
