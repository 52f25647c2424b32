"""Several processes save and restore together: any number of them, asynchronously, through trouble of one of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest import mock

import torch
from ranks.checkpoint import run_ranks, same, whole

from rayrec import checkpoint
from rayrec.checkpoint import Checkpoint, Retention, Saver, acquire_lease, folder_of, newest_good, reader


def test_from_two_ranks_to_one_to_three_to_two(tmp_path: Path) -> None:
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
    with mock.patch.object(
        reader, "_WINDOW_BYTES", 24
    ):  # a range of rows then lies in several chunks, of rows or of columns
        assert checkpoint.weights_sha256(one) == checkpoint.weights_sha256(two) == checkpoint.weights_sha256(three)

    shutil.copytree(two.path, folder_of(folder, 4))
    (chunk,) = two.manifest()["tensors"]["model.rows"]["chunks"]
    harmed = Path(folder_of(folder, 4), chunk["file"])
    data = bytearray(harmed.read_bytes())
    data[chunk["start"] + chunk["bytes"] - 1] ^= 1  # whichever rank reads it, all are to know
    harmed.write_bytes(data)
    shutil.copytree(two.path, folder_of(folder, 5))
    Path(folder_of(folder, 5), chunk["file"]).unlink()
    outputs = run_ranks("restore", 2, folder)
    expected = f"damaged: {harmed}: damaged, the checksum of model.rows does not fit"
    assert all(expected in output for output in outputs), outputs


def test_a_rank_reads_the_blocks_it_needs(tmp_path: Path) -> None:
    run_ranks("read_some", 2, str(tmp_path))


def test_what_all_ranks_hold_is_fetched_once(tmp_path: Path) -> None:
    run_ranks("read_once", 2, str(tmp_path))


def test_ranks_save_in_the_background(tmp_path: Path) -> None:
    run_ranks("save_in_background", 2, str(tmp_path))


def test_no_checkpoint_where_ranks_share_no_storage_or_no_plan(tmp_path: Path) -> None:
    run_ranks("save_apart", 2, str(tmp_path))


def test_a_rank_killed_while_it_saves(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks("die_saving", 2, folder, killed=1)
    torn = folder_of(folder, 2)
    assert any(name.endswith(".partial") for name in os.listdir(torn))
    found = newest_good(folder, log=lambda *_: None)
    assert found == Checkpoint(folder_of(folder, 1))
    target = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    checkpoint.restore(found, target)
    assert same(target, whole())
    # The next attempt sweeps, and saves.
    saver = Saver(
        folder, lease=acquire_lease(folder), retention=Retention(), extra_files={}, max_outage_s=5, log=lambda *_: None
    )
    assert saver.begin(3, target, state={}, score=None)
    saver.wait()
    saver.close()
    assert not os.path.exists(torn)
    assert [found.step for found in checkpoint.committed(folder)] == [1, 3]
