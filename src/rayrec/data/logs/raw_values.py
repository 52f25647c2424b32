"""The values of single columns as the log has them, so that metrics can be told by what people know rows by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.logs.index import Block, Part
from rayrec.data.logs.parquet import read_rows
from rayrec.data.logs.splits import Slice
from rayrec.data.logs.table_log import good_rows
from rayrec.data.raw_block import RawBlock
from rayrec.schema import Schema


def values_of(block: Block, raw: RawBlock, column: str, schema: Schema) -> pa.Array:
    """One value a row of an unpermuted block whose segments `raw` holds, null where missing: uint32 for a category of 8
    hexadecimal digits, text (as a dictionary) for other categories, int64 or float64 for a number."""
    order = block.order()
    values = raw.column(column)
    if isinstance(values, np.ndarray) and (column in schema.dense or schema.tokens == "hexadecimal"):
        return pa.array(values[order], mask=raw.is_missing(column)[order])
    # Wide tokens do not tell what they were made of.
    return pa.concat_arrays([_text(part, column, schema) for part in block.parts]).dictionary_encode()


def _text(part: Part, column: str, schema: Schema) -> pa.Array:
    """Large text of the part's rows, null where missing."""
    segment = part.segment
    table, _ = read_rows(segment.path, segment.start, segment.stop, schema, columns=[column])
    found = table.column(column) if column in table.column_names else pa.chunked_array([pa.nulls(len(table))])
    if segment.rows != segment.stop - segment.start:
        found = found.take(pa.array(good_rows(segment, schema)))
    found = found.slice(part.start, part.stop - part.start)
    if pa.types.is_dictionary(found.type):
        found = found.cast(found.type.value_type)
    if pa.types.is_boolean(found.type):
        found = found.cast(pa.uint8())  # as its tokens count
    if pa.types.is_floating(found.type):  # whole numbers; NaN is a missing value
        found = pc.if_else(pc.is_nan(found), pa.scalar(None, found.type), found).cast(pa.int64())
    text = found.cast(pa.large_binary()).cast(pa.large_string()) if _is_binary(found) else found.cast(pa.large_string())
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.large_string()), text).combine_chunks()


def _is_binary(values: pa.ChunkedArray) -> bool:
    return pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)


def stretch_of(block: Block, stretches: Sequence[Slice]) -> pa.Array:
    """The name of the stretch that each row of an unpermuted block lies in, as a dictionary; the stretches follow each other
    from the log's first row to its last."""
    starts = np.array([stretch.start for stretch in stretches], np.int64)
    rows = np.concatenate(
        [part.segment.first_row + np.arange(part.start, part.stop, dtype=np.int64) for part in block.parts]
    )
    numbers = np.searchsorted(starts, rows, side="right") - 1
    return pa.DictionaryArray.from_arrays(
        pa.array(numbers.astype(np.int32)), pa.array(distinct_names(stretches), pa.large_string())
    )


def distinct_names(stretches: Sequence[Slice]) -> list[str]:
    """The stretches' names; those of several folders' files of one name are numbered."""
    assert all(before.stop == after.start for before, after in pairwise(stretches))
    names = [stretch.name for stretch in stretches]
    return [
        f"{name} ({names[:place].count(name) + 1})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]
