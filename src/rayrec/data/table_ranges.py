"""Ranges of tables, so that tasks read a large file together: row groups in Parquet, or rows in
CSV.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar

import pyarrow as pa

from rayrec import storage
from rayrec.data.arrow import json_reply, parse_reply
from rayrec.data.engine import Engine, grouped
from rayrec.data.formats.base import Format
from rayrec.data.formats.columns import check_file, parse_partitions
from rayrec.data.formats.csv import Csv
from rayrec.data.formats.csv_reader import CsvRange
from rayrec.data.formats.parquet import Parquet, dictionary_columns, open_parquet
from rayrec.data.formats.registry import find_format
from rayrec.data.job import ResumableJob
from rayrec.data.logs.partitions import with_partitions
from rayrec.schema import Schema
from rayrec.storage.cache import is_packed

BATCH_ROWS: Final = 1 << 15
_CODED_BATCHES: Final = 8
_CUT_FILES: Final = 64
"""Number of tables that one task opens to cut them."""
_MIN_TASK_BYTES: Final = 32 << 20
_MAX_TASK_BYTES: Final = 512 << 20
_TARGET_TASKS: Final = 256


@dataclass(frozen=True)
class TableRange:
    """Range of a table's file."""

    number: int
    file: str = ""
    start: int = 0
    stop: int = 0
    """Range [start, stop) of row groups, or of byte positions where CSV rows start. 0, 0 is a full
    CSV file.
    """
    is_row_start: bool = True
    """Whether `start` is the start of a row. If not, the range starts at the next line, which may
    be in a quoted field.
    """


_Range = TypeVar("_Range", bound=TableRange)


