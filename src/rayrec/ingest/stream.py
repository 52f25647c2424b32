"""Rows in a given order, from engine tasks, mapped files or a row source, and prefetching in a
thread.
"""

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar, final

import numpy as np
import pyarrow as pa

from rayrec.data.arrow import arrays_to_table, table_to_arrays
from rayrec.data.encoded_rows import EncodedRows, from_arrow, to_arrow
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.engine import Shared, StopToken, StreamEngine
from rayrec.data.logs.index import Block, row_numbers
from rayrec.data.logs.reading import read_raw
from rayrec.data.materialized.dataset import open_dataset
from rayrec.data.materialized.dataset import read as read_preprocessed
from rayrec.data.numbered_rows import EpochRows, RowSource
from rayrec.data.raw_block import RawBlock
from rayrec.data.stage_times import BlockTimes, StageTimes, measured, read_times, stage, with_times
from rayrec.ingest.block_order import BlockRange
from rayrec.native import keep_freed_memory
from rayrec.schema import Schema

T = TypeVar("T")
BlockRanges: TypeAlias = Iterable[tuple[Block, BlockRange]]
NumberedItem: TypeAlias = tuple[np.ndarray, int]
NumberedArrays: TypeAlias = tuple[np.ndarray, dict[str, np.ndarray]]
EncodedBlock: TypeAlias = tuple[Sequence[EncodedRows], BlockTimes | None]
"""Rows of a block range and their stage times."""
_STALL_S: Final = 5.0
"""Maximum wait for the next value after the run was asked to stop, in seconds."""
_POLL_S: Final = 0.1
"""Interval at which the thread and its reader check for each other's end, in seconds."""
ITEM_BYTES: Final = 16 << 20
"""Maximum size of the rows that a task reads, unless a single one is larger, in bytes."""
_CLOSE_S: Final = 10.0
"""Maximum wait of `close` for a pending read, which may hang if storage is unavailable, in
seconds.
"""


@dataclass(frozen=True)
class _End:
    """End of a prefetched generator, behind its last value."""

    error: BaseException
    """Error of the generator, or its StopIteration."""


