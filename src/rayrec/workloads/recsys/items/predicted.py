"""Items that a retrieval model predicts for the rows of a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, final

import numpy as np
import pyarrow as pa

from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.logs.index import Block
from rayrec.data.logs.reading import read_categories
from rayrec.metrics.ranking import DEFAULT_KS
from rayrec.models.heads import Head, ItemsHead
from rayrec.schema import SEEN
from rayrec.workloads.base import ScoringContext
from rayrec.workloads.recsys.candidates import model_inputs
from rayrec.workloads.recsys.items.recommender import (
    Recommender,
    TopItems,
    check_recommends,
)
from rayrec.workloads.recsys.scorer import empty_model

if TYPE_CHECKING:
    from rayrec.ingest.stream import LazyBlock
    from rayrec.models.base import ClickModelConfig

ITEM_COLUMNS: Final = ("items", "scores")
"""Columns of items in tables of predictions."""
_NUMBERS: Final = "top:numbers"
_SCORES: Final = "top:scores"
"""Names of the fields of TopItems in scored columns."""


@final
@dataclass(frozen=True)
class ItemsRequest:
    """Items to predict for each row."""

    k: int
    exclude_seen: bool
    """Whether to leave out the items that a row has already."""


def items_request(
    model: ClickModelConfig,
    context: ScoringContext,
    preprocessor: Preprocessor,
) -> ItemsRequest | None:
    """Return the items to predict, None if the model predicts none. Raises InputError if they are
    asked for of a model that cannot recommend.
    """
    if context.evaluating:
        return None
    requested = [] if context.k is None else ["k"]
    if not context.exclude_seen:
        requested.append("exclude_seen")
    if not requested and model.candidate_feature(model_inputs(preprocessor)) is None:
        return None
    network = empty_model(model, preprocessor=preprocessor, precision=context.config.precision)
    try:
        check_recommends(network, preprocessor)
    except InputError as error:
        if requested:
            raise InputError(f"{requested[0]}: {error}") from None
        return None
    k = context.k or int(getattr(model, "k", DEFAULT_KS[-1]))
    return ItemsRequest(k, context.exclude_seen)


def heads_beside(heads: Sequence[Head], columns: Sequence[str]) -> tuple[Head, ...]:
    """Return the heads that are written beside items: vectors, unless the rows' own column of that
    name is kept.
    """
    return tuple(
        head for head in heads if not isinstance(head, ItemsHead) and head.name not in columns
    )


@final
class BlockItems:
    """Predicted items of a block of a log."""

    def __init__(
        self,
        recommender: Recommender,
        request: ItemsRequest,
        preprocessor: Preprocessor,
        block: Block,
        opened: LazyBlock,
    ) -> None:
        self._recommender = recommender
        self._request = request
        self._preprocessor = preprocessor
        self._block = block
        self._opened = opened

    def score(self, rows: EncodedRows, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return the values of rows [start, stop) for `columns`, by name."""
        excluded = []
        if self._request.exclude_seen:
            excluded = [lists.cut(start, stop) for lists in self._seen]
        queries = self._recommender.queries(rows)
        top = self._recommender.top(queries, self._request.k, excluded=excluded)
        return {_NUMBERS: top.numbers, _SCORES: top.scores}

    def columns(self, scored: Mapping[str, np.ndarray]) -> dict[str, pa.Array]:
        """Return lists with ids and scores, given the concatenated results of `score`."""
        top = TopItems(scored[_NUMBERS], scored[_SCORES])
        arrays = self._recommender.lists(top)
        return dict(zip(ITEM_COLUMNS, arrays, strict=True))

    @cached_property
    def _seen(self) -> list[JaggedIds]:
        """Items that the block's rows have already, as candidate numbers, -1 for others: the list
        `seen`, and the whole item list, whatever its `max_length`.
        """
        lists = self._preprocessor.inputs.lists
        names = [name for name in (SEEN, self._recommender.feature) if name in lists]
        if self._opened.raw is None:
            return [self._encoded_items(name) for name in names]
        return [self._raw_items(name) for name in names]

    def _raw_items(self, name: str) -> JaggedIds:
        """Return all items of a list in a raw log."""
        schema = self._preprocessor.schema
        parts = [read_categories(part, name, schema) for part in self._block.parts]
        tokens = np.concatenate([part.tokens for part in parts])
        lengths = np.concatenate([part.lengths for part in parts]).astype(np.int32)
        return JaggedIds(self._recommender.lookup.numbers(tokens), lengths)

    def _encoded_items(self, name: str) -> JaggedIds:
        """Return the items of a list in a preprocessed log, which has at most `max_length`."""
        number = self._preprocessor.inputs.sparse.index(name)
        ids = self._opened.encode(0, self._block.rows).ids[number]
        assert isinstance(ids, JaggedIds)
        candidates = model_inputs(self._preprocessor).candidates_of(name)
        return JaggedIds(candidates.numbers(ids.values), ids.lengths)
