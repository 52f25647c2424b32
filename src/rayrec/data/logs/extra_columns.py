"""Columns of a log with their original values, which predictions keep next to the scores."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.csv
from pyarrow import types

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.engine import Engine
from rayrec.data.formats.columns import parse_partitions
from rayrec.data.formats.row_faults import FAULT
from rayrec.data.logs.column_values import is_list
from rayrec.data.logs.index import Block, LogIndex, SegmentRange
from rayrec.data.logs.parquet import read_rows, read_types
from rayrec.data.logs.reading import good_lines, line_starts
from rayrec.data.logs.text_log import read_text
from rayrec.humanize import one_line
from rayrec.schema import Schema

_TASK_FILES: Final = 256
"""Files per task that reads types."""


# Model inputs and these columns are read by different ways from the same rows:
#
#   log               file with the columns                   values
#   text              itself, split at its tabs                text
#   CSV, JSON, ...    Parquet in the cache, rewritten once     text, or the type that the format has
#   Parquet           itself; rewritten if its groups are large  its types
#   folders           the name of the folder                   text
#
# Segments have the same rows for both, and invalid ones are removed from both.
@dataclass(frozen=True)
class ExtraColumns:
    """Columns of a raw log and the types of their values."""

    types: pa.Schema

    def read(self, block: Block, schema: Schema) -> dict[str, pa.Array]:
        """Return the columns of a block's rows, in the order of the log.

        Args:
            block: Block without a permutation.
            schema: Schema that the log was indexed with. Rows that are invalid with it are left
                out.

        Raises InputError if the log changed since it was indexed, and for values that do not fit
        the type of all.
        """
        tables = [self._read_part(part, schema) for part in block.parts]
        table = pa.concat_tables(tables)
        return {name: _one_array(table.column(name)) for name in self.types.names}

    def _read_part(self, part: SegmentRange, schema: Schema) -> pa.Table:
        is_table = part.segment.format == "table"
        table = self._read_table(part, schema) if is_table else self._read_text(part, schema)
        columns = [_converted(table.column(field.name), field) for field in self.types]
        return pa.table(columns, schema=self.types)

    @cached_property
    def _as_categories(self) -> Schema:
        """Schema whose columns are these, as optional categories: any type, and text of folders."""
        names = tuple(self.types.names)
        return Schema(label=None, sparse=names, optional=names)

    def _read_table(self, part: SegmentRange, schema: Schema) -> pa.Table:
        segment = part.segment
        table, _ = read_rows(segment.path, segment.start, segment.stop, self._as_categories)
        if segment.rows != segment.stop - segment.start:
            table = table.take(pa.array(good_lines(segment, schema)))
        table = table.slice(part.start, part.rows)
        for name in self.types.names:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(len(table)))
        return table

    def _read_text(self, part: SegmentRange, schema: Schema) -> pa.Table:
        segment = part.segment
        length = segment.stop - segment.start
        text = read_text(segment)
        starts = line_starts(text, length)
        lines = text[:length]
        if len(starts) != segment.rows:
            is_good = np.zeros(len(starts), bool)
            is_good[good_lines(segment, schema)] = True
            lines = lines[np.repeat(is_good, np.diff(starts, append=length))]
        return _split_lines(lines, schema.columns, self.types.names).slice(part.start, part.rows)


def _split_lines(text: np.ndarray, columns: Sequence[str], names: Sequence[str]) -> pa.Table:
    """Return the named columns of tab-separated lines, uint8, as text."""
    return pa.csv.read_csv(
        pa.BufferReader(pa.py_buffer(text)),
        pa.csv.ReadOptions(column_names=list(columns), use_threads=False, block_size=len(text) + 1),
        pa.csv.ParseOptions(delimiter="\t", quote_char=False, double_quote=False),
        pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.large_string()),
            include_columns=list(names),
            strings_can_be_null=False,
        ),
    )


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


# A column may have several types: int32 and int64 in two files, or one in each block of JSON lines.
# Files of scores have one:
#
#   types of a column         type of all
#   equal, or null            that one
#   numbers                   the smallest that has all values
#   lists and others          lists
#   others without structure  text
def find_types(extra: Sequence[str], index: LogIndex, engine: Engine) -> ExtraColumns:
    """Return the columns of an indexed raw log with the type of their values. Data tasks read the
    descriptions of Parquet files, no rows. Memory does not grow with the number of files.

    Args:
        extra: Names of the columns.
        index: Index of a raw log, made with these columns (`LogSource.index`).
        engine: Engine of the tasks.

    Raises InputError for a column without a common type.
    """
    text = pa.schema([(name, pa.large_string()) for name in extra])
    if index.format != "table":
        return ExtraColumns(text)
    paths = list(dict.fromkeys(segment.path for segment in index.segments))
    groups = [paths[start : start + _TASK_FILES] for start in range(0, len(paths), _TASK_FILES)]
    merged = pa.schema([(name, pa.null()) for name in extra])
    task = functools.partial(_types_task, extra=extra)
    for table in engine.run("types", task, groups, block_bytes=1 << 12):
        for stored in table.column("types").to_pylist():
            merged = _merged(merged, pa.ipc.read_schema(pa.py_buffer(stored)))
    return ExtraColumns(merged)


def _types_task(paths: Sequence[str], *, extra: Sequence[str]) -> pa.Table:
    """Return the merged types of some files, serialized."""
    read = functools.partial(_file_types, extra=extra)
    merged = functools.reduce(_merged, storage.in_parallel(read, paths, path=paths[0]))
    return pa.table({"types": pa.array([merged.serialize().to_pybytes()], pa.binary())})


def _file_types(path: str, *, extra: Sequence[str]) -> pa.Schema:
    stored = read_types(path)
    partitions = parse_partitions(path)
    fields = []
    for name in extra:
        kind = pa.large_string() if name in partitions else pa.null()
        if name in stored.names:
            kind = _plain(stored.field(name).type)
            # Text of CSV files is stored as bytes.
            if FAULT in stored.names and types.is_large_binary(kind):
                kind = pa.large_string()
        fields.append((name, kind))
    return pa.schema(fields)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if types.is_dictionary(kind) else kind


def _merged(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    return pa.schema(
        [
            (field.name, _common_type(field.name, field.type, other.field(field.name).type))
            for field in one
        ]
    )


def _common_type(name: str, one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type that has the values of both. Raises InputError if there is none."""
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if is_list(one) or is_list(other):
        return pa.large_list(_common_type(name, _item_type(one), _item_type(other)))
    try:
        pair = [pa.schema([(name, kind)]) for kind in (one, other)]
        return pa.unify_schemas(pair, promote_options="permissive").field(name).type
    except pa.ArrowException:
        if types.is_nested(one) or types.is_nested(other):
            raise InputError(
                f"keep: column {name} has values of the types {one} and {other}, which have no "
                "common one; leave it out"
            ) from None
    return pa.large_string()


def _item_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if is_list(kind) else kind


def _converted(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """Return the values with the type of `_common_type`. Raises InputError if it would change
    them.
    """
    column = column.cast(_plain(column.type))
    if is_list(field.type) and not (is_list(column.type) or types.is_null(column.type)):
        column = pa.chunked_array(map(_as_lists, column.chunks), pa.large_list(column.type))
    try:
        return column.cast(field.type)
    except pa.ArrowInvalid as error:
        raise InputError(
            f"keep: column {field.name} has values of several types, which {field.type} cannot "
            f"have ({one_line(error)}); leave it out"
        ) from None


def _as_lists(values: pa.Array) -> pa.LargeListArray:
    """Return a list of one item for each value, null for null."""
    offsets = np.arange(len(values) + 1)
    mask = np.append(values.is_null().to_numpy(zero_copy_only=False), False)
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64(), mask=mask), values)
