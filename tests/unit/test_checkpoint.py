"""Checkpoints: complete or not at all, damage found by file name, free of pickle, plan and world size."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec import checkpoint, storage
from rayrec.checkpoint import Checkpoint
from rayrec.config import InputError


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "model.weight": torch.randn(5, 3),
        "model.bias": torch.randn(7).to(torch.bfloat16),
        "model.mask": torch.tensor([True, False, True]),
        "model.half": torch.randn(3).half(),
        "optim.step": torch.tensor(2**40 + seed),
        "optim.ids": torch.arange(5, dtype=torch.int32) + seed,
        "optim.bytes": torch.arange(3, dtype=torch.uint8),
        "optim.double": torch.randn(2, 2, 2, dtype=torch.float64).permute(2, 0, 1),  # not contiguous
        "optim.empty": torch.zeros(0, 4),
    }


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}


def save(folder: Path, step: int = 1, **arguments: Any) -> Checkpoint:
    path = checkpoint.folder_of(str(folder), step)
    checkpoint.save(
        path, arguments.pop("tensors", tensors()), state=arguments.pop("state", {"step": step}), **arguments
    )
    return Checkpoint(path)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_tensors_come_back(tmp_path: Path) -> None:
    saved = save(tmp_path, 12, state={"position": [1, None], "ä": 0.1})
    target = zeros()
    checkpoint.restore(saved, target)
    assert same(target, tensors())
    assert (saved.step, saved.manifest()["state"]) == (12, {"position": [1, None], "ä": 0.1})
    assert dict(checkpoint.full_tensors(saved)).keys() == tensors().keys()
    assert same(dict(checkpoint.full_tensors(saved)), tensors())
    part = {"model.weight": torch.zeros(5, 3)}
    checkpoint.restore(saved, part)
    assert torch.equal(part["model.weight"], tensors()["model.weight"])


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    saved = save(tmp_path)
    parameter = torch.nn.Parameter(torch.zeros(5, 3))
    checkpoint.restore(saved, {"model.weight": parameter})
    assert torch.equal(parameter, tensors()["model.weight"])


def test_files_are_safetensors_and_nothing_is_pickled(tmp_path: Path) -> None:
    constant = {"a": torch.ones(4, 3), "b": torch.tensor(5)}
    saved = save(tmp_path, tensors=constant)
    assert sorted(os.listdir(saved.path)) == ["data_00000.safetensors", "manifest.json"]
    for name in os.listdir(saved.path):
        data = Path(saved.path, name).read_bytes()
        assert not any(b"\x80" + bytes([protocol]) in data for protocol in range(2, 6))
        assert b"PK\x03\x04" not in data
    data = Path(saved.path, "data_00000.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 64 == 0
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    assert {name.split("@")[0]: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == {
        "a": ("F32", [4, 3]),
        "b": ("I64", []),
    }
    offsets = sorted(entry["data_offsets"] for entry in header.values())
    assert offsets[0][0] == 0
    assert offsets[0][1] == offsets[1][0]
    assert offsets[1][1] == len(body)
    start, stop = next(entry["data_offsets"] for name, entry in header.items() if name.startswith("a@"))
    assert body[start:stop] == torch.ones(4, 3).numpy().tobytes()


def test_the_size_is_that_of_the_tensors(tmp_path: Path) -> None:
    size = checkpoint.save(str(tmp_path / "step_1"), tensors(), state={})
    assert size == sum(tensor.numel() * tensor.element_size() for tensor in tensors().values())


def test_the_manifest_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever dies on the way leaves no checkpoint behind, and the one before is still the latest."""
    before = save(tmp_path, 1)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    def extra(folder: str) -> None:
        storage.write_bytes(storage.join(folder, "config.yaml"), b"a: 1")

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, extra_files=dies)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_json", dies)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 3, extra_files=extra)
    torn = checkpoint.folder_of(str(tmp_path), 3)
    assert sorted(os.listdir(torn)) == ["config.yaml", "data_00000.safetensors"]
    assert checkpoint.committed(str(tmp_path)) == [before]
    assert checkpoint.latest(str(tmp_path)) == before
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        checkpoint.open_checkpoint(torn)
    again = save(tmp_path, 3, extra_files=extra)  # over the torn one
    assert checkpoint.latest(str(tmp_path)) == again


