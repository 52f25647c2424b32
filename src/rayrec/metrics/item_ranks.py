"""Ranks of relevant items among all candidates, and the metrics at k that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch.nn import functional

_COLUMNS: Final = 16
"""Number of float32 columns in the widest vector register."""


@final
@dataclass(frozen=True)
class ItemNumbers:
    """Any number of items per row, as candidate numbers."""

    rows: torch.Tensor
    """Row of each item, int64 [items]."""
    numbers: torch.Tensor
    """Candidate number of each item, int64 [items]. -1: no candidate."""

    @classmethod
    def one_each(cls, numbers: torch.Tensor, has_item: torch.Tensor | None = None) -> ItemNumbers:
        """Return one item per row, int64 [rows], only for the rows of a mask, bool [rows]."""
        rows = torch.arange(len(numbers), device=numbers.device)
        return cls(rows, numbers) if has_item is None else cls(rows[has_item], numbers[has_item])

    @classmethod
    def of_lists(cls, numbers: torch.Tensor, lengths: torch.Tensor) -> ItemNumbers:
        """Return the items of lists, int64 [items], with their lengths, int64 [rows]."""
        rows = torch.arange(len(lengths), device=lengths.device)
        repeated = torch.repeat_interleave(rows, lengths, output_size=len(numbers))
        return cls(repeated, numbers)

    def counts(self, rows: int) -> torch.Tensor:
        """Return the number of items of each of `rows` rows, int64 [rows]."""
        return torch.bincount(self.rows, minlength=rows)

    def known(self) -> ItemNumbers:
        """Return the items that are candidates."""
        is_known = self.numbers >= 0
        return ItemNumbers(self.rows[is_known], self.numbers[is_known])


def candidate_logits(rows: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Return the dot products of row and candidate vectors, float32 [rows, candidates]. Equal
    candidates have equal logits.

    BLAS adds up the last columns, which do not fill a vector register, in another order. Zeros fill
    it.
    """
    num_candidates = candidates.shape[0]
    filled = functional.pad(candidates.float(), (0, 0, 0, -num_candidates % _COLUMNS))
    return (rows.float() @ filled.T)[:, :num_candidates]


def without_items(logits: torch.Tensor, items: ItemNumbers) -> torch.Tensor:
    """Return a copy of the logits [rows, candidates] with -inf for these items of each row."""
    known = items.known()
    return logits.index_put((known.rows, known.numbers), logits.new_tensor(-torch.inf))


# What is known of a target among the candidates, and what follows:
#
#   above, tied      the places above .. above + tied - 1 are equally likely: recall and DCG are
#                    sums over targets, so their expected values are sums too
#   best level       the tied candidates with a row's first target; `_none_before` gives the
#                    probabilities of the place of the first of several targets: hit rate and MRR
#   cold, seen       no place
def rank_measures(
    logits: torch.Tensor,
    targets: ItemNumbers,
    *,
    ks: Sequence[int],
    seen: ItemNumbers | None = None,
) -> dict[str, torch.Tensor]:
    """Return the metrics of each row's relevant items among the candidates, float64 [rows] each,
    NaN for rows without any, and the counts `targets`, `unknown_targets` and, with `seen`,
    `seen_targets`, int64 [rows].

    At each k: `recall_at_k` is the share of the relevant items within the first k, `ndcg_at_k` has
    the discount 1 / log2(rank + 1) and the ideal of min(k, relevant items) (Järvelin & Kekäläinen
    2002), `hit_rate_at_k` tells whether any is within the first k, and `mrr_at_k` is 1 / rank of
    the first one, 0 beyond k. Ties count as the expected value over all orders of the tied
    candidates (McSherry & Najork 2008), so that a constant model gets what chance gives.

    Args:
        logits: Scores of the candidates, float32 [rows, candidates]. A NaN ranks above all others.
        targets: Relevant items, each once a row. Unknown ones (-1) and seen ones are misses.
        ks: Ranks of the metrics.
        seen: Items that are no candidates of a row, such as those that a user had before.
    """
    rows = len(logits)
    if not logits.shape[1]:
        logits = logits.new_full((rows, 1), -torch.inf)
    if seen is not None:
        logits = without_items(logits, seen)
    is_unknown = targets.numbers < 0
    target_logits = logits[targets.rows, targets.numbers.clamp(min=0)]
    is_seen = ~is_unknown & target_logits.isneginf() if seen is not None else is_unknown & False
    of_target = logits.index_select(0, targets.rows)
    above = (~(of_target <= target_logits.unsqueeze(1))).sum(1)
    # 0 if the target's own score is NaN: then all are above
    tied = (of_target == target_logits.unsqueeze(1)).sum(1)
    places = _Places(targets.rows, above, tied, ~(is_unknown | is_seen), rows)
    num_targets = targets.counts(rows)
    has_target = num_targets > 0
    measures = {}
    for k in ks:
        for name, values in places.at(k, num_targets).items():
            measures[f"{name}_at_{k}"] = values.masked_fill(~has_target, torch.nan)
    counts = {
        "targets": num_targets,
        "unknown_targets": torch.bincount(targets.rows[is_unknown], minlength=rows),
    }
    if seen is not None:
        counts["seen_targets"] = torch.bincount(targets.rows[is_seen], minlength=rows)
    return {**measures, **counts}


