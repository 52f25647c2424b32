"""From log files through Ray Data to batches, as a training run does it, on a local Ray."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from builders.faults import rejects
from builders.golden import check_golden
from builders.golden_outputs import digests, output_makers, predictions
from builders.logs import open_index, rows_of

from rayrec import storage
from rayrec.data.encoding.counts import count_log
from rayrec.data.encoding.preprocessor import Preprocessor, put_preprocessor
from rayrec.data.encoding.presets import RAYREC, make_preprocessor
from rayrec.data.engine import InProcess, Shared, TaskContext, TaskPlacement, ThreadEngine
from rayrec.data.log_source import index_log
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.text_parser import parse
from rayrec.datasets.criteo import SCHEMA
from rayrec.ingest.batches import ClickBatches
from rayrec.ingest.block_order import BatchSharding, BlockOrder
from rayrec.ingest.loader import Loader
from rayrec.ingest.ray_engine import RayEngine
from rayrec.ingest.stream import TaskSource
from rayrec.schema import RowSample
from rayrec.workloads.recsys.row_sample import sample_order

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

PLACEMENT = TaskPlacement(max_object_store_bytes=50_000_000)
SEGMENT_BYTES = 1 << 17
Row = tuple[bytes, ...]
MakeLoader = Callable[..., Loader[Any, Any]]


def open_here(path: Path, folder: Path, note: Callable[[str], None] = lambda _: None) -> LogIndex:
    return open_index(
        path,
        segment_bytes=SEGMENT_BYTES,
        engine=RayEngine(PLACEMENT),
        cache=folder / "cache",
        note=note,
    )


@pytest.fixture(scope="module")
def index(click_log: Path, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> LogIndex:
    return open_here(click_log / "train.txt", tmp_path_factory.mktemp("index"))


def counts_of(index: LogIndex) -> Any:
    return count_log(
        RAYREC.counting(SCHEMA), tuple(index.parts(0, index.rows)), engine=RayEngine(PLACEMENT)
    )


@pytest.fixture(scope="module")
def preprocessor(index: LogIndex) -> Preprocessor:
    return make_preprocessor(RAYREC, SCHEMA, counts_of(index))


@pytest.fixture(scope="module")
def shared(preprocessor: Preprocessor) -> ray.ObjectRef:
    return put_preprocessor(preprocessor, RayEngine(PLACEMENT))


def order_of(index: LogIndex, shuffle: str = "none", segments_per_block: int = 4) -> BlockOrder:
    return BlockOrder(tuple(index.parts(0, index.rows)), shuffle, 5, segments_per_block)


def loader_of(
    order: BlockOrder,
    shared: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int = 777,
    **changes: Any,
) -> Loader[Any, Any]:
    reader = ClickBatches(
        TaskSource(shared, RayEngine(PLACEMENT), SCHEMA, order.max_block_rows), SCHEMA
    )
    return Loader(
        order, reader, BatchSharding(rank, world_size, batch_size), **{"epochs": 1, **changes}
    )


@pytest.fixture(scope="module")
def make_loader(index: LogIndex, shared: Shared[Preprocessor]) -> MakeLoader:
    return partial(loader_of, order_of(index, "window"), shared)


@pytest.fixture(scope="module")
def expected(click_log: Path, preprocessor: Preprocessor) -> Counter[Row]:
    raw, faults = parse(SCHEMA, (click_log / "train.txt").read_bytes())
    assert (raw.rows, faults.total) == (20_000, 0)
    return Counter(rows_of(preprocessor.encode(raw)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_workers_read_each_row_once(
    make_loader: MakeLoader, expected: Counter[Row], world_size: int
) -> None:
    batches = [list(make_loader(rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert len({len(rank_batches) for rank_batches in batches}) == 1
    for step_batches in zip(*batches, strict=True):
        assert sum(
            batch.loss_weight * len(batch) / world_size for batch in step_batches
        ) == pytest.approx(1)
    assert (
        Counter(row for rank_batches in batches for batch in rank_batches for row in rows_of(batch))
        == expected
    )


def test_run_resumes_with_same_batches(make_loader: MakeLoader) -> None:
    settings = {
        "epochs": 2,
        "batch_size": 1500,
        "rank": 1,
        "world_size": 2,
        "max_steps": 10,
    }
    first = make_loader(**settings)
    whole = []
    states = [first.state()]
    for batch in first:
        whole.append(rows_of(batch))
        states.append(first.state())
    assert len(whole) == 10
    for step in (3, 7, 8):  # in the first epoch, at its end, in the second
        again = make_loader(**{**settings, "max_steps": 10 - step}, state=states[step])
        assert [rows_of(batch) for batch in again] == whole[step:]
    assert states[7]["epoch"] == 1


def test_ray_and_threads_read_same_sample(
    index: LogIndex, preprocessor: Preprocessor, shared: Any, tmp_path: Path
) -> None:
    found = []
    for name, engine in (("ray", RayEngine(PLACEMENT)), ("threads", ThreadEngine(2))):
        folder = tmp_path / name
        folder.mkdir()
        order = sample_order(
            order_of(index, "window"),
            index,
            RowSample(label=0, keep=0.1),
            schema=SCHEMA,
            engine=engine,
            folder=str(folder),
        )
        preprocessors = shared if name == "ray" else InProcess(preprocessor)
        source = TaskSource(preprocessors, engine, SCHEMA, order.max_block_rows)
        loader = Loader(order, ClickBatches(source, SCHEMA), BatchSharding(0, 1, 777), epochs=1)
        found.append([rows_of(batch) for batch in loader])
    assert found[0] == found[1]
    assert 0 < sum(map(len, found[0])) < 0.6 * index.rows


def test_index_numbers_all_rows_and_is_cached(click_log: Path, tmp_path: Path) -> None:
    files = storage.list_files(str(click_log / "train.txt"))
    done: list[int] = []
    context = TaskContext(
        RayEngine(PLACEMENT), str(tmp_path), progress=lambda label, size, total: done.append(size)
    )
    made = index_log(files, SCHEMA, segment_bytes=SEGMENT_BYTES, context=context)
    assert made.rows == 20_000
    assert done[-1] == made.size_bytes == files[0].size_bytes
    done.clear()
    assert index_log(files, SCHEMA, segment_bytes=SEGMENT_BYTES, context=context) == made
    assert not done  # read back
    assert len(os.listdir(tmp_path)) == 1


def test_changed_log_stops_run(
    click_log: Path, tmp_path: Path, shared: Shared[Preprocessor]
) -> None:
    path = tmp_path / "log.txt"
    text = b"".join((click_log / "train.txt").read_bytes().splitlines(keepends=True)[:1000])
    path.write_bytes(text)
    index = open_here(path, tmp_path)
    path.write_bytes(text[:-5000])
    loader = loader_of(order_of(index), shared)
    rejects(
        r"log\.txt: bytes .* changed since the log was indexed; .* --name$", lambda: list(loader)
    )
    rejects(r"log\.txt: bytes .* changed since ", counts_of, index)


def test_tasks_run_on_all_cpus(tmp_path: Path) -> None:
    """Each task but the last to begin waits until another has begun, which on one CPU none
    would.
    """
    num_tasks = 8

    def meet(item: int) -> pa.Table:
        begun = 0
        while True:
            try:
                os.close(os.open(tmp_path / str(begun), os.O_CREAT | os.O_EXCL))
                break
            except FileExistsError:
                begun += 1
        deadline_s = time.monotonic() + 120
        while (
            not (met := begun == num_tasks - 1 or (tmp_path / str(begun + 1)).exists())
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.02)
        return pa.table({"met": [met]})

    found = [
        table.to_pylist()[0]
        for table in RayEngine(TaskPlacement()).run("meet", meet, list(range(num_tasks)))
    ]
    assert found == [{"met": True}] * num_tasks


def test_ray_data_keeps_no_statistics_of_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is a thread in every process that, by printing stacks, makes others fail, and an actor
    in the cluster.
    """
    # as `ray start` does, and a Ray of one process does not
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    (table,) = RayEngine(TaskPlacement()).run("one", lambda item: pa.table({"item": [item]}), [0])
    assert table.num_rows == 1
    assert not [thread.name for thread in threading.enumerate() if "usage" in thread.name]
    assert not [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if "usage" in actor["name"]
    ]


# -- What commands write if Ray does the work: the bytes that threads write
@pytest.mark.extended
@pytest.mark.usefixtures("own_cache")
def test_outputs_of_ray_are_golden(tmp_path: Path) -> None:
    """One output of each command and of each way to write it: the others are the threads'."""
    (tmp_path / "scored").mkdir()
    makers = output_makers(tmp_path)
    for name in (
        "npy, shuffled",
        "parquet of lists",
        "split by rows",
        "split by last-out",
        "text by characters",
    ):
        makers[name](tmp_path / name, "ray")
        check_golden("outputs", digests(tmp_path / name, root=tmp_path), case=name)
    check_golden(
        "predictions_own", predictions("own", tmp_path / "scored", address="local"), tolerance=1e-4
    )
