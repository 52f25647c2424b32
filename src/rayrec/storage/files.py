"""Single files by path or URL: existence, reading, atomic writing. Temporary folders, removed even
if the process is killed.
"""

import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
from pyarrow import fs as arrow_fs

from rayrec.config import InputError
from rayrec.humanize import json_values
from rayrec.storage.filesystems import parse_location, resolve, with_retries
from rayrec.storage.range_reader import read_url
from rayrec.storage.retry import retry
from rayrec.storage.urls import (
    bucket_url,
    in_object_store,
    local_path,
    split_options,
    url_scheme,
)

_BUFFER_BYTES: Final = 8 << 20
"""Bytes read, written or copied at a time. Smaller files need one request to a store."""
_MIN_FLUSH_BYTES: Final = 1 << 20
_SYNC_FILE_RANGE_WRITE: Final = 2  # linux/fs.h
_MAX_JSON_BYTES: Final = 1 << 30
PARTIAL: Final = re.compile(r"\.[0-9a-f]{32}\.partial$")
"""Matches the suffix added by `partial_path`."""
_LARGEST_COPY_BYTES: Final = 5 << 30
"""Largest file that S3 can copy in one request."""
_COPIES_ANY_SIZE: Final = {"gs", "gcs", "az", "abfs", "abfss"}
_NO_LINK: Final = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT} | {
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
}
"""Errors if hard links are impossible: other file system, no support, too many links, or a removed
file.
"""


def partial_path(path: str) -> str:
    """Return a new temporary name in the same folder, which is left behind if the process is
    killed.
    """
    return f"{path}.{uuid.uuid4().hex}.partial"


def exists(path: str) -> bool:
    return read_info(path).type != arrow_fs.FileType.NotFound


def size_of(path: str) -> int | None:
    """Return the size of a file in bytes, or None if it is not a file."""
    info = read_info(path)
    return info.size if info.type == arrow_fs.FileType.File else None


def read_info(path: str) -> arrow_fs.FileInfo:
    """Return type, size and time of the entry at a path."""
    return with_retries(path, lambda filesystem, inner: filesystem.get_file_info(inner))


def missing(path: str, problem: str = "no such file") -> InputError:
    """Return the error for a path that does not exist. Raises InputError if its bucket does not
    exist.
    """
    if in_object_store(path):
        read_info(bucket_url(path) + split_options(path)[1])
    return InputError(f"{path}: {problem}")


def read_into(path: str, start: int, buffer: np.ndarray) -> int:
    """Read bytes from `start` into a uint8 array and return their number. Thread-safe. Raises
    InputError without the file.
    """
    local = local_path(path)
    try:
        if local is None:
            data = read_url(path, start, len(buffer))
            buffer[: len(data)] = np.frombuffer(data, np.uint8)
            return len(data)
        with open(local, "rb") as file:
            file.seek(start)
            return file.readinto(buffer.data)
    except FileNotFoundError:
        raise missing(path) from None


def read_stream(path: str) -> Iterator[bytes]:
    """Yield a file's bytes in pieces of some MiB, resuming after a store outage. Raises InputError
    if the file does not exist.
    """
    local = local_path(path)
    try:
        if local is None:
            yield from _read_chunks(path)
            return
        with open(local, "rb") as file:
            while data := file.read(_BUFFER_BYTES):
                yield data
    except FileNotFoundError:
        raise missing(path) from None


def _read_chunks(path: str) -> Iterator[bytes]:
    position = 0
    while data := read_url(path, position, _BUFFER_BYTES).to_pybytes():
        yield data
        position += len(data)
        if len(data) < _BUFFER_BYTES:  # The end, which needs no request
            return


def read_bytes(path: str) -> bytes:
    """Read a file. Raises InputError if it does not exist."""
    return b"".join(read_stream(path))


def read_text(path: str) -> str:
    """Read a UTF-8 file without its byte order mark, or a pipe, such as a shell's `<(...)`, which
    can be read once. Raises InputError if it does not exist or has another encoding.
    """
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: must be UTF-8 text. Save it with that encoding") from None


