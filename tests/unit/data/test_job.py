"""Resumable jobs: the folder is complete or absent, resumed after a kill, and never written by two
processes.
"""

import errno
import functools
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from builders.engines import Died, LoopEngine
from builders.faults import at_first, fails_with, raising, rejects, until

from rayrec import storage
from rayrec.config import InputError
from rayrec.data import stage_times
from rayrec.data.engine import Engine, StreamEngine, ThreadEngine, grouped
from rayrec.data.job import COMPLETE, JobFolder, resumable_job
from rayrec.data.stage_times import (
    STAGES,
    BlockTimes,
    StageTimes,
    measured,
    read_times,
    stage,
    with_times,
)
from rayrec.storage.range_reader import in_order

MADE_OF: dict[str, Any] = {"checkpoint": "a", "input": ["log", 3]}
ITEMS = [SimpleNamespace(number=number) for number in range(5)]


def _write(item: SimpleNamespace, *, folder: JobFolder) -> pa.Table:
    folder.require()
    storage.write_bytes(storage.join(folder.path, f"file-{item.number}"), b"%d" % item.number)
    return folder.done("write", item.number, {"square": item.number**2})


def _make(out: str, *, last_file: str | None, engine: LoopEngine | None = None) -> None:
    with resumable_job(out, MADE_OF, last_file=last_file) as job:
        list(
            job.run(
                "write",
                functools.partial(_write, folder=job.folder),
                ITEMS,
                engine or LoopEngine(),
            )
        )
        if last_file is not None:
            storage.write_bytes(storage.join(job.folder.path, last_file), b"whole")


def _begun(out: str, *, last_file: str | None = None, names: tuple[str, ...] = ("a",)) -> Any:
    """Enter a context in which one task is finished."""
    context = resumable_job(out, MADE_OF, last_file=last_file)
    job = context.__enter__()
    for name in names:
        storage.write_bytes(storage.join(job.folder.path, name), name.encode())
    job.folder.done("write", 0, {})
    return context


@pytest.mark.parametrize("place", ["", "file://"])
@pytest.mark.parametrize("last_file", ["last", None])
@pytest.mark.parametrize("tasks", range(5))
def test_job_resumes_after_kill(
    tmp_path: Path,
    place: str,
    last_file: str | None,
    tasks: int,
) -> None:
    out = f"{place}{tmp_path}/out"
    engine = LoopEngine()
    progress = []
    fails_with(Died, "", _make, out, last_file=last_file, engine=LoopEngine(tasks))
    appears_early = place == "file://" and last_file is not None
    assert storage.exists(out) == (appears_early and tasks > 0)

    def on_progress(*counts: int) -> None:
        progress.append(counts)

    with resumable_job(out, MADE_OF, last_file=last_file) as job:
        assert job.resumed == (tasks > 0)
        assert list(job.finished("write", ITEMS)) == list(range(tasks))
        task = functools.partial(_write, folder=job.folder)
        found = list(job.run("write", task, ITEMS, engine, on_progress))
    assert engine.tasks == 5 - tasks
    assert [each["square"] for each in found] == [0, 1, 4, 9, 16]
    assert progress == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    files = {f"file-{number}" for number in range(5)}
    if place and last_file is None:
        files.add(COMPLETE)
    assert set(storage.list_folder(out)) == files
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("place", ["", "file://"])
@pytest.mark.parametrize("last_file", ["last", None])
def test_job_rejects_complete_folder(tmp_path: Path, place: str, last_file: str | None) -> None:
    _make(f"{place}{tmp_path}/out", last_file=last_file)
    rejects(
        r"out: exists already; remove it or choose another place",
        _make,
        f"{place}{tmp_path}/out",
        last_file=last_file,
    )


