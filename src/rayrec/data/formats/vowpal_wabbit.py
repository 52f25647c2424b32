"""Vowpal Wabbit text: `label [weight] ['tag]|namespace feature[:value] ... |namespace ...`
(https://github.com/VowpalWabbit/vowpal_wabbit/wiki/Input-format).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import ClassVar, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.formats.base import LineFormat
from rayrec.data.formats.content import all_lines_match
from rayrec.data.formats.libsvm import NUMBER
from rayrec.data.formats.tokens import Tokens, split_lines, table_of
from rayrec.schema import Schema

_LINE: Final = re.compile(rf"(?:{NUMBER} )*(?:'?[^\s|]+ ?)?(?:\|[^|]*)+".encode())
_UNNAMED: Final = "features"
"""Column of a namespace without a name."""
_VALUES: Final = "_value"
"""End of the name of a namespace's column of values."""


@final
class VowpalWabbit(LineFormat):
    """Columns label, weight if lines have one, and for each namespace N the lists N, its features,
    and N_value, their values, 1 for a feature without one. Tags are left out. A namespace with a
    value of its own, N:2, is a fault of its row.
    """

    name: ClassVar[str] = "vw"

    def recognizes(self, start: bytes) -> bool:
        return b"|" in start and all_lines_match(start, _LINE)

    def rare_columns(self, schema: Schema) -> tuple[str, ...]:
        # Any list may be a namespace's.
        return (*schema.lists, *schema.list_weights)

    def parse(self, text: bytes, columns: Sequence[str] | None, lists: Collection[str]) -> pa.Table:
        lines = split_lines(text)
        # The text before the first bar, then a text for each namespace, of the line that it is in.
        split = pc.split_pattern(lines, "|")
        parts = Tokens(
            pc.list_flatten(split),
            pc.list_parent_indices(split).to_numpy().astype(np.int64),
            len(lines),
        )
        is_head = parts.positions() == 0
        head = Tokens.from_lines(parts.where(is_head).text)
        head = head.where(pc.invert(pc.starts_with(head.text, "'")))
        found = {"label": head.single()}
        # Only a number may stand behind the label, but for a tag without its mark.
        second = head.where(head.positions() == 1)
        weights = second.where(pc.match_substring_regex(second.text, f"^{NUMBER}$"))
        if len(weights.text):
            found["weight"] = pc.fill_null(weights.single(), "1")
        elif columns is not None and "weight" in columns:
            found["weight"] = pa.nulls(len(lines), pa.large_string()).fill_null("1")

        spaces = parts.where(~is_head)
        is_unnamed = pc.match_substring_regex(spaces.text, r"^(\s|$)").to_numpy(
            zero_copy_only=False
        )
        tokens = Tokens.from_lines(spaces.text)
        is_name = (tokens.positions() == 0) & ~is_unnamed[tokens.row_of]
        names = pc.fill_null(tokens.where(is_name).single(), _UNNAMED)
        features = tokens.where(~is_name)
        # The value of a feature is behind its last colon: names may have colons.
        is_valued = pc.match_substring_regex(features.text, f":{NUMBER}$")
        plain = pc.if_else(
            is_valued, pc.replace_substring_regex(features.text, ":[^:]*$", ""), features.text
        )
        values = pc.if_else(is_valued, pc.replace_substring_regex(features.text, "^.*:", ""), "1")
        space_of = names.take(pa.array(features.row_of))
        # From the parts to the lines that they are in
        features = Tokens(features.text, spaces.row_of[features.row_of], len(lines))
        if columns is None:
            unique = pc.unique(space_of).to_pylist()
            valued = set(pc.unique(space_of.filter(is_valued)).to_pylist())
            columns = [
                *found,
                *(
                    column
                    for name in unique
                    for column in (name, name + _VALUES)
                    if column == name or name in valued
                ),
            ]
        for name in columns:
            if name not in found:
                kind = name.removesuffix(_VALUES) if name.endswith(_VALUES) else name
                mask = pc.equal(space_of, kind)
                text_of = plain if kind == name else values
                found[name] = features.with_text(text_of).where(mask).lists()
        has_value = pc.match_substring(names, ":")
        malformed = np.zeros(len(lines), bool)
        malformed[spaces.row_of[has_value.to_numpy(zero_copy_only=False)]] = True
        return table_of({name: found[name] for name in columns}, malformed)
