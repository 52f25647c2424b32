"""Tests of row mappings between old and new tables."""

import numpy as np
import pytest
from builders.faults import rejects

from rayrec.config import InputError
from rayrec.data.encoding.rules import SparseColumn
from rayrec.workloads.recsys.warm_start import TableRemap, remap_table


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def joined(old: SparseColumn, new: SparseColumn, old_tokens: np.ndarray, new_tokens: np.ndarray) -> TableRemap:
    return remap_table(old, new, old_tokens, new_tokens, where="column a")


OLD = SparseColumn(num_embeddings=5, num_tokens=3)


def test_extended_vocabulary_needs_no_row_table() -> None:
    found = joined(OLD, SparseColumn(num_embeddings=7, num_tokens=5), tokens(9, 4, 7), tokens(9, 4, 7, 1, 2))
    assert found.row_map.sources is None
    assert found.row_map.of(3, 7).tolist() == [3, 4, -1, -1]
    assert found.counts() == {"kept": 3, "fresh": 2, "dropped": 0}


def test_unknown_row_keeps_number() -> None:
    old = SparseColumn(num_embeddings=4, num_tokens=3, first_id=0, unknown_id=3, missing_id=3)
    new = SparseColumn(num_embeddings=6, num_tokens=5, first_id=0, unknown_id=3, missing_id=3, gap=3)
    found = joined(old, new, tokens(9, 4, 7), tokens(9, 4, 7, 1, 2))
    assert found.row_map.of(0, 6).tolist() == [0, 1, 2, 3, -1, -1]
    # Counted again, the row of unknown categories is the last one.
    again = SparseColumn(num_embeddings=4, num_tokens=3, first_id=0, unknown_id=3, missing_id=3)
    found = joined(new, again, tokens(9, 4, 7, 1, 2), tokens(2, 7, 5))
    assert found.row_map.of(0, 4).tolist() == [5, 2, -1, 3]
    assert found.counts() == {"kept": 2, "fresh": 1, "dropped": 3}


def test_new_empty_category_starts_from_missing_row() -> None:
    old = SparseColumn(num_embeddings=4, num_tokens=2, missing_id=0)
    new = SparseColumn(num_embeddings=5, num_tokens=2, missing_id=3, gap=3)
    assert joined(old, new, tokens(9, 4), tokens(4, 8)).row_map.of(0, 5).tolist() == [0, 1, 3, 0, -1]


def test_hashed_columns_map_fully_or_raise() -> None:
    hashed = SparseColumn(num_embeddings=100, num_tokens=None)
    assert joined(hashed, hashed, tokens(), tokens()).row_map.of(98, 100).tolist() == [98, 99]
    with pytest.raises(InputError, match="column a: must be hashed to 100 rows by the checkpoint's rule, got 200 rows"):
        joined(hashed, SparseColumn(num_embeddings=200, num_tokens=None), tokens(), tokens())
    rejects("column a: hashing does not match", joined, hashed, OLD, tokens(), tokens(9, 4, 7))


def test_shared_rows_require_extended_vocabulary() -> None:
    old = SparseColumn(num_embeddings=4, num_tokens=5)
    new = SparseColumn(num_embeddings=4, num_tokens=6)
    assert joined(old, new, tokens(1, 2, 3, 4, 5), tokens(1, 2, 3, 4, 5, 6)).row_map.of(0, 4).tolist() == [0, 1, 2, 3]
    rejects("column a: several categories share a row", joined, old, new, tokens(1, 2, 3, 4, 5), tokens(5, 1, 2, 3, 4, 6))
