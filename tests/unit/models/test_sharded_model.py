"""Valid outputs of user networks, and rejection of invalid ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders.click_models import whole_model
from builders.faults import rejects
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec.batch import Batch
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ranking.din import DINConfig

ROWS = 3


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

    def loss(self, outputs: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.losses(outputs["label"], labels["label"])


def step(network: nn.Module, **changes: Any) -> torch.Tensor:
    class Made(ClickModelConfig):
        def build(self, inputs: ModelInputs, *, precision: str = "fp32") -> nn.Module:
            return network

    ids = KeyedJaggedTensor(["cat_0"], torch.zeros(ROWS, dtype=torch.long), lengths=torch.ones(ROWS, dtype=torch.int32))
    fields = {"loss_weight": 1.0, "sparse_features": ids, "labels": {"label": torch.tensor([0.0, 1.0, 1.0])}, **changes}
    return whole_model(Made(embedding_dim=2), [4])(Batch({"dense": torch.zeros(ROWS, 13)}, **fields))[0]


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda logits: [logits], "forward must return a dict of logits, {'label': logits}, got a list"),
        (lambda logits: {"click": logits}, "forward: outputs must have logits named after the label, label, got click"),
        (
            lambda logits: {"label": logits.unsqueeze(1)},
            r"must have shape \(3,\) and dtype float32, got \(3, 1\) and torch.float32",
        ),
        (lambda logits: {"label": logits.bfloat16()}, r"got \(3,\) and torch.bfloat16"),
    ],
)
def test_heads_reject_invalid_outputs(returns: Callable[[torch.Tensor], Any], message: str) -> None:
    rejects(f"^Network: .*{message}", step, Network(returns))


def test_single_tensor_is_value_of_only_head() -> None:
    assert step(Network(lambda logits: logits)) == step(Network(lambda logits: {"label": logits}))


def test_network_row_losses_are_weighted_and_must_not_be_averaged() -> None:
    network = WithLoss(lambda logits, labels: (logits - labels) ** 2)  # 1, 1, 4
    assert step(network).item() == 6
    assert step(network, loss_weight=0.5, weights=torch.tensor([2.0, 1.0, 0.5])).item() == 2.5
    averaged = WithLoss(lambda logits, labels: ((logits - labels) ** 2).mean())
    rejects(r"^WithLoss: loss must return unweighted row losses of shape \(3,\), got \(\)", step, averaged)


def test_embedding_penalty_applies_to_network_inputs() -> None:
    """The penalty applies to each embedding of `item` and the unpooled list `history`, and to the sum of `tags`, a list."""
    inputs = ModelInputs(
        0, ("item", "history", "tags"), "click", vocabularies=("item", "item", "tags"), lists=(("history", None), ("tags", None))
    )
    item, history, tags = torch.tensor([0, 1, 2]), torch.tensor([1, 1, 3, 0]), torch.tensor([0, 1, 1, 4, 2])
    of_history, of_tags = torch.tensor([3, 0, 1]), torch.tensor([2, 3, 0])
    pooled = KeyedJaggedTensor(keys=["tags"], values=tags, lengths=of_tags, stride=3)
    ids, lengths = torch.cat([item, history]), torch.cat([torch.ones(3, dtype=torch.int64), of_history])
    listed = KeyedJaggedTensor(keys=["item", "history"], values=ids, lengths=lengths, stride=3)
    labels = {"click": torch.tensor([1.0, 0.0, 1.0])}
    batch = Batch({"dense": torch.zeros(3, 0)}, 1 / 3, pooled, labels, sequence_features=listed)
    gradients = []
    for penalty in (0.0, 0.6):
        config = DINConfig(embedding_dim=4, attention=(4,), mlp=(4,), embedding_penalty=penalty)
        model = whole_model(config, [4, 4, 5], inputs=inputs)
        items, of_tag = (next(tables.parameters()) for tables in (model.sequences, model.embeddings))
        gradients.append(torch.autograd.grad(model(batch)[0], [items, of_tag]))
    sums = torch.stack([part.sum(0) for part in of_tag[tags].split(of_tags.tolist())])
    squares = items[item].square().sum() + items[history].square().sum() + sums.square().sum()
    expected = torch.autograd.grad(0.6 / 2 * squares / 3, [items, of_tag])
    for with_it, without, own in zip(gradients[1], gradients[0], expected, strict=True):
        torch.testing.assert_close(with_it - without, own, atol=1e-6, rtol=1e-5)
