"""Checkpoints free of plan and world size: tensors by name in safetensors files, a JSON manifest written last.

A checkpoint folder holds `data_RANK.safetensors` (each rank writes its shards, in parallel), what belongs with the
weights (`config.yaml`, the workload's own files), and `manifest.json`, which says where every part of every tensor
lies, with checksums, and holds the run's plain state. A folder without a manifest is not a checkpoint. Nothing in it is
ever unpickled. torch.distributed.checkpoint plans who writes and who reads what; its own storage is not used, since it pickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rayrec import storage
from rayrec.config import InputError

MANIFEST = "manifest.json"
VERSION = 1
_ALIGNMENT = 64
_DTYPES = {  # names of the safetensors format
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: str

    @property
    def step(self) -> int:
        return step_of(self.path)

    def manifest(self) -> dict[str, Any]:
        return storage.read_json(storage.join(self.path, MANIFEST))


def folder_of(run_folder: str, step: int) -> str:
    return storage.join(run_folder, "checkpoints", f"step_{step:08d}")


def step_of(path: str) -> int:
    found = re.search(r"step_(\d+)/?$", path)
    if not found:
        raise InputError(f"{path}: not a checkpoint's folder; they are named step_00001000 and the like")
    return int(found.group(1))


def committed(run_folder: str) -> list[Checkpoint]:
    """The complete checkpoints of a run, oldest first."""
    filesystem, inner = storage.resolve(storage.join(run_folder, "checkpoints"))
    from pyarrow import fs as arrow_fs

    infos = filesystem.get_file_info(arrow_fs.FileSelector(inner, allow_not_found=True))
    found = [
        Checkpoint(storage.join(run_folder, "checkpoints", info.base_name))
        for info in infos
        if info.type == arrow_fs.FileType.Directory and re.fullmatch(r"step_\d+", info.base_name)
    ]
    found = [checkpoint for checkpoint in found if storage.exists(storage.join(checkpoint.path, MANIFEST))]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest(run_folder: str) -> Checkpoint | None:
    """The newest complete checkpoint of a run, None where there is none."""
    found = committed(run_folder)
    return found[-1] if found else None


def open_checkpoint(path: str) -> Checkpoint:
    """A checkpoint by its folder; of a run's folder the one its summary names, else the newest.

    Raises InputError where there is none.
    """
    if storage.exists(storage.join(path, MANIFEST)):
        return Checkpoint(storage.absolute(path))
    summary = storage.join(path, "summary.json")
    chosen = latest(path)
    if storage.exists(summary):
        chosen = Checkpoint(folder_of(path, storage.read_json(summary)["chosen_step"]))
    if chosen is None:
        raise InputError(
            f"{path}: holds no complete checkpoint (no {MANIFEST}); give a folder such as RUN/checkpoints/step_00001000"
        )
    return Checkpoint(storage.absolute(chosen.path))


def save(
    path: str,
    tensors: dict[str, Any],
    *,
    state: dict[str, Any],
    extra_files: Callable[[str], None] | None = None,
) -> int:
    """Writes a checkpoint; collective. Returns its size in bytes (over all ranks).

    `tensors`: name -> tensor, ShardedTensor or DTensor. `state`: plain JSON values, taken from rank 0. `extra_files`
    is called on rank 0 with the folder, before the manifest is written.
    """
    first = not distributed.is_initialized() or distributed.get_rank() == 0
    if first:
        storage.remove_folder(path)  # a torn earlier attempt
        storage.make_folder(path)
        if extra_files is not None:
            extra_files(path)
    if distributed.is_initialized():
        distributed.barrier()
    writer = _Writer(path, state)
    with _unwrapped():
        dcp.save(tensors, storage_writer=writer, no_dist=not distributed.is_initialized())
    if distributed.is_initialized():
        distributed.barrier()
    return sum(file["bytes"] for file in Checkpoint(path).manifest()["files"].values())


def restore(checkpoint: Checkpoint, tensors: dict[str, Any]) -> None:
    """Fills `tensors` in place from a checkpoint, each rank reading what it holds, under any plan and world size.

    Collective where a process group is up. Raises InputError for a tensor that is missing, misshapen or damaged.
    """
    manifest = checkpoint.manifest()
    stored = manifest["tensors"]
    for name, tensor in tensors.items():
        if name not in stored:
            raise InputError(f"{checkpoint.path}: holds no {name}; it was saved by another model")
        if list(tensor.size()) != stored[name]["shape"]:
            raise InputError(
                f"{checkpoint.path}: {name} has shape {stored[name]['shape']}, the model's is {list(tensor.size())}"
            )
    with _unwrapped():
        dcp.load(tensors, storage_reader=_Reader(checkpoint, manifest), no_dist=not distributed.is_initialized())


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raises, on every rank, what failed on the first failing one: torch wraps it in a CheckpointException, which is no
    Exception and hides the message."""
    try:
        yield
    except CheckpointException as error:
        failure, _ = error.failures[min(error.failures)]
        raise failure from None


