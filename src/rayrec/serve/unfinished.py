"""A folder that appears complete or not at all, and whose making goes on where a killed process left it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from rayrec import storage
from rayrec.config import InputError

JOB = "_job.json"
"""What the folder is being made of; of a folder at a URL it also says that it is not complete."""
COMPLETE = "_SUCCESS"
"""The last file of a folder at a URL, for its readers; it names the others."""
_LOCK = "_lock"


@dataclass
class Unfinished:
    """The folder while it is made."""

    folder: str
    """To write to: OUT.partial, local or a URL."""
    files: list[str] = field(default_factory=list)
    """Names of the files that OUT shall have; set by who makes it, once they are there."""


@contextmanager
def unfinished(out: str, made_of: dict[str, Any]) -> Iterator[Unfinished]:
    """On leaving it without an error, the folder is at `out` with the files that were named. After an error it stays at
    OUT.partial, to be gone on with by whoever asks for the same, unless it holds nothing yet.

    At a URL, where no folder can be renamed, its files are copied one after the other, and COMPLETE comes last; a process killed
    meanwhile leaves some, and whoever asks for the same adds the rest. Raises InputError where `out` exists, is being made right
    now, or was begun of something else than `made_of` (plain JSON values), or nobody knows of what.
    """
    out = storage.absolute(out).rstrip("/")
    work = Unfinished(f"{out}.partial")
    job = storage.join(work.folder, JOB)
    if storage.exists(out) and not (storage.is_url(out) and storage.exists(job)):
        raise InputError(f"{out}: exists already; remove it or choose another place")
    with ExitStack() as locked:
        if not storage.is_url(out):
            os.makedirs(work.folder, exist_ok=True)
            locked.enter_context(_locked(work.folder))
        _begin(work.folder, job, made_of)
        try:
            yield work
        except BaseException:
            if not _begun(work.folder):
                storage.remove_folder(work.folder)
            raise
        _finish(work, out)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    with open(os.path.join(folder, _LOCK), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the system however the process ends
        except BlockingIOError:
            raise InputError(
                f"{folder}: another process is writing there; wait for it or choose another place"
            ) from None
        yield


def _begin(folder: str, job: str, made_of: dict[str, Any]) -> None:
    if _begun(folder):
        if not storage.exists(job):
            raise InputError(
                f"{folder}: holds files, but no {JOB} that says of what they were made; remove that folder"
            )
        before = storage.read_json(job)
        others = [name for name, value in made_of.items() if before.get(name) != value]
        if others:
            raise InputError(
                f"{folder}: left by an unfinished call with another {', '.join(others)}; give the same to go on with it, or "
                "remove that folder to start over"
            )
        return
    storage.write_json(job, made_of)


def _begun(folder: str) -> bool:
    """Whether anything was made."""
    if storage.is_url(folder):
        return any(name not in (JOB, _LOCK) for name in storage.list_folder(folder))
    names = [
        name for name in os.listdir(folder) if not name.startswith((JOB, _LOCK))
    ]  # a JOB being written has a longer name
    return any(os.path.getsize(os.path.join(folder, name)) for name in names)


def _finish(work: Unfinished, out: str) -> None:
    if storage.is_url(out):
        for name in work.files:
            storage.copy_file(storage.join(work.folder, name), storage.join(out, name))
        storage.write_json(storage.join(out, COMPLETE), {"files": work.files})
        storage.remove_file(storage.join(work.folder, JOB))  # first: from now on nobody goes on with it
        storage.remove_folder(work.folder)
        return
    for name in set(os.listdir(work.folder)) - {*work.files, JOB, _LOCK}:
        os.remove(os.path.join(work.folder, name))
    os.rename(work.folder, out)
    storage.sync(os.path.dirname(out))
    for name in (JOB, _LOCK):  # last: until the folder appeared, whoever is killed can go on
        os.remove(os.path.join(out, name))
