"""Counts of one column's tokens, in a growing table, and on disk if all tables together exceed the
memory limit.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.raw_block import RawBlock
from rayrec.native import c_fields, call

Items = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""(Tokens, counts int64, first rows int64 or None), unordered."""

TILE = 256  # From counting.c: tokens that a table must have room for
NO_ROW = 2**63 - 1

# A table filled in the order of another table's slots needs a different hash function, or each part
# would fill one corner. Tasks use the first, the driver the second, the merging of spilled
# partitions the third.
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD)


# Mirror of rayrec_counter in native/kernels.h. A TokenCounter owns it and what it points to:
#
#   slots           array `_slots` of the counter, replaced together with this structure
#   size, shift     number of slots, a power of two, and 64 minus its logarithm; constant
#   used            the kernels raise it
#   factor, words   hash function, and numbers of a slot; constant
class _CCounter(ctypes.Structure):
    _fields_ = c_fields("void* slots; int64 size used; uint64 factor; int32 shift words")


_HUGE_PAGE = 2 << 20


def _zeros(slots: int, words: int) -> np.ndarray:
    """Allocate a table; a large one in separate memory with huge pages, returned to the system
    immediately when freed.
    """
    size = slots * words * 8
    if size < _HUGE_PAGE:
        return np.zeros((slots, words), np.uint64)
    # The array keeps the mapping alive, and unmaps it when it is freed. malloc would keep the pages
    # for other arrays of this process.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint64).reshape(slots, words)


class TokenCounter:
    """Counts of one column's tokens in a growing open-addressing table with 16 bytes per slot, 24
    with first rows.
    """

    def __init__(
        self,
        slots: int = 1024,
        *,
        dtype: Any = np.uint32,
        first_rows: bool = False,
        family: int = 0,
    ) -> None:
        """Create a table for `dtype` uint32 or uint64; `first_rows` keeps each token's smallest
        row, `family` is a hash of 3.
        """
        self.dtype = np.dtype(dtype)
        assert self.dtype in (np.uint32, np.uint64)
        self.first_rows = first_rows
        self._family = family
        self._allocate(slots)

    @property
    def used(self) -> int:
        """Number of distinct tokens."""
        return self._c.used

    @property
    def num_bytes(self) -> int:
        return self._slots.nbytes

    def num_bytes_with(self, tokens: int) -> int:
        """Return the table size with room for `tokens` more tokens."""
        return self._slots_with(tokens) * self._slots.shape[1] * 8

    def count_values(self, tokens: np.ndarray, rows: np.ndarray | None = None) -> None:
        """Count tokens (uint32 or uint64), one each; `rows` (int64) are their row numbers if first
        rows are kept.
        """
        self._add(tokens, None, rows, 0)

    def merge(
        self,
        tokens: np.ndarray,
        counts: np.ndarray,
        first_rows: np.ndarray | None = None,
        *,
        shift_rows: int = 0,
    ) -> None:
        """Add tokens with their counts (1 or more) and, if kept, first rows, each raised by
        shift_rows.
        """
        self.reserve(len(tokens))
        self._add(tokens, counts, first_rows, shift_rows)

    def items(self, min_count: int = 1) -> Items:
        """Return the tokens counted at least `min_count` times, unordered."""
        return self.partitioned(0, min_count)[0]

    def partitioned(self, bits: int, min_count: int = 1) -> tuple[Items, np.ndarray]:
        """Return items ordered by partition, 2^bits of them, and the start of each, with the
        end.
        """
        offsets = np.empty((1 << bits) + 1, np.int64)
        sizes = (ctypes.c_int32(self.dtype.itemsize), ctypes.c_int32(bits))
        write = functools.partial(
            call, "rayrec_count_items", ctypes.byref(self._c), min_count, *sizes, offsets
        )
        size = write(None, None, None)
        tokens = np.empty(size, self.dtype)
        counts = np.empty(size, np.int64)
        rows = np.empty(size, np.int64) if self.first_rows else None
        write(tokens, counts, rows)
        return (tokens, counts, rows), offsets

    def clear(self) -> None:
        self._allocate(1024)

    def reserve(self, tokens: int) -> None:
        """Grow the table to take `tokens` more tokens without growing again."""
        size = self._slots_with(tokens)
        if size > self._c.size:
            # Kept until the move is done
            # The old structure points into the old array, and `_allocate` replaces both.
            slots = self._slots
            old = self._c
            self._allocate(size)
            assert slots is not None
            call("rayrec_count_move", ctypes.byref(old), ctypes.byref(self._c))

    def _slots_with(self, tokens: int) -> int:
        size = self._c.size
        while size // 3 * 2 < self._c.used + tokens + TILE:
            size *= 2
        return size

    def _allocate(self, slots: int) -> None:
        assert slots >= 2
        assert slots & (slots - 1) == 0
        words = 3 if self.first_rows else 2
        self._slots = _zeros(slots, words)
        shift = 64 - (slots.bit_length() - 1)
        self._c = _CCounter(self._slots.ctypes.data, slots, 0, _FACTORS[self._family], shift, words)

    def _add(
        self,
        tokens: np.ndarray,
        counts: np.ndarray | None,
        rows: np.ndarray | None,
        shift_rows: int,
    ) -> None:
        assert tokens.dtype in (np.uint32, np.uint64)
        assert tokens.itemsize <= self.dtype.itemsize
        assert not self.first_rows or rows is not None or not len(tokens)
        tokens = _plain(tokens, tokens.dtype)
        counts = None if counts is None else _plain(counts, np.int64)
        rows = _plain(rows, np.int64) if self.first_rows and rows is not None else None
        done = 0
        # The kernel counts until the table is two thirds full, and returns the number of counted
        # tokens. So a table never grows for tokens that repeat.
        while True:
            counted, numbers = (None if each is None else each[done:] for each in (counts, rows))
            sizes = (shift_rows, len(tokens) - done, ctypes.byref(self._c))
            done += call(
                "rayrec_count_values",
                tokens[done:],
                ctypes.c_int32(tokens.itemsize),
                counted,
                numbers,
                *sizes,
            )
            if done == len(tokens):
                return
            self.reserve(0)


