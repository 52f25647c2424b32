"""Object stores behind pyarrow's interface of file systems, for files read by pyarrow and Ray Data
as well. Requests and uploads are those of self._obstore.
"""

from __future__ import annotations

import abc
import errno
import io
import posixpath
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from pyarrow import NativeFile, PythonFile
from pyarrow import fs as arrow_fs

from rayrec.config import InputError
from rayrec.storage.retry import UnavailableError
from rayrec.storage.stores import StoreLocation

if TYPE_CHECKING:
    from obstore import Bytes, ObjectMeta

_PART_BYTES: Final = 10 << 20
"""Part size of large uploads. S3 accepts 10,000 parts."""
_NUM_PARTS: Final = 8
"""Number of parts of one file that are sent at the same time, from memory."""

# obstore has types for some errors only, and none for those of lists and writers. All texts have
# the same form.
_STATUS: Final = re.compile(r"non-2xx status code: (\d{3})")
_BODY: Final = (re.compile(r"<Code>([^<\n]*)"), re.compile(r"<Message>([^<\n]*)"))
_NO_ANSWER: Final = {
    r'connect error",\s*([^\s,]+),\s*Os \{[^}]*message: "([^"]*)"': "cannot connect to {}: {}",
    r'"dns error"(?s:.*?)error: "([^"]*)"': "{}",
    r"\bTimedOut\b": "timeout was reached",
    r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)": "{}",
}
"""Patterns of errors without an HTTP status, and their causes."""
_URL: Final = re.compile(r"\w+://\S+")
_PASSING: Final = {408, 425, 429}
_NO_BUCKET: Final = {"NoSuchBucket", "ContainerNotFound"}
_CREDENTIALS: Final = re.compile(r"token|credential|access ?key|signature|authori[sz]", re.I)
_NO_IDENTITY: Final = (
    "//169.254.169.254/",
    "//metadata.google.internal/",
    "federated token",
    "get-access-token",
)
"""Sources of credentials in error texts: machines of Google and Azure, pods and logins."""


