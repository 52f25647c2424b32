"""Lookups of formulas in side tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec import storage
from rayrec.config import InputError, suggest
from rayrec.data.features.definitions import TableLookup, category_token
from rayrec.data.features.few_rows import plain_values
from rayrec.data.features.inputs import (
    canonical,
    counts_by_row,
    empty_lists,
    for_definitions,
    lists_of,
)
from rayrec.data.features.side_table import SideTable, build, open_content
from rayrec.data.logs.column_parser import ColumnParser
from rayrec.data.logs.column_values import (
    Markers,
    category_tokens,
    is_list,
    is_text,
    resolved,
    split_lists,
)
from rayrec.formula.tree import Column, Lookup, Node
from rayrec.formula.types import Type
from rayrec.hashing import key_tokens
from rayrec.schema import NamedTable, Schema


@final
class Lookups:
    """Side tables for the rows of a log's table."""

    def __init__(self, schema: Schema, parser: ColumnParser) -> None:
        self._schema = schema
        self._parser = parser
        self._rows: dict[tuple[str, tuple[Node, ...]], np.ndarray] = {}
        """Rows by table and keys, which several columns of a table share."""
        self._values: dict[Lookup, pa.Array] = {}
        """Values by lookup, which several formulas share."""

    def values(self, lookup: Lookup, keys: Sequence[pa.Array], kind: Type) -> pa.Array:
        """Return a column of a side table, as formulas take it, in the rows with `keys`, one or two
        arrays; null if no row has the key.
        """
        if lookup not in self._values:
            self._values[lookup] = self._table_values(lookup, keys, kind)
        return self._values[lookup]

    def _table_values(self, lookup: Lookup, keys: Sequence[pa.Array], kind: Type) -> pa.Array:
        table = open_named(self._schema, lookup.table)
        table_key = (lookup.table, lookup.keys)
        if table_key not in self._rows:
            times = None if table.source.time is None else self._times
            self._rows[table_key] = _rows_of_keys(table, keys, times)
        rows = self._rows[table_key]
        values, _ = column_values(table.column(lookup.column, rows), kind, lookup, self._schema)
        if not kind.is_list:
            return values
        return pc.if_else(pa.array(rows >= 0), values, pa.scalar(None, values.type))

    def row_lookup(self, row: int) -> TableLookup:
        """Return the function with which definitions look up values for a row of the log."""
        rows_by_key: dict[tuple[str, ...], np.ndarray] = {}

        def lookup(name: str, keys: list[Any], column: str, kind: Mapping[str, Any]) -> Any:
            if None in keys:
                return None
            table = open_named(self._schema, name)
            table_key = (name, *keys)
            if table_key not in rows_by_key:
                times = None if table.source.time is None else self._times[row : row + 1]
                tokens = [np.array([category_token(key)], np.uint64) for key in keys]
                rows_by_key[table_key] = table.lookup(key_tokens(tokens), None, times)
            rows = rows_by_key[table_key]
            if rows[0] < 0:
                return None
            return _value(table.column(column, rows), name, column, Type(**kind), self._schema)

        return lookup

    @cached_property
    def _times(self) -> np.ndarray:
        """Time of each row of the log, int64 microseconds."""
        name = self._schema.timestamp
        assert name is not None, "the schema was checked"
        return self._parser.times(name)


def _value(stored: pa.Array, table: str, column: str, kind: Type, schema: Schema) -> Any:
    """Return the one value of a side table as definitions take it."""
    values = plain_values(stored, kind)
    if values is None:
        lookup = Lookup("lookup", (Column(table), Column(column)), kind)
        canonical_values, _ = column_values(stored, kind, lookup, schema)
        values = for_definitions(canonical_values, kind).to_pylist()
    return values[0]


def _rows_of_keys(
    table: SideTable, keys: Sequence[pa.Array], times: np.ndarray | None
) -> np.ndarray:
    """Return the row of each key, one or two columns of categories, -1 if absent, int64 [rows]."""
    columns = []
    missing = np.zeros(len(keys[0]), bool)
    for key in keys:
        tokens = np.empty(len(key), np.uint64)
        category_tokens(key, tokens)
        columns.append(tokens)
        missing |= key.is_null().to_numpy(zero_copy_only=False)
    return table.lookup(key_tokens(columns), missing, times)


def open_named(schema: Schema, name: str) -> SideTable:
    """Open a side table of a schema. One with a known content is opened as it was built, whatever
    its file has become, and stays open in this process. Others, and those that are not built, are
    built. Raises InputError if the file has another content than the schema then.
    """
    table = schema.table(name)
    integer_keys = _integer_keys(schema, name)
    columns = schema.program.lookups[name]
    if table.content is None:
        return _built(table, columns, integer_keys)
    return _opened(table, columns, integer_keys)


@lru_cache(maxsize=64)
def _opened(
    table: NamedTable, columns: tuple[str, ...], integer_keys: tuple[str, ...]
) -> SideTable:
    assert table.content is not None
    built = open_content(table.content, table)
    return built or _built(table, columns, integer_keys)


