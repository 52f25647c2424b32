"""Cache folder for files fetched from a store, shared by all processes of a node, and for
decompressed gzip and zip files.
"""

import fcntl
import glob
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final, final

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.storage.files import PARTIAL
from rayrec.storage.zip_archive import ZIP_MAGIC, unzip

MIN_FILES: Final = 4
"""Minimum number of files that a limited cache must fit: some in use, some in transfer."""
KEY_DIGITS = 10
"""Number of hex digits that identify the source in a cache key of 16. The others identify its
version.
"""
GZIP_MAGIC = b"\x1f\x8b"
GUNZIP_BYTES = 8 << 20
"""Maximum bytes from one decompression step."""


def folder(run_folder: str | None = None) -> str:
    """Return the cache folder: $RAYREC_CACHE, else a run's if it exists and is writable, else
    ~/.cache/rayrec. Raises InputError without a home directory.
    """
    path = os.environ.get("RAYREC_CACHE")
    if path:
        return path
    if (
        run_folder
        and storage.exists(run_folder)
        and (storage.is_url(run_folder) or os.access(run_folder, os.W_OK))
    ):
        return run_folder
    return os.path.join(storage.home(), ".cache", "rayrec")


# Locks of the cache's processes on one node. Each is an flock, which the kernel drops with its
# process:
#
#   NAME.lock, exclusive    one process fetches a file; others wait, and then find it
#   room, exclusive         evicts and creates the new file, so that others count its size
#   file, shared            a process maps it: no eviction
#
# Files appear by a rename, after `check`. A leftover NAME.*.partial under a free lock is of a
# killed process.
@final
class ShardCache:
    """Cache of one store folder, in a local folder that all processes of the node share. Uses file
    locks on open descriptors, which end with their process however it ends. A process that maps a
    file keeps a shared lock on it, through `in_use`. Eviction removes unlocked files only, least
    recently used first.
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
        """Create a cache for URL `source` in `folder`. `index` identifies the version. Raises
        InputError for too low a limit.
        """
        largest = max(sizes_bytes.values())
        if limit_bytes is not None and limit_bytes < MIN_FILES * largest:
            raise InputError(
                f"{source}: cache_bytes {limit_bytes:,} is too small for shards of up to "
                f"{largest:,}. Use at least {MIN_FILES * largest:,} bytes, or prepare smaller "
                "shards"
            )
        key = hashlib.sha256(source.encode() + b"\0" + index).hexdigest()[:16]
        self.folder = os.path.join(storage.absolute(folder), key)
        self._source = source
        self._sizes_bytes = sizes_bytes
        self._limit_bytes = limit_bytes
        os.makedirs(os.path.join(self.folder, ".locks"), exist_ok=True)

    def fetch(
        self,
        name: str,
        check: Callable[[str], None],
        read: Callable[[], Iterable[bytes]] | None = None,
    ) -> int:
        """Fetch a file, unless another process has meanwhile, and return the number of fetched
        bytes. An error of `check`, called with the local path, keeps the file invisible. `read`
        None reads it from the store. Raises InputError if the store has no such file, OSError if it
        is unavailable for too long.
        """
        target = os.path.join(self.folder, name)
        locks = os.path.join(self.folder, ".locks")
        # no shard is named "room", the other lock
        with storage.locked(os.path.join(locks, f"{name}.lock")):
            if os.path.exists(target):
                return 0
            # Left over from a killed process, because the lock was free.
            for left in glob.glob(f"{glob.escape(target)}.*.partial"):
                os.remove(left)
            with storage.writing(target) as local:
                with storage.locked(os.path.join(locks, "room")):
                    if self._limit_bytes is not None:
                        self._evict(self._sizes_bytes[name], self._limit_bytes)
                    file = open(local, "wb")  # noqa: SIM115  counted by other processes from now on
                with file:
                    for data in (
                        read() if read else storage.read_stream(storage.join(self._source, name))
                    ):
                        file.write(data)
                check(local)
            return self._sizes_bytes[name]

    def remove(self, name: str) -> None:
        """Remove a file, in use or not."""
        with suppress(FileNotFoundError):
            os.remove(os.path.join(self.folder, name))

    def _evict(self, needed_bytes: int, limit_bytes: int) -> None:
        cached = []
        total_bytes = needed_bytes
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                name = PARTIAL.sub("", entry.name)
                # files in transfer count with their full size
                total_bytes += self._sizes_bytes.get(name, 0)
                if entry.name == name and name in self._sizes_bytes:
                    cached.append((entry.stat().st_mtime_ns, name))
        for _, name in sorted(cached):
            if total_bytes <= limit_bytes:
                break
            if remove_unused(os.path.join(self.folder, name)):
                total_bytes -= self._sizes_bytes[name]


def in_use(descriptor: int) -> bool:
    """Lock an open cache file against eviction until its descriptor and maps are closed. Return
    False if already evicted.
    """
    # Readers share a lock on the file itself; eviction asks for it alone and gives up at once.
    # Eviction may have won before the lock: then the file has no name left.
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.utime(descriptor)
    return os.fstat(descriptor).st_nlink > 0


def remove_unused(path: str) -> bool:
    """Remove a file of the cache, and return True, unless a process has locked it by `in_use`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.remove(path)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def version_key(source: object, version: object) -> str:
    """Return 16 hex digits that name a derived file: KEY_DIGITS for the source, the others for its
    version.
    """
    digests = [hashlib.sha256(repr(each).encode()).hexdigest() for each in (source, version)]
    return digests[0][:KEY_DIGITS] + digests[1][: 16 - KEY_DIGITS]


