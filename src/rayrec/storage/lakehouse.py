"""Folders of table formats (Delta, Iceberg, Hudi), whose data files also have removed and replaced
rows.
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
_READERS: Final = {
    "Delta": 'ray.data.read_delta("{0}")',
    "Hudi": 'ray.data.read_hudi("{0}")',
    "Iceberg": "ray.data.read_iceberg(table_identifier=..., catalog_kwargs=...)",
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


def reject_listed_tables(path: str, inner: str, infos: Iterable[arrow_fs.FileInfo]) -> None:
    """Check that the listed folder `inner`, in the filesystem of `path`, is not a table, nor a
    partition below it. Raises InputError.
    """
    for info in infos:
        match = _LISTED.fullmatch(posixpath.relpath(info.path, inner))
        if match:
            folder = to_url(posixpath.join(inner, match[1]).rstrip("/"), path)
            kind = _detect_format(folder) if match[3] else _LOGS.get(match[2], "Iceberg")
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
        candidates, in_parallel(_detect_format, candidates, path=path), strict=True
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


def _detect_format(folder: str) -> str | None:
    """Return the format of a table's folder, or None for other folders."""
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
    shown = f"the {kind} table {table}" if table != path.rstrip("/") else f"this {kind} table"
    return InputError(
        f"{path}: cannot read {shown} as plain files, which also have removed and replaced rows. "
        f"Write its current rows as Parquet, or pass {_READERS[kind].format(table)} to "
        "rayrec.train(config, data=...)"
    )
