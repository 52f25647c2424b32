"""Tests of click model plans and worker memory."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders.faults import rejects
from builders.logs import learn, open_index

import rayrec
from rayrec import recipes
from rayrec.cli.parser import parse
from rayrec.commands import COMMANDS
from rayrec.config import InputError
from rayrec.data.encoding.presets import FUXICTR_X4, MLPERF_NUM_EMBEDDINGS
from rayrec.host_resources import Memory
from rayrec.models.cost import NetworkCost
from rayrec.sharding.placement import PROCESS_BYTES, TablePlacement, worker_memories
from rayrec.workloads.recsys import planning, worker
from rayrec.workloads.recsys.planning import batch_bytes, build_model
from rayrec.workloads.recsys.worker import RankResources, _plan_or_wait

GB = 10**9
GPUS = "cpus=96,gpus=8,nodes=1,memory_gb=1000,gpu_memory_gb=80"


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_plan_for_absent_gpus_needs_no_log() -> None:
    text, unchecked = (rayrec.plan(recipes.mlperf_dlrm(), cluster=at, tables=MLPERF_NUM_EMBEDDINGS) for at in (GPUS, None))
    assert "cat_0   40,000,000  128" in text
    assert "of GPU memory: tables with optimizer state" in text
    assert "a checkpoint's copy" in text
    assert "Not checked" not in text
    assert "cat_0   40,000,000  128" in unchecked
    assert unchecked.endswith("Set --cluster gpus=N,gpu_memory_gb=N,...")


def test_adagrad_doubles_table_memory() -> None:
    adagrad, plan = recipes.mlperf_dcnv2(), partial(rayrec.plan, tables=MLPERF_NUM_EMBEDDINGS)
    two = adagrad.replace(scaling={"num_workers": 2})
    doubled = r"26 tables need 194.7 GiB \(weights and optimizer state\), but 2 workers"
    rejects(doubled, plan, two, cluster="cpus=96,gpus=2,gpu_memory_gb=80")
    less = GPUS.replace("memory_gb=1000", "memory_gb=100", 1)
    rejects("host memory, 15% kept free, for a checkpoint's copy", plan, adagrad, cluster=less)
    assert "adagrad" in adagrad.to_yaml()


def test_adam_triples_table_memory() -> None:
    config = recipes.criteo_demo()
    sizes = {}
    for kind in ("sgd", "adam", "sparse_adam"):
        text = rayrec.plan(config.replace(workload={"sparse_optimizer": {"kind": kind}}), tables=[40_000] * 26)
        sizes[kind] = re.findall(r"^cat_0 .* (\S+ MiB)$", text, re.MULTILINE)
    assert sizes == {"sgd": ["2.4 MiB"], "adam": ["7.3 MiB"], "sparse_adam": ["7.3 MiB"]}
    large = config.replace(workload={"sparse_optimizer": {"kind": "adam"}})
    tripled = r"26 tables need 46.5 GiB \(weights and optimizer state\), but 2 workers"
    rejects(tripled, rayrec.plan, large, cluster="cpus=8,nodes=1,memory_gb=64", tables=[10_000_000] * 26)


def test_plan_includes_bucketized_columns() -> None:
    config = recipes.criteo_demo().replace(workload={"preset": FUXICTR_X4.to_dict()})
    assert "int_12" in rayrec.plan(config, tables=[10] * 39)
    rejects("must have one table size per sparse column \(39\), got 26", rayrec.plan, config, tables=[10] * 26)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--tables", "mlperf"], {"tables": MLPERF_NUM_EMBEDDINGS}), (["--tables=3,20"], {"tables": (3, 20)}), ([], {})],
)
def test_plan_command_accepts_sizes(arguments: list[str], expected: Any) -> None:
    assert parse(COMMANDS["plan"], ["criteo_demo", *arguments, "--cluster=cpus=2"]).keywords == {"cluster": "cpus=2", **expected}
    with pytest.raises(InputError, match=r"must be mlperf or row counts of at least 1, .* got '3,x'"):
        parse(COMMANDS["plan"], ["criteo_demo", "--tables", "3,x"])


def test_worker_memory_is_sum_of_parts() -> None:
    config = recipes.criteo_demo()
    workload = config.workload.replace(sparse_optimizer={"kind": "sgd"}, dense_optimizer={"kind": "adam"})
    rows = [
        TablePlacement(table="a", num_embeddings=10, embedding_dim=4, sharding_type="table_wise", bytes_of_rank={0: 160}),
        TablePlacement(table="b", num_embeddings=5, embedding_dim=4, sharding_type="data_parallel", bytes_of_rank={0: 80, 1: 80}),
    ]
    cost = NetworkCost(weights=100, multiply_adds=None, saved_bytes_per_row=200.0)
    settings: dict[str, Any] = {"dense_weights": 100, "dense_state_bytes": workload.dense_optimizer.state_bytes(100)}
    settings |= {"batch_bytes": batch_bytes(workload, config, cost, values=2 * workload.model.table_width), "world_size": 2}
    first, second = worker_memories(rows, **settings)
    assert (first.tables, first.gradients, first.dense, first.checkpoint) == (240, 80, 1600, 160 + (80 + 1200) // 2)
    assert (second.tables, second.gradients, second.checkpoint) == (80, 80, (80 + 1200) // 2)
    parts = first.tables + first.gradients + first.dense + first.batches + first.checkpoint
    assert first.host_bytes("cpu") == parts + PROCESS_BYTES
    assert first.host_bytes("cuda") == first.checkpoint + PROCESS_BYTES
    assert first.device_bytes("cuda") == parts - first.checkpoint
    moved, _ = worker_memories([replace(rows[0], device_share=0.25), rows[1]], **settings)
    assert moved.device_bytes("cuda") == first.device_bytes("cuda") - 120
    assert moved.host_bytes("cuda") == first.host_bytes("cuda") + 160
    assert "tables 160 B" in moved.text("cuda")


def test_local_memory_excludes_object_store_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "available_host_bytes", lambda: 20 * GB)
    config = recipes.criteo_demo()
    assert planning.local_memory(config, workers=2) == 7 * GB - PROCESS_BYTES
    config = config.replace(cluster={"object_store_bytes": 2 * GB})
    assert planning.local_memory(config, workers=2) == 9 * GB - PROCESS_BYTES


def test_plan_waits_for_memory_of_other_processes() -> None:
    workload = recipes.criteo_demo().workload
    sizes = [400_000] * 26  # 674 MiB with their state
    model = build_model(workload, sizes, inputs=workload.schema)
    free = RankResources("a", "cpu", host_bytes=4 * GB, max_host_bytes=4 * GB, device_bytes=None)
    full = replace(free, host_bytes=GB)
    small = replace(full, max_host_bytes=GB)

    def planned(place: RankResources, *, can_wait: bool) -> Any:
        return _plan_or_wait(workload, model, [place], batch_size=8, can_wait=can_wait)

    assert planned(free, can_wait=True) is not None
    assert planned(full, can_wait=True) is None
    for place, can_wait in ((full, False), (small, True)):
        rejects("Use at least 2 workers", planned, place, can_wait=can_wait)


def test_node_memory_is_shared_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.host_resources, "memory", lambda: Memory(total=10 * GB, available=6 * GB))
    ranks: Any = SimpleNamespace(all_gather=lambda value: ["a", "b", "a"] if isinstance(value, str) else [value])
    context: Any = SimpleNamespace(node="a", device=torch.device("cpu"), object_store_bytes=2 * GB)
    (place,) = worker.gather_rank_resources(context, ranks)
    assert place == RankResources("a", "cpu", host_bytes=2 * GB, max_host_bytes=4 * GB, device_bytes=None)


def test_plan_uses_preprocessor_columns(tmp_path: Path) -> None:
    """A preset can bucketize integers, so model columns differ from log columns."""
    values = np.random.default_rng(0).integers(0, 9, (200, 26))
    lines = ("\t".join(["1", *map(str, range(13)), *(f"{value:08x}" for value in row)]) for row in values)
    (tmp_path / "log.txt").write_text("\n".join(lines) + "\n")
    learn(open_index(tmp_path / "log.txt"), preset=FUXICTR_X4).save(str(tmp_path / "preprocessor"))
    assert "int_12" in rayrec.plan(recipes.criteo_demo().replace(workload={"preprocessor": str(tmp_path / "preprocessor")}))