def test_failures_are_raised_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path)
    with pytest.raises(TypeError, match=r"rates is no tensor"):
        save(tmp_path, tensors={"rates": [1, 2]})


def test_checkpoints_are_found_in_the_order_of_steps(tmp_path: Path) -> None:
    assert checkpoint.latest(str(tmp_path)) is None
    with pytest.raises(InputError, match=r"holds no complete checkpoint \(no manifest\.json\)"):
        checkpoint.open_checkpoint(str(tmp_path))
    for step in (200_000_000, 5, 40):
        save(tmp_path, step, tensors={"a": torch.zeros(1)})
    (tmp_path / "checkpoints" / "other").mkdir()
    (tmp_path / "checkpoints" / "step_00000099").mkdir()
    assert [found.step for found in checkpoint.committed(str(tmp_path))] == [5, 40, 200_000_000]
    assert checkpoint.open_checkpoint(str(tmp_path)).step == 200_000_000
    one = checkpoint.folder_of(str(tmp_path), 40)
    assert checkpoint.open_checkpoint(one).path == one
    assert checkpoint.step_of(one + "/") == 40
    with pytest.raises(InputError, match="not a checkpoint's folder"):
        checkpoint.step_of(str(tmp_path))


@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "empty"])
def test_damage_is_found_by_name(tmp_path: Path, how: str) -> None:
    saved = save(tmp_path, tensors={"model.weight": torch.randn(40, 10)})
    path = Path(saved.path, "data_00000.safetensors")
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"flipped": data, "cut": data[:-3], "empty": b""}[how])
    with pytest.raises(InputError, match=r"data_00000\.safetensors: .*model\.weight.*use an earlier checkpoint"):
        checkpoint.restore(saved, {"model.weight": torch.zeros(40, 10)})
    with pytest.raises(InputError, match=r"data_00000\.safetensors"):
        checkpoint.weights_sha256(saved)


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved = save(tmp_path)
    with pytest.raises(InputError, match=r"model\.weight has shape \[5, 3\], the model's is \[5, 4\]"):
        checkpoint.restore(saved, {"model.weight": torch.zeros(5, 4)})
    with pytest.raises(InputError, match=r"holds no model\.new; it was saved by another model"):
        checkpoint.restore(saved, {"model.new": torch.zeros(5, 4)})


def test_another_version_and_a_damaged_manifest_are_refused(tmp_path: Path) -> None:
    saved = save(tmp_path)
    manifest = saved.manifest()
    storage.write_json(storage.join(saved.path, "manifest.json"), {**manifest, "version": 2})
    with pytest.raises(InputError, match="format version 2, this rayrec reads 1"):
        checkpoint.restore(saved, zeros())
    Path(saved.path, "manifest.json").write_bytes(b'{"version": 1')
    with pytest.raises(InputError, match=r"manifest\.json: damaged"):
        checkpoint.restore(saved, zeros())


def test_the_weights_hash(tmp_path: Path) -> None:
    base = checkpoint.weights_sha256(save(tmp_path, 1))
    assert checkpoint.weights_sha256(save(tmp_path, 2)) == base
    shuffled = dict(reversed(tensors().items()))
    shuffled["optim.step"] = torch.tensor(1)  # not a weight
    assert checkpoint.weights_sha256(save(tmp_path, 3, tensors=shuffled)) == base
    seen = {base}
    for name, tensor in tensors().items():
        if name.startswith("model."):
            changed = tensors()
            changed[name] = tensor.clone()
            changed[name][0] = 0 if tensor[0].any() else 1
            seen.add(checkpoint.weights_sha256(save(tmp_path, 4, tensors=changed)))
    reshaped = {**tensors(), "model.weight": tensors()["model.weight"].reshape(3, 5)}
    seen.add(checkpoint.weights_sha256(save(tmp_path, 4, tensors=reshaped)))
    assert len(seen) == 6


def test_urls(tmp_path: Path) -> None:
    saved = Checkpoint(f"file://{tmp_path}/checkpoints/step_00000001")
    checkpoint.save(saved.path, tensors(), state={})
    target = zeros()
    checkpoint.restore(checkpoint.open_checkpoint(f"file://{tmp_path}"), target)
    assert same(target, tensors())
    path = tmp_path / "checkpoints" / "step_00000001" / "data_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="cut short"):
        checkpoint.restore(saved, target)


