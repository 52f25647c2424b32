"""What a forecast measures a click model by: tables as the cluster would hold them, cut where this machine cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayrec import recipes
from rayrec.config import InputError
from rayrec.data.encoded import Bags, EncodedRows
from rayrec.sharding.placement import PROCESS_BYTES
from rayrec.training.forecast import ClusterShape, forecast
from rayrec.workloads.base import MeasuredSpeed, Target, TrainConfig
from rayrec.workloads.recsys import planning, speed_probe
from rayrec.workloads.recsys.speed_probe import folded

ROWS = 2000
GB = 10**9


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    values = np.random.default_rng(0).integers(0, 2**32, (ROWS, 26))
    lines = ("\t".join(["1", *map(str, range(13)), *(f"{value:08x}" for value in row)]) for row in values)
    (tmp_path / "log.txt").write_text("\n".join(lines) + "\n")
    return recipes.criteo_demo(str(tmp_path / "log.txt")).replace(batch_size=8, workload={"preset": {"min_count": 1}})


class Trained:
    """Training for some steps, which is left out here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_embeddings: list[list[int]] = []
        monkeypatch.setattr(speed_probe, "_train_here", self._train)

    def _train(self, config: TrainConfig, piece: Any, num_embeddings: list[int], **_: Any) -> list[Any]:
        self.num_embeddings.append(num_embeddings)
        return [(1000, 0.5, 0.25)]


def probed(config: TrainConfig, target: Target, *, cuda: bool = False) -> MeasuredSpeed:
    return config.workload.probe_speed(config, target=target, local_workers=1, cuda=cuda)


def test_tables_are_judged_by_the_clusters_memory(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(monkeypatch)
    whole = probed(config, Target(2, 1, GB))
    (wanted,) = trained.num_embeddings
    assert not whole.notes
    assert min(wanted) >= ROWS
    assert sum(whole.worker_bytes) == sum(rows * (16 + 1) * 4 for rows in wanted)
    with pytest.raises(InputError, match="tables"):
        probed(config, Target(2, 1, 1_000_000))
    # This machine holds too little, and the cluster enough.
    free = int((PROCESS_BYTES + sum(whole.worker_bytes) // 2) / 0.7)  # of which Ray's object store takes 0.3
    monkeypatch.setattr(planning, "available_host_bytes", lambda: free)
    with pytest.raises(InputError, match="taken for as large as here, memory_gb=N in --cluster"):
        probed(config, Target(2, 1))
    cut = probed(config, Target(2, 1, GB))
    assert (cut.plan, cut.worker_bytes) == (whole.plan, whole.worker_bytes)
    held = trained.num_embeddings[-1]
    assert sum(rows * (16 + 1) * 4 for rows in held) < sum(whole.worker_bytes) // 4
    (note,) = cut.notes
    assert f"with {max(held):,} rows in the largest" in note


def test_a_gpus_speed_that_is_given_is_not_measured(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trained = Trained(monkeypatch)
    config = config.replace(scaling={"num_workers": 2})
    found = forecast(config, ClusterShape.parse("cpus=16,gpus=2,gpu_rows_per_s=250000"))
    assert not trained.num_embeddings
    assert found.model_rows_per_s == 250_000 * found.num_workers
    assert found.cpus_per_gpu is not None
    assert "given, not measured" in found.text()
    assert "--cluster gpus=N,gpu_memory_gb=N,... says what theirs have" in found.text()


def test_ids_beyond_a_cut_table_are_folded_into_it() -> None:
    ids = (np.array([0, 5, 9]), np.array([[1, 7], [2, 8], [3, 3]]), Bags(np.array([4, 6]), np.array([0, 2, 0])))
    rows = EncodedRows(np.zeros((3, 1), np.float32), ids, None)
    one, two, bags = folded(rows, [5, 4, 10]).ids
    assert isinstance(one, np.ndarray)
    assert isinstance(two, np.ndarray)
    assert isinstance(bags, Bags)
    assert one.tolist() == [0, 0, 4]
    assert two.tolist() == [[1, 3], [2, 0], [3, 3]]
    assert bags.values.tolist() == [4, 6]
    assert bags.lengths.tolist() == [0, 2, 0]
