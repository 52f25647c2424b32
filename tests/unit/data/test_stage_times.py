"""Stage times: measured per thread, stored in tables, summed where blocks are used."""

import os
import threading
import time
from types import SimpleNamespace

import pyarrow as pa
import pytest

from rayrec.data import stage_times
from rayrec.data.stage_times import STAGES, BlockTimes, StageTimes, measured, stage, times_of, with_times


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
    threads: dict[int, int] = {}
    looks = dict.fromkeys(range(8), 0)
    open_file, close_file = stage_times.os.open, stage_times.os.close

    def opened(path: str, flags: int) -> int:
        assert path == "/proc/thread-self/schedstat"
        descriptor = open_file(os.devnull, flags)
        threads[descriptor] = int(threading.current_thread().name)
        return descriptor

    def read(descriptor: int, size: int, offset: int) -> bytes:
        number = threads[descriptor]
        assert number == int(threading.current_thread().name)
        looks[number] += 1
        return b"7 %d 3\n" % (looks[number] * 1_000_000)

    def closed(descriptor: int) -> None:
        del threads[descriptor]
        close_file(descriptor)

    monkeypatch.setattr(stage_times, "os", SimpleNamespace(open=opened, pread=read, close=closed, O_RDONLY=os.O_RDONLY))
    found: dict[int, float] = {}

    def work(number: int) -> None:
        def make() -> None:
            for _ in range(5):
                with stage("read"):
                    barrier.wait()

        found[number] = measured(make, rows_of=lambda _: 1)[1].queue_s["read"]

    barrier = threading.Barrier(8)
    workers = [threading.Thread(target=work, args=(number,), name=str(number)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == dict.fromkeys(range(8), pytest.approx(0.005))
    assert set(looks.values()) == {10}
    assert not threads


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="the kernel does not report queueing")
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

    with pytest.raises(RuntimeError, match="no storage"):
        measured(fail, rows_of=lambda _: 0)
    _, times = measured(lambda: None, rows_of=lambda _: 0)
    assert times.wall_s == {}
    table = pa.table({"a": [1, 2]}).replace_schema_metadata({b"other": b"kept"})
    assert times_of(table) is None
    times = BlockTimes(2, {"read": 0.5}, {"read": 0.25}, {"read": 0.125}, 1_790_000_000.0)
    carried = with_times(table, times)
    assert times_of(carried) == times
    assert carried.schema.metadata[b"other"] == b"kept"
    assert carried.equals(table)


def test_stage_times_sum_until_taken() -> None:
    account = StageTimes(cpus=1.5)
    ready_s = time.time() - 2
    account.add(BlockTimes(100, {"read": 1.0, "parse": 2.0}, {"read": 0.5, "parse": 2.0}, {"read": 0.1, "parse": 0.0}, ready_s))
    account.add(BlockTimes(50, {"read": 1.0}, {"read": 0.5}, {"read": 0.2}, time.time() + 100))  # another node's clock
    most_s = time.time() - ready_s
    sums = dict(zip(StageTimes.FIELDS, account.take(), strict=True))
    assert (sums["cpus"], sums["rows"], sums["blocks"]) == (1.5, 150, 2)
    assert (sums["read_wall_s"], sums["read_cpu_s"], sums["parse_wall_s"], sums["encode_wall_s"]) == (2.0, 1.0, 2.0, 0.0)
    assert sums["read_queue_s"] == pytest.approx(0.3)
    assert 200 <= sums["waited_row_s"] <= 100 * most_s
    assert 2 <= sums["waited_block_s"] <= most_s
    assert dict(zip(StageTimes.FIELDS, account.take(), strict=True)) == {**dict.fromkeys(StageTimes.FIELDS, 0.0), "cpus": 1.5}
    assert len(STAGES) == 3
