"""CSV reader: files to columns of text, with every row accounted for."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.columns import check_file
from rayrec.data.formats.header import Header, read_header
from rayrec.data.formats.row_faults import FAULT
from rayrec.data.formats.text_stream import ByteStream, open_text
from rayrec.native import call
from rayrec.schema import Schema

READ_BYTES = 4 << 20
MAX_ROW_BYTES = 64 << 20
MAX_QUOTED_BYTES = 256 << 10
MAX_QUOTED_LINES = 100
"""Maximum bytes and line ends of a quoted field. A quote not closed within them is unmatched."""
_HEADER_BYTES = 1 << 20
_SEARCHED_BYTES = 64 << 10
_BOM = b"\xef\xbb\xbf"
_ROWS_AT_ONCE = 1 << 15
"""Rows split at once; their positions take 8 bytes per field."""


def csv_head(path: str, encoding: str | None = None) -> bytes:
    """Return the start of a CSV file in UTF-8, with its first row, without a byte order mark."""
    schema = Schema(label=None, sparse=("-",), encoding=encoding)  # No column is read
    with open_text(path, schema) as stream:
        return _head(stream, path, _HEADER_BYTES, schema)


def csv_columns(path: str, schema: Schema) -> tuple[str, ...]:
    """Return the column names of a CSV file, none if it is empty."""
    with open_text(path, schema) as stream:
        text = _head(stream, path, _HEADER_BYTES, schema)
        return read_header(text, schema, path=path).columns if text.strip(b"\r\n") else ()


def read_csv(
    path: str,
    schema: Schema,
    columns: Sequence[str] | None = None,
    *,
    read_bytes: int = READ_BYTES,
) -> Iterator[pa.Table]:
    """Yield columns of a CSV file, plain or packed: those of the schema, or the named ones. Tables
    have them as UTF-8 bytes, with the column FAULT. Columns that the file lacks are absent. Invalid
    rows have empty values; empty lines are skipped. In a row with an unmatched quote, the first
    line is one invalid row and the next row starts at the next line. Raises InputError for damage,
    and a row of more than MAX_ROW_BYTES.
    """
    with open_text(path, schema) as stream:
        text = _head(stream, path, read_bytes, schema)
        if not text.strip(b"\r\n"):
            return
        splitter = _Splitter.from_file(path, text, schema, columns)
        # `text` is the beginning of a row that the last bytes cut.
        while True:
            more = stream.read(read_bytes)
            tables, text = splitter.split(text, more, final=not more)
            yield from tables
            if not more:
                return
            splitter.check_length(text)


# Ranges of a CSV file are read by different tasks, and a row may contain line ends in quotes:
#
#   start         where the previous range has ended, or a guess (`row_start`) that is checked later
#   inside        rows are split as in a full read
#   at `stop`     the row that it cuts is read to its end, one at a time
#   open quote    rows are read on until it closes, or until the file ends
#
# The end of one range must be the start of the next, or the guess was in a quoted field.
class CsvRange:
    """Rows that begin in bytes [start, stop) of a plain CSV file in UTF-8, independent of earlier
    rows, as tables like those from `read_csv`. `start` is 0 or the first byte of a row.
    """

    def __init__(
        self, path: str, schema: Schema, columns: Sequence[str], start: int, stop: int
    ) -> None:
        self._path = path
        self._schema = schema
        self._columns = columns
        self._start = start
        self._stop = stop
        self.end = start
        """Start of the first row after the range, known after iteration."""

    def __iter__(self) -> Iterator[pa.Table]:
        path = self._path
        at = self._start
        text = b""
        with open_text(path, self._schema) as stream:
            head = _head(stream, path, _HEADER_BYTES, self._schema)
            splitter = _Splitter.from_file(path, head, self._schema, self._columns)
        if at:
            splitter.has_header = False  # It is in another range
        elif _bytes_at(path, (0, len(_BOM))) == _BOM:
            at = len(_BOM)
        ranges = [
            (start, min(READ_BYTES, self._stop - start))
            for start in range(at, self._stop, READ_BYTES)
        ]
        for chunk in storage.in_parallel(functools.partial(_bytes_at, path), ranges, path=path):
            tables, rest = splitter.split(text, chunk, final=False)
            at += len(text) + len(chunk) - len(rest)
            text = rest
            yield from tables
        # The row cut by `stop`, or rows after a quote that is not closed before it.
        final = False
        while at < self._stop and (text or not final):
            tables, rest = splitter.split(text, final=final, max_rows=1)
            at += len(text) - len(rest)
            yield from tables
            if len(rest) == len(text):
                chunk = _bytes_at(path, (at + len(text), READ_BYTES))
                final = not chunk
                rest = text + chunk
                splitter.check_length(rest)
            text = rest
        self.end = _skip_line_ends(path, at)


def row_start(path: str, start: int) -> int:
    """Return the first byte after the line end at or after `start` - 1: a row start, unless the
    line end is in a quoted field.
    """
    at = start - 1
    while chunk := _bytes_at(path, (at, _SEARCHED_BYTES)):
        ends = [end_at for end in (b"\n", b"\r") if (end_at := chunk.find(end)) >= 0]
        if ends:
            return _skip_line_ends(path, at + min(ends))
        at += len(chunk)
    return at


def _skip_line_ends(path: str, at: int) -> int:
    """Return the first byte at or after `at` that is not a line end."""
    while chunk := _bytes_at(path, (at, _SEARCHED_BYTES)):
        rest = chunk.lstrip(b"\r\n")
        at += len(chunk) - len(rest)
        if rest:
            break
    return at


def _bytes_at(path: str, byte_range: tuple[int, int]) -> bytes:
    """Return the bytes at (first byte, maximum size)."""
    start, size = byte_range
    buffer = np.empty(size, np.uint8)
    return buffer[: storage.read_into(path, start, buffer)].tobytes()


def read_csv_text(
    text: bytes, schema: Schema, *, delimiter: str, columns: Sequence[str], path: str
) -> pa.Table:
    """Return the same table for rows in memory without a header, skipping empty lines. `columns`
    names their fields in order.
    """
    header = Header(delimiter, tuple(columns), is_row=False)
    splitter = _Splitter(path, header, schema, schema.columns)
    tables, _ = splitter.split(text, final=True)
    if tables:
        return pa.concat_tables(tables)
    arrays = [pa.array([], pa.large_binary())] * len(splitter.names)
    return pa.table([*arrays, pa.array([], pa.uint8())], names=[*splitter.names, FAULT])


def _head(stream: ByteStream, path: str, read_bytes: int, schema: Schema) -> bytes:
    """Return the file's start up to at least the end of its header, without a byte order mark."""
    text = b""
    # A line end in a quoted name does not end the header: its quotes are even only after the last
    # one.
    while len(text) < _HEADER_BYTES and (more := stream.read(read_bytes)):
        text += more
        line, ended, _ = text.lstrip(b"\r\n").partition(b"\n")
        if ended and line.count(b'"') % 2 == 0:
            break
    if schema.is_utf8 and text.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(
            f"{path}: is UTF-16; name it in the schema, `encoding: utf-16`, or save it as UTF-8"
        )
    return text.removeprefix(_BOM)


