"""Click logs in Parquet and CSV: segments of full row groups, read into raw columns. A row group is
the smallest readable unit. Parquet files are read directly if their row groups are small enough to
be shuffled. Others, and all CSV files, are rewritten once, with row groups of the size of a
segment.
"""

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.data.arrow import json_reply, parse_reply
from rayrec.data.engine import Engine, TaskContext, grouped
from rayrec.data.formats.columns import pick_columns
from rayrec.data.formats.content import count_names
from rayrec.data.formats.csv import Csv
from rayrec.data.formats.parquet import Parquet
from rayrec.data.formats.registry import find_format
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import (
    CachedIndex,
    LogIndex,
    Segment,
    SegmentEntry,
    changed,
    numbered,
)
from rayrec.data.logs.parquet import read_rows
from rayrec.data.logs.rewritten import (
    VERSION,
    FileRange,
    ParquetPart,
    Rewriting,
    SegmentChecks,
    prepared,
    segments_of,
)
from rayrec.data.logs.table_parser import check_table, find_valid_rows, parse_clicks, parse_table
from rayrec.data.raw_block import RawBlock
from rayrec.data.sampled_rows import sampled_rows
from rayrec.data.stage_times import stage
from rayrec.data.table_ranges import aligned_ranges, csv_ranges
from rayrec.native import keep_freed_memory
from rayrec.schema import Schema
from rayrec.storage.cache import remove_older

_TASK_SEGMENTS = 8
"""Maximum segments of one file per indexing task."""
_TASK_BYTES = 64 << 20
_TASK_FILES = 64
"""Maximum small files per task, of _TASK_BYTES in total."""


def is_table(files: Sequence[storage.File], schema: Schema) -> bool:
    """Return whether the files are tables: of any format with columns, which a schema with tokens
    "any" needs, or text with a header. Looks into the first file. Otherwise they are Criteo's
    text.
    """
    if schema.tokens == "any":
        return True
    first = next((file for file in files if file.size_bytes), None)
    if first is None:
        return False
    is_text = isinstance(find_format(first.path, schema), Csv)
    return not is_text or 2 * count_names(first.path, schema) > len(schema.columns)


# A table is indexed in two jobs, whose results are cached. Both parse each segment that they
# handle once: valid rows, checksum, faults.
#
#   tables   _prepare_task   CSV files and Parquet files with large row groups become Parquet files
#                            with row groups of a segment; other Parquet files stay
#   index    _check_task     segments of the files that stay, or were rewritten earlier
#
# Tasks have one part of a large file, or up to _TASK_FILES small ones, whose requests to a store
# run at the same time.
def index_tables(
    files: Sequence[storage.File],
    schema: Schema,
    *,
    segment_bytes: int,
    context: TaskContext,
    extra: Sequence[str] = (),
) -> LogIndex:
    """Read the full log once to number its rows and count its faults. The cache folder gets the
    index, which is returned for the same files later, and rewritten files, which have the columns
    `extra` too. Raises InputError for a missing column or an unusable type.
    """
    new_columns = tuple(name for name in extra if name not in schema.columns)
    cache = CachedIndex.at(
        context.cache_folder,
        files=files,
        schema=schema,
        segment_bytes=segment_bytes,
        suffix=f"-{VERSION}{new_columns or ''}",
    )
    if cached := cache.read():
        return cached
    parts = _prepared_parts(files, schema, segment_bytes, context, new_columns)
    entries_of: dict[str, list[SegmentEntry]] = {part.path: [] for part in parts}
    faults = Faults()
    for part in parts:
        if part.checks is not None:
            entries_of[part.path] = _entries(part.path, part.checks)
            faults.add(Faults.from_dict(part.checks.faults))
    unchecked = [part for part in parts if part.checks is None]
    total = sum(part.rows for part in unchecked)
    done = 0
    for path, checks in _checked(unchecked, schema, segment_bytes, context):
        entries_of[path] += _entries(path, checks)
        faults.add(Faults.from_dict(checks.faults))
        done += sum(stop - start for start, stop in checks.ranges)
        context.progress("index (rows)", done, total)
    entries = [entry for part in parts for entry in entries_of[part.path]]
    return cache.keep(LogIndex(numbered(entries, "table"), faults), context.note)


