"""Tests of Adam on tables: matches torch.optim.Adam over all weights under every plan, and
resumes.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.faults import rejects
from ranks import click
from ranks.checkpoint import same

from rayrec import checkpoint
from rayrec.checkpoint import Checkpoint, full_tensors
from rayrec.checkpoint.state import all_tensors, restore_all
from rayrec.models.base import ModelInputs, TableInit
from rayrec.models.sharded_model import build_click_model
from rayrec.optim.config import DenseOptimizerConfig, SparseOptimizerConfig
from rayrec.sharding.planner import ShardingConfig
from rayrec.workloads.base import WorkerSetup

TABLES = click.SHARED
STEPS = 4
SPARSE: dict[str, Any] = {"learning_rate": 0.01, "eps": 1e-3}
DENSE = DenseOptimizerConfig(kind="adam", learning_rate=0.01, eps=1e-3)
ADAM = SparseOptimizerConfig(kind="adam")
CLIPPED = DenseOptimizerConfig(max_gradient_norm=1.0)


@pytest.fixture(autouse=True)
def _quiet(single_rank: None) -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def set_up(plan: Any, *, max_gradient_norm: float | None = None, **sparse: Any) -> WorkerSetup:
    optimizers = {
        "sparse_optimizer": SparseOptimizerConfig(**SPARSE, **sparse),
        "dense_optimizer": DENSE,
    }
    sharding = ShardingConfig(sharding_types=(plan,), min_column_width=4)
    config = click.config(
        TABLES, 1, **optimizers, max_gradient_norm=max_gradient_norm, sharding=sharding
    )
    return config.workload.set_up(click.context(config, 0, 1), click.prepared(TABLES))


def check_against_torch(
    setup: WorkerSetup, folder: Path, *rule: Any, **clipping: Any
) -> dict[str, torch.Tensor]:
    """Train, compare losses and weights with torch's optimizer, and return the weights."""
    losses = train(setup, range(STEPS))
    found = saved(setup, folder)
    expected_losses, expected = by_torch(*rule, **clipping)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    found = {name: found[name] for name in expected}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return found


def train(setup: WorkerSetup, steps: range) -> list[float]:
    batches = iter([click.batch(TABLES, step, 0, 1) for step in steps])
    losses = []
    for step in steps:
        setup.begin_step(step, STEPS)
        losses.append(setup.pipeline.progress(batches).loss.item())
    return losses


def saved(setup: WorkerSetup, folder: Path) -> dict[str, torch.Tensor]:
    checkpoint.save(str(folder), all_tensors(setup.model, setup.optimizer), state={})
    return dict(full_tensors(Checkpoint(str(folder))))


def by_torch(
    kind: str, weight_decay: float, *, max_gradient_norm: float | None = None
) -> tuple[list[float], dict[str, Any]]:
    """Train the model with plain tables and torch's optimizer. Returns losses and weights."""
    workload = click.workload(TABLES)
    model = build_click_model(
        workload.model,
        ModelInputs.from_schema(workload.schema),
        num_embeddings=TABLES,
        embedding_device="cpu",
    )
    rule = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    tables = list(model.embeddings.parameters())
    others = [
        weight for name, weight in model.named_parameters() if not name.startswith("embeddings.")
    ]
    decay = weight_decay if max_gradient_norm is None else 0.0
    optimizer = rule(
        [{"params": tables, "weight_decay": decay}, {"params": others}],
        lr=0.01,
        eps=1e-3,
        weight_decay=0.0,
    )
    losses = []
    for step in range(STEPS):
        loss, _ = model(click.batch(TABLES, step, 0, 1))
        optimizer.zero_grad()
        loss.backward()
        if max_gradient_norm is not None:  # FuxiCTR's way: the penalty is part of the loss
            for weight in tables:
                weight.grad += weight_decay * weight.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_gradient_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "weight_decay", "plan"),
    [
        ("adam", 0.0, "table_wise"),
        ("adam", 0.3, "column_wise"),
        ("adam", 0.3, "data_parallel"),
        ("adamw", 0.3, "table_wise"),
    ],
)
def test_dense_adam_matches_under_every_plan(
    kind: Any, weight_decay: float, plan: str, tmp_path: Path
) -> None:
    setup = set_up(plan, kind=kind, weight_decay=weight_decay)
    assert {row["sharding_type"] for row in setup.described["tables"]} == {plan}
    check_against_torch(setup, tmp_path / "end", kind, weight_decay)


