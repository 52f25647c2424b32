"""Tasks of `rayrec split`: examine a log range, choose the last rows of users, write its rows by
part. Each task leaves a marker, so that an interrupted job resumes, and files that depend only on
the log and the options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.engine import grouped
from rayrec.data.formats.csv_reader import row_start
from rayrec.data.formats.row_faults import FAULT
from rayrec.data.job import JobFolder, read_array
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import Segment, changed
from rayrec.data.logs.reading import line_starts
from rayrec.data.logs.table_parser import find_valid_rows, parse_table
from rayrec.data.logs.text_log import read_text
from rayrec.data.logs.text_parser import TextParser, max_rows_in
from rayrec.data.raw_block import RawBlock
from rayrec.data.table_ranges import RangeTables, TableRange, table_ranges
from rayrec.hashing import GOLDEN, mix64
from rayrec.native import keep_freed_memory
from rayrec.schema import Schema

CHUNK_ROWS: Final = 1 << 20
"""Number of rows whose keys a task keeps in memory."""
EVENT: Final = np.dtype([("user", np.int64), ("time", np.int64), ("row", np.int64)])
"""One row of a user. `row` counts from the first row of its task."""
MARK: Final = np.dtype([("row", np.int64), ("part", np.uint8)])
"""Row of the log that is one of a user's last rows, and its part: an index into PARTS."""

Numbers = npt.NDArray[np.int64]


def key_path(folder: JobFolder, kind: str, number: int) -> str:
    """Return the path of a task's keys or marks."""
    return folder.aid(kind, f"{number:06d}.bin")


