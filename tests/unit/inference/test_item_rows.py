"""Histories, targets and seen items of rows: prepared lists, plain lists, single items."""

from collections.abc import Sequence

import numpy as np
import torch
from builders.click_models import make_preprocessor

from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import SparseColumn
from rayrec.inference.item_baselines import evaluated_items, trained_items
from rayrec.metrics.item_ranks import ItemNumbers
from rayrec.models.base import CandidateRows
from rayrec.schema import Feature, Schema
from rayrec.workloads.recsys.candidates import model_inputs
from rayrec.workloads.recsys.scoring import first_targets

UNKNOWN = 0
MISSING = 1
"""Items 2 to 6 are candidates 0 to 4."""


def preprocessor_of(*lists: str) -> Preprocessor:
    features = [Feature(name=name, vocabulary="item") for name in lists if name != "item"]
    schema = Schema(
        label=None,
        sparse=lists or ("item",),
        lists=lists,
        tokens="any",
        features=tuple(features),
    )
    columns = (SparseColumn(7, 5),) * len(schema.sparse)
    return make_preprocessor(schema, sparse=columns, tokens=np.arange(5, dtype=np.uint64))


def candidates_of(preprocessor: Preprocessor) -> CandidateRows:
    return model_inputs(preprocessor).candidates_of("item")


def rows_of(*columns: Sequence[Sequence[int]]) -> EncodedRows:
    """Return rows as an encoder does: an empty list has one missing item."""
    filled = [[items or [MISSING] for items in lists] for lists in columns]
    ids = [
        JaggedIds(
            np.array([item for items in lists for item in items], np.int32),
            np.array([len(items) for items in lists], np.int32),
        )
        for lists in filled
    ]
    return EncodedRows(np.empty((len(columns[0]), 0), np.float32), ids)


def by_row(items: ItemNumbers | None, rows: int) -> list[list[int]]:
    assert items is not None
    return [items.numbers[items.rows == row].tolist() for row in range(rows)]


def test_prepared_rows_have_targets_and_seen_items() -> None:
    preprocessor = preprocessor_of("item", "target", "seen")
    rows = rows_of(
        [[2, 3], [4], [], [2, 5]],
        # Repeated, unknown twice, seen, none
        [[4, 4, 5], [UNKNOWN, UNKNOWN], [6], []],
        [[6, 2, 3], [4], [6], []],
    )
    items = evaluated_items(rows, "item", preprocessor, candidates_of(preprocessor))
    assert items.rows == 4
    assert by_row(items.targets, 4) == [[2, 3], [-1, -1], [4], [3]]
    assert by_row(items.seen, 4) == [[4, 0, 1], [2], [4], []]
    # The whole history if the row has it, which is longer than the list
    assert by_row(items.histories, 4) == [[4, 0, 1], [2], [4], [0]]
    first = first_targets(rows, "item", preprocessor)
    assert first.tolist() == [4, UNKNOWN, 6, 5]


def test_plain_rows_hold_out_their_last_item() -> None:
    preprocessor = preprocessor_of("item")
    rows = rows_of([[2, UNKNOWN, 3], [4], [], [2, MISSING], [MISSING, 6, UNKNOWN]])
    items = evaluated_items(rows, "item", preprocessor, candidates_of(preprocessor))
    assert by_row(items.targets, 5) == [[1], [], [], [], [-1]]
    assert by_row(items.histories, 5) == [[0], [], [], [0], [4]]
    assert items.seen is None
    first = first_targets(rows, "item", preprocessor)
    assert first.tolist() == [3, -1, -1, -1, UNKNOWN]
    trained = trained_items(rows, "item", preprocessor, candidates_of(preprocessor))
    assert by_row(trained, 5) == [[0, 1], [2], [], [0], [4]]


def test_single_items_are_targets_without_history() -> None:
    preprocessor = preprocessor_of()
    ids = np.array([2, UNKNOWN, MISSING, 6], np.int32)
    rows = EncodedRows(np.empty((4, 0), np.float32), [ids])
    items = evaluated_items(rows, "item", preprocessor, candidates_of(preprocessor))
    assert by_row(items.targets, 4) == [[0], [-1], [], [4]]
    assert by_row(items.histories, 4) == [[], [], [], []]
    trained = trained_items(rows, "item", preprocessor, candidates_of(preprocessor))
    assert torch.equal(trained.numbers, torch.tensor([0, 4]))
