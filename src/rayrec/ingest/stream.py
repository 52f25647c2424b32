"""On-the-fly ingest: streams a log's encoded rows, in a given order, made by an engine's tasks."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Final

import pyarrow as pa

from rayrec.data import materialized
from rayrec.data.encoded import EncodedRows, from_arrow, to_arrow
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.engine import STOP_ASKED, Shared, StreamEngine
from rayrec.data.logs.index import Block
from rayrec.data.logs.reading import encode_block
from rayrec.data.materialized.dataset import dataset_of
from rayrec.data.stage_times import BlockTimes, StageAccount, measured, stage, times_of, with_times
from rayrec.ingest.block_order import Piece
from rayrec.native import keep_freed_memory
from rayrec.schema import Schema

_STALL_S: Final = 5.0
"""Seconds without the next block after which, in a run that is asked to stop, the worker makes its blocks itself."""
_POLL_S: Final = 0.2
_CLOSE_S: Final = 5.0


def encode_task(item: tuple[Block, int, int], *, preprocessor: Shared[Preprocessor], labelled: bool) -> pa.Table:
    """What one data task does: rows [start, stop) of a block, encoded."""
    keep_freed_memory()
    shared = preprocessor.get()
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
    pieces: Iterable[tuple[Block, Piece]],
    preprocessor: Shared[Preprocessor],
    *,
    most_rows: int,
    schema: Schema,
    engine: StreamEngine,
    labelled: bool = True,
    prefetch_blocks: int = 2,
    account: StageAccount | None = None,
) -> Iterator[EncodedRows]:
    """Encoded rows of the pieces, in order, made by tasks of `engine` ahead of the reader; `account` receives what they took. No
    piece has more than `most_rows` rows. The pieces may be iterated again from the first.

    If the run is asked to stop and no block comes (the nodes that run data tasks may be gone), this process makes the blocks that
    are missing: other workers may have trained theirs of the same step, and a checkpoint needs a step that is whole.
    """

    def items() -> Iterator[tuple[Block, int, int]]:
        return ((block, piece.start, piece.stop) for block, piece in pieces)

    made = engine.stream(
        "ingest",
        functools.partial(encode_task, preprocessor=preprocessor, labelled=labelled),
        items(),
        block_bytes=most_rows * 4 * len(schema.columns),
        prefetch_blocks=prefetch_blocks,
    )
    num_made = 0
    for table in _until_stalled(made):
        num_made += 1
        times = times_of(table)
        if account is not None and times is not None:
            account.add(times)
        yield from from_arrow(table)
    for item in islice(items(), num_made, None):
        yield from from_arrow(encoded_block(item, preprocessor.get(), labelled=labelled))


def _until_stalled(source: Generator[pa.Table, None, None]) -> Iterator[pa.Table]:
    """The tables of `source`; ends early if the run is asked to stop and the next one does not come."""
    ready: queue.Queue[pa.Table | BaseException | None] = queue.Queue(maxsize=1)
    ended = threading.Event()

    def put(item: pa.Table | BaseException | None) -> None:
        while not ended.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=_POLL_S)
                break

    def pull() -> None:
        try:
            for table in source:
                put(table)
                if ended.is_set():
                    break
            put(None)
        except BaseException as error:  # raised where the table is asked for
            put(error)
        finally:
            source.close()

    # A wait within an engine (Ray's) cannot be broken off, so a thread waits that does not keep the process alive.
    thread = threading.Thread(target=pull, name="ingest", daemon=True)
    thread.start()
    try:
        since_s = time.monotonic()
        while True:
            try:
                item = ready.get(timeout=_POLL_S)
            except queue.Empty:
                if STOP_ASKED.is_set() and time.monotonic() - since_s >= _STALL_S:
                    return
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
            since_s = time.monotonic()
    finally:
        ended.set()
        if not STOP_ASKED.is_set():
            thread.join(_CLOSE_S)


def stream_preprocessed(
    pieces: Iterable[tuple[Block, Piece]],
    preprocessor: Preprocessor,
    *,
    in_memory: bool = False,
    prefetch_blocks: int = 2,
    account: StageAccount | None = None,
) -> Iterator[EncodedRows]:
    """Rows of the pieces, in order, read in this process by one thread that stays `prefetch_blocks` pieces ahead (the
    kernels release the GIL). With `in_memory`, the files the pieces are of are read wholly first, and stay in memory as
    long as the process; the pieces are then iterated twice. `account` receives the time of each. For formats in MAPPED;
    `stream` reads the others."""
    if in_memory:
        files = {part.segment.path: dataset_of(part.segment) for block, _ in pieces for part in block.parts}
        for dataset, _ in islice(files.values(), 1):  # that of all
            dataset.maps.hold(sorted({file for _, file in files.values()}))
    thread = ThreadPoolExecutor(1, thread_name_prefix="read-ready")
    ahead: deque[Future[tuple[EncodedRows, BlockTimes]]] = deque()

    def taken() -> EncodedRows:
        rows, times = ahead.popleft().result()
        if account is not None:
            account.add(times)
        return rows

    waiting = iter(pieces)
    try:
        for block, piece in waiting:
            ahead.append(thread.submit(_read_piece, block, piece, preprocessor))
            if len(ahead) > prefetch_blocks:
                yield taken()
        while ahead:
            yield taken()
    finally:
        thread.shutdown(wait=True, cancel_futures=True)


def _read_piece(block: Block, piece: Piece, preprocessor: Preprocessor) -> tuple[EncodedRows, BlockTimes]:
    def make() -> EncodedRows:
        with stage("read"):
            order = block.order()[piece.start : piece.stop]
            return materialized.read([part.segment for part in block.parts], order, preprocessor)

    return measured(make, rows_of=len)
