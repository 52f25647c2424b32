"""Click models of products, attention and experts against their formulas in plain torch, and what they share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from whole_click_model import whole_model

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.data.encoded import EncodedRows
from rayrec.data.loader import sparse_features
from rayrec.layers.embedded import Embedded
from rayrec.layers.first_order import width_with_weight
from rayrec.layers.tower import LogitTower, Tower
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ranking.deepfm import DeepFMConfig
from rayrec.models.ranking.widedeep import WideDeepConfig
from rayrec.models.tables import RowFormat
from rayrec.workloads.recsys_scorer import PlainModel, make_scorer

ROWS, DIM = 17, 4
INPUTS = ModelInputs(2, ("a", "b", "c"), "click")
DEEPFM = DeepFMConfig(embedding_dim=DIM, mlp=(8, 6), batch_norm=True)
WIDEDEEP = WideDeepConfig(embedding_dim=DIM, mlp=(8,))
CONFIGS: list[ClickModelConfig] = [DEEPFM, WIDEDEEP]
Reference = Callable[[nn.Module, torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]

each = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)


def network(config: ClickModelConfig, inputs: ModelInputs = INPUTS) -> nn.Module:
    """Without a parameter that is 0 or 1 at the start, and that a wrong formula could leave out."""
    torch.manual_seed(0)
    built = config.build(inputs)
    for parameter in built.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return built.train()


def delivery(config: ClickModelConfig, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense features and (rows, features, width) rows of tables."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 2, generator=chance), torch.randn(ROWS, 3, config.width, generator=chance)


def as_columns(values: torch.Tensor) -> Embedded:
    return Embedded.in_order(INPUTS.features, values.shape[2], values.flatten(1))


def linear(layer: nn.Module, values: torch.Tensor) -> torch.Tensor:
    product = torch.einsum("...i,oi->...o", values, layer.weight)
    return product if layer.bias is None else product + layer.bias


def standardized(values: torch.Tensor, norm: nn.Module, dim: int) -> torch.Tensor:
    variance = values.var(dim, unbiased=False, keepdim=True)
    return (values - values.mean(dim, keepdim=True)) / (variance + 1e-5).sqrt() * norm.weight + norm.bias


def tower(net: Tower, values: torch.Tensor) -> torch.Tensor:
    for layer, norm in zip(net.layers, net.norms, strict=True):
        values = linear(layer, values)
        if not isinstance(norm, nn.Identity):
            values = standardized(values, norm, 0)
        values = values.clamp(min=0)
    return values


def logit(net: LogitTower, values: torch.Tensor) -> torch.Tensor:
    return linear(net.logit, tower(net.tower, values))[:, 0]


def as_fields(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
    """The vectors v_i of all features, each (rows, dim)."""
    numbers = [dense[:, n : n + 1] * net.number_vectors[n] for n in range(2)]
    return numbers + [values[:, n, :DIM] for n in range(3)]


def first_order(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """w_0 + sum of w_i x_i."""
    numbers = sum(dense[:, n] * net.linear.weight[0, n] for n in range(2))
    bias = 0 if net.linear.bias is None else net.linear.bias[0]
    return bias + numbers + sum(values[:, n, DIM] for n in range(3))


def deepfm(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Equations 1 to 4: y_FM + y_DNN."""
    v = as_fields(net.fields, dense, values)
    pairs = sum((v[i] * v[j]).sum(1) for i in range(5) for j in range(i + 1, 5))
    return {"click": first_order(net.fields, dense, values) + pairs + logit(net.deep, torch.cat(v, dim=1))}


