"""Weighted sums of products of vectors against torch's operators."""

import pytest
import torch

from rayrec.layers.kernels import vector_products
from rayrec.layers.kernels.vector_products import sum_products

ROWS = 131  # more than a block of rows, and no multiple of it
MANY_ROWS = 32 * 64 + 5  # whose blocks have more rows


def leaf(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, requires_grad=True)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(
    ("rows", "dim"), [(ROWS, 1), (ROWS, 10), (ROWS, 16), (ROWS, 70), (MANY_ROWS, 3)]
)
def test_sums_and_gradients_match_operators(
    *, same: bool, rows: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = leaf(rows, 5, dim, seed=0)
    second = first if same else leaf(rows, 7, dim, seed=1)
    weight = leaf(19, 5 * second.shape[1], seed=2)
    bias = leaf(19, seed=3)
    slopes = torch.randn(rows, 19, dim)
    leaves = [first, weight, bias] + ([] if same else [second])
    results = []
    for uses_kernels in (True, False):
        monkeypatch.setattr(vector_products, "uses_kernels", lambda _, uses=uses_kernels: uses)
        out = sum_products(first, second, weight, bias)
        results.append((out, *torch.autograd.grad(out, leaves, slopes)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


def test_result_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    first = leaf(ROWS, 5, 16, seed=0)
    weight = leaf(8, 25, seed=1)
    results = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        out = sum_products(first, first, weight, torch.zeros(8))
        results.append((out, *torch.autograd.grad(out.square().sum(), [first, weight])))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_sums_keep_bfloat16() -> None:
    first = leaf(ROWS, 5, 16, seed=0).detach()
    weight = leaf(8, 25, seed=1).detach()
    expected = sum_products(first, first, weight, torch.zeros(8))
    low = first.bfloat16()
    out = sum_products(low, low, weight, torch.zeros(8))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.3)


def test_no_rows_have_no_sums() -> None:
    first = leaf(0, 5, 16, seed=0)
    weight = leaf(8, 25, seed=1)
    out = sum_products(first, first, weight, torch.zeros(8))
    assert out.shape == (0, 8, 16)
    (slopes,) = torch.autograd.grad(out.sum(), weight)
    assert not slopes.any()