# How `last-out` finds the last rows of each user in a log that is in no order:
#
#   examine      each task writes (user, time, row) of its rows, sorted by partition of users
#   mark_last    each partition reads its events from all tasks, sorts them, marks the last two rows
#   write        each task reads its marks from all partitions, and writes rows to their parts
#
# A partition has all rows of its users and fits into memory; tasks share nothing but files.
class Keys:
    """Key file of a task: times, or events in chunks, each sorted by partition."""

    def __init__(self, path: str, opened: ExitStack, *, partitions: int | None) -> None:
        """Create the file. `partitions`: number of partitions of the users. None stores times
        only.
        """
        self._partitions = partitions
        path = opened.enter_context(storage.writing(path))
        self._file = opened.enter_context(open(path, "wb"))  # noqa: SIM115  closed with the others
        self._waiting: list[np.ndarray] = []
        self._rows = 0
        self.sizes: list[list[int]] = []
        """Event count of each partition, for each chunk."""

    def add(self, raw: RawBlock, first_row: int) -> None:
        """Add rows, starting at `first_row` of the task."""
        if self._partitions is None:
            self._file.write(np.ascontiguousarray(read_times(raw)).data)
            return
        users = raw.group_keys()
        events = np.empty(raw.rows, EVENT)
        events["user"] = users
        events["time"] = read_times(raw)
        events["row"] = np.arange(first_row, first_row + raw.rows)
        self._waiting.append(events[users != 0])
        self._rows += raw.rows
        if self._rows >= CHUNK_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the pending events as one chunk."""
        events = np.concatenate([np.empty(0, EVENT), *self._waiting])
        self._waiting = []
        self._rows = 0
        if len(events) and self._partitions is not None:
            partition_of = (
                mix64(events["user"].view(np.uint64)) % np.uint64(self._partitions)
            ).astype(np.intp)
            # Sorted, so that a partition is one range of the chunk.
            self._file.write(events[np.argsort(partition_of, kind="stable")].view(np.uint8).data)
            self.sizes.append(np.bincount(partition_of, minlength=self._partitions).tolist())


def read_times(raw: RawBlock) -> Numbers:
    assert raw.times is not None
    return raw.times


# Times are not sorted for their quantile. A pass counts them by their upper 16 bits, the next by 16
# bits more among those with the found prefix, four times. Each keeps 65,536 counts per prefix.
@dataclass(frozen=True)
class DigitTask:
    """Task that counts the times with each leading bit prefix by their next 16 bits."""

    path: str
    rows: int
    prefixes: tuple[int, ...]
    shift: int


def count_digits(task: DigitTask) -> pa.Table:
    """Return a histogram for each prefix, concatenated, int64 [prefixes * 65,536]."""
    counts = np.zeros((len(task.prefixes), 1 << 16), np.int64)
    for start in range(0, task.rows, CHUNK_ROWS):
        times = read_array(task.path, np.dtype(np.int64), start, min(CHUNK_ROWS, task.rows - start))
        bits = times.view(np.uint64) ^ np.uint64(1 << 63)  # preserves the order of the times
        for prefix_counts, prefix in zip(counts, task.prefixes, strict=True):
            selected = (
                bits
                if task.shift == 48
                else bits[bits >> np.uint64(task.shift + 16) == np.uint64(prefix)]
            )
            prefix_counts += np.bincount(
                (selected >> np.uint64(task.shift)).astype(np.int64) & 0xFFFF,
                minlength=1 << 16,
            )
    return pa.table({"counts": counts.reshape(-1)})


@dataclass(frozen=True)
class UsersTask:
    """Partition of the users, with the locations of its events in the task files."""

    number: int
    events: tuple[tuple[str, int, int, int], ...]
    """Tuples of (path, first event, event count, first row of the task in the log)."""
    starts: tuple[int, ...] = field(repr=False)
    """First row in the log, for every task."""


def mark_last(task: UsersTask, *, folder: JobFolder) -> pa.Table:
    """Write the marks of each user's last row (test) and second last row (validation), sorted by
    row.
    """
    keep_freed_memory()
    folder.require()
    chunks = [np.empty(0, EVENT)]
    for path, start, count, first_row in task.events:
        chunk = read_array(path, EVENT, start, count).copy()
        chunk["row"] += first_row
        chunks.append(chunk)
    events = np.concatenate(chunks)
    marks = last_rows(events["user"], events["time"], events["row"])
    edges = np.searchsorted(marks["row"], [*task.starts, np.iinfo(np.int64).max]).tolist()
    with folder.disk_errors():
        storage.write_bytes(key_path(folder, "marks", task.number), marks.view(np.uint8).data)
        return folder.done(
            "marks",
            task.number,
            {"edges": edges, "users": len(np.unique(events["user"])), "marks": len(marks)},
        )


def last_rows(users: Numbers, times: Numbers, rows: Numbers) -> np.ndarray:
    """Return the marks (MARK) sorted by row: the last row of users with at least two rows is for
    the test, and the second last row of users with at least three rows for validation. At equal
    times, the larger row is later. Pure.
    """
    order = np.lexsort((rows, times, users))
    users, rows = users[order], rows[order]
    ends = np.flatnonzero(np.append(users[1:] != users[:-1], True)[: len(users)])
    sizes = np.diff(np.append(-1, ends))
    marks = np.empty(int((sizes >= 2).sum() + (sizes >= 3).sum()), MARK)
    marks["row"] = rows[np.concatenate([ends[sizes >= 2], ends[sizes >= 3] - 1])]
    marks["part"] = np.repeat([2, 1], [int((sizes >= 2).sum()), int((sizes >= 3).sum())])
    return marks[np.argsort(marks["row"], kind="stable")]


PARTS: Final = ("train", "validation", "test")
By = Literal["rows", "group", "time", "last-out"]
GROUP_BYTES: Final = 2 << 20
"""Bytes of a written row group, small enough to be shuffled as a unit."""


@dataclass(frozen=True)
class SplitTask(TableRange):
    """Log range: text segments, or a range of a table."""

    segments: tuple[Segment, ...] = ()
    first_row: int = 0
    """Index of its first valid row in the log. 0 until the log is examined."""
    rows: int = 0
    """Number of valid rows."""
    marks: tuple[tuple[int, int], ...] = ()
    """First mark of the task and mark count, for each partition of the users, for last-out."""


@dataclass(frozen=True)
class SplitJob:
    """Parameters of all tasks."""

    folder: JobFolder
    schema: Schema
    by: By
    seed: int
    thresholds: tuple[int, int] = (0, 0)
    """Hash limits for rows and group: values below the first are for the test, below the second for
    validation.
    """
    times: tuple[int, int | None] = (0, None)
    """Start of validation and test in microseconds, for time. None for the test creates no test
    part.
    """
    partitions: int = 1
    """Number of partitions of the users, for last-out."""

    def begin(self) -> None:
        """Prepare the process of a task. Raises InputError if it does not see the folder."""
        keep_freed_memory()
        self.folder.require()


def _lines(segment: Segment, schema: Schema) -> tuple[RawBlock, _Lines]:
    """Return the valid rows of a segment, and their lines."""
    text = read_text(segment)
    size = segment.stop - segment.start
    parser = TextParser(schema, max_rows_in(schema, size))
    starts = line_starts(text, size)
    stops = np.append(starts[1:], size)
    faults = parser.parse(text, size, max_faults=len(starts))
    good = ~np.isin(starts, np.array([fault.byte for fault in faults.first], np.int64))
    if parser.rows != segment.rows or int(good.sum()) != parser.rows:
        raise changed(segment.path, segment.start, segment.stop, "bytes")
    return parser.block(), _Lines(text, starts[good], stops[good])


def examine(task: SplitTask, *, job: SplitJob) -> pa.Table:
    """Count valid rows and faults in a table's range, and write the keys for `time` and `last-out`.
    Numbers rows from 0.
    """
    job.begin()
    if not task.is_row_start:
        task = replace(task, start=row_start(task.file, task.start), is_row_start=True)
    rows = 0
    missing = 0
    faults = Faults()
    first = 0
    with job.folder.disk_errors(), ExitStack() as opened:
        keys = None
        if job.by in ("time", "last-out"):
            path = key_path(job.folder, "keys", task.number)
            keys = Keys(path, opened, partitions=job.partitions if job.by == "last-out" else None)
        tables = RangeTables(task, job.schema)
        for table in tables:
            raw, wrong = parse_table(
                table,
                job.schema,
                path=task.file,
                first_row=first,
                needs_values=False,
            )
            faults.add(wrong)
            first += len(table)
            if job.by in ("group", "last-out"):
                missing += int(np.count_nonzero(raw.group_keys() == 0))
            if keys is not None:
                keys.add(raw, rows)
            rows += raw.rows
        if keys is not None:
            keys.flush()
    counts = {
        "rows": rows,
        "missing": missing,
        "faults": faults.to_dict(),
        "sizes": [] if keys is None else keys.sizes,
    }
    return job.folder.done(
        "examine",
        task.number,
        {**counts, "lines": first, "start": task.start, "end": tables.end},
    )


def hash_part(values: npt.NDArray[np.uint64], job: SplitJob) -> npt.NDArray[np.uint8]:
    """Return the part of each value, as an index into PARTS, by a hash of the value and the
    seed.
    """
    seed = mix64(np.array([job.seed], np.int64).view(np.uint64) + np.uint64(GOLDEN))
    hashes = mix64(mix64(values + seed) ^ seed)
    test, holdout = (np.uint64(threshold) for threshold in job.thresholds)
    return np.where(hashes < test, 2, np.where(hashes < holdout, 1, 0)).astype(np.uint8)


class _Chooser:
    """Assignment of a task's rows to parts. Must be called for all rows in order."""

    def __init__(self, task: SplitTask, job: SplitJob) -> None:
        self._job = job
        self._row = task.first_row
        marks = [np.empty(0, MARK)]
        if job.by == "last-out":
            for number, (start, count) in enumerate(task.marks):
                if count:
                    marks.append(
                        read_array(key_path(job.folder, "marks", number), MARK, start, count)
                    )
        self._marks = np.sort(np.concatenate(marks), order="row")

    def __call__(self, raw: RawBlock) -> npt.NDArray[np.uint8]:
        """Return indices into PARTS, uint8 [rows]."""
        job = self._job
        first = self._row
        rows = raw.rows
        self._row += rows
        if job.by == "rows":
            return hash_part(np.arange(first, first + rows, dtype=np.uint64), job)
        if job.by == "group":
            keys = raw.group_keys()
            return np.where(keys == 0, 0, hash_part(keys.view(np.uint64), job)).astype(np.uint8)
        if job.by == "time":
            validation, test = job.times
            times = read_times(raw)
            parts = (times >= validation).astype(np.uint8)
            if test is not None:
                parts[times >= test] = 2
            return parts
        parts = np.zeros(rows, np.uint8)
        low, high = np.searchsorted(self._marks["row"], [first, first + rows])
        marks = self._marks[low:high]
        parts[marks["row"] - first] = marks["part"]
        return parts


