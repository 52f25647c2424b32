"""Table of the columns that a schema's formulas compute, for a look at some rows."""

from typing import Any

from rayrec.config import InputError
from rayrec.data.encoding.fitting import fit_to_table
from rayrec.data.formats.registry import find_format
from rayrec.data.log_source import LogSource
from rayrec.data.logs.partitions import with_partitions
from rayrec.data.logs.rewritten import read_file
from rayrec.data.logs.table_parser import check_table, derived_columns
from rayrec.schema import Schema

MAX_ROWS = 10_000
"""Maximum rows of a table."""


def compute_features(schema: Schema, path: str, rows: int) -> list[dict[str, Any]]:
    """Compute the inputs of a model for the first rows of a log.

    Args:
        schema: Schema with formulas.
        path: Path of the log.
        rows: Number of rows; fewer if the log, or the first table of its first file, has fewer.

    Returns:
        The columns of the log that formulas read, and the model's inputs, by name, one mapping
        for each valid row. Values are None if missing. Functions such as `quantile` are fitted to
        the first table of the first file.

    Raises InputError for a log without valid rows, and if a formula does not fit it.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise InputError(f"rows: must be 1 to {MAX_ROWS:,}, got {rows}")
    source = LogSource.at(path)
    files = [file for file in source.raw_files(schema) if file.size_bytes]
    if not files:
        raise InputError(f"{path}: no usable rows; it is empty")
    schema = source.schema(schema).unlabelled()
    first = files[0].path
    table = next(read_file(find_format(first, schema), first, schema), None)
    if table is None:
        raise InputError(f"{first}: no usable rows; it is empty")
    table = with_partitions(table, first, schema)
    is_valid, faults = check_table(table, schema, path=first)
    if not is_valid.any():
        raise InputError(f"{first}: no usable rows; {faults.describe()}")
    schema = fit_to_table(schema, table.filter(is_valid), path=first)
    computed = derived_columns(table.filter(is_valid).slice(0, rows), schema, path=first)
    shown = (*schema.program.inputs, *schema.dense, *schema.sparse)
    values = computed.select(
        [name for name in dict.fromkeys(shown) if name in computed.column_names]
    )
    return [{name: _shown(value) for name, value in row.items()} for row in values.to_pylist()]


def _shown(value: Any) -> Any:
    """Return a value with its bytes as text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace") or None
    return [_shown(item) for item in value] if isinstance(value, list) else value
