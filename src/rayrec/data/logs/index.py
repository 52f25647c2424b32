"""A click log as a sequence of segments: byte ranges of whole lines whose good rows are counted once and numbered."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.logs.faults import HEAD_BYTES, Faults, likely_cause
from rayrec.data.logs.text_parser import MAX_LINE_BYTES, PADDING_BYTES, TextParser, max_rows_in
from rayrec.data.raw_block import RawBlock
from rayrec.data.stage_times import stage
from rayrec.native import library
from rayrec.schema import Schema

GZIP_MAGIC = b"\x1f\x8b"
GUNZIP_BYTES = 8 << 20
"""Most bytes that one step of unpacking gives."""
KEY_DIGITS = 10
"""Of the 16 hex digits that name what was made from a file, those that say which file; the others say which version of it."""
_MOST_INDICES = 64
"""Indices that one folder keeps."""

Format = Literal["text", "table", "binary", "npy", "npz", "parquet"]
"""text: lines of a raw log; table: a raw log in Parquet or CSV; the others are preprocessed data (data/materialized)."""
VERSION = 2
"""Version of stored indices; another one makes a log be indexed again."""


class Entry(NamedTuple):
    """A segment that is not numbered yet."""

    path: str
    start: int
    stop: int
    rows: int
    """Good rows."""
    checksum: int | None = None


@dataclass(frozen=True)
class Segment:
    """A stretch of one file, its good rows numbered from first_row on (over the whole log)."""

    path: str
    start: int
    stop: int
    """[start, stop): bytes holding whole lines of text; in other formats, rows of the file."""
    first_row: int
    rows: int
    format: Format = "text"
    checksum: int | None = None
    """Checksum of the bytes the rows are made from (native/checksum.c), of a table those of the schema's columns. None: not
    known; preprocessed files have checksums of their own."""


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of one segment (good rows, counted from the segment's first)."""

    segment: Segment
    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """Rows that are read, parsed and permuted together."""

    parts: tuple[Part, ...]
    seed: tuple[int, ...] | None
    """Of the permutation; None keeps the log's order."""

    @property
    def rows(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    def order(self) -> np.ndarray:
        """int64 (rows): which row of the parsed segments comes at each place of the block."""
        chosen, base = [], 0
        for part in self.parts:
            chosen.append(np.arange(base + part.start, base + part.stop, dtype=np.int64))
            base += part.segment.rows
        rows = np.concatenate(chosen)
        return (
            rows
            if self.seed is None
            else np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed))).permutation(rows)
        )


