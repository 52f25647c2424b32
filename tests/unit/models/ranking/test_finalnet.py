"""FinalNet: training and settings. Its formula: test_formulas.py."""

from __future__ import annotations

import pytest
import torch
from builders.whole_click_model import whole_model
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.models.base import ModelInputs
from rayrec.models.ranking.finalnet import FinalNetConfig

SMALL = FinalNetConfig(embedding_dim=4, first_tower=(12, 8), second_tower=(10,), first_dropout=0.0)
INPUTS = ModelInputs(2, ("a", "b", "c"), "click")


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
