"""Rows of Parquet files: full row groups, with the checksum of their bytes."""

import functools
import itertools
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.coded_columns import CodedChunk, decode_chunks, is_decodable
from rayrec.data.formats.columns import check_columns, pick_columns
from rayrec.data.formats.parquet import dictionary_columns, unreadable_parquet
from rayrec.data.formats.row_faults import FAULT
from rayrec.data.logs.column_values import is_text
from rayrec.data.logs.index import changed, checksum
from rayrec.data.logs.partitions import with_partitions
from rayrec.schema import Schema
from rayrec.storage.object_store import RangeFile

_FOOTERS = 64
"""Maximum file descriptions cached per process."""
_GAP_BYTES = 64 << 10
"""Maximum bytes between two column chunks that are read by one request."""


def leaves_of(metadata: pq.FileMetaData, names: Sequence[str]) -> list[int]:
    """Return the indices of the leaf columns of the named columns."""
    roots = set(names)
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    return [i for i, path in enumerate(paths) if path in roots or path.partition(".")[0] in roots]


@dataclass(frozen=True)
class _Footer:
    """Description of a Parquet file, which is slow to read if there are many row groups."""

    metadata: pq.FileMetaData
    types: pa.Schema
    """Columns and their types."""
    starts: tuple[int, ...]
    """First row of each row group, and the row count."""
    size_bytes: int


@lru_cache(maxsize=_FOOTERS)
def _footer(path: str, version: tuple[int, int] | None) -> _Footer:
    del version  # Part of the cache key
    filesystem, inner = storage.resolve(path)
    try:
        with filesystem.open_input_file(inner) as file, pq.ParquetFile(file) as parquet:
            metadata = parquet.metadata
            rows = (
                metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)
            )
            starts = tuple(itertools.accumulate(rows, initial=0))
            return _Footer(metadata, parquet.schema_arrow, starts, file.size())
    except (OSError, pa.ArrowException) as error:
        raise unreadable_parquet(path, error) from None


def _version(path: str) -> tuple[int, int] | None:
    """Return the size and time of a local file; None for a URL, which would need a request."""
    if storage.is_url(path):
        return None
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable_parquet(path, error) from None
    return status.st_size, status.st_mtime_ns


def read_rows(
    path: str,
    start: int,
    stop: int,
    schema: Schema,
    *,
    columns: Sequence[str] | None = None,
    dictionaries: bool = False,
) -> tuple[pa.Table, int]:
    """Return rows [start, stop), which are full row groups, and the checksum of their bytes in the
    file. The columns are `schema.columns`, or `columns` among them, without optional ones that the
    file lacks, and FAULT if present. Partition columns come from the file's path. Neighbouring
    column chunks are one request to a store. With `dictionaries`, single categories in text may be
    dictionaries. Raises InputError for unreadable or changed files.
    """
    version = _version(path)
    footer = _footer(path, version)
    groups = _groups(footer, start, stop)
    if groups is None and version is None:  # The file at the URL may have changed
        # All footers: the cache has no way to drop one, and changed files are rare.
        _footer.cache_clear()
        footer = _footer(path, version)
        groups = _groups(footer, start, stop)
    if groups is None:
        raise changed(path, start, stop, "rows")
    names = schema.columns if columns is None else columns
    names_in_file = footer.types.names
    check_columns(pick_columns(path, names_in_file), names, path=path, optional=schema.optional)
    stored = [name for name in (*names, FAULT) if name in names_in_file]
    chunks = column_chunks(footer.metadata, groups, stored)
    spans = _read_spans(path, footer.size_bytes, chunks)
    decoded = {}
    coded = None
    if dictionaries and schema.tokens == "any":
        decoded = _decoded_columns(footer, groups, stored, spans, schema)
        left = [name for name in schema.singles if name not in decoded]
        coded = dictionary_columns(footer.metadata, groups, left)
    by_arrow = [name for name in stored if name not in decoded]
    if decoded and not by_arrow:
        table = pa.table(decoded)
    else:  # Arrow's table has a number of rows even without columns
        table = _read_by_arrow(path, footer, groups, by_arrow, coded, spans)
        for name, column in decoded.items():
            table = table.append_column(name, column)
    sum_ = checksum_of(spans.span_bytes(*chunk) for chunk in chunks)
    return with_partitions(table, path, schema, columns=names), sum_


def read_types(path: str) -> pa.Schema:
    """Return the columns of a file and their types, without partition columns. Raises InputError if
    it is unreadable.
    """
    return _footer(path, _version(path)).types


def _groups(footer: _Footer, start: int, stop: int) -> list[int] | None:
    """Return the row groups of rows [start, stop); None if these are not full row groups."""
    first = bisect_left(footer.starts, start)
    last = bisect_left(footer.starts, stop)
    if last >= len(footer.starts) or footer.starts[first] != start or footer.starts[last] != stop:
        return None
    return list(range(first, last))


