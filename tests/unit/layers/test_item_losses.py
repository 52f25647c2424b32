"""Losses over items against their formulas in float64, with gradients."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from rayrec.layers import item_losses
from rayrec.layers.item_losses import find_hits

TARGETS = 300  # More than a tile
DIM = 5
ITEMS = 50


def vectors(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, DIM, generator=generator, dtype=torch.float64).requires_grad_()


def numbers(count: int, below: int, seed: int) -> torch.Tensor:
    return torch.randint(below, (count,), generator=torch.Generator().manual_seed(seed))


STATES = vectors(TARGETS, 0)
TABLE = vectors(ITEMS, 1)
POSITIVES = numbers(TARGETS, ITEMS, 2)
NEGATIVES = numbers(20, ITEMS, 3)
HITS = find_hits(POSITIVES, NEGATIVES)
IS_HIT = POSITIVES.unsqueeze(1) == NEGATIVES
COUNTS = numbers(ITEMS, 9, 4) + 1
SHARES = COUNTS.double() / COUNTS.sum()
BATCH = numbers(40, ITEMS, 5)

Loss = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


def scores_of(states: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of the targets' items, [targets], and of the negatives, with -inf for
    hits.
    """
    negatives = (states @ table[NEGATIVES].T).masked_fill(IS_HIT, -torch.inf)
    return (states * table[POSITIVES]).sum(1), negatives


