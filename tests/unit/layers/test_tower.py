"""Towers: their layers in order, in any precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from rayrec.layers.tower import Tower


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_linear_then_norm_then_activation(*, batch_norm: bool, precision: str) -> None:
    torch.manual_seed(0)
    tower, inputs = Tower(5, (4, 3), batch_norm=batch_norm, precision=precision).train(), torch.randn(16, 5)
    outputs = tower(inputs)
    expected = inputs
    for layer in tower.layers:
        expected = functional.linear(expected, layer.weight, layer.bias)
        if batch_norm:
            mean, variance = expected.mean(0, keepdim=True), expected.var(0, unbiased=False, keepdim=True)
            expected = (expected - mean) / (variance + 1e-5).sqrt()
        expected = expected.relu()
    tolerance = 1e-5 if precision == "fp32" else 0.1
    torch.testing.assert_close(outputs.float(), expected, atol=tolerance, rtol=tolerance)
    assert outputs.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
    assert (tower.out_features, Tower(5, ()).out_features) == (3, 5)
