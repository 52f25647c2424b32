"""Tests of trained row records: lost, repeated and exchanged rows are detected."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from rayrec.trained_rows import RESIDUES, RowNumbers, TrainedRows, merge_ranges

ROWS = 100_000
Change = Callable[[list[RowNumbers]], list[RowNumbers]]


def batches(epochs: int = 2, rows: int = ROWS, size: int = 1000) -> list[RowNumbers]:
    rng = np.random.default_rng(0)
    return [
        RowNumbers(epoch, part)
        for epoch in range(epochs)
        for part in np.split(rng.permutation(rows), rows // size)
    ]


def tally_of(given: list[RowNumbers]) -> TrainedRows:
    tally = TrainedRows()
    for batch in given:
        tally.add(batch)
    return tally


def expected(epochs: int = 2, rows: int = ROWS) -> TrainedRows:
    tally = TrainedRows()
    for epoch in range(epochs):
        tally.add_ranges([(0, rows // 3), (rows // 3, rows)], epoch=epoch)
    return tally


@pytest.mark.parametrize("start", [0, 1, RESIDUES - 1, RESIDUES, 5 * 10**9])
@pytest.mark.parametrize("length", [0, 1, RESIDUES - 1, RESIDUES, 3 * RESIDUES + 7])
def test_range_equals_sum_of_rows(start: int, length: int) -> None:
    one_by_one = TrainedRows()
    as_range = TrainedRows()
    one_by_one.add(RowNumbers(3, np.arange(start, start + length, dtype=np.int64)))
    as_range.add_ranges([(start, start + length)], epoch=3)
    assert one_by_one == as_range
    as_range.add_ranges([(start, start + length)], epoch=3, times=-1)
    assert as_range == TrainedRows()
    one_by_one.remove(RowNumbers(3, np.arange(start, start + length, dtype=np.int64)))
    assert one_by_one == TrainedRows()


def test_worker_totals_survive_checkpoint() -> None:
    given = batches()
    parts = [tally_of(given[rank::3]) for rank in range(3)]
    total = TrainedRows.total(
        np.sum([part.counts for part in parts], axis=0), [part.checksums for part in parts]
    )
    assert (total, total.rows) == (expected(), 2 * ROWS)
    assert TrainedRows.from_dict(json.loads(json.dumps(total.to_dict()))) == total


def with_one_exchanged(given: list[RowNumbers]) -> list[RowNumbers]:
    """Replace a row by another with the same residue."""
    numbers = given[0].numbers.copy()
    numbers[0] = (numbers[0] + RESIDUES) % (ROWS // RESIDUES * RESIDUES)
    return [RowNumbers(0, numbers), *given[1:]]


def test_lost_and_repeated_rows_are_detected() -> None:
    for change, lost, repeated in (
        (list, 0, 0),
        (lambda given: given[1:], 1000, 0),
        (lambda given: [*given, given[7]], 0, 1000),
        (lambda given: [RowNumbers(0, given[0].numbers[:-1]), *given[1:]], 1, 0),
        (lambda given: [*given, RowNumbers(1, given[-1].numbers[:1])], 0, 1),
        (lambda given: [*given, RowNumbers(0, np.array([ROWS]))], 0, 1),
        (with_one_exchanged, 1, 1),
        # again in the second epoch, not in the first
        (lambda given: [RowNumbers(1, given[0].numbers), *given[1:]], 1, 1),
    ):
        assert tally_of(change(batches())).lost_and_repeated(expected()) == (lost, repeated)


def test_lost_and_repeated_are_nearly_exact_and_ranges_merge() -> None:
    given = batches()
    lost, repeated = tally_of([given[1], *given[1:]]).lost_and_repeated(expected())
    assert lost == repeated
    assert 900 < lost <= 1000
    assert merge_ranges([(0, 3), (3, 5), (7, 9), (9, 9), (2, 4)]) == [(0, 5), (7, 9), (2, 4)]
    assert merge_ranges([]) == []
