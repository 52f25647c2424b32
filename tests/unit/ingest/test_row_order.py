"""Rows are dealt out as DistributedSampler does, each once an epoch, from any position, to any
number of workers.
"""

import json
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from builders.faults import rejects
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.data.logs.index import Block, Segment, SegmentRange
from rayrec.data.numbered_rows import ArrayRows
from rayrec.ingest import block_order
from rayrec.ingest.batches import ArrayBatches
from rayrec.ingest.block_order import (
    BatchSharding,
    BlockOrder,
    BlockRange,
    Position,
    full_epoch,
    skip_rows,
    spread,
)
from rayrec.ingest.loader import Loader
from rayrec.ingest.row_order import RowOrder


class Shards(ArrayRows):  # type: ignore[misc]  # final for others
    """Numbers 0, 1, 2, ... in chunks, with a note of what was announced."""

    def __init__(self, *chunks: int) -> None:
        super().__init__({"number": np.arange(sum(chunks))})
        self._chunks = chunks
        self.announced: list[np.ndarray] = []
        self.closed = False

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        return self._chunks

    def will_read(self, indices: np.ndarray) -> None:
        self.announced.append(indices)

    def close(self) -> None:
        self.closed = True


def _order(
    source: ArrayRows,
    shuffle: str = "full",
    *,
    seed: int = 0,
    chunks_per_window: int = 2,
    **options: Any,
) -> RowOrder:
    return RowOrder(
        tuple(source.chunk_rows),
        shuffle,  # type: ignore[arg-type]
        seed,
        chunks_per_window,
        **options,
    )


def _loader(
    source: ArrayRows, *, rank: int = 0, world_size: int = 1, batch_size: int = 4, **options: Any
) -> Loader:
    arguments = {"epochs": 1, **options}
    order = arguments.pop("order", None) or _order(source)
    return Loader(
        order, ArrayBatches(source), BatchSharding(rank, world_size, batch_size), **arguments
    )


def _numbers(batches: list[Batch]) -> list[list[int]]:
    """Of each batch, without fillers."""
    return [batch.tensors["number"].tolist() if batch.loss_weight else [] for batch in batches]


def _all_workers(source: ArrayRows, world_size: int, **options: object) -> list[list[int]]:
    """Each step's rows over all workers, in the order of the epoch."""
    loaders = [
        _loader(
            source,
            rank=rank,
            world_size=world_size,
            **options,
        )
        for rank in range(world_size)
    ]
    shares = [_numbers(list(loader)) for loader in loaders]
    steps = []
    for parts in zip(*shares, strict=True):
        merged = [0] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            merged[rank::world_size] = part
        steps.append(merged)
    return steps


def test_full_shuffle_matches_distributed_sampler() -> None:
    source = Shards(24)
    for epoch in range(2):
        for rank in range(2):
            sampler = DistributedSampler(
                range(24),  # type: ignore[arg-type]
                num_replicas=2,
                rank=rank,
                seed=7,
            )
            sampler.set_epoch(epoch)
            loader = _loader(
                source,
                rank=rank,
                world_size=2,
                batch_size=3,
                epochs=2,
                order=_order(source, seed=7),
            )
            block_rows = _numbers(list(loader))[4 * epoch : 4 * epoch + 4]
            assert [number for batch in block_rows for number in batch] == list(sampler)


