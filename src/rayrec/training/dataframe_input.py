"""Training data from a DataFrame, Arrow table or Dataset, written once as Parquet into the run
folder and read from there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.frame_files import num_rows, pick_columns, write_rows
from rayrec.data.frames import (
    DATA_TYPES,
    is_computed,
    is_dataset,
    is_frame,
    is_rows,
    with_text_names,
)
from rayrec.schema import Schema
from rayrec.workloads.base import TrainConfig

if TYPE_CHECKING:
    from rayrec.data.frame_files import Rows

MANIFEST = "written.json"
_ARGUMENTS: Final = {"train_data": "data", "eval_data": "eval_data"}
"""Arguments of `rayrec.train` with the rows for a field of the configuration, for messages."""


def with_paths(config: TrainConfig, folder: str, tables: Mapping[str, Rows]) -> TrainConfig:
    """Return the configuration of a run in `folder` that reads what `write` makes from `tables`
    (keys "train_data" and "eval_data"). Raises InputError if a path is set as well, for other data
    types, and a recipe without tables.
    """
    for field, data in tables.items():
        name = _ARGUMENTS[field]
        if not is_rows(data):
            raise InputError(f"{name}: must be a path, {DATA_TYPES}, got {type(data).__name__}")
        schema = config.workload.table_schema
        if schema is None:
            raise InputError(
                f"{name}: recipe {config.recipe} does not train on tables. Set train_data.path"
            )
        target = _data_folder(folder, field)
        path = getattr(config, field).path
        if path not in (None, target):
            raise InputError(
                f"{name}: cannot use both rows and {field}.path {path}. Set one of them"
            )
        config = config.updated({field: {"path": target, "files": ()}})
        if field == "train_data" and schema.header is None and schema.tokens == "any":
            # The files written below have the schema's order, in which nobody writes lines.
            config = config.updated({"workload": {"schema": {"header": []}}})
    return config


def write(
    config: TrainConfig,
    folder: str,
    tables: Mapping[str, Rows],
    *,
    resumes: bool,
    note: Callable[[str], None],
) -> None:
    """Write the columns of the workload's schema in row order; each table completely or not at all.
    If the run `resumes`, existing output is reused, and InputError is raised if the given data has
    a different number of rows, or different columns or types. A Dataset is not computed for this
    comparison. Also raises InputError for data without rows, and for a column that is missing or of
    an unusable type.
    """
    schema = config.workload.table_schema
    for field, data in tables.items():
        assert schema is not None
        if is_frame(data):
            data = with_text_names(data)
        target = _data_folder(folder, field)
        manifest = storage.join(target, MANIFEST)
        if resumes and storage.exists(manifest):
            _compare(storage.read_json(manifest), data, schema, field, target=target)
            note(f"Resuming with the data in {target}; the given data is not read again")
            continue
        columns, types = pick_columns(data, schema, _ARGUMENTS[field])
        storage.remove_folder(target)
        rows = write_rows(data, columns, target, functools.partial(_write_manifest, columns=types))
        if is_dataset(data) and not data.context.execution_options.preserve_order:
            note(
                "preserve_order of Ray Data is off, so the order of row blocks may have changed "
                f"in {target}"
            )
        note(
            f"Wrote {rows:,} rows to {target} as Parquet (once); the run reads its {field} from "
            "there"
        )


def _data_folder(folder: str, field: str) -> str:
    return storage.join(folder, "data", field.removesuffix("_data"))


def _write_manifest(folder: str, rows: int, *, columns: dict[str, str]) -> None:
    storage.write_json(storage.join(folder, MANIFEST), {"rows": rows, "columns": columns})


def _compare(
    stored: dict[str, Any], data: Rows, schema: Schema, field: str, *, target: str
) -> None:
    """Raise InputError if the given data is not the stored one. A Dataset may take hours to compute
    again, so it is compared by what Ray Data knows of it.
    """
    current: dict[str, Any] = {}
    if not is_dataset(data) or data.schema(fetch_if_missing=False) is not None:
        current["columns"] = pick_columns(data, schema, _ARGUMENTS[field])[1]
    if not is_dataset(data) or is_computed(data):
        current["rows"] = num_rows(data)
    for name, new in current.items():
        old = stored[name]
        if old != new:
            raise InputError(
                f"{target}: the run started with other data ({name}: {old} -> {new}). Use the "
                "same, or another name"
            )
