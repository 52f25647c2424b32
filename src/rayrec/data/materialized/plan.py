"""The layout of a preprocessed log: the names of files, the place of every row, and the task that writes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoding.derivation import file_key
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.logs.index import LogIndex, Part, select, source_of, sources_in_order
from rayrec.data.materialized.files import FilePlan, plan_files
from rayrec.data.materialized.write_tasks import Task

MOST_SHUFFLE_TASKS = 1024
"""Of a full shuffle: each of its second half reads from all of its first."""
_ENDINGS = re.compile(r"\.(txt|tsv|csv|log)$")


@dataclass(frozen=True)
class Layout:
    """Where every row goes."""

    raw_files: list[str]
    """Paths of the log's files, sorted as `position` sorts them."""
    file_rows: list[int]
    """Rows of each."""
    plans: list[list[FilePlan]]
    """The files each becomes; none for parquet, whose files the tasks make."""
    ranges: list[tuple[str, int, int]]
    """(set, first row, row behind the last) in the order of the log; rows of no set are of the set `other`."""
    tasks: list[Task]

    @property
    def all_plans(self) -> list[FilePlan]:
        return [plan for of_file in self.plans for plan in of_file]

    @property
    def shuffled(self) -> list[Task]:
        """The tasks whose rows a full shuffle moves."""
        return [task for task in self.tasks if task.set in ("train", "all")]

    def segments(self, index: LogIndex) -> list[list[int]]:
        """[file number, first row in the file, row behind the last, rows] of each segment."""
        number_of = {path: number for number, path in enumerate(self.raw_files)}
        done = [0] * len(self.raw_files)
        segments = []
        for segment in index.segments:
            number = number_of[segment.path]
            start = done[number]
            done[number] += segment.rows
            segments.append([number, start, done[number], segment.rows])
        return segments

    def manifest(self, index: LogIndex) -> dict[str, Any]:
        """What a reader must know of it."""
        matrices = [[list(vars(matrix).values()) for plan in plans for matrix in plan.matrices] for plans in self.plans]
        return {
            "raw_files": [storage.name_of(path) for path in self.raw_files],
            "file_rows": self.file_rows,
            "matrices": matrices,
            "segments": self.segments(index),
        }


def lay_out(
    index: LogIndex,
    *,
    preprocessor: Preprocessor,
    format: str,
    sets: dict[str, tuple[int, int]] | None,
    segments_per_task: int,
    shuffle: str,
) -> Layout:
    """Raises InputError for sets that overlap or reach beyond the log."""
    rows_of: dict[str, int] = {}
    for segment in index.segments:
        rows_of[segment.path] = rows_of.get(segment.path, 0) + segment.rows
    rank = {source: number for number, source in enumerate(sources_in_order(rows_of))}
    raw_files = sorted(rows_of, key=lambda path: (rank[source_of(path)], path))
    file_rows = [rows_of[path] for path in raw_files]
    plans: list[list[FilePlan]] = []
    if format != "parquet":
        stems = _stems(raw_files)
        plans = [plan_files(format, preprocessor, stem, rows) for stem, rows in zip(stems, file_rows, strict=True)]
    layout = Layout(raw_files, file_rows, plans, _ranges(sets, index.rows), [])
    layout.tasks.extend(_tasks(index, layout, segments_per_task, shuffle))
    return layout


def _stems(paths: Sequence[str]) -> list[str]:
    """What the names of a raw file's preprocessed files begin with: day_0, train; with a number where two are alike."""
    stems: dict[str, None] = {}
    numbers: dict[str, int] = {}
    for path in paths:
        stem = first = _ENDINGS.sub("", file_key(path)) or "log"
        number = numbers.get(first, 1)
        while stem in stems:
            number += 1
            stem = f"{first}-{number}"
        numbers[first] = number
        stems[stem] = None
    return list(stems)


def _ranges(sets: dict[str, tuple[int, int]] | None, rows: int) -> list[tuple[str, int, int]]:
    if sets is None:
        return [("all", 0, rows)]
    ranges, done = [], 0
    for name, (start, stop) in sorted(sets.items(), key=lambda item: item[1]):
        if start < done or stop > rows or start > stop:
            raise InputError(
                f"sets: {name} has rows {start}-{stop}, which others have too or a log of {rows} rows has not"
            )
        if start > done:
            ranges.append(("other", done, start))
        if start < stop:
            ranges.append((name, start, stop))
        done = stop
    return [*ranges, ("other", done, rows)] if done < rows else ranges


def _tasks(index: LogIndex, layout: Layout, segments_per_task: int, shuffle: str) -> list[Task]:
    number_of = {path: number for number, path in enumerate(layout.raw_files)}
    matrices = [tuple(matrix for plan in plans for matrix in plan.matrices) for plans in layout.plans]
    first_rows: dict[str, int] = {}
    for segment in index.segments:
        first_rows.setdefault(segment.path, segment.first_row)
    tasks: list[Task] = []
    for name, start, stop in layout.ranges:
        parts = [Part(*part) for part in select(index, start, stop)]
        size = segments_per_task
        if shuffle == "full":
            size = max(size, -(-len(parts) // MOST_SHUFFLE_TASKS))
        for begin in range(0, len(parts), size):
            chosen = tuple(parts[begin : begin + size])
            places = tuple(_place(part, number_of, first_rows) for part in chosen)
            of_files = {number: matrices[number] for number, _ in places if matrices}
            tasks.append(Task(len(tasks), name, chosen, places, of_files))
    return tasks


def _place(part: Part, number_of: dict[str, int], first_rows: dict[str, int]) -> tuple[int, int]:
    path = part.segment.path
    return number_of[path], part.segment.first_row + part.start - first_rows[path]
