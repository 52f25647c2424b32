"""Checkpoints through torch.distributed.checkpoint, and its checkpoints in rayrec."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.faults import flip
from ranks.checkpoint import run_ranks, same, sharded, whole
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from rayrec import checkpoint
from rayrec.checkpoint import Checkpoint, CheckpointReader, CheckpointWriter, restore, weights_sha256


def _zeros() -> dict[str, Any]:
    return {name: torch.zeros_like(tensor) for name, tensor in whole().items()}


def test_dcp_and_rayrec_checkpoints_are_interchangeable(tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    checkpoint.save(ours, whole(), state={})
    dcp.save(whole(), storage_writer=CheckpointWriter(theirs, state={"step": 3}))
    assert weights_sha256(Checkpoint(theirs)) == weights_sha256(Checkpoint(ours))
    assert Checkpoint(theirs).manifest()["state"] == {"step": 3}
    loaded, restored = _zeros(), _zeros()
    dcp.load(loaded, storage_reader=CheckpointReader(ours))
    restore(Checkpoint(theirs), restored)
    assert same(loaded, whole())
    assert same(restored, whole())


def test_dcp_loads_nested_and_selected_names(tmp_path: Path) -> None:
    path = tmp_path / "nested"
    dcp.save({"model": {"a": torch.arange(4.0), "b": torch.ones(2)}}, storage_writer=CheckpointWriter(path))
    assert set(Checkpoint(str(path)).manifest()["tensors"]) == {"model.a", "model.b"}
    found = {"model": {"a": torch.zeros(4)}}
    dcp.load(found, storage_reader=CheckpointReader(path))
    assert found["model"]["a"].tolist() == [0, 1, 2, 3]


def test_dcp_rejects_invalid_values_and_folders(tmp_path: Path) -> None:
    path = str(tmp_path / "one")
    with pytest.raises(CheckpointException, match=r"step: must be a tensor\. Put plain values into `state`"):
        dcp.save({"step": "three"}, storage_writer=CheckpointWriter(path))
    assert not Path(path).exists()
    dcp.save({"a": torch.ones(3)}, storage_writer=CheckpointWriter(path))
    with pytest.raises(CheckpointException, match="already contains a checkpoint"):
        dcp.save({"a": torch.ones(3)}, storage_writer=CheckpointWriter(path))
    with pytest.raises(CheckpointException, match=r"manifest\.json: missing"):
        dcp.load({"a": torch.ones(3)}, storage_reader=CheckpointReader(str(tmp_path / "nothing")))
    (data,) = Path(path).glob("data_*")
    flip(data, -1)
    with pytest.raises(CheckpointException, match="damaged, the checksum of a does not match"):
        dcp.load({"a": torch.ones(3)}, storage_reader=CheckpointReader(path))


def ranks(folder: str, rank: int) -> None:
    path = f"{folder}/step"
    dcp.save(sharded(), storage_writer=CheckpointWriter(path))
    loaded, restored = sharded(0), sharded(0)
    dcp.load(loaded, storage_reader=CheckpointReader(path))
    restore(Checkpoint(path), restored)
    assert same(loaded, sharded())
    assert same(restored, sharded())


@pytest.mark.slow
def test_dcp_loads_sharded_tensors_of_several_ranks(tmp_path: Path) -> None:
    run_ranks(ranks, 2, str(tmp_path))
    plain = _zeros()
    restore(Checkpoint(str(tmp_path / "step")), plain)
    assert same(plain, whole())
