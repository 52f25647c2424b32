"""An output folder of numbered Parquet files that appears complete or not at all; a killed process resumes it.

A file is written when all its rows are there. Until then they are in a journal next to it, an entry a table: the number of bytes
that follow, their CRC-32, and the table as an Arrow stream. An entry that was cut short ends the journal.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec import storage
from rayrec.config import InputError

JOB = "_job.json"
"""What the folder is being made of; of a folder at a URL it also says that it is not complete."""
COMPLETE = "_SUCCESS"
"""The last file of a folder at a URL, for its readers; it names the others."""
_LOCK = "_lock"


@dataclass
class ResumableFolder:
    """The folder while it is made."""

    folder: str
    """To write to: OUT.partial, local or a URL."""
    files: list[str] = field(default_factory=list)
    """Names of the files that OUT shall have; set by the writer, once they are there."""


@contextmanager
def resumable_folder(out: str, made_of: dict[str, Any]) -> Iterator[ResumableFolder]:
    """On leaving it without an error, the folder is at `out` with the files that were named. After an error it stays at
    OUT.partial, so that the same call resumes it, unless it holds nothing yet.

    At a URL, where no folder can be renamed, its files are copied one after the other, and COMPLETE comes last; a process killed
    meanwhile leaves some, and the same call adds the rest. Raises InputError where `out` exists, is being made right
    now, or was begun of something else than `made_of` (plain JSON values), or nobody knows of what.
    """
    out = storage.absolute(out).rstrip("/")
    work = ResumableFolder(f"{out}.partial")
    job = storage.join(work.folder, JOB)
    if storage.exists(out) and not (storage.is_url(out) and storage.exists(job)):
        raise InputError(f"{out}: exists already; remove it or choose another place")
    with ExitStack() as locked:
        if not storage.is_url(out):
            os.makedirs(work.folder, exist_ok=True)
            locked.enter_context(_locked(work.folder))
        _begin(work.folder, job, made_of)
        try:
            yield work
        except BaseException:
            if not _begun(work.folder):
                storage.remove_folder(work.folder)
            raise
        _finish(work, out)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    with open(os.path.join(folder, _LOCK), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the system however the process ends
        except BlockingIOError:
            raise InputError(
                f"{folder}: another process is writing there; wait for it or choose another place"
            ) from None
        yield


def _begin(folder: str, job: str, made_of: dict[str, Any]) -> None:
    if _begun(folder):
        if not storage.exists(job):
            raise InputError(
                f"{folder}: holds files, but no {JOB} that says of what they were made; remove that folder"
            )
        before = storage.read_json(job)
        others = [name for name, value in made_of.items() if before.get(name) != value]
        if others:
            raise InputError(
                f"{folder}: left by an unfinished call with another {', '.join(others)}; give the same to go on with it, or "
                "remove that folder to start over"
            )
        return
    storage.write_json(job, made_of)


def _begun(folder: str) -> bool:
    """Whether anything was made."""
    if storage.is_url(folder):
        return any(name not in (JOB, _LOCK) for name in storage.list_folder(folder))
    names = [
        name for name in os.listdir(folder) if not name.startswith((JOB, _LOCK))
    ]  # a JOB being written has a longer name
    return any(os.path.getsize(os.path.join(folder, name)) for name in names)


def _finish(work: ResumableFolder, out: str) -> None:
    if storage.is_url(out):
        for name in work.files:
            storage.copy_file(storage.join(work.folder, name), storage.join(out, name))
        storage.write_json(storage.join(out, COMPLETE), {"files": work.files})
        storage.remove_file(storage.join(work.folder, JOB))  # first: from now on nobody goes on with it
        storage.remove_folder(work.folder)
        return
    for name in set(os.listdir(work.folder)) - {*work.files, JOB, _LOCK}:
        os.remove(os.path.join(work.folder, name))
    os.rename(work.folder, out)
    storage.sync(os.path.dirname(out))
    for name in (JOB, _LOCK):  # last: until the folder appeared, a killed call can resume
        os.remove(os.path.join(out, name))


PART_ROWS = 1 << 20
"""Rows of one file, about 12 MB of click scores."""
GROUP_ROWS = 1 << 17
"""Rows of one row group: the same however the rows came, so that the same rows make the same bytes."""
_HEADER = struct.Struct("<QI")


@final
class Parts:
    """Writes part-00000.parquet, part-00001.parquet, ... into a folder; a context, behind which the journal is closed.

    In a folder with some files it resumes: at a URL after the last complete file, in a local folder after the
    last table.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._exit = folder, ExitStack()
        names = set(storage.list_folder(folder))
        self._number = next(number for number in itertools.count() if _name(number) not in names)
        """Of the file that is next."""
        place = self._exit.enter_context(storage.Scratch("journal")) if storage.is_url(folder) else folder
        self._journal = _Journal(os.path.join(place, f"_journal-{self._number:05d}"))
        self.rows = self._rows_of_files() + self._journal.rows
        """Written so far, including earlier calls."""

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()
        self._exit.close()

    def write(self, table: pa.Table) -> None:
        start = 0
        while start < len(table):
            piece = table.slice(start, PART_ROWS - self._journal.rows)
            self._journal.append(piece)
            start += len(piece)
            self.rows += len(piece)
            if self._journal.rows == PART_ROWS:
                self._end_part()

    def finish(self) -> list[str]:
        """Writes what is left as the last file; returns the names of all."""
        if self._journal.rows:
            self._end_part()
        return [_name(number) for number in range(self._number)]

    def _rows_of_files(self) -> int:
        """All but the newest are full; that one may be what `finish` wrote, and tells itself."""
        if not self._number:
            return 0
        filesystem, inner = storage.resolve(storage.join(self._folder, _name(self._number - 1)))
        return (self._number - 1) * PART_ROWS + pq.read_metadata(inner, filesystem=filesystem).num_rows

    def _end_part(self) -> None:
        with storage.writing(storage.join(self._folder, _name(self._number))) as path:
            _write_parquet(self._journal.tables(), path)
        self._journal.remove()
        self._number += 1
        self._journal = _Journal(os.path.join(os.path.dirname(self._journal.path), f"_journal-{self._number:05d}"))


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
                joined = pa.concat_tables(waiting)
                if writer is None:
                    dictionaries = _repeating(joined.schema)
                    writer = opened.enter_context(pq.ParquetWriter(path, joined.schema, use_dictionary=dictionaries))
                # One chunk: where chunks end must not show in the file.
                writer.write_table(joined.slice(0, GROUP_ROWS).combine_chunks(), row_group_size=GROUP_ROWS)
                waiting = [joined.slice(GROUP_ROWS)]
                num_waiting = len(waiting[0])