# Several processes ---------------------------------------------------------------------------------------------------

WORKER = r"""
import sys
import torch
from torch import distributed
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from rayrec import checkpoint
from rayrec.config import InputError

action, rank, world_size, folder, meeting = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
mesh = init_device_mesh("cpu", (world_size,))


def table(value):
    # 7 rows by 4 over the ranks, as TorchRec holds a row-wise table
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(world_size)])
    out = sharded_tensor.zeros(spec, 7, 4)
    for shard in out.local_shards():
        (row, _), (rows, _) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(value[row : row + rows])
    return out


def state(factor):
    torch.manual_seed(0)
    return {
        "model.rows": distribute_tensor(torch.arange(30.0).reshape(10, 3) * factor, mesh, [Shard(0)]),
        "model.columns": distribute_tensor(torch.arange(30.0).reshape(3, 10) * factor, mesh, [Shard(1)]),
        "model.table": table(torch.arange(28.0).reshape(7, 4) * factor),
        "model.same": distribute_tensor(torch.arange(5.0) * factor, mesh, [Replicate()]),
        "model.plain": torch.arange(6.0) * factor,
    }


def local(value):
    if hasattr(value, "local_shards"):
        return torch.cat([shard.tensor for shard in value.local_shards()])
    return value.to_local() if hasattr(value, "to_local") else value


if action == "save":
    checkpoint.save(folder, state(1), state={"rank": rank})
else:
    target = state(0)
    checkpoint.restore(checkpoint.Checkpoint(folder), target)
    for name, expected in state(1).items():
        assert torch.equal(local(target[name]), local(expected)), name
    try:
        checkpoint.restore(checkpoint.Checkpoint(folder + "_damaged"), target)
    except InputError as error:
        print(error)
    else:
        raise AssertionError
distributed.barrier()  # a rank that goes first would abort the other while it still works
distributed.destroy_process_group()
"""


def run_workers(action: str, world_size: int, path: str, meeting: Path) -> list[tuple[int, str]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WORKER, action, str(rank), str(world_size), path, str(meeting)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]
    return [(process.wait(timeout=120), process.communicate()[0]) for process in processes]


def whole() -> dict[str, torch.Tensor]:
    return {
        "model.rows": torch.arange(30.0).reshape(10, 3),
        "model.columns": torch.arange(30.0).reshape(3, 10),
        "model.table": torch.arange(28.0).reshape(7, 4),
        "model.same": torch.arange(5.0),
        "model.plain": torch.arange(6.0),
    }


def test_two_ranks_save_and_one_restores(tmp_path: Path) -> None:
    path = str(tmp_path / "step_00000001")
    results = run_workers("save", 2, path, tmp_path / "meeting")
    assert [code for code, _ in results] == [0, 0], results
    assert sorted(os.listdir(path)) == ["data_00000.safetensors", "data_00001.safetensors", "manifest.json"]
    saved = Checkpoint(path)
    assert saved.manifest()["state"] == {"rank": 0}
    target = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    checkpoint.restore(saved, target)
    assert same(target, whole())
    assert same(dict(checkpoint.full_tensors(saved)), whole())
    alone = save(tmp_path, tensors=whole())
    assert checkpoint.weights_sha256(alone) == checkpoint.weights_sha256(saved)
    second = Path(path, "data_00001.safetensors")
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)
    with pytest.raises(InputError, match=r"data_00001\.safetensors: damaged"):
        checkpoint.restore(saved, target)


def test_one_saves_and_two_ranks_restore(tmp_path: Path) -> None:
    saved = save(tmp_path, tensors=whole())
    shutil.copytree(saved.path, saved.path + "_damaged")
    path = Path(saved.path + "_damaged", "data_00000.safetensors")
    data = bytearray(path.read_bytes())
    data[-200] ^= 1  # in the rows of one rank; the other reads a part of the same tensor
    path.write_bytes(data)
    results = run_workers("restore", 2, saved.path, tmp_path / "meeting")
    assert [code for code, _ in results] == [0, 0], results
    assert all("data_00000.safetensors: damaged" in output for _, output in results)
