"""Where good rows stand among all lines of a log, the faulty ones too, so that scores can be joined to the input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.data import materialized
from rayrec.data.engine import Engine
from rayrec.data.logs.index import LogIndex, Segment
from rayrec.data.logs.table_log import good_rows
from rayrec.data.logs.text_parser import PADDING_BYTES, TextParser, max_rows_in
from rayrec.schema import Schema


def first_lines(index: LogIndex, *, segments_per_task: int, engine: Engine) -> dict[Segment, int]:
    """The position of each segment's first line (or row of a table) in the whole log, faulty ones counted too; that of
    preprocessed rows is unchanged. Reads a text log once more, if it has faulty lines."""
    if not index.faults.total or index.format in materialized.FORMATS:
        return {segment: segment.first_row for segment in index.segments}
    if index.format == "table":
        sizes = [segment.stop - segment.start for segment in index.segments]
        return dict(zip(index.segments, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    groups = [index.segments[i : i + segments_per_task] for i in range(0, len(index.segments), segments_per_task)]
    tables = engine.run("count lines", _count_lines, groups, block_bytes=1 << 12)
    lines = [count for table in tables for count in table.column("lines").to_pylist()]
    starts = np.concatenate([[0], np.cumsum(lines, dtype=np.int64)])
    assert int(starts[-1]) == index.rows + index.faults.total
    return {segment: int(start) for segment, start in zip(index.segments, starts[:-1], strict=True)}


def _count_lines(segments: Sequence[Segment]) -> pa.Table:
    return pa.table({"lines": [len(line_starts(read_text(segment), _length(segment))) for segment in segments]})


def _length(segment: Segment) -> int:
    return segment.stop - segment.start


def read_text(segment: Segment) -> np.ndarray:
    """The segment's bytes, uint8, with the padding the parser needs behind them."""
    text = np.zeros(_length(segment) + PADDING_BYTES, np.uint8)
    storage.read_into(segment.path, segment.start, text[: _length(segment)])
    return text


def line_starts(text: np.ndarray, length: int) -> np.ndarray:
    """int64: where each line of text[:length] starts. A line cut off by the segment's end counts: it starts here."""
    if not length:
        return np.empty(0, np.int64)
    newlines = np.flatnonzero(text[: length - 1] == ord("\n"))
    return np.concatenate([[0], newlines + 1])


def good_lines(segment: Segment, schema: Schema) -> np.ndarray:
    """int64 (segment.rows): the place of each good row among the segment's lines (or rows of a table), from 0 on."""
    if segment.format == "table":
        return good_rows(segment, schema)
    text, length = read_text(segment), _length(segment)
    starts = line_starts(text, length)
    if len(starts) == segment.rows:
        return np.arange(segment.rows, dtype=np.int64)
    faults = TextParser(schema, max_rows_in(schema, length)).parse(text, length, most_faults=len(starts))
    bad = np.searchsorted(starts, np.array([fault.byte for fault in faults.first], np.int64))
    good = np.delete(np.arange(len(starts), dtype=np.int64), bad)
    assert len(good) == segment.rows
    return good
