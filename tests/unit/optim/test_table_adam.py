"""Table Adam against torch's, over many steps with rows that no batch touches for long."""

from typing import Any

import numpy as np
import pytest
import torch
from builders.faults import fails_with, rejects
from ranks.checkpoint import same
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn import Parameter
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer

from rayrec.optim import config as optim
from rayrec.optim import table_adam
from rayrec.optim.config import SparseOptimizerConfig
from rayrec.optim.optimizer import DataParallelTableOptimizer, data_parallel_optimizer
from rayrec.optim.table_adam import (
    AdamStep,
    Lookups,
    RowGradients,
    TableAdam,
    TableFeatures,
    TablePart,
)

ROWS = 40
COLUMNS = 6
STEPS = 200


def gradient_of(step: int) -> torch.Tensor:
    """Return a gradient of some rows. Rows 30 to 34 are touched every 100 steps, 35 to 39 never."""
    generator = torch.Generator().manual_seed(step)
    gradient = torch.zeros(ROWS, COLUMNS)
    touched = torch.randint(30, (8,), generator=generator)
    gradient[touched] = torch.randn(8, COLUMNS, generator=generator) * 10.0 ** torch.randint(
        -4, 1, (8, 1), generator=generator
    )
    if step % 100 == 3:
        gradient[30:35] = 1.0
    return gradient


def start() -> torch.nn.Parameter:
    return torch.nn.Parameter(
        torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7)) * 0.01
    )


def trained(optimizer: Any, table: torch.nn.Parameter, *, sparse: bool = False) -> torch.Tensor:
    for step in range(STEPS):
        gradient = gradient_of(step)
        if sparse:
            ids = gradient.any(dim=1).nonzero().T
            table.grad = torch.sparse_coo_tensor(ids, gradient[ids[0]], gradient.shape)
        else:
            table.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step / 100)
        optimizer.step()
    return table.detach()


@pytest.mark.parametrize(
    ("kind", "weight_decay"),
    [
        ("adam", 0.0),
        ("adam", 0.05),
        ("adamw", 0.0),
        ("adamw", 0.3),
    ],
)
def test_table_adam_matches_torch(kind: Any, weight_decay: float) -> None:
    settings: dict[str, Any] = {"betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": weight_decay}
    expected = start()
    found = start()
    reference = (torch.optim.Adam if kind == "adam" else torch.optim.AdamW)(
        [expected], lr=0.01, **settings
    )
    own = TableAdam.from_parameters(SparseOptimizerConfig(kind=kind, **settings), {"table": found})
    torch.testing.assert_close(
        trained(own, found), trained(reference, expected), rtol=1e-6, atol=1e-6
    )
    state = own.state_dict()["state"]["table"]
    for name, value in reference.state[expected].items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-9)
    assert bool((found.detach()[35:] - start().detach()[35:]).any()) == (weight_decay > 0)
    assert torch.equal(state["exp_avg"][30:35] != 0, torch.ones(5, COLUMNS, dtype=torch.bool))


def test_sparse_adam_matches_torch() -> None:
    expected = start()
    found = start()
    # SparseAdam does not scale eps as Adam does. With a tiny eps, they are the same formula.
    reference = torch.optim.SparseAdam([expected], lr=0.01, eps=1e-20)
    own = TableAdam.from_parameters(
        SparseOptimizerConfig(kind="sparse_adam", eps=1e-20), {"table": found}
    )
    torch.testing.assert_close(
        trained(own, found), trained(reference, expected, sparse=True), rtol=1e-6, atol=1e-6
    )
    assert torch.equal(found.detach()[35:], start().detach()[35:])


def parse_step(number: int, *, every_row: bool) -> AdamStep:
    return AdamStep(
        learning_rate=0.1,
        number=number,
        betas=(0.9, 0.999),
        eps=1e-8,
        gradient_scale=0.5,
        l2=0.01 * every_row,
        decay=0.1 * every_row,
        every_row=every_row,
    )


