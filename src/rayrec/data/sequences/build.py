"""Builder of lists of items per user, as a resumable job whose last file is the manifest. The bytes
depend on the log and its schema, not on the engine or its parallelism.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, TypeVar, final

import pyarrow as pa

from rayrec import host_resources, storage
from rayrec.config import InputError, json_hash
from rayrec.data.engine import Engine, TaskContext, ThreadEngine
from rayrec.data.job import Numbered, ResumableJob, resumable_job
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex, numbered
from rayrec.data.sequences.lists import (
    BUCKETS,
    PARTS,
    ItemsTask,
    ListsJob,
    UsersTask,
    count_items,
    value_type,
    write_lists,
)
from rayrec.data.sequences.spills import SECOND, EventsJob, Spill, spill_events
from rayrec.data.table_ranges import (
    TableRange,
    aligned_ranges,
    cut_once,
    table_ranges,
    task_bytes_of,
)
from rayrec.schema import Schema, SequenceSplit

MANIFEST: Final = "sequences.json"
"""Last file of a folder of lists."""
VERSION: Final = 2
"""Version of the files. Lists of another version are built again. In version 1, ages counted from
the newest item of a row.
"""
_JOB_VERSION: Final = 2
"""Version of the files that tasks pass on. A call does not resume a job of another version."""
_PARTITION_BYTES: Final = 8 << 20
"""Log bytes per partition of the users. There are at most _MAX_PARTITIONS."""
_MAX_PARTITIONS: Final = 512
_LISTS_BYTES: Final = 512 << 20
"""Memory of a task that writes lists: 8 MiB of Parquet may be two million events."""
_MARKED: Final = {
    "train": "train",
    "validation": "valid",
    "test": "test",
}
"""Beginning of a part's file names by its name in the manifest."""

_Item = TypeVar("_Item", bound=Numbered)


@dataclass(frozen=True)
class EventsLog:
    """Log of events, and how its lists are built."""

    path: str
    """Path of the log, for messages."""
    files: tuple[storage.File, ...]
    schema: Schema
    """Schema of the lists, with `sequence`."""
    max_bad_fraction: float = 0.001

    def job_inputs(self) -> dict[str, Any]:
        """Return what the lists are made of, as JSON values."""
        assert self.schema.sequence is not None
        assert self.schema.split is not None
        events = self.schema.events
        form = {name: getattr(events, name) for name in ("format", "encoding", "escape", "header")}
        files = [
            [
                file.path,
                file.size_bytes,
                file.modified_ns,
            ]
            for file in self.files
        ]
        return {
            "version": VERSION,
            "job_version": _JOB_VERSION,
            "log": json_hash(files),
            "events": events.describe() | form,
            "sequence": self.schema.sequence.built(),
            "split": self.schema.split.to_dict(),
        }

    def check_faults(
        self,
        index: LogIndex,
        context: TaskContext,
    ) -> None:
        """Check that the log has not too many invalid events, and report them. Raises
        InputError.
        """
        index.check(self.max_bad_fraction, self.path)
        if index.faults.total:
            fix = index.faults.text_fix()
            show = context.warn if fix else context.note
            show(f"{self.path}: leaving out {index.faults.describe()}{fix and '; '}{fix}")


def build(
    log: EventsLog,
    *,
    out: str,
    context: TaskContext,
) -> dict[str, Any]:
    """Write lists of items per user atomically into folder `out`. Resumes an interrupted call.

    `log` has files train-*, valid-* and test-*, for the split kind `named_files`, and `histories`
    the whole list of every user. The manifest comes last. Returns it.

    Raises InputError for an unusable log, a part without lists, or if `out` exists.
    """
    with resumable_job(
        out,
        log.job_inputs(),
        last_file=MANIFEST,
    ) as running:
        if running.resumed:
            context.note(f"Resuming {running.folder.path}")
        work = _Work(
            log,
            running,
            context,
        )
        markers = work.read_events()
        return work.finish(work.write_lists(markers))


