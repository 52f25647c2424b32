"""Constants of formulas from the training rows of a log."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from rayrec.data.engine import Engine, grouped
from rayrec.data.logs.index import LogIndex, SegmentRange
from rayrec.data.logs.reading import argument_columns
from rayrec.data.logs.table_parser import argument_values
from rayrec.formula.fitted import Unfitted
from rayrec.schema import FittedFunction, Schema

MAX_ROWS: Final = 1 << 20
"""Maximum number of rows that constants are computed from. Of longer logs, evenly spread ranges of
rows count.
"""
_MAX_VALUES: Final = 1 << 25
"""Maximum number of values in memory, of all functions that are fitted at once: 256 MiB."""
_RANGES: Final = 64
"""Number of ranges of rows in a longer log."""
_TASK_ROWS: Final = 1 << 17


# Categories can only be counted with all constants: the ids of cross(quantile(price, 20), user)
# follow from the edges of the quantile. So a bounded number of rows is read before that pass:
#
#   fit     functions whose arguments have no others to fit, each from its argument's values
#   again   those around them, until all have constants
#   count   all rows, in one pass
def fit(schema: Schema, index: LogIndex, rows: tuple[int, int], engine: Engine) -> Schema:
    """Return the schema with the constants of its formulas' fitted functions.

    Args:
        schema: Schema of the log. Constants that it has already stay.
        index: Index of the log.
        rows: Training rows [start, stop).
        engine: Engine of the tasks that read rows.

    The result depends on the rows, not on how they are divided into tasks.
    """
    while waiting := schema.program.unfitted:
        limit = min(MAX_ROWS, _MAX_VALUES // len(waiting))
        parts = [part for low, high in _ranges(*rows, limit) for part in index.parts(low, high)]
        groups = grouped(parts, lambda part: part.rows, max_bytes=_TASK_ROWS)
        task = functools.partial(_read, schema=schema)
        schema = _with_constants(schema, list(engine.run("fit", task, list(groups))))
    return schema


def fit_to_table(schema: Schema, table: pa.Table, *, path: str) -> Schema:
    """Return the schema with the constants of its formulas' fitted functions, from the rows of one
    table.
    """
    while waiting := schema.program.unfitted:
        values = argument_values(table, schema, [each.argument for each in waiting], path=path)
        names = [str(number) for number in range(len(values))]
        schema = _with_constants(schema, [pa.table(values, names=names)])
    return schema


def with_constants_of(schema: Schema, other: Schema) -> Schema:
    """Return the schema with the constants of another one, of formulas that both have."""
    formulas = {each.name: each.formula for each in other.features}
    same = {each.name for each in schema.features if formulas.get(each.name) == each.formula}
    return schema.replace(fitted=tuple(each for each in other.fitted if each.feature in same))


def _ranges(start: int, stop: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `limit` rows together, evenly spread."""
    rows = stop - start
    if rows <= limit:
        yield start, stop
        return
    length = limit // _RANGES
    for number in range(_RANGES):
        low = start + (rows - length) * number // (_RANGES - 1)
        yield low, low + length


def _read(parts: Sequence[SegmentRange], *, schema: Schema) -> pa.Table:
    """Return the arguments of the functions to fit, a column each."""
    nodes = [each.argument for each in schema.program.unfitted]
    return pa.concat_tables([argument_columns(part, nodes, schema) for part in parts])


def _with_constants(schema: Schema, tables: Sequence[pa.Table]) -> Schema:
    """Return the schema with the constants of the next functions, whose arguments are the columns
    of tables.
    """
    new = []
    for number, waiting in enumerate(schema.program.unfitted):
        columns = [table.column(number).drop_null() for table in tables]
        values = np.concatenate([column.to_numpy() for column in columns])
        constants = _constants(waiting, values)
        new.append(
            FittedFunction(
                feature=waiting.feature,
                number=waiting.number,
                constants=constants,
            )
        )
    return schema.replace(fitted=(*schema.fitted, *new))


def _constants(waiting: Unfitted, values: np.ndarray) -> tuple[float, ...]:
    if waiting.call.function == "quantile":
        return quantile_edges(values, waiting.num_bins)
    return mean_and_deviation(values)


# Bins are right-open, edge <= x < next edge, as in `bucketize`, and a value belongs to one bin. So
# edges lie between distinct values, where they divide the rows as equally as they can. A frequent
# value has a bin of its own, and several edges are one then.
def quantile_edges(values: np.ndarray, num_bins: int) -> tuple[float, ...]:
    """Return the edges of bins with equally many values: edge k is the distinct value with the
    number of values below it nearest to k / num_bins of all. At most num_bins - 1, and fewer if
    values are equal. Empty for one distinct value, or none.
    """
    distinct, amounts = np.unique(values + 0.0, return_counts=True)
    if len(distinct) < 2:
        return ()
    # In integers, so that no rounding decides
    below = num_bins * np.cumsum(amounts[:-1])
    levels = len(values) * np.arange(1, num_bins)
    upper = np.searchsorted(below, levels).clip(max=len(below) - 1)
    lower = (upper - 1).clip(min=0)
    is_lower = np.abs(below[lower] - levels) <= np.abs(below[upper] - levels)
    chosen = np.unique(np.where(is_lower, lower, upper))
    edges: tuple[float, ...] = tuple(distinct[1:][chosen].tolist())
    return edges


def mean_and_deviation(values: np.ndarray) -> tuple[float, float]:
    """Return the mean and the standard deviation of values, divided by their number; the deviation
    is 1 if they are equal. 0 and 1 without values.
    """
    if not len(values):
        return 0.0, 1.0
    deviation = float(values.std())
    return float(values.mean()), deviation or 1.0
