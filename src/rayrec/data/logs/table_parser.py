"""Parser of Arrow tables to raw rows: the columns of a log, and those that its schema's formulas
compute.
"""

from collections.abc import Container, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec.config import InputError
from rayrec.data.features import few_rows
from rayrec.data.features.functions import evaluate
from rayrec.data.features.inputs import (
    canonical,
    counts_by_row,
    empty_lists,
    for_definitions,
    lists_of,
)
from rayrec.data.features.lookups import Lookups
from rayrec.data.formats.columns import present_columns
from rayrec.data.logs.column_parser import (
    BRACKET,
    LENGTH,
    NOT_FINITE,
    NOT_UTF8,
    TIME,
    ColumnParser,
)
from rayrec.data.logs.faults import Faults
from rayrec.data.raw_block import RawBlock
from rayrec.formula.tree import Node
from rayrec.formula.types import NUMBERS, Type
from rayrec.schema import Schema

_FAULTS: Final = {
    "number": NOT_FINITE,
    "category": NOT_UTF8,
    "text": NOT_UTF8,
    "time": TIME,
}
"""Faults of columns that formulas read, by the kind of their type."""


# From a table of a log to raw rows, in files, DataFrames and requests alike:
#
#   inputs     each column that a formula reads becomes an array of one type of its kind, whatever
#              its type in the file; values that are none of the kind are faults of their rows
#   steps      the kernels compute one column after the other, in the program's order
#   lookups    rows of side tables by the tokens of keys, taken from the mapped files
#   columns    computed ones join the table, and are parsed like those of the log
#
# A counting pass, the encoder and the server all begin here, so that no value is computed twice in
# different ways.
def _parser(
    table: pa.Table,
    schema: Schema,
    path: str,
    *,
    finds_faults: bool = False,
) -> ColumnParser:
    """Return a parser of a table with the columns of its schema's formulas."""
    parser = ColumnParser(table, schema, path, finds_faults=finds_faults)
    program = schema.program
    if program.steps:
        is_small = table.num_rows <= few_rows.MAX_ROWS and not program.unfitted
        columns = _computed_by_row(parser) if is_small else _computed(parser)[0]
        parser.compute({name: columns[name] for name in schema.derived})
    return parser


def _computed(
    parser: ColumnParser,
    names: Container[str] | None = None,
) -> tuple[dict[str, pa.Array], Lookups]:
    """Return the inputs and results of formulas, and their lookups. `names` are the columns to
    return, all that others of them need included. None: all.
    """
    program = parser.schema.program
    columns = {
        name: _input(parser, name, kind)
        for name, kind in program.inputs.items()
        if names is None or name in names
    }
    lookups = Lookups(parser.schema, parser)
    for step in program.steps:
        if names is None or step.name in names:
            columns[step.name] = evaluate(step.node, columns, parser.table.num_rows, lookups.values)
    return columns, lookups


def _computed_by_row(parser: ColumnParser) -> dict[str, pa.Array]:
    """Return the results of all formulas for a few rows."""
    program = parser.schema.program
    columns = {name: _input_values(parser, name, kind) for name, kind in program.inputs.items()}
    lookups = Lookups(parser.schema, parser)
    by_row = [lookups.row_lookup(row) for row in range(parser.table.num_rows)]
    return few_rows.results(program, columns, by_row)


def _input_values(parser: ColumnParser, name: str, kind: Type) -> list[Any]:
    """Return the values of a column of the log as definitions take them, and record its faults."""
    schema = parser.schema
    is_plain = not schema.missing and name not in schema.integers
    if is_plain and schema.vector_length(name) is None:
        values = few_rows.plain_values(parser.array(name), kind)
        if values is not None:
            return values
    return for_definitions(_input(parser, name, kind), kind).to_pylist()


def _input(parser: ColumnParser, name: str, kind: Type) -> pa.Array:
    """Return a column of the log as formulas take it, and record its faults."""
    array = parser.array(name)
    if name in parser.schema.integers and not types.is_null(array.type):
        array = parser.integers(array, name)
    if not kind.is_list:
        values, rejected = canonical(array, kind, name, parser.type_error, parser.markers)
        parser.reject(rejected, _FAULTS[kind.kind], name)
        return values
    if types.is_null(array.type):
        return empty_lists(kind, len(array))
    items, lengths, bad = parser.items(array, name, parser.schema.feature(name))
    parser.reject(bad, BRACKET, name)
    values, rejected = canonical(items, kind, name, parser.type_error, parser.markers)
    is_bad = counts_by_row(rejected, lengths) > 0
    parser.reject(is_bad, _FAULTS[kind.kind], name)
    lists = lists_of(values, lengths)
    vector_length = parser.schema.vector_length(name)
    if vector_length is None:
        return lists
    present = pc.list_value_length(lists).to_numpy()
    is_short = (present != vector_length) & (present > 0)
    parser.reject(is_short, LENGTH, name)
    # No kernel may read an item that is not there.
    return pc.if_else(pa.array(is_short), pa.scalar([], lists.type), lists)


