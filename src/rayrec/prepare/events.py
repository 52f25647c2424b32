"""Times and (user, time) events of log rows, on disk, to find each user's last rows and the times at given positions."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.job import JobFolder
from rayrec.data.raw_block import RawBlock
from rayrec.hashing import mix64
from rayrec.native import keep_freed_memory

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


class Keys:
    """Key file of a task: times, or events in chunks, each sorted by partition."""

    def __init__(self, path: str, opened: ExitStack, *, partitions: int | None) -> None:
        """Create the file. `partitions`: number of partitions of the users. None stores times only."""
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
            self._file.write(np.ascontiguousarray(times_of(raw)).data)
            return
        users = raw.group_keys()
        events = np.empty(raw.rows, EVENT)
        events["user"], events["time"] = users, times_of(raw)
        events["row"] = np.arange(first_row, first_row + raw.rows)
        self._waiting.append(events[users != 0])
        self._rows += raw.rows
        if self._rows >= CHUNK_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the pending events as one chunk."""
        events = np.concatenate([np.empty(0, EVENT), *self._waiting])
        self._waiting, self._rows = [], 0
        if len(events) and self._partitions is not None:
            partition_of = (mix64(events["user"].view(np.uint64)) % np.uint64(self._partitions)).astype(np.intp)
            self._file.write(events[np.argsort(partition_of, kind="stable")].view(np.uint8).data)
            self.sizes.append(np.bincount(partition_of, minlength=self._partitions).tolist())


def times_of(raw: RawBlock) -> Numbers:
    assert raw.times is not None
    return raw.times


def read_array(path: str, dtype: np.dtype, start: int, count: int) -> np.ndarray:
    """Read items [start, start + count) of a file."""
    data = np.empty(count * dtype.itemsize, np.uint8)
    if count and storage.read_into(path, start * dtype.itemsize, data) != len(data):
        raise InputError(f"{path}: was truncated. Remove its folder and split again")
    return data.view(dtype)


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
        for of_prefix, prefix in zip(counts, task.prefixes, strict=True):
            selected = bits if task.shift == 48 else bits[bits >> np.uint64(task.shift + 16) == np.uint64(prefix)]
            of_prefix += np.bincount((selected >> np.uint64(task.shift)).astype(np.int64) & 0xFFFF, minlength=1 << 16)
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
    """Write the marks of each user's last row (test) and second last row (validation), sorted by row."""
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
        return folder.done("marks", task.number, {"edges": edges, "users": len(np.unique(events["user"])), "marks": len(marks)})


def last_rows(users: Numbers, times: Numbers, rows: Numbers) -> np.ndarray:
    """Return the marks (MARK) sorted by row: the last row of users with at least two rows is for the test, and the second last
    row of users with at least three rows for validation. At equal times, the larger row is later. Pure."""
    order = np.lexsort((rows, times, users))
    users, rows = users[order], rows[order]
    ends = np.flatnonzero(np.append(users[1:] != users[:-1], True)[: len(users)])
    sizes = np.diff(np.append(-1, ends))
    marks = np.empty(int((sizes >= 2).sum() + (sizes >= 3).sum()), MARK)
    marks["row"] = rows[np.concatenate([ends[sizes >= 2], ends[sizes >= 3] - 1])]
    marks["part"] = np.repeat([2, 1], [int((sizes >= 2).sum()), int((sizes >= 3).sum())])
    return marks[np.argsort(marks["row"], kind="stable")]
