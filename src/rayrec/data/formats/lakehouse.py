"""Folders of Delta and Iceberg tables as logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.delta import open_delta
from rayrec.data.formats.iceberg import open_iceberg
from rayrec.data.formats.libsvm import without_queries
from rayrec.data.formats.table_version import TableVersion
from rayrec.storage.urls import local_path, split_options

_OPEN: Final[dict[str, Callable[[str, int | None], TableVersion]]] = {
    "Delta": open_delta,
    "Iceberg": open_iceberg,
}
_FILE: Final = re.compile(r"(.+@v\d+)/.+")
_MAX_OPENED: Final = 8
_opened: dict[str, TableVersion | None] = {}
"""Versions by their folder TABLE@vN. None: a plain folder of that name."""


# A log's path, and what it is:
#
#   TABLE          the current version
#   TABLE@vN       version N of a Delta table, snapshot N of an Iceberg table
#   TABLE@vN/FILE  a file of that version, which only `find_version` can read; see table_version.py
#
# A plain file or folder of such a name comes first.
def list_log(path: str, names: Sequence[str]) -> list[storage.File]:
    """List the files of a log like `storage.list_files`, but also those of a table's version.
    Raises InputError for a version that cannot be read, and without the packages for it.
    """
    folder, version = storage.split_version(path)
    kind = None
    if version is not None and not storage.exists(path):
        kind = storage.table_kind(folder)
    if kind is None:
        try:
            return without_queries(storage.list_files(path, names=names))
        except storage.TableError as table:
            if table.kind not in _OPEN:
                raise
            kind = table.kind
            folder = path
            version = None
    if names:
        raise InputError(
            f"{path}: is a {kind} table, whose log lists its files; remove --train-data.files"
        )
    return _open(folder, kind, version).list_files()


def pinned(path: str) -> str:
    """Return the path with the current version if it is a table's folder. Other paths are returned
    unchanged. Raises InputError like `list_log`.
    """
    if storage.split_version(path)[1] is not None or re.search(r"[*?\[]", split_options(path)[0]):
        return path
    kind = storage.table_kind(path)
    if kind not in _OPEN:
        return path
    return storage.with_version(path, _open(path, kind, None).version)


def find_version(path: str) -> TableVersion | None:
    """Return the version that a file TABLE@vN/FILE is of; None for a plain file. Opens it once per
    process.
    """
    body, options = split_options(path)
    match = _FILE.fullmatch(body)
    if match is None:
        return None
    root = match[1] + options
    opened = _opened.get(root)
    if root in _opened and (opened is None or opened.has_file(path)):
        return opened
    # Not yet opened, or a table that was written again since
    folder, version = storage.split_version(root)
    kind = None if storage.exists(root) else storage.table_kind(folder)
    if kind in _OPEN:
        return _open(folder, kind, version)
    _keep(root, None)
    return None


def _open(folder: str, kind: str, version: int | None) -> TableVersion:
    folder = local_path(folder) or folder
    body, options = split_options(folder)
    opened = _OPEN[kind](body.rstrip("/") + options, version)
    _keep(storage.with_version(opened.folder, opened.version), opened)
    return opened


def _keep(root: str, opened: TableVersion | None) -> None:
    # Of the last ones: a process reads few logs
    for oldest in list(_opened)[: 1 - _MAX_OPENED]:
        _opened.pop(oldest, None)
    _opened[root] = opened
