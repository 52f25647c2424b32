"""One version of a Delta or Iceberg table as the format of its files."""

from __future__ import annotations

import hashlib
import posixpath
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.base import Format
from rayrec.schema import Schema
from rayrec.storage.urls import is_url, split_options

_NULL: Final = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class LiveFile:
    """Data file with rows of a table's version."""

    path: str
    """Path or URL of the file."""
    size_bytes: int
    modified_ns: int
    partitions: Mapping[str, str | None]
    """Values of partition columns from the table's log; None if missing."""
    deletes: str = ""
    """Hash of the removed rows, empty if the file has none."""


# A file's name in a version, below TABLE@vN, is made from the log, not from the file's folder:
#
#   folders   KEY=VALUE for each partition column, so that its rows have these values as in any
#             log
#   name      the file's own, with the hash of its removed rows, if it has some
#
# Path order of these names is the order of the version's rows.
def _named(files: Iterable[LiveFile]) -> dict[str, LiveFile]:
    named: dict[str, LiveFile] = {}
    for file in sorted(files, key=lambda file: file.path):
        folders = [
            f"{quote(key, safe='')}={_NULL if value is None else quote(value, safe='')}"
            for key, value in file.partitions.items()
        ]
        base, ending = posixpath.splitext(storage.name_of(file.path))
        if file.deletes:
            base = f"{base}.without-{file.deletes}"
        name = "/".join([*folders, base + ending])
        if name in named:  # Files in other folders may have the same name
            name = "/".join([*folders, f"{base}.{digest(file.path.encode())}{ending}"])
        named[name] = file
    return named


def cause_of(error: BaseException) -> str:
    """Return the first line of an error, without the queries of URLs, which may have secrets."""
    return re.sub(r"\?\S+", "?...", str(error).partition("\n")[0])


def digest(data: bytes) -> str:
    """Return a hash of 8 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:8]


def same_store(location: str, folder: str) -> str:
    """Return the path or URL of a file whose location is in a log, with the options of the table's
    URL.
    """
    if location.startswith("file:"):
        return "/" + location.removeprefix("file:").lstrip("/")
    if not is_url(location):
        return location
    scheme, _, rest = split_options(location)[0].partition("://")
    if scheme in ("s3a", "s3n"):  # Hadoop's names of S3
        scheme = "s3"
    return f"{scheme}://{rest}{split_options(folder)[1]}"


class TableVersion(Format):
    """One version of a table, the format of its files. Reads them without removed rows, with names
    and types of columns as in that version. Rows of a file stay in its order.
    """

    def __init__(
        self, folder: str, version: int, *, columns: Mapping[str, str], files: Iterable[LiveFile]
    ) -> None:
        """`columns`: names in the table's order, with a text that changes if their values may."""
        self.folder = folder
        self.version = version
        self._columns = dict(columns)
        self._files = _named(files)

    @abstractmethod
    def read(self, file: LiveFile, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of a file with these columns, in order. Raises InputError for a damaged
        file.
        """

    @property
    def title(self) -> str:
        """Return the version and the table, for messages."""
        return f"version {self.version} of the {self.name} table {self.folder}"

    def list_files(self) -> list[storage.File]:
        """Return the files in the order of their rows. Raises InputError if there are none."""
        if not self._files:
            raise InputError(f"{self.folder}: has no rows in version {self.version}; write some")
        root = storage.with_version(self.folder, self.version)
        return storage.natural_order(
            storage.File(storage.join(root, name), file.size_bytes, file.modified_ns)
            for name, file in self._files.items()
        )

    def recognizes(self, start: bytes) -> bool:
        """Return False: a table's log names its files."""
        return False

    def columns(self, path: str, schema: Schema) -> tuple[str, ...]:
        file = self._file(path)
        return tuple(name for name in self._columns if name not in file.partitions)

    def tables(
        self, path: str, schema: Schema, columns: Sequence[str] | None
    ) -> Iterator[pa.Table]:
        present = self.columns(path, schema)
        names = present
        if columns is not None:
            # A table without columns would have no rows.
            names = tuple(name for name in columns if name in present) or present[:1]
        file = self._file(path)
        try:
            yield from self.read(file, names)
        except (InputError, OSError):
            if storage.exists(file.path):
                raise
            raise InputError(
                f"{file.path}: no such file, but {self.title} has it. It was vacuumed or expired: "
                "restore it, or use a later version under another --name"
            ) from None

    def cache_key(self, file: storage.File) -> tuple[object, tuple[object, ...]]:
        live = self._file(file.path)
        # Not of the version, as most files stay from one to the next.
        return (live.path, live.deletes, sorted(self._columns.items())), ()

    def has_file(self, path: str) -> bool:
        """Return whether a path TABLE@vN/FILE is a file of this version."""
        return self._name(path) in self._files

    def _file(self, path: str) -> LiveFile:
        name = self._name(path)
        if name not in self._files:
            raise InputError(f"{path}: no such file in {self.title}; list the table again")
        return self._files[name]

    def _name(self, path: str) -> str:
        root, _ = split_options(storage.with_version(self.folder, self.version))
        return split_options(path)[0].removeprefix(f"{root}/")
