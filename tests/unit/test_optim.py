"""The schedule has the values computed by hand, all optimizers train, and fused kernels match their formulas."""

from typing import Any

import numpy as np
import pytest
import torch
from builders.faults import rejects
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn import Parameter
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer

from rayrec.optim import config as optim


# Schedule ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "base", "rates"),
    [
        ({}, 0.3, [0.3] * 3),
        ({"decay_steps": 2}, 1.0, [0.25, 1e-7, 1e-7, 1e-7]),
        ({"warmup_steps": 2, "decay_start_step": 2, "decay_steps": 2}, 1.0, [0.5, 1.0, 0.25, 1e-7, 1e-7]),
        ({"decay_steps": 2}, 0.0, [0.0] * 6),  # The floor never raises it
        ({"decay_steps": 2}, 1e-9, [1e-9] * 6),
        ({"warmup_steps": 10}, 1e-8, [pytest.approx(1e-9)]),
    ],
)
def test_schedule_matches_example(fields: dict[str, int], base: float, rates: list[float]) -> None:
    assert [optim.LearningRateSchedule(**fields).learning_rate(step, base=base) for step in range(len(rates))] == rates


def test_constant_phase_has_exact_base_rate() -> None:
    schedule = optim.LearningRateSchedule(warmup_steps=2750, decay_start_step=49315, decay_steps=27772)
    assert {schedule.learning_rate(step, base=0.1) for step in range(2749, 49315)} == {0.1}
    rates = [schedule.learning_rate(step, base=0.1) for step in range(80000)]
    assert (rates[:2750], rates[49315:]) == (sorted(set(rates[:2750])), sorted(rates[49315:], reverse=True))
    assert rates[-1] == 1e-7


@pytest.mark.parametrize(("warmup", "start", "steps"), [(4, 6, 4), (4, 4, 3), (1, 10, 7), (0, 5, 20)])
def test_warm_up_and_decay_match_mlperf(warmup: int, start: int, steps: int) -> None:
    """Compare with the reference, which counts steps from 1: 1 - (W - n) / W, then ((N - (n - S)) / N)^2."""
    schedule = optim.LearningRateSchedule(warmup_steps=warmup, decay_start_step=start, decay_steps=steps)
    for step in range(start + steps - 1):
        count = step + 1
        if count < warmup:
            reference = 1.0 - (warmup - count) / warmup
        elif count < start:
            reference = 1.0
        else:
            reference = ((steps - (count - start)) / steps) ** 2
        assert schedule.factor(step) == pytest.approx(reference), step


def test_decay_fraction_is_end_of_run() -> None:
    schedule = optim.LearningRateSchedule(warmup_steps=2, decay_fraction=0.25)
    assert schedule.for_steps(100) == optim.LearningRateSchedule(warmup_steps=2, decay_start_step=76, decay_steps=25)
    assert schedule.for_steps(100).factor(99) > 0
    assert schedule.for_steps(2).decay_start_step + schedule.for_steps(2).decay_steps >= 2
    assert optim.LearningRateSchedule(warmup_steps=2).for_steps(100) == optim.LearningRateSchedule(warmup_steps=2)


# Configurations ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (optim.SparseOptimizerConfig, {"kind": "lamb"}, "has the wrong type"),
        (optim.SparseOptimizerConfig, {"kind": "sparse_adam", "weight_decay": 0.1}, "Choose kind adam or adamw"),
        (optim.SparseOptimizerConfig, {"kind": "rowwise_adagrad", "weight_decay": 0.1}, r"model\.embedding_penalty"),
        (optim.SparseOptimizerConfig, {"kind": "adam", "eps": 0.0}, "eps: must be above 0 for adam"),
        (optim.SparseOptimizerConfig, {"kind": "adam", "betas": (1.0, 0.9)}, "betas"),
        (optim.SparseOptimizerConfig, {"learning_rate": -0.1}, "learning_rate: must be at least 0 .*, got -0.1"),
        (optim.DenseOptimizerConfig, {"eps": float("nan")}, "eps: must be .*, got nan"),
        (optim.DenseOptimizerConfig, {"betas": (0.9, 1.0)}, "betas"),
        (optim.DenseOptimizerConfig, {"kind": "lars", "momentum": 0.9, "nesterov": True}, "nesterov is for sgd with momentum"),
        (optim.DenseOptimizerConfig, {"kind": "lamb", "momentum": 0.9}, "momentum: must be 0 except for sgd and lars"),
        (optim.DenseOptimizerConfig, {"max_gradient_norm": 0.0}, "must be above 0"),
        (optim.LearningRateSchedule, {"warmup_steps": 5, "decay_start_step": 4, "decay_steps": 1},
         "decay_start_step: must be at least warmup_steps 5, got 4"),
        (optim.LearningRateSchedule, {"warmup_steps": -1}, "warmup_steps: must be at least 0, got -1"),
        (optim.LearningRateSchedule, {"decay_fraction": 1.5}, "at least 0 and at most 1"),
        (optim.LearningRateSchedule, {"decay_fraction": 0.5, "decay_steps": 3}, "set only one"),
        (optim.LearningRateSchedule, {"decay_steps": 0.5}, "has the wrong type"),
    ],
)  # fmt: skip
def test_optimizer_configs_reject_invalid_settings(config: type, fields: dict[str, Any], message: str) -> None:
    rejects(message, config, **fields)