class ObjectStore(arrow_fs.FileSystemHandler):
    """Bucket of an object store. Paths have the form BUCKET/KEY. Picklable without credentials,
    which each process takes from its environment.
    """

    def __init__(self, location: StoreLocation, outage_s: float) -> None:
        """Open a bucket. `outage_s` is how long each request is retried, in seconds."""
        import obstore

        self._location = location
        self._outage_s = outage_s
        self._obstore = obstore
        try:
            self._store = location.open(outage_s)
        except obstore.exceptions.BaseError as error:  # An unreadable key or key file
            raise location.denied(_first_line(str(error))) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self._location, self._outage_s)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectStore) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self._location)

    def read(self, path: str, start: int, size: int) -> tuple[Bytes | bytes, int | None]:
        """Return up to `size` bytes from `start`, and the size of the file, with one request. None
        if the range is behind its end. Raises FileNotFoundError.
        """
        with self._explained(path):
            try:
                result = self._obstore.get(
                    self._store, _key(path), options={"range": (start, start + size)}
                )
                return result.bytes(), result.meta["size"]
            except self._obstore.exceptions.BaseError as error:
                if _status(str(error)) != 416:
                    raise
                return b"", None

    def put(self, path: str, chunks: Iterable[memoryview]) -> None:
        """Write a file atomically, a small one with one request, else in parts. Raises the errors
        of `chunks` unchanged; the parts stay hidden then.
        """
        with self._explained(path):
            # Not `obstore.put`, which would run an iterable inside its event loop, where it could
            # not read another store. Without `close`, the file never appears.
            file = self._obstore.open_writer(
                self._store, _key(path), buffer_size=_PART_BYTES, max_concurrency=_NUM_PARTS
            )
        for chunk in chunks:
            with self._explained(path):
                file.write(bytes(chunk))  # A copy, because it is sent later
        with self._explained(path):
            file.close()

    def get_type_name(self) -> str:
        return "rayrec"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[arrow_fs.FileInfo]:
        return [self._info(path) for path in paths]

    def size(self, path: str) -> int:
        """Return the size of a file in bytes. Raises FileNotFoundError."""
        with self._explained(path):
            return int(self._obstore.head(self._store, _key(path))["size"])

    def _info(self, path: str) -> arrow_fs.FileInfo:
        key = _key(path)
        info = arrow_fs.FileInfo(path, arrow_fs.FileType.NotFound)
        with suppress(FileNotFoundError), self._explained(path):
            if key:
                info = _file_info(path, self._obstore.head(self._store, key))
        if info.size:
            return info
        # An empty object may stand for a folder, as in accounts with a hierarchical namespace.
        with self._explained(path):
            inside = next(iter(self._obstore.list(self._store, key or None, chunk_size=2)), [])
        if not key or any(meta["path"] != key for meta in inside):
            return arrow_fs.FileInfo(path, arrow_fs.FileType.Directory)
        return info

    def get_file_info_selector(self, selector: arrow_fs.FileSelector) -> list[arrow_fs.FileInfo]:
        path = selector.base_dir.rstrip("/")
        key = _key(path)
        with self._explained(path):
            if selector.recursive:
                pages = self._obstore.list(self._store, key or None)
                metas = [meta for page in pages for meta in page]
                folders = {above for meta in metas for above in _folders_above(meta["path"], key)}
            else:
                result = self._obstore.list_with_delimiter(self._store, key or None)
                metas = list(result["objects"])
                folders = set(result["common_prefixes"])
        if key and not metas and not folders and not selector.allow_not_found:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        bucket = path.partition("/")[0]
        infos = [
            arrow_fs.FileInfo(f"{bucket}/{folder}", arrow_fs.FileType.Directory)
            for folder in sorted(folders)
        ]
        # Empty objects that other programs make for folders have their names.
        infos += [
            _file_info(f"{bucket}/{meta['path']}", meta)
            for meta in metas
            if meta["path"] not in folders and meta["path"] != key
        ]
        return infos

    def create_dir(self, path: str, recursive: bool) -> None:
        """Do nothing: folders exist through their files."""

    def delete_file(self, path: str) -> None:
        with self._explained(path):
            self._obstore.delete(self._store, _key(path))

    def delete_dir(self, path: str) -> None:
        with self._explained(path):
            for page in self._obstore.list(self._store, _key(path)):
                self._obstore.delete(self._store, [meta["path"] for meta in page])

    def copy_file(self, src: str, dest: str) -> None:
        with self._explained(src):
            self._obstore.copy(self._store, _key(src), _key(dest))

    def open_input_file(self, path: str) -> NativeFile:
        return PythonFile(_Object(self, path), mode="r")

    def open_input_stream(self, path: str) -> NativeFile:
        return self.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> NativeFile:
        """Open a stream for Ray Data, which appears when it is closed, also after an error."""
        file = self._obstore.open_writer(self._store, _key(path), buffer_size=_PART_BYTES)
        attributes = {name: getattr(file, name) for name in ("write", "flush", "close")}
        return PythonFile(SimpleNamespace(closed=False, **attributes), mode="w")

    def _unsupported(self, *_: object, **__: object) -> Any:
        raise NotImplementedError

    delete_dir_contents = delete_root_dir_contents = move = open_append_stream = _unsupported

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        """Raise one-line errors for those of obstore; see `_explain`."""
        try:
            yield
        except ValueError as error:  # Its parts cannot be empty, "." or ".."
            raise InputError(
                f"{self._location.scheme}://{path}: must be a key of plain names ({error}). Rename "
                "it in the store"
            ) from None
        except (self._obstore.exceptions.BaseError, OSError) as error:  # OSError of a writer
            raise _explain(self._location, path, error) from None


def _key(path: str) -> str:
    return path.partition("/")[2]


