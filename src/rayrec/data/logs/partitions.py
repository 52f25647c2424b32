"""Partition columns of a log: folders KEY=VALUE directly above a file (Hive), whose rows all have
that value in column KEY.
"""

from collections.abc import Sequence

import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.formats.columns import missing_partitions, parse_partitions
from rayrec.data.logs.column_values import VALUE, parse_numbers, read_times, type_error
from rayrec.schema import Schema


def with_partitions(
    table: pa.Table, path: str, schema: Schema, *, columns: Sequence[str] | None = None
) -> pa.Table:
    """Add the file's partition columns that the schema (or `columns`) names: float64 for dense
    columns and the weight, text for others, as in a CSV file. Raises InputError for a value that
    cannot be read as what the schema makes of the column.
    """
    required = schema.columns if columns is None else columns
    for key, value in missing_partitions(path, table.column_names).items():
        if key in required:
            table = table.append_column(
                key, pa.repeat(_partition_value(key, value, schema, path), len(table))
            )
    return table


def _partition_value(key: str, value: str | None, schema: Schema, path: str) -> pa.Scalar:
    value = None if value in schema.missing else value
    text = pa.array([value], pa.large_string())
    if key in schema.dense or key == schema.weight:
        numbers, status = parse_numbers(
            text, key, type_error(pa.schema([(key, text.type)]), path), times=key in schema.dense
        )
        if value is not None and status[0] != VALUE:
            raise InputError(
                f"{path}: column {key} is the partition {key}={value}, which is not a number; add "
                "it to the sparse columns"
            )
        return pa.scalar(None if value is None else float(numbers[0]), pa.float64())
    if key == schema.timestamp and (value is None or read_times(text)[1][0] != VALUE):
        raise InputError(
            f"{path}: column {key} is the partition {key}={value or ''}, which is not a time; "
            "name another column"
        )
    return text[0]


def with_sampled_partitions(table: pa.Table, files: Sequence[storage.File]) -> pa.Table:
    """Add the first file's partition columns as text, with the values of evenly spread files. Rows
    of one file have one value, which shows nothing about the column.
    """
    columns = missing_partitions(files[0].path, table.column_names)
    rows = len(table)
    step = max(len(files) / max(rows, 1), 1.0)
    values = [
        parse_partitions(files[int(row * step) % len(files)].path)
        for row in range(rows if columns else 0)
    ]
    for key in columns:
        table = table.append_column(
            key, pa.array([value.get(key) for value in values], pa.large_string())
        )
    return table
