"""Side tables of an export, for its `encode.py` and for a server."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec import storage
from rayrec.data.features.inputs import for_definitions
from rayrec.data.features.lookups import column_values, open_named
from rayrec.data.features.side_table import copy_built, restore
from rayrec.data.logs.column_values import Text
from rayrec.formula.types import Type
from rayrec.inference.export.plain_encoder import column_key
from rayrec.schema import Schema


# Arrays of a table, in numpy.savez's format, which needs no pickle. K is the name of a column and
# its type, as in `plain_encoder.column_key`:
#
#   tokens, rows       token of each row's key, sorted (rows of one token by time), and its row
#   times              time of these rows, in a table with `time`
#   K values           numbers and times; NaN or 0 if missing
#   K text, K ends     text of all rows, UTF-8, and where each row's text ends
#   K missing          whether a row has no value
#   K list ends        where each row's list ends; the other arrays have items then
#   K no list          whether a row has no list
def write_tables(folder: str, schema: Schema) -> None:
    """Write the side tables of a schema to `folder`: tables/0.npz for the first, and tables/0 for
    `restore_tables`.
    """
    for number, table in enumerate(schema.tables):
        opened = open_named(schema, table.name)
        tokens, times, rows = opened.sorted_keys()
        arrays = {"tokens": tokens, "rows": rows}
        if times is not None:
            arrays["times"] = times
        for lookup in schema.program.lookup_nodes:
            if lookup.table != table.name:
                continue
            values = opened.column(lookup.column, np.arange(opened.rows))
            column, _ = column_values(values, lookup.type, lookup, schema)
            column = for_definitions(column, lookup.type)
            arrays |= _arrays_of(column, _key(lookup.column, lookup.type))
        with (
            storage.writing(storage.join(folder, "tables", f"{number}.npz")) as path,
            open(path, "wb") as file,
        ):
            np.savez(file, allow_pickle=False, **arrays)
        copy_built(opened, _copy(folder, number))


def restore_tables(folder: str, schema: Schema) -> None:
    """Build the side tables that `write_tables` wrote to `folder`, unless they are built, so that
    no other files are needed. Raises InputError if they are damaged.
    """
    for number, table in enumerate(schema.tables):
        if table.content is not None:
            restore(_copy(folder, number), table.content, table)


def _copy(folder: str, number: int) -> str:
    """Return the folder with a copy of a built table."""
    return storage.join(folder, "tables", str(number))


def _key(column: str, kind: Type) -> str:
    return column_key(column, {"kind": kind.kind, "is_list": kind.is_list})


def _arrays_of(column: pa.Array, key: str) -> dict[str, Any]:
    """Return the arrays of a column as formulas take it."""
    arrays: dict[str, Any] = {}
    if pa.types.is_large_list(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        arrays[f"{key} list ends"] = np.cumsum(lengths, dtype=np.int64)
        arrays[f"{key} no list"] = column.is_null().to_numpy(zero_copy_only=False)
        column = pc.list_flatten(column)
    arrays[f"{key} missing"] = column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_large_string(column.type):
        text = Text.from_array(pc.fill_null(column, ""))
        start = text.offsets[0]
        arrays[f"{key} text"] = text.data[start : text.offsets[-1]]
        arrays[f"{key} ends"] = text.offsets[1:] - start
    else:
        arrays[f"{key} values"] = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    return arrays
