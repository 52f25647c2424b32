"""Training data from a DataFrame or Ray Dataset, written once as Parquet into the run's folder and read from there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.frames import arrow_of, is_computed, is_dataset, is_frame, with_text_names
from rayrec.data.logs.csv_reader import check_columns, present_columns
from rayrec.data.logs.table_parser import check_types
from rayrec.schema import Schema
from rayrec.workloads.base import TrainConfig

if TYPE_CHECKING:
    import pandas
    import ray.data

    Table: TypeAlias = pandas.DataFrame | ray.data.Dataset

MANIFEST = "written.json"
_GROUP_ROWS = 8192
"""Rows per row group: small enough to be shuffled as a segment without rewriting."""
_FILE_ROWS = 64 * _GROUP_ROWS


def with_paths(config: TrainConfig, folder: str, tables: Mapping[str, Table]) -> TrainConfig:
    """Return the configuration of a run in `folder` that reads the `given` data (keys "train_data" and "eval_data") from the
    output of `write`. Raises InputError if a path is set as well, for other data types, and a recipe without tables."""
    for field, data in tables.items():
        if not is_frame(data) and not is_dataset(data):
            raise InputError(f"{field}: must be a pandas DataFrame or a ray.data.Dataset, got {type(data).__name__}")
        schema = config.workload.table_schema
        if schema is None:
            raise InputError(f"{field}: recipe {config.recipe} does not train on tables. Set train_data.path")
        target, path = _folder_of(folder, field), getattr(config, field).path
        if path not in (None, target):
            raise InputError(f"{field}: cannot use both data and {field}.path {path}. Set one of them")
        config = config.updated({field: {"path": target, "files": ()}})
        if field == "train_data" and schema.header is None and schema.tokens == "any":
            # The files written below have the schema's order, in which nobody writes lines.
            config = config.updated({"workload": {"schema": {"header": []}}})
    return config


def write(config: TrainConfig, folder: str, tables: Mapping[str, Table], *, resumes: bool, note: Callable[[str], None]) -> None:
    """Write the columns of the workload's schema in row order; each table completely or not at all. If the run `resumes`,
    existing output is reused, and InputError is raised if the given data has a different number of rows, or different columns or
    types. A Dataset is not computed for this comparison. Also raises InputError for data without rows, and for a column that
    is missing or of an unusable type."""
    schema = config.workload.table_schema
    for field, data in tables.items():
        assert schema is not None
        if is_frame(data):
            data = with_text_names(data)
        target = _folder_of(folder, field)
        manifest = storage.join(target, MANIFEST)
        if resumes and storage.exists(manifest):
            _compare(storage.read_json(manifest), data, schema, field, target=target)
            note(f"Resuming with the data in {target}; the given data is not read again")
            continue
        columns, types = _columns(data, schema, field)
        storage.remove_folder(target)
        if is_frame(data):
            rows = _write_table(arrow_of(data[columns]), target, types)
        else:
            assert is_dataset(data)
            rows = _write_dataset(data.select_columns(columns), target, types)
            if not data.context.execution_options.preserve_order:
                note(f"preserve_order of Ray Data is off, so the order of row blocks may have changed in {target}")
        note(f"Wrote {rows:,} rows to {target} as Parquet (once); the run reads its {field} from there")


def _folder_of(folder: str, field: str) -> str:
    return storage.join(folder, "data", field.removesuffix("_data"))


def _columns(data: Table, schema: Schema, field: str) -> tuple[list[str], dict[str, str]]:
    """Return the columns to write and their types. For a Dataset that is not computed yet, Ray Data computes one row."""
    if is_frame(data):
        columns = _present(list(data.columns), schema, field)
        arrow_schema = arrow_of(data[columns]).schema
    else:
        assert is_dataset(data)
        dataset_schema = data.schema()
        types = dict(zip(dataset_schema.names, dataset_schema.types, strict=True)) if dataset_schema else {}
        numbered = [name for name in types if not isinstance(name, str)]
        if numbered:
            raise InputError(
                f"{field}: column names must be text, got {numbered[0]!r}. Make the Dataset of frame.rename(columns=str)"
            )
        columns = _present(list(types), schema, field)
        # Types unknown to Arrow fail when they are written.
        arrow_schema = pa.schema({name: types[name] if isinstance(types[name], pa.DataType) else pa.null() for name in columns})
    check_types(arrow_schema, schema, path=field)
    # Text from pandas (depending on its version) and Ray Data has 32-bit or 64-bit offsets.
    return columns, {name: str(arrow_schema.field(name).type).replace("large_", "") for name in columns}


def _present(names: list[str], schema: Schema, field: str) -> list[str]:
    check_columns(names, schema.columns, path=field, optional=schema.optional)
    return list(present_columns(names, schema))


def _compare(stored: dict[str, Any], data: Table, schema: Schema, field: str, *, target: str) -> None:
    """Raise InputError if the given data is not the stored one. A Dataset may take hours to compute again, so it is compared by
    what Ray Data knows of it."""
    current: dict[str, Any] = {}
    if is_frame(data):
        current = {"columns": _columns(data, schema, field)[1], "rows": len(data)}
    else:
        assert is_dataset(data)
        if data.schema(fetch_if_missing=False) is not None:
            current["columns"] = _columns(data, schema, field)[1]
        if is_computed(data):
            current["rows"] = data.count()
    for name, new in current.items():
        old = stored[name]
        if old != new:
            raise InputError(f"{target}: the run started with other data ({name}: {old} -> {new}). Use the same, or another name")


def _write_table(table: pa.Table, target: str, columns: dict[str, str]) -> int:
    if not table.num_rows:
        raise InputError(f"{target}: the DataFrame has no rows to train on")
    with storage.writing_folder(target) as folder:
        for number, start in enumerate(range(0, table.num_rows, _FILE_ROWS)):
            part = table.slice(start, _FILE_ROWS)
            pq.write_table(part, storage.join(folder, f"part-{number:06}.parquet"), row_group_size=_GROUP_ROWS)
        storage.write_json(storage.join(folder, MANIFEST), {"rows": table.num_rows, "columns": columns})
    return table.num_rows


def _write_dataset(dataset: ray.data.Dataset, target: str, columns: dict[str, str]) -> int:
    """Write with Ray Data's tasks; at a URL directly, because a folder without a manifest is ignored."""
    with contextlib.nullcontext(target) if storage.is_url(target) else storage.writing_folder(target) as folder:
        filesystem, inner = storage.resolve(folder)
        dataset.write_parquet(inner, filesystem=filesystem, row_group_size=_GROUP_ROWS)
        rows = 0
        for file in storage.list_files(folder):
            filesystem, inner = storage.resolve(file.path)
            rows += pq.read_metadata(inner, filesystem=filesystem).num_rows
        if not rows:
            raise InputError(f"{folder}: the Dataset has no rows to train on")
        storage.write_json(storage.join(folder, MANIFEST), {"rows": rows, "columns": columns})
        return rows
