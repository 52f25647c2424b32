"""Items that an evaluation predicts, and what is known before them, in rows with lists of items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from rayrec.metrics.item_ranks import ItemNumbers
from rayrec.models.base import CandidateRows
from rayrec.schema import SEEN, TARGET


@dataclass(frozen=True)
class ItemList:
    """Lists of ids, one a row."""

    ids: torch.Tensor
    """Concatenated ids of the rows, int64 [ids]."""
    lengths: torch.Tensor
    """Number of ids of each row, int64 [rows]."""

    def present(self, candidates: CandidateRows) -> ItemList:
        """Return the ids without those of missing values. An encoder writes one for an empty
        list.
        """
        if candidates.missing is None:
            return self
        is_present = self.ids != candidates.missing
        rows = ItemNumbers.from_lists(self.ids, self.lengths).rows
        lengths = torch.bincount(rows[is_present], minlength=len(self.lengths))
        return ItemList(self.ids[is_present], lengths)

    def items(self, candidates: CandidateRows) -> ItemNumbers:
        """Return the ids as candidate numbers."""
        return ItemNumbers.from_lists(candidates.numbers(self.ids), self.lengths)


@final
@dataclass(frozen=True)
class EvaluationItems:
    """Targets of rows, and the items before them."""

    targets: ItemNumbers
    seen: ItemNumbers | None
    """Items that are no candidates. None without a list of them: then all are candidates."""
    is_last: torch.Tensor
    """Whether the last item of the row's own list is held out, bool [rows]."""


def evaluation_items(
    lists: Mapping[str, ItemList],
    feature: str,
    candidates: CandidateRows,
) -> EvaluationItems:
    """Return the distinct items in `TARGET`, and for rows without any the last item of list
    `feature`. Lists of one item, and those with a missing last one, have no target.

    Args:
        lists: List `feature`, and `TARGET` and `SEEN` if the log has them.
        feature: Name of the list with a row's items in the order of time.
        candidates: Table rows of the candidates.
    """
    items = lists[feature]
    empty = ItemList(items.ids[:0], torch.zeros_like(items.lengths))
    target = lists.get(TARGET, empty).present(candidates)
    is_last = target.lengths == 0
    if len(items.ids):
        last = items.ids[(items.lengths.cumsum(0) - 1).clamp(min=0)]
    else:
        last = torch.zeros_like(items.lengths)
    has_last = is_last & (items.lengths > 1)
    if candidates.missing is not None:
        has_last = has_last & (last != candidates.missing)
    listed = target.items(candidates).distinct()
    targets = ItemNumbers.joined(listed, ItemNumbers.one_each(candidates.numbers(last), has_last))
    if SEEN not in lists:
        return EvaluationItems(targets, None, is_last)
    seen = lists[SEEN].present(candidates).items(candidates)
    return EvaluationItems(targets, seen, is_last)


def item_histories(
    lists: Mapping[str, ItemList],
    feature: str,
    candidates: CandidateRows,
    evaluated: EvaluationItems,
) -> ItemNumbers:
    """Return the known items before the targets: the seen ones, or without any those of list
    `feature`. Arguments as in `evaluation_items`, and its result.
    """
    row_items = lists[feature]
    is_history = torch.ones(len(row_items.ids), dtype=torch.bool)
    last = row_items.lengths.cumsum(0) - 1
    is_history[last[evaluated.is_last & (row_items.lengths > 0)]] = False
    items = row_items.items(candidates)
    seen = evaluated.seen
    if seen is not None:
        has_seen = seen.counts(len(row_items.lengths)) > 0
        is_history &= ~has_seen[items.rows]
    items = ItemNumbers(items.rows[is_history], items.numbers[is_history])
    if seen is not None:
        items = ItemNumbers.joined(items, seen)
    return items.candidates_only()
