"""Keeps what an evaluation has to look at more than once: labels, logits, and what slices are told by."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import final

import numpy as np
import pyarrow as pa

from rayrec.data.arrow_arrays import numpy_of
from rayrec.workloads.scoring import GROUP, KEY


@final
class KeptRows:
    """The scores of a click model over a labelled log: 5 bytes a row, 13 where rows have groups; for each key 4 bytes a row
    (8 for numbers), and its different texts once a block."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._logits: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []
        self._groups: list[np.ndarray] = []
        self._keys: dict[str, list[pa.Array]] = {key: [] for key in keys}
        self.rows = 0
        self.checksums = (0, 0)
        """Of the rows' numbers and of their labels: the same for the same rows, however they come."""

    def update(self, table: pa.Table) -> None:
        # Copies: what comes lies in the object store, which would have to hold all of it.
        logits = numpy_of(table.column("logit")).astype(np.float32)
        labels = numpy_of(table.column("label")).astype(np.uint8)
        self._logits.append(logits)
        self._labels.append(labels)
        if GROUP in table.column_names:
            self._groups.append(numpy_of(table.column(GROUP)).copy())
        for key, kept in self._keys.items():
            kept += [_copied(chunk) for chunk in table.column(KEY + key).chunks]
        self.rows += len(table)
        of_rows, of_labels = self.checksums
        self.checksums = zlib.crc32(numpy_of(table.column("row")).data, of_rows), zlib.crc32(labels.data, of_labels)

    @property
    def logits(self) -> np.ndarray:
        """float32 (rows)"""
        return np.concatenate([np.empty(0, np.float32), *self._logits])

    @property
    def labels(self) -> np.ndarray:
        """uint8 (rows)"""
        return np.concatenate([np.empty(0, np.uint8), *self._labels])

    @property
    def groups(self) -> np.ndarray | None:
        """int64 (rows); None where rows have no groups."""
        return np.concatenate(self._groups) if self._groups else None

    def key(self, name: str) -> pa.ChunkedArray:
        """One value a row, null where missing."""
        return pa.chunked_array(self._keys[name])


def _copied(values: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(values.type):
        dictionary = pa.array(values.dictionary.to_pylist(), values.dictionary.type)
        return pa.DictionaryArray.from_arrays(_copied(values.indices), dictionary)
    missing = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    return pa.array(values.fill_null(0).to_numpy(zero_copy_only=False).copy(), values.type, mask=missing)