def test_files_of_killed_tasks_are_removed(tmp_path: Path) -> None:
    with resumable_job(str(tmp_path / "out"), MADE_OF, last_file="last") as job:
        inside = Path(job.folder.path, "train")
        inside.mkdir()
        (inside / f"shard.{'0f' * 16}.partial").write_text("of a killed task")
        (inside / "shard").write_text("whole")
    assert os.listdir(tmp_path / "out" / "train") == ["shard"]


def test_partial_folder_is_kept_after_first_task(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    failed = resumable_job(out, MADE_OF, last_file=None)
    Path(failed.__enter__().folder.path, "prepared").write_text("1")
    assert not failed.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not os.listdir(tmp_path)
    assert not _begun(out).__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    other = resumable_job(out, {**MADE_OF, "input": ["log", 4]}, last_file=None)
    rejects(
        r"incomplete output of a call with a different input; use the same .* remove that",
        other.__enter__,
    )
    with resumable_job(out, MADE_OF, last_file=None) as job:
        assert Path(job.folder.path, "a").read_text() == "a"
    assert (os.listdir(tmp_path), os.listdir(out)) == (["out"], ["a"])


@pytest.mark.parametrize("place", ["", "file://"])
def test_job_without_finished_tasks_restarts(tmp_path: Path, place: str) -> None:
    work = tmp_path / ("out" if place else "out.partial")
    (work / "_job" / "keys").mkdir(parents=True)
    (work / "half").mkdir()
    (work / "a").write_text("1")
    (work / "_job" / "made_of.json").write_text('{"input": "another"}')
    with resumable_job(f"{place}{tmp_path}/out", MADE_OF, last_file="last") as job:
        assert not job.resumed
        assert storage.read_json(job.folder.aid("made_of.json")) == MADE_OF
    assert not os.listdir(tmp_path / "out")


@pytest.mark.parametrize("place", ["", "file://"])
def test_job_rejects_foreign_folder(tmp_path: Path, place: str) -> None:
    work = tmp_path / ("out" if place else "out.partial")
    work.mkdir()
    (work / "a").write_text("1")
    job = resumable_job(f"{place}{tmp_path}/out", MADE_OF, last_file="last")
    rejects(r"out(\.partial)?: has files, but no _job/made_of\.json", job.__enter__)
    assert (work / "a").read_text() == "1"


@pytest.mark.parametrize("killed_at", ["rename", "remove"])
def test_kill_while_folder_appears(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: str,
) -> None:
    out = tmp_path / "out"
    killed = _begun(str(tmp_path / "out"))
    with monkeypatch.context() as patch:
        patch.setattr(
            *{"rename": (os, "rename"), "remove": (storage, "remove_folder")}[killed_at],
            raising(KeyboardInterrupt()),
        )
        fails_with(KeyboardInterrupt, "", killed.__exit__, None, None, None)
    if killed_at == "remove":
        assert (out / "a").read_text() == "a"
        return
    with resumable_job(str(out), MADE_OF, last_file=None) as job:
        assert job.resumed
    assert os.listdir(out) == ["a"]


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_job_resumes_copy_to_url(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    copies: int,
) -> None:
    """Killed after some of two files, or after both, before the job's inputs are removed."""
    url = f"file://{tmp_path}/out"
    copy = storage.copy_file
    done = []

    def copy_some(source: str, target: str) -> None:
        if len(done) == copies:
            raise KeyboardInterrupt
        done.append(copy(source, target))

    killed = _begun(url, names=("a", "b"))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "copy_file", copy_some)
        if copies == 2:
            patch.setattr(storage, "remove_file", lambda path: copy_some(path, path))
        fails_with(KeyboardInterrupt, "", killed.__exit__, None, None, None)
    assert (COMPLETE in storage.list_folder(url)) == (copies == 2)
    with resumable_job(url, MADE_OF, last_file=None) as job:
        assert job.resumed
    assert storage.list_folder(url) == [COMPLETE, "a", "b"]
    assert storage.read_json(storage.join(url, COMPLETE)) == {"files": ["a", "b"]}
    assert os.listdir(tmp_path) == ["out"]


