"""Model inputs of pandas DataFrames, Arrow tables and Ray Datasets with a log's raw columns."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, overload

import pyarrow as pa
from pyarrow import types

from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.formats.columns import check_columns
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.materialized.formats import named_columns
from rayrec.schema import Schema

if TYPE_CHECKING:
    import pandas
    import ray.data
    from typing_extensions import TypeIs


DATA_TYPES: Final = "a DataFrame, a pyarrow.Table or a ray.data.Dataset"
"""Accepted types of rows in memory, for messages."""


def is_frame(data: object) -> TypeIs[pandas.DataFrame]:
    """Return whether the value is a pandas DataFrame, without importing pandas."""
    module = sys.modules.get("pandas")
    return module is not None and isinstance(data, module.DataFrame)


def is_dataset(data: object) -> TypeIs[ray.data.Dataset]:
    """Return whether the value is a `ray.data.Dataset`, without importing Ray."""
    module = sys.modules.get("ray.data")
    return module is not None and isinstance(data, module.Dataset)


def is_rows(data: object) -> bool:
    """Return whether the value is a pandas DataFrame, an Arrow table or a Ray Dataset."""
    return isinstance(data, pa.Table) or is_frame(data) or is_dataset(data)


def as_table(data: Any) -> Any:
    """Return rows of other libraries as an Arrow table: all that implement Arrow's PyCapsule
    interface, such as polars and DuckDB. Other values are returned unchanged.
    """
    if is_rows(data) or not hasattr(type(data), "__arrow_c_stream__"):
        return data
    table = pa.table(data)
    columns = []
    for column in table.itercolumns():
        chunks = column.chunks or [pa.nulls(0, column.type)]
        columns.append(pa.chunked_array([_plain_array(chunk) for chunk in chunks]))
    return pa.Table.from_arrays(columns, names=table.column_names)


def _plain_array(array: pa.Array) -> pa.Array:
    """Return an array without views of strings. Arrow casts no dictionaries of them."""
    if types.is_dictionary(array.type):
        return pa.DictionaryArray.from_arrays(array.indices, _plain_array(array.dictionary))
    return array.cast(_without_views(array.type))


def _without_views(kind: pa.DataType) -> pa.DataType:
    """Return a type without views of strings, such as polars has. Few functions of Arrow read
    them.
    """
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.large_list(_without_views(kind.value_type))
    return kind


def is_computed(dataset: ray.data.Dataset) -> bool:
    """Return whether the rows of a Dataset are in Ray's object store, so that none of its tasks
    needs to run.
    """
    return isinstance(dataset, sys.modules["ray.data.dataset"].MaterializedDataset)


@overload
def transform(
    preprocessor: Preprocessor | str | os.PathLike[str], data: ray.data.Dataset
) -> ray.data.Dataset: ...


@overload
def transform(
    preprocessor: Preprocessor | str | os.PathLike[str], data: pandas.DataFrame
) -> pandas.DataFrame: ...


# To mypy, a DataFrame is Any, because pandas has no types: it holds the next case for unreachable.
@overload
def transform(  # type: ignore[overload-cannot-match]
    preprocessor: Preprocessor | str | os.PathLike[str], data: pa.Table
) -> pa.Table: ...


def transform(
    preprocessor: Preprocessor | str | os.PathLike[str],
    data: pandas.DataFrame | pa.Table | ray.data.Dataset,
) -> pandas.DataFrame | pa.Table | ray.data.Dataset:
    """Transform rows with the raw columns of the Preprocessor's schema, found by name, to model
    inputs.

    The inputs are bit-identical to those of training. A DataFrame returns a DataFrame with its
    index, an Arrow table a table, a Dataset a lazy Dataset. DataFrames of other libraries, such as
    polars, return a table.

    `preprocessor` is a Preprocessor, its folder, or the folder of a run or a checkpoint. The result
    has the columns of `preprocessor.inputs`: label (int8) and weight (float32) if `data` has them,
    dense columns (float32), and ids of sparse columns. Ids are int32, or int64 for tables of more
    than 2^31 rows. Lists and several hashes are lists of ids. Other columns are dropped. NaN and
    None in a DataFrame are missing values. If a preset has constants by file, the rows belong to no
    known file.

    Row order is that of `data`; Ray Data keeps the order of blocks if
    `DataContext.execution_options.preserve_order` is set. All rows are transformed, so limits on
    invalid rows do not apply. Raises InputError for the first invalid row, with its number (from 0;
    in a Dataset, within its block) and column, for missing columns, unusable types, and other
    `data`. Ray Data raises errors in the rows of a Dataset when it is consumed.
    """
    if not isinstance(preprocessor, Preprocessor):
        preprocessor = Preprocessor.load(os.fspath(preprocessor))
    data = as_table(data)
    if is_frame(data):
        data = with_text_names(data)
        schema = schema_for(preprocessor.schema, list(data.columns), "DataFrame")
        columns = [name for name in schema.columns if name in data.columns]
        inputs = transform_table(
            frame_to_arrow(data[columns]), preprocessor, source="DataFrame"
        ).to_pandas()
        inputs.index = data.index
        return inputs
    if is_dataset(data):
        _ = preprocessor.slots  # Built once here, not in every task
        task = functools.partial(
            transform_table, preprocessor=preprocessor, source="Dataset, in a block"
        )
        return data.map_batches(task, batch_size=None, batch_format="pyarrow")
    if isinstance(data, pa.Table):
        return transform_table(data, preprocessor, source="table")
    raise InputError(f"transform: data must be {DATA_TYPES}, got {type(data).__name__}")


def transform_table(table: pa.Table, preprocessor: Preprocessor, *, source: str) -> pa.Table:
    """Transform raw rows as `transform` does. `source` is the source of the rows, for messages."""
    raw, faults = parse_table(
        table, schema_for(preprocessor.schema, table.column_names, source), path=source
    )
    if faults.total:
        count = (
            f" ({faults.total:,} of {table.num_rows:,} rows are invalid)"
            if faults.total > 1
            else ""
        )
        raise InputError(
            f"{faults.first[0]}{count}; fix or remove it, since transform drops no rows"
        )
    return named_columns(preprocessor.encode(raw), preprocessor.inputs)


def with_text_names(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return a DataFrame whose columns have text as names: pandas numbers those of a file without a
    header from 0.
    """
    return (
        frame if all(isinstance(name, str) for name in frame.columns) else frame.rename(columns=str)
    )


def frame_to_arrow(frame: pandas.DataFrame) -> pa.Table:
    """Convert a DataFrame without its index; NaN and None become null. Raises InputError for a
    column of mixed types.
    """
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(
            f"DataFrame: {' '.join(str(error).split())}; give each column one type"
        ) from None


def schema_for(schema: Schema, names: Sequence[str], source: str) -> Schema:
    """Return the schema without the labels, weight and timestamp that the data lacks. Raises
    InputError for other columns.
    """
    if schema.label is not None and schema.label not in names:
        schema = schema.unlabelled()
    else:
        schema = schema.replace(
            labels=tuple(label for label in schema.labels if label.name in names),
            weight=schema.weight if schema.weight in names else None,
            timestamp=schema.timestamp if schema.timestamp in names else None,
        )
    check_columns(names, schema.columns, path=source, optional=schema.optional)
    return schema
