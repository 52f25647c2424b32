"""Zero-copy conversion between Arrow arrays and NumPy arrays, bytes and texts, without pyarrow's
own conversions (`pa.array`, `to_numpy`), whose import of pandas takes longer than a small command's
work.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

_SHAPES: Final = b"rayrec.shapes"
"""Table metadata key for the shapes of rows."""


def arrow_numbers(values: np.ndarray, missing: np.ndarray | None = None) -> pa.Array:
    """Convert one-dimensional numbers to Arrow, sharing contiguous memory. Null if `missing` (bool,
    or uint8 0 or 1) is set.
    """
    kind, values = pa.from_numpy_dtype(values.dtype), np.ascontiguousarray(values)
    valid = None if missing is None else pa.py_buffer(np.packbits(missing == 0, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(values)])


def arrow_rows(values: np.ndarray) -> pa.Array:
    """Convert one number per row, or several per row as fixed-size lists."""
    if values.ndim == 1:
        return arrow_numbers(values)
    return pa.FixedSizeListArray.from_arrays(
        arrow_numbers(values.reshape(-1)), math.prod(values.shape[1:])
    )


def arrow_bytes(values: Sequence[bytes]) -> pa.Array:
    """Convert values to large_binary."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return pa.Array.from_buffers(
        pa.large_binary(),
        len(values),
        [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))],
    )


def arrow_texts(values: Sequence[str]) -> pa.Array:
    """Convert values to large_string."""
    return arrow_bytes([value.encode() for value in values]).view(pa.large_string())


def as_numpy(array: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Convert Arrow numbers without nulls to a read-only NumPy array. Shares the memory of an array
    with one chunk.
    """
    dtype = np.dtype(array.type.to_pandas_dtype())
    if isinstance(array, pa.ChunkedArray):
        parts = [as_numpy(chunk) for chunk in array.chunks]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
    assert not array.null_count
    if not len(array):  # an empty array may have no buffer
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def numpy_rows(array: pa.Array) -> np.ndarray:
    """Invert `arrow_rows`, [rows] or [rows, size]."""
    if not pa.types.is_fixed_size_list(array.type):
        return as_numpy(array)
    return as_numpy(array.flatten()).reshape(-1, array.type.list_size)


def arrays_to_table(arrays: Mapping[str, np.ndarray]) -> pa.Table:
    """Convert numeric arrays [rows, ...] to a table without copies."""
    shapes = json.dumps({name: array.shape[1:] for name, array in arrays.items()})
    return pa.table(
        {name: arrow_rows(array) for name, array in arrays.items()}
    ).replace_schema_metadata({_SHAPES: shapes})


def table_to_arrays(table: pa.Table) -> dict[str, np.ndarray]:
    """Invert `arrays_to_table`, with read-only arrays."""
    (batch,) = table.combine_chunks().to_batches()
    shapes = json.loads(table.schema.metadata[_SHAPES])
    return {name: numpy_rows(batch[name]).reshape(-1, *shape) for name, shape in shapes.items()}


def json_reply(value: Any) -> pa.Table:
    """Pack a small JSON value as a task's result."""
    return pa.table({"reply": arrow_texts([json.dumps(value)])})


def parse_reply(reply: pa.Table) -> Any:
    """Return the value of a `json_reply`."""
    return json.loads(reply.column("reply")[0].as_py())
