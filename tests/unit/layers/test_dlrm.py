"""Each interaction against torchrec's own, and independence of the order in which tables deliver."""

from __future__ import annotations

import pytest
import torch
from torchrec.models.dlrm import InteractionArch, InteractionDCNArch, InteractionProjectionArch
from torchrec.modules.crossnet import LowRankCrossNet

from rayrec.layers.dlrm import CrossInteraction, DotInteraction, Interaction, ProjectionInteraction
from rayrec.layers.keyed_embeddings import Embedded

FEATURES = [f"cat_{index}" for index in range(5)]
DIM, ROWS = 8, 33


def pooled(values: torch.Tensor, keys: list[str]) -> Embedded:
    return Embedded(FEATURES, DIM, lambda: (values, tuple(FEATURES.index(key) for key in keys)))


def build(kind: str) -> Interaction:
    torch.manual_seed(1)
    if kind == "dot":
        return DotInteraction(FEATURES, dim=DIM)
    if kind == "cross":
        return CrossInteraction(FEATURES, dim=DIM, num_layers=2, low_rank=12)
    return ProjectionInteraction(FEATURES, dim=DIM, first_branch=(20, 3 * DIM), second_branch=(20, 2 * DIM))


def torchrec_twin(mine: Interaction) -> torch.nn.Module:
    if isinstance(mine, DotInteraction):
        return InteractionArch(num_sparse_features=len(FEATURES))
    if isinstance(mine, CrossInteraction):
        net = LowRankCrossNet((len(FEATURES) + 1) * DIM, num_layers=2, low_rank=12)
        with torch.no_grad():
            for layer in range(2):
                mine.bias[layer].normal_()
                net.V_kernels[layer].copy_(mine.down[layer])
                net.W_kernels[layer].copy_(mine.up[layer])
                net.bias[layer].copy_(mine.bias[layer])
        return InteractionDCNArch(num_sparse_features=len(FEATURES), crossnet=net)
    assert isinstance(mine, ProjectionInteraction)
    return InteractionProjectionArch(len(FEATURES), mine.first_branch, mine.second_branch)


@pytest.mark.parametrize("kind", ["dot", "cross", "projection"])
def test_equals_torchrec_with_gradients(kind: str) -> None:
    mine = build(kind)
    theirs = torchrec_twin(mine)
    dense, sparse = torch.randn(ROWS, DIM), torch.randn(ROWS, len(FEATURES) * DIM)
    results = []
    for run in (
        lambda d, s: mine(d, pooled(s, FEATURES)),
        lambda d, s: theirs(d, s.view(ROWS, len(FEATURES), DIM)),
    ):
        leaves = dense.clone().requires_grad_(), sparse.clone().requires_grad_()
        output = run(*leaves)
        assert output.shape == (ROWS, mine.out_features)
        (output * torch.linspace(-1, 1, output.shape[1])).sum().backward()
        results.append((output.detach(), leaves[0].grad, leaves[1].grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dot", "cross", "projection"])
def test_order_of_delivery_changes_nothing(kind: str) -> None:
    mine = build(kind)
    dense, sparse = torch.randn(ROWS, DIM), torch.randn(ROWS, len(FEATURES), DIM)
    order = [3, 0, 4, 2, 1]
    plain_leaf = sparse.reshape(ROWS, -1).requires_grad_()
    moved_leaf = sparse[:, order].reshape(ROWS, -1).requires_grad_()
    plain = mine(dense, pooled(plain_leaf, FEATURES))
    moved = mine(dense, pooled(moved_leaf, [FEATURES[index] for index in order]))
    torch.testing.assert_close(plain, moved, atol=1e-6, rtol=1e-6)
    weights = torch.randn_like(plain)
    (plain * weights).sum().backward()
    (moved * weights).sum().backward()
    assert plain_leaf.grad is not None
    assert moved_leaf.grad is not None
    torch.testing.assert_close(
        plain_leaf.grad.view(ROWS, -1, DIM)[:, order], moved_leaf.grad.view(ROWS, -1, DIM), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(mine(dense, pooled(plain_leaf, FEATURES)), plain, atol=0, rtol=0)


def test_bf16_dot_is_close() -> None:
    mine = build("dot")
    dense, sparse = torch.randn(ROWS, DIM), torch.randn(ROWS, len(FEATURES) * DIM, requires_grad=True)
    exact = mine(dense, pooled(sparse, FEATURES))
    rough = mine(dense.bfloat16(), pooled(sparse, FEATURES))
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).norm() < 0.01 * exact.norm()
    rough.float().sum().backward()
    assert sparse.grad is not None
    assert sparse.grad.dtype == torch.float32
