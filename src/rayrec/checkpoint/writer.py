"""Checkpoint writer: each rank writes its file with checksums, then rank 0 writes the extra files
and, last, the manifest.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from rayrec import storage
from rayrec.checkpoint.communicator import Communicator
from rayrec.checkpoint.discovery import Checkpoint, file_sizes, wrong_file
from rayrec.checkpoint.format import (
    BLOCK_BYTES,
    MANIFEST,
    VERSION,
    UnreadableError,
    block_digest,
    compute_sha256,
    data_file,
    is_data_file,
    read_manifest,
    seal,
)
from rayrec.checkpoint.lease import Lease
from rayrec.checkpoint.plan import HostCopy, LocalTensors, Shapes, check_covered, make_plan
from rayrec.checkpoint.reader import verified_bytes
from rayrec.checkpoint.safetensors import DTYPES, TORCH_DTYPES, header
from rayrec.config import InputError
from rayrec.storage.range_reader import in_order

Source = bytes | str
"""Content of a file, or the path or URL of a file to copy."""
Described = dict[str, dict[str, Any]]
"""Manifest entries of files, by name: `bytes` and `sha256`."""
_NUM_THREADS: Final = 8
"""Number of files hashed or copied in parallel."""
_WRITE_BYTES: Final = 1 << 20
"""Bytes that are hashed and written at a time. They fit into a processor's second cache."""


@final
class ExtraFiles:
    """Writer of the same extra files into successive checkpoints. Reads each source to hash it and
    to copy it into the first checkpoint. Later checkpoints share the bytes of the previous one (see
    `storage.clone_file`): a large vocabulary is not copied for every save, and later changes of the
    source have no effect. Its size, or its hash when read, tells a failed copy.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        """Create a writer for sources by file name."""
        self._sources = dict(sources)
        self._described: Described = {}
        self._last: dict[str, str] = {}
        """Path of the copy in the last checkpoint, by name."""

    def write(self, folder: str) -> Described:
        """Write the files into a checkpoint folder. The caller checks the sizes of the copies.
        Raises InputError if a source is missing, OSError if storage is unavailable. Keeps files of
        a complete checkpoint in the same folder that have different content: until the next
        manifest is written, a resume would use that checkpoint. An earlier attempt saved it.
        """
        new = [name for name in self._sources if name not in self._described]
        self._described |= zip(
            new, _threaded(_describe, [self._sources[name] for name in new]), strict=True
        )
        before = _recorded(folder) if self._sources else {}
        preserved = {
            name: before[name]
            for name, file in self._described.items()
            if name in before
            and before[name]["sha256"] != file["sha256"]
            and _is(storage.join(folder, name), before[name])
        }
        paths = {
            name: storage.join(folder, name) for name in self._sources if name not in preserved
        }
        _threaded(lambda name: self._write(name, paths[name]), paths)
        self._last |= paths
        return self._described | preserved

    def _write(self, name: str, target: str) -> None:
        source = self._sources[name]
        last = self._last.get(name)
        # Shares the last checkpoint's copy, unless retention removed it, or it was truncated.
        if not (
            last is not None
            and isinstance(source, str)
            and storage.size_of(last) == self._described[name]["bytes"]
            and (last == target or storage.clone_file(last, target))
        ):
            _copy(source, target)


def repair(folder: str, sources: Mapping[str, Source]) -> list[str]:
    """Restore missing or damaged files of a checkpoint from sources with the recorded content;
    return their names. Checkpoints of an attempt share these files. Does nothing if the manifest is
    damaged. Raises OSError if storage is unavailable.
    """
    recorded = _recorded(folder)
    damaged = [
        name
        for name in sources
        if name in recorded and not _is(storage.join(folder, name), recorded[name])
    ]
    repaired = [name for name in damaged if has_content(sources[name], recorded[name])]
    for name in repaired:
        _copy(sources[name], storage.join(folder, name))
    return repaired


def _copy(source: Source, target: str) -> None:
    """Replace the full file, because `target` may be a hard link to shared content."""
    if isinstance(source, bytes):
        storage.write_bytes(target, source)
    else:
        storage.copy_file(source, target)


def _recorded(folder: str) -> Described:
    """Return the extra files of the complete checkpoint in a folder, or {} if none can be read."""
    files: Described = {}
    if storage.exists(storage.join(folder, MANIFEST)):
        with contextlib.suppress(InputError):
            files = read_manifest(folder)["files"]
    return {name: file for name, file in files.items() if "sha256" in file}


def _is(path: str, file: Mapping[str, Any]) -> bool:
    try:
        return storage.size_of(path) == file["bytes"] and compute_sha256(path) == file["sha256"]
    except UnreadableError:
        return False


def has_content(source: Source, file: Mapping[str, Any]) -> bool:
    """Return whether a source still has the content recorded in the manifest."""
    try:
        return _describe(source) == dict(file)
    except InputError:
        return False


def _threaded(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Map the function over items in threads. Raises the error of the first failed call."""
    return list(
        in_order(
            function,
            items,
            name="checkpoint-files",
            num_threads=_NUM_THREADS,
            prefetch=_NUM_THREADS,
        )
    )


