"""Temporary folders that are removed even if their process is killed."""

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import tempfile
from contextlib import suppress
from typing import Final

_PREFIX: Final = f"rayrec-{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-"
"""Prefix of this machine's folders: locks on a shared file system are not visible to other machines."""


class Scratch:
    """Empty private folder, removed by `close`, or after a kill by a later process with a folder in the same place."""

    def __init__(self, purpose: str, *, parent: str | None = None) -> None:
        """Create the folder in `parent`, an existing folder. None selects the temporary directory."""
        parent = parent or tempfile.gettempdir()
        _remove_abandoned(parent)
        self._lock: int | None = None
        while True:
            self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=parent)
            try:
                self._lock = _locked(self.path)
            except (FileNotFoundError, BlockingIOError):  # another process is removing it as abandoned
                continue
            except OSError:  # a file system without locks, on which no process considers it abandoned
                return
            if os.path.exists(self.path):
                return
            self.close()

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder. Later processes remove the rest, if there are errors."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def make_temporary_folder() -> str:
    """Create a private folder that stays after this process, and return it."""
    return tempfile.mkdtemp()


@functools.cache
def _remove_abandoned(parent: str) -> None:
    """Remove folders of killed processes, once per process."""
    for entry in os.scandir(parent):
        if entry.name.startswith(_PREFIX):
            with suppress(OSError):  # in use, or owned by another user
                lock = _locked(entry.path)
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)


def _locked(folder: str) -> int:
    """Lock a folder and return its descriptor. Raises BlockingIOError if it is already locked."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
