"""A file of a run that is made of its events anew by every driver: local, or uploaded as a whole now and then."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final, final

from rayrec import storage

UPLOAD_S: Final = 30.0
"""Between two uploads, each of the whole file: a store has no appending."""


@final
class ViewFile:
    """Bytes appended to a file, which takes the place of an older one at the first `flush`.

    What could not be written is kept and written with the next `flush`; at a URL the whole file is kept in memory (of
    TensorBoard's about 2 kB a logged step).
    """

    def __init__(self, path: str) -> None:
        self.path: Final = path
        self._is_url = storage.is_url(path)
        self._waiting = bytearray()
        self._descriptor: int | None = None
        self._uploaded_bytes = 0
        self._next_upload_s = 0.0

    def write(self, data: bytes) -> None:
        """Keeps bytes in memory until `flush`."""
        self._waiting += data

    def flush(self, *, now: bool = False) -> None:
        """Writes what was taken; to a URL only every `UPLOAD_S`, or `now`. Raises OSError where it cannot."""
        if self._is_url:
            self._upload(now)
            return
        partial = f"{self.path}.partial"
        if self._descriptor is None:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        while self._waiting:
            del self._waiting[: os.write(self._descriptor, self._waiting)]
        with contextlib.suppress(FileNotFoundError):  # it has its name already
            os.replace(partial, self.path)

    def _upload(self, now: bool) -> None:
        if len(self._waiting) == self._uploaded_bytes or not (now or time.monotonic() >= self._next_upload_s):
            return
        with storage.patience(0):
            storage.write_bytes(self.path, bytes(self._waiting))
        self._uploaded_bytes = len(self._waiting)
        self._next_upload_s = time.monotonic() + UPLOAD_S

    def close(self) -> None:
        """Flushes, and closes the file whatever comes of that."""
        try:
            self.flush(now=True)
        finally:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)
