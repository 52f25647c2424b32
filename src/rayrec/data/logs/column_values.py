"""Categories of any kind as 64-bit tokens, and the open-addressing tables that map these to ids.

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
        status = np.empty(len(self), np.uint8)
        getattr(library(), kernel)(
            ctypes.c_void_p(self.offsets.ctypes.data),
            ctypes.c_void_p(self.data.ctypes.data),
            ctypes.c_void_p(None if self.null is None else self.null.ctypes.data),
            ctypes.c_int64(len(self)),
            *(ctypes.c_void_p(array.ctypes.data) for array in (*outputs, status)),
        )
        return status


def text_tokens(array: pa.Array, *, booleans: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """(tokens uint64, status uint8) of an Arrow array of text; what is not UTF-8 is REFUSED. Without `booleans`, true and
    false are plain text. About 20 ns a value."""
    text = Text.of(array)
    tokens = np.empty(len(text), np.uint64)
    return tokens, text.call("rayrec_text_tokens" if booleans else "rayrec_plain_text_tokens", tokens)


def text_integers(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """(tokens uint64, status uint8) of an Arrow array of text that is whole numbers of 64 bits in any form: 7, 07, +7, 7.0.
    Blanks around a number do not count, true and false are 1 and 0, `nan` is a missing value; the rest is REFUSED."""
    text = Text.of(array)
    tokens = np.empty(len(text), np.uint64)
    return tokens, text.call("rayrec_text_whole", tokens)


def integer_tokens(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """(tokens uint64, status uint8) of an Arrow array of integers of any width, or of booleans (0 and 1)."""
    if pa.types.is_boolean(array.type):
        array = pc.cast(array, pa.uint8())
    empty = array.is_null().to_numpy(zero_copy_only=False)
    values = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
    if not pa.types.is_uint64(array.type):
        return values.astype(np.int64).view(np.uint64), empty.astype(np.uint8)
    tokens = values.astype(np.uint64)
    large = np.flatnonzero(tokens >= 2**63)
    if len(large):
        tokens[large], _ = text_tokens(pc.cast(pa.array(tokens[large]), pa.string()))
    return tokens, empty.astype(np.uint8)


def build_slots(tokens: np.ndarray, ids: np.ndarray, out: np.ndarray) -> bool:
    """Fills the zeroed table `out` uint64 (slots, 2), slots a power of two above the tokens' number, so that token i
    (uint64) has id ids[i] (int32, 0 or more). False where a token comes twice. About 20 ns a token."""
    assert tokens.dtype == out.dtype == np.uint64
    assert ids.dtype == np.int32
    assert len(tokens) == len(ids)
    assert len(out) > len(tokens)
    assert len(out) & (len(out) - 1) == 0
    assert tokens.flags.c_contiguous
    assert ids.flags.c_contiguous
    assert out.flags.c_contiguous
    failed = library().rayrec_build_wide_slots(
        ctypes.c_void_p(tokens.ctypes.data),
        ctypes.c_void_p(ids.ctypes.data),
        ctypes.c_int64(len(tokens)),
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(len(out)),
    )
    return not failed


def look_up(tokens: np.ndarray, slots: np.ndarray, unknown_id: int) -> np.ndarray:
    """int32: the id of each token (uint64) in a table that `build_slots` made; unknown_id where it has none."""
    assert slots.flags.c_contiguous
    assert slots.dtype == np.uint64
    tokens = np.ascontiguousarray(tokens, np.uint64)
    out = np.empty(len(tokens), np.int32)
    library().rayrec_look_up_wide(
        ctypes.c_void_p(tokens.ctypes.data),
        ctypes.c_int64(len(tokens)),
        ctypes.c_void_p(slots.ctypes.data),
        ctypes.c_int64(len(slots)),
        ctypes.c_int32(unknown_id),
        ctypes.c_void_p(out.ctypes.data),
    )
    return out
