"""Losses of retrieval models: a target's item against all items, sampled ones, or those of the
batch. The score of an item is the dot product of its vector and the target's state.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.nn import functional

from rayrec.compat.torch_compat import linear_pointwise
from rayrec.layers.kernels.kernel_threads import run_kernel, vectorized
from rayrec.native import c_fields

Hits = tuple[torch.Tensor, torch.Tensor]
"""Pairs of a target and an item that is its own, int64 [pairs] both, rising by target."""

_TILE: Final = 256
"""Maximum number of targets for one product, few enough that their scores stay in cache."""
_STEP: Final = 16
"""Divisor of the number of targets for one product. oneDNN compiles a program for each number."""
_ROWS_AT_ONCE: Final = 16
"""Number of targets whose exponents a thread takes at a time."""
_MAX_SAVED: Final = 1 << 26
"""Maximum number of scores that are saved for the backward pass. More are computed again."""
_LOG2_E: Final = math.log2(math.e)
"""Factor from natural to binary logarithms, whose exponential takes a third of the time."""
_EPS: Final = 1e-10
"""Bound of probabilities in `gbce`, as in gSASRec."""


def find_hits(positives: torch.Tensor, items: torch.Tensor) -> Hits:
    """Return the pairs of a target, int64 [targets], and an item, int64 [items], with equal ids."""
    ordered, order = items.sort(stable=True)
    first = torch.searchsorted(ordered, positives)
    counts = torch.searchsorted(ordered, positives, right=True) - first
    targets = torch.arange(len(positives), device=positives.device).repeat_interleave(counts)
    # Number of each pair among the target's
    number = torch.arange(len(targets), device=positives.device) - (
        counts.cumsum(0) - counts
    ).repeat_interleave(counts)
    return targets, order[first.repeat_interleave(counts) + number]


def full_softmax(
    states: torch.Tensor,
    items: torch.Tensor,
    positives: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the cross entropy of each target among all items, float32 [targets].

    Args:
        states: State of each target, [targets, dim].
        items: Vectors of all items, [items, dim].
        positives: Number of each target's item, int64 [targets].
        dtype: Type of products. float64 returns float64.
    """
    scores = dots(states, items.index_select(0, positives), dtype=dtype)
    return log_sum_exp(states, items, dtype=dtype) - scores


