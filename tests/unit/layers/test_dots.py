"""Kernel of pairwise dot products against torch's operators."""

import pytest
import torch
from builders.faults import fails_with
from torch.utils.flop_counter import FlopCounterMode

from rayrec.layers import dots, kernel_threads
from rayrec.layers.dots import _indices, _OperatorDots, pairwise_dots
from rayrec.layers.keyed_embeddings import Delivery, KeyedEmbeddings


def drawn(rows: int, features: int, dim: int, kinds: tuple[torch.dtype, torch.dtype]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + features + dim)
    order = tuple(torch.randperm(features, generator=generator).tolist())
    dense, sparse = (torch.randn(rows, width, generator=generator) for width in (dim, features * dim))
    return dense.to(kinds[0]).requires_grad_(), sparse.to(kinds[1]).requires_grad_(), order  # type: ignore[return-value]


FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize("kinds", [(FLOAT, FLOAT), (HALF, FLOAT), (HALF, HALF), (FLOAT, HALF)])
@pytest.mark.parametrize(
    ("rows", "features", "dim"), [(0, 3, 4), (1, 1, 1), (5, 2, 3), (7, 26, 16), (3, 33, 20), (600, 16, 33), (4, 70, 64)]
)
def test_dots_kernel_matches_operators(rows: int, features: int, dim: int, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    dense, sparse, order = drawn(rows, features, dim, kinds)
    by_kernel = pairwise_dots(dense, sparse, order)
    with_torch_ops = _OperatorDots.apply(dense, sparse, *_indices(order, dim, torch.device("cpu")))
    assert by_kernel.dtype == with_torch_ops.dtype == kinds[0]
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if kinds[0] == FLOAT else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(by_kernel, with_torch_ops, **tolerance)
    weights = torch.linspace(-1, 1, by_kernel.shape[1]).to(kinds[0])
    results = [torch.autograd.grad(output, (dense, sparse), weights.expand_as(output)) for output in (by_kernel, with_torch_ops)]
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if HALF not in kinds else {"rtol": 2e-2, "atol": 2e-2}
    for got, expected in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, **tolerance)


def test_dots_are_bit_identical_for_any_threads_and_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, sparse, order = drawn(1_000, 26, 16, (FLOAT, FLOAT))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(pairwise_dots(dense, sparse, order))
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(kernel_threads, "openmp_parallel", lambda: None)
    results.append(pairwise_dots(dense, sparse, order))
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "AVX512"])
def test_vectorized_selects_kernel_for_cpu(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order = ("DEFAULT", "AVX2", "AVX512")
    if torch.backends.cpu.get_cpu_capability() not in order[order.index(capability) :]:
        pytest.skip("not this CPU")
    dense, sparse, places = drawn(40, 26, 16, (FLOAT, FLOAT))
    expected = pairwise_dots(dense, sparse, places)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    kernel_threads.vectorized.cache_clear()
    try:
        ending = "dots" if capability == "DEFAULT" else capability.lower()
        assert kernel_threads.vectorized("rayrec_pairwise_dots").__name__.endswith(ending)
        torch.testing.assert_close(pairwise_dots(dense, sparse, places), expected)
    finally:
        kernel_threads.vectorized.cache_clear()


def test_run_kernel_uses_several_threads_and_raises_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_threads.openmp_parallel() is not None
    dense, sparse = torch.zeros(1, 1), torch.zeros(1, 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    arguments = dots._structure(dense, sparse, [0], torch.zeros(1, 2))
    arguments.vectors = 1 << 26  # Their products exceed the address space
    with pytest.raises(MemoryError, match="rayrec_pairwise_dots"):
        kernel_threads.run_kernel(kernel_threads.vectorized("rayrec_pairwise_dots"), arguments, 1, at_once=1)


def test_torch_counts_dots_operations() -> None:
    dense, sparse, order = drawn(8, 26, 16, (FLOAT, FLOAT))
    with FlopCounterMode(display=False) as counter:
        pairwise_dots(dense, sparse, order).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 8 * 27 * 27 * 16


# Embeddings by feature name, for any delivery order -------------------------------------------------------------------
FEATURES = ["b", "a", "c"]
VALUES = torch.arange(24.0).view(2, 12)
ORDER = (2, 0, 1)


def test_embedding_order_does_not_depend_on_delivery() -> None:
    plain = KeyedEmbeddings.in_order(FEATURES, 4, VALUES)
    moved = torch.cat([VALUES[:, 4 * number : 4 * number + 4] for number in ORDER], dim=1)
    delivered = KeyedEmbeddings(FEATURES, 4, lambda: (moved, ORDER))
    assert delivered.pooled_unordered()[0] is moved
    assert plain.flattened() is VALUES
    assert torch.equal(delivered.flattened(), VALUES)
    assert torch.equal(delivered.stacked(), VALUES.view(2, 3, 4))
    assert list(delivered) == FEATURES
    for number, feature in enumerate(FEATURES):
        assert torch.equal(delivered[feature], VALUES[:, 4 * number : 4 * number + 4])
        assert torch.equal(plain[feature], delivered[feature])
    fails_with(KeyError, "d", delivered.__getitem__, "d")


def test_embeddings_are_awaited_on_first_use() -> None:
    calls = []

    def deliver() -> Delivery:
        calls.append(1)
        return VALUES, (0, 1, 2)

    embedded = KeyedEmbeddings(FEATURES, 4, deliver)
    assert (len(embedded), "a" in list(embedded), calls) == (3, True, [])
    embedded.stacked()
    embedded.flattened()
    assert calls == [1]
