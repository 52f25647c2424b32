"""Versions of Delta and Iceberg tables as logs: exactly their rows, in one order, again in a
resumed run.
"""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.engines import LoopEngine
from builders.faults import rejects
from builders.runs import LEAN, train
from builders.tables import (
    commit_deletes,
    create_iceberg,
    delta_table,
    edit_delta_log,
    selection,
    write_delta,
)

from rayrec import recipes, storage
from rayrec.data.engine import TaskContext
from rayrec.data.formats.registry import find_format
from rayrec.data.log_source import LogSource
from rayrec.schema import Schema

SCHEMA = Schema(label="click", sparse=("user",), tokens="any")
KINDS = ["Delta", "Iceberg"]


def rows_of(first: int, count: int) -> pa.Table:
    rows = range(first, first + count)
    return pa.table({"click": [row % 2 for row in rows], "user": [f"u{row}" for row in rows]})


def write_table(kind: str, folder: Path, rows: pa.Table) -> Callable[[pa.Table], object]:
    """Write a table of one commit, and return a function that appends rows in another."""
    if kind == "Delta":
        write_delta(rows, folder)
        return lambda more: write_delta(more, folder)
    table = create_iceberg(folder, rows.schema)
    table.append(rows)
    return table.append  # type: ignore[no-any-return]


def live_rows(path: Path | str) -> list[dict[str, Any]]:
    """Return the rows of a log in order, with the columns of its files."""
    rows = []
    for file in LogSource.at(str(path)).raw_files():
        for table in find_format(file.path, SCHEMA).tables(file.path, SCHEMA, None):
            rows += table.to_pylist()
    return rows


def users(path: Path | str) -> list[str]:
    return [row["user"] for row in live_rows(path)]


# -- rows of a version
@pytest.mark.parametrize("kind", KINDS)
def test_version_reads_committed_rows(kind: str, tmp_path: Path) -> None:
    append = write_table(kind, tmp_path / "log", rows_of(0, 2))
    before = LogSource.at(str(tmp_path / "log")).pinned()
    append(rows_of(7, 1))
    assert users(before) == ["u0", "u1"]
    assert sorted(users(tmp_path / "log")) == ["u0", "u1", "u7"]
    assert LogSource.at(str(tmp_path / "log")).pinned() != before


def test_removed_and_uncommitted_files_are_not_read(tmp_path: Path) -> None:
    write_delta(rows_of(0, 3), tmp_path)
    pq.write_table(rows_of(20, 3), tmp_path / "part-1.parquet")
    write_delta(rows_of(3, 2), tmp_path, mode="overwrite")
    assert users(tmp_path) == ["u3", "u4"]


@pytest.mark.parametrize("kind", KINDS)
def test_files_have_order_of_their_paths(kind: str, tmp_path: Path) -> None:
    append = write_table(kind, tmp_path / "log", rows_of(0, 1))
    for number in range(1, 6):
        append(rows_of(number, 1))
    files = [file.path for file in LogSource.at(str(tmp_path / "log")).list_files()]
    assert files == [file.path for file in storage.natural_order(map(at_path, reversed(files)))]
    assert users(tmp_path / "log") == users(tmp_path / "log")


def at_path(path: str) -> storage.File:
    return storage.File(path, 1, 0)


def test_partition_values_come_from_log(tmp_path: Path) -> None:
    """A file may be in any folder, here one without KEY=VALUE."""
    table = rows_of(0, 2).append_column("day", pa.array(["a b/c", None]))
    write_delta(table, tmp_path, by=["day"])

    def moved(action: dict[str, Any]) -> None:
        if "add" in action:
            name = Path(action["add"]["path"]).name
            found = next(tmp_path.rglob(name))
            (tmp_path / "x").mkdir(exist_ok=True)
            found.rename(tmp_path / "x" / name)
            action["add"]["path"] = f"x/{name}"

    edit_delta_log(tmp_path, moved)
    schema = SCHEMA.replace(sparse=("user", "day"))
    context = TaskContext(LoopEngine(), str(tmp_path / "cache"))
    index = LogSource.at(str(tmp_path)).index(schema, segment_bytes=1000, context=context)
    folders = [Path(segment.path).parent.name for segment in index.segments]
    assert folders == ["day=__HIVE_DEFAULT_PARTITION__", "day=a%20b%2Fc"]


def test_deletion_vectors_remove_rows(tmp_path: Path) -> None:
    write_delta(rows_of(0, 6), tmp_path)

    def deleted(action: dict[str, Any]) -> None:
        if "protocol" in action:
            action["protocol"] = {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": ["deletionVectors"],
                "writerFeatures": ["deletionVectors"],
            }
        if "add" in action:
            action["add"]["deletionVector"] = selection([1, 3])

    plain = LogSource.at(str(tmp_path)).list_files()
    edit_delta_log(tmp_path, deleted)
    assert users(tmp_path) == ["u0", "u2", "u4", "u5"]
    # Other data than the file with all rows
    assert LogSource.at(str(tmp_path)).list_files() != plain


