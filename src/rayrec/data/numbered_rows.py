"""Rows that can be read in any order, by number: images in memory, blocks of tokens in shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, final

import numpy as np


class RowSource(Protocol):
    """One set of rows, numbered from 0, as one process reads it."""

    def __len__(self) -> int: ...

    @property
    def chunk_rows(self) -> Sequence[int]:
        """Rows of each piece that is cheap to read as a whole, a shard for instance, in the order of their numbers."""
        ...

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows int64 (n,) as named arrays (n, ...), in the order asked for. Raises InputError for damaged data."""
        ...

    def will_read(self, indices: np.ndarray) -> None:
        """A hint that these rows are wanted soon; returns at once."""
        ...

    def close(self) -> None: ...


@final
class ArrayRows:
    """Rows in memory: named arrays (rows, ...) of equal length."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        lengths = {name: len(array) for name, array in arrays.items()}
        assert len(set(lengths.values())) == 1, lengths
        self._arrays = dict(arrays)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    @property
    def chunk_rows(self) -> Sequence[int]:
        return (len(self),)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[indices] for name, array in self._arrays.items()}

    def will_read(self, indices: np.ndarray) -> None:
        pass

    def close(self) -> None:
        pass
