"""Data tasks in threads: order, prefetching and shutdown."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pyarrow as pa
import pytest
from builders.faults import until

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.engine import Engine, StreamEngine, ThreadEngine, in_order


def table(value: float) -> pa.Table:
    return pa.table({"value": [value]})


def values(tables: Iterator[pa.Table]) -> list[float]:
    return [each["value"][0].as_py() for each in tables]


def stream(function: Callable[[Any], pa.Table], items: range, *, num_threads: int = 2, prefetch: int = 1) -> Generator[Any]:
    return ThreadEngine(num_threads).stream("stream", function, items, block_bytes=1, prefetch_blocks=prefetch)


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
    lock, begun, read, running = threading.Lock(), 0, 0, 0
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

    reading = in_order(task, range(20), name="bounded", num_threads=num_threads, prefetch=prefetch)
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
    """None: the caller's limit at the time of the call, whatever it does while reading."""

    def task(item: int) -> pa.Table:
        return table(storage.outage_s())

    engine = ThreadEngine(2, max_outage_s=max_outage_s)
    with storage.retry_timeout(12.0):
        running = engine.run("patience", task, range(3))
        streaming = engine.stream("patience", task, range(3), block_bytes=1, prefetch_blocks=1)
    with storage.retry_timeout(1.0):
        assert values(running) == values(streaming) == [expected] * 3
        assert storage.outage_s() == 1.0
