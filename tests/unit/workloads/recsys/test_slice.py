"""Tests of measuring a log slice for forecasts, with tables cut to fit this machine."""

import queue
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from builders.faults import rejects

from rayrec import recipes
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
from rayrec.sharding.placement import PROCESS_BYTES
from rayrec.training import forecast as forecasts
from rayrec.training.forecast import ClusterShape, forecast
from rayrec.workloads.base import MeasuredSpeed, Target, TrainConfig, TrainingRows
from rayrec.workloads.recsys import planning
from rayrec.workloads.recsys.planning import folded

ROWS = 2000
GB = 10**9


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    values = np.random.default_rng(0).integers(0, 2**32, (ROWS, 26))
    lines = ("\t".join(["1", *map(str, range(13)), *(f"{value:08x}" for value in row)]) for row in values)
    (tmp_path / "log.txt").write_text("\n".join(lines) + "\n")
    return recipes.criteo_demo(str(tmp_path / "log.txt")).replace(batch_size=8, workload={"preset": {"min_count": 1}})


def probed(config: TrainConfig, target: Target, train: Any) -> MeasuredSpeed:
    return config.workload.probe_speed(config, target=target, local_workers=1, cuda=False, train=train)


def test_tables_are_checked_against_cluster_memory(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Mock(return_value=[(1000, 0.5, 0.25)])
    whole = probed(config, Target(2, 1, GB), train)
    wanted = train.call_args.args[1].num_embeddings
    assert not whole.notes
    assert min(wanted) >= ROWS
    assert sum(whole.worker_bytes) == sum(rows * (16 + 1) * 4 for rows in wanted)
    rejects("tables", probed, config, Target(2, 1, 1_000_000), train)
    # This machine holds too little, and the cluster enough.
    free = int((PROCESS_BYTES + sum(whole.worker_bytes) // 2) / 0.7)  # of which Ray's object store takes 0.3
    monkeypatch.setattr(planning, "available_host_bytes", lambda: free)
    rejects(r"Assumed the memory of this machine. Set it with memory_gb=N in --cluster", probed, config, Target(2, 1), train)
    cut = probed(config, Target(2, 1, GB), train)
    assert (cut.plan, cut.worker_bytes) == (whole.plan, whole.worker_bytes)
    held = train.call_args.args[1].num_embeddings
    assert sum(rows * (16 + 1) * 4 for rows in held) < sum(whole.worker_bytes) // 4
    (note,) = cut.notes
    assert f"with {max(held):,} rows in the largest" in note


def test_passed_gpu_speed_is_not_measured(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(forecasts, "train_locally", train := Mock())
    config = config.replace(scaling={"num_workers": 2})
    found = forecast(config, ClusterShape.parse("cpus=16,gpus=2,gpu_rows_per_s=250000"))
    train.assert_not_called()
    assert found.model_rows_per_s == 250_000 * found.num_workers
    assert found.cpus_per_gpu is not None
    assert "given, not measured" in found.text()
    assert "--cluster gpus=N,gpu_memory_gb=N,... sets their memory" in found.text()


def test_probe_trains_with_training_loop_on_wrapped_ids(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "_MEASURED_S", 0.0)
    trained: list[Any] = []

    def train(config: TrainConfig, rows: TrainingRows, **_: Any) -> list[tuple[float, float, float]]:
        results: queue.Queue[tuple[float, float, float]] = queue.Queue()
        forecasts._train_rank(0, f"file://{tmp_path}/rendezvous", config, rows, 1, 1, False, results)
        trained.append(results.get_nowait())
        return trained

    try:
        found = probed(config, Target(1, 1, GB), train)
    finally:
        torch.distributed.destroy_process_group()
    ((rows, seconds, cpu_s),) = trained
    assert rows == 9 * 14  # eight steps, and the batch that the pipeline had pulled by then
    assert (found.rows_per_s, found.cpu_s_per_row) == (rows / seconds, cpu_s / rows)
    ids = (np.array([0, 5, 9]), np.array([[1, 7], [2, 8], [3, 3]]), JaggedIds(np.array([4, 6]), np.array([0, 2, 0])))
    one, two, bags = folded(EncodedRows(np.zeros((3, 1), np.float32), ids), [5, 4, 10]).ids
    assert one.tolist() == [0, 0, 4]
    assert two.tolist() == [[1, 3], [2, 0], [3, 3]]
    assert (bags.values.tolist(), bags.lengths.tolist()) == ([4, 6], [0, 2, 0])
