"""Headers of RecBole's atomic files, which name each column's type behind a colon
(https://recbole.io/docs/user_guide/data/atomic_files.html).

    user_id:token  item_id:token  rating:float  class:token_seq
    u5             i7             4             comedy drama

`token` is a category, `float` a number. `token_seq` and `float_seq` are lists, whose items have a
blank between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

CATEGORY: Final = "token"
NUMBER: Final = "float"
CATEGORIES: Final = "token_seq"
NUMBERS: Final = "float_seq"
ITEM_MARK: Final = " "
"""Mark between the items of a list."""
_TYPES: Final = (CATEGORY, NUMBER, CATEGORIES, NUMBERS)


def split_types(names: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of a header without their types, and the type of each name. The names stay
    as they are, without types, unless each has one.
    """
    plain: list[str] = []
    types: dict[str, str] = {}
    for name in names:
        head, mark, kind = name.strip().rpartition(":")
        if not mark or not head or kind not in _TYPES:
            return tuple(names), {}
        plain.append(head)
        types[head] = kind
    return tuple(plain), types
