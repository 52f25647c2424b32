"""Reads the rows of segments and blocks, whatever format they are in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rayrec.data import materialized
from rayrec.data.encoded import EncodedRows
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.logs.index import Block, Segment, row_numbers
from rayrec.data.logs.table_log import read_tables
from rayrec.data.logs.text_log import read_segments
from rayrec.data.raw_block import RawBlock
from rayrec.data.stage_times import stage
from rayrec.schema import Schema


def read_raw(segments: Sequence[Segment], schema: Schema) -> RawBlock:
    """The raw rows of segments of one log."""
    if segments and segments[0].format == "table":
        return read_tables(segments, schema)
    return read_segments(segments, schema)


@dataclass(frozen=True)
class OpenedBlock:
    """A block whose rows are encoded when they are asked for."""

    encode: Callable[[int, int], EncodedRows]
    """Of start and stop: rows [start, stop) of the block, permuted and encoded."""
    raw: RawBlock | None
    """All rows of the block's segments, in their own order; None where they are preprocessed."""


def open_block(block: Block, preprocessor: Preprocessor, *, labelled: bool = True) -> OpenedBlock:
    """A raw log is read and parsed here, preprocessed rows when they are asked for."""
    segments, order = [part.segment for part in block.parts], block.order()
    if segments[0].format in materialized.FORMATS:
        read = stage("read")(lambda start, stop: materialized.read(segments, order[start:stop], preprocessor))
        return OpenedBlock(read, None)
    raw = read_raw(segments, preprocessor.schema if labelled else preprocessor.schema.unlabelled())
    numbers = row_numbers(segments)  # reading has checked that every segment has the rows that it was indexed with

    @stage("encode")
    def encode(start: int, stop: int) -> EncodedRows:
        chosen = order[start:stop]
        groups = raw.group_keys(chosen) if labelled and raw.schema.group else None
        return replace(preprocessor.encode(raw, chosen), row_numbers=numbers[chosen], groups=groups)

    return OpenedBlock(encode, raw)


def encode_block(
    block: Block, start: int, stop: int, preprocessor: Preprocessor, *, labelled: bool = True
) -> EncodedRows:
    """Rows [start, stop) of a block, permuted and encoded."""
    return open_block(block, preprocessor, labelled=labelled).encode(start, stop)
