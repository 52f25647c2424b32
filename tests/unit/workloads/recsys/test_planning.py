"""Tests of click model plans and worker memory."""

import json
import os
import queue
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
import torchrec
from builders.exports import write_criteo_rows
from builders.faults import rejects
from builders.logs import learn, open_index
from ranks import click
from ranks.checkpoint import run_ranks, same
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import rayrec
from rayrec import recipes
from rayrec.checkpoint import Checkpoint, full_tensors, weights_sha256
from rayrec.cli.parser import parse
from rayrec.commands import COMMANDS
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.data.encoding.presets import FUXICTR_X4, MLPERF_NUM_EMBEDDINGS
from rayrec.data.encoding.rules import SparseColumn
from rayrec.host_resources import Memory
from rayrec.ingest.ray_engine import DELIVERY_S, ITEMS_A_TASK
from rayrec.models.base import ModelInputs
from rayrec.models.cost import NetworkCost
from rayrec.sharding.communication import (
    CommunicationVolume,
    LinkBandwidth,
    Lookup,
    estimate_communication,
)
from rayrec.sharding.placement import PROCESS_BYTES, TablePlacement, worker_memories
from rayrec.training import forecast as forecasts
from rayrec.training.forecast import ClusterShape, forecast
from rayrec.workloads.base import MeasuredSpeed, Target, TrainConfig, TrainingRows
from rayrec.workloads.recsys import planning, worker
from rayrec.workloads.recsys.planning import batch_bytes, build_model, folded, lookups_of
from rayrec.workloads.recsys.warm_start import TableRemap, remap_table
from rayrec.workloads.recsys.worker import RankResources, TimedSparseDist, Unwrapped, _plan_or_wait

GB = 10**9
GPUS = "cpus=96,gpus=8,nodes=1,memory_gb=1000,gpu_memory_gb=80"


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_plan_for_absent_gpus_needs_no_log() -> None:
    text, unchecked = (
        rayrec.plan(recipes.mlperf_dlrm(), cluster=at, tables=MLPERF_NUM_EMBEDDINGS)
        for at in (GPUS, None)
    )
    assert "cat_0   40,000,000  128" in text
    assert "of GPU memory: tables with optimizer state" in text
    assert "a checkpoint's copy" in text
    assert "Not checked" not in text
    assert "cat_0   40,000,000  128" in unchecked
    assert unchecked.endswith("Set --cluster gpus=N,gpu_memory_gb=N,...")


@pytest.mark.parametrize(
    ("name", "gpus", "gib"),
    [
        ("torchrec_dlrm_mlperf", 8, 97.36),
        ("torchrec_dlrm_mlperf_x2", 16, 174.03),
        ("torchrec_dlrm_full", 80, 420.94),
    ],
)
def test_torchrec_recipes_have_published_table_sizes(name: str, gpus: int, gib: float) -> None:
    config = recipes.ALL[name]()
    nodes = f"cpus=96,gpus=8,nodes={gpus // 8},gpu_memory_gb=40,memory_gb=1152"
    assert (
        f"all tables: {gib} GiB without optimizer state"
        in rayrec.plan(config, cluster=nodes).splitlines()
    )
    assert config.scaling.max_workers == gpus
    assert config.scaling.max_workers * config.worker_batch_size in (65_536, 65_520)


