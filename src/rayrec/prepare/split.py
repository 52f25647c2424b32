"""Split of a log into files of training, validation and test rows, for parts that are not row
ranges. A resumable job, whose last file is split.json. The bytes depend on log and options, not on
the engine or its parallelism.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, final

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.bounds import Part, Share
from rayrec.config import Config, InputError, json_hash
from rayrec.data.arrow import as_numpy
from rayrec.data.engine import Engine
from rayrec.data.job import ResumableJob, resumable_job
from rayrec.data.log_source import LogSource
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex, numbered
from rayrec.data.logs.table_log import is_table
from rayrec.data.table_ranges import aligned_ranges, cut_once, task_bytes_of
from rayrec.observe.console import Console
from rayrec.prepare import split_tasks
from rayrec.prepare.config import PreparationConfig, engine, raw_index, reject_options
from rayrec.prepare.split_tasks import (
    PARTS,
    By,
    DigitTask,
    SplitJob,
    SplitTask,
    UsersTask,
    key_path,
)
from rayrec.schema import Schema

MANIFEST: Final = "split.json"
VERSION: Final = 1
_JOB_VERSION: Final = 3
"""Version of an unfinished folder."""
_PARTITION_BYTES: Final = 64 << 20
"""Log bytes per partition of the users. There are at most _MAX_PARTITIONS."""
_MAX_PARTITIONS: Final = 256
_READS: Final = (
    "address",
    "files",
    "engine",
    "spark",
    "schema",
    "max_bad_fraction",
    "block_bytes",
    "segments_per_block",
)
"""Fields of PreparationConfig used by a split."""


_Item = TypeVar("_Item", SplitTask, UsersTask)


@dataclass(frozen=True, kw_only=True)
class RowSplit(Config):
    """Assignment of rows to parts."""

    by: By
    """Criterion. rows: random rows. group: random values of a column, such as users, with all their
    rows. time: latest rows. last-out: last row of each user for the test, the one before it for
    validation.
    """
    validation: Part = 0.1
    """Fraction of rows (by group: of values) for validation. Not for last-out."""
    test: Share = 0.1
    """Fraction for the final test. 0 creates no test part."""
    seed: int = 0
    """Random seed for rows and group."""
    group: str | None = None
    """Column of the group or user, for group and last-out: a sparse column. None: the schema's
    group.
    """
    timestamp: str | None = None
    """Column of the time, for time and last-out. None: the schema's timestamp."""
    validation_from: str | None = None
    """First date or time (ISO 8601, UTC) of validation, for time, instead of fractions."""
    test_from: str | None = None
    """First date or time of the test, for time with validation_from. None creates no test part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation + self.test >= 1:
            raise InputError(
                f"split: validation {self.validation} and test {self.test} must be below 1 together"
            )
        unread = {
            "rows": ("group", "timestamp", "validation_from", "test_from"),
            "group": ("timestamp", "validation_from", "test_from"),
            "time": ("group", "seed"),
            "last-out": ("validation", "test", "seed", "validation_from", "test_from"),
        }[self.by]
        for name in unread:
            if getattr(self, name) != getattr(RowSplit, name):
                raise InputError(f"split by {self.by}: must not be used with {name}")
        if self.test_from is not None and self.validation_from is None:
            raise InputError("split by time: test_from must be used with validation_from")
        starts = self.starts
        if starts is not None and starts[1] is not None and starts[0] >= starts[1]:
            raise InputError(
                f"split by time: test_from must be after validation_from={self.validation_from}, "
                f"got {self.test_from}"
            )

    @property
    def starts(self) -> tuple[int, int | None] | None:
        """Start of validation and test in microseconds, or None for fractions."""
        if self.validation_from is None:
            return None
        test = (
            None if self.test_from is None else split_tasks.parse_time(self.test_from, "test_from")
        )
        return split_tasks.parse_time(self.validation_from, "validation_from"), test

    def pick_columns(self, schema: Schema) -> Schema:
        """Return the schema with the columns that the split reads. Raises InputError for an
        unusable column.
        """
        if self.by in ("group", "last-out"):
            schema = schema.replace(group=self.group or schema.group)
            if schema.group is None:
                raise InputError(
                    f"split by {self.by}: column not specified. Use --group with one of the "
                    "sparse columns"
                )
        if self.by in ("time", "last-out"):
            name = self.timestamp or schema.timestamp
            if name is None:
                raise InputError(
                    f"split by {self.by}: column of the time not specified. Use --timestamp"
                )
            if schema.tokens != "any":
                raise InputError(
                    f"split by {self.by}: log must have a time column: CSV or Parquet, --schema "
                    "with tokens: any"
                )
            schema = schema.replace(timestamp=name)
        return schema


def split(
    path: str,
    *,
    out: str,
    rows: RowSplit,
    config: PreparationConfig,
    console: Console,
) -> dict[str, Any]:
    """Write the valid rows of a raw log atomically into folder `out`, as files train-*,
    validation-* and test-* for the split kind `named_files`. Resumes an interrupted call. Text
    stays text, Parquet stays Parquet with all columns, and CSV becomes Parquet with text fields.
    Rows keep bytes and, within a part, order. Returns split.json: rows, fraction and files of each
    part, invalid rows, and those without a group. Raises InputError for an unusable log, an empty
    part, or if `out` exists.
    """
    reject_options(config, PreparationConfig(), "not an option of a split", but=_READS)
    out = storage.absolute(out).rstrip("/")
    source = LogSource.at(path, config.files)
    source.require_raw()
    schema = rows.pick_columns(config.adapted(path).schema)
    files = source.raw_files(schema)
    identity = [[file.path, file.size_bytes, file.modified_ns] for file in files]
    job_inputs = {
        "version": _JOB_VERSION,
        "log": json_hash(identity),
        "schema": schema.to_dict(),
        "segment_bytes": config.segment_bytes,
        **rows.to_dict(),
    }
    with (
        resumable_job(out, job_inputs, last_file=MANIFEST) as running,
        console.preparing(),
        engine(config, console, paths=(path, out)) as data_engine,
    ):
        if running.resumed:
            console.note(f"Resuming {running.folder.path}")
        work = _Work(
            path,
            rows,
            config.replace(schema=schema),
            files,
            running,
            data_engine,
            console,
        )
        result = work.finish(work.write(work.choose(work.tasks())))
    return {"out": out, **result}


# Phases of a split. Each phase is a set of data tasks of one resumable job:
#
#   by          examine                 choose                     write
#   rows        tables only             -                          hash of the row's number
#   group       tables only             -                          hash of the group
#   time        times of all rows       quantiles by radix search  time of the row
#   last-out    events by partition     last rows of each user     marks of the row
#
# Text needs no examination: its index has the rows. A table's first row is known only after the
# rows before it were counted.
@final
class _Work:
    """State of one call of `split`."""

    def __init__(
        self,
        path: str,
        rows: RowSplit,
        config: PreparationConfig,
        files: Sequence[storage.File],
        running: ResumableJob,
        engine: Engine,
        console: Console,
    ) -> None:
        self.path = path
        self.rows = rows
        self.config = config
        self.files = files
        self.running = running
        self.engine = engine
        self.console = console
        size_bytes = sum(file.size_bytes for file in files)
        self.task_bytes = task_bytes_of(size_bytes)
        partitions = min(max(size_bytes // _PARTITION_BYTES, 1), _MAX_PARTITIONS)
        test, holdout = (
            int(fraction * 2**64) for fraction in (rows.test, rows.test + rows.validation)
        )
        self.job = SplitJob(
            running.folder,
            config.schema,
            rows.by,
            rows.seed,
            thresholds=(test, holdout),
            partitions=partitions,
        )
        self.index = LogIndex((), Faults())
        self.missing = 0

    def tasks(self) -> list[SplitTask]:
        """Return the tasks, with the number of their valid rows. Raises InputError for a log with
        too many invalid rows.
        """
        if not is_table(self.files, self.config.schema):
            labelled = LogSource.at(self.path, self.config.files).is_labelled(self.config.schema)
            if not labelled:
                self.job = replace(self.job, schema=self.config.schema.unlabelled())
            self.index = raw_index(
                self.path,
                self.config,
                self.engine,
                self.console,
                labelled=labelled,
            )
            return split_tasks.text_tasks(self.index.segments, self.task_bytes)
        cuts = cut_once(
            self.files,
            self.config.schema,
            task_bytes=self.task_bytes,
            running=self.running,
            engine=self.engine,
        )
        tasks, markers = self._examined(split_tasks.table_tasks(self.files, cuts))
        faults = Faults()
        first = dict.fromkeys((file.path for file in self.files), 0)
        for task, marker in zip(tasks, markers, strict=True):
            task_faults = Faults.from_dict(marker["faults"])
            task_faults.first = [
                replace(fault, row=(fault.row or 0) + first[task.file])
                for fault in task_faults.first
            ]
            faults.add(task_faults)
            first[task.file] += marker["lines"]
        entries = [
            (task.file, 0, 0, marker["rows"]) for task, marker in zip(tasks, markers, strict=True)
        ]
        self.index = LogIndex(numbered(entries, "table"), faults)
        self.index.check(self.config.max_bad_fraction, self.path)
        if faults.total:
            fix = faults.text_fix()
            show = self.console.warn if fix else self.console.note
            show(f"{self.path}: {faults.describe()}; they are left out{fix and '; '}{fix}")
        self.missing = sum(marker["missing"] for marker in markers)
        tasks = [
            replace(task, first_row=segment.first_row, rows=segment.rows)
            for task, segment in zip(tasks, self.index.segments, strict=True)
        ]
        return (
            self._marked(tasks, [marker["sizes"] for marker in markers])
            if self.rows.by == "last-out"
            else tasks
        )

    def _examined(self, tasks: list[SplitTask]) -> tuple[list[SplitTask], list[dict[str, Any]]]:
        """Return the tasks, each of which starts where the one before in its file ends, and the
        results of `examine`.
        """
        task = functools.partial(split_tasks.examine, job=self.job)
        return aligned_ranges(tasks, list(self._run("examine", task, tasks)), task, self.engine)

    def _marked(self, tasks: list[SplitTask], sizes: list[list[list[int]]]) -> list[SplitTask]:
        """Return the tasks with the positions of their users' last rows. `sizes`: event counts by
        task, chunk and partition.
        """
        starts = tuple(task.first_row for task in tasks)
        events: list[list[tuple[str, int, int, int]]] = [[] for _ in range(self.job.partitions)]
        for task, chunks in zip(tasks, sizes, strict=True):
            begin = 0
            for chunk in chunks:
                for partition_events, count in zip(events, chunk, strict=True):
                    if count:
                        partition_events.append(
                            (
                                key_path(self.job.folder, "keys", task.number),
                                begin,
                                count,
                                task.first_row,
                            )
                        )
                    begin += count
        users = [UsersTask(number, tuple(each), starts) for number, each in enumerate(events)]
        markers = self._run(
            "marks",
            functools.partial(split_tasks.mark_last, folder=self.job.folder),
            users,
        )
        edges = [marker["edges"] for marker in markers]
        return [
            replace(
                task,
                marks=tuple((entry[index], entry[index + 1] - entry[index]) for entry in edges),
            )
            for index, task in enumerate(tasks)
        ]

    def choose(self, tasks: list[SplitTask]) -> list[SplitTask]:
        """Find the start of validation and test for a split by time."""
        if self.rows.by != "time":
            return tasks
        total = sum(task.rows for task in tasks)
        starts = self.rows.starts
        if starts is None:
            test, holdout = (
                round(total * fraction)
                for fraction in (self.rows.test, self.rows.test + self.rows.validation)
            )
            positions = [
                min(total - holdout, total - 1),
                *([min(total - test, total - 1)] if test else []),
            ]
            times = self._times(tasks, positions)
            starts = times[0], times[1] if test else None
        self.job = replace(self.job, times=starts)
        return tasks

    def _times(self, tasks: Sequence[SplitTask], positions: Sequence[int]) -> list[int]:
        """Return the times at these positions in time order, counted from 0, by a radix search with
        16 bits per pass.
        """
        prefixes = [0] * len(positions)
        remaining = list(positions)
        for shift in (48, 32, 16, 0):
            items = [
                DigitTask(
                    key_path(self.job.folder, "keys", task.number),
                    task.rows,
                    tuple(prefixes),
                    shift,
                )
                for task in tasks
                if task.rows
            ]
            # One pass finds 16 bits of all positions at once.
            counts = np.zeros((len(positions), 1 << 16), np.int64)
            for table in self.engine.run(
                "times",
                split_tasks.count_digits,
                items,
                block_bytes=len(positions) << 19,
            ):
                counts += as_numpy(table.column("counts")).reshape(counts.shape)
            for number, prefix_counts in enumerate(np.cumsum(counts, axis=1)):
                digit = int(np.searchsorted(prefix_counts, remaining[number], side="right"))
                remaining[number] -= int(prefix_counts[digit - 1]) if digit else 0
                prefixes[number] = prefixes[number] << 16 | digit
        return [prefix - (1 << 63) for prefix in prefixes]

    def write(self, tasks: Sequence[SplitTask]) -> dict[str, dict[str, Any]]:
        """Write all rows. Return rows, fraction and files of each part."""
        rows = np.zeros(len(PARTS), np.int64)
        files = list[str]()
        for marker in self._run("write", functools.partial(split_tasks.write, job=self.job), tasks):
            rows += marker["rows"]
            files += marker["files"]
            self.missing += marker["missing"]
        parts = {
            name: {
                "rows": int(count),
                "share": round(int(count) / int(rows.sum()), 6),
                "files": sorted(file for file in files if file.startswith(f"{name}-")),
            }
            for name, count in zip(PARTS, rows.tolist(), strict=True)
        }
        empty = [
            name
            for name, part in parts.items()
            if not part["rows"] and not (name == "test" and self._no_test)
        ]
        if empty:
            storage.remove_folder(self.running.folder.path)
            raise InputError(
                f"{self.path}: split by {self.rows.by} leaves no rows for {' and '.join(empty)}. "
                "Choose other parts"
            )
        return {name: part for name, part in parts.items() if part["rows"]}

    @property
    def _no_test(self) -> bool:
        by_fractions = self.rows.by != "last-out" and self.rows.validation_from is None
        return (
            self.rows.test == 0
            if by_fractions
            else self.rows.by == "time" and self.rows.test_from is None
        )

    def finish(self, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        counts = {"by": self.rows.by, "rows": self.index.rows, "bad_rows": self.index.faults.total}
        grouped = (
            {"rows_without_group": self.missing} if self.rows.by in ("group", "last-out") else {}
        )
        result = {**counts, "parts": parts, **grouped}
        manifest = {**result, "options": self.rows.to_dict(), "version": VERSION}
        folder = self.running.folder
        with folder.disk_errors():
            storage.write_json(storage.join(folder.path, MANIFEST), manifest)
        return {
            **result,
            "parts": {name: {**part, "files": len(part["files"])} for name, part in parts.items()},
        }

    def _run(
        self,
        kind: str,
        task: Callable[[_Item], pa.Table],
        items: Sequence[_Item],
    ) -> Iterator[dict[str, Any]]:
        report = functools.partial(self.console.progress, f"{kind} (parts of the log)")
        return self.running.run(kind, task, items, self.engine, report)