def _plain(array: np.ndarray, dtype: Any) -> np.ndarray:
    # The kernels read contiguous and aligned numbers. A copy lives as long as the caller's
    # variable.
    return np.require(array, dtype, ["C", "A"])


def count_columns(
    counters: Sequence[TokenCounter], raw: RawBlock, first_row: int, absences: np.ndarray
) -> None:
    """Count the categorical columns of a log of hexadecimal tokens, with one counter each. Row r is
    number first_row + r. `absences` int64 [columns, 2] is the number of rows without a value and
    the first such row.
    """
    tokens = raw.categories
    done = 0
    if not counters:
        return
    assert all(tokens.itemsize <= counter.dtype.itemsize for counter in counters)
    while True:
        # Made again in each round: a counter that grew has another structure. `counters` owns all
        # of them until the call returns.
        pointers = (ctypes.c_void_p * len(counters))(
            *(ctypes.addressof(counter._c) for counter in counters)
        )
        sizes = (
            raw.rows - done,
            tokens.shape[1],
            ctypes.c_int32(len(raw.schema.dense)),
            ctypes.c_int32(len(counters)),
        )
        left = (tokens[done:], ctypes.c_int32(tokens.itemsize), raw.missing[done:])
        done += call("rayrec_count_rows", *left, *sizes, first_row + done, pointers, absences)
        if done == raw.rows:
            return
        for counter in counters:
            counter.reserve(0)


_PARTITION_BITS = 6
_CHUNK = 1 << 16
"""Tokens read at once."""


class _Run:
    """Items of one column in the spill file, ordered by partition: all tokens, then all counts,
    then all first rows.
    """

    def __init__(self, start: int, offsets: np.ndarray, dtypes: Sequence[np.dtype]) -> None:
        self.start = start
        self.offsets = offsets
        self.dtypes = dtypes

    def read(self, file: int, first: int, stop: int) -> Iterator[list[np.ndarray]]:
        total = int(self.offsets[-1])
        for low in range(int(self.offsets[first]), int(self.offsets[stop]), _CHUNK):
            high = min(low + _CHUNK, int(self.offsets[stop]))
            base = self.start
            arrays = []
            for dtype in self.dtypes:
                array = np.empty(high - low, dtype)
                # Without a seek, so that the position of `write` stays.
                num_read = os.preadv(file, [array.view(np.uint8).data], base + low * dtype.itemsize)
                assert num_read == array.nbytes
                arrays.append(array)
                base += total * dtype.itemsize
            yield arrays