def test_adagrad_doubles_and_adam_triples_table_memory() -> None:
    adagrad = recipes.mlperf_dcnv2()
    plan = partial(rayrec.plan, tables=MLPERF_NUM_EMBEDDINGS)
    two = adagrad.replace(scaling={"num_workers": 2})
    doubled = r"26 tables need 194.7 GiB \(weights and optimizer state\), but 2 workers"
    rejects(doubled, plan, two, cluster="cpus=96,gpus=2,gpu_memory_gb=80")
    less = GPUS.replace("memory_gb=1000", "memory_gb=100", 1)
    rejects("host memory, 15% kept free, for a checkpoint's copy", plan, adagrad, cluster=less)
    assert "adagrad" in adagrad.to_yaml()
    config = recipes.criteo_kaggle()
    sizes = {}
    for kind in ("sgd", "adam", "sparse_adam"):
        text = rayrec.plan(
            config.replace(workload={"sparse_optimizer": {"kind": kind}}), tables=[40_000] * 26
        )
        sizes[kind] = re.findall(r"^cat_0 .* (\S+ MiB)$", text, re.MULTILINE)
    assert sizes == {"sgd": ["2.4 MiB"], "adam": ["7.3 MiB"], "sparse_adam": ["7.3 MiB"]}
    large = config.replace(workload={"sparse_optimizer": {"kind": "adam"}})
    tripled = r"26 tables need 46.5 GiB \(weights and optimizer state\), but 2 workers"
    rejects(
        tripled, rayrec.plan, large, cluster="cpus=8,nodes=1,memory_gb=64", tables=[10_000_000] * 26
    )


def test_plan_includes_columns_of_preset_and_preprocessor(tmp_path: Path) -> None:
    config = recipes.criteo_demo().replace(workload={"preset": FUXICTR_X4.to_dict()})
    assert "int_12" in rayrec.plan(config, tables=[10] * 39)
    rejects(
        "must have one table size per sparse column \(39\), got 26",
        rayrec.plan,
        config,
        tables=[10] * 26,
    )
    # A preset can bucketize integers, so model columns differ from log columns.
    write_criteo_rows(tmp_path / "log.txt", 200)
    learn(open_index(tmp_path / "log.txt"), preset=FUXICTR_X4).save(str(tmp_path / "preprocessor"))
    for folder in (tmp_path / "preprocessor", tmp_path):  # itself, or that of a run
        assert "int_12" in rayrec.plan(
            recipes.criteo_demo().replace(workload={"preprocessor": str(folder)})
        )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tables", "mlperf"], {"tables": MLPERF_NUM_EMBEDDINGS}),
        (["--tables=3,20"], {"tables": (3, 20)}),
        ([], {}),
    ],
)
def test_plan_command_accepts_sizes(arguments: list[str], expected: Any) -> None:
    assert parse(COMMANDS["plan"], ["criteo_demo", *arguments, "--cluster=cpus=2"]).keywords == {
        "cluster": "cpus=2",
        **expected,
    }
    with pytest.raises(
        InputError, match=r"must be mlperf or row counts of at least 1, .* got '3,x'"
    ):
        parse(COMMANDS["plan"], ["criteo_demo", "--tables", "3,x"])


def test_worker_memory_is_sum_of_parts() -> None:
    config = recipes.criteo_demo()
    workload = config.workload.replace(
        sparse_optimizer={"kind": "sgd"}, dense_optimizer={"kind": "adam"}
    )
    rows = [
        TablePlacement(
            table="a",
            num_embeddings=10,
            embedding_dim=4,
            sharding_type="table_wise",
            bytes_of_rank={0: 160},
        ),
        TablePlacement(
            table="b",
            num_embeddings=5,
            embedding_dim=4,
            sharding_type="data_parallel",
            bytes_of_rank={0: 80, 1: 80},
        ),
    ]
    cost = NetworkCost(weights=100, multiply_adds=None, saved_bytes_per_row=200.0)
    settings: dict[str, Any] = {
        "dense_weights": 100,
        "dense_state_bytes": workload.dense_optimizer.state_bytes(100),
        "batch_bytes": batch_bytes(workload, config, cost, values=2 * workload.model.table_width),
        "world_size": 2,
    }
    first, second = worker_memories(rows, **settings)
    assert (first.tables, first.gradients, first.dense, first.checkpoint) == (
        240,
        80,
        1600,
        160 + (80 + 1200) // 2,
    )
    assert (second.tables, second.gradients, second.checkpoint) == (80, 80, (80 + 1200) // 2)
    parts = first.tables + first.gradients + first.dense + first.batches + first.checkpoint
    assert first.host_bytes("cpu") == parts + PROCESS_BYTES
    assert first.host_bytes("cuda") == first.checkpoint + PROCESS_BYTES
    assert first.device_bytes("cuda") == parts - first.checkpoint
    moved, _ = worker_memories([replace(rows[0], device_share=0.25), rows[1]], **settings)
    assert moved.device_bytes("cuda") == first.device_bytes("cuda") - 120
    assert moved.host_bytes("cuda") == first.host_bytes("cuda") + 160
    assert "tables 160 B" in moved.text("cuda")


def test_memory_excludes_object_store_and_is_shared_by_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        planning.host_resources, "memory", lambda: Memory(total=20 * GB, available=20 * GB)
    )
    config = recipes.criteo_demo()
    assert planning.local_memory(config, workers=2) == 7 * GB - PROCESS_BYTES
    config = config.replace(cluster={"object_store_bytes": 2 * GB})
    assert planning.local_memory(config, workers=2) == 9 * GB - PROCESS_BYTES
    monkeypatch.setattr(
        worker.host_resources, "memory", lambda: Memory(total=10 * GB, available=6 * GB)
    )
    ranks: Any = SimpleNamespace(
        all_gather=lambda value: ["a", "b", "a"] if isinstance(value, str) else [value]
    )
    context: Any = SimpleNamespace(node="a", device=torch.device("cpu"), object_store_bytes=2 * GB)
    (place,) = worker.gather_rank_resources(context, ranks)
    assert place == RankResources(
        "a", "cpu", host_bytes=2 * GB, max_host_bytes=4 * GB, device_bytes=None
    )