@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    shuffle=st.sampled_from(["none", "files", "window", "full"]),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    batch_size=st.integers(1, 5),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_row_trains_once_across_reshards(
    chunks: list[int], shuffle: str, worlds: list[int], batch_size: int, data: st.DataObject
) -> None:
    """Stopped again and again, and dealt out to other numbers of workers: the sequence of rows
    stays the same.
    """
    source = Shards(*chunks)
    epochs = 2
    order = _order(source, shuffle)
    whole = [
        number
        for epoch in range(epochs)
        for piece in order.numbers(epoch, 0)
        for number in piece.tolist()
    ]
    assert sorted(whole) == sorted(list(range(len(source))) * epochs)
    seen: list[int] = []
    state = None
    for place, world_size in enumerate(worlds):
        options = {
            "batch_size": batch_size,
            "epochs": epochs,
            "state": state,
            "order": order,
        }
        steps = _loader(source, world_size=world_size, **options).steps
        taken = steps if place == len(worlds) - 1 else data.draw(st.integers(0, steps))
        rows = [
            number
            for step in _all_workers(source, world_size, **{**options, "max_steps": taken})
            for number in step
        ]
        loader = _loader(source, world_size=world_size, **options)
        assert loader.rows(taken) == len(rows)
        for _ in range(taken):
            next(loader)
        seen += rows
        assert loader.trained_rows().rows == len(seen)
        state = loader.state()
        loader.close()
    assert seen == whole


@pytest.mark.parametrize("world_size", [1, 3])
def test_limited_order_has_spread_rows(world_size: int) -> None:
    source = Shards(100, 150, 50)
    for max_rows in (1, 130, 300, 999):
        order = _order(source, "none", small_steps=True, max_rows=max_rows)
        rows = [row for step in _all_workers(source, world_size, order=order) for row in step]
        assert sorted(rows) == [row for span in spread(300, max_rows) for row in range(*span)]


@pytest.mark.parametrize(
    ("small_steps", "sizes"),
    [
        pytest.param(False, [8, 9], id="joins last step"),
        pytest.param(True, [8, 8, 1], id="small step"),
    ],
)
def test_short_rest_joins_batch_unless_small_steps(small_steps: bool, sizes: list[int]) -> None:
    source = Shards(17)
    order = _order(source, small_steps=small_steps)
    assert list(map(len, _all_workers(source, 2, batch_size=4, order=order))) == sizes


def test_short_step_weighs_rows_of_workers() -> None:
    source = Shards(5)
    order = _order(source, small_steps=True)
    batches = [
        list(
            _loader(
                source,
                rank=rank,
                world_size=2,
                batch_size=2,
                order=order,
            )
        )
        for rank in range(2)
    ]
    assert [len(batch) for batch in batches[0]] == [2, 1]
    assert [batch.loss_weight for batch in batches[0]] == [0.5, 2.0]
    assert (batches[1][1].loss_weight, len(batches[1][1])) == (0.0, 1)


