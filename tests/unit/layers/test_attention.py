"""Attention over fields, by kernel and by torch's operators."""

import pytest
import torch

from rayrec.layers import attention
from rayrec.layers.attention import FieldAttention


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("in_dim", [8, 12])
def test_kernel_matches_operators(
    *, scale: bool, in_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = FieldAttention(in_dim, 12, 3, scale=scale, dropout=0.0)
    fields = torch.randn(17, 39, in_dim, requires_grad=True)
    slopes = torch.randn(17, 39, 12)
    results = []
    for uses_kernels in (True, False):
        monkeypatch.setattr(attention, "uses_kernels", lambda _, uses=uses_kernels: uses)
        out = layer(fields)
        results.append((out, *torch.autograd.grad(out, [fields, *layer.parameters()], slopes)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_weights_are_dropped_in_training_only() -> None:
    torch.manual_seed(0)
    layer = FieldAttention(8, 8, 2, scale=True, dropout=0.5)
    fields = torch.randn(4, 6, 8)
    assert not torch.equal(layer(fields), layer(fields))
    layer.eval()
    assert torch.equal(layer(fields), layer(fields))
