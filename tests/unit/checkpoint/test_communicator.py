"""Saves and restores of several processes, with other world sizes, asynchronous saves and failing ranks."""

import os
import shutil
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
import torch
from builders.faults import flip
from builders.savers import Run, save
from ranks.checkpoint import run_ranks, same, whole

from rayrec import checkpoint
from rayrec.checkpoint import Checkpoint, folder_of, reader


def test_checkpoint_restores_at_other_world_sizes(tmp_path: Path) -> None:
    folder = str(tmp_path)
    one, two, three = (Checkpoint(folder_of(folder, step)) for step in (1, 2, 3))
    run_ranks("save", 2, folder)
    assert sorted(os.listdir(one.path)) == ["data_00000.safetensors", "data_00001.safetensors", "manifest.json"]
    assert one.manifest()["state"] == {"rank": 0}
    target = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    checkpoint.restore(one, target)
    assert same(target, whole())
    checkpoint.save(two.path, target, state={})
    run_ranks("reshard", 3, folder)
    assert len(os.listdir(three.path)) == 4
    assert same(dict(checkpoint.full_tensors(three)), whole())
    assert checkpoint.weights_sha256(one) == checkpoint.weights_sha256(two) == checkpoint.weights_sha256(three)
    with mock.patch.object(reader, "_WINDOW_BYTES", 24):  # a range of rows then lies in several chunks
        assert checkpoint.weights_sha256(one) == checkpoint.weights_sha256(two) == checkpoint.weights_sha256(three)

    shutil.copytree(two.path, folder_of(folder, 4))
    (chunk,) = two.manifest()["tensors"]["model.rows"]["chunks"]
    harmed = Path(folder_of(folder, 4), chunk["file"])
    flip(harmed, chunk["start"] + chunk["bytes"] - 1)  # whichever rank reads it, all are to know
    shutil.copytree(two.path, folder_of(folder, 5))
    Path(folder_of(folder, 5), chunk["file"]).unlink()
    outputs = run_ranks("restore", 2, folder)
    expected = f"damaged: {harmed}: damaged, the checksum of model.rows does not match"
    assert all(expected in output for output in outputs), outputs


@pytest.mark.parametrize("what", ["read_some", "read_once", "save_in_background", "save_apart"])
def test_two_ranks_agree(tmp_path: Path, what: str) -> None:
    run_ranks(what, 2, str(tmp_path))


def test_rank_killed_during_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    run_ranks("die_saving", 2, str(tmp_path), killed=1)
    with closing(Run(tmp_path)) as run:
        assert list(run.path(2).glob("*.partial"))
        assert run.newest() == run.at(1)
        target = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
        checkpoint.restore(run.at(1), target)
        assert same(target, whole())
        save(run.saver(), 3, target)  # the next attempt sweeps, and saves
    assert not run.path(2).exists()
    assert run.steps() == [1, 3]
