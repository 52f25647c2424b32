"""Writes a click log in a ready-made format: tasks encode some segments each and write their rows where they belong.

Everything is made in OUT.partial (for a URL, below OUT itself) and marked task by task, so that what was interrupted goes on
where it stopped; dataset.json comes last, then the folder gets its name.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import posixpath
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from pyarrow import fs as arrow_fs

from rayrec import storage
from rayrec.config import InputError
from rayrec.data import shuffle as shuffling
from rayrec.data.engine import Engine
from rayrec.data.ingest import read_raw, share_preprocessor
from rayrec.data.log import LogIndex, select
from rayrec.data.position import Part
from rayrec.data.preprocessor import Preprocessor, file_key
from rayrec.data.ray_tasks import RayEngine
from rayrec.data.ready import MANIFEST, VERSION, file_checksum
from rayrec.data.ready_formats import (
    FORMATS,
    FilePlan,
    Matrix,
    archive_records,
    check,
    combine,
    matrix_of,
    plan_files,
    row_bytes,
    stored,
)
from rayrec.native import keep_freed_memory
from rayrec.schema import Schema

JOB = "job.json"
_MOST_SHUFFLE_TASKS = 1024
"""Of a full shuffle: each of its second half reads from all of its first."""
_UNPACKED = re.compile(r"^[0-9a-f]{16}-")  # what log.unpack puts before a name
_ENDINGS = re.compile(r"\.(txt|tsv|csv|log)$")


def preprocess(
    index: LogIndex,
    *,
    preprocessor: Preprocessor,
    out: str,
    format: str,
    engine: Engine,
    sets: dict[str, tuple[int, int]] | None = None,
    segments_per_task: int = 8,
    shuffle: Literal["none", "full"] = "none",
    seed: int = 0,
    labelled: bool = True,
    progress: Callable[[int], None] = lambda rows: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Writes the log of `index` to the new folder `out` and returns rows, out, format, hash, bytes, seconds and rows_per_s.

    `sets`: row ranges, as a Split gives them; parquet keeps them in folders, and shuffle `full` puts the rows of `train`
    (without sets, all rows) in a random order given by `seed`, those of the others staying where they are. `progress` gets
    the rows done so far. The bytes do not depend on who ran the tasks, nor on interruptions.
    Raises InputError where the format cannot hold the log, `out` exists, an unfinished run there had other inputs, or the
    disk is too small.
    """
    begun = time.perf_counter()
    out = storage.absolute(out).rstrip("/")
    _check_target(index, out, format, shuffle)
    check(format, preprocessor, labelled=labelled)
    work = out if storage.is_url(out) else f"{out}.partial"
    raw_files, file_rows = _raw_files(index)
    plans = {n: plan_files(format, preprocessor, stem, file_rows[n]) for n, stem in enumerate(_stems(raw_files))}
    if format == "parquet":
        plans = {}
    ranges = _ranges(sets, index.rows)
    tasks = _tasks(index, raw_files, plans, ranges, segments_per_task, shuffle)
    made_of = {
        "version": VERSION,
        "format": format,
        "preprocessor": preprocessor.hash(),
        "log": _log_identity(index),
        "sets": {name: list(rows) for name, rows in (sets or {}).items()},
        "labelled": labelled,
        "segments_per_task": segments_per_task,
        "shuffle": shuffle,
        "seed": seed if shuffle == "full" else None,
    }
    all_plans = [plan for of_file in plans.values() for plan in of_file]
    going_on = _goes_on(work, made_of)
    _check_disk(work, out, all_plans, preprocessor, index.rows, shuffle)
    if not going_on:
        folders = sorted({f"set={name}" for name, _, _ in ranges}) if format == "parquet" else []
        _begin(work, all_plans, folders, preprocessor, made_of)
    with_preprocessor = (
        share_preprocessor(preprocessor) if isinstance(engine, RayEngine) else storage.join(work, "preprocessor")
    )
    schema = preprocessor.schema if labelled else preprocessor.schema.unlabelled()
    job = Job(work, format, schema, with_preprocessor)
    markers = _finished(job, tasks)
    if going_on:
        done = sum(markers[task.number]["rows"] for task in tasks if task.number in markers)
        note(f"{work}: going on, {done:,} of {index.rows:,} rows were done")
    rows_before = sum(marker["rows"] for marker in markers.values())
    for marker in _run(engine, job, [task for task in tasks if task.number not in markers], tasks, shuffle, seed):
        markers[marker["number"]] = marker
        progress(sum(each["rows"] for each in markers.values()))
    files = _finish_files(work, all_plans, [markers[task.number] for task in tasks])
    manifest = {
        **{name: value for name, value in made_of.items() if name not in ("log", "segments_per_task")},
        "profile": preprocessor.profile,
        "schema": preprocessor.schema.to_dict(),
        "hash": hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16],
        "rows": index.rows,
        "raw_files": [posixpath.basename(path) for path in raw_files],
        "file_rows": file_rows,
        "segments": _segments(index, raw_files),
        "source": _source(index),
        "faults": {"counts": index.faults.counts, "first": [vars(fault) for fault in index.faults.first]},
        "files": files,
        "matrices": [[list(vars(m).values()) for plan in plans[n] for m in plan.matrices] for n in sorted(plans)],
        "parquet": [m["parquet"] for m in (markers[task.number] for task in tasks) if "parquet" in m],
    }
    storage.write_json(storage.join(work, MANIFEST), manifest)
    if work != out:
        os.rename(work, out)
    for name in ("done", "shuffle"):
        storage.remove_folder(storage.join(out, name))
    filesystem, inner = storage.resolve(storage.join(out, JOB))
    filesystem.delete_file(inner)
    seconds = time.perf_counter() - begun
    return {
        "rows": index.rows,
        "out": out,
        "format": format,
        "hash": manifest["hash"],
        "bytes": sum(file["bytes"] for file in files),
        "seconds": seconds,
        "rows_per_s": (index.rows - rows_before) / seconds,
    }


