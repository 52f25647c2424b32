"""libffm text: `label field:index:value ...` (https://github.com/ycjuan/libffm, README)."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import ClassVar, Final, final

import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.formats.base import LineFormat
from rayrec.data.formats.content import all_lines_match
from rayrec.data.formats.libsvm import NUMBER
from rayrec.data.formats.tokens import Tokens, split_lines, split_pairs, table_of
from rayrec.schema import Schema

_LINE: Final = re.compile(rf"{NUMBER}(?: +[0-9]+:[0-9]+:{NUMBER})+ *".encode())
_COLUMN: Final = re.compile(r"(?:field|value)_([0-9]+)")


@final
class LibFfm(LineFormat):
    """Columns label, and for each field F of a file the lists field_F, its indices, and value_F."""

    name: ClassVar[str] = "libffm"

    def recognizes(self, start: bytes) -> bool:
        return all_lines_match(start, _LINE)

    def rare_columns(self, schema: Schema) -> tuple[str, ...]:
        return tuple(name for name in schema.columns if _COLUMN.fullmatch(name))

    def parse(self, text: bytes, columns: Sequence[str] | None, lists: Collection[str]) -> pa.Table:
        tokens = Tokens.from_lines(split_lines(text))
        is_label = tokens.positions() == 0
        features = tokens.where(~is_label)
        (fields, indices, values), is_triple = split_pairs(features.text, 3)
        found = {"label": tokens.where(is_label).single()}
        if columns is None:
            names = sorted(pc.unique(fields).to_pylist(), key=lambda name: (len(name), name))
            columns = [
                "label",
                *(f"{kind}_{name}" for name in names if name for kind in ("field", "value")),
            ]
        for name in columns:
            match = _COLUMN.fullmatch(name)
            if match:
                mask = pc.equal(fields, match[1])
                text_of = indices if name.startswith("field") else values
                found[name] = features.with_text(text_of).where(mask).lists()
        kept = {name: found[name] for name in columns if name in found}
        return table_of(kept, features.rows_with(~is_triple))