def _entries(path: str, checks: SegmentChecks) -> list[SegmentEntry]:
    by_segment = zip(checks.ranges, checks.rows, checks.checksums, strict=True)
    return [SegmentEntry(path, *range_, rows, sum_) for range_, rows, sum_ in by_segment]


def _checked(
    parts: Sequence[ParquetPart],
    schema: Schema,
    segment_bytes: int,
    context: TaskContext,
) -> Iterator[tuple[str, SegmentChecks]]:
    """Yield the path of a part and the checks of its next segments, in order."""
    tasks: list[list[_Chunk]] = grouped(
        (chunk for part in parts for chunk in _chunks(part, segment_bytes)),
        lambda chunk: chunk.size_bytes,
        max_bytes=_TASK_SEGMENTS * segment_bytes,
        max_items=_TASK_FILES,
    )
    function = functools.partial(_check_task, schema=schema)
    results = context.engine.run("index", function, tasks, block_bytes=1 << 16)
    for task, result in zip(tasks, map(parse_reply, results), strict=True):
        for chunk, checks in zip(task, result, strict=True):
            yield chunk.part.path, SegmentChecks(**checks)


def _prepared_parts(
    files: Sequence[storage.File],
    schema: Schema,
    segment_bytes: int,
    context: TaskContext,
    extra: tuple[str, ...],
) -> list[ParquetPart]:
    """Return the Parquet files with all rows of the log, after rewriting what cannot be shuffled.
    Notes what is rewritten.
    """
    assert context.cache_folder is not None
    folder = storage.absolute(storage.join(context.cache_folder, "tables"))
    kind = _other_format(files, schema)
    if kind is not None:
        context.note(f"Writing {len(files)} {kind} files as Parquet to {folder} (once)")
    how = Rewriting(schema, segment_bytes, folder, extra)
    ranges = _file_ranges(files, how)
    total = 0
    replies: list[dict[str, Any]] = []
    groups = grouped(
        ranges,
        # Ranges of one file are tasks of their own
        lambda part: _TASK_BYTES if part.stop else part.version.size_bytes,
        max_bytes=_TASK_BYTES,
        max_items=_TASK_FILES,
    )
    prepare = functools.partial(_prepare_task, how=how)
    for table in context.engine.run("tables", prepare, groups, block_bytes=1 << 16):
        new = parse_reply(table)
        replies += new
        total += sum(part.rows for reply in new for part in _parts_of(reply))
        context.progress("tables (rows)", total, None)
    parts = _joined_parts(ranges, replies, how, context.engine)
    rewritten = [part for part in parts if part.source != part.path]
    sources = {part.source for part in rewritten}
    if sources and kind is None:
        context.note(
            f"Rewrote {len(sources)} Parquet files with row groups of more than "
            f"{2 * segment_bytes >> 10:,} KiB, too large to "
            f"shuffle, to {folder} (once)"
        )
    # Rewritten files of an older state of the log would fill the cache folder. A name starts with
    # the hash of its source.
    if rewritten:
        remove_older(
            folder,
            {part.path.removeprefix(folder).lstrip("/")[:16] for part in rewritten},
        )
    return parts


# A large CSV file that was not rewritten before is rewritten by several tasks:
#
#   cut       into ranges of bytes, whose number depends on the file's size alone, so that a log has
#             the same segments whatever cluster opens it
#   tables    a task a range writes its rows from the first line end, which may be in a quoted field
#   align     a range that does not begin where the one before has ended is written again
#
# A log of many large files has enough tasks without, and too many files to look into them here.
def _file_ranges(files: Sequence[storage.File], how: Rewriting) -> list[FileRange]:
    """Return the files of a log, the large CSV files among them as ranges."""
    large = [file for file in files if file.size_bytes > _TASK_BYTES]
    edges: dict[str, list[tuple[int, int]]] = {}
    if 0 < len(large) <= _TASK_FILES:
        cut = functools.partial(_edges_of, how=how)
        paths = (file.path for file in large)
        edges = dict(zip(paths, storage.in_parallel(cut, large, path=files[0].path), strict=True))
    ranges = []
    for file in files:
        for number, (start, stop) in enumerate(edges.get(file.path) or [(0, 0)]):
            is_row_start = start == 0
            ranges.append(FileRange(number, file.path, start, stop, is_row_start, version=file))
    return ranges