class _Splitter:
    """Incremental splitter of a CSV file's text."""

    def __init__(self, path: str, header: Header, schema: Schema, columns: Sequence[str]) -> None:
        self.path = path
        self.names = tuple(name for name in columns if name in header.columns)
        self.delimiter = np.frombuffer(header.delimiter.encode(), np.uint8)
        self.columns = len(header.columns)
        index = {name: number for number, name in enumerate(self.names)}
        self.places = np.array([index.get(name, -1) for name in header.columns], np.int32)
        self.has_header = header.is_row
        """Whether the next row is the header, which is split too."""
        self.row = 0
        self.trim = schema.tokens == "any" and schema.category_rules >= 2
        self.escape = -1 if schema.escape is None else ord(schema.escape)

    @classmethod
    def from_file(
        cls, path: str, head: bytes, schema: Schema, columns: Sequence[str] | None
    ) -> _Splitter:
        """Create a splitter for the file that begins with `head`. Raises InputError if its header
        lacks a column of the schema.
        """
        header = read_header(head, schema, path=path)
        check_file(path, header.columns, schema, hint=f" (split at {header.delimiter!r})")
        return cls(path, header, schema, schema.columns if columns is None else columns)

    def split(
        self, text: bytes, more: bytes = b"", *, final: bool, max_rows: int | None = None
    ) -> tuple[list[pa.Table], bytes]:
        """Return the complete rows of `text` and the text behind it, all or the first `max_rows`,
        and the remaining text.
        """
        # A copy, since quotes are removed in place, only in complete rows
        data = np.empty(len(text) + len(more), np.uint8)
        data[: len(text)] = np.frombuffer(text, np.uint8)
        data[len(text) :] = np.frombuffer(more, np.uint8)
        tables = []
        begin = 0
        assert len(data) < 1 << 31
        while begin < len(data):
            table, consumed = self._table(data[begin:], final, max_rows or _ROWS_AT_ONCE)
            if table.num_rows:
                tables.append(table)
            begin += consumed
            if not consumed or max_rows:
                break
        assert not final or max_rows or begin == len(data)
        return tables, data[begin:].tobytes()

    def check_length(self, text: bytes) -> None:
        """Check that the text, an incomplete row, is not too long. Raises InputError."""
        if len(text) > MAX_ROW_BYTES:
            raise InputError(
                f"{self.path}: row {self.row} exceeds {MAX_ROW_BYTES >> 20} MiB, so it is not a "
                "CSV file"
            )

    def _table(self, data: np.ndarray, final: bool, max_rows: int) -> tuple[pa.Table, int]:
        """Return rows at the start of the text, and their size in bytes."""
        columns_out = len(self.names)
        # More rows come with the next call
        capacity = min(len(data) // max(self.columns, 2) + 1, max_rows)
        fields = np.empty((capacity, columns_out, 2), np.uint32)
        kinds = np.empty(capacity, np.uint8)
        consumed = np.zeros(1, np.int64)
        marks = (self.delimiter, len(self.delimiter), ctypes.c_int32(self.escape))
        how = (ctypes.c_int32(final), *marks, ctypes.c_int32(self.trim))
        columns = (ctypes.c_int32(self.columns), self.places, ctypes.c_int32(columns_out), capacity)
        out = (fields, kinds, consumed)
        rows = call(
            "rayrec_split_csv",
            data,
            len(data),
            *how,
            MAX_QUOTED_BYTES,
            MAX_QUOTED_LINES,
            *columns,
            *out,
        )
        skip = 1 if rows and self.has_header else 0
        if skip and kinds[0]:
            raise InputError(f"{self.path}: first row must be a header (an unmatched quote)")
        self.has_header = self.has_header and not rows
        self.row += rows - skip
        arrays = gather_columns(data, fields[skip:rows])
        return pa.table([*arrays, pa.array(kinds[skip:rows])], names=[*self.names, FAULT]), int(
            consumed[0]
        )


# All columns share one buffer, in column order:
#
#   offsets[c]    starts of the texts of column c, and their end, from 0
#   starts[c]     first byte of column c in the buffer, and its end
#
# The kernel goes through some rows at a time, whose fields stay in the CPU's cache for all columns.
def gather_columns(data: np.ndarray, fields: np.ndarray) -> list[pa.Array]:
    """Return the columns of text, large_binary. `fields` has the first byte and size of each field,
    uint32 [rows, columns, 2].
    """
    rows, width, _ = fields.shape
    shape = (rows, ctypes.c_int32(width))
    starts = np.zeros(width + 1, np.int64)
    call("rayrec_text_sizes", fields, *shape, starts[1:])
    starts = np.cumsum(starts)
    offsets = np.empty((width, rows + 1), np.int64)
    out = np.empty(starts[-1], np.uint8)
    call("rayrec_gather_text", data, len(data), fields, *shape, starts, offsets, out)
    arrays = []
    for column in range(width):
        text = out[starts[column] : starts[column + 1]]
        buffers = [None, pa.py_buffer(offsets[column]), pa.py_buffer(text)]
        arrays.append(pa.LargeBinaryArray.from_buffers(pa.large_binary(), rows, buffers))
    return arrays