def read_json(path: str) -> Any:
    """Read a JSON file. Raises InputError if it is absent, damaged, a pipe or device, over 1 GiB,
    or nested too deeply.
    """
    local = local_path(path)
    if local is not None and os.path.exists(local) and not os.path.isfile(local):
        raise InputError(f"{path}: damaged, not a regular file")
    data = bytearray()
    for chunk in read_stream(path):
        data += chunk
        if len(data) > _MAX_JSON_BYTES:
            raise InputError(f"{path}: damaged, more than {_MAX_JSON_BYTES:,} bytes of JSON")
    try:
        return json.loads(data)
    except ValueError as error:
        raise InputError(f"{path}: damaged, not JSON ({error})") from None
    except RecursionError:
        raise InputError(f"{path}: damaged, its JSON is nested too deeply") from None


def write_stream(path: str, chunks: Iterable[bytes | memoryview]) -> int:
    """Write a file atomically from pieces, and return its size in bytes. A piece may be overwritten
    once the next one is requested. A URL needs no local disk, and at most about 100 MiB of memory.
    S3 accepts 10,000 parts of 10 MiB, which is 97 GiB; after a crash, uploaded parts stay in the
    store, hidden, until its rule for incomplete uploads removes them. Raises the errors of
    `chunks`, OSError with its errno if a disk fails, OSError if a store is unavailable for too long
    (`OUTAGE_S` to twice that), and InputError if a store rejects the request for a reason that the
    user can fix.
    """
    size_bytes = 0

    def cut_chunks() -> Iterator[memoryview]:
        nonlocal size_bytes
        for chunk in chunks:
            view = _as_view(chunk)
            size_bytes += len(view)
            # Limited in size, because each is copied on its way to a store.
            for start in range(0, len(view), _BUFFER_BYTES):
                yield view[start : start + _BUFFER_BYTES]

    local = local_path(path)
    if local is not None:
        with _appearing(local) as temporary, open(temporary, "wb") as file:
            for chunk in cut_chunks():
                file.write(chunk)
                if len(chunk) >= _MIN_FLUSH_BYTES:
                    _begin_flush(file.fileno(), file.tell() - len(chunk), len(chunk))
    else:
        # Only the store repeats its requests, because the pieces cannot be read again.
        filesystem, inner = resolve(path)
        retry(path, lambda: _put(filesystem, inner, cut_chunks()), limit_s=0)
    return size_bytes


def _put(filesystem: arrow_fs.FileSystem, inner: str, chunks: Iterable[memoryview]) -> None:
    if isinstance(filesystem, arrow_fs.PyFileSystem):
        filesystem.handler.put(inner, chunks)
        return
    filesystem.create_dir(os.path.dirname(inner), recursive=True)
    with filesystem.open_output_stream(inner, compression=None) as stream:
        for chunk in chunks:
            stream.write(chunk)


def write_bytes(path: str, data: bytes | memoryview) -> None:
    """Write a file atomically."""
    if local_path(path) is None and memoryview(data).nbytes <= _BUFFER_BYTES:
        # One request, which can be repeated here, with a warning in an outage.
        with_retries(path, lambda filesystem, inner: _put(filesystem, inner, [_as_view(data)]))
    else:
        write_stream(path, [data])


def write_json(path: str, value: Any) -> None:
    """Write a JSON file atomically. NaN and infinities become null."""
    write_bytes(path, (json_text(value) + "\n").encode())


def json_text(value: Any) -> str:
    """Format indented JSON that every reader accepts (RFC 8259): NaN and infinities become null."""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(json_values(value), indent=2, ensure_ascii=False, allow_nan=False)


@contextmanager
def writing(path: str) -> Iterator[str]:
    """Yield a local path to write to, and move or upload the file to `path` atomically if there was
    no error.
    """
    target = local_path(path)
    if target is not None:
        with _appearing(target) as temporary:
            yield temporary
        return
    with Scratch("upload") as folder:
        local = os.path.join(folder, "file")
        yield local
        write_stream(path, read_stream(local))


