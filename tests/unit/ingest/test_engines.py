"""Ray and Spark as engines, without either."""

import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
import ray.data
from builders.faults import fails_with, rejects

from rayrec import storage
from rayrec.data.engine import StopToken, TaskPlacement
from rayrec.ingest import ray_engine, spark_engine
from rayrec.ingest.ray_engine import ConcurrencyLimits, RayEngine, _LimitPolicy, tasks_dataset
from rayrec.ingest.spark_engine import SparkConfig


def patience_of(item: int) -> pa.Table:
    return pa.table({"item": [item], "outage_s": [storage.outage_s()]})


@pytest.mark.parametrize(("max_outage_s", "waits_s"), [(None, 30.0), (900.0, 900.0), (0.0, 0.0)])
def test_task_outage_wait_follows_placement(
    monkeypatch: pytest.MonkeyPatch, max_outage_s: float | None, waits_s: float
) -> None:
    monkeypatch.setenv("RAYREC_STORAGE_OUTAGE_S", "30")
    monkeypatch.setattr(ray.data, "read_datasource", lambda source, **_: source)
    source: Any = tasks_dataset(
        "look", patience_of, [3, 4], placement=TaskPlacement(max_outage_s=max_outage_s)
    )
    found = [table.to_pylist() for task in source.get_read_tasks(2) for table in task()]
    assert found == [[{"item": item, "outage_s": waits_s}] for item in (3, 4)]


def test_datasets_have_task_memory_and_names_of_their_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(ray.data, "read_datasource", lambda *_, memory, **__: Mock(memory=memory))

    def tables(made: Mock) -> Iterator[None]:
        seen.append((*made.set_name.call_args.args, made.memory))
        yield None

    monkeypatch.setattr(ray_engine, "tables", tables)
    engine = RayEngine(TaskPlacement(memory_bytes=800), owner="demo_worker_1")
    next(engine.run("ingest", patience_of, [3]))
    assert seen == [("demo_worker_1_ingest", 800)]


def test_stream_limits_tasks_and_blocks(monkeypatch: Any) -> None:
    for changes, prefetch_blocks, limits in (
        (
            {},
            2,
            ConcurrencyLimits(tasks=8, blocks=10),
        ),  # all four CPUs of the cluster, twice
        (
            {"max_cpus": 2.0},
            0,
            ConcurrencyLimits(tasks=4, blocks=4),
        ),
        (
            {"max_cpus": 0.5, "num_cpus": 0.5},
            1,
            ConcurrencyLimits(tasks=2, blocks=3),
        ),
        (
            {"max_cpus": 0.7, "num_cpus": 1.0},
            2,
            ConcurrencyLimits(tasks=2, blocks=4),
        ),
        # the reader has three blocks
        (
            {"max_object_store_bytes": 9_999},
            2,
            ConcurrencyLimits(tasks=6, blocks=6),
        ),
        (
            {"max_object_store_bytes": 1_000},
            2,
            ConcurrencyLimits(tasks=1, blocks=1),
        ),
    ):
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
        assert (
            ConcurrencyLimits.compute(
                TaskPlacement(**changes), block_bytes=1_000, prefetch_blocks=prefetch_blocks
            )
            == limits
        )


def test_policy_blocks_tasks_without_room() -> None:
    def may_start(active: int, waiting: int) -> bool:
        state = SimpleNamespace(total_enqueued_output_blocks=lambda: waiting)
        policy = _LimitPolicy(
            None, defaultdict(lambda: state), None, limits=ConcurrencyLimits(tasks=3, blocks=5)
        )
        return policy.can_add_input(Mock(num_active_tasks=lambda: active))

    assert [may_start(active, 0) for active in range(5)] == [True, True, True, False, False]
    assert [may_start(1, waiting) for waiting in range(6)] == [True, True, True, True, False, False]


