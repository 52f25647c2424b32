"""On-the-fly ingest: indexes a click log and streams its encoded rows, in a given order, through Ray Data."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from rayrec import storage
from rayrec.data.log import (
    Chunk,
    LogIndex,
    cut,
    identity,
    index_chunk,
    is_gzip,
    numbered,
    read_segments,
    unpack,
    unpacked_path,
)
from rayrec.data.parsing import Fault, Faults
from rayrec.data.placement import TaskPlacement
from rayrec.data.position import Block, Piece
from rayrec.data.preprocessor import EncodedRows, Preprocessor
from rayrec.data.ray_tasks import raise_input_error, tables, tasks_dataset
from rayrec.native import keep_freed_memory
from rayrec.schema import Schema

CHUNK_BYTES = 32 << 20
"""Text one indexing task reads."""


def plain_files(
    path: str, *, unpack_folder: str, placement: TaskPlacement, note: Callable[[str], None]
) -> list[storage.File]:
    """The files of a log as text that can be split; gzip files are unpacked once, in parallel, into `unpack_folder`."""
    files = storage.list_files(path)
    packed = [file for file in files if is_gzip(file.path)]
    if not packed:
        return files
    new = [file.path for file in packed if not storage.exists(unpacked_path(file, unpack_folder))]
    if new:
        names = ", ".join(new[:3]) + (f" and {len(new) - 3} more" if len(new) > 3 else "")
        note(f"gzip cannot be split: unpacking {names} to {unpack_folder} (once; give plain files to skip this)")
    task = ray.remote(num_cpus=placement.num_cpus, label_selector=placement.label_selector or {})(unpack)
    unpacked = dict(
        zip(packed, _get([task.remote(file, storage.absolute(unpack_folder)) for file in packed]), strict=True)
    )
    return [unpacked.get(file, file) for file in files]


def _get(references: Sequence[ray.ObjectRef]) -> list[Any]:
    try:
        return ray.get(list(references))
    except ray.exceptions.RayTaskError as error:
        raise_input_error(error)
        raise


def _index_table(chunk: Chunk, *, schema: Schema, segment_bytes: int) -> pa.Table:
    entries, faults = index_chunk(chunk, schema, segment_bytes)
    result = {"entries": entries, "counts": faults.counts, "first": [vars(fault) for fault in faults.first]}
    return pa.table({"index": [json.dumps(result)]})


def index_log(
    files: Sequence[storage.File],
    schema: Schema,
    *,
    segment_bytes: int,
    placement: TaskPlacement,
    cache_folder: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> LogIndex:
    """Parses the whole log once to number its rows and count its faults; about 5 million Criteo rows/s a core.

    With `cache_folder`, an index of the very same files is read back from there instead. `progress` gets bytes done.
    """
    cached = (
        storage.join(cache_folder, f"index-{identity(files, schema, segment_bytes)}.json") if cache_folder else None
    )
    if cached and storage.exists(cached):
        return LogIndex.from_dict(storage.read_json(cached))
    chunks = cut(files, max(CHUNK_BYTES, segment_bytes))
    entries: list[tuple[str, int, int, int]] = []
    faults, done = Faults(), 0
    if chunks:
        function = functools.partial(_index_table, schema=schema, segment_bytes=segment_bytes)
        dataset = tasks_dataset("index", function, chunks, placement=placement, block_bytes=1 << 16)
        for table in tables(dataset):
            for text in table.column("index").to_pylist():
                result = json.loads(text)
                entries.extend((path, start, stop, rows) for path, start, stop, rows in result["entries"])
                faults.add(Faults(result["counts"], [Fault(**fault) for fault in result["first"]]))
                done += sum(stop - start for _, start, stop, _ in result["entries"])
                if progress:
                    progress(done)
    index = LogIndex(numbered(entries), faults)
    if cached:
        storage.write_json(cached, index.to_dict())
    return index


def open_log(
    path: str,
    schema: Schema,
    *,
    segment_bytes: int,
    placement: TaskPlacement,
    cache_folder: str,
    note: Callable[[str], None],
    progress: Callable[[str, int, int | None], None],
) -> LogIndex:
    """The index of whatever `path` names; unpacked gzip files and indices are kept in `cache_folder`."""
    files = plain_files(path, unpack_folder=storage.join(cache_folder, "unpacked"), placement=placement, note=note)
    size = sum(file.size_bytes for file in files)
    return index_log(
        files,
        schema,
        segment_bytes=segment_bytes,
        placement=placement,
        cache_folder=cache_folder,
        progress=lambda done: progress("index (bytes)", done, size),
    )


def share_preprocessor(preprocessor: Preprocessor) -> ray.ObjectRef:
    """Puts the Preprocessor into the object store; its arrays are then shared by all processes of a node, uncopied."""
    return ray.put(preprocessor)


@lru_cache(maxsize=2)
def _shared(reference: ray.ObjectRef) -> Preprocessor:
    return ray.get(reference)


def encode_block(
    block: Block, start: int, stop: int, preprocessor: Preprocessor, *, labelled: bool = True
) -> EncodedRows:
    """Reads, parses, permutes and encodes rows [start, stop) of a block."""
    schema = preprocessor.schema if labelled else preprocessor.schema.unlabelled()
    raw = read_segments([part.segment for part in block.parts], schema)
    return preprocessor.encode(raw, block.order()[start:stop])


def _encode_task(item: tuple[Block, int, int], *, preprocessor: ray.ObjectRef, labelled: bool) -> pa.Table:
    keep_freed_memory()
    return to_arrow(encode_block(*item, _shared(preprocessor), labelled=labelled))


def to_arrow(rows: EncodedRows) -> pa.Table:
    """Columnar and zero-copy both ways: `dense` fixed-size list of float (absent without dense columns, as Arrow has no
    list of nothing), `id_s` int32 a sparse column, `label`."""
    arrays = {}
    if rows.dense.shape[1]:
        arrays["dense"] = pa.FixedSizeListArray.from_arrays(pa.array(rows.dense.reshape(-1)), rows.dense.shape[1])
    arrays.update((f"id_{s}", pa.array(ids)) for s, ids in enumerate(rows.ids))
    if rows.labels is not None:
        arrays["label"] = pa.array(rows.labels)
    return pa.table(arrays)


def from_arrow(table: pa.Table) -> list[EncodedRows]:
    """The rows of a table as `to_arrow` made it, one EncodedRows a chunk, its arrays pointing into Arrow's memory.

    Ids come as a list-like of columns; `EncodedRows.ids` is only stacked where the caller needs it in one piece.
    """
    return [_from_batch(batch) for batch in table.to_batches() if batch.num_rows]


def _from_batch(batch: pa.RecordBatch) -> EncodedRows:
    dense = np.empty((batch.num_rows, 0), np.float32)
    if "dense" in batch.schema.names:
        dense_list = batch.column("dense")
        dense = dense_list.flatten().to_numpy(zero_copy_only=True).reshape(-1, dense_list.type.list_size)
    names = [name for name in batch.schema.names if name.startswith("id_")]
    ids = [batch.column(name).to_numpy(zero_copy_only=True) for name in names]
    labels = batch.column("label").to_numpy(zero_copy_only=True) if "label" in batch.schema.names else None
    return EncodedRows(dense, ids, labels)  # type: ignore[arg-type]


def stream(
    pieces: Sequence[tuple[Block, Piece]],
    preprocessor: ray.ObjectRef,
    *,
    schema: Schema,
    placement: TaskPlacement,
    labelled: bool = True,
    prefetch_blocks: int = 2,
) -> Iterator[EncodedRows]:
    """Encoded rows of the pieces, in order, made by Ray Data tasks ahead of the reader."""
    if not pieces:
        return
    items = [(block, piece.start, piece.stop) for block, piece in pieces]
    row_bytes = 4 * len(schema.columns)
    block_bytes = max(piece.rows for _, piece in pieces) * row_bytes
    dataset = tasks_dataset(
        "ingest",
        functools.partial(_encode_task, preprocessor=preprocessor, labelled=labelled),
        items,
        placement=placement,
        block_bytes=block_bytes,
    )
    for table in tables(dataset, prefetch_blocks=prefetch_blocks):
        yield from from_arrow(table)
