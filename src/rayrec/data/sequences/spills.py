"""Events of a log by partitions of the users, in files that each task writes for its range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec import storage
from rayrec.data.arrow import arrow_numbers
from rayrec.data.formats.csv import Csv
from rayrec.data.formats.csv_reader import row_start
from rayrec.data.formats.registry import find_format
from rayrec.data.job import JobFolder, read_array
from rayrec.data.logs.column_parser import MISSING, ColumnParser
from rayrec.data.logs.column_values import VALUE, Text, decimal_digits, is_text
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.splits import NAMES, part_of_file
from rayrec.data.table_ranges import RangeTables, TableRange
from rayrec.hashing import mix64
from rayrec.native import call, keep_freed_memory
from rayrec.schema import Schema, SequenceSplit

CHUNK_BYTES: Final = 24 << 20
"""Bytes of events that a task keeps in memory before it writes them."""
SECOND: Final = 1_000_000
"""Microseconds of a second."""
_CHUNK: Final = np.dtype(
    [
        ("start", np.int64),
        ("size", np.int64),
        ("events", np.int64),
        ("texts", np.int64),
    ]
)
"""Range of bytes in a task's file, with some events of one partition. `texts` has a bit for each
column of values that has texts.
"""
_FACTORS: Final = (0x94D049BB133111EB, 0xBF58476D1CE4E5B9)
"""Factors of `mix64`, the last one first."""

_TEXTS: Final = pa.schema([("token", pa.uint64()), ("text", pa.large_string())])
"""Distinct texts of a column."""

Numbers = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class EventsJob:
    """Parameters of all tasks that read events."""

    folder: JobFolder
    events: Schema
    """Schema of the log. Its columns of `sparse` become lists, except the first, the user."""
    partitions: int
    split: SequenceSplit

    @property
    def has_parts(self) -> bool:
        """Return whether rows have a part."""
        return self.split.kind == "files"

    @property
    def has_times(self) -> bool:
        return self.events.timestamp is not None

    @property
    def width(self) -> int:
        """Number of values in an event's row."""
        return self.value_index(len(self.events.sparse))

    def value_index(self, column: int) -> int:
        """Return the index of a column's value in an event's row. The user, column 0, is the
        first.
        """
        return self.has_parts + self.has_times + column if column else 0

    def path(
        self,
        kind: Literal["events", "chunks"],
        number: int,
    ) -> str:
        """Return the path of a task's events, or of their chunks by partition, _CHUNK [partitions,
        chunks].
        """
        return self.folder.aid(kind, f"{number:06d}.bin")


@dataclass(frozen=True)
class Spill:
    """File with a task's events."""

    number: int
    chunks: int


# Events of a log that is in no order become lists in three phases, whose tasks share nothing but
# files:
#
#   events    a task per range of the log writes its events by partition of the users
#   lists     a task per partition reads its events of all ranges, sorts them, and writes its lists
#   items     a task per partition of items counts those that training does not have
#
# An event is a row of 64-bit values, in this order:
#
#   hash      of the user's token, a bijection
#   part      for a split by files: 0 for training, 1 for validation, 2 for the test
#   time      in microseconds, for a log with times
#   tokens    of the item and of further columns. That of an integer is the integer
#
# A chunk of a file has some rows of one partition. For each column with texts, a message of Arrow
# follows with its distinct tokens and their texts.
def spill_events(part: TableRange, *, job: EventsJob) -> pa.Table:
    """Write a range's events by partition, in their order, and return their number, faults, and
    the range of their times. An event without a user, an item, or a value of another column is a
    fault.
    """
    keep_freed_memory()
    job.folder.require()
    if not part.is_row_start:
        start = row_start(part.file, part.start)
        part = replace(
            part,
            start=start,
            is_row_start=True,
        )
    counts = _Counts()
    tables = RangeTables(
        part,
        job.events,
        columns=job.events.columns,
        dictionaries=True,
    )
    with job.folder.disk_errors(), ExitStack() as opened:
        path = opened.enter_context(storage.writing(job.path("events", part.number)))
        writer = _SpillWriter(
            opened.enter_context(open(path, "wb")),
            job,
            keeps_texts=find_format(part.file, job.events).name != Csv.name,
        )
        for table in tables:
            batch, faults = _parsed(table, part.file, job, first_row=counts.lines)
            counts.add(table.num_rows, batch, faults)
            if batch.events:
                writer.add(batch)
        chunks = writer.finish()
    with job.folder.disk_errors():
        storage.write_bytes(job.path("chunks", part.number), chunks.view(np.uint8).data)
    marker = {
        **counts.to_dict(),
        "texts": writer.texts,
        "words": writer.words,
        "wide": writer.wide,
        "chunks": chunks.shape[1],
        "start": part.start,
        "end": tables.end,
    }
    return job.folder.done("events", part.number, marker)


