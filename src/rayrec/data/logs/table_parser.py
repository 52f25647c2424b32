"""Parser of Arrow tables to raw rows: the columns of a log."""

import numpy as np
import pyarrow as pa

from rayrec.data.formats.columns import present_columns
from rayrec.data.logs.column_parser import ColumnParser
from rayrec.data.logs.faults import Faults
from rayrec.data.raw_block import RawBlock
from rayrec.schema import Schema


def check_types(table_schema: pa.Schema, schema: Schema, *, path: str) -> None:
    """Check that the types of the columns, which must exist, match the schema. Raises
    InputError.
    """
    parse_table(
        table_schema.empty_table().select(list(present_columns(table_schema.names, schema))),
        schema,
        path=path,
    )


def parse_table(
    table: pa.Table, schema: Schema, *, path: str = "", first_row: int = 0
) -> tuple[RawBlock, Faults]:
    """Parse a table with the schema's columns to its valid rows, and its faults, numbered from
    `first_row`. Null and empty text are missing; such list items are dropped. An absent column is
    all missing. Raises InputError for an unusable type.
    """
    parser = ColumnParser(table, schema, path)
    return parser.parse(), parser.faults(first_row)


def check_table(
    table: pa.Table, schema: Schema, *, path: str = "", first_row: int = 0
) -> tuple[np.ndarray, Faults]:
    """Return which rows `parse_table` returns, bool [rows], and the faults of the others."""
    parser = ColumnParser(table, schema, path, finds_faults=True)
    parser.parse_all()
    return parser.fault_kinds < 0, parser.faults(first_row)


def find_valid_rows(table: pa.Table, schema: Schema, *, path: str = "") -> np.ndarray:
    """Return the rows that `parse_table` returns, int64."""
    is_valid, _ = check_table(table, schema, path=path)
    return np.flatnonzero(is_valid)


def label_faults(table: pa.Table, schema: Schema, label: str, *, path: str) -> Faults:
    """Return the faults of the label column."""
    parser = ColumnParser(table, schema, path)
    parser.clicks(label)
    return parser.faults(0)
