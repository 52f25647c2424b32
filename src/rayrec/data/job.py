"""Resumable job of tasks whose output folder appears complete or not at all. The folder is written
as OUT.partial. Its subfolder `_job` contains the job's inputs, a lock, a marker for each finished
task, and data that tasks pass to later ones. At the end `_job` is removed and the folder gets its
final name. Folders at a URL cannot be renamed: the job writes below OUT directly if its last file
marks it as complete, else it copies the files from OUT.partial.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar, final

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.arrow import json_reply, parse_reply
from rayrec.data.engine import Engine
from rayrec.storage.files import PARTIAL
from rayrec.storage.retry import Backoff, retry_errors

_logger = logging.getLogger(__name__)

COMPLETE: Final = "_SUCCESS"
"""Last file of a folder copied to a URL, which names the others and marks it as complete."""
_AIDS: Final = storage.JOB_FOLDER
_INPUTS: Final = "made_of.json"
_LOCK: Final = "lock"
_REMOVAL_S: Final = 2.0
_BACKOFF: Final = Backoff(first_s=0.1, longest_s=0.1)


class Numbered(Protocol):
    """Item of a task; its number names the task's marker."""

    @property
    def number(self) -> int: ...


_Item = TypeVar("_Item", bound=Numbered)


@dataclass(frozen=True)
class JobFolder:
    """Folder during the job; picklable, for tasks."""

    path: str
    """Local path or URL."""

    def aid(self, *names: str) -> str:
        """Return the path of a file or folder that is removed when the job is done."""
        return storage.join(self.path, _AIDS, *names)

    def require(self) -> None:
        """Check that the task can see the folder. Raises InputError."""
        if not storage.exists(self.aid(_INPUTS)):
            raise InputError(
                f"{self.path}: not visible to tasks on {os.uname().nodename}; choose an --out "
                "that all nodes share"
            )

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Convert the error of a full disk to an InputError with the fix."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise InputError(
                f"{self.path}: {error.strerror}; make room there and run the same command again "
                "to resume"
            ) from None

    def done(self, kind: str, number: int, result: dict[str, Any]) -> pa.Table:
        """Mark a task as finished, and return its result, a small JSON value, as the task's
        table.
        """
        with self.disk_errors():
            storage.write_json(self.aid("done", _marker(kind, number)), result)
        return json_reply(result)

    def has_finished_tasks(self) -> bool:
        """Return whether any task is finished."""
        return bool(storage.list_folder(self.aid("done")))


def _marker(kind: str, number: int) -> str:
    return f"{kind}-{number:06d}.json"


def read_array(path: str, dtype: np.dtype, start: int, count: int) -> np.ndarray:
    """Read items [start, start + count) of a task's file. Raises InputError if it is shorter."""
    data = np.empty(count * dtype.itemsize, np.uint8)
    if count and storage.read_into(path, start * dtype.itemsize, data) != len(data):
        raise InputError(f"{path}: was truncated. Remove its folder and start over")
    return data.view(dtype)


# Protocol of a job, whose processes may be killed at any moment. The folder is OUT.partial, or OUT
# at a URL with a last file:
#
#   lock                a second process of the same job is rejected
#   _job/made_of.json   inputs; a resume needs equal ones
#   task                writes its files, then _job/done/KIND-NUMBER.json with its result
#   resume              skips tasks with a marker; others write the same bytes again
#   finish, local       rename to OUT, then remove _job
#   finish, URL         last file in place; or copy all files, then _SUCCESS
#
# A reader finds nothing, or a complete folder.
@final
@dataclass(frozen=True)
class ResumableJob:
    """Runner of the tasks that write the folder."""

    folder: JobFolder
    resumed: bool
    """Whether to skip finished tasks of an earlier call, which also wrote the files that precede
    tasks.
    """

    def finished(self, kind: str, items: Sequence[_Item]) -> dict[int, dict[str, Any]]:
        """Return the results of the finished tasks by item number."""
        markers = set(storage.list_folder(self.folder.aid("done"))) if self.resumed else set()
        return {
            item.number: storage.read_json(self.folder.aid("done", name))
            for item in items
            if (name := _marker(kind, item.number)) in markers
        }

    def run(
        self,
        kind: str,
        task: Callable[[_Item], pa.Table],
        items: Sequence[_Item],
        engine: Engine,
        progress: Callable[[int, int], None] = lambda done, items: None,
    ) -> Iterator[dict[str, Any]]:
        """Run the task, which ends with `JobFolder.done`, on the unfinished items; yield all
        results in order. `progress` receives the numbers of finished and of all items.
        """
        finished = self.finished(kind, items)
        # Results come in the order of the items, so `next` belongs to the first unfinished one.
        tables = engine.run(
            kind,
            task,
            [item for item in items if item.number not in finished],
            block_bytes=1 << 16,
        )
        for done, item in enumerate(items, start=1):
            yield finished[item.number] if item.number in finished else parse_reply(next(tables))
            progress(done, len(items))