def full_tensors(checkpoint: Checkpoint, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor whose name starts with `prefix`, whole, one after the other, by name."""
    manifest = checkpoint.manifest()
    for name in sorted(manifest["tensors"]):
        if not name.startswith(prefix):
            continue
        entry = manifest["tensors"][name]
        whole = torch.empty(entry["shape"], dtype=_TORCH_DTYPES[entry["dtype"]])
        for chunk in entry["chunks"]:
            target = whole
            for dimension, (offset, size) in enumerate(zip(chunk["offsets"], chunk["sizes"], strict=True)):
                target = target.narrow(dimension, offset, size)
            target.copy_(_read_chunk(checkpoint.path, name, entry, chunk, verify=True))
        yield name, whole


def verify(checkpoint: Checkpoint, prefix: str = "") -> None:
    """Reads every tensor whose name starts with `prefix`. Raises InputError for what is missing or damaged."""
    for _ in full_tensors(checkpoint, prefix):
        pass


def weights_sha256(checkpoint: Checkpoint, prefix: str = "model.") -> str:
    """SHA-256 over name, dtype, shape and bytes of every weight, by name: free of world size and sharding plan."""
    digest = hashlib.sha256()
    for name, tensor in full_tensors(checkpoint, prefix):
        digest.update(f"{name}\0{_DTYPES[tensor.dtype]}\0{list(tensor.shape)}\0".encode())
        digest.update(_as_bytes(tensor))
    return digest.hexdigest()


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _tensor_bytes(planner: SavePlanner, item: WriteItem) -> memoryview:
    data = planner.resolve_data(item)
    assert isinstance(data, torch.Tensor)
    return _as_bytes(data)


def _read_chunk(folder: str, name: str, entry: dict[str, Any], chunk: dict[str, Any], *, verify: bool) -> torch.Tensor:
    import numpy as np

    path = storage.join(folder, chunk["file"])
    if storage.is_url(path):
        data = np.empty(chunk["bytes"], np.uint8)
        got = storage.read_into(path, chunk["start"], data)
    else:
        try:
            got = max(0, min(os.path.getsize(path) - chunk["start"], chunk["bytes"]))
        except FileNotFoundError:
            got = -1
        if got == chunk["bytes"] and got:
            data = np.memmap(path, np.uint8, "r", chunk["start"], (chunk["bytes"],))
        else:
            data = np.empty(0, np.uint8)
    if got != chunk["bytes"]:
        raise InputError(f"{path}: {'missing' if got < 0 else 'cut short'} ({name}); use an earlier checkpoint")
    if not chunk["bytes"]:
        return torch.empty(chunk["sizes"], dtype=_TORCH_DTYPES[entry["dtype"]])
    if verify and hashlib.sha256(data.data).hexdigest() != chunk["sha256"]:
        raise InputError(f"{path}: damaged, the checksum of {name} does not fit; use an earlier checkpoint")
    flat = torch.from_numpy(data.view(np.ndarray)) if data.flags.writeable else _read_only(data)
    return flat.view(_TORCH_DTYPES[entry["dtype"]]).reshape(chunk["sizes"])


def _read_only(data: Any) -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tensor is only ever copied from
        return torch.from_numpy(data)


class _Writer(StorageWriter):
    """Writes one safetensors file a rank and, on rank 0, the manifest last."""

    def __init__(self, path: str, state: dict[str, Any]) -> None:
        self._path, self._state = path, state

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(f"{item.index.fqn} is no tensor; plain state belongs into the manifest's state")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        name = f"data_{rank:05d}.safetensors"
        results: list[WriteResult] = []
        done: Future[list[WriteResult]] = Future()
        if plan.items:
            views = [(item, _tensor_bytes(planner, item)) for item in plan.items]
            header, starts, position = {}, [], 0
            for item, view in views:
                assert item.tensor_data is not None
                offsets = ",".join(str(offset) for offset in item.tensor_data.chunk.offsets)
                header[f"{item.index.fqn}@{offsets}"] = {
                    "dtype": _DTYPES[item.tensor_data.properties.dtype],
                    "shape": list(item.tensor_data.chunk.sizes),
                    "data_offsets": [position, position + len(view)],
                }
                starts.append(position)
                position += len(view)
            encoded = json.dumps(header, separators=(",", ":")).encode()
            encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT)
            with storage.writing(storage.join(self._path, name)) as local, open(local, "wb") as file:
                file.write(len(encoded).to_bytes(8, "little"))
                file.write(encoded)
                for _, view in views:
                    file.write(view)
            base = 8 + len(encoded)
            for (item, view), start in zip(views, starts, strict=True):
                where = {
                    "file": name,
                    "start": base + start,
                    "bytes": len(view),
                    "sha256": hashlib.sha256(view).hexdigest(),
                }
                results.append(WriteResult(index=item.index, size_in_bytes=len(view), storage_data=where))
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        where = {result.index: result.storage_data for part in results for result in part}
        tensors: dict[str, dict[str, Any]] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = []
            for chunk in entry.chunks:
                # A replicated tensor's index has no offset.
                place = where.get(MetadataIndex(name, chunk.offsets)) or where[MetadataIndex(name)]
                chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **place})
            tensors[name] = {"dtype": _DTYPES[entry.properties.dtype], "shape": list(entry.size), "chunks": chunks}
        files: dict[str, dict[str, int]] = {}
        for tensor in tensors.values():
            for chunk in tensor["chunks"]:
                files.setdefault(chunk["file"], {"bytes": 0})["bytes"] += chunk["bytes"]
        manifest = {"version": VERSION, "state": self._state, "files": files, "tensors": tensors}
        storage.write_json(storage.join(self._path, MANIFEST), manifest)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Reader(StorageReader):
    """Reads the byte ranges a rank needs of the safetensors files."""

    def __init__(self, checkpoint: Checkpoint, manifest: dict[str, Any]) -> None:
        self._path, self._tensors = checkpoint.path, manifest["tensors"]
        if manifest["version"] != VERSION:
            raise InputError(f"{checkpoint.path}: format version {manifest['version']}, this rayrec reads {VERSION}")

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=_TORCH_DTYPES[entry["dtype"]]),
                    torch.Size(entry["shape"]),
                    [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in entry["chunks"]],
                )
                for name, entry in self._tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        verified: set[tuple[str, int]] = set()
        for item in plan.items:
            assert item.type == LoadItemType.TENSOR
            name = item.storage_index.fqn
            entry = self._tensors[name]
            offset = item.storage_index.offset
            chunk = next(c for c in entry["chunks"] if offset is None or c["offsets"] == list(offset))
            # Also where only a part is wanted (another world size): a rank then reads whole what it needs a part of.
            place = (chunk["file"], chunk["start"])
            source = _read_chunk(self._path, name, entry, chunk, verify=place not in verified)
            verified.add(place)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
