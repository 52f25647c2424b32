"""Sharding plans: data-parallel only if allowed, balanced, deterministic, readable, and rejected if
tables do not fit.
"""

import time
from collections import Counter
from typing import Any, Literal

import pytest
from builders.faults import rejects
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from rayrec.models.sharded_model import build_embeddings
from rayrec.optim.config import SparseOptimizerConfig
from rayrec.sharding.placement import TablePlacement, data_parallel_tables, describe, placements
from rayrec.sharding.planner import ShardingConfig, Site, embedding_sharders, plan_sharding

SIZES = [
    1460,
    583,
    1_000_000,
    900_000,
    305,
    24,
    12_517,
    633,
    3,
    93_145,
    5683,
    800_000,
    3194,
    27,
    14_992,
    700_000,
]
MIB = 1 << 20
GIB = 1 << 30
STATE = SparseOptimizerConfig(kind="rowwise_adagrad").state_bytes


class Model(nn.Module):
    def __init__(self, sizes: list[int], dim: int = 16) -> None:
        super().__init__()
        self.embeddings = build_embeddings(sizes, embedding_dim=dim, seed=0)


def plan(
    world_size: int = 2,
    device: Literal["cpu", "cuda"] = "cpu",
    memory_bytes: int = 2 * GIB,
    **settings: Any,
) -> Any:
    config = settings.pop("config", None)
    site = Site(world_size, device, memory_bytes, **settings)
    return plan_sharding(
        Model(SIZES),
        site,
        batch_size=2048,
        config=config,
        state_bytes=STATE,
    )


def rows_of(made: Any, model: Model | None = None) -> list[TablePlacement]:
    return placements(made, model or Model(SIZES), state_bytes=STATE)


def only(*types: str, **settings: Any) -> ShardingConfig:
    return ShardingConfig(sharding_types=types, **settings)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_table_is_fused_and_none_data_parallel(
    world_size: int, device: Literal["cpu", "cuda"]
) -> None:
    made = plan(world_size, device)
    rows = rows_of(made)
    tables = [(f"cat_{index}", size, 16) for index, size in enumerate(SIZES)]
    assert [(row.table, row.num_embeddings, row.embedding_dim) for row in rows] == tables
    assert {row.sharding_type for row in rows} <= (
        {"table_wise", "row_wise"} if world_size > 1 else {"table_wise"}
    )
    assert {
        sharding.compute_kernel for module in made.plan.values() for sharding in module.values()
    } == {"fused"}
    assert {rank for row in rows for rank in row.bytes_of_rank} == set(range(world_size))
    assert sum(row.total_bytes for row in rows) == sum(SIZES) * 17 * 4


def test_plan_is_balanced() -> None:
    counts = Counter(rank for row in rows_of(plan()) for rank in row.bytes_of_rank)
    assert abs(counts[0] - counts[1]) <= 2


def test_plan_is_deterministic_and_fast() -> None:
    first = describe(plan(), Model(SIZES), state_bytes=STATE)
    start = time.thread_time()
    assert describe(plan(), Model(SIZES), state_bytes=STATE) == first
    assert time.thread_time() - start < 1


def test_plan_is_described_as_table() -> None:
    lines = describe(plan(), Model(SIZES), state_bytes=STATE).splitlines()
    assert lines[0].split() == [
        "table",
        "rows",
        "dim",
        "sharding",
        "ranks",
        "weights",
        "+",
        "optimizer",
    ]
    assert lines[3].split()[:4] == ["cat_2", "1,000,000", "16", "table_wise"]
    assert lines[3].endswith("64.8 MiB")
    assert lines[-2].startswith("worker 0: ")
    assert lines[-1].startswith("worker 1: ")


def test_wide_table_is_split_by_columns() -> None:
    model = Model([1_000_000], dim=64)
    config = only("column_wise", min_column_width=32)
    made = plan_sharding(
        model, Site(2, "cpu", 640 * MIB), batch_size=128, state_bytes=STATE, config=config
    )
    (row,) = rows_of(made, model)
    assert (row.sharding_type, row.num_embeddings, row.embedding_dim) == (
        "column_wise",
        1_000_000,
        64,
    )
    assert set(row.bytes_of_rank) == {0, 1}


