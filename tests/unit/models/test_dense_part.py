"""The dense part alone gives what the whole network gives, as it is and as an exported program."""

from __future__ import annotations

import pytest
import torch
from saved_clicks import SMALL

from rayrec.models.dense_part import DensePart

FEATURES = ["b", "a", "c"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("interaction", ["dot", "cross", "projection"])
def test_an_exported_program_gives_the_same_logits(interaction: str, precision: str) -> None:
    torch.manual_seed(0)
    part = DensePart(SMALL.replace(interaction=interaction), num_dense=5, features=FEATURES, precision=precision).eval()
    dense, pooled = torch.randn(50, 5), torch.randn(50, 24)
    rows = torch.export.Dim("rows", min=1)
    program = torch.export.export(part, (dense, pooled), dynamic_shapes=({0: rows}, {0: rows})).module()
    with torch.no_grad():
        expected = part(dense, pooled)
        assert expected.shape == (50,)
        assert expected.dtype == torch.float32
        tolerance = 1e-5 if precision == "fp32" else 0.03
        torch.testing.assert_close(program(dense, pooled), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(program(dense[:1], pooled[:1]), expected[:1], atol=tolerance, rtol=tolerance)


def test_building_on_meta_draws_nothing() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.device("meta"):
        part = DensePart(SMALL, num_dense=5, features=FEATURES)
    assert all(parameter.is_meta for parameter in part.parameters())
    assert torch.equal(torch.get_rng_state(), before)