def _describe(source: Source) -> dict[str, Any]:
    if isinstance(source, bytes):
        return {"bytes": len(source), "sha256": hashlib.sha256(source).hexdigest()}
    return {"bytes": storage.size_of(source), "sha256": compute_sha256(source)}


def describe_output(function: Callable[[str], None]) -> Callable[[str], Described]:
    """Wrap a `function` that writes files into a folder, for a checkpoint that is saved once, and
    describe its files.
    """

    def write(folder: str) -> Described:
        function(folder)
        sizes = {
            name: size_bytes
            for name, size_bytes in sorted(file_sizes(folder).items())
            if name != MANIFEST and not is_data_file(name) and not name.endswith(".partial")
        }
        sums = _threaded(compute_sha256, [storage.join(folder, name) for name in sizes])
        return {
            name: {"bytes": sizes[name], "sha256": sha256}
            for name, sha256 in zip(sizes, sums, strict=True)
        }

    return write


@dataclass(frozen=True)
class WrittenFile:
    """File of a rank, and the manifest entries of its parts."""

    file: str
    size_bytes: int
    chunks: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]
    """Tuples of (name, tensor, chunk)."""


def write_rank(
    folder: str,
    copy: HostCopy,
    *,
    rank: int,
    tag: str,
    on_write: Callable[[int], None] = lambda size_bytes: None,
) -> WrittenFile | None:
    """Write a rank's file from its copy in host memory. Return None, without a file, if the rank
    has nothing to write. `on_write` is called with the size of each block. Raises OSError, leaving
    no file, if storage is unavailable or full.
    """
    parts = copy.plan.parts
    if not parts:
        return None
    name = data_file(rank, tag)
    keys = (f"{part.name}@{','.join(map(str, part.offsets))}" for part in parts)
    head = header(
        [
            (key, part.dtype, part.sizes, part.start, part.size_bytes)
            for key, part in zip(keys, parts, strict=True)
        ]
    )
    checksums: list[list[str]] = []
    stream = _file_chunks(head, copy, checksums, on_write)
    storage.write_stream(storage.join(folder, name), stream)
    chunks = []
    for part, sums in zip(parts, checksums, strict=True):
        box = {
            "offsets": list(part.offsets),
            "sizes": list(part.sizes),
            "file": name,
            "start": len(head) + part.start,
        }
        tensor = {"dtype": DTYPES[part.dtype], "shape": list(part.shape)}
        chunks.append((part.name, tensor, {**box, "bytes": part.size_bytes, "xxh3_128": sums}))
    return WrittenFile(name, len(head) + copy.plan.body_bytes, tuple(chunks))


