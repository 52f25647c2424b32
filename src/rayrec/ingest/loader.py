"""Click batches of one worker: dealt, streamed and sliced so that every row of an epoch is used exactly once."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec.batch import DENSE, Batch
from rayrec.data.encoded import Bags, EncodedRows, Ids
from rayrec.data.engine import Shared, StreamEngine
from rayrec.data.logs.index import Block, Part, row_numbers
from rayrec.data.stage_times import StageAccount
from rayrec.ingest.ahead import Ahead
from rayrec.ingest.block_order import BlockOrder, Piece, Position, after, steps_in
from rayrec.ingest.stream import stream, stream_preprocessed
from rayrec.row_tally import RowNumbers, RowTally, merged
from rayrec.schema import Schema

if TYPE_CHECKING:
    from rayrec.data.encoding.preprocessor import Preprocessor


Targets = Callable[[EncodedRows], np.ndarray]
"""What labelled rows are to be scored as: float32 (rows), from 0 to 1."""


class ClickLoader:
    """Batches of one worker from a position to the end of the last epoch. A worker's share of a step may be smaller than
    its neighbour's, even empty, at the end of an epoch; `loss_weight` makes up for it."""

    def __init__(
        self,
        order: BlockOrder,
        preprocessor: Shared[Preprocessor],
        *,
        schema: Schema,
        epochs: int,
        batch_size: int,
        rank: int,
        world_size: int,
        position: Position,
        engine: StreamEngine,
        prefetch_blocks: int,
        max_steps: int | None = None,
        mapped: Preprocessor | None = None,
        in_memory: bool = False,
        targets: Targets | None = None,
        ahead: int = 0,
        unpooled: Sequence[str] = (),
    ) -> None:
        """`schema` is that of the model's inputs; `unpooled`: those of its features that go into `Batch.sequence_features`.
        `mapped`: the rows are preprocessed files of this machine, which the worker reads itself, with `in_memory` all of them
        first; else data tasks of `engine` make the rows. `targets`: what rows are to be scored as; None: their labels. `ahead`:
        so many batches are cut by a thread and copied to pinned memory, from which they travel to a GPU while it computes; 0:
        `next` cuts them, in pageable memory. Raises InputError where `position` is one in another order."""
        order.check(position)
        self._order, self._preprocessor, self._schema = order, preprocessor, schema
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._engine, self._prefetch_blocks = engine, prefetch_blocks
        self._mapped, self._in_memory, self._targets, self._unpooled = mapped, in_memory, targets, unpooled
        # One thread reads what is mapped.
        self.stages = StageAccount(cpus=1.0 if mapped is not None else engine.cpus)
        self._handed_out = 0
        self.steps_per_epoch = steps_in(-(-order.rows // world_size), batch_size)
        self._start = position
        self._next_epoch = position.epoch  # the first one begun from its start
        self._first_epoch_steps = 0
        if position.epoch < epochs:
            self._next_epoch += 1
            self._start = position.for_workers(
                order.blocks(position.epoch), world_size=world_size, batch_size=batch_size
            )
            self._first_epoch_steps = self._steps_left(self._start, self._hands(self._start))
        self.steps = self._first_epoch_steps + max(0, epochs - position.epoch - 1) * self.steps_per_epoch
        if max_steps is not None:
            self.steps = min(self.steps, max_steps)
        # Epoch by epoch: the first of those left, then whole ones. A thread reads ahead in the next one.
        self._plan = lru_cache(maxsize=3)(self._plan_of)
        self._first_epoch_rows = int(self._plan(0).rows_until[-1]) if self.steps else 0
        self._batches: Generator[Batch, None, None] | Ahead[Batch] = self._make_batches()
        self._ahead = ahead
        self._first: Future[Batch] | None = None

    def start(self) -> None:
        """Lets data tasks begin: the first batch is made in a thread, and waits there for the first `next`."""
        if self._ahead:
            self._cut_ahead()
        elif self.steps and not self._handed_out and self._first is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="first-batch")
            self._first = thread.submit(next, self._batches)
            thread.shutdown(wait=False)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ahead:
            self._cut_ahead()
        first, self._first = self._first, None
        batch = next(self._batches) if first is None else first.result()
        self._handed_out += 1
        return batch

    def _cut_ahead(self) -> None:
        if isinstance(self._batches, Generator):
            self._batches = Ahead(self._batches, most=self._ahead, prepare=Batch.pin_memory)

    def close(self) -> None:
        """Stops the data tasks."""
        if self._first is not None:
            self._first.exception()  # waits: a generator cannot be closed while it runs
        self._batches.close()

    def rows(self, batches: int) -> int:
        """Rows of all workers in the first `batches` batches."""
        if not batches:
            return 0
        beyond = batches - self._first_epoch_steps
        if beyond <= 0:
            return int(self._plan(0).rows_until[batches])
        epochs, step = divmod(beyond, self.steps_per_epoch)
        before = self._first_epoch_rows + epochs * self._order.rows
        return before + (int(self._plan(1 + epochs).rows_until[step]) if step else 0)

    def position(self) -> Position:
        """The position behind the batches handed out so far."""
        beyond = self._handed_out - self._first_epoch_steps
        if beyond < 0:
            return replace(self._start, step_in_deal=self._start.step_in_deal + self._handed_out)
        epochs, step = divmod(beyond, self.steps_per_epoch)
        return self._epoch_start(self._next_epoch + epochs, step)

    def state(self) -> dict[str, Any]:
        return replace(self.position(), order=self._order.identity).to_dict()

    def rows_behind(self) -> RowTally:
        """The rows that a run has to have trained at the present position, by any number of workers: each row of the log's
        training set once in every epoch, less those that are left of this one."""
        position, tally = self.position(), RowTally()
        whole_set = merged(numbers_of(part) for part in self._order.parts)
        for epoch in range(position.epoch):
            tally.add_ranges(whole_set, epoch=epoch)
        if position.world_size:
            tally.add_ranges(whole_set, epoch=position.epoch)
            blocks, used = self._order.blocks(position.epoch), position.step_in_deal * position.batch_size
            left = [piece for hand in position.hands(blocks) for piece in after(hand, used)]
            whole = [blocks[piece.block] for piece in left if piece.rows == blocks[piece.block].rows]
            untouched = merged(numbers_of(part) for block in whole for part in block.parts)
            tally.add_ranges(untouched, epoch=position.epoch, times=-1)
            for piece in left:
                if piece.rows < blocks[piece.block].rows:
                    tally.remove(RowNumbers(position.epoch, _numbers_in(blocks[piece.block], piece)))
        return tally

    def _hands(self, position: Position) -> list[list[Piece]]:
        return position.hands(self._order.blocks(position.epoch))

    def _steps_left(self, position: Position, hands: list[list[Piece]]) -> int:
        largest = max((sum(piece.rows for piece in hand) for hand in hands), default=0)
        return steps_in(largest, self._batch_size) - position.step_in_deal

    def _epoch_start(self, epoch: int, step: int = 0) -> Position:
        return Position(epoch, step, self._world_size, self._batch_size, None)

    def _plan_of(self, number: int) -> _EpochPlan:
        """Of the epoch of the start position, for 0, and of those after it."""
        start = self._start if number == 0 else self._epoch_start(self._start.epoch + number)
        blocks = self._order.blocks(start.epoch)
        hands = start.hands(blocks)
        pieces = [
            (blocks[piece.block], piece) for piece in after(hands[self._rank], start.step_in_deal * self._batch_size)
        ]
        totals = [sum(piece.rows for piece in hand) for hand in hands]
        first = start.step_in_deal
        until = np.arange(first, first + self._steps_left(start, hands) + 1) * self._batch_size  # rows of a worker
        own_rows = np.diff(np.minimum(until, totals[self._rank]))
        rows_until = np.zeros_like(until)
        for total, workers in Counter(totals).items():  # two, since hands differ by a row at most
            rows_until += workers * np.minimum(until, total)
        return _EpochPlan(start.epoch, pieces, own_rows, rows_until - rows_until[0])

    def _plans(self) -> Iterator[tuple[_EpochPlan, int]]:
        """With the number of steps that are wanted of each."""
        left, number = self.steps, 0
        while left > 0:
            plan = self._plan(number)
            yield plan, min(left, len(plan.own_rows))
            left, number = left - len(plan.own_rows), number + 1

    def _sizes(self) -> Iterator[tuple[int, int, int]]:
        """(epoch, its rows, rows of all workers) of every step."""
        for plan, steps in self._plans():
            for own, everyone in zip(
                plan.own_rows[:steps].tolist(), np.diff(plan.rows_until[: steps + 1]).tolist(), strict=True
            ):
                yield plan.epoch, own, everyone

    def _make_batches(self) -> Generator[Batch, None, None]:
        if not self.steps:
            return
        pieces = _Pieces(self._plans)
        if self._mapped is not None:
            rows = stream_preprocessed(
                pieces,
                self._mapped,
                in_memory=self._in_memory,
                prefetch_blocks=max(1, self._prefetch_blocks),
                account=self.stages,
            )
        else:
            rows = stream(
                pieces,
                self._preprocessor,
                most_rows=max((block.rows for block, _ in self._plan(0).pieces or self._plan(1).pieces), default=1),
                schema=self._schema,
                engine=self._engine,
                prefetch_blocks=self._prefetch_blocks,
                account=self.stages,
            )
        slicer = Slicer.of(
            rows, self._schema, targets=self._targets, unpooled=self._unpooled, pin_constants=bool(self._ahead)
        )
        for epoch, mine, everyone in self._sizes():
            yield slicer.take(mine, loss_weight=self._world_size / everyone, epoch=epoch)


def numbers_of(part: Part) -> tuple[int, int]:
    """[first, one after last) number in the log of a part's rows."""
    first = part.segment.first_row
    return first + part.start, first + part.stop


def _numbers_in(block: Block, piece: Piece) -> np.ndarray:
    return row_numbers([part.segment for part in block.parts])[block.order()[piece.start : piece.stop]]


class _EpochPlan(NamedTuple):
    """What a worker has of an epoch, or of the rest of one."""

    epoch: int
    pieces: list[tuple[Block, Piece]]
    """That it reads."""
    own_rows: np.ndarray
    """Of each step."""
    rows_until: np.ndarray
    """Of all workers, before each step and after the last."""


@dataclass(frozen=True)
class _Pieces:
    """The pieces of all epochs, as often as they are iterated; none for rows that no step wants."""

    plans: Callable[[], Iterator[tuple[_EpochPlan, int]]]

    def __iter__(self) -> Iterator[tuple[Block, Piece]]:
        for plan, steps in self.plans():
            left = int(plan.own_rows[:steps].sum())
            for block, piece in plan.pieces:
                if left <= 0:
                    break
                yield block, piece
                left -= piece.rows


class Slicer:
    """Cuts a stream of encoded rows into batches; one copy a row."""

    def __init__(
        self,
        rows: Iterator[EncodedRows],
        *,
        num_dense: int,
        keys: Sequence[str],
        labels: Sequence[str],
        weighted: bool = False,
        targets: Targets | None = None,
        unpooled: Sequence[str] = (),
        pin_constants: bool = False,
    ) -> None:
        """`labels`: names of the rows' labels, the first of which `targets` changes. `weighted`: whether ids have weights.
        `unpooled`: those of `keys` that go into `Batch.sequence_features`. `pin_constants`: lengths and offsets that are the same
        in every batch are pinned once, and not in each batch, of which they are more than half."""
        self._rows, self._num_dense, self._keys, self._labels, self._targets = rows, num_dense, keys, labels, targets
        self._weighted, self._pin_constants = weighted, pin_constants
        self._unpooled = [number for number, key in enumerate(keys) if key in unpooled]
        self._pooled = [number for number, key in enumerate(keys) if key not in unpooled]
        self._current: EncodedRows | None = None
        self._offsets: list[np.ndarray | None] = []
        self._used = 0
        self._constant: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def of(
        cls,
        rows: Iterator[EncodedRows],
        inputs: Schema,
        *,
        targets: Targets | None = None,
        unpooled: Sequence[str] = (),
        pin_constants: bool = False,
    ) -> Slicer:
        """`inputs`: the model's columns."""
        assert inputs.label is not None, "an unlabelled log is refused before"
        return cls(
            rows,
            num_dense=len(inputs.dense),
            keys=inputs.sparse,
            labels=inputs.label_names,
            weighted=bool(inputs.list_weights),
            targets=targets,
            unpooled=unpooled,
            pin_constants=pin_constants,
        )

    def take(self, count: int, *, loss_weight: float, epoch: int = 0) -> Batch:
        """The next `count` rows, which belong to an epoch."""
        slices: list[tuple[EncodedRows, list[np.ndarray | None], int, int]] = []
        done = 0
        while done < count:
            if self._current is None or self._used == len(self._current):
                self._current, self._used = next(self._rows), 0
                self._offsets = [ids.offsets() if isinstance(ids, Bags) else None for ids in self._current.ids]
            size = min(count - done, len(self._current) - self._used)
            slices.append((self._current, self._offsets, self._used, self._used + size))
            done += size
            self._used += size
        dense = np.empty((count, self._num_dense), np.float32)
        done = 0
        for rows, _, start, stop in slices:
            dense[done : done + stop - start] = rows.dense[start:stop]
            done += stop - start
        ids = self._ids(slices, count)

        def joined(values_of: Callable[[EncodedRows], np.ndarray | None], dtype: type) -> np.ndarray | None:
            """Numbers of the rows of all slices; None if the rows have none."""
            parts = [(values_of(rows), start, stop) for rows, _, start, stop in slices]
            there = [values[start:stop] for values, start, stop in parts if values is not None]
            if len(there) < max(len(parts), 1):
                return None
            return np.concatenate(there, dtype=dtype)

        labels = joined(lambda rows: rows.labels, np.float32)
        labels = np.empty(0, np.float32) if labels is None else labels
        assert len(labels) == count, "an unlabelled log is refused before"
        if self._targets is not None and count:
            # Batch by batch: a model's last digits depend on the rows it takes together, and these are the same in every run.
            labels = self._targets(EncodedRows(dense, ids, labels))
        more_labels = [
            joined(functools.partial(_more_label, number=number), np.float32) for number in range(len(self._labels) - 1)
        ]
        return Batch(
            {DENSE: torch.from_numpy(dense)},
            loss_weight,
            self._features(ids, self._pooled, count),
            {
                name: torch.from_numpy(np.empty(0, np.float32) if values is None else values)
                for name, values in zip(self._labels, [labels, *more_labels], strict=True)
            },
            weights=_tensor(joined(lambda rows: rows.weights, np.float32)),
            groups=_tensor(joined(lambda rows: rows.groups, np.int64)),
            timestamps=_tensor(joined(lambda rows: rows.timestamps, np.int64)),
            sequence_features=self._features(ids, self._unpooled, count),
            row_numbers=_row_numbers(
                [None if rows.row_numbers is None else rows.row_numbers[start:stop] for rows, _, start, stop in slices],
                epoch,
            ),
        )

    def _features(self, ids: Sequence[Ids], numbers: Sequence[int], count: int) -> KeyedJaggedTensor | None:
        """The ids of some features, by their numbers."""
        if not numbers:
            return None
        if len(numbers) == len(ids):
            features = sparse_features(self._keys, ids, count, self._constant, weighted=self._weighted)
            if self._pin_constants and count in self._constant:
                lengths, offsets = self._constant[count]
                self._constant[count] = lengths.pin_memory(), offsets.pin_memory()  # what is pinned is not copied again
            return features
        keys = [self._keys[number] for number in numbers]
        return sparse_features(keys, [ids[number] for number in numbers], count, weighted=self._weighted)

    def _ids(
        self, slices: list[tuple[EncodedRows, list[np.ndarray | None], int, int]], count: int
    ) -> Sequence[np.ndarray | Bags]:
        """The ids of the slices' rows; columns of so many ids a row lie in one array, one after the other."""
        first = slices[0][0].ids if slices else [np.empty(0, np.int32)] * len(self._keys)
        if any(isinstance(column, Bags) for column in first):
            return [
                _joined([_part(rows.ids[c], offsets[c], start, stop) for rows, offsets, start, stop in slices])
                for c in range(len(self._keys))
            ]
        shapes = [(count, *column.shape[1:]) for column in first if isinstance(column, np.ndarray)]
        sizes = [math.prod(shape) for shape in shapes]
        values = np.empty(sum(sizes), first[0].dtype if len(first) else np.int32)  # type: ignore[union-attr]
        columns, begin = [], 0
        for c, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
            out, done = values[begin : begin + size].reshape(shape), 0
            for rows, _, start, stop in slices:
                out[done : done + stop - start] = rows.ids[c][start:stop]  # type: ignore[index]
                done += stop - start
            columns.append(out)
            begin += size
        return OneArray(values, columns)


def _more_label(rows: EncodedRows, number: int) -> np.ndarray:
    return rows.more_labels[number]


def _tensor(values: np.ndarray | None) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values)