def remove_older(folder: str, current: Iterable[str]) -> None:
    """Remove files derived from older versions of the sources of the `current` names from a folder;
    see `version_key`.
    """
    current = {name[:16] for name in current}
    sources = {name[:KEY_DIGITS] for name in current}
    for name in storage.list_folder(folder) if sources else []:
        if name[:KEY_DIGITS] in sources and name[:16] not in current:
            storage.remove_folder(storage.join(folder, name))
            storage.remove_file(storage.join(folder, name))


def read_head(path: str, size_bytes: int) -> bytes:
    """Return the first bytes of a file. Raises InputError if it is not readable."""
    head = np.zeros(size_bytes, np.uint8)
    try:
        num_read = storage.read_into(path, 0, head)
    except (PermissionError, IsADirectoryError) as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}). Check its permissions"
        ) from None
    return head[:num_read].tobytes()


def is_packed(path: str) -> bool:
    """Return whether a file is gzip or zip. Raises InputError if it is not readable."""
    return read_head(path, len(ZIP_MAGIC)).startswith((GZIP_MAGIC, ZIP_MAGIC))


def unpacked_path(file: storage.File, folder: str) -> str:
    """Return the cache path of a decompressed file, which depends on the file's path, size and
    time.
    """
    key = version_key(file.path, (file.size_bytes, file.modified_ns))
    name = storage.name_of(file.path).removesuffix(".gz").removesuffix(".zip")
    return storage.join(folder, f"{key}-{name}")


def unpack(file: storage.File, folder: str) -> storage.File:
    """Decompress a gzip or zip file once, so that it can be split and read from any row. Atomic,
    and idempotent. A URL target is streamed and needs no local disk. Raises InputError for a
    damaged file or a full disk.
    """
    target = unpacked_path(file, folder)
    if not storage.exists(target):
        try:
            storage.write_stream(target, _decompressed(file.path))
        except OSError as error:
            if error.errno is None:  # an unavailable store
                raise
            raise InputError(
                f"{target}: {file.path} cannot be decompressed there ({error.strerror})"
            ) from None
    return storage.find_files([target])[target]


def _decompressed(path: str) -> Iterator[bytes]:
    if read_head(path, len(ZIP_MAGIC)) == ZIP_MAGIC:
        yield from unzip(path)
        return
    try:
        yield from gunzip(storage.read_stream(path))
    except zlib.error as error:
        raise InputError(f"{path}: damaged gzip file ({error}). Download it again") from None
    except EOFError:
        raise InputError(f"{path}: the gzip file is truncated. Download it again") from None


def gunzip(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress gzip data into pieces of at most GUNZIP_BYTES. Raises zlib.error for damaged data,
    EOFError if truncated.
    """
    engine = zlib.decompressobj(wbits=31)
    is_started = False
    for data in chunks:
        while data:
            if engine.eof:
                data = data.lstrip(b"\0")  # padding after the last member, which gzip skips too
                if not data:
                    break
                engine = zlib.decompressobj(wbits=31)  # concatenated gzip members
            is_started = True
            if content := engine.decompress(data, GUNZIP_BYTES):
                yield content
            data = engine.unused_data if engine.eof else engine.unconsumed_tail
        while not engine.eof and (
            content := engine.decompress(b"", GUNZIP_BYTES) if is_started else b""
        ):
            yield content
    if not engine.eof:
        raise EOFError