def test_plan_waits_for_memory_of_other_processes() -> None:
    workload = recipes.criteo_kaggle().workload
    sizes = [400_000] * 26  # 674 MiB with their state
    model = build_model(workload, sizes, inputs=ModelInputs.from_schema(workload.schema))
    free = RankResources(
        "a",
        "cpu",
        host_bytes=4 * GB,
        max_host_bytes=4 * GB,
        device_bytes=None,
    )
    full = replace(free, host_bytes=GB)
    small = replace(full, max_host_bytes=GB)

    def planned(place: RankResources, *, can_wait: bool) -> Any:
        return _plan_or_wait(workload, model, [place], batch_size=8, can_wait=can_wait)

    assert planned(free, can_wait=True) is not None
    assert planned(full, can_wait=True) is None
    for place, can_wait in ((full, False), (small, True)):
        rejects("Use at least 2 workers", planned, place, can_wait=can_wait)


def test_plan_fits_smallest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Mock()
    monkeypatch.setattr(worker, "plan_sharding", plan)
    devices = [
        RankResources(
            "a",
            f"cuda:{number}",
            host_bytes=(4 - number) * GB,
            max_host_bytes=9 * GB,
            device_bytes=size * GB,
        )
        for number, size in enumerate((16, 8, 80))
    ]
    _plan_or_wait(recipes.criteo_kaggle().workload, Mock(), devices, batch_size=8, can_wait=False)
    site = plan.call_args.args[1]
    assert (site.device, site.memory_bytes, site.host_memory_bytes) == ("cuda", 8 * GB, 2 * GB)


# -- Communication volumes against numbers computed by hand
ROWS = 10
"""Batch size per worker."""
ONE_ID = Lookup()


def table(
    name: str, kind: str, ranks: list[int], *, dim: int = 16, rows: int = 100
) -> TablePlacement:
    rank_bytes = dict.fromkeys(
        ranks, rows * dim * 4 // (1 if kind == "data_parallel" else len(ranks))
    )
    return TablePlacement(
        table=name,
        num_embeddings=rows,
        embedding_dim=dim,
        sharding_type=kind,
        bytes_of_rank=rank_bytes,
    )


def traffic(
    *tables: TablePlacement, lookup: Lookup = ONE_ID, **changes: Any
) -> CommunicationVolume:
    settings = {
        "num_workers": 4,
        "workers_per_node": 2,
        "batch_size": ROWS,
        "dense_weights": 0,
        "exchange_bytes": 4,
        **changes,
    }
    return estimate_communication(tables, {one.table: [lookup] for one in tables}, **settings)


