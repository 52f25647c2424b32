"""Impressions, one a line, as in MIND's behaviors.tsv (https://msnews.github.io/): number, user,
time, earlier items, and the shown items, with 1 behind those that were chosen.

    1  U5  11/11/2019 9:05:58 AM  N4 N7  N2-0 N9-1

becomes a row for each shown item:

    impression  user  time                   history  item  click
    1           U5    11/11/2019 9:05:58 AM  N4, N7   N2    0
    1           U5    11/11/2019 9:05:58 AM  N4, N7   N9    1

In logs to predict, items have no 0 or 1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import ClassVar, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.formats.base import LineFormat, Roles
from rayrec.data.formats.content import all_lines_match
from rayrec.data.formats.tokens import split_lines, table_of

_LINE: Final = re.compile(rb"(?:[^\t]*\t){4}[^\s]+-[01](?: [^\s]+-[01])*")
_FIELDS: Final = ("impression", "user", "time", "history", "shown")
_SHOWN: Final = r"^(?P<item>.*?)(?:-(?P<click>[01]))?$"


@final
class Impressions(LineFormat):
    """Columns impression, user, time, history (a list), item and click."""

    name: ClassVar[str] = "impressions"
    # A line with many items is large as rows, each of which has the history.
    has_row_per_line: ClassVar[bool] = False

    def recognizes(self, start: bytes) -> bool:
        return all_lines_match(start, _LINE)

    def roles(self, columns: Sequence[str]) -> Roles:
        return Roles(group="user", unused={"impression": "number of the impression"})

    def parse(self, text: bytes, columns: Sequence[str] | None, lists: Collection[str]) -> pa.Table:
        # Steps, each for all lines of the block at once:
        #
        #   lines    -> five fields
        #   shown    -> items, with the line of each
        #   others   -> repeated for each item of their line
        #   item     -> its name, and the 0 or 1 behind it
        lines = pc.utf8_rtrim(split_lines(text), "\n")
        fields = pc.split_pattern(lines, "\t")
        is_full = pc.equal(pc.list_value_length(fields), len(_FIELDS))
        # A malformed line is a row without values.
        empty = pa.scalar([""] * len(_FIELDS), pa.list_(pa.large_string()))
        values = pc.list_flatten(pc.if_else(is_full, fields, empty))
        columns_of = {
            name: values.take(pa.array(np.arange(number, len(values), len(_FIELDS))))
            for number, name in enumerate(_FIELDS)
        }
        shown = pc.split_pattern(columns_of.pop("shown"), " ")
        line_of = pc.list_parent_indices(shown)
        columns_of["history"] = _split_items(columns_of["history"])
        arrays = {name: column.take(line_of) for name, column in columns_of.items()}
        parts = pc.extract_regex(pc.list_flatten(shown), pattern=_SHOWN)
        arrays["item"] = parts.field("item")
        arrays["click"] = parts.field("click")
        is_malformed = pc.invert(is_full).take(line_of).to_numpy(zero_copy_only=False)
        return table_of(arrays, is_malformed, columns)


def _split_items(texts: pa.LargeStringArray) -> pa.LargeListArray:
    """Return the items between blanks of each text, none of an empty text."""
    items = pc.split_pattern(texts, " ")
    none = pa.scalar([], items.type)
    return pc.if_else(pc.equal(texts, ""), none, items)