@dataclass(frozen=True)
class LogIndex:
    """A click log cut into segments, with every refused line accounted for."""

    segments: tuple[Segment, ...]
    faults: Faults

    @property
    def rows(self) -> int:
        last = self.segments[-1] if self.segments else None
        return last.first_row + last.rows if last else 0

    @property
    def size_bytes(self) -> int:
        """Of a log of text."""
        return sum(segment.stop - segment.start for segment in self.segments)

    @property
    def format(self) -> Format:
        return self.segments[0].format if self.segments else "text"

    @property
    def bad_fraction(self) -> float:
        lines = self.rows + self.faults.total
        return self.faults.total / lines if lines else 0.0

    def check(self, max_bad_fraction: float, path: str) -> None:
        """Raises InputError if the log has no rows or more faulty ones than allowed; it names the likely cause."""
        if self.rows and self.bad_fraction <= max_bad_fraction:
            return
        why = self.faults.describe() if self.faults.total else "it is empty"
        cause = self._cause()
        wrong_labels = None if cause else self.faults.wrong_labels()
        if cause or wrong_labels:
            why += f"; {cause or wrong_labels}"
        if not self.rows:
            raise InputError(f"{path}: no usable rows; {why}")
        fix = "" if wrong_labels else "; fix the log or raise --max-bad-fraction"
        raise InputError(
            f"{path}: {self.bad_fraction:.2%} of its lines are faulty, more than max_bad_fraction {max_bad_fraction:.2%}; "
            f"{why}{fix}"
        )

    def _cause(self) -> str:
        """Return the likely cause of the faults of a text log; "" if nothing is conspicuous."""
        if self.format != "text" or not self.faults.first or self.faults.first[0].byte is None:
            return ""
        return likely_cause(head_of(self.faults.first[0].path, HEAD_BYTES))

    def to_dict(self) -> dict[str, Any]:
        paths = sorted({segment.path for segment in self.segments})
        number = {path: i for i, path in enumerate(paths)}
        return {
            "paths": paths,
            "format": self.format,
            "segments": [[number[s.path], s.start, s.stop, s.rows, s.checksum] for s in self.segments],
            "faults": self.faults.to_dict(),
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> LogIndex:
        entries = (Entry(stored["paths"][number], *rest) for number, *rest in stored["segments"])
        return cls(numbered(entries, stored["format"]), Faults.from_dict(stored["faults"]))


def numbered(entries: Iterable[Entry | tuple[str, int, int, int]], format: Format = "text") -> tuple[Segment, ...]:
    """Segments in log order, their rows numbered through."""
    segments, first_row = [], 0
    for entry in entries:
        path, start, stop, rows, checksum = Entry(*entry)
        segments.append(Segment(path, start, stop, first_row, rows, format, checksum))
        first_row += rows
    return tuple(segments)


@dataclass(frozen=True)
class Chunk:
    """A byte range of one file, not aligned to lines: the unit of work of one indexing task. The lines that *start* in
    [start, stop) are its own."""

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


def read_lines(chunk: Chunk) -> tuple[np.ndarray, int, int]:
    """The chunk's own lines: (padded uint8 text, its length, byte of the file where it starts).

    A line longer than the parser accepts is cut off where the chunk's neighbour begins to look for its own first line.
    """
    before = 1 if chunk.start > 0 else 0  # the byte before tells whether a line starts at `start`
    want = min(chunk.stop + MAX_LINE_BYTES + 1, chunk.file_size) - (chunk.start - before)
    text = np.zeros(want + PADDING_BYTES, np.uint8)
    got = storage.read_into(chunk.path, chunk.start - before, text[:want])
    first = 0
    if before and text[0] != ord("\n"):
        found = _find_newline(text, 0, got)
        if found < 0 or chunk.start - before + found + 1 >= chunk.stop:
            return text[-PADDING_BYTES:], 0, chunk.stop
        first = found + 1
    elif before:
        first = 1
    own = chunk.stop - (chunk.start - before)  # lines that start before this offset are ours
    if own >= got:
        stop = got
    else:
        found = _find_newline(text, own - 1, got)
        stop = found + 1 if found >= 0 else got
    text[stop : stop + PADDING_BYTES] = 0
    return text[first:], stop - first, chunk.start - before + first


def _find_newline(text: np.ndarray, start: int, stop: int) -> int:
    for low in range(start, stop, 4096):
        found = text[low : min(low + 4096, stop)].tobytes().find(b"\n")
        if found >= 0:
            return low + found
    return -1


def parsed_segments(chunk: Chunk, schema: Schema, segment_bytes: int) -> Iterator[tuple[Entry, Faults, RawBlock]]:
    """Parses a chunk and cuts it into segments of about `segment_bytes`; the rows of one are overwritten by the next's."""
    text, length, first_byte = read_lines(chunk)
    parser = TextParser(schema, max_rows_in(schema, min(length, 2 * segment_bytes + MAX_LINE_BYTES)))
    start = 0
    while start < length:
        stop = length
        if length - start > segment_bytes * 3 // 2:
            stop = start + _last_line_start(text[start:], segment_bytes)
            if stop == start:  # no newline in a whole segment: the parser refuses that line as too long
                newline = _find_newline(text, start, length)
                stop = newline + 1 if newline >= 0 else length
                parser = TextParser(schema, max(parser.capacity, max_rows_in(schema, stop - start)))
        parser.drop_after(0)
        sum_ = checksum(text[start:stop])
        faults = parser.parse(text[start:], stop - start, path=chunk.path, first_byte=first_byte + start)
        yield Entry(chunk.path, first_byte + start, first_byte + stop, parser.rows, sum_), faults, parser.block()
        start = stop


def index_chunk(chunk: Chunk, schema: Schema, segment_bytes: int) -> tuple[list[Entry], Faults]:
    """The segments of a chunk, and its faults."""
    entries, total = [], Faults()
    for entry, faults, _ in parsed_segments(chunk, schema, segment_bytes):
        entries.append(entry)
        total.add(faults)
    return entries, total


def _last_line_start(text: np.ndarray, length: int) -> int:
    function = library().rayrec_last_line_start
    function.restype = ctypes.c_int64
    return function(ctypes.c_void_p(text.ctypes.data), ctypes.c_int64(length))


def checksum(data: np.ndarray) -> int:
    """Checksum of contiguous bytes (uint8), from 0 to 2^63 - 1; finds any change of one 8-byte word, others but for 2^-63."""
    function = library().rayrec_checksum
    function.restype = ctypes.c_int64
    return function(ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(data.nbytes))


def changed(path: str, start: int, stop: int, unit: str) -> InputError:
    """The error for a segment that is not what it was when the log was indexed; `unit`: bytes or rows."""
    return InputError(
        f"{path}: {unit} {start}-{stop} changed since the log was indexed; restore the file, or start a new run with "
        "another --name"
    )


def read_segments(segments: Sequence[Segment], schema: Schema) -> RawBlock:
    """Reads and parses segments one after the other; their faulty lines, counted before, are passed over.

    Raises InputError where a segment no longer holds the rows it was indexed with.
    """
    sizes = [segment.stop - segment.start for segment in segments]
    parser = TextParser(schema, sum(max_rows_in(schema, size) for size in sizes))
    texts = storage.ahead(
        [functools.partial(_read_text, segment) for segment in segments], of=segments[0].path if segments else ""
    )
    for segment, size in zip(segments, sizes, strict=True):
        with stage("read"):
            text, got = next(texts)
        if got != size or (segment.checksum is not None and checksum(text[:size]) != segment.checksum):
            raise changed(segment.path, segment.start, segment.stop, "bytes")
        before = parser.rows
        with stage("parse"):
            parser.parse(text, size, path=segment.path, first_byte=segment.start)
        if parser.rows - before != segment.rows:
            raise changed(segment.path, segment.start, segment.stop, "bytes")
    return parser.block()


def _read_text(segment: Segment) -> tuple[np.ndarray, int]:
    """A segment's bytes with the padding the parser needs behind them, and how many bytes there were."""
    size = segment.stop - segment.start
    text = np.empty(size + PADDING_BYTES, np.uint8)
    text[size:] = 0
    return text, storage.read_into(segment.path, segment.start, text[:size])


def row_numbers(segments: Sequence[Segment]) -> np.ndarray:
    """int64: the numbers in the log of the segments' rows, one segment after the other."""
    return np.concatenate(
        [np.arange(segment.first_row, segment.first_row + segment.rows, dtype=np.int64) for segment in segments]
    )


def head_of(path: str, size_bytes: int) -> bytes:
    """A file's first bytes. Raises InputError for a file that this user may not read."""
    head = np.zeros(size_bytes, np.uint8)
    try:
        got = storage.read_into(path, 0, head)
    except (PermissionError, IsADirectoryError) as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from None
    return head[:got].tobytes()


def is_gzip(path: str) -> bool:
    return head_of(path, 2) == GZIP_MAGIC


def version_key(source: object, version: object) -> str:
    """16 hex digits that name a file made from a source: the first KEY_DIGITS for the source, the others for its version."""
    digests = [hashlib.sha256(repr(each).encode()).hexdigest() for each in (source, version)]
    return digests[0][:KEY_DIGITS] + digests[1][: 16 - KEY_DIGITS]


def remove_older(folder: str, kept: Iterable[str]) -> None:
    """Removes what was made from older versions of the sources of `kept` names (see `version_key`) from a folder."""
    kept = {name[:16] for name in kept}
    sources = {name[:KEY_DIGITS] for name in kept}
    for name in storage.list_folder(folder) if sources else []:
        if name[:KEY_DIGITS] in sources and name[:16] not in kept:
            storage.remove_folder(storage.join(folder, name))
            storage.remove_file(storage.join(folder, name))


def unpacked_path(file: storage.File, folder: str) -> str:
    """Where the plain text of a gzip file is kept: named by the file's path, size and time."""
    key = version_key(file.path, (file.size_bytes, file.modified_ns))
    return storage.join(folder, f"{key}-{storage.name_of(file.path).removesuffix('.gz')}")


def unpack(file: storage.File, folder: str, progress: Callable[[int], None] | None = None) -> storage.File:
    """Unpacks a gzip file once, so that it can be split and reread from any row (gzip itself allows neither).

    The result appears complete or not at all; a second call finds it. At a URL it is sent while it is unpacked, and takes no
    room here. Raises InputError for a damaged file or a full disk.
    """
    target = unpacked_path(file, folder)
    if not storage.exists(target):
        try:
            storage.write_stream(target, _reported(_decompressed(file.path), progress))
        except OSError as error:
            if error.errno is None:  # a store that is out
                raise
            raise InputError(f"{target}: {file.path} cannot be unpacked there ({error.strerror})") from None
    return storage.list_files(target)[0]


def _reported(pieces: Iterator[bytes], progress: Callable[[int], None] | None) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        if progress:
            progress(len(piece))


def _decompressed(path: str) -> Iterator[bytes]:
    try:
        yield from gunzip(storage.read_stream(path))
    except zlib.error as error:
        raise InputError(f"{path}: damaged gzip file ({error}); fetch it again") from None
    except EOFError:
        raise InputError(f"{path}: the gzip file ends in the middle; fetch it again") from None


def gunzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The content of gzip data, in pieces of at most GUNZIP_BYTES however well it was compressed. Raises zlib.error for
    damaged data, EOFError if it ends in the middle."""
    engine = zlib.decompressobj(wbits=31)
    begun = False
    for data in pieces:
        while data:
            if engine.eof:
                data = data.lstrip(b"\0")  # padding behind the last member, which gzip passes over too
                if not data:
                    break
                engine = zlib.decompressobj(wbits=31)  # several gzip members one after the other
            begun = True
            if piece := engine.decompress(data, GUNZIP_BYTES):
                yield piece
            data = engine.unused_data if engine.eof else engine.unconsumed_tail
        while not engine.eof and (piece := engine.decompress(b"", GUNZIP_BYTES) if begun else b""):
            yield piece
    if not engine.eof:
        raise EOFError


def source_of(path: str) -> tuple[str, str]:
    """What tells apart the user's file that a segment's rows come from, and its name with the partitions it is in, if it was
    unpacked (see `unpacked_path`) or written again in several parts (see data/logs/parquet.py)."""
    folder, base = storage.folder_of(path), storage.name_of(path)
    plain = folder.partition("?")[0]
    partitions = "".join(f"{name}/" for name in partition_names(plain))
    rewritten = re.fullmatch(r"(.*/tables/[0-9a-f]{16})/\d{5}(/[^/]*=[^/]*)*", plain)
    if rewritten:
        return rewritten[1], partitions + base.removesuffix(".parquet")
    return path, partitions + re.sub(r"^[0-9a-f]{16}-", "", base)


def partition_names(folder: str) -> list[str]:
    """The last folders of a path, as far as they are named KEY=VALUE."""
    names: list[str] = []
    for name in reversed(folder.split("/")):
        if not storage.PARTITION.fullmatch(name):
            break
        names.insert(0, name)
    return names


def select(index: LogIndex, start: int, stop: int) -> list[tuple[Segment, int, int]]:
    """The segments holding rows [start, stop) of the log, each with the range of its own rows that is meant."""
    parts = []
    for segment in index.segments:
        low, high = max(start - segment.first_row, 0), min(stop - segment.first_row, segment.rows)
        if low < high:
            parts.append((segment, low, high))
    return parts


@dataclass(frozen=True)
class CachedIndex:
    """Where the index of some files, cut in one way, is kept for the next run."""

    path: str | None
    """None: it is not kept."""
    version: str
    """What identifies these versions of the files."""
    listed: frozenset[str]
    """Paths of the files, which are known to be there."""

    @classmethod
    def at(
        cls, folder: str | None, *, files: Sequence[storage.File], schema: Schema, segment_bytes: int, suffix: str = ""
    ) -> CachedIndex:
        """In `folder` (None: nowhere); `suffix` tells apart indices that depend on more than that."""
        paths = [file.path for file in files]
        source = hashlib.sha256(repr((paths, schema.to_dict(), segment_bytes, suffix)).encode()).hexdigest()[:16]
        versions = [(file.size_bytes, file.modified_ns) for file in files]
        version = hashlib.sha256(repr((VERSION, versions)).encode()).hexdigest()[:16]
        path = None if folder is None else storage.join(folder, f"index-{source}.json")
        return cls(path, version, frozenset(paths))

    def read(self) -> LogIndex | None:
        """None if there is none of these versions of the files, if files that were made from them are gone, or if it is
        damaged: the log is then indexed again."""
        version, index = self._stored()
        if index is None or version != self.version:
            return None
        made = {segment.path for segment in index.segments} - self.listed
        return index if len(storage.find_files(sorted(made))) == len(made) else None

    def write(self, index: LogIndex) -> str | None:
        """Replaces the index of an older version of the files, and returns where the log was edited since, if it was: a file
        and the first segment of it that has other bytes in the same place."""
        if self.path is None:
            return None
        _, old = self._stored()
        storage.write_json(self.path, {"version": self.version, **index.to_dict()})
        folder = storage.folder_of(self.path)
        kept = [file for file in storage.files_in(folder) if storage.name_of(file.path).startswith("index-")]
        for file in sorted(kept, key=lambda file: file.modified_ns)[:-_MOST_INDICES]:
            storage.remove_file(file.path)
        return None if old is None else _edited(old, index)

    def _stored(self) -> tuple[str | None, LogIndex | None]:
        """The version of the files and their index; None if there is none, or a damaged one."""
        if self.path is None or not storage.exists(self.path):
            return None, None
        try:
            stored = storage.read_json(self.path)
            return stored["version"], LogIndex.from_dict(stored)
        except (ValueError, TypeError, LookupError, AttributeError):  # not JSON, or JSON of another shape
            return None, None


def said_of(edited: str) -> str:
    """What to tell the user of a log that was edited, as `CachedIndex.write` returns it."""
    return f"{edited} changed since the log was indexed before; runs that began with the old rows cannot resume"


def _edited(old: LogIndex, new: LogIndex) -> str | None:
    known = {(segment.path, segment.start, segment.stop): segment.checksum for segment in old.segments}
    for segment in new.segments:
        before = known.get((segment.path, segment.start, segment.stop))
        if before is not None and segment.checksum not in (None, before):
            unit = "bytes" if segment.format == "text" else "rows"
            return f"{segment.path}: {unit} {segment.start}-{segment.stop}"
    return None
