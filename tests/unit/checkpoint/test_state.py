"""Row-wise optimizer state under other column splits. integration/test_resharding.py tests all plans."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from builders.faults import rejects
from ranks.checkpoint import same

from rayrec.checkpoint import Checkpoint, folder_of, save
from rayrec.checkpoint.state import Targets, all_tensors, make_state, model_tensors, optimizer_tensors, restore_all, restore_model
from rayrec.optim.config import DenseOptimizerConfig, SparseOptimizerConfig
from rayrec.optim.optimizer import data_parallel_optimizer

NAME = "optimizer.weight.momentum1"


def table(kind: Any = "rowwise_adagrad") -> tuple[torch.nn.Module, Any]:
    """Weights of 3 rows by 8 columns."""
    model = torch.nn.Linear(8, 3, bias=False)
    return model, data_parallel_optimizer(SparseOptimizerConfig(kind=kind), dict(model.named_parameters()))


def test_state_names_have_parameter_and_state() -> None:
    model, optimizer = table()
    shapes = {name: tuple(tensor.shape) for name, tensor in all_tensors(model, optimizer).items()}
    assert shapes == {"model.weight": (3, 8), NAME: (3,)}
    assert set(optimizer_tensors(table("sgd")[1])) == set()


def test_equal_columns_are_restored_directly() -> None:
    model, optimizer = table()
    targets = Targets(model, optimizer, stored=["model.weight", NAME, f"{NAME}.columns_0_4"])
    assert targets.tensors.keys() == {"model.weight", NAME}
    targets.tensors[NAME].fill_(5.0)
    targets.loaded()
    assert torch.equal(optimizer_tensors(optimizer)[NAME], torch.full((3,), 5.0))


def test_parts_are_weighted_by_width() -> None:
    model, optimizer = table()
    parts = [f"{NAME}.columns_0_6", f"{NAME}.columns_6_8"]
    targets = Targets(model, optimizer, stored=["model.weight", *parts, "optimizer.weights.momentum1.columns_0_8"])
    assert targets.tensors.keys() == {"model.weight", *parts}
    targets.tensors[parts[0]].copy_(torch.tensor([1.0, 0.1, 4.0]))
    targets.tensors[parts[1]].copy_(torch.tensor([5.0, 0.1, 0.0]))
    targets.loaded()
    assert torch.equal(optimizer_tensors(optimizer)[NAME], torch.tensor([2.0, 0.1, 3.0]))


def test_missing_state_is_requested_by_name() -> None:
    model, optimizer = table()
    for stored in (["model.weight"], [f"{NAME}.columns_0_4"], [f"{NAME}.columns_0_2", f"{NAME}.columns_4_8"]):
        assert Targets(model, optimizer, stored=stored).tensors.keys() == {"model.weight", NAME}


def test_restore_rejects_another_optimizer(tmp_path: Path) -> None:
    """Restoring only the rest would drop it silently."""
    model = torch.nn.Linear(8, 3)
    adam = DenseOptimizerConfig(kind="adam").build_keyed(dict(model.named_parameters()))
    make_state(adam)
    saved = Checkpoint(folder_of(str(tmp_path), 1))
    save(saved.path, all_tensors(model, adam), state={})
    restore_all(saved, model, adam)
    sgd = DenseOptimizerConfig(kind="sgd").build_keyed(dict(model.named_parameters()))
    rejects(r"step_00000001: contains optimizer\.bias\.exp_avg, which the optimizer of this run", restore_all, saved, model, sgd)
    smaller = torch.nn.Linear(8, 3, bias=False)
    save(saved.path, model_tensors(model), state={})
    sgd = DenseOptimizerConfig(kind="sgd").build_keyed(dict(smaller.named_parameters()))
    rejects(r"step_00000001: contains model\.bias, which the model of this run", restore_all, saved, smaller, sgd)


def test_make_state_runs_once() -> None:
    model = torch.nn.Linear(8, 3)
    optimizer = DenseOptimizerConfig(kind="adam").build_keyed(dict(model.named_parameters()))
    assert not optimizer_tensors(optimizer)
    make_state(optimizer)
    made = optimizer_tensors(optimizer)
    assert {name.rpartition(".")[2] for name in made} == {"exp_avg", "exp_avg_sq", "step"}
    assert all(parameter.grad is None for parameter in model.parameters())
    before = {name: tensor.clone() for name, tensor in made.items()}
    make_state(optimizer)
    assert same(before, optimizer_tensors(optimizer))


def test_restore_clears_table_caches(tmp_path: Path) -> None:
    purged = []

    model, optimizer = table()
    save(str(tmp_path / "run"), all_tensors(model, optimizer), state={})
    lookup = SimpleNamespace(purge=lambda: purged.append(model.weight[0, 0].item()))
    model._lookups = [lookup, object()]  # type: ignore[assignment]
    stored = model.weight[0, 0].item()
    for restore in (lambda at: restore_all(at, model, optimizer), lambda at: restore_model(at, model)):
        with torch.no_grad():
            model.weight.fill_(7.0)
        restore(Checkpoint(str(tmp_path / "run")))
    assert purged == [stored, stored]