def test_renamed_and_added_columns_are_mapped(tmp_path: Path) -> None:
    write_delta(pa.table({"col-1": [0, 1], "col-2": ["a", "b"]}), tmp_path, by=["col-2"])

    def mapped(action: dict[str, Any]) -> None:
        if "protocol" in action:
            action["protocol"] = {"minReaderVersion": 2, "minWriterVersion": 5}
        if "metaData" in action:
            described = json.loads(action["metaData"]["schemaString"])
            described["fields"].append({"name": "col-3", "type": "double", "nullable": True})
            for number, name in enumerate(("click", "user", "price")):
                field = described["fields"][number]
                field["metadata"] = {
                    "delta.columnMapping.id": number + 1,
                    "delta.columnMapping.physicalName": field["name"],
                }
                field["name"] = name
            action["metaData"]["schemaString"] = json.dumps(described)
            action["metaData"]["partitionColumns"] = ["user"]
            action["metaData"]["configuration"] = {"delta.columnMapping.mode": "name"}

    edit_delta_log(tmp_path, mapped)
    assert live_rows(tmp_path) == [{"click": 0, "price": None}, {"click": 1, "price": None}]
    names = [Path(file.path).parent.name for file in LogSource.at(str(tmp_path)).list_files()]
    assert names == ["user=a", "user=b"]


def test_iceberg_field_ids_map_columns(tmp_path: Path) -> None:
    table = create_iceberg(tmp_path / "log", rows_of(0, 1).schema)
    table.append(rows_of(0, 1))
    with table.update_schema() as change:
        change.rename_column("user", "visitor")
    table.append(pa.table({"click": [1], "visitor": ["u9"]}))
    assert {row["visitor"] for row in live_rows(tmp_path / "log")} == {"u0", "u9"}


def test_iceberg_position_deletes_remove_rows(tmp_path: Path) -> None:
    table = create_iceberg(tmp_path / "log", rows_of(0, 1).schema)
    table.append(rows_of(0, 4))
    (task,) = table.scan().plan_files()
    removed = pa.table({"file_path": [task.file.file_path] * 2, "pos": [0, 2]})
    commit_deletes(table, removed, tmp_path / "deletes.parquet", "POSITION_DELETES")
    assert users(tmp_path / "log") == ["u1", "u3"]


# -- rejected tables
def test_iceberg_equality_deletes_are_rejected(tmp_path: Path) -> None:
    table = create_iceberg(tmp_path / "log", rows_of(0, 1).schema)
    table.append(rows_of(0, 4))
    removed = pa.table({"click": [1]})
    commit_deletes(table, removed, tmp_path / "deletes.parquet", "EQUALITY_DELETES", ids=[1])
    rejects("equality deletes.*write its rows as Parquet", live_rows, tmp_path / "log")


