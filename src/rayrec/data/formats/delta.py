"""Delta tables, whose log is read by the package `deltalake`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.parquet import open_parquet
from rayrec.data.formats.table_version import (
    LiveFile,
    TableVersion,
    cause_of,
    digest,
    same_store,
)
from rayrec.imports import require
from rayrec.storage.urls import is_url

if TYPE_CHECKING:
    from deltalake import DeltaTable

_FEATURES: Final = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
"""Features of tables that `DeltaVersion` reads, or that its reader need not know."""
_MAPPING: Final = "delta.columnMapping."
_BLOCK_ROWS: Final = 1 << 15


# What `deltalake` reads of the log, and what becomes of it:
#
#   add actions         files that were added and not removed, with their partition values
#   schema              names and types of columns, and their physical names in files
#   deletion vectors    rows of these files that stay; read at once, since a log has no list of them
#   protocol            features, of which unknown ones are rejected: they may change rows
#
# The data files themselves are read as those of other logs, with the same connections and retries.
def open_delta(folder: str, version: int | None) -> DeltaVersion:
    """Open a version of a table, None: the current one. Raises InputError for a missing version, a
    log that cannot be read, and features of tables that would change its rows.
    """
    try:
        require("deltalake", extra="lakehouse")
    except InputError as error:
        raise InputError(f"{folder}: is a Delta table; {error}") from None
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    url, options = storage.delta_options(folder)
    try:
        table = DeltaTable(url, version=version, storage_options=options)
        _check_features(table, folder)
        return DeltaVersion(table, folder)
    except InputError:
        raise
    except (DeltaError, OSError, ValueError) as error:
        shown = "the current version" if version is None else f"version {version}"
        raise InputError(
            f"{folder}: cannot read {shown} of this Delta table "
            f"({cause_of(error)}); restore its log, use another version as "
            f"{folder}@vN, or write its rows as Parquet"
        ) from None


def _check_features(table: DeltaTable, folder: str) -> None:
    protocol = table.protocol()
    unknown = sorted(set(protocol.reader_features or ()) - _FEATURES)
    if unknown:
        raise InputError(
            f"{folder}: this Delta table uses {', '.join(unknown)}, which rayrec does not read; "
            "write its current rows as Parquet"
        )
    if table.metadata().configuration.get(f"{_MAPPING}mode") == "id":
        raise InputError(
            f"{folder}: this Delta table maps columns by id, which rayrec does not read; set "
            f"{_MAPPING}mode to name, or write its current rows as Parquet"
        )


@final
class DeltaVersion(TableVersion):
    """Files that were added to a table and not removed until a version, without the rows in their
    deletion vectors. Columns that a file lacks are null. Renamed columns are found by their
    physical names.
    """

    name: ClassVar[str] = "Delta"

    def __init__(self, table: DeltaTable, folder: str) -> None:
        schema = pa.schema(table.schema().to_arrow())
        self._types = {field.name: field.type for field in schema}
        self._stored = {field.name: _physical_name(field) for field in schema}
        self._root = folder
        self._selected = _selections(table, folder)
        actions = pa.table(table.get_add_actions())
        partitions = _partitions(actions, table.metadata().partition_columns)
        rows = actions.select(["path", "size_bytes", "modification_time"]).to_pylist()
        files = [self._live_file(*pair) for pair in zip(rows, partitions, strict=True)]
        missing = self._selected.keys() - {file.path for file in files}
        if missing:
            raise ValueError(f"deletion vector of another file, {min(missing)}")
        super().__init__(
            folder,
            table.version(),
            columns={name: f"{self._stored[name]}: {self._types[name]}" for name in self._types},
            files=files,
        )

    def read(self, file: LiveFile, columns: Sequence[str]) -> Iterator[pa.Table]:
        selected = self._selected.get(file.path)
        start = 0
        with open_parquet(file.path) as parquet:
            names = parquet.schema_arrow.names
            stored = [self._stored[name] for name in columns if self._stored[name] in names]
            for batch in parquet.iter_batches(_BLOCK_ROWS, columns=stored, use_threads=False):
                table = pa.table({name: self._column(batch, name) for name in columns})
                if selected is not None:
                    # Rows behind its end are kept.
                    mask = np.ones(len(table), bool)
                    part = selected[start : start + len(table)]
                    mask[: len(part)] = part
                    table = table.filter(pa.array(mask))
                start += batch.num_rows
                yield table

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        kind = self._types[name]
        stored = self._stored[name]
        if stored not in batch.schema.names:
            return pa.nulls(batch.num_rows, kind)
        values = batch.column(stored)
        if values.type == kind or pa.types.is_nested(kind):
            return values
        # Spark's old times have nanoseconds
        return values.cast(kind, safe=not pa.types.is_timestamp(kind))

    def _live_file(
        self, action: Mapping[str, Any], partitions: Mapping[str, str | None]
    ) -> LiveFile:
        path = _data_file(action["path"], self._root)
        selected = self._selected.get(path)
        return LiveFile(
            path,
            action["size_bytes"],
            action["modification_time"] * 1_000_000,
            partitions,
            "" if selected is None else digest(selected.tobytes()),
        )


def _physical_name(field: pa.Field) -> str:
    """Return the name of a column in data files."""
    name = (field.metadata or {}).get(f"{_MAPPING}physicalName".encode())
    return field.name if name is None else name.decode()


def _partitions(actions: pa.Table, names: Sequence[str]) -> list[dict[str, str | None]]:
    """Return the partition columns and their values, as text, of each file."""
    if not names or not actions.num_rows:
        return [{} for _ in range(actions.num_rows)]
    values = actions.column("partition").combine_chunks()
    texts = [values.field(name).cast(pa.string()).to_pylist() for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*texts, strict=True)]


def _selections(table: DeltaTable, folder: str) -> dict[str, np.ndarray]:
    """Return whether each row is kept, bool, up to the last removed one, of the files with a
    deletion vector.
    """
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return {}
    selected = {}
    root = table.table_uri.rstrip("/") + "/"
    for batch in table.deletion_vectors():
        vectors = pa.record_batch(batch)
        for uri, rows in zip(
            vectors.column("filepath").to_pylist(), vectors.column("selection_vector"), strict=True
        ):
            path = _data_file(uri.removeprefix(root), folder)
            selected[path] = rows.values.to_numpy(zero_copy_only=False)
    return selected


def _data_file(path: str, folder: str) -> str:
    """Return the path or URL of a data file, which a log has percent-encoded, relative to the
    table or as a URL.
    """
    decoded = unquote(path)
    if is_url(decoded):
        return same_store(decoded, folder)
    return storage.join(folder, decoded)