def _built(table: NamedTable, columns: tuple[str, ...], integer_keys: tuple[str, ...]) -> SideTable:
    """Open a side table as its file is now. Raises InputError if its content is another one."""
    opened = build(table, columns, integer_keys=integer_keys)
    if table.content is not None:
        opened.check_content(table.content)
    return opened


def _integer_keys(schema: Schema, name: str) -> tuple[str, ...]:
    """Return the columns of a table's key that are compared with a column of `Schema.integers`, so
    that 07 is 7 in the table too.
    """
    columns = set()
    for node in schema.program.lookup_nodes:
        if node.table != name:
            continue
        for column, key in zip(schema.table(name).keys, node.keys, strict=True):
            if isinstance(key, Column) and key.name in schema.integers:
                columns.add(column)
    return tuple(sorted(columns))


def current_tables(schema: Schema, names: Collection[str] | None = None) -> tuple[NamedTable, ...]:
    """Return the side tables of a schema with their absolute paths and the hashes of their content
    today. Raises InputError for a table that cannot be read, and if a hash of the schema differs.

    Args:
        schema: Schema with side tables.
        names: Tables to look at. Others stay as they are. None: all.
    """
    tables = []
    for table in schema.tables:
        if names is not None and table.name not in names:
            tables.append(table)
            continue
        columns = schema.program.lookups.get(table.name)
        if columns is None:
            raise InputError(f"schema: no formula looks up table {table.name}; remove it")
        # Not one that is open already: the file may have changed
        opened = _built(table, columns, _integer_keys(schema, table.name))
        path = storage.absolute(table.path)
        tables.append(table.replace(path=path, content=opened.content_hash))
    return tuple(tables)


def with_contents(schema: Schema, names: Collection[str] | None = None) -> Schema:
    """Return the schema with its `current_tables`. Raises InputError too for values that formulas
    cannot take.
    """
    completed = schema.replace(tables=current_tables(schema, names))
    for lookup in completed.program.lookup_nodes:
        if names is None or lookup.table in names:
            _check_values(completed, lookup)
    return completed


def _check_values(schema: Schema, lookup: Lookup) -> None:
    """Check that a lookup can take all values of its column. Raises InputError."""
    opened = open_named(schema, lookup.table)
    values = opened.column(lookup.column, np.arange(opened.rows))
    _, rejected = column_values(values, lookup.type, lookup, schema)
    if rejected.any():
        row = int(np.argmax(rejected))
        value = values[row].as_py()
        shown = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        raise InputError(
            f"tables: {opened.source.path}: column {lookup.column} has {shown!r} in row {row}, "
            f"which is no {lookup.type.kind}. Correct it, or use the column in another way"
        )


def swapped_tables(schema: Schema, paths: Mapping[str, str]) -> tuple[NamedTable, ...]:
    """Return side tables of a model's schema with other files and their contents, built. Key, time
    and form stay.

    Args:
        schema: Schema of the model.
        paths: File of each table to return, by name.

    Raises InputError for a name that the schema lacks, and for a file that its formulas cannot look
    up: without its key, its time or a looked up column, or with values of another type.
    """
    tables_of_model = schema.table_names
    for name in paths:
        if name not in tables_of_model:
            names = ", ".join(tables_of_model) or "none"
            hint = suggest(name, tables_of_model, otherwise=f"it has {names}")
            raise InputError(f"tables: the model has no table {name}; {hint}")
    tables = tuple(
        table.replace(path=paths[table.name], content=None) if table.name in paths else table
        for table in schema.tables
    )
    completed = with_contents(schema.replace(tables=tables), paths)
    return tuple(completed.table(name) for name in paths)


def column_values(
    values: pa.Array, kind: Type, lookup: Lookup, schema: Schema
) -> tuple[pa.Array, np.ndarray]:
    """Return values of a side table as formulas take them, and which are not of the type, bool."""

    def error(name: str, fix: str) -> InputError:
        return InputError(f"tables: {lookup.table}: column {name} is of type {values.type}; {fix}")

    no_markers = Markers.from_texts(())  # Text that means a missing value is null already
    if not kind.is_list:
        return canonical(values, kind, lookup.column, error, no_markers)
    values = resolved(values)
    if types.is_null(values.type):
        return empty_lists(kind, len(values)), np.zeros(len(values), bool)
    if is_text(values.type):
        values, bad = split_lists(values, schema.list_delimiter, trim=False)
    elif is_list(values.type):
        bad = np.zeros(len(values), bool)
    else:
        raise error(
            lookup.column,
            "a list is needed, or text with the schema's list_delimiter",
        )
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    items = resolved(pc.list_flatten(values))
    canonical_items, rejected = canonical(items, kind, lookup.column, error, no_markers)
    bad = bad | (counts_by_row(rejected, lengths) > 0)
    return lists_of(canonical_items, lengths), bad