def _row_numbers(slices: Sequence[np.ndarray | None], epoch: int) -> RowNumbers | None:
    known = [numbers for numbers in slices if numbers is not None]
    if len(known) < len(slices):
        return None
    return RowNumbers(epoch, np.concatenate([np.empty(0, np.int64), *known]))


class OneArray(list[np.ndarray]):
    """Columns that are views of one array, in which they follow each other."""

    def __init__(self, values: np.ndarray, columns: Sequence[np.ndarray]) -> None:
        super().__init__(columns)
        self.values = values


def _part(ids: Ids, offsets: np.ndarray | None, start: int, stop: int) -> Ids:
    if isinstance(ids, Bags):
        assert offsets is not None
        return ids.take(start, stop, offsets)
    return ids[start:stop]


def _joined(parts: Sequence[Ids]) -> Ids:
    if isinstance(parts[0], Bags):
        bags = [part for part in parts if isinstance(part, Bags)]
        weights = [bag.weights for bag in bags if bag.weights is not None]
        return Bags(
            np.concatenate([bag.values for bag in bags]),
            np.concatenate([bag.lengths for bag in bags]),
            np.concatenate(weights) if weights else None,
        )
    return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])


def sparse_features(
    keys: Sequence[str],
    columns: Sequence[Ids],
    rows: int,
    constant: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
    *,
    weighted: bool = False,
) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor of `rows` rows; `weighted`: with weights, 1 for ids without one. `constant` keeps, by the
    number of rows, lengths and offsets of columns that have the same number of ids in every row."""
    sizes = [len(column.values) if isinstance(column, Bags) else column.size for column in columns]
    if isinstance(columns, OneArray):
        values = columns.values
    elif isinstance(columns, np.ndarray):
        values = columns.reshape(-1)
    else:
        flat = [column.values if isinstance(column, Bags) else column.reshape(-1) for column in columns]
        values = np.concatenate(flat) if flat else np.empty(0, np.int32)
    varying = any(isinstance(column, Bags) for column in columns)
    constant = {} if constant is None or varying else constant
    if rows not in constant:
        lengths = torch.from_numpy(
            np.concatenate([_lengths(column, rows) for column in columns] or [np.empty(0, np.int32)])
        )
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32 if len(values) < 2**31 else torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        constant[rows] = lengths, offsets
    lengths, offsets = constant[rows]
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.from_numpy(values),
        weights=torch.from_numpy(_weights(columns, sizes)) if weighted else None,
        lengths=lengths,
        offsets=offsets,
        stride=rows,
        length_per_key=sizes,
        offset_per_key=[0, *np.cumsum(sizes, dtype=np.int64).tolist()],
    )


def _weights(columns: Sequence[Ids], sizes: Sequence[int]) -> np.ndarray:
    """float32 (ids of all columns)."""
    given = [column.weights if isinstance(column, Bags) else None for column in columns]
    return np.concatenate(
        [np.ones(size, np.float32) if weights is None else weights for weights, size in zip(given, sizes, strict=True)]
    )


def _lengths(ids: Ids, rows: int) -> np.ndarray:
    if isinstance(ids, Bags):
        return ids.lengths
    return np.full(rows, ids.shape[1] if ids.ndim == 2 else 1, np.int32)
