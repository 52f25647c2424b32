"""Epoch order of numbered rows: a pure function of seed and epoch, so that a position is two
numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from rayrec.config import InputError
from rayrec.ingest.block_order import BatchSharding, spread
from rayrec.trained_rows import RowNumbers, TrainedRows


class RowPosition(NamedTuple):
    """Position before row `offset` of an epoch's order."""

    epoch: int
    offset: int


@dataclass(frozen=True)
class RowOrder:
    """Row order by windows, each shuffled uniformly. Uses 8 bytes of memory per row of a window.
    With one window, the order equals torch's DistributedSampler: `torch.randperm(rows)`, seeded
    with seed + epoch. A step of all workers has `batch_size * world_size` consecutive rows, of
    which worker r takes rows r, r + world_size, ... The rest of an epoch is a smaller step. If it
    has fewer than two rows per worker, too few for batch normalisation, it is added to the previous
    step.
    """

    chunk_rows: tuple[int, ...]
    """Row count of each chunk (shard)."""
    shuffle: Literal["none", "files", "window", "full"]
    """Shuffle mode. none: by number. files: chunks in random order. window: like files, and shuffle
    the rows of every `chunks_per_window` chunks. full: shuffle all rows.
    """
    seed: int
    chunks_per_window: int
    small_steps: bool = False
    """Whether to keep any rest as a separate step, for evaluation."""
    data_hash: str | None = None
    """Hash of the rows, compared on resume. None skips the comparison."""
    max_rows: int | None = None
    """Maximum number of rows, evenly spread (`spread`), for evaluation in the order `none`. None:
    all rows.
    """

    @cached_property
    def rows(self) -> int:
        rows = sum(self.chunk_rows)
        return rows if self.max_rows is None else min(rows, self.max_rows)

    # One window at a time: an epoch's order of all rows may be larger than memory.
    def numbers(self, epoch: int, offset: int) -> Iterator[np.ndarray]:
        """Yield the row numbers of an epoch from `offset`, int64, one window at a time."""
        if self.max_rows is not None:
            assert not offset
            yield from (np.arange(*span) for span in spread(sum(self.chunk_rows), self.max_rows))
            return
        for number, chunks in enumerate(self._windows(epoch)):
            rows = sum(self.chunk_rows[chunk] for chunk in chunks)
            if offset < rows:
                yield self._numbers(epoch, number, chunks)[offset:]
            offset = max(0, offset - rows)

    def position(self, state: dict[str, Any] | None) -> RowPosition:
        if not self.rows:
            raise InputError("the training data has no rows")
        if not state:
            return self.start(0)
        for name, value in self._identity.items():
            if state.get(name, value) != value:  # Older checkpoints lack some entries.
                raise InputError(
                    f"train_data: cannot resume, because {name} changed from {state[name]} to "
                    f"{value}. Restore the original data and order, or choose another --name."
                )
        return RowPosition(state["epoch"], state["offset"])

    def start(self, epoch: int) -> RowPosition:
        return RowPosition(epoch, 0)

    def plan(self, position: RowPosition, sharding: BatchSharding) -> RowPlan:
        return RowPlan(self, position, sharding)

    def state(self, position: RowPosition) -> dict[str, Any]:
        return {"epoch": position.epoch, "offset": position.offset, **self._identity}

    def trained(self, position: RowPosition) -> TrainedRows:
        tally = TrainedRows()
        for past in range(position.epoch + bool(position.offset)):
            tally.add_ranges([(0, self.rows)], epoch=past)
        if position.offset:
            for numbers in self.numbers(*position):
                tally.remove(RowNumbers(position.epoch, numbers))
        return tally

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Identity of the rows and their order. A position is valid only for an equal identity."""
        identity: dict[str, Any] = {"rows": self.rows, "chunks": len(self.chunk_rows)}
        if self.data_hash is not None:
            identity["data_hash"] = self.data_hash
        identity["chunk_rows"] = hashlib.sha256(
            np.array(self.chunk_rows, "<i8").tobytes()
        ).hexdigest()[:16]
        identity |= {"shuffle": self.shuffle, "seed": self.seed}
        if self.shuffle == "window":  # Any size that covers all chunks gives the same order.
            identity["window"] = min(self.chunks_per_window, len(self.chunk_rows))
        return identity

    def _windows(self, epoch: int) -> list[list[int]]:
        count = len(self.chunk_rows)
        size = count if self.shuffle == "full" else self.chunks_per_window
        order = list(range(count))
        # A single window is shuffled anyway.
        if self.shuffle == "files" or (self.shuffle == "window" and count > size):
            order = torch.randperm(count, generator=_generator(self.seed + epoch)).tolist()
        return [order[start : start + size] for start in range(0, count, size)]

    def _numbers(self, epoch: int, window: int, chunks: list[int]) -> np.ndarray:
        numbers = np.concatenate(
            [self._starts[chunk] + np.arange(self.chunk_rows[chunk]) for chunk in chunks]
        )
        if self.shuffle in ("none", "files"):
            return numbers
        # The first window uses the generator of DistributedSampler. Other windows never share one
        # with another epoch.
        return numbers[
            torch.randperm(
                len(numbers), generator=_generator(self.seed + epoch + (window << 32))
            ).numpy()
        ]

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0, *self.chunk_rows])


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Row numbers reach workers as in torch's DistributedSampler: row i of a step belongs to worker i
# modulo their number. A position is an offset in the epoch's order, so it needs nothing of the
# former workers:
#
#   offset        rows trained in the epoch
#   steps         of batch_size * workers rows; a small rest is left out, or is a small step
#   resize        other steps from the same offset on
@dataclass(frozen=True)
class RowPlan:
    """Steps of one worker from a position to the end of its epoch."""

    order: RowOrder
    start: RowPosition
    sharding: BatchSharding

    @property
    def epoch(self) -> int:
        return self.start.epoch

    @cached_property
    def steps(self) -> int:
        full, rest = divmod(self._rows, self._step_rows)
        # A rest smaller than two rows per worker is dropped: batch norm has no statistics of one
        # row.
        fewest = 1 if self.order.small_steps else min(2 * self.sharding.world_size, self._step_rows)
        return full if full and rest < fewest else full + bool(rest)

    def rows_until(self, step: int) -> int:
        return self._rows if step >= self.steps else step * self._step_rows

    def position_at(self, step: int) -> RowPosition:
        return RowPosition(self.epoch, self.start.offset + step * self._step_rows)

    def numbers(self) -> Iterator[np.ndarray]:
        """Yield the row numbers of all workers, one window at a time."""
        return self.order.numbers(*self.start)

    @property
    def _rows(self) -> int:
        return self.order.rows - self.start.offset

    @property
    def _step_rows(self) -> int:
        return self.sharding.batch_size * self.sharding.world_size