def test_data_parallel_tables_are_copied_to_all_ranks() -> None:
    made = plan(config=only("data_parallel"))
    rows = rows_of(made)
    assert {row.sharding_type for row in rows} == {"data_parallel"}
    assert all(
        row.bytes_of_rank == {0: row.num_embeddings * 17 * 4, 1: row.num_embeddings * 17 * 4}
        for row in rows
    )
    assert set(data_parallel_tables(made)) == {
        f"embeddings.embedding_bags.cat_{index}.weight" for index in range(len(SIZES))
    }
    assert "data_parallel  0-1" in describe(made, Model(SIZES), state_bytes=STATE).splitlines()[1]


def test_plan_keeps_tables_fused_and_uses_devices_of_ranks() -> None:
    made = plan(config=only("table_wise", "data_parallel"))
    kernels = {
        (sharding.sharding_type, sharding.compute_kernel)
        for sharding in made.plan["embeddings"].values()
    }
    assert kernels <= {("table_wise", "fused"), ("data_parallel", "dense")}
    assert data_parallel_tables(plan()) == []
    # cuda:2 of the first node is broken
    devices = [
        "cuda:0",
        "cuda:1",
        "cuda:3",
        "cuda:0",
        "cuda:2",
    ]
    made = plan(5, "cuda", nodes=["a", "a", "a", "b", "b"], devices=devices)
    tables = [sharding for module in made.plan.values() for sharding in module.values()]
    shards = [shard for sharding in tables for shard in sharding.sharding_spec.shards]
    assert {shard.placement.rank() for shard in shards} == set(range(5))
    assert all(str(shard.placement.device()) == devices[shard.placement.rank()] for shard in shards)
    made = plan(3, "cuda", nodes=["a", "a", "b"], config=only("table_row_wise", "table_wise"))
    assert {row.sharding_type for row in rows_of(made)} == {"table_wise"}
    assert plan(4, "cuda", nodes=["a", "a", "b", "b"], config=only("table_row_wise"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"memory_bytes": 100 * MIB},
            r"16 tables need .* MiB .* but 2 workers have .* Use at least 6 workers",
        ),
        (
            {"world_size": 8, "memory_bytes": 120 * MIB},
            r"table cat_2 \(1,000,000 rows x 16\) needs 64.8 MiB on one worker",
        ),
        (
            {"memory_bytes": 400 * MIB, "config": only("data_parallel")},
            r"16 tables need 22\d\.. MiB on each worker, .* Add table_wise",
        ),
        (
            {"memory_bytes": 600 * MIB, "config": only("data_parallel", reserved_fraction=0.0)},
            r"need 229.1 MiB on worker 0, 215.6 MiB for their gradients",
        ),
        (
            {"world_size": 1, "device": "cuda", "host_memory_bytes": 200 * MIB},
            r"200.0 MiB of host memory, 15% kept free, for a checkpoint's copy",
        ),
        (
            {
                "world_size": 3,
                "device": "cuda",
                "nodes": ["a", "a", "b"],
                "config": only("table_row_wise"),
            },
            "needs equally many workers on each node, got 2, 1. Add table_wise",
        ),
        ({"config": only("row_wise")}, "no support on CPU for row_wise. Add table_wise."),
        (
            {"config": ShardingConfig(exchange_precision="bf16")},
            "must be fp16 or fp32 on CPU, got bf16",
        ),
    ],
)
def test_plan_rejects_impossible_settings(settings: dict[str, Any], message: str) -> None:
    rejects(message, plan, **settings)


def test_plan_explains_planner_error_and_reserves_copy() -> None:
    # 39 MiB each: two do not fit in one worker's 62 MiB, though all fit in the sum
    three_for_two = Model([600_000] * 3)
    settings: Any = {
        "batch_size": 1,
        "state_bytes": STATE,
        "config": ShardingConfig(reserved_fraction=0.0),
    }
    rejects(
        "no plan found for 3 tables",
        plan_sharding,
        three_for_two,
        Site(2, "cpu", 124 * MIB),
        **settings,
    )
    model = Model([1_000_000])  # 64.8 MiB with its state
    assert plan_sharding(model, Site(1, "cpu", 135 * MIB), **settings)
    rejects(
        "125.0 MiB are free, 0% kept free, half of the rest for checkpoints",
        plan_sharding,
        model,
        Site(1, "cpu", 125 * MIB),
        **settings,
    )
    assert plan(1, "cuda", host_memory_bytes=GIB)
    # 229 MiB, their copy, 216 MiB of gradients
    assert plan(memory_bytes=700 * MIB, config=only("data_parallel", reserved_fraction=0.0))


