"""Replicated tables follow the formulas of the fused kernels, which test_optim.py holds those kernels to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rayrec.optim.config import SparseOptimizerConfig
from rayrec.optim.optimizer import DataParallelTableOptimizer, data_parallel_optimizer


@pytest.mark.parametrize("eps", [0.25, 0.0])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_the_rule(kind: Any, eps: float) -> None:
    table = torch.nn.Parameter(torch.ones(5, 4))
    config = SparseOptimizerConfig(kind=kind, learning_rate=0.1, eps=eps)
    optimizer = data_parallel_optimizer(config, {"table": table})
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


@pytest.mark.parametrize("eps", [0.25, 0.0])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_the_update_for_gpus_is_the_same(kind: Any, eps: float) -> None:
    tables = [torch.nn.Parameter(torch.linspace(-1, 1, 24).reshape(6, 4)) for _ in range(2)]
    optimizers = [DataParallelTableOptimizer([table], kind=kind, learning_rate=0.1, eps=eps) for table in tables]
    for step in range(3):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        gradient[[0, 2, 5 - step]] = 0
        for optimizer, table, update in zip(
            optimizers, tables, (optimizers[0]._update, optimizers[1]._update_all), strict=True
        ):
            with torch.no_grad():
                update(table, gradient.clone(), learning_rate=0.1, eps=eps)
            assert len(optimizer.state[table]) == (kind != "sgd")
    assert torch.equal(*tables)
    for states in zip(
        *(optimizer.state[table].values() for optimizer, table in zip(optimizers, tables, strict=True)), strict=True
    ):
        assert torch.equal(*states)


def test_the_learning_rate_is_that_of_the_group() -> None:
    table = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = data_parallel_optimizer(SparseOptimizerConfig(kind="sgd", learning_rate=1.0), {"table": table})
    (group,) = optimizer.param_groups
    assert group["lr"] == 1.0
    group["lr"] = 0.25  # type: ignore[index]
    table.sum().backward()
    optimizer.step()
    assert torch.equal(table.data, torch.full((2, 2), 0.75))
