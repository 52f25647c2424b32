"""Lists of a partition's users: sorted events, their parts, and the files with a row per user."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from rayrec import storage
from rayrec.data.arrow import arrow_numbers
from rayrec.data.encoded_rows import expand_ranges
from rayrec.data.job import read_array
from rayrec.data.logs.column_values import integer_tokens, text_tokens
from rayrec.data.sequences.spills import KEY, TIME, EventsJob, Numbers, Spill, read_events
from rayrec.hashing import mix64
from rayrec.native import keep_freed_memory
from rayrec.schema import AGE, SEEN, TARGET, SequenceColumns, SequenceSplit

PARTS: Final = ("train", "valid", "test")
"""Parts of the lists, as the beginnings of their file names."""
Part = Literal["train", "valid", "test", "histories"]
GROUP_BYTES: Final = 1 << 20
"""Bytes of a written row group, small enough to be shuffled as a unit."""
_MILLION: Final = np.float64(1e6)
BUCKETS: Final = 64
"""Number of partitions of the items."""
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
    texts: tuple[bool, ...]
    """Whether the values of each column of events are text, the user's first. Otherwise int64."""
    latest: int
    """Latest time of the log in microseconds."""

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


def sort_events(keys: npt.NDArray[np.uint64], times: Numbers | None) -> Numbers:
    """Return the order of events by user, then time, then their order, int64 [events]. Pure."""
    order = None
    if times is not None and (times[1:] < times[:-1]).any():
        order = _radix_order((times - times.min()).view(np.uint64))
    codes = arrow_numbers(keys).dictionary_encode()
    users = codes.dictionary.to_numpy()
    ranks = np.empty(len(users), np.uint64)
    ranks[np.argsort(users)] = np.arange(len(users), dtype=np.uint64)
    return _radix_order(ranks[codes.indices.to_numpy()], order)


# NumPy sorts 16-bit numbers by their counts, in a tenth of the time of a comparison sort.
def _radix_order(values: npt.NDArray[np.uint64], order: Numbers | None = None) -> Numbers:
    """Return the order of values that keeps equal ones in `order`, int64. Pure."""
    bits = int(values.max()).bit_length()
    for shift in range(0, max(bits, 1), 16):
        digits = (values >> np.uint64(shift)).astype(np.uint16)
        if order is not None:
            digits = digits[order]
        step = np.argsort(digits, kind="stable")
        order = step if order is None else order[step]
    assert order is not None
    return order


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
    """Hold out the events from two times on, those of validation and test. Pure."""
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
            counts["events"] = len(lists.order)
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
    values: pa.Array
    """Distinct values, int64 or large_string."""

    def take(self, events: Numbers) -> pa.Array:
        """Return the values of some events."""
        return self.values.take(arrow_numbers(self.codes[events]))

    def tokens(self, *, booleans: bool) -> npt.NDArray[np.uint64]:
        """Return the token of each distinct value. `booleans`: see `text_tokens`."""
        tokens = np.empty(len(self.values), np.uint64)
        if types.is_integer(self.values.type):
            integer_tokens(self.values, tokens)
        else:
            text_tokens(
                self.values,
                tokens,
                booleans=booleans,
            )
        return tokens


