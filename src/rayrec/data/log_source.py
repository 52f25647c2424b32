"""From a path to the index of the log that lies there, raw or preprocessed."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data import materialized
from rayrec.data.arrow import arrow_texts
from rayrec.data.engine import Engine
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import CachedIndex, Entry, LogIndex, numbered, remove_older, said_of
from rayrec.data.logs.table_log import index_tables, is_table
from rayrec.data.logs.text_log import Chunk, cut, index_chunk, is_gzip, unpack, unpacked_path
from rayrec.schema import Schema

CHUNK_BYTES = 32 << 20
"""Text one indexing task reads."""
CHUNKS_PER_TASK = 256
"""Most small files that one indexing task reads."""
SNIFFED_FILES = 256
"""Files of a store that one process opens to see whether they are gzip; more are opened by data tasks."""


def plain_files(
    files: Sequence[storage.File], *, unpack_folder: str, engine: Engine, note: Callable[[str], None]
) -> list[storage.File]:
    """The files as text that can be split; gzip files are unpacked once, in parallel, into `unpack_folder`, where the text
    of older versions of them is removed."""
    packed = [file for file, is_packed in zip(files, _are_gzip(files, engine), strict=True) if is_packed]
    if not packed:
        return list(files)
    targets = {file: unpacked_path(file, storage.absolute(unpack_folder)) for file in packed}
    there = storage.find_files(list(targets.values()))
    new = [file for file in packed if targets[file] not in there]
    if new:
        names = ", ".join(file.path for file in new[:3]) + (f" and {len(new) - 3} more" if len(new) > 3 else "")
        note(f"gzip cannot be split: unpacking {names} to {unpack_folder} (once; give plain files to skip this)")
        task = functools.partial(_unpack_task, folder=storage.absolute(unpack_folder))
        for _ in engine.run("unpack", task, new):
            pass
        there |= storage.find_files([targets[file] for file in new])
        remove_older(unpack_folder, [storage.name_of(path) for path in targets.values()])
    return [there[targets[file]] if file in targets else file for file in files]


def _are_gzip(files: Sequence[storage.File], engine: Engine) -> list[bool]:
    """By the first bytes of each file: many files of a store are opened by data tasks."""
    paths = [file.path for file in files]
    if not paths or not storage.is_url(paths[0]) or len(paths) <= SNIFFED_FILES:
        return list(storage.in_parallel(is_gzip, paths, of=paths[0] if paths else ""))
    groups = [paths[start : start + SNIFFED_FILES] for start in range(0, len(paths), SNIFFED_FILES)]
    tables = engine.run("open", _sniff_task, groups, block_bytes=1 << 12)
    return [found for table in tables for found in table.column("gzip").to_pylist()]


def _sniff_task(paths: Sequence[str]) -> pa.Table:
    return pa.table({"gzip": pa.array(storage.in_parallel(is_gzip, paths, of=paths[0]), pa.bool_())})


def _unpack_task(file: storage.File, *, folder: str) -> pa.Table:
    return pa.table({"path": arrow_texts([unpack(file, folder).path])})


def _index_table(chunks: Sequence[Chunk], *, schema: Schema, segment_bytes: int) -> pa.Table:
    """Indexes some chunks: a large one, or several small files whose requests to a store run in parallel."""
    index = functools.partial(index_chunk, schema=schema, segment_bytes=segment_bytes)
    entries, total = [], Faults()
    for found, faults in storage.in_parallel(index, chunks, of=chunks[0].path):
        entries += found
        total.add(faults)
    return pa.table({"index": arrow_texts([json.dumps({"entries": entries, "faults": total.to_dict()})])})


def _grouped(chunks: Sequence[Chunk], group_bytes: int) -> list[list[Chunk]]:
    """The chunks in order, small ones together: up to CHUNKS_PER_TASK of them, of `group_bytes` in all."""
    groups: list[list[Chunk]] = []
    room = 0
    for chunk in chunks:
        size = chunk.stop - chunk.start
        if size > room or len(groups[-1]) == CHUNKS_PER_TASK:
            groups.append([])
            room = group_bytes
        groups[-1].append(chunk)
        room -= size
    return groups


def index_log(
    files: Sequence[storage.File],
    schema: Schema,
    *,
    segment_bytes: int,
    engine: Engine,
    cache_folder: str | None = None,
    progress: Callable[[int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> LogIndex:
    """Parses the whole log once to number its rows and count its faults; about 5 million Criteo rows/s a core.

    With `cache_folder`, an index of the very same files is read back from there instead. `progress` gets bytes done; `note`
    gets where the log was edited since it was indexed before.
    """
    cache = CachedIndex.at(cache_folder, files=files, schema=schema, segment_bytes=segment_bytes)
    if cached := cache.read():
        return cached
    group_bytes = max(CHUNK_BYTES, segment_bytes)
    groups = _grouped(cut(files, group_bytes), group_bytes)
    entries: list[Entry] = []
    faults, done = Faults(), 0
    function = functools.partial(_index_table, schema=schema, segment_bytes=segment_bytes)
    for table in engine.run("index", function, groups, block_bytes=1 << 16):
        for text in table.column("index").to_pylist():
            result = json.loads(text)
            found = [Entry(*entry) for entry in result["entries"]]
            entries.extend(found)
            faults.add(Faults.from_dict(result["faults"]))
            done += sum(entry.stop - entry.start for entry in found)
            if progress:
                progress(done)
    index = LogIndex(numbered(entries), faults)
    edited = cache.write(index)
    if edited and note:
        note(said_of(edited))
    return index


class TextIndexer(Protocol):
    """Indexes text files as `index_log` does, with its arguments."""

    def __call__(
        self,
        files: Sequence[storage.File],
        schema: Schema,
        *,
        segment_bytes: int,
        engine: Engine,
        cache_folder: str | None = None,
        progress: Callable[[int], None] | None = None,
        note: Callable[[str], None] | None = None,
    ) -> LogIndex: ...


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
    index_text: TextIndexer = index_log,
) -> LogIndex:
    """The index of whatever `path` names, raw or preprocessed, or of the named `files` of a folder; unpacked gzip files and
    indices are kept in `cache_folder`. `index_text` indexes text whose index is not kept there."""
    if materialized.is_preprocessed(path):
        return materialized.open_verified(
            path,
            engine=engine,
            cache_folder=cache_folder,
            progress=lambda done, size: progress("verify (bytes)", done, size),
        ).index
    found = storage.list_files(path, names=files)
    refuse_foreign(path, found)
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
    cache = CachedIndex.at(cache_folder, files=found, schema=schema, segment_bytes=segment_bytes)
    if cached := cache.read():
        return cached
    plain = plain_files(found, unpack_folder=storage.join(cache_folder, "unpacked"), engine=engine, note=note)
    size = sum(file.size_bytes for file in plain)
    index = index_text(
        plain,
        schema,
        segment_bytes=segment_bytes,
        engine=engine,
        cache_folder=cache_folder,
        progress=lambda done: progress("index (bytes)", done, size),
        note=note,
    )
    if plain != found:  # the next run need not look at the unpacked files
        cache.write(index)
    return index


def refuse_foreign(path: str, files: Sequence[storage.File]) -> None:
    """Raises InputError for a folder of another program's preprocessed files."""
    names = [storage.name_of(file.path) for file in files]
    arrays = [name for name in names if name.endswith((".npy", ".npz"))]
    if arrays:
        folder = storage.folder_of(files[0].path)
        raise InputError(
            f"{path}: holds {arrays[0]}, an array as TorchRec's scripts write them; `rayrec adopt {folder}` checks such arrays "
            "once and makes the folder usable, without copying them"
        )
    shards = [name for name in names if re.search(r"\.mds(\.\w+)?$", name)]
    if shards:
        raise InputError(
            f"{path}: holds {shards[0]}, an MDS shard; click logs are read from text, CSV, Parquet or what `rayrec preprocess` "
            "wrote; export the rows to Parquet"
        )
