"""Single files by path or URL: whether they are there, their bytes, and writing them whole or not at all."""

import ctypes
import errno
import itertools
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import NativeFile
from pyarrow import fs as arrow_fs

from rayrec.config import InputError
from rayrec.quantities import json_values
from rayrec.storage.outages import explained
from rayrec.storage.ranges import read_url
from rayrec.storage.scratch import Scratch
from rayrec.storage.stores import enduring, no_bucket, place_of, remedy, resolve
from rayrec.storage.urls import bucket_of, in_object_store, local_path, scheme_of, split_options

_PIECE_BYTES: Final = 8 << 20
"""Read, written and copied at once; a smaller file is one request to a store."""
_MAX_JSON_BYTES: Final = 1 << 30
PARTIAL: Final = re.compile(r"\.[0-9a-f]{32}\.partial$")
"""What `partial_of` adds to a name."""
_AHEAD_BYTES: Final = 64 << 20
"""Handed to the uploading threads before waiting for them: they would take any amount, and memory with it."""
_LARGEST_COPY_BYTES: Final = 5 << 30
"""More than this S3 does not copy within itself in one request."""
_COPIES_ANY_SIZE: Final = {"gs", "gcs", "az", "abfs", "abfss"}
_SECTION_BYTES: Final = 32 << 20
"""Of a file for Azure, kept in memory until the store has it."""
_STAGED: Final = {"az", "abfs", "abfss"}
"""Of these stores' objects the beginning would be visible while the rest is written."""
_NO_LINK: Final = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT} | {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""A hard link was refused: another file system, one without links, too many links, or the file was removed."""


def partial_of(path: str) -> str:
    """Return a new name beside a file, for while it is written. A process that is killed leaves it."""
    return f"{path}.{uuid.uuid4().hex}.partial"


def exists(path: str) -> bool:
    return info_of(path).type != arrow_fs.FileType.NotFound


def size_of(path: str) -> int | None:
    """Bytes of a file; None where there is no file."""
    info = info_of(path)
    return info.size if info.type == arrow_fs.FileType.File else None


def info_of(path: str) -> arrow_fs.FileInfo:
    """What is at a path."""

    def asked(filesystem: arrow_fs.FileSystem, inner: str) -> arrow_fs.FileInfo:
        info = filesystem.get_file_info(inner)
        if info.type != arrow_fs.FileType.NotFound or not isinstance(filesystem, arrow_fs.AzureFileSystem):
            return info
        # pyarrow looks at the first name that begins so, and "run-1/" comes before "run/".
        inside = filesystem.get_file_info(arrow_fs.FileSelector(inner, allow_not_found=True))
        return arrow_fs.FileInfo(info.path, arrow_fs.FileType.Directory) if inside else info

    return enduring(path, asked)


def missing(path: str, what: str = "no such file") -> InputError:
    """What to say of a path where nothing is: that of a bucket which is not there, too, a store says just that."""
    if in_object_store(path) and not exists(bucket_of(path) + split_options(path)[1]):
        return no_bucket(path)
    return InputError(f"{path}: {what}")


# Reading -------------------------------------------------------------------------------------------------------------


def read_into(path: str, start: int, buffer: np.ndarray) -> int:
    """Reads bytes from `start` on into a uint8 array and returns how many there were; any number of threads may.

    Raises InputError where the file is gone.
    """
    local = local_path(path)
    try:
        if local is None:
            return read_url(path, start, buffer)
        with open(local, "rb", buffering=0) as file:
            view, done = memoryview(buffer.data), 0
            while done < len(view) and (count := os.preadv(file.fileno(), [view[done:]], start + done)):
                done += count
            return done
    except FileNotFoundError:
        raise missing(path) from None


def read_stream(path: str) -> Iterator[bytes]:
    """A file's bytes in pieces of some MiB, going on where they stopped if the store was out. Raises InputError where the
    file is gone."""
    file: NativeFile | None = None
    position = 0

    def read(filesystem: arrow_fs.FileSystem, inner: str) -> bytes:
        nonlocal file
        try:
            if file is None:
                file = filesystem.open_input_file(inner)
                file.seek(position)
            return file.read(_PIECE_BYTES)
        except OSError:
            file = None
            raise

    try:
        while piece := enduring(path, read):
            position += len(piece)
            yield piece
    except FileNotFoundError:
        raise missing(path) from None
    finally:
        if file is not None:
            file.close()


def read_bytes(path: str) -> bytes:
    """All of a file. Raises InputError where there is none."""
    return b"".join(read_stream(path))


def read_text(path: str) -> str:
    """All of a UTF-8 file, without a byte order mark. Raises InputError if there is none, and for any other encoding."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; save it with that encoding") from None


