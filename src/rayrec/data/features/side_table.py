"""Side tables: columns of items or users, found by key. A table is converted once per content to
Arrow files with a key index, which the processes of a machine map and share.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec import host_resources, storage
from rayrec.config import InputError, first_of, suggest
from rayrec.data.formats.base import Format
from rayrec.data.formats.columns import missing_partitions
from rayrec.data.formats.lakehouse import list_log
from rayrec.data.formats.registry import find_format
from rayrec.data.logs.column_parser import ColumnParser
from rayrec.data.logs.column_values import Markers, Text, is_list, is_text, resolved
from rayrec.data.logs.partitions import with_partitions
from rayrec.hashing import key_tokens
from rayrec.humanize import size_text
from rayrec.native import call
from rayrec.schema import Schema, TableSource
from rayrec.storage import cache
from rayrec.storage.cache import ShardCache, version_key
from rayrec.storage.urls import local_path

VERSION: Final = 2
"""Version of built tables. Tables of another version are built again."""
_RESTORED: Final = (1, 2)
"""Versions of the copies that exports have. The first has no dictionaries."""
_HASH_VERSION: Final = 1
"""Version of content hashes, which models store."""
FOLDER: Final = "tables"
"""Folder of built tables in a cache folder."""
_ROWS: Final = "rows.arrow"
_INDEX: Final = "index.arrow"
_MANIFEST: Final = "manifest.json"
_SOURCES: Final = "sources"
"""Folder with the built table of each version of a source."""
UNUSED_DAYS: Final = 30
"""Days after which a built table that no process maps is removed."""
_FETCHED: Final = "fetched"
"""Folder of tables that were fetched from a cache folder in a store."""
_MAX_KEYS: Final = 2**32 - 2
"""Maximum keys: slots of the index have 32 bits."""
_BUILD_FACTOR: Final = 2
"""Memory to build a table, as a multiple of its size: its blocks, then its joined columns."""
_MAX_DISTINCT: Final = 4096
"""Maximum distinct values of a text column that is stored as a dictionary: half a block of rows.
A block then converts each value once, not once per row.
"""
_SAMPLE_ROWS: Final = 65_536
"""Rows whose distinct values decide whether all are counted."""
_SHOWN_NAMES: Final = 12
_JOIN: Final = "join its columns into the log before ingest instead"
_BUILT_NAME: Final = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}-\d+")


# Files of built tables, in a cache folder:
#
#   tables/HASH-VERSION/rows.arrow      the columns, one record batch
#   tables/HASH-VERSION/index.arrow     the arrays of native/side_tables.c, as lists in one row
#   tables/HASH-VERSION/manifest.json   written last: a folder without it is ignored
#   tables/sources/KEY.json             the name of the folder for a version of a source
#
# HASH is the hash of the rows, so that a source that was copied, touched or renamed is not written
# again. Folders of earlier contents stay, since runs and servers that began with them open them
# again, when they restart too. Each process that maps a table locks its manifest (of a fetched
# table: its rows), and so renews the time of that file. When a table is built, others on the local
# disk that nobody maps, or has opened for UNUSED_DAYS, are removed, the locked file first.
@final
class SideTable:
    """Built side table, mapped read-only: it takes no memory of its own, and all processes of a
    machine share its pages. Pickled as its path and source. Equal to a table with the same content.
    Safe to use from several threads.
    """

    def __init__(
        self,
        path: str,
        source: TableSource,
        folder: str,
        manifest: Mapping[str, Any],
    ) -> None:
        """Map the files of local `folder`, a copy of `path` or the same."""
        self.path = path
        """Folder or URL of the built table, for `open_table`."""
        self.source = source
        self.rows = int(manifest["rows"])
        self.content_hash = str(manifest["content_hash"])
        """Hash of the rows' keys, times and stored columns in order, 32 hex digits. Names and types
        of columns count, but neither the file's name, time or format, nor the key's name and type.
        A table has one hash as CSV and as Parquet if its columns are text in both.
        """
        weakref.finalize(self, _locked(path, folder).close)
        self._columns = _read_batch(os.path.join(folder, _ROWS))
        index = _read_batch(os.path.join(folder, _INDEX))
        self._index = _Index.from_batch(index)

    def __reduce__(
        self,
    ) -> tuple[Callable[..., SideTable], tuple[str, TableSource]]:
        return open_table, (self.path, self.source)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SideTable) and self.content_hash == other.content_hash

    def __hash__(self) -> int:
        return hash(self.content_hash)

    @cached_property
    def types(self) -> dict[str, pa.DataType]:
        """Arrow type of each stored column's values."""
        kinds = {}
        for each in self._columns.schema:
            is_dictionary = types.is_dictionary(each.type)
            kinds[each.name] = each.type.value_type if is_dictionary else each.type
        return kinds

    def lookup(
        self,
        tokens: np.ndarray,
        missing: np.ndarray | None = None,
        times: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the row of each key, -1 if it is absent or missing, int64 [keys].

        Args:
            tokens: Categories as in `RawBlock.categories`, of two key columns from `key_tokens`,
                uint64 [keys].
            missing: Whether a key is missing, bool [keys]. None: all are present.
            times: Microseconds since 1970-01-01 00:00 UTC, int64 [keys]. A table with `time`
                returns the newest row that is not after it; other tables ignore it.

        Raises InputError if a table with `time` is looked up without times.
        """
        has_times = self.source.time is not None
        if has_times and times is None:
            raise InputError(
                f"tables: {self.source.path}: has time {self.source.time}, so that rows need one: "
                "name the log's timestamp in the schema, or remove `time`"
            )
        tokens = np.ascontiguousarray(tokens, np.uint64)
        if missing is not None:
            missing = np.ascontiguousarray(missing, bool)
        if has_times:
            times = np.ascontiguousarray(times, np.int64)
        else:
            times = None
        return self._index.find(tokens, missing, times)

    def column(self, name: str, rows: np.ndarray) -> pa.Array:
        """Return the values of a column at rows of `lookup`, null for -1.

        Args:
            name: Stored column.
            rows: Rows of the table, or -1, int64 [rows].

        Types are those of the file, but text is large_binary, or a dictionary of it that is shorter
        than the rows, and lists are large lists. Missing text is null, and dictionaries have no
        null. Copies only the values that it returns. Raises InputError for a column that the table
        does not store.
        """
        if name not in self.types:
            raise _no_column(self.source.path, name, list(self.types))
        absent = rows < 0
        indices = pa.array(rows, mask=absent) if absent.any() else pa.array(rows)
        values = self._columns.column(name).take(indices)
        if not types.is_dictionary(values.type):
            return values
        # Of a longer one, most values would be looked at for nothing.
        is_short = len(values.dictionary) < len(rows)
        return values if is_short else values.dictionary_decode()

    def sorted_keys(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """Return the token of each row's key in ascending order, rows of one key by time; these
        times in microseconds, None in a table without `time`; and the rows, int64.
        """
        return self._index.sorted_keys()

    def check_content(self, content_hash: str) -> None:
        """Check that the table is the one with this hash, such as the one stored with a model.
        Raises InputError.
        """
        if content_hash != self.content_hash:
            raise InputError(
                f"tables: {self.source.path}: changed since the model was trained (content "
                f"{self.content_hash[:8]}, the model has {content_hash[:8]}). Restore the table, "
                "serve with the new one (--swap-table), or train with it, without `content` in the "
                "schema"
            )


def open_content(content_hash: str, source: TableSource) -> SideTable | None:
    """Map the built table with a content from the cache folder, whatever its file has become. None
    if it is not there.

    Args:
        content_hash: `SideTable.content_hash`.
        source: Source to show in messages.
    """
    name = _built_name(content_hash)
    if not _BUILT_NAME.fullmatch(name):
        return None
    path = storage.join(_cached_tables(), name)
    manifest_path = storage.join(path, _MANIFEST)
    if not storage.exists(manifest_path):
        return None
    return open_table(path, source)


def _cached_tables(folder: str | None = None) -> str:
    """Return the folder of built tables in a cache folder, by default that of this machine."""
    shared = storage.absolute(folder or cache.folder())
    return storage.join(shared, FOLDER)


def copy_built(table: SideTable, folder: str) -> None:
    """Write the built files of a table to another folder, for `restore`."""
    manifest = storage.read_json(storage.join(table.path, _MANIFEST))
    local = _fetched(table.path, manifest)
    for name in manifest["sizes_bytes"]:
        built = os.path.join(local, name)
        copy = storage.join(folder, name)
        with storage.writing(copy) as path:
            shutil.copyfile(built, path)
    storage.write_json(storage.join(folder, _MANIFEST), manifest)


def restore(folder: str, content_hash: str, source: TableSource) -> None:
    """Build a table from the files of `copy_built`, unless it is built, or the files are absent or
    of another version.

    Args:
        folder: Folder or URL of the files.
        content_hash: `SideTable.content_hash` that they must have.
        source: Table, its key, and its time.

    Raises InputError if the files are damaged or have another content. Memory: the table, twice.
    """
    if open_content(content_hash, source) is not None:
        return
    manifest_path = storage.join(folder, _MANIFEST)
    if not storage.exists(manifest_path):
        return
    manifest = storage.read_json(manifest_path)
    if manifest.get("version") not in _RESTORED:
        return
    rows = _copied_rows(folder, source)
    # Not as the manifest says: the cache folder must not have a table under the name of another.
    if _content_hash(rows, source) != content_hash:
        raise InputError(f"{folder}: damaged, another content than the model's table")
    target = _cached_tables()
    with _building(target):
        _write_built(rows, content_hash, target)


def _copied_rows(folder: str, source: TableSource) -> _Rows:
    """Read the rows of a built table. Raises InputError if they are damaged."""
    batches = {}
    try:
        for name in (_ROWS, _INDEX):
            content = storage.read_bytes(storage.join(folder, name))
            with pa.ipc.open_file(pa.py_buffer(content)) as reader:
                batch = reader.get_batch(0)
            batch.validate(full=True)
            batches[name] = batch
        index = _Index.from_batch(batches[_INDEX])
        tokens, times = index.by_row()
    except (pa.ArrowException, AttributeError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: damaged ({error})") from None
    return _Rows(
        source,
        batches[_ROWS],
        tokens,
        times,
        keys={" and ".join(source.keys): pa.chunked_array([pa.array(tokens)])},
        files=((folder, 0),),
    )


def _built_name(content_hash: str) -> str:
    """Return the folder name of a built table."""
    return f"{content_hash[:16]}-{content_hash[16:]}-{VERSION}"


def open_table(path: str, source: TableSource | None = None) -> SideTable:
    """Map a built table by its `SideTable.path`. A URL is fetched once per machine to its cache
    folder. Raises InputError if it is missing, incomplete, of another version, or larger than the
    memory of the machine.

    Args:
        path: Folder or URL of the built table.
        source: Source to show in messages. None: the first one that was built with this content.
    """
    manifest_path = storage.join(path, _MANIFEST)
    if not storage.exists(manifest_path):
        raise _absent(path)
    manifest = storage.read_json(manifest_path)
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        raise InputError(
            f"{path}: side table built by another version of rayrec. Run the command again to "
            "build it"
        )
    if source is None:
        stored: Any = TableSource.from_values(manifest["source"], where=f"{manifest_path}: ")
        source = stored
    sizes: dict[str, int] = manifest["sizes_bytes"]
    size = sum(sizes.values())
    total = host_resources.memory().total
    if size > total:
        raise InputError(
            f"tables: {source.path}: takes {size_text(size)}, and this machine has "
            f"{size_text(total)} of memory; {_JOIN}"
        )
    return SideTable(path, source, _fetched(path, manifest), manifest)


def build(
    source: TableSource,
    columns: Sequence[str] = (),
    *,
    integer_keys: Sequence[str] = (),
    folder: str | None = None,
) -> SideTable:
    """Open a side table, and convert it first if its content is new. Processes of a machine that
    ask for a table at once convert it once.

    Args:
        source: Table, its key, its time, and the form of its files, whose missing markers become
            null in text.
        columns: Columns that lookups will read. Others are not stored, and not part of the hash.
        integer_keys: Columns of the key that are compared with a column of `Schema.integers`, so
            that 07 is 7.
        folder: Cache folder or URL. None: `cache.folder()`.

    Raises InputError for an absent column, a missing or invalid key or time, a repeated key (with
    `time`: a repeated key and time), and a column of types that do not agree. Raises it too for a
    table without rows, one that does not fit into the available memory, and a folder that cannot
    be written.
    """
    # The key and the time are parsed as those of a log.
    schema = source.form(integers=tuple(integer_keys))
    listed = list_log(source.path, ())
    files = [(file, find_format(file.path, schema)) for file in listed]
    names = tuple(sorted(set(columns)))
    folder = _cached_tables(folder)
    sources = storage.join(folder, _SOURCES)
    source_name = _source_name(files, schema, names)
    pointer = storage.join(sources, source_name)
    path = _built_path(folder, pointer)
    if path is None:
        with _building(folder):
            # Another process may have built it while this one waited.
            path = _built_path(folder, pointer)
            if path is None:
                path = _convert(source, files, names, schema=schema, folder=folder)
                storage.write_json(pointer, storage.name_of(path))
                cache.remove_older(sources, [source_name])
    return open_table(path, source)


# -- Built tables in a cache folder
def _absent(path: str) -> InputError:
    return InputError(
        f"{path}: built side table not found on this machine. Run the command again to build it; "
        "several machines need a shared cache folder"
    )


def _locked(path: str, folder: str) -> BinaryIO:
    """Lock a built table, of the files in local `folder`, against its removal until the returned
    file is closed, and note that it was opened now. Raises InputError if it was just removed.
    """
    name = _MANIFEST if local_path(path) is not None else _ROWS
    try:
        file = open(os.path.join(folder, name), "rb")  # noqa: SIM115  the lock lasts as long
    except FileNotFoundError:
        raise _absent(path) from None
    # Another user's folder, or a file system without locks
    with contextlib.suppress(OSError):
        if not cache.in_use(file.fileno()):
            file.close()
            raise _absent(path)
    return file


def _remove_unused(folder: str, names: Iterable[str], locked: str) -> bool:
    """Remove the tables of a local folder that no process maps, or has opened for UNUSED_DAYS.
    Returns whether it removed one. `locked`: name of the file that `_locked` locks.
    """
    oldest_s = time.time() - UNUSED_DAYS * 86400
    is_removed = False
    for name in names:
        path = os.path.join(folder, name)
        file = os.path.join(path, locked)
        # Another process removed it, or the folder is of another user
        with contextlib.suppress(OSError):
            if os.stat(file).st_mtime < oldest_s and cache.remove_unused(file):
                storage.remove_folder(path)
                is_removed = True
    return is_removed


def _remove_dangling(folder: str) -> None:
    """Remove the names of tables that were removed."""
    sources = os.path.join(folder, _SOURCES)
    for name in storage.list_folder(sources):
        pointer = os.path.join(sources, name)
        if _built_path(folder, pointer) is None:
            storage.remove_file(pointer)


def _built_path(folder: str, pointer: str) -> str | None:
    """Return the built table of a version of a source, None if it is not built."""
    if not storage.exists(pointer):
        return None
    name = str(storage.read_json(pointer))
    path = storage.join(folder, name)
    if not _BUILT_NAME.fullmatch(name):
        return None
    manifest_path = storage.join(path, _MANIFEST)
    return path if storage.exists(manifest_path) else None


def _source_name(
    files: Sequence[tuple[storage.File, Format]],
    schema: Schema,
    names: Sequence[str],
) -> str:
    """Return the name of a source's file in _SOURCES."""
    keys = [file_format.cache_key(file) for file, file_format in files]
    paths = [path for path, _ in keys]
    versions = [version for _, version in keys]
    source = (
        paths,
        names,
        schema.sparse,
        schema.timestamp,
        schema.integers,
        schema.format,
        schema.delimiter,
        schema.escape,
        schema.encoding,
        schema.header,
        schema.missing,
        schema.category_rules,
    )
    return f"{version_key(source, (VERSION, versions))}.json"


@contextlib.contextmanager
def _building(folder: str) -> Iterator[None]:
    """Let one process of this machine convert tables in a local folder, others wait, and remove the
    remains of killed ones, and unused tables. Machines that share a folder or a store may convert a
    table at once: they write equal files.
    """
    local = local_path(folder)
    if local is None:
        yield
        return
    with _writable(local):
        os.makedirs(local, exist_ok=True)
    with storage.locked(os.path.join(local, ".lock")):
        for name in filter(_BUILT_NAME.fullmatch, storage.list_folder(local)):
            path = os.path.join(local, name)
            if not os.path.exists(os.path.join(path, _MANIFEST)):
                storage.remove_folder(path)
        built = filter(_BUILT_NAME.fullmatch, storage.list_folder(local))
        if _remove_unused(local, built, _MANIFEST):
            _remove_dangling(local)
        yield


def _fetched(path: str, manifest: Mapping[str, Any]) -> str:
    """Return the local folder with the files of a built table. Raises InputError if they do not
    have the sizes of the manifest.
    """
    sizes: dict[str, int] = manifest["sizes_bytes"]
    local = local_path(path)
    if local is None:
        # Another process of the machine may fetch it at the same time: the first one does.
        shared = cache.folder()
        if storage.is_url(shared):
            shared = os.path.join(storage.home(), ".cache", "rayrec")
        shards = ShardCache(
            path,
            index=json.dumps(manifest, sort_keys=True).encode(),
            sizes_bytes=sizes,
            folder=os.path.join(shared, FOLDER, _FETCHED),
        )
        local = shards.folder
        num_bytes = 0
        for name, size in sizes.items():
            check = functools.partial(_check_size, size_bytes=size, source=path)
            num_bytes += shards.fetch(name, check)
        if num_bytes:
            fetched = os.path.dirname(local)
            _remove_unused(fetched, storage.list_folder(fetched), _ROWS)
    for name, size in sizes.items():
        _check_size(os.path.join(local, name), size_bytes=size, source=path)
    return local


def _check_size(file: str, *, size_bytes: int, source: str) -> None:
    """Check the size of a local file of the built table `source`. Raises InputError."""
    if not os.path.exists(file) or os.path.getsize(file) != size_bytes:
        raise InputError(f"{source}: damaged, a file has another size: {file}. Remove the folder")


def _convert(
    source: TableSource,
    files: Sequence[tuple[storage.File, Format]],
    names: Sequence[str],
    *,
    schema: Schema,
    folder: str,
) -> str:
    """Read a table and write its built files, unless they exist. Return their folder."""
    rows = _TableReader(source, names, schema).read(files)
    return _write_built(rows, _content_hash(rows, source), folder)


def _write_built(rows: _Rows, content_hash: str, folder: str) -> str:
    """Write the built files of a table, unless they exist. Return their folder. Raises InputError
    for a repeated key.
    """
    source = rows.source
    index = _timed_index(rows) if source.time is not None else _plain_index(rows)
    path = storage.join(folder, _built_name(content_hash))
    manifest_path = storage.join(path, _MANIFEST)
    if storage.exists(manifest_path):
        return path
    rows_bytes = _write_batch(storage.join(path, _ROWS), rows.columns)
    index_bytes = _write_batch(storage.join(path, _INDEX), index.to_batch())
    manifest = {
        "version": VERSION,
        "source": source.to_dict(),
        "rows": len(rows.tokens),
        "content_hash": content_hash,
        "sizes_bytes": {_ROWS: rows_bytes, _INDEX: index_bytes},
    }
    # Last: a folder without it is ignored.
    storage.write_json(manifest_path, manifest)
    return path


def _write_batch(path: str, batch: pa.RecordBatch) -> int:
    """Write a file of one record batch, uncompressed, and return its size in bytes. Raises
    InputError if a disk is full or not writable.
    """
    with _writable(path), storage.writing(path) as local:
        with (
            pa.OSFile(local, "wb") as file,
            pa.ipc.new_file(file, batch.schema) as writer,
        ):
            writer.write_batch(batch)
        return os.path.getsize(local)


@contextlib.contextmanager
def _writable(path: str) -> Iterator[None]:
    """Raise InputError for the error of a disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # An unavailable store
            raise
        raise InputError(
            f"{path}: side table cannot be written there ({error.strerror}). Set RAYREC_CACHE to "
            "another folder"
        ) from None


def _read_batch(path: str) -> pa.RecordBatch:
    """Map the record batch of a file. Its arrays keep the file mapped."""
    try:
        with pa.ipc.open_file(pa.memory_map(path)) as reader:
            return reader.get_batch(0)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: damaged ({error}). Remove its folder") from None


# -- Rows of a source
@dataclass(frozen=True)
class _Rows:
    """Rows of a table, in memory."""

    source: TableSource
    columns: pa.RecordBatch
    tokens: np.ndarray
    """Token of each row's key, uint64 [rows]."""
    times: np.ndarray | None
    """Microseconds since 1970, int64 [rows]. None in a table without `time`."""
    keys: Mapping[str, pa.ChunkedArray]
    """Columns of the key as in the file, by name, for messages."""
    files: tuple[tuple[str, int], ...]
    """Path and first row of each file."""

    def key_text(self, row: int) -> str:
        """Return the key of a row with the names of its columns."""
        texts = []
        for name, values in self.keys.items():
            value = values[row].as_py()
            shown = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            texts.append(f"{name} {shown}")
        return " and ".join(texts)

    def location(self, row: int) -> str:
        """Return the row's number, and its file if there are several."""
        earlier = [each for each in self.files if each[1] <= row]
        path, first = earlier[-1]
        name = f" of {path}" if len(self.files) > 1 else ""
        return f"row {row - first:,}{name}"


@dataclass
class _TableReader:
    """Reader of the files of a table."""

    source: TableSource
    names: Sequence[str]
    schema: Schema
    tokens: list[np.ndarray] = field(default_factory=list)
    times: list[np.ndarray] = field(default_factory=list)
    keys: dict[str, list[pa.Array]] = field(default_factory=dict)
    """Blocks of each column of the key."""
    blocks: list[list[pa.Array]] = field(default_factory=list)
    """Blocks of each stored column."""
    size_bytes: int = 0

    def read(self, files: Sequence[tuple[storage.File, Format]]) -> _Rows:
        """Return the rows of the files, in order. Raises InputError."""
        available = host_resources.memory().available
        # A column may be the key or the time and be looked up too.
        names = [*self.schema.columns, *self.names]
        required = tuple(dict.fromkeys(names))
        self.blocks = [[] for _ in self.names]
        self.keys = {name: [] for name in self.source.keys}
        starts = []
        first_row = 0
        for file, file_format in files:
            in_file = self._columns_in_file(file_format, file.path, required)
            starts.append((file.path, first_row))
            start = first_row
            for table in file_format.tables(file.path, self.schema, in_file or None):
                complete = with_partitions(table, file.path, self.schema, columns=required)
                self._add(complete, file.path, first_row - start)
                first_row += len(table)
                self._check_memory(available)
        if not first_row:
            raise InputError(f"tables: {self.source.path}: has no rows")
        return _Rows(
            self.source,
            self._joined(),
            np.concatenate(self.tokens),
            np.concatenate(self.times) if self.times else None,
            {name: _joined_keys(blocks) for name, blocks in self.keys.items()},
            tuple(starts),
        )

    def _columns_in_file(
        self,
        file_format: Format,
        path: str,
        required: Sequence[str],
    ) -> tuple[str, ...]:
        """Return the required columns that a file has itself, not from KEY=VALUE folders. Raises
        InputError for a column that it lacks or has twice.
        """
        names = () if file_format.is_sparse else file_format.columns(path, self.schema)
        partitions = missing_partitions(path, names)
        in_file = tuple(name for name in required if name not in partitions)
        for name in in_file:
            # An empty file has no columns, and a row of a sparse format any.
            if names and name not in names:
                raise _no_column(path, name, [*names, *partitions])
            if names.count(name) > 1:
                raise InputError(f"tables: {path}: has several columns {name}. Rename one")
        return in_file

    def _add(self, table: pa.Table, path: str, first_row: int) -> None:
        """Add a block of rows, numbered in their file from `first_row`."""
        parser = ColumnParser(table, self.schema, path)
        block = parser.parse()
        faults = parser.faults(first_row)
        if faults.total:
            fix = faults.text_fix() or "Correct or remove these rows"
            raise InputError(f"tables: {faults.describe()}. {fix}")
        key = "the key" if len(self.source.keys) == 1 else "a part of the key"
        for number, name in enumerate(self.source.keys):
            missing = np.flatnonzero(block.missing[:, number])
            if len(missing):
                raise InputError(
                    f"tables: {path}: {len(missing):,} of {len(table):,} rows have no {name}, "
                    f"which is {key}; first: row {first_row + missing[0]:,}. Remove these rows"
                )
        columns = [block.categories[:, number] for number in range(len(self.source.keys))]
        tokens = np.ascontiguousarray(key_tokens(columns))
        self.tokens.append(tokens)
        if block.times is not None:
            self.times.append(block.times)
        for name, keys in self.keys.items():
            if name in table.column_names:
                keys.append(_stored(table.column(name), path, name))
                self.size_bytes += keys[-1].nbytes
        markers = Markers.from_texts(self.schema.missing)
        for name, blocks in zip(self.names, self.blocks, strict=True):
            if name not in table.column_names:
                blocks.append(pa.nulls(len(table)))
                continue
            stored = _stored(table.column(name), path, name)
            values = _without_empty(markers.to_null(stored))
            self.size_bytes += values.nbytes
            blocks.append(values)
        self.size_bytes += tokens.nbytes

    def _check_memory(self, available: int) -> None:
        """Check that the rows until here can be built in memory. Raises InputError."""
        needed = _BUILD_FACTOR * self.size_bytes
        if needed > available:
            raise InputError(
                f"tables: {self.source.path}: needs more than {size_text(needed)} of memory to be "
                f"built, and {size_text(available)} are available; {_JOIN}"
            )

    def _joined(self) -> pa.RecordBatch:
        """Return the stored columns with one array each, and forget their blocks."""
        arrays = []
        for name, blocks in zip(self.names, self.blocks, strict=True):
            column = f"{self.source.path}: column {name}"
            values = _concatenated(blocks, column)
            arrays.append(_numbered(values))
            blocks.clear()
        if not arrays:
            # A record batch without columns has no rows.
            return pa.record_batch({})
        return pa.record_batch(arrays, names=list(self.names))


def _no_column(path: str, name: str, names: Sequence[str]) -> InputError:
    otherwise = f"it has {first_of(names, _SHOWN_NAMES) or 'none'}"
    hint = suggest(name, names, otherwise=otherwise)
    return InputError(f"tables: {path}: column {name} not found; {hint}")


def _joined_keys(keys: Sequence[pa.Array]) -> pa.ChunkedArray:
    """Return keys for messages; their types may differ between blocks."""
    if len({each.type for each in keys}) == 1:
        return pa.chunked_array(keys)
    texts = []
    for each in keys:
        text = each if is_text(each.type) else pc.cast(each, pa.large_string())
        texts.append(pc.cast(text, pa.large_binary()))
    return pa.chunked_array(texts)


def _stored(column: pa.ChunkedArray, path: str, name: str) -> pa.Array:
    """Return a column as one array of its stored type."""
    try:
        kind = _stored_type(column.type)
        arrays = [pc.cast(resolved(chunk), kind) for chunk in column.chunks]
    except pa.ArrowException as error:
        raise InputError(
            f"tables: {path}: column {name} of type {column.type} cannot be stored ({error}). "
            "Convert it to numbers, text or lists"
        ) from None
    return pa.concat_arrays(arrays) if len(arrays) != 1 else arrays[0]


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type in which values of a type are stored: text as bytes and lists with 64-bit
    offsets, without dictionaries and extensions.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return _stored_type(kind.storage_type)
    if types.is_dictionary(kind):
        return _stored_type(kind.value_type)
    if is_text(kind):
        return pa.large_binary()
    if is_list(kind):
        return pa.large_list(_stored_type(kind.value_type))
    if types.is_map(kind):
        key = _stored_type(kind.key_type)
        item = _stored_type(kind.item_type)
        return pa.map_(key, item)
    if types.is_struct(kind):
        return pa.struct([each.with_type(_stored_type(each.type)) for each in kind])
    return kind


def _without_empty(array: pa.Array) -> pa.Array:
    """Return the array with null for empty text, which is missing too."""
    if not types.is_large_binary(array.type):
        return array
    empty = pc.equal(pc.binary_length(array), 0)
    if not pc.any(empty).as_py():
        return array
    return pc.if_else(empty, pa.scalar(None, array.type), array)


def _concatenated(blocks: Sequence[pa.Array], column: str) -> pa.Array:
    """Return blocks of a column as one array. Integers and numbers become numbers. Raises
    InputError if their types do not agree.
    """
    try:
        kinds = {block.type for block in blocks}
        schemas = [pa.schema([("", each)]) for each in kinds]
        kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        return pa.concat_arrays([pc.cast(block, kind) for block in blocks])
    except pa.ArrowException:
        names = " and ".join(sorted(str(each) for each in kinds))
        raise InputError(
            f"tables: {column} has values of types {names}. Convert them to one type"
        ) from None


def _numbered(array: pa.Array) -> pa.Array:
    """Return text of few distinct values as a dictionary, other arrays as they are."""
    if not types.is_large_binary(array.type):
        return array
    # Not all of a long column, which may have no two equal values
    sample = array[:_SAMPLE_ROWS]
    if len(sample.unique()) > _MAX_DISTINCT:
        return array
    encoded = array.dictionary_encode()
    is_short = len(encoded.dictionary) <= _MAX_DISTINCT
    return encoded if is_short else array


# -- Key index
@dataclass(frozen=True)
class _Index:
    """Arrays of native/side_tables.c."""

    keys: np.ndarray
    slots: np.ndarray
    starts: np.ndarray | None = None
    times: np.ndarray | None = None
    rows: np.ndarray | None = None

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch) -> _Index:
        """Wrap the arrays of a file, which share its memory."""
        return cls(
            **{
                name: batch.column(name).flatten().to_numpy(zero_copy_only=True)
                for name in batch.schema.names
            }
        )

    def to_batch(self) -> pa.RecordBatch:
        """Return the arrays as lists in one row, because they have different lengths."""
        lists = {}
        for name, values in vars(self).items():
            if values is not None:
                ends = pa.array([0, len(values)], pa.int64())
                lists[name] = pa.LargeListArray.from_arrays(ends, pa.array(values))
        return pa.record_batch(lists)

    def sorted_keys(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """Return all rows sorted by key; see `SideTable.sorted_keys`."""
        if self.starts is None or self.rows is None:
            order = np.argsort(self.keys, kind="stable")
            return self.keys[order], None, order
        return np.repeat(self.keys, np.diff(self.starts)), self.times, self.rows

    def by_row(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the token of each row's key, and its time in a table with `time`."""
        sorted_tokens, sorted_times, rows = self.sorted_keys()
        if sorted_times is None:
            return self.keys, None
        tokens = np.empty_like(sorted_tokens)
        tokens[rows] = sorted_tokens
        times = np.empty_like(sorted_times)
        times[rows] = sorted_times
        return tokens, times

    def find(
        self,
        tokens: np.ndarray,
        missing: np.ndarray | None,
        times: np.ndarray | None,
    ) -> np.ndarray:
        """Return the row of each key; see `SideTable.lookup`."""
        # The numbers of keys, then of rows
        numbers = np.empty(len(tokens), np.int64)
        call(
            "rayrec_find_keys",
            tokens,
            missing,
            len(tokens),
            self.keys,
            len(self.keys),
            self.slots,
            len(self.slots),
            numbers,
        )
        if times is not None and self.rows is not None:
            call(
                "rayrec_newest_rows",
                times,
                len(tokens),
                self.starts,
                self.times,
                self.rows,
                len(self.rows),
                numbers,
            )
        return numbers


def _slots(keys: np.ndarray) -> tuple[np.ndarray, int, np.ndarray]:
    """Return (slots, count of repeated keys, first two equal keys by their numbers, int64 [2]). At
    most half of the slots are used.
    """
    bits = max(1, (2 * len(keys) - 1).bit_length())
    slots = np.zeros(1 << bits, np.uint32)
    pair = np.zeros(2, np.int64)
    repeated = call(
        "rayrec_build_key_slots",
        keys,
        len(keys),
        slots,
        len(slots),
        pair,
    )
    return slots, repeated, pair


def _check_count(rows: _Rows, num_keys: int) -> None:
    if num_keys > _MAX_KEYS:
        raise InputError(
            f"tables: {rows.source.path}: has {num_keys:,} keys, at most {_MAX_KEYS:,} are "
            f"possible; {_JOIN}"
        )


def _plain_index(rows: _Rows) -> _Index:
    """Return the index of a table with one row per key. Raises InputError for a repeated key."""
    _check_count(rows, len(rows.tokens))
    slots, repeated, pair = _slots(rows.tokens)
    if repeated:
        key = " and ".join(rows.source.keys)
        raise InputError(
            f"tables: {rows.source.path}: {_repeats(rows, repeated, pair)}. Keep one row per "
            f"{key}, or name the column with the time of each row: `time`"
        )
    return _Index(rows.tokens, slots)


def _timed_index(rows: _Rows) -> _Index:
    """Return the index of a table with several rows per key, by time. Raises InputError if two have
    one time.
    """
    assert rows.times is not None
    order = np.lexsort((rows.times, rows.tokens))
    tokens = rows.tokens[order]
    times = rows.times[order]
    is_same = tokens[1:] == tokens[:-1]
    is_tie = is_same & (times[1:] == times[:-1])
    ties = np.flatnonzero(is_tie)
    if len(ties):
        first = ties[np.argmin(order[ties + 1])]
        pair = order[first : first + 2]
        raise InputError(
            f"tables: {rows.source.path}: {_repeats(rows, len(ties), pair)} with the same "
            f"{rows.source.time}. Keep one of them"
        )
    is_first = np.concatenate([[True], ~is_same])
    starts = np.append(np.flatnonzero(is_first), len(tokens))
    keys = tokens[is_first]
    _check_count(rows, len(keys))
    slots, _, _ = _slots(keys)
    return _Index(keys, slots, starts, times, order)


def _repeats(rows: _Rows, repeated: int, pair: np.ndarray) -> str:
    earlier, later = pair.tolist()
    return (
        f"{repeated:,} of {len(rows.tokens):,} rows repeat a key; first: "
        f"{rows.key_text(later)} in {rows.location(earlier)} and {rows.location(later)}"
    )


# -- Content hash
def _content_hash(rows: _Rows, source: TableSource) -> str:
    """Return `SideTable.content_hash`: SHA-256 over the tokens, the times and the columns, cut to
    32 hex digits.
    """
    digest = hashlib.sha256(
        f"{_HASH_VERSION} {len(rows.tokens)} {source.time is not None};".encode()
    )
    digest.update(rows.tokens.data)
    if rows.times is not None:
        digest.update(rows.times.data)
    for name in rows.columns.schema.names:
        digest.update(json.dumps(name).encode())
        for part in _parts(rows.columns.column(name)):
            digest.update(part)
    return digest.hexdigest()[:32]


# Arrow has many forms of equal arrays: with an offset, with or without a mask of nulls, with any
# bytes in a null's place. Only what all of them share is hashed.
def _parts(array: pa.Array) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an array's type, nulls and values, equal for equal arrays."""
    array = resolved(array)
    yield f"{array.type} {len(array)} {array.null_count};".encode()
    if array.null_count:
        yield np.packbits(array.is_null().to_numpy(zero_copy_only=False)).data
        array = array.drop_null()
    if not len(array):
        return
    kind = array.type
    if types.is_large_list(kind) or types.is_map(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        yield np.diff(offsets).data
        start = offsets[0]
        length = offsets[-1] - start
        if types.is_large_list(kind):
            yield from _parts(array.values.slice(start, length))
        else:
            yield from _parts(array.keys.slice(start, length))
            yield from _parts(array.items.slice(start, length))
    elif types.is_struct(kind):
        for each in array.flatten():
            yield from _parts(each)
    elif types.is_large_binary(kind):
        text = Text.from_array(array)
        yield np.diff(text.offsets).data
        start = text.offsets[0]
        end = text.offsets[-1]
        yield text.data[start:end].data
    elif types.is_boolean(kind):
        yield array.to_numpy(zero_copy_only=False).data
    else:
        width = kind.bit_width // 8
        start = array.offset * width
        end = start + len(array) * width
        yield memoryview(array.buffers()[1])[start:end]