def _repeating(schema: pa.Schema) -> list[str]:
    """Columns whose values repeat; of others a dictionary would only be tried and thrown away."""
    return [
        field.name
        for field in schema
        if field.name == "label" or (field.name != "row" and not pa.types.is_floating(field.type))
    ]


@final
class _Journal:
    """Tables in a local file that a killed process leaves readable."""

    def __init__(self, path: str) -> None:
        self.path, self.rows = path, 0
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115
        whole_bytes = 0
        for end, data in self._entries():
            whole_bytes = end
            self.rows += len(_table(data))
        self._file.truncate(whole_bytes)

    def append(self, table: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        data = sink.getvalue()
        for piece in (_HEADER.pack(data.size, zlib.crc32(data)), memoryview(data)):
            while len(piece):
                piece = piece[self._file.write(piece) :]
        self.rows += len(table)

    def tables(self) -> Iterator[pa.Table]:
        for _, data in self._entries():
            yield _table(data)

    def _entries(self) -> Iterator[tuple[int, bytes]]:
        """Where each whole entry ends, and its table."""
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                length, checksum = _HEADER.unpack(header)
                if length > size - file.tell():
                    return
                data = file.read(length)
                if zlib.crc32(data) != checksum:
                    return
                yield file.tell(), data

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        os.remove(self.path)


def _table(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as stream:
        return stream.read_all()
