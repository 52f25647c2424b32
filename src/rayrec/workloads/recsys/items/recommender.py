"""Exact search for the best items of rows with a retrieval model, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np
import pyarrow as pa
import torch

from rayrec.config import InputError
from rayrec.data.arrow import arrow_numbers
from rayrec.data.encoding.known_categories import ENDS, UserIds, VocabularyLookup
from rayrec.metrics.item_ranks import ItemNumbers, filled_vectors, top_items, without_items

if TYPE_CHECKING:
    from rayrec.data.encoded_rows import EncodedRows
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.workloads.recsys.scorer import ClickScorer, PlainModel

_TILE_SCORES: Final = 1 << 24
"""Maximum number of scores in memory at once, unless a single row has more."""


class TopItems(NamedTuple):
    """Best items of rows, the best first."""

    numbers: np.ndarray
    """Candidate numbers, int64 [rows, k], -1 after the last item of a row."""
    scores: np.ndarray
    """Their scores, float32 [rows, k], 0 after the last."""

    @classmethod
    def from_scores(cls, scores: torch.Tensor, k: int) -> TopItems:
        """Return the k highest scores of each row, float32 [rows, candidates]. Equal ones are in
        the order of candidate numbers. Items with the score -inf are none.
        """
        if not k:
            return cls(np.zeros((len(scores), 0), np.int64), np.zeros((len(scores), 0), np.float32))
        values, numbers = top_items(scores, k)
        return cls(numbers.cpu().numpy(), values.where(numbers >= 0, 0.0).cpu().numpy())


@final
@dataclass(frozen=True)
class ItemLists:
    """Any number of items in each row, as candidate numbers."""

    numbers: np.ndarray
    """Candidate numbers of all rows, -1 for other items, int32 [items]."""
    ends: np.ndarray
    """End of each row's items, int64 [rows]."""

    @classmethod
    def from_lengths(cls, numbers: np.ndarray, lengths: np.ndarray) -> ItemLists:
        """Create from the number of items in each row, int [rows]."""
        return cls(numbers, np.cumsum(lengths, dtype=np.int64))

    def between(self, start: int, stop: int) -> ItemNumbers:
        """Return the items of rows [start, stop), numbered from 0."""
        ends = self.ends[start:stop]
        first = int(self.ends[start - 1]) if start else 0
        last = int(ends[-1]) if len(ends) else first
        rows = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=first))
        numbers = self.numbers[first:last].astype(np.int64)
        return ItemNumbers(torch.from_numpy(rows), torch.from_numpy(numbers))


