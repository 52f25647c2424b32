"""Dropout of values on CPUs."""

import pytest
import torch

from rayrec.layers.kernels.dropout import dropped


def test_dropout_repeats_with_seed() -> None:
    values = torch.ones(100, 1000, requires_grad=True)
    torch.manual_seed(3)
    first = dropped(values, 0.2)
    again = dropped(values, 0.2)
    torch.manual_seed(3)
    torch.testing.assert_close(dropped(values, 0.2), first, rtol=0, atol=0)
    assert not torch.equal(again, first)


def test_dropout_scales_other_values() -> None:
    torch.manual_seed(0)
    values = torch.arange(1.0, 100_001)
    factors = dropped(values, 0.2) / values
    assert factors.unique().tolist() == [0.0, pytest.approx(1.25)]
    assert (factors == 0).float().mean().item() == pytest.approx(0.2, abs=0.005)


def test_gradient_matches_values() -> None:
    values = torch.ones(7, 5001, requires_grad=True)
    out = dropped(values, 0.4)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), values)[0], out.detach())


def test_neighbors_are_dropped_independently() -> None:
    torch.manual_seed(1)
    is_dropped = dropped(torch.ones(1_000_000), 0.5) == 0
    for distance in (1, 4, 8, 16, 1 << 14):
        both = (is_dropped[distance:] & is_dropped[:-distance]).float().mean().item()
        assert both == pytest.approx(0.25, abs=0.003)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_certain_probabilities(probability: float) -> None:
    values = torch.tensor([1.0, -2.0, 3.0])
    expected = values if probability == 0 else torch.zeros(3)
    torch.testing.assert_close(dropped(values, probability), expected)


def test_dropout_keeps_bfloat16() -> None:
    out = dropped(torch.ones(50, dtype=torch.bfloat16), 0.5)
    assert out.dtype == torch.bfloat16
    assert set(out.tolist()) == {0.0, 2.0}
