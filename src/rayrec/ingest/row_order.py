"""The order of numbered rows in each epoch: a function of seed and epoch alone, so that a position is two numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch


@dataclass(frozen=True)
class RowOrder:
    """Rows come window by window; within a window every row has the same chance of every place.

    Memory: 8 bytes for each row of a window. With all rows in one window the order is that of torch's DistributedSampler:
    `torch.randperm(rows)` by a generator seeded with seed + epoch.
    """

    chunk_rows: tuple[int, ...]
    """Rows of each chunk (shard)."""
    shuffle: Literal["none", "files", "window", "full"]
    """none: by number; files: chunks in random order; window: as files, and the rows of every `chunks_per_window` chunks
    mixed; full: all rows mixed."""
    seed: int
    chunks_per_window: int

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
