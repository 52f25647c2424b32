"""From a path to the index of the log that lies there, raw or ready-made."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence

import pyarrow as pa

from rayrec import storage
from rayrec.data import ready
from rayrec.data.engine import Engine
from rayrec.data.log import (
    CachedIndex,
    Chunk,
    Entry,
    LogIndex,
    cut,
    index_chunk,
    is_gzip,
    numbered,
    unpack,
    unpacked_path,
)
from rayrec.data.parsing import Faults
from rayrec.data.tables import index_tables, is_table
from rayrec.schema import Schema

CHUNK_BYTES = 32 << 20
"""Text one indexing task reads."""


def plain_files(
    files: Sequence[storage.File], *, unpack_folder: str, engine: Engine, note: Callable[[str], None]
) -> list[storage.File]:
    """The files as text that can be split; gzip files are unpacked once, in parallel, into `unpack_folder`."""
    packed = [file for file in files if is_gzip(file.path)]
    if not packed:
        return list(files)
    new = [file.path for file in packed if not storage.exists(unpacked_path(file, unpack_folder))]
    if new:
        names = ", ".join(new[:3]) + (f" and {len(new) - 3} more" if len(new) > 3 else "")
        note(f"gzip cannot be split: unpacking {names} to {unpack_folder} (once; give plain files to skip this)")
    task = functools.partial(_unpack_task, folder=storage.absolute(unpack_folder))
    paths = [path for table in engine.run("unpack", task, packed) for path in table.column("path").to_pylist()]
    unpacked = {file: storage.list_files(path)[0] for file, path in zip(packed, paths, strict=True)}
    return [unpacked.get(file, file) for file in files]


def _unpack_task(file: storage.File, *, folder: str) -> pa.Table:
    return pa.table({"path": [unpack(file, folder).path]})


def _index_table(chunk: Chunk, *, schema: Schema, segment_bytes: int) -> pa.Table:
    entries, faults = index_chunk(chunk, schema, segment_bytes)
    return pa.table({"index": [json.dumps({"entries": entries, "faults": faults.to_dict()})]})


def index_log(
    files: Sequence[storage.File],
    schema: Schema,
    *,
    segment_bytes: int,
    engine: Engine,
    cache_folder: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> LogIndex:
    """Parses the whole log once to number its rows and count its faults; about 5 million Criteo rows/s a core.

    With `cache_folder`, an index of the very same files is read back from there instead. `progress` gets bytes done.
    """
    cache = CachedIndex.at(cache_folder, files=files, schema=schema, segment_bytes=segment_bytes)
    if cached := cache.read():
        return cached
    chunks = cut(files, max(CHUNK_BYTES, segment_bytes))
    entries: list[Entry] = []
    faults, done = Faults(), 0
    function = functools.partial(_index_table, schema=schema, segment_bytes=segment_bytes)
    for table in engine.run("index", function, chunks, block_bytes=1 << 16):
        for text in table.column("index").to_pylist():
            result = json.loads(text)
            found = [Entry(*entry) for entry in result["entries"]]
            entries.extend(found)
            faults.add(Faults.from_dict(result["faults"]))
            done += sum(entry.stop - entry.start for entry in found)
            if progress:
                progress(done)
    index = LogIndex(numbered(entries), faults)
    cache.write(index)
    return index


def open_log(
    path: str,
    schema: Schema,
    *,
    files: Sequence[str] = (),
    segment_bytes: int,
    engine: Engine,
    cache_folder: str,
    note: Callable[[str], None],
    progress: Callable[[str, int, int | None], None],
) -> LogIndex:
    """The index of whatever `path` names, raw or ready-made, or of the named `files` of a folder; unpacked gzip files and
    indices are kept in `cache_folder`."""
    if ready.is_ready(path):
        return ready.open_verified(
            path,
            engine=engine,
            cache_folder=cache_folder,
            progress=lambda done, size: progress("verify (bytes)", done, size),
        ).index
    found = storage.list_files(path, names=files)
    if is_table(found, schema):
        return index_tables(
            found,
            schema,
            segment_bytes=segment_bytes,
            engine=engine,
            cache_folder=cache_folder,
            note=note,
            progress=progress,
        )
    plain = plain_files(found, unpack_folder=storage.join(cache_folder, "unpacked"), engine=engine, note=note)
    size = sum(file.size_bytes for file in plain)
    return index_log(
        plain,
        schema,
        segment_bytes=segment_bytes,
        engine=engine,
        cache_folder=cache_folder,
        progress=lambda done: progress("index (bytes)", done, size),
    )
