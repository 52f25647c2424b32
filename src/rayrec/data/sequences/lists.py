"""Lists of a partition's users: sorted events, their parts, and the files with a row per user."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from rayrec import storage
from rayrec.data.arrow import arrow_numbers
from rayrec.data.encoded_rows import expand_ranges, take_ranges
from rayrec.data.job import read_array
from rayrec.data.logs.column_values import Text
from rayrec.data.sequences.spills import (
    SECOND,
    Events,
    EventsJob,
    Numbers,
    Spill,
    Tokens,
    find_texts,
    integer_texts,
    read_events,
    user_tokens,
)
from rayrec.hashing import mix64
from rayrec.native import call, keep_freed_memory
from rayrec.schema import AGE, SEEN, TARGET, SequenceColumns, SequenceSplit

PARTS: Final = ("train", "valid", "test")
"""Parts of the lists, as the beginnings of their file names."""
Part = Literal["train", "valid", "test", "histories"]
GROUP_BYTES: Final = 1 << 20
"""Bytes of a written row group, small enough to be shuffled as a unit."""
_BUCKET_EVENTS: Final = 16
"""Events of a range of hashes, in which events are sorted at once."""
_WRITTEN_VALUES: Final = 1 << 16
"""Values that Arrow encodes at once."""
BUCKETS: Final = 64
"""Number of partitions of the items. A task counts one or several."""
ITEM: Final = np.dtype(
    [
        ("token", np.uint64),
        ("trained", np.int64),
        ("valid", np.int64),
        ("test", np.int64),
    ]
)
"""Item of a partition's users: whether a training row has it, and how often it is held out."""


@dataclass(frozen=True)
class ListsJob:
    """Parameters of all tasks that write lists."""

    reading: EventsJob
    columns: SequenceColumns
    split: SequenceSplit
    spills: tuple[Spill, ...]
    types: tuple[pa.DataType, ...]
    """Type of each column of events, the user's first: see `value_type`."""
    were_texts: tuple[bool, ...]
    """Whether each column is text in a file of the log."""
    latest: int
    """Latest time of the log in microseconds."""
    has_small_ages: bool
    """Whether all ages are whole seconds below 2^31, which are written as int32."""

    @functools.cached_property
    def starts(self) -> tuple[int, int]:
        """Start of validation and test in microseconds, for a split by time."""
        validation, test = self.split.sizes
        # Without a test, the latest event is for validation.
        first_test = self.latest - test if test else self.latest + 1
        return self.latest - test - validation, first_test

    def items_path(self, number: int) -> str:
        """Return the path of a partition's items."""
        return self.reading.folder.aid("items", f"{number:06d}.bin")


def value_type(*, is_text: bool, is_wide: bool) -> pa.DataType:
    """Return the type in which all files have a column. Integers that fit are int32, which is half
    of the bytes to write and to read.
    """
    if is_text:
        return pa.large_string()
    return pa.int64() if is_wide else pa.int32()


@dataclass(frozen=True)
class UsersTask:
    """Partition of the users."""

    number: int


@dataclass(frozen=True)
class UserRanges:
    """Events of each user, sorted by time, as ranges of a partition's events. All are int64
    [users].
    """

    starts: Numbers
    valid: Numbers
    """Start of the events for validation."""
    test: Numbers
    """Start of the events for the test."""
    stops: Numbers


