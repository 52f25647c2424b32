"""Vowpal Wabbit text: `label [weight] ['tag]|namespace feature[:value] ... |namespace ...`
(https://github.com/VowpalWabbit/vowpal_wabbit/wiki/Input-format).

    1 2.0 'r7|user u5 age:0.5 |item i3
    -1 |item i9

becomes

    label  weight  user    user_value  item
    1      2.0     u5, age 1, 0.5      i3
    -1     1                           i9
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.formats.base import LineFormat, Roles
from rayrec.data.formats.content import all_lines_match
from rayrec.data.formats.libsvm import NUMBER
from rayrec.data.formats.tokens import Tokens, split_lines, table_of

_LINE: Final = re.compile(
    rf"(?:{NUMBER} )?(?:{NUMBER} )?(?:'?[^\s|]+ ?)?(?:\|(?:[a-zA-Z][^\s|]*)?[ \t][^|]*)+".encode()
)
_UNNAMED: Final = "features"
"""Column of a namespace without a name."""
_VALUES: Final = "_value"
"""Suffix of the column with a namespace's values."""


@final
class VowpalWabbit(LineFormat):
    """Columns label, weight if lines have one, and for each namespace N the lists N, its features,
    and N_value, their values, 1 for a feature without one. Tags are left out. A namespace with a
    value of its own, N:2, is a fault of its row.
    """

    name: ClassVar[str] = "vw"
    is_sparse: ClassVar[bool] = True

    def recognizes(self, start: bytes) -> bool:
        return b"|" in start and all_lines_match(start, _LINE)

    def roles(self, columns: Sequence[str]) -> Roles:
        weights = {name: name + _VALUES for name in columns if name + _VALUES in columns}
        return Roles(weights, weight="weight" if "weight" in columns else None)

    def parse(self, text: bytes, columns: Sequence[str] | None, lists: Collection[str]) -> pa.Table:
        # The text before the first bar, then a text for each namespace, of the line that it is in.
        parts = _split_at_bars(split_lines(text))
        is_head = parts.positions() == 0
        arrays = _read_heads(parts.select(is_head), columns)
        features = _Features.from_spaces(parts.select(~is_head))
        if columns is None:
            columns = (*arrays, *features.columns())
        for name in columns:
            if name not in arrays:
                arrays[name] = features.lists(name)
        return table_of(arrays, features.malformed, columns)


def _split_at_bars(lines: pa.LargeStringArray) -> Tokens:
    split = pc.split_pattern(lines, "|")
    row_of = pc.list_parent_indices(split).to_numpy().astype(np.int64)
    return Tokens(pc.list_flatten(split), row_of, len(lines))


def _read_heads(heads: Tokens, columns: Sequence[str] | None) -> dict[str, pa.Array]:
    """Return the labels, and the weights if there are some or `columns` names them, of the texts
    before the namespaces, one of each line.
    """
    words = Tokens.from_lines(heads.text)
    words = words.select(pc.invert(pc.starts_with(words.text, "'")))
    arrays = {"label": words.single()}
    # A word behind the label that is no number is a tag without its mark.
    second = words.select(words.positions() == 1)
    weights = second.select(pc.match_substring_regex(second.text, f"^{NUMBER}$"))
    if len(weights.text) or "weight" in (columns or ()):
        arrays["weight"] = pc.fill_null(weights.single(), "1")
    return arrays


@dataclass(frozen=True)
class _Features:
    """Features of all namespaces of all lines, in order."""

    names: Tokens
    values: pa.LargeStringArray
    is_valued: np.ndarray
    """Whether a feature has a value of its own, bool."""
    space_of: pa.LargeStringArray
    """Namespace of each feature."""
    malformed: np.ndarray
    """Lines with a namespace that has a value, bool."""

    @classmethod
    def from_spaces(cls, spaces: Tokens) -> _Features:
        """Read the texts of namespaces, with the line of each."""
        is_unnamed = pc.match_substring_regex(spaces.text, r"^(\s|$)")
        tokens = Tokens.from_lines(spaces.text)
        is_name = tokens.positions() == 0
        is_name &= ~is_unnamed.to_numpy(zero_copy_only=False)[tokens.row_of]
        space_names = pc.fill_null(tokens.select(is_name).single(), _UNNAMED)
        malformed = np.zeros(spaces.rows, bool)
        has_value = pc.match_substring(space_names, ":").to_numpy(zero_copy_only=False)
        malformed[spaces.row_of[has_value]] = True

        features = tokens.select(~is_name)
        # The value of a feature is behind its last colon: names may have colons.
        is_valued = pc.match_substring_regex(features.text, f":{NUMBER}$")
        without = pc.replace_substring_regex(features.text, ":[^:]*$", "")
        after_colon = pc.replace_substring_regex(features.text, "^.*:", "")
        line_of = spaces.row_of[features.row_of]
        return cls(
            Tokens(pc.if_else(is_valued, without, features.text), line_of, spaces.rows),
            pc.if_else(is_valued, after_colon, "1"),
            is_valued.to_numpy(zero_copy_only=False),
            space_names.take(pa.array(features.row_of)),
            malformed,
        )

    def columns(self) -> list[str]:
        """Return the namespaces, each followed by its values if some features have one."""
        valued = set(pc.unique(self.space_of.filter(pa.array(self.is_valued))).to_pylist())
        columns = []
        for name in pc.unique(self.space_of).to_pylist():
            columns.append(name)
            if name in valued:
                columns.append(name + _VALUES)
        return columns

    def lists(self, column: str) -> pa.LargeListArray:
        """Return the features of a namespace in each line, or their values."""
        space = column.removesuffix(_VALUES)
        features = self.names if space == column else self.names.with_text(self.values)
        return features.select(pc.equal(self.space_of, space)).lists()
