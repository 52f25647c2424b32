"""Tables of Delta and Iceberg, written by their own packages."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def write_delta(
    rows: pa.Table, folder: Path | str, *, by: Sequence[str] = (), mode: str = "append"
) -> None:
    """Commit rows to a table, partitioned by columns. Skips the test without the package."""
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(folder), rows, partition_by=list(by) or None, mode=mode)


def delta_table(folder: Path | str) -> Any:
    return pytest.importorskip("deltalake").DeltaTable(str(folder))


def create_iceberg(folder: Path, kinds: pa.Schema, *, by: Sequence[str] = ()) -> Any:
    """Create a table in the folder, partitioned by columns, and return it. Skips the test without
    the package.
    """
    sql = pytest.importorskip("pyiceberg.catalog.sql")
    transforms = pytest.importorskip("pyiceberg.transforms")
    folder.parent.mkdir(parents=True, exist_ok=True)
    catalog = sql.SqlCatalog("test", uri=f"sqlite:///{folder}.db", warehouse=folder.parent.as_uri())
    catalog.create_namespace_if_not_exists("space")
    table = catalog.create_table("space.log", kinds, location=f"file://{folder}")
    with table.update_spec() as spec:
        for name in by:
            spec.add_field(name, transforms.IdentityTransform(), name)
    return catalog.load_table("space.log")


def edit_delta_log(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change each action of a table's first commit."""
    commit = folder / "_delta_log" / "00000000000000000000.json"
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    for action in actions:
        change(action)
    commit.write_text("".join(f"{json.dumps(action)}\n" for action in actions))


_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def selection(removed: Sequence[int]) -> dict[str, Any]:
    """Return the deletion vector of some rows, written inline into a Delta log."""
    rows = pytest.importorskip("pyroaring").BitMap(removed).serialize()
    # Magic number, one bitmap of 32 bits, its high bits
    data = struct.pack("<IQI", 1681511377, 1, 0) + rows
    padded = data + bytes(-len(data) % 4)
    text = ""
    for start in range(0, len(padded), 4):
        word = int.from_bytes(padded[start : start + 4], "big")
        text += "".join(_Z85[word // 85**place % 85] for place in (4, 3, 2, 1, 0))
    return {
        "storageType": "i",
        "pathOrInlineDv": text,
        "sizeInBytes": len(data),
        "cardinality": len(removed),
    }


def commit_deletes(
    table: Any, rows: pa.Table, path: Path, content: str, *, ids: Sequence[int] | None = None
) -> None:
    """Commit a file of deletes to an Iceberg table, as engines that merge on read do. pyiceberg
    itself rewrites data files.
    """
    from pyiceberg import manifest
    from pyiceberg.table import snapshots, update

    class Deletes(manifest.ManifestWriterV2):
        def content(self) -> manifest.ManifestContent:
            return manifest.ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    pq.write_table(rows, path)
    number = table.metadata.new_snapshot_id()
    before = table.current_snapshot()
    order = table.metadata.next_sequence_number()
    file = manifest.DataFile.from_args(
        content=manifest.DataFileContent[content],
        file_path=f"file://{path}",
        file_format=manifest.FileFormat.PARQUET,
        partition=manifest.Record(),
        record_count=rows.num_rows,
        file_size_in_bytes=path.stat().st_size,
        equality_ids=ids,
    )
    entry = manifest.ManifestEntry.from_args(
        status=manifest.ManifestEntryStatus.ADDED, snapshot_id=number, data_file=file
    )
    metadata = f"{table.location()}/metadata"
    output = table.io.new_output(f"{metadata}/{number}-m0.avro")
    with Deletes(table.spec(), table.schema(), output, number, "null") as writer:
        writer.add_entry(entry)
    listed = f"{metadata}/snap-{number}.avro"
    with manifest.write_manifest_list(
        2, table.io.new_output(listed), number, before.snapshot_id, order, "null"
    ) as manifests:
        manifests.add_manifests([*before.manifests(table.io), writer.to_manifest_file()])
    snapshot = snapshots.Snapshot(
        snapshot_id=number,
        parent_snapshot_id=before.snapshot_id,
        sequence_number=order,
        timestamp_ms=before.timestamp_ms + 1000,
        manifest_list=listed,
        summary=snapshots.Summary(snapshots.Operation.DELETE),
        schema_id=table.schema().schema_id,
    )
    changes = (
        update.AddSnapshotUpdate(snapshot=snapshot),
        update.SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=number),
    )
    table.catalog.commit_table(table, (), changes)
    table.refresh()