def sort_events(
    rows: Numbers,
    *,
    keys: int,
    partition: int = 0,
    partitions: int = 1,
) -> Numbers:
    """Return the columns of a partition's events, int64 [width, events], sorted by user, then by
    the second value if `keys` is 2, then in their order. Overwrites `rows`, int64 [events, width].
    """
    events = len(rows)
    buckets = max(events // _BUCKET_EVENTS, 1)
    call(
        "rayrec_sort_events",
        rows,
        np.empty_like(rows),
        events,
        rows.shape[1],
        keys,
        partition,
        partitions,
        buckets,
        np.empty(buckets + 1, np.int64),
    )
    return rows.reshape(-1, events)


def divide_by_items(
    starts: Numbers,
    stops: Numbers,
    *,
    sizes: tuple[int, int],
    min_length: int,
) -> UserRanges:
    """Hold out the last items of each user, `sizes` of them for validation and test. Users with
    fewer than `min_length` others have none held out. Pure.
    """
    validation, test = sizes
    has_enough = stops - starts >= min_length + validation + test
    first_test = np.where(has_enough, stops - test, stops)
    return UserRanges(
        starts,
        first_test - np.where(has_enough, validation, 0),
        first_test,
        stops,
    )


def divide_by_time(
    starts: Numbers,
    stops: Numbers,
    times: Numbers,
    first: tuple[int, int],
) -> UserRanges:
    """Hold out the events from two times, or parts, on, those of validation and test. Pure."""
    cuts = []
    for start in first:
        before = np.append(0, np.cumsum(times < start))
        cuts.append(starts + before[stops] - before[starts])
    return UserRanges(
        starts,
        cuts[0],
        cuts[1],
        stops,
    )


def write_lists(task: UsersTask, *, job: ListsJob) -> pa.Table:
    """Write the lists of a partition's users, one file for each part with rows, and its items.
    Return the numbers of users, events, and of rows and held-out items by part.
    """
    keep_freed_memory()
    reading = job.reading
    reading.folder.require()
    rows = dict.fromkeys((*PARTS, "histories"), 0)
    counts = {
        "rows": rows,
        "users": 0,
        "events": 0,
        "targets": {"valid": 0, "test": 0},
    }
    with reading.folder.disk_errors():
        lists = _UserLists.read(task.number, job)
        items = np.zeros(0, ITEM)
        if lists is not None:
            rows |= {part: lists.write(part, task.number) for part in (*PARTS, "histories")}
            counts["users"] = len(lists.ranges.starts)
            counts["events"] = int(lists.ranges.stops[-1])
            items = lists.items()
            counts["targets"] = {part: int(items[part].sum()) for part in ("valid", "test")}
        buckets = mix64(items["token"]) >> np.uint64(58)
        order = np.argsort(buckets, kind="stable")
        edges = np.searchsorted(buckets[order], np.arange(BUCKETS + 1)).tolist()
        storage.write_bytes(job.items_path(task.number), items[order].view(np.uint8).data)
        return reading.folder.done(
            "lists",
            task.number,
            {**counts, "edges": edges},
        )


@dataclass(frozen=True)
class _Values:
    """Column of values in the events' sorted order."""

    codes: npt.NDArray[np.int32]
    tokens: Tokens
    """Token of each code."""
    values: npt.NDArray[np.integer[Any]] | Text
    """Value of each event."""
    digits: npt.NDArray[np.uint8] | None = None
    """Bytes of each value's text, for integers that are text in the log."""

    @classmethod
    def from_tokens(
        cls,
        tokens: Numbers,
        texts: pa.Table,
        kind: pa.DataType,
        *,
        were_texts: bool,
    ) -> _Values:
        """Return a column of events as a type of `value_type`, given tokens and their texts."""
        coded = arrow_numbers(tokens).dictionary_encode()
        codes = coded.indices.to_numpy()
        distinct = coded.dictionary.to_numpy().view(np.uint64)
        if types.is_integer(kind):
            digits = None
            if were_texts:
                sizes = pc.binary_length(integer_texts(distinct)).to_numpy()
                digits = sizes.astype(np.uint8)[codes]
            integers = tokens.astype(kind.to_pandas_dtype(), copy=False)
            return cls(codes, distinct, integers, digits)
        values = find_texts(texts, distinct).take(arrow_numbers(codes))
        return cls(codes, distinct, Text.from_array(values))

    def take(self, starts: Numbers, lengths: Numbers) -> pa.Array:
        """Return the values of ranges of events."""
        if not isinstance(self.values, Text):
            return arrow_numbers(take_ranges(self.values, starts, lengths))
        offsets = self.values.offsets
        sizes = take_ranges(np.diff(offsets), starts, lengths)
        first = offsets[starts]
        data = take_ranges(self.values.data, first, offsets[starts + lengths] - first)
        ends = np.append(0, np.cumsum(sizes))
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.large_string(), len(sizes), buffers)

    def text_bytes(self, starts: Numbers, lengths: Numbers) -> int:
        """Return by how much ranges of events would be larger if integers were text as in the
        log, see `shuffled_bytes`.
        """
        if self.digits is None:
            return 0
        digits = take_ranges(self.digits, starts, lengths)
        return int(digits.sum(dtype=np.int64)) + null_bytes(len(digits))