Range = tuple[int, int]
"""Bytes [start, stop) of a file."""


def column_chunks(
    metadata: pq.FileMetaData, groups: Sequence[int], columns: Sequence[str]
) -> list[Range]:
    """Return the byte range of each column chunk of some row groups."""
    leaves = leaves_of(metadata, columns)
    chunks = []
    for number in groups:
        group = metadata.row_group(number)
        chunks += [_chunk_range(group.column(index)) for index in leaves]
    return chunks


def _chunk_range(chunk: pq.ColumnChunkMetaData) -> Range:
    offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
    start = min(filter(None, offsets), default=0)
    return start, start + chunk.total_compressed_size


# Requests to a store cost more than some unused bytes between two columns.
def _spans(chunks: Iterable[Range]) -> list[Range]:
    spans: list[Range] = []
    for start, stop in sorted(chunks):
        if spans and start - spans[-1][1] <= _GAP_BYTES:
            spans[-1] = spans[-1][0], max(stop, spans[-1][1])
        else:
            spans.append((start, stop))
    return spans


def _read_span(path: str, span: Range) -> np.ndarray:
    buffer = np.empty(span[1] - span[0], np.uint8)
    if storage.read_into(path, span[0], buffer) != len(buffer):
        raise InputError(f"{path}: is shorter than its footer says; fetch or write it again")
    return buffer


class _Spans(RangeFile):
    """File with some spans in memory; other bytes are read on demand."""

    def __init__(
        self, path: str, size_bytes: int, spans: Sequence[Range], buffers: Sequence[np.ndarray]
    ) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._buffers = buffers
        self._starts = [start for start, _ in spans]

    def size(self) -> int:
        return self._size_bytes

    def span_bytes(self, start: int, stop: int) -> np.ndarray:
        number = bisect_right(self._starts, start) - 1
        if number >= 0 and stop <= self._starts[number] + len(self._buffers[number]):
            offset = start - self._starts[number]
            return self._buffers[number][offset : offset + stop - start]
        return _read_span(self._path, (start, stop))

    def read_range(self, start: int, size: int) -> memoryview:
        return self.span_bytes(start, min(start + size, self._size_bytes)).data


def _read_spans(path: str, size_bytes: int, chunks: Sequence[Range]) -> _Spans:
    """Read some column chunks of a file. Raises InputError if it is too short."""
    spans = _spans(chunks)
    buffers = list(storage.in_parallel(functools.partial(_read_span, path), spans, path=path))
    return _Spans(path, size_bytes, spans, buffers)


def _read_by_arrow(
    path: str,
    footer: _Footer,
    groups: Sequence[int],
    names: Sequence[str],
    coded: Sequence[str] | None,
    spans: _Spans,
) -> pa.Table:
    """Read columns of some row groups, those of `coded` as dictionaries. Raises InputError."""
    file = pa.PythonFile(spans, mode="r")
    try:
        with pq.ParquetFile(file, metadata=footer.metadata, read_dictionary=coded) as parquet:
            return parquet.read_row_groups(groups, columns=names, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise unreadable_parquet(path, error) from None


def _decoded_columns(
    footer: _Footer,
    groups: Sequence[int],
    names: Sequence[str],
    spans: _Spans,
    schema: Schema,
) -> dict[str, pa.ChunkedArray]:
    """Return the columns of some row groups that kernels decode, by name: numbers, and text of
    single categories as dictionaries.
    """
    metadata = footer.metadata
    row_groups = [metadata.row_group(number) for number in groups]
    singles = frozenset(schema.singles)
    kinds = dict(zip(footer.types.names, footer.types.types, strict=True))
    chunks = []
    for index in leaves_of(metadata, names):
        leaf = metadata.schema.column(index)
        name = leaf.path
        kind = kinds.get(name)
        # A column "a.b" and the field b of a column "a" have the same path.
        if kind is None or "." in name:
            continue
        if types.is_dictionary(kind):
            kind = kind.value_type
        if not is_decodable(leaf, kind) or (is_text(kind) and name not in singles):
            continue
        is_optional = leaf.max_definition_level == 1
        for group in row_groups:
            chunk = group.column(index)
            data = spans.span_bytes(*_chunk_range(chunk))
            chunks.append(CodedChunk(name, kind, is_optional, chunk, group.num_rows, data))
    return decode_chunks(chunks)


def checksum_of(chunks: Iterable[np.ndarray]) -> int:
    """Return the checksum of column chunks, uint8 each: that of their own checksums, in order."""
    return checksum(np.array([checksum(chunk) for chunk in chunks], np.int64))
