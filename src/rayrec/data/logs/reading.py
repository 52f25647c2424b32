"""Rows of raw logs in any format, their line numbers, and the values of single columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.engine import Engine
from rayrec.data.logs.column_values import is_text
from rayrec.data.logs.index import Block, LogIndex, Segment, SegmentRange
from rayrec.data.logs.parquet import read_rows
from rayrec.data.logs.random_log import read_random
from rayrec.data.logs.splits import Slice
from rayrec.data.logs.table_log import good_rows, read_label_column, read_tables
from rayrec.data.logs.table_parser import argument_values, category_items, derived_columns
from rayrec.data.logs.text_log import read_segments, read_text
from rayrec.data.logs.text_parser import TextParser, max_rows_in
from rayrec.data.raw_block import RawBlock
from rayrec.data.sampled_rows import all_sampled_rows, log_segments
from rayrec.formula.tree import Node
from rayrec.schema import Schema


def read_raw(segments: Sequence[Segment], schema: Schema) -> RawBlock:
    """Read the raw rows of segments of one log, all sampled or none."""
    if segments and segments[0].format == "table":
        return read_tables(segments, schema)
    if segments and segments[0].sample is not None:
        raw = read_raw(log_segments(segments), schema)
        return raw.subset(all_sampled_rows(segments, raw.labels[schema.label_names[0]]))
    if segments and segments[0].format == "random":
        return read_random(segments, schema)
    return read_segments(segments, schema)


def read_clicks(segments: Sequence[Segment], schema: Schema) -> np.ndarray:
    """Read `Schema.label` of raw segments, float32 [rows]. Of tables without faults, only this
    column is read.
    """
    has_faults = any(each.stop - each.start != each.rows for each in segments)
    if segments[0].format == "table" and not has_faults:
        return np.concatenate([read_label_column(each, schema) for each in segments])
    return read_raw(segments, schema).labels[schema.label_names[0]]


def first_lines(index: LogIndex, *, segments_per_task: int, engine: Engine) -> dict[Segment, int]:
    """Return the position of each segment's first line (or table row) in the full log, including
    invalid ones. Row numbers of preprocessed data are returned unchanged. Reads a text log with
    invalid lines once more.
    """
    if not index.faults.total or index.format not in ("text", "table"):
        return {segment: segment.first_row for segment in index.segments}
    if index.format == "table":
        sizes = [segment.stop - segment.start for segment in index.segments]
        return dict(zip(index.segments, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    groups = [
        index.segments[i : i + segments_per_task]
        for i in range(0, len(index.segments), segments_per_task)
    ]
    tables = engine.run("count lines", _count_lines, groups, block_bytes=1 << 12)
    lines = [count for table in tables for count in table.column("lines").to_pylist()]
    starts = np.concatenate([[0], np.cumsum(lines, dtype=np.int64)])
    assert int(starts[-1]) == index.rows + index.faults.total
    return {segment: int(start) for segment, start in zip(index.segments, starts[:-1], strict=True)}


def _count_lines(segments: Sequence[Segment]) -> pa.Table:
    return pa.table(
        {"lines": [len(line_starts(read_text(each), each.stop - each.start)) for each in segments]}
    )


def line_starts(text: np.ndarray, length: int) -> np.ndarray:
    """Return the start of each line of text[:length], int64. A line cut off by the segment's end
    counts, since it starts here.
    """
    if not length:
        return np.empty(0, np.int64)
    return np.concatenate([[0], np.flatnonzero(text[: length - 1] == ord("\n")) + 1])


def good_lines(segment: Segment, schema: Schema) -> np.ndarray:
    """Return the position of each valid row among the segment's lines (or table rows), from 0,
    int64 [segment.rows].
    """
    if segment.format == "table":
        return good_rows(segment, schema)
    text = read_text(segment)
    length = segment.stop - segment.start
    starts = line_starts(text, length)
    if len(starts) == segment.rows:
        return np.arange(segment.rows, dtype=np.int64)
    faults = TextParser(schema, max_rows_in(schema, length)).parse(
        text,
        length,
        max_faults=len(starts),
    )
    bad = np.searchsorted(starts, np.array([fault.byte for fault in faults.first], np.int64))
    good = np.delete(np.arange(len(starts), dtype=np.int64), bad)
    assert len(good) == segment.rows
    return good


def read_column(block: Block, raw: RawBlock, column: str, schema: Schema) -> pa.Array:
    """Return the column's value in each row of an unpermuted block, whose segments `raw` contains;
    null if missing. uint32 for a category of 8 hexadecimal digits, text (as a dictionary) for other
    categories, int64 or float64 for a number.
    """
    order = block.order()
    values = raw.column(column)
    if isinstance(values, np.ndarray) and (
        column in schema.dense or schema.tokens == "hexadecimal"
    ):
        return pa.array(values[order], mask=raw.is_missing(column)[order])
    # 64-bit tokens are hashes of the text.
    return pa.concat_arrays(
        [_text(part, column, schema) for part in block.parts]
    ).dictionary_encode()


def _text(part: SegmentRange, column: str, schema: Schema) -> pa.Array:
    """Return the column's text in the part's rows, null if missing, large_string."""
    segment = part.segment
    is_derived = column in schema.derived
    columns = None if is_derived else [column]
    table, _ = read_rows(segment.path, segment.start, segment.stop, schema, columns=columns)
    if is_derived:
        table = derived_columns(table, schema, path=segment.path)
    values = (
        table.column(column)
        if column in table.column_names
        else pa.chunked_array([pa.nulls(len(table))])
    )
    if segment.rows != segment.stop - segment.start:
        values = values.take(pa.array(good_rows(segment, schema)))
    values = values.slice(part.start, part.rows)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())  # Like its tokens
    if pa.types.is_floating(values.type):  # Integers, and NaN if missing
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values).cast(
            pa.int64()
        )
    text = (values.cast(pa.large_binary()) if is_text(values.type) else values).cast(
        pa.large_string()
    )
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.large_string()), text).combine_chunks()


@final
@dataclass(frozen=True)
class Categories:
    """Present values of a column of categories."""

    items: pa.Array
    """Values as in the file, [values]."""
    tokens: np.ndarray
    """Their tokens, uint64 [values]."""
    lengths: np.ndarray
    """Number of values in each row, int64 [rows]."""


def read_categories(part: SegmentRange, column: str, schema: Schema) -> Categories:
    """Return a column's categories in a part of a table. Lists are whole, whatever their
    `max_length`.
    """
    segment = part.segment
    is_derived = column in schema.derived
    columns = None if is_derived else [column]
    table, _ = read_rows(segment.path, segment.start, segment.stop, schema, columns=columns)
    if is_derived:
        table = derived_columns(table, schema, path=segment.path)
    if segment.rows != segment.stop - segment.start:
        table = table.take(pa.array(good_rows(segment, schema)))
    table = table.slice(part.start, part.rows)
    return Categories(*category_items(table, column, schema, path=segment.path))


def argument_columns(part: SegmentRange, nodes: Sequence[Node], schema: Schema) -> pa.Table:
    """Return the values of parts of formulas in a part's rows, a column each, 0 for the first."""
    segment = part.segment
    # Lookups may depend on the row's time.
    names = {*schema.program.needed(nodes), schema.timestamp}
    read = [name for name in schema.columns if name in names]
    table, _ = read_rows(segment.path, segment.start, segment.stop, schema, columns=read)
    values = argument_values(table, schema, nodes, path=segment.path)
    columns = pa.table(values, names=[str(number) for number in range(len(values))])
    if segment.rows != segment.stop - segment.start:
        columns = columns.take(pa.array(good_rows(segment, schema)))
    return columns.slice(part.start, part.rows)


def name_slices(block: Block, slices: Sequence[Slice]) -> pa.Array:
    """Return the name of each row's range in an unpermuted block, as a dictionary. The ranges are
    adjacent and cover the log.
    """
    starts = np.array([each.start for each in slices], np.int64)
    rows = np.concatenate(
        [
            part.segment.first_row + np.arange(part.start, part.stop, dtype=np.int64)
            for part in block.parts
        ]
    )
    numbers = np.searchsorted(starts, rows, side="right") - 1
    return pa.DictionaryArray.from_arrays(
        pa.array(numbers.astype(np.int32)),
        pa.array(distinct_names(slices), pa.large_string()),
    )


def distinct_names(slices: Sequence[Slice]) -> list[str]:
    """Return the names of the ranges, numbered if files in several folders have the same name."""
    assert all(before.stop == after.start for before, after in pairwise(slices))
    names = [each.name for each in slices]
    return [
        f"{name} ({names[:number].count(name) + 1})" if names.count(name) > 1 else name
        for number, name in enumerate(names)
    ]