def task_bytes_of(size_bytes: int) -> int:
    """Return the bytes per task for a log of a given size."""
    return min(max(size_bytes // _TARGET_TASKS, _MIN_TASK_BYTES), _MAX_TASK_BYTES)


class RangeTables:
    """All rows of a table's range, also invalid, with columns of file and partitions. Formats other
    than Parquet have FAULT.
    """

    def __init__(
        self,
        part: TableRange,
        schema: Schema,
        *,
        columns: Sequence[str] | None = None,
        dictionaries: bool = False,
    ) -> None:
        """Read the columns of file and partitions with names in `columns`; None reads all.
        `dictionaries`: texts that Parquet has as dictionaries stay so, in tables of more rows.
        """
        self._columns = columns
        self._dictionaries = dictionaries
        self._range = part
        self._schema = schema
        self.end = 0
        """Start of the first row after a range of a CSV file, in bytes. Set after reading."""

    def __iter__(self) -> Iterator[pa.Table]:
        file_format = find_format(self._range.file, self._schema)
        is_parquet = file_format.name == Parquet.name
        for table in self._parquet_tables() if is_parquet else self._other_tables(file_format):
            yield with_partitions(
                table,
                self._range.file,
                self._schema,
            )

    def _parquet_tables(self) -> Iterator[pa.Table]:
        part = self._range
        schema = self._schema
        with open_parquet(part.file) as parquet:
            names = parquet.schema_arrow.names
            metadata = parquet.metadata
        check_file(
            part.file,
            names,
            schema,
        )
        groups = list(range(part.start, part.stop))
        stored = self._selected(names)
        coded = dictionary_columns(metadata, groups, stored) if self._dictionaries else []
        # The texts of a dictionary are hashed once per table
        batch_rows = BATCH_ROWS * (_CODED_BATCHES if coded else 1)
        with open_parquet(part.file, dictionaries=coded, metadata=metadata) as parquet:
            for batch in parquet.iter_batches(
                batch_size=batch_rows,
                row_groups=groups,
                columns=stored,
                use_threads=False,
            ):
                yield pa.Table.from_batches([batch])

    def _other_tables(self, file_format: Format) -> Iterator[pa.Table]:
        part = self._range
        schema = self._schema
        stored = file_format.columns(part.file, schema)
        if file_format.is_sparse:
            columns = (name for name in schema.columns if name not in parse_partitions(part.file))
            stored = tuple(dict.fromkeys((*stored, *columns)))
        check_file(
            part.file,
            stored,
            schema,
        )
        stored = self._selected(stored)
        if not part.stop:
            yield from file_format.tables(
                part.file,
                schema,
                stored,
            )
            return
        rows = CsvRange(
            part.file,
            schema,
            stored,
            part.start,
            part.stop,
        )
        yield from rows
        self.end = rows.end

    def _selected(self, stored: Sequence[str]) -> tuple[str, ...]:
        """Return the columns to read of those in a file."""
        selected = stored if self._columns is None else self._columns
        return tuple(name for name in stored if name in selected)


def csv_ranges(
    file: storage.File,
    schema: Schema,
    *,
    task_bytes: int,
) -> list[tuple[int, int]]:
    """Return byte ranges of a CSV file for CsvRange, each up to `task_bytes`. None if it is
    smaller, packed, in an encoding other than UTF-8, where line ends are other bytes, or of a
    format that reads its rows in its own way.
    """
    if file.size_bytes <= task_bytes or not schema.is_utf8:
        return []
    # First, so that no bytes of other formats are looked at
    file_format = find_format(file.path, schema)
    if not isinstance(file_format, Csv) or type(file_format).tables is not Csv.tables:
        return []
    if is_packed(file.path):
        return []
    count = -(-file.size_bytes // task_bytes)
    return list(pairwise(file.size_bytes * number // count for number in range(count + 1)))


def cut_files(
    files: Sequence[storage.File],
    *,
    task_bytes: int,
    schema: Schema,
) -> pa.Table:
    """Cut tables into ranges of about `task_bytes`: adjacent row groups, or bytes of a CSV file.
    Opens files in parallel.
    """

    def cut(file: storage.File) -> list[tuple[int, int]]:
        if find_format(file.path, schema).name != Parquet.name:
            return csv_ranges(file, schema, task_bytes=task_bytes) or [(0, 0)]
        with open_parquet(file.path) as parquet:
            sizes = [
                parquet.metadata.row_group(i).total_byte_size
                for i in range(parquet.metadata.num_row_groups)
            ]
        groups = grouped(
            sizes,
            int,
            max_bytes=task_bytes,
            overflows=True,
        )
        return list(pairwise(accumulate(map(len, groups), initial=0)))

    return json_reply(
        list(
            storage.in_parallel(
                cut,
                files,
                path=files[0].path,
            )
        )
    )


def table_ranges(
    files: Sequence[storage.File],
    cuts: Sequence[Sequence[tuple[int, int]]],
) -> list[TableRange]:
    """Return the ranges of all files, numbered in order."""
    ranges: list[TableRange] = []
    for file, cuts_of_file in zip(
        files,
        cuts,
        strict=True,
    ):
        # Row groups have more than a byte
        is_csv = cuts_of_file[-1:] and cuts_of_file[-1][1] == file.size_bytes
        for start, stop in cuts_of_file:
            is_row_start = not (is_csv and start)
            ranges.append(
                TableRange(
                    len(ranges),
                    file.path,
                    start,
                    stop,
                    is_row_start,
                )
            )
    return ranges


def cut_once(
    files: Sequence[storage.File],
    schema: Schema,
    *,
    task_bytes: int,
    running: ResumableJob,
    engine: Engine,
) -> list[list[tuple[int, int]]]:
    """Return the row ranges of each table, from an earlier call of the job if there was one."""
    path = running.folder.aid("cuts.json")
    if storage.exists(path):
        return storage.read_json(path)
    groups = [files[start : start + _CUT_FILES] for start in range(0, len(files), _CUT_FILES)]
    cut = functools.partial(
        cut_files,
        task_bytes=task_bytes,
        schema=schema,
    )
    cuts = [
        file_cuts
        for table in engine.run(
            "cut",
            cut,
            groups,
            block_bytes=1 << 16,
        )
        for file_cuts in parse_reply(table)
    ]
    with running.folder.disk_errors():
        storage.write_json(path, cuts)
    return cuts


def aligned_ranges(
    ranges: list[_Range],
    markers: list[dict[str, Any]],
    task: Callable[[_Range], pa.Table],
    engine: Engine,
) -> tuple[list[_Range], list[dict[str, Any]]]:
    """Return the ranges so that each starts at the end of the one before in the same file, and
    their markers. `markers` have the `start` that a task found and the `end` of its last row.
    """
    for number, (before, item) in enumerate(pairwise(ranges), start=1):
        if item.is_row_start or before.file != item.file:
            continue
        # The previous range knows where a row ends; this one has only guessed it.
        start = markers[number - 1]["end"]
        ranges[number] = replace(
            item,
            start=start,
            is_row_start=True,
        )
        # the line break at the cut was within a quoted field
        if markers[number]["start"] != start:
            (table,) = engine.run(
                "examine",
                task,
                [ranges[number]],
                block_bytes=1 << 16,
            )
            markers[number] = parse_reply(table)
    return ranges, markers