def copy_file(source: str, target: str) -> None:
    """Copy a file, within an object store without downloading it. Raises InputError if it does not
    exist.
    """
    size = size_of(source)
    if size is None:
        raise missing(source)
    if not _copied_by_store(source, target, size):
        write_stream(target, read_stream(source))


def clone_file(source: str, target: str) -> bool:
    """Copy a file without reading it: by a hard link, or by a copy within an object store. Returns
    False, without a change, if storage does not support that or `source` does not exist. Linked
    files share their bytes: a program that writes to one in place changes both. All functions of
    this module replace the file instead, which leaves the other unchanged.
    """
    local_source = local_path(source)
    local_target = local_path(target)
    if local_source is not None and local_target is not None:
        return _linked(local_source, local_target)
    size = size_of(source)
    return size is not None and _copied_by_store(source, target, size)


def _linked(source: str, target: str) -> bool:
    try:
        with _appearing(target) as temporary:
            os.link(source, temporary)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def _copied_by_store(source: str, target: str, size: int) -> bool:
    if not same_store(source, target) or (
        size > _LARGEST_COPY_BYTES and url_scheme(source) not in _COPIES_ANY_SIZE
    ):
        return False
    _, inner = resolve(source)
    with_retries(
        target,
        lambda filesystem, target_inner: filesystem.copy_file(inner, target_inner),
    )
    return True


def same_store(source: str, target: str) -> bool:
    """Return whether an object store can copy between two paths: they are in the same bucket."""
    return (
        in_object_store(source)
        and in_object_store(target)
        and parse_location(source).root() == parse_location(target).root()
    )


def remove_file(path: str) -> None:
    """Remove a file if it exists."""
    with suppress(FileNotFoundError):
        with_retries(path, lambda filesystem, inner: filesystem.delete_file(inner))


@contextmanager
def locked(path: str, busy: str | None = None) -> Iterator[None]:
    """Lock a local file, which is created. The system releases the lock however the process ends.
    If another process has it, raises InputError with the text `busy`, or waits without one.
    """
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise InputError(busy or "") from None
        yield


@contextmanager
def _appearing(target: str) -> Iterator[str]:
    """Yield a temporary path next to `target`, then sync and rename it. Removes it after an error,
    and if both were already links to the same file, which a rename leaves unchanged.
    """
    folder = os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    temporary = partial_path(target)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, target)
        sync(folder)
    finally:
        with suppress(FileNotFoundError):
            os.remove(temporary)


def _begin_flush(descriptor: int, start: int, size_bytes: int) -> None:
    """Have the disk write a range while the caller goes on, if the C library can. Else, the system
    would begin only at `sync`, which then takes as long as all that was written before. Errors show
    at `sync`.
    """
    begin = _sync_file_range()
    if begin is not None:
        begin(descriptor, start, size_bytes, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Any:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def sync(path: str) -> None:
    """Make a local file's content, or a folder's listing, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _as_view(data: bytes | memoryview) -> memoryview:
    view = memoryview(data)
    # memoryviews with a 0 in their shape cannot be cast
    return view.cast("B") if view.nbytes else memoryview(b"")


_PREFIX: Final = f"rayrec-{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-"
"""Prefix of this machine's folders: locks on a shared file system are not visible to other
machines.
"""


class Scratch:
    """Empty private folder, removed by `close`, or after a kill by a later process with a folder in
    the same place.
    """

    def __init__(self, purpose: str, *, parent: str | None = None) -> None:
        """Create the folder in `parent`, an existing folder. None selects the temporary
        directory.
        """
        parent = parent or tempfile.gettempdir()
        _remove_abandoned(parent)
        self._lock: int | None = None
        while True:
            self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=parent)
            try:
                self._lock = _lock_folder(self.path)
            except (FileNotFoundError, BlockingIOError):
                # Another process is removing it as abandoned.
                continue
            except OSError:
                # A file system without locks, on which no process considers it abandoned.
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
                lock = _lock_folder(entry.path)
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)


def _lock_folder(folder: str) -> int:
    """Lock a folder and return its descriptor. Raises BlockingIOError if it is already locked."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