def _edges_of(file: storage.File, how: Rewriting) -> list[tuple[int, int]]:
    """Return the ranges of bytes of a CSV file that several tasks rewrite, none for other files."""
    ranges = csv_ranges(file, how.schema, task_bytes=_TASK_BYTES)
    return [] if ranges and how.is_done(file) else ranges


def _joined_parts(
    ranges: Sequence[FileRange],
    replies: Sequence[dict[str, Any]],
    how: Rewriting,
    engine: Engine,
) -> list[ParquetPart]:
    """Return the parts of all files, given the replies for their ranges. Aligns the ranges of each
    file, and makes its parts valid.
    """
    joined: list[ParquetPart] = []
    # A log may name a file twice, so that only the numbers tell where the next one begins
    files = itertools.accumulate(part.number == 0 for part in ranges)
    triples = zip(files, ranges, replies, strict=True)
    for _, group in itertools.groupby(triples, key=operator.itemgetter(0)):
        _, file_ranges, markers = map(list, zip(*group, strict=True))
        is_cut = file_ranges[0].stop > 0
        if is_cut:
            _, markers = aligned_ranges(
                file_ranges, markers, functools.partial(_align_task, how=how), engine
            )
        parts: list[ParquetPart] = []
        rows = 0
        for marker in markers:
            new = _parts_of(marker)
            parts += [part.moved(rows) for part in new]
            rows += sum(part.rows for part in new)
        if is_cut:
            how.finish(file_ranges[0].version, parts)
        joined += parts
    return joined


def _other_format(files: Sequence[storage.File], schema: Schema) -> str | None:
    """Return the format of a log's files; None for Parquet. One look: a log may have 100,000
    files.
    """
    file_format = find_format(files[0].path, schema) if files else Parquet()
    if isinstance(file_format, Parquet):
        return None
    return "CSV" if isinstance(file_format, Csv) else file_format.name


def _prepare_task(ranges: Sequence[FileRange], *, how: Rewriting) -> pa.Table:
    """Prepare a large file, a range of one, or several small files whose requests to a store run in
    parallel.
    """
    keep_freed_memory()
    prepare = functools.partial(prepared, how=how)
    replies = storage.in_parallel(prepare, ranges, path=ranges[0].file)
    return json_reply([asdict(reply) for reply in replies])


def _align_task(part: FileRange, *, how: Rewriting) -> pa.Table:
    """Rewrite a range of a file from the start of its first row."""
    keep_freed_memory()
    return json_reply(asdict(prepared(part, how)))


def _parts_of(reply: dict[str, Any]) -> list[ParquetPart]:
    """Return the parts in the reply for a file or range."""
    parts = []
    for stored in reply["parts"]:
        checks = stored["checks"]
        groups = [(rows, size) for rows, size in stored["groups"]]
        checked = checks and SegmentChecks(**checks)
        parts.append(ParquetPart(**{**stored, "groups": groups, "checks": checked}))
    return parts


@dataclass(frozen=True)
class _Chunk:
    """Row ranges of a part, one per segment. An indexing task has one or more chunks."""

    part: ParquetPart
    ranges: list[tuple[int, int]]
    size_bytes: int


def _chunks(part: ParquetPart, segment_bytes: int) -> Iterator[_Chunk]:
    segments = list(segments_of(part.groups, segment_bytes))
    for first in range(0, len(segments), _TASK_SEGMENTS):
        some = segments[first : first + _TASK_SEGMENTS]
        ranges = [(segment.start, segment.stop) for segment in some]
        yield _Chunk(part, ranges, sum(segment.size_bytes for segment in some))


def _check_task(chunks: Sequence[_Chunk], *, schema: Schema) -> pa.Table:
    """Read and parse each segment of some chunks; reply with the checks of each chunk."""
    ranges = [(chunk.part.path, *range_) for chunk in chunks for range_ in chunk.ranges]
    tables = storage.in_parallel(
        lambda range_: read_rows(*range_, schema, dictionaries=True), ranges, path=ranges[0][0]
    )
    replies = []
    for chunk in chunks:
        rows = []
        sums = []
        faults = Faults()
        for start, _ in chunk.ranges:
            table, sum_ = next(tables)
            part = chunk.part
            is_valid, new_faults = check_table(
                table, schema, path=part.source, first_row=part.first_row + start
            )
            rows.append(int(is_valid.sum()))
            sums.append(sum_)
            faults.add(new_faults)
        replies.append(asdict(SegmentChecks(chunk.ranges, rows, sums, faults.to_dict())))
    return json_reply(replies)


