"""Deterministic epoch order: blocks of rows, sharded over any number of workers. Pure functions.

An epoch is a sequence of blocks. A block combines row ranges of a few random segments and permutes their rows together. Any node
can recompute it from its number. Pieces (row ranges of permuted blocks) are sharded round-robin and balanced so that shards
differ by at most one row. The rest of an epoch is also a list of pieces, which can be sharded over any number of workers.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from rayrec.config import InputError
from rayrec.data.logs.index import Block, SegmentRange, row_numbers, source_of, sources_in_order
from rayrec.ingest.order import Share
from rayrec.row_tally import RowNumbers, RowTally, merged

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Row range [start, stop) of block number `block` of an epoch, in its permuted order."""

    block: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def blocks_of_epoch(
    parts: Sequence[SegmentRange], *, shuffle: str, seed: int, epoch: int, segments_per_block: int
) -> list[Block]:
    """Compute the blocks of one epoch.

    shuffle: `none` keeps the log order. `files` permutes files and keeps the order within each. `window` permutes segments, and
    the rows of each block of `segments_per_block` segments. `full` does the same for a log that is already fully shuffled.
    """
    parts = list(parts)
    if shuffle == "none":
        ordered = parts
    elif shuffle == "files":
        files = sources_in_order(part.segment.path for part in parts)
        rank = {files[i]: place for place, i in enumerate(_generator(seed, epoch).permutation(len(files)))}
        ordered = sorted(parts, key=lambda part: rank[source_of(part.segment.path)])
    elif shuffle in ("window", "full"):
        ordered = [parts[i] for i in _generator(seed, epoch).permutation(len(parts))]
    else:
        raise AssertionError(shuffle)
    return [
        Block(tuple(ordered[i : i + segments_per_block]), (seed, epoch, i) if shuffle in ("window", "full") else None)
        for i in range(0, len(ordered), segments_per_block)
    ]


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))


