"""Replicated tables follow the formulas of the fused kernels, which test_optim.py holds those kernels to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rayrec.models.replicated import replicated_optimizer
from rayrec.optim import SparseOptimizerConfig


@pytest.mark.parametrize("eps", [0.25, 0.0])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_the_rule(kind: Any, eps: float) -> None:
    table = torch.nn.Parameter(torch.ones(5, 4))
    config = SparseOptimizerConfig(kind=kind, learning_rate=0.1, eps=eps)
    optimizer = replicated_optimizer(config, {"table": table})
    gradient = torch.zeros(5, 4)
    gradient[1], gradient[3] = torch.tensor([2.0, 4.0, -6.0, 8.0]), torch.full((4,), 0.5)
    expected, squares = torch.ones(5, 4), torch.zeros(5, 4)
    for _ in range(3):
        optimizer.zero_grad()
        (table * gradient).sum().backward()
        optimizer.step()
        squares += gradient**2 if kind == "adagrad" else (gradient**2).mean(dim=1, keepdim=True)
        step = gradient if kind == "sgd" else gradient / (squares.sqrt() + eps)
        expected -= 0.1 * step.nan_to_num()  # of rows that no batch has touched
        torch.testing.assert_close(table.data, expected, rtol=1e-6, atol=1e-6)
    state = optimizer.state_dict()["state"].get("table", {})
    if kind == "sgd":
        assert not state
    else:
        kept = squares if kind == "adagrad" else squares[:, 0]
        torch.testing.assert_close(state, {"momentum1": kept}, rtol=1e-6, atol=1e-6)


def test_the_learning_rate_is_that_of_the_group() -> None:
    table = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = replicated_optimizer(SparseOptimizerConfig(kind="sgd", learning_rate=1.0), {"table": table})
    (group,) = optimizer.param_groups
    assert group["lr"] == 1.0
    group["lr"] = 0.25  # type: ignore[index]
    table.sum().backward()
    optimizer.step()
    assert torch.equal(table.data, torch.full((2, 2), 0.75))
