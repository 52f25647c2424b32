"""One run under many plans and numbers of workers: every weight and optimizer state comes over to the last bit."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec.checkpoint import Checkpoint, full_tensors

pytestmark = [pytest.mark.slow, pytest.mark.extended]

Saved = dict[str, dict[str, torch.Tensor]]
"""Checkpoints, whole, by name."""
WORLD = 3
"""Processes; a stage with fewer ranks leaves the last ones idle."""

WORKER = r"""
import json, logging, sys
logging.disable(logging.WARNING)
from types import SimpleNamespace
import torch
from torch import distributed
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from rayrec import checkpoint
from rayrec.batch import DENSE, Batch
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.embeddings import feature_names, initialize_shards
from rayrec.optim.table_adam import disable_fused_update
from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule, SparseOptimizerConfig
from rayrec.optim.config import learning_rates, set_learning_rates
from rayrec.sharding.planner import ShardingConfig, Site, embedding_sharders, plan_sharding, placements
from rayrec.checkpoint.state import all_tensors, restore_all
from rayrec.workloads.recsys.worker import Unwrapped, make_optimizer, make_pipeline
from builders.click_models import whole_model

rank, folder, stages = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
torch.set_num_threads(1)
TABLES, ROWS = [40, 7, 1, 90], 24


def batch(step, world_size):
    # The same global batch for any number of ranks; the last one has none of the first step's rows.
    generator = torch.Generator().manual_seed(step)
    ids = [torch.randint(rows, (ROWS,), generator=generator) for rows in TABLES]
    dense, labels = torch.rand(ROWS, 3, generator=generator), torch.rand(ROWS, generator=generator).round()
    size = ROWS // (world_size - (step == 0 and world_size > 1))
    mine = slice(rank * size, (rank + 1) * size)
    values = torch.cat([column[mine] for column in ids])
    lengths = torch.ones(len(values), dtype=torch.int64)
    sparse = KeyedJaggedTensor(keys=feature_names(len(TABLES)), values=values, lengths=lengths)
    return Batch({DENSE: dense[mine]}, world_size / ROWS, sparse, {"label": labels[mine]})


def build(stage):
    config = DLRMConfig(embedding_dim=16, bottom_mlp=(8, 16), top_mlp=(8, 1), interaction="dot")
    model = whole_model(config, TABLES, num_dense=3, embedding_device="meta")
    sparse = SparseOptimizerConfig(kind=stage["sparse"], learning_rate=0.5, eps=stage.get("eps", 1e-8))
    optimizer_class, arguments = sparse.build()
    apply_optimizer_in_backward(optimizer_class, model.embeddings.parameters(), arguments)
    if stage["plan"] == ["row_wise"]:  # which no planner gives a CPU, though tables can lie so
        sharder = embedding_sharders()[0]  # that of the pooled tables
        tables = {name: row_wise() for name in feature_names(len(TABLES))}
        by_hand = construct_module_sharding_plan(
            model.embeddings, tables, sharder, local_size=stage["ranks"], world_size=stage["ranks"], device_type="cpu"
        )
        plan = ShardingPlan(plan={"embeddings": by_hand})
    else:
        plan = plan_sharding(
            model,
            Site(stage["ranks"], "cpu", 1 << 30),
            batch_size=ROWS,
            config=ShardingConfig(sharding_types=tuple(stage["plan"]), min_column_width=stage.get("width", 8)),
            state_bytes=sparse.state_bytes,
        )
    if rank == 0:
        print(stage["save"], {row.sharding_type for row in placements(plan, model, state_bytes=sparse.state_bytes)})
    disable_fused_update(model.embeddings, sparse)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(distributed.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=embedding_sharders(),
        data_parallel_wrapper=None if stage["ranks"] > 1 else Unwrapped(),
    )
    initialize_shards(sharded, seed=0)
    return sharded, make_optimizer(sharded, plan, sparse=sparse, dense=DenseOptimizerConfig(kind=stage["dense"]))


