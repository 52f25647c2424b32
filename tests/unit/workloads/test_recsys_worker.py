"""A click model on workers of unequal machines: one plan, every table trained and saved, the weights of a single worker."""

from __future__ import annotations

import json
from pathlib import Path

import click_ranks
import pytest
import torch
from checkpoint_ranks import run_ranks
from torch import distributed
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from rayrec.checkpoint import Checkpoint, full_tensors, weights_sha256
from rayrec.workloads.recsys_worker import Unwrapped


def test_the_dense_part_of_a_single_worker_is_on_its_device(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        sharded = DistributedModelParallel(
            torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)),
            env=ShardingEnv.from_local(1, 0),
            device=torch.device("meta"),
            plan=ShardingPlan({}),
            init_parameters=False,
            data_parallel_wrapper=Unwrapped(),
        )
    finally:
        distributed.destroy_process_group()
    assert {tensor.device.type for tensor in sharded.state_dict().values()} == {"meta"}


@pytest.mark.slow
def test_machines_with_unequal_numbers_of_workers_train_one_model(tmp_path: Path) -> None:
    run_ranks(click_ranks.alone, 1, str(tmp_path))
    run_ranks(click_ranks.on_unequal_nodes, 3, str(tmp_path))
    tables_of = {name: len(tables) for name, tables in click_ranks.CASES.items()}
    for name, num_tables in {**tables_of, "shared": 2, "sequences": 2, "adam": 2, "adam_sequences": 2}.items():
        one, three = tmp_path / f"{name}_1", tmp_path / f"{name}_3"
        assert weights_sha256(Checkpoint(str(three / "start"))) == weights_sha256(Checkpoint(str(one / "start")))
        expected, found = (dict(full_tensors(Checkpoint(str(run / "end")))) for run in (one, three))
        assert found.keys() == expected.keys()
        of_tables = [key for key in found if ".embedding_bags." in key or ".sequences.embeddings." in key]
        assert len(of_tables) == num_tables * (4 if name.startswith("adam") else 1)  # with Adam's three states
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, msg=key)
        losses = [json.loads((run / "losses.json").read_text()) for run in (one, three)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    exact, rounded = (
        dict(full_tensors(Checkpoint(str(tmp_path / f"{name}_3" / "end")))) for name in ("equal", "rounded")
    )
    assert any(not torch.equal(exact[key], tensor) for key, tensor in rounded.items())
    for key, tensor in rounded.items():
        torch.testing.assert_close(tensor, exact[key], msg=key, rtol=0.01, atol=0.002)
    # Sums of three depend on their order, which is the same in the first step of an attempt as in any other.
    whole, parts = (weights_sha256(Checkpoint(str(tmp_path / name / "6"))) for name in ("whole", "parts"))
    assert whole == parts
