"""Tab-separated logs: segmenting, indexing and reading."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rayrec import storage
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import Segment, SegmentEntry, changed, checksum
from rayrec.data.logs.text_parser import MAX_LINE_BYTES, PADDING_BYTES, TextParser, max_rows_in
from rayrec.data.raw_block import RawBlock
from rayrec.data.stage_times import stage
from rayrec.native import call
from rayrec.schema import Schema


@dataclass(frozen=True)
class Chunk:
    """Byte range of one file, not aligned to lines, for one indexing task. Contains the lines that
    *start* in [start, stop).
    """

    path: str
    start: int
    stop: int
    file_size: int


def cut(files: Sequence[storage.File], chunk_bytes: int) -> list[Chunk]:
    return [
        Chunk(file.path, start, min(start + chunk_bytes, file.size_bytes), file.size_bytes)
        for file in files
        for start in range(0, file.size_bytes, chunk_bytes)
    ]


# A line belongs to the chunk in which it starts:
#
#   ...line\n|line\nline\nli|ne\n...       chunk = bytes between the bars
#   skipped   ^ first line       ^ read beyond the chunk, up to its end
#
# So chunks are read without knowing each other, and each line once.
def read_lines(chunk: Chunk) -> tuple[np.ndarray, int, int]:
    """Read the chunk's lines: (padded uint8 text, its length, its first byte in the file). A line
    longer than the parser accepts is cut off where the next chunk starts to search for its first
    line.
    """
    before = 1 if chunk.start > 0 else 0  # The byte before shows whether a line starts at `start`
    want = min(chunk.stop + MAX_LINE_BYTES + 1, chunk.file_size) - (chunk.start - before)
    text = np.zeros(want + PADDING_BYTES, np.uint8)
    size = storage.read_into(chunk.path, chunk.start - before, text[:want])
    first = 0
    if before and text[0] != ord("\n"):
        newline = _find_newline(text, 0, size)
        if newline < 0 or chunk.start - before + newline + 1 >= chunk.stop:
            return text[-PADDING_BYTES:], 0, chunk.stop
        first = newline + 1
    elif before:
        first = 1
    # Lines that start before this offset belong to the chunk
    end = chunk.stop - (chunk.start - before)
    if end >= size:
        stop = size
    else:
        newline = _find_newline(text, end - 1, size)
        stop = newline + 1 if newline >= 0 else size
    text[stop : stop + PADDING_BYTES] = 0
    return text[first:], stop - first, chunk.start - before + first


def _find_newline(text: np.ndarray, start: int, stop: int) -> int:
    for low in range(start, stop, 4096):
        offset = text[low : min(low + 4096, stop)].tobytes().find(b"\n")
        if offset >= 0:
            return low + offset
    return -1


def parsed_segments(
    chunk: Chunk, schema: Schema, segment_bytes: int
) -> Iterator[tuple[SegmentEntry, Faults, RawBlock]]:
    """Parse a chunk in segments of about `segment_bytes`. The rows of one segment are overwritten
    by the next.
    """
    text, length, first_byte = read_lines(chunk)
    parser = TextParser(
        schema, max_rows_in(schema, min(length, 2 * segment_bytes + MAX_LINE_BYTES))
    )
    start = 0
    while start < length:
        stop = length
        if length - start > segment_bytes * 3 // 2:
            stop = start + call("rayrec_last_line_start", text[start:], segment_bytes)
            # No newline in a full segment: the parser rejects that line as too long
            if stop == start:
                newline = _find_newline(text, start, length)
                stop = newline + 1 if newline >= 0 else length
                parser = TextParser(schema, max(parser.capacity, max_rows_in(schema, stop - start)))
        parser.drop_after(0)
        sum_ = checksum(text[start:stop])
        faults = parser.parse(
            text[start:], stop - start, path=chunk.path, first_byte=first_byte + start
        )
        yield (
            SegmentEntry(chunk.path, first_byte + start, first_byte + stop, parser.rows, sum_),
            faults,
            parser.block(),
        )
        start = stop


def index_chunk(
    chunk: Chunk, schema: Schema, segment_bytes: int
) -> tuple[list[SegmentEntry], Faults]:
    """Return the segments of a chunk, and its faults."""
    entries = []
    total = Faults()
    for entry, faults, _ in parsed_segments(chunk, schema, segment_bytes):
        entries.append(entry)
        total.add(faults)
    return entries, total


def read_segments(segments: Sequence[Segment], schema: Schema) -> RawBlock:
    """Read and parse segments in turn, without invalid lines. Raises InputError if a segment no
    longer has its indexed rows.
    """
    sizes = [segment.stop - segment.start for segment in segments]
    parser = TextParser(schema, sum(max_rows_in(schema, size) for size in sizes))
    texts = storage.in_parallel(read_text, segments, path=segments[0].path if segments else "")
    for segment, size in zip(segments, sizes, strict=True):
        with stage("read"):
            text = next(texts)
        before = parser.rows
        with stage("parse"):
            parser.parse(text, size, path=segment.path, first_byte=segment.start)
        if parser.rows - before != segment.rows:
            raise changed(segment.path, segment.start, segment.stop, "bytes")
    return parser.block()


def read_text(segment: Segment) -> np.ndarray:
    """Return the segment's bytes and the parser's padding, uint8. Raises InputError if they changed
    since indexing.
    """
    size = segment.stop - segment.start
    text = np.empty(size + PADDING_BYTES, np.uint8)
    text[size:] = 0
    num_read = storage.read_into(segment.path, segment.start, text[:size])
    if num_read != size or (
        segment.checksum is not None and checksum(text[:size]) != segment.checksum
    ):
        raise changed(segment.path, segment.start, segment.stop, "bytes")
    return text