# Dense ---------------------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "adamw"])
def test_fused_optimizer_matches_plain_rule(kind: Any) -> None:
    config = optim.DenseOptimizerConfig(kind=kind, learning_rate=0.1, eps=1e-3, weight_decay=0.2, betas=(0.5, 0.75))
    ours, plain = (Parameter(torch.tensor([3.0, -2.0])) for _ in range(2))
    optimizer = config.build([ours])
    assert optimizer.param_groups[0]["fused"]
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "foreach": False}
    settings |= {} if kind == "sgd" else {"eps": 1e-3}
    settings |= {"betas": (0.5, 0.75)} if kind.startswith("adam") else {}
    names = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW"}
    reference = getattr(torch.optim, names[kind])([plain], **settings)
    for _ in range(5):
        for parameter, rule in ((ours, optimizer), (plain, reference)):
            rule.zero_grad()
            parameter.pow(4).sum().backward()
            rule.step()
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_lamb_matches_paper() -> None:
    start, beta1, beta2, rate, decay, eps = torch.tensor([3.0, -2.0]), 0.8, 0.9, 0.1, 0.2, 1e-3
    settings: dict[str, Any] = {"learning_rate": rate, "weight_decay": decay, "betas": (beta1, beta2), "eps": eps}
    parameter, zero = Parameter(start.clone()), Parameter(torch.zeros(2))
    optimizer = optim.DenseOptimizerConfig(kind="lamb", **settings).build([parameter, zero])
    x, m, v = start.double().numpy(), 0.0, 0.0
    for step in range(1, 6):
        gradient = [0.5 * step, -1.0 / step]
        parameter.grad, zero.grad = torch.tensor(gradient), torch.zeros(2)
        optimizer.step()
        g = np.array(gradient)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        r = (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + eps) + decay * x
        x = x - rate * np.linalg.norm(x) / np.linalg.norm(r) * r
    torch.testing.assert_close(parameter.data, torch.tensor(x).float(), rtol=1e-6, atol=1e-6)
    assert not zero.any()
    zero.grad = torch.tensor([1.0, 0.0])
    optimizer.step()
    assert zero.isfinite().all()
    assert zero[0] < 0  # Without a norm, it moves by Adam's update


def test_lars_matches_paper() -> None:
    start, rate, decay, momentum, trust = torch.tensor([3.0, -2.0]), 0.5, 0.2, 0.9, 0.01
    parameter, zero = Parameter(start.clone()), Parameter(torch.zeros(2))
    settings: dict[str, Any] = {"learning_rate": rate, "weight_decay": decay, "momentum": momentum, "trust_coefficient": trust}
    optimizer = optim.DenseOptimizerConfig(kind="lars", **settings).build([parameter, zero])
    x, v = start.double().numpy(), 0.0
    for step in range(1, 6):
        gradient = [0.5 * step, -1.0 / step]
        parameter.grad, zero.grad = torch.tensor(gradient), torch.tensor([1.0, 0.0])
        optimizer.step()
        g = np.array(gradient)
        local = trust * np.linalg.norm(x) / (np.linalg.norm(g) + decay * np.linalg.norm(x))
        v = momentum * v + rate * local * (g + decay * x)
        x = x - v
        if step == 1:
            assert zero.tolist() == [-0.5, 0.0]  # The bias is initially 0
    torch.testing.assert_close(parameter.data, torch.tensor(x).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "names"), [("lamb", {"exp_avg", "exp_avg_sq", "step"}), ("lars", {"momentum_buffer"})])
def test_trust_ratio_state_size_matches_config(kind: Any, names: set[str]) -> None:
    parameter = Parameter(torch.ones(3, 4))
    config = optim.DenseOptimizerConfig(kind=kind)
    named = config.build_named({"weight": parameter})
    parameter.grad = torch.ones(3, 4)
    named.step()
    state = named.state_dict()["state"]["weight"]
    assert state.keys() == names
    assert config.state_bytes(12) == sum(value.nbytes for name, value in state.items() if name != "step")


def test_fused_falls_back_to_torch_default() -> None:
    assert not optim.DenseOptimizerConfig().build([Parameter(torch.zeros(2, device="meta"))]).param_groups[0]["fused"]


@pytest.mark.parametrize(("limit", "size"), [(1.0, 1.0), (None, 5.0), (7.0, 5.0)])
def test_clipping_bounds_joint_norm(limit: float | None, size: float) -> None:
    parameters = {"a": Parameter(torch.zeros(1)), "b": Parameter(torch.zeros(1))}
    optimizer = optim.DenseOptimizerConfig(kind="sgd", learning_rate=1.0, max_gradient_norm=limit).build_keyed(parameters)
    optimizer.zero_grad()
    (3 * parameters["a"] + 4 * parameters["b"]).backward()
    optimizer.step()
    moved = torch.cat(list(parameters.values())).detach()
    torch.testing.assert_close(moved, torch.tensor([-0.6, -0.8]) * size, rtol=1e-5, atol=1e-5)
    assert set(optimizer.params) == {"a", "b"}
    assert optim.learning_rates(optimizer) == [1.0]