@pytest.mark.parametrize("every_row", [True, False])
def test_adam_operators_match_kernels(every_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_adam, "_VALUES_OF_OPERATORS", 7 * COLUMNS)
    parts = [
        TablePart(start().detach().clone(), lambda: pytest.fail("not asked for")) for _ in range(2)
    ]
    for number in range(1, 20):
        gradients = RowGradients.from_dense(gradient_of(number))
        gradients = RowGradients(
            torch.cat([gradients.ids, torch.tensor([39])]),
            torch.cat([gradients.values, torch.zeros(1, 6)]),
        )
        parts[0].update(parse_step(number, every_row=every_row), gradients)
        parts[1].update_with_torch_ops(parse_step(number, every_row=every_row), gradients)
    for name in ("weights", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(
            getattr(parts[0], name), getattr(parts[1], name), rtol=1e-5, atol=1e-7
        )
    assert bool(parts[0].exp_avg[39].any()) == every_row


def test_moments_decay_without_subnormals_alike_on_any_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = TablePart(torch.ones(3, 4), lambda: pytest.fail("not asked for"))
    part.update(parse_step(1, every_row=True), RowGradients(torch.tensor([1]), torch.ones(1, 4)))
    rule = AdamStep(
        learning_rate=0.1, number=2, betas=(0.9, 0.9), eps=1e-8, l2=0.0, decay=0.0, every_row=True
    )
    for _ in range(1000):
        part.update(rule, RowGradients.empty(4, torch.device("cpu")))
    assert not part.exp_avg.any()
    assert not part.exp_avg_sq.any()
    assert part.weights.isfinite().all()
    monkeypatch.setattr(table_adam, "_VALUES_OF_A_TASK", 5 * COLUMNS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    table = start()
    found = trained(
        TableAdam.from_parameters(SparseOptimizerConfig(kind="adam"), {"table": table}), table
    )
    monkeypatch.undo()
    table = start()
    assert torch.equal(
        found,
        trained(
            TableAdam.from_parameters(SparseOptimizerConfig(kind="adam"), {"table": table}), table
        ),
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 0])
def test_row_gradients_match_autograd(
    threads: int, pooled: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test three features with bags of 0 to 3 ids, two of one table, and one without ids. 0 threads
    means torch operators.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.cat(
        [torch.randint(4, (3 * 10,), generator=generator), torch.zeros(10, dtype=torch.int64)]
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ends = offsets[::10].tolist()  # of features
    wide = 8 if pooled else 4
    tables = [
        torch.randn(*size, generator=generator).requires_grad_()
        for size in ((9, 4), (7, wide), (3, 4))
    ]
    drawn = [
        torch.randint(rows, (count,), generator=generator)
        for rows, count in ((9, ends[1]), (7, ends[3] - ends[1]))
    ]
    ids = torch.cat(drawn)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    outputs = []
    for feature, table in enumerate((tables[0], tables[1], tables[1], tables[2])):
        feature_slice = slice(ends[feature], ends[feature + 1])
        scale = torch.ones(len(ids[feature_slice])) if weights is None else weights[feature_slice]
        if pooled:
            starts = offsets[10 * feature : 10 * feature + 10] - ends[feature]
            outputs.append(
                torch.nn.functional.embedding_bag(
                    ids[feature_slice], table, starts, mode="sum", per_sample_weights=scale
                )
            )
        else:
            outputs.append(table[ids[feature_slice]] * scale.unsqueeze(1))
    output = torch.cat(outputs, dim=1 if pooled else 0)
    gradient = torch.randn(output.shape, generator=generator)
    output.backward(gradient)
    lookups = Lookups(ids, offsets, weights, gradient, 10, pooled)
    features = [
        TableFeatures(0, 1, 0, 4, 9),
        TableFeatures(1, 2, 4, wide, 7),
        TableFeatures(3, 1, 4 + 2 * wide, 4, 3),
    ]
    ranges = [
        (0, ends[1]),
        (ends[1], ends[3]),
        (ends[3], ends[4]),
    ]
    table_results = (
        lookups.table_gradients(features) if threads else lookups.with_torch_ops(features, ranges)
    )
    for table, found in zip(tables, table_results, strict=True):
        assert len(found.ids) == len(found.ids.unique())
        assert found.values.is_contiguous()
        dense = torch.zeros(table.shape).index_add_(0, found.ids, found.values)
        torch.testing.assert_close(dense, table.grad, rtol=1e-5, atol=1e-6)


def test_row_gradients_add_backward_passes() -> None:
    one = RowGradients(torch.tensor([4, 1]), torch.tensor([[1.0], [2.0]]))
    found = RowGradients.sum(
        [one, RowGradients(torch.tensor([1, 3]), torch.tensor([[10.0], [20.0]]))]
    )
    assert dict(zip(found.ids.tolist(), found.values[:, 0].tolist(), strict=True)) == {
        1: 12.0,
        3: 20.0,
        4: 1.0,
    }


# -- Replicated tables match the formulas of the fused kernels, tested below
@pytest.mark.parametrize("eps", [0.25, 0.0])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_data_parallel_optimizer_matches_formula(kind: Any, eps: float) -> None:
    table = torch.nn.Parameter(torch.ones(5, 4))
    optimizer = data_parallel_optimizer(
        SparseOptimizerConfig(kind=kind, learning_rate=1.0, eps=eps), {"table": table}
    )
    (group,) = optimizer.param_groups
    assert group["lr"] == 1.0
    group["lr"] = 0.1  # type: ignore[index]  # as a schedule does
    gradient = torch.zeros(5, 4)
    gradient[1], gradient[3] = torch.tensor([2.0, 4.0, -6.0, 8.0]), torch.full((4,), 0.5)
    expected = torch.ones(5, 4)
    squares = torch.zeros(5, 4)
    for _ in range(3):
        optimizer.zero_grad()
        (table * gradient).sum().backward()
        optimizer.step()
        squares += gradient**2 if kind == "adagrad" else (gradient**2).mean(dim=1, keepdim=True)
        step = gradient if kind == "sgd" else gradient / (squares.sqrt() + eps)
        expected -= 0.1 * step.nan_to_num()  # Of rows that no batch has touched
        torch.testing.assert_close(table.data, expected, rtol=1e-6, atol=1e-6)
    state = optimizer.state_dict()["state"].get("table", {})
    if kind == "sgd":
        assert not state
    else:
        torch.testing.assert_close(
            state,
            {"momentum1": squares if kind == "adagrad" else squares[:, 0]},
            rtol=1e-6,
            atol=1e-6,
        )


@pytest.mark.parametrize("eps", [0.25, 0.0])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_data_parallel_gpu_update_matches_cpu(kind: Any, eps: float) -> None:
    results = []
    for name in ("_update", "_update_all"):
        table = torch.nn.Parameter(torch.linspace(-1, 1, 24).reshape(6, 4))
        optimizer = DataParallelTableOptimizer(
            [table],
            kind=kind,
            learning_rate=0.1,
            eps=eps,
        )
        for step in range(3):
            gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            gradient[[0, 2, 5 - step]] = 0
            with torch.no_grad():
                getattr(optimizer, name)(table, gradient, learning_rate=0.1, eps=eps)
            assert len(optimizer.state[table]) == (kind != "sgd")
        results.append({"table": table, **optimizer.state[table]})
    assert same(*results)


# -- The schedule's values, training of all optimizers, and fused kernels that match their formulas
# -- Schedule
def test_schedule_matches_example() -> None:
    for fields, base, rates in (
        ({}, 0.3, [0.3] * 3),
        (
            {"decay_steps": 2},
            1.0,
            [0.25, 1e-7, 1e-7, 1e-7],
        ),
        (
            {"warmup_steps": 2, "decay_start_step": 2, "decay_steps": 2},
            1.0,
            [0.5, 1.0, 0.25, 1e-7, 1e-7],
        ),
        ({"decay_steps": 2}, 0.0, [0.0] * 6),  # The floor never raises it
        ({"decay_steps": 2}, 1e-9, [1e-9] * 6),
        (
            {"warmup_steps": 10},
            1e-8,
            [pytest.approx(1e-9)],
        ),
    ):
        assert [
            optim.LearningRateSchedule(**fields).learning_rate(step, base=base)
            for step in range(len(rates))
        ] == rates


def test_constant_phase_has_exact_base_rate() -> None:
    schedule = optim.LearningRateSchedule(
        warmup_steps=2750, decay_start_step=49315, decay_steps=27772
    )
    assert {schedule.learning_rate(step, base=0.1) for step in range(2749, 49315)} == {0.1}
    rates = [schedule.learning_rate(step, base=0.1) for step in range(80000)]
    assert (rates[:2750], rates[49315:]) == (
        sorted(set(rates[:2750])),
        sorted(rates[49315:], reverse=True),
    )
    assert rates[-1] == 1e-7


@pytest.mark.parametrize(
    ("warmup", "start", "steps"),
    [
        (4, 6, 4),
        (4, 4, 3),
        (1, 10, 7),
        (0, 5, 20),
    ],
)
def test_warm_up_and_decay_match_mlperf(warmup: int, start: int, steps: int) -> None:
    """Compare with the reference, which counts steps from 1: 1 - (W - n) / W, then ((N - (n - S)) /
    N)^2.
    """
    schedule = optim.LearningRateSchedule(
        warmup_steps=warmup, decay_start_step=start, decay_steps=steps
    )
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
    assert schedule.for_steps(100) == optim.LearningRateSchedule(
        warmup_steps=2, decay_start_step=76, decay_steps=25
    )
    assert schedule.for_steps(100).factor(99) > 0
    assert schedule.for_steps(2).decay_start_step + schedule.for_steps(2).decay_steps >= 2
    assert optim.LearningRateSchedule(warmup_steps=2).for_steps(100) == optim.LearningRateSchedule(
        warmup_steps=2
    )


# -- Configurations
@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (optim.SparseOptimizerConfig, {"kind": "lamb"}, "has the wrong type"),
        (
            optim.SparseOptimizerConfig,
            {"kind": "sparse_adam", "weight_decay": 0.1},
            "Choose kind adam or adamw",
        ),
        (
            optim.SparseOptimizerConfig,
            {"kind": "rowwise_adagrad", "weight_decay": 0.1},
            r"model\.embedding_penalty",
        ),
        (
            optim.SparseOptimizerConfig,
            {"kind": "adam", "eps": 0.0},
            "eps: must be above 0 for adam",
        ),
        (optim.SparseOptimizerConfig, {"kind": "adam", "betas": (1.0, 0.9)}, "betas"),
        (
            optim.SparseOptimizerConfig,
            {"learning_rate": -0.1},
            "learning_rate: must be at least 0 .*, got -0.1",
        ),
        (optim.DenseOptimizerConfig, {"eps": float("nan")}, "eps: must be .*, got nan"),
        (optim.DenseOptimizerConfig, {"betas": (0.9, 1.0)}, "betas"),
        (
            optim.DenseOptimizerConfig,
            {"kind": "lars", "momentum": 0.9, "nesterov": True},
            "nesterov is for sgd with momentum",
        ),
        (
            optim.DenseOptimizerConfig,
            {"kind": "lamb", "momentum": 0.9},
            "momentum: must be 0 except for sgd and lars",
        ),
        (optim.DenseOptimizerConfig, {"max_gradient_norm": 0.0}, "must be above 0"),
        (
            optim.LearningRateSchedule,
            {"warmup_steps": 5, "decay_start_step": 4, "decay_steps": 1},
            "decay_start_step: must be at least warmup_steps 5, got 4",
        ),
        (
            optim.LearningRateSchedule,
            {"warmup_steps": -1},
            "warmup_steps: must be at least 0, got -1",
        ),
        (optim.LearningRateSchedule, {"decay_fraction": 1.5}, "at least 0 and at most 1"),
        (optim.LearningRateSchedule, {"decay_fraction": 0.5, "decay_steps": 3}, "set only one"),
        (optim.LearningRateSchedule, {"decay_steps": 0.5}, "has the wrong type"),
    ],
)
def test_optimizer_configs_reject_invalid_settings(
    config: type, fields: dict[str, Any], message: str
) -> None:
    rejects(message, config, **fields)


# -- Dense
@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "adamw"])
def test_fused_optimizer_matches_plain_rule(kind: Any) -> None:
    config = optim.DenseOptimizerConfig(
        kind=kind, learning_rate=0.1, eps=1e-3, weight_decay=0.2, betas=(0.5, 0.75)
    )
    ours, plain = (Parameter(torch.tensor([3.0, -2.0])) for _ in range(2))
    optimizer = config.build([ours])
    assert optimizer.param_groups[0]["fused"]
    # torch's default
    assert not config.build([Parameter(torch.zeros(2, device="meta"))]).param_groups[0]["fused"]
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "foreach": False}
    settings |= {} if kind == "sgd" else {"eps": 1e-3}
    settings |= {"betas": (0.5, 0.75)} if kind.startswith("adam") else {}
    names = {
        "sgd": "SGD",
        "adagrad": "Adagrad",
        "adam": "Adam",
        "adamw": "AdamW",
    }
    reference = getattr(torch.optim, names[kind])([plain], **settings)
    for _ in range(5):
        for parameter, rule in ((ours, optimizer), (plain, reference)):
            rule.zero_grad()
            parameter.pow(4).sum().backward()
            rule.step()
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_lamb_matches_paper() -> None:
    start = torch.tensor([3.0, -2.0])
    beta1 = 0.8
    beta2 = 0.9
    rate = 0.1
    decay = 0.2
    eps = 1e-3
    settings: dict[str, Any] = {
        "learning_rate": rate,
        "weight_decay": decay,
        "betas": (beta1, beta2),
        "eps": eps,
    }
    parameter = Parameter(start.clone())
    zero = Parameter(torch.zeros(2))
    optimizer = optim.DenseOptimizerConfig(kind="lamb", **settings).build([parameter, zero])
    x = start.double().numpy()
    m = 0.0
    v = 0.0
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
    start = torch.tensor([3.0, -2.0])
    rate = 0.5
    decay = 0.2
    momentum = 0.9
    trust = 0.01
    parameter = Parameter(start.clone())
    zero = Parameter(torch.zeros(2))
    optimizer = optim.DenseOptimizerConfig(
        kind="lars",
        learning_rate=rate,
        weight_decay=decay,
        momentum=momentum,
        trust_coefficient=trust,
    ).build([parameter, zero])
    x = start.double().numpy()
    v = 0.0
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


