"""Ranks of relevant items among all candidates, and the metrics at k that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, final

import torch
from torch.nn import functional

from rayrec.metrics.recommended import RECOMMENDED

_COLUMNS: Final = 16
"""Number of float32 columns in the widest vector register."""
_TILE_NUMBERS: Final = 1 << 23
"""Number of scores in a tile, 32 MiB. There are two: the scores of rows, and those of targets."""


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
    def from_lists(cls, numbers: torch.Tensor, lengths: torch.Tensor) -> ItemNumbers:
        """Return the items of lists, int64 [items], with their lengths, int64 [rows]."""
        rows = torch.arange(len(lengths), device=lengths.device)
        repeated = torch.repeat_interleave(rows, lengths, output_size=len(numbers))
        return cls(repeated, numbers)

    @classmethod
    def joined(cls, *parts: ItemNumbers) -> ItemNumbers:
        """Return the items of one or more parts with the same rows."""
        return cls(
            torch.cat([part.rows for part in parts]),
            torch.cat([part.numbers for part in parts]),
        )

    def in_order(self) -> ItemNumbers:
        """Return the items by row, in their order within a row."""
        order = self.rows.argsort(stable=True)
        return ItemNumbers(self.rows[order], self.numbers[order])

    def cut(self, start: int, stop: int) -> ItemNumbers:
        """Return the items of the rows [start, stop), which become rows from 0, of items in
        order.
        """
        ends = self.rows.new_tensor([start, stop])
        first, last = torch.searchsorted(self.rows, ends).tolist()
        return ItemNumbers(self.rows[first:last] - start, self.numbers[first:last])

    def distinct(self) -> ItemNumbers:
        """Return the items without later repetitions in a row. Unknown items stay, because each may
        be another one.
        """
        if not len(self.rows):
            return self
        # One more number in each row, for the unknown items
        keys = self.rows * (self.numbers.max() + 2) + self.numbers
        _, number = keys.unique(return_inverse=True)
        index = torch.arange(len(keys), device=keys.device)
        first = index.new_full((len(keys),), len(keys))
        first = first.scatter_reduce(0, number, index, "amin")
        is_first = (first[number] == index) | (self.numbers < 0)
        return ItemNumbers(self.rows[is_first], self.numbers[is_first])

    def counts(self, rows: int) -> torch.Tensor:
        """Return each row's number of items, int64 [rows]."""
        return torch.bincount(self.rows, minlength=rows)

    def candidates_only(self) -> ItemNumbers:
        """Return the items that are candidates."""
        is_candidate = self.numbers >= 0
        return ItemNumbers(self.rows[is_candidate], self.numbers[is_candidate])


def filled_vectors(candidates: torch.Tensor) -> torch.Tensor:
    """Return the vectors of candidates, float32 [candidates, width], and zeros behind them.

    BLAS adds up the last columns, which do not fill a vector register, in another order. Zeros fill
    it, so that equal candidates have equal scores.
    """
    return functional.pad(candidates.float(), (0, 0, 0, -len(candidates) % _COLUMNS))


