"""Functions of ranks that train small models under several sharding plans, each in a separate
process.
"""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from builders.click_models import whole_model
from ranks import click
from torch import distributed
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from rayrec import checkpoint
from rayrec.batch import Batch
from rayrec.checkpoint.state import all_tensors, restore_all
from rayrec.models.base import ModelInputs
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.sharded_model import feature_names, initialize_shards
from rayrec.optim import config as optim
from rayrec.optim.table_adam import disable_fused_update
from rayrec.sharding.planner import (
    ShardingConfig,
    Site,
    embedding_sharders,
    placements,
    plan_sharding,
)
from rayrec.workloads.recsys.worker import Unwrapped, make_optimizer, make_pipeline

Stage = dict[str, Any]
TABLES = [40, 7, 1, 90]
ROWS = 24


def run_stages(stages: list[Stage], folder: str, rank: int) -> None:
    """Run each stage with its own number of ranks; the others are idle."""
    logging.disable(logging.WARNING)
    for number, stage in enumerate(stages):
        if rank < stage["ranks"]:
            meeting = f"file://{folder}/meeting_{number}"
            distributed.init_process_group(
                "gloo", init_method=meeting, rank=rank, world_size=stage["ranks"]
            )
            run(folder, rank, stage)
            # a rank that goes first would abort the other while it still works
            distributed.barrier()
            distributed.destroy_process_group()


def batch(step: int, rank: int, world_size: int) -> Batch:
    """Return a rank's part of the same global batch, for any number of ranks. In the first step,
    the last one has no rows.
    """
    shares = world_size - (step == 0 and world_size > 1)
    return replace(
        click.batch(TABLES, step, rank, shares, rows=ROWS), loss_weight=world_size / ROWS
    )


def build(stage: Stage, rank: int) -> tuple[DistributedModelParallel, Any]:
    config = DLRMConfig(
        embedding_dim=16,
        bottom_mlp=(8, 16),
        top_mlp=(8, 1),
        interaction="dot",
    )
    model = whole_model(
        config,
        TABLES,
        inputs=ModelInputs(2, tuple(feature_names(len(TABLES)))),
        embedding_device="meta",
    )
    sparse = optim.SparseOptimizerConfig(
        kind=stage["sparse"], learning_rate=0.5, eps=stage.get("eps", 1e-8)
    )
    optimizer_class, arguments = sparse.build()
    apply_optimizer_in_backward(optimizer_class, model.embeddings.parameters(), arguments)
    if stage["plan"] == ["row_wise"]:  # which no planner gives a CPU, though tables can lie so
        sharder = embedding_sharders()[0]  # that of the pooled tables
        tables = {name: row_wise() for name in feature_names(len(TABLES))}
        by_hand = construct_module_sharding_plan(
            model.embeddings,
            tables,
            sharder,
            device_type="cpu",
            local_size=stage["ranks"],
            world_size=stage["ranks"],
        )
        plan = ShardingPlan(plan={"embeddings": by_hand})
    else:
        site = Site(stage["ranks"], "cpu", 1 << 30)
        asked = ShardingConfig(
            sharding_types=tuple(stage["plan"]), min_column_width=stage.get("width", 8)
        )
        plan = plan_sharding(
            model, site, batch_size=ROWS, config=asked, state_bytes=sparse.state_bytes
        )
    if rank == 0:
        print(
            stage["save"],
            {row.sharding_type for row in placements(plan, model, state_bytes=sparse.state_bytes)},
        )
    disable_fused_update(model.embeddings, sparse)
    sharded = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        env=ShardingEnv.from_process_group(distributed.group.WORLD),
        plan=plan,
        sharders=embedding_sharders(),
        data_parallel_wrapper=None if stage["ranks"] > 1 else Unwrapped(),
    )
    initialize_shards(sharded, seed=0)
    return sharded, make_optimizer(
        sharded, plan, sparse=sparse, dense=optim.DenseOptimizerConfig(kind=stage["dense"])
    )


def run(folder: str, rank: int, stage: Stage) -> None:
    model, optimizer = build(stage, rank)
    rates = optim.learning_rates(optimizer)
    if "restore" in stage:
        restore_all(checkpoint.Checkpoint(f"{folder}/{stage['restore']}"), model, optimizer)
    steps = range(*stage.get("steps", (0, 0)))
    context = SimpleNamespace(world_size=stage["ranks"], device=torch.device("cpu"))
    pipeline = make_pipeline(model, optimizer, context)
    batches = iter([batch(step, rank, stage["ranks"]) for step in steps])
    for step in steps:
        optim.set_learning_rates(
            optimizer,
            base_rates=rates,
            schedule=optim.LearningRateSchedule(warmup_steps=6),
            step=step,
        )
        pipeline.progress(batches)
    checkpoint.save(f"{folder}/{stage['save']}", all_tensors(model, optimizer), state={})
