"""Reads the rows of segments and blocks, whatever format they are in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayrec.data import ready
from rayrec.data.columns import RawColumns
from rayrec.data.encoded import EncodedRows
from rayrec.data.log import Segment, read_segments
from rayrec.data.parsing import RawRows
from rayrec.data.position import Block
from rayrec.data.preprocessor import Preprocessor
from rayrec.data.tables import read_tables
from rayrec.schema import Schema


def read_raw(segments: Sequence[Segment], schema: Schema) -> RawRows | RawColumns:
    """The raw rows of segments of one log."""
    if segments and segments[0].format == "table":
        return read_tables(segments, schema)
    return read_segments(segments, schema)


def open_block(block: Block, preprocessor: Preprocessor, *, labelled: bool = True) -> Callable[[int, int], EncodedRows]:
    """A function of start and stop that gives rows [start, stop) of a block, permuted and encoded. A raw log is read and
    parsed here, ready-made rows when they are asked for."""
    segments, order = [part.segment for part in block.parts], block.order()
    if segments[0].format in ready.FORMATS:
        return lambda start, stop: ready.read(segments, order[start:stop], preprocessor)
    raw = read_raw(segments, preprocessor.schema if labelled else preprocessor.schema.unlabelled())
    return lambda start, stop: preprocessor.encode(raw, order[start:stop])


def encode_block(
    block: Block, start: int, stop: int, preprocessor: Preprocessor, *, labelled: bool = True
) -> EncodedRows:
    """Rows [start, stop) of a block, permuted and encoded."""
    return open_block(block, preprocessor, labelled=labelled)(start, stop)
