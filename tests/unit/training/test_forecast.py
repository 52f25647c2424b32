"""Forecasts computed from synthetic measurements."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from builders.faults import rejects

from rayrec import recipes
from rayrec.cluster.layout import layout
from rayrec.config import InputError
from rayrec.sharding.communication import (
    CommunicationVolume,
    Exchange,
    ExchangeBytes,
    LinkBandwidth,
)
from rayrec.training.forecast import ClusterShape, Forecast, extrapolate, forecast, train_locally
from rayrec.workloads.base import MeasuredSpeed, Target

MEASURED = MeasuredSpeed(
    num_workers=2,
    threads_per_worker=1,
    device="cpu",
    rows_per_s=40_000.0,
    cpu_s_per_row=45e-6,
    stage_wall_s={"read": 1e-6, "parse": 2e-6, "encode": 2e-6},
    stage_cpu_s={"read": 0.5e-6, "parse": 2e-6, "encode": 2e-6},
    rows=1_000_000,
    worker_bytes=(4_000_000, 3_000_000),
    sampled_vocabulary=False,
    plan="cat_0 ...",
)


def predict(measured: MeasuredSpeed, text: str, *, workers: int = 2) -> Forecast:
    shape = ClusterShape.parse(text)
    default = partial(layout, cpus_per_worker=None, resources_per_worker={}, data_nodes="auto")
    shares = default(shape.resources(), num_workers=workers, use_gpu=bool(shape.gpus))
    return extrapolate(measured, shape, shares, threads_per_worker=None)


def test_forecast_scales_and_names_model_data_or_cpu_bottleneck() -> None:
    found = predict(MEASURED, "cpus=2")
    assert (found.bottleneck, found.rows_per_s) == ("model", 40_000)
    assert found.data_rows_per_s == pytest.approx(2 / 5e-6)
    assert found.cpu_rows_per_s == pytest.approx(2 / 49.5e-6)
    assert (
        "About 40k rows/s, limited by the model; an epoch of about 1M rows takes 25 s."
        in found.text()
    )
    assert "4 MB on the worker with most" in found.text()
    assert "slice" not in found.text()
    assert (
        "slice of the log"
        in replace(found, measured_speed=replace(MEASURED, sampled_vocabulary=True)).text()
    )
    assert predict(MEASURED, "cpus=8").model_rows_per_s == pytest.approx(4 * 40_000)
    found = predict(MEASURED, "cpus=8,nodes=4", workers=8)
    assert found.model_rows_per_s == pytest.approx(16 * 40_000)
    # without GPUs all nodes are alike
    assert found == predict(MEASURED, "cpus=8,nodes=1,cpu_nodes=3", workers=8)
    assert found.cpu_rows_per_s == pytest.approx(32 / 49.5e-6)
    assert "On 4 nodes of 8 CPUs:" in found.text()
    for wall_s, cpu_s, bottleneck, rows_per_s in (
        (100e-6, 1e-6, "data", 20_000),
        (40e-6, 40e-6, "cpus", 2 / 85e-6),
    ):
        found = predict(
            replace(MEASURED, stage_wall_s={"read": wall_s}, stage_cpu_s={"read": cpu_s}), "cpus=2"
        )
        assert (found.bottleneck, found.rows_per_s) == (bottleneck, pytest.approx(rows_per_s))


def test_forecast_includes_network_and_returns_cpus_per_gpu() -> None:
    names: tuple[Exchange, ...] = ("ids", "embeddings", "gradients", "all_reduce")
    flows = {name: ExchangeBytes(2, 1) for name in names}
    flows["embeddings"].add_all_to_all([500_000.0] * 2, to_owner=False)  # 4 Mbit from each node
    flows["all_reduce"].add_ring(500_000.0)
    measured = replace(MEASURED, traffic=CommunicationVolume(1000, flows))
    free = predict(measured, "cpus=1,nodes=2")
    assert (free.bottleneck, free.rows_per_s) == ("model", 40_000)
    assert "taken for no limit" in free.text()
    fast = predict(measured, "cpus=1,nodes=2,network_gbit=1")  # 8 ms on top of a step's 25
    assert (fast.bottleneck, fast.rows_per_s) == ("model", pytest.approx(1000 / 0.033))
    slow = predict(measured, "cpus=1,nodes=2,network_gbit=0.1")
    assert (slow.bottleneck, slow.rows_per_s) == ("network", pytest.approx(1000 / 0.105))
    assert "  network  12.5k rows/s in all, by network_gbit=0.1\n" in slow.text()
    assert "About 9520 rows/s, limited by the network between workers" in slow.text()
    found = predict(
        replace(MEASURED, device="cuda", num_workers=1, rows_per_s=1_000_000.0),
        "cpus=16,gpus=1,nodes=2,cpu_nodes=3",
    )
    assert found.model_rows_per_s == pytest.approx(2e6)
    assert found.cpu_rows_per_s is None
    assert found.cpus_per_gpu == pytest.approx(5.0)
    assert "5 CPUs for data tasks keep one GPU busy: 1 CPU node of this size a GPU." in found.text()
    assert found.data_cpus == 48.0  # those of the nodes without GPUs
    assert found.bottleneck == "model"


def test_forecast_uses_given_gpu_speed() -> None:
    measured = replace(
        MEASURED,
        device="cuda",
        num_workers=1,
        rows_per_s=500_000.0,
        is_assumed=True,
        notes=("Not looked at.",),
    )
    text = predict(measured, "cpus=16,gpus=1,nodes=2,gpu_rows_per_s=500000").text()
    assert "  model    1M rows/s in all, by gpu_rows_per_s: given, not measured\n" in text
    assert "3 CPUs for data tasks keep one GPU busy" in text
    assert text.endswith("\nNot looked at.")
    unassumed = replace(measured, is_assumed=False)
    assert "given" not in predict(unassumed, "cpus=16,gpus=1,nodes=2").text()


@pytest.mark.parametrize(
    ("text", "workers", "target"),
    [
        pytest.param("cpus=8,nodes=2", 3, Target(3, 2), id="cpus-8-nodes-2"),
        pytest.param(
            "cpus=8,nodes=2,memory_gb=64",
            4,
            Target(4, 2, 32_000_000_000),
            id="cpus-8-nodes-2-memory_gb-64",
        ),
        pytest.param(
            "cpus=8,gpus=2,nodes=2,memory_gb=64",
            4,
            Target(4, 2, host_memory_bytes=32_000_000_000),
            id="cpus-8-gpus-2-nodes-2-memory_gb",
        ),
        pytest.param(
            "cpus=8,gpus=2,gpu_memory_gb=80,gpu_rows_per_s=1e6",
            2,
            Target(2, 2, 80_000_000_000, 1e6),
            id="cpus-8-gpus-2-gpu_memory_gb-80",
        ),
        pytest.param(
            "cpus=8,network_gbit=10,inside_gbit=200",
            2,
            Target(2, 2, links=LinkBandwidth(10.0, 200.0)),
            id="cpus-8-network_gbit-10",
        ),
    ],
)
def test_forecast_target_uses_cluster_memory(text: str, workers: int, target: Any) -> None:
    assert ClusterShape.parse(text).target(workers) == target


def test_cluster_shape_rejects_invalid_text() -> None:
    two_cpu_options = (
        "nodes=0",
        "cores=3",
        "memory_gb=0",
        "nodes=2,network_gbit=0",
        "gpu_rows_per_s=5",
        "gpus=1,gpu_rows_per_s=0",
    )
    for text in (
        "",
        "cpus",
        "cpus=x",
        "cpus=-1",
        "gpus=1",
        "cpus=nan",
        *(f"cpus=2,{more}" for more in two_cpu_options),
    ):
        rejects("--cluster: ", ClusterShape.parse, text)


def test_forecast_rejects_unsupported_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipes.criteo_demo("log").replace(scaling={"cpus_per_worker": 1.0})
    rejects("2 workers need 2 CPU", forecast, config, ClusterShape(1.0))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    rejects(
        "no GPU found on this machine to measure the model",
        forecast,
        config,
        ClusterShape(8.0, 1.0, 2),
    )
    other = recipes.gpt2_tiny("tokens")
    with pytest.raises(InputError, match="cannot be measured before training"):
        other.workload.probe_speed(
            other, target=Target(1, 1), local_workers=1, cuda=False, train=train_locally
        )
