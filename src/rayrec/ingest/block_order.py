"""Where every row of an epoch stands: a pure, deterministic order of blocks, dealt out to any number of workers.

An epoch is a sequence of blocks. A block is made of row ranges of a few segments, drawn from all over the log, whose rows
are permuted together; so a block can be made again at any time, on any node, from its number alone. Workers receive pieces
(row ranges of permuted blocks) in turn, evened up so that no worker holds two rows more than another. What remains of an
epoch after some steps is again a list of pieces, which can be dealt out to another number of workers.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rayrec.config import InputError
from rayrec.data.logs.index import Block, Part, row_numbers, source_of, sources_in_order
from rayrec.ingest.order import Share
from rayrec.row_tally import RowNumbers, RowTally, merged

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of block number `block` of an epoch, in the block's permuted order."""

    block: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def blocks_of_epoch(parts: Sequence[Part], *, shuffle: str, seed: int, epoch: int, segments_per_block: int) -> list[Block]:
    """The blocks of one epoch over the chosen rows.

    shuffle: `none` keeps the order of the log; `files` permutes files, keeping the order inside each; `window` permutes
    segments and then the rows of each block of `segments_per_block` segments; `full` does the same to a log whose rows are
    mixed as a whole already.
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
    """Which rows an epoch has and in what order they come."""

    parts: tuple[Part, ...]
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
        """Rows that no block of any epoch exceeds."""
        return sum(heapq.nlargest(self.segments_per_block, (part.stop - part.start for part in self.parts)))

    @cached_property
    def identity(self) -> str:
        """What the meaning of a position depends on, as 16 hex digits: which rows of which files, and how they are mixed.

        A file is known by its name, and by its segments with their numbers of rows and checksums, not by its folder, so a
        log may be moved. Takes under two seconds for a million parts.
        """
        return self._identity(checksums=True)

    def _identity(self, *, checksums: bool) -> str:
        sources = {path: source_of(path) for path in dict.fromkeys(part.segment.path for part in self.parts)}
        # `files` permutes them from that order on.
        files = sources_in_order(sources) if self.shuffle == "files" else list(dict.fromkeys(sources.values()))
        place_of = {file: place for place, file in enumerate(files)}
        file_of = {path: place_of[source] for path, source in sources.items()}
        numbers = (
            number
            for part in self.parts
            for number in (
                file_of[part.segment.path],
                part.segment.start,
                part.segment.stop,
                part.segment.rows,
                part.start,
                part.stop,
            )
        )
        seed = None if self.shuffle == "none" else self.seed
        digest = hashlib.sha256(repr((self.shuffle, seed, self.segments_per_block, [name for _, name in files])).encode())
        digest.update(np.fromiter(numbers, "<i8", count=6 * len(self.parts)).tobytes())
        if checksums and any(part.segment.checksum is not None for part in self.parts):
            sums = (-1 if part.segment.checksum is None else part.segment.checksum for part in self.parts)
            digest.update(np.fromiter(sums, "<i8", count=len(self.parts)).tobytes())
        return digest.hexdigest()[:16]

    def place(self, state: dict[str, Any] | None) -> Position:
        """Return the position of a stored state. Raises InputError for one in another order, whose pieces would be other rows of
        this one. A position that does not say its order passes; one of a checkpoint written before segments had checksums is
        compared without them."""
        if not state:
            return Position()
        position = Position.from_dict(state)
        if position.order is None:
            _logger.warning("the checkpoint does not say of which rows its position is; nothing checks that they are the same")
        elif position.order != self.identity and position.order != self._identity(checksums=False):
            raise InputError(
                "train_data: the run began with other rows, or with another order of them (path, files, shuffle, block_bytes, "
                "segments_per_block; seed), or the log was edited; give it those, or choose another --name"
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
            blocks, used = self.blocks(place.epoch), place.step_in_deal * place.batch_size
            left = [piece for hand in place.hands(blocks) for piece in after(hand, used)]
            untouched = [blocks[piece.block] for piece in left if piece.rows == blocks[piece.block].rows]
            ranges = merged(_numbers_of(part) for block in untouched for part in block.parts)
            tally.add_ranges(ranges, epoch=place.epoch, times=-1)
            for piece in left:
                if piece.rows < blocks[piece.block].rows:
                    tally.remove(RowNumbers(place.epoch, _numbers_in(blocks[piece.block], piece)))
        return tally


def _numbers_of(part: Part) -> tuple[int, int]:
    """[first, one after last) number in the log of a part's rows."""
    first = part.segment.first_row
    return first + part.start, first + part.stop


