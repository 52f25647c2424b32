"""Checkpoint reader: verifies block checksums, and reads only the requested rows, in parallel."""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import distributed

from rayrec import storage
from rayrec.checkpoint.communicator import Communicator
from rayrec.checkpoint.discovery import Checkpoint
from rayrec.checkpoint.format import (
    DamagedError,
    block_checksum,
    compute_sha256,
    wrap_read_errors,
)
from rayrec.checkpoint.safetensors import TORCH_DTYPES, write_weights
from rayrec.collectives import group_device
from rayrec.config import InputError
from rayrec.storage.range_reader import in_order

# Importing torch.distributed.checkpoint takes a second, which scoring processes can avoid.
if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata
    from torch.distributed.checkpoint.planner import ReadItem


NUM_THREADS = 8
_RANGE_BYTES = 64 * 2**20
"""Bytes that each thread reads from a URL and copies at a time."""
_LOCAL_RANGE_BYTES = 16 * 2**20
"""Bytes that each thread reads from a disk at a time. Fits partly into the CPU cache, and small
reads cost nothing extra.
"""


_WINDOW_BYTES = 64 * 2**20
"""Bytes of a tensor in memory at once while it is hashed. As many again are prefetched."""


def restore(checkpoint: Checkpoint, tensors: dict[str, Any]) -> None:
    """Load `tensors` in place from a checkpoint, each rank its own shards, for any plan and world
    size. For a URL, one rank fetches each tensor that all share, so every byte is downloaded once.
    Collective in a process group. Raises on all ranks DamagedError for a damaged file (rank 0 also
    checks the extra files), and InputError for a missing tensor or a wrong shape.
    """
    ranks = Communicator.all()
    manifest = ranks.run_on_rank0(checkpoint.manifest)
    # Broadcasting is faster than a store, but not than a disk or its cache.
    shared = assign_readers(tensors, ranks) if storage.is_url(checkpoint.path) else {}
    local = {
        name: tensor
        for name, tensor in tensors.items()
        if shared.get(name, ranks.rank) == ranks.rank
    }
    ranks.run_on_all_ranks(
        lambda: _restore_local(checkpoint.path, manifest, local, extra_files=ranks.first)
    )
    # All ranks go through the same names in the same order, as `assign_readers` promises.
    for name, reader in shared.items():
        distributed.broadcast(tensors[name].detach(), src=reader)


def _restore_local(
    folder: str, manifest: dict[str, Any], tensors: dict[str, Any], *, extra_files: bool
) -> None:
    from torch.distributed.checkpoint import DefaultLoadPlanner

    stored = manifest["tensors"]
    for name, tensor in tensors.items():
        if name not in stored:
            raise InputError(f"{folder}: {name} not found. Use a checkpoint of the same model")
        if list(tensor.size()) != stored[name]["shape"]:
            raise InputError(
                f"{folder}: {name} must have the model's shape {list(tensor.size())}, got "
                f"{stored[name]['shape']}"
            )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, make_metadata(manifest))
    items = [
        (item, planner.resolve_tensor(item).detach()) for item in planner.create_local_plan().items
    ]
    _run(
        itertools.chain(
            _reads(folder, manifest, items),
            _extra_checks(folder, manifest) if extra_files else (),
        )
    )


def read_items(
    folder: str,
    manifest: dict[str, Any],
    items: Iterable[tuple[ReadItem, torch.Tensor]],
) -> None:
    """Load the items of a load plan, in threads. Raises DamagedError for a damaged file."""
    _run(_reads(folder, manifest, items))


def _reads(
    folder: str,
    manifest: dict[str, Any],
    items: Iterable[tuple[ReadItem, torch.Tensor]],
) -> Iterator[Callable[[], None]]:
    reader = _Reader(folder, manifest["block_bytes"])
    for item, target in items:
        name = item.storage_index.fqn
        offset = item.storage_index.offset
        assert offset is not None
        rows = next(
            rows
            for rows in _stored_rows(name, manifest["tensors"][name])
            if rows.chunk.offsets == list(offset)
        )
        box = tuple(zip(item.storage_offsets, item.lengths, strict=True))
        yield from _copies(reader, rows, box, target)


def make_metadata(manifest: dict[str, Any]) -> Metadata:
    """Return the checkpoint metadata for torch.distributed.checkpoint planners."""
    from torch.distributed.checkpoint import Metadata
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=TORCH_DTYPES[entry["dtype"]]),
                torch.Size(entry["shape"]),
                [
                    ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"]))
                    for c in entry["chunks"]
                ],
            )
            for name, entry in manifest["tensors"].items()
        }
    )