def read_json(path: str) -> Any:
    """Return the value of a JSON file. Raises InputError if there is none, and for damage, a pipe or device, more than 1 GiB,
    and values that are nested too deeply."""
    local = local_path(path)
    if local is not None and os.path.exists(local) and not os.path.isfile(local):
        raise InputError(f"{path}: damaged, not a regular file")
    data = bytearray()
    for piece in read_stream(path):
        data += piece
        if len(data) > _MAX_JSON_BYTES:
            raise InputError(f"{path}: damaged, more than {_MAX_JSON_BYTES:,} bytes of JSON")
    try:
        return json.loads(data)
    except ValueError as error:
        raise InputError(f"{path}: damaged, not JSON ({error})") from None
    except RecursionError:
        raise InputError(f"{path}: damaged, its JSON is nested too deeply") from None


# Writing -------------------------------------------------------------------------------------------------------------


def write_stream(path: str, pieces: Iterable[bytes | memoryview]) -> int:
    """Writes a file piece by piece; it appears complete or not at all. Returns its bytes.

    A piece may be overwritten once the next one is asked for. To a URL nothing is stored on the way on this machine, and at
    most about 100 MiB are in memory; S3 takes 10,000 parts of 10 MiB, which is 97 GiB. After an error, as after a crash, parts
    that were sent stay in the store, unseen, until its rule for incomplete uploads removes them. In Azure the file is first
    NAME.*.partial, which the store then copies; after a crash that file stays.
    Raises what `pieces` raises, OSError with its errno where a disk fails, OSError where a store is out for too long
    (from `OUTAGE_S` to twice that), and InputError where a store refuses what the user can fix.
    """
    local = local_path(path)
    if local is not None:
        with _appearing(local) as temporary, open(temporary, "wb", buffering=0) as file:
            return sum(_write_all(file.write, piece) for piece in pieces)
    try:
        return _staged(path, pieces) if scheme_of(path) in _STAGED else _sent(path, pieces)
    except FileNotFoundError:  # what Google's store says of a bucket that is not there
        raise missing(path) from None


def _sent(path: str, pieces: Iterable[bytes | memoryview]) -> int:
    iterator = iter(pieces)
    head = bytearray()
    for piece in iterator:
        if len(head) + memoryview(piece).nbytes > _PIECE_BYTES:
            return _upload(path, itertools.chain([head, piece], iterator))
        for part in _cut(piece):
            head += part
    failed = False

    def put(filesystem: arrow_fs.FileSystem, inner: str) -> None:
        nonlocal failed
        if failed:
            # Fails while the store is out, and makes no stream that `_abandon` must keep
            filesystem.get_file_info(inner)
        failed = True
        _put(filesystem, inner, head)

    enduring(path, put)
    return len(head)


def write_bytes(path: str, data: bytes | memoryview) -> None:
    """Writes a file that appears complete or not at all."""
    write_stream(path, [data])


def write_json(path: str, value: Any) -> None:
    """Writes a file of JSON; NaN and infinities become null."""
    write_bytes(path, (json_text(value) + "\n").encode())


def json_text(value: Any) -> str:
    """Indented JSON that every reader accepts (RFC 8259): NaN and infinities, which JSON lacks, become null."""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(json_values(value), indent=2, ensure_ascii=False, allow_nan=False)


@contextmanager
def writing(path: str) -> Iterator[str]:
    """A local path to write to; on leaving it without an error the file appears at `path`, complete."""
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
    """Copies a file; within an object store without fetching it. Raises InputError where there is no such file."""
    size = size_of(source)
    if size is None:
        raise missing(source)
    if not _copied_by_store(source, target, size):
        write_stream(target, read_stream(source))


def clone_file(source: str, target: str) -> bool:
    """Gives `target` the content of `source` without reading it: by a hard link on a file system, by a copy that an
    object store makes itself. False, and nothing is done, if storage cannot do that for these two, or if there is no `source`.

    Linked files share their bytes: a program that writes into one of them in place changes both. All functions of this module
    replace the whole file, which leaves the other unchanged.
    """
    local_source, local_target = local_path(source), local_path(target)
    if local_source is not None and local_target is not None:
        return _linked(local_source, local_target)
    size = size_of(source)
    return size is not None and _copied_by_store(source, target, size)


def _linked(source: str, target: str) -> bool:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = partial_of(target)
    try:
        os.link(source, temporary)
        os.replace(temporary, target)
        sync(os.path.dirname(target))
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    finally:
        with suppress(FileNotFoundError):
            os.remove(temporary)  # it is still there if `target` was a link to the same file before
    return True


def _copied_by_store(source: str, target: str, size: int) -> bool:
    if not same_store(source, target) or (size > _LARGEST_COPY_BYTES and scheme_of(source) not in _COPIES_ANY_SIZE):
        return False
    _, inner = resolve(source)
    enduring(target, lambda filesystem, target_inner: filesystem.copy_file(inner, target_inner))
    return True


