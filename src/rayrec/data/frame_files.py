"""Parquet files of pandas DataFrames, Arrow tables and Ray Datasets, for all readers of paths."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.columns import check_columns, check_extra, present_columns
from rayrec.data.frames import (
    DATA_TYPES,
    frame_to_arrow,
    is_dataset,
    is_frame,
    is_rows,
    with_text_names,
)
from rayrec.data.logs.table_parser import check_types
from rayrec.schema import Schema

if TYPE_CHECKING:
    import pandas
    import ray.data

    Rows: TypeAlias = pandas.DataFrame | pa.Table | ray.data.Dataset

_GROUP_ROWS: Final = 8192
"""Rows per row group: small enough to be shuffled as a segment without rewriting."""
_FILE_ROWS: Final = 64 * _GROUP_ROWS
_UNFINISHED: Final = "unfinished.json"


def pick_columns(
    data: Rows, schema: Schema | None, name: str, extra: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Return the columns to write and their types. Ray Data computes one row of a lazy Dataset.

    Args:
        data: Rows in memory.
        schema: Schema whose columns are written. None: all columns.
        name: Name of the argument with the rows, which messages begin with.
        extra: Further columns to write.

    Raises InputError for a missing column and unusable types.
    """
    if is_dataset(data):
        types = _column_types(data)
        numbered = [column for column in types if not isinstance(column, str)]
        if numbered:
            raise InputError(
                f"{name}: column names must be text, got {numbered[0]!r}. Make the Dataset of "
                "frame.rename(columns=str)"
            )
        columns = _selected(list(types), schema, name, extra)
        # Types unknown to Arrow fail when they are written.
        arrow_schema = pa.schema(
            {
                column: types[column] if isinstance(types[column], pa.DataType) else pa.null()
                for column in columns
            }
        )
    else:
        columns = _selected(column_names(data), schema, name, extra)
        arrow_schema = _to_table(data, columns).schema
    if schema is not None:
        check_types(arrow_schema, schema, path=name)
    # Text from pandas (depending on its version) and Ray Data has 32-bit or 64-bit offsets.
    return columns, {
        column: str(arrow_schema.field(column).type).replace("large_", "") for column in columns
    }


def _column_types(dataset: ray.data.Dataset) -> dict[Any, Any]:
    """Return the type of each column by name, None if unknown. Names of DataFrame blocks may be
    numbers.
    """
    schema = dataset.schema()
    if schema is None:
        return {}
    try:
        types = schema.types
    except pa.ArrowException:  # Ray cannot convert lists of texts in blocks of pandas
        types = [None] * len(schema.names)
    return dict(zip(schema.names, types, strict=True))


def column_names(data: Rows) -> list[str]:
    """Return the names of the columns."""
    if is_dataset(data):
        return list(data.schema().names)
    if isinstance(data, pa.Table):
        return list(data.column_names)
    return list(map(str, data.columns))


def _selected(
    names: list[str], schema: Schema | None, name: str, extra: Sequence[str]
) -> list[str]:
    check_extra(names, extra, path=name)
    if schema is None:
        return names
    check_columns(names, schema.columns, path=name, optional=schema.optional)
    return list(dict.fromkeys([*present_columns(names, schema), *extra]))


def _to_table(data: Any, columns: Sequence[str]) -> pa.Table:
    if isinstance(data, pa.Table):
        return data.select(list(columns))
    return frame_to_arrow(data[list(columns)])


def first_rows(data: Rows, rows: int) -> pa.Table:
    """Return at most the first `rows` rows, with all columns. Ray Data computes the first blocks of
    a lazy Dataset. Raises InputError for a column of mixed types.
    """
    if is_dataset(data):
        with _in_order(data):
            tables = list(data.limit(rows).iter_batches(batch_size=None, batch_format="pyarrow"))
        return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
    if isinstance(data, pa.Table):
        return data.slice(0, rows)
    return frame_to_arrow(with_text_names(data).head(rows))