def check_types(table_schema: pa.Schema, schema: Schema, *, path: str) -> None:
    """Check that the types of the columns, which must exist, match the schema. Raises
    InputError.
    """
    parse_table(
        table_schema.empty_table().select(list(present_columns(table_schema.names, schema))),
        schema,
        path=path,
        needs_values=False,
    )


def parse_table(
    table: pa.Table,
    schema: Schema,
    *,
    path: str = "",
    first_row: int = 0,
    needs_values: bool = True,
) -> tuple[RawBlock, Faults]:
    """Parse a table with the schema's columns to its valid rows, and its faults, numbered from
    `first_row`. Null and empty text are missing; such list items are dropped. An absent column is
    all missing. Without `needs_values`, so is a column whose formula is to be fitted. Raises
    InputError for an unusable type, and for formulas that are to be fitted.
    """
    if needs_values:
        _require_fitted(schema)
    parser = _parser(table, schema, path)
    return parser.parse(), parser.faults(first_row)


def check_table(
    table: pa.Table,
    schema: Schema,
    *,
    path: str = "",
    first_row: int = 0,
) -> tuple[np.ndarray, Faults]:
    """Return which rows `parse_table` returns, bool [rows], and the faults of the others."""
    parser = _parser(table, schema, path, finds_faults=True)
    parser.parse_all()
    return parser.fault_kinds < 0, parser.faults(first_row)


def derived_columns(table: pa.Table, schema: Schema, *, path: str = "") -> pa.Table:
    """Return a table of the log's columns with those of the schema's formulas. Values that formulas
    cannot read are missing. Raises InputError for formulas that are to be fitted.
    """
    _require_fitted(schema)
    parser = _parser(table, schema, path)
    kinds = {step.name: step.type for step in schema.program.steps}
    computed = {}
    for name, array in parser.computed.items():
        computed[name] = for_definitions(array, kinds[name])
    names = [name for name in table.column_names if name not in computed]
    return pa.table(
        [*table.select(names).columns, *computed.values()],
        [*names, *computed],
    )


def category_items(
    table: pa.Table,
    column: str,
    schema: Schema,
    *,
    path: str = "",
) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Return the present categories of a table's column: values, [values], their tokens, uint64
    [values], and their number in each row, int64 [rows]. Missing and invalid ones are left out.
    """
    return ColumnParser(table, schema, path).present_items(column)


def argument_values(
    table: pa.Table,
    schema: Schema,
    nodes: Sequence[Node],
    *,
    path: str,
) -> list[pa.Array]:
    """Return the values of parts of the schema's formulas, [rows], which need no other constants
    than the fitted ones.
    """
    parser = ColumnParser(table, schema, path)
    columns, lookups = _computed(parser, schema.program.needed(nodes))
    return [evaluate(node, columns, parser.table.num_rows, lookups.values) for node in nodes]


def find_lengths(table: pa.Table, schema: Schema, *, path: str) -> dict[str, int]:
    """Return the length of the first list of each vector whose length is unknown, by name. Vectors
    without a list are left out.
    """
    parser = ColumnParser(table, schema, path)
    by_name = {}
    for vector in schema.vectors:
        if vector.length is None:
            lengths = pc.list_value_length(_input(parser, vector.name, NUMBERS))
            filled = lengths.filter(pc.greater(lengths, 0))
            if len(filled):
                by_name[vector.name] = filled[0].as_py()
    return by_name


def _require_fitted(schema: Schema) -> None:
    """Raise InputError if a formula has no constants from training rows."""
    for waiting in schema.program.unfitted:
        raise InputError(
            f"schema: feature {waiting.feature}: {waiting.call.function} has constants from the "
            "training rows. Use a Preprocessor, a run or a checkpoint, which has them"
        )


def find_valid_rows(table: pa.Table, schema: Schema, *, path: str = "") -> np.ndarray:
    """Return the rows that `parse_table` returns, int64."""
    is_valid, _ = check_table(table, schema, path=path)
    return np.flatnonzero(is_valid)


def parse_clicks(table: pa.Table, schema: Schema, *, path: str) -> np.ndarray:
    """Return `Schema.label` of all rows of a table, float32 [rows]. Invalid ones are any number."""
    assert schema.label is not None
    return ColumnParser(table, schema, path).clicks(schema.label)


def label_faults(table: pa.Table, schema: Schema, label: str, *, path: str) -> Faults:
    """Return the faults of the label column."""
    parser = _parser(table, schema, path)
    parser.clicks(label)
    return parser.faults(0)