def test_windows_are_announced() -> None:
    source = Shards(4, 4, 4, 4)
    order = _order(source, "window", chunks_per_window=2)
    windows = list(order.numbers(0, 0))
    assert [len(set((window // 4).tolist())) for window in windows] == [2, 2]
    assert list(map(len, order.numbers(0, 10))) == [6]
    list(_loader(source, order=order, epochs=1))
    assert [sorted(window.tolist()) for window in source.announced] == [
        sorted(window.tolist()) for window in windows
    ]
    assert not any(np.array_equal(window, np.sort(window)) for window in windows)


FOURS = (4, 4, 4, 4)


def test_position_rejects_other_order() -> None:
    for chunks, options, others, changes, why in (
        (
            (10,),
            {},
            (11,),
            {},
            "rows changed from 10 to 11",
        ),
        (
            (10,),
            {},
            (10,),
            {"seed": 3},
            "seed changed from 0 to 3",
        ),
        (
            (10,),
            {"data_hash": "0a"},
            (10,),
            {"data_hash": "0b"},
            "data_hash changed from 0a to 0b",
        ),
        (
            (10,),
            {"data_hash": "0a"},
            (10,),
            {},
            None,
        ),
        (
            FOURS,
            {"shuffle": "window"},
            (3, 5, 4, 4),
            {},
            "because chunk_rows",
        ),
        (
            FOURS,
            {"shuffle": "window"},
            FOURS,
            {"chunks_per_window": 3},
            r"window changed from 2 to 3[^\n]* another --name\.$",
        ),
        # A window that holds all chunks is one order, however large; elsewhere its size decides
        # nothing.
        (
            FOURS,
            {"shuffle": "window", "chunks_per_window": 4},
            FOURS,
            {"chunks_per_window": 9},
            None,
        ),
        (
            FOURS,
            {},
            FOURS,
            {"chunks_per_window": 3},
            None,
        ),
    ):
        source = Shards(*chunks)
        other = Shards(*others)
        state = _loader(source, order=_order(source, **options)).state()
        order = _order(other, **{**options, **changes})
        if why is None:
            assert _loader(other, order=order, state=state).state()["offset"] == state["offset"]
        else:
            rejects(f"^train_data: .*{why}", _loader, other, order=order, state=state)


def test_old_position_resumes_and_loader_raises_row_errors() -> None:
    source = Shards(4, 4, 4, 4)
    order = _order(source, "window", data_hash="0a")
    stored = {
        "epoch": 0,
        "offset": 8,
        "rows": 16,
        "chunks": 4,
        "shuffle": "window",
        "seed": 0,
    }
    loader = _loader(source, state=stored, order=order)
    assert _numbers(list(loader)) == _numbers(list(_loader(source, order=order)))[2:]
    assert loader.state()["data_hash"] == "0a"

    class Damaged(Shards):
        def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            if 9 in indices:
                raise InputError("shard 2: damaged")
            return super().read(indices)

    loader = _loader(Damaged(12), order=_order(Shards(12), "none"))
    assert len(next(loader)) == 4
    next(loader)
    rejects("damaged", next, loader)
    rejects("no rows", _loader, Shards(0))


def test_close_stops_thread_and_rows() -> None:
    source = Shards(1000)
    threads = threading.active_count()
    loader = _loader(source, batch_size=1)
    next(loader)
    assert threading.active_count() == threads + 1
    loader.close()
    assert source.closed
    assert threading.active_count() == threads
    assert next(loader, None) is None


@pytest.mark.parametrize(
    ("rows", "count", "sizes"),
    [
        (5, 2, [3, 2]),
        (2, 3, [1, 1, 1]),
        (4, 1, [4]),
    ],
)
def test_split_batch_has_exact_size(rows: int, count: int, sizes: list[int]) -> None:
    parts = Batch({"x": torch.arange(rows)}, 0.5).parts(count)
    assert [len(part) for part in parts] == sizes
    assert sum(len(part) for part in parts if part.loss_weight) == rows


# -- Blocks of an epoch are dealt once, to any sequence of worker numbers, evenly and always the
# same way
sizes = st.lists(st.integers(1, 40), max_size=12)
block_ranges = sizes.map(
    lambda sizes: [BlockRange(number, 3, 3 + size) for number, size in enumerate(sizes)]
)


def rows_of(block_ranges: list[BlockRange]) -> list[tuple[int, int]]:
    return [
        (block_range.block, row)
        for block_range in block_ranges
        for row in range(block_range.start, block_range.stop)
    ]


def make_order(
    sizes: list[int], shuffle: str, segments_per_block: int = 2, files: int = 3
) -> BlockOrder:
    parts = []
    first = 0
    for i, size in enumerate(sizes):
        segment = Segment(f"day_{i * files // len(sizes)}", 100 * i, 100 * i + 100, first, size + 4)
        parts.append(SegmentRange(segment, i % 3, i % 3 + size))
        first += size + 4
    return BlockOrder(tuple(parts), shuffle, 7, segments_per_block)


def log_rows(blocks: list[Block]) -> list[int]:
    rows: list[int] = []
    for block in blocks:
        segment_rows = [
            segment.first_row + i for segment in block.segments for i in range(segment.rows)
        ]
        rows += [segment_rows[place] for place in block.order()]
    return rows


@given(block_ranges, st.integers(1, 9))
def test_sharding_is_balanced_and_complete(block_ranges: list[BlockRange], world_size: int) -> None:
    shards = block_order.shard_block_ranges(block_ranges, world_size)
    sizes = [len(rows_of(shard)) for shard in shards]
    assert len(shards) == world_size
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # the first hand is the largest
    assert sorted(row for shard in shards for row in rows_of(shard)) == rows_of(block_ranges)
    assert all(block_range.rows > 0 for shard in shards for block_range in shard)
    assert shards == block_order.shard_block_ranges(tuple(block_ranges), world_size)


@given(block_ranges, st.integers(0, 500))
def test_skip_rows_drops_first_rows(block_ranges: list[BlockRange], rows: int) -> None:
    assert rows_of(skip_rows(block_ranges, rows)) == rows_of(block_ranges)[rows:]


@pytest.mark.parametrize("shuffle", ["none", "files", "window"])
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    moves=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=6
    ),
)
def test_every_row_once_across_reshards(
    shuffle: str, sizes: list[int], moves: list[tuple[int, int, int]]
) -> None:
    blocks = make_order(sizes, shuffle).blocks(0)
    position = Position()
    used = []
    for world_size, batch_size, desired in [*moves, (1, 1, 10_000)]:
        position = Position.from_dict(json.loads(json.dumps(position.to_dict())))
        position = position.for_workers(blocks, world_size=world_size, batch_size=batch_size)
        left = [
            skip_rows(shard, position.steps_since_sharding * batch_size)
            for shard in position.shards(blocks)
        ]
        steps = min(desired, -(-max(len(rows_of(shard)) for shard in left) // batch_size))
        for shard in left:
            used += rows_of(shard)[: steps * batch_size]
        position = Position(
            position.epoch,
            position.steps_since_sharding + steps,
            world_size,
            batch_size,
            position.block_ranges,
        )
    assert sorted(used) == rows_of(full_epoch(blocks))


@given(st.integers(1, 400), st.integers(1, 500))
def test_spread_has_count_and_order(rows: int, count: int) -> None:
    spans = spread(rows, count)
    assert sum(stop - start for start, stop in spans) == min(rows, count)
    assert all(0 <= start < stop <= rows for start, stop in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert len(spans) <= 64


@pytest.mark.parametrize("max_rows", [1, 50, 100, 180, 300])
def test_limited_block_order_has_spread_rows(max_rows: int) -> None:
    order = make_order([40, 30, 50, 60], "none", segments_per_block=16)
    every = log_rows(order.blocks(0))
    limited = order.limited(max_rows)
    rows = log_rows(limited.blocks(0))
    assert rows == [every[row] for span in spread(180, max_rows) for row in range(*span)]
    assert len(rows) == limited.rows == min(max_rows, 180)
    for world_size in (2, 3):  # the same rows for any number of workers
        shards = block_order.shard_block_ranges(full_epoch(limited.blocks(0)), world_size)
        assert sorted(row for shard in shards for row in rows_of(shard)) == rows_of(
            full_epoch(limited.blocks(0))
        )


def test_same_world_size_keeps_shards_and_files_stay_together() -> None:
    blocks = make_order([10, 20, 30], "window").blocks(0)
    position = Position(0, 3, 2, 4, None)
    assert position.for_workers(blocks, world_size=2, batch_size=4) is position
    smaller = position.for_workers(blocks, world_size=1, batch_size=4)
    assert (smaller.steps_since_sharding, smaller.world_size) == (0, 1)
    assert sum(block_range.rows for block_range in smaller.block_ranges or ()) == 60 - 2 * 3 * 4
    other_batch = position.for_workers(blocks, world_size=2, batch_size=5)
    assert sum(block_range.rows for block_range in other_batch.block_ranges or ()) == 60 - 2 * 3 * 4
    blocks = make_order([10], "none").blocks(0)
    done = Position(0, 5, 1, 2, None).for_workers(blocks, world_size=3, batch_size=2)
    assert done.block_ranges == ()
    assert done.shards(blocks) == [[], [], []]
    order = make_order([3] * 12, "files", files=4)
    seen = set()
    for epoch in range(8):
        rows = log_rows(order.blocks(epoch))
        assert sorted(rows) == log_rows(make_order([3] * 12, "none", files=4).blocks(0))
        per_file = np.array(rows).reshape(4, 9)
        assert (np.sort(per_file, axis=1) == per_file).all()
        seen.add(tuple(per_file[:, 0].tolist()))
    assert len(seen) > 3


def test_window_shuffles_rows_anew_every_epoch() -> None:
    order = make_order([20] * 9, "window", segments_per_block=4)
    unshuffled = log_rows(make_order([20] * 9, "none").blocks(0))
    epochs = [log_rows(order.blocks(epoch)) for epoch in (0, 1)]
    assert epochs[0] != epochs[1]
    assert log_rows(BlockOrder(order.parts, "window", 8, 4).blocks(0)) != epochs[0]
    for epoch, rows in enumerate(epochs):
        assert rows == log_rows(order.blocks(epoch))  # made again from its number
        assert sorted(rows) == unshuffled


def test_blocks_of_window_mix_segments_and_shuffle_rows() -> None:
    order = make_order([20] * 9, "window", segments_per_block=4)
    for epoch in (0, 1):
        blocks = order.blocks(epoch)
        assert [len(block.parts) for block in blocks] == [4, 4, 1]
        # of any places of the log
        assert [part for block in blocks for part in block.parts] != list(order.parts)
        for block in blocks:
            block_rows = log_rows([block])
            expected = [
                p.segment.first_row + row for p in block.parts for row in range(p.start, p.stop)
            ]
            assert sorted(block_rows) == sorted(expected)
            assert block_rows != sorted(block_rows)


def order_paths(*paths: str, shuffle: str = "window", seed: int = 7) -> BlockOrder:
    parts = [SegmentRange(Segment(path, 0, 90, 4 * i, 4), 0, 4) for i, path in enumerate(paths)]
    return BlockOrder(tuple(parts), shuffle, seed, 2)


def test_identity_depends_on_rows_and_order_but_not_on_folder() -> None:
    order = make_order([4, 5, 6], "window")
    assert order.identity == make_order([4, 5, 6], "window").identity
    part = order.parts[1]
    segments: list[dict[str, Any]] = [
        {"start": 101},
        {"stop": 199},
        {"rows": part.segment.rows + 1},
        {"path": "day_9"},
    ]
    parts = [replace(part, start=part.start + 1), replace(part, stop=part.stop - 1)]
    parts += [replace(part, segment=replace(part.segment, **changes)) for changes in segments]
    first, _, last = order.parts
    changes: list[dict[str, Any]] = [
        {"seed": 8},
        {"shuffle": "files"},
        {"segments_per_block": 3},
        {"parts": (first, part)},
        {"parts": (part, last, first)},
        *({"parts": (first, other, last)} for other in parts),
    ]
    assert len({order.identity, *(replace(order, **change).identity for change in changes)}) == 12
    unmixed = replace(order, shuffle="none")
    assert unmixed.identity == replace(unmixed, seed=8).identity  # it draws nothing
    assert order_paths("a/x", "a/y").identity == order_paths("b/x", "b/y").identity
    assert order_paths("a/x", "a/y").identity != order_paths("a/x", "a/x").identity
    assert order_paths("a/day", "b/day").identity == order_paths("c/day", "b/day").identity
    # Where files are permuted, that begins with the order of their whole paths.
    assert (
        order_paths("a/day", "b/day", shuffle="files").identity
        != order_paths("c/day", "b/day", shuffle="files").identity
    )
    assert [order_paths(f"cache/{mark:016x}-day_0").identity for mark in (1, 2)] == [
        order_paths("log/day_0").identity
    ] * 2


@pytest.mark.parametrize(
    "made", ["tables/{:016x}/00000/dt={}/part.parquet", "unpacked/{:016x}-day_{}"]
)
def test_cached_files_keep_permutation_after_move(made: str) -> None:
    orders = [
        order_paths(
            *(f"/cache/{made.format(mark, day)}" for day, mark in enumerate(marks)), shuffle="files"
        )
        for marks in ((1, 2, 3), (3, 1, 2))  # the digits depend on the folder of the log
    ]
    assert orders[0].identity == orders[1].identity
    for epoch in range(4):
        assert log_rows(orders[0].blocks(epoch)) == log_rows(orders[1].blocks(epoch))