@pytest.mark.parametrize(
    ("kind", "names"), [("lamb", {"exp_avg", "exp_avg_sq", "step"}), ("lars", {"momentum_buffer"})]
)
def test_trust_ratio_state_size_matches_config(kind: Any, names: set[str]) -> None:
    parameter = Parameter(torch.ones(3, 4))
    config = optim.DenseOptimizerConfig(kind=kind)
    named = config.build_named({"weight": parameter})
    parameter.grad = torch.ones(3, 4)
    named.step()
    state = named.state_dict()["state"]["weight"]
    assert state.keys() == names
    assert config.state_bytes(12) == sum(
        value.nbytes for name, value in state.items() if name != "step"
    )


@pytest.mark.parametrize(("limit", "size"), [(1.0, 1.0), (None, 5.0), (7.0, 5.0)])
def test_clipping_bounds_joint_norm(limit: float | None, size: float) -> None:
    parameters = {"a": Parameter(torch.zeros(1)), "b": Parameter(torch.zeros(1))}
    optimizer = optim.DenseOptimizerConfig(
        kind="sgd", learning_rate=1.0, max_gradient_norm=limit
    ).build_keyed(parameters)
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
    schedule = optim.LearningRateSchedule(warmup_steps=4)
    optim.set_learning_rates(
        optimizer,
        base_rates=base_rates,
        schedule=schedule,
        step=0,
    )
    assert optim.learning_rates(optimizer) == [0.5, 1.0]
    (parameters["a"] + parameters["b"]).backward()
    optimizer.step()
    assert [parameter.item() for parameter in parameters.values()] == [-0.5, -1.0]
    fails_with(
        ValueError,
        "zip",
        optim.set_learning_rates,
        optimizer,
        base_rates=[1.0],
        schedule=schedule,
        step=0,
    )


