"""Exact search for the best items of rows with a retrieval model, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np
import pyarrow as pa
import torch

from rayrec.config import InputError
from rayrec.data.arrow import arrow_numbers
from rayrec.data.encoding.known_categories import ENDS, UserIds, VocabularyLookup
from rayrec.metrics.item_ranks import filled_vectors, top_items

if TYPE_CHECKING:
    from rayrec.data.encoded_rows import EncodedRows, JaggedIds
    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.workloads.recsys.scorer import ClickScorer, PlainModel

_TILE_SCORES: Final = 1 << 24
"""Maximum number of scores in memory at once, 64 MiB, unless a single row has more."""


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


# From rows to items:
#
#   EncodedRows -> network's queries [rows, dim]
#   queries x vectors of all candidates, in tiles of rows -> scores [tile, candidates]
#   scores, -inf for excluded and for other than allowed items -> the first k, ties by candidate
#   number
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
        singles = [name for name in scorer.model.sequences if name not in preprocessor.inputs.lists]
        self.described_by = (feature, *singles)
        """Columns of a row with a list whose known values the model knows something of."""
        self.ages = preprocessor.schema.feature(feature).ages
        """Column of the items' ages. None: the model reads no times."""
        self.reads_request_time = scorer.model.reads_request_time
        """Whether the model reads the time at which a row asks."""
        self.has_popularity = feature in preprocessor.constants.get(ENDS, {})
        """Whether candidates are ordered by their counts in the training rows, the most frequent
        first.
        """
        self._scorer = scorer
        vectors = scorer.item_vectors() if vectors is None else vectors.to(scorer.device)
        self.num_candidates = len(vectors)
        self._filled = filled_vectors(vectors).contiguous()
        self.vectors = self._filled[: len(vectors)]
        """Vectors of all candidates, float32 [candidates, dim]."""

    def queries(self, rows: EncodedRows) -> torch.Tensor:
        """Return the vectors of rows, float32 [rows, dim]."""
        return self._scorer.queries(rows)

    def top(
        self,
        queries: torch.Tensor,
        k: int,
        *,
        excluded: Sequence[JaggedIds] = (),
        allowed: JaggedIds | None = None,
    ) -> TopItems:
        """Return the k best items of each query, fewer if there are fewer candidates. Equal scores
        are in the order of candidate numbers.

        Args:
            queries: Vectors of rows, float32 [rows, dim].
            k: Number of items.
            excluded: Lists with the candidate numbers of items that each row must not get, -1 for
                other items.
            allowed: Lists with those of the items that each row may get, or one list for all rows.
                None: all candidates.
        """
        k = min(k, self.num_candidates)
        tiles = [TopItems(np.zeros((0, k), np.int64), np.zeros((0, k), np.float32))]
        with torch.inference_mode():
            for start, stop in self._tiles(len(queries)):
                scores = (queries[start:stop] @ self._filled.T)[:, : self.num_candidates]
                if allowed is not None:
                    scores.masked_fill_(self._not_in(allowed, start, stop), -torch.inf)
                for lists in excluded:
                    scores[_indices(lists.cut(start, stop))] = -torch.inf
                tiles.append(TopItems.from_scores(scores, k))
        return TopItems(*(np.concatenate(parts) for parts in zip(*tiles, strict=True)))

    def _not_in(self, allowed: JaggedIds, start: int, stop: int) -> torch.Tensor:
        """Return which candidates the rows [start, stop) may not get, bool [stop - start,
        candidates], or [1, candidates] of one list for all rows.
        """
        part = allowed if len(allowed.lengths) == 1 else allowed.cut(start, stop)
        shape = (len(part.lengths), self.num_candidates)
        is_left_out = torch.ones(shape, dtype=torch.bool, device=self._filled.device)
        is_left_out[_indices(part)] = False
        return is_left_out

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
            allowed: Candidate numbers of the only possible items, ascending. None: all.
        """
        # The first k, and as many more as may be left out
        count = k + len(excluded)
        if allowed is None:
            allowed = np.arange(min(count, self.num_candidates))
        numbers = np.setdiff1d(allowed[:count], excluded)[:k].astype(np.int64)
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


def _indices(lists: JaggedIds) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the candidate number of each item in lists that is a candidate, int64
    [items].
    """
    is_candidate = lists.values >= 0
    rows = np.repeat(np.arange(len(lists.lengths)), lists.lengths)[is_candidate]
    numbers = lists.values[is_candidate].astype(np.int64)
    return torch.from_numpy(rows), torch.from_numpy(numbers)
