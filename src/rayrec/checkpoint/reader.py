"""Reads checkpoints: only the rows that are wanted, by blocks whose checksums are verified, many at a time."""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import distributed

from rayrec import storage
from rayrec.checkpoint.communicator import Ranks
from rayrec.checkpoint.discovery import Checkpoint
from rayrec.checkpoint.format import DamagedError, sha256_of, told_unreadable
from rayrec.checkpoint.safetensors import TORCH_DTYPES, write_weights
from rayrec.collectives import group_device
from rayrec.config import InputError

if TYPE_CHECKING:  # torch.distributed.checkpoint takes a second to import, which a process that scores need not do
    from torch.distributed.checkpoint import Metadata
    from torch.distributed.checkpoint.planner import ReadItem


NUM_THREADS = 8
_RANGE_BYTES = 64 * 2**20
"""Read from a URL and copied at a time by each thread."""
_LOCAL_RANGE_BYTES = 16 * 2**20
"""Likewise from a disk: what a processor's cache holds in part, and no request costs anything."""


_WINDOW_BYTES = 64 * 2**20
"""Of a tensor that is hashed, in memory at once; and as much again is read ahead."""


def restore(checkpoint: Checkpoint, tensors: dict[str, Any]) -> None:
    """Fills `tensors` in place from a checkpoint, each rank reading what it holds, under any plan and world size. What all
    ranks hold is fetched from a URL by one of them, so that a store gives out every byte once.

    Collective where a process group is up. Raises, on all ranks, DamagedError where any rank found a file damaged (rank 0
    looks at the extra files too), InputError for a tensor that is missing or misshapen; tensors may then be half filled.
    """
    ranks = Ranks.all()
    manifest = ranks.from_first(checkpoint.manifest)
    shared = share_out(tensors, ranks) if storage.is_url(checkpoint.path) else {}
    mine = {name: tensor for name, tensor in tensors.items() if shared.get(name, ranks.rank) == ranks.rank}
    ranks.together(lambda: _restore_mine(checkpoint.path, manifest, mine, extra_files=ranks.first))
    for name, reader in shared.items():
        distributed.broadcast(tensors[name].detach(), src=reader)


def _restore_mine(folder: str, manifest: dict[str, Any], tensors: dict[str, Any], *, extra_files: bool) -> None:
    from torch.distributed.checkpoint import DefaultLoadPlanner

    stored = manifest["tensors"]
    for name, tensor in tensors.items():
        if name not in stored:
            raise InputError(f"{folder}: holds no {name}; it was saved by another model")
        if list(tensor.size()) != stored[name]["shape"]:
            raise InputError(f"{folder}: {name} has shape {stored[name]['shape']}, the model's is {list(tensor.size())}")
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, metadata_of(manifest))
    items = [(item, planner.resolve_tensor(item).detach()) for item in planner.create_local_plan().items]
    _run(itertools.chain(_reads(folder, manifest, items), _extra_checks(folder, manifest) if extra_files else ()))


def read_items(folder: str, manifest: dict[str, Any], items: Iterable[tuple[ReadItem, torch.Tensor]]) -> None:
    """Fills tensors with the parts of a checkpoint that a load plan names, in threads. Raises DamagedError for a file that is not
    as it was written."""
    _run(_reads(folder, manifest, items))


def _reads(folder: str, manifest: dict[str, Any], items: Iterable[tuple[ReadItem, torch.Tensor]]) -> Iterator[Callable[[], None]]:
    reader = _Reader(folder, manifest["block_bytes"])
    for item, target in items:
        yield from _copies(reader, manifest["tensors"][item.storage_index.fqn], item, target)


def metadata_of(manifest: dict[str, Any]) -> Metadata:
    """What torch.distributed.checkpoint's planners want to know of a checkpoint."""
    from torch.distributed.checkpoint import Metadata
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=TORCH_DTYPES[entry["dtype"]]),
                torch.Size(entry["shape"]),
                [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in entry["chunks"]],
            )
            for name, entry in manifest["tensors"].items()
        }
    )


def _copies(reader: _Reader, entry: dict[str, Any], item: ReadItem, target: torch.Tensor) -> Iterator[Callable[[], None]]:
    name, offset = item.storage_index.fqn, item.storage_index.offset
    assert offset is not None
    chunk = next(chunk for chunk in entry["chunks"] if chunk["offsets"] == list(offset))
    rows = _Rows(name, TORCH_DTYPES[entry["dtype"]], chunk)
    box = tuple(zip(item.storage_offsets, item.lengths, strict=True))
    return _copies_of(reader, rows, box, target)