def sampled_softmax(
    states: torch.Tensor,
    positives: torch.Tensor,
    negatives: torch.Tensor,
    *,
    hits: Hits,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the cross entropy of each target's item among itself and the negatives that all
    targets share, except its `hits`, float32 [targets].

    Args:
        states: State of each target, [targets, dim].
        positives: Vector of each target's item, [targets, dim].
        negatives: Vectors of sampled items, [negatives, dim].
        hits: Negatives that are the target's item (`find_hits`).
        dtype: Type of products.
    """
    scores = dots(states, positives, dtype=dtype)
    log_sums = log_sum_exp(states, negatives, hits=hits, dtype=dtype)
    return torch.logaddexp(scores, log_sums) - scores


def bce(
    states: torch.Tensor,
    positives: torch.Tensor,
    negatives: torch.Tensor,
    *,
    hits: Hits,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the mean binary cross entropy of each target's item and the negatives, float32
    [targets]. Arguments as in `sampled_softmax`. A hit counts 0.
    """
    scores = dots(states, positives, dtype=dtype)
    return _bce(scores, states, negatives, hits=hits, dtype=dtype)


def gbce(
    states: torch.Tensor,
    positives: torch.Tensor,
    negatives: torch.Tensor,
    *,
    hits: Hits,
    num_items: int,
    t: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return `bce` with the probability of a target's item raised to a power, against the
    overconfidence from few negatives (Petrov & Macdonald, "gSASRec", RecSys 2023), float32
    [targets].

    Args:
        states: State of each target, [targets, dim].
        positives: Vector of each target's item, [targets, dim].
        negatives: Vectors of sampled items, [negatives, dim].
        hits: Negatives that are the target's item (`find_hits`).
        num_items: Number of all items.
        t: Calibration from 0, which is `bce`, to 1.
        dtype: Type of products.
    """
    rate = len(negatives) / (num_items - 1)
    beta = rate * (t * (1 - 1 / rate) + 1 / rate)
    scores = dots(states, positives, dtype=dtype).double()
    odds = scores.sigmoid().clamp(_EPS, 1 - _EPS).pow(-beta).clamp(min=1 + _EPS) - 1
    calibrated = -odds.clamp(max=1 / _EPS).log()
    return _bce(calibrated, states, negatives, hits=hits, dtype=dtype)


def _bce(
    scores: torch.Tensor,
    states: torch.Tensor,
    negatives: torch.Tensor,
    *,
    hits: Hits,
    dtype: torch.dtype,
) -> torch.Tensor:
    wide = _wide(dtype)
    logits = (states.to(dtype) @ negatives.to(dtype).T).to(wide)
    logits = logits.index_put(hits, logits.new_tensor(-torch.inf))
    total = functional.softplus(-scores).to(wide) + functional.softplus(logits).sum(1)
    return total / (len(negatives) + 1)


def corrected_softmax(
    states: torch.Tensor,
    positives: torch.Tensor,
    pool: torch.Tensor,
    *,
    hits: Hits,
    probabilities: torch.Tensor,
    positive_probabilities: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return a softmax loss over drawn items, such as the batch's, float32 [targets]. Its gradient
    is the full softmax's (Khrylchenko et al., "Correcting the LogQ Correction", RecSys 2025). 0
    without other items.

    Each target's own item is neither among the negatives nor corrected. The weight 1 - p, where p
    is its estimated probability, has no gradient.

    Args:
        states: State of each target, [targets, dim].
        positives: Vector of each target's item, [targets, dim].
        pool: Vectors of the drawn items, [pool, dim].
        hits: Items of the pool that are the target's (`find_hits`).
        probabilities: Probability of each drawn item, [pool].
        positive_probabilities: Probability of drawing each target's item, [targets].
        dtype: Type of products.
    """
    wide = _wide(dtype)
    scores = dots(states, positives, dtype=dtype)
    offsets = -probabilities.to(wide).log()
    log_sums = log_sum_exp(states, pool, offsets=offsets, hits=hits, dtype=dtype)
    # A negative's probability, given that it is not the target's item, is q / (1 - q of that item)
    log_sums = log_sums + torch.log1p(-positive_probabilities.to(wide))
    counts = len(pool) - torch.bincount(hits[0], minlength=len(states))
    mean = log_sums - counts.clamp(min=1).to(wide).log()
    weights = (mean - scores).sigmoid().detach()
    return (weights * (log_sums - scores)).masked_fill(counts == 0, 0.0)


def pool_probabilities(
    frequencies: torch.Tensor,
    *,
    from_batch: int,
    uniform: int,
    num_items: int,
) -> torch.Tensor:
    """Return the probabilities of items in a pool, in which `from_batch` items come by their
    frequencies [items], and `uniform` items have equal probabilities among `num_items`.
    """
    return (from_batch * frequencies + uniform / num_items) / (from_batch + uniform)


def cosine_contrastive(
    states: torch.Tensor,
    positives: torch.Tensor,
    negatives: torch.Tensor,
    *,
    hits: Hits,
    margin: float,
    weight: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return 1 - cosine of each target and its item, plus `weight` times the mean of the negatives'
    cosines above `margin` (Mao et al., "SimpleX", CIKM 2021), float32 [targets]. Other arguments as
    in `sampled_softmax`. A hit counts 0.
    """
    unit = functional.normalize(states, dim=1)
    similarity = dots(unit, functional.normalize(positives, dim=1), dtype=dtype)
    candidates = functional.normalize(negatives, dim=1)
    sums: torch.Tensor = _SumAbove.apply(_padded(unit), candidates, margin, hits, dtype)
    above = sums[: len(states)]
    return 1 - similarity + weight / len(negatives) * above


def dots(
    states: torch.Tensor,
    vectors: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the score of each target's vector, float32 [targets]. Both are rounded to `dtype`."""
    wide = _wide(dtype)
    return (states.to(dtype).to(wide) * vectors.to(dtype).to(wide)).sum(1)


def log_sum_exp(
    states: torch.Tensor,
    items: torch.Tensor,
    *,
    offsets: torch.Tensor | None = None,
    hits: Hits | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the logarithm of the sum of exp(score + offset) over the items except the hits, -inf
    without any, float32 [targets].

    Args:
        states: State of each target, [targets, dim].
        items: Vectors, [items, dim].
        offsets: Constant of each item, [items]. None: 0.
        hits: Pairs of a target and an item that does not count.
        dtype: Type of products. Exponents and sums are float32, or float64 if products are.
    """
    result: torch.Tensor = _LogSumExp.apply(_padded(states), items, offsets, hits, dtype)
    return result[: len(states)]


def log_sums(scores: torch.Tensor) -> torch.Tensor:
    """Return log(sum(exp(scores))) of each row, -inf without items, float32 [rows], from scores
    [rows, items]. Has no gradient.
    """
    if not scores.is_cpu:
        return scores.logsumexp(1)
    largest, sums = torch.ops.rayrec.exponents_(scores.detach() * _LOG2_E)
    return sums.log() + largest / _LOG2_E


# Why not torch's logsumexp: scores of [targets, items] are the largest tensors of a model. Each
# tile of them is written, and read by all that follows, while it is in cache:
#
#   forward     scores -> minus their maximum -> exp -> sum; exp is saved, if it is not too large
#   backward    both products of exp; what else is in the scores' gradient, exp / sum * gradient, is
#               a factor of rows of the states, which are smaller
class _LogSumExp(torch.autograd.Function):
    """Autograd function behind `log_sum_exp`."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        items: torch.Tensor,
        offsets: torch.Tensor | None,
        hits: Hits | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        scores = _Scores((states * _LOG2_E).to(dtype), items.to(dtype), offsets, hits)
        result = states.new_full((len(states),), -torch.inf, dtype=_wide(dtype))
        totals = torch.zeros_like(result)
        saves = len(states) * len(items) <= _MAX_SAVED
        saved = []
        if len(items):
            for tile in _tiles(len(states)):
                exponents, largest, sums = scores.exponents(tile)
                totals[tile] = sums
                result[tile] = sums.log() + largest / _LOG2_E
                saved.append(exponents if saves else None)
        ctx.scores = scores
        ctx.saved = saved
        ctx.save_for_backward(states, items, totals)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, items, totals = ctx.saved_tensors
        scores = ctx.scores
        saved = ctx.saved
        ctx.saved = [None] * len(saved)
        # Sums are 0 if no item counts
        scale = gradient / totals.clamp(min=torch.finfo(totals.dtype).tiny)
        weights = (
            scores.exponents(tile)[0] if exponents is None else exponents
            for tile, exponents in zip(_tiles(len(totals)), saved, strict=False)
        )
        return *_gradients(states, items, scores, scale, weights), None, None, None


# The scores stay in cache, as those of _LogSumExp. The backward pass needs only their signs.
class _SumAbove(torch.autograd.Function):
    """Sum of each target's scores above a margin, minus it."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        items: torch.Tensor,
        margin: float,
        hits: Hits,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        scores = _Scores(states.to(dtype), items.to(dtype), None, hits)
        totals = states.new_zeros(len(states), dtype=_wide(dtype))
        ctx.scores = scores
        ctx.above = []
        for tile in _tiles(len(states)):
            excess = scores.products(tile).sub_(margin).relu_()
            totals[tile] = excess.sum(1)
            ctx.above.append(excess > 0)
        ctx.save_for_backward(states, items)
        return totals

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, items = ctx.saved_tensors
        return *_gradients(states, items, ctx.scores, gradient, ctx.above), None, None, None


def _gradients(
    states: torch.Tensor,
    items: torch.Tensor,
    scores: _Scores,
    scale: torch.Tensor,
    weights: Iterable[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients for states and items. The gradient for the scores of a tile is its
    `weights` [tile, items] times `scale` [targets].
    """
    factor = scale.unsqueeze(1)
    scaled_states = (states * factor).to(scores.states.dtype)
    for_states = torch.zeros_like(states)
    # As the products are laid out
    for_items = scale.new_zeros(items.shape[1], items.shape[0])
    for tile, values in zip(_tiles(len(states)), weights, strict=False):
        rounded = values.to(scores.items.dtype)
        for_states[tile] = _product(rounded, scores.items.T) * factor[tile]
        _add_product(for_items, scaled_states[tile].T, rounded)
    return for_states, for_items.T.to(items.dtype)


class _Scores:
    """Scores of targets and items, in parts."""

    def __init__(
        self,
        states: torch.Tensor,
        items: torch.Tensor,
        offsets: torch.Tensor | None,
        hits: Hits | None,
    ) -> None:
        self.states = states
        self.items = items
        self._offsets = None if offsets is None else offsets * _LOG2_E
        self._hits = hits

    def products(self, tile: slice) -> torch.Tensor:
        """Return the scores of targets, -inf for hits, [tile, items]."""
        scores = _product(self.states[tile], self.items).to(_wide(self.states.dtype))
        if self._offsets is not None:
            scores += self._offsets
        if self._hits is not None:
            targets, items = self._hits
            bounds = torch.searchsorted(targets, targets.new_tensor([tile.start, tile.stop]))
            hits = slice(*bounds.tolist())
            scores[targets[hits] - tile.start, items[hits]] = -torch.inf
        return scores

    def exponents(self, tile: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return 2^(score - largest), 0 for hits, [tile, items], and the largest score and the sum
        of each target, [tile] both. Scores are logarithms to base 2.
        """
        scores = self.products(tile)
        if scores.is_cpu and scores.dtype == torch.float32:
            return scores, *torch.ops.rayrec.exponents_(scores)
        largest = scores.amax(1).clamp(min=torch.finfo(scores.dtype).min)
        exponents = scores.sub_(largest.unsqueeze(1)).exp2_()
        return exponents, largest, exponents.sum(1)


def _exponents(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = scores.new_empty(len(scores))
    sums = scores.new_empty(len(scores))
    # Tensors are variables of this call, which outlive the kernel. `scores` are overwritten.
    pointers = [tensor.data_ptr() for tensor in (scores, largest, sums)]
    run_kernel(
        vectorized("rayrec_exponents_of_rows"),
        _CExponents(*pointers, scores.shape[1]),
        len(scores),
        at_once=_ROWS_AT_ONCE,
    )
    return largest, sums


class _CExponents(ctypes.Structure):
    """Mirror of rayrec_exponents in native/kernels.h."""

    _fields_ = c_fields("void* scores largest sums; int64 columns")


# Registered as a torch operator for its profiler and modes
_OPERATORS: Final = torch.library.Library("rayrec", "FRAGMENT")
_OPERATORS.define("exponents_(Tensor(a!) scores) -> (Tensor, Tensor)")
_OPERATORS.impl("exponents_", _exponents, "CPU")


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Return `rows` [rows, columns] with rows of zeros at the end, so that all tiles have equal
    lengths, of which a run has few.
    """
    return functional.pad(rows, (0, 0, 0, -len(rows) % _tile_length(len(rows))))


def _tiles(count: int) -> list[slice]:
    length = _tile_length(count)
    return [slice(start, start + length) for start in range(0, count, length)]


def _tile_length(count: int) -> int:
    number = max(math.ceil(count / _TILE), 1)
    return max(math.ceil(count / number / _STEP), 1) * _STEP


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left` [rows, in] times transposed `right` [columns, in]. For tiles, oneDNN is at
    least as fast as BLAS, also on Intel's CPUs.
    """
    if left.is_cpu and left.dtype == torch.float32 and right.numel():
        return linear_pointwise(left, right, None, "none")
    return left @ right.T


def _add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add the product of `left` [rows, in] and `right` [in, columns] to `sums` [rows, columns]."""
    if sums.dtype == left.dtype:
        sums.addmm_(left, right)
    else:
        sums += left @ right


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