# -- Sparse: through TorchRec into the fused CPU kernel
def _sharded(config: optim.SparseOptimizerConfig) -> tuple[Any, Any]:
    """Return a table of 5 rows by 4, all 1, table-wise on one rank, and its fused kernel."""
    table = EmbeddingBagConfig(
        name="t",
        embedding_dim=4,
        num_embeddings=5,
        feature_names=["f"],
    )
    collection = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    optimizer_class, kwargs = config.build()
    _apply_optimizer_in_backward(optimizer_class, collection.parameters(), kwargs)
    sharder = EmbeddingBagCollectionSharder()
    site = {"local_size": 1, "world_size": 1, "device_type": "cpu"}
    by_table = {"t": table_wise(rank=0, compute_kernel="fused")}
    plan = ShardingPlan(
        plan={"": construct_module_sharding_plan(collection, by_table, sharder=sharder, **site)}
    )
    model = DistributedModelParallel(
        collection, device=torch.device("cpu"), sharders=[sharder], plan=plan
    )
    kernel = model.module._lookups[0]._emb_modules[0].emb_module
    _weights(kernel).fill_(1.0)
    return model, kernel


def _weights(kernel: Any) -> Any:
    return kernel.split_embedding_weights()[0]


_GRADIENTS = [[1.0, 2.0, 3.0, 4.0], [0.5, 0.5, 0.5, 0.5]]  # Of the bags [1, 1] and [3]