def test_table_wise_table_is_requested_by_all_workers() -> None:
    found = traffic(table("a", "table_wise", [0]))
    ids = found.flows["ids"]
    forward = found.flows["embeddings"]
    backward = found.flows["gradients"]
    # 10 rows of 16 float32 to each worker: one in the node of worker 0, two in the other.
    assert (forward.sent_inside, forward.received_inside) == ([640, 0, 0, 0], [0, 640, 0, 0])
    assert (forward.sent_between, forward.received_between) == ([1280, 0], [0, 1280])
    assert (backward.sent_inside, backward.received_inside) == (
        forward.received_inside,
        forward.sent_inside,
    )
    assert (backward.sent_between, backward.received_between) == ([0, 1280], [1280, 0])
    # an id and a length of 4 bytes a row
    assert (ids.sent_inside, ids.sent_between) == ([0, 80, 0, 0], [0, 160])
    assert found.bytes_per_row() == ((640 + 640 + 80) / 40, (1280 + 1280 + 160) / 40)


COLUMNS = table("a", "column_wise", [0, 2])
BY_ROWS = table("a", "row_wise", [0, 1, 2, 3])
SEQUENCE = Lookup(ids=20.0, pooled=False)
RING = ([3 * 640, 0, 3 * 640, 0], [3 * 640] * 2, [3 * 640] * 2)  # each sends three of four parts


@pytest.mark.parametrize(
    (
        "tables",
        "lookup",
        "flow",
        "sent_inside",
        "sent_between",
        "received_between",
    ),
    [
        (
            [table(str(rank), "table_wise", [rank]) for rank in range(4)],
            ONE_ID,
            "embeddings",
            [640] * 4,
            [2560] * 2,
            [2560] * 2,
        ),
        # 8 columns of 10 rows to two workers, and the ids from all workers to both.
        (
            [COLUMNS],
            ONE_ID,
            "embeddings",
            [320, 0, 320, 0],
            [640, 640],
            [640, 640],
        ),
        (
            [COLUMNS],
            ONE_ID,
            "ids",
            [0, 80, 0, 80],
            [160, 160],
            [160, 160],
        ),
        (
            [BY_ROWS],
            Lookup(ids=2.0),
            "embeddings",
            *RING,
        ),
        (
            [BY_ROWS],
            Lookup(ids=2.0),
            "gradients",
            *RING,
        ),
        # To each worker the length of each row, and a fourth of its two ids.
        (
            [BY_ROWS],
            Lookup(ids=2.0),
            "ids",
            [ROWS * (4 + 0.5 * 4)] * 4,
            [ROWS * (4 + 0.5 * 4) * 4] * 2,
            [ROWS * 6 * 4] * 2,
        ),
        # Half of the sums of 40 rows.
        (
            [table("a", "table_row_wise", [0, 1])],
            ONE_ID,
            "embeddings",
            [2 * 640, 2 * 640, 0, 0],
            [1280, 0],
            [0, 1280],
        ),
        # Unpooled embeddings are sent for each id: by its worker, or a fourth of it by each, to two
        # of the other node.
        (
            [table("a", "table_wise", [0])],
            SEQUENCE,
            "embeddings",
            [20 * 640, 0, 0, 0],
            [20 * 1280, 0],
            [0, 20 * 1280],
        ),
        ([BY_ROWS], SEQUENCE, "embeddings", [20 * 160] * 4, [20 * 640] * 2, [20 * 640] * 2),
    ],
)
def test_exchanges_depend_on_sharding(
    tables: list[TablePlacement],
    lookup: Lookup,
    flow: str,
    sent_inside: Any,
    sent_between: Any,
    received_between: Any,
) -> None:
    found = traffic(*tables, lookup=lookup).flows[flow]  # type: ignore[index]
    assert (found.sent_inside, found.sent_between, found.received_between) == (
        sent_inside,
        sent_between,
        received_between,
    )


