"""Parquet files with row groups small enough to be read separately: the user's own, or rewritten
from Parquet or CSV.
"""

import functools
import itertools
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.base import Format
from rayrec.data.formats.columns import (
    check_columns,
    check_extra,
    check_file,
    parse_partitions,
    partition_names,
    pick_columns,
)
from rayrec.data.formats.csv import Csv
from rayrec.data.formats.parquet import Parquet, open_parquet, unreadable_parquet
from rayrec.data.formats.registry import find_format
from rayrec.data.formats.row_faults import FAULT
from rayrec.data.logs.index import changed, checksum
from rayrec.data.logs.partitions import with_partitions
from rayrec.data.logs.table_parser import check_types
from rayrec.schema import Schema
from rayrec.storage.cache import version_key
from rayrec.storage.object_store import RangeFile

VERSION = 3
"""Version of rewritten files. Files of another version are rewritten again."""
_FOOTERS = 64
"""Maximum file descriptions cached per process."""
_GAP_BYTES = 64 << 10
"""Maximum bytes between two column chunks that are read by one request."""
_SAMPLED_ROWS = 2000
_FEW_VALUES = 500
"""Rows whose values are counted, and the maximum distinct values of text with a dictionary."""
_TEXT_TYPES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
PART_GROUPS = 64
"""Maximum row groups of a rewritten file. A reader of one group reads the description of all."""


@dataclass(frozen=True)
class ParquetPart:
    """Parquet file with rows of `source`, or `source` itself."""

    source: str
    path: str
    first_row: int
    """First row in the source."""
    groups: list[tuple[int, int]]
    """Rows and bytes of each row group."""

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.groups)


