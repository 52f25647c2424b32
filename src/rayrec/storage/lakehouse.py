"""Folders of table formats (Delta, Iceberg, Hudi), whose data files also have removed and replaced
rows, so that only their logs tell the rows of a version.
"""

import posixpath
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Final

from pyarrow import fs as arrow_fs

from rayrec.config import InputError
from rayrec.storage.files import read_info
from rayrec.storage.filesystems import with_retries
from rayrec.storage.range_reader import in_parallel
from rayrec.storage.urls import (
    bucket_url,
    join,
    local_path,
    name_of,
    parent_folder,
    split_options,
    to_url,
)

_DATA_FILES: Final = (".parquet", ".orc", ".avro")
"""Endings of the data files of all three formats."""
_LOGS: Final = {"_delta_log": "Delta", ".hoodie": "Hudi"}
"""Folders that make their parent a table. In Iceberg, it is `_METADATA` if it has files
*.metadata.json.
"""
_METADATA: Final = "metadata"
_FIXES: Final = {
    "Delta": "Use the table's folder itself, {0}, as a click log",
    "Iceberg": "Use the table's folder itself, {0}, as a click log",
    "Hudi": (
        'Write its current rows as Parquet, or pass ray.data.read_hudi("{0}") to '
        "rayrec.train(config, data=...)"
    ),
}
_INNER: Final = re.compile(r"[^=/]+=[^/]*|data|[0-9a-f-]+")
"""Names of folders inside tables: partitions, Iceberg's data folder with its hashes, and dates of
Hudi.
"""
_LISTED: Final = re.compile(
    r"((?:[^=/]+=[^/]*/)*)"
    r"(?:(_delta_log|\.hoodie)(?:/.*)?|(metadata)|metadata/[^/]+\.metadata\.json)"
)
"""Path of a table's own files in a listing: its folder, a partition or nothing, and its log."""
_SAMPLED: Final = 16
"""Maximum number of folders of a glob that are checked, spread evenly."""
_VERSION: Final = re.compile(r"(.+)@v(\d+)")


class TableError(InputError):
    """Rejection of a path that is itself a table's folder, which only click logs can be."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind
        """Delta, Iceberg or Hudi."""

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (str(self), self.kind)


def split_version(path: str) -> tuple[str, int | None]:
    """Split a path TABLE@vN into the table's folder and its version. Other paths have none."""
    body, options = split_options(path)
    match = _VERSION.fullmatch(body.rstrip("/"))
    return (match[1] + options, int(match[2])) if match else (path, None)


def with_version(folder: str, version: int) -> str:
    """Return the path TABLE@vN of a version of a table."""
    body, options = split_options(folder)
    return f"{body.rstrip('/')}@v{version}{options}"


def reject_listed_tables(path: str, inner: str, infos: Iterable[arrow_fs.FileInfo]) -> None:
    """Check that the listed folder `inner`, in the filesystem of `path`, is not a table, nor a
    partition below it. Raises InputError.
    """
    for info in infos:
        match = _LISTED.fullmatch(posixpath.relpath(info.path, inner))
        if match:
            folder = to_url(posixpath.join(inner, match[1]).rstrip("/"), path)
            kind = table_kind(folder)
            if kind is not None:
                raise _rejected(path, kind, folder)


def reject_enclosing_tables(path: str, files: Sequence[str]) -> None:
    """Check that `path`, with these files, is not within a table. Files whose names are not those
    of tables' data files need no check. Looks at all folders above a local path. At a URL, where
    each look is a request, only above folders that are named as in tables. Raises InputError.
    """
    if not any(name_of(file).endswith(_DATA_FILES) for file in files):
        return
    inside = sorted(set(map(parent_folder, files)))
    sampled = inside[:: -(-len(inside) // _SAMPLED)]
    candidates = list(dict.fromkeys(above for folder in sampled for above in _upwards(folder)))
    for folder, kind in zip(
        candidates, in_parallel(table_kind, candidates, path=path), strict=True
    ):
        if kind is not None:
            raise _rejected(path, kind, folder)


def _upwards(folder: str) -> list[str]:
    """Return the folder and those above it that may be the table that it is in."""
    local = local_path(folder)
    if local is not None:
        return [local, *map(str, PurePath(local).parents)]
    folders = [folder]
    while folder != bucket_url(folder) + split_options(folder)[1] and _INNER.fullmatch(
        name_of(folder)
    ):
        folder = parent_folder(folder)
        folders.append(folder)
    return folders


def table_kind(folder: str) -> str | None:
    """Return the format of a table's folder: Delta, Iceberg or Hudi. None for other folders. A
    folder with the logs of two formats has the first.
    """
    for name, kind in _LOGS.items():
        if read_info(join(folder, name)).type == arrow_fs.FileType.Directory:
            return kind

    def names(filesystem: arrow_fs.FileSystem, inner: str) -> list[str]:
        return [
            info.base_name
            for info in filesystem.get_file_info(arrow_fs.FileSelector(inner, allow_not_found=True))
        ]

    metadata = join(folder, _METADATA)
    if read_info(metadata).type != arrow_fs.FileType.Directory:
        return None
    return (
        "Iceberg"
        if any(name.endswith(".metadata.json") for name in with_retries(metadata, names))
        else None
    )


def _rejected(path: str, kind: str, table: str) -> InputError:
    is_root = _plain(table) == _plain(path)
    shown = f"this {kind} table" if is_root else f"the {kind} table {table}"
    message = (
        f"{path}: cannot read {shown} as plain files, which also have removed and replaced rows. "
        f"{_FIXES[kind].format(table)}"
    )
    return TableError(message, kind) if is_root else InputError(message)


def _plain(path: str) -> str:
    """Return a folder without options and in one spelling."""
    return split_options(local_path(path) or path)[0].rstrip("/")