@contextmanager
def resumable_job(
    out: str,
    job_inputs: dict[str, Any],
    *,
    last_file: str | None,
) -> Iterator[ResumableJob]:
    """Create the folder `out` with the tasks run in this context; it appears on exit without an
    error. After an error the partial folder stays for the same call to resume, unless no task is
    finished. `last_file` is the name of the file that the job writes last. None: no file marks the
    folder as complete, so at a URL its files are copied sequentially, then COMPLETE. Raises
    InputError if `out` exists, is being written, or was started with a different or unknown
    `job_inputs`.
    """
    out = storage.absolute(out).rstrip("/")
    is_url = storage.is_url(out)
    is_direct = storage.is_url(out) and last_file is not None
    folder = JobFolder(out if is_direct else f"{out}.partial")
    exists = storage.exists(storage.join(out, last_file) if is_direct and last_file else out)
    if exists and not (is_url and not is_direct and storage.exists(folder.aid(_INPUTS))):
        raise InputError(f"{out}: exists already; remove it or choose another place")
    with ExitStack() as locked:
        if not is_url:
            with folder.disk_errors():
                os.makedirs(folder.aid(), exist_ok=True)
            busy = (
                f"{folder.path}: another process is writing there; wait for it or choose another "
                "place"
            )
            locked.enter_context(storage.locked(folder.aid(_LOCK), busy))
        resumed = _begin(folder, job_inputs)
        try:
            yield ResumableJob(folder, resumed)
        except BaseException:
            # Nothing is worth resuming, and a folder that stays would have to be explained.
            if not folder.has_finished_tasks():
                _remove(folder.path)
            raise
        _finish(folder, out)


def _remove(path: str) -> None:
    """Remove a folder to which ending tasks may still write. Log a warning if it cannot be
    removed.
    """
    # InputError: half removed, already without its marker
    errors = (OSError, InputError)
    try:
        retry_errors(
            partial(storage.remove_folder, path),
            errors,
            limit_s=_REMOVAL_S,
            backoff=_BACKOFF,
            wait=time.sleep,
        )
    except errors as error:
        _logger.warning("Cannot remove %s (%s), remove it", path, error)


def _begin(folder: JobFolder, job_inputs: dict[str, Any]) -> bool:
    """Return whether to resume a job with the same inputs; otherwise clear the folder and record
    them.
    """
    exists = storage.exists(folder.aid(_INPUTS))
    if not exists and set(storage.list_folder(folder.path)) - {_AIDS}:
        raise InputError(
            f"{folder.path}: has files, but no {_AIDS}/{_INPUTS}, so their source is unknown; "
            "remove that folder"
        )
    if exists and folder.has_finished_tasks():
        before = storage.read_json(folder.aid(_INPUTS))
        changed = [name for name, value in job_inputs.items() if before.get(name) != value]
        if changed:
            raise InputError(
                f"{folder.path}: incomplete output of a call with a different "
                f"{', '.join(changed)}; use the same values to "
                "resume, or remove that folder to start over"
            )
        return True
    for path, keep in ((folder.path, _AIDS), (folder.aid(), _LOCK)):
        for name in set(storage.list_folder(path)) - {keep}:
            storage.remove_folder(storage.join(path, name))
            storage.remove_file(storage.join(path, name))
    with folder.disk_errors():
        storage.write_json(folder.aid(_INPUTS), job_inputs)
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
        storage.remove_file(folder.aid(_INPUTS))  # First: no call can resume the job from now on
        storage.remove_folder(folder.path)
        return
    # Tasks write files as NAME.partial and rename them.
    for path, _, names in os.walk(folder.path):
        for name in filter(PARTIAL.search, names):  # left by a task that was killed
            os.remove(os.path.join(path, name))
    os.rename(folder.path, out)
    storage.sync(os.path.dirname(out))
    storage.remove_folder(storage.join(out, _AIDS))
