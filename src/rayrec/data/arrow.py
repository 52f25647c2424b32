"""Arrow arrays made of NumPy arrays, bytes and texts, and back, by way of their buffers and without a copy where there is none to
make. pyarrow's own conversions (`pa.array`, `to_numpy`) import pandas, which takes longer than a small command's work."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def arrow_numbers(values: np.ndarray, missing: np.ndarray | None = None) -> pa.Array:
    """An Arrow array of a one-dimensional array of integers or floats; shares its memory if that is contiguous. Elements whose
    `missing` (bool, or uint8 of 0 and 1) is set are null."""
    kind, values = pa.from_numpy_dtype(values.dtype), np.ascontiguousarray(values)
    valid = None if missing is None else pa.py_buffer(np.packbits(missing == 0, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(values)])


def arrow_rows(values: np.ndarray) -> pa.Array:
    """`arrow_numbers` of one number a row; of several, lists of so many."""
    if values.ndim == 1:
        return arrow_numbers(values)
    return pa.FixedSizeListArray.from_arrays(arrow_numbers(values.reshape(-1)), values[0].size)


def arrow_bytes(values: Sequence[bytes]) -> pa.Array:
    """large_binary, one element a value."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return pa.Array.from_buffers(pa.large_binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))])


def arrow_texts(values: Sequence[str]) -> pa.Array:
    """large_string, one element a value."""
    return arrow_bytes([value.encode() for value in values]).view(pa.large_string())


def numpy_of(array: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """A read-only NumPy array of integers or floats without nulls; shares the memory of an array of one chunk."""
    dtype = np.dtype(array.type.to_pandas_dtype())
    if isinstance(array, pa.ChunkedArray):
        parts = [numpy_of(chunk) for chunk in array.chunks]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
    assert not array.null_count
    if not len(array):  # which may have no buffer
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def json_reply(value: Any) -> pa.Table:
    """A task's result that is one small JSON value."""
    return pa.table({"reply": arrow_texts([json.dumps(value)])})


def json_of(reply: pa.Table) -> Any:
    """The value of a `json_reply`."""
    return json.loads(reply.column("reply")[0].as_py())