def candidate_logits(rows: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Return the dot products of row and candidate vectors, float32 [rows, candidates]. Equal
    candidates have equal logits.
    """
    return CandidateScores(rows, candidates)(0, len(rows))


@final
class CandidateScores:
    """Dot products of row and candidate vectors, part by part."""

    def __init__(
        self,
        rows: torch.Tensor,
        candidates: torch.Tensor,
        *,
        stored: torch.Tensor | None = None,
    ) -> None:
        """Create from vectors, [rows, width] and [candidates, width], and the scores of all rows,
        if they are computed already.
        """
        self.shape = (len(rows), len(candidates))
        self.stored = stored
        """Scores of all rows, float32 [rows, candidates]. None: not computed, or too many."""
        self._rows = rows.float()
        self._candidates = candidates.float()

    @cached_property
    def _filled(self) -> torch.Tensor:
        return filled_vectors(self._candidates)

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        """Return the scores of the rows [start, stop), float32 [stop - start, candidates]."""
        if self.stored is not None:
            return self.stored[start:stop]
        products = self._rows[start:stop] @ self._filled.T
        return products[:, : self.shape[1]]

    def at_items(self, items: ItemNumbers) -> torch.Tensor:
        """Return the scores of candidates, float32 [items]."""
        vectors = self._candidates[items.numbers]
        return (self._rows[items.rows] * vectors).sum(1)

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return a function's values of all rows, [rows], from the scores of some at a time."""
        values = []
        tiles = _tiles(*self.shape)
        for start, stop in tiles:
            scores = self(start, stop)
            values.append(function(scores))
            if len(tiles) == 1:
                self.stored = scores
        return torch.cat(values)


def without_items(logits: torch.Tensor, items: ItemNumbers) -> torch.Tensor:
    """Return a copy of the logits [rows, candidates] with -inf for these items of each row."""
    indexed = items.candidates_only()
    return logits.index_put((indexed.rows, indexed.numbers), logits.new_tensor(-torch.inf))


# What is known of a target among the candidates, and what follows:
#
#   above, tied      the places above .. above + tied - 1 are equally likely: recall and DCG are
#                    sums over targets, so their expected values are sums too
#   best level       the tied candidates with a row's first target; `_first_ranks` gives the
#                    probabilities of each place of the first target: hit rate and MRR
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

    At each k, `recall_at_K` is the share of the relevant items within the first k. `ndcg_at_K` has
    the discount 1 / log2(rank + 1), and the ideal has min(k, relevant items) first ranks (Järvelin
    & Kekäläinen 2002). `hit_rate_at_K` tells whether any is within the first k, and `mrr_at_K` is
    1 / rank of the first one, 0 beyond k. Ties count as the expected value over all orders of the
    tied candidates (McSherry & Najork 2008), so that a constant model gets what chance gives.

    Args:
        logits: Scores of the candidates, float32 [rows, candidates]. A NaN ranks above all others.
        targets: Relevant items, each once a row. Unknown ones (-1) and seen ones are misses.
        ks: Ranks of the metrics.
        seen: Items that are no candidates of a row, such as those that a user had before.
    """
    if seen is not None:
        logits = without_items(logits, seen)
    measures = _row_measures(logits, targets, ks, seen)
    del measures[RECOMMENDED]
    return measures


def _row_measures(
    logits: torch.Tensor,
    targets: ItemNumbers,
    ks: Sequence[int],
    seen: ItemNumbers | None,
) -> dict[str, torch.Tensor]:
    """Return `rank_measures` and the best candidates, `RECOMMENDED`, of logits that are -inf for
    seen items.
    """
    rows = len(logits)
    if not logits.shape[1]:
        logits = logits.new_full((rows, 1), -torch.inf)
    best = _Best(logits, max(ks))
    is_unknown = targets.numbers < 0
    target_logits = logits[targets.rows, targets.numbers.clamp(min=0)]
    is_seen = _are_among(targets, seen, logits.shape) & ~is_unknown
    above, tied = best.orders(targets.rows, target_logits)
    ranks = _TargetRanks(targets.rows, above, tied, ~(is_unknown | is_seen), rows)
    num_targets = targets.counts(rows)
    has_target = num_targets > 0
    measures = {RECOMMENDED: best.items()[1].int()}
    for k in ks:
        for name, values in ranks.at(k, num_targets).items():
            measures[f"{name}_at_{k}"] = values.masked_fill(~has_target, torch.nan)
    counts = {
        "targets": num_targets,
        "unknown_targets": torch.bincount(targets.rows[is_unknown], minlength=rows),
    }
    if seen is not None:
        counts["seen_targets"] = torch.bincount(targets.rows[is_seen], minlength=rows)
    return {**measures, **counts}


def _are_among(
    items: ItemNumbers,
    other_items: ItemNumbers | None,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Return whether each item is one of the other items of its row, bool [items]."""
    if other_items is None:
        return torch.zeros_like(items.rows, dtype=torch.bool)
    keys = items.rows * shape[1] + items.numbers
    indexed = other_items.candidates_only()
    return torch.isin(keys, indexed.rows * shape[1] + indexed.numbers)


# Ranks beyond the largest k have no effect. A target's order follows from its row's k + 1 best
# candidates. Only targets equal to the last of these are compared with all candidates, which may be
# tied too.
@final
class _Best:
    """The best candidates of rows, and the next one."""

    def __init__(self, logits: torch.Tensor, k: int) -> None:
        """Find the best k of logits, float32 [rows, candidates]."""
        self._logits = logits
        self._k = k
        num_candidates = logits.shape[1]
        self._scores, self._numbers = logits.topk(min(k + 1, num_candidates), dim=1)
        self._has_more = self._scores.shape[1] < num_candidates

    def orders(self, rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how many candidates of the rows are above these values, at most k + 1, and how
        many are equal, int64 [values] each. Values below k + 1 candidates have no equal ones. All
        candidates are above a NaN.
        """
        best = self._scores[rows]
        column = values.unsqueeze(1)
        above = (~(best <= column)).sum(1)
        tied = (best == column).sum(1)
        if self._has_more:
            is_last = (best[:, -1] == values).nonzero().squeeze(1)
            for part in is_last.split(max(1, _TILE_NUMBERS // self._logits.shape[1])):
                tied[part] = (self._logits[rows[part]] == column[part]).sum(1)
        return above, tied

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `top_items`."""
        k = self._k
        if self._scores.isnan().any():
            return top_items(
                self._logits.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf),
                k,
            )
        numbers = self._numbers[:, :k]
        if self._scores.shape[1] > k:
            last = self._scores[:, k - 1]
            is_cut = (self._scores[:, k] == last) & ~last.isneginf()
            step = max(1, _TILE_NUMBERS // (8 * self._logits.shape[1]))
            for rows in is_cut.nonzero().squeeze(1).split(step):
                numbers[rows] = _lowest_tied(self._logits[rows], last[rows].unsqueeze(1), k)
        numbers = numbers.sort(dim=1).values
        scores = self._logits.gather(1, numbers)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        numbers = numbers.gather(1, order)
        return scores, numbers.masked_fill(scores.isneginf(), -1)


def top_items(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores and numbers of each row's k best candidates, or of all if there are fewer,
    float32 and int64 [rows, items]. Equal scores are in the order of the numbers. The number is -1
    for a score of -inf. A NaN is above all others.
    """
    return _Best(logits, k).items()


def _lowest_tied(logits: torch.Tensor, last: torch.Tensor, k: int) -> torch.Tensor:
    """Return the candidates above the last score, [rows, 1], and the first of those equal to it,
    int64 [rows, k].
    """
    is_above = logits > last
    left = k - is_above.sum(1, keepdim=True)
    is_tied = logits == last
    is_first = is_tied & (is_tied.cumsum(1, dtype=torch.int32) <= left)
    return (is_first | is_above).nonzero()[:, 1].unflatten(0, (-1, k))


# A million candidates and 256 rows have a gigabyte of scores, so only some rows have theirs at any
# time.
def _tiles(rows: int, candidates: int) -> list[tuple[int, int]]:
    """Divide rows into ranges [start, stop), at least one, with scores that fit in memory."""
    step = max(1, _TILE_NUMBERS // max(1, candidates))
    return [(start, min(start + step, rows)) for start in range(0, max(1, rows), step)]


def tiled_rank_measures(
    scores: Callable[[int, int], torch.Tensor],
    targets: ItemNumbers,
    *,
    shape: tuple[int, int],
    ks: Sequence[int],
    seen: ItemNumbers | None = None,
) -> dict[str, torch.Tensor]:
    """Return `rank_measures`, computed part by part, and `RECOMMENDED`: the best candidates in each
    row up to the largest k, int32 [rows, items], -1 where there are no more.

    Args:
        scores: Function that returns the scores of the rows [start, stop), float32 [stop - start,
            candidates], which are changed in place.
        targets: As in `rank_measures`.
        shape: Numbers of rows and of candidates.
        ks: As in `rank_measures`.
        seen: As in `rank_measures`.
    """
    targets = targets.in_order()
    if seen is not None:
        seen = seen.in_order()
    parts = []
    for start, stop in _tiles(*shape):
        logits = scores(start, stop)
        seen_part = None if seen is None else seen.cut(start, stop)
        if seen_part is not None:
            indexed = seen_part.candidates_only()
            logits[indexed.rows, indexed.numbers] = -torch.inf
        parts.append(_row_measures(logits, targets.cut(start, stop), ks, seen_part))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@final
class _TargetRanks:
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
        first_ranks = self._first_ranks(k)
        ranks = torch.arange(1, k + 1, dtype=torch.float64, device=self._rows.device)
        return {
            "ndcg": self._added(gains) / ideal,
            "recall": hits / num_targets.clamp(min=1),
            "hit_rate": first_ranks.sum(1),
            "mrr": (first_ranks / ranks).sum(1),
        }

    def _discounts(self, k: int) -> torch.Tensor:
        """Return the sum of the first discounts, float64 [k + 1]."""
        ranks = torch.arange(1, k + 1, dtype=torch.float64, device=self._rows.device)
        return functional.pad((1 / (ranks + 1).log2()).cumsum(0), (1, 0))

    def _added(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the targets' values in each row, float64 [rows]."""
        total = values.new_zeros(self._num_rows, dtype=torch.float64)
        return total.index_add(0, self._rows, values)

    def _first_ranks(self, k: int) -> torch.Tensor:
        """Return the probability that a row's first target is at each place, float64 [rows, k]."""
        nowhere = torch.iinfo(torch.int64).max
        above = self._above.new_full((self._num_rows,), nowhere)
        above = above.scatter_reduce(0, self._rows, self._above, "amin")
        is_first = self._above == above[self._rows]
        first_rows = self._rows[is_first]
        targets = torch.bincount(first_rows, minlength=self._num_rows)
        # At least one, so that rows without a target have no 0 / 0
        tied = torch.ones_like(above).index_put((first_rows,), self._tied[is_first])
        rest = (tied - targets).unsqueeze(1)
        # Of `tied` candidates in random order, the first x have no target with the probability
        # (rest / tied) (rest - 1) / (tied - 1) ... of x factors.
        index = torch.arange(k, device=above.device)
        factors = (rest - index).clamp(min=0).double() / (tied.unsqueeze(1) - index).clamp(min=1)
        none_before = functional.pad(factors.cumprod(1), (1, 0), value=1.0)
        at_index = none_before[:, :-1] - none_before[:, 1:]
        shifted = index - above.clamp(max=k).unsqueeze(1)
        is_reached = (shifted >= 0) & (targets > 0).unsqueeze(1)
        return at_index.gather(1, shifted.clamp(min=0)) * is_reached
