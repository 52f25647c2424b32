"""The network between plain tensors gives what the trained model gives, as it is and as an exported program."""

from __future__ import annotations

import pytest
import torch
from builders.saved_clicks import SMALL
from builders.served_click_model import make_preprocessor
from torch import nn

from rayrec.layers.keyed_embeddings import Embedded
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.scoring_tables import RowFormat
from rayrec.workloads.recsys.scorer import PlainModel, empty_model, make_scorer

INPUTS = ModelInputs(5, ("b", "a", "c"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("interaction", ["dot", "cross", "projection"])
def test_an_exported_program_gives_the_same_logits(interaction: str, precision: str) -> None:
    torch.manual_seed(0)
    network = SMALL.replace(interaction=interaction).build(INPUTS, precision=precision)  # type: ignore[arg-type]
    model = PlainModel(network, INPUTS, width=8).eval()
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


class _Own(nn.Module):
    """Has a constant that is not among its weights, which would be lost on the meta device."""

    def __init__(self, inputs: ModelInputs) -> None:
        super().__init__()
        self.label, self.weight = inputs.label, nn.Parameter(torch.randn(1))
        self.register_buffer("chosen", torch.tensor([1]), persistent=False)

    def forward(self, dense: torch.Tensor, embedded: Embedded) -> dict[str, torch.Tensor]:
        return {self.label: dense[:, self.get_buffer("chosen")].squeeze(1) * self.weight}


class _OwnConfig(ClickModelConfig):
    def build(self, inputs: ModelInputs, *, precision: str = "fp32") -> nn.Module:
        return _Own(inputs)


def test_a_network_of_ones_own_keeps_its_constants() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = empty_model(_OwnConfig(), preprocessor=make_preprocessor(), precision="fp32")
    assert torch.equal(torch.get_rng_state(), before)
    model.network.load_state_dict({"weight": torch.tensor([2.0])}, assign=True)
    scorer = make_scorer(model, [], row_format=RowFormat("fp32", 16), device="cpu")
    assert scorer.parts()[0](torch.tensor([[5.0, 7.0]]), torch.zeros(1, 0)).tolist() == [14.0]