def test_learning_rates_update_every_group() -> None:
    parameters = {name: Parameter(torch.zeros(1)) for name in "ab"}
    config = optim.DenseOptimizerConfig(kind="sgd", learning_rate=2.0, max_gradient_norm=100.0)
    first = config.build_keyed({"a": parameters["a"]})
    second = config.replace(learning_rate=4.0).build_keyed({"b": parameters["b"]})
    optimizer = CombinedOptimizer([("first", first), ("second", second)])
    base_rates = optim.learning_rates(optimizer)
    assert base_rates == [2.0, 4.0]
    optim.set_learning_rates(optimizer, base_rates=base_rates, schedule=optim.LearningRateSchedule(warmup_steps=4), step=0)
    assert optim.learning_rates(optimizer) == [0.5, 1.0]
    (parameters["a"] + parameters["b"]).backward()
    optimizer.step()
    assert [parameter.item() for parameter in parameters.values()] == [-0.5, -1.0]
    with pytest.raises(ValueError, match="zip"):
        optim.set_learning_rates(optimizer, base_rates=[1.0], schedule=optim.LearningRateSchedule(), step=0)


# Sparse: through TorchRec into the fused CPU kernel ------------------------------------------------------------------
def _sharded(config: optim.SparseOptimizerConfig) -> tuple[Any, Any]:
    """Return a table of 5 rows by 4, all 1, table-wise on one rank, and its fused kernel."""
    table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=5, feature_names=["f"])
    collection = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    optimizer_class, kwargs = config.build()
    _apply_optimizer_in_backward(optimizer_class, collection.parameters(), kwargs)
    sharder, site = EmbeddingBagCollectionSharder(), {"local_size": 1, "world_size": 1, "device_type": "cpu"}
    by_table = {"t": table_wise(rank=0, compute_kernel="fused")}
    plan = ShardingPlan(plan={"": construct_module_sharding_plan(collection, by_table, sharder=sharder, **site)})
    model = DistributedModelParallel(collection, device=torch.device("cpu"), sharders=[sharder], plan=plan)
    kernel = model.module._lookups[0]._emb_modules[0].emb_module
    _weights(kernel).fill_(1.0)
    return model, kernel


def _weights(kernel: Any) -> Any:
    return kernel.split_embedding_weights()[0]


_GRADIENTS = [[1.0, 2.0, 3.0, 4.0], [0.5, 0.5, 0.5, 0.5]]  # Of the bags [1, 1] and [3]


def _step(model: Any) -> None:
    model.fused_optimizer.zero_grad()
    bags = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 1, 3]), lengths=torch.tensor([2, 1]))
    (model(bags).wait().values() * torch.tensor(_GRADIENTS)).sum().backward()
    model.fused_optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_fused_kernel_matches_formula(single_rank: None, kind: Any) -> None:
    learning_rate, eps = 0.1, 0.25
    model, kernel = _sharded(optim.SparseOptimizerConfig(kind=kind, learning_rate=learning_rate, eps=eps))
    gradient = torch.zeros(5, 4)
    gradient[1] = 2 * torch.tensor(_GRADIENTS[0])  # The id is twice in the bag: summed first, then applied once
    gradient[3] = torch.tensor(_GRADIENTS[1])
    expected, squares = torch.ones(5, 4), torch.zeros(5, 4)
    for _ in range(3):
        _step(model)
        squares += gradient**2 if kind == "adagrad" else (gradient**2).mean(dim=1, keepdim=True)
        expected -= learning_rate * (gradient if kind == "sgd" else gradient / (squares.sqrt() + eps))
        torch.testing.assert_close(_weights(kernel), expected, rtol=1e-5, atol=1e-6)
    assert (_weights(kernel)[[0, 2, 4]] == 1).all()


@pytest.mark.slow
def test_schedule_updates_fused_kernel(single_rank: None) -> None:
    model, kernel = _sharded(optim.SparseOptimizerConfig(kind="sgd", learning_rate=1.0))
    schedule = optim.LearningRateSchedule(warmup_steps=2, decay_start_step=2, decay_steps=2)
    base_rates = optim.learning_rates(model.fused_optimizer)
    assert base_rates == [1.0]
    for step, rate in enumerate([0.5, 1.0, 0.25]):
        before = _weights(kernel).clone()
        optim.set_learning_rates(model.fused_optimizer, base_rates=base_rates, schedule=schedule, step=step)
        _step(model)
        moved = before[3] - _weights(kernel)[3]
        torch.testing.assert_close(moved, torch.full((4,), 0.5 * rate), rtol=1e-6, atol=1e-6)


def test_sparse_optimizer_build_returns_new_dict() -> None:
    config = optim.SparseOptimizerConfig()
    config.build()[1].clear()  # TorchRec changes it as well
    assert config.build()[1] == {"lr": 0.01, "eps": 1e-8}
