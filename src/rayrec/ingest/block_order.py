"""Epoch orders: their interface, and the order of a click log's blocks, sharded over any number of
workers. Pure functions: equal on every node. An epoch is a sequence of blocks. A block combines row
ranges of a few random segments and permutes their rows together. Any node can recompute it from its
number. Block ranges (row ranges of permuted blocks) are sharded round-robin and balanced so that
shards differ by at most one row. The rest of an epoch is also a list of block ranges, which can be
sharded over any number of workers. No array grows with the number of steps.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np

from rayrec.config import InputError
from rayrec.data.logs.index import (
    Block,
    SegmentRange,
    resolve_source,
    row_numbers,
    sources_in_order,
)
from rayrec.trained_rows import RowNumbers, TrainedRows, merge_ranges

_logger = logging.getLogger(__name__)

PositionT = TypeVar("PositionT")
PositionT_co = TypeVar("PositionT_co", covariant=True)
Plan = TypeVar("Plan", bound="EpochPlan[Any]")
Plan_co = TypeVar("Plan_co", bound="EpochPlan[Any]", covariant=True)


@dataclass(frozen=True)
class BatchSharding:
    """Share of one worker in each step."""

    rank: int
    world_size: int
    batch_size: int
    """Rows per worker and step."""


class EpochPlan(Protocol[PositionT_co]):
    """Steps of one worker in an epoch, or in the rest of one."""

    @property
    def epoch(self) -> int: ...

    @property
    def steps(self) -> int:
        """Number of steps, equal on all workers."""

    def rows_until(self, step: int) -> int:
        """Return the row count of all workers before a step."""

    def position_at(self, step: int) -> PositionT_co:
        """Return the position before a step."""


Plans: TypeAlias = Callable[[], Iterator[tuple[Plan, int]]]
"""Function that yields the plan and number of steps of each epoch. All calls yield the same."""


_MAX_SPANS: Final = 64
"""Maximum number of ranges of `spread`. Each may require reading a full segment of a log."""


def spread(rows: int, count: int) -> list[tuple[int, int]]:
    """Return up to 64 ranges [start, stop) with `count` of `rows` rows in all, or all of these,
    evenly spread. Pure.
    """
    if count >= rows:
        return [(0, rows)]
    size = -(-count // _MAX_SPANS)
    starts = [(first * rows // count, first) for first in range(0, count, size)]
    return [(start, start + min(size, count - first)) for start, first in starts]


class EpochOrder(Protocol[PositionT, Plan_co]):
    """Rows of an epoch and their order."""

    @property
    def rows(self) -> int:
        """Row count of an epoch."""

    def position(self, state: dict[str, Any] | None) -> PositionT:
        """Return the position of a stored state, or the start for None. Raises InputError if the
        rows or their order differ.
        """

    def start(self, epoch: int) -> PositionT: ...

    def plan(self, position: PositionT, sharding: BatchSharding) -> Plan_co:
        """Plan the steps from a position to the end of its epoch. Any number of workers may have
        reached it.
        """

    def state(self, position: PositionT) -> dict[str, Any]:
        """Return the position as JSON values, equal on all workers."""

    def trained(self, position: PositionT) -> TrainedRows:
        """Return the rows trained before a position: every row once per epoch, minus the rest of
        the current epoch.
        """


@dataclass(frozen=True)
class BlockRange:
    """Row range [start, stop) of block number `block` of an epoch, in its permuted order."""

    block: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


# How rows reach workers. Every step is a pure function of (seed, epoch, workers, position), so no
# process hands out rows and nothing is lost with one:
#
#   parts of segments -- permuted by (seed, epoch) --> blocks of segments_per_block parts
#   blocks            -- permuted by (seed, epoch, block) --> rows of a block, in random order
#   block ranges      -- round-robin, then balanced to one row --> shard of each worker
#   shard             -- batch_size rows each --> steps
#
# After a resize, `remaining` lists the block ranges that no worker has trained. These are sharded
# again, as `pieces` of the new position. So a row is trained once per epoch, however often the
# number of workers changes.
@dataclass(frozen=True)
class BlockOrder:
    """Epoch order over row ranges of a click log."""

    parts: tuple[SegmentRange, ...]
    shuffle: str
    """Shuffle mode. `none` keeps the log order. `files` permutes files and keeps the order within
    each. `window` permutes segments, and the rows of each block. `full` does the same for a log
    that is already fully shuffled.
    """
    seed: int
    segments_per_block: int

    def blocks(self, epoch: int) -> list[Block]:
        """Compute the blocks of one epoch."""
        parts = self.parts
        size = self.segments_per_block
        is_mixed = self.shuffle in ("window", "full")
        if self.shuffle != "none":
            generator = np.random.Generator(
                np.random.Philox(np.random.SeedSequence((self.seed, epoch)))
            )
            if is_mixed:
                parts = tuple(parts[i] for i in generator.permutation(len(parts)))
            else:
                assert self.shuffle == "files"
                files = sources_in_order(part.segment.path for part in parts)
                rank = {
                    files[i]: number for number, i in enumerate(generator.permutation(len(files)))
                }
                parts = tuple(
                    sorted(parts, key=lambda part: rank[resolve_source(part.segment.path)])
                )
        return [
            Block(parts[i : i + size], (self.seed, epoch, i) if is_mixed else None)
            for i in range(0, len(parts), size)
        ]

    @cached_property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @cached_property
    def max_block_rows(self) -> int:
        """Upper bound of the rows per block in all epochs."""
        return sum(heapq.nlargest(self.segments_per_block, (part.rows for part in self.parts)))

    @cached_property
    def identity(self) -> str:
        """Hash of the rows and their order, as 16 hex digits. A position needs an equal hash. Files
        are known by names, row counts and checksums of segments, not by folder: a log can be moved.
        Takes less than 2 s for a million parts.
        """
        return self._identity(checksums=True)

    def _identity(self, *, checksums: bool) -> str:
        sources = {
            path: resolve_source(path)
            for path in dict.fromkeys(part.segment.path for part in self.parts)
        }
        # Shuffle mode `files` permutes files in this order.
        files = (
            sources_in_order(sources)
            if self.shuffle == "files"
            else list(dict.fromkeys(sources.values()))
        )
        file_numbers = {file: number for number, file in enumerate(files)}
        file_of = {path: file_numbers[source] for path, source in sources.items()}
        numbers = chain.from_iterable(
            (
                file_of[segment.path],
                segment.start,
                segment.stop,
                segment.rows,
                part.start,
                part.stop,
            )
            for part in self.parts
            for segment in [part.segment]
        )
        seed = None if self.shuffle == "none" else self.seed
        digest = hashlib.sha256(
            repr(
                (self.shuffle, seed, self.segments_per_block, [name for _, name in files])
            ).encode()
        )
        digest.update(np.fromiter(numbers, "<i8", count=6 * len(self.parts)).tobytes())
        if checksums and any(part.segment.checksum is not None for part in self.parts):
            sums = (
                -1 if part.segment.checksum is None else part.segment.checksum
                for part in self.parts
            )
            digest.update(np.fromiter(sums, "<i8", count=len(self.parts)).tobytes())
        return digest.hexdigest()[:16]

    def position(self, state: dict[str, Any] | None) -> Position:
        """Return the position of a stored state. Raises InputError if it belongs to another order.
        Accepts a position without an order hash, and compares hashes without checksums for older
        checkpoints.
        """
        if not state:
            return Position()
        position = Position.from_dict(state)
        if position.order is None:
            _logger.warning(
                "Checkpoint does not identify its training rows. Cannot verify that they are "
                "unchanged."
            )
        elif position.order != self.identity and position.order != self._identity(checksums=False):
            raise InputError(
                "train_data: cannot resume, because the rows or their order changed (path, files, "
                "shuffle, block_bytes, segments_per_block; seed), or the log was edited. Restore "
                "the original settings, or choose another --name."
            )
        return position

    def start(self, epoch: int) -> Position:
        return Position(epoch)

    def limited(self, max_rows: int) -> BlockOrder:
        """Return the order of at most `max_rows` of the rows (`spread`)."""
        starts = np.cumsum([0, *(part.stop - part.start for part in self.parts)]).tolist()
        chosen = []
        for first, stop in spread(self.rows, max_rows):
            number = bisect_right(starts, first) - 1
            while number < len(self.parts) and starts[number] < stop:
                part = self.parts[number]
                base = self.parts[number].start - starts[number]
                chosen.append(
                    replace(
                        part,
                        start=max(part.start, base + first),
                        stop=min(part.stop, base + stop),
                    )
                )
                number += 1
        return replace(self, parts=tuple(chosen))

    def plan(self, position: Position, sharding: BatchSharding) -> BlockPlan:
        blocks = self.blocks(position.epoch) if position.world_size else ()
        start = position.for_workers(
            blocks,
            world_size=sharding.world_size,
            batch_size=sharding.batch_size,
        )
        return BlockPlan(self, start, sharding.rank)

    def state(self, position: Position) -> dict[str, Any]:
        return replace(position, order=self.identity).to_dict()

    def trained(self, position: Position) -> TrainedRows:
        tally = TrainedRows()
        all_rows = merge_ranges(_row_numbers(part) for part in self.parts)
        for epoch in range(position.epoch):
            tally.add_ranges(all_rows, epoch=epoch)
        if position.world_size:
            tally.add_ranges(all_rows, epoch=position.epoch)
            blocks = self.blocks(position.epoch)
            left = position.remaining(blocks)
            untouched = [
                blocks[block_range.block]
                for block_range in left
                if block_range.rows == blocks[block_range.block].rows
            ]
            ranges = merge_ranges(_row_numbers(part) for block in untouched for part in block.parts)
            tally.add_ranges(ranges, epoch=position.epoch, times=-1)
            for block_range in left:
                block = blocks[block_range.block]
                if block_range.rows < block.rows:
                    order = block.order()[block_range.start : block_range.stop]
                    numbers = row_numbers(block.segments)[order]
                    tally.remove(RowNumbers(position.epoch, numbers))
        return tally


def _row_numbers(part: SegmentRange) -> tuple[int, int]:
    """Return the range of the part's row numbers in the log, as [start, stop)."""
    first = part.segment.first_row
    return first + part.start, first + part.stop


