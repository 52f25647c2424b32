"""Batches of numbered rows from a position on: DistributedSampler's way of dealing them out, without its repeated rows."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, final

import numpy as np
import torch

from rayrec.batch import Batch
from rayrec.config import InputError
from rayrec.data.numbered_rows import RowSource
from rayrec.data.stage_times import BlockTimes, StageAccount, measured, stage
from rayrec.ingest.row_order import RowOrder
from rayrec.row_tally import RowNumbers, RowTally

_CLOSE_S = 10.0
"""For which `stop` waits for a read under way, which may hang where storage is unavailable."""


@final
class RowLoader:
    """One worker's batches, from a place in an epoch to the end of the last epoch or `max_steps` batches on.

    A global batch is `batch_size * world_size` rows that follow each other in the order of the epoch; worker r has rows r,
    r + world_size, ... of it. What is left at the end of an epoch makes a smaller batch, or joins the one before where it is
    fewer than two rows a worker (which batch normalisation could not train on). A thread reads ahead.
    """

    def __init__(
        self,
        source: RowSource,
        order: RowOrder,
        *,
        epochs: int | None,
        batch_size: int,
        rank: int,
        world_size: int,
        state: dict[str, Any] | None = None,
        max_steps: int | None = None,
        prefetch_batches: int = 2,
        small_batches: bool = False,
        data_hash: str | None = None,
    ) -> None:
        """`epochs` None: as many as `max_steps` take. `state`: of a loader over the same rows in the same order, of any number
        of workers; raises InputError where they are others, as their counts, or their `data_hash`, tell. `small_batches`: any
        rest is a batch of its own, for evaluation."""
        assert epochs is not None or max_steps is not None
        if len(source) == 0:
            raise InputError("the training data has no rows")
        self._source, self._order = source, order
        self._global = batch_size * world_size
        self._rank, self._world_size = rank, world_size
        self._least = 1 if small_batches else min(2 * world_size, self._global)
        self._prefetch = prefetch_batches
        self._identity = _identity(order, data_hash)
        self._epoch, self._offset = _place(state, self._identity) if state else (0, 0)
        self._handed_out = 0
        self.steps_per_epoch = self._steps_left(0)
        to_end = None if epochs is None else self._steps_to(epochs)
        self.steps = min(count for count in (to_end, max_steps) if count is not None)
        self.stages = StageAccount(cpus=1.0)
        self._ready: queue.Queue[tuple[Batch, BlockTimes] | BaseException] = queue.Queue(
            maxsize=max(1, prefetch_batches)
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Lets the thread read the first batches."""
        if self._thread is None and self.steps:
            self._thread = threading.Thread(target=self._read_ahead, name="row-loader", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._handed_out == self.steps:
            raise StopIteration
        self.start()
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        batch, times = item
        self.stages.add(times)
        self._handed_out += 1
        return batch

    def rows(self, batches: int) -> int:
        """Rows of all workers in the first `batches` batches."""
        return self._behind(*self._after(batches)) - self._behind(self._epoch, self._offset)

    def rows_behind(self) -> RowTally:
        """The rows that a run has to have trained at the present position: every row once in each epoch, less those that are
        left of this one."""
        epoch, offset = self._after(self._handed_out)
        tally = RowTally()
        for past in range(epoch + bool(offset)):
            tally.add_ranges([(0, len(self._source))], epoch=past)
        if offset:
            for numbers in self._order.numbers(epoch, offset):
                tally.remove(RowNumbers(epoch, numbers))
        return tally

    def state(self) -> dict[str, Any]:
        """The position behind the batches handed out so far; plain JSON values, the same on every worker."""
        epoch, offset = self._after(self._handed_out)
        return {"epoch": epoch, "offset": offset, **self._identity}

    def stop(self) -> None:
        """Ends the thread; the rows stay open."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def close(self) -> None:
        """Ends the thread and closes the rows."""
        self.stop()
        self._source.close()

    # -- positions

    def _behind(self, epoch: int, offset: int) -> int:
        return epoch * self._order.rows + offset

    def _steps_left(self, offset: int) -> int:
        full, rest = divmod(self._order.rows - offset, self._global)
        return full if full and rest < self._least else full + bool(rest)

    def _steps_to(self, epochs: int) -> int:
        if self._epoch >= epochs:
            return 0
        return self._steps_left(self._offset) + (epochs - self._epoch - 1) * self.steps_per_epoch

    def _after(self, batches: int) -> tuple[int, int]:
        """The place behind so many batches."""
        epoch, offset = self._epoch, self._offset
        left = self._steps_left(offset)
        if batches >= left:
            whole, batches = divmod(batches - left, self.steps_per_epoch)
            epoch, offset = epoch + 1 + whole, 0
        return epoch, offset + batches * self._global

    def _stops(self, offset: int) -> Iterator[tuple[int, int]]:
        """(first, one after last) place of each batch of an epoch from `offset` on."""
        for step in range(count := self._steps_left(offset)):
            stop = self._order.rows if step == count - 1 else offset + self._global
            yield offset, stop
            offset = stop

    # -- in the thread

    def _read_ahead(self) -> None:
        try:
            for _, batch in zip(range(self.steps), self._batches(), strict=False):
                if not self._put(batch):
                    return
        except BaseException as error:  # raised where the batch is asked for
            self._put(error)

    def _put(self, item: tuple[Batch, BlockTimes] | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _batches(self) -> Iterator[tuple[Batch, BlockTimes]]:
        epoch, offset = self._epoch, self._offset
        while True:
            numbers = _Numbers(self._announced(epoch, offset))
            for start, stop in self._stops(offset):
                taken = numbers.take(stop - start)
                yield measured(partial(self._batch, taken, epoch), rows_of=len)
            epoch, offset = epoch + 1, 0

    def _announced(self, epoch: int, offset: int) -> Iterator[np.ndarray]:
        """The order's windows, each announced to the source while the one before is in use."""
        windows = self._order.numbers(epoch, offset)
        present = next(windows, None)
        if present is not None:
            self._source.will_read(present)
        while present is not None:
            following = next(windows, None)
            if following is not None:
                self._source.will_read(following)
            yield present
            present = following

    def _batch(self, numbers: np.ndarray, epoch: int) -> Batch:
        mine, weight = numbers[self._rank :: self._world_size], self._world_size / len(numbers)
        counted = RowNumbers(epoch, mine)
        if not len(mine):
            mine, weight = numbers[:1], 0.0
        with stage("read"):
            arrays = self._source.read(mine)
        return Batch({name: torch.from_numpy(array) for name, array in arrays.items()}, weight, row_numbers=counted)


class _Numbers:
    """Takes batches off windows of row numbers, across their borders."""

    def __init__(self, windows: Iterator[np.ndarray]) -> None:
        self._windows = windows
        self._left = np.empty(0, np.int64)

    def take(self, count: int) -> np.ndarray:
        pieces = []
        while count:
            if not len(self._left):
                self._left = next(self._windows)
            piece, self._left = self._left[:count], self._left[count:]
            pieces.append(piece)
            count -= len(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _identity(order: RowOrder, data_hash: str | None) -> dict[str, Any]:
    """What the meaning of a place depends on: which rows these are, and how they are mixed."""
    identity: dict[str, Any] = {"rows": order.rows, "chunks": len(order.chunk_rows)}
    if data_hash is not None:
        identity["data_hash"] = data_hash
    identity["chunk_rows"] = hashlib.sha256(np.array(order.chunk_rows, "<i8").tobytes()).hexdigest()[:16]
    identity |= {"shuffle": order.shuffle, "seed": order.seed}
    if order.shuffle == "window":  # one that holds all chunks is the same whatever its size
        identity["window"] = min(order.chunks_per_window, len(order.chunk_rows))
    return identity


def _place(state: dict[str, Any], identity: dict[str, Any]) -> tuple[int, int]:
    for name, value in identity.items():
        if state.get(name, value) != value:  # what earlier versions did not store cannot be compared
            raise InputError(
                f"train_data: the checkpoint's position is one in data with {name} {state[name]}, and this has {value}; go on "
                "with the data and order the run began with, or choose another --name"
            )
    return state["epoch"], state["offset"]