@dataclass(frozen=True)
class _Batch:
    """Valid events of a table."""

    keys: Tokens
    parts: Numbers | None
    times: Numbers | None
    tokens: Sequence[Tokens]
    """Tokens of each column of values, the user's first."""
    texts: Mapping[int, pa.Array | None]
    """Text columns by number, with text of any type, or a dictionary. None if all texts are
    integers, as are their tokens.
    """

    @property
    def events(self) -> int:
        return len(self.keys)

    @property
    def size_bytes(self) -> int:
        arrays = (*self.columns(), *self.texts.values())
        return sum(array.nbytes for array in arrays if array is not None)

    def columns(self) -> list[np.ndarray]:
        """Return the columns of the events' rows."""
        ordering = [column for column in (self.parts, self.times) if column is not None]
        return [self.keys, *ordering, *self.tokens[1:]]


@dataclass
class _Counts:
    """Counts of a range's rows."""

    rows: int = 0
    """Valid events."""
    lines: int = 0
    """All rows."""
    latest: int | None = None
    """Latest time in microseconds. None without times or events."""
    earliest: int | None = None
    has_fractions: bool = False
    """Whether a time is not a whole second."""
    faults: Faults = field(default_factory=Faults)

    def add(self, lines: int, batch: _Batch, faults: Faults) -> None:
        """Add the rows of a table, with its valid events."""
        self.lines += lines
        self.rows += batch.events
        self.faults.add(faults)
        if batch.times is None or not batch.events:
            return
        times = batch.times
        latest = int(times.max())
        earliest = int(times.min())
        self.latest = latest if self.latest is None else max(latest, self.latest)
        self.earliest = earliest if self.earliest is None else min(earliest, self.earliest)
        self.has_fractions |= bool((times // SECOND * SECOND != times).any())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "rows": self.rows,
            "lines": self.lines,
            "latest": self.latest,
            "earliest": self.earliest,
            "has_fractions": self.has_fractions,
            "faults": self.faults.to_dict(),
        }


def _parsed(
    table: pa.Table,
    path: str,
    job: EventsJob,
    *,
    first_row: int,
) -> tuple[_Batch, Faults]:
    """Return the valid events of a table, and its faults, numbered from `first_row`."""
    events = job.events
    parser = ColumnParser(
        table,
        events,
        path,
    )
    block = parser.parse_all()
    for number, name in enumerate(events.sparse):
        parser.reject(
            block.missing[:, number],
            MISSING,
            name,
        )
    valid = parser.fault_kinds < 0
    is_full = bool(valid.all())
    tokens = list(block.categories.T)
    times = block.times
    if not is_full:
        tokens = [column[valid] for column in tokens]
        times = None if times is None else times[valid]
    parts = None
    if job.has_parts:
        parts = _parts(path, tokens[0], tokens[1], job.split)
    texts = {}
    for number, name in enumerate(events.sparse):
        array = parser.categories(name)
        if not is_full:
            array = array.filter(pa.array(valid))
        text = None if name in events.integers else _as_text(array)
        if text is not None:
            texts[number] = None if _are_integers(text, tokens[number]) else text
    batch = _Batch(
        mix64(tokens[0]),
        parts,
        times,
        tokens,
        texts,
    )
    return batch, parser.faults(first_row)


# A draw depends on the user and the item alone, so that any engine and order of files give the
# same.
def _parts(
    path: str,
    users: Tokens,
    items: Tokens,
    split: SequenceSplit,
) -> Numbers:
    """Return the part of a file's events, given the tokens of their users and items."""
    name = part_of_file(path)
    if name in NAMES[1:]:
        return np.full(len(users), NAMES.index(name))
    draws = mix64(users ^ mix64(items)) % np.uint64(1_000_000)
    return (draws < split.sizes[0]).astype(np.int64)


def _as_text(array: pa.Array) -> pa.Array | None:
    """Return categories without nulls as text. None if they are integers, as are their tokens."""
    kind = array.type
    if is_text(kind) or types.is_dictionary(kind):
        return array
    if types.is_date(kind):
        return pc.cast(pc.cast(array, pa.date32()), pa.large_string())
    if types.is_decimal(kind):
        return decimal_digits(array)[0]
    if types.is_uint64(kind) and (pc.max(array).as_py() or 0) >= 1 << 63:
        return pc.cast(array, pa.large_string())
    return None


def _are_integers(texts: pa.Array, tokens: Tokens) -> bool:
    """Return whether texts are the digits of their tokens."""
    if types.is_dictionary(texts.type):
        return False
    for count in (1, len(texts)):  # One is enough for most other texts
        values = np.empty(count, np.int64)
        status = Text.from_array(texts[:count]).call("rayrec_text_integers", values)
        if (status != VALUE).any() or (values.view(np.uint64) != tokens[:count]).any():
            return False
    return True


class _SpillWriter:
    """Writer of one task's events."""

    def __init__(
        self,
        file: Any,
        job: EventsJob,
        *,
        keeps_texts: bool,
    ) -> None:
        """`keeps_texts`: integers that are text stay so, also in columns without other text."""
        self._file = file
        self._job = job
        self._keeps_texts = keeps_texts
        self._waiting: list[_Batch] = []
        self._events = 0
        self._bytes = 0
        self._position = 0
        self._chunks: list[np.ndarray] = []
        self.texts = 0
        """A bit for each column of text."""
        self.words = 0
        """A bit for each column of values that stay text."""
        self.wide = 0
        """A bit for each column of values that has integers beyond int32."""

    def add(self, batch: _Batch) -> None:
        self._waiting.append(batch)
        self._events += batch.events
        self._bytes += batch.size_bytes
        for number, tokens in enumerate(batch.tokens):
            text = batch.texts.get(number)
            if number in batch.texts:
                self.texts |= 1 << number
                # Users are what predictions name.
                if text is not None or self._keeps_texts or not number:
                    self.words |= 1 << number
            if text is None and _has_wide(tokens):
                self.wide |= 1 << number
        if self._bytes >= CHUNK_BYTES:
            self._flush()

    def finish(self) -> np.ndarray:
        """Write the pending events. Return all chunks by partition, _CHUNK [partitions, chunks]."""
        self._flush()
        chunks = np.zeros((len(self._chunks), self._job.partitions), _CHUNK)
        for number, chunk in enumerate(self._chunks):
            chunks[number] = chunk
        return np.ascontiguousarray(chunks.T)

    def _flush(self) -> None:
        """Write the pending events as one chunk per partition."""
        if not self._events:
            return
        batches = self._waiting
        coded = {
            number for batch in batches for number, text in batch.texts.items() if text is not None
        }
        sources = np.empty(self._events, np.int64) if coded else None
        rows, starts = self._partitioned(batches, sources)
        chunk = np.zeros(self._job.partitions, _CHUNK)
        chunk["events"] = np.diff(starts)
        chunk["texts"] = sum(1 << number for number in coded)
        data = [[pa.py_buffer(rows[start:stop])] for start, stop in pairwise(starts.tolist())]
        for number in sorted(coded):
            texts = _distinct_texts(
                rows,
                self._job.value_index(number),
                starts,
                sources,
                _texts_of(batches, number),
            )
            for part, messages in zip(data, texts, strict=True):
                part.append(messages)
        for part in data:
            self._file.writelines(part)
        sizes = [sum(each.size for each in part) for part in data]
        ends = self._position + np.cumsum(sizes)
        chunk["start"] = ends - sizes
        chunk["size"] = sizes
        self._position = int(ends[-1])
        self._chunks.append(chunk)
        self._waiting = []
        self._events = 0
        self._bytes = 0

    def _partitioned(
        self,
        batches: Sequence[_Batch],
        sources: Numbers | None,
    ) -> tuple[Tokens, Numbers]:
        """Return the rows by partition, in their order, uint64 [events, width], and the start of
        each partition and the end, int64 [partitions + 1]. Write the number of each row's event to
        `sources`.
        """
        partitions = self._job.partitions
        starts = np.zeros(partitions + 1, np.int64)
        for batch in batches:
            call("rayrec_count_partitions", batch.keys, batch.events, partitions, starts[1:])
        np.cumsum(starts, out=starts)
        ends = starts[:-1].copy()
        rows = np.empty((self._events, self._job.width), np.uint64)
        first = 0
        for batch in batches:
            columns = [np.ascontiguousarray(column) for column in batch.columns()]
            call(
                "rayrec_partition_events",
                np.array([column.ctypes.data for column in columns], np.uint64),
                len(columns),
                batch.events,
                partitions,
                ends,
                first,
                rows,
                sources,
            )
            first += batch.events
        return rows, starts


def _has_wide(tokens: Tokens) -> bool:
    """Return whether a token is an integer beyond int32."""
    return bool((tokens + np.uint64(1 << 31)).max() >= 1 << 32)


def _texts_of(batches: Sequence[_Batch], number: int) -> pa.ChunkedArray:
    """Return a column of values as text or a dictionary of it. Some batches may have integers."""
    arrays = []
    for batch in batches:
        array = batch.texts.get(number)
        if array is None:
            array = integer_texts(batch.tokens[number])
        arrays.append(array)
    if len({array.type for array in arrays}) > 1:
        arrays = [pc.cast(array, pa.large_string()) for array in arrays]
    return pa.chunked_array(arrays)


def integer_texts(tokens: Tokens) -> pa.Array:
    """Return the texts of integers, given their tokens, large_string."""
    return pc.cast(arrow_numbers(tokens.view(np.int64)), pa.large_string())


def _distinct_texts(
    rows: Tokens,
    index: int,
    starts: Numbers,
    sources: Numbers | None,
    texts: pa.ChunkedArray,
) -> Iterator[pa.Buffer]:
    """Yield a message for each partition, with the distinct tokens at `index` in its rows and their
    texts. `texts` are those of the events, and `sources` has the event of each row.
    """
    assert sources is not None
    slots = np.empty(max(4 * int(np.diff(starts).max()), 64), np.uint32)
    tokens = np.empty(len(rows), np.uint64)
    first = np.empty(len(rows), np.int64)
    ends = np.zeros(len(starts), np.int64)
    call(
        "rayrec_distinct_values",
        rows,
        rows.shape[1],
        index,
        starts,
        len(starts) - 1,
        slots,
        tokens,
        first,
        ends[1:],
    )
    tokens = tokens[: ends[-1]] if index else user_tokens(tokens[: ends[-1]])
    distinct = pc.cast(texts.take(arrow_numbers(sources[first[: ends[-1]]])), pa.large_string())
    columns = [arrow_numbers(tokens), distinct.combine_chunks()]
    batch = pa.RecordBatch.from_arrays(columns, schema=_TEXTS)
    for start, stop in pairwise(ends.tolist()):
        yield batch.slice(start, stop - start).serialize()


def find_texts(texts: pa.Table, tokens: Tokens) -> pa.Array:
    """Return the texts of tokens, large_string, given those of a column. Other tokens are
    integers.
    """
    indices = pc.index_in(arrow_numbers(tokens), value_set=texts.column("token"))
    array = texts.column("text").take(indices).combine_chunks()
    return pc.coalesce(array, integer_texts(tokens)) if array.null_count else array


@dataclass(frozen=True)
class Events:
    """Events of a partition in the order of the log."""

    rows: Numbers
    """Hash of the user, part and time if there are, and tokens of further columns, int64 [events,
    width].
    """
    texts: Sequence[pa.Table]
    """Texts of each column by token."""


def read_events(
    spills: Sequence[Spill],
    number: int,
    *,
    job: EventsJob,
) -> Events | None:
    """Return the events of a partition in the order of the log, None if there are none."""
    chunks = []
    for spill in spills:
        first = number * spill.chunks
        stored = read_array(job.path("chunks", spill.number), _CHUNK, first, spill.chunks)
        path = job.path("events", spill.number)
        chunks += [(path, chunk) for chunk in stored if chunk["events"]]
    if not chunks:
        return None
    rows = np.empty((sum(int(chunk["events"]) for _, chunk in chunks), job.width), np.int64)
    texts: list[list[pa.RecordBatch]] = [[] for _ in job.events.sparse]
    start = 0
    for path, chunk in chunks:
        data = read_array(path, np.dtype(np.uint8), int(chunk["start"]), int(chunk["size"]))
        stop = start + int(chunk["events"])
        size = rows[start:stop].nbytes
        rows[start:stop] = data[:size].view(np.int64).reshape(-1, job.width)
        start = stop
        messages = pa.BufferReader(data[size:])
        for column, batches in enumerate(texts):
            if chunk["texts"] >> column & 1:
                message = pa.ipc.read_message(messages)
                batches.append(pa.ipc.read_record_batch(message, _TEXTS))
    return Events(rows, [pa.Table.from_batches(batches, _TEXTS) for batches in texts])


# The steps of `mix64` in reverse order. A number is xored with its own upper bits once more, since
# the first time has changed those of the lower half.
def user_tokens(keys: Tokens) -> Tokens:
    """Return the tokens of users, given their hashes: the inverse of `mix64`."""
    tokens = keys
    for shift, factor in zip((31, 27), _FACTORS, strict=True):
        tokens = tokens ^ tokens >> np.uint64(shift) ^ tokens >> np.uint64(2 * shift)
        tokens = tokens * np.uint64(pow(factor, -1, 1 << 64))
    return tokens ^ tokens >> np.uint64(30) ^ tokens >> np.uint64(60)