def full_epoch(blocks: Sequence[Block]) -> list[BlockRange]:
    """Return block ranges that cover all rows of the epoch."""
    return [BlockRange(number, 0, block.rows) for number, block in enumerate(blocks) if block.rows]


def shard_block_ranges(
    block_ranges: Sequence[BlockRange],
    world_size: int,
) -> list[list[BlockRange]]:
    """Shard block ranges round-robin, then move rows from the ends of longer shards to shorter
    ones, so that sizes differ by at most one row. Assigns each row exactly once. Pure.
    """
    shards: list[list[BlockRange]] = [
        list(block_ranges[rank::world_size]) for rank in range(world_size)
    ]
    total = sum(block_range.rows for block_range in block_ranges)
    targets = [total // world_size + (rank < total % world_size) for rank in range(world_size)]
    surplus: list[BlockRange] = []
    for shard, target in zip(shards, targets, strict=True):
        excess = sum(block_range.rows for block_range in shard) - target
        while excess > 0:
            last = shard.pop()
            moved = min(excess, last.rows)
            surplus.append(BlockRange(last.block, last.stop - moved, last.stop))
            if moved < last.rows:
                shard.append(BlockRange(last.block, last.start, last.stop - moved))
            excess -= moved
    for shard, target in zip(shards, targets, strict=True):
        lacking = target - sum(block_range.rows for block_range in shard)
        while lacking > 0:
            last = surplus.pop()
            moved = min(lacking, last.rows)
            shard.append(BlockRange(last.block, last.start, last.start + moved))
            if moved < last.rows:
                surplus.append(BlockRange(last.block, last.start + moved, last.stop))
            lacking -= moved
    assert not surplus
    return shards


def skip_rows(shard: Sequence[BlockRange], rows: int) -> list[BlockRange]:
    """Return a shard without its first `rows` rows."""
    left = []
    for block_range in shard:
        used = min(rows, block_range.rows)
        rows -= used
        if used < block_range.rows:
            left.append(BlockRange(block_range.block, block_range.start + used, block_range.stop))
    return left


@dataclass(frozen=True)
class Position:
    """Position of training in its data, between two steps. SegmentRange of checkpoints, so plain
    values only.
    """

    epoch: int = 0
    steps_since_sharding: int = 0
    """Number of steps since the rows were sharded."""
    world_size: int = 0
    """Number of workers over which the rows were sharded. 0 before sharding."""
    batch_size: int = 0
    """Rows per worker and step."""
    block_ranges: tuple[BlockRange, ...] | None = None
    """Sharded block ranges. None means the full epoch."""
    order: str | None = None
    """`identity` of the order. None at the start, and in old checkpoints."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state under the keys of checkpoints, which never change."""
        values = dict(vars(self))
        steps = values.pop("steps_since_sharding")
        ranges = values.pop("block_ranges")
        stored_ranges = (
            None if ranges is None else [[part.block, part.start, part.stop] for part in ranges]
        )
        return {**values, "step_in_deal": steps, "pieces": stored_ranges}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Position:
        values = dict(stored)
        steps = values.pop("step_in_deal")
        stored_ranges = values.pop("pieces")
        ranges = (
            None
            if stored_ranges is None
            else tuple(BlockRange(*numbers) for numbers in stored_ranges)
        )
        return cls(**values, steps_since_sharding=steps, block_ranges=ranges)

    def for_workers(self, blocks: Sequence[Block], *, world_size: int, batch_size: int) -> Position:
        """Return this position for a number of workers and a batch size. If both are unchanged,
        every worker keeps its rows and continues with its next row. Otherwise the remaining rows of
        all shards are sharded again.
        """
        if self.world_size == world_size and self.batch_size == batch_size:
            return self
        block_ranges = self.block_ranges
        if self.world_size:
            block_ranges = tuple(
                sorted(
                    self.remaining(blocks),
                    key=lambda block_range: (block_range.block, block_range.start),
                )
            )
        return Position(self.epoch, 0, world_size, batch_size, block_ranges, self.order)

    def remaining(self, blocks: Sequence[Block]) -> list[BlockRange]:
        """Return the unused block ranges of all shards."""
        used = self.steps_since_sharding * self.batch_size
        return [
            block_range for shard in self.shards(blocks) for block_range in skip_rows(shard, used)
        ]

    def shards(self, blocks: Sequence[Block]) -> list[list[BlockRange]]:
        """Return the shard of each worker, including rows already used."""
        return shard_block_ranges(
            full_epoch(blocks) if self.block_ranges is None else self.block_ranges,
            self.world_size,
        )


@dataclass(frozen=True)
class BlockPlan:
    """Steps of one worker from a position to the end of its epoch. Shards differ by at most one
    row, larger ones first, so that all counts follow from the number of sharded rows.
    """

    order: BlockOrder
    start: Position
    """Position, sharded over the current workers."""
    rank: int

    @property
    def epoch(self) -> int:
        return self.start.epoch

    @cached_property
    def steps(self) -> int:
        largest = -(-self._rows // self.start.world_size)
        return -(-largest // self.start.batch_size) - self.start.steps_since_sharding

    def worker_rows(self, step: int) -> int:
        """Return the row count of this worker in a step."""
        return self._worker_rows_until(step + 1) - self._worker_rows_until(step)

    def rows_until(self, step: int) -> int:
        return self._sharded_rows(step) - self._sharded_rows(0)

    def first_row(self, step: int) -> int:
        """Return the number of rows of all workers in the epoch before a step."""
        return self.order.rows - self._rows + self._sharded_rows(step)

    def position_at(self, step: int) -> Position:
        return replace(self.start, steps_since_sharding=self.start.steps_since_sharding + step)

    def block_ranges(self, steps: int) -> Iterator[tuple[Block, BlockRange]]:
        """Yield the block ranges to read for the first steps."""
        blocks = self.order.blocks(self.epoch)
        left = self._worker_rows_until(steps) - self._worker_rows_until(0)
        for block_range in skip_rows(
            self.start.shards(blocks)[self.rank],
            self._worker_rows_until(0),
        ):
            if left <= 0:
                break
            yield blocks[block_range.block], block_range
            left -= block_range.rows

    @cached_property
    def _rows(self) -> int:
        """Number of sharded rows of all workers, including steps before the start."""
        block_ranges = self.start.block_ranges
        return (
            self.order.rows
            if block_ranges is None
            else sum(block_range.rows for block_range in block_ranges)
        )

    def _worker_rows_until(self, step: int) -> int:
        min_rows, larger = divmod(self._rows, self.start.world_size)
        return min(
            (self.start.steps_since_sharding + step) * self.start.batch_size,
            min_rows + (self.rank < larger),
        )

    def _sharded_rows(self, step: int) -> int:
        workers = self.start.world_size
        until = (self.start.steps_since_sharding + step) * self.start.batch_size
        min_rows, larger = divmod(self._rows, workers)
        return larger * min(until, min_rows + 1) + (workers - larger) * min(until, min_rows)
