"""Files fetched from a store and kept on a node's disk for all its processes: each is fetched once, and a limit is kept."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final, final

from rayrec import storage
from rayrec.config import InputError

LEAST_FILES: Final = 4
"""That a limited cache must have room for: some in use, some on their way."""
_PARTIAL: Final = re.compile(r"\.[0-9a-f]{32}\.partial$")
"""What `storage.writing` adds to a name while the file is written."""


def default_folder() -> str:
    """In $RAYREC_CACHE, else in ~/.cache/rayrec."""
    home = os.environ.get("RAYREC_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "rayrec")
    return os.path.join(home, "shards")


@final
class ShardCache:
    """The files of one folder of a store, below a local folder that any process of the node may share.

    Locks are held on files, by their holder's descriptors, so that they end with a process however it ends. Who maps a file
    holds it shared, by `in_use`; only what nobody holds goes when room is made, the one not used for longest first.
    """

    def __init__(
        self,
        source: str,
        *,
        index: bytes,
        sizes_bytes: Mapping[str, int],
        folder: str,
        limit_bytes: int | None = None,
    ) -> None:
        """`source`: the URL. `index`: what tells this version of its files from another. `folder`: of all caches.

        Raises InputError for a limit that is too low to work with.
        """
        largest = max(sizes_bytes.values())
        if limit_bytes is not None and limit_bytes < LEAST_FILES * largest:
            raise InputError(
                f"{source}: cache_bytes {limit_bytes:,} is too small for shards of up to {largest:,}; allow at least "
                f"{LEAST_FILES * largest:,} bytes, or prepare it with smaller shards"
            )
        key = hashlib.sha256(source.encode() + b"\0" + index).hexdigest()[:16]
        self.folder = os.path.join(storage.absolute(folder), key)
        self._source, self._sizes_bytes, self._limit_bytes = source, sizes_bytes, limit_bytes
        os.makedirs(os.path.join(self.folder, ".locks"), exist_ok=True)

    def fetch(self, name: str, check: Callable[[str], None], read: Callable[[], Iterable[bytes]] | None = None) -> int:
        """Fetches a file that is not here, unless another process has meanwhile; returns the bytes fetched. `read` gives its
        content (None: what the store has by its name).

        `check` is given the local path before the file appears and raises what keeps it from appearing. Raises InputError
        where the store has no such file, OSError where it is out for too long.
        """
        target = os.path.join(self.folder, name)
        with self._locked(f"{name}.lock"):  # no shard's lock has the name of the one below
            if os.path.exists(target):
                return 0
            for left in glob.glob(
                f"{glob.escape(target)}.*.partial"
            ):  # by a process that was killed: the lock was free
                os.remove(left)
            self._make_room(self._sizes_bytes[name])
            with storage.writing(target) as local:
                with open(local, "wb") as file:
                    for piece in read() if read else storage.read_stream(storage.join(self._source, name)):
                        file.write(piece)
                check(local)
            return self._sizes_bytes[name]

    def remove(self, name: str) -> None:
        """Removes a file, in use or not."""
        with suppress(FileNotFoundError):
            os.remove(os.path.join(self.folder, name))

    def _make_room(self, needed_bytes: int) -> None:
        if self._limit_bytes is None:
            return
        with self._locked("room"):
            here = []
            total_bytes = needed_bytes
            for entry in os.scandir(self.folder):
                with suppress(FileNotFoundError):
                    name = _PARTIAL.sub("", entry.name)
                    total_bytes += self._sizes_bytes.get(name, 0)  # of one on its way, what it will have
                    if entry.name == name and name in self._sizes_bytes:
                        here.append((entry.stat().st_mtime_ns, name))
            for _, name in sorted(here):
                if total_bytes <= self._limit_bytes:
                    break
                if _remove_unused(os.path.join(self.folder, name)):
                    total_bytes -= self._sizes_bytes[name]

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        descriptor = os.open(os.path.join(self.folder, ".locks", name), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def in_use(descriptor: int) -> bool:
    """Keeps an opened file of the cache from going, as long as the descriptor or a map of it lives; False: it went already."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.utime(descriptor)
    return os.fstat(descriptor).st_nlink > 0


def _remove_unused(path: str) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.remove(path)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
