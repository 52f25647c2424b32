"""Folders with lists: given ones, and those in the cache, which are built from events once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.engine import TaskContext
from rayrec.data.sequences.build import MANIFEST, VERSION, EventsLog, build
from rayrec.schema import Schema
from rayrec.storage.cache import remove_older, version_key

Rows = Literal["log", "histories"]
"""Subfolder: rows to train on and to evaluate, or the whole list of every user."""


def find_lists(path: str, rows: Rows = "log") -> str | None:
    """Return the folder of the rows if lists were built at `path`, or above it. None for others."""
    if storage.exists(storage.join(path, MANIFEST)):
        return storage.join(path, rows)
    parent = storage.parent_folder(path.rstrip("/"))
    is_part = storage.name_of(path.rstrip("/")) in ("log", "histories")
    return path if is_part and storage.exists(storage.join(parent, MANIFEST)) else None


def check_lists(folder: str, schema: Schema) -> None:
    """Check that lists were built as the schema says. Raises InputError."""
    assert schema.sequence is not None
    assert schema.split is not None
    manifest = storage.read_json(storage.join(storage.parent_folder(folder), MANIFEST))
    settings = {"sequence": schema.sequence.built(), "split": schema.split.to_dict()}
    for name, current in settings.items():
        differing = [key for key in current if current[key] != manifest[name].get(key)]
        for key in differing:
            raise InputError(
                f"{folder}: {name}.{key} of the schema must match {manifest[name].get(key)}, with "
                f"which the lists were built, got {current[key]}. Change it, or give the events"
            )
    if schema.aged and manifest["version"] != VERSION:
        raise InputError(
            f"{folder}: the lists have ages of an earlier version. Build them again, or set "
            "--workload.model.times false"
        )


# Two runs may start with one log at once: the second waits until the first has built the lists. The
# system releases a lock however its process ends, and the job of a killed process is resumed.
def cached_lists(log: EventsLog, context: TaskContext) -> str:
    """Return the folder of the lists of a log in the cache, built unless they are there. Raises
    InputError for an unusable log, and a part without lists.
    """
    root = _root(log, context)
    inputs = log.job_inputs()
    names = tuple(file.path for file in log.files)
    # Complete lists of another job_version are as good
    versions = ("log", "version", "job_version")
    form = {name: value for name, value in inputs.items() if name not in versions}
    key = version_key((names, storage.json_text(form)), (inputs["version"], inputs["log"]))
    folder = storage.join(root, key)
    storage.make_folder(root)
    lock = nullcontext() if storage.is_url(root) else storage.locked(f"{folder}.lock")
    with lock:
        if not storage.exists(storage.join(folder, MANIFEST)):
            context.note(f"Building lists of {log.path} in {folder} (once)")
            build(
                log,
                out=folder,
                context=context,
            )
            remove_older(root, [key])
    _check_faults(storage.read_json(storage.join(folder, MANIFEST)), log)
    return folder


def _root(log: EventsLog, context: TaskContext) -> str:
    """Return the folder of cached lists: beside rows in memory, which are written to the cache for
    one call, so that both are removed together.
    """
    assert context.cache_folder is not None
    cache = storage.absolute(context.cache_folder)
    folder = storage.parent_folder(log.files[0].path) if log.files else cache
    if storage.absolute(folder).startswith(f"{cache}/"):
        return storage.join(storage.absolute(folder), ".sequences")
    return storage.join(cache, "sequences")


def _check_faults(manifest: dict[str, Any], log: EventsLog) -> None:
    """Check the invalid events of lists that may have been built with another limit. Raises
    InputError.
    """
    bad_rows = manifest["bad_rows"]
    if bad_rows > log.max_bad_fraction * (manifest["events"] + bad_rows):
        raise InputError(
            f"{log.path}: {bad_rows:,} events are invalid, more than max_bad_fraction "
            f"{log.max_bad_fraction:.2%}. Fix the log or raise --max-bad-fraction"
        )