def test_half_precision_halves_bytes_and_links_bound_rows_per_s() -> None:
    found = traffic(table("a", "data_parallel", [0, 1, 2, 3]), dense_weights=1000, exchange_bytes=2)
    size = 2 * 3 / 4 * 4 * (1000 + 100 * 16)
    assert (
        found.flows["all_reduce"].sent_between
        == found.flows["all_reduce"].received_between
        == [size, size]
    )
    assert found.flows["all_reduce"].sent_inside == [size, 0, size, 0]
    assert not any(found.flows["embeddings"].sent_between)
    found = traffic(
        table("a", "table_wise", [0]), lookup=Lookup(ids=3.0, weighted=True), exchange_bytes=2
    )
    assert found.flows["embeddings"].sent_between == [640, 0]
    assert found.flows["ids"].sent_between == [0, 2 * ROWS * (4 + 3 * 8)]
    found = traffic(
        table("a", "table_wise", [0]), num_workers=1, workers_per_node=1, dense_weights=1000
    )
    assert found.bytes_per_row() == (0, 0)
    assert found.rows_per_s(LinkBandwidth(10.0, 10.0)) is None
    assert found.limit(5000.0, LinkBandwidth(10.0)) == (5000.0, "model")
    assert found.text(LinkBandwidth(10.0)) == "One worker exchanges nothing."
    found = traffic(table("a", "table_wise", [0]))
    # A step of 40 rows: 1280 bytes forward, as many back, and 160 of ids, one exchange after the
    # other.
    seconds = (1280 + 1280 + 160) * 8 / 1e9
    assert found.rows_per_s(LinkBandwidth(1.0)) == pytest.approx(40 / seconds)
    assert found.rows_per_s(LinkBandwidth(inside_gbit=1.0)) == pytest.approx(
        40 * 1e9 / 8 / (640 + 640 + 80)
    )
    assert found.rows_per_s(LinkBandwidth(1.0, 1e-3)) == pytest.approx(
        40 * 1e6 / 8 / (640 + 640 + 80)
    )
    assert found.rows_per_s(LinkBandwidth()) is None


def test_exchange_alternates_with_compute_and_has_lookups_of_row() -> None:
    found = traffic(table("a", "table_wise", [0]), dense_weights=1000)
    exchanged_s = (2560 + 160 + 6000) * 8 / 1e9
    rate, limit = found.limit(40 / (2 * exchanged_s), LinkBandwidth(1.0))
    assert (rate, limit) == (pytest.approx(40 / (3 * exchanged_s)), "model")
    rate, limit = found.limit(40 / (0.5 * exchanged_s), LinkBandwidth(1.0))
    assert (rate, limit) == (pytest.approx(40 / (1.5 * exchanged_s)), "network")
    assert found.limit(1000.0, LinkBandwidth()) == (1000.0, "model")
    text = found.text(LinkBandwidth())
    assert (
        "Workers send 702 B a row (6 B ids, 48 B embeddings, 48 B gradients of embeddings, 600 B "
        "gradients" in text
    )
    assert "334 B inside nodes, 368 B between them." in text
    assert "is taken for no limit; network_gbit=N in --cluster" in text
    assert "10 Gbit/s 5.73M, 100 Gbit/s 57.3M, 400 Gbit/s 229M." in text
    text = found.text(LinkBandwidth(10.0), 1e6)
    assert "  network  5.73M rows/s in all, by network_gbit=10\n" in text
    assert (
        "About 851k rows/s of the 1M that GPUs of gpu_rows_per_s would train; the model takes more"
        in text
    )
    assert "no limit" not in text
    inputs = ModelInputs(
        2,
        ("a", "b", "c"),
        vocabularies=("a", "a", "c"),
        lists=(("b", 7), ("c", None)),
        weighted=True,
    )
    workload = recipes.criteo_demo().workload
    found = lookups_of(workload, inputs, None)
    assert found == {
        "a": [Lookup(1, weighted=True), Lookup(7, weighted=True)],
        "c": [Lookup(20, weighted=True)],
    }
    assert lookups_of(workload, inputs, [3, None, 2])["a"] == [
        Lookup(3, weighted=True),
        Lookup(7, weighted=True),
    ]


