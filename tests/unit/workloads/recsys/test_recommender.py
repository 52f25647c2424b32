"""Search for the best items, against a sort of all scores."""

import numpy as np
import pytest
import torch

from rayrec.metrics.item_ranks import ItemNumbers
from rayrec.workloads.recsys.items import recommender
from rayrec.workloads.recsys.items.recommender import ItemLists, Recommender, TopItems


def sorted_items(scores: np.ndarray, k: int) -> list[list[int]]:
    """Return the k best numbers of each row, ties by number, without -inf."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return [
        [number for number in numbers if scores[row, number] > -np.inf]
        for row, numbers in enumerate(order.tolist())
    ]


def items_of(numbers: np.ndarray) -> list[list[int]]:
    return [[number for number in row if number >= 0] for row in numbers.tolist()]


@pytest.mark.parametrize("k", [0, 1, 3, 7, 40])
@pytest.mark.parametrize("levels", [1, 2, 5, 10**6])
def test_best_items_are_first_of_sorted(k: int, levels: int) -> None:
    """With many ties, and scores of excluded items."""
    rng = np.random.default_rng(levels + k)
    scores = rng.integers(0, levels, (50, 40)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    scores[7] = -np.inf
    top = TopItems.from_scores(torch.from_numpy(scores), k)
    assert items_of(top.numbers) == sorted_items(scores, k)
    for row, numbers in enumerate(items_of(top.numbers)):
        assert top.scores[row, : len(numbers)].tolist() == scores[row, numbers].tolist()
        assert not top.scores[row, len(numbers) :].any()


def make_recommender(vectors: torch.Tensor) -> Recommender:
    """Return a recommender of vectors alone."""
    made = Recommender.__new__(Recommender)
    made.num_candidates = len(vectors)
    made._filled = torch.nn.functional.pad(vectors, (0, 0, 0, -len(vectors) % 16))
    return made


@pytest.mark.parametrize("tile", [1, 100, 1 << 24])
def test_tiles_exclusion_and_allow_lists(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommender, "_TILE_SCORES", tile)
    generator = torch.Generator().manual_seed(3)
    # Whole numbers, so that products are exact in any order
    vectors = torch.randint(-3, 4, (45, 4), generator=generator).float()
    queries = torch.randint(-3, 4, (23, 4), generator=generator).float()
    scores = (queries @ vectors.T).numpy()
    found = make_recommender(vectors)
    assert items_of(found.top(queries, 9).numbers) == sorted_items(scores, 9)
    rows = torch.arange(23).repeat_interleave(3)
    numbers = torch.randint(-1, 45, (69,), generator=generator)
    excluded = scores.copy()
    is_item = numbers >= 0
    excluded[rows[is_item], numbers[is_item]] = -np.inf
    top = found.top(queries, 60, excluded=ItemNumbers(rows, numbers))
    assert items_of(top.numbers) == sorted_items(excluded, 60)
    allowed = np.full_like(scores, -np.inf)
    allowed[rows[is_item], numbers[is_item]] = scores[rows[is_item], numbers[is_item]]
    top = found.top(queries, 9, allowed=ItemNumbers(rows, numbers))
    assert items_of(top.numbers) == sorted_items(allowed, 9)
    assert found.top(queries[:0], 9).numbers.shape == (0, 9)


def test_lists_are_cut_by_rows() -> None:
    lists = ItemLists.from_lengths(np.array([5, -1, 7, 8, 9], np.int32), np.array([2, 0, 1, 2]))
    middle = lists.between(1, 4)
    assert (middle.rows.tolist(), middle.numbers.tolist()) == ([1, 2, 2], [7, 8, 9])
    assert lists.between(0, 1).numbers.tolist() == [5, -1]
    assert lists.between(4, 4).numbers.tolist() == []
