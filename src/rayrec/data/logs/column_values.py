"""Categories of any kind as 64-bit tokens.

The token of an integer is its 64-bit two's complement; that of text is the XXH64 (seed 0) of its UTF-8 bytes. Text that is
exactly how an int64 is written in decimal (no plus, no leading zeros, no -0) counts as that integer, and an unsigned
integer of 2^63 or more as its text, so that a column's integers have the same tokens in a CSV file as in a Parquet file.
Booleans are the integers 1 and 0, also as the texts true, True, TRUE, false, False and FALSE.

Two different categories get the same token with probability 2^-64, and are then one category to the model. Among n
different texts of a column, n^2 / 2^65 such pairs are expected: 3e-8 for a million, 0.03 for a billion, 1 for 6.1 billion.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.native import library

VALUE, EMPTY, REFUSED = 0, 1, 2  # rayrec_text_status in native/kernels.h


@dataclass(frozen=True)
class Text:
    """A column of text as the kernels take it; value i is data[offsets[i] : offsets[i + 1]]."""

    offsets: np.ndarray
    """int64 (values + 1)"""
    data: np.ndarray
    """uint8"""
    null: np.ndarray | None
    """bool (values); None where all are there"""

    @classmethod
    def of(cls, array: pa.Array) -> Text:
        """Of an Arrow array of strings or bytes of any kind, whose memory it points into."""
        array = pc.cast(array, pa.large_binary())
        _, offsets, data = array.buffers()
        empty = not len(array)  # then Arrow may have no buffers
        return cls(
            np.zeros(1, np.int64) if empty else np.frombuffer(offsets, np.int64, len(array) + 1, 8 * array.offset),
            np.zeros(1, np.uint8) if not data or not data.size else np.frombuffer(data, np.uint8),
            array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def call(self, kernel: str, *outputs: np.ndarray) -> np.ndarray:
        """Runs a kernel over the values, into `outputs`; returns uint8 (values): VALUE, EMPTY or REFUSED."""
        assert all(output.flags.c_contiguous or len(output) < 2 for output in outputs)
        status = np.empty(len(self), np.uint8)
        getattr(library(), kernel)(
            ctypes.c_void_p(self.offsets.ctypes.data),
            ctypes.c_void_p(self.data.ctypes.data),
            ctypes.c_void_p(None if self.null is None else self.null.ctypes.data),
            ctypes.c_int64(len(self)),
            *(ctypes.c_void_p(array.ctypes.data) for array in (*outputs, status)),
        )
        return status


def text_tokens(array: pa.Array, out: np.ndarray, *, booleans: bool = True) -> np.ndarray:
    """Write the tokens of an Arrow array of text to `out` (contiguous uint64) and return their status, uint8; what is not UTF-8
    is REFUSED. Without `booleans`, true and false are plain text. About 20 ns a value."""
    return Text.of(array).call("rayrec_text_tokens" if booleans else "rayrec_plain_text_tokens", out)


def text_integers(array: pa.Array, out: np.ndarray) -> np.ndarray:
    """Write the tokens of an Arrow array of text that is whole numbers of 64 bits in any form: 7, 07, +7, 7.0; return their
    status. Blanks around a number do not count, true and false are 1 and 0, `nan` is a missing value; the rest is REFUSED."""
    return Text.of(array).call("rayrec_text_whole", out)


def integer_tokens(array: pa.Array, out: np.ndarray) -> np.ndarray:
    """Write the tokens of an Arrow array of integers of any width, or of booleans (0 and 1); return their status."""
    if pa.types.is_boolean(array.type):
        array = pc.cast(array, pa.uint8())
    empty = array.is_null().to_numpy(zero_copy_only=False)
    values = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
    out.view(np.uint64 if pa.types.is_uint64(array.type) else np.int64)[:] = values
    if pa.types.is_uint64(array.type):
        large = np.flatnonzero(values >= 2**63)
        if len(large):
            tokens = np.empty(len(large), np.uint64)
            text_tokens(pc.cast(pa.array(values[large]), pa.string()), tokens)
            out[large] = tokens
    return empty.astype(np.uint8)