@pytest.mark.parametrize(
    ("protocol", "settings", "message"),
    [
        ({"readerFeatures": ["newFeature"]}, {}, "newFeature"),
        ({"readerFeatures": ["catalogManaged"]}, {}, "catalog-managed"),
        (
            {"readerFeatures": ["columnMapping"]},
            {"delta.columnMapping.mode": "id"},
            "maps columns by id.*set delta.columnMapping.mode to name",
        ),
    ],
)
def test_unknown_delta_features_are_rejected(
    tmp_path: Path,
    protocol: dict[str, Any],
    settings: dict[str, str],
    message: str,
) -> None:
    write_delta(rows_of(0, 1), tmp_path)

    def changed(action: dict[str, Any]) -> None:
        if "protocol" in action:
            action["protocol"] = {"minReaderVersion": 3, "minWriterVersion": 7} | protocol
            action["protocol"]["writerFeatures"] = action["protocol"]["readerFeatures"]
        if "metaData" in action:
            action["metaData"]["configuration"] = settings
            described = json.loads(action["metaData"]["schemaString"])
            for number, field in enumerate(described["fields"]):
                field["metadata"] = {
                    "delta.columnMapping.id": number + 1,
                    "delta.columnMapping.physicalName": field["name"],
                }
            action["metaData"]["schemaString"] = json.dumps(described)

    edit_delta_log(tmp_path, changed)
    rejects(message, live_rows, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_version_is_rejected(kind: str, tmp_path: Path) -> None:
    write_table(kind, tmp_path / "log", rows_of(0, 1))
    rejects(rf"{tmp_path}/log: .* 123\b", live_rows, f"{tmp_path}/log@v123")
    rejects("no such file or folder", live_rows, f"{tmp_path}/other@v0")


def test_two_newest_metadata_files_are_rejected(tmp_path: Path) -> None:
    write_table("Iceberg", tmp_path / "log", rows_of(0, 1))
    pinned = LogSource.at(str(tmp_path / "log")).pinned()
    newest = max((tmp_path / "log" / "metadata").glob("*.metadata.json"))
    shutil.copy(newest, newest.with_name(f"{newest.name[:5]}-other.metadata.json"))
    rejects("may both be .* newest metadata; name the snapshot", live_rows, tmp_path / "log")
    assert users(pinned) == ["u0"]


@pytest.mark.parametrize("kind", KINDS)
def test_tables_need_extra(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = {"Delta": "_delta_log/0.json", "Iceberg": "metadata/v1.metadata.json"}[kind]
    (tmp_path / marker).parent.mkdir()
    (tmp_path / marker).write_text("{}")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("deltalake", "pyiceberg") else find_spec(name),
    )
    rejects(
        rf"{tmp_path}: is an? {kind} table; .* Run pip install 'rayrec\[lakehouse\]'",
        LogSource.at(str(tmp_path)).raw_files,
    )


def test_files_of_tables_cannot_be_named(tmp_path: Path) -> None:
    write_delta(rows_of(0, 1), tmp_path)
    rejects(
        "is a Delta table.*remove --train-data.files",
        LogSource.at(str(tmp_path), ["a.parquet"]).raw_files,
    )


def test_plain_folder_may_be_named_like_version(tmp_path: Path) -> None:
    (tmp_path / "log@v3").mkdir()
    pq.write_table(rows_of(0, 2), tmp_path / "log@v3" / "a.parquet")
    assert users(tmp_path / "log@v3") == ["u0", "u1"]


# -- runs
def run_of(path: Path | str, folder: Path, **changes: Any) -> Any:
    schema = SCHEMA.replace(sparse=("user",))
    config = recipes.clicks(str(path), schema=schema)
    fields: dict[str, Any] = {"storage_path": str(folder), "name": "run", "batch_size": 8, **LEAN}
    fields |= {"early_stopping": {"patience": 0}, **changes}
    return train(config.replace(**fields))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("kind", KINDS)
def test_resume_reads_stored_version(kind: str, tmp_path: Path) -> None:
    append = write_table(kind, tmp_path / "log", rows_of(0, 200))
    pinned = LogSource.at(str(tmp_path / "log")).pinned()
    run_of(tmp_path / "log", tmp_path / "runs", steps=3)
    append(rows_of(500, 300))
    resumed = run_of(tmp_path / "log", tmp_path / "runs", steps=6)
    run_of(pinned, tmp_path / "others", steps=3)
    same = run_of(pinned, tmp_path / "others", steps=6)
    assert resumed.summary["weights_sha256"] == same.summary["weights_sha256"]
    config = storage.read_text(f"{tmp_path}/runs/run/config.yaml")
    assert f"path: {pinned}" in config
    # Another run reads the rows of now
    later = run_of(tmp_path / "log", tmp_path / "runs", name="later", steps=6)
    assert later.summary["data"]["train_data"]["files"] == 2


@pytest.mark.usefixtures("own_cache")
def test_resume_rejects_vacuumed_files(tmp_path: Path) -> None:
    write_delta(rows_of(0, 200), tmp_path / "log")
    run_of(tmp_path / "log", tmp_path / "runs", steps=3)
    write_delta(rows_of(500, 200), tmp_path / "log", mode="overwrite")
    delta_table(tmp_path / "log").vacuum(0, dry_run=False, enforce_retention_duration=False)
    shutil.rmtree(tmp_path / "runs" / ".cache")
    rejects(
        "no such file, but version 0 of the Delta table .*vacuumed or expired.*another --name",
        run_of,
        tmp_path / "log",
        tmp_path / "runs",
        steps=6,
    )


@pytest.mark.usefixtures("own_cache")
def test_unchanged_files_are_converted_once(tmp_path: Path) -> None:
    """A version's copy of a file serves later versions."""
    write_delta(rows_of(0, 20), tmp_path / "log")
    cache = tmp_path / "cache"
    for count in (1, 2):
        context = TaskContext(LoopEngine(), str(cache))
        index = LogSource.at(str(tmp_path / "log")).index(
            SCHEMA,
            segment_bytes=1 << 20,
            context=context,
        )
        assert index.rows == 20 * count
        assert len(list((cache / "tables").iterdir())) == count
        write_delta(rows_of(20, 20), tmp_path / "log")
