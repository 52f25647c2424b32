"""Search for the best items, against a sort of all scores."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayrec.data.encoded_rows import JaggedIds
from rayrec.workloads.recsys.items import recommender
from rayrec.workloads.recsys.items.recommender import Recommender, TopItems


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
    rows = np.arange(23).repeat(3)
    numbers = torch.randint(-1, 45, (69,), generator=generator).numpy()
    is_item = numbers >= 0
    places = (rows[is_item], numbers[is_item])
    lists = JaggedIds(numbers, np.full(23, 3, np.int32))
    excluded = scores.copy()
    excluded[places] = -np.inf
    top = found.top(queries, 60, excluded=[lists])
    assert items_of(top.numbers) == sorted_items(excluded, 60)
    allowed = np.full_like(scores, -np.inf)
    allowed[places] = scores[places]
    top = found.top(queries, 9, allowed=lists)
    assert items_of(top.numbers) == sorted_items(allowed, 9)
    assert found.top(queries[:0], 9).numbers.shape == (0, 9)


class LargeTensors(TorchDispatchMode):
    """Addresses of the float tensors with at least so many numbers."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.addresses: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_float = torch.is_tensor(result) and result.is_floating_point()
        if is_float and result.numel() >= self.numbers:
            self.addresses.add(result.untyped_storage().data_ptr())
        return result


def test_masks_copy_no_scores() -> None:
    found = make_recommender(torch.randn(1000, 4))
    lists = JaggedIds(np.arange(60), np.full(20, 3, np.int32))
    with LargeTensors(20 * 1000) as large:
        top = found.top(torch.randn(20, 4), 2, excluded=[lists.take(np.arange(20))], allowed=lists)
    assert items_of(top.numbers) == [[]] * 20
    assert len(large.addresses) == 1


def test_tiles_bound_scores_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommender, "_TILE_SCORES", 4000)
    found = make_recommender(torch.randn(1000, 4))
    with LargeTensors(5000) as large:
        found.top(torch.randn(20, 4), 2)
    assert not large.addresses
