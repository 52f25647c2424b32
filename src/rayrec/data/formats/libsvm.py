"""Text for libsvm and SVM-light: `label [qid:query] index:value ...`, with an optional comment at
the end (https://www.cs.cornell.edu/people/tj/svm_light, "Input file format").

    2 qid:7 3:0.5 9:1 # a comment
    0 qid:7 4:2

becomes

    label  group  index   value
    2      7      3, 9    0.5, 1
    0      7      4       2
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import ClassVar, Final, final

import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.formats.base import LineFormat, Roles
from rayrec.data.formats.content import all_lines_match
from rayrec.data.formats.tokens import Tokens, split_lines, split_pairs, table_of

NUMBER: Final = r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?"
_LINE: Final = re.compile(rf"{NUMBER}(?: +qid:[0-9]+)?(?: +[0-9]+:{NUMBER})+ *(?:#.*)?".encode())
_QUERY: Final = "qid:"


@final
class LibSvm(LineFormat):
    """Columns label, group (the query), and the lists index and value."""

    name: ClassVar[str] = "libsvm"

    def recognizes(self, start: bytes) -> bool:
        return all_lines_match(start, _LINE)

    def roles(self, columns: Sequence[str]) -> Roles:
        return Roles({"index": "value"}, group="group" if "group" in columns else None)

    def parse(self, text: bytes, columns: Sequence[str] | None, lists: Collection[str]) -> pa.Table:
        lines = split_lines(text)
        if b"#" in text:
            lines = pc.replace_substring_regex(lines, "#.*", "")
        tokens = Tokens.from_lines(lines)
        is_label = tokens.positions() == 0
        is_query = pc.starts_with(tokens.text, _QUERY).to_numpy(zero_copy_only=False)
        features = tokens.select(~is_label & ~is_query)
        (indices, values), is_pair = split_pairs(features.text, 2)
        arrays = {
            "label": tokens.select(is_label).single(),
            "index": features.with_text(indices).lists(),
            "value": features.with_text(values).lists(),
        }
        if is_query.any() or "group" in (columns or ()):
            queries = tokens.select(is_query)
            names = pc.utf8_slice_codeunits(queries.text, len(_QUERY))
            arrays["group"] = queries.with_text(names).single()
        return table_of(arrays, features.rows_with(~is_pair), columns)