@final
class _Work:
    """State of one call of `build`."""

    def __init__(
        self,
        log: EventsLog,
        running: ResumableJob,
        context: TaskContext,
    ) -> None:
        self._log = log
        self._running = running
        self._context = context
        size_bytes = sum(file.size_bytes for file in log.files)
        self._task_bytes = task_bytes_of(size_bytes)
        partitions = min(max(size_bytes // _PARTITION_BYTES, 1), _MAX_PARTITIONS)
        assert log.schema.split is not None
        self._reading = EventsJob(
            running.folder,
            log.schema.events,
            partitions,
            log.schema.split,
        )
        self._index = LogIndex((), Faults())

    def read_events(self) -> list[dict[str, Any]]:
        """Write the events by partition of the users. Return the tasks' markers. Raises InputError
        for too many invalid events.
        """
        events = self._reading.events
        cuts = cut_once(
            self._log.files,
            events,
            task_bytes=self._task_bytes,
            running=self._running,
            engine=self._context.engine,
        )
        ranges = table_ranges(self._log.files, cuts)
        task = functools.partial(spill_events, job=self._reading)
        markers = list(
            self._run(
                "events",
                task,
                ranges,
            )
        )
        ranges, markers = aligned_ranges(
            ranges,
            markers,
            task,
            self._context.engine,
        )
        self._index = _merged(ranges, markers)
        self._log.check_faults(self._index, self._context)
        return markers

    def write_lists(self, markers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Write the lists of all partitions, and return their counts. Raises InputError if a part
        has none.
        """
        job = self._lists_job(markers)
        users = [UsersTask(number) for number in range(self._reading.partitions)]
        task = functools.partial(write_lists, job=job)
        engine = _limited(self._context.engine)
        written = list(
            self._run(
                "lists",
                task,
                users,
                engine=engine,
            )
        )
        rows = _totals(written, "rows")
        self._check_rows(rows, job.split)
        count = min(self._reading.partitions, BUCKETS)
        edges = [BUCKETS * number // count for number in range(count + 1)]
        tasks = [
            _items_task(number, buckets, written) for number, buckets in enumerate(pairwise(edges))
        ]
        counted = list(
            self._run(
                "items",
                functools.partial(count_items, job=job),
                tasks,
            )
        )
        targets = _totals(written, "targets")
        cold = _totals(counted, "cold")
        names = [name for name, part in _MARKED.items() if rows[part]]
        evaluated = [name for name in names if name != "train"]
        return {
            "users": sum(each["users"] for each in written),
            "items": sum(each["items"] for each in counted),
            "events": self._index.rows,
            "bad_rows": self._index.faults.total,
            "rows": {name: rows[_MARKED[name]] for name in names},
            "targets": {name: targets[_MARKED[name]] for name in evaluated},
            "cold_targets": {name: cold[_MARKED[name]] for name in evaluated},
        }

    def _lists_job(self, markers: Sequence[dict[str, Any]]) -> ListsJob:
        """Return the parameters of the tasks that write lists, given the markers of `events`."""
        schema = self._log.schema
        assert schema.sequence is not None
        assert schema.split is not None
        texts = 0
        words = 0
        wide = 1  # The users are int64 in any case
        for marker in markers:
            texts |= marker["texts"]
            words |= marker["words"]
            wide |= marker["wide"]
        timed = [each for each in markers if each["latest"] is not None]
        spills = [Spill(number, each["chunks"]) for number, each in enumerate(markers)]
        columns = range(len(schema.sequence.listed))
        types = [
            value_type(is_text=bool(words >> column & 1), is_wide=bool(wide >> column & 1))
            for column in columns
        ]
        latest = max((each["latest"] for each in timed), default=0)
        earliest = min((each["earliest"] for each in timed), default=0)
        has_fractions = any(each["has_fractions"] for each in timed)
        return ListsJob(
            self._reading,
            schema.sequence,
            schema.split,
            tuple(spills),
            types=tuple(types),
            were_texts=tuple(bool(texts >> column & 1) for column in columns),
            latest=latest,
            has_small_ages=not has_fractions and latest - earliest < SECOND << 31,
        )

    def _check_rows(
        self,
        rows: Mapping[str, int],
        split: SequenceSplit,
    ) -> None:
        """Raise InputError if a part has no lists."""
        parts = PARTS if split.sizes[1] else PARTS[:2]
        empty = [name for name, part in _MARKED.items() if part in parts and not rows[part]]
        if not empty:
            return
        storage.remove_folder(self._running.folder.path)
        columns = self._log.schema.sequence
        assert columns is not None
        rule = f"split {split.kind} with validation {split.validation} and test {split.test}"
        fix = {
            "time": "hold out shorter times",
            "files": "give files whose names begin with train, valid and test",
            "last_items": "hold out fewer items, or give a log with more events of the same users",
        }[split.kind]
        raise InputError(
            f"{self._log.path}: no user has a list for {' and '.join(empty)}, with {rule} and "
            f"min_length {columns.min_length}. Lower min_length, or {fix}"
        )

    def finish(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        """Write the manifest, and return it."""
        schema = self._log.schema
        assert schema.sequence is not None
        assert schema.split is not None
        manifest = {
            **counts,
            "sequence": schema.sequence.built(),
            "split": schema.split.to_dict(),
            "version": VERSION,
        }
        folder = self._running.folder
        with folder.disk_errors():
            storage.write_json(storage.join(folder.path, MANIFEST), manifest)
        return manifest

    def _run(
        self,
        kind: str,
        task: Callable[[_Item], pa.Table],
        items: Sequence[_Item],
        *,
        engine: Engine | None = None,
    ) -> Iterator[dict[str, Any]]:
        report = functools.partial(self._context.progress, f"{kind} (parts of the log)")
        return self._running.run(
            kind,
            task,
            items,
            engine or self._context.engine,
            report,
        )


def _totals(markers: Sequence[dict[str, Any]], field: str) -> dict[str, int]:
    """Return the sums of a field by part."""
    totals = Counter[str]()
    for marker in markers:
        totals.update(marker[field])
    return totals


def _items_task(
    number: int,
    buckets: tuple[int, int],
    markers: Sequence[dict[str, Any]],
) -> ItemsTask:
    """Return the task for some buckets, given the markers of `lists`."""
    first, end = buckets
    ranges = []
    for marker in markers:
        start = marker["edges"][first]
        stop = marker["edges"][end]
        ranges.append((start, stop - start))
    return ItemsTask(number, tuple(ranges))


def _limited(engine: Engine) -> Engine:
    """Return the engine for tasks that have a partition in memory: two threads, or as many as fit
    in a quarter of the memory. Tasks of a cluster are limited by its CPUs.
    """
    if not isinstance(engine, ThreadEngine):
        return engine
    fitting = host_resources.memory().available // (4 * _LISTS_BYTES)
    return replace(engine, num_threads=min(engine.num_threads, max(2, fitting)))


def _merged(ranges: Sequence[TableRange], markers: Sequence[dict[str, Any]]) -> LogIndex:
    """Return the events and faults of the ranges as an index."""
    faults = Faults()
    first: dict[str, int] = {}
    for part, marker in zip(
        ranges,
        markers,
        strict=True,
    ):
        new = Faults.from_dict(marker["faults"])
        start = first.get(part.file, 0)
        new.first = [replace(fault, row=(fault.row or 0) + start) for fault in new.first]
        faults.add(new)
        first[part.file] = start + marker["lines"]
    entries = [
        (part.file, 0, 0, marker["rows"])
        for part, marker in zip(
            ranges,
            markers,
            strict=True,
        )
    ]
    return LogIndex(numbered(entries, "table"), faults)