def _step(model: Any) -> None:
    model.fused_optimizer.zero_grad()
    bags = KeyedJaggedTensor(
        keys=["f"], values=torch.tensor([1, 1, 3]), lengths=torch.tensor([2, 1])
    )
    (model(bags).wait().values() * torch.tensor(_GRADIENTS)).sum().backward()
    model.fused_optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_fused_kernel_matches_formula(single_rank: None, kind: Any) -> None:
    learning_rate = 0.1
    eps = 0.25
    model, kernel = _sharded(
        optim.SparseOptimizerConfig(kind=kind, learning_rate=learning_rate, eps=eps)
    )
    gradient = torch.zeros(5, 4)
    # The id is twice in the bag: summed first, then applied once
    gradient[1] = 2 * torch.tensor(_GRADIENTS[0])
    gradient[3] = torch.tensor(_GRADIENTS[1])
    expected = torch.ones(5, 4)
    squares = torch.zeros(5, 4)
    for _ in range(3):
        _step(model)
        squares += gradient**2 if kind == "adagrad" else (gradient**2).mean(dim=1, keepdim=True)
        expected -= learning_rate * (
            gradient if kind == "sgd" else gradient / (squares.sqrt() + eps)
        )
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
        optim.set_learning_rates(
            model.fused_optimizer, base_rates=base_rates, schedule=schedule, step=step
        )
        _step(model)
        moved = before[3] - _weights(kernel)[3]
        torch.testing.assert_close(moved, torch.full((4,), 0.5 * rate), rtol=1e-6, atol=1e-6)


def test_sparse_optimizer_build_returns_new_dict() -> None:
    config = optim.SparseOptimizerConfig()
    config.build()[1].clear()  # TorchRec changes it as well
    assert config.build()[1] == {"lr": 0.01, "eps": 1e-8}
