"""Files of a log as Parquet with row groups small enough to be read separately: the user's own, or
rewritten from Parquet or text.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.base import Format
from rayrec.data.formats.columns import (
    check_extra,
    check_file,
    parse_partitions,
    partition_names,
    pick_columns,
)
from rayrec.data.formats.csv import Csv
from rayrec.data.formats.csv_reader import CsvRange, row_start
from rayrec.data.formats.parquet import Parquet, open_parquet
from rayrec.data.formats.registry import find_format
from rayrec.data.formats.row_faults import FAULT
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.parquet import checksum_of, column_chunks, leaves_of
from rayrec.data.logs.partitions import with_partitions
from rayrec.data.logs.table_parser import check_table, check_types
from rayrec.data.table_ranges import TableRange
from rayrec.schema import Schema
from rayrec.storage.cache import version_key

VERSION = 3
"""Version of rewritten files. Files of another version are rewritten again."""
_SAMPLED_ROWS = 2000
_FEW_VALUES = 500
"""Rows whose values are counted, and the maximum distinct values of text with a dictionary."""
_TEXT_TYPES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_TABLES_AHEAD = 1
_GROUPS_AHEAD = 5
"""Row groups that are ready to be written. One table of text makes about three."""
_VALID = "rayrec.valid"
"""Column of tables that are being written: whether a reader will take the row."""
PART_GROUPS = 64
"""Maximum row groups of a rewritten file. A reader of one group reads the description of all."""


@dataclass(frozen=True)
class SegmentChecks:
    """Results of parsing the segments of one Parquet file once. All values are ready for JSON."""

    ranges: list[tuple[int, int]]
    """Rows [start, stop) of the file, by segment."""
    rows: list[int]
    """Valid rows of each segment."""
    checksums: list[int]
    """Checksum of each segment's bytes (see `read_rows`)."""
    faults: dict[str, Any]
    """Faults of all other rows, as from `Faults.to_dict`."""


@dataclass(frozen=True)
class ParquetPart:
    """Parquet file with rows of `source`, or `source` itself."""

    source: str
    path: str
    first_row: int
    """First row in the source."""
    groups: list[tuple[int, int]]
    """Rows and bytes of each row group."""
    checks: SegmentChecks | None = None
    """Results for a file that was just written, whose rows were parsed on the way. None: its
    segments must be read and parsed.
    """

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.groups)

    def moved(self, rows: int) -> ParquetPart:
        """Return the part with its rows, and those of its faults, that many rows later."""
        checks = self.checks
        if checks is not None:
            faults = Faults.from_dict(checks.faults)
            faults.first = [
                replace(fault, row=None if fault.row is None else fault.row + rows)
                for fault in faults.first
            ]
            checks = replace(checks, faults=faults.to_dict())
        return replace(self, first_row=self.first_row + rows, checks=checks)


@dataclass(frozen=True)
class FileRange(TableRange):
    """File of a log, or a range of a large CSV file."""

    version: storage.File = field(kw_only=True)
    """The file, with its size and time."""


@dataclass(frozen=True)
class PreparedRange:
    """Parquet files with the rows of a range. Rows are numbered from its first one."""

    parts: list[ParquetPart]
    start: int = 0
    """First byte of its first row, in a range of a CSV file."""
    end: int = 0
    """First byte of the first row behind it."""


