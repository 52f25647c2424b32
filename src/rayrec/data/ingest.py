"""On-the-fly ingest: streams a log's encoded rows, in a given order, through Ray Data."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import pyarrow as pa
import ray

from rayrec.data.encoded import EncodedRows, from_arrow, to_arrow
from rayrec.data.placement import TaskPlacement
from rayrec.data.position import Block, Piece
from rayrec.data.preprocessor import Preprocessor
from rayrec.data.ray_tasks import tables, tasks_dataset
from rayrec.data.reading import encode_block
from rayrec.data.stages import StageAccount, measured, stage, times_of, with_times
from rayrec.native import keep_freed_memory
from rayrec.schema import Schema


def share_preprocessor(preprocessor: Preprocessor) -> ray.ObjectRef:
    """Puts the Preprocessor into the object store; its arrays are then shared by all processes of a node, uncopied."""
    _ = preprocessor.slots  # built before, once
    return ray.put(preprocessor)


@lru_cache(maxsize=2)
def _shared(reference: ray.ObjectRef) -> Preprocessor:
    return ray.get(reference)


def encode_task(item: tuple[Block, int, int], *, preprocessor: ray.ObjectRef, labelled: bool) -> pa.Table:
    """What one data task does: rows [start, stop) of a block, encoded."""
    keep_freed_memory()
    shared = _shared(preprocessor)
    table, times = measured(
        lambda: encoded_block(item, shared, labelled=labelled), rows_of=lambda table: table.num_rows
    )
    return with_times(table, times)


def encoded_block(item: tuple[Block, int, int], preprocessor: Preprocessor, *, labelled: bool = True) -> pa.Table:
    """Rows [start, stop) of a block as `to_arrow` makes them, in this process; its stages may be `measured`."""
    rows = encode_block(*item, preprocessor, labelled=labelled)
    with stage("encode"):
        return to_arrow(rows)


def stream(
    pieces: Sequence[tuple[Block, Piece]],
    preprocessor: ray.ObjectRef,
    *,
    schema: Schema,
    placement: TaskPlacement,
    labelled: bool = True,
    prefetch_blocks: int = 2,
    account: StageAccount | None = None,
) -> Iterator[EncodedRows]:
    """Encoded rows of the pieces, in order, made by Ray Data tasks ahead of the reader; `account` is told what they took."""
    if not pieces:
        return
    items = [(block, piece.start, piece.stop) for block, piece in pieces]
    row_bytes = 4 * len(schema.columns)
    block_bytes = max(piece.rows for _, piece in pieces) * row_bytes
    dataset = tasks_dataset(
        "ingest",
        functools.partial(encode_task, preprocessor=preprocessor, labelled=labelled),
        items,
        placement=placement,
        block_bytes=block_bytes,
    )
    for table in tables(dataset, prefetch_blocks=prefetch_blocks):
        times = times_of(table)
        if account is not None and times is not None:
            account.add(times)
        yield from from_arrow(table)
