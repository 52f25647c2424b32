"""FinalNet against its formulas in plain torch, and what a click model's network may rely on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from whole_click_model import whole_model

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.layers.embedded import Embedded
from rayrec.models.base import ModelInputs
from rayrec.models.ranking.finalnet import FinalNet, FinalNetConfig

SMALL = FinalNetConfig(embedding_dim=4, first_tower=(12, 8), second_tower=(10,), first_dropout=0.0)
INPUTS = ModelInputs(2, ("a", "b", "c"), "click")
ROWS = 33


def network(config: FinalNetConfig = SMALL) -> FinalNet:
    torch.manual_seed(0)
    built = config.build(INPUTS)
    assert isinstance(built, FinalNet)
    if built.gate is not None:
        nn.init.normal_(built.gate.weight)  # which starts as 0
    return built


def reference(net: FinalNet, dense: torch.Tensor, pooled: torch.Tensor) -> list[torch.Tensor]:
    """The logit and those of the towers, written out from the paper's equations and FuxiCTR's FinalNet.py."""
    numbers = torch.stack([dense[:, n : n + 1] * net.number_vectors[n] for n in range(2)], dim=1)
    fields = torch.cat([numbers, pooled.view(ROWS, 3, 4)], dim=1)
    gate = torch.einsum("rfd,gf->rgd", fields, net.gate.weight) + net.gate.bias[None, :, None]
    towers = []
    for tower, inputs in ((net.first, torch.cat([fields, fields * gate], dim=1)), (net.second, fields)):
        hidden = inputs.reshape(ROWS, -1)
        for layer, norm in zip(tower.layers, tower.norms, strict=True):
            linear = hidden @ layer.weight.t() + layer.bias
            half = linear.shape[1] // 2
            outputs = torch.cat([linear[:, :half], linear[:, :half] * linear[:, half:]], dim=1)
            mean, variance = outputs.mean(0), outputs.var(0, unbiased=False)
            hidden = ((outputs - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias).clamp(min=0)
        towers.append((hidden @ tower.logit.weight.t() + tower.logit.bias).squeeze(1))
    return [(towers[0] + towers[1]) / 2, *towers]


def test_logits_and_loss_are_those_of_the_paper() -> None:
    net, dense, pooled = network().train(), torch.randn(ROWS, 2), torch.randn(ROWS, 12)
    outputs = net(dense, Embedded.in_order(INPUTS.features, 4, pooled))
    logits, first, second = reference(net, dense, pooled)
    for name, expected in (("click", logits), ("first tower", first), ("second tower", second)):
        torch.testing.assert_close(outputs[name], expected, atol=1e-5, rtol=1e-5)
    labels = torch.randint(0, 2, (ROWS,)).float()
    probability = torch.sigmoid(logits).detach()
    expected = sum(
        functional.binary_cross_entropy(torch.sigmoid(values), target, reduction="none")
        for values, target in ((logits, labels), (first, probability), (second, probability))
    )
    torch.testing.assert_close(net.loss(outputs, {"click": labels}), expected, atol=1e-4, rtol=1e-4)


def test_one_tower_has_no_other_to_learn_from() -> None:
    net = network(SMALL.replace(second_tower=(), feature_gate=False, batch_norm=False)).eval()
    outputs = net(torch.randn(5, 2), Embedded.in_order(INPUTS.features, 4, torch.randn(5, 12)))
    assert list(outputs) == ["click"]
    expected = functional.binary_cross_entropy_with_logits(outputs["click"], torch.ones(5), reduction="none")
    assert torch.equal(net.loss(outputs, {"click": torch.ones(5)}), expected)


def test_tower_losses_are_a_setting() -> None:
    """Without them only the cross entropy of the mean logit is trained, as in the runs that BARS published."""
    net, plain = network().train(), network(SMALL.replace(tower_losses=False)).train()
    assert_same_weights(net, plain)
    dense, pooled, labels = torch.randn(ROWS, 2), torch.randn(ROWS, 12), torch.randint(0, 2, (ROWS,)).float()
    outputs = plain(dense, Embedded.in_order(INPUTS.features, 4, pooled))
    logits = reference(net, dense, pooled)[0]
    torch.testing.assert_close(outputs["click"], logits, atol=1e-5, rtol=1e-5)
    loss = plain.loss(outputs, {"click": labels})
    expected = functional.binary_cross_entropy(torch.sigmoid(logits), labels, reduction="none")
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    more = net.loss(net(dense, Embedded.in_order(INPUTS.features, 4, pooled)), {"click": labels})
    assert (more > loss.detach() + 0.1).all()


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())


def batch(rows: int) -> Batch:
    chance = torch.Generator().manual_seed(rows)
    ids = torch.cat([torch.randint(0, 9, (rows,), generator=chance) for _ in range(3)])
    return Batch(
        tensors={"dense": torch.randn(rows, 2, generator=chance)},
        sparse_features=KeyedJaggedTensor(
            keys=list(INPUTS.features), values=ids, lengths=torch.ones(3 * rows, dtype=torch.int32), stride=rows
        ),
        labels={"label": torch.randint(0, 2, (rows,), generator=chance).float()},
        loss_weight=1 / max(1, rows),
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_parameter_learns(precision: str) -> None:
    model = whole_model(
        SMALL.replace(first_dropout=0.1), [9, 9, 9], num_dense=2, features=INPUTS.features, precision=precision
    )
    optimizer, rows, losses = torch.optim.Adagrad(model.parameters(), lr=0.05), batch(64), []
    for _ in range(40):
        optimizer.zero_grad()
        loss, output = model(rows)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert output.logits["label"].dtype == torch.float32
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("rows", [0, 1])
def test_the_smallest_batches_have_a_finite_loss(rows: int) -> None:
    model = whole_model(SMALL, [9, 9, 9], num_dense=2, features=INPUTS.features)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "running" in name}
    loss, output = model(batch(rows))
    loss.backward()
    assert torch.isfinite(loss)
    assert output.logits["label"].shape == (rows,)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.head.parameters())
    assert before
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_tower": ()}, "needs even sizes"),
        ({"second_tower": (7,)}, "needs even sizes"),
        ({"first_dropout": 1.0}, "must be at least 0 and below 1"),
        ({"embedding_dim": 0}, "must be at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SMALL.replace(**changes)
