"""Rows of a JSON request as columns, without an object for each value."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from rayrec.data.formats.csv_reader import gather_columns
from rayrec.data.logs.column_values import LIMIT, text_numbers
from rayrec.native import call

NULL: Final = 1
STRING: Final = 2
INTEGER: Final = 4
DECIMAL: Final = 8
BOOLEAN: Final = 16
"""Kinds of a value, as in native/kernels.h. An absent one has 0."""


@dataclass(frozen=True, eq=False)
class JsonRows:
    """Values of the rows, which are all of plain kinds, by row and name."""

    names: tuple[str, ...]
    text: np.ndarray
    """Body of the request, with 1 and 0 at the start of true and false, uint8 [bytes]."""
    fields: np.ndarray
    """First byte and size of each value, uint32 [rows, names, 2]."""
    kinds: np.ndarray
    """Kind of each value, uint8 [rows, names]."""

    def __len__(self) -> int:
        return len(self.kinds)

    def has_only(self, allowed: np.ndarray) -> bool:
        """Return whether each value is missing or of the kinds in `allowed`, uint8 [names]."""
        return not (self.kinds & ~(allowed | NULL)).any()

    def lines(self, indices: np.ndarray) -> bytes:
        """Return the values of the names at `indices` as lines, each behind a label of 0."""
        fields = self.fields.take(indices, axis=1)
        size = int(fields[:, :, 1].sum(dtype=np.int64)) + len(self) * (len(indices) + 2)
        out = np.empty(size, np.uint8)
        width = ctypes.c_int32(len(indices))
        written = call("rayrec_join_fields", self.text, fields, len(self), width, out)
        assert written == size
        return out.tobytes()

    # Columns are slices of one long column, so that few calls make them all.

    def texts(self, indices: np.ndarray) -> list[pa.Array]:
        """Return the columns of the names at `indices` as text, null where it is missing."""
        column, missing = self._joined(indices)
        valid = None
        if missing.any():
            valid = pa.py_buffer(np.packbits(~missing, bitorder="little"))
        buffers = [valid, *column.buffers()[1:]]
        return self._divided(pa.Array.from_buffers(pa.large_string(), len(column), buffers))

    def numbers(self, indices: np.ndarray) -> list[pa.Array] | None:
        """Return the columns of the names at `indices` as numbers, float64, null where they are
        missing. None if one is beyond LIMIT.
        """
        column, missing = self._joined(indices)
        values, _ = text_numbers(column)
        if not (np.abs(values) <= LIMIT).all():
            return None
        return self._divided(pa.array(values, mask=missing))

    def _joined(self, indices: np.ndarray) -> tuple[pa.Array, np.ndarray]:
        """Return columns one behind the other, large_binary [names * rows], and which of their
        values are missing, bool.
        """
        fields = self.fields.transpose(1, 0, 2).take(indices, axis=0)
        (column,) = gather_columns(self.text, fields.reshape(-1, 1, 2))
        return column, self.kinds.T.take(indices, axis=0).ravel() <= NULL

    def _divided(self, column: pa.Array) -> list[pa.Array]:
        rows = len(self)
        return [column.slice(start, rows) for start in range(0, len(column), rows)]


def split_rows(content: bytes, names: tuple[str, ...], *, max_rows: int) -> JsonRows | None:
    """Split a request {"rows": [{name: value, ...}, ...]} with these names and plain values:
    strings without escapes, numbers, true, false and null. Returns None for any other text, which
    may be a request all the same, and for more than `max_rows` rows.
    """
    capacity = min(content.count(b"{") - 1, max_rows)
    if capacity < 1 or not _is_utf8(content) or len(content) >= 1 << 31:
        return None
    table, offsets = _table_of(names)
    text = np.frombuffer(content, np.uint8).copy()
    width = len(names)
    fields = np.empty((capacity, width, 2), np.uint32)
    kinds = np.empty((capacity, width), np.uint8)
    follows = np.empty(width + 1, np.int32)
    rows = call(
        "rayrec_split_json",
        text,
        len(text),
        table,
        offsets,
        ctypes.c_int32(width),
        follows,
        capacity,
        fields,
        kinds,
    )
    return None if rows < 0 else JsonRows(names, text, fields[:rows], kinds[:rows])


def find_indices(names: Sequence[str], columns: Sequence[str]) -> np.ndarray:
    """Return the index of each column in `names`, int64 [columns]."""
    indices = {name: index for index, name in enumerate(names)}
    return np.array([indices[name] for name in columns], np.int64)


@functools.lru_cache(maxsize=16)
def _table_of(names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the names' bytes, uint8, and the start of each one and the end, int64."""
    texts = [name.encode() for name in names]
    table = np.frombuffer(b"".join(texts), np.uint8)
    return table, np.cumsum([0, *map(len, texts)], dtype=np.int64)


def _is_utf8(content: bytes) -> bool:
    if content.isascii():
        return True
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