def _check_target(index: LogIndex, out: str, format: str, shuffle: str) -> None:
    if index.format in FORMATS:
        raise InputError(f"the log is ready-made already, in format {index.format}; give the raw log")
    if not index.rows:
        raise InputError("the log has no rows to write; give one that has")
    if storage.is_url(out):
        if format != "parquet":
            raise InputError(
                f"{out}: format {format} is written at any row, which only a file system can do; give --out a folder and copy "
                "it there, or choose --format parquet"
            )
        if shuffle != "none":
            raise InputError(
                f"{out}: a full shuffle needs a file system to shuffle in; give --out a folder and copy it there"
            )
        if storage.exists(storage.join(out, MANIFEST)):
            raise InputError(f"{out}: exists already; remove it or choose another place")
    elif storage.exists(out):
        raise InputError(f"{out}: exists already; remove it or choose another place")


def _raw_files(index: LogIndex) -> tuple[list[str], list[int]]:
    """Paths of the log's files, sorted as `position` sorts them, and the rows of each."""
    rows: dict[str, int] = {}
    for segment in index.segments:
        rows[segment.path] = rows.get(segment.path, 0) + segment.rows
    paths = sorted(rows)
    return paths, [rows[path] for path in paths]


def _stems(paths: Sequence[str]) -> list[str]:
    """What the names of a raw file's ready-made files begin with: day_0, train; with a number where two are alike."""
    stems: list[str] = []
    for path in paths:
        stem = first = _ENDINGS.sub("", _UNPACKED.sub("", file_key(path))) or "log"
        number = 1
        while stem in stems:
            number += 1
            stem = f"{first}-{number}"
        stems.append(stem)
    return stems


def _ranges(sets: dict[str, tuple[int, int]] | None, rows: int) -> list[tuple[str, int, int]]:
    """(set, first row, row behind the last) in the order of the log; rows of no set are of the set `other`."""
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


