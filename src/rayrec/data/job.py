"""A folder that appears complete or not at all, made by tasks; a killed process resumes it.

It is made in OUT.partial, with all that goes when it is done below `_job` in it: what the folder is being made of, a lock, a
marker of each task that is done, and what tasks hand to later ones. Then it gets its name. At a URL, where no folder can be
renamed, it is made below OUT itself if one of its files, written last, says that it is complete, else copied from OUT.partial.
"""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, final

import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.arrow import json_of, json_reply
from rayrec.data.engine import Engine
from rayrec.storage.files import PARTIAL

_logger = logging.getLogger(__name__)

COMPLETE: Final = "_SUCCESS"
"""The last file of a folder that was copied to a URL, for its readers; it names the others."""
_AIDS: Final = "_job"
_MADE_OF: Final = "made_of.json"
_LOCK: Final = "lock"
_REMOVALS: Final = 20
_REMOVAL_WAIT_S: Final = 0.1


class Numbered(Protocol):
    """What a task is given: its number names its marker."""

    @property
    def number(self) -> int: ...


_Item = TypeVar("_Item", bound=Numbered)


@dataclass(frozen=True)
class JobFolder:
    """The folder while it is made; picklable, for tasks."""

    path: str
    """Local or a URL."""

    def aid(self, *names: str) -> str:
        """Path of a file or folder that is removed when the folder is done."""
        return storage.join(self.path, _AIDS, *names)

    def require(self) -> None:
        """Raises InputError for a task that does not see the folder."""
        if not storage.exists(self.aid(_MADE_OF)):
            raise InputError(
                f"{self.path}: not visible from a data task on {os.uname().nodename}; give an --out that all nodes share"
            )

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """A full disk as the one line that helps."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise InputError(f"{self.path}: {error.strerror}; make room there and give the same command again to go on") from None

    def done(self, kind: str, number: int, found: dict[str, Any]) -> pa.Table:
        """Marks a task as done; returns what it found, a small JSON value, as its result."""
        with self.disk_errors():
            storage.write_json(self.aid("done", _marker(kind, number)), found)
        return json_reply(found)

    def is_begun(self) -> bool:
        """Whether a task is done."""
        return bool(storage.list_folder(self.aid("done")))


def _marker(kind: str, number: int) -> str:
    return f"{kind}-{number:06d}.json"


@final
@dataclass(frozen=True)
class ResumableJob:
    """What makes the folder."""

    folder: JobFolder
    resumed: bool
    """Whether an earlier call did some of its tasks; then it had also written what is there before tasks run."""

    def finished(self, kind: str, items: Sequence[_Item]) -> dict[int, dict[str, Any]]:
        """What tasks of these items found that are done, by the items' numbers."""
        there = set(storage.list_folder(self.folder.aid("done"))) if self.resumed else set()
        return {
            item.number: storage.read_json(self.folder.aid("done", name))
            for item in items
            if (name := _marker(kind, item.number)) in there
        }

    def run(
        self,
        kind: str,
        task: Callable[[_Item], pa.Table],
        items: Sequence[_Item],
        engine: Engine,
        progress: Callable[[int, int], None] = lambda done, items: None,
    ) -> Iterator[dict[str, Any]]:
        """What the task, which ends with `JobFolder.done`, found of each item, in their order; what is done is not done
        again. `progress` gets items done and all."""
        found = self.finished(kind, items)
        made = engine.run(kind, task, [item for item in items if item.number not in found], block_bytes=1 << 16)
        for done, item in enumerate(items, start=1):
            yield found[item.number] if item.number in found else json_of(next(made))
            progress(done, len(items))


@contextmanager
def resumable_job(out: str, made_of: dict[str, Any], *, last_file: str | None) -> Iterator[ResumableJob]:
    """On leaving it without an error, the folder is at `out`. After an error it stays, so that the same call resumes it,
    unless no task is done.

    `last_file`: name of the file that the job writes last; None: no file of the folder says that it is complete, so that at a
    URL its files are copied one after the other, and COMPLETE comes last. Raises InputError where `out` exists, is being made
    right now, or was begun of something else than `made_of` (plain JSON values), or nobody knows of what.
    """
    out = storage.absolute(out).rstrip("/")
    is_url, in_place = storage.is_url(out), storage.is_url(out) and last_file is not None
    folder = JobFolder(out if in_place else f"{out}.partial")
    taken = storage.exists(storage.join(out, last_file) if in_place and last_file else out)
    if taken and not (is_url and not in_place and storage.exists(folder.aid(_MADE_OF))):
        raise InputError(f"{out}: exists already; remove it or choose another place")
    with ExitStack() as locked:
        if not is_url:
            with folder.disk_errors():
                os.makedirs(folder.aid(), exist_ok=True)
            locked.enter_context(_locked(folder))
        resumed = _begin(folder, made_of)
        try:
            yield ResumableJob(folder, resumed)
        except BaseException:
            if not folder.is_begun():
                _remove(folder.path)
            raise
        _finish(folder, out)


def _remove(path: str) -> None:
    """Remove a folder to which tasks that are still ending may write. What cannot be removed is left, with a warning."""
    for _ in range(_REMOVALS):
        try:
            storage.remove_folder(path)
        except OSError as error:
            refused = error
            time.sleep(_REMOVAL_WAIT_S)
        else:
            return
    _logger.warning("%s: cannot be removed (%s); remove it", path, refused)


@contextmanager
def _locked(folder: JobFolder) -> Iterator[None]:
    with open(folder.aid(_LOCK), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the system however the process ends
        except BlockingIOError:
            raise InputError(f"{folder.path}: another process is writing there; wait for it or choose another place") from None
        yield


def _begin(folder: JobFolder, made_of: dict[str, Any]) -> bool:
    """Whether the folder was begun of the same; else it is empty then, but for what it is made of."""
    known = storage.exists(folder.aid(_MADE_OF))
    if not known and set(storage.list_folder(folder.path)) - {_AIDS}:
        raise InputError(
            f"{folder.path}: holds files, but no {_AIDS}/{_MADE_OF} that says of what they were made; remove that folder"
        )
    if known and folder.is_begun():
        before = storage.read_json(folder.aid(_MADE_OF))
        others = [name for name, value in made_of.items() if before.get(name) != value]
        if others:
            raise InputError(
                f"{folder.path}: left by an unfinished call with another {', '.join(others)}; give the same to go on with "
                "it, or remove that folder to start over"
            )
        return True
    for place, kept in ((folder.path, _AIDS), (folder.aid(), _LOCK)):
        for name in set(storage.list_folder(place)) - {kept}:
            storage.remove_folder(storage.join(place, name))
            storage.remove_file(storage.join(place, name))
    with folder.disk_errors():
        storage.write_json(folder.aid(_MADE_OF), made_of)
    return False


def _finish(folder: JobFolder, out: str) -> None:
    if folder.path == out:
        storage.remove_folder(folder.aid())
        return
    if storage.is_url(out):
        names = [name for name in storage.list_folder(folder.path) if name != _AIDS]
        for name in names:
            storage.copy_file(storage.join(folder.path, name), storage.join(out, name))
        storage.write_json(storage.join(out, COMPLETE), {"files": names})
        storage.remove_file(folder.aid(_MADE_OF))  # first: from now on nobody goes on with it
        storage.remove_folder(folder.path)
        return
    for place, _, names in os.walk(folder.path):
        for name in filter(PARTIAL.search, names):  # left by a task that was killed
            os.remove(os.path.join(place, name))
    os.rename(folder.path, out)
    storage.sync(os.path.dirname(out))
    storage.remove_folder(storage.join(out, _AIDS))
