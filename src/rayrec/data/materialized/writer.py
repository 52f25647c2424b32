"""Writes a click log in a preprocessed format: tasks encode some segments each and write their rows where they belong.

Everything is made in OUT.partial (for a URL, below OUT itself) and marked task by task, so that an interrupted job resumes
where it stopped; dataset.json is written last, then the folder gets its name.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import posixpath
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa
from pyarrow import fs as arrow_fs

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import Preprocessor, share_preprocessor
from rayrec.data.engine import Engine, StreamEngine
from rayrec.data.logs.index import LogIndex
from rayrec.data.materialized.dataset import MANIFEST, VERSION, hash_of, write_manifest
from rayrec.data.materialized.files import FORMATS, create_files, finish_files, row_bytes
from rayrec.data.materialized.formats import check
from rayrec.data.materialized.plan import Layout, lay_out
from rayrec.data.materialized.shuffle import run_path
from rayrec.data.materialized.write_tasks import JOB, Job, Task, disk_errors, gather_rows, scatter_rows, write_rows

Marker = dict[str, Any]
"""What a task says it has written."""


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
    layout = lay_out(
        index,
        preprocessor=preprocessor,
        format=format,
        sets=sets,
        segments_per_task=segments_per_task,
        shuffle=shuffle,
    )
    sources = _sources(index)
    settings = {
        "version": VERSION,
        "format": format,
        "preprocessor": preprocessor.hash(),
        "sets": {name: list(rows) for name, rows in (sets or {}).items()},
        "labelled": labelled,
        "shuffle": shuffle,
        "seed": seed if shuffle == "full" else None,
    }
    made_of = {**settings, "log": _identity(index, sources), "segments_per_task": segments_per_task}
    going_on = goes_on(work, made_of)
    if work != out:
        _check_disk(work, layout, preprocessor, index.rows, shuffle)
    if not going_on:
        _begin(work, layout, preprocessor, made_of)
    schema = preprocessor.schema if labelled else preprocessor.schema.unlabelled()
    job = Job(work, format, schema, _shared(preprocessor, engine, work))
    markers = _finished(job, layout.tasks)
    done = before = sum(marker["rows"] for marker in markers.values())
    if going_on:
        note(f"{work}: going on, {done:,} of {index.rows:,} rows were done")
    for marker in _run(engine, job, layout, set(markers), shuffle, seed):
        markers[marker["number"]] = marker
        done += marker["rows"]
        progress(done)
    description = {
        **settings,
        "preset": preprocessor.preset,
        "schema": preprocessor.schema.to_dict(),
        "rows": index.rows,
        "source": [{"path": file.path, "bytes": file.size_bytes} for file in sources],
        "faults": index.faults.to_dict(),
        **layout.manifest(index),
    }
    files = _finish(work, out, layout, [markers[task.number] for task in layout.tasks], description)
    seconds = time.perf_counter() - begun
    return {
        "rows": index.rows,
        "out": out,
        "format": format,
        "hash": hash_of(files),
        "bytes": sum(file["bytes"] for file in files),
        "seconds": seconds,
        "rows_per_s": (index.rows - before) / seconds,
    }


def _check_target(index: LogIndex, out: str, format: str, shuffle: str) -> None:
    if index.format in FORMATS:
        raise InputError(f"the log is preprocessed already, in format {index.format}; give the raw log")
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


def _sources(index: LogIndex) -> list[storage.File]:
    paths = list(dict.fromkeys(segment.path for segment in index.segments))
    found = storage.find_files(paths)
    for path in paths:
        if path not in found:
            raise InputError(f"{path}: no such file; it was there when the log was indexed")
    return [found[path] for path in paths]


def _identity(index: LogIndex, sources: Sequence[storage.File]) -> str:
    files = [[file.path, file.size_bytes, file.modified_ns] for file in sources]
    return hashlib.sha256(json.dumps([files, index.to_dict()], sort_keys=True).encode()).hexdigest()[:16]


def goes_on(work: str, made_of: dict[str, Any]) -> bool:
    """Whether the folder was begun with the same inputs. Raises InputError where they were others."""
    path = storage.join(work, JOB)
    if not storage.exists(path):
        return False
    begun = storage.read_json(path)
    others = [name for name, value in made_of.items() if begun.get(name) != value]
    if others:
        raise InputError(
            f"{work}: left by an unfinished call with another {', '.join(others)}; give the same inputs to go on with it, "
            "or remove that folder to start over"
        )
    return True


def _check_disk(work: str, layout: Layout, preprocessor: Preprocessor, rows: int, shuffle: str) -> None:
    """Raises InputError where the disk has less room than what is still to be written takes."""
    # Parquet's size is not known before; Criteo's is a third of the plain one.
    needed = sum(plan.size_bytes for plan in layout.all_plans) or rows * row_bytes(preprocessor) // 2
    if shuffle == "full":
        needed += sum(task.rows for task in layout.shuffled) * (row_bytes(preprocessor) + 8)
    needed += preprocessor.tokens.nbytes
    for folder, _, names in os.walk(work):
        needed -= sum(os.stat(os.path.join(folder, name)).st_blocks * 512 for name in names)
    parent = os.path.dirname(work)
    os.makedirs(parent, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise InputError(
            f"{work}: about {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free there; make room or choose "
            "another --out"
        )


def _begin(work: str, layout: Layout, preprocessor: Preprocessor, made_of: dict[str, Any]) -> None:
    """The files of the layout, the Preprocessor, and last what all is being made of."""
    folders = [] if layout.plans else sorted({f"set={name}" for name, _, _ in layout.ranges})
    with disk_errors(work):
        for name in ("preprocessor", "done", *folders):
            storage.make_folder(storage.join(work, name))
        create_files(work, layout.all_plans)
        preprocessor.save(storage.join(work, "preprocessor"))
        storage.write_json(storage.join(work, JOB), made_of)


def _shared(preprocessor: Preprocessor, engine: Engine, work: str) -> Any:
    """The Preprocessor as tasks get it: shared by the engine, else (Spark's) from the folder it is saved in."""
    if isinstance(engine, StreamEngine):
        return share_preprocessor(preprocessor, engine)
    return storage.join(work, "preprocessor")


def _finished(job: Job, tasks: Sequence[Task]) -> dict[int, Marker]:
    filesystem, inner = storage.resolve(storage.join(job.folder, "done"))
    selector = arrow_fs.FileSelector(inner, allow_not_found=True)
    there = {info.base_name for info in filesystem.get_file_info(selector)}
    return {
        task.number: storage.read_json(job.marker(task))
        for task in tasks
        if posixpath.basename(job.marker(task)) in there
    }


def _run(engine: Engine, job: Job, layout: Layout, finished: set[int], shuffle: str, seed: int) -> Iterator[Marker]:
    """The markers of the tasks that are not finished, as they are."""
    moved = layout.shuffled if shuffle == "full" else []
    numbers = {task.number for task in moved}
    pending = [task for task in layout.tasks if task.number not in finished]
    plain = [task for task in pending if task.number not in numbers]
    yield from _markers(engine.run("preprocess", functools.partial(write_rows, job=job), plain, block_bytes=1 << 16))
    later = [task for task in pending if task.number in numbers]
    if not later:
        return
    storage.make_folder(job.runs)
    rows = sum(task.rows for task in moved)
    scatter = functools.partial(scatter_rows, job=job, first_row=moved[0].first_row, rows=rows, seed=seed)
    missing = [task for task in moved if not storage.exists(run_path(job.runs, task.number))]
    for _ in engine.run("shuffle", scatter, missing, block_bytes=1 << 16):
        pass
    gather = functools.partial(gather_rows, job=job, runs=[task.number for task in moved])
    yield from _markers(engine.run("preprocess", gather, later, block_bytes=1 << 16))


def _markers(tables: Iterable[pa.Table]) -> Iterator[Marker]:
    for table in tables:
        for text in table.column("marker").to_pylist():
            yield json.loads(text)


def _finish(
    work: str, out: str, layout: Layout, markers: Sequence[Marker], description: dict[str, Any]
) -> list[dict[str, Any]]:
    """The manifest, then the folder's name; returns [{name, bytes, crc32}] of its files."""
    if layout.plans:
        written = [tuple(stretch) for marker in markers for stretch in marker["ranges"]]
        files = finish_files(work, layout.all_plans, written)
    else:
        files = [marker["file"] for marker in markers]
    parquet = [marker["parquet"] for marker in markers if "parquet" in marker]
    write_manifest(work, {**description, "hash": hash_of(files), "files": files, "parquet": parquet})
    if work != out:
        os.rename(work, out)
    for name in ("done", "shuffle"):
        storage.remove_folder(storage.join(out, name))
    filesystem, inner = storage.resolve(storage.join(out, JOB))
    filesystem.delete_file(inner)
    return files
