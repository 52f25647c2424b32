"""Writer of preprocessed datasets: a resumable job whose tasks encode segments to their places.
dataset.json comes last.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayrec import storage
from rayrec.config import InputError, json_hash
from rayrec.data.encoding.encoder import file_key
from rayrec.data.encoding.preprocessor import Preprocessor, put_preprocessor
from rayrec.data.engine import Engine, StreamEngine
from rayrec.data.job import ResumableJob, resumable_job
from rayrec.data.logs.index import LogIndex, resolve_source, sources_in_order
from rayrec.data.materialized.dataset import MANIFEST, VERSION, compute_hash, write_manifest
from rayrec.data.materialized.formats import (
    FilePlan,
    check,
    create_files,
    finish_files,
    plan_files,
    row_bytes,
)
from rayrec.data.materialized.write_tasks import Job, Task, gather_rows, scatter_rows, write_rows


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output settings of `preprocess`."""

    format: str
    sets: dict[str, tuple[int, int]] | None = None
    """Row ranges by set name, as returned by Split. Parquet stores each set in a folder."""
    segments_per_task: int = 8
    shuffle: Literal["none", "full"] = "none"
    """Shuffle mode. `full` puts the rows of `train` (without sets, all rows) in random order and
    leaves other sets unchanged.
    """
    seed: int = 0
    """Shuffle seed."""
    labelled: bool = True