# A file of runs. A run is one column's table at some moment, ordered by 2^6 partitions of the
# tokens' hash:
#
#   write     all tables -> a run per column; then the tables are empty
#   merged    for each group of partitions that fits into memory: read it from all runs, add up
#
# Equal tokens are in equal partitions, so a partition's counts are final after one group. A
# partition that does not fit is read 2^n times, each time for a part of its tokens.
class Spill:
    """Counts that exceeded the memory limit, in one unnamed file, whose space is freed however this
    process ends.
    """

    def __init__(self, folder: str | None, memory_bytes: int) -> None:
        if folder is not None and storage.is_url(folder):
            raise InputError(f"{folder}: spill folder must be local")
        self.folder = storage.absolute(folder or tempfile.gettempdir())
        self.memory_bytes = memory_bytes
        # The other half is for a growing table and for a column's items while they are written.
        self.table_bytes = memory_bytes // 2
        self._file: Any = None
        self._runs: dict[int, list[_Run]] = {}
        self.written_bytes = 0

    @property
    def has_spilled(self) -> bool:
        return self._file is not None

    def write(self, counters: Sequence[TokenCounter]) -> None:
        """Move the counters' contents to disk. Raises InputError if it is full."""
        try:
            if self._file is None:
                os.makedirs(self.folder, exist_ok=True)
                self._file = tempfile.TemporaryFile(  # noqa: SIM115  # closed by `close`
                    dir=self.folder, buffering=0
                )
            for column, counter in enumerate(counters):
                if not counter.used:
                    continue
                (tokens, counts, rows), offsets = counter.partitioned(_PARTITION_BITS)
                counter.clear()
                arrays = [tokens, narrow(counts)] + ([] if rows is None else [rows])
                run = _Run(self.written_bytes, offsets, [array.dtype for array in arrays])
                self._runs.setdefault(column, []).append(run)
                for array in arrays:
                    self._write(array)
        except OSError as error:
            raise InputError(
                f"{self.folder}: cannot write spilled counts ({error.strerror}); make room, "
                "name another spill_folder or raise memory_bytes"
            ) from None

    def _write(self, array: np.ndarray) -> None:
        view = array.view(np.uint8).data
        while view:
            done = self._file.write(view)
            self.written_bytes += done
            view = view[done:]

    def merged(
        self, column: int, like: TokenCounter, min_count: int, *, always: int | None = None
    ) -> tuple[Items, int]:
        """Return a column's spilled tokens counted at least `min_count` times or equal to `always`,
        and the distinct number.
        """
        runs = self._runs.get(column, [])
        distinct = 0
        result = like.items(NO_ROW)
        sizes = sum(
            (np.diff(run.offsets) for run in runs), np.zeros(1 << _PARTITION_BITS, np.int64)
        )
        for first, stop, split_bits in _groups(sizes.tolist(), self.table_bytes, like):
            for part in range(1 << split_bits):
                counter = TokenCounter(dtype=like.dtype, first_rows=like.first_rows, family=2)
                counter.reserve(int(sizes[first:stop].sum()) >> split_bits)
                for run in runs:
                    for arrays in run.read(self._file.fileno(), first, stop):
                        if split_bits:
                            arrays = _select(
                                arrays, _PARTITION_BITS + split_bits, (first << split_bits) + part
                            )
                        counter.merge(*arrays)
                distinct += counter.used
                _extend(result, frequent_items(counter, min_count, always))
                # Before the next table is made, or two would be in memory.
                del counter
        return result, distinct

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._runs.clear()


def _groups(
    sizes: Sequence[int], table_bytes: int, like: TokenCounter
) -> Iterator[tuple[int, int, int]]:
    """Yield (first partition, end, split bits): partitions that fit into a table together, or one
    to read 2^split bits times.
    """
    empty = TokenCounter(dtype=like.dtype, first_rows=like.first_rows)
    first = 0
    while first < len(sizes):
        stop = first + 1
        total = sizes[first]
        while stop < len(sizes) and empty.num_bytes_with(total + sizes[stop]) <= table_bytes:
            total += sizes[stop]
            stop += 1
        split_bits = 0
        while (
            empty.num_bytes_with(total >> split_bits) > table_bytes
            and total >> split_bits > 2 * TILE
        ):
            split_bits += 1
        if total:
            yield first, stop, split_bits
        first = stop


def _select(arrays: Sequence[np.ndarray], bits: int, partition: int) -> list[np.ndarray]:
    tokens, counts, *rows = arrays
    counts = counts.astype(np.int64)
    item_bytes = ctypes.c_int32(tokens.itemsize)
    first_rows = rows[0] if rows else None
    sizes = (len(tokens), ctypes.c_int32(bits), partition)
    count = call("rayrec_select_partition", tokens, item_bytes, counts, first_rows, *sizes)
    return [array[:count] for array in (tokens, counts, *rows)]


def frequent_items(counter: TokenCounter, min_count: int, always: int | None) -> Items:
    """Return the tokens counted at least `min_count` times, and the token `always` if it was
    counted.
    """
    if always is None or min_count <= 1:
        return counter.items(min_count)
    tokens, counts, rows = counter.items()
    mask = (counts >= min_count) | (tokens == always)
    return tokens[mask], counts[mask], None if rows is None else rows[mask]


def _extend(items: Items, more: Items) -> None:
    """Append in place: the kernel moves the pages of large arrays instead of copying them, so there
    are never two copies.
    """
    for array, new in zip(items, more, strict=True):
        if array is not None and new is not None:
            start = len(array)
            array.resize(start + len(new), refcheck=False)
            array[start:] = new


def narrow(counts: np.ndarray) -> np.ndarray:
    """Return the counts in 32 bits if they fit."""
    return counts.astype(np.uint32) if not len(counts) or counts.max() < 2**32 else counts