@final
class _Places:
    """Places of targets in the order of candidates."""

    def __init__(
        self,
        rows: torch.Tensor,
        above: torch.Tensor,
        tied: torch.Tensor,
        is_ranked: torch.Tensor,
        num_rows: int,
    ) -> None:
        """Create from each target's row, the numbers of candidates above and of tied ones, itself
        included, int64 [targets], and whether it is a candidate, bool [targets].
        """
        ranked = is_ranked & (tied > 0)
        self._rows = rows[ranked]
        self._above = above[ranked]
        self._tied = tied[ranked]
        self._num_rows = num_rows

    def at(self, k: int, num_targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the metrics at k by name, float64 [rows] each. `num_targets`: int64 [rows]."""
        discounts = self._discounts(k)
        first = self._above.clamp(max=k)
        last = (self._above + self._tied).clamp(max=k)
        gains = (discounts[last] - discounts[first]) / self._tied
        ideal = discounts[num_targets.clamp(min=1, max=k)]
        hits = self._added((last - first).double() / self._tied)
        first_places = self._first_places(k)
        ranks = torch.arange(1, k + 1, dtype=torch.float64, device=self._rows.device)
        return {
            "ndcg": self._added(gains) / ideal,
            "recall": hits / num_targets.clamp(min=1),
            "hit_rate": first_places.sum(1),
            "mrr": (first_places / ranks).sum(1),
        }

    def _discounts(self, k: int) -> torch.Tensor:
        """Return the sum of the first discounts, float64 [k + 1]."""
        ranks = torch.arange(1, k + 1, dtype=torch.float64, device=self._rows.device)
        return functional.pad((1 / (ranks + 1).log2()).cumsum(0), (1, 0))

    def _added(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the targets' values in each row, float64 [rows]."""
        total = values.new_zeros(self._num_rows, dtype=torch.float64)
        return total.index_add(0, self._rows, values)

    def _first_places(self, k: int) -> torch.Tensor:
        """Return the probability that a row's first target is at each place, float64 [rows, k]."""
        nowhere = torch.iinfo(torch.int64).max
        above = self._above.new_full((self._num_rows,), nowhere)
        above = above.scatter_reduce(0, self._rows, self._above, "amin")
        is_first = self._above == above[self._rows]
        first_rows = self._rows[is_first]
        targets = torch.bincount(first_rows, minlength=self._num_rows)
        # At least one, so that rows without a target have no 0 / 0
        tied = torch.ones_like(above).index_put((first_rows,), self._tied[is_first])
        others = (tied - targets).unsqueeze(1)
        # Of `tied` candidates in random order, the first x have no target with the probability
        # (others / tied) (others - 1) / (tied - 1) ... of x factors.
        place = torch.arange(k, device=above.device)
        factors = (others - place).clamp(min=0).double() / (tied.unsqueeze(1) - place).clamp(min=1)
        none_before = functional.pad(factors.cumprod(1), (1, 0), value=1.0)
        at_place = none_before[:, :-1] - none_before[:, 1:]
        shifted = place - above.clamp(max=k).unsqueeze(1)
        is_reached = (shifted >= 0) & (targets > 0).unsqueeze(1)
        return at_place.gather(1, shifted.clamp(min=0)) * is_reached
