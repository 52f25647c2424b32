"""Click models of crosses: training, precision and settings. Their formulas: test_formulas.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from rayrec.config import InputError
from rayrec.layers.keyed_embeddings import Embedded
from rayrec.layers.mlp import Precision
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ranking.dcnv2 import DCNv2Config
from rayrec.models.ranking.gdcn import GDCNConfig

ROWS, DIM = 17, 4
INPUTS = ModelInputs(2, ("a", "b", "c"), "click")

DCNV2 = DCNv2Config(embedding_dim=DIM, cross_layers=2, mlp=(8, 6), batch_norm=True)
GDCN = GDCNConfig(embedding_dim=DIM, cross_layers=2, mlp=(8, 6))
MODELS = [DCNV2, GDCN]


CASES: dict[str, ClickModelConfig] = {
    "dcnv2": DCNV2,
    "dcnv2 stacked": DCNV2.replace(structure="stacked"),
    "dcnv2 both": DCNV2.replace(structure="stacked_parallel", stacked_mlp=(7,)),
    "dcnv2 low rank": DCNV2.replace(low_rank=3),
    "dcnv2 mixture": DCNV2.replace(low_rank=3, experts=2),
    "dcnv2 crosses alone": DCNV2.replace(mlp=()),
    "gdcn": GDCN,
    "gdcn stacked": GDCN.replace(structure="stacked"),
}

each = pytest.mark.parametrize("config", CASES.values(), ids=CASES)


def network(config: ClickModelConfig, precision: Precision = "fp32") -> nn.Module:
    """A network without a parameter that starts as 0 or 1, which a wrong formula could leave out."""
    torch.manual_seed(0)
    built = config.build(INPUTS, precision=precision)
    for parameter in built.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return built.train()


def delivery(config: ClickModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense features and (rows, features, dim) embeddings."""
    chance = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 2, generator=chance), torch.randn(ROWS, 3, config.width, generator=chance)


def in_order(values: torch.Tensor) -> Embedded:
    return Embedded.in_order(INPUTS.features, DIM, values.flatten(1))


@each
def test_the_order_of_delivery_does_not_matter(config: ClickModelConfig) -> None:
    net, (dense, values) = network(config), delivery(config)
    order = (2, 0, 1)
    shuffled = Embedded(INPUTS.features, DIM, lambda: (values[:, list(order)].flatten(1), order))
    assert torch.equal(net(dense, shuffled)["click"], net(dense, in_order(values))["click"])


def a_step(
    net: nn.Module, tables: torch.Tensor, ids: torch.Tensor, dense: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss after its backward pass, and the logits, of rows that are clicked if their categories of a and b are the same."""
    values = tables[torch.arange(3), ids]
    logits = net(dense, in_order(values))["click"]
    labels = (ids[:, 0] == ids[:, 1]).float()
    loss = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / max(len(ids), 1)
    loss.backward()
    return loss.detach(), logits


@pytest.mark.parametrize("config", MODELS, ids=lambda config: type(config).__name__)
def test_forty_steps_halve_the_loss(config: ClickModelConfig) -> None:
    torch.manual_seed(0)
    net, tables = config.build(INPUTS), nn.Parameter(torch.randn(3, 4, DIM) * 0.1)
    ids, dense = torch.randint(0, 4, (64, 3)), torch.rand(64, 2)
    optimizer, losses = torch.optim.Adam([*net.parameters(), tables], lr=0.02), []
    for _ in range(40):
        optimizer.zero_grad()
        losses.append(a_step(net, tables, ids, dense)[0])
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("rows", [0, 64])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@each
def test_a_step_reaches_every_parameter(config: ClickModelConfig, precision: Precision, rows: int) -> None:
    torch.manual_seed(0)
    net, tables = config.build(INPUTS, precision=precision), nn.Parameter(torch.randn(3, 4, DIM))
    loss, logits = a_step(net, tables, torch.randint(0, 4, (rows, 3)), torch.rand(rows, 2))
    assert (logits.shape, logits.dtype) == ((rows,), torch.float32)
    assert loss.isfinite()
    for name, parameter in [*net.named_parameters(), ("tables", tables)]:
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any() == (rows > 0), name


@each
def test_bf16_is_close_to_fp32(config: ClickModelConfig) -> None:
    dense, values = delivery(config)
    exact, close = (
        network(config, precision).eval()(dense, in_order(values))["click"] for precision in ("fp32", "bf16")
    )
    assert not torch.equal(exact, close)
    torch.testing.assert_close(close, exact, atol=0.03 * exact.abs().max().item(), rtol=0.03)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (DCNV2, {"cross_layers": 0}, "DCNv2Config.cross_layers: 0 must be at least 1"),
        (DCNV2, {"low_rank": 0}, "DCNv2Config.low_rank: 0 must be at least 1"),
        (DCNV2, {"mlp": (8, 0)}, r"DCNv2Config.mlp: \(8, 0\) needs sizes of at least 1"),
        (DCNV2, {"dropout": 1.0}, "DCNv2Config.dropout: 1.0 must be at least 0 and below 1"),
        (DCNV2, {"experts": 2}, "DCNv2Config.experts: need low_rank, .*, got experts 2. Set both"),
        (DCNV2, {"low_rank": 2, "experts": 0}, "DCNv2Config.experts: 0 must be at least 1"),
        (DCNV2, {"structure": "stacked_parallel", "mlp": ()}, "DCNv2Config.mlp: must have one or more sizes"),
        (DCNV2, {"structure": "both"}, "DCNv2Config.structure"),
        (GDCN, {"cross_layers": -1}, "GDCNConfig.cross_layers: -1 must be at least 1"),
        (GDCN, {"mlp": (0,)}, r"GDCNConfig.mlp: \(0,\) needs sizes of at least 1"),
        (GDCN, {"dropout": -0.1}, "GDCNConfig.dropout: -0.1 must be at least 0 and below 1"),
    ],
)
def test_settings_that_make_no_network(config: ClickModelConfig, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        config.replace(**settings)


def test_biases_of_gated_crosses_start_between_0_and_1() -> None:
    torch.manual_seed(0)
    biases, plain = (
        torch.cat([cross.linear.bias for cross in config.build(INPUTS).network.crosses]) for config in (GDCN, DCNV2)
    )
    assert 0 <= biases.min() < 0.2
    assert 0.8 < biases.max() < 1
    assert not plain.any()
