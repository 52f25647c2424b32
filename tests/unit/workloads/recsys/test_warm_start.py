"""Tests of row mappings between old and new tables."""

from typing import Any

import numpy as np
import pytest
from builders.faults import rejects

from rayrec.data.encoding.rules import SparseColumn
from rayrec.workloads.recsys.warm_start import TableRemap, remap_table


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def joined(old: SparseColumn, new: SparseColumn, old_tokens: np.ndarray, new_tokens: np.ndarray) -> TableRemap:
    return remap_table(old, new, old_tokens, new_tokens, where="column a")


OLD = SparseColumn(num_embeddings=5, num_tokens=3)
HASHED = SparseColumn(num_embeddings=100, num_tokens=None)
SHARED, EXTENDED = (SparseColumn(num_embeddings=4, num_tokens=number) for number in (5, 6))
"""Columns whose categories share rows."""
LAST = SparseColumn(num_embeddings=4, num_tokens=3, first_id=0, unknown_id=3, missing_id=3)
GAP = SparseColumn(num_embeddings=6, num_tokens=5, first_id=0, unknown_id=3, missing_id=3, gap=3)


@pytest.mark.parametrize(
    ("old", "new", "old_tokens", "new_tokens", "rows"),
    [
        (OLD, SparseColumn(num_embeddings=7, num_tokens=5), [9, 4, 7], [9, 4, 7, 1, 2], [0, 1, 2, 3, 4, -1, -1]),
        # The row of unknown categories keeps its number. Counted again, it is the last one.
        (LAST, GAP, [9, 4, 7], [9, 4, 7, 1, 2], [0, 1, 2, 3, -1, -1]),
        (GAP, LAST, [9, 4, 7, 1, 2], [2, 7, 5], [5, 2, -1, 3]),
        (  # A new row of missing values starts from that of the old table.
            SparseColumn(num_embeddings=4, num_tokens=2, missing_id=0),
            SparseColumn(num_embeddings=5, num_tokens=2, missing_id=3, gap=3),
            [9, 4],
            [4, 8],
            [0, 1, 3, 0, -1],
        ),
        (HASHED, HASHED, [], [], list(range(100))),
        (SHARED, EXTENDED, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [0, 1, 2, 3]),
    ],
)
def test_rows_follow_categories(old: SparseColumn, new: SparseColumn, old_tokens: Any, new_tokens: Any, rows: list[int]) -> None:
    assert joined(old, new, tokens(*old_tokens), tokens(*new_tokens)).row_map.of(0, len(rows)).tolist() == rows


def test_extended_vocabulary_needs_no_table_and_others_are_rejected() -> None:
    found = joined(OLD, SparseColumn(num_embeddings=7, num_tokens=5), tokens(9, 4, 7), tokens(9, 4, 7, 1, 2))
    assert found.row_map.sources is None
    assert found.counts() == {"kept": 3, "fresh": 2, "dropped": 0}
    found = joined(GAP, LAST, tokens(9, 4, 7, 1, 2), tokens(2, 7, 5))
    assert found.counts() == {"kept": 2, "fresh": 1, "dropped": 3}
    wider = SparseColumn(num_embeddings=200, num_tokens=None)
    hashed_to = "column a: must be hashed to 100 rows by the checkpoint's rule, got 200 rows"
    rejects(hashed_to, joined, HASHED, wider, tokens(), tokens())
    rejects("column a: hashing does not match", joined, HASHED, OLD, tokens(), tokens(9, 4, 7))
    rejects("column a: several categories share a row", joined, SHARED, EXTENDED, tokens(1, 2, 3, 4, 5), tokens(5, 1, 2, 3, 4, 6))
