"""Text of `slot:value` tokens between blanks, as in PaddleRec's logs: a slot that occurs several
times in a line is a list.

    click:1 user:5 tag:a tag:b
    tag:c click:0

becomes

    click  user  tag
    1      5     a, b
    0            c
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import ClassVar, Final, final

import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.formats.base import LineFormat
from rayrec.data.formats.content import all_lines_match
from rayrec.data.formats.tokens import Tokens, split_lines, split_pairs, table_of

_LINE: Final = re.compile(rb"[^\s:,;|]+:\S+(?:[ \t]+[^\s:,;|]+:\S+)+[ \t]*")


@final
class SlotValue(LineFormat):
    """A column for each slot. A column that is no list has at most one value in a line."""

    name: ClassVar[str] = "slot_value"
    is_sparse: ClassVar[bool] = True

    def recognizes(self, start: bytes) -> bool:
        return all_lines_match(start, _LINE)

    def parse(self, text: bytes, columns: Sequence[str] | None, lists: Collection[str]) -> pa.Table:
        tokens = Tokens.from_lines(split_lines(text))
        (slots, values), is_pair = split_pairs(tokens.text, 2)
        malformed = tokens.rows_with(~is_pair)
        is_draft = columns is None
        names = (
            pc.unique(slots.filter(pa.array(is_pair))).to_pylist() if columns is None else columns
        )
        arrays = {}
        for name in names:
            mask = pc.equal(slots, name).to_numpy(zero_copy_only=False) & is_pair
            slot = tokens.with_text(values).select(mask)
            several = slot.counts() > 1
            if name in lists or (is_draft and several.any()):
                arrays[name] = slot.lists()
            else:
                malformed |= several
                arrays[name] = slot.single()
        return table_of(arrays, malformed)
