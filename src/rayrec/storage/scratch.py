"""Temporary folders that do not outlast their processes for long, even those that are killed."""

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
"""Of this machine's folders: on a file system that machines share, none sees another's locks."""


class Scratch:
    """A folder for this user alone, empty at first, which goes with `close`. If this process is killed, a later one that has a
    folder in the same place removes it."""

    def __init__(self, purpose: str, *, parent: str | None = None) -> None:
        """`parent`: an existing folder; None: the temporary directory."""
        parent = parent or tempfile.gettempdir()
        _remove_abandoned(parent)
        self._lock: int | None = None
        while True:
            self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=parent)
            try:
                self._lock = _locked(self.path)
            except (FileNotFoundError, BlockingIOError):  # another process takes it for abandoned and removes it
                continue
            except OSError:  # a file system without locks, on which nobody finds it abandoned
                return
            if os.path.exists(self.path):
                return
            self.close()

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder. What cannot be removed now is left to later processes."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@functools.cache
def _remove_abandoned(parent: str) -> None:
    """Remove the folders whose processes are gone; once per process."""
    for entry in os.scandir(parent):
        if entry.name.startswith(_PREFIX):
            with suppress(OSError):  # it is in use, or another user's
                lock = _locked(entry.path)
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)


def _locked(folder: str) -> int:
    """An open file that holds the folder's lock. Raises BlockingIOError if another one holds it."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