def _copies_of(
    reader: _Reader, rows: _Rows, box: Sequence[tuple[int, int]], target: torch.Tensor
) -> Iterator[Callable[[], None]]:
    """Calls that fill `target` with a box (first, length in each dimension) of a chunk, a range of rows each."""
    first, count = box[0] if box else (0, 1)
    for begin, end in rows.ranges(first, first + count, range_bytes=reader.range_bytes):
        part = target.narrow(0, begin - first, end - begin) if box else target

        def copy(begin: int = begin, end: int = end, part: torch.Tensor = part) -> None:
            memory = _memory(part, rows, box)
            if memory is not None and reader.reads_whole_blocks(rows, begin, end):
                reader.read(rows, begin, end, memory)
                return
            source = reader.read(rows, begin, end)
            for dimension, (start, length) in enumerate(box[1:], 1):
                source = source.narrow(dimension, start, length)
            part.copy_(source)

        yield copy


def _memory(part: torch.Tensor, rows: _Rows, box: Sequence[tuple[int, int]]) -> np.ndarray | None:
    """The bytes of a tensor that is to hold whole rows just as they are stored; None of others."""
    if part.device.type != "cpu" or part.dtype != rows.dtype or not part.is_contiguous():
        return None
    if list(box[1:]) != [(0, size) for size in rows.chunk["sizes"][1:]]:
        return None
    return part.reshape(-1).view(torch.uint8).numpy()