def write(task: SplitTask, *, job: SplitJob) -> pa.Table:
    """Write the valid rows of a range in order, one file for each part."""
    job.begin()
    chooser = _Chooser(task, job)
    rows = np.zeros(len(PARTS), np.int64)
    missing = 0
    with job.folder.disk_errors(), ExitStack() as opened:
        writer = _PartFiles(task, job, opened)
        for raw, data in _blocks(task, job.schema):
            parts = chooser(raw)
            if task.segments and job.by == "group":
                missing += int(np.count_nonzero(raw.group_keys() == 0))
            rows += np.bincount(parts, minlength=len(PARTS))
            for index, name in enumerate(PARTS):
                if len(selected := np.flatnonzero(parts == index)):
                    writer.add(name, data, selected)
        writer.finish()
    if rows.sum() != task.rows:
        raise InputError(
            f"{task.file or task.segments[0].path}: changed during the split. Split it again"
        )
    return job.folder.done(
        "write",
        task.number,
        {"rows": rows.tolist(), "files": list(writer.files), "missing": missing},
    )


@dataclass(frozen=True)
class _Lines:
    """Text with the start and end of each valid line."""

    text: npt.NDArray[np.uint8]
    starts: Numbers
    stops: Numbers


def _blocks(task: SplitTask, schema: Schema) -> Iterator[tuple[RawBlock, pa.Table | _Lines]]:
    for segment in task.segments:
        yield _lines(segment, schema)
    if task.segments:
        return
    for table in RangeTables(task, schema):
        raw, faults = parse_table(table, schema, path=task.file, needs_values=False)
        if faults.total:
            table = table.take(find_valid_rows(table, schema, path=task.file))
        yield raw, _as_text(table, task.file)