# From rows to items:
#
#   EncodedRows -> network's queries [rows, dim]
#   queries x vectors of all candidates, in tiles of rows -> scores [tile, candidates]
#   scores without excluded and with only allowed items -> the first k, ties by candidate number
#
# The vectors are computed once. Candidates are the vocabulary's categories: no reserved row.
@final
class Recommender:
    """Search for the best items with a retrieval model. Thread-safe."""

    def __init__(
        self,
        scorer: ClickScorer,
        preprocessor: Preprocessor,
        *,
        vectors: torch.Tensor | None = None,
    ) -> None:
        """Create a recommender. `vectors` are those of the candidates, float32 [candidates, dim],
        if known. Raises InputError if the model cannot recommend.
        """
        feature = check_recommends(scorer.model, preprocessor)
        self.feature = feature
        """Column of the items."""
        self.ids = UserIds(preprocessor, feature)
        """Users' ids of the candidates."""
        self.lookup = VocabularyLookup(preprocessor, feature)
        """Candidate numbers of tokens."""
        self.is_list = feature in preprocessor.inputs.lists
        """Whether rows have lists of items, as for next-item models."""
        self.has_popularity = feature in preprocessor.constants.get(ENDS, {})
        """Whether candidates are ordered by their counts in the training rows, the most frequent
        first.
        """
        self._scorer = scorer
        vectors = scorer.item_vectors() if vectors is None else vectors.to(scorer.device)
        self.num_candidates = len(vectors)
        self.vectors = vectors
        """Vectors of all candidates, float32 [candidates, dim]."""
        self._filled = filled_vectors(vectors).contiguous()

    def queries(self, rows: EncodedRows) -> torch.Tensor:
        """Return the vectors of rows, float32 [rows, dim]."""
        return self._scorer.queries(rows)

    def top(
        self,
        queries: torch.Tensor,
        k: int,
        *,
        excluded: ItemNumbers | None = None,
        allowed: ItemNumbers | None = None,
    ) -> TopItems:
        """Return the k best items of each query, fewer if there are fewer candidates. Equal scores
        are in the order of candidate numbers.

        Args:
            queries: Vectors of rows, float32 [rows, dim].
            k: Number of items.
            excluded: Items that a row must not get.
            allowed: Items that a row may get. None: all candidates.
        """
        k = min(k, self.num_candidates)
        allowed = None if allowed is None else allowed.in_order()
        excluded = None if excluded is None else excluded.in_order()
        tiles = [TopItems(np.zeros((0, k), np.int64), np.zeros((0, k), np.float32))]
        with torch.inference_mode():
            for start, stop in self._tiles(len(queries)):
                scores = (queries[start:stop] @ self._filled.T)[:, : self.num_candidates]
                if allowed is not None:
                    scores = _only(scores, allowed.cut(start, stop))
                if excluded is not None:
                    scores = without_items(scores, excluded.cut(start, stop))
                tiles.append(TopItems.from_scores(scores, k))
        return TopItems(*(np.concatenate(parts) for parts in zip(*tiles, strict=True)))

    def popular(
        self,
        k: int,
        *,
        excluded: np.ndarray,
        allowed: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the k most frequent items in the training rows, int64 [k], and 1 / rank as their
        scores, float32 [k]. Both have fewer if there are fewer candidates.

        Args:
            k: Number of items.
            excluded: Candidate numbers of items that are left out, -1 for none.
            allowed: Candidate numbers of the only possible items. None: all.
        """
        if allowed is None:
            # The first k, and as many more as may be left out
            allowed = np.arange(min(k + len(excluded), self.num_candidates))
        numbers = np.setdiff1d(allowed[allowed >= 0], excluded)[:k].astype(np.int64)
        return numbers, (1.0 / np.arange(1, len(numbers) + 1)).astype(np.float32)

    def lists(self, top: TopItems) -> tuple[pa.Array, pa.Array]:
        """Return each row's items as a list of users' ids, int64 or large_string, and a list of
        float scores.
        """
        is_item = top.numbers >= 0
        ends = np.cumsum(is_item.sum(1), dtype=np.int32)
        offsets = arrow_numbers(np.concatenate([np.zeros(1, np.int32), ends]))
        ids = self.ids.take(top.numbers[is_item])
        scores = arrow_numbers(top.scores[is_item])
        return pa.ListArray.from_arrays(offsets, ids), pa.ListArray.from_arrays(offsets, scores)

    def _tiles(self, rows: int) -> Iterator[tuple[int, int]]:
        size = max(1, _TILE_SCORES // max(self.num_candidates, 1))
        for start in range(0, rows, size):
            yield start, min(start + size, rows)


def check_recommends(model: PlainModel, preprocessor: Preprocessor) -> str:
    """Return the feature of the items that a model recommends. Raises InputError unless it has
    vectors of all items, each with an id of its own.
    """
    feature = model.candidates
    if feature is None or not model.has_queries:
        raise InputError(
            "the model scores rows and does not recommend items. Train next_item or two_tower."
        )
    if not model.has_item_vectors:
        raise InputError(
            f"the model's items have more features than {feature}, which no table has for all "
            "items. Train with one item feature."
        )
    number = preprocessor.inputs.sparse.index(feature)
    if preprocessor.multi_hot is not None or not preprocessor.sparse[number].has_unique_ids:
        raise InputError(
            f"items of column {feature} share rows of its table, so that they cannot be told "
            "apart. Train without max_num_embeddings, num_embeddings and hashes."
        )
    return feature


def _only(scores: torch.Tensor, items: ItemNumbers) -> torch.Tensor:
    """Return a copy of the scores [rows, candidates] with -inf for all but these items."""
    allowed = items.candidates_only()
    masked = torch.full_like(scores, -torch.inf)
    masked[allowed.rows, allowed.numbers] = scores[allowed.rows, allowed.numbers]
    return masked