def test_job_resumes_removal_after_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/out"
    killed = _begun(url)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove_folder", raising(KeyboardInterrupt()))
        fails_with(KeyboardInterrupt, "", killed.__exit__, None, None, None)
    rejects("exists already", resumable_job(url, MADE_OF, last_file=None).__enter__)
    shutil.rmtree(tmp_path / "out")
    rejects(
        r"out\.partial: has files, but no _job/made_of\.json",
        resumable_job(url, MADE_OF, last_file=None).__enter__,
    )


def test_job_rejects_second_writer(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with resumable_job(out, MADE_OF, last_file=None):
        rejects(
            "another process is writing there",
            resumable_job(out, MADE_OF, last_file=None).__enter__,
        )


def test_job_errors_name_fix_and_are_raised_while_tasks_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = JobFolder(str(tmp_path / "gone"))
    rejects(r"gone: not visible to tasks on .*choose an --out that all nodes share", folder.require)
    with (
        pytest.raises(
            InputError,
            match=r"gone: No space left .*make room there and run the same command",
        ),
        folder.disk_errors(),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), folder.disk_errors():
        raise PermissionError(errno.EPERM, "no")
    monkeypatch.setattr(
        storage,
        "remove_folder",
        at_first([OSError(errno.ENOTEMPTY, "not empty")] * 2, storage.remove_folder),
    )
    with (
        pytest.raises(InputError, match=r"^bad rows$"),
        resumable_job(str(tmp_path / "out"), MADE_OF, last_file="last"),
    ):
        raise InputError("bad rows")
    assert os.listdir(tmp_path) == []


# -- Data tasks in threads: order, prefetching and shutdown
def table(value: float) -> pa.Table:
    return pa.table({"value": [value]})


def values(tables: Iterator[pa.Table]) -> list[float]:
    return [each["value"][0].as_py() for each in tables]


def stream(
    function: Callable[[Any], pa.Table],
    items: range,
    *,
    num_threads: int = 2,
    prefetch: int = 1,
) -> Generator[Any]:
    return ThreadEngine(num_threads).stream(
        "stream",
        function,
        items,
        block_bytes=1,
        prefetch_blocks=prefetch,
    )


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_results_are_in_item_order() -> None:
    behind = threading.Event()

    def task(item: int) -> pa.Table:
        if item == 0:
            assert behind.wait(30)
        if item == 3:
            behind.set()
        return table(item)

    assert values(stream(task, range(10), num_threads=2, prefetch=3)) == [*range(10)]
    engine: Engine = ThreadEngine(4)
    assert isinstance(engine, StreamEngine)
    assert engine.cpus == 4.0
    assert values(engine.run("run", task, range(10))) == [*range(10)]
    assert values(engine.run("run", task, [])) == []
    value = [1]
    assert engine.share(value).get() is value


@pytest.mark.parametrize(("num_threads", "prefetch"), [(1, 0), (1, 2), (2, 1), (3, 4)])
def test_in_order_limits_prefetch(num_threads: int, prefetch: int) -> None:
    """With a slow reader, the number of unread values reaches the limit and never exceeds it."""
    lock = threading.Lock()
    begun = 0
    read = 0
    running = 0
    most_unread = most_running = 0

    def task(item: int) -> int:
        nonlocal begun, running, most_unread, most_running
        with lock:
            begun, running = begun + 1, running + 1
            most_unread, most_running = max(most_unread, begun - read), max(most_running, running)
        time.sleep(0.001)
        with lock:
            running -= 1
        return item

    reading = in_order(
        task,
        range(20),
        name="bounded",
        num_threads=num_threads,
        prefetch=prefetch,
    )
    assert begun == 0  # nothing runs before it is read
    for expected in range(20):
        assert next(reading) == expected
        # What the reader just took is counted as unread until it is back for more.
        due = min(20, expected + num_threads + prefetch)
        until(lambda due=due: begun >= due, timeout_s=30, pause_s=0.0005)
        with lock:
            read = expected  # the value that the reader holds
    assert most_unread <= num_threads + prefetch + 1
    assert begun == 20
    assert 1 <= most_running <= num_threads
    assert next(reading, None) is None


def test_in_order_raises_error_in_place() -> None:
    started: list[int] = []
    failed = InputError("day_3: no such file; give another")

    def task(item: int) -> pa.Table:
        started.append(item)
        if item == 2:
            raise failed
        return table(item)

    reading = stream(task, range(1000), num_threads=2, prefetch=1)
    assert values(iter([next(reading), next(reading)])) == [0, 1]
    with pytest.raises(InputError) as raised:
        next(reading)
    assert raised.value is failed  # neither wrapped nor pickled
    assert max(started) <= 4
    assert not threads_named("stream")
    assert list(reading) == []


def test_closing_stream_ends_threads() -> None:
    started: list[int] = []

    def task(item: int) -> pa.Table:
        started.append(item)
        return table(item)

    reading = stream(task, range(1000))
    next(reading)
    assert threads_named("stream")
    reading.close()
    assert not threads_named("stream")
    count = len(started)
    assert count <= 4
    time.sleep(0.01)
    assert len(started) == count


@pytest.mark.parametrize(("max_outage_s", "expected"), [(7.5, 7.5), (None, 12.0)])
def test_tasks_apply_engine_outage_limit(max_outage_s: float | None, expected: float) -> None:
    def task(item: int) -> pa.Table:
        return table(storage.outage_s())

    engine = ThreadEngine(2, max_outage_s=max_outage_s)
    with storage.retry_timeout(12.0):
        running = engine.run("patience", task, range(3))
        streaming = engine.stream("patience", task, range(3), block_bytes=1, prefetch_blocks=1)
    with storage.retry_timeout(1.0):
        assert values(running) == values(streaming) == [expected] * 3
        assert storage.outage_s() == 1.0


# -- Times of stages and blocks
def test_stages_are_measured_per_thread() -> None:
    def make() -> list[int]:
        with stage("read"):
            time.sleep(0.03)
        for _ in range(2):
            with stage("parse"):
                end_s = time.thread_time() + 0.01
                while time.thread_time() < end_s:
                    pass
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        return [1, 2, 3]

    def elsewhere() -> None:
        with stage("encode"):
            pass

    begin_s = time.time()
    made, times = measured(make, rows_of=len)
    assert (made, times.rows) == ([1, 2, 3], 3)
    assert times.wall_s.keys() == times.cpu_s.keys() == times.queue_s.keys() == {"read", "parse"}
    assert times.wall_s["read"] >= 0.03
    assert times.cpu_s["read"] < 0.02
    assert times.cpu_s["parse"] >= 0.02
    assert begin_s <= times.done_s <= time.time()


def test_queueing_is_measured_per_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads, for each of which the kernel reports 1 ms more queueing at every poll."""
    owners = dict[int, int]()
    looks = Counter[int]()
    barrier = threading.Barrier(8)
    open_file = stage_times.os.open
    close_file = stage_times.os.close

    def opened(path: str, flags: int) -> int:
        assert path == "/proc/thread-self/schedstat"
        owners[descriptor := open_file(os.devnull, flags)] = threading.get_ident()
        return descriptor

    def read(descriptor: int, size: int, offset: int) -> bytes:
        assert owners[descriptor] == threading.get_ident()
        looks[descriptor] += 1
        return b"7 %d 3\n" % (looks[descriptor] * 1_000_000)

    def closed(descriptor: int) -> None:
        del owners[descriptor]
        close_file(descriptor)

    def make() -> None:
        for _ in range(5):
            with stage("read"):
                barrier.wait()

    monkeypatch.setattr(
        stage_times,
        "os",
        SimpleNamespace(
            open=opened,
            pread=read,
            close=closed,
            O_RDONLY=os.O_RDONLY,
        ),
    )
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda _: measured(make, rows_of=lambda _: 1)[1].queue_s["read"], range(8))
        )
    assert found == [pytest.approx(0.005)] * 8
    assert [*looks.values()] == [10] * 8
    assert not owners


@pytest.mark.skipif(
    not os.path.exists("/proc/thread-self/schedstat"),
    reason="the kernel does not report queueing",
)
def test_schedstat_increases() -> None:
    clock = stage_times._Clock()
    before = clock.now()
    end_s = time.thread_time() + 0.005
    while time.thread_time() < end_s:
        pass
    after = clock.now()
    clock.close()
    assert all(late >= early for early, late in zip(before, after, strict=True))
    assert after[1] > before[1]
    assert after[2] < 3600  # seconds


def test_stage_needs_measured_and_metadata_round_trips() -> None:
    with stage("read"):
        pass

    def fail() -> None:
        with stage("read"):
            raise RuntimeError("no storage")

    fails_with(RuntimeError, "no storage", measured, fail, rows_of=lambda _: 0)
    _, times = measured(lambda: None, rows_of=lambda _: 0)
    assert times.wall_s == {}
    table = pa.table({"a": [1, 2]}).replace_schema_metadata({b"other": b"kept"})
    assert read_times(table) is None
    times = BlockTimes(2, {"read": 0.5}, {"read": 0.25}, {"read": 0.125}, 1_790_000_000.0, "node-1")
    carried = with_times(table, times)
    assert read_times(carried) == times
    assert carried.schema.metadata[b"other"] == b"kept"
    assert carried.equals(table)


def test_stage_times_sum_until_taken() -> None:
    account = StageTimes(cpus=1.5)
    ready_s = time.time() - 2
    account.add(
        BlockTimes(
            100,
            {"read": 1.0, "parse": 2.0},
            {"read": 0.5, "parse": 2.0},
            {"read": 0.1, "parse": 0.0},
            ready_s,
        )
    )
    # another node's clock
    account.add(BlockTimes(50, {"read": 1.0}, {"read": 0.5}, {"read": 0.2}, time.time() + 100))
    most_s = time.time() - ready_s
    sums = dict(zip(StageTimes.FIELDS, account.take(), strict=True))
    assert (sums["cpus"], sums["rows"], sums["blocks"]) == (1.5, 150, 2)
    assert (
        sums["read_wall_s"],
        sums["read_cpu_s"],
        sums["parse_wall_s"],
        sums["encode_wall_s"],
    ) == (2.0, 1.0, 2.0, 0.0)
    assert sums["read_queue_s"] == pytest.approx(0.3)
    assert 200 <= sums["waited_row_s"] <= 100 * most_s
    assert 2 <= sums["waited_block_s"] <= most_s
    assert dict(zip(StageTimes.FIELDS, account.take(), strict=True)) == {
        **dict.fromkeys(StageTimes.FIELDS, 0.0),
        "cpus": 1.5,
    }
    assert len(STAGES) == 3


@pytest.mark.parametrize(
    ("sizes", "limits", "expected"),
    [
        pytest.param([3, 3, 3], {"max_bytes": 6}, [[3, 3], [3]], id="full"),
        pytest.param([9, 1, 2], {"max_bytes": 6}, [[9], [1, 2]], id="larger item"),
        pytest.param([0, 0, 0], {"max_bytes": 6, "max_items": 2}, [[0, 0], [0]], id="items"),
        pytest.param([4, 4, 4], {"max_bytes": 6, "overflows": True}, [[4, 4], [4]], id="overflow"),
        pytest.param([], {"max_bytes": 6}, [], id="empty"),
    ],
)
def test_grouped_keeps_order_and_limits(
    sizes: list[int],
    limits: dict[str, Any],
    expected: list[list[int]],
) -> None:
    assert grouped(sizes, int, **limits) == expected
