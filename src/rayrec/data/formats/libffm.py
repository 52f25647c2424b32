"""Text for libffm: `label field:index:value ...` (https://github.com/ycjuan/libffm, README).

    1 0:3:0.5 0:4:1 1:7:2
    0 1:8:1

becomes

    label  field_0  value_0  field_1  value_1
    1      3, 4     0.5, 1   7        2
    0                        8        1
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import ClassVar, Final, final

import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.formats.base import LineFormat, Roles
from rayrec.data.formats.content import all_lines_match
from rayrec.data.formats.libsvm import NUMBER
from rayrec.data.formats.tokens import Tokens, split_lines, split_pairs, table_of

_LINE: Final = re.compile(rf"{NUMBER}(?: +[0-9]+:[0-9]+:{NUMBER})+ *".encode())
_COLUMN: Final = re.compile(r"(?:field|value)_([0-9]+)")


@final
class LibFfm(LineFormat):
    """Columns label, and for each field F of a file the lists field_F, its indices, and value_F."""

    name: ClassVar[str] = "libffm"
    is_sparse: ClassVar[bool] = True

    def recognizes(self, start: bytes) -> bool:
        return all_lines_match(start, _LINE)

    def roles(self, columns: Sequence[str]) -> Roles:
        fields = [match[1] for name in columns if (match := _COLUMN.fullmatch(name))]
        return Roles({f"field_{name}": f"value_{name}" for name in fields})

    def parse(self, text: bytes, columns: Sequence[str] | None, lists: Collection[str]) -> pa.Table:
        tokens = Tokens.from_lines(split_lines(text))
        is_label = tokens.positions() == 0
        features = tokens.select(~is_label)
        (fields, indices, values), is_triple = split_pairs(features.text, 3)
        arrays = {"label": tokens.select(is_label).single()}
        if columns is None:
            columns = ["label", *_columns_of(fields)]
        for name in columns:
            match = _COLUMN.fullmatch(name)
            if match:
                mask = pc.equal(fields, match[1])
                text_of = indices if name.startswith("field") else values
                arrays[name] = features.with_text(text_of).select(mask).lists()
        return table_of(arrays, features.rows_with(~is_triple), columns)


def _columns_of(fields: pa.LargeStringArray) -> list[str]:
    """Return the columns of the fields that occur, in the order of their numbers."""
    columns = []
    for name in sorted(pc.unique(fields).to_pylist(), key=_order):
        # Empty for a malformed feature
        if name:
            columns.append(f"field_{name}")
            columns.append(f"value_{name}")
    return columns


def _order(number: str) -> tuple[int, str]:
    return len(number), number