def preprocess(
    index: LogIndex,
    *,
    preprocessor: Preprocessor,
    out: str,
    engine: Engine,
    progress: Callable[[int], None] = lambda rows: None,
    note: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> dict[str, Any]:
    """Write a log to the new folder `out` and return rows, out, format, hash, bytes, seconds and
    rows_per_s. The bytes do not depend on engine or interruptions. `settings` are fields of Output.
    `progress` takes finished rows, `note` messages. Raises InputError for an unsuitable format, an
    existing `out`, an unfinished job with other inputs, or a small disk.
    """
    start_s = time.perf_counter()
    out = storage.absolute(out).rstrip("/")
    output = Output(**settings)
    _check_target(index, out, output)
    check(output.format, preprocessor, labelled=output.labelled)
    layout = lay_out(index, preprocessor, output)
    sources = _sources(index)
    # What the bytes of the output depend on. The same call resumes, others are rejected.
    identity = {
        "version": VERSION,
        "format": output.format,
        "preprocessor": preprocessor.hash(),
        "sets": {name: list(rows) for name, rows in (output.sets or {}).items()},
        "labelled": output.labelled,
        "shuffle": output.shuffle,
        "seed": output.seed if output.shuffle == "full" else None,
    }
    log = {"log": _identity(index, sources), "segments_per_task": output.segments_per_task}
    with resumable_job(out, {**identity, **log}, last_file=MANIFEST) as running:
        job = _started(running, index, layout, preprocessor, engine, output)
        replies = running.finished("write", layout.tasks)
        done = before = sum(reply["rows"] for reply in replies.values())
        if running.resumed:
            note(f"Resuming {running.folder.path}, {done:,} of {index.rows:,} rows done")
        for reply in _run(running, engine, job, layout, set(replies), output):
            replies[reply["number"]] = reply
            done += reply["rows"]
            progress(done)
        results = [replies[task.number] for task in layout.tasks]
        schema = preprocessor.schema.to_dict()
        described = {**identity, "preset": preprocessor.preset, "schema": schema}
        manifest = _manifest(running.folder.path, described, index, sources, layout, results)
        write_manifest(running.folder.path, manifest)
    seconds = time.perf_counter() - start_s
    size_bytes = sum(file["bytes"] for file in manifest["files"])
    return {
        "rows": index.rows,
        "out": out,
        "format": output.format,
        "hash": manifest["hash"],
        "bytes": size_bytes,
        "seconds": seconds,
        "rows_per_s": (index.rows - before) / seconds,
    }


def _started(
    running: ResumableJob,
    index: LogIndex,
    layout: Layout,
    preprocessor: Preprocessor,
    engine: Engine,
    output: Output,
) -> Job:
    """Write what precedes the tasks, unless an earlier call did, and return the tasks' settings.
    Raises InputError for a small disk.
    """
    folder = running.folder
    saved = storage.join(folder.path, "preprocessor")
    if not storage.is_url(folder.path):
        _check_disk(folder.path, layout, preprocessor, index.rows, output)
    if not running.resumed:
        with folder.disk_errors():
            create_files(folder.path, layout.all_plans)
            preprocessor.save(saved)
    # Spark's tasks load it.
    shared = put_preprocessor(preprocessor, engine) if isinstance(engine, StreamEngine) else saved
    schema = preprocessor.schema if output.labelled else preprocessor.schema.unlabelled()
    return Job(folder, output.format, schema, shared)


def _manifest(
    folder: str,
    described: dict[str, Any],
    index: LogIndex,
    sources: Sequence[storage.File],
    layout: Layout,
    results: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return the manifest of the complete files in a folder. `described` are its first entries."""
    if layout.plans:
        ranges = (range_ for reply in results for range_ in reply["ranges"])
        files = finish_files(folder, layout.all_plans, ranges)
    else:
        files = [reply["file"] for reply in results]
    return {
        **described,
        "rows": index.rows,
        "source": [{"path": file.path, "bytes": file.size_bytes} for file in sources],
        "faults": index.faults.to_dict(),
        **layout.manifest(index),
        "hash": compute_hash(files),
        "files": files,
        "parquet": [reply["parquet"] for reply in results if "parquet" in reply],
    }


def _check_target(index: LogIndex, out: str, output: Output) -> None:
    if index.is_preprocessed:
        raise InputError(
            f"the log is preprocessed already, in format {index.format}. Use the raw log."
        )
    if not index.rows:
        raise InputError("the log has no rows to write")
    if storage.is_url(out):
        if output.format != "parquet":
            raise InputError(
                f"{out}: format {output.format} is written in place, which needs a file system. "
                "Set --out to a folder and copy it there, or choose --format parquet."
            )
        if output.shuffle != "none":
            raise InputError(
                f"{out}: a full shuffle needs a file system. Set --out to a folder and copy it "
                "there."
            )


def _sources(index: LogIndex) -> list[storage.File]:
    paths = list(dict.fromkeys(segment.path for segment in index.segments))
    if index.format == "random":
        # Each path has the log's rows and seed.
        return [storage.File(path, 0, 0) for path in paths]
    files = storage.find_files(paths)
    for path in paths:
        if path not in files:
            raise InputError(f"{path}: not found, but was present when the log was indexed")
    return [files[path] for path in paths]


def _identity(index: LogIndex, sources: Sequence[storage.File]) -> str:
    files = [[file.path, file.size_bytes, file.modified_ns] for file in sources]
    return json_hash([files, index.to_dict()])


def _check_disk(
    work: str, layout: Layout, preprocessor: Preprocessor, rows: int, output: Output
) -> None:
    """Check that the remaining output fits on the disk. Raises InputError."""
    # The Parquet size is unknown in advance. For Criteo it is a third of the plain size.
    needed = (
        sum(plan.size_bytes for plan in layout.all_plans) or rows * row_bytes(preprocessor) // 2
    )
    if output.shuffle == "full":
        needed += sum(task.rows for task in layout.shuffled) * (row_bytes(preprocessor) + 8)
    needed += preprocessor.tokens.nbytes
    for folder, _, names in os.walk(work):
        needed -= sum(os.stat(os.path.join(folder, name)).st_blocks * 512 for name in names)
    free = shutil.disk_usage(work).free
    if needed > free:
        raise InputError(
            f"{work}: about {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free. Free "
            "space or choose another --out."
        )


# Phases of the tasks. Each row has one place in the output, known before anything is written:
#
#   plain       write_rows      read, encode, write in place
#   shuffled    scatter_rows    read, encode, sort by shuffled position, write a run file
#               gather_rows     read a range of positions from all run files, write in place
def _run(
    running: ResumableJob,
    engine: Engine,
    job: Job,
    layout: Layout,
    finished: set[int],
    output: Output,
) -> Iterator[dict[str, Any]]:
    """Run the unfinished tasks and yield their results."""
    moved = layout.shuffled if output.shuffle == "full" else []
    numbers = {task.number for task in moved}
    pending = [task for task in layout.tasks if task.number not in finished]
    plain = [task for task in pending if task.number not in numbers]
    later = [task for task in pending if task.number in numbers]
    yield from running.run("write", functools.partial(write_rows, job=job), plain, engine)
    if not later:
        return
    rows = sum(task.rows for task in moved)
    scatter = functools.partial(
        scatter_rows, job=job, first_row=moved[0].first_row, rows=rows, seed=output.seed
    )
    for _ in running.run("scatter", scatter, moved, engine):
        pass
    gather = functools.partial(gather_rows, job=job, runs=[task.number for task in moved])
    yield from running.run("write", gather, later, engine)


MAX_SHUFFLE_TASKS = 1024
"""Maximum number of tasks in each phase of a full shuffle. Each gather task reads from all scatter
tasks.
"""
_ENDINGS = re.compile(r"\.(txt|tsv|csv|log)$")


@dataclass(frozen=True)
class Layout:
    """Output location of every row."""

    raw_files: list[str]
    """Paths of the log files, in epoch order."""
    file_rows: list[int]
    """Row count of each raw file."""
    plans: list[list[FilePlan]]
    """Output files of each raw file. Empty for parquet, whose files the tasks create."""
    tasks: list[Task]

    @property
    def all_plans(self) -> list[FilePlan]:
        return [plan for file_plans in self.plans for plan in file_plans]

    @property
    def shuffled(self) -> list[Task]:
        """Tasks whose rows a full shuffle moves."""
        return [task for task in self.tasks if task.set in ("train", "all")]

    def manifest(self, index: LogIndex) -> dict[str, Any]:
        """Return the manifest entries that readers need, with [file number, first row, end row, row
        count] of each segment.
        """
        number_of = {path: number for number, path in enumerate(self.raw_files)}
        done = [0] * len(self.raw_files)
        segments = []
        for segment in index.segments:
            number = number_of[segment.path]
            start = done[number]
            done[number] += segment.rows
            segments.append([number, start, done[number], segment.rows])
        return {
            "raw_files": [storage.name_of(path) for path in self.raw_files],
            "file_rows": self.file_rows,
            "matrices": [
                [list(vars(matrix).values()) for plan in plans for matrix in plan.matrices]
                for plans in self.plans
            ],
            "segments": segments,
        }


def lay_out(index: LogIndex, preprocessor: Preprocessor, output: Output) -> Layout:
    """Plan output files and tasks. Raises InputError if sets overlap or exceed the log."""
    rows_of: dict[str, int] = {}
    for segment in index.segments:
        rows_of[segment.path] = rows_of.get(segment.path, 0) + segment.rows
    rank = {source: number for number, source in enumerate(sources_in_order(rows_of))}
    raw_files = sorted(rows_of, key=lambda path: (rank[resolve_source(path)], path))
    file_rows = [rows_of[path] for path in raw_files]
    plans: list[list[FilePlan]] = []
    if output.format != "parquet":
        stems = _stems(raw_files)
        plans = [
            plan_files(output.format, preprocessor, stem, rows)
            for stem, rows in zip(stems, file_rows, strict=True)
        ]
    return Layout(raw_files, file_rows, plans, _tasks(index, raw_files, plans, output))


def _stems(paths: Sequence[str]) -> list[str]:
    """Return a unique output name prefix for each raw file: day_0, train, or with a number for
    duplicates.
    """
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
    """Return (set, first row, end row) in log order. Rows outside all sets belong to the set
    `other`.
    """
    if sets is None:
        return [("all", 0, rows)]
    ranges = []
    done = 0
    for name, (start, stop) in sorted(sets.items(), key=lambda item: item[1]):
        if start < done or stop > rows or start > stop:
            raise InputError(
                f"sets: rows {start}-{stop} of {name} overlap other sets or exceed the log of "
                f"{rows} rows"
            )
        if start > done:
            ranges.append(("other", done, start))
        if start < stop:
            ranges.append((name, start, stop))
        done = stop
    return [*ranges, ("other", done, rows)] if done < rows else ranges


def _tasks(
    index: LogIndex, raw_files: Sequence[str], plans: Sequence[Sequence[FilePlan]], output: Output
) -> list[Task]:
    number_of = {path: number for number, path in enumerate(raw_files)}
    matrices = [
        tuple(matrix for plan in file_plans for matrix in plan.matrices) for file_plans in plans
    ]
    first_rows: dict[str, int] = {}
    for segment in index.segments:
        first_rows.setdefault(segment.path, segment.first_row)
    tasks: list[Task] = []
    for name, start, stop in _ranges(output.sets, index.rows):
        parts = list(index.parts(start, stop))
        size = output.segments_per_task
        if output.shuffle == "full":
            size = max(size, -(-len(parts) // MAX_SHUFFLE_TASKS))
        for begin in range(0, len(parts), size):
            task_parts = tuple(parts[begin : begin + size])
            file_rows = tuple(
                (number_of[path], part.segment.first_row + part.start - first_rows[path])
                for part in task_parts
                for path in [part.segment.path]
            )
            file_matrices = {number: matrices[number] for number, _ in file_rows if matrices}
            tasks.append(Task(len(tasks), name, task_parts, file_rows, file_matrices))
    return tasks