# -- Measuring a log slice for forecasts, with tables cut to fit this machine
LOG_ROWS = 2000


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    values = np.random.default_rng(0).integers(0, 2**32, (LOG_ROWS, 26))
    lines = (
        "\t".join(["1", *map(str, range(13)), *(f"{value:08x}" for value in row)]) for row in values
    )
    (tmp_path / "log.txt").write_text("\n".join(lines) + "\n")
    return recipes.criteo_demo(str(tmp_path / "log.txt")).replace(
        batch_size=8, workload={"preset": {"min_count": 1}}
    )


def probed(config: TrainConfig, target: Target, train: Any) -> MeasuredSpeed:
    return config.workload.probe_speed(
        config, target=target, local_workers=1, cuda=False, train=train
    )


def test_tables_are_checked_against_cluster_memory(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Mock(return_value=[(1000, 0.5, 0.25)])
    whole = probed(config, Target(2, 1, GB), train)
    desired = train.call_args.args[1].num_embeddings
    assert not whole.notes
    assert min(desired) >= LOG_ROWS
    assert sum(whole.worker_bytes) == sum(rows * (20 + 1) * 4 for rows in desired)
    rejects("tables", probed, config, Target(2, 1, 1_000_000), train)
    # This machine holds too little, and the cluster enough.
    # of which Ray's object store takes 0.3
    free = int((PROCESS_BYTES + sum(whole.worker_bytes) // 2) / 0.7)
    monkeypatch.setattr(
        planning.host_resources, "memory", lambda: Memory(total=free, available=free)
    )
    rejects(
        r"Assumed the memory of this machine. Set it with memory_gb=N in --cluster",
        probed,
        config,
        Target(2, 1),
        train,
    )
    cut = probed(config, Target(2, 1, GB), train)
    assert (cut.plan, cut.worker_bytes) == (whole.plan, whole.worker_bytes)
    held = train.call_args.args[1].num_embeddings
    assert sum(rows * (20 + 1) * 4 for rows in held) < sum(whole.worker_bytes) // 4
    (note,) = cut.notes
    assert f"with {max(held):,} rows in the largest" in note


def test_passed_gpu_speed_is_not_measured(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "train_locally", train := Mock())
    config = config.replace(scaling={"num_workers": 2})
    found = forecast(config, ClusterShape.parse("cpus=16,gpus=2,gpu_rows_per_s=250000"))
    train.assert_not_called()
    assert found.model_rows_per_s == 250_000 * found.num_workers
    assert found.cpus_per_gpu is not None
    # one block, of all rows
    assert found.data_rows_per_s < found.data_cpus * LOG_ROWS / (DELIVERY_S[0] / ITEMS_A_TASK)
    assert "given, not measured" in found.text()
    assert "Set --cluster gpus=N,gpu_memory_gb=N,..." in found.text()


def test_probe_trains_with_loop_on_wrapped_ids(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "_MEASURED_S", 0.0)
    trained: list[Any] = []

    def train(
        config: TrainConfig, rows: TrainingRows, **_: Any
    ) -> list[tuple[float, float, float]]:
        results: queue.Queue[tuple[float, float, float]] = queue.Queue()
        forecasts._train_rank(
            0, f"file://{tmp_path}/rendezvous", config, rows, 1, 1, False, results
        )
        trained.append(results.get_nowait())
        return trained

    try:
        found = probed(config, Target(1, 1, GB), train)
    finally:
        torch.distributed.destroy_process_group()
    ((rows, seconds, cpu_s),) = trained
    assert rows == 9 * 14  # eight steps, and the batch that the pipeline had pulled by then
    assert (found.rows_per_s, found.cpu_s_per_row) == (rows / seconds, cpu_s / rows)
    ids = (
        np.array([0, 5, 9]),
        np.array([[1, 7], [2, 8], [3, 3]]),
        JaggedIds(np.array([4, 6]), np.array([0, 2, 0])),
    )
    one, two, bags = folded(EncodedRows(np.zeros((3, 1), np.float32), ids), [5, 4, 10]).ids
    assert one.tolist() == [0, 0, 4]
    assert two.tolist() == [[1, 3], [2, 0], [3, 3]]
    assert (bags.values.tolist(), bags.lengths.tolist()) == ([4, 6], [0, 2, 0])


# -- Workers: single ones, on unequal machines, and warm starts
def test_single_worker_step_has_no_device_sync(
    single_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    meta = torch.device("meta")
    sharded = DistributedModelParallel(
        model,
        device=meta,
        init_parameters=False,
        env=ShardingEnv.from_local(1, 0),
        plan=ShardingPlan({}),
        data_parallel_wrapper=Unwrapped(),
    )
    assert {tensor.device.type for tensor in sharded.state_dict().values()} == {"meta"}
    # Each of these methods blocks the host on a GPU. torch's optimizers call them on host memory
    # only.
    waits: list[str] = []
    # Any path may contain the name of a package, such as a checkout.
    packages = tuple(f"{Path(module.__file__).parent}{os.sep}" for module in (rayrec, torchrec))

    def counted(name: str) -> Any:
        plain = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            frame: FrameType | None = sys._getframe(1)
            if frame.f_code.co_filename.startswith(packages):
                waits.append(f"{name} by {frame.f_code.co_qualname}")
            return plain(self, *arguments, **named)

        return method

    found = {}
    for pipeline in (None, TimedSparseDist):
        config = click.config(click.MANY, 1)
        setup = config.workload.set_up(click.context(config, 0, 1), click.prepared(click.MANY))
        made: Any = setup.pipeline
        if pipeline is not None:
            made = pipeline(setup.model, setup.optimizer, torch.device("cpu"), setup.clock)
        batches = iter([click.batch(click.MANY, step, 0, 1) for step in range(6)])
        made.progress(batches)  # builds what later steps use
        with monkeypatch.context() as patched:
            for name in (
                "item",
                "tolist",
                "cpu",
                "numpy",
                "nonzero",
                "unique",
                "__bool__",
                "__int__",
                "__float__",
            ):
                patched.setattr(torch.Tensor, name, counted(name))
            for step in range(1, 4):
                setup.begin_step(step, 6)
                made.progress(batches)
        found[pipeline], waits = waits, []
    assert found[None] == []
    assert len(found[TimedSparseDist]) >= 3  # which is why one worker does not have it


def test_closed_evaluation_stops_batch_thread(
    single_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = MagicMock()
    loader.__iter__.side_effect = lambda: iter(
        [click.batch(click.EQUAL, step, 0, 1) for step in range(3)]
    )
    monkeypatch.setattr(worker, "_loader", lambda *_, **__: loader)
    config = click.config(click.EQUAL, 1)
    prepared = click.prepared(click.EQUAL)
    prepared.sets["validation"] = prepared.sets["train"]
    setup = config.workload.set_up(click.context(config, 0, 1), prepared)
    batches: Any = setup.eval_batches["validation"]()
    next(batches)
    loader.close.assert_not_called()
    batches.close()
    assert loader.close.call_count == 1
    assert len(list(setup.eval_batches["validation"]())) == 3
    assert loader.close.call_count == 2


@pytest.mark.extended
def test_unequal_workers_per_machine_train_one_model(tmp_path: Path) -> None:
    run_ranks(click.alone, 1, str(tmp_path))
    run_ranks(click.on_unequal_nodes, 3, str(tmp_path))
    tables_of = {name: len(tables) for name, tables in click.CASES.items()}
    for name, num_tables in {
        **tables_of,
        "shared": 2,
        "sequences": 2,
        "adam": 2,
        "adam_sequences": 2,
    }.items():
        one = tmp_path / f"{name}_1"
        three = tmp_path / f"{name}_3"
        assert weights_sha256(Checkpoint(str(three / "start"))) == weights_sha256(
            Checkpoint(str(one / "start"))
        )
        expected, found = (dict(full_tensors(Checkpoint(str(run / "end")))) for run in (one, three))
        table_results = [
            key for key in found if ".embedding_bags." in key or ".sequences.embeddings." in key
        ]
        # with Adam's three states
        assert len(table_results) == num_tables * (4 if name.startswith("adam") else 1)
        torch.testing.assert_close(found, expected)
        losses = [json.loads((run / "losses.json").read_text()) for run in (one, three)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    exact, rounded = (
        dict(full_tensors(Checkpoint(str(tmp_path / f"{name}_3" / "end"))))
        for name in ("equal", "rounded")
    )
    assert not same(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.01, atol=0.002)
    # Sums of three depend on their order, which is the same in the first step of an attempt as in
    # any other.
    whole, parts = (
        weights_sha256(Checkpoint(str(tmp_path / name / "6"))) for name in ("whole", "parts")
    )
    assert whole == parts


# -- Row mappings between old and new tables
def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def joined(
    old: SparseColumn, new: SparseColumn, old_tokens: np.ndarray, new_tokens: np.ndarray
) -> TableRemap:
    return remap_table(old, new, old_tokens, new_tokens, where="column a")


OLD = SparseColumn(num_embeddings=5, num_tokens=3)
HASHED = SparseColumn(num_embeddings=100, num_tokens=None)
SHARED, EXTENDED = (SparseColumn(num_embeddings=4, num_tokens=number) for number in (5, 6))
"""Columns whose categories share rows."""
LAST = SparseColumn(
    num_embeddings=4,
    num_tokens=3,
    first_id=0,
    unknown_id=3,
    missing_id=3,
)
GAP = SparseColumn(
    num_embeddings=6,
    num_tokens=5,
    first_id=0,
    unknown_id=3,
    missing_id=3,
    gap=3,
)


def test_rows_follow_categories() -> None:
    for old, new, old_tokens, new_tokens, rows in (
        (
            OLD,
            SparseColumn(num_embeddings=7, num_tokens=5),
            [9, 4, 7],
            [9, 4, 7, 1, 2],
            [0, 1, 2, 3, 4, -1, -1],
        ),
        # The row of unknown categories keeps its number. Counted again, it is the last one.
        (
            LAST,
            GAP,
            [9, 4, 7],
            [9, 4, 7, 1, 2],
            [0, 1, 2, 3, -1, -1],
        ),
        (
            GAP,
            LAST,
            [9, 4, 7, 1, 2],
            [2, 7, 5],
            [5, 2, -1, 3],
        ),
        (  # A new row of missing values starts from that of the old table.
            SparseColumn(num_embeddings=4, num_tokens=2, missing_id=0),
            SparseColumn(
                num_embeddings=5,
                num_tokens=2,
                missing_id=3,
                gap=3,
            ),
            [9, 4],
            [4, 8],
            [0, 1, 3, 0, -1],
        ),
        (HASHED, HASHED, [], [], list(range(100))),
        (
            SHARED,
            EXTENDED,
            [1, 2, 3, 4, 5],
            [1, 2, 3, 4, 5, 6],
            [0, 1, 2, 3],
        ),
    ):
        assert (
            joined(old, new, tokens(*old_tokens), tokens(*new_tokens))
            .row_map.sources_between(0, len(rows))
            .tolist()
            == rows
        )


def test_extended_vocabulary_needs_no_table_unlike_others() -> None:
    found = joined(
        OLD, SparseColumn(num_embeddings=7, num_tokens=5), tokens(9, 4, 7), tokens(9, 4, 7, 1, 2)
    )
    assert found.row_map.sources is None
    assert found.counts() == {"kept": 3, "fresh": 2, "dropped": 0}
    found = joined(GAP, LAST, tokens(9, 4, 7, 1, 2), tokens(2, 7, 5))
    assert found.counts() == {"kept": 2, "fresh": 1, "dropped": 3}
    wider = SparseColumn(num_embeddings=200, num_tokens=None)
    hashed_to = "column a: must be hashed to 100 rows by the checkpoint's rule, got 200 rows"
    rejects(hashed_to, joined, HASHED, wider, tokens(), tokens())
    rejects("column a: hashing does not match", joined, HASHED, OLD, tokens(), tokens(9, 4, 7))
    rejects(
        "column a: several categories share a row",
        joined,
        SHARED,
        EXTENDED,
        tokens(1, 2, 3, 4, 5),
        tokens(5, 1, 2, 3, 4, 6),
    )