# Data is in the processor's cache when it is written, since its checksum was taken just before.
def _file_chunks(
    head: bytes, copy: HostCopy, checksums: list[list[str]], on_write: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a rank's file. Appends the checksums of each part's blocks to
    `checksums`.
    """
    yield head
    body = copy.body()
    for part in copy.plan.parts:
        part_end = part.start + part.size_bytes
        sums = []
        for start in range(part.start, part_end, BLOCK_BYTES):
            block = body[start : min(start + BLOCK_BYTES, part_end)]
            digest = block_digest()
            for first in range(0, len(block), _WRITE_BYTES):
                data = block[first : first + _WRITE_BYTES]
                digest.update(data)
                yield data
            sums.append(digest.hexdigest())
            on_write(len(block))
        checksums.append(sums)


def commit(
    folder: str,
    rank_files: Sequence[WrittenFile],
    *,
    shapes: Shapes,
    state: dict[str, Any],
    score: float | None,
    extra_files: Callable[[str], Described] | None,
    lease: Lease | None = None,
) -> int:
    """Commit a checkpoint of tensors with these `shapes` from the files of all ranks, on rank 0.
    Return its size in bytes. `extra_files` writes further files into the folder. Raises InputError
    if the lease is no longer valid or the ranks have not written the full model, and OSError if
    storage is unavailable or full, or a written file is missing or has another size.
    """
    if lease is not None:
        lease.check()
    storage.make_folder(folder)  # in case no rank had anything to write
    files: Described = {part.file: {"bytes": part.size_bytes} for part in rank_files}
    if extra_files is not None:
        files |= extra_files(folder)
    tensors: dict[str, dict[str, Any]] = {}
    entries = (entry for part in rank_files for entry in part.chunks)
    for name, tensor, chunk in sorted(entries, key=lambda entry: (entry[0], entry[2]["offsets"])):
        tensors.setdefault(name, {**tensor, "chunks": []})["chunks"].append(chunk)
    boxes = {
        name: [(tuple(box["offsets"]), tuple(box["sizes"])) for box in tensor["chunks"]]
        for name, tensor in tensors.items()
    }
    check_covered(shapes, boxes)
    wrong = wrong_file(folder, files)
    if wrong is not None:
        path, problem = wrong
        raise OSError(
            f"{path}: {problem} after it was written. storage_path must be shared by all workers"
        )
    head = {"version": VERSION, "state": state, "score": score, "block_bytes": BLOCK_BYTES}
    if lease is not None:
        lease.check()  # as late as possible, because writing and hashing can take long
    storage.write_json(
        storage.join(folder, MANIFEST), seal({**head, "files": files, "tensors": tensors})
    )
    return sum(file["bytes"] for file in files.values())


def save(
    path: str,
    tensors: dict[str, Any],
    *,
    state: dict[str, Any],
    extra_files: Callable[[str], None] | None = None,
) -> int:
    """Write a checkpoint synchronously; collective. Return its size in bytes over all ranks.
    Without retries; see `Saver`.

    Args:
        tensors: Tensors, ShardedTensors or DTensors by name.
        state: Plain JSON values, taken from rank 0.
        extra_files: Called on rank 0 with the folder, before the manifest is written.
    """
    ranks = Communicator.all()

    def prepare() -> LocalTensors:
        local = LocalTensors(tensors)  # detects invalid tensors before anything is written
        if ranks.first:
            storage.remove_folder(path)  # an uncommitted earlier attempt
            storage.make_folder(path)
        return local

    local = ranks.run_on_all_ranks(prepare)
    copy = HostCopy(make_plan(local, ranks), local.data)
    try:
        copy.fill(local.data)
        shapes = copy.plan.shapes
        results = ranks.each(lambda: write_rank(path, copy, rank=ranks.rank, tag=""))
    finally:
        copy.free()
    present = [part for part in results if part is not None]
    extra = extra_files and describe_output(extra_files)
    return ranks.run_on_rank0(
        lambda: commit(path, present, shapes=shapes, state=state, score=None, extra_files=extra)
    )


@dataclass(frozen=True)
class TargetSlice:
    """Position of a source tensor in the merged checkpoint: a full tensor, or columns of it."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full merged tensor."""
    first_column: int = 0
    """First column in dimension 1, for tensors of two or more dimensions."""


def join(
    path: str,
    sources: Sequence[tuple[Checkpoint, Mapping[str, TargetSlice]]],
    *,
    state: dict[str, Any],
    extra_files: Callable[[str], None],
) -> int:
    """Merge tensors of other checkpoints, one file for each, into an empty folder. Return the size
    in bytes. `sources` has the positions of selected tensors by name. `state` and `extra_files` are
    as in `rayrec.checkpoint.save`. Memory: a few blocks of 16 MiB. Verifies every checksum. Raises
    DamagedError, or InputError for gaps.
    """
    files = [_copied(path, number, *source) for number, source in enumerate(sources)]
    shapes = {target.name: target.shape for _, targets in sources for target in targets.values()}
    return commit(
        path,
        files,
        shapes=shapes,
        state=state,
        score=None,
        extra_files=describe_output(extra_files),
    )


def _copied(
    path: str, number: int, source: Checkpoint, targets: Mapping[str, TargetSlice]
) -> WrittenFile:
    tensors = source.manifest()["tensors"]
    file = data_file(number, "")
    chunks = [(name, chunk) for name in sorted(targets) for chunk in tensors[name]["chunks"]]
    entries = []
    start = 0
    for name, chunk in chunks:
        dtype = TORCH_DTYPES[tensors[name]["dtype"]]
        size_bytes = dtype.itemsize * math.prod(chunk["sizes"])
        key = f"{targets[name].name}@{','.join(map(str, _offsets(chunk, targets[name])))}"
        entries.append((key, dtype, tuple(chunk["sizes"]), start, size_bytes))
        start += size_bytes
    head = header(entries)

    def file_chunks() -> Iterator[bytes]:
        yield head
        for name, chunk in chunks:
            yield from verified_bytes(source, name, chunk)

    storage.write_stream(storage.join(path, file), file_chunks())
    described = tuple(
        (
            targets[name].name,
            {"dtype": tensors[name]["dtype"], "shape": list(targets[name].shape)},
            {
                **chunk,
                "offsets": _offsets(chunk, targets[name]),
                "file": file,
                "start": len(head) + entry[3],
            },
        )
        for (name, chunk), entry in zip(chunks, entries, strict=True)
    )
    return WrittenFile(file, len(head) + start, described)


def _offsets(chunk: Mapping[str, Any], target: TargetSlice) -> list[int]:
    offsets = list(chunk["offsets"])
    if target.first_column:
        offsets[1] += target.first_column
    return offsets