def run(stage):
    model, optimizer = build(stage)
    rates = learning_rates(optimizer)
    if "restore" in stage:
        restore_all(checkpoint.Checkpoint(f"{folder}/{stage['restore']}"), model, optimizer)
    steps = range(*stage.get("steps", (0, 0)))
    context = SimpleNamespace(world_size=stage["ranks"], device=torch.device("cpu"))
    pipeline, batches = make_pipeline(model, optimizer, context), iter([batch(step, stage["ranks"]) for step in steps])
    for step in steps:
        set_learning_rates(optimizer, base_rates=rates, schedule=LearningRateSchedule(warmup_steps=6), step=step)
        pipeline.progress(batches)
    checkpoint.save(f"{folder}/{stage['save']}", all_tensors(model, optimizer), state={})


for number, stage in enumerate(stages):
    if rank < stage["ranks"]:
        meeting = f"file://{folder}/meeting_{number}"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=stage["ranks"])
        run(stage)
        distributed.barrier()  # a rank that goes first would abort the other while it still works
        distributed.destroy_process_group()
"""


def run_stages(folder: Path, stages: list[dict[str, Any]]) -> Saved:
    """Every stage's checkpoint, whole. A stage begins again or from a checkpoint, may train, and saves."""
    logs = [folder / f"rank_{rank}.log" for rank in range(WORLD)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WORKER, str(rank), str(folder), json.dumps(stages)],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        for rank, log in enumerate(logs)
    ]
    deadline_s = time.monotonic() + 240
    try:
        # A rank that failed leaves the others waiting for it.
        while any(process.poll() is None for process in processes) and not any(p.returncode for p in processes):
            assert time.monotonic() < deadline_s, [log.read_text()[-2000:] for log in logs]
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = [log.read_text() for log in logs]
    assert [process.returncode for process in processes] == [0] * WORLD, "\n".join(text[-3000:] for text in outputs)
    for stage in stages:
        assert f"{stage['save']} {set(stage['plan'])}" in outputs[0]  # the planner did as it was told
    return {stage["save"]: dict(full_tensors(Checkpoint(f"{folder}/{stage['save']}"))) for stage in stages}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    names = {name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])}
    return names | (one.keys() ^ other.keys())


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with the column parts of a state as one, which they must be equal for."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        whole = name.partition(".columns_")[0]
        assert torch.equal(found.setdefault(whole, tensor), tensor), name
    return found


def state_of(tensors: dict[str, torch.Tensor], table: int, columns: str = "", *, state: str = "momentum1") -> torch.Tensor:
    return tensors[f"optimizer.embeddings.embedding_bags.cat_{table}.weight.{state}{columns}"]


ROUND_TRIPS = [
    ("rowwise_adagrad", "adam", "table_wise"),
    ("adagrad", "adagrad", "column_wise"),
    ("sgd", "sgd", "data_parallel"),
    ("rowwise_adagrad", "adamw", "data_parallel"),
    ("adam", "adam", "column_wise"),
]
RULES = [
    ("rowwise_adagrad", 1e-8),
    ("rowwise_adagrad", 0.0),
    ("adagrad", 1e-8),
    ("sgd", 1e-8),
    ("adam", 1e-2),
    ("sparse_adam", 1e-2),
]


def round_trip(sparse: str, dense: str, home: str) -> list[dict[str, Any]]:
    """2 -> 1 -> 3 -> 2 ranks under all plans, then on; and a run that never leaves."""
    kinds = {"sparse": sparse, "dense": dense}
    at_home = {"ranks": 2, "plan": [home], **kinds}
    away = [plan for plan in ("data_parallel", "column_wise", "table_wise") if plan != home]
    name = f"{sparse}_{home}"
    return [
        {**at_home, "steps": (0, 4), "save": f"{name}_start"},
        {"ranks": 1, "plan": [away[0]], **kinds, "restore": f"{name}_start", "save": f"{name}_one"},
        {"ranks": 3, "plan": [away[1]], **kinds, "restore": f"{name}_one", "save": f"{name}_three"},
        {**at_home, "restore": f"{name}_three", "save": f"{name}_back"},
        {**at_home, "restore": f"{name}_back", "steps": (4, 7), "save": f"{name}_went"},
        {**at_home, "steps": (0, 7), "save": f"{name}_stayed"},
    ]