def _numbers_in(block: Block, piece: Piece) -> np.ndarray:
    return row_numbers([part.segment for part in block.parts])[block.order()[piece.start : piece.stop]]


def whole(blocks: Sequence[Block]) -> list[Piece]:
    """Every row of the epoch."""
    return [Piece(number, 0, block.rows) for number, block in enumerate(blocks) if block.rows]


def deal(pieces: Sequence[Piece], world_size: int) -> list[list[Piece]]:
    """Deals pieces to workers in turn, then moves rows from the ends of the longer hands to the shorter ones, so that
    hands differ by at most one row. No row is lost or repeated; the result depends on nothing but the arguments."""
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
    """What is left of a hand once its first `rows` rows are used."""
    left = []
    for piece in hand:
        used = min(rows, piece.rows)
        rows -= used
        if used < piece.rows:
            left.append(Piece(piece.block, piece.start + used, piece.stop))
    return left


def steps_in(rows_of_largest_hand: int, batch_size: int) -> int:
    return -(-rows_of_largest_hand // batch_size)


@dataclass(frozen=True)
class Position:
    """Where training stands in its data, between two steps. Plain values only; it is part of a checkpoint."""

    epoch: int = 0
    step_in_deal: int = 0
    """Steps done since the pieces were dealt."""
    world_size: int = 0
    """Workers the pieces were dealt to; 0: not dealt yet."""
    batch_size: int = 0
    """Rows a worker takes in a step."""
    pieces: tuple[Piece, ...] | None = None
    """What was dealt; None: the whole epoch."""
    order: str | None = None
    """`identity` of the order this is a place in; None: not said, as at the start."""

    def to_dict(self) -> dict[str, Any]:
        pieces = None if self.pieces is None else [[piece.block, piece.start, piece.stop] for piece in self.pieces]
        return {**vars(self), "pieces": pieces}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Position:
        pieces = None if stored["pieces"] is None else tuple(Piece(*piece) for piece in stored["pieces"])
        return cls(**{**stored, "pieces": pieces})

    def for_workers(self, blocks: Sequence[Block], *, world_size: int, batch_size: int) -> Position:
        """The same place in the data for (another) number of workers or batch size.

        With the same ones every worker keeps its rows and goes on with the very row that was next;
        otherwise what is left of all hands is dealt again.
        """
        if self.world_size == world_size and self.batch_size == batch_size:
            return self
        pieces = self.pieces
        if self.world_size:
            taken = self.step_in_deal * self.batch_size
            left = [piece for hand in self.hands(blocks) for piece in after(hand, taken)]
            pieces = tuple(sorted(left, key=lambda piece: (piece.block, piece.start)))
        return Position(self.epoch, 0, world_size, batch_size, pieces, self.order)

    def hands(self, blocks: Sequence[Block]) -> list[list[Piece]]:
        """Each worker's pieces as dealt, including those already used."""
        return deal(whole(blocks) if self.pieces is None else self.pieces, self.world_size)


@dataclass(frozen=True)
class BlockPlan:
    """One worker's steps from a position to the end of its epoch. Hands differ by a row at most, the larger ones first, so that
    all counts follow from the rows that were dealt."""

    order: BlockOrder
    start: Position
    """Dealt to the workers that train now."""
    rank: int

    @property
    def epoch(self) -> int:
        return self.start.epoch

    @cached_property
    def steps(self) -> int:
        largest = -(-self._rows // self.start.world_size)
        return steps_in(largest, self.start.batch_size) - self.start.step_in_deal

    def own_rows(self, step: int) -> int:
        """Return the rows of this worker in a step."""
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
        """That were dealt to all workers, with those of steps before the start."""
        pieces = self.start.pieces
        return self.order.rows if pieces is None else sum(piece.rows for piece in pieces)

    def _own_rows_until(self, step: int) -> int:
        """Of this worker, since the deal."""
        least, larger = divmod(self._rows, self.start.world_size)
        return min((self.start.step_in_deal + step) * self.start.batch_size, least + (self.rank < larger))

    def _dealt_rows(self, step: int) -> int:
        """Of all workers, since the deal."""
        workers, until = self.start.world_size, (self.start.step_in_deal + step) * self.start.batch_size
        least, larger = divmod(self._rows, workers)
        return larger * min(until, least + 1) + (workers - larger) * min(until, least)
