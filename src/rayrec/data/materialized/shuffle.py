"""A shuffle of a whole log outside the trainer, the same for a seed in any number of tasks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import isqrt

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.hashing import GOLDEN, mix64

_ROUNDS = 8
_CHUNK_ROWS = 1 << 14
_PLACE = "rayrec.place"  # column of a run: where each row is to go


class Permutation:
    """A pseudorandom permutation of [0, size), computed row by row, so that it needs no memory and no common knowledge but
    the seed: a Feistel network over pairs (left, right) of [0, a) x [0, b), a b >= size, walked on until it comes back
    below `size` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002)."""

    def __init__(self, size: int, *, seed: int) -> None:
        self.size = size
        self._left = max(1, isqrt(max(size - 1, 0)) + 1)
        self._right = max(1, -(-size // self._left))
        self._keys = np.random.SeedSequence((seed, size)).generate_state(_ROUNDS, np.uint64)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """int64: the place of each row. About 0.15 microseconds a row."""
        out = np.empty(len(rows), np.int64)
        for start in range(0, len(rows), _CHUNK_ROWS):  # so that what passes between rounds stays in the cache
            places = self._once(np.asarray(rows[start : start + _CHUNK_ROWS], np.uint64))
            beyond = np.flatnonzero(places >= self.size)
            while len(beyond):
                places[beyond] = self._once(places[beyond])
                beyond = beyond[places[beyond] >= self.size]
            out[start : start + len(places)] = places
        return out

    def _once(self, values: np.ndarray) -> np.ndarray:
        a, b = np.uint64(self._left), np.uint64(self._right)
        left: np.ndarray = values // b
        right: np.ndarray = values % b
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + mix64((left ^ key) * np.uint64(GOLDEN)) % b) % b
            else:
                left = (left + mix64((right ^ key) * np.uint64(GOLDEN)) % a) % a
        return left * b + right


def write_run(tables: Sequence[pa.Table], places: np.ndarray, path: str) -> None:
    """Writes rows with the places they are to go to, sorted by these; the file appears complete or not at all."""
    table = pa.concat_tables(tables).combine_chunks().append_column(_PLACE, pa.array(places))
    table = table.take(pa.array(np.argsort(places, kind="stable")))
    with storage.writing(path) as local, pa.OSFile(local, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())


def gather_runs(paths: Sequence[str], start: int, stop: int) -> pa.Table:
    """The rows of all runs whose places are [start, stop), in the order of these."""
    slices = []
    for path in paths:
        with pa.memory_map(path) as source, pa.ipc.open_file(source) as run:
            batches = [run.get_batch(number) for number in range(run.num_record_batches)]
        for batch in batches:  # mapped: of the places, too, only the pages that the search touches are read
            low, high = np.searchsorted(batch.column(_PLACE).to_numpy(zero_copy_only=True), [start, stop])
            if low < high:
                slices.append(pa.Table.from_batches([batch.slice(low, high - low)]))
    table = pa.concat_tables(slices).combine_chunks()
    places = table.column(_PLACE).to_numpy() - start
    assert len(places) == stop - start
    order = np.full(len(places), -1, np.int64)
    order[places] = np.arange(len(places))
    assert order.min() >= 0
    return table.drop_columns([_PLACE]).take(pa.array(order))


def run_path(folder: str, number: int) -> str:
    return os.path.join(folder, f"run-{number:06d}.arrow")