def column_parts() -> list[dict[str, Any]]:
    kinds = {"sparse": "rowwise_adagrad", "dense": "adam"}
    halves = {"plan": ["column_wise"], "width": 8, **kinds}
    return [
        {**halves, "ranks": 2, "steps": (0, 4), "save": "halves_start"},
        {**halves, "ranks": 1, "restore": "halves_start", "save": "halves_one"},
        {**halves, "ranks": 3, "restore": "halves_one", "save": "halves_three"},
        {**halves, "ranks": 2, "restore": "halves_three", "steps": (4, 7), "save": "halves_went"},
        {**halves, "ranks": 2, "steps": (0, 7), "save": "halves_stayed"},
        {"ranks": 2, "plan": ["table_wise"], **kinds, "restore": "halves_start", "save": "halves_whole"},
        {"ranks": 1, "plan": ["data_parallel"], **kinds, "restore": "halves_start", "save": "halves_replicated"},
        {**halves, "ranks": 3, "width": 4, "restore": "halves_start", "save": "halves_narrow"},
        {"ranks": 3, "plan": ["row_wise"], **kinds, "restore": "halves_narrow", "save": "halves_rows"},
        {**halves, "ranks": 2, "restore": "halves_rows", "save": "halves_again"},
    ]


def same_rule(sparse: str, eps: float) -> list[dict[str, Any]]:
    kinds = {"sparse": sparse, "dense": "adam", "eps": eps, "steps": (0, 8)}
    name = f"rule_{sparse}_{eps}"
    return [
        {"ranks": 2, "plan": ["table_wise"], **kinds, "save": f"{name}_fused"},
        {"ranks": 2, "plan": ["data_parallel"], **kinds, "save": f"{name}_replicated"},
        {"ranks": 1, "plan": ["data_parallel"], **kinds, "save": f"{name}_alone"},
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """All at once, since a process takes longer to start than its stages do."""
    # The first has all processes: TorchRec makes a collective check of its own once in the life of each.
    stages = [{"ranks": WORLD, "plan": ["table_wise"], "sparse": "sgd", "dense": "sgd", "save": "first"}]
    stages += [stage for case in ROUND_TRIPS for stage in round_trip(*case)]
    stages += column_parts() + [stage for case in RULES for stage in same_rule(*case)]
    return run_stages(tmp_path_factory.mktemp("stages"), stages)


@pytest.mark.parametrize(("sparse", "dense", "home"), ROUND_TRIPS)
def test_a_round_trip_over_all_plans_changes_no_bit(saved: Saved, sparse: str, dense: str, home: str) -> None:
    start, one, three, back, went, stayed = (saved[stage["save"]] for stage in round_trip(sparse, dense, home))
    assert not differing(joined(one), joined(start))
    assert not differing(joined(three), joined(start))
    assert not differing(back, start)
    assert not differing(went, stayed)
    assert differing(went, start) >= {name for name in start if "cat_3.weight" in name}
    if sparse != "sgd":
        state = state_of(start, 3, state="exp_avg_sq" if sparse == "adam" else "momentum1")
        assert state.shape == ((90,) if sparse == "rowwise_adagrad" else (90, 16))
        assert state.count_nonzero() > 30
    if dense == "adam":
        assert {name.rpartition(".")[2] for name in start} >= {"exp_avg", "exp_avg_sq", "step"}


def test_states_of_column_parts_stay_apart_and_join_as_their_mean(saved: Saved) -> None:
    start, one, three, went, stayed, whole, replicated, narrow, rows, again = (saved[stage["save"]] for stage in column_parts())
    assert not differing(one, start)
    assert not differing(three, start)
    assert not differing(went, stayed)
    first, second = (state_of(start, 3, part) for part in (".columns_0_8", ".columns_8_16"))
    assert not torch.equal(first, second)
    mean = ((first.double() + second.double()) / 2).float()
    for tensors in (whole, replicated, rows):
        assert torch.equal(state_of(tensors, 3), mean)
        assert not {name for name in tensors if ".columns_" in name}
    for part in range(0, 16, 4):
        quarter = state_of(narrow, 3, f".columns_{part}_{part + 4}")
        assert torch.equal(quarter, first if part < 8 else second)
    assert not differing(joined(again), whole)


@pytest.mark.parametrize(("sparse", "eps"), RULES)
def test_data_parallel_tables_learn_by_the_rule_of_fused_ones(saved: Saved, sparse: str, eps: float) -> None:
    fused, replicated, alone = (saved[stage["save"]] for stage in same_rule(sparse, eps))
    for tensors in (replicated, alone):
        assert tensors.keys() == fused.keys()
        for name in fused:
            torch.testing.assert_close(tensors[name], fused[name], rtol=1e-5, atol=1e-5, msg=name)