class _UserLists:
    """Lists of one partition."""

    def __init__(
        self,
        batch: pa.RecordBatch,
        job: ListsJob,
    ) -> None:
        self._job = job
        keys = batch.column(KEY).to_numpy()
        times = batch.column(TIME).to_numpy() if TIME in batch.schema.names else None
        order = sort_events(keys, times)
        self.order = order
        keys = keys[order]
        self._times = None if times is None else times[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        stops = np.append(starts[1:], len(keys))
        self.ranges = self._divided(starts, stops)
        users = _typed(batch.column("0"), is_text=job.texts[0])
        self._users = users.take(arrow_numbers(order[starts]))
        self._columns = {
            name: _encoded(
                batch.column(str(number)),
                order,
                is_text=job.texts[number],
            )
            for number, name in enumerate((job.columns.item, *job.columns.with_columns), start=1)
        }

    @classmethod
    def read(
        cls,
        number: int,
        job: ListsJob,
    ) -> _UserLists | None:
        """Read the events of a partition. None if it has none."""
        batch = read_events(
            job.spills,
            number,
            job=job.reading,
        )
        return None if batch is None else cls(batch, job)

    def _divided(
        self,
        starts: Numbers,
        stops: Numbers,
    ) -> UserRanges:
        job = self._job
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
        table = self._table(
            part,
            users,
            history,
            stops,
        )
        sizes = history - self.ranges.starts[users]
        with storage.writing(path) as local:
            _write_groups(
                table,
                sizes,
                local,
            )
        return len(users)

    def _table(
        self,
        part: Part,
        users: Numbers,
        history: Numbers,
        stops: Numbers,
    ) -> pa.Table:
        """Return the rows of a part: user, lists, held-out items, seen items, and ages."""
        first = self.ranges.starts[users]
        starts = first
        if part in ("valid", "test"):  # Which have the whole list as `seen`
            starts = np.maximum(first, history - self._longest)
        lengths = history - starts
        offsets = _offsets(lengths)
        before = expand_ranges(starts, lengths)
        columns = {self._job.columns.user: self._users.take(arrow_numbers(users))}
        for name, values in self._columns.items():
            columns[name] = pa.ListArray.from_arrays(offsets, values.take(before))
        if part in ("valid", "test"):
            items = self._columns[self._job.columns.item]
            for name, start, stop in ((TARGET, history, stops), (SEEN, first, history)):
                column = items.take(expand_ranges(start, stop - start))
                columns[name] = pa.ListArray.from_arrays(_offsets(stop - start), column)
        if self._times is not None:
            newest = np.repeat(self._times[np.maximum(history, 1) - 1], lengths)
            ages = ((newest - self._times[before]) / _MILLION).astype(np.float32)
            columns[AGE] = pa.ListArray.from_arrays(offsets, arrow_numbers(ages))
        return pa.table(columns)

    @property
    def _longest(self) -> int:
        """Number of items that a reader takes, the newest ones."""
        return self._job.columns.max_length + 1

    def items(self) -> np.ndarray:
        """Return the distinct items, ITEM."""
        values = self._columns[self._job.columns.item]
        items = np.zeros(len(values.values), ITEM)
        rules = self._job.reading.events.category_rules
        items["token"] = values.tokens(booleans=rules >= 2)
        users, ends, _ = self.rows("train")
        starts = np.maximum(self.ranges.starts[users], ends - self._longest)
        items["trained"][values.codes[expand_ranges(starts, ends - starts)]] = 1
        for part in ("valid", "test"):
            users, starts, ends = self.rows(part)
            codes = values.codes[expand_ranges(starts, ends - starts)]
            items[part] = np.bincount(codes, minlength=len(items))
        return items


def _typed(array: pa.Array, *, is_text: bool) -> pa.Array:
    """Return values as the column of all files has them."""
    return pc.cast(array, pa.large_string() if is_text else pa.int64())


def _encoded(
    array: pa.Array,
    order: Numbers,
    *,
    is_text: bool,
) -> _Values:
    coded = _typed(array, is_text=is_text).dictionary_encode()
    return _Values(coded.indices.to_numpy()[order], coded.dictionary)


# Row groups are the units of shuffling, so they end where their bytes do, not their rows: a user
# may have thousands of events.
def _write_groups(
    table: pa.Table,
    sizes: Numbers,
    path: str,
) -> None:
    """Write a table in row groups of about GROUP_BYTES, given the length of each row's history."""
    ends = group_ends(sizes + 1, max(table.nbytes, 1))
    with pq.ParquetWriter(
        path,
        table.schema,
        compression="lz4",
        write_statistics=False,
        use_dictionary=False,
    ) as writer:
        start = 0
        for end in ends:
            writer.write_table(table.slice(start, end - start), row_group_size=end - start)
            start = end


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
