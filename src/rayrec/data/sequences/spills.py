"""Events of a log by partitions of the users, in files that each task writes for its range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec import storage
from rayrec.data.arrow import arrow_numbers
from rayrec.data.formats.csv_reader import row_start
from rayrec.data.job import JobFolder, read_array
from rayrec.data.logs.column_parser import MISSING, ColumnParser
from rayrec.data.logs.column_values import decimal_digits, is_text
from rayrec.data.logs.faults import Faults
from rayrec.data.table_ranges import RangeTables, TableRange
from rayrec.hashing import mix64
from rayrec.native import keep_freed_memory
from rayrec.schema import Schema

CHUNK_BYTES: Final = 24 << 20
"""Bytes of events that a task keeps in memory before it writes them."""
KEY: Final = "key"
"""Column with the hash of the user, a bijection of its token, uint64."""
TIME: Final = "time"
"""Column with the time in microseconds, int64."""
_CHUNK: Final = np.dtype(
    [
        ("start", np.int64),
        ("size", np.int64),
        ("texts", np.int64),
    ]
)
"""Range of bytes in a task's file, with some events of one partition. `texts` has a bit for each
column of values that is text.
"""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EventsJob:
    """Parameters of all tasks that read events."""

    folder: JobFolder
    events: Schema
    """Schema of the log. Its columns of `sparse` become lists, except the first, the user."""
    partitions: int

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
def spill_events(part: TableRange, *, job: EventsJob) -> pa.Table:
    """Write a range's events by partition, in their order, and return their number, faults, and
    their latest time. An event without a user, an item, or a value of another column is a fault.
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
    tables = RangeTables(part, job.events, columns=job.events.columns)
    with job.folder.disk_errors(), ExitStack() as opened:
        path = opened.enter_context(storage.writing(job.path("events", part.number)))
        writer = _SpillWriter(opened.enter_context(open(path, "wb")), job)
        for table in tables:
            events, faults = _parsed(table, part.file, job.events, first_row=counts.lines)
            counts.add(table.num_rows, events, faults)
            if events.num_rows:
                writer.add(events)
        chunks = writer.finish()
    with job.folder.disk_errors():
        storage.write_bytes(job.path("chunks", part.number), chunks.view(np.uint8).data)
    marker = {
        **counts.to_dict(),
        "texts": writer.texts,
        "chunks": chunks.shape[1],
        "start": part.start,
        "end": tables.end,
    }
    return job.folder.done("events", part.number, marker)


@dataclass
class _Counts:
    """Counts of a range's rows."""

    rows: int = 0
    """Valid events."""
    lines: int = 0
    """All rows."""
    latest: int | None = None
    """Latest time in microseconds. None without times or events."""
    faults: Faults = field(default_factory=Faults)

    def add(self, lines: int, events: pa.RecordBatch, faults: Faults) -> None:
        """Add the rows of a table, with its valid events."""
        self.lines += lines
        self.rows += events.num_rows
        self.faults.add(faults)
        if events.num_rows and TIME in events.schema.names:
            latest = pc.max(events.column(TIME)).as_py()
            self.latest = latest if self.latest is None else max(latest, self.latest)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "rows": self.rows,
            "lines": self.lines,
            "latest": self.latest,
            "faults": self.faults.to_dict(),
        }


def _parsed(
    table: pa.Table,
    path: str,
    events: Schema,
    *,
    first_row: int,
) -> tuple[pa.RecordBatch, Faults]:
    """Return the valid events: hash of the user, time if there is one, and the values by the number
    of their column. Return the faults too, numbered from `first_row`.
    """
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
    valid_rows = None if is_full else pa.array(np.flatnonzero(valid))
    users = block.categories[:, 0] if is_full else block.categories[valid, 0]
    columns = {KEY: arrow_numbers(mix64(users))}
    if block.times is not None:
        columns[TIME] = arrow_numbers(block.times if is_full else block.times[valid])
    for number, name in enumerate(events.sparse):
        if name in events.integers:
            tokens = block.categories[:, number] if is_full else block.categories[valid, number]
            columns[str(number)] = arrow_numbers(tokens.view(np.int64))
            continue
        array = parser.array(name)
        array = array if valid_rows is None else array.take(valid_rows)
        columns[str(number)] = _plain_values(array)
    return pa.RecordBatch.from_pydict(columns), parser.faults(first_row)


