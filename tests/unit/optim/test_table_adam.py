"""Table Adam against torch's, over many steps with rows that no batch touches for long."""

from typing import Any

import pytest
import torch

from rayrec.optim import table_adam
from rayrec.optim.config import SparseOptimizerConfig
from rayrec.optim.optimizer import DataParallelTableOptimizer, data_parallel_optimizer
from rayrec.optim.row_gradients import Lookups, RowGradients, TableFeatures
from rayrec.optim.table_adam import AdamStep, TableAdam, TablePart

ROWS, COLUMNS, STEPS = 40, 6, 200


def gradient_of(step: int) -> torch.Tensor:
    """Return a gradient of some rows. Rows 30 to 34 are touched every 100 steps, 35 to 39 never."""
    generator = torch.Generator().manual_seed(step)
    gradient = torch.zeros(ROWS, COLUMNS)
    touched = torch.randint(30, (8,), generator=generator)
    gradient[touched] = torch.randn(8, COLUMNS, generator=generator) * 10.0 ** torch.randint(-4, 1, (8, 1), generator=generator)
    if step % 100 == 3:
        gradient[30:35] = 1.0
    return gradient


def start() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7)) * 0.01)


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


@pytest.mark.parametrize(("kind", "weight_decay"), [("adam", 0.0), ("adam", 0.05), ("adamw", 0.0), ("adamw", 0.3)])
def test_table_adam_matches_torch(kind: Any, weight_decay: float) -> None:
    settings: dict[str, Any] = {"betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": weight_decay}
    expected, found = start(), start()
    reference = (torch.optim.Adam if kind == "adam" else torch.optim.AdamW)([expected], lr=0.01, **settings)
    own = TableAdam.from_parameters(SparseOptimizerConfig(kind=kind, **settings), {"table": found})
    torch.testing.assert_close(trained(own, found), trained(reference, expected), rtol=1e-6, atol=1e-6)
    state = own.state_dict()["state"]["table"]
    for name, value in reference.state[expected].items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-9)
    assert bool((found.detach()[35:] - start().detach()[35:]).any()) == (weight_decay > 0)
    assert torch.equal(state["exp_avg"][30:35] != 0, torch.ones(5, COLUMNS, dtype=torch.bool))


def test_sparse_adam_matches_torch() -> None:
    expected, found = start(), start()
    # SparseAdam does not scale eps as Adam does. With a tiny eps, they are the same formula.
    reference = torch.optim.SparseAdam([expected], lr=0.01, eps=1e-20)
    own = TableAdam.from_parameters(SparseOptimizerConfig(kind="sparse_adam", eps=1e-20), {"table": found})
    torch.testing.assert_close(trained(own, found), trained(reference, expected, sparse=True), rtol=1e-6, atol=1e-6)
    assert torch.equal(found.detach()[35:], start().detach()[35:])


def step_of(number: int, *, every_row: bool) -> AdamStep:
    of_rows = {"l2": 0.01 * every_row, "decay": 0.1 * every_row, "every_row": every_row}
    return AdamStep(learning_rate=0.1, number=number, betas=(0.9, 0.999), eps=1e-8, gradient_scale=0.5, **of_rows)


@pytest.mark.parametrize("every_row", [True, False])
def test_adam_operators_match_kernels(every_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_adam, "_VALUES_OF_OPERATORS", 7 * COLUMNS)
    parts = [TablePart(start().detach().clone(), lambda: pytest.fail("not asked for")) for _ in range(2)]
    for number in range(1, 20):
        gradients = RowGradients.from_dense(gradient_of(number))
        gradients = RowGradients(torch.cat([gradients.ids, torch.tensor([39])]), torch.cat([gradients.values, torch.zeros(1, 6)]))
        parts[0].update(step_of(number, every_row=every_row), gradients)
        parts[1].update_with_torch_ops(step_of(number, every_row=every_row), gradients)
    for name in ("weights", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(getattr(parts[0], name), getattr(parts[1], name), rtol=1e-5, atol=1e-7)
    assert bool(parts[0].exp_avg[39].any()) == every_row


def test_moments_decay_to_zero_without_subnormals() -> None:
    part = TablePart(torch.ones(3, 4), lambda: pytest.fail("not asked for"))
    part.update(step_of(1, every_row=True), RowGradients(torch.tensor([1]), torch.ones(1, 4)))
    rule = AdamStep(learning_rate=0.1, number=2, betas=(0.9, 0.9), eps=1e-8, l2=0.0, decay=0.0, every_row=True)
    for _ in range(1000):
        part.update(rule, RowGradients.nothing(4, torch.device("cpu")))
    assert not part.exp_avg.any()
    assert not part.exp_avg_sq.any()
    assert part.weights.isfinite().all()


def test_table_adam_is_bit_identical_for_any_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_adam, "_VALUES_OF_A_TASK", 5 * COLUMNS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    table = start()
    found = trained(TableAdam.from_parameters(SparseOptimizerConfig(kind="adam"), {"table": table}), table)
    monkeypatch.undo()
    table = start()
    assert torch.equal(found, trained(TableAdam.from_parameters(SparseOptimizerConfig(kind="adam"), {"table": table}), table))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 0])