def _copies(
    reader: _Reader, rows: _Rows, box: Sequence[tuple[int, int]], target: torch.Tensor
) -> Iterator[Callable[[], None]]:
    """Yield calls that fill `target` with a box (first, length in each dimension) of a chunk, one
    range of rows each.
    """
    first, count = box[0] if box else (0, 1)
    for begin, end in rows.ranges(first, first + count, range_bytes=reader.range_bytes):
        part = target.narrow(0, begin - first, end - begin) if box else target

        def copy(begin: int = begin, end: int = end, part: torch.Tensor = part) -> None:
            memory = _memory(part, rows, box)
            if memory is not None and reader.is_block_aligned(rows, begin, end):
                reader.read(rows, begin, end, memory)
                return
            source = reader.read(rows, begin, end)
            for dimension, (start, length) in enumerate(box[1:], 1):
                source = source.narrow(dimension, start, length)
            part.copy_(source)

        yield copy


def _memory(part: torch.Tensor, rows: _Rows, box: Sequence[tuple[int, int]]) -> np.ndarray | None:
    """Return the bytes of a tensor to read full stored rows into, or None if layout or dtype
    differ.
    """
    if part.device.type != "cpu" or part.dtype != rows.dtype or not part.is_contiguous():
        return None
    if list(box[1:]) != [(0, size) for size in rows.chunk.sizes[1:]]:
        return None
    return part.reshape(-1).view(torch.uint8).numpy()


def _run(calls: Iterable[Callable[[], None]]) -> None:
    """Run calls in threads (hashing, copying and reading release the GIL), a single one in this
    thread: most tensors are small. Raises the error of the first failed call.
    """
    calls = iter(calls)
    first = list(itertools.islice(calls, 2))
    if len(first) < 2:
        for call in first:
            call()
        return
    calls = itertools.chain(first, calls)
    for _ in in_order(
        lambda call: call(),
        calls,
        name="checkpoint-read",
        num_threads=NUM_THREADS,
        prefetch=8 * NUM_THREADS,
    ):
        pass


@dataclass(frozen=True)
class Chunk:
    """Box of a stored tensor, as the manifest describes it."""

    offsets: list[int]
    sizes: list[int]
    file: str
    start: int
    """First byte in the file."""
    bytes: int
    xxh3_128: list[str] | None = None
    """Checksum of each block."""
    sha256: list[str] | None = None
    """The same in version 2, None in later ones."""

    @property
    def checksums(self) -> list[str]:
        """Checksum of each block, of either version."""
        checksums = self.xxh3_128 if self.sha256 is None else self.sha256
        assert checksums is not None  # As the manifest was checked
        return checksums

    def is_intact(self, block: int, data: np.ndarray) -> bool:
        """Return whether the data of a block has its checksum."""
        checksum = (
            block_checksum(data.data)
            if self.sha256 is None
            else hashlib.sha256(data.data).hexdigest()
        )
        return checksum == self.checksums[block]

    @property
    def num_rows(self) -> int:
        return self.sizes[0] if self.sizes else 1


