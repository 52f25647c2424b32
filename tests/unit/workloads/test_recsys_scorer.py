"""The network between plain tensors gives what the trained model gives, as it is and as an exported program."""

from __future__ import annotations

import pytest
import torch
from saved_clicks import SMALL

from rayrec.models.base import ModelInputs
from rayrec.workloads.recsys_scorer import PlainModel

INPUTS = ModelInputs(5, ("b", "a", "c"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("interaction", ["dot", "cross", "projection"])
def test_an_exported_program_gives_the_same_logits(interaction: str, precision: str) -> None:
    torch.manual_seed(0)
    network = SMALL.replace(interaction=interaction).build(INPUTS, precision=precision)  # type: ignore[arg-type]
    model = PlainModel(network, INPUTS, embedding_dim=8).eval()
    dense, pooled = torch.randn(50, 5), torch.randn(50, 24)
    rows = torch.export.Dim("rows", min=1)
    program = torch.export.export(model, (dense, pooled), dynamic_shapes=({0: rows}, {0: rows})).module()
    with torch.no_grad():
        expected = model(dense, pooled)
        assert expected.shape == (50,)
        assert expected.dtype == torch.float32
        tolerance = 1e-5 if precision == "fp32" else 0.03
        torch.testing.assert_close(program(dense, pooled), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(program(dense[:1], pooled[:1]), expected[:1], atol=tolerance, rtol=tolerance)


def test_building_on_meta_draws_nothing() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.device("meta"):
        network = SMALL.build(INPUTS)
    assert all(parameter.is_meta for parameter in network.parameters())
    assert torch.equal(torch.get_rng_state(), before)