def _as_text(table: pa.Table, path: str) -> pa.Table:
    """Drop FAULT, and decode the bytes of CSV fields."""
    if FAULT not in table.column_names:
        return table
    table = table.drop_columns([FAULT])
    kinds = [
        pa.field(each.name, pa.large_string()) if pa.types.is_large_binary(each.type) else each
        for each in table.schema
    ]
    try:
        return table.cast(pa.schema(kinds))
    except pa.ArrowInvalid:
        raise InputError(
            f"{path}: must be UTF-8. Convert the file, for example with iconv"
        ) from None


class _PartFiles:
    """Output files of a range, one for each part with rows: text, or Parquet in row groups of about
    GROUP_BYTES.
    """

    def __init__(self, task: SplitTask, job: SplitJob, opened: ExitStack) -> None:
        self._number = task.number
        self._folder = job.folder.path
        self._opened = opened
        self.files: dict[str, Any] = {}
        self._waiting: dict[str, list[pa.Table]] = {}
        self._numbers = Counter[str]()
        """Number of each part's Parquet file. A column's new type starts another."""

    def add(self, part: str, data: pa.Table | _Lines, rows: npt.NDArray[np.int64]) -> None:
        """Write the given rows of the data."""
        if isinstance(data, _Lines):
            self._write_lines(part, data.text, data.starts[rows], data.stops[rows])
            return
        waiting = self._waiting.setdefault(part, [])
        # JSON lines may have another type further on.
        if waiting and waiting[-1].schema != data.schema:
            self._write_waiting(part)
            self._numbers[part] += 1
            waiting = self._waiting.setdefault(part, [])
        waiting.append(data.take(rows))
        if sum(table.nbytes for table in waiting) >= GROUP_BYTES:
            self._write_waiting(part)

    def _write_lines(
        self,
        part: str,
        text: npt.NDArray[np.uint8],
        starts: Numbers,
        stops: Numbers,
    ) -> None:
        file = self._file(f"{part}-{self._number:05d}.txt", partial(open, mode="wb"))
        # Adjacent lines of one part are written together.
        breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
        first = np.append(0, breaks)
        last = np.append(breaks, len(starts)) - 1
        view = text.data
        for start, stop in zip(starts[first].tolist(), stops[last].tolist(), strict=True):
            file.write(view[start:stop])
        if text[stops[-1] - 1] != ord("\n"):
            file.write(b"\n")

    def _write_waiting(self, part: str) -> None:
        table = pa.concat_tables(self._waiting.pop(part)).combine_chunks()
        number = self._numbers[part]
        suffix = f"-{number}" if number else ""
        file = self._file(
            f"{part}-{self._number:05d}{suffix}.parquet",
            partial(pq.ParquetWriter, schema=table.schema),
        )
        file.write_table(
            table,
            row_group_size=max(len(table) // max(table.nbytes // GROUP_BYTES, 1), 1),
        )

    def _file(self, name: str, create: Callable[[str], Any]) -> Any:
        if name not in self.files:
            path = self._opened.enter_context(storage.writing(storage.join(self._folder, name)))
            self.files[name] = self._opened.enter_context(create(path))
        return self.files[name]

    def finish(self) -> None:
        """Write the pending rows."""
        for part in list(self._waiting):
            self._write_waiting(part)


def parse_time(text: str, name: str) -> int:
    """Parse an ISO 8601 date or time into microseconds since 1970, in UTC by default. Raises
    InputError for other text.
    """
    for kind in (pa.timestamp("us", "UTC"), pa.timestamp("us")):
        try:
            return int(pc.cast(pa.array([text]), kind).cast(pa.int64())[0].as_py())
        except pa.ArrowInvalid:
            continue
    raise InputError(
        f"{name}: must be an ISO 8601 date or time, such as 2026-01-31 or 2026-01-31T12:00, got "
        f"{text}"
    )


def text_tasks(segments: Sequence[Segment], task_bytes: int) -> list[SplitTask]:
    """Group adjacent text segments into tasks of about `task_bytes`."""
    groups = grouped(
        segments,
        lambda segment: segment.stop - segment.start,
        max_bytes=task_bytes,
        overflows=True,
    )
    return [
        SplitTask(
            number,
            segments=tuple(group),
            first_row=group[0].first_row,
            rows=sum(segment.rows for segment in group),
        )
        for number, group in enumerate(groups)
    ]


def table_tasks(
    files: Sequence[storage.File],
    cuts: Sequence[Sequence[tuple[int, int]]],
) -> list[SplitTask]:
    """Return a task for each range of each file."""
    return [SplitTask(**vars(part)) for part in table_ranges(files, cuts)]