@dataclass(frozen=True)
class _Rows:
    """Rows (dimension 0) of a stored chunk. A scalar is one row."""

    name: str
    dtype: torch.dtype
    chunk: Chunk

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.chunk.sizes[1:])

    def ranges(self, first: int, stop: int, *, range_bytes: int) -> Iterator[tuple[int, int]]:
        """Split rows [first, stop) into ranges of bounded size, aligned to blocks if rows are
        smaller than blocks.
        """
        if not self.row_bytes:
            return
        while first < stop:
            border = (first * self.row_bytes // range_bytes + 1) * range_bytes
            end = min(stop, max(first + 1, -(-border // self.row_bytes)))
            yield first, end
            first = end


def _stored_rows(name: str, entry: dict[str, Any]) -> Iterator[_Rows]:
    """Yield the rows of each chunk of a tensor, given its manifest entry."""
    for chunk in entry["chunks"]:
        yield _Rows(name, TORCH_DTYPES[entry["dtype"]], Chunk(**chunk))


@final
class _Reader:
    """Thread-safe reader of verified rows. Does not use memory maps: a bad disk sector would kill
    the process, instead of raising an error from which an earlier checkpoint can recover.
    """

    def __init__(self, folder: str, block_bytes: int) -> None:
        self._folder = folder
        self._block_bytes = block_bytes
        self.range_bytes = _RANGE_BYTES if storage.is_url(folder) else _LOCAL_RANGE_BYTES
        self._verified: set[tuple[str, int, int]] = set()
        self._local = threading.local()

    def is_block_aligned(self, rows: _Rows, begin: int, end: int) -> bool:
        """Return whether these rows of a chunk consist of full checksum blocks."""
        stop = end * rows.row_bytes
        return begin * rows.row_bytes % self._block_bytes == 0 and (
            stop % self._block_bytes == 0 or stop == rows.chunk.bytes
        )

    def read(
        self, rows: _Rows, begin: int, end: int, memory: np.ndarray | None = None
    ) -> torch.Tensor:
        """Read rows of a chunk into `memory`, for full blocks, or into a buffer that the next read
        reuses. Raises DamagedError if a checksum does not match; `memory` is filled anyway.
        """
        chunk = rows.chunk
        row_bytes = rows.row_bytes
        first_block = begin * row_bytes // self._block_bytes
        stop_block = -(-end * row_bytes // self._block_bytes)
        start = first_block * self._block_bytes
        stop = min(stop_block * self._block_bytes, chunk.bytes)
        data = self._buffer(stop - start) if memory is None else memory
        self._fill(data, rows, start)
        for block in range(first_block, stop_block):
            offset = block * self._block_bytes - start
            self._verify(rows, block, data[offset : offset + self._block_bytes])
        rows_read = torch.from_numpy(data[begin * row_bytes - start : end * row_bytes - start])
        return rows_read.view(rows.dtype).reshape(
            [end - begin, *chunk.sizes[1:]] if chunk.sizes else []
        )

    def _verify(self, rows: _Rows, block: int, data: np.ndarray) -> None:
        chunk = rows.chunk
        key = (chunk.file, chunk.start, block)
        # A disk usually serves the second read from the page cache, but a URL is transferred again.
        path = storage.join(self._folder, chunk.file)
        if key in self._verified and not storage.is_url(path):
            return
        if not chunk.is_intact(block, data):
            raise DamagedError(
                f"{path}: damaged, the checksum of {rows.name} does not match; use an earlier "
                "checkpoint"
            )
        self._verified.add(key)

    def _fill(self, data: np.ndarray, rows: _Rows, start: int) -> None:
        path = storage.join(self._folder, rows.chunk.file)
        first = rows.chunk.start
        with wrap_read_errors(path):
            try:
                num_read = storage.read_into(path, first + start, data)
            except InputError:
                if storage.exists(path):
                    raise
                raise DamagedError(
                    f"{path}: missing ({rows.name}); use an earlier checkpoint"
                ) from None
        if num_read != len(data):
            raise DamagedError(f"{path}: truncated ({rows.name}); use an earlier checkpoint")

    def _buffer(self, size_bytes: int) -> np.ndarray:
        """Return this thread's buffer for one range: allocating memory costs as much as reading
        into it.
        """
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._local.buffer = np.empty(size_bytes, np.uint8)
        return buffer[:size_bytes]


def check_extra_files(folder: str, manifest: dict[str, Any]) -> None:
    """Check the files in addition to the tensors (config.yaml, the workload's own). Raises
    DamagedError.
    """
    _run(_extra_checks(folder, manifest))


def _extra_checks(folder: str, manifest: dict[str, Any]) -> Iterator[Callable[[], None]]:
    for name, file in manifest["files"].items():
        if "sha256" in file:
            yield partial(_check_extra_file, storage.join(folder, name), file["sha256"])


def _check_extra_file(path: str, sha256: str) -> None:
    if not storage.exists(path):
        raise DamagedError(f"{path}: missing; use an earlier checkpoint")
    if compute_sha256(path) != sha256:
        raise DamagedError(
            f"{path}: damaged, its checksum does not match; use an earlier checkpoint"
        )


def full_tensors(checkpoint: Checkpoint, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor whose name starts with `prefix`, unsharded, sorted by name."""
    manifest = checkpoint.manifest()
    reader = TableReader(checkpoint.path, manifest)
    for name in sorted(manifest["tensors"]):
        if name.startswith(prefix):
            yield (
                name,
                reader.rows(name, 0, (manifest["tensors"][name]["shape"] or [1])[0]),
            )


def verify(checkpoint: Checkpoint, prefix: str = "") -> None:
    """Read all extra files and every tensor whose name starts with `prefix`. Raises
    DamagedError.
    """
    for _ in full_tensors(checkpoint, prefix):
        pass
    check_extra_files(checkpoint.path, checkpoint.manifest())


def weights_sha256(checkpoint: Checkpoint, prefix: str = "model.") -> str:
    """Return the SHA-256 over name, dtype, shape and row-major bytes of every weight, sorted by
    name. Independent of the number of workers and the sharding plan. Needs at most 200 MiB of
    memory for tables of any size. Raises DamagedError.
    """
    manifest = checkpoint.manifest()
    reader = TableReader(checkpoint.path, manifest)
    digest = hashlib.sha256()
    for name in sorted(name for name in manifest["tensors"] if name.startswith(prefix)):
        entry = manifest["tensors"][name]
        digest.update(f"{name}\0{entry['dtype']}\0{entry['shape']}\0".encode())
        reads = (partial(reader.rows, name, *window) for window in reader.windows(name))
        # One thread prefetches while this one hashes, which is sequential.
        for rows in in_order(lambda read: read(), reads, name="weights", num_threads=1, prefetch=1):
            digest.update(_as_bytes(rows))
    return digest.hexdigest()


def verified_bytes(checkpoint: Checkpoint, name: str, chunk: dict[str, Any]) -> Iterator[bytes]:
    """Yield the bytes of a `chunk` of the manifest, a few blocks at a time. Raises DamagedError."""
    manifest = checkpoint.manifest()
    reader = _Reader(checkpoint.path, manifest["block_bytes"])
    entry = manifest["tensors"][name]
    rows = _Rows(name, TORCH_DTYPES[entry["dtype"]], Chunk(**chunk))
    for begin, end in rows.ranges(0, rows.chunk.num_rows, range_bytes=reader.range_bytes):
        # a copy, because the next read reuses the memory
        yield bytes(_as_bytes(reader.read(rows, begin, end)))


@final
class TableReader:
    """Reader of row ranges of a checkpoint's tensors, with checksum verification."""

    def __init__(self, folder: str, manifest: dict[str, Any]) -> None:
        self._tensors = manifest["tensors"]
        self._reader = _Reader(folder, manifest["block_bytes"])

    def windows(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield one or more ranges [first, stop) of at most 64 MiB that cover a tensor's rows. A
        scalar is one row.
        """
        shape = self._tensors[name]["shape"] or [1]
        row_bytes = TORCH_DTYPES[self._tensors[name]["dtype"]].itemsize * math.prod(shape[1:])
        step = max(1, _WINDOW_BYTES // max(1, row_bytes))
        for first in range(0, max(1, shape[0]), step):
            yield first, min(first + step, shape[0])

    def rows(
        self,
        name: str,
        first: int,
        stop: int,
        *,
        columns: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Read rows [first, stop) of a tensor across chunks, and `columns` of dimension 1, None for
        all. Raises DamagedError.
        """
        entry = self._tensors[name]
        dtype = TORCH_DTYPES[entry["dtype"]]
        shape = entry["shape"]
        ranges = [(first, stop), *((0, size) for size in shape[1:])] if shape else []
        if columns is not None:
            ranges[1] = columns
        part = torch.empty([end - begin for begin, end in ranges], dtype=dtype)
        calls: list[Callable[[], None]] = []
        for rows in _stored_rows(name, entry):
            target = part
            box = []
            for dimension, (low, high) in enumerate(ranges):
                offset = rows.chunk.offsets[dimension]
                size = rows.chunk.sizes[dimension]
                begin = max(low, offset)
                end = min(high, offset + size)
                if begin >= end:
                    break
                target = target.narrow(dimension, begin - low, end - begin)
                box.append((begin - offset, end - begin))
            if len(box) == len(ranges):
                calls += _copies(self._reader, rows, box, target)
        _run(calls)
        return part


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


Shared = dict[str, int]
"""Rank that reads each fully replicated tensor, by name, in an order that all ranks agree on."""


def assign_readers(tensors: dict[str, Any], ranks: Communicator) -> Shared:
    """Assign replicated tensors to ranks, balanced by bytes; collective. Empty for a single rank.
    Assigns only tensors that the default process group can broadcast: with NCCL none in host
    memory.
    """
    if ranks.size == 1:
        return {}
    device = group_device().type
    local = {
        name: (tuple(tensor.shape), tensor.dtype, tensor.nbytes)
        for name, tensor in tensors.items()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == device
        and tensor.is_contiguous()
    }
    # Ranks see only their own tensors. A tensor is replicated if all ranks name one of equal kind.
    gathered = ranks.all_gather(local)
    replicated = [
        name
        for name, kind in gathered[0].items()
        if all(other.get(name) == kind for other in gathered)
    ]
    shared: Shared = {}
    load = [0] * ranks.size
    # Largest first, each to the rank with the fewest bytes so far. Ties go by name, so that all
    # ranks agree.
    for name in sorted(replicated, key=lambda name: (-local[name][2], name)):
        reader = load.index(min(load))
        load[reader] += local[name][2]
        shared[name] = reader
    return shared


def export_weights(checkpoint: str, out: str) -> dict[str, int]:
    """Write a checkpoint's weights, by parameter name, to model.safetensors in a folder. Return
    `tensors` and `bytes`.
    """
    prefix = "model."
    weights = {
        name.removeprefix(prefix): tensor
        for name, tensor in full_tensors(Checkpoint(checkpoint), prefix)
    }
    return {
        "tensors": len(weights),
        "bytes": write_weights(storage.join(out, "model.safetensors"), weights),
    }