def _plain_values(array: pa.Array) -> pa.Array:
    """Return categories without nulls as int64, or as text if they are none, large_string."""
    kind = array.type
    if is_text(kind):
        return pc.cast(array, pa.large_string())
    if types.is_null(kind):  # All events are faults
        return pa.array([], pa.int64())
    if types.is_date(kind):
        return pc.cast(pc.cast(array, pa.date32()), pa.large_string())
    if types.is_decimal(kind):
        return decimal_digits(array)[0]
    if types.is_boolean(kind):
        array = pc.cast(array, pa.uint8())
    try:
        return pc.cast(array, pa.int64())
    except pa.ArrowInvalid:  # Unsigned integers from 2^63 on
        return pc.cast(array, pa.large_string())


class _SpillWriter:
    """Writer of one task's events."""

    def __init__(
        self,
        file: Any,
        job: EventsJob,
    ) -> None:
        self._file = file
        self._job = job
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0
        self._position = 0
        self._chunks: list[np.ndarray] = []
        self.texts = 0
        """A bit for each column of values that has text."""

    def add(self, events: pa.RecordBatch) -> None:
        self._waiting.append(events)
        self._bytes += events.nbytes
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
        """Write the pending events as one chunk, sorted by partition."""
        if not self._waiting:
            return
        events = concatenated(self._waiting)
        self._waiting = []
        self._bytes = 0
        numbers = partition_of(events.column(KEY), self._job.partitions)
        # A sort of 16-bit numbers takes few passes.
        events = events.take(arrow_numbers(np.argsort(numbers, kind="stable")))
        counts = np.bincount(numbers, minlength=self._job.partitions)
        chunk = np.zeros(self._job.partitions, _CHUNK)
        chunk["texts"] = _texts(events.schema)
        self.texts |= _texts(events.schema)
        start = 0
        for number in np.flatnonzero(counts).tolist():
            data = events.slice(start, int(counts[number])).serialize()
            self._file.write(data)
            chunk["start"][number] = self._position
            chunk["size"][number] = data.size
            self._position += data.size
            start += int(counts[number])
        self._chunks.append(chunk)


def partition_of(keys: pa.Array, partitions: int) -> npt.NDArray[np.uint16]:
    """Return the partition of each hash, a range of hashes, so that all lists together are in hash
    order.
    """
    upper = keys.to_numpy() >> np.uint64(32)
    return (upper * np.uint64(partitions) >> np.uint64(32)).astype(np.uint16)


def _value_names(schema: pa.Schema) -> list[str]:
    return [name for name in schema.names if name not in (KEY, TIME)]


def _texts(schema: pa.Schema) -> int:
    """Return a bit for each column of values that is text."""
    names = _value_names(schema)
    return sum(1 << int(name) for name in names if is_text(schema.field(name).type))


def _schema_of(events: Schema, texts: int) -> pa.Schema:
    """Return the Arrow schema of events."""
    fields = [(KEY, pa.uint64())]
    if events.timestamp is not None:
        fields.append((TIME, pa.int64()))
    for number in range(len(events.sparse)):
        is_text_column = texts >> number & 1
        fields.append((str(number), pa.large_string() if is_text_column else pa.int64()))
    return pa.schema(fields)


def concatenated(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate events. A column with text in some of them is text."""
    names = batches[0].schema.names
    columns = []
    for name in names:
        arrays = [batch.column(name) for batch in batches]
        if any(is_text(array.type) for array in arrays):
            arrays = [pc.cast(array, pa.large_string()) for array in arrays]
        columns.append(pa.concat_arrays(arrays))
    return pa.RecordBatch.from_arrays(columns, names=names)


def read_events(
    spills: Sequence[Spill],
    number: int,
    *,
    job: EventsJob,
) -> pa.RecordBatch | None:
    """Return the events of a partition in the order of the log, None if there are none."""
    batches = [
        batch
        for spill in spills
        for batch in _batches(
            spill,
            number,
            job,
        )
    ]
    return concatenated(batches) if batches else None


def _batches(
    spill: Spill,
    number: int,
    job: EventsJob,
) -> Iterator[pa.RecordBatch]:
    """Yield the events of a partition in one file."""
    first = number * spill.chunks
    chunks = read_array(
        job.path("chunks", spill.number),
        _CHUNK,
        first,
        spill.chunks,
    )
    path = job.path("events", spill.number)
    for chunk in chunks[chunks["size"] > 0]:
        data = read_array(
            path,
            np.dtype(np.uint8),
            int(chunk["start"]),
            int(chunk["size"]),
        )
        schema = _schema_of(job.events, int(chunk["texts"]))
        yield pa.ipc.read_record_batch(pa.py_buffer(data), schema)
