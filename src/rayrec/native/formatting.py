"""Python's side of format.c: columns of clicks to tab-separated text, without the GIL."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from rayrec.native import library

_MAX_INTEGER_BYTES = 12
_TOKEN_BYTES = 9


@lru_cache(maxsize=1)
def _kernel() -> Any:
    kernel = library().rayrec_format_rows
    kernel.restype = ctypes.c_int64
    kernel.argtypes = [
        *[ctypes.c_void_p] * 4,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_int64,
    ]
    return kernel


def max_row_bytes(num_dense: int, num_sparse: int) -> int:
    """The longest a formatted row can be, newline included."""
    return 2 + num_dense * _MAX_INTEGER_BYTES + num_sparse * _TOKEN_BYTES


def format_rows(
    labels: np.ndarray, *, dense: np.ndarray, tokens: np.ndarray, missing: np.ndarray, out: np.ndarray
) -> int:
    """Write rows as `label, integers, 8-hex-digit tokens`, tab-separated, into `out`; returns the bytes written.

    labels uint8 (rows), dense int32 (num_dense, rows), tokens uint32 (num_sparse, rows), out uint8 (capacity),
    missing uint64 (rows) with bit d for dense column d and bit num_dense + s for sparse column s. All C-contiguous.
    Raises ValueError where an array does not fit or the text does not fit `out`.
    """
    rows, num_dense, num_sparse = len(labels), len(dense), len(tokens)
    wanted = (
        ("labels", labels, np.uint8, (rows,)),
        ("dense", dense, np.int32, (num_dense, rows)),
        ("tokens", tokens, np.uint32, (num_sparse, rows)),
        ("missing", missing, np.uint64, (rows,)),
        ("out", out, np.uint8, (out.size,)),
    )
    for name, array, kind, shape in wanted:
        if array.dtype != kind or array.shape != shape or not array.flags.c_contiguous:
            raise ValueError(f"{name}: needs C-contiguous {np.dtype(kind)} {shape}, not {array.dtype} {array.shape}")
    if not out.flags.writeable:
        raise ValueError("out: is read-only")
    written = _kernel()(
        *(array.ctypes.data for array in (labels, dense, tokens, missing)),
        rows,
        rows,
        num_dense,
        num_sparse,
        out.ctypes.data,
        out.size,
    )
    if written < 0:
        most = max_row_bytes(num_dense, num_sparse)
        raise ValueError(f"{rows} rows do not fit {out.size} bytes (a row takes up to {most}), or a label exceeds 9")
    return int(written)
