"""A line for each user, who is its first token: user, then the items in order, between blanks. So
are the sets of S3-Rec (https://github.com/RUCAIBox/CIKM2020-S3Rec) and of LightGCN and BARS.

    7 3 9 4
    8 9

becomes a row for each event:

    user  item
    7     3
    7     9
    7     4
    8     9
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import ClassVar, Final, final

import numpy as np
import pyarrow as pa

from rayrec.data.formats.base import LineFormat, Roles
from rayrec.data.formats.content import all_lines_match
from rayrec.data.formats.tokens import Tokens, split_lines, table_of

_LINE: Final = re.compile(rb"\d+(?: \d+)* ?")


@final
class UserItems(LineFormat):
    """Columns user and item. Rows of a user are in the order of the line."""

    name: ClassVar[str] = "user_items"
    has_row_per_line: ClassVar[bool] = False

    def recognizes(self, start: bytes) -> bool:
        # Lines of one length may be a table of integers, with blanks as delimiters.
        lines = re.split(rb"[\r\n]", start)[:-1]
        lengths = {len(line.split()) for line in lines if line.strip()}
        return len(lengths) > 1 and all_lines_match(start, _LINE)

    def roles(self, columns: Sequence[str]) -> Roles:
        del columns
        return Roles(group="user")

    def parse(self, text: bytes, columns: Sequence[str] | None, lists: Collection[str]) -> pa.Table:
        tokens = Tokens.from_lines(split_lines(text))
        is_item = tokens.positions() > 0
        items = tokens.select(is_item)
        users = tokens.single().take(pa.array(items.row_of))
        # A user without items has no event
        malformed = np.zeros(len(items.row_of), bool)
        return table_of({"user": users, "item": items.text}, malformed, columns)
