"""How often a category was counted, told by its id: a handful of numbers a column, since ids go by falling frequency."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rayrec.config import InputError

if TYPE_CHECKING:
    from rayrec.data.encoding.preprocessor import Preprocessor

ENDS: Final = "frequency_ends"
"""Among a Preprocessor's constants: by sparse column, how many of its tokens were counted in at least 1, 2, 10, 100, ... rows."""
UNKNOWN: Final = "(not in the vocabulary)"


def _edges() -> Iterator[int]:
    yield 1
    yield 2
    yield from (10**digits for digits in count(1))


def frequency_ends(amounts: np.ndarray) -> list[int]:
    """`amounts`: rows of each token. The last number is not 0."""
    ends: list[int] = []
    for edge in _edges():
        ends.append(int(np.count_nonzero(amounts >= edge)))
        if not ends[-1]:
            return ends[:-1]
    raise AssertionError("the edges have no end")


def bucket_names(preprocessor: Preprocessor, column: str) -> list[str]:
    """Of a sparse column: "1", "2-9", "10-99", ..., as far as it has tokens, then UNKNOWN. Raises InputError where how often its
    tokens were counted is not known."""
    ends = _ends(preprocessor, column)
    edges = [edge for edge, _ in zip(_edges(), [*ends, 0], strict=False)]
    ranges = ["1", *(f"{low:,}-{high - 1:,}" for low, high in pairwise(edges[1:]))]
    return [*ranges[: len(ends)], UNKNOWN]


def buckets_of(preprocessor: Preprocessor, column: str, ids: np.ndarray) -> np.ndarray:
    """int8 (rows): which of `bucket_names` each id is in, as far as the row has a value. Raises InputError likewise."""
    ends = _ends(preprocessor, column)
    rule = preprocessor.sparse[preprocessor.inputs.sparse.index(column)]
    numbers = ids.astype(np.int64) - rule.first_id
    if rule.gap is not None:
        numbers -= ids > rule.gap
    # As many ends lie above a token's number as there are edges that its amount reaches.
    buckets = np.searchsorted(-np.array(ends, np.int64), -numbers, side="left") - 1
    known = (ids != rule.unknown_id) & (numbers >= 0) & (buckets >= 0)
    return np.where(known, buckets, len(ends)).astype(np.int8)


def _ends(preprocessor: Preprocessor, column: str) -> list[int]:
    if column not in preprocessor.inputs.sparse:
        raise InputError(f"slice_by: frequency:{column}: the model takes {column} as a number; choose a sparse column")
    if preprocessor.multi_hot:
        raise InputError(
            f"slice_by: frequency:{column}: every row has many ids in {column}; tell metrics by its values"
        )
    found: dict[str, Any] = preprocessor.constants.get(ENDS, {})
    if column not in found:
        raise InputError(
            f"slice_by: frequency:{column}: the Preprocessor does not know how often its tokens were counted (none does of "
            "hashed columns, or where ids go by first appearance; nor one made by an earlier version); choose another column"
        )
    ends: list[int] = found[column]
    return ends
