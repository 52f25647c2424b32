"""Click models of masks, two streams and stacked factorization machines against their formulas in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from whole_click_model import whole_model

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.data.loader import sparse_features
from rayrec.layers.embedded import Embedded
from rayrec.layers.tower import LogitTower, Tower
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
Reference = Callable[[nn.Module, ClickModelConfig, torch.Tensor], torch.Tensor]


def linear(layer: nn.Module, values: torch.Tensor) -> torch.Tensor:
    product = torch.einsum("...i,oi->...o", values, layer.weight)
    return product if layer.bias is None else product + layer.bias


def standardized(values: torch.Tensor, dim: int) -> torch.Tensor:
    variance = values.var(dim, unbiased=False, keepdim=True)
    return (values - values.mean(dim, keepdim=True)) / (variance + 1e-5).sqrt()


def tower(net: Tower, values: torch.Tensor) -> torch.Tensor:
    for layer, norm in zip(net.layers, net.norms, strict=True):
        values = linear(layer, values)
        if not isinstance(norm, nn.Identity):
            values = standardized(values, 0) * norm.weight + norm.bias
        values = values.clamp(min=0)
    return values


def logit(net: LogitTower, values: torch.Tensor) -> torch.Tensor:
    return linear(net.logit, tower(net.tower, values))[:, 0]


def of_masknet(net: nn.Module, config: ClickModelConfig, v: torch.Tensor) -> torch.Tensor:
    """Equations 3 to 10 and FuxiCTR's MaskNet.py."""
    features = v.flatten(1)
    normal = standardized(v, 2) * net.norms.weight + net.norms.bias if net.norms is not None else v
    hidden, outputs = normal.flatten(1), []
    for block in net.blocks:
        mask = linear(block.second, linear(block.first, features).clamp(min=0))
        out = linear(block.layer, mask * hidden)
        if config.layer_norm:
            out = standardized(out, 1) * block.norm.weight + block.norm.bias
        outputs.append(out.clamp(min=0))
        if config.structure == "serial":
            hidden = outputs[-1]
    return logit(net.top, hidden if config.structure == "serial" else torch.cat(outputs, dim=1))


def of_finalmlp(net: nn.Module, config: ClickModelConfig, v: torch.Tensor) -> torch.Tensor:
    """Equations 4 to 10: gates, two streams and multi-head bilinear fusion. Features are two numbers, a, b and c."""
    streams = []
    for stream, gate, places in ((net.first, net.first_gate, (4, 0, 1)), (net.second, net.second_gate, None)):
        inputs = v.flatten(1)
        if gate is not None:
            raw = linear(gate.gate, tower(gate.tower, v[:, list(places)].flatten(1))) if places else gate.bias
            inputs = inputs * 2 / (1 + torch.exp(-raw))
        streams.append(tower(stream, inputs))
    first, second = streams
    logits = linear(net.first_logit, first)[:, 0] + linear(net.second_logit, second)[:, 0]
    for head in range(2):
        part, other = first[:, 3 * head : 3 * head + 3], second[:, 2 * head : 2 * head + 2]
        logits = logits + torch.einsum("ri,ij,rj->r", part, net.products[head], other)
    return logits


def of_wukong(net: nn.Module, config: ClickModelConfig, v: torch.Tensor) -> torch.Tensor:
    """X <- LN(concat(FMB(X), LCB(X)) + X), section 3 of the paper."""
    for layer in net.layers:
        products = torch.einsum("rnd,rmd,mk->rnk", v, v, layer.mixing).flatten(1)
        normal = standardized(products, 1) * layer.products_norm.weight + layer.products_norm.bias
        made = linear(layer.products, tower(layer.tower, normal)).clamp(min=0).view(ROWS, 2, DIM)
        together = torch.cat([made, torch.einsum("ln,rnd->rld", layer.linear.weight, v)], dim=1)
        if layer.shortcut is not None:
            v = torch.einsum("on,rnd->rod", layer.shortcut.weight, v) + layer.shortcut.bias[:, None]
        v = standardized(together + v, 2) * layer.norm.weight + layer.norm.bias
    return logit(net.top, v.flatten(1))


CASES: dict[str, tuple[ClickModelConfig, Reference]] = {
    "masknet": (MASKNET, of_masknet),
    "masknet parallel": (MASKNET.replace(structure="parallel"), of_masknet),
    "masknet without norms": (MASKNET.replace(layer_norm=False, embedding_layer_norm=False), of_masknet),
    "finalmlp": (FINALMLP.replace(batch_norm=True), of_finalmlp),
    "finalmlp gates": (GATED, of_finalmlp),
    "wukong": (WUKONG, of_wukong),
    "wukong shortcut": (WUKONG.replace(linear_vectors=2), of_wukong),
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
def test_logits_are_those_of_the_paper(name: str) -> None:
    (config, reference), (dense, values) = CASES[name], delivery()
    net = network(config)
    outputs = net(dense, Embedded.in_order(INPUTS.features, DIM, values.flatten(1)))
    numbers = torch.stack([dense[:, n : n + 1] * net.number_vectors[n] for n in range(2)], dim=1)
    expected = reference(net, config, torch.cat([numbers, values], dim=1))
    torch.testing.assert_close(outputs["click"], expected, atol=1e-5, rtol=1e-5)


@each
def test_the_order_of_delivery_does_not_matter(name: str) -> None:
    net, (dense, values), order = network(CASES[name][0]).eval(), delivery(), (2, 0, 1)
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
    model = whole_model(CASES[name][0], [4, 4, 4], inputs=INPUTS, precision=precision)
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
    model = whole_model(CASES[name][0], [4, 4, 4], inputs=INPUTS)
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
