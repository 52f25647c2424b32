"""Click models of products, attention and experts against their formulas in plain torch, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from whole_click_model import whole_model

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.data.encoded import EncodedRows
from rayrec.data.loader import sparse_features
from rayrec.layers.embedded import Embedded
from rayrec.layers.first_order import width_with_weight
from rayrec.layers.tower import LogitTower, Tower
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ranking.autoint import AutoIntConfig
from rayrec.models.ranking.dcnv3 import DCNv3Config
from rayrec.models.ranking.deepfm import DeepFMConfig
from rayrec.models.ranking.mmoe import MMoEConfig
from rayrec.models.ranking.ple import PLEConfig
from rayrec.models.ranking.widedeep import WideDeepConfig
from rayrec.models.ranking.xdeepfm import XDeepFMConfig
from rayrec.models.tables import RowFormat
from rayrec.schema import Label
from rayrec.workloads.recsys_scorer import PlainModel, make_scorer

ROWS, DIM = 17, 4
INPUTS = ModelInputs(2, ("a", "b", "c"), "click")
SEVERAL = replace(INPUTS, more_labels=(Label(name="like"),))
DEEPFM = DeepFMConfig(embedding_dim=DIM, mlp=(8, 6), batch_norm=True)
WIDEDEEP = WideDeepConfig(embedding_dim=DIM, mlp=(8,))
XDEEPFM = XDeepFMConfig(embedding_dim=DIM, interaction=(5, 3), mlp=(8,))
DCNV3 = DCNv3Config(embedding_dim=DIM, deep_layers=2, shallow_layers=3, deep_dropout=0.0, shallow_dropout=0.0)
AUTOINT = AutoIntConfig(embedding_dim=DIM, layers=2, attention_dim=6, heads=2, mlp=(8,))
MMOE = MMoEConfig(embedding_dim=DIM, experts=3, expert=(8, 6), gate=(5,), tower=(7,))
PLE = PLEConfig(embedding_dim=DIM, levels=2, own_experts=2, shared_experts=1, expert=(16,), tower=(8,))
CONFIGS: list[ClickModelConfig] = [DEEPFM, WIDEDEEP, XDEEPFM, DCNV3, AUTOINT, MMOE, PLE]
Reference = Callable[[nn.Module, torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]

each = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)


def inputs_of(config: ClickModelConfig) -> ModelInputs:
    return SEVERAL if config.SEVERAL_LABELS else INPUTS


def network(config: ClickModelConfig) -> nn.Module:
    """Without a parameter that is 0 or 1 at the start, and that a wrong formula could leave out."""
    torch.manual_seed(0)
    built = config.build(inputs_of(config))
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


def xdeepfm(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Equations 6 to 8: x^k_h = sum over i and j of W^k_hij (x^(k-1)_i * x^0_j), summed over its values."""
    v = as_fields(net.fields, dense, values)
    before, sums = v, []
    for layer in net.interaction.layers:
        weights = layer.weight.view(-1, 5, len(before))
        vectors = [
            layer.bias[h] + sum(weights[h, j, i] * v[j] * before[i] for j in range(5) for i in range(len(before)))
            for h in range(len(weights))
        ]
        sums += [vector.sum(1) for vector in vectors]
        before = vectors
    logits = first_order(net.fields, dense, values) + linear(net.interaction.logit, torch.stack(sums, dim=1))[:, 0]
    return {"click": logits if net.deep is None else logits + logit(net.deep, torch.cat(v, dim=1))}