def _group_sizes(file: pq.ParquetFile, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the rows and the approximate raw bytes of each row group, in the named columns
    only.
    """
    metadata = file.metadata
    sizes = []
    leaves = _leaves(metadata, names)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        stored = sum(group.column(i).total_uncompressed_size for i in leaves)
        # Dictionary-encoded values are decoded to 8 bytes each.
        sizes.append((group.num_rows, max(stored, 8 * len(names) * group.num_rows)))
    return sizes


def _leaves(metadata: pq.FileMetaData, names: Sequence[str]) -> list[int]:
    """Return the indices of the leaf columns of the named columns."""
    roots = set(names)
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    return [i for i, path in enumerate(paths) if path in roots or path.partition(".")[0] in roots]


def check_schema(parquet: pq.ParquetFile, path: str, schema: Schema) -> None:
    """Check the columns of a file and its partitions, and their types. Raises InputError."""
    check_file(path, parquet.schema_arrow.names, schema)
    empty = with_partitions(parquet.schema_arrow.empty_table(), path, schema)
    check_types(empty.schema, schema, path=path)


# Row groups are the smallest units of reading, so they should have about the size of a segment:
#
#   Parquet, small groups    used as it is
#   Parquet, large groups    rewritten once into the cache
#   CSV                      rewritten once into the cache, with its invalid rows
#
# A rewritten folder is valid once it has a manifest. Its key has the file's version and everything
# that changes the rewritten rows.
def prepared(
    file: storage.File,
    schema: Schema,
    segment_bytes: int,
    folder: str,
    extra: tuple[str, ...] = (),
) -> list[ParquetPart]:
    """Return the Parquet files for `file`: itself, or rewritten ones in `folder`.

    Args:
        file: File of a log, of any format.
        schema: Schema of the log, whose columns rewritten files have.
        segment_bytes: Size of a row group in rewritten files.
        folder: Cache folder of rewritten files.
        extra: Further columns of rewritten files, which are copied unchanged.

    Raises InputError for unusable columns.
    """
    file_format = find_format(file.path, schema)
    if file_format.name == Parquet.name:
        with open_parquet(file.path) as parquet:
            check_schema(parquet, file.path, schema)
            check_extra(pick_columns(file.path, parquet.schema_arrow.names), extra, path=file.path)
            groups = _group_sizes(parquet, schema.columns)
        if all(size <= 2 * segment_bytes or rows <= 1 for rows, size in groups):
            return [ParquetPart(file.path, file.path, 0, groups)]
    text = (
        schema.format,
        schema.delimiter,
        schema.escape,
        schema.encoding,
        schema.header,
        schema.header_row,
        schema.dropped,
    )
    form = *text, schema.list_delimiter, segment_bytes, schema.category_rules, schema.optional
    source, version = file_format.cache_key(file)
    key = version_key((source, schema.columns, *form, *extra), (VERSION, *version))
    folder = storage.join(folder, key)
    manifest = storage.join(folder, "manifest.json")
    if storage.exists(manifest):
        stored = storage.read_json(manifest)
    else:
        tables = read_file(file_format, file.path, schema, extra)
        if isinstance(file_format, Csv):
            tables = map(_without_nulls, tables)
        name = storage.name_of(file.path).removesuffix(".gz").removesuffix(".parquet") + ".parquet"
        # Folder names store the values of partition columns.
        name = "/".join([*partition_names(file.path), name])
        stored = list(_write_parts(tables, folder, name, schema, segment_bytes))
        storage.write_json(manifest, stored)  # Last: files without it are ignored
    parts = []
    first_row = 0
    for path, groups in stored:
        parts.append(
            ParquetPart(file.path, path, first_row, [(rows, size) for rows, size in groups])
        )
        first_row += parts[-1].rows
    return parts


def read_file(
    file_format: Format, path: str, schema: Schema, extra: Sequence[str] = ()
) -> Iterator[pa.Table]:
    """Yield the rows of a file with the columns of the schema and `extra`, and FAULT if its format
    has it. Opens it once, without `extra`. Raises InputError for unusable columns.
    """
    columns = (*schema.columns, *extra)
    partitions = parse_partitions(path)
    if file_format.is_sparse:
        # Any row may have any column. Those of the path have its value.
        columns = tuple(name for name in columns if name not in partitions)
    elif extra:
        check_extra(pick_columns(path, file_format.columns(path, schema)), extra, path=path)
    required = {name for name in schema.columns if name not in schema.optional}
    for table in file_format.tables(path, schema, columns):
        if not required <= {*table.column_names, *partitions}:
            # Its message shows the file's own names.
            check_file(path, file_format.columns(path, schema), schema)
        # An unusable value ends this before the file is rewritten
        with_partitions(table.slice(0, 0), path, schema)
        yield _with_text(table, extra, path)


def _with_text(table: pa.Table, extra: Sequence[str], path: str) -> pa.Table:
    """Return the table with the text of extra columns in UTF-8. Raises InputError for other
    bytes.
    """
    for name in extra:
        if name not in table.column_names or FAULT not in table.column_names:
            continue
        values = table.column(name)
        if not types.is_large_binary(values.type):
            continue
        try:
            text = values.cast(pa.large_string())
        except pa.ArrowInvalid:
            raise InputError(
                f"keep: {path}: column {name} has text that is not UTF-8; name its encoding in "
                "the schema, or leave the column out"
            ) from None
        table = table.set_column(table.column_names.index(name), name, text)
    return table


def _write_parts(
    tables: Iterable[pa.Table], folder: str, name: str, schema: Schema, segment_bytes: int
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Write the rows to files `folder`/number/`name` of up to PART_GROUPS row groups, each with one
    type of its columns; yield their paths and row groups.
    """
    # Rows are split and compressed at the same time
    sized = storage.read_ahead(_regroup(tables, segment_bytes), name="rows")
    rows = next(sized, None)
    number = 0
    while rows is not None:
        path = storage.join(folder, f"{number:05d}", name)
        groups: list[tuple[int, int]] = []
        coded = _coded_columns(rows, schema)
        create = functools.partial(
            pq.ParquetWriter, compression="lz4", write_statistics=False, use_dictionary=coded
        )
        with storage.writing(path) as local, create(local, rows.schema) as writer:
            kinds = rows.schema
            while rows is not None and len(groups) < PART_GROUPS and rows.schema == kinds:
                writer.write_table(rows, row_group_size=len(rows))
                groups.append((len(rows), rows.nbytes))
                rows = next(sized, None)
        yield path, groups
        number += 1


def _coded_columns(rows: pa.Table, schema: Schema) -> list[str]:
    """Return the columns that are written with a dictionary. Text has one if its first rows have
    few values: with many, a dictionary takes more time to write and read than LZ4 alone.
    """
    names = [name for name in (*schema.sparse, FAULT) if name in rows.schema.names]
    first = rows.slice(0, _SAMPLED_ROWS)
    texts = [name for name in names if first.schema.field(name).type in _TEXT_TYPES]
    many = {name for name in texts if pc.count_distinct(first[name]).as_py() > _FEW_VALUES}
    return [name for name in names if name not in many]


def _without_nulls(table: pa.Table) -> pa.Table:
    """Return a table of text with columns that cannot be null, which are read and written faster.
    Text has empty values instead.
    """
    fields = [each.with_nullable(False) for each in table.schema]
    return pa.Table.from_arrays(table.columns, schema=pa.schema(fields))


def _regroup(tables: Iterable[pa.Table], size_bytes: int) -> Iterator[pa.Table]:
    """Yield the same rows in tables of about the given size, with one chunk per column. A table has
    one type of each column, which JSON lines may change.
    """
    waiting: list[pa.Table] = []
    waiting_bytes = 0
    for table in tables:
        if not len(table):
            continue
        if waiting and waiting[0].schema != table.schema:
            yield pa.concat_tables(waiting)
            waiting = []
            waiting_bytes = 0
        waiting.append(table)
        waiting_bytes += table.nbytes
        if waiting_bytes < size_bytes:
            continue
        merged = pa.concat_tables(waiting)
        count = max(1, waiting_bytes // size_bytes)
        rows = -(-len(merged) // count)
        waiting = []
        waiting_bytes = 0
        for start in range(0, len(merged), rows):
            yield merged.slice(start, rows)
    if waiting:
        yield pa.concat_tables(waiting)


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
    path: str, start: int, stop: int, schema: Schema, *, columns: Sequence[str] | None = None
) -> tuple[pa.Table, int]:
    """Return rows [start, stop), which are full row groups, and the checksum of their bytes in the
    file. The columns are `schema.columns`, or `columns` among them, without optional ones that the
    file lacks, and FAULT if present. Partition columns come from the file's path. Neighbouring
    column chunks are one request to a store. Raises InputError for unreadable or changed files.
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
    chunks = _column_chunks(footer.metadata, groups, stored)
    spans = _spans(chunks)
    buffers = list(storage.in_parallel(functools.partial(_read_span, path), spans, path=path))
    file = _Spans(path, footer.size_bytes, spans, buffers)
    sums = np.array([checksum(file.span_bytes(*chunk)) for chunk in chunks], np.int64)
    try:
        with pq.ParquetFile(pa.PythonFile(file, mode="r"), metadata=footer.metadata) as parquet:
            table = parquet.read_row_groups(groups, columns=stored, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise unreadable_parquet(path, error) from None
    return with_partitions(table, path, schema, columns=names), checksum(sums)


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


def _column_chunks(
    metadata: pq.FileMetaData, groups: Sequence[int], columns: Sequence[str]
) -> list[Range]:
    """Return the byte range of each column chunk of some row groups."""
    leaves = _leaves(metadata, columns)
    chunks = []
    for number in groups:
        group = metadata.row_group(number)
        for chunk in map(group.column, leaves):
            start = min(
                filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0
            )
            chunks.append((start, start + chunk.total_compressed_size))
    return chunks


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