def same_store(source: str, target: str) -> bool:
    """Whether two paths are in one object store, which can copy between them: buckets of one endpoint or account."""
    return in_object_store(source) and in_object_store(target) and place_of(source).store() == place_of(target).store()


def remove_file(path: str) -> None:
    """Removes a file if it is there."""
    with suppress(FileNotFoundError):
        enduring(path, lambda filesystem, inner: filesystem.delete_file(inner))


@contextmanager
def _appearing(target: str) -> Iterator[str]:
    """A path beside `target` to write to, renamed to it at the end, once it is on the disk; removed after an error."""
    folder = os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    temporary = partial_of(target)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, target)
        sync(folder)
    finally:
        with suppress(FileNotFoundError):
            os.remove(temporary)


def sync(path: str) -> None:
    """Makes a local file's content, or the names in a folder, outlast a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(piece: bytes | memoryview | bytearray) -> memoryview:
    view = memoryview(piece)
    return view.cast("B") if view.nbytes else memoryview(b"")  # no cast of a view with a 0 in its shape


def _cut(piece: bytes | memoryview | bytearray) -> Iterator[memoryview]:
    view = _bytes_of(piece)
    return (view[start : start + _PIECE_BYTES] for start in range(0, len(view), _PIECE_BYTES))


def _write_all(write: Callable[[memoryview], int], piece: bytes | memoryview) -> int:
    view = _bytes_of(piece)
    done = 0
    while done < len(view):
        done += write(view[done:])
    return done


def _put(filesystem: arrow_fs.FileSystem, inner: str, data: bytearray) -> None:
    _fill(_opened(filesystem, inner), data)


def _fill(stream: NativeFile, data: bytearray) -> None:
    try:
        stream.write(data)
        stream.close()
    except BaseException:
        _abandon(stream)
        raise


def _staged(path: str, pieces: Iterable[bytes | memoryview]) -> int:
    """Appends pieces to an object of another name, section by section, which the store then copies to `path`."""
    temporary = partial_of(path)
    section = bytearray()
    sent_bytes = 0
    try:
        for piece in pieces:
            for part in _cut(piece):
                section += part
                if len(section) >= _SECTION_BYTES:
                    sent_bytes = _append(temporary, sent_bytes, section)
                    section = bytearray()
        if section or not sent_bytes:
            sent_bytes = _append(temporary, sent_bytes, section)
        _, inner = resolve(temporary)
        enduring(path, lambda filesystem, target: filesystem.copy_file(inner, target))
    finally:
        with suppress(OSError, InputError):
            remove_file(temporary)
    return sent_bytes


def _append(path: str, start: int, data: bytearray) -> int:
    """Writes the bytes of an object from `start` on, which is its end, and returns its new end. The attempts after a failed one
    first look at what the store has got: its answer may be all that was lost."""
    end = start + len(data)
    failed = False

    def append(filesystem: arrow_fs.FileSystem, inner: str) -> None:
        nonlocal failed
        if failed:
            size = filesystem.get_file_info(inner).size or 0
            if size == end and data:
                return
            if size != start:
                raise OSError(errno.EIO, f"{path}: has {size} bytes in place of {start}")
        failed = True
        mode = filesystem.open_append_stream if start else filesystem.open_output_stream
        _fill(mode(inner, compression=None), data)

    enduring(path, append)
    return end


def _upload(path: str, pieces: Iterable[bytes | memoryview | bytearray]) -> int:
    """Sends pieces as one object. Unlike `_put` it cannot begin again, so that outages are outlasted by the retries of the
    filesystem itself."""
    filesystem, inner = resolve(path)
    info_of(path)  # waits for a store that is out: a stream that fails keeps its memory
    with _explaining(path):
        stream = _opened(filesystem, inner)
    try:
        ahead_bytes = 0
        for piece in pieces:
            for part in _cut(piece):
                with _explaining(path):
                    stream.write(bytes(part))  # a copy: it is sent later
                    ahead_bytes += len(part)
                    if ahead_bytes >= _AHEAD_BYTES:
                        stream.flush()
                        ahead_bytes = 0
        sent_bytes = stream.tell()
        with _explaining(path):
            stream.close()
    except BaseException:
        _abandon(stream)
        raise
    return sent_bytes


def _opened(filesystem: arrow_fs.FileSystem, inner: str) -> NativeFile:
    # They would make an empty object of it
    if not isinstance(filesystem, arrow_fs.S3FileSystem | arrow_fs.GcsFileSystem):
        filesystem.create_dir(os.path.dirname(inner), recursive=True)
    return filesystem.open_output_stream(inner, compression=None)


@contextmanager
def _explaining(path: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise explained(path, error, waited_s=time.monotonic() - start, remedy=remedy(path)) from None


def _abandon(stream: NativeFile) -> None:
    """Never lets go of an output stream: closing it, which its destructor does too, would complete a half-written file,
    and pyarrow has no other way to end it. That keeps up to 10 MiB, so no stream is made while a store is known to be out."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))
