"""Kernels that decode dictionary-encoded Parquet columns, all in two calls without the GIL. Arrow
would hash each dictionary's texts again.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.native import c_fields, call

_CODECS: Final = {"UNCOMPRESSED": 0, "SNAPPY": 1, "LZ4": 2}
"""CODEC_NONE and the others in native/parquet.c."""
_OTHER_CODEC: Final = -1
"""Compression that Arrow undoes."""
_ITEM_BYTES: Final = {
    pa.float64(): 8,
    pa.float32(): 4,
    pa.int64(): 8,
    pa.int32(): 4,
    pa.string(): 0,
    pa.large_string(): 0,
    pa.binary(): 0,
    pa.large_binary(): 0,
}
"""Bytes of a number, 0 for text, by the types of columns that are decoded."""


# A table of these has the addresses of buffers that `_decoded` and the chunks keep alive.
@final
class _CChunk(ctypes.Structure):
    """Mirror of rayrec_coded_chunk in native/kernels.h."""

    _fields_ = c_fields(
        "void* data; int64 length rows max_bytes codec optional item_bytes state entries "
        "dictionary_bytes page_bytes; void* codes valid values offsets; int64 nulls"
    )


@dataclass(frozen=True)
class CodedChunk:
    """Values of a column in a row group."""

    name: str
    kind: pa.DataType
    """Type of the column, one that `is_decodable` accepts."""
    is_optional: bool
    metadata: pq.ColumnChunkMetaData
    rows: int
    """Rows of the group."""
    data: np.ndarray
    """Bytes in the file, uint8."""


def is_decodable(column: pq.ColumnSchema, kind: pa.DataType) -> bool:
    """Return whether kernels may decode a column of type `kind`."""
    is_flat = column.max_repetition_level == 0 and column.max_definition_level <= 1
    return is_flat and kind in _ITEM_BYTES


# Two kernels decode all chunks, since a call for each would wait for the GIL as long as it works:
#
#   rayrec_find_pages       tells which chunks have only a dictionary and indices, and their sizes
#   (here)                  memory for the results
#   rayrec_decode_chunks    decompresses and decodes the pages
def decode_chunks(chunks: Sequence[CodedChunk]) -> dict[str, pa.ChunkedArray]:
    """Decode chunks to columns by name, with one array a chunk: of numbers, or dictionaries of
    large_binary for text. Columns with pages that have to be read by Arrow, or are damaged, are
    left out: Arrow reads the first, and tells how the others are damaged.
    """
    table = _table(chunks)
    call("rayrec_find_pages", table, len(table))
    is_coded = table["state"] == 0
    coded = [chunks[number] for number in np.flatnonzero(is_coded).tolist()]
    left_out = {chunks[number].name for number in np.flatnonzero(~is_coded).tolist()}
    arrays: dict[str, list[pa.Array]] = {}
    for chunk, array in zip(coded, _decoded(coded, table[is_coded]), strict=True):
        if array is None:
            left_out.add(chunk.name)
        else:
            arrays.setdefault(chunk.name, []).append(array)
    return {name: pa.chunked_array(parts) for name, parts in arrays.items() if name not in left_out}


def _table(chunks: Sequence[CodedChunk]) -> np.ndarray:
    """Return a description of chunks for the kernels, _CChunk [chunks]."""
    table = np.zeros(len(chunks), np.dtype(_CChunk))
    table["data"] = [pa.py_buffer(chunk.data).address for chunk in chunks]
    table["length"] = [len(chunk.data) for chunk in chunks]
    table["rows"] = [chunk.rows for chunk in chunks]
    table["max_bytes"] = [chunk.metadata.total_uncompressed_size for chunk in chunks]
    table["codec"] = [_CODECS.get(chunk.metadata.compression, _OTHER_CODEC) for chunk in chunks]
    table["optional"] = [chunk.is_optional for chunk in chunks]
    table["item_bytes"] = [_ITEM_BYTES[chunk.kind] for chunk in chunks]
    return table


def _decoded(chunks: Sequence[CodedChunk], table: np.ndarray) -> list[pa.Array | None]:
    """Decode chunks whose pages were found. Return None for damaged ones."""
    sizes = table[["item_bytes", "entries", "dictionary_bytes"]].tolist()
    results = [
        _Result.for_chunk(chunk, *its_sizes) for chunk, its_sizes in zip(chunks, sizes, strict=True)
    ]
    table["codes"] = [_address(result.codes) for result in results]
    table["valid"] = [_address(result.valid) for result in results]
    table["values"] = [_address(result.values) for result in results]
    table["offsets"] = [_address(result.offsets) for result in results]
    room = 8 * table["rows"] + table["dictionary_bytes"] + table["page_bytes"]
    call("rayrec_decode_chunks", table, len(table), np.empty(room.max(initial=0), np.uint8))
    outcomes = zip(chunks, results, table[["state", "nulls"]].tolist(), strict=True)
    return [
        result.array(chunk, nulls) if state == 0 else None
        for chunk, result, (state, nulls) in outcomes
    ]


@dataclass(frozen=True)
class _Result:
    """Memory of a chunk's decoded values."""

    codes: pa.Buffer | None
    valid: pa.Buffer | None
    values: pa.Buffer
    offsets: pa.Buffer | None

    @classmethod
    def for_chunk(
        cls, chunk: CodedChunk, item_bytes: int, entries: int, dictionary_bytes: int
    ) -> Self:
        rows = chunk.rows
        valid = pa.py_buffer(np.zeros(-(-rows // 8), np.uint8)) if chunk.is_optional else None
        if item_bytes:
            return cls(None, valid, pa.py_buffer(np.empty(rows * item_bytes, np.uint8)), None)
        return cls(
            pa.py_buffer(np.empty(rows, np.uint32)),
            valid,
            pa.py_buffer(np.empty(dictionary_bytes, np.uint8)),
            pa.py_buffer(np.empty(entries + 1, np.int64)),
        )

    def array(self, chunk: CodedChunk, nulls: int) -> pa.Array:
        rows = chunk.rows
        valid = self.valid if nulls else None
        if self.offsets is None:
            buffers = [valid, self.values]
            return pa.Array.from_buffers(chunk.kind, rows, buffers, null_count=nulls)
        codes = pa.Array.from_buffers(pa.int32(), rows, [valid, self.codes], null_count=nulls)
        entries = self.offsets.size // 8 - 1
        buffers = [None, self.offsets, self.values]
        texts = pa.Array.from_buffers(pa.large_binary(), entries, buffers, null_count=0)
        # The kernel has compared the codes with the number of entries
        return pa.DictionaryArray.from_arrays(codes, texts, safe=False)


def _address(buffer: pa.Buffer | None) -> int:
    """Return the address of a buffer, that of NULL without one."""
    return 0 if buffer is None else buffer.address
