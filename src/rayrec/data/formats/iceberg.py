"""Iceberg tables, which are read by the package `pyiceberg`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, final

import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.table_version import (
    LiveFile,
    TableVersion,
    cause_of,
    digest,
    same_store,
)
from rayrec.imports import require

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.table import FileScanTask, StaticTable

_METADATA: Final = re.compile(r"v?(\d+)(-.*|\..*)?\.metadata\.json")
"""Names of metadata files: 00003-UUID of a catalog, v3 without one."""


def open_iceberg(folder: str, version: int | None) -> IcebergVersion:
    """Open a snapshot of a table, None: the current one of its newest metadata file. Raises
    InputError for a missing snapshot, several newest metadata files, and features of tables that
    pyiceberg does not read, such as equality deletes.
    """
    try:
        require("pyiceberg", extra="lakehouse")
    except InputError as error:
        raise InputError(f"{folder}: is an Iceberg table; {error}") from None
    shown = "the current snapshot" if version is None else f"snapshot {version}"
    try:
        table, snapshot = _find_snapshot(folder, version)
        return IcebergVersion(table, folder, snapshot)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise InputError(
            f"{folder}: cannot read {shown} of this Iceberg table "
            f"({cause_of(error)}); write its rows as Parquet, or use another "
            f"snapshot as {folder}@vN"
        ) from None


# A folder has a metadata file for each commit. Only the catalog knows which is the current one:
#
#   TABLE        the file with the highest number; several such files are commits of which at most
#                one succeeded, so they are rejected
#   TABLE@vN     the newest file with snapshot N. Later ones lack it after it expired
def _find_snapshot(folder: str, version: int | None) -> tuple[StaticTable, int]:
    """Return the table as its newest metadata file with the snapshot describes it, and the ID of
    the snapshot.
    """
    newest = _metadata_files(folder)
    if version is None:
        number = newest[0][0]
        candidates = [path for each, path in newest if each == number]
        if len(candidates) > 1:
            names = " and ".join(map(storage.name_of, candidates))
            raise InputError(
                f"{folder}: {names} may both be this Iceberg table's newest metadata; name the "
                f"snapshot that its catalog has, as {folder}@vN"
            )
        table = _load(folder, candidates[0])
        snapshot = table.current_snapshot()
        if snapshot is None:
            raise InputError(f"{folder}: this Iceberg table has no rows; write some")
        return table, snapshot.snapshot_id
    for _, path in newest:
        table = _load(folder, path)
        if table.snapshot_by_id(version) is not None:
            return table, version
    raise InputError(
        f"{folder}: this Iceberg table has no snapshot {version}; it expired, or the number is "
        "wrong. Use a later snapshot under another --name"
    )


def _metadata_files(folder: str) -> list[tuple[int, str]]:
    """Return the metadata files and their numbers, the newest first."""
    metadata = storage.join(folder, "metadata")
    files = []
    for name in storage.list_folder(metadata):
        match = _METADATA.fullmatch(name)
        if match:
            files.append((int(match[1]), storage.join(metadata, name)))
    if not files:
        raise InputError(
            f"{metadata}: has no metadata file of a known name, such as v1.metadata.json"
        )
    return sorted(files, reverse=True)


def _load(folder: str, path: str) -> StaticTable:
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.serializers import FromInputFile
    from pyiceberg.table import StaticTable

    io = _storage_io(folder)
    metadata = FromInputFile.table_metadata(io.new_input(path))
    return StaticTable((folder,), metadata, path, io, NoopCatalog(folder))


def _storage_io(folder: str) -> FileIO:
    """Return an interface to files that opens them as all files of logs."""
    from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

    class StorageIO(PyArrowFileIO):
        """Files at their locations, with the options of the table's URL."""

        def new_input(self, location: str) -> PyArrowFile:
            filesystem, inner = storage.resolve(same_store(location, folder))
            return PyArrowFile(location, inner, filesystem)

    return StorageIO()


@final
class IcebergVersion(TableVersion):
    """Data files of a snapshot, read by pyiceberg without removed rows, with the snapshot's
    columns.
    """

    name: ClassVar[str] = "Iceberg"

    def __init__(self, table: StaticTable, folder: str, snapshot: int) -> None:
        self._table = table
        scan = table.scan(snapshot_id=snapshot)
        self._schema = scan.projection()
        self._tasks: dict[str, FileScanTask] = {}
        described = table.snapshot_by_id(snapshot)
        assert described is not None
        files = []
        for task in scan.plan_files():
            file = self._live_file(task, folder, described.timestamp_ms)
            files.append(file)
            self._tasks[file.path] = task
        super().__init__(
            folder,
            snapshot,
            columns={field.name: str(field) for field in self._schema.fields},
            files=files,
        )

    def read(self, file: LiveFile, columns: Sequence[str]) -> Iterator[pa.Table]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        schema = self._schema.select(*columns)
        scan = ArrowScan(self._table.metadata, self._table.io, schema, AlwaysTrue())
        try:
            for batch in scan.to_record_batches([self._tasks[file.path]]):
                yield pa.Table.from_batches([batch]).select(list(columns))
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            raise InputError(
                f"{file.path}: cannot be read as a file of {self.title} "
                f"({cause_of(error)}); restore it"
            ) from None

    def _live_file(self, task: FileScanTask, folder: str, time_ms: int) -> LiveFile:
        file = task.file
        kind = str(file.file_format.value)
        if kind not in ("PARQUET", "ORC"):
            raise NotImplementedError(f"{file.file_path} is an {kind} file")
        deletes = sorted(each.file_path for each in task.delete_files)
        return LiveFile(
            same_store(file.file_path, folder),
            file.file_size_in_bytes,
            time_ms * 1_000_000,
            self._partitions(task),
            digest(repr(deletes).encode()) if deletes else "",
        )

    def _partitions(self, task: FileScanTask) -> dict[str, str | None]:
        """Return the columns by whose values the table is partitioned; those of transforms, such as
        days of a time, are not columns.
        """
        from pyiceberg.transforms import IdentityTransform

        columns = {field.field_id: field for field in self._schema.fields}
        partitions: dict[str, str | None] = {}
        for number, field in enumerate(self._table.specs()[task.file.spec_id].fields):
            column = columns.get(field.source_id)
            if column is not None and isinstance(field.transform, IdentityTransform):
                value = task.file.partition[number]
                text = field.transform.to_human_string(column.field_type, value)
                partitions[column.name] = None if value is None else text
        return partitions
