"""Ensembles in one model: predictions, and independent training of each member."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders.click_models import whole_model
from builders.faults import rejects
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec.batch import Batch
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ensemble import build_network
from rayrec.models.ranking.din import DINConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.schema import Label

ROWS = 12
DIM = 4
LABELS = (Label(name="like"), Label(name="seconds", kind="number"))
DLRM = DLRMConfig(
    interaction="dot", embedding_dim=DIM, bottom_mlp=(8, DIM), top_mlp=(8, 1), embedding_penalty=0.1
)
FINAL = FinalNetConfig(
    embedding_dim=DIM,
    first_tower=(8,),
    second_tower=(6,),
    first_dropout=0.0,
)
INPUTS = ModelInputs(2, ("a", "b"), "click")


def batch(inputs: ModelInputs) -> Batch:
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 5, (2 * ROWS,), generator=chance)
    labels = {
        name: torch.randint(0, 2, (ROWS,), generator=chance).float() for name in inputs.label_names
    }
    if inputs.more_labels:
        labels["like"][::3] = torch.nan
        labels["seconds"][::4] = torch.nan
    features = KeyedJaggedTensor(
        keys=["a", "b"], values=ids, lengths=torch.ones(2 * ROWS, dtype=torch.int32), stride=ROWS
    )
    dense = torch.rand(ROWS, 2, generator=chance)
    weights = torch.rand(ROWS, generator=chance)
    return Batch({"dense": dense}, 1 / ROWS, features, labels, weights=weights)


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        (DLRM, INPUTS),
        (DLRM, ModelInputs(2, ("a", "b"), "click", LABELS)),
        (FINAL, INPUTS),
    ],
)
def test_ensemble_members_learn_independently(
    config: ClickModelConfig, inputs: ModelInputs
) -> None:
    """Compare gradients with a separate model that has the member's weights and embeddings."""
    rows = batch(inputs)
    whole = whole_model(config.replace(members=3), [5, 5], inputs=inputs)
    loss, output = whole(rows)
    loss.backward()
    logits = []
    losses = []
    for number, network in enumerate(whole.head.network.members):
        alone = whole_model(config, [5, 5], inputs=inputs)
        columns = slice(number * DIM, (number + 1) * DIM)
        with torch.no_grad():
            alone.head.network.load_state_dict(network.state_dict())
            for actual, its in zip(
                alone.embeddings.parameters(), whole.embeddings.parameters(), strict=True
            ):
                actual.copy_(its[:, columns])
        network_loss, own_output = alone(rows)
        network_loss.backward()
        logits.append(own_output.outputs["click"])
        losses.append(network_loss.detach())
        for actual, its in zip(alone.head.network.parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(its.grad, actual.grad)
        for actual, its in zip(
            alone.embeddings.parameters(), whole.embeddings.parameters(), strict=True
        ):
            torch.testing.assert_close(its.grad[:, columns], actual.grad)
    torch.testing.assert_close(output.outputs["click"], torch.stack(logits).mean(0))
    torch.testing.assert_close(loss.detach(), torch.stack(losses).mean())
    assert list(output.outputs) == list(inputs.label_names)
    assert not torch.equal(logits[0], logits[1])


def test_members_have_equal_parts_of_rows() -> None:
    assert DLRM.replace(members=3).table_width == 3 * DIM
    rejects(r"DLRMConfig.members: must be at least 1, got 0", DLRM.replace, members=0)
    inputs = ModelInputs(
        0, ("item", "history"), "click", vocabularies=("item", "item"), lists=(("history", None),)
    )
    network = build_network(
        DINConfig(
            embedding_dim=DIM,
            attention=(),
            mlp=(),
            members=2,
        ),
        inputs,
    ).eval()
    item = torch.rand(ROWS, 2 * DIM)
    values = torch.rand(3 * ROWS, 2 * DIM)
    lengths = torch.full((ROWS,), 3)
    lists = {"history": JaggedEmbeddings(values, lengths)}
    made = network(
        torch.zeros(ROWS, 0), KeyedEmbeddings.in_order(inputs.features, 2 * DIM, item, lists)
    )
    parts = []
    for number, member in enumerate(network.members):
        part = slice(number * DIM, (number + 1) * DIM)
        lists = {"history": JaggedEmbeddings(values[:, part], lengths)}
        given = KeyedEmbeddings.in_order(inputs.features, DIM, item[:, part], lists)
        parts.append(member(torch.zeros(ROWS, 0), given)["click"])
    torch.testing.assert_close(made["click"], (parts[0] + parts[1]) / 2)


# -- Valid outputs of user networks, and rejection of invalid ones
THREE = 3


class Network(nn.Module):
    """Network that passes the logits 1, 2, 3 through `returns`."""

    def __init__(self, returns: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.returns = returns

    def forward(self, dense: torch.Tensor, embedded: object) -> Any:
        return self.returns(torch.arange(1.0, len(dense) + 1) * self.weight)


class WithLoss(Network):
    """Network whose loss is `losses` of the logits and the labels."""

    def __init__(self, losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(lambda logits: {"label": logits})
        self.losses = losses

    def loss(
        self, outputs: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        return self.losses(outputs["label"], labels["label"])


def step(network: nn.Module, **changes: Any) -> torch.Tensor:
    class Made(ClickModelConfig):
        def build(self, inputs: ModelInputs, *, precision: str = "fp32") -> nn.Module:
            return network

    ids = KeyedJaggedTensor(
        ["cat_0"],
        torch.zeros(THREE, dtype=torch.long),
        lengths=torch.ones(THREE, dtype=torch.int32),
    )
    fields = {
        "loss_weight": 1.0,
        "sparse_features": ids,
        "labels": {"label": torch.tensor([0.0, 1.0, 1.0])},
        **changes,
    }
    return whole_model(Made(embedding_dim=2), [4])(
        Batch({"dense": torch.zeros(THREE, 13)}, **fields)
    )[0]


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        pytest.param(
            lambda logits: [logits],
            "forward must return a dict of logits, {'label': logits}, got a list",
            id="logits-logits",
        ),
        pytest.param(
            lambda logits: {"click": logits},
            "forward: outputs must have logits named after the label, label, got click",
            id="logits-click-logits",
        ),
        pytest.param(
            lambda logits: {"label": logits[:, None]},
            r"must have shape \(3,\) and dtype float32, got \(3, 1\) and torch.float32",
            id="logits-label-logits-None",
        ),
        pytest.param(
            lambda logits: {"label": logits.bfloat16()},
            r"got \(3,\) and torch.bfloat16",
            id="logits-label",
        ),
    ],
)
def test_heads_reject_invalid_outputs(returns: Callable[..., Any], message: str) -> None:
    rejects(f"^Network: .*{message}", step, Network(returns))


def test_single_tensor_is_value_and_row_losses_are_weighted() -> None:
    assert step(Network(lambda logits: logits)) == step(Network(lambda logits: {"label": logits}))
    network = WithLoss(lambda logits, labels: (logits - labels) ** 2)  # 1, 1, 4
    assert step(network).item() == 6
    assert step(network, loss_weight=0.5, weights=torch.tensor([2.0, 1.0, 0.5])).item() == 2.5
    averaged = WithLoss(lambda logits, labels: ((logits - labels) ** 2).mean())
    rejects(
        r"^WithLoss: loss must return unweighted row losses of shape \(3,\), got \(\)",
        step,
        averaged,
    )


def test_embedding_penalty_applies_to_network_inputs() -> None:
    """The penalty applies to each embedding of `item` and the unpooled list `history`, and to the
    sum of `tags`, a list.
    """
    inputs = ModelInputs(
        0,
        ("item", "history", "tags"),
        "click",
        vocabularies=("item", "item", "tags"),
        lists=(("history", None), ("tags", None)),
    )
    item = torch.tensor([0, 1, 2])
    history = torch.tensor([1, 1, 3, 0])
    tags = torch.tensor([0, 1, 1, 4, 2])
    history_lengths = torch.tensor([3, 0, 1])
    tag_lengths = torch.tensor([2, 3, 0])
    pooled = KeyedJaggedTensor(
        keys=["tags"],
        values=tags,
        lengths=tag_lengths,
        stride=3,
    )
    ids = torch.cat([item, history])
    lengths = torch.cat([torch.ones(3, dtype=torch.int64), history_lengths])
    listed = KeyedJaggedTensor(
        keys=["item", "history"],
        values=ids,
        lengths=lengths,
        stride=3,
    )
    labels = {"click": torch.tensor([1.0, 0.0, 1.0])}
    batch = Batch({"dense": torch.zeros(3, 0)}, 1 / 3, pooled, labels, sequence_features=listed)
    gradients = []
    for penalty in (0.0, 0.6):
        config = DINConfig(
            embedding_dim=4,
            attention=(4,),
            mlp=(4,),
            embedding_penalty=penalty,
        )
        model = whole_model(config, [4, 4, 5], inputs=inputs)
        items, tag_table = (
            next(tables.parameters()) for tables in (model.sequences, model.embeddings)
        )
        gradients.append(torch.autograd.grad(model(batch)[0], [items, tag_table]))
    sums = torch.stack([part.sum(0) for part in tag_table[tags].split(tag_lengths.tolist())])
    squares = items[item].square().sum() + items[history].square().sum() + sums.square().sum()
    expected = torch.autograd.grad(0.6 / 2 * squares / 3, [items, tag_table])
    for with_it, without, own in zip(gradients[1], gradients[0], expected, strict=True):
        torch.testing.assert_close(with_it - without, own, atol=1e-6, rtol=1e-5)