def num_rows(data: Rows) -> int:
    """Return the number of rows. Ray Data may read a lazy Dataset for it."""
    if is_dataset(data):
        return data.count()
    return len(data)


def write_rows(
    data: Rows, columns: Sequence[str], target: str, write_extra: Callable[[str, int], None]
) -> int:
    """Write the columns of all rows, in order, as Parquet files into the new folder `target`,
    completely or not at all; a Dataset at a URL directly. `write_extra(folder, rows)` is called
    last. Returns the number of rows. Raises InputError without rows.
    """
    if is_dataset(data):
        return _write_dataset(data.select_columns(list(columns)), target, write_extra)
    table = _to_table(data, columns)
    if not table.num_rows:
        kind = "table" if isinstance(data, pa.Table) else "DataFrame"
        raise InputError(f"{target}: the {kind} has no rows to train on or to score")
    with storage.writing_folder(target) as folder:
        for number, start in enumerate(range(0, table.num_rows, _FILE_ROWS)):
            part = table.slice(start, _FILE_ROWS)
            pq.write_table(
                part, storage.join(folder, f"part-{number:06}.parquet"), row_group_size=_GROUP_ROWS
            )
        write_extra(folder, table.num_rows)
    return table.num_rows


def _write_dataset(
    dataset: ray.data.Dataset, target: str, write_extra: Callable[[str, int], None]
) -> int:
    """Write with Ray Data's tasks; at a URL directly, because a folder without a manifest is
    ignored. A mark makes it removable after a kill: Ray Data chooses the names of files.
    """
    with (
        contextlib.nullcontext(target)
        if storage.is_url(target)
        else storage.writing_folder(target) as folder
    ):
        storage.make_folder(folder)
        mark = storage.join(folder, _UNFINISHED)
        storage.write_json(mark, {})
        filesystem, inner = storage.resolve(folder)
        dataset.write_parquet(inner, filesystem=filesystem, row_group_size=_GROUP_ROWS)
        rows = 0
        for file in storage.list_files(folder):
            filesystem, inner = storage.resolve(file.path)
            rows += pq.read_metadata(inner, filesystem=filesystem).num_rows
        if not rows:
            raise InputError(f"{folder}: the Dataset has no rows to train on or to score")
        write_extra(folder, rows)
        storage.remove_file(mark)
        return rows


@contextmanager
def data_paths(
    data: object, *, name: str, schema: Schema | None, folder: str, extra: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the path of `data`: a text or path object unchanged, otherwise that of a new folder
    inside `folder` with its rows, which is removed afterwards.

    A Dataset is read in order, whatever its option `preserve_order`. `schema` selects the columns,
    in addition to `extra`; None keeps all. Raises InputError, which names the argument `name`, for
    other types, missing columns and unusable types.
    """
    if isinstance(data, str | os.PathLike):
        yield os.fspath(data)
        return
    if not is_rows(data):
        raise InputError(f"{name}: must be a path, {DATA_TYPES}, got {type(data).__name__}")
    target = written(data, name=name, schema=schema, folder=folder, extra=extra)
    try:
        yield target
    finally:
        storage.remove_folder(target)


def written(
    data: Rows, *, name: str, schema: Schema | None, folder: str, extra: Sequence[str] = ()
) -> str:
    """Write rows, in order, into a new folder inside `folder` and return its path. See
    `data_paths`.
    """
    if is_frame(data):
        data = with_text_names(data)
    columns, _ = pick_columns(data, schema, name, extra)
    target = storage.join(storage.absolute(folder), "frames", uuid.uuid4().hex[:16])
    with _in_order(data):
        write_rows(data, columns, target, lambda _, __: None)
    return target


@contextmanager
def _in_order(data: Rows) -> Iterator[None]:
    """Have Ray Data keep the order of a Dataset's blocks."""
    if not is_dataset(data):
        yield
        return
    options = data.context.execution_options
    before = options.preserve_order
    options.preserve_order = True
    try:
        yield
    finally:
        options.preserve_order = before
