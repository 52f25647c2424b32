"""Every row of an epoch is dealt once, to any sequence of worker numbers, evenly and always the same way."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data.logs.index import Block, Segment, SegmentRange
from rayrec.ingest.block_order import BlockOrder, BlockRange, Position, full_epoch, shard_block_ranges, skip_rows

sizes = st.lists(st.integers(1, 40), max_size=12)
block_ranges = sizes.map(lambda sizes: [BlockRange(number, 3, 3 + size) for number, size in enumerate(sizes)])


def rows_of(block_ranges: list[BlockRange]) -> list[tuple[int, int]]:
    return [(block_range.block, row) for block_range in block_ranges for row in range(block_range.start, block_range.stop)]


def make_order(sizes: list[int], shuffle: str, segments_per_block: int = 2, files: int = 3) -> BlockOrder:
    parts, first = [], 0
    for i, size in enumerate(sizes):
        segment = Segment(f"day_{i * files // len(sizes)}", 100 * i, 100 * i + 100, first, size + 4)
        parts.append(SegmentRange(segment, i % 3, i % 3 + size))
        first += size + 4
    return BlockOrder(tuple(parts), shuffle, 7, segments_per_block)


def log_rows(blocks: list[Block]) -> list[int]:
    """Row numbers of the log, in the order of the epoch."""
    rows: list[int] = []
    for block in blocks:
        of_segments = [part.segment.first_row + i for part in block.parts for i in range(part.segment.rows)]
        rows += [of_segments[place] for place in block.order()]
    return rows


@given(block_ranges, st.integers(1, 9))
def test_sharding_is_balanced_and_complete(block_ranges: list[BlockRange], world_size: int) -> None:
    shards = shard_block_ranges(block_ranges, world_size)
    sizes = [len(rows_of(shard)) for shard in shards]
    assert len(shards) == world_size
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # the first hand is the largest
    assert sorted(row for shard in shards for row in rows_of(shard)) == rows_of(block_ranges)
    assert all(block_range.rows > 0 for shard in shards for block_range in shard)
    assert shards == shard_block_ranges(tuple(block_ranges), world_size)


@given(block_ranges, st.integers(0, 500))
def test_skip_rows_drops_first_rows(block_ranges: list[BlockRange], rows: int) -> None:
    assert rows_of(skip_rows(block_ranges, rows)) == rows_of(block_ranges)[rows:]


@pytest.mark.parametrize("shuffle", ["none", "files", "window"])
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    moves=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=6),
)
def test_every_row_once_across_reshards(shuffle: str, sizes: list[int], moves: list[tuple[int, int, int]]) -> None:
    """3 workers for some steps, then 2, then 5 ...: no row lost, none twice."""
    blocks = make_order(sizes, shuffle).blocks(0)
    position, used = Position(), []
    for world_size, batch_size, wanted in [*moves, (1, 1, 10_000)]:
        position = Position.from_dict(json.loads(json.dumps(position.to_dict())))
        position = position.for_workers(blocks, world_size=world_size, batch_size=batch_size)
        left = [skip_rows(shard, position.step_in_deal * batch_size) for shard in position.shards(blocks)]
        steps = min(wanted, -(-max(len(rows_of(shard)) for shard in left) // batch_size))
        for shard in left:
            used += rows_of(shard)[: steps * batch_size]
        position = Position(position.epoch, position.step_in_deal + steps, world_size, batch_size, position.pieces)
    assert sorted(used) == rows_of(full_epoch(blocks))


def test_same_world_size_keeps_shards_and_finished_epoch_has_none() -> None:
    blocks = make_order([10, 20, 30], "window").blocks(0)
    position = Position(0, 3, 2, 4, None)
    assert position.for_workers(blocks, world_size=2, batch_size=4) is position
    smaller = position.for_workers(blocks, world_size=1, batch_size=4)
    assert (smaller.step_in_deal, smaller.world_size) == (0, 1)
    assert sum(block_range.rows for block_range in smaller.pieces or ()) == 60 - 2 * 3 * 4
    other_batch = position.for_workers(blocks, world_size=2, batch_size=5)
    assert sum(block_range.rows for block_range in other_batch.pieces or ()) == 60 - 2 * 3 * 4
    blocks = make_order([10], "none").blocks(0)
    done = Position(0, 5, 1, 2, None).for_workers(blocks, world_size=3, batch_size=2)
    assert done.pieces == ()
    assert done.shards(blocks) == [[], [], []]


def test_shuffle_files_keeps_files_together() -> None:
    order = make_order([3] * 12, "files", files=4)
    seen = set()
    for epoch in range(8):
        rows = log_rows(order.blocks(epoch))
        assert sorted(rows) == log_rows(make_order([3] * 12, "none", files=4).blocks(0))
        per_file = np.array(rows).reshape(4, 9)
        assert (np.sort(per_file, axis=1) == per_file).all()
        seen.add(tuple(per_file[:, 0].tolist()))
    assert len(seen) > 3


def test_window_shuffles_segments_and_rows_inside_blocks() -> None:
    order = make_order([20] * 9, "window", segments_per_block=4)
    unshuffled = log_rows(make_order([20] * 9, "none").blocks(0))
    epochs = [log_rows(order.blocks(epoch)) for epoch in (0, 1)]
    assert epochs[0] != epochs[1]
    for epoch, rows in enumerate(epochs):
        assert rows == log_rows(order.blocks(epoch))  # made again from its number
        assert sorted(rows) == unshuffled
        blocks = order.blocks(epoch)
        assert [len(block.parts) for block in blocks] == [4, 4, 1]
        for block in blocks:
            mine = log_rows([block])
            expected = [p.segment.first_row + row for p in block.parts for row in range(p.start, p.stop)]
            assert sorted(mine) == sorted(expected)
            assert mine != sorted(mine)
    assert log_rows(BlockOrder(order.parts, "window", 8, 4).blocks(0)) != epochs[0]


def of_paths(*paths: str, shuffle: str = "window", seed: int = 7) -> BlockOrder:
    parts = [SegmentRange(Segment(path, 0, 90, 4 * i, 4), 0, 4) for i, path in enumerate(paths)]
    return BlockOrder(tuple(parts), shuffle, seed, 2)


def test_identity_depends_on_rows_and_order_but_not_on_folder() -> None:
    order = make_order([4, 5, 6], "window")
    assert order.identity == make_order([4, 5, 6], "window").identity
    part = order.parts[1]
    segments: list[dict[str, Any]] = [{"start": 101}, {"stop": 199}, {"rows": part.segment.rows + 1}, {"path": "day_9"}]
    parts = [replace(part, start=part.start + 1), replace(part, stop=part.stop - 1)]
    parts += [replace(part, segment=replace(part.segment, **changes)) for changes in segments]
    first, _, last = order.parts
    changes: list[dict[str, Any]] = [{"seed": 8}, {"shuffle": "files"}, {"segments_per_block": 3}, {"parts": (first, part)}]
    changes += [{"parts": (part, last, first)}, *({"parts": (first, other, last)} for other in parts)]
    assert len({order.identity, *(replace(order, **change).identity for change in changes)}) == 12
    unmixed = replace(order, shuffle="none")
    assert unmixed.identity == replace(unmixed, seed=8).identity  # it draws nothing
    assert of_paths("a/x", "a/y").identity == of_paths("b/x", "b/y").identity
    assert of_paths("a/x", "a/y").identity != of_paths("a/x", "a/x").identity
    assert of_paths("a/day", "b/day").identity == of_paths("c/day", "b/day").identity
    # Where files are permuted, that begins with the order of their whole paths.
    assert of_paths("a/day", "b/day", shuffle="files").identity != of_paths("c/day", "b/day", shuffle="files").identity
    assert [of_paths(f"cache/{mark:016x}-day_0").identity for mark in (1, 2)] == [of_paths("log/day_0").identity] * 2


@pytest.mark.parametrize("made", ["tables/{:016x}/00000/dt={}/part.parquet", "unpacked/{:016x}-day_{}"])
def test_cached_files_keep_permutation_after_move(made: str) -> None:
    orders = [
        of_paths(*(f"/cache/{made.format(mark, day)}" for day, mark in enumerate(marks)), shuffle="files")
        for marks in ((1, 2, 3), (3, 1, 2))  # the digits depend on the folder of the log
    ]
    assert orders[0].identity == orders[1].identity
    for epoch in range(4):
        assert log_rows(orders[0].blocks(epoch)) == log_rows(orders[1].blocks(epoch))
