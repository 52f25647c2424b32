"""Writes checkpoints: each rank's file with its checksums, then, on rank 0, what belongs with it and the manifest last."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rayrec import storage
from rayrec.checkpoint.communicator import Ranks
from rayrec.checkpoint.discovery import wrong_file
from rayrec.checkpoint.extra_files import Described, written_by
from rayrec.checkpoint.format import (
    BLOCK_BYTES,
    MANIFEST,
    VERSION,
    data_file,
    seal,
)
from rayrec.checkpoint.lease import Lease
from rayrec.checkpoint.plan import HostCopy, LocalTensors, Shapes, check_covered, make_plan
from rayrec.checkpoint.safetensors import DTYPES, header


@dataclass(frozen=True)
class Written:
    """A rank's file, and for each part of it what the manifest says of its tensor and of the chunk."""

    file: str
    size_bytes: int
    chunks: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]
    """(name, tensor, chunk)."""


def write_rank(
    folder: str, copy: HostCopy, *, rank: int, tag: str, wrote: Callable[[int], None] = lambda size_bytes: None
) -> Written | None:
    """Writes a rank's file from its copy in host memory; None, and no file, where the rank has nothing to write.

    `wrote` is called with the bytes of each block that was handed to storage.

    Raises OSError where storage is unavailable or full; no part of the file is left then.
    """
    parts = copy.plan.parts
    if not parts:
        return None
    name = data_file(rank, tag)
    head = header(
        [
            (f"{part.name}@{','.join(map(str, part.offsets))}", part.dtype, part.sizes, part.start, part.size_bytes)
            for part in parts
        ]
    )
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-sums") as pool:
        sums_ahead = pool.submit(_checksums, copy)  # both leave Python to itself, so that they overlap
        storage.write_stream(storage.join(folder, name), _pieces(head, copy, wrote))
        checksums = sums_ahead.result()
    chunks = tuple(
        (
            part.name,
            {"dtype": DTYPES[part.dtype], "shape": list(part.shape)},
            {
                "offsets": list(part.offsets),
                "sizes": list(part.sizes),
                "file": name,
                "start": len(head) + part.start,
                "bytes": part.size_bytes,
                "sha256": sums,
            },
        )
        for part, sums in zip(parts, checksums, strict=True)
    )
    return Written(name, len(head) + copy.plan.body_bytes, chunks)


def _checksums(copy: HostCopy) -> list[list[str]]:
    """For each part the SHA-256 of its blocks."""
    body = copy.body()
    return [
        [
            hashlib.sha256(body[start : min(start + BLOCK_BYTES, part.start + part.size_bytes)]).hexdigest()
            for start in range(part.start, part.start + part.size_bytes, BLOCK_BYTES)
        ]
        for part in copy.plan.parts
    ]


def _pieces(head: bytes, copy: HostCopy, wrote: Callable[[int], None]) -> Iterator[bytes | memoryview]:
    yield head
    body = copy.body()
    for start in range(0, len(body), BLOCK_BYTES):
        yield (block := body[start : start + BLOCK_BYTES])
        wrote(len(block))


def commit(
    folder: str,
    written: Sequence[Written],
    *,
    shapes: Shapes,
    state: dict[str, Any],
    score: float | None,
    extra_files: Callable[[str], Described] | None,
    lease: Lease | None = None,
) -> int:
    """Makes a checkpoint of what the ranks have written; on rank 0. Returns its size in bytes. `shapes`: all tensors of the
    model; `extra_files` writes what belongs with the weights into the folder.

    Raises InputError if the lease is not valid any more or the ranks have not written all of the model; OSError if storage is
    unavailable or full, and if a file that was written is missing or has another size.
    """
    if lease is not None:
        lease.check()
    storage.make_folder(folder)  # where no rank had anything to write
    files: Described = {part.file: {"bytes": part.size_bytes} for part in written}
    if extra_files is not None:
        files |= extra_files(folder)
    tensors: dict[str, dict[str, Any]] = {}
    for name, tensor, chunk in sorted((entry for part in written for entry in part.chunks), key=_by_name_and_place):
        tensors.setdefault(name, {**tensor, "chunks": []})["chunks"].append(chunk)
    check_covered(
        shapes,
        {
            name: [(tuple(chunk["offsets"]), tuple(chunk["sizes"])) for chunk in tensor["chunks"]]
            for name, tensor in tensors.items()
        },
    )
    wrong = wrong_file(folder, files)
    if wrong is not None:
        path, what = wrong
        raise OSError(f"{path}: {what} after it was written; storage_path must be storage that all workers share")
    manifest = {
        "version": VERSION,
        "state": state,
        "score": score,
        "block_bytes": BLOCK_BYTES,
        "files": files,
        "tensors": tensors,
    }
    if lease is not None:
        lease.check()  # as late as can be: writing and summing up may have taken long
    storage.write_json(storage.join(folder, MANIFEST), seal(manifest))
    return sum(file["bytes"] for file in files.values())


def _by_name_and_place(entry: tuple[str, dict[str, Any], dict[str, Any]]) -> tuple[str, list[int]]:
    return entry[0], entry[2]["offsets"]


def save(
    path: str,
    tensors: dict[str, Any],
    *,
    state: dict[str, Any],
    extra_files: Callable[[str], None] | None = None,
) -> int:
    """Writes a checkpoint and returns when it is complete; collective. Returns its size in bytes (over all ranks).

    `tensors`: name -> tensor, ShardedTensor or DTensor. `state`: plain JSON values, taken from rank 0. `extra_files`
    is called on rank 0 with the folder, before the manifest is written. Nothing is tried twice; `Saver` does that.
    """
    ranks = Ranks.all()
    # A torn earlier attempt goes, and what cannot be saved is found, before anything is written.
    local = ranks.together(lambda: _ready(path, tensors, ranks))
    copy = HostCopy(make_plan(local, ranks), local)
    try:
        copy.fill(local)
        shapes = copy.plan.shapes
        written = ranks.each(lambda: write_rank(path, copy, rank=ranks.rank, tag=""))
    finally:
        copy.free()
    present = [part for part in written if part is not None]
    extra = extra_files and written_by(extra_files)
    return ranks.from_first(lambda: commit(path, present, shapes=shapes, state=state, score=None, extra_files=extra))


def _ready(path: str, tensors: dict[str, Any], ranks: Ranks) -> LocalTensors:
    local = LocalTensors(tensors)
    if ranks.first:
        storage.remove_folder(path)
        storage.make_folder(path)
    return local
