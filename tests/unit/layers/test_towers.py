"""Linear stacks, towers and batch norms against torch: equal outputs and gradients,
deterministically.
"""

import copy
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from builders.faults import fails_with, until
from ranks.checkpoint import run_ranks
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rayrec.collectives import global_means
from rayrec.layers.kernels import dots, kernel_threads
from rayrec.layers.kernels.dots import _indices, _OperatorDots, pairwise_dots
from rayrec.layers.kernels.kernel_threads import CpuWatch, WaitPolicy, waiting_share
from rayrec.layers.keyed_embeddings import KeyedEmbeddings
from rayrec.layers.mlp import (
    MLP,
    GlobalBatchNorm,
    Precision,
    Tower,
    linear_stack,
    onednn_is_faster,
    relu_backward_,
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["oneDNN", "MKL"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Library that multiplies float32 matrices."""
    name: str = request.param
    is_faster = name == "oneDNN" and torch.backends.mkldnn.is_available()
    monkeypatch.setattr("rayrec.layers.mlp.onednn_is_faster", lambda: is_faster)
    return name


@pytest.mark.parametrize(
    ("maker", "has_mkl", "has_onednn", "faster"),
    [
        ("GenuineIntel", True, True, False),
        ("GenuineIntel", False, True, True),
        ("AuthenticAMD", True, True, True),
        ("AuthenticAMD", True, False, False),
        ("", False, True, True),
    ],
)
def test_cpu_maker_decides_engine_of_float32(
    monkeypatch: pytest.MonkeyPatch, maker: str, has_mkl: bool, has_onednn: bool, faster: bool
) -> None:
    monkeypatch.setattr("rayrec.layers.mlp.cpu_maker", lambda: maker)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    assert onednn_is_faster.__wrapped__() is faster


def reference(mlp: MLP, *, final_activation: bool) -> nn.Sequential:
    modules = [module for layer in mlp.layers for module in (copy.deepcopy(layer), nn.ReLU())]
    return nn.Sequential(*(modules if final_activation else modules[:-1]))


def gradients(
    module: nn.Module, inputs: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    inputs = inputs.clone().requires_grad_()
    module.zero_grad()
    output = module(inputs)
    (output.float() * weights).sum().backward()
    assert inputs.grad is not None
    return output.detach(), [
        inputs.grad,
        *(parameter.grad.clone() for parameter in module.parameters()),
    ]


@pytest.mark.parametrize("final_activation", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 257])
@pytest.mark.parametrize("sizes", [(512, 256, 64, 16), (367, 5, 1), (1,)])
@pytest.mark.usefixtures("engine")
def test_fp32_equals_linear_layers(
    sizes: tuple[int, ...], rows: int, final_activation: bool
) -> None:
    mlp = MLP(13, sizes, final_activation=final_activation)
    inputs = torch.randn(rows, 13)
    weights = torch.randn(rows, sizes[-1])
    output, got = gradients(mlp, inputs, weights)
    expected_output, expected = gradients(
        reference(mlp, final_activation=final_activation), inputs, weights
    )
    torch.testing.assert_close(output, expected_output, atol=1e-5, rtol=1e-4)
    for actual, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, theirs, atol=1e-4, rtol=1e-4)


@pytest.fixture
def own_threads() -> Iterator[None]:
    """Restore torch's thread count after the test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_relu_backward_is_bit_identical_for_any_threads(own_threads: None) -> None:
    output = torch.randn(1000, 77)
    given = torch.randn(1000, 77)
    output[3, 5], given[4, 6] = float("nan"), float("inf")
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        gradient = given.clone()
        results.append((gradient, *relu_backward_(gradient, output)))
    expected = torch.ops.aten.threshold_backward(given, output, 0)
    for gradient, turned, sums in results:
        assert torch.equal(gradient, expected)
        assert torch.equal(turned, expected.t())
        torch.testing.assert_close(sums, expected.sum(0), rtol=1e-4, atol=1e-4)
        assert torch.equal(sums, results[0][2])


@pytest.mark.parametrize("final_activation", [True, False])
def test_bf16_is_close_and_keeps_float32_gradients(final_activation: bool) -> None:
    mlp = MLP(130, (64, 32, 16), final_activation=final_activation, precision="bf16")
    inputs = torch.randn(512, 130)
    weights = torch.randn(512, 16)
    output, got = gradients(mlp, inputs, weights)
    expected_output, expected = gradients(
        reference(mlp, final_activation=final_activation), inputs, weights
    )
    assert output.dtype == (torch.bfloat16 if final_activation else torch.float32)
    assert (output.float() - expected_output).norm() < 0.01 * expected_output.norm()
    for actual, theirs in zip(got, expected, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - theirs).norm() < 0.12 * theirs.norm()  # Mostly ReLUs that flip near zero


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("engine")
def test_linear_stack_repeats_bits_for_any_number_of_rows(precision: str) -> None:
    mlp = MLP(40, (96, 1), final_activation=False, precision=precision)
    inputs = torch.randn(300, 40)
    weights = torch.randn(300, 1)
    _, first = gradients(mlp, inputs, weights)
    _, second = gradients(mlp, inputs, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    mlp = MLP(13, (32, 1), final_activation=False, precision=precision)
    output = mlp(torch.zeros(0, 13))
    output.sum().backward()
    assert output.shape == (0, 1)
    assert all(
        torch.equal(parameter.grad, torch.zeros_like(parameter)) for parameter in mlp.parameters()
    )
    torch.manual_seed(0)
    mlp = MLP(13, (32, 16, 1), final_activation=False, precision=precision)
    inputs = torch.randn(40, 13)
    with torch.no_grad():
        together = mlp(inputs)
        alone = torch.cat([mlp(inputs[row : row + 1]) for row in range(40)])
    tolerance = 1e-6 if precision == "fp32" else 0.03
    torch.testing.assert_close(alone, together, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("in_features", [13, 70])
@pytest.mark.usefixtures("engine")
def test_backward_does_not_modify_incoming_gradient(in_features: int) -> None:
    output = MLP(in_features, (32, 16), final_activation=True)(torch.randn(8, in_features))
    incoming = torch.ones_like(output)
    output.backward(incoming)
    assert torch.equal(incoming, torch.ones_like(output))


@pytest.mark.usefixtures("engine")
def test_layers_without_bias_and_without_activation() -> None:
    down = torch.randn(24, 100)
    up = torch.randn(100, 24)
    bias = torch.randn(100)
    inputs = torch.randn(50, 100)
    got = linear_stack(inputs, (down, None, up, bias), relus=(False, False), dtype=torch.float32)
    torch.testing.assert_close(got, inputs @ down.t() @ up.t() + bias, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("in_features", "out_features"),
    [
        (24, 100),
        (100, 300),
        (100, 24),
        (80, 80),
    ],
)
@pytest.mark.usefixtures("engine")
def test_input_major_weight_gradient_matches_output_major(
    in_features: int, out_features: int
) -> None:
    inputs = torch.randn(50, in_features)
    factors = torch.randn(50, out_features)
    by_inputs = torch.randn(in_features, out_features, requires_grad=True)
    by_outputs = by_inputs.detach().t().contiguous().requires_grad_()

    def gradient(parameter: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        outputs = linear_stack(inputs, (weight, None), relus=(False,), dtype=torch.float32)
        return torch.autograd.grad((outputs * factors).sum(), parameter)[0]

    got = gradient(by_inputs, by_inputs.t())
    torch.testing.assert_close(got, gradient(by_outputs, by_outputs).t(), atol=1e-4, rtol=1e-5)
    if in_features < out_features:
        assert got.is_contiguous()  # No copy into the parameter's layout needed


def test_export_uses_plain_operators_and_empty_layer_learns_bias() -> None:
    mlp = MLP(13, (32, 1), final_activation=False).eval()
    inputs = torch.randn(4, 13)
    program = torch.export.export(mlp, (inputs,))
    torch.testing.assert_close(program.module()(inputs), mlp(inputs), atol=1e-5, rtol=1e-4)
    assert "mkldnn" not in program.graph_module.code
    mlp = MLP(0, (16, 8), final_activation=True)
    output = mlp(torch.zeros(20, 0))
    torch.testing.assert_close(output[0], mlp.layers[1](mlp.layers[0].bias.relu()).relu())
    output.sum().backward()
    assert mlp.layers[0].bias.grad is not None
    assert mlp.layers[0].bias.grad.abs().sum() > 0


# -- Towers: their formula is in models/ranking/test_formulas.py
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tower_returns_precision_dtype(precision: Precision) -> None:
    outputs = Tower(5, (4, 3), batch_norm=True, precision=precision)(torch.randn(16, 5))
    assert outputs.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
    assert (Tower(5, (4, 3)).out_features, Tower(5, ()).out_features) == (3, 5)


# -- Batch normalization and means over all workers' rows
FEATURES = 3
STEPS = 4
PARTS = ((0, 7), (7, 7), (7, 8))
"""Rows of each rank. One has none."""


def rows(step: int) -> torch.Tensor:
    return 100 + torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(step))


def weights(count: int) -> torch.Tensor:
    return torch.linspace(-1, 1, count * FEATURES).view(count, FEATURES)


def test_global_batch_norm_matches_torch_on_one_worker() -> None:
    actual = GlobalBatchNorm(FEATURES)
    theirs = nn.BatchNorm1d(FEATURES)
    for step in range(STEPS):
        torch.testing.assert_close(actual(rows(step)), theirs(rows(step)))
    torch.testing.assert_close(actual.running_var, theirs.running_var)
    torch.testing.assert_close(actual.eval()(rows(9)), theirs.eval()(rows(9)))
    assert actual(rows(9).bfloat16()).dtype == torch.bfloat16


def a_rank(folder: str, rank: int) -> None:
    norm, (start, stop) = GlobalBatchNorm(FEATURES), PARTS[rank]
    for step in range(STEPS):
        inputs = rows(step)[start:stop].requires_grad_()
        outputs = norm(inputs)
        (outputs * weights(8)[start:stop]).sum().backward()
    state = {name: tensor.detach() for name, tensor in norm.state_dict().items()}
    found = {
        "outputs": outputs.detach(),
        "gradient": inputs.grad,
        "weight_gradient": norm.weight.grad,
        **state,
    }
    values = rows(0)[start:stop].requires_grad_()
    (values.square() @ global_means(values)).sum().backward()
    found |= {"means": global_means(values).detach(), "gradient_with_means": values.grad}
    torch.save(found, f"{folder}/rank_{rank}.pt")


@pytest.mark.slow
def test_batch_norm_with_unequal_workers_matches_one_worker(tmp_path: Path) -> None:
    run_ranks(a_rank, 3, str(tmp_path))
    found = [torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(3)]
    whole = nn.BatchNorm1d(FEATURES)
    for step in range(STEPS):
        inputs = rows(step).requires_grad_()
        outputs = whole(inputs)
        (outputs * weights(8)).sum().backward()
    assert inputs.grad is not None
    for name, expected in (("outputs", outputs.detach()), ("gradient", inputs.grad)):
        torch.testing.assert_close(
            torch.cat([part[name] for part in found]), expected, atol=2e-4, rtol=1e-3
        )
    torch.testing.assert_close(
        sum(part["weight_gradient"] for part in found), whole.weight.grad, atol=1e-3, rtol=1e-3
    )
    values = rows(0).requires_grad_()
    (values.square() @ values.mean(0)).sum().backward()
    torch.testing.assert_close(
        torch.cat([part["gradient_with_means"] for part in found]), values.grad
    )
    for part in found:
        torch.testing.assert_close(part["means"], values.mean(0).detach())
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(part[name], getattr(whole, name), rtol=1e-4, atol=1e-4)
            assert torch.equal(part[name], found[0][name])


# -- Kernel of pairwise dot products against torch's operators
def drawn(
    rows: int, features: int, dim: int, kinds: tuple[torch.dtype, torch.dtype]
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + features + dim)
    order = tuple(torch.randperm(features, generator=generator).tolist())
    dense, sparse = (
        torch.randn(rows, width, generator=generator) for width in (dim, features * dim)
    )
    dense, sparse = dense.to(kinds[0]), sparse.to(kinds[1])
    return dense.requires_grad_(), sparse.requires_grad_(), order  # type: ignore[return-value]


FLOAT = torch.float32
HALF = torch.bfloat16


@pytest.mark.parametrize(
    "kinds",
    [
        (FLOAT, FLOAT),
        (HALF, FLOAT),
        (HALF, HALF),
        (FLOAT, HALF),
    ],
)
@pytest.mark.parametrize(
    ("rows", "features", "dim"),
    [
        (0, 3, 4),
        (1, 1, 1),
        (5, 2, 3),
        (7, 26, 16),
        (3, 33, 20),
        (600, 16, 33),
        (4, 70, 64),
    ],
)
def test_dots_kernel_matches_operators(
    rows: int, features: int, dim: int, kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    dense, sparse, order = drawn(rows, features, dim, kinds)
    by_kernel = pairwise_dots(dense, sparse, order)
    with_torch_ops = _OperatorDots.apply(dense, sparse, *_indices(order, dim, torch.device("cpu")))
    assert by_kernel.dtype == with_torch_ops.dtype == kinds[0]
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if kinds[0] == FLOAT else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(by_kernel, with_torch_ops, **tolerance)
    weights = torch.linspace(-1, 1, by_kernel.shape[1]).to(kinds[0])
    results = [
        torch.autograd.grad(output, (dense, sparse), weights.expand_as(output))
        for output in (by_kernel, with_torch_ops)
    ]
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if HALF not in kinds else {"rtol": 2e-2, "atol": 2e-2}
    for got, expected in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, **tolerance)


def test_dots_are_bit_identical_for_any_threads_and_openmp(
    own_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, sparse, order = drawn(1_000, 26, 16, (FLOAT, FLOAT))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(pairwise_dots(dense, sparse, order))
    monkeypatch.setattr(kernel_threads, "openmp_parallel", lambda: None)
    results.append(pairwise_dots(dense, sparse, order))
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "AVX512"])
def test_vectorized_selects_kernel_for_cpu(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_kernel_raises_memory_error_and_torch_counts_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kernel_threads.openmp_parallel() is not None
    dense = torch.zeros(1, 1)
    sparse = torch.zeros(1, 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    arguments = dots._structure(dense, sparse, [0], torch.zeros(1, 2))
    arguments.vectors = 1 << 26  # Their products exceed the address space
    with pytest.raises(MemoryError, match="rayrec_pairwise_dots"):
        kernel_threads.run_kernel(
            kernel_threads.vectorized("rayrec_pairwise_dots"), arguments, 1, at_once=1
        )
    dense, sparse, order = drawn(8, 26, 16, (FLOAT, FLOAT))
    with FlopCounterMode(display=False) as counter:
        pairwise_dots(dense, sparse, order).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 8 * 27 * 27 * 16


# -- Embeddings by feature name, for any delivery order
DOTTED = ["b", "a", "c"]
VALUES = torch.arange(24.0).view(2, 12)
ORDER = (2, 0, 1)


def test_embeddings_have_one_order_and_are_awaited_on_first_use() -> None:
    plain = KeyedEmbeddings.in_order(DOTTED, 4, VALUES)
    moved = torch.cat([VALUES[:, 4 * number : 4 * number + 4] for number in ORDER], dim=1)
    delivered = KeyedEmbeddings(DOTTED, 4, lambda: (moved, ORDER))
    assert delivered.pooled_unordered()[0] is moved
    assert plain.flattened() is VALUES
    assert torch.equal(delivered.flattened(), VALUES)
    assert torch.equal(delivered.stacked(), VALUES.view(2, 3, 4))
    assert list(delivered) == DOTTED
    for number, feature in enumerate(DOTTED):
        assert torch.equal(delivered[feature], VALUES[:, 4 * number : 4 * number + 4])
        assert torch.equal(plain[feature], delivered[feature])
    fails_with(KeyError, "d", delivered.__getitem__, "d")
    embedded = KeyedEmbeddings(DOTTED, 4, deliver := Mock(return_value=(VALUES, (0, 1, 2))))
    assert (len(embedded), "a" in list(embedded), deliver.call_count) == (3, True, 0)
    embedded.stacked()
    embedded.flattened()
    deliver.assert_called_once_with()


# -- Detection of CPU contention, and short OpenMP waits during contention
_MS = 1_000_000
ROW = [1.0] * kernel_threads._CONTENDED_INTERVALS


@pytest.fixture
def two_threads(own_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in kernel_threads._WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)


def decisions(policy: WaitPolicy, shares: list[float], *, start_s: float = 0.0) -> list[bool]:
    return [policy.update(share, start_s + place * 0.1) for place, share in enumerate(shares)]


def test_wait_policy_and_ratio_follow_contention() -> None:
    assert decisions(WaitPolicy(), [0.9, 0.9, 0.9, 0.9, 0.1] * 3) == [False] * 15
    assert decisions(WaitPolicy(), [*ROW, 0.0]) == [False, False, False, False, True, True]
    policy = WaitPolicy()
    now_s = 0.0
    short_s = []
    decisions(policy, ROW[1:])
    for _ in range(9):
        assert policy.update(1.0, now_s)
        begin_s = now_s
        while policy.update(1.0, now_s):
            now_s += 0.125
        short_s.append(now_s - begin_s)
    assert short_s == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    policy = WaitPolicy()
    assert decisions(policy, ROW)[-1]
    assert decisions(policy, [0.3, 0.3, 1.0, 0.2], start_s=5.0) == [False, False, False, False]
    assert decisions(policy, ROW, start_s=6.0) == [False, False, False, False, True]
    assert policy.update(1.0, 7.3)
    assert not policy.update(1.0, 7.5)  # Initial duration again
    before = [(0, 0), (5 * _MS, 5 * _MS), (0, 0)]
    assert (
        waiting_share(
            before,
            [
                (90 * _MS, 10 * _MS),
                (6 * _MS, 9 * _MS),
                (1 * _MS, 3 * _MS),
            ],
        )
        == 0.1
    )
    assert waiting_share(
        before,
        [
            (90 * _MS, 10 * _MS),
            (10 * _MS, 95 * _MS),
            (0, 0),
        ],
    ) == pytest.approx(90 / 95)
    assert waiting_share(before, before) == 0.0


_SPINNING = """
import threading, time, torch
from pathlib import Path
from rayrec.layers.kernels import kernel_threads

torch.set_num_threads(2)
(worker,) = set(kernel_threads._run_in_team(torch.get_num_threads())) - {threading.get_native_id()}
path, values = Path(f"/proc/self/task/{worker}/schedstat"), torch.ones(1_000_000)

def spinning_ns():
    before = kernel_threads._run_and_wait_ns(path)[0]
    for _ in range(20):
        values.add_(1)
        time.sleep(0.005)
    return kernel_threads._run_and_wait_ns(path)[0] - before

waits = kernel_threads._ShortWaits()
print(spinning_ns())
waits.set(True)
print(spinning_ns())
waits.set(False)
print(spinning_ns())
"""


def test_short_waits_make_threads_sleep() -> None:
    """Compare the CPU time of an idle thread between operators, in a process whose OpenMP may
    spin.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in kernel_threads._WAIT_VARIABLES
    }
    ended = subprocess.run(
        [sys.executable, "-c", _SPINNING],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    long_ns, short_ns, long_again_ns = map(int, ended.stdout.split())
    assert short_ns < min(long_ns, long_again_ns) / 3


def test_cpu_watch_reports_contention_once(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = itertools.count(step=100 * _MS)
    # it waits always
    monkeypatch.setattr(kernel_threads, "_run_and_wait_ns", lambda path: (0, next(reads)))
    monkeypatch.setattr(kernel_threads, "_INTERVAL_S", 0.005)
    shares: list[float] = []
    watch = CpuWatch(shares.append)
    until(lambda: "rayrec-idle-team" in [thread.name for thread in threading.enumerate()])
    watch.close()
    assert shares == [1.0]
    assert not {"rayrec-idle-team", "rayrec-cpu-watch"} & {
        thread.name for thread in threading.enumerate()
    }


def test_cpu_watch_respects_user_settings(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernel_threads._can_shorten_waits(2)
    assert not kernel_threads._can_shorten_waits(1)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert not kernel_threads._can_shorten_waits(2)