def _tasks(
    index: LogIndex,
    raw_files: Sequence[str],
    plans: dict[int, list[FilePlan]],
    ranges: Sequence[tuple[str, int, int]],
    segments_per_task: int,
    shuffle: str,
) -> list[Task]:
    number_of = {path: number for number, path in enumerate(raw_files)}
    first_rows: dict[str, int] = {}
    for segment in index.segments:
        first_rows.setdefault(segment.path, segment.first_row)
    tasks: list[Task] = []
    for name, start, stop in ranges:
        parts = [Part(*part) for part in select(index, start, stop)]
        size = segments_per_task
        if shuffle == "full" and name in ("train", "all"):
            size = max(size, -(-len(parts) // _MOST_SHUFFLE_TASKS))
        for begin in range(0, len(parts), size):
            chosen = tuple(parts[begin : begin + size])
            places = tuple(
                (number_of[path], part.segment.first_row + part.start - first_rows[path])
                for part in chosen
                for path in (part.segment.path,)
            )
            matrices = {
                number: tuple(matrix for plan in plans[number] for matrix in plan.matrices)
                for number, _ in places
                if plans
            }
            tasks.append(Task(len(tasks), name, chosen, places, matrices))
    return tasks


def _segments(index: LogIndex, raw_files: Sequence[str]) -> list[list[int]]:
    """[file number, first row in the file, row behind the last, rows] of each segment."""
    number_of = {path: number for number, path in enumerate(raw_files)}
    done = [0] * len(raw_files)
    segments = []
    for segment in index.segments:
        number = number_of[segment.path]
        start = done[number]
        done[number] += segment.rows
        segments.append([number, start, done[number], segment.rows])
    return segments


def _source_files(index: LogIndex) -> list[storage.File]:
    return [storage.list_files(path)[0] for path in dict.fromkeys(segment.path for segment in index.segments)]


def _source(index: LogIndex) -> list[dict[str, Any]]:
    return [{"path": file.path, "bytes": file.size_bytes} for file in _source_files(index)]


def _log_identity(index: LogIndex) -> str:
    files = [[file.path, file.size_bytes, file.modified_ns] for file in _source_files(index)]
    return hashlib.sha256(json.dumps([files, index.to_dict()], sort_keys=True).encode()).hexdigest()[:16]


def _goes_on(work: str, made_of: dict[str, Any]) -> bool:
    """Whether the folder was begun with the same inputs. Raises InputError where they were others."""
    path = storage.join(work, JOB)
    if not storage.exists(path):
        return False
    begun = storage.read_json(path)
    others = [name for name, value in made_of.items() if begun.get(name) != value]
    if others:
        raise InputError(
            f"{work}: left by an unfinished preprocess with another {', '.join(others)}; give the same inputs to go on with it, "
            "or remove that folder to start over"
        )
    return True


def _check_disk(
    work: str, out: str, plans: Sequence[FilePlan], preprocessor: Preprocessor, rows: int, shuffle: str
) -> None:
    if storage.is_url(out):
        return
    # Parquet's size is not known before; Criteo's takes half of the plain one.
    needed = sum(plan.size_bytes for plan in plans) or rows * row_bytes(preprocessor) // 2
    if shuffle == "full":
        needed += rows * (row_bytes(preprocessor) + 8)
    needed += preprocessor.tokens.nbytes
    there = 0
    for folder, _, names in os.walk(work):
        there += sum(os.stat(os.path.join(folder, name)).st_blocks * 512 for name in names)
    parent = os.path.dirname(out)
    os.makedirs(parent, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if needed - there > free:
        raise InputError(
            f"{out}: about {(needed - there) / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free there; make room or "
            "choose another --out"
        )


def _begin(
    work: str, plans: Sequence[FilePlan], folders: Sequence[str], preprocessor: Preprocessor, made_of: dict[str, Any]
) -> None:
    """Files at their full size without their rows (which take no room yet), the Preprocessor, and what all is made of."""
    with disk_errors(work):
        for name in ("preprocessor", "done", *folders):
            storage.make_folder(storage.join(work, name))
        for plan in plans:
            with open(storage.join(work, plan.name), "wb") as file:
                file.truncate(plan.size_bytes)
                for start, data in plan.headers:
                    file.seek(start)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
        preprocessor.save(storage.join(work, "preprocessor"))
        storage.write_json(storage.join(work, JOB), made_of)


def _finished(job: Job, tasks: Sequence[Task]) -> dict[int, dict[str, Any]]:
    filesystem, inner = storage.resolve(storage.join(job.folder, "done"))
    selector = arrow_fs.FileSelector(inner, allow_not_found=True)
    there = {info.base_name for info in filesystem.get_file_info(selector)}
    return {
        task.number: storage.read_json(job.marker(task))
        for task in tasks
        if posixpath.basename(job.marker(task)) in there
    }


def _run(
    engine: Engine, job: Job, pending: Sequence[Task], tasks: Sequence[Task], shuffle: str, seed: int
) -> Iterator[dict[str, Any]]:
    """The markers of the pending tasks as they are done."""
    shuffled = [task for task in tasks if shuffle == "full" and task.set in ("train", "all")]
    numbers = {task.number for task in shuffled}
    plain = [task for task in pending if task.number not in numbers]
    yield from _markers(engine.run("preprocess", functools.partial(write_rows, job=job), plain, block_bytes=1 << 16))
    later = [task for task in pending if task.number in numbers]
    if not later:
        return
    storage.make_folder(job.runs)
    rows = sum(task.rows for task in shuffled)
    scatter = functools.partial(scatter_rows, job=job, first_row=shuffled[0].first_row, rows=rows, seed=seed)
    missing = [task for task in shuffled if not storage.exists(shuffling.run_path(job.runs, task.number))]
    for _ in engine.run("shuffle", scatter, missing, block_bytes=1 << 16):
        pass
    gather = functools.partial(gather_rows, job=job, runs=[task.number for task in shuffled])
    yield from _markers(engine.run("preprocess", gather, later, block_bytes=1 << 16))


def _markers(tables: Iterable[pa.Table]) -> Iterator[dict[str, Any]]:
    for table in tables:
        for text in table.column("marker").to_pylist():
            yield json.loads(text)


def _finish_files(work: str, plans: Sequence[FilePlan], markers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """[{name, bytes, crc32}]: the checksum of a file is put together from those of its rows as they were written, so that
    nothing is read again."""
    if not plans:
        return [marker["file"] for marker in markers]
    of_file: dict[str, list[tuple[int, int, int]]] = {}
    for marker in markers:
        for name, start, length, checksum in marker["ranges"]:
            of_file.setdefault(name, []).append((start, length, checksum))
    files = []
    for plan in plans:
        ranges = sorted(of_file.get(plan.name, []))
        with open(storage.join(work, plan.name), "r+b") as file:
            if plan.archive:
                for start, data in archive_records(plan, _matrix_checksums(plan, ranges)):
                    file.seek(start)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            checksum = done = 0
            for start, length, of_range in [*ranges, (plan.size_bytes, 0, 0)]:
                file.seek(done)
                checksum = zlib.crc32(file.read(start - done), checksum)
                checksum = combine(checksum, of_range, length) if length else checksum
                done = start + length
            assert os.fstat(file.fileno()).st_size == done
        files.append({"name": plan.name, "bytes": plan.size_bytes, "crc32": f"{checksum:08x}"})
    return files


def _matrix_checksums(plan: FilePlan, ranges: Sequence[tuple[int, int, int]]) -> dict[str, int]:
    checksums = {}
    for matrix in plan.matrices:
        checksum, at, stop = 0, matrix.offset, matrix.offset + plan.rows * matrix.row_bytes
        for start, length, of_range in ranges:
            if length and matrix.offset <= start < stop:
                assert start == at
                checksum = combine(checksum, of_range, length)
                at += length
        assert at == stop
        checksums[matrix.name] = checksum
    return checksums