@dataclass(frozen=True)
class BlockOrder:
    """Epoch order over row ranges of a click log."""

    parts: tuple[SegmentRange, ...]
    shuffle: str
    seed: int
    segments_per_block: int

    def blocks(self, epoch: int) -> list[Block]:
        return blocks_of_epoch(
            self.parts, shuffle=self.shuffle, seed=self.seed, epoch=epoch, segments_per_block=self.segments_per_block
        )

    @cached_property
    def rows(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    @cached_property
    def max_block_rows(self) -> int:
        """Upper bound of the rows per block in all epochs."""
        return sum(heapq.nlargest(self.segments_per_block, (part.stop - part.start for part in self.parts)))

    @cached_property
    def identity(self) -> str:
        """Hash of the rows and their order, as 16 hex digits. A position is valid only for an equal hash.

        Files are identified by their names and the row counts and checksums of their segments, not by their folder: a log can be
        moved. Takes less than 2 s for a million parts.
        """
        return self._identity(checksums=True)

    def _identity(self, *, checksums: bool) -> str:
        sources = {path: source_of(path) for path in dict.fromkeys(part.segment.path for part in self.parts)}
        # Shuffle mode `files` permutes files in this order.
        files = sources_in_order(sources) if self.shuffle == "files" else list(dict.fromkeys(sources.values()))
        place_of = {file: place for place, file in enumerate(files)}
        file_of = {path: place_of[source] for path, source in sources.items()}
        numbers = chain.from_iterable(
            (file_of[segment.path], segment.start, segment.stop, segment.rows, part.start, part.stop)
            for part in self.parts
            for segment in [part.segment]
        )
        seed = None if self.shuffle == "none" else self.seed
        digest = hashlib.sha256(repr((self.shuffle, seed, self.segments_per_block, [name for _, name in files])).encode())
        digest.update(np.fromiter(numbers, "<i8", count=6 * len(self.parts)).tobytes())
        if checksums and any(part.segment.checksum is not None for part in self.parts):
            sums = (-1 if part.segment.checksum is None else part.segment.checksum for part in self.parts)
            digest.update(np.fromiter(sums, "<i8", count=len(self.parts)).tobytes())
        return digest.hexdigest()[:16]

    def place(self, state: dict[str, Any] | None) -> Position:
        """Return the position of a stored state. Raises InputError if it belongs to another order. Accepts a position without an
        order hash, and compares hashes without checksums for older checkpoints."""
        if not state:
            return Position()
        position = Position.from_dict(state)
        if position.order is None:
            _logger.warning("Checkpoint does not identify its training rows. Cannot verify that they are unchanged.")
        elif position.order != self.identity and position.order != self._identity(checksums=False):
            raise InputError(
                "train_data: cannot resume, because the rows or their order changed (path, files, shuffle, block_bytes, "
                "segments_per_block; seed), or the log was edited. Restore the original settings, or choose another --name."
            )
        return position

    def start(self, epoch: int) -> Position:
        return Position(epoch)

    def plan(self, place: Position, share: Share) -> BlockPlan:
        blocks = self.blocks(place.epoch) if place.world_size else ()
        start = place.for_workers(blocks, world_size=share.world_size, batch_size=share.batch_size)
        return BlockPlan(self, start, share.rank)

    def state(self, place: Position) -> dict[str, Any]:
        return replace(place, order=self.identity).to_dict()

    def trained(self, place: Position) -> RowTally:
        tally = RowTally()
        all_rows = merged(_numbers_of(part) for part in self.parts)
        for epoch in range(place.epoch):
            tally.add_ranges(all_rows, epoch=epoch)
        if place.world_size:
            tally.add_ranges(all_rows, epoch=place.epoch)
            blocks = self.blocks(place.epoch)
            left = place.remaining(blocks)
            untouched = [blocks[piece.block] for piece in left if piece.rows == blocks[piece.block].rows]
            ranges = merged(_numbers_of(part) for block in untouched for part in block.parts)
            tally.add_ranges(ranges, epoch=place.epoch, times=-1)
            for piece in left:
                block = blocks[piece.block]
                if piece.rows < block.rows:
                    numbers = row_numbers([part.segment for part in block.parts])[block.order()[piece.start : piece.stop]]
                    tally.remove(RowNumbers(place.epoch, numbers))
        return tally


def _numbers_of(part: SegmentRange) -> tuple[int, int]:
    """Return the range of the part's row numbers in the log, as [start, stop)."""
    first = part.segment.first_row
    return first + part.start, first + part.stop


def whole(blocks: Sequence[Block]) -> list[Piece]:
    """Return pieces that cover all rows of the epoch."""
    return [Piece(number, 0, block.rows) for number, block in enumerate(blocks) if block.rows]


def deal(pieces: Sequence[Piece], world_size: int) -> list[list[Piece]]:
    """Shard pieces round-robin, then move rows from the ends of longer shards to shorter ones, so that sizes differ by at most
    one row. Assigns each row exactly once. Pure."""
    hands: list[list[Piece]] = [list(pieces[rank::world_size]) for rank in range(world_size)]
    total = sum(piece.rows for piece in pieces)
    targets = [total // world_size + (rank < total % world_size) for rank in range(world_size)]
    surplus: list[Piece] = []
    for hand, target in zip(hands, targets, strict=True):
        excess = sum(piece.rows for piece in hand) - target
        while excess > 0:
            last = hand.pop()
            moved = min(excess, last.rows)
            surplus.append(Piece(last.block, last.stop - moved, last.stop))
            if moved < last.rows:
                hand.append(Piece(last.block, last.start, last.stop - moved))
            excess -= moved
    for hand, target in zip(hands, targets, strict=True):
        lacking = target - sum(piece.rows for piece in hand)
        while lacking > 0:
            last = surplus.pop()
            moved = min(lacking, last.rows)
            hand.append(Piece(last.block, last.start, last.start + moved))
            if moved < last.rows:
                surplus.append(Piece(last.block, last.start + moved, last.stop))
            lacking -= moved
    assert not surplus
    return hands


def after(hand: Sequence[Piece], rows: int) -> list[Piece]:
    """Return a shard without its first `rows` rows."""
    left = []
    for piece in hand:
        used = min(rows, piece.rows)
        rows -= used
        if used < piece.rows:
            left.append(Piece(piece.block, piece.start + used, piece.stop))
    return left


@dataclass(frozen=True)
class Position:
    """Position of training in its data, between two steps. Part of checkpoints, so plain values only."""

    epoch: int = 0
    step_in_deal: int = 0
    """Number of steps since the pieces were sharded."""
    world_size: int = 0
    """Number of workers over which the pieces were sharded. 0 before sharding."""
    batch_size: int = 0
    """Rows per worker and step."""
    pieces: tuple[Piece, ...] | None = None
    """Sharded pieces. None means the full epoch."""
    order: str | None = None
    """`identity` of the order. None at the start, and in old checkpoints."""

    def to_dict(self) -> dict[str, Any]:
        pieces = None if self.pieces is None else [[piece.block, piece.start, piece.stop] for piece in self.pieces]
        return {**vars(self), "pieces": pieces}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Position:
        pieces = None if stored["pieces"] is None else tuple(Piece(*piece) for piece in stored["pieces"])
        return cls(**{**stored, "pieces": pieces})

    def for_workers(self, blocks: Sequence[Block], *, world_size: int, batch_size: int) -> Position:
        """Return this position for a number of workers and a batch size. If both are unchanged, every worker keeps its rows and
        continues with its next row. Otherwise the remaining rows of all shards are sharded again."""
        if self.world_size == world_size and self.batch_size == batch_size:
            return self
        pieces = self.pieces
        if self.world_size:
            pieces = tuple(sorted(self.remaining(blocks), key=lambda piece: (piece.block, piece.start)))
        return Position(self.epoch, 0, world_size, batch_size, pieces, self.order)

    def remaining(self, blocks: Sequence[Block]) -> list[Piece]:
        """Return the unused pieces of all shards."""
        used = self.step_in_deal * self.batch_size
        return [piece for hand in self.hands(blocks) for piece in after(hand, used)]

    def hands(self, blocks: Sequence[Block]) -> list[list[Piece]]:
        """Return the shard of each worker, including rows already used."""
        return deal(whole(blocks) if self.pieces is None else self.pieces, self.world_size)


@dataclass(frozen=True)
class BlockPlan:
    """Steps of one worker from a position to the end of its epoch. Shards differ by at most one row, larger ones first, so that
    all counts follow from the number of sharded rows."""

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
        return -(-largest // self.start.batch_size) - self.start.step_in_deal

    def own_rows(self, step: int) -> int:
        """Return the row count of this worker in a step."""
        return self._own_rows_until(step + 1) - self._own_rows_until(step)

    def rows_until(self, step: int) -> int:
        return self._dealt_rows(step) - self._dealt_rows(0)

    def after(self, step: int) -> Position:
        return replace(self.start, step_in_deal=self.start.step_in_deal + step)

    def pieces(self, steps: int) -> Iterator[tuple[Block, Piece]]:
        """Return the pieces to read for the first steps."""
        blocks = self.order.blocks(self.epoch)
        left = self._own_rows_until(steps) - self._own_rows_until(0)
        for piece in after(self.start.hands(blocks)[self.rank], self._own_rows_until(0)):
            if left <= 0:
                break
            yield blocks[piece.block], piece
            left -= piece.rows

    @cached_property
    def _rows(self) -> int:
        """Number of sharded rows of all workers, including steps before the start."""
        pieces = self.start.pieces
        return self.order.rows if pieces is None else sum(piece.rows for piece in pieces)

    def _own_rows_until(self, step: int) -> int:
        """Count the rows of this worker since sharding."""
        least, larger = divmod(self._rows, self.start.world_size)
        return min((self.start.step_in_deal + step) * self.start.batch_size, least + (self.rank < larger))

    def _dealt_rows(self, step: int) -> int:
        """Count the rows of all workers since sharding."""
        workers, until = self.start.world_size, (self.start.step_in_deal + step) * self.start.batch_size
        least, larger = divmod(self._rows, workers)
        return larger * min(until, least + 1) + (workers - larger) * min(until, least)
