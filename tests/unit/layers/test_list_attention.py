"""Attention within lists, with dropout, against its weights written out."""

import pytest
import torch

from rayrec.layers.kernels.list_attention import attend_lists

HEADS = 2
DIM = 10
LENGTHS = (70, 33, 5, 1, 0)
STARTS = torch.tensor([0, 70, 103, 108, 109, 109])


def make_projected(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(STARTS[-1]), 3 * DIM, generator=generator, requires_grad=True)


def dropped_weights(dropout: float) -> list[torch.Tensor]:
    """Return each list's weights after dropout, [heads, elements, elements], read off the result
    for values that are the unit vectors, some at a time.
    """
    projected = make_projected().detach()
    width = DIM // HEADS
    weights = [torch.zeros(HEADS, length, length) for length in LENGTHS]
    for first in range(0, max(LENGTHS), width):
        values = torch.zeros(len(projected), HEADS, width)
        for start, length in zip(STARTS.tolist(), LENGTHS, strict=False):
            for column in range(min(width, length - first)):
                values[start + first + column, :, column] = 1
        projected[:, 2 * DIM :] = values.flatten(1)
        torch.manual_seed(5)
        out = attend_lists((projected,), STARTS, heads=HEADS, dropout=dropout)
        for own, start, length in zip(weights, STARTS.tolist(), LENGTHS, strict=False):
            part = out[start : start + length].unflatten(1, (HEADS, width)).transpose(0, 1)
            own[:, :, first : first + width] = part[:, :, : max(0, length - first)]
    return weights


def softmax_weights(projected: torch.Tensor, start: int, length: int) -> torch.Tensor:
    own = projected[start : start + length].unflatten(1, (3, HEADS, -1))
    query, key, _ = own.permute(1, 2, 0, 3)
    scores = query @ key.transpose(1, 2) / (DIM // HEADS) ** 0.5
    is_later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return scores.masked_fill(is_later, -torch.inf).softmax(2)


def test_weights_are_dropped_and_scaled() -> None:
    projected = make_projected().detach()
    kept = total = 0
    for own, start, length in zip(dropped_weights(0.4), STARTS.tolist(), LENGTHS, strict=False):
        weights = softmax_weights(projected, start, length)
        is_kept = own > 0
        torch.testing.assert_close(own[is_kept], weights[is_kept] / 0.6)
        kept += int(is_kept.sum())
        total += HEADS * length * (length + 1) // 2
    assert kept / total == pytest.approx(0.6, abs=0.02)


def test_gradients_match_dropped_weights() -> None:
    projected = make_projected()
    factors = [
        own / softmax_weights(projected, start, length).detach().clamp(min=1e-30)
        for own, start, length in zip(dropped_weights(0.4), STARTS.tolist(), LENGTHS, strict=False)
    ]
    torch.manual_seed(5)
    out = attend_lists((projected,), STARTS, heads=HEADS, dropout=0.4)
    expected = []
    for factor, start, length in zip(factors, STARTS.tolist(), LENGTHS, strict=False):
        weights = softmax_weights(projected, start, length) * factor
        value = projected[start : start + length, 2 * DIM :].unflatten(1, (HEADS, -1))
        expected.append((weights @ value.transpose(0, 1)).transpose(0, 1).flatten(1))
    torch.testing.assert_close(out, torch.cat(expected))
    slopes = torch.randn(out.shape)
    gradients = [
        torch.autograd.grad((values * slopes).sum(), projected)[0]
        for values in (out, torch.cat(expected))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_result_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    projected = make_projected()
    results = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        torch.manual_seed(2)
        out = attend_lists((projected,), STARTS, heads=HEADS, dropout=0.1)
        results.append((out, *torch.autograd.grad(out.square().sum(), projected)))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_nan_remains_in_row() -> None:
    projected = make_projected().detach()
    projected[80, 0] = torch.nan
    out = attend_lists((projected,), STARTS, heads=HEADS, dropout=0.0)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [80]


def test_attention_keeps_bfloat16() -> None:
    projected = make_projected().detach()
    expected = attend_lists((projected,), STARTS, heads=HEADS, dropout=0.0)
    out = attend_lists((projected.bfloat16(),), STARTS, heads=HEADS, dropout=0.0)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.03)
