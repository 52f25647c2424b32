"""Numbered Parquet files of predictions, resumable after a kill. A file is written once all its rows are complete. Until then a
journal contains them, with an entry per table: byte count, CRC-32, and the table as an Arrow stream. An incomplete entry ends the
journal."""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import final

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec import storage
from rayrec.data.job import JobFolder

PART_ROWS = 1 << 20
"""Rows per file, about 12 MB of click scores."""
GROUP_ROWS = 1 << 17
"""Rows per row group, independent of the incoming tables, so that equal rows produce equal bytes."""
_HEADER = struct.Struct("<QI")


@final
class Parts:
    """Writer of part-00000.parquet, part-00001.parquet, ... in a folder. A context manager, which closes the journal. It resumes
    in a folder with files: at a URL after the last complete file, in a local folder after the last table."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder, self._exit = folder, ExitStack()
        names = set(storage.list_folder(folder.path))
        self._number = next(number for number in itertools.count() if _name(number) not in names)
        """Number of the next file."""
        self._is_local = not storage.is_url(folder.path)
        self._journal_folder = folder.aid() if self._is_local else self._exit.enter_context(storage.Scratch("journal"))
        os.makedirs(self._journal_folder, exist_ok=True)
        self._journal = self._new_journal()
        self.rows = self._journal.rows
        """Rows written so far, including earlier calls."""
        if self._number:  # All files but the last one are full
            filesystem, inner = storage.resolve(storage.join(folder.path, _name(self._number - 1)))
            self.rows += (self._number - 1) * PART_ROWS + pq.read_metadata(inner, filesystem=filesystem).num_rows

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()
        self._exit.close()

    def write(self, table: pa.Table) -> None:
        start = 0
        while start < len(table):
            chunk = table.slice(start, PART_ROWS - self._journal.rows)
            self._journal.append(chunk)
            if not self.rows and self._is_local:
                self._folder.done("predict", 0, {})
            start += len(chunk)
            self.rows += len(chunk)
            if self._journal.rows == PART_ROWS:
                self._end_part()

    def finish(self) -> None:
        """Write the remaining rows as the last file."""
        if self._journal.rows:
            self._end_part()

    def _new_journal(self) -> _Journal:
        return _Journal(os.path.join(self._journal_folder, f"journal-{self._number:05d}"))

    def _end_part(self) -> None:
        with storage.writing(storage.join(self._folder.path, _name(self._number))) as path:
            _write_parquet(self._journal.tables(), path)
        if not self._number:
            self._folder.done("predict", 0, {})
        self._journal.remove()
        self._number += 1
        self._journal = self._new_journal()


def _name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def _write_parquet(tables: Iterator[pa.Table], path: str) -> None:
    waiting, num_waiting = [], 0
    with ExitStack() as opened:
        writer: pq.ParquetWriter | None = None
        for table in itertools.chain(tables, [None]):
            if table is not None:
                waiting.append(table)
                num_waiting += len(table)
            while num_waiting >= GROUP_ROWS or (table is None and num_waiting):
                merged = pa.concat_tables(waiting)
                if writer is None:
                    # Dictionaries only for columns with repeated values.
                    is_float = {field.name: pa.types.is_floating(field.type) for field in merged.schema}
                    repeating = [name for name in is_float if name == "label" or not (name == "row" or is_float[name])]
                    writer = opened.enter_context(pq.ParquetWriter(path, merged.schema, use_dictionary=repeating))
                # A single chunk, because chunk boundaries would change the bytes of the file.
                writer.write_table(merged.slice(0, GROUP_ROWS).combine_chunks(), row_group_size=GROUP_ROWS)
                waiting = [merged.slice(GROUP_ROWS)]
                num_waiting = len(waiting[0])


@final
class _Journal:
    """Local file of tables, readable after a kill."""

    def __init__(self, path: str) -> None:
        self.path, self.rows = path, 0
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115
        complete_bytes = 0
        for end, table in self._entries():
            complete_bytes = end
            self.rows += len(table)
        self._file.truncate(complete_bytes)

    def append(self, table: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        data = sink.getvalue()
        for chunk in (_HEADER.pack(data.size, zlib.crc32(data)), memoryview(data)):
            while len(chunk):
                chunk = chunk[self._file.write(chunk) :]
        self.rows += len(table)

    def tables(self) -> Iterator[pa.Table]:
        return (table for _, table in self._entries())

    def _entries(self) -> Iterator[tuple[int, pa.Table]]:
        """Yield the end offset and table of each complete entry."""
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                length, checksum = _HEADER.unpack(header)
                if length > size - file.tell():
                    return
                data = file.read(length)
                if zlib.crc32(data) != checksum:
                    return
                with pa.ipc.open_stream(data) as stream:
                    yield file.tell(), stream.read_all()

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        os.remove(self.path)