@pytest.mark.parametrize(
    ("max_gradient_norm", "plan"),
    [
        (0.05, "table_wise"),
        (0.05, "data_parallel"),
        (100.0, "table_wise"),
    ],
)
def test_joint_clipping_covers_all_gradients(
    max_gradient_norm: float, plan: str, tmp_path: Path
) -> None:
    setup = set_up(
        plan,
        kind="adam",
        weight_decay=0.3,
        max_gradient_norm=max_gradient_norm,
    )
    found = check_against_torch(
        setup, tmp_path / "end", "adam", 0.3, max_gradient_norm=max_gradient_norm
    )
    whole = by_torch("adam", 0.3)[1]
    assert all(torch.allclose(whole[name], found[name]) for name in whole) == (
        max_gradient_norm == 100.0
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"max_gradient_norm": 1.0},
            "sgd updates tables during the backward pass",
            id="max_gradient_norm-1.0",
        ),
        pytest.param(
            {"max_gradient_norm": 1.0, "sparse_optimizer": ADAM, "dense_optimizer": CLIPPED},
            "Set one.",
            id="max_gradient_norm-1.0-Set-one",
        ),
    ],
)
def test_joint_clipping_rejects_unsupported_settings(
    settings: dict[str, Any], message: str
) -> None:
    config = click.config(TABLES, 1, **settings).replace(train_data={"path": "log"})
    rejects(message, config.workload.check, config)


def test_sparse_adam_skips_other_rows_and_zero_norm_is_rejected(tmp_path: Path) -> None:
    rejects(
        r"max_gradient_norm: must be above 0, got 0\.0",
        click.config,
        TABLES,
        1,
        max_gradient_norm=0.0,
    )
    ends = []
    for plan in ("table_wise", "column_wise", "data_parallel"):
        setup = set_up(plan, kind="sparse_adam")
        start = saved(setup, tmp_path / f"{plan}_start")
        train(setup, range(STEPS))
        ends.append(saved(setup, tmp_path / f"{plan}_end"))
        table = "model.embeddings.embedding_bags.cat_1.weight"
        moved = (ends[-1][table] != start[table]).any(dim=1)
        touched = torch.zeros(900, dtype=torch.bool)
        for step in range(STEPS):
            touched[click.batch(TABLES, step, 0, 1).sparse_features["cat_1"].values().long()] = True
        assert torch.equal(moved, touched)
    for other in ends[1:]:
        torch.testing.assert_close(other, ends[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "sparse_adam"])
def test_resumed_run_matches_uninterrupted(kind: Any, tmp_path: Path) -> None:
    whole = set_up("table_wise", kind=kind)
    losses = train(whole, range(STEPS))
    expected = saved(whole, tmp_path / "whole")
    first = set_up("table_wise", kind=kind)
    train(first, range(2))
    half = saved(first, tmp_path / "half")
    for plan in ("data_parallel", "table_wise"):  # the last is the plan that it began with
        resumed = set_up(plan, kind=kind)
        restore_all(Checkpoint(str(tmp_path / "half")), resumed.model, resumed.optimizer)
        assert same(saved(resumed, tmp_path / f"{plan}_half"), half)
        assert train(resumed, range(2, STEPS)) == pytest.approx(losses[2:], rel=1e-6)
    assert same(saved(resumed, tmp_path / "resumed"), expected)
    states = {
        name.rpartition(".")[2]
        for name in half
        if "cat_1.weight" in name and name.startswith("optimizer.")
    }
    assert states == {"exp_avg", "exp_avg_sq", "step"}


def test_initial_values_match_and_evaluation_has_no_gradients(tmp_path: Path) -> None:
    starts = []
    for plan in ("table_wise", "column_wise", "data_parallel"):
        sharding = ShardingConfig(sharding_types=(plan,), min_column_width=4)
        config = click.config(TABLES, 1, table_start=TableInit(kind="normal"), sharding=sharding)
        setup = config.workload.set_up(click.context(config, 0, 1), click.prepared(TABLES))
        starts.append(saved(setup, tmp_path / plan)["model.embeddings.embedding_bags.cat_1.weight"])
    assert starts[0].std().item() == pytest.approx(1e-4, rel=0.1)
    assert torch.equal(starts[0], starts[1])
    assert torch.equal(starts[0], starts[2])
    setup = set_up("table_wise", kind="adam")
    with torch.no_grad():
        setup.model(click.batch(TABLES, 0, 0, 1))
    before = saved(setup, tmp_path / "before")
    setup.optimizer.step()  # with zero gradients and no moments, it moves nothing
    after = saved(setup, tmp_path / "after")
    assert all(
        torch.equal(before[name], after[name])
        for name in before
        if name.startswith("model.") and "bags" in name
    )