def test_row_gradients_match_autograd(threads: int, pooled: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test three features with bags of 0 to 3 ids, two of which share a table. 0 threads means torch operators."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(4, (3 * 10,), generator=generator).cumsum(0)])
    ids = torch.randint(9, (int(offsets[-1]),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    tables = [torch.randn(9, 4, generator=generator).requires_grad_() for _ in range(2)]
    outputs = []
    for feature, table in enumerate((tables[0], tables[1], tables[1])):
        of_feature = offsets[10 * feature : 10 * feature + 11]
        mine = slice(int(of_feature[0]), int(of_feature[-1]))
        scale = torch.ones(len(ids[mine])) if weights is None else weights[mine]
        if pooled:
            starts = of_feature[:-1] - of_feature[0]
            outputs.append(torch.nn.functional.embedding_bag(ids[mine], table, starts, mode="sum", per_sample_weights=scale))
        else:
            outputs.append(table[ids[mine]] * scale.unsqueeze(1))
    output = torch.cat(outputs, dim=1 if pooled else 0)
    gradient = torch.randn(output.shape, generator=generator)
    output.backward(gradient)
    lookups = Lookups(ids, offsets, weights, gradient, 10, pooled)
    features = [TableFeatures(0, 1, 0, 4, 9), TableFeatures(1, 2, 4, 4, 9)]
    ranges = [(int(offsets[0]), int(offsets[10])), (int(offsets[10]), int(offsets[30]))]
    for number, found in enumerate(lookups.of_tables(features) if threads else lookups.with_torch_ops(features, ranges)):
        assert len(found.ids) == len(found.ids.unique())
        dense = torch.zeros(9, 4).index_add_(0, found.ids, found.values)
        expected = tables[number].grad
        assert expected is not None
        torch.testing.assert_close(dense, expected, rtol=1e-5, atol=1e-6)


def test_row_gradients_separate_tables_of_unequal_width() -> None:
    generator = torch.Generator().manual_seed(2)
    bags, features = 6, [TableFeatures(0, 1, 0, 4, 5), TableFeatures(1, 1, 4, 8, 7), TableFeatures(2, 1, 12, 4, 3)]
    features.append(TableFeatures(3, 1, 16, 4, 6))
    lengths = torch.tensor([2] * bags + [1] * bags + [0] * bags + [1] * bags)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = torch.tensor([5] * 2 * bags + [7] * bags + [6] * bags)
    ids = (torch.rand(len(rows), generator=generator) * rows).long()
    lookups = Lookups(ids, offsets, None, torch.randn(bags, 20, generator=generator), bags, True)
    expected, found = lookups.of_tables(features), lookups.with_torch_ops(features, [(0, 12), (12, 18), (18, 18), (18, 24)])
    for table, (kernel, operators) in zip(features, zip(expected, found, strict=True), strict=True):
        dense = [torch.zeros(table.rows, table.columns).index_add_(0, one.ids, one.values) for one in (kernel, operators)]
        torch.testing.assert_close(dense[1], dense[0])
        assert operators.values.is_contiguous()
    assert [len(one.ids) for one in found] == [len(one.ids) for one in expected]


def test_row_gradients_add_several_backward_passes() -> None:
    one = RowGradients(torch.tensor([4, 1]), torch.tensor([[1.0], [2.0]]))
    found = RowGradients.sum([one, RowGradients(torch.tensor([1, 3]), torch.tensor([[10.0], [20.0]]))])
    assert dict(zip(found.ids.tolist(), found.values[:, 0].tolist(), strict=True)) == {1: 12.0, 3: 20.0, 4: 1.0}


# Replicated tables match the formulas of the fused kernels in test_optim.py -------------------------------------------
@pytest.mark.parametrize("eps", [0.25, 0.0])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_data_parallel_optimizer_matches_formula(kind: Any, eps: float) -> None:
    table = torch.nn.Parameter(torch.ones(5, 4))
    optimizer = data_parallel_optimizer(SparseOptimizerConfig(kind=kind, learning_rate=0.1, eps=eps), {"table": table})
    gradient = torch.zeros(5, 4)
    gradient[1], gradient[3] = torch.tensor([2.0, 4.0, -6.0, 8.0]), torch.full((4,), 0.5)
    expected, squares = torch.ones(5, 4), torch.zeros(5, 4)
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
        torch.testing.assert_close(state, {"momentum1": squares if kind == "adagrad" else squares[:, 0]}, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("eps", [0.25, 0.0])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_data_parallel_gpu_update_matches_cpu(kind: Any, eps: float) -> None:
    tables = [torch.nn.Parameter(torch.linspace(-1, 1, 24).reshape(6, 4)) for _ in range(2)]
    optimizers = [DataParallelTableOptimizer([table], kind=kind, learning_rate=0.1, eps=eps) for table in tables]
    for step in range(3):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        gradient[[0, 2, 5 - step]] = 0
        for optimizer, table, update in zip(optimizers, tables, (optimizers[0]._update, optimizers[1]._update_all), strict=True):
            with torch.no_grad():
                update(table, gradient.clone(), learning_rate=0.1, eps=eps)
            assert len(optimizer.state[table]) == (kind != "sgd")
    assert torch.equal(*tables)
    for states in zip(
        *(optimizer.state[table].values() for optimizer, table in zip(optimizers, tables, strict=True)), strict=True
    ):
        assert torch.equal(*states)


def test_table_optimizer_uses_group_learning_rate() -> None:
    table = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = data_parallel_optimizer(SparseOptimizerConfig(kind="sgd", learning_rate=1.0), {"table": table})
    (group,) = optimizer.param_groups
    assert group["lr"] == 1.0
    group["lr"] = 0.25  # type: ignore[index]
    table.sum().backward()
    optimizer.step()
    assert torch.equal(table.data, torch.full((2, 2), 0.75))
