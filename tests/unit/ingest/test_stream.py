"""What a thread makes ahead: in order, few at a time, errors in their place; and no wait for data tasks in a run that stops."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from builders.faults import fails_with, rejects, until
from builders.logs import made_from, open_index

from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import RAYREC
from rayrec.data.engine import InProcess, ThreadEngine
from rayrec.data.logs.index import Block, SegmentRange
from rayrec.data.logs.reading import read_raw
from rayrec.datasets.criteo import SCHEMA
from rayrec.ingest import stream as stream_module
from rayrec.ingest.block_order import BlockRange
from rayrec.ingest.stream import STOP_REQUESTED, Prefetcher, RowStream, TaskSource, encoded_block
from rayrec.training import stop_monitor

BLOCKS = 4
BlockRanges = list[tuple[Block, BlockRange]]


@pytest.fixture
def block_ranges(click_log: Path) -> BlockRanges:
    segments = open_index(click_log / "train.txt").segments[:BLOCKS]
    blocks = [Block((SegmentRange(each, 0, each.rows),), (3, number)) for number, each in enumerate(segments)]
    return [(block, BlockRange(number, 5, block.rows)) for number, block in enumerate(blocks)]


@pytest.fixture
def preprocessor(block_ranges: BlockRanges) -> Preprocessor:
    return made_from(read_raw([block.parts[0].segment for block, _ in block_ranges], SCHEMA), SCHEMA, RAYREC)


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """What data tasks wait for whose nodes are gone."""
    event = threading.Event()
    STOP_REQUESTED.clear()
    yield event
    event.set()
    STOP_REQUESTED.clear()


class Given(ThreadEngine):
    """Its tasks make the tables that a test gives."""

    def __init__(self, tables: Callable[[], Generator[pa.Table, None, None]]) -> None:
        super().__init__(num_threads=1)
        self.__dict__["stream"] = lambda *_, **__: tables()


def stream(block_ranges: BlockRanges, preprocessor: Preprocessor, engine: Given) -> RowStream:
    return RowStream(TaskSource(InProcess(preprocessor), engine, SCHEMA, 1000), block_ranges)


def numbers(block_ranges: BlockRanges, preprocessor: Preprocessor, engine: Given) -> list[int]:
    return [number for rows in stream(block_ranges, preprocessor, engine) for number in rows.row_numbers.tolist()]


@pytest.mark.parametrize("made", [0, 1, 3, BLOCKS])
def test_stop_makes_missing_blocks_locally(
    monkeypatch: pytest.MonkeyPatch, block_ranges: BlockRanges, preprocessor: Preprocessor, never: threading.Event, made: int
) -> None:
    items = [(block, block_range.start, block_range.stop) for block, block_range in block_ranges]

    def tables() -> Generator[pa.Table, None, None]:
        for item in items[:made]:
            yield encoded_block(item, preprocessor)
        if made < BLOCKS:
            never.wait()

    monkeypatch.setattr(stream_module, "_STALL_S", 0.3)
    monkeypatch.setattr(stream_module, "_POLL_S", 0.05)
    threading.Timer(0.2, STOP_REQUESTED.set).start()
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(numbers(block_ranges, preprocessor, Given(tables))), daemon=True)
    thread.start()
    thread.join(60)
    expected = [each.parts[0].segment.first_row + each.order()[rows.start : rows.stop] for each, rows in block_ranges]
    assert found == [np.concatenate(expected).tolist()]


def test_stream_raises_errors_and_closes(block_ranges: BlockRanges, preprocessor: Preprocessor, never: threading.Event) -> None:
    closed = threading.Event()

    def tables() -> Generator[pa.Table, None, None]:
        try:
            for block, block_range in block_ranges[:2]:
                yield encoded_block((block, block_range.start, block_range.stop), preprocessor)
            raise InputError("the file changed")
        finally:
            closed.set()

    rejects("the file changed", numbers, block_ranges, preprocessor, Given(tables))
    assert closed.wait(5)
    closed.clear()
    rows = stream(block_ranges, preprocessor, Given(tables))
    next(rows)
    rows.close()
    assert closed.wait(5)


@pytest.mark.parametrize("rank", [0, 1])
def test_stop_reaches_every_worker(monkeypatch: pytest.MonkeyPatch, never: threading.Event, rank: int) -> None:
    monkeypatch.setattr(stop_monitor, "POLL_S", 0.01)
    monkeypatch.setattr(stop_monitor, "_RANKS_POLL_S", 0.01)
    watch = stop_monitor.StopMonitor(SimpleNamespace(stop_reason=lambda: "SIGTERM"), rank=rank)
    assert STOP_REQUESTED.wait(10)
    watch.close()
    assert (watch.cause is None) == (rank == 1)  # all act on what worker 0 has heard


# -- values of any generator
class Source:
    def __init__(self, size: int, *, fails_at: int | None = None) -> None:
        self.made, self.closed, self.threads = 0, False, set[int]()
        self._size, self._fails_at = size, fails_at

    def values(self) -> Generator[int, None, None]:
        try:
            for number in range(self._size):
                self.threads.add(threading.get_ident())
                if number == self._fails_at:
                    raise ValueError("broken")
                self.made += 1
                yield number
        finally:
            self.closed = True


def test_prefetcher_returns_values_in_order() -> None:
    source = Source(50)
    assert list(Prefetcher(source.values(), max_prefetch=2)) == list(range(50))
    assert threading.get_ident() not in source.threads


def test_prefetcher_limits_values_and_closes_source() -> None:
    source = Source(50)
    ahead = Prefetcher(source.values(), max_prefetch=2)
    assert [next(ahead), next(ahead)] == [0, 1]
    until(lambda: source.made >= 5, timeout_s=5)
    time.sleep(0.05)
    assert source.made == 5  # two read, two that wait, and one that finds no room
    ahead.close()
    assert source.closed
    assert next(ahead, None) is None


def test_prefetcher_raises_error_after_values() -> None:
    ahead = Prefetcher(Source(5, fails_at=2).values(), max_prefetch=4)
    assert [next(ahead), next(ahead)] == [0, 1]
    fails_with(ValueError, "broken", next, ahead)
    assert next(ahead, None) is None
    ahead.close()
