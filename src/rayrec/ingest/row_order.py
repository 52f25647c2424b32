"""The order of numbered rows in each epoch: a function of seed and epoch alone, so that a position is two numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from rayrec.config import InputError
from rayrec.ingest.order import Share
from rayrec.row_tally import RowNumbers, RowTally


class RowPlace(NamedTuple):
    """The place before row `offset` of an epoch's order."""

    epoch: int
    offset: int


@dataclass(frozen=True)
class RowOrder:
    """Rows come window by window; within a window every row has the same chance of every place.

    Memory: 8 bytes for each row of a window. With all rows in one window the order is that of torch's DistributedSampler:
    `torch.randperm(rows)` by a generator seeded with seed + epoch.

    A step of all workers has `batch_size * world_size` rows that follow each other; worker r has rows r, r + world_size, ... of
    them. What is left at the end of an epoch makes a smaller step, or joins the one before if it is fewer than two rows a worker
    (which batch normalisation could not train on).
    """

    chunk_rows: tuple[int, ...]
    """Rows of each chunk (shard)."""
    shuffle: Literal["none", "files", "window", "full"]
    """none: by number; files: chunks in random order; window: as files, and the rows of every `chunks_per_window` chunks
    mixed; full: all rows mixed."""
    seed: int
    chunks_per_window: int
    small_steps: bool = False
    """Whether any rest is a step by itself, for evaluation."""
    data_hash: str | None = None
    """Of the rows, which a place in them then depends on."""

    @cached_property
    def rows(self) -> int:
        return sum(self.chunk_rows)

    def numbers(self, epoch: int, offset: int) -> Iterator[np.ndarray]:
        """The numbers of the rows from place `offset` of an epoch on, int64, a window at a time."""
        for number, chunks in enumerate(self._windows(epoch)):
            rows = sum(self.chunk_rows[chunk] for chunk in chunks)
            if offset < rows:
                yield self._numbers(epoch, number, chunks)[offset:]
            offset = max(0, offset - rows)

    def place(self, state: dict[str, Any] | None) -> RowPlace:
        if not self.rows:
            raise InputError("the training data has no rows")
        if not state:
            return self.start(0)
        for name, value in self._identity.items():
            if state.get(name, value) != value:  # what earlier versions did not store cannot be compared
                raise InputError(
                    f"train_data: the checkpoint's position is one in data with {name} {state[name]}, and this has {value}; go "
                    "on with the data and order the run began with, or choose another --name"
                )
        return RowPlace(state["epoch"], state["offset"])

    def start(self, epoch: int) -> RowPlace:
        return RowPlace(epoch, 0)

    def plan(self, place: RowPlace, share: Share) -> RowPlan:
        return RowPlan(self, place, share)

    def state(self, place: RowPlace) -> dict[str, Any]:
        return {"epoch": place.epoch, "offset": place.offset, **self._identity}

    def trained(self, place: RowPlace) -> RowTally:
        tally = RowTally()
        for past in range(place.epoch + bool(place.offset)):
            tally.add_ranges([(0, self.rows)], epoch=past)
        if place.offset:
            for numbers in self.numbers(*place):
                tally.remove(RowNumbers(place.epoch, numbers))
        return tally

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What the meaning of a place depends on: which rows these are, and how they are mixed."""
        identity: dict[str, Any] = {"rows": self.rows, "chunks": len(self.chunk_rows)}
        if self.data_hash is not None:
            identity["data_hash"] = self.data_hash
        identity["chunk_rows"] = hashlib.sha256(np.array(self.chunk_rows, "<i8").tobytes()).hexdigest()[:16]
        identity |= {"shuffle": self.shuffle, "seed": self.seed}
        if self.shuffle == "window":  # one that holds all chunks is the same whatever its size
            identity["window"] = min(self.chunks_per_window, len(self.chunk_rows))
        return identity

    def _windows(self, epoch: int) -> list[list[int]]:
        count = len(self.chunk_rows)
        size = count if self.shuffle == "full" else self.chunks_per_window
        order = list(range(count))
        if self.shuffle == "files" or (self.shuffle == "window" and count > size):  # one window is mixed anyway
            order = torch.randperm(count, generator=_generator(self.seed + epoch)).tolist()
        return [order[start : start + size] for start in range(0, count, size)]

    def _numbers(self, epoch: int, window: int, chunks: list[int]) -> np.ndarray:
        numbers = np.concatenate(
            [np.arange(self._starts[chunk], self._starts[chunk] + self.chunk_rows[chunk]) for chunk in chunks]
        )
        if self.shuffle in ("none", "files"):
            return numbers
        # The first window's generator is DistributedSampler's; further ones are apart from those of other epochs.
        generator = _generator(self.seed + epoch + (window << 32))
        return numbers[torch.randperm(len(numbers), generator=generator).numpy()]

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.chunk_rows)])


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class RowPlan:
    """One worker's steps from a place to the end of its epoch."""

    order: RowOrder
    start: RowPlace
    share: Share

    @property
    def epoch(self) -> int:
        return self.start.epoch

    @cached_property
    def steps(self) -> int:
        full, rest = divmod(self._rows, self._step_rows)
        fewest = 1 if self.order.small_steps else min(2 * self.share.world_size, self._step_rows)
        return full if full and rest < fewest else full + bool(rest)

    def rows_until(self, step: int) -> int:
        return self._rows if step >= self.steps else step * self._step_rows

    def after(self, step: int) -> RowPlace:
        return RowPlace(self.epoch, self.start.offset + step * self._step_rows)

    def numbers(self) -> Iterator[np.ndarray]:
        """Return the numbers of all workers' rows, a window at a time."""
        return self.order.numbers(*self.start)

    @property
    def _rows(self) -> int:
        return self.order.rows - self.start.offset

    @property
    def _step_rows(self) -> int:
        return self.share.batch_size * self.share.world_size