def read_tables(segments: Sequence[Segment], schema: Schema) -> RawBlock:
    """Read segments of one log in turn, without invalid rows, and without those that a sample
    leaves out. Raises InputError if a segment no longer has its indexed rows.
    """
    tables = storage.in_parallel(
        functools.partial(_read_table, schema=schema),
        segments,
        path=segments[0].path,
    )
    blocks = []
    for _, group in itertools.groupby(segments, lambda each: (each.path, each.sample is None)):
        batch = list(group)
        with stage("read"):
            read = [next(tables) for _ in batch]
        with stage("parse"):
            blocks += _parsed_batch(read, batch, schema)
    return RawBlock.concatenated(blocks)


# Tables without a sample are parsed as one: of small ones, the calls for each column take longer
# than their values.
def _parsed_batch(
    tables: Sequence[pa.Table], segments: Sequence[Segment], schema: Schema
) -> list[RawBlock]:
    """Parse segments of one file, given all rows of their ranges. Raises InputError if they changed
    since the log was indexed.
    """
    first = segments[0]
    is_equal = all(table.schema == tables[0].schema for table in tables)
    if first.sample is None and is_equal:
        raw, _ = parse_table(pa.concat_tables(tables), schema, path=first.path)
        if raw.rows == sum(segment.rows for segment in segments):
            return [raw]
    blocks = []
    for table, segment in zip(tables, segments, strict=True):
        raw = _parsed(table, segment, schema)
        if raw.rows != segment.rows:
            raise changed(segment.path, segment.start, segment.stop, "rows")
        blocks.append(raw)
    return blocks


def _parsed(table: pa.Table, segment: Segment, schema: Schema) -> RawBlock:
    """Parse the rows of a segment, given all rows of its range."""
    if segment.sample is None:
        raw, _ = parse_table(table, schema, path=segment.path)
        return raw
    if segment.sample.part.segment.rows == table.num_rows:
        # Without faults, labels alone say which rows to parse
        labels = parse_clicks(table, schema, path=segment.path)
        table = table.take(pa.array(sampled_rows(segment, labels)))
        raw, _ = parse_table(table, schema, path=segment.path)
        return raw
    raw, _ = parse_table(table, schema, path=segment.path)
    return raw.subset(sampled_rows(segment, raw.labels[schema.label_names[0]]))


def read_label_column(segment: Segment, schema: Schema) -> np.ndarray:
    """Return the label of each row of a segment without faults, float32 [rows]."""
    columns = schema.label_names[:1]
    table, _ = read_rows(segment.path, segment.start, segment.stop, schema, columns=columns)
    return parse_clicks(table, schema, path=segment.path)


def good_rows(segment: Segment, schema: Schema) -> np.ndarray:
    """Return the position of each valid row among the segment's rows, from 0, int64
    [segment.rows].
    """
    table = _read_table(segment, schema)
    good = find_valid_rows(table, schema, path=segment.path)
    if len(good) != segment.rows:
        raise changed(segment.path, segment.start, segment.stop, "rows")
    return good


def file_columns(file: storage.File, schema: Schema) -> tuple[str, ...]:
    """Return the columns of a table's file in file order, without partition columns, none if it is
    empty.
    """
    return find_format(file.path, schema).columns(file.path, schema)


def column_names(file: storage.File, schema: Schema) -> tuple[str, ...]:
    """Return the columns of a table's rows, none if its CSV file is empty."""
    columns = file_columns(file, schema)
    is_parquet = find_format(file.path, schema).name == Parquet.name
    return pick_columns(file.path, columns) if columns or is_parquet else ()


def _read_table(segment: Segment, schema: Schema) -> pa.Table:
    """Read a segment's rows, including invalid ones. Raises InputError if they changed since the
    log was indexed.
    """
    rows = (segment.path, segment.start, segment.stop)
    table, sum_ = read_rows(*rows, schema, dictionaries=True)
    if segment.checksum is not None and sum_ != segment.checksum:
        raise changed(segment.path, segment.start, segment.stop, "rows")
    return table
