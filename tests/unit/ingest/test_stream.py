"""What a thread makes ahead: in order, few at a time, errors in their place; and no wait for data
tasks in a run that stops.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from builders.faults import fails_with, rejects, until
from builders.logs import learn, made_from, open_index, rows_of
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows, JaggedIds, from_arrow, to_arrow
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import RAYREC
from rayrec.data.engine import InProcess, StopToken, ThreadEngine
from rayrec.data.logs.index import Block, LogIndex, SegmentRange
from rayrec.data.logs.reading import read_raw
from rayrec.data.logs.text_log import read_segments
from rayrec.datasets.criteo import SCHEMA
from rayrec.ingest import stream as stream_module
from rayrec.ingest.batches import BatchSlicer, ClickBatches
from rayrec.ingest.block_order import BatchSharding, BlockOrder, BlockPlan, BlockRange, Position
from rayrec.ingest.loader import Loader
from rayrec.ingest.stream import (
    EncodedBlock,
    MappedSource,
    Prefetcher,
    RowStream,
    TaskSource,
    encoded_block,
)
from rayrec.models.base import CandidateRows
from rayrec.schema import Schema
from rayrec.trained_rows import TrainedRows
from rayrec.training import stop_monitor
from rayrec.workloads.recsys.candidates import SampledRows

BLOCKS = 4
BlockRanges = list[tuple[Block, BlockRange]]


@pytest.fixture
def block_ranges(click_log: Path) -> BlockRanges:
    segments = open_index(click_log / "train.txt").segments[:BLOCKS]
    blocks = [
        Block((SegmentRange(each, 0, each.rows),), (3, number))
        for number, each in enumerate(segments)
    ]
    return [(block, BlockRange(number, 5, block.rows)) for number, block in enumerate(blocks)]


@pytest.fixture
def preprocessor(block_ranges: BlockRanges) -> Preprocessor:
    return made_from(
        read_raw([block.parts[0].segment for block, _ in block_ranges], SCHEMA),
        SCHEMA,
        RAYREC,
    )


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """What data tasks wait for whose nodes are gone."""
    event = threading.Event()
    yield event
    event.set()


class Given(ThreadEngine):
    """Its tasks make the tables that a test gives."""

    def __init__(self, tables: Callable[[], Generator[pa.Table, None, None]]) -> None:
        super().__init__(num_threads=1)
        self.__dict__["stream"] = lambda *_, **__: tables()


def stream(block_ranges: BlockRanges, preprocessor: Preprocessor, engine: Given) -> RowStream:
    return RowStream(TaskSource(InProcess(preprocessor), engine, SCHEMA, 1000), block_ranges)


def numbers(block_ranges: BlockRanges, preprocessor: Preprocessor, engine: Given) -> list[int]:
    return [
        number
        for rows in stream(block_ranges, preprocessor, engine)
        for number in rows.row_numbers.tolist()
    ]


@pytest.mark.parametrize("made", [0, 1, 3, BLOCKS])
def test_stop_makes_missing_blocks_locally(
    monkeypatch: pytest.MonkeyPatch,
    block_ranges: BlockRanges,
    preprocessor: Preprocessor,
    never: threading.Event,
    made: int,
) -> None:
    items = [(block, block_range.start, block_range.stop) for block, block_range in block_ranges]

    def tables() -> Generator[pa.Table, None, None]:
        for item in items[:made]:
            yield encoded_block(item, preprocessor)
        if made < BLOCKS:
            never.wait()

    monkeypatch.setattr(stream_module, "_STALL_S", 0.3)
    monkeypatch.setattr(stream_module, "_POLL_S", 0.05)
    engine = Given(tables)
    threading.Timer(0.2, engine.stop.set).start()
    found: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: found.append(numbers(block_ranges, preprocessor, engine)),
        daemon=True,
    )
    thread.start()
    thread.join(60)
    expected = [
        each.parts[0].segment.first_row + each.order()[rows.start : rows.stop]
        for each, rows in block_ranges
    ]
    assert found == [np.concatenate(expected).tolist()]


def test_stream_raises_errors_and_closes(
    block_ranges: BlockRanges,
    preprocessor: Preprocessor,
    never: threading.Event,
) -> None:
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
def test_stop_reaches_every_worker(
    monkeypatch: pytest.MonkeyPatch,
    never: threading.Event,
    rank: int,
) -> None:
    monkeypatch.setattr(stop_monitor, "POLL_S", 0.01)
    monkeypatch.setattr(stop_monitor, "_RANKS_POLL_S", 0.01)
    stop = StopToken()
    watch = stop_monitor.StopMonitor(
        SimpleNamespace(stop_reason=lambda: "SIGTERM"),
        rank=rank,
        stop=stop,
    )
    assert stop.wait(10)
    watch.close()
    assert (watch.cause is None) == (rank == 1)  # all act on what worker 0 has heard


# -- values of any generator
class Source:
    def __init__(self, size: int, *, fails_at: int | None = None) -> None:
        self.made = 0
        self.closed = False
        self.threads = set[int]()
        self._size = size
        self._fails_at = fails_at

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


def test_prefetcher_returns_few_values_in_order_before_errors() -> None:
    source = Source(50)
    assert list(Prefetcher(source.values(), max_prefetch=2)) == list(range(50))
    assert threading.get_ident() not in source.threads
    source = Source(50)
    ahead = Prefetcher(source.values(), max_prefetch=2)
    assert [next(ahead), next(ahead)] == [0, 1]
    until(lambda: source.made >= 5, timeout_s=5)
    time.sleep(0.05)
    assert source.made == 5  # two read, two that wait, and one that finds no room
    ahead.close()
    assert source.closed
    assert next(ahead, None) is None
    ahead = Prefetcher(Source(5, fails_at=2).values(), max_prefetch=4)
    assert [next(ahead), next(ahead)] == [0, 1]
    fails_with(ValueError, "broken", next, ahead)
    assert next(ahead, None) is None
    ahead.close()


# -- Batches of all workers together hold every row of an epoch once; any step can be gone on from
ROWS = 700
ClickLoader = Loader[Position, BlockPlan]
Prepared = tuple[LogIndex, Preprocessor]


@pytest.fixture(scope="module")
def prepared(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    lines = (click_log / "train.txt").read_bytes().splitlines(keepends=True)[:ROWS]
    lines[100:100] = [b"a bad line\n"]
    path = tmp_path_factory.mktemp("loader") / "log.txt"
    path.write_bytes(b"".join(lines))
    index = open_index(path, segment_bytes=9_000)
    assert (index.rows, index.faults.total) == (ROWS, 1)
    return index, learn(index)


def order_of(
    index: LogIndex,
    start: int = 0,
    stop: int = ROWS,
    shuffle: str = "window",
) -> BlockOrder:
    return BlockOrder(tuple(index.parts(start, stop)), shuffle, 3, 3)


def resolve_source(prepared: Prepared) -> TaskSource:
    return TaskSource(InProcess(prepared[1]), ThreadEngine(1), SCHEMA, ROWS, prefetch_blocks=1)


def loader(
    prepared: Prepared,
    order: Any = None,
    *,
    source: Any = None,
    pinned: int = 0,
    **changes: Any,
) -> ClickLoader:
    settings: dict[str, Any] = {
        "epochs": 1,
        "batch_size": 64,
        "rank": 0,
        "world_size": 1,
        **changes,
    }
    sharding = BatchSharding(*(settings.pop(name) for name in ("rank", "world_size", "batch_size")))
    position = settings.pop("position", None)
    state = None if position is None else position.to_dict()
    reader = ClickBatches(source or resolve_source(prepared), SCHEMA, pinned=pinned)
    return Loader(order or order_of(prepared[0]), reader, sharding, state=state, **settings)


def log_rows(prepared: Prepared, start: int = 0, stop: int = ROWS) -> list[tuple[bytes, ...]]:
    return rows_of(
        prepared[1].encode(read_segments(prepared[0].segments, SCHEMA), np.arange(start, stop))
    )


def same(one: Batch, other: Batch) -> bool:
    return rows_of(one) == rows_of(other) and one.loss_weight == other.loss_weight


def total_weight(batches: Sequence[Any]) -> float:
    """Return the mean over workers of the weights of their rows in one step."""
    return sum(batch.loss_weight * len(batch) for batch in batches) / len(batches)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 33, 64, 350, 1000])
def test_epoch_returns_every_row_once(prepared: Prepared, world_size: int, batch_size: int) -> None:
    loaders = [
        loader(
            prepared,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    steps = list(zip(*loaders, strict=True))
    assert (
        len(steps)
        == loaders[0].steps
        == loaders[0].steps_per_epoch
        == math.ceil(math.ceil(ROWS / world_size) / batch_size)
    )
    batches = itertools.chain(*steps)
    assert Counter(row for batch in batches for row in rows_of(batch)) == Counter(
        log_rows(prepared)
    )
    done = 0
    for step, step_batches in enumerate(steps):
        assert total_weight(step_batches) == pytest.approx(1)
        done += sum(len(batch) for batch in step_batches)
        assert loaders[0].rows(step + 1) == done
        if step + 1 < loaders[0].steps:
            assert {len(batch) for batch in step_batches} == {batch_size}
    assert done == ROWS


@pytest.mark.parametrize("world_size", [1, 3, 7])
@pytest.mark.parametrize("used", [0, 2])
def test_plan_matches_worker_rows(prepared: Prepared, world_size: int, used: int) -> None:
    size = 30
    start = Position().for_workers(
        order_of(prepared[0]).blocks(0),
        world_size=world_size,
        batch_size=size,
    )
    options = {
        "batch_size": size,
        "world_size": world_size,
        "position": dataclasses.replace(start, steps_since_sharding=used),
    }
    totals = [ROWS // world_size + (rank < ROWS % world_size) for rank in range(world_size)]
    steps = np.arange(used, -(-totals[0] // size))
    shares = np.clip(np.array(totals) - steps[:, None] * size, 0, size)
    for rank in range(world_size):
        plan = order_of(prepared[0]).plan(
            options["position"],
            BatchSharding(rank, world_size, size),
        )
        assert plan.steps == len(steps)
        assert [plan.worker_rows(step) for step in range(plan.steps)] == shares[:, rank].tolist()
        assert [plan.rows_until(step) for step in range(plan.steps + 1)] == [
            0,
            *shares.sum(1).cumsum().tolist(),
        ]
        assert (
            sum(block_range.rows for _, block_range in plan.block_ranges(plan.steps))
            == shares[:, rank].sum()
        )


def test_first_row_matches_on_all_workers(prepared: Prepared) -> None:
    order = order_of(prepared[0])
    rows = []
    for world_size in (1, 2, 3):
        plan = order.plan(Position(), BatchSharding(0, world_size, 60 // world_size))
        rows.append([plan.first_row(step) for step in range(plan.steps)])
    assert rows[0] == rows[1] == rows[2] == list(range(0, ROWS, 60))
    stopped = order.plan(Position(), BatchSharding(0, 1, 60)).position_at(3)
    for world_size in (1, 2):
        plan = order.plan(stopped, BatchSharding(0, world_size, 60 // world_size))
        assert plan.first_row(1) == 4 * 60


@pytest.mark.parametrize(
    ("candidates", "allowed"),
    [
        pytest.param(CandidateRows(2, 7), [2, 3, 4, 5, 6], id="range"),
        pytest.param(CandidateRows(2, 7, gap=4), [2, 3, 5, 6], id="gap"),
        pytest.param(CandidateRows(5), [5, 6, 7, 8], id="to the end"),
    ],
)
def test_sampled_rows_return_candidates(candidates: CandidateRows, allowed: list[int]) -> None:
    rows = SampledRows(candidates, 9, 1000, seed=3)
    ids = rows(1, 60)
    assert (ids.dtype, np.unique(ids).tolist()) == (np.int32, allowed)
    assert np.bincount(ids)[allowed].min() > 700 / len(allowed)
    np.testing.assert_array_equal(SampledRows(candidates, 9, 1000, seed=3)(1, 60), ids)
    for other in (rows(1, 61), rows(2, 60), dataclasses.replace(rows, seed=4)(1, 60)):
        assert not np.array_equal(other, ids)


def test_slicer_draws_sampled_rows_for_each_step() -> None:
    inputs = Schema(
        label=None,
        sparse=("item",),
        lists=("item",),
        tokens="any",
    )
    lists = JaggedIds(np.array([5, 3, 4], np.int32), np.array([2, 1], np.int32))
    rows = EncodedRows(np.empty((2, 0), np.float32), [lists])
    sample = SampledRows(CandidateRows(2, 9), 9, 4, seed=0)
    slicer = BatchSlicer(iter([rows]), inputs, unpooled=("item",), tables={"table:item": sample})
    for first_row in (0, 1):
        batch = slicer.take(1, loss_weight=1.0, epoch=2, first_row=first_row)
        assert batch.sequence_features is not None
        drawn = batch.sequence_features["table:item"].values().tolist()
        assert drawn == sample(2, first_row).tolist()


def test_plan_memory_does_not_grow_with_workers(prepared: Prepared) -> None:
    segment = dataclasses.replace(prepared[0].segments[0], rows=1 << 24)
    order = BlockOrder((SegmentRange(segment, 0, segment.rows),), "none", 0, 1)
    tracemalloc.start()
    try:
        planned = loader(prepared, order, batch_size=128, world_size=1024)
        assert (planned.steps, planned.rows(128)) == (128, 1 << 24)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # a number for each step takes 1 kB, one for each worker 8 kB and one for both 1 MB
    assert peak_bytes < 50_000


def test_gpu_batches_are_pinned_in_thread(
    prepared: Prepared,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[int] = set()

    def pin_memory(values: Any) -> Any:  # which a machine without a GPU cannot
        threads.add(threading.get_ident())
        return values

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(KeyedJaggedTensor, "pin_memory", pin_memory)
    plain = loader(prepared, epochs=2)
    prefetching = loader(prepared, epochs=2, pinned=2)
    prefetching.start()
    for position, batch in enumerate(plain):
        pinned = next(prefetching)
        assert same(pinned, batch)
        assert np.array_equal(pinned.row_numbers.numbers, batch.row_numbers.numbers)
        assert prefetching.state() == plain.state(), position
    assert next(prefetching, None) is None
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    prefetching.close()
    left = loader(prepared, pinned=2)
    next(left)
    left.close()


def test_constants_are_pinned_once(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    # as torch's, which copies nothing that is pinned
    def pin_memory(values: torch.Tensor) -> torch.Tensor:
        if any(values is other for other in pinned):
            return values
        pinned.append(values.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    prefetching = loader(prepared, epochs=3, pinned=2)
    batches = list(prefetching)
    prefetching.close()
    sizes = {len(batch) for batch in batches}
    assert len(batches) > 4 * len(sizes)
    for size in sizes:
        offsets = [tensor for tensor in pinned if tensor.shape == (26 * size + 1,)]
        assert 1 <= len(offsets) <= 2  # of the first batch, and then for good


def test_batches_of_last_step_may_be_empty(prepared: Prepared) -> None:
    order = order_of(prepared[0], 0, 5)
    last = [
        list(
            loader(
                prepared,
                order,
                batch_size=1,
                rank=rank,
                world_size=4,
            )
        )[-1]
        for rank in range(4)
    ]
    assert [len(batch) for batch in last] == [1, 0, 0, 0]
    assert (
        last[3].sparse_features.stride(),
        last[3].sparse_features["cat_3"].values().numel(),
    ) == (0, 0)
    assert {batch.loss_weight for batch in last} == {4.0}
    loaders = [
        loader(
            prepared,
            order_of(prepared[0], 0, 2),
            epochs=2,
            rank=rank,
            world_size=3,
        )
        for rank in range(3)
    ]
    assert sorted([[len(batch) for batch in each] for each in loaders]) == [[0, 0], [1, 1], [1, 1]]


def test_slicer_adds_full_tables_to_empty_batch() -> None:
    inputs = Schema(
        label="label",
        dense=(),
        sparse=("user", "item"),
        lists=("item",),
        tokens="any",
    )
    lists = JaggedIds(np.array([5, 3, 4], np.int32), np.array([2, 1], np.int32))
    rows = EncodedRows(
        np.empty((2, 0), np.float32),
        [np.array([7, 8], np.int32), lists],
        {"label": np.ones(2, np.float32)},
    )
    slicer = BatchSlicer(iter([rows]), inputs, unpooled=("item",), tables={"table:item": 3})
    features = slicer.take(2, loss_weight=1.0).sequence_features
    assert features is not None
    assert features["item"].to_dense()[0].tolist() == [5, 3]
    assert [part.tolist() for part in features["table:item"].to_dense()] == [[0, 1, 2], []]
    nothing = slicer.take(0, loss_weight=1.0)
    assert len(nothing) == 0
    assert nothing.sequence_features is not None
    # One row, as TorchRec cannot exchange embeddings one by one for none.
    assert [part.tolist() for part in nothing.sequence_features["item"].to_dense()] == [[]]
    assert [part.tolist() for part in nothing.sequence_features["table:item"].to_dense()] == [
        [0, 1, 2]
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_step_resumes(prepared: Prepared, world_size: int) -> None:
    end = Position(3, 0, world_size, 100, None, order_of(prepared[0]).identity)
    rank_states = []
    for rank in range(world_size):
        settings = {
            "epochs": 3,
            "batch_size": 100,
            "rank": rank,
            "world_size": world_size,
        }
        first = loader(prepared, **settings)
        states = [first.state()]
        whole = []
        rank_states.append(states)
        for batch in first:
            whole.append(batch)
            states.append(first.state())
        for step in range(len(whole) + 1):
            again = loader(
                prepared,
                **settings,
                position=Position.from_dict(json.loads(json.dumps(states[step]))),
            )
            assert (again.steps, again.state()) == (len(whole) - step, states[step])
            rest = list(again)
            assert len(rest) == again.steps
            assert all(same(one, other) for one, other in zip(rest, whole[step:], strict=True))
            assert again.state() == states[-1] == end.to_dict()
    assert all(states == rank_states[0] for states in rank_states)


@pytest.mark.parametrize(
    "moves",
    [
        [
            (3, 2, 40),
            (2, 1, 40),
            (5, 1, 30),
            (1, 3, 64),
        ],
        [
            (2, 5, 64),
            (2, 3, 50),
            (4, 0, 50),
            (3, 4, 9),
        ],
    ],
)
def test_loader_resumes_with_other_world_sizes(
    prepared: Prepared,
    moves: list[tuple[int, int, int]],
) -> None:
    """Every row once an epoch and one loader's count of steps left on all ranks, whatever the
    workers were.
    """
    epoch_rows = Counter(log_rows(prepared))
    used: Counter[tuple[bytes, ...]] = Counter()
    numbers: Counter[tuple[int, int]] = Counter()
    trained = TrainedRows()
    state: dict[str, Any] = Position().to_dict()
    for world_size, steps, batch_size in [*moves, (2, 10_000, 64)]:
        options = {
            "epochs": 2,
            "position": Position.from_dict(state),
            "world_size": world_size,
            "batch_size": batch_size,
        }
        loaders = [loader(prepared, rank=rank, **options) for rank in range(world_size)]
        assert len({each.steps for each in loaders}) == 1
        for _ in range(min(steps, loaders[0].steps)):
            step_batches = [next(each) for each in loaders]
            assert total_weight(step_batches) == pytest.approx(1)
            for batch in step_batches:
                used.update(rows_of(batch))
                trained.add(batch.row_numbers)
                numbers.update(epoch_and_row(batch))
        state = loaders[0].state()
        for each in loaders:
            assert (json.dumps(each.state()), each.trained_rows()) == (json.dumps(state), trained)
    assert used == epoch_rows + epoch_rows
    assert state["epoch"] == 2
    assert numbers == Counter(itertools.product(range(2), range(ROWS)))


def epoch_and_row(batch: Any) -> list[tuple[int, int]]:
    given = batch.row_numbers
    return [(given.epoch, row) for row in given.numbers.tolist()]


def test_row_numbers_match_log(prepared: Prepared) -> None:
    rows = log_rows(prepared)
    for start, stop, shuffle in (
        (0, ROWS, "window"),
        (90, 611, "window"),
        (90, 611, "none"),
    ):
        numbers = []
        for batch in loader(prepared, order_of(prepared[0], start, stop, shuffle), epochs=2):
            numbers += batch.row_numbers.numbers.tolist()
            assert [rows[number] for number in batch.row_numbers.numbers] == rows_of(batch)
        assert (numbers == 2 * [*range(start, stop)]) == (shuffle == "none")
        assert (numbers[: stop - start] == numbers[stop - start :]) == (shuffle == "none")


def taken(rows: EncodedRows, which: Any) -> EncodedRows:
    ids = [column[which] for column in rows.ids]  # type: ignore[index]
    return EncodedRows(
        rows.dense[which],
        ids,
        {"label": rows.label[which]},
        None,
        rows.row_numbers[which],
    )


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda first, *rest: [first, *rest], (0, 0)),
        # The last batch cannot be filled, and the one before has a row of it.
        (lambda first, *rest: [taken(first, slice(1, None)), *rest], (1, 1)),
        (lambda first, *rest: [taken(first, slice(0, 1)), first, *rest], (1, 1)),
        (lambda first, *rest: [taken(first, np.array([1, *range(1, len(first))])), *rest], (1, 1)),
        (lambda first, *rest: [first, first, *rest], None),
    ],
    ids=[
        "none",
        "a row is dropped",
        "a row is repeated",
        "one in place of another",
        "a block is repeated",
    ],
)
@pytest.mark.parametrize("epochs", [1, 2])
def test_lost_and_repeated_rows_are_counted(
    prepared: Prepared,
    fault: Any,
    expected: Any,
    epochs: int,
) -> None:
    """A data task that makes other rows than it was asked for: the position says nothing of it, and
    the count does.
    """
    tasks = []

    class Faulty(TaskSource):
        def make(self, block_ranges: Any) -> Generator[EncodedBlock, None, None]:
            tasks.append([block_range.rows for _, block_range in block_ranges])
            made = [rows for range_rows, _ in super().make(block_ranges) for rows in range_rows]
            yield from (([rows], None) for rows in fault(*made))

    loading = loader(prepared, source=Faulty(**vars(resolve_source(prepared))), epochs=epochs)
    trained = TrainedRows()
    with contextlib.suppress(RuntimeError):  # a stream that ends too soon
        for batch in loading:
            trained.add(batch.row_numbers)
    assert trained.lost_and_repeated(loading.trained_rows()) == (expected or (tasks[0][0],) * 2)


def test_max_steps_limit_requests_and_epoch_end_is_next_start(prepared: Prepared) -> None:
    whole = list(loader(prepared, epochs=2))
    for max_steps in (0, 1, 5, 12, 1000):
        short = loader(prepared, epochs=2, max_steps=max_steps)
        batches = list(short)
        assert len(batches) == short.steps == min(max_steps, len(whole))
        assert all(same(one, other) for one, other in zip(batches, whole, strict=False))
        assert short.rows(short.steps) == sum(len(batch) for batch in batches)
    asked: list[int] = []

    class Counting(TaskSource):
        def make(self, block_ranges: Any) -> Generator[EncodedBlock, None, None]:
            asked.extend(block_range.rows for _, block_range in block_ranges)
            return super().make(block_ranges)

    assert (
        len(list(loader(prepared, source=Counting(**vars(resolve_source(prepared))), max_steps=1)))
        == 1
    )
    assert len(asked) == 1
    # Also where the position says so with a step number, as no loader does.
    end = loader(prepared, epochs=2, position=Position(0, 11, 1, 64, None))
    assert end.steps == 11
    assert dataclasses.replace(Position.from_dict(end.state()), order=None) == Position(
        1,
        0,
        1,
        64,
        None,
    )
    assert all(
        same(one, other)
        for one, other in zip(end, list(loader(prepared, epochs=2))[11:], strict=True)
    )


def test_resume_rejects_changed_order(prepared: Prepared, tmp_path: Path) -> None:
    """A position means other rows in any other order, and so rows would be lost and trained on
    twice, unnoticed.
    """
    index, _ = prepared
    order = order_of(index)
    begun = loader(prepared, order, batch_size=64)
    for _ in range(4):
        next(begun)
    position = Position.from_dict(json.loads(json.dumps(begun.state())))
    begun.close()
    again = open_index(Path(index.segments[0].path), segment_bytes=4_500)
    others = [
        dataclasses.replace(order, **change)
        for change in (
            {"seed": 4},
            {"segments_per_block": 4},
            {"shuffle": "none"},
        )
    ]
    for other in (
        *others,
        order_of(again),
        order_of(index, 0, ROWS - 1),
    ):
        rejects(
            r"^train_data: cannot resume, .*order changed.* another --name\.$",
            loader,
            prepared,
            other,
            position=position,
        )
    moved = tmp_path / "elsewhere" / "log.txt"
    moved.parent.mkdir()
    moved.write_bytes(Path(index.segments[0].path).read_bytes())
    at_another_place = order_of(open_index(moved, segment_bytes=9_000))
    rest = [
        Counter(rows_of(batch)) for batch in loader(prepared, at_another_place, position=position)
    ]
    assert rest == [Counter(rows_of(batch)) for batch in loader(prepared, order, position=position)]
    with moved.open("ab") as file:
        file.write(b"".join(moved.read_bytes().splitlines(keepends=True)[:3]))
    grown = open_index(moved, segment_bytes=9_000)
    rejects(
        "rows or their order changed",
        loader,
        prepared,
        order_of(grown, 0, grown.rows),
        position=position,
    )


def test_position_without_order_resumes_and_close_stops_reading(prepared: Prepared) -> None:
    stored = {
        "epoch": 0,
        "step_in_deal": 2,
        "world_size": 1,
        "batch_size": 64,
        "pieces": None,
    }
    going_on = loader(prepared, position=Position.from_dict(stored))
    assert all(
        same(one, other) for one, other in zip(going_on, list(loader(prepared))[2:], strict=True)
    )
    assert going_on.state()["order"] == order_of(prepared[0]).identity
    loading = loader(prepared)
    next(loading)
    loading.close()
    assert list(loading) == []


def test_batches_contain_variable_length_ids() -> None:
    """One id, two ids and any number of them, through Arrow, cut into batches across what the tasks
    made.
    """
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, 2**40, rng.integers(0, 4)).tolist() for _ in range(50)]
    one = rng.integers(0, 2**40, 50)
    two = rng.integers(0, 2**40, (50, 2))
    weights = rng.random(50, np.float32)
    parts = []
    for part in (slice(0, 7), slice(7, 8), slice(8, 50)):
        sizes = np.array([len(ids) for ids in lists[part]], np.int32)
        bags = JaggedIds(np.array([x for ids in lists[part] for x in ids], np.int64), sizes)
        numbers = np.zeros((len(sizes), 2), np.float32)
        rows = EncodedRows(
            numbers[:, :1],
            [one[part], bags, two[part]],
            {"label": numbers[:, 1]},
            weights[part],
        )
        parts += from_arrow(to_arrow(rows))
    slicer = BatchSlicer(
        iter(parts),
        Schema(label="label", dense=("x",), sparse=("one", "list", "two")),
    )
    done = 0
    for count in (3, 0, 20, 27):
        batch = slicer.take(count, loss_weight=1.0)
        features = batch.sparse_features
        chosen = slice(done, done + count)
        assert (features.stride(), features["one"].values().tolist()) == (
            count,
            one[chosen].tolist(),
        )
        assert features["two"].values().tolist() == two[chosen].reshape(-1).tolist()
        assert [bag.tolist() for bag in features["list"].to_dense()] == lists[chosen]
        assert (
            batch.weights is None
            if not count
            else batch.weights.tolist() == weights[chosen].tolist()
        )
        done += count


def test_arrow_round_trips_one_kind_and_epochs_are_lazy(
    prepared: Prepared,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (back,) = from_arrow(
        to_arrow(EncodedRows(np.empty((2, 0), np.float32), np.array([[1, 2**25 + 1]], np.int32)))
    )
    assert (back.dense.shape, back.ids[0].tolist(), back.labels) == ((2, 0), [1, 2**25 + 1], {})
    dense = np.arange(6, dtype=np.float32).reshape(2, 3)
    (back,) = from_arrow(
        to_arrow(EncodedRows(dense, np.empty((0, 2), np.int32), {"label": np.ones(2, np.float32)}))
    )
    assert (back.dense == dense).all()
    assert (list(back.ids), len(back)) == ([], 2)
    assert from_arrow(to_arrow(EncodedRows(dense[:0], np.empty((1, 0), np.int32)))) == []
    assert from_arrow(to_arrow(EncodedRows(dense, np.array([[7, 8]], np.int32))).slice(1))[
        0
    ].dense.tolist() == [[3, 4, 5]]
    planned: list[int] = []
    blocks = BlockOrder.blocks

    def noted(order: BlockOrder, epoch: int) -> Any:
        planned.append(epoch)
        return blocks(order, epoch)

    monkeypatch.setattr(BlockOrder, "blocks", noted)
    many = loader(prepared, epochs=1_000_000, batch_size=300)
    assert many.steps == 3_000_000
    for _ in range(4):
        next(many)
    assert max(planned) == 1
    assert [many.rows(step) for step in (0, 1, 3, 4, 2_999_999)] == [
        0,
        300,
        ROWS,
        ROWS + 300,
        1_000_000 * ROWS - 100,
    ]
    many.close()


def test_mapped_source_queue_is_bounded() -> None:
    """A queue of size 0 would have no bound."""
    preprocessor: Any = None
    counts = [MappedSource(preprocessor, prefetch_blocks=count).max_prefetch for count in (1, 2, 8)]
    assert counts == [1, 1, 7]


@pytest.mark.parametrize("is_stopping", [False, True])
def test_close_waits_for_value_unless_stopping(is_stopping: bool) -> None:
    stop = threading.Event()
    is_released = threading.Event()
    has_started = threading.Event()
    has_closed = threading.Event()

    def values() -> Generator[int, None, None]:
        try:
            has_started.set()
            assert is_released.wait(30)
            yield 1
        finally:
            has_closed.set()

    prefetcher = Prefetcher(values(), max_prefetch=1, stop=stop)
    assert has_started.wait(30)
    if is_stopping:
        stop.set()
        prefetcher.close()
        assert not has_closed.is_set()
        is_released.set()
        assert has_closed.wait(30)
        return
    threading.Timer(0.2, is_released.set).start()
    prefetcher.close()
    assert has_closed.is_set()
