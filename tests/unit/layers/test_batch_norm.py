"""Batch normalization and means over all workers' rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks.checkpoint import run_ranks
from torch import nn

from rayrec.collectives import global_means
from rayrec.layers.batch_norm import GlobalBatchNorm

FEATURES, STEPS = 3, 4
PARTS = ((0, 7), (7, 7), (7, 8))
"""Rows of each rank; one has none."""


def rows(step: int) -> torch.Tensor:
    return 100 + torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(step))


def weights(count: int) -> torch.Tensor:
    return torch.linspace(-1, 1, count * FEATURES).view(count, FEATURES)


def test_alone_it_is_torchs() -> None:
    mine, theirs = GlobalBatchNorm(FEATURES), nn.BatchNorm1d(FEATURES)
    for step in range(STEPS):
        torch.testing.assert_close(mine(rows(step)), theirs(rows(step)))
    torch.testing.assert_close(mine.running_var, theirs.running_var)
    torch.testing.assert_close(mine.eval()(rows(9)), theirs.eval()(rows(9)))
    assert mine(rows(9).bfloat16()).dtype == torch.bfloat16


def a_rank(folder: str, rank: int) -> None:
    norm, (start, stop) = GlobalBatchNorm(FEATURES), PARTS[rank]
    for step in range(STEPS):
        inputs = rows(step)[start:stop].requires_grad_()
        outputs = norm(inputs)
        (outputs * weights(8)[start:stop]).sum().backward()
    state = {name: tensor.detach() for name, tensor in norm.state_dict().items()}
    found = {"outputs": outputs.detach(), "gradient": inputs.grad, "weight_gradient": norm.weight.grad, **state}
    values = rows(0)[start:stop].requires_grad_()
    (values.square() @ global_means(values)).sum().backward()
    found |= {"means": global_means(values).detach(), "gradient_with_means": values.grad}
    torch.save(found, f"{folder}/rank_{rank}.pt")


@pytest.mark.slow
def test_workers_with_unequal_rows_normalize_as_one(tmp_path: Path) -> None:
    run_ranks(a_rank, 3, str(tmp_path))
    found = [torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(3)]
    whole = nn.BatchNorm1d(FEATURES)
    for step in range(STEPS):
        inputs = rows(step).requires_grad_()
        outputs = whole(inputs)
        (outputs * weights(8)).sum().backward()
    assert inputs.grad is not None
    for name, expected in (("outputs", outputs.detach()), ("gradient", inputs.grad)):
        torch.testing.assert_close(torch.cat([part[name] for part in found]), expected, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(sum(part["weight_gradient"] for part in found), whole.weight.grad, atol=1e-3, rtol=1e-3)
    values = rows(0).requires_grad_()
    (values.square() @ values.mean(0)).sum().backward()
    torch.testing.assert_close(torch.cat([part["gradient_with_means"] for part in found]), values.grad)
    for part in found:
        torch.testing.assert_close(part["means"], values.mean(0).detach())
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(part[name], getattr(whole, name), rtol=1e-4, atol=1e-4)
            assert torch.equal(part[name], found[0][name])