# -- What is said if Spark does not start, without Spark
@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Stands for a driver that waits for an executor."""
    process = subprocess.Popen(["sleep", "600"], text=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("raylet.err", r"FileNotFoundError: '-Dray\.address=1'"),
        ("raydp-java-worker-01000000-7.log", r"FileNotFoundError: '-Dray\.address=1'"),
        ("raylet.out", "are there CPUs and memory for its executors"),
    ],
)
def test_spark_start_timeout_names_ray_error(
    child: subprocess.Popen[str],
    log: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = tmp_path / "session" / "logs"
    logs.mkdir(parents=True)
    context = SimpleNamespace(
        get_temp_dir=lambda: str(tmp_path), get_session_name=lambda: "session"
    )
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where its log is kept
    (logs / "raylet.err").write_text("OldError: of another job\n")
    engine = spark_engine.SparkEngine(child, str(tmp_path), 0.01, spark_engine._ray_logs())
    with open(logs / log, "a") as file:
        file.write("Traceback\nFileNotFoundError: '-Dray.address=1'\n")
    assert "OldError" not in rejects(
        f"^Spark did not start in 0.01 s .*{said}.*Log: ", engine._await_start
    )


def test_spark_result_renamed_after_listing(tmp_path: Path) -> None:
    (tmp_path / "000000.arrow.17").touch()
    (entry,) = os.scandir(tmp_path)
    os.rename(entry, tmp_path / "000000.arrow")
    assert spark_engine._modified_s(entry) == 0


def test_spark_on_ray_rejects_missing_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("JAVA_HOME", "/usr/lib/jvm/java-17")
    starting = spark_engine.SparkEngine.started(
        SparkConfig(), ray_address="127.0.0.1:6379", cache_folder="", note=print
    )
    rejects("^engine spark-on-ray: needs Java 17, got no java on PATH", starting.__enter__)


# -- Streams of many pieces: a bounded number of tasks a Dataset; the next starts before the one
# before is read
class Datasets:
    """Stand-ins that note what is opened, read and closed, a table an item."""

    def __init__(self) -> None:
        self.opened: list[Sequence[int]] = []
        self.closed: list[Sequence[int]] = []

    def tables_of(self, group: Sequence[int]) -> Generator[pa.Table, None, None]:
        self.opened.append(group)
        try:
            for item in group:
                if item < 0:
                    raise ValueError("broken")
                yield pa.table({"item": [item]})
        finally:
            self.closed.append(group)


def items(tables: Iterator[pa.Table]) -> Iterator[int]:
    return (table["item"][0].as_py() for table in tables)


def test_datasets_start_early_and_close_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_EARLY_START_ITEMS", 2)
    datasets = Datasets()
    groups = [range(0, 5), range(5, 10), range(10, 12)]
    found = items(ray_engine._chain_groups(groups, datasets.tables_of, StopToken()))
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    assert datasets.opened == [range(0, 5)]
    assert next(found) == 3
    assert (next(found), next(found)) == (4, 5)
    assert (datasets.opened, datasets.closed) == ([range(0, 5), range(5, 10)], [range(0, 5)])
    assert list(found) == [*range(6, 12)]
    assert datasets.opened == datasets.closed == groups


def test_datasets_close_when_reading_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_EARLY_START_ITEMS", 2)
    datasets = Datasets()
    found = ray_engine._chain_groups([range(0, 2), range(2, 4)], datasets.tables_of, StopToken())
    next(found)
    found.close()
    assert (
        sorted(datasets.closed, key=min)
        == sorted(datasets.opened, key=min)
        == [range(0, 2), range(2, 4)]
    )


def test_errors_of_datasets_are_raised_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_EARLY_START_ITEMS", 2)
    found = items(ray_engine._chain_groups([[0, 1, 2], [-1, 3]], Datasets().tables_of, StopToken()))
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    fails_with(ValueError, "broken", next, found)
    assert list(ray_engine._chain_groups([], Datasets().tables_of, StopToken())) == []


def test_groups_of_items_start_small() -> None:
    groups = list(ray_engine._groups(range(4000)))
    assert [len(group) for group in groups] == [64, 256, 1024, 1024, 1024, 608]
    assert [item for group in groups for item in group] == list(range(4000))


@pytest.mark.parametrize(
    ("count", "first", "tasks"),
    [
        (1, 4, [[0]]),
        (3, 0, [[0, 1], [2]]),
        (5, 2, [[0], [1], [2, 3], [4]]),
        (4, 4, [[0], [1], [2], [3]]),
    ],
)
def test_first_tasks_have_one_item(count: int, first: int, tasks: list[list[int]]) -> None:
    assert [
        list(each) for each in ray_engine.group_items(range(count), first=first, size=2)
    ] == tasks


@pytest.mark.parametrize("rows", [(3,), (2, 0, 1), (0, 0)])
def test_merged_task_returns_table_per_item(rows: tuple[int, ...]) -> None:
    def table_of(item: int) -> pa.Table:
        values = [item * 10 + row for row in range(rows[item])]
        return pa.table(
            {"value": pa.array(values, pa.int64())},
            metadata={"made": f"by {item}"} if item else None,
        )

    expected = [table_of(item) for item in range(len(rows))]
    found = list(ray_engine.split_table(ray_engine.merge_tables(table_of, range(len(rows)))))
    assert found == expected
    assert [table.schema.metadata for table in found] == [
        table.schema.metadata for table in expected
    ]
