"""Checks that preprocessed data is what was written: checksums of its files, and ids within their tables."""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.data.encoded import Bags, EncodedRows
from rayrec.data.engine import TaskContext
from rayrec.data.materialized.files import combine
from rayrec.data.materialized.row_maps import damaged

_TASK_BYTES = 256 << 20
"""Bytes one task reads; a larger file is split, and small files share a task."""
_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class _Range:
    """Bytes [start, stop) of file number `file`."""

    file: int
    name: str
    start: int
    stop: int


def check_checksums(
    path: str,
    files: Sequence[Mapping[str, Any]],
    found: Mapping[str, storage.File],
    context: TaskContext,
) -> None:
    """Compares the CRC-32 of each of a dataset's files with its manifest, in data tasks; reads every byte.

    `files`: {name, bytes, crc32} of the manifest; `found`: the files in the folder by name, sizes already compared. A
    record in the cache folder lets the next run skip files whose names, sizes, times and expected checksums are the same.
    Raises InputError that names a file with other bytes.
    """
    assert context.cache_folder is not None
    record = storage.join(context.cache_folder, "verified", f"{hashlib.sha256(path.encode()).hexdigest()[:16]}.json")
    state = [[file["name"], file["bytes"], file["crc32"], found[file["name"]].modified_ns] for file in files]
    version = {"path": path, "files": hashlib.sha256(json.dumps(state).encode()).hexdigest()}
    if storage.exists(record) and storage.read_json(record) == version:
        return
    groups = list(_groups(files))
    total, done = sum(file["bytes"] for file in files), 0
    checksums = [0] * len(files)
    task = functools.partial(_checksums, path=path)
    for group, table in zip(groups, context.engine.run("verify", task, groups, block_bytes=1 << 12), strict=True):
        for part, checksum in zip(group, table.column("crc32").to_pylist(), strict=True):
            checksums[part.file] = combine(checksums[part.file], checksum, part.stop - part.start)
            done += part.stop - part.start
            if part.stop == files[part.file]["bytes"] and f"{checksums[part.file]:08x}" != files[part.file]["crc32"]:
                raise damaged(path, part.name, "has other bytes than were written")
        context.progress("verify (bytes)", done, total)
    storage.write_json(record, version)


def _groups(files: Sequence[Mapping[str, Any]]) -> Iterator[list[_Range]]:
    """The bytes of all files in order, cut into groups of at most _TASK_BYTES."""
    group: list[_Range] = []
    room = _TASK_BYTES
    for number, file in enumerate(files):
        start = 0
        while start < file["bytes"]:
            stop = min(start + room, file["bytes"])
            group.append(_Range(number, file["name"], start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield group
                group, room = [], _TASK_BYTES
    if group:
        yield group


def _checksums(group: Sequence[_Range], *, path: str) -> pa.Table:
    buffer = np.empty(_READ_BYTES, np.uint8)
    checksums = []
    for part in group:
        checksum = 0
        for start in range(part.start, part.stop, _READ_BYTES):
            piece = buffer[: min(_READ_BYTES, part.stop - start)]
            if storage.read_into(storage.join(path, part.name), start, piece) != len(piece):
                raise damaged(path, part.name, "is shorter than it was")
            checksum = zlib.crc32(piece.data, checksum)
        checksums.append(checksum)
    return pa.table({"crc32": pa.array(checksums, pa.int64())})


@dataclass(frozen=True)
class WrongId:
    """An id that is no row of its table."""

    row: int
    """Place among the rows that were checked."""
    column: int
    """Number of the sparse column."""
    id: int


def wrong_id(rows: EncodedRows, num_embeddings: Sequence[int]) -> WrongId | None:
    """The first id outside [0, num_embeddings) of its column, columns first; None if all are rows of their tables.

    Costs one pass over the ids, about 1 ns an id.
    """
    for column, (ids, size) in enumerate(zip(rows.ids, num_embeddings, strict=True)):
        values = ids.values if isinstance(ids, Bags) else ids
        if not values.size:
            continue
        unsigned = values.view(np.dtype(f"u{values.itemsize}"))  # negative ids become the largest
        if int(unsigned.max()) < size:
            continue
        place = int(np.argmax(unsigned.reshape(-1) >= size))
        if isinstance(ids, Bags):
            row = int(np.searchsorted(ids.offsets(), place, side="right")) - 1
        else:
            row = place // (values.size // len(rows))
        return WrongId(row, column, int(values.reshape(-1)[place]))
    return None
