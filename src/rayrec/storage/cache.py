"""The cache folder, and what is kept there: files fetched from a store, for all processes of a node, and unpacked gzip files."""

import fcntl
import glob
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import BinaryIO, Final, final

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.storage.files import PARTIAL

LEAST_FILES: Final = 4
"""That a limited cache must have room for: some in use, some on their way."""
KEY_DIGITS = 10
"""Of the 16 hex digits that name what was made from a file, those that say which file; the others say which version of it."""
GZIP_MAGIC = b"\x1f\x8b"
GUNZIP_BYTES = 8 << 20
"""Most bytes that one step of unpacking gives."""


def folder(of_run: str | None = None) -> str:
    """The cache folder: $RAYREC_CACHE, else that of a run if it is there and may be written, else ~/.cache/rayrec."""
    chosen = os.environ.get("RAYREC_CACHE")
    if chosen:
        return chosen
    if of_run and storage.exists(of_run) and (storage.is_url(of_run) or os.access(of_run, os.W_OK)):
        return of_run
    return os.path.join(os.path.expanduser("~"), ".cache", "rayrec")


@final
class ShardCache:
    """The files of one folder of a store, below a local folder that any process of the node may share.

    Locks are held on files, by their holder's descriptors, so that they end with a process however it ends. Who maps a file
    holds it shared, by `in_use`; only what nobody holds goes when room is made, the one not used for longest first.
    """

    def __init__(
        self, source: str, *, index: bytes, sizes_bytes: Mapping[str, int], folder: str, limit_bytes: int | None = None
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
            # By a process that was killed: the lock was free
            for left in glob.glob(f"{glob.escape(target)}.*.partial"):
                os.remove(left)
            with storage.writing(target) as local:
                with self._open_in_room(local, self._sizes_bytes[name]) as file:
                    for piece in read() if read else storage.read_stream(storage.join(self._source, name)):
                        file.write(piece)
                check(local)
            return self._sizes_bytes[name]

    def remove(self, name: str) -> None:
        """Removes a file, in use or not."""
        with suppress(FileNotFoundError):
            os.remove(os.path.join(self.folder, name))

    def _open_in_room(self, local: str, needed_bytes: int) -> BinaryIO:
        """Open a file for so many bytes once there is room for them. Others that make room count it from here on."""
        with self._locked("room"):
            if self._limit_bytes is not None:
                self._make_room(needed_bytes, self._limit_bytes)
            return open(local, "wb")

    def _make_room(self, needed_bytes: int, limit_bytes: int) -> None:
        here = []
        total_bytes = needed_bytes
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                name = PARTIAL.sub("", entry.name)
                total_bytes += self._sizes_bytes.get(name, 0)  # of one on its way, what it will have
                if entry.name == name and name in self._sizes_bytes:
                    here.append((entry.stat().st_mtime_ns, name))
        for _, name in sorted(here):
            if total_bytes <= limit_bytes:
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


def version_key(source: object, version: object) -> str:
    """16 hex digits that name a file made from a source: the first KEY_DIGITS for the source, the others for its version."""
    digests = [hashlib.sha256(repr(each).encode()).hexdigest() for each in (source, version)]
    return digests[0][:KEY_DIGITS] + digests[1][: 16 - KEY_DIGITS]


def remove_older(folder: str, kept: Iterable[str]) -> None:
    """Removes what was made from older versions of the sources of `kept` names (see `version_key`) from a folder."""
    kept = {name[:16] for name in kept}
    sources = {name[:KEY_DIGITS] for name in kept}
    for name in storage.list_folder(folder) if sources else []:
        if name[:KEY_DIGITS] in sources and name[:16] not in kept:
            storage.remove_folder(storage.join(folder, name))
            storage.remove_file(storage.join(folder, name))


def head_of(path: str, size_bytes: int) -> bytes:
    """A file's first bytes. Raises InputError for a file that this user may not read."""
    head = np.zeros(size_bytes, np.uint8)
    try:
        got = storage.read_into(path, 0, head)
    except (PermissionError, IsADirectoryError) as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from None
    return head[:got].tobytes()


def is_gzip(path: str) -> bool:
    return head_of(path, 2) == GZIP_MAGIC


def unpacked_path(file: storage.File, folder: str) -> str:
    """Where the plain text of a gzip file is kept: named by the file's path, size and time."""
    key = version_key(file.path, (file.size_bytes, file.modified_ns))
    return storage.join(folder, f"{key}-{storage.name_of(file.path).removesuffix('.gz')}")


def unpack(file: storage.File, folder: str, progress: Callable[[int], None] | None = None) -> storage.File:
    """Unpacks a gzip file once, so that it can be split and reread from any row (gzip itself allows neither).

    The result appears complete or not at all; a second call finds it. At a URL it is sent while it is unpacked, and takes no
    room here. Raises InputError for a damaged file or a full disk.
    """
    target = unpacked_path(file, folder)
    if not storage.exists(target):
        try:
            storage.write_stream(target, _reported(_decompressed(file.path), progress))
        except OSError as error:
            if error.errno is None:  # a store that is out
                raise
            raise InputError(f"{target}: {file.path} cannot be unpacked there ({error.strerror})") from None
    return storage.list_files(target)[0]


def _reported(pieces: Iterator[bytes], progress: Callable[[int], None] | None) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        if progress:
            progress(len(piece))


def _decompressed(path: str) -> Iterator[bytes]:
    try:
        yield from gunzip(storage.read_stream(path))
    except zlib.error as error:
        raise InputError(f"{path}: damaged gzip file ({error}); fetch it again") from None
    except EOFError:
        raise InputError(f"{path}: the gzip file ends in the middle; fetch it again") from None


def gunzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The content of gzip data, in pieces of at most GUNZIP_BYTES however well it was compressed. Raises zlib.error for
    damaged data, EOFError if it ends in the middle."""
    engine = zlib.decompressobj(wbits=31)
    begun = False
    for data in pieces:
        while data:
            if engine.eof:
                data = data.lstrip(b"\0")  # padding behind the last member, which gzip passes over too
                if not data:
                    break
                engine = zlib.decompressobj(wbits=31)  # several gzip members one after the other
            begun = True
            if piece := engine.decompress(data, GUNZIP_BYTES):
                yield piece
            data = engine.unused_data if engine.eof else engine.unconsumed_tail
        while not engine.eof and (piece := engine.decompress(b"", GUNZIP_BYTES) if begun else b""):
            yield piece
    if not engine.eof:
        raise EOFError
