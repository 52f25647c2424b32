"""Click models of masks, two streams and stacked factorization machines: training and settings. Formulas: test_formulas.py."""

from __future__ import annotations

import pytest
import torch
from builders.whole_click_model import whole_model
from torch import nn

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.ingest.batches import sparse_features
from rayrec.layers.keyed_embeddings import Embedded
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ranking.finalmlp import FinalMLPConfig
from rayrec.models.ranking.masknet import MaskNetConfig
from rayrec.models.ranking.wukong import WukongConfig

ROWS, DIM = 17, 4
INPUTS = ModelInputs(2, ("a", "b", "c"), "click")
MASKNET = MaskNetConfig(embedding_dim=DIM, mlp=(8, 6), num_blocks=2, block_dim=5, reduction_ratio=0.5)
FINALMLP = FinalMLPConfig(
    embedding_dim=DIM, first_mlp=(8, 6), second_mlp=(4,), heads=2, gate_mlp=(3,), first_dropout=0.0, second_dropout=0.0
)
GATED = FINALMLP.replace(feature_gates=True, first_context=("c", "numbers"))
WUKONG = WukongConfig(
    embedding_dim=DIM, num_layers=3, linear_vectors=3, product_vectors=2, rank=2, block_mlp=(6,), mlp=(8,)
)


CASES: dict[str, ClickModelConfig] = {
    "masknet": MASKNET,
    "masknet parallel": MASKNET.replace(structure="parallel"),
    "masknet without norms": MASKNET.replace(layer_norm=False, embedding_layer_norm=False),
    "finalmlp": FINALMLP.replace(batch_norm=True),
    "finalmlp gates": GATED,
    "wukong": WUKONG,
    "wukong shortcut": WUKONG.replace(linear_vectors=2, mlp_batch_norm=True),
}
each = pytest.mark.parametrize("name", CASES)


def network(config: ClickModelConfig) -> nn.Module:
    """Without a parameter that is 0 or 1 at the start, and that a wrong formula could leave out."""
    torch.manual_seed(0)
    built = config.build(INPUTS)
    for name, parameter in built.named_parameters():
        if parameter.dim() == 1 or name.startswith("norms."):
            nn.init.normal_(parameter)
    return built.train()


def delivery() -> tuple[torch.Tensor, torch.Tensor]:
    """Dense features and (rows, features, dim) embeddings."""
    chance = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 2, generator=chance), torch.randn(ROWS, 3, DIM, generator=chance)


@each
def test_the_order_of_delivery_does_not_matter(name: str) -> None:
    net, (dense, values), order = network(CASES[name]).eval(), delivery(), (2, 0, 1)
    shuffled = Embedded(INPUTS.features, DIM, lambda: (values[:, list(order)].flatten(1), order))
    plain = Embedded.in_order(INPUTS.features, DIM, values.flatten(1))
    torch.testing.assert_close(net(dense, shuffled)["click"], net(dense, plain)["click"])


def batch(rows: int) -> Batch:
    """Rows whose click depends on whether the categories of a and b are alike."""
    chance = torch.Generator().manual_seed(rows)
    ids = [torch.randint(0, 4, (rows,), generator=chance).int().numpy() for _ in INPUTS.features]
    labels = {"click": torch.from_numpy(ids[0] == ids[1]).float()}
    dense = torch.rand(rows, 2, generator=chance)
    return Batch({"dense": dense}, 1 / max(rows, 1), sparse_features(list(INPUTS.features), ids, rows), labels)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@each
def test_every_parameter_learns(name: str, precision: str) -> None:
    model = whole_model(CASES[name], [4, 4, 4], inputs=INPUTS, precision=precision)
    torch.manual_seed(0)
    with torch.no_grad():
        for table in model.embeddings.parameters():
            table.uniform_(-0.5, 0.5)
    optimizer, rows, losses = torch.optim.Adam(model.parameters(), lr=0.05), batch(64), []
    for _ in range(20):
        optimizer.zero_grad()
        loss, output = model(rows)
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert output.logits["click"].dtype == torch.float32


@each
def test_a_batch_without_rows_costs_nothing(name: str) -> None:
    model = whole_model(CASES[name], [4, 4, 4], inputs=INPUTS)
    loss, output = model(batch(0))
    loss.backward()
    assert loss.item() == 0.0
    assert output.logits["click"].shape == (0,)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.head.parameters())


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (MASKNET, {"mlp": ()}, r"MaskNetConfig.mlp: \(\) needs one or more sizes of at least 1"),
        (MASKNET, {"reduction_ratio": 0.0}, "MaskNetConfig.reduction_ratio: 0.0 must be above 0"),
        (FINALMLP, {"heads": 4}, r"FinalMLPConfig.heads: 4 must divide the last widths of both MLPs, \(6, 4\)"),
        (FINALMLP, {"second_context": ("a",)}, "FinalMLPConfig.second_context: is for gates; set feature_gates"),
        (WUKONG, {"rank": 0}, "WukongConfig.rank: 0 must be at least 1"),
    ],
)
def test_settings_that_make_no_network(config: ClickModelConfig, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        config.replace(**settings)


def test_a_context_names_features_of_the_model() -> None:
    with pytest.raises(InputError, match="first_context: no feature 'd'; there are a, b, c, numbers"):
        GATED.replace(first_context=("d",)).sequences(INPUTS)
    assert GATED.sequences(INPUTS) == ()