def plain_bce(positive: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
    total = -positive.sigmoid().log() - (1 - negatives.sigmoid()).log().sum(1)
    return total / (len(NEGATIVES) + 1)


def plain_gbce(states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    positive, negatives = scores_of(states, table)
    alpha = len(NEGATIVES) / (ITEMS - 1)
    beta = alpha * (0.75 * (1 - 1 / alpha) + 1 / alpha)
    calibrated = (1 / (positive.sigmoid() ** -beta - 1)).log()
    return plain_bce(calibrated, negatives)


def plain_corrected(
    states: torch.Tensor,
    table: torch.Tensor,
    pool: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:
    losses = []
    for target, positive in enumerate(POSITIVES.tolist()):
        others = pool[pool != positive]
        q = shares[others] / (1 - shares[positive])
        scores = table[others] @ states[target]
        score = table[positive] @ states[target]
        mean = (scores.exp() / q).mean()
        share = score.exp() / (score.exp() + mean)
        losses.append((1 - share).detach() * (-score + (scores.exp() / q).sum().log()))
    return torch.stack(losses)


def plain_cosine(states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    unit = functional.normalize(table, dim=1)
    positive, negatives = scores_of(functional.normalize(states, dim=1), unit)
    return 1 - positive + 3 / len(NEGATIVES) * (negatives - 0.2).clamp(min=0).sum(1)


def sampled(function: Callable[..., torch.Tensor], **settings: float) -> Loss:
    return lambda states, table, dtype: function(
        states,
        table[POSITIVES],
        table[NEGATIVES],
        hits=HITS,
        dtype=dtype,
        **settings,
    )


def corrected(pool: torch.Tensor, shares: torch.Tensor) -> Loss:
    return lambda states, table, dtype: item_losses.corrected_softmax(
        states,
        table[POSITIVES],
        table[pool],
        hits=find_hits(POSITIVES, pool),
        probabilities=shares[pool],
        positive_probabilities=shares[POSITIVES],
        dtype=dtype,
    )


MIXED = torch.cat([BATCH, NEGATIVES])
MIXED_SHARES = (40 * SHARES + 20 / ITEMS) / 60
LOSSES: dict[str, tuple[Loss, Callable[..., torch.Tensor]]] = {
    "full": (
        lambda states, table, dtype: item_losses.full_softmax(
            states,
            table,
            POSITIVES,
            dtype=dtype,
        ),
        lambda states, table: -(states @ table.T).log_softmax(1)[range(TARGETS), POSITIVES],
    ),
    "sampled": (
        sampled(item_losses.sampled_softmax),
        lambda states, table: (
            -scores_of(states, table)[0]
            + torch.cat([scores_of(states, table)[0].unsqueeze(1), scores_of(states, table)[1]], 1)
            .exp()
            .sum(1)
            .log()
        ),
    ),
    "bce": (
        sampled(item_losses.bce),
        lambda states, table: plain_bce(*scores_of(states, table)),
    ),
    "gbce": (sampled(item_losses.gbce, num_items=ITEMS, t=0.75), plain_gbce),
    "in_batch": (
        corrected(BATCH, SHARES),
        lambda states, table: plain_corrected(states, table, BATCH, SHARES),
    ),
    "mixed": (
        corrected(
            MIXED,
            item_losses.pool_probabilities(SHARES, from_batch=40, uniform=20, num_items=ITEMS),
        ),
        lambda states, table: plain_corrected(states, table, MIXED, MIXED_SHARES),
    ),
    "cosine": (sampled(item_losses.cosine_contrastive, margin=0.2, weight=3.0), plain_cosine),
}


def gradients(losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the losses' sum, weighted by target."""
    weights = torch.arange(1, TARGETS + 1).to(losses.dtype) / TARGETS
    return torch.autograd.grad((losses * weights).sum(), (STATES, TABLE))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kept", [1 << 26, 0], ids=["kept", "again"])
def test_loss_and_gradients_match_formula(
    name: str,
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(item_losses, "_MAX_SAVED", kept)
    loss, plain = LOSSES[name]
    expected = plain(STATES, TABLE)
    losses = loss(STATES, TABLE, torch.float64)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-9)
    for gradient, correct in zip(gradients(losses), gradients(expected), strict=True):
        torch.testing.assert_close(gradient, correct, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_round_in_lower_precision(name: str, dtype: torch.dtype) -> None:
    loss, plain = LOSSES[name]
    losses = loss(STATES.float(), TABLE.float(), dtype)
    assert losses.dtype == torch.float32
    near = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(losses.double(), plain(STATES, TABLE), rtol=near, atol=near)


def test_gbce_of_t_0_is_bce() -> None:
    settings = {"hits": HITS, "dtype": torch.float64}
    arguments = (STATES, TABLE[POSITIVES], TABLE[NEGATIVES])
    losses = item_losses.gbce(*arguments, num_items=ITEMS, t=0.0, **settings)
    torch.testing.assert_close(losses, item_losses.bce(*arguments, **settings), rtol=1e-6, atol=0)


def test_corrected_softmax_has_full_gradient() -> None:
    """The pool has each item as often as its share, so it is the mean over pools."""
    pool = torch.arange(ITEMS).repeat_interleave(COUNTS)
    full = gradients(item_losses.full_softmax(STATES, TABLE, POSITIVES, dtype=torch.float64))
    found = gradients(corrected(pool, SHARES)(STATES, TABLE, torch.float64))
    for gradient, expected in zip(found, full, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    # The classic form corrects the target's item too, and has it among the negatives
    scores = (STATES * TABLE[POSITIVES]).sum(1) - SHARES[POSITIVES].log()
    others = (STATES @ TABLE[pool].T - SHARES[pool].log()).masked_fill(
        POSITIVES.unsqueeze(1) == pool,
        -torch.inf,
    )
    classic = torch.cat([scores.unsqueeze(1), others], 1).logsumexp(1) - scores
    assert (gradients(classic)[0] - full[0]).abs().max() > 0.1


def test_find_hits_returns_equal_pairs() -> None:
    expected = IS_HIT.nonzero()
    assert len(expected) > 2
    found = torch.stack(HITS, 1)
    assert sorted(found.tolist()) == expected.tolist()
    assert HITS[0].tolist() == sorted(HITS[0].tolist())
    empty = POSITIVES[:0]
    assert [part.tolist() for part in find_hits(empty, NEGATIVES)] == [[], []]
    assert [part.tolist() for part in find_hits(POSITIVES, empty)] == [[], []]


def test_losses_without_negatives_or_targets_are_finite() -> None:
    own = POSITIVES[:1].repeat(3)
    hits = find_hits(POSITIVES[:1], own)
    states = STATES[:1]
    arguments = (states, TABLE[POSITIVES[:1]], TABLE[own])
    shares = {"probabilities": torch.ones(3), "positive_probabilities": torch.ones(1)}
    for losses in (
        item_losses.sampled_softmax(*arguments, hits=hits),
        item_losses.corrected_softmax(*arguments, hits=hits, **shares),
    ):
        assert losses.tolist() == [0.0]
        assert torch.autograd.grad(losses.sum(), STATES)[0].abs().max() == 0
    nothing = item_losses.full_softmax(STATES[:0], TABLE, POSITIVES[:0])
    assert nothing.shape == (0,)
    assert item_losses.log_sum_exp(states, TABLE[:0]).tolist() == [-torch.inf]