def test_plan_moves_oversized_tables_to_host_memory() -> None:
    settings: Any = {"memory_bytes": 200 * MIB, "host_memory_bytes": GIB}
    cached = ShardingConfig(uvm_caching=True, uvm_cache_fraction=0.25)
    rejects(r"workers have 170.0 MiB", plan, 1, "cuda", **settings)
    made = plan(1, "cuda", config=cached, **settings)
    rows = rows_of(made)
    moved = [row for row in rows if row.device_share < 1]
    assert {row.device_share for row in moved} == {0.25}
    assert sum(row.total_bytes for row in rows) == sum(SIZES) * 17 * 4
    assert sum(row.device_bytes(0) for row in rows) <= 170 * MIB
    assert sum(row.host_bytes(0) for row in rows) == sum(row.total_bytes for row in moved) > 0
    assert "table_wise, 25% cached" in describe(made, Model(SIZES), state_bytes=STATE)
    # Host memory has these tables, and a checkpoint's copy of all tables.
    settings["host_memory_bytes"] = 310 * MIB
    rejects(
        r"worker 0 needs .* of host memory, .* for tables \(uvm_caching\)",
        plan,
        1,
        "cuda",
        config=cached,
        **settings,
    )
    assert {row.device_share for row in rows_of(plan(config=cached))} == {1.0}


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adagrad"])
def test_optimizer_state_size_matches_torchrec(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SparseOptimizerConfig(kind=kind)
    model = Model([1_000_000], dim=32)
    optimizer_class, arguments = optimizer.build()
    apply_optimizer_in_backward(optimizer_class, model.embeddings.parameters(), arguments)
    seen: list[int] = []
    plan_options = EmbeddingShardingPlanner.plan

    def noting(self: Any, *arguments: Any) -> Any:
        made = plan_options(self, *arguments)
        (option,) = self._best_plan
        seen.append(option.total_storage.ddr)
        return made

    monkeypatch.setattr(EmbeddingShardingPlanner, "plan", noting)
    made = plan_sharding(
        model, Site(1, "cpu", 2 * GIB), batch_size=1, state_bytes=optimizer.state_bytes
    )
    (row,) = placements(made, model, state_bytes=optimizer.state_bytes)
    assert row.total_bytes == 1_000_000 * 4 * (
        32 + {"sgd": 0, "rowwise_adagrad": 1, "adagrad": 32}[kind]
    )
    assert seen == [pytest.approx(row.total_bytes, rel=1e-3)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"sharding_types": ()}, "must have 1 or more values", id="sharding_types"),
        pytest.param(
            {"sharding_types": ("diagonal",)}, "has the wrong type", id="sharding_types-diagonal"
        ),
        pytest.param(
            {"reserved_fraction": 1.0}, "must be at least 0 and below 1", id="reserved_fraction-1.0"
        ),
        pytest.param({"min_column_width": 6}, "multiple of 4", id="min_column_width-6"),
        pytest.param(
            {"uvm_cache_fraction": 1.0},
            "uvm_cache_fraction: must be above 0 and below 1, got 1.0",
            id="uvm_cache_fraction-1.0",
        ),
    ],
)
def test_sharding_config_rejects_invalid_settings(settings: dict[str, Any], message: str) -> None:
    rejects(message, ShardingConfig, **settings)


def test_sharders_support_rayrec_tables() -> None:
    model = Model([10])
    rounded = ShardingConfig(exchange_precision="bf16")
    assert all(
        sharder.qcomm_codecs_registry for sharder in embedding_sharders(rounded, device="cuda")
    )
    assert any(type(model.embeddings) is sharder.module_type for sharder in embedding_sharders())