def _file_info(path: str, meta: ObjectMeta) -> arrow_fs.FileInfo:
    # Lists have parts of seconds, responses to HEAD do not, and both identify a version.
    modified_s = int(meta["last_modified"].timestamp())
    return arrow_fs.FileInfo(
        path, arrow_fs.FileType.File, size=meta["size"], mtime_ns=modified_s * 10**9
    )


def _folders_above(key: str, base: str) -> Iterator[str]:
    """Yield the folders of an object that are below the folder `base`."""
    while (key := posixpath.dirname(key)) != base and key:
        yield key


class RangeFile(io.RawIOBase, abc.ABC):
    """Read-only file for pyarrow, from a source of byte ranges."""

    _position = 0

    @abc.abstractmethod
    def size(self) -> int:
        """Return the file's size in bytes."""

    @abc.abstractmethod
    def read_range(self, start: int, size: int) -> Any:
        """Return up to `size` bytes from `start`, which may be behind the end, as a buffer."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            offset += self.size()
        elif whence == io.SEEK_CUR:
            offset += self._position
        self._position = offset
        return offset

    def read(self, size: int = -1) -> Any:
        data = self.read_range(self._position, self.size() - self._position if size < 0 else size)
        self._position += len(data)
        return data


class _Object(RangeFile):
    """Object as a file. Each read is one request; the size is known from the first one."""

    def __init__(self, store: ObjectStore, path: str) -> None:
        self._store = store
        self._path = path
        self._size: int | None = None

    def size(self) -> int:
        if self._size is None:
            self._size = self._store.size(self._path)
        return self._size

    def read_range(self, start: int, size: int) -> Any:
        if size <= 0 or (self._size is not None and start >= self._size):
            return b""
        data, file_size = self._store.read(self._path, start, size)
        self._size = file_size or self._size
        return data


def _status(text: str) -> int:
    """Return the HTTP status in an error's text, 0 without a response."""
    match = _STATUS.search(text)
    return int(match[1]) if match else 0


def _explain(location: StoreLocation, path: str, error: Exception) -> Exception:
    """Return a one-line error for an error of obstore: InputError if the user can fix it,
    FileNotFoundError, UnavailableError in an outage, else OSError. Contains no keys and no URLs of
    requests, which may have a signature.
    """
    text = str(error)
    status = _status(text)
    messages = [match[1].strip() for pattern in _BODY if (match := pattern.search(text))]
    cause = ": ".join([f"HTTP status {status}", *messages]) if status else _no_answer(text)
    if messages and messages[0] in _NO_BUCKET:
        return location.no_bucket()
    if "InvalidCertificate" in text:
        return location.untrusted(cause)
    if status == 301 or "incorrectly configured region" in text:
        return location.other_region()
    if status in _PASSING or status >= 500:
        return UnavailableError(cause, location.endpoint_hint())
    if _is_denied(text, status, messages):
        return location.denied(cause)
    if status == 404 or isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "no such file", path)
    if "HTTP error" in text:
        return UnavailableError(cause, location.endpoint_hint())
    return OSError(f"{location.bucket_url()}: the store rejected the request ({cause})")


def _is_denied(text: str, status: int, messages: list[str]) -> bool:
    if status in {401, 403} or any(source in text for source in _NO_IDENTITY):
        return True
    if status and "token request" in text:
        return True
    # Responses to HEAD have no body. AWS sends this status for an expired token.
    return status == 400 and (not messages or _CREDENTIALS.search(" ".join(messages)) is not None)


def _no_answer(text: str) -> str:
    """Return the cause of an error without an HTTP status."""
    for pattern, cause in _NO_ANSWER.items():
        if match := re.search(pattern, text):
            return cause.format(*match.groups())
    return _first_line(text)


def _first_line(text: str) -> str:
    return _URL.sub("...", text.partition("\n")[0]).rstrip(": .")