@final
class Prefetcher(Generic[T]):
    """Iterator over the values of a generator, of which a daemon thread prefetches at most
    `max_prefetch`. Errors of the generator are raised to the reader in order. The thread owns the
    generator and closes it.
    """

    # Neither side may wait for the other without end. A reader that must stop must not wait for
    # data tasks on lost nodes, and the thread must not wait for a reader that is gone. So both
    # wait in intervals of _POLL_S, and look at `stop` and `_closed` in between. The thread is a
    # daemon, since a generator that waits for lost nodes cannot be interrupted at the process's
    # end. Only the thread may run or close the generator, which Python allows one thread at a time.

    def __init__(
        self, values: Generator[T, None, None], *, max_prefetch: int, stop: StopToken | None = None
    ) -> None:
        """Start the thread. Once `stop` is set, iteration ends if the next value is late. It is for
        a generator that may wait forever and cannot be interrupted, such as for data tasks on lost
        nodes.
        """
        self._values = values
        self._stop = stop
        # Its size limits the rows in memory ahead of the reader.
        self._made: queue.Queue[T | _End] = queue.Queue(max_prefetch)
        self._closed = threading.Event()
        self._ended = False
        self.stalled = False
        """Whether iteration ended early."""
        self._thread = threading.Thread(target=self._make, name="ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        since_s = time.monotonic()
        while not self._ended:
            try:
                made = self._made.get(timeout=_POLL_S)
            except queue.Empty:
                if self._is_stopping() and time.monotonic() - since_s >= _STALL_S:
                    self._ended = self.stalled = True
                continue
            if not isinstance(made, _End):
                return made
            self._ended = True
            raise made.error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread. Waits for the pending value, unless that could stall a run that was
        asked to stop.
        """
        self._ended = True
        self._closed.set()
        if not self._is_stopping():
            self._thread.join(_CLOSE_S)

    def _is_stopping(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    def _make(self) -> None:
        try:
            while not self._closed.is_set():
                self._put(next(self._values))
        except BaseException as error:  # Including StopIteration, which ends the reader in order.
            self._put(_End(error))
        finally:
            self._values.close()

    def _put(self, made: T | _End) -> None:
        while not self._closed.is_set():
            try:
                self._made.put(made, timeout=_POLL_S)
            except queue.Full:
                continue
            return


@dataclass(frozen=True)
class LazyBlock:
    """Block whose rows are encoded on request."""

    encode: Callable[[int, int], EncodedRows]
    """Function of (start, stop) that encodes rows [start, stop) of the permuted block."""
    raw: RawBlock | None
    """Raw rows of the block's segments, not permuted. None for preprocessed data."""


def open_block(block: Block, preprocessor: Preprocessor, *, labelled: bool = True) -> LazyBlock:
    """Open a block. Reads and parses raw logs immediately, and preprocessed rows on request."""
    segments = block.segments
    order = block.order()
    if segments[0].is_preprocessed:
        read = stage("read")(
            lambda start, stop: read_preprocessed(segments, order[start:stop], preprocessor)
        )
        return LazyBlock(read, None)
    raw = read_raw(segments, preprocessor.schema if labelled else preprocessor.schema.unlabelled())
    numbers = row_numbers(segments)  # `read_raw` checks the row count of each segment.

    @stage("encode")
    def encode(start: int, stop: int) -> EncodedRows:
        rows = order[start:stop]
        groups = raw.group_keys(rows) if labelled and raw.schema.group else None
        return replace(preprocessor.encode(raw, rows), row_numbers=numbers[rows], groups=groups)

    return LazyBlock(encode, raw)


def encode_block(
    block: Block, start: int, stop: int, preprocessor: Preprocessor, *, labelled: bool = True
) -> EncodedRows:
    """Encode rows [start, stop) of a permuted block."""
    return open_block(block, preprocessor, labelled=labelled).encode(start, stop)


def encode_task(item: tuple[Block, int, int], *, preprocessor: Shared[Preprocessor]) -> pa.Table:
    """Encode rows [start, stop) of a block in a data task."""
    keep_freed_memory()
    shared = preprocessor.get()
    table, times = measured(
        lambda: encoded_block(item, shared), rows_of=lambda table: table.num_rows
    )
    return with_times(table, times)


def encoded_block(item: tuple[Block, int, int], preprocessor: Preprocessor) -> pa.Table:
    """Encode rows [start, stop) of a block into an Arrow table, in this process. Records stages for
    `measured`.
    """
    rows = encode_block(*item, preprocessor)
    with stage("encode"):
        return to_arrow(rows)


@dataclass(frozen=True)
class TaskSource:
    """Source of encoded rows from engine tasks, which run ahead of the reader."""

    preprocessor: Shared[Preprocessor]
    engine: StreamEngine
    inputs: Schema
    """Input columns of the model."""
    max_rows: int
    """Maximum number of rows per block range."""
    prefetch_blocks: int = 2
    max_prefetch: ClassVar[int] = 1

    @property
    def stop(self) -> StopToken:
        return self.engine.stop

    @property
    def cpus(self) -> float:
        return self.engine.cpus

    def make(self, block_ranges: BlockRanges) -> Generator[EncodedBlock, None, None]:
        tables = self.engine.stream(
            "ingest",
            functools.partial(encode_task, preprocessor=self.preprocessor),
            ((block, block_range.start, block_range.stop) for block, block_range in block_ranges),
            block_bytes=self.max_rows * 4 * len(self.inputs.columns),
            prefetch_blocks=self.prefetch_blocks,
        )
        for table in tables:
            yield from_arrow(table), read_times(table)

    def make_locally(self, block: Block, block_range: BlockRange) -> Sequence[EncodedRows]:
        """Encode the rows of a block range in this process."""
        return from_arrow(
            encoded_block((block, block_range.start, block_range.stop), self.preprocessor.get())
        )


@dataclass(frozen=True)
class MappedSource:
    """Source of rows from local preprocessed files in MAPPED formats, read by one thread. The
    kernels release the GIL. `in_memory` first loads the files into memory, where they stay until
    the process ends.
    """

    preprocessor: Preprocessor
    in_memory: bool = False
    prefetch_blocks: int = 2
    cpus: ClassVar[float] = 1.0
    stop: ClassVar[None] = None

    @property
    def max_prefetch(self) -> int:
        return max(1, self.prefetch_blocks - 1)  # The thread has one more.

    def make(self, block_ranges: BlockRanges) -> Generator[EncodedBlock, None, None]:
        if self.in_memory:
            segments = {part.segment for block, _ in block_ranges for part in block.parts}
            files = [open_dataset(segment) for segment in segments]
            if files:
                dataset, _ = files[0]  # That of all files
                dataset.maps.load(sorted({file for _, file in files}))
        for block, block_range in block_ranges:
            rows, times = measured(
                functools.partial(self.make_locally, block, block_range),
                rows_of=lambda rows: len(rows[0]),
            )
            yield rows, times

    def make_locally(self, block: Block, block_range: BlockRange) -> Sequence[EncodedRows]:
        with stage("read"):
            order = block.order()[block_range.start : block_range.stop]
            return [read_preprocessed(block.segments, order, self.preprocessor)]


@dataclass(frozen=True)
class NumberedSource:
    """Source of numbered rows from engine tasks, or one thread. Items (row numbers, epoch) become
    (row numbers, arrays).
    """

    rows: RowSource
    """Rows to read. With an engine, picklable, and readable by several threads."""
    engine: StreamEngine | None
    max_prefetch: int

    @property
    def stop(self) -> StopToken | None:
        return None if self.engine is None else self.engine.stop

    def make(
        self, items: Iterable[NumberedItem]
    ) -> Generator[tuple[Sequence[NumberedArrays], BlockTimes | None], None, None]:
        if self.engine is None:
            for item in items:
                yield measured(
                    functools.partial(self.make_locally, *item),
                    rows_of=lambda made: len(made[0][0]),
                )
            return
        read = functools.partial(_read_task, rows=self.engine.share(self.rows))
        # The engine takes items ahead of its results, which come in order.
        pending: deque[np.ndarray] = deque()

        def send() -> Iterator[NumberedItem]:
            for item in items:
                pending.append(item[0])
                yield item

        for table in self.engine.stream(
            "rows", read, send(), block_bytes=ITEM_BYTES, prefetch_blocks=self.max_prefetch
        ):
            yield [(pending.popleft(), table_to_arrays(table))], read_times(table)

    def make_locally(self, numbers: np.ndarray, epoch: int) -> Sequence[NumberedArrays]:
        return [(numbers, _read_epoch(self.rows, numbers, epoch))]


def _read_task(item: NumberedItem, *, rows: Shared[RowSource]) -> pa.Table:
    keep_freed_memory()
    arrays, times = measured(lambda: _read_epoch(rows.get(), *item), rows_of=lambda _: len(item[0]))
    return with_times(arrays_to_table(arrays), times)


@stage("read")
def _read_epoch(rows: RowSource, numbers: np.ndarray, epoch: int) -> dict[str, np.ndarray]:
    return rows.read_epoch(numbers, epoch) if isinstance(rows, EpochRows) else rows.read(numbers)


@final
class RowStream(Iterator[Any]):
    """Iterator over the rows of items, such as block ranges, in order. The source starts
    immediately and runs ahead of the reader. If the run is asked to stop and no rows arrive,
    because the nodes of the data tasks may be lost, this process makes the missing rows: other
    workers may have trained theirs of the same step, and a checkpoint needs a complete step.
    """

    def __init__(
        self,
        source: TaskSource | MappedSource | NumberedSource,
        items: Iterable[tuple[Any, Any]],
        account: StageTimes | None = None,
    ) -> None:
        """Start reading. `items` must be re-iterable. `account` receives the stage times of
        each.
        """
        self._source = source
        self._items = items
        self._account = account
        self._prefetcher = Prefetcher(
            source.make(items), max_prefetch=source.max_prefetch, stop=source.stop
        )
        self._rows = self._take()

    def __next__(self) -> Any:
        return next(self._rows)

    def close(self) -> None:
        self._prefetcher.close()

    def _take(self) -> Iterator[Any]:
        count = 0
        for rows, times in self._prefetcher:
            count += 1
            if self._account is not None and times is not None:
                self._account.add(times)
            yield from rows
        if not self._prefetcher.stalled:
            return
        # The nodes of the data tasks may be gone. Other workers may have trained their rows of this
        # step, so make ours here.
        for item in islice(self._items, count, None):
            yield from self._source.make_locally(*item)
