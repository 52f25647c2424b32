"""pandas DataFrames and Ray Datasets with a log's raw columns, transformed into model inputs."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard, overload

import pyarrow as pa

from rayrec.config import InputError
from rayrec.data.encoding.extension import preprocessor_folder
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.logs.csv_reader import check_columns
from rayrec.data.logs.table_parser import parse_table
from rayrec.data.materialized.formats import named_columns
from rayrec.schema import Schema

if TYPE_CHECKING:
    import pandas
    import ray.data


def is_frame(data: object) -> TypeGuard[pandas.DataFrame]:
    """Whether it is a pandas DataFrame. Does not import pandas."""
    module = sys.modules.get("pandas")
    return module is not None and isinstance(data, module.DataFrame)


def is_dataset(data: object) -> TypeGuard[ray.data.Dataset]:
    """Whether it is a `ray.data.Dataset`. Does not import Ray."""
    module = sys.modules.get("ray.data")
    return module is not None and isinstance(data, module.Dataset)


@overload
def transform(preprocessor: Preprocessor | str | os.PathLike[str], data: ray.data.Dataset) -> ray.data.Dataset: ...


@overload
def transform(preprocessor: Preprocessor | str | os.PathLike[str], data: pandas.DataFrame) -> pandas.DataFrame: ...


def transform(
    preprocessor: Preprocessor | str | os.PathLike[str], data: pandas.DataFrame | ray.data.Dataset
) -> pandas.DataFrame | ray.data.Dataset:
    """The model inputs of rows with the raw columns of the Preprocessor's schema, found by name: equal bit for bit to what
    training reads of the same rows. A DataFrame gives a DataFrame with its index, a Dataset a Dataset, computed when it is
    consumed.

    `preprocessor` is a Preprocessor, its folder, or the folder of a run or a checkpoint. Columns of the result, under the
    names of `preprocessor.inputs`: the label (int8) and the weight (float32) if `data` has them, dense columns (float32), ids of
    sparse columns (int32, or int64 for tables of more than 2^31 rows), a list a row for lists and several hashes. Other columns
    are left out. NaN and None in a DataFrame are missing values. For a preset with constants by file, the rows are of no
    known file.

    The rows have the order of `data`; Ray Data keeps the order of blocks if `DataContext.execution_options.preserve_order` is
    set. No row is left out, so thresholds of faulty rows do not apply: the first faulty row raises InputError, one line with
    its number (the first is 0; of a Dataset, within its block) and column. Also raised for a column that is missing or of an
    unusable type, and for other `data`. Errors in the rows of a Dataset come from Ray Data, when it is consumed.
    """
    if not isinstance(preprocessor, Preprocessor):
        preprocessor = Preprocessor.load(preprocessor_folder(os.fspath(preprocessor)))
    if is_frame(data):
        schema = _schema_for(preprocessor.schema, list(data.columns), "DataFrame")
        columns = [name for name in schema.columns if name in data.columns]
        inputs = transform_table(arrow_of(data[columns]), preprocessor, where="DataFrame").to_pandas()
        inputs.index = data.index
        return inputs
    if is_dataset(data):
        _ = preprocessor.slots  # built once here, not in every task
        task = functools.partial(transform_table, preprocessor=preprocessor, where="Dataset, in a block")
        return data.map_batches(task, batch_size=None, batch_format="pyarrow")
    raise InputError(f"transform: {type(data).__name__} is neither a pandas DataFrame nor a ray.data.Dataset")


def transform_table(table: pa.Table, preprocessor: Preprocessor, *, where: str) -> pa.Table:
    """Model inputs of raw rows, as `transform` says; `where` is named in errors."""
    schema = _schema_for(preprocessor.schema, table.column_names, where)
    raw, faults = parse_table(table, schema, path=where)
    if faults.total:
        others = f" ({faults.total:,} of {table.num_rows:,} rows are faulty)" if faults.total > 1 else ""
        raise InputError(f"{faults.first[0]}{others}; correct or remove it, since transform leaves out no rows")
    return named_columns(preprocessor.encode(raw), preprocessor.inputs)


def arrow_of(frame: pandas.DataFrame) -> pa.Table:
    """A DataFrame's columns, without its index; NaN and None are null. Raises InputError for a column of mixed types."""
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"DataFrame: {' '.join(str(error).split())}; give each column one type") from None


def _schema_for(schema: Schema, names: Sequence[str], where: str) -> Schema:
    """The schema without a label, and without a weight, that the data lacks. Raises InputError if it lacks another column."""
    if schema.label is not None and schema.label not in names:
        schema = schema.unlabelled()
    else:
        schema = schema.replace(
            labels=tuple(label for label in schema.labels if label.name in names),
            weight=schema.weight if schema.weight in names else None,
            timestamp=schema.timestamp if schema.timestamp in names else None,
        )
    check_columns(names, schema.columns, path=where, optional=schema.optional)
    return schema