def _group_sizes(file: pq.ParquetFile, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the rows and the approximate raw bytes of each row group, in the named columns
    only.
    """
    metadata = file.metadata
    sizes = []
    leaves = leaves_of(metadata, names)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        stored = sum(group.column(i).total_uncompressed_size for i in leaves)
        # Dictionary-encoded values are decoded to 8 bytes each.
        sizes.append((group.num_rows, max(stored, 8 * len(names) * group.num_rows)))
    return sizes


def check_schema(parquet: pq.ParquetFile, path: str, schema: Schema) -> None:
    """Check the columns of a file and its partitions, and their types. Raises InputError."""
    check_file(path, parquet.schema_arrow.names, schema)
    empty = with_partitions(parquet.schema_arrow.empty_table(), path, schema)
    check_types(empty.schema, schema, path=path)


# Row groups are the smallest units of reading, so they should have about the size of a segment:
#
#   Parquet, small groups    used as it is
#   Parquet, large groups    rewritten once into the cache
#   other formats            rewritten once into the cache, with their invalid rows; a large CSV
#                            file by several tasks, each one range
#
# A rewritten folder is valid once it has a manifest. The task of a full file writes it; for ranges,
# `_joined_parts` in table_log.py does when all are done. Its key has the file's version and
# everything that changes the rewritten rows.
@dataclass(frozen=True)
class Rewriting:
    """Settings of rewritten files."""

    schema: Schema
    """Schema of the log, whose columns they have."""
    segment_bytes: int
    """Size of a row group."""
    folder: str
    """Cache folder."""
    extra: tuple[str, ...] = ()
    """Further columns, which are copied unchanged."""

    def folder_of(self, file: storage.File, file_format: Format) -> str:
        """Return the folder of a file's rows."""
        schema = self.schema
        text = (
            schema.format,
            schema.delimiter,
            schema.escape,
            schema.encoding,
            schema.header,
            schema.header_row,
            schema.dropped,
        )
        size = self.segment_bytes
        form = *text, schema.list_delimiter, size, schema.category_rules, schema.optional
        source, version = file_format.cache_key(file)
        key = version_key((source, schema.columns, *form, *self.extra), (VERSION, *version))
        return storage.join(self.folder, key)

    def is_done(self, file: storage.File) -> bool:
        """Return whether a file was rewritten before."""
        folder = self.folder_of(file, find_format(file.path, self.schema))
        return storage.exists(_manifest(folder))

    def finish(self, file: storage.File, parts: Sequence[ParquetPart]) -> None:
        """Make the parts that several tasks have written valid."""
        _write_manifest(self.folder_of(file, find_format(file.path, self.schema)), parts)


def _manifest(folder: str) -> str:
    return storage.join(folder, "manifest.json")


def _write_manifest(folder: str, parts: Sequence[ParquetPart]) -> None:
    # Last: files without it are ignored
    storage.write_json(_manifest(folder), [(part.path, part.groups) for part in parts])


def prepared(part: FileRange, how: Rewriting) -> PreparedRange:
    """Return the Parquet files for a file or range: the file itself, or rewritten ones. Raises
    InputError for unusable columns.
    """
    file = part.version
    schema = how.schema
    file_format = find_format(file.path, schema)
    if file_format.name == Parquet.name:
        with open_parquet(file.path) as parquet:
            check_schema(parquet, file.path, schema)
            names = pick_columns(file.path, parquet.schema_arrow.names)
            check_extra(names, how.extra, path=file.path)
            groups = _group_sizes(parquet, schema.columns)
        if all(size <= 2 * how.segment_bytes or rows <= 1 for rows, size in groups):
            return PreparedRange([ParquetPart(file.path, file.path, 0, groups)])
    folder = how.folder_of(file, file_format)
    if part.stop:
        return _prepared_range(part, how, file_format, storage.join(folder, f"{part.number:05d}"))
    if storage.exists(_manifest(folder)):
        parts = [
            ParquetPart(file.path, path, 0, [(rows, size) for rows, size in groups])
            for path, groups in storage.read_json(_manifest(folder))
        ]
    else:
        tables = read_file(file_format, file.path, schema, how.extra)
        parts = _rewrite(tables, folder, file_format, how, source=file.path)
        _write_manifest(folder, parts)
    return PreparedRange(_numbered(parts))


def _prepared_range(
    part: FileRange, how: Rewriting, file_format: Format, folder: str
) -> PreparedRange:
    """Rewrite the rows of a CSV file's range."""
    start = part.start if part.is_row_start else row_start(part.file, part.start)
    ranges = []

    def read(path: str, schema: Schema, columns: Sequence[str]) -> CsvRange:
        ranges.append(CsvRange(path, schema, columns, start, part.stop))
        return ranges[-1]

    tables = read_file(file_format, part.file, how.schema, how.extra, read=read)
    parts = _rewrite(tables, folder, file_format, how, source=part.file)
    return PreparedRange(_numbered(parts), start, ranges[-1].end)


def _numbered(parts: Sequence[ParquetPart]) -> list[ParquetPart]:
    """Return consecutive parts of a file with their first rows."""
    starts = itertools.accumulate((part.rows for part in parts), initial=0)
    return [replace(part, first_row=row) for part, row in zip(parts, starts, strict=False)]


def read_file(
    file_format: Format,
    path: str,
    schema: Schema,
    extra: Sequence[str] = (),
    *,
    read: Callable[[str, Schema, Sequence[str]], Iterable[pa.Table]] | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of a file with the columns of the schema and `extra`, and FAULT if its format
    has it. Opens it once, without `extra`. `read` replaces the format's own function `tables`, for
    some of the rows. Raises InputError for unusable columns.
    """
    columns = (*schema.columns, *extra)
    partitions = parse_partitions(path)
    if file_format.is_sparse:
        # Any row may have any column. Those of the path have its value.
        columns = tuple(name for name in columns if name not in partitions)
    elif extra:
        check_extra(pick_columns(path, file_format.columns(path, schema)), extra, path=path)
    required = {name for name in schema.columns if name not in schema.optional}
    for table in (read or file_format.tables)(path, schema, columns):
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


# A text file becomes Parquet in four stages. Each has a thread, and the first two are some tables
# and row groups ahead of the next one:
#
#   split     the format yields the columns as text
#   check     the text is parsed as a reader will parse it, for the counts that an index needs, so
#             that the new file need not be read back. A column is added, since row groups have
#             other limits than these tables
#   write     the text is compressed
#   publish   the bytes of a full file are summed, while the disk writes them and the next file is
#             made
@dataclass(frozen=True)
class _CheckedGroup:
    """Rows of a new row group."""

    rows: pa.Table
    size_bytes: int
    valid: int
    """Number of rows that a reader will take."""
    faults: Faults
    """Faults of all rows that were parsed since the group before."""


def _checked_groups(
    tables: Iterable[pa.Table], schema: Schema, segment_bytes: int, *, source: str
) -> Iterator[_CheckedGroup]:
    """Yield the rows of a log's file as row groups of about `segment_bytes`."""
    faults_since_group = Faults()

    def checked() -> Iterator[pa.Table]:
        first_row = 0
        for table in tables:
            complete = with_partitions(table, source, schema)
            is_valid, faults = check_table(complete, schema, path=source, first_row=first_row)
            faults_since_group.add(faults)
            first_row += len(table)
            yield table.append_column(_VALID, pa.array(is_valid))

    for rows in _regroup(checked(), segment_bytes):
        valid = pc.sum(rows.column(_VALID)).as_py()
        stored = rows.drop_columns([_VALID])
        faults = Faults()
        faults.add(faults_since_group)
        faults_since_group.clear()
        yield _CheckedGroup(stored, stored.nbytes, valid, faults)


@dataclass(frozen=True)
class _NewFile:
    """File that was just written, still under a temporary name."""

    path: str
    groups: list[tuple[int, int]]
    """Rows and bytes of each row group."""
    valid_rows: list[int]
    faults: Faults
    metadata: pq.FileMetaData
    data: np.ndarray
    """Bytes of the file, mapped, uint8."""
    publish: ExitStack
    """Context that gives the file its name when it is closed. It removes the file if it is dropped
    instead, because another stage failed.
    """


def _write_files(
    groups: Iterator[_CheckedGroup], folder: str, name: str, schema: Schema
) -> Iterator[_NewFile]:
    """Write the rows to files `folder`/number/`name` of up to PART_GROUPS row groups, each with one
    type of its columns.
    """
    group = next(groups, None)
    number = 0
    while group is not None:
        kinds = group.rows.schema
        path = storage.join(folder, f"{number:05d}", name)
        create = functools.partial(
            pq.ParquetWriter,
            compression=_compression(group.rows),
            write_statistics=False,
            use_dictionary=_coded_columns(group.rows, schema),
        )
        sizes: list[tuple[int, int]] = []
        valid_rows: list[int] = []
        faults = Faults()
        with ExitStack() as stack:
            local = stack.enter_context(storage.writing(path))
            with create(local, kinds) as writer:
                while group is not None and len(sizes) < PART_GROUPS and group.rows.schema == kinds:
                    writer.write_table(group.rows, row_group_size=len(group.rows))
                    sizes.append((len(group.rows), group.size_bytes))
                    valid_rows.append(group.valid)
                    faults.add(group.faults)
                    group = next(groups, None)
            metadata = pq.read_metadata(local)
            # Parts of plain arrays are made faster than those of np.memmap
            data = np.asarray(np.memmap(local, np.uint8, "r"))
            publish = stack.pop_all()
        yield _NewFile(path, sizes, valid_rows, faults, metadata, data, publish)
        number += 1


def _published(file: _NewFile, *, source: str, schema: Schema, segment_bytes: int) -> ParquetPart:
    """Publish a new file, and return it as the part of a log that begins at row 0, with its
    checks.
    """
    names_in_file = file.metadata.schema.to_arrow_schema().names
    stored = [name for name in (*schema.columns, FAULT) if name in names_in_file]
    ranges = []
    rows = []
    checksums = []
    first = 0
    with ThreadPoolExecutor(1) as thread:
        # The disk writes the file meanwhile
        published = thread.submit(copy_context().run, file.publish.close)
        for segment in segments_of(file.groups, segment_bytes):
            last = first + segment.groups
            chunks = column_chunks(file.metadata, range(first, last), stored)
            ranges.append((segment.start, segment.stop))
            rows.append(sum(file.valid_rows[first:last]))
            checksums.append(checksum_of(file.data[start:stop] for start, stop in chunks))
            first = last
        published.result()
    checks = SegmentChecks(ranges, rows, checksums, file.faults.to_dict())
    return ParquetPart(source, file.path, 0, file.groups, checks)


def _rewrite(
    tables: Iterable[pa.Table],
    folder: str,
    file_format: Format,
    how: Rewriting,
    *,
    source: str,
) -> list[ParquetPart]:
    """Write rows of a log's file as Parquet, and return the new files, each of which begins at
    row 0.
    """
    if isinstance(file_format, Csv):
        tables = map(_without_nulls, tables)
    name = storage.name_of(source).removesuffix(".gz").removesuffix(".parquet") + ".parquet"
    # Folder names store the values of partition columns.
    name = "/".join([*partition_names(source), name])
    size = how.segment_bytes
    split = storage.read_ahead(iter(tables), name="split", ahead=_TABLES_AHEAD)
    groups = _checked_groups(split, how.schema, size, source=source)
    ahead = storage.read_ahead(groups, name="rows", ahead=_GROUPS_AHEAD)
    publish = functools.partial(_published, source=source, schema=how.schema, segment_bytes=size)
    files = _write_files(ahead, folder, name, how.schema)
    return list(storage.in_order(publish, files, name="publish", num_threads=1, prefetch=1))


@dataclass(frozen=True)
class GroupRange:
    """Consecutive row groups of a file that form one segment: rows [start, stop)."""

    start: int
    stop: int
    size_bytes: int
    """Approximate bytes of the rows."""
    groups: int


# A segment ends where the next row group would exceed its size by more than half of that group. Row
# groups are never divided.
def segments_of(groups: Iterable[tuple[int, int]], segment_bytes: int) -> Iterator[GroupRange]:
    """Yield the segments of a file with these row groups, each (rows, bytes)."""
    start = stop = size = count = 0
    for rows, group_bytes in groups:
        if stop > start and size + group_bytes // 2 > segment_bytes:
            yield GroupRange(start, stop, size, count)
            start = stop
            size = 0
            count = 0
        stop += rows
        size += group_bytes
        count += 1
    if stop > start:
        yield GroupRange(start, stop, size, count)


def _coded_columns(rows: pa.Table, schema: Schema) -> list[str]:
    """Return the columns that are written with a dictionary. Text has one if its first rows have
    few values: with many, a dictionary takes more time to write and read than LZ4 alone.
    """
    names = [name for name in (*schema.sparse, FAULT) if name in rows.schema.names]
    first = rows.slice(0, _SAMPLED_ROWS)
    texts = [name for name in names if first.schema.field(name).type in _TEXT_TYPES]
    many = {name for name in texts if pc.count_distinct(first[name]).as_py() > _FEW_VALUES}
    return [name for name in names if name not in many]


# LZ4 takes half of the time to write a file, and shrinks short values by little more than the four
# bytes of their lengths.
def _compression(rows: pa.Table) -> dict[str, str]:
    """Return the codec of each column: LZ4, or none for text that it does not halve, judged by the
    first rows. Small tables are compressed.
    """
    codecs = dict.fromkeys(rows.schema.names, "lz4")
    texts = [field.name for field in rows.schema if field.type in _TEXT_TYPES]
    if len(rows) < _SAMPLED_ROWS or not texts:
        return codecs
    sample = pa.BufferOutputStream()
    first = rows.slice(0, _SAMPLED_ROWS).select(texts)
    pq.write_table(first, sample, compression="lz4", write_statistics=False, use_dictionary=False)
    metadata = pq.read_metadata(pa.BufferReader(sample.getvalue()))
    group = metadata.row_group(0)
    for number, name in enumerate(texts):
        column = group.column(number)
        if 2 * column.total_compressed_size > column.total_uncompressed_size:
            codecs[name] = "none"
    return codecs


def _without_nulls(table: pa.Table) -> pa.Table:
    """Return a table of text with columns that cannot be null, which are read and written faster.
    Text has empty values instead.
    """
    fields = [each.with_nullable(False) for each in table.schema]
    return pa.Table.from_arrays(table.columns, schema=pa.schema(fields))


def _regroup(tables: Iterable[pa.Table], size_bytes: int) -> Iterator[pa.Table]:
    """Yield the same rows in tables of about the given size without _VALID, with one chunk per
    column. A table has one type of each column, which JSON lines may change.
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
        waiting_bytes += table.drop_columns([_VALID]).nbytes
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
