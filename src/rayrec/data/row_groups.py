"""Parquet files whose row groups are small enough to be read one by one: the user's own, or written anew from them or CSV."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.arrow_columns import check_types
from rayrec.data.csv_text import FAULT, check_columns, present_columns, read_csv
from rayrec.schema import Schema

VERSION = 2
"""Of the files written here; another one makes them be written anew."""
PART_GROUPS = 64
"""Row groups a file written here has at most: whoever reads one of them reads the description of all."""


@dataclass(frozen=True)
class Part:
    """A Parquet file that holds rows of `source`, or is it."""

    source: str
    path: str
    first_row: int
    """Of the source."""
    groups: list[tuple[int, int]]
    """Rows and bytes of each row group."""

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.groups)


def is_parquet(path: str) -> bool:
    return storage.name_of(path).lower().endswith(".parquet")


@contextmanager
def open_parquet(path: str) -> Iterator[pq.ParquetFile]:
    """A Parquet file, its errors turned into InputErrors."""
    filesystem, inner = storage.resolve(path)
    try:
        with pq.ParquetFile(inner, filesystem=filesystem) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: BaseException) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path}: no such file")
    return InputError(
        f"{path}: cannot be read as Parquet ({str(error).partition(chr(10))[0]}); fetch or write it again"
    )


def _group_sizes(file: pq.ParquetFile, names: Sequence[str]) -> list[tuple[int, int]]:
    """Rows and about the raw bytes of each row group, in the named columns alone."""
    metadata, sizes = file.metadata, []
    wanted = set(names)
    leaves = [i for i in range(metadata.num_columns) if _top_level(metadata.schema.column(i), wanted)]
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        stored = sum(group.column(i).total_uncompressed_size for i in leaves)
        # Values that dictionaries made small come out as 8 bytes each.
        sizes.append((group.num_rows, max(stored, 8 * len(names) * group.num_rows)))
    return sizes


def _top_level(column: pq.ColumnSchema, wanted: set[str]) -> bool:
    return column.path in wanted or column.path.partition(".")[0] in wanted


def prepared(file: storage.File, schema: Schema, segment_bytes: int, folder: str) -> list[Part]:
    """The Parquet files to read in place of `file`: itself, or ones that are written into `folder` unless they are there.
    Raises InputError for a file that lacks a column or has one of an unusable type."""
    if is_parquet(file.path):
        with open_parquet(file.path) as parquet:
            check_columns(parquet.schema_arrow.names, schema.columns, path=file.path, optional=schema.optional)
            check_types(parquet.schema_arrow, schema, path=file.path)
            groups = _group_sizes(parquet, schema.columns)
        if all(size <= 2 * segment_bytes or rows <= 1 for rows, size in groups):
            return [Part(file.path, file.path, 0, groups)]
    key = repr(
        (
            *(VERSION, astuple(file), schema.columns, schema.delimiter, schema.list_delimiter, segment_bytes),
            *(schema.category_rules, schema.optional),
        )
    )
    folder = storage.join(folder, hashlib.sha256(key.encode()).hexdigest()[:16])
    manifest = storage.join(folder, "manifest.json")
    if storage.exists(manifest):
        stored = storage.read_json(manifest)
    else:
        tables = _read_parquet(file.path, schema) if is_parquet(file.path) else read_csv(file.path, schema)
        name = storage.name_of(file.path).removesuffix(".gz").removesuffix(".parquet") + ".parquet"
        stored = list(_written(tables, folder, name, schema, segment_bytes))
        storage.write_json(manifest, stored)  # last: without it the files do not count
    parts, first_row = [], 0
    for path, groups in stored:
        parts.append(Part(file.path, path, first_row, [(rows, size) for rows, size in groups]))
        first_row += parts[-1].rows
    return parts


def _read_parquet(path: str, schema: Schema) -> Iterator[pa.Table]:
    with open_parquet(path) as parquet:
        names = list(present_columns(parquet.schema_arrow.names, schema))
        for batch in parquet.iter_batches(batch_size=1 << 15, columns=names, use_threads=False):
            yield pa.table(batch).select(names)


def _written(
    tables: Iterable[pa.Table], folder: str, name: str, schema: Schema, segment_bytes: int
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Writes the rows to files `folder`/number/`name` of up to PART_GROUPS row groups; yields their paths and row groups.

    The base name stays that of the source, by which constants of a file are found.
    """
    pieces = _of_size(tables, segment_bytes)
    piece = next(pieces, None)
    number = 0
    while piece is not None:
        path = storage.join(folder, f"{number:05d}", name)
        groups: list[tuple[int, int]] = []
        with (
            storage.writing(path) as local,
            pq.ParquetWriter(
                local,
                piece.schema,
                compression="lz4",
                write_statistics=False,
                use_dictionary=[name for name in (*schema.sparse, FAULT) if name in piece.schema.names],
            ) as writer,
        ):
            while piece is not None and len(groups) < PART_GROUPS:
                writer.write_table(piece, row_group_size=len(piece))
                groups.append((len(piece), piece.nbytes))
                piece = next(pieces, None)
        yield path, groups
        number += 1


def _of_size(tables: Iterable[pa.Table], size_bytes: int) -> Iterator[pa.Table]:
    """The same rows in tables of about the given size, each of one chunk a column."""
    waiting: list[pa.Table] = []
    waiting_bytes = 0
    for table in tables:
        if not len(table):
            continue
        waiting.append(table)
        waiting_bytes += table.nbytes
        if waiting_bytes < size_bytes:
            continue
        joined = pa.concat_tables(waiting)
        pieces = max(1, waiting_bytes // size_bytes)
        rows = -(-len(joined) // pieces)
        waiting, waiting_bytes = [], 0
        for start in range(0, len(joined), rows):
            yield joined.slice(start, rows)
    if waiting:
        yield pa.concat_tables(waiting)


def changed(path: str, start: int, stop: int, what: str) -> InputError:
    return InputError(
        f"{path}: rows {start}-{stop} hold {what} when the log was indexed; the file changed, start a new run"
    )


def read_rows(
    parquet: pq.ParquetFile, path: str, start: int, stop: int, names: Sequence[str], *, optional: Sequence[str] = ()
) -> pa.Table:
    """Rows [start, stop), which are whole row groups: the named columns without the `optional` ones that the file lacks, and
    FAULT if there is one."""
    known = parquet.schema_arrow.names
    check_columns(known, names, path=path, optional=optional)
    names = [name for name in names if name in known]
    ends = list(
        itertools.accumulate(parquet.metadata.row_group(i).num_rows for i in range(parquet.metadata.num_row_groups))
    )
    starts = [0, *ends[:-1]]
    groups = [i for i, (low, high) in enumerate(zip(starts, ends, strict=True)) if low < stop and high > start]
    if not groups or starts[groups[0]] != start or ends[groups[-1]] != stop:
        raise changed(path, start, stop, f"other row groups ({len(ends)} of {ends[-1] if ends else 0} rows) than")
    return parquet.read_row_groups(groups, columns=[*names, FAULT] if FAULT in known else names, use_threads=False)