def _run(calls: Iterable[Callable[[], None]]) -> None:
    """Runs calls in threads (hashing, copying and reading let go of the interpreter); raises what the first failing raised."""
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="checkpoint-read")
    try:
        for future in [pool.submit(copy_context().run, call) for call in calls]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Rows:
    """The rows (dimension 0) of a stored chunk; a number without dimensions is one row."""

    name: str
    dtype: torch.dtype
    chunk: dict[str, Any]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.chunk["sizes"][1:])

    def ranges(self, first: int, stop: int, *, range_bytes: int) -> Iterator[tuple[int, int]]:
        """The rows from `first` to `stop` in ranges of a bounded size, cut where blocks are, if rows fit into them."""
        if not self.row_bytes:
            return
        while first < stop:
            border = (first * self.row_bytes // range_bytes + 1) * range_bytes
            end = min(stop, max(first + 1, -(-border // self.row_bytes)))
            yield first, end
            first = end


@final
class _Reader:
    """Reads verified rows of a checkpoint's files; by many threads at once. Never by a memory map: a place that a disk has
    lost would end the process, instead of an error that an earlier checkpoint helps against."""

    def __init__(self, folder: str, block_bytes: int) -> None:
        self._folder, self._block_bytes = folder, block_bytes
        self.range_bytes = _RANGE_BYTES if storage.is_url(folder) else _LOCAL_RANGE_BYTES
        self._verified: set[tuple[str, int, int]] = set()
        self._local = threading.local()

    def reads_whole_blocks(self, rows: _Rows, begin: int, end: int) -> bool:
        """Whether these rows of a chunk are all that has to be read to verify them."""
        stop = end * rows.row_bytes
        return begin * rows.row_bytes % self._block_bytes == 0 and (stop % self._block_bytes == 0 or stop == rows.chunk["bytes"])

    def read(self, rows: _Rows, begin: int, end: int, memory: np.ndarray | None = None) -> torch.Tensor:
        """Rows of a chunk: to be copied from at once, or in `memory`, where they are whole blocks. Raises DamagedError where a
        block is not as written; it is in `memory` all the same."""
        chunk, row_bytes = rows.chunk, rows.row_bytes
        first_block = begin * row_bytes // self._block_bytes
        stop_block = -(-end * row_bytes // self._block_bytes)
        start = first_block * self._block_bytes
        stop = min(stop_block * self._block_bytes, chunk["bytes"])
        data = self._buffer(stop - start) if memory is None else memory
        self._fill(data, rows, start)
        for block in range(first_block, stop_block):
            place = block * self._block_bytes - start
            self._verify(rows, block, data[place : place + self._block_bytes])
        wanted = torch.from_numpy(data[begin * row_bytes - start : end * row_bytes - start])
        return wanted.view(rows.dtype).reshape([end - begin, *chunk["sizes"][1:]] if chunk["sizes"] else [])

    def _verify(self, rows: _Rows, block: int, data: np.ndarray) -> None:
        chunk = rows.chunk
        place = (chunk["file"], chunk["start"], block)
        # Read again from a disk it comes from memory, as a rule; from far away it travels again.
        path = storage.join(self._folder, chunk["file"])
        if place in self._verified and not storage.is_url(path):
            return
        if hashlib.sha256(data.data).hexdigest() != chunk["sha256"][block]:
            raise DamagedError(f"{path}: damaged, the checksum of {rows.name} does not fit; use an earlier checkpoint")
        self._verified.add(place)

    def _fill(self, data: np.ndarray, rows: _Rows, start: int) -> None:
        path, first = storage.join(self._folder, rows.chunk["file"]), rows.chunk["start"]
        with told_unreadable(path):
            try:
                got = storage.read_into(path, first + start, data)
            except InputError:
                if storage.exists(path):
                    raise
                raise DamagedError(f"{path}: missing ({rows.name}); use an earlier checkpoint") from None
        if got != len(data):
            raise DamagedError(f"{path}: cut short ({rows.name}); use an earlier checkpoint")

    def _buffer(self, size_bytes: int) -> np.ndarray:
        """Of this thread, for one range at a time: fresh memory costs as much as reading into it."""
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._local.buffer = np.empty(size_bytes, np.uint8)
        return buffer[:size_bytes]


def check_extra_files(folder: str, manifest: dict[str, Any]) -> None:
    """Raises DamagedError where a file beside the tensors (config.yaml, the workload's own) is not as it was written."""
    _run(_extra_checks(folder, manifest))


def _extra_checks(folder: str, manifest: dict[str, Any]) -> Iterator[Callable[[], None]]:
    for name, file in manifest["files"].items():
        if "sha256" in file:
            yield partial(_check_extra_file, storage.join(folder, name), file["sha256"])


def _check_extra_file(path: str, sha256: str) -> None:
    if not storage.exists(path):
        raise DamagedError(f"{path}: missing; use an earlier checkpoint")
    if sha256_of(path) != sha256:
        raise DamagedError(f"{path}: damaged, its checksum does not fit; use an earlier checkpoint")


def full_tensors(checkpoint: Checkpoint, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor whose name starts with `prefix`, whole, one after the other, by name."""
    manifest = checkpoint.manifest()
    reader = _Reader(checkpoint.path, manifest["block_bytes"])
    for name in sorted(manifest["tensors"]):
        if not name.startswith(prefix):
            continue
        entry = manifest["tensors"][name]
        dtype = TORCH_DTYPES[entry["dtype"]]
        whole = torch.empty(entry["shape"], dtype=dtype)
        calls: list[Callable[[], None]] = []
        for chunk in entry["chunks"]:
            target = whole
            for dimension, (offset, size) in enumerate(zip(chunk["offsets"], chunk["sizes"], strict=True)):
                target = target.narrow(dimension, offset, size)
            box = [(0, size) for size in chunk["sizes"]]
            calls += _copies_of(reader, _Rows(name, dtype, chunk), box, target)
        _run(calls)
        yield name, whole


def verify(checkpoint: Checkpoint, prefix: str = "") -> None:
    """Reads every tensor whose name starts with `prefix`, and the extra files. Raises DamagedError for what is not as it
    was written."""
    for _ in full_tensors(checkpoint, prefix):
        pass
    check_extra_files(checkpoint.path, checkpoint.manifest())


def weights_sha256(checkpoint: Checkpoint, prefix: str = "model.") -> str:
    """SHA-256 over name, dtype, shape and bytes (row-major) of every weight, by name: it depends on neither the number of workers
    nor the sharding plan. Reads the files row range by row range: memory stays below 200 MiB for tables of any size. Raises
    DamagedError for a file that is not as it was written."""
    manifest = checkpoint.manifest()
    reader = _Reader(checkpoint.path, manifest["block_bytes"])
    digest = hashlib.sha256()
    # One thread reads ahead while this one hashes, which is a single stream by nature.
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as ahead:
        for name in sorted(name for name in manifest["tensors"] if name.startswith(prefix)):
            entry = manifest["tensors"][name]
            digest.update(f"{name}\0{entry['dtype']}\0{entry['shape']}\0".encode())
            first, *others = (partial(_rows_of, reader, name, entry, *window) for window in _windows(entry))
            upcoming = ahead.submit(copy_context().run, first)
            for read in others:
                rows, upcoming = upcoming.result(), ahead.submit(copy_context().run, read)
                digest.update(_as_bytes(rows))
            digest.update(_as_bytes(upcoming.result()))
    return digest.hexdigest()


def verified_bytes(checkpoint: Checkpoint, name: str, chunk: dict[str, Any]) -> Iterator[bytes]:
    """The bytes of a chunk of a tensor, of which its manifest says `chunk`, in pieces of a few blocks. Raises DamagedError where
    they are not as they were written."""
    manifest = checkpoint.manifest()
    reader, entry = _Reader(checkpoint.path, manifest["block_bytes"]), manifest["tensors"][name]
    rows = _Rows(name, TORCH_DTYPES[entry["dtype"]], chunk)
    for begin, end in rows.ranges(0, chunk["sizes"][0] if chunk["sizes"] else 1, range_bytes=reader.range_bytes):
        yield bytes(_as_bytes(reader.read(rows, begin, end)))  # a copy: the next read is into the same memory


def _windows(entry: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Ranges of a tensor's rows (dimension 0) of a bounded size; at least one, which may be empty. A number without dimensions is
    one row."""
    shape = entry["shape"] or [1]
    row_bytes = TORCH_DTYPES[entry["dtype"]].itemsize * math.prod(shape[1:])
    step = max(1, _WINDOW_BYTES // max(1, row_bytes))
    for first in range(0, max(1, shape[0]), step):
        yield first, min(first + step, shape[0])


def _rows_of(
    reader: _Reader, name: str, entry: dict[str, Any], first: int, stop: int, columns: tuple[int, int] | None = None
) -> torch.Tensor:
    """Rows [first, stop) of a stored tensor, whatever chunks it is in; of dimension 1 the range `columns` (None: all)."""
    dtype, shape = TORCH_DTYPES[entry["dtype"]], entry["shape"]
    wanted = [(first, stop), *((0, size) for size in shape[1:])] if shape else []
    if columns is not None:
        wanted[1] = columns
    part = torch.empty([end - begin for begin, end in wanted], dtype=dtype)
    calls: list[Callable[[], None]] = []
    for chunk in entry["chunks"]:
        target, box = part, []
        for dimension, (low, high) in enumerate(wanted):
            offset, size = chunk["offsets"][dimension], chunk["sizes"][dimension]
            begin, end = max(low, offset), min(high, offset + size)
            if begin >= end:
                break
            target = target.narrow(dimension, begin - low, end - begin)
            box.append((begin - offset, end - begin))
        if len(box) == len(wanted):
            calls += _copies_of(reader, _Rows(name, dtype, chunk), box, target)
    _run(calls)
    return part


@final
class TableReader:
    """Reads ranges of rows of a checkpoint's tensors, whose checksums it verifies."""

    def __init__(self, folder: str, manifest: dict[str, Any]) -> None:
        self._tensors, self._reader = manifest["tensors"], _Reader(folder, manifest["block_bytes"])

    def windows(self, name: str) -> Iterator[tuple[int, int]]:
        """Ranges [first, stop) of at most 64 MiB that all rows of a tensor make up."""
        return _windows(self._tensors[name])

    def rows(self, name: str, first: int, stop: int, *, columns: tuple[int, int] | None = None) -> torch.Tensor:
        """Rows [first, stop) of a tensor, of dimension 1 the range `columns` (None: all). Raises DamagedError for a file that is
        not as it was written."""
        return _rows_of(self._reader, name, self._tensors[name], first, stop, columns)


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


Shared = dict[str, int]
"""Names of tensors that all ranks hold whole -> the rank that reads them, in an order that all agree on."""


def share_out(tensors: dict[str, Any], ranks: Ranks) -> Shared:
    """Deals those tensors out so that each rank reads as many bytes; collective. Empty for a rank alone.

    Only what the default process group can pass on is dealt out: with NCCL nothing that lies in host memory.
    """
    if ranks.size == 1:
        return {}
    device = group_device().type
    mine = {
        name: (tuple(tensor.shape), tensor.dtype, tensor.nbytes)
        for name, tensor in tensors.items()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == device and tensor.is_contiguous()
    }
    everyone = ranks.gather_all(mine)
    held = [name for name, kind in everyone[0].items() if all(other.get(name) == kind for other in everyone)]
    shared: Shared = {}
    load = [0] * ranks.size
    for name in sorted(held, key=lambda name: (-mine[name][2], name)):
        reader = load.index(min(load))
        load[reader] += mine[name][2]
        shared[name] = reader
    return shared


def export_weights(checkpoint: str, out: str) -> dict[str, int]:
    """Writes the weights of a checkpoint's folder, under the model's own names, as model.safetensors into a folder. Returns how
    many `tensors` and `bytes` they are."""
    prefix = "model."
    weights = {name.removeprefix(prefix): tensor for name, tensor in full_tensors(Checkpoint(checkpoint), prefix)}
    return {"tensors": len(weights), "bytes": write_weights(storage.join(out, "model.safetensors"), weights)}