class _UserLists:
    """Lists of one partition."""

    def __init__(
        self,
        events: Events,
        number: int,
        job: ListsJob,
    ) -> None:
        self._job = job
        reading = job.reading
        values = sort_events(
            events.rows,
            keys=1 + (reading.has_parts or reading.has_times),
            partition=number,
            partitions=reading.partitions,
        )
        keys = values[0].view(np.uint64)
        self._parts = values[1] if reading.has_parts else None
        self._times = values[1 + reading.has_parts] if reading.has_times else None
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        stops = np.append(starts[1:], len(keys))
        self.ranges = self._divided(starts, stops)
        users = user_tokens(keys[starts])
        is_text = not types.is_integer(job.types[0])
        self._users = (
            find_texts(events.texts[0], users) if is_text else arrow_numbers(users.view(np.int64))
        )
        self._columns = {
            name: _Values.from_tokens(
                values[reading.value_index(column)],
                events.texts[column],
                job.types[column],
                were_texts=job.were_texts[column],
            )
            for column, name in enumerate((job.columns.item, *job.columns.with_columns), start=1)
        }

    @classmethod
    def read(
        cls,
        number: int,
        job: ListsJob,
    ) -> _UserLists | None:
        """Read the events of a partition. None if it has none."""
        events = read_events(
            job.spills,
            number,
            job=job.reading,
        )
        return None if events is None else cls(events, number, job)

    def _divided(
        self,
        starts: Numbers,
        stops: Numbers,
    ) -> UserRanges:
        job = self._job
        if self._parts is not None:
            return divide_by_time(starts, stops, self._parts, (1, 2))
        if job.split.kind == "time":
            assert self._times is not None
            return divide_by_time(
                starts,
                stops,
                self._times,
                job.starts,
            )
        return divide_by_items(
            starts,
            stops,
            sizes=job.split.sizes,
            min_length=job.columns.min_length,
        )

    def rows(self, part: Part) -> tuple[Numbers, Numbers, Numbers]:
        """Return the users of a part, and the ends of their histories and targets."""
        ranges = self.ranges
        ends: Mapping[Part, tuple[Numbers, Numbers]] = {
            "train": (ranges.valid, ranges.valid),
            "valid": (ranges.valid, ranges.test),
            "test": (ranges.test, ranges.stops),
            "histories": (ranges.stops, ranges.stops),
        }
        history, stop = ends[part]
        if part == "histories":
            users = np.arange(len(history))
        elif part == "train":
            users = np.flatnonzero(history - ranges.starts >= self._job.columns.min_length)
        else:
            users = np.flatnonzero(stop > history)
        return users, history[users], stop[users]

    def write(
        self,
        part: Part,
        number: int,
    ) -> int:
        """Write the rows of a part, and return their number."""
        users, history, stops = self.rows(part)
        if not len(users):
            return 0
        folder = "histories" if part == "histories" else "log"
        name = "part" if part == "histories" else part
        path = storage.join(
            self._job.reading.folder.path,
            folder,
            f"{name}-{number:05d}.parquet",
        )
        table, text_bytes = self._table(
            part,
            users,
            history,
            stops,
        )
        size_bytes = shuffled_bytes(table) + text_bytes
        sizes = history - self.ranges.starts[users]
        with storage.writing(path) as local:
            _write_groups(
                table,
                group_ends(sizes + 1, max(size_bytes, 1)),
                local,
            )
        return len(users)

    def _table(
        self,
        part: Part,
        users: Numbers,
        history: Numbers,
        stops: Numbers,
    ) -> tuple[pa.Table, int]:
        """Return the rows of a part: user, lists, held-out items, seen items, and ages. Return
        their `text_bytes` too.
        """
        first = self.ranges.starts[users]
        starts = first
        if part in ("valid", "test"):  # Which have the whole list as `seen`
            starts = np.maximum(first, history - self._longest)
        lengths = history - starts
        offsets = _offsets(lengths)
        columns = {self._job.columns.user: self._users.take(arrow_numbers(users))}
        text_bytes = 0
        for name, values in self._columns.items():
            columns[name] = pa.ListArray.from_arrays(offsets, values.take(starts, lengths))
            text_bytes += values.text_bytes(starts, lengths)
        if part in ("valid", "test"):
            items = self._columns[self._job.columns.item]
            for name, start, stop in ((TARGET, history, stops), (SEEN, first, history)):
                column = items.take(start, stop - start)
                columns[name] = pa.ListArray.from_arrays(_offsets(stop - start), column)
                text_bytes += items.text_bytes(start, stop - start)
        if self._times is not None:
            times = self._times_of_rows(part, history)
            ages = self._ages(times, starts, lengths)
            columns[AGE] = pa.ListArray.from_arrays(offsets, arrow_numbers(ages))
            if part == "histories":
                assert self._job.columns.time is not None
                columns[self._job.columns.time] = pa.array(times, pa.timestamp("us", "UTC"))
        return pa.table(columns), text_bytes

    def _ages(
        self,
        times: Numbers,
        starts: Numbers,
        lengths: Numbers,
    ) -> npt.NDArray[np.int32] | npt.NDArray[np.float64]:
        """Return the seconds from each event of the rows' ranges to the row's time."""
        assert self._times is not None
        if not self._job.has_small_ages:
            before = take_ranges(self._times, starts, lengths)
            return (np.repeat(times, lengths) - before) / np.float64(SECOND)
        last = self._job.latest
        before = take_ranges(self._seconds, starts, lengths)
        seconds = ((last - times) // SECOND).astype(np.int32)
        return np.subtract(before, np.repeat(seconds, lengths), out=before)

    @functools.cached_property
    def _seconds(self) -> npt.NDArray[np.int32]:
        """Seconds from each event to the latest one of the log."""
        assert self._times is not None
        return ((self._job.latest - self._times) // SECOND).astype(np.int32)

    def _times_of_rows(self, part: Part, history: Numbers) -> Numbers:
        """Return the time from which each row's ages count, in microseconds: the newest item's in
        training, the first held-out item's after the history, or the log's latest for whole lists.
        """
        assert self._times is not None
        if part == "histories":
            return np.full(len(history), self._job.latest)
        return self._times[history - 1 if part == "train" else history]

    @property
    def _longest(self) -> int:
        """Number of items that a reader takes, the newest ones."""
        return self._job.columns.max_length + 1

    def items(self) -> np.ndarray:
        """Return the distinct items, ITEM."""
        values = self._columns[self._job.columns.item]
        items = np.zeros(len(values.tokens), ITEM)
        items["token"] = values.tokens
        users, ends, _ = self.rows("train")
        starts = np.maximum(self.ranges.starts[users], ends - self._longest)
        items["trained"][values.codes[expand_ranges(starts, ends - starts)]] = 1
        for part in ("valid", "test"):
            users, starts, ends = self.rows(part)
            codes = values.codes[expand_ranges(starts, ends - starts)]
            items[part] = np.bincount(codes, minlength=len(items))
        return items


def _write_groups(
    table: pa.Table,
    ends: Sequence[int],
    path: str,
) -> None:
    """Write a table in row groups that end at `ends`."""
    with pq.ParquetWriter(
        path,
        table.schema,
        compression="lz4",
        column_encoding=_encodings(table.schema),
        write_statistics=False,
        use_dictionary=False,
        write_batch_size=_WRITTEN_VALUES,
    ) as writer:
        start = 0
        for end in ends:
            writer.write_table(table.slice(start, end - start), row_group_size=end - start)
            start = end


# The upper bytes of most numbers are alike. Next to each other they take little time and space.
def _encodings(schema: pa.Schema) -> dict[str, str]:
    """Return the encoding of each column with lists of numbers."""
    return {
        f"{field.name}.list.element": "BYTE_STREAM_SPLIT"
        for field in schema
        if types.is_list(field.type) and types.is_primitive(field.type.value_type)
    }


# Shuffled rows keep their order when the types of files change. In the first version of the lists,
# integers had 8 bytes, ages 4, and texts a bit each for null.
def shuffled_bytes(table: pa.Table) -> int:
    """Return the bytes of a table that count for the row groups."""
    size_bytes = table.nbytes
    for name in table.column_names:
        column = table.column(name).chunk(0)
        if not types.is_list(column.type):
            continue
        values = column.values
        count = len(values)
        if name == AGE:
            size_bytes += 4 * count - values.nbytes
        elif types.is_integer(values.type):
            size_bytes += 8 * count - values.nbytes
        else:
            size_bytes += null_bytes(count)
    return size_bytes


def null_bytes(count: int) -> int:
    """Return the bytes of a bit each."""
    return -(-count // 8)


# Row groups are the units of shuffling, so they end where their bytes do, not their rows: a user
# may have thousands of events.
def group_ends(weights: Numbers, size_bytes: int) -> Sequence[int]:
    """Return the ends of row groups with about GROUP_BYTES, given each row's weight and the bytes
    of all. Pure.
    """
    total = np.cumsum(weights)
    count = max(size_bytes // GROUP_BYTES, 1)
    marks = np.arange(1, count + 1) * (total[-1] / count)
    ends = np.searchsorted(total, marks - 0.5) + 1
    ends[-1] = len(weights)
    return np.unique(np.minimum(ends, len(weights))).tolist()


def _offsets(lengths: Numbers) -> pa.Array:
    """Return the offsets of lists, int32."""
    return arrow_numbers(np.append(0, np.cumsum(lengths)).astype(np.int32))


@dataclass(frozen=True)
class ItemsTask:
    """Partition of the items, with its ranges in the files of the users' partitions."""

    number: int
    ranges: tuple[tuple[int, int], ...]
    """Start and number of items in each file."""


def count_items(task: ItemsTask, *, job: ListsJob) -> pa.Table:
    """Count the distinct items of a partition, and the held-out ones by part that no training row
    has.
    """
    keep_freed_memory()
    parts = [np.zeros(0, ITEM)]
    for number, (start, count) in enumerate(task.ranges):
        parts.append(
            read_array(
                job.items_path(number),
                ITEM,
                start,
                count,
            )
        )
    items = np.concatenate(parts)
    tokens, owners = np.unique(items["token"], return_inverse=True)
    trained = (
        np.bincount(
            owners,
            items["trained"],
            minlength=len(tokens),
        )
        > 0
    )
    is_cold = ~trained[owners]
    cold = {part: int(items[part][is_cold].sum()) for part in ("valid", "test")}
    return job.reading.folder.done(
        "items",
        task.number,
        {"items": len(tokens), "cold": cold},
    )
