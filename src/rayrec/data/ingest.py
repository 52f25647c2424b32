"""On-the-fly ingest: streams a log's encoded rows, in a given order, through Ray Data."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import lru_cache
from typing import Any, Final

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

STOP_ASKED: Final = threading.Event()
"""Set in a worker's process when its run is asked to stop: from then on it does not wait for data tasks that may never run."""
_STALL_S: Final = 5.0
"""Seconds without the next block after which, in a run that is asked to stop, the worker makes its blocks itself."""
_POLL_S: Final = 0.2
_CLOSE_S: Final = 5.0
_PIECES_A_DATASET: Final = 1024
"""Some 32 GB of text, at the usual size of a block."""
_STARTED_AHEAD: Final = 16
"""Pieces left of a Dataset when the next one starts: it takes a second or so to make its first rows."""


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
    """Encoded rows of the pieces, in order, made by Ray Data tasks ahead of the reader; `account` receives what they took.

    If the run is asked to stop and no block comes (the nodes that run data tasks may be gone), this process makes the blocks that
    are missing: other workers may have trained theirs of the same step, and a checkpoint needs a step that is whole.

    A Dataset stores all its read tasks before it makes the first row, so each has a bounded number of pieces.
    """
    if not pieces:
        return
    items = [(block, piece.start, piece.stop) for block, piece in pieces]

    def tables_of(some: Sequence[tuple[Block, int, int]]) -> Generator[pa.Table, None, None]:
        dataset = tasks_dataset(
            "ingest",
            functools.partial(encode_task, preprocessor=preprocessor, labelled=labelled),
            some,
            placement=placement,
            block_bytes=max(stop - start for _, start, stop in some) * 4 * len(schema.columns),
        )
        yield from tables(dataset, prefetch_blocks=prefetch_blocks)

    num_made = 0
    groups = [items[first : first + _PIECES_A_DATASET] for first in range(0, len(items), _PIECES_A_DATASET)]
    made = _until_stalled(_one_after_another(groups, tables_of))
    for table in made:
        num_made += 1
        times = times_of(table)
        if account is not None and times is not None:
            account.add(times)
        yield from from_arrow(table)
    for item in items[num_made:]:
        yield from from_arrow(encoded_block(item, _shared(preprocessor), labelled=labelled))


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

    # A wait within Ray cannot be broken off, so a thread waits that does not keep the process alive.
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


def _one_after_another(
    groups: Sequence[Sequence[Any]], tables_of: Callable[[Sequence[Any]], Generator[pa.Table, None, None]]
) -> Generator[pa.Table, None, None]:
    """The tables of each group, one for each of its items. A thread makes the first table of the next group, and so starts its
    tasks, when `_STARTED_AHEAD` of the present group are left."""
    with contextlib.ExitStack() as opened:
        following: _Started | None = None
        for number, group in enumerate(groups):
            present = following or opened.enter_context(contextlib.closing(tables_of(group)))
            following = None
            for place, table in enumerate(present):
                if following is None and place + _STARTED_AHEAD >= len(group) and number + 1 < len(groups):
                    following = opened.enter_context(contextlib.closing(_Started(tables_of(groups[number + 1]))))
                yield table
            present.close()


class _Started:
    """An iterator whose first value is made in a thread, which does not keep the process alive."""

    def __init__(self, values: Generator[pa.Table, None, None]) -> None:
        self._values = values
        self._first: Future[pa.Table | None] = Future()
        threading.Thread(target=copy_context().run, args=(self._make,), name="next-dataset", daemon=True).start()

    def __iter__(self) -> Iterator[pa.Table]:
        first = self._first.result()
        if first is not None:
            yield first
            yield from self._values

    def close(self) -> None:
        wait([self._first], timeout=0 if STOP_ASKED.is_set() else _CLOSE_S)
        if self._first.done():  # a generator that runs cannot be closed
            self._values.close()

    def _make(self) -> None:
        try:
            self._first.set_result(next(self._values, None))
        except BaseException as error:  # raised where the table is asked for
            self._first.set_exception(error)