def dcnv3(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sections 3.2 to 3.4, and DCNv3.py of the authors: heads, halves of embeddings side by side, and both networks."""
    stacked = torch.stack(as_fields(net, dense, values), dim=1)
    heads = net._heads
    inputs = torch.stack(
        [
            torch.cat([half.flatten(1) for half in head.tensor_split(2, dim=2)], dim=1)
            for head in stacked.tensor_split(heads, dim=2)
        ],
        dim=1,
    )
    outputs = {}
    for name, crosses in (("deep", net.deep), ("shallow", net.shallow)):
        x = inputs
        for number, layer in enumerate(crosses.layers):
            half, batch_norm, mask_norm = linear(layer, x), crosses.batch_norms[number], crosses.mask_norms[number]
            if heads > 1:
                half = torch.cat(
                    [
                        (part - part.mean()) / (part.var(unbiased=False) + 1e-5).sqrt() * batch_norm.weight[head]
                        + batch_norm.bias[head]
                        for head, part in enumerate(half.split(1, dim=1))
                    ],
                    dim=1,
                )
            mask = (half if isinstance(mask_norm, nn.Identity) else standardized(half, mask_norm, 2)).clamp(min=0)
            crossed = torch.cat([half, half * mask], dim=2) + crosses.biases[number]
            x = (x if name == "deep" else inputs) * crossed + x
        outputs[name] = linear(crosses.logit, x)[:, :, 0].mean(1)
    return {"click": (outputs["deep"] + outputs["shallow"]) / 2, **outputs}


def autoint(
    net: nn.Module, dense: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Equations 5 to 9, head by head and field by field; the residual is projected if the width changes, as in FuxiCTR."""
    fields = as_fields(net, dense, values)
    hidden = fields
    for layer in net.attention:
        parts = []
        for of_query, of_key, of_value in zip(
            *(part.weight.chunk(2) for part in (layer.query, layer.key, layer.value)), strict=True
        ):
            queries, keys, mixed_in = ([e @ w.t() for e in hidden] for w in (of_query, of_key, of_value))
            heads = []
            for query in queries:
                exponents = [((query * key).sum(1) * scale).exp() for key in keys]
                total = sum(exponents)
                heads.append(sum((e / total)[:, None] * v for e, v in zip(exponents, mixed_in, strict=True)))
            parts.append(heads)
        residual = hidden if layer.shortcut is None else [linear(layer.shortcut, e) for e in hidden]
        hidden = [(torch.cat(heads, dim=1) + own).clamp(min=0) for *heads, own in zip(*parts, residual, strict=True)]
    logits = linear(net.logit, torch.cat(hidden, dim=1))[:, 0]
    return {"click": logits if net.deep is None else logits + logit(net.deep, torch.cat(fields, dim=1))}


def mixture(gate: nn.Module, values: torch.Tensor, experts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of g_i(x) f_i(x), g the softmax of the gate."""
    exponents = linear(gate.scores, tower(gate.tower, values)).exp()
    shares = exponents / exponents.sum(1, keepdim=True)
    return sum(shares[:, n : n + 1] * expert for n, expert in enumerate(experts))


def mmoe(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Equations 6 and 7: y_k = h^k(sum of g^k_i(x) f_i(x))."""
    x = torch.cat(as_fields(net, dense, values), dim=1)
    experts = [tower(expert, x) for expert in net.experts.towers]
    return {
        label: logit(net.towers[k], mixture(net.gates[k], x, experts)) for k, label in enumerate(SEVERAL.label_names)
    }


def ple(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Equations 1 to 6 for two labels and two levels; the first level's shared gate weighs the experts of both labels too."""
    x = torch.cat(as_fields(net, dense, values), dim=1)
    states = [x, x, x]
    for level, last in zip(net.levels, (False, True), strict=True):
        first, second, shared = (
            [tower(expert, state) for expert in experts.towers]
            for experts, state in zip([*level.own, level.shared], states, strict=True)
        )
        mixed = [
            mixture(level.gates[0], states[0], first + shared),
            mixture(level.gates[1], states[1], second + shared),
        ]
        states = mixed if last else [*mixed, mixture(level.shared_gate, states[2], first + second + shared)]
    return {label: logit(net.towers[k], states[k]) for k, label in enumerate(SEVERAL.label_names)}


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (DEEPFM, deepfm),
        (WIDEDEEP, widedeep),
        (XDEEPFM, xdeepfm),
        (XDEEPFM.replace(mlp=()), xdeepfm),
        (DCNV3, dcnv3),
        (DCNV3.replace(heads=2, batch_norm=True), dcnv3),
        (DCNV3.replace(layer_norm=False), dcnv3),
        (AUTOINT, autoint),
        (AUTOINT.replace(mlp=(), scale=True, attention_dim=DIM), partial(autoint, scale=2**-0.5)),
        (MMOE, mmoe),
        (PLE, ple),
    ],
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


def test_dcnv3_learns_more_from_the_network_that_is_worse() -> None:
    """Loss and gradient are those of L + L_d max(0, L_d - L) + L_s max(0, L_s - L) over means of the batch."""
    net, (dense, values) = network(DCNV3), delivery(DCNV3)
    outputs = net(0.1 * dense, as_columns(0.1 * values))
    labels = (outputs["deep"] > outputs["shallow"]).float()
    loss, deep, shallow = (
        functional.binary_cross_entropy(outputs[name].double().sigmoid(), labels.double())
        for name in ("click", "deep", "shallow")
    )
    assert deep < loss < shallow  # the better one adds nothing
    expected = loss + deep * (deep - loss).clamp(min=0) + shallow * (shallow - loss).clamp(min=0)
    found = net.loss(outputs, {"click": labels})
    assert found.shape == (ROWS,)
    torch.testing.assert_close(found.mean(), expected.float(), atol=1e-5, rtol=1e-5)
    parameters = list(net.parameters())
    wanted = torch.autograd.grad(expected, parameters, retain_graph=True)
    for gradient, other in zip(torch.autograd.grad(found.mean(), parameters), wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-4)


def rows(count: int) -> tuple[Batch, EncodedRows]:
    """Rows whose click depends on whether the categories of a and b are alike, and whose like on those of a and c."""
    chance = torch.Generator().manual_seed(count)
    ids = [torch.randint(0, 4, (count,), generator=chance).int().numpy() for _ in INPUTS.features]
    dense = torch.rand(count, 2, generator=chance)
    labels = {"click": torch.from_numpy(ids[0] == ids[1]).float(), "like": torch.from_numpy(ids[0] < ids[2]).float()}
    features = sparse_features(list(INPUTS.features), ids, count)
    return Batch({"dense": dense}, 1 / max(count, 1), features, labels), EncodedRows(dense.numpy(), ids, None)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@each
def test_it_learns_and_scores_as_it_trains(config: ClickModelConfig, precision: str) -> None:
    model = whole_model(config, [4, 4, 4], inputs=inputs_of(config), precision=precision)
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
    plain = PlainModel(model.head.network, inputs_of(config), width=config.table_width).requires_grad_(
        requires_grad=False
    )
    weights = model.state_dict()
    tables = [weights[name] for name in plain.table_weights().values()]
    scorer = make_scorer(plain, tables, row_format=RowFormat("fp32", config.table_width), device="cpu")
    tolerance = 1e-5 if precision == "fp32" else 0.05
    torch.testing.assert_close(torch.from_numpy(scorer.score(encoded)), trained, atol=tolerance, rtol=tolerance)


@each
def test_a_batch_without_rows_costs_nothing(config: ClickModelConfig) -> None:
    model = whole_model(config, [4, 4, 4], inputs=inputs_of(config))
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
        (XDEEPFM, {"interaction": ()}, r"XDeepFMConfig.interaction: \(\) needs one or more sizes of at least 1"),
        (XDEEPFM, {"mlp": (0,)}, r"XDeepFMConfig.mlp: \(0,\) needs sizes of at least 1"),
        (DCNV3, {"heads": 3}, r"DCNv3Config.embedding_dim: 4 must be a multiple of 6, 2 \* heads"),
        (DCNV3, {"deep_layers": 0}, "DCNv3Config.deep_layers: 0 must be at least 1"),
        (DCNV3, {"shallow_dropout": 1.0}, "DCNv3Config.shallow_dropout: 1.0 must be at least 0 and below 1"),
        (AUTOINT, {"heads": 4}, "AutoIntConfig.attention_dim: 6 must be a multiple of heads, 4"),
        (AUTOINT, {"layers": 0}, "AutoIntConfig.layers: 0 must be at least 1"),
        (AUTOINT, {"mlp": (0,)}, r"AutoIntConfig.mlp: \(0,\) needs sizes of at least 1"),
        (MMOE, {"experts": 0}, "MMoEConfig.experts: 0 must be at least 1"),
        (MMOE, {"expert": ()}, r"MMoEConfig.expert: \(\) needs one or more sizes of at least 1"),
        (MMOE, {"tower": (0,)}, r"MMoEConfig.tower: \(0,\) needs sizes of at least 1"),
        (PLE, {"levels": 0}, "PLEConfig.levels: 0 must be at least 1"),
        (PLE, {"gate": (0,)}, r"PLEConfig.gate: \(0,\) needs sizes of at least 1"),
        (PLE, {"dropout": 1.5}, "PLEConfig.dropout: 1.5 must be at least 0 and below 1"),
        (WIDEDEEP, {"mlp": (-1,)}, r"WideDeepConfig.mlp: \(-1,\) needs sizes of at least 1"),
        (WIDEDEEP, {"dropout": -0.1}, "WideDeepConfig.dropout: -0.1 must be at least 0 and below 1"),
    ],
)
def test_settings_that_make_no_network(config: ClickModelConfig, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        config.replace(**settings)