def widedeep(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Equation 3: w_wide x + w_deep a + b."""
    v = as_fields(net.fields, dense, values)
    return {"click": first_order(net.fields, dense, values) + logit(net.deep, torch.cat(v, dim=1))}


@pytest.mark.parametrize(
    ("config", "reference"), [(DEEPFM, deepfm), (WIDEDEEP, widedeep)], ids=lambda part: type(part).__name__
)
def test_outputs_are_those_of_the_paper(config: ClickModelConfig, reference: Reference) -> None:
    net, (dense, values) = network(config), delivery(config)
    outputs, expected = net(dense, as_columns(values)), reference(net, dense, values)
    assert outputs.keys() == expected.keys()
    for name, values_of_name in expected.items():
        torch.testing.assert_close(outputs[name], values_of_name, atol=1e-5, rtol=1e-5)


@each
def test_the_order_of_delivery_does_not_matter(config: ClickModelConfig) -> None:
    net, (dense, values) = network(config).eval(), delivery(config)
    order = (2, 0, 1)
    shuffled = Embedded(INPUTS.features, config.width, lambda: (values[:, list(order)].flatten(1), order))
    torch.testing.assert_close(net(dense, shuffled)["click"], net(dense, as_columns(values))["click"])


def rows(count: int) -> tuple[Batch, EncodedRows]:
    """Rows whose click depends on whether the categories of a and b are alike."""
    chance = torch.Generator().manual_seed(count)
    ids = [torch.randint(0, 4, (count,), generator=chance).int().numpy() for _ in INPUTS.features]
    dense = torch.rand(count, 2, generator=chance)
    labels = {"click": torch.from_numpy(ids[0] == ids[1]).float()}
    features = sparse_features(list(INPUTS.features), ids, count)
    return Batch({"dense": dense}, 1 / max(count, 1), features, labels), EncodedRows(dense.numpy(), ids, None)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@each
def test_it_learns_and_scores_as_it_trains(config: ClickModelConfig, precision: str) -> None:
    model = whole_model(config, [4, 4, 4], inputs=INPUTS, precision=precision)
    optimizer, (batch, encoded) = torch.optim.Adam(model.parameters(), lr=0.02), rows(64)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        if not losses:
            assert all(parameter.grad.any() for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert output.logits["click"].dtype == torch.float32
    model.eval()
    trained = model.score(batch.tensors["dense"], batch.sparse_features).detach()
    plain = PlainModel(model.head.network, INPUTS, width=config.table_width).requires_grad_(requires_grad=False)
    weights = model.state_dict()
    tables = [weights[name] for name in plain.table_weights().values()]
    scorer = make_scorer(plain, tables, row_format=RowFormat("fp32", config.table_width), device="cpu")
    tolerance = 1e-5 if precision == "fp32" else 0.05
    torch.testing.assert_close(torch.from_numpy(scorer.score(encoded)), trained, atol=tolerance, rtol=tolerance)


@each
def test_a_batch_without_rows_costs_nothing(config: ClickModelConfig) -> None:
    model = whole_model(config, [4, 4, 4], inputs=INPUTS)
    loss, output = model(rows(0)[0])
    loss.backward()
    assert loss.item() == 0.0
    assert output.logits["click"].shape == (0,)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.head.parameters())


def test_a_row_of_a_table_has_room_for_a_weight() -> None:
    assert [width_with_weight(dim) for dim in (1, 3, 4, 10, 16)] == [4, 4, 8, 12, 20]
    assert DEEPFM.replace(members=2).table_width == 16
    config, (dense, values) = WIDEDEEP, delivery(WIDEDEEP)
    net = network(config).eval()
    changed = values.clone()
    changed[:, :, DIM + 1 :] = torch.nan  # what is left of a row reaches nothing
    assert torch.equal(net(dense, as_columns(changed))["click"], net(dense, as_columns(values))["click"])


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (DEEPFM, {"mlp": (8, 0)}, r"DeepFMConfig.mlp: \(8, 0\) needs sizes of at least 1"),
        (DEEPFM, {"dropout": 1.0}, "DeepFMConfig.dropout: 1.0 must be at least 0 and below 1"),
        (WIDEDEEP, {"mlp": (-1,)}, r"WideDeepConfig.mlp: \(-1,\) needs sizes of at least 1"),
        (WIDEDEEP, {"dropout": -0.1}, "WideDeepConfig.dropout: -0.1 must be at least 0 and below 1"),
    ],
)
def test_settings_that_make_no_network(config: ClickModelConfig, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        config.replace(**settings)
