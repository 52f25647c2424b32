"""Batches of one worker: slices of a click log's encoded rows, or any numbered rows."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, final

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec.batch import DENSE, Batch
from rayrec.data.encoded_rows import (
    EncodedRows,
    Ids,
    JaggedIds,
    concatenate_ids,
    join_columns,
)
from rayrec.data.engine import StreamEngine
from rayrec.data.logs.index import Block
from rayrec.data.numbered_rows import EpochRows, RowSource
from rayrec.data.stage_times import StageTimes
from rayrec.ingest.block_order import BatchSharding, BlockPlan, BlockRange, EpochPlan, Plans
from rayrec.ingest.row_order import RowPlan
from rayrec.ingest.stream import (
    ITEM_BYTES,
    MappedSource,
    NumberedArrays,
    NumberedSource,
    Prefetcher,
    RowStream,
    TaskSource,
)
from rayrec.schema import Schema
from rayrec.trained_rows import RowNumbers

Plan_contra = TypeVar("Plan_contra", bound=EpochPlan, contravariant=True)
_Slice = tuple[EncodedRows, slice]
"""Rows, and the range to take."""
StepIds = Callable[[int, int], np.ndarray]
"""Function of an epoch and the number of its rows before a step that returns ids, int32 [ids]."""
Targets = Callable[[EncodedRows], np.ndarray]
"""Function that replaces the labels of rows by targets from 0 to 1, float32 [rows]."""


class BatchReader(Protocol[Plan_contra]):
    """Reader of one worker's batches."""

    stages: StageTimes
    """Time per reading stage."""

    def batches(self, plans: Plans[Plan_contra], sharding: BatchSharding) -> Iterator[Batch]:
        """Return one batch per step. At an epoch's end, some get fewer rows or none; `loss_weight`
        compensates.
        """

    def stop(self) -> None:
        """Stop reading."""

    def close(self) -> None:
        """Stop reading and release the rows."""


@final
class ArrayBatches:
    """Batches of numbered rows, read ahead by a thread or, with an engine, by its data tasks."""

    def __init__(
        self,
        source: RowSource,
        *,
        max_prefetch: int = 2,
        engine: StreamEngine | None = None,
    ) -> None:
        self._reader = NumberedSource(source, engine, max(1, max_prefetch))
        self._rows: RowStream | None = None
        self.stages = StageTimes(cpus=1.0 if engine is None else engine.cpus)

    def batches(self, plans: Plans[RowPlan], sharding: BatchSharding) -> Iterator[Batch]:
        max_rows = sys.maxsize
        if self._reader.engine is not None:
            row = self._reader.rows.read(np.zeros(1, np.int64))
            max_rows = max(1, ITEM_BYTES // sum(array.nbytes for array in row.values()))
        items = _WorkerRows(plans, sharding, max_rows, self._reader.rows.will_read)
        self._rows = rows = RowStream(self._reader, items, self.stages)
        return self._make(rows, plans, sharding, max_rows)

    def stop(self) -> None:
        if self._rows is not None:
            self._rows.close()

    def close(self) -> None:
        self.stop()
        self._reader.rows.close()

    def _make(
        self,
        rows: Iterator[NumberedArrays],
        plans: Plans[RowPlan],
        sharding: BatchSharding,
        max_rows: int,
    ) -> Iterator[Batch]:
        for plan, steps in plans():
            for step in range(steps):
                step_rows = plan.rows_until(step + 1) - plan.rows_until(step)
                count = len(range(sharding.rank, step_rows, sharding.world_size))
                parts = list(itertools.islice(rows, max(1, -(-count // max_rows))))
                numbers = np.concatenate([numbers for numbers, _ in parts])
                arrays = {
                    name: _concatenated([arrays[name] for _, arrays in parts])
                    for name in parts[0][1]
                }
                if isinstance(self._reader.rows, EpochRows):
                    self._reader.rows.check(numbers, plan.epoch, arrays)
                # A worker without rows repeats one, with weight 0.
                weight = sharding.world_size / step_rows if count else 0.0
                counted = RowNumbers(plan.epoch, numbers[:count])
                yield Batch(
                    {name: torch.from_numpy(array) for name, array in arrays.items()},
                    weight,
                    row_numbers=counted,
                )


def _concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays, without a copy of a single one that torch can use."""
    return arrays[0] if len(arrays) == 1 and arrays[0].flags.writeable else np.concatenate(arrays)


@dataclass(frozen=True)
class _WorkerRows:
    """Re-iterable row numbers of one worker's batches, in parts of at most `max_rows`, with their
    epochs.
    """

    plans: Plans[RowPlan]
    sharding: BatchSharding
    max_rows: int
    announce: Callable[[np.ndarray], None]

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        for plan, steps in self.plans():
            sizes = (plan.rows_until(step + 1) - plan.rows_until(step) for step in range(steps))
            for numbers in _split(self._announced(plan.numbers()), sizes):
                rows = numbers[self.sharding.rank :: self.sharding.world_size]
                if not len(rows):
                    # All workers take part in each step: this one repeats a row, with weight 0.
                    rows = numbers[:1]
                for start in range(0, len(rows), self.max_rows):
                    yield rows[start : start + self.max_rows], plan.epoch

    def _announced(self, windows: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the windows, announcing each to the source while the previous one is in use."""
        previous = None
        for window in windows:
            self.announce(window)
            if previous is not None:
                yield previous
            previous = window
        if previous is not None:
            yield previous


def _split(windows: Iterator[np.ndarray], sizes: Iterable[int]) -> Iterator[np.ndarray]:
    """Split windows of row numbers into batches of these sizes, across window boundaries."""
    left = np.empty(0, np.int64)
    for size in sizes:
        parts = []
        while size:
            if not len(left):
                left = next(windows)
            parts.append(left[:size])
            left, size = left[size:], size - len(parts[-1])
        yield parts[0] if len(parts) == 1 else np.concatenate(parts)


# From source to batch, and what runs where:
#
#   data tasks or a thread     blocks -> encoded rows, ahead of the reader
#   this thread, or one that   rows -> batches: one copy, labels of a teacher
#     pins memory for a GPU
#   the caller                 takes batches; the loader counts them
@final
class ClickBatches:
    """Batches of a click log, sliced from encoded rows."""

    def __init__(
        self,
        source: TaskSource | MappedSource,
        inputs: Schema,
        *,
        pinned: int = 0,
        **slicing: Any,
    ) -> None:
        """Configure the reader. `pinned` is the number of batches that a thread prepares in pinned
        memory, for asynchronous copies to a GPU. 0 makes batches on `next`, in pageable memory.
        `slicing`: further arguments of `BatchSlicer`.
        """
        self._source = source
        self._num_pinned = pinned
        self._slicer = functools.partial(
            BatchSlicer,
            inputs=inputs,
            pin_constants=bool(pinned),
            **slicing,
        )
        self._rows: RowStream | None = None
        self._pinned: Prefetcher[Batch] | None = None
        self.stages = StageTimes(cpus=source.cpus)

    def batches(self, plans: Plans[BlockPlan], sharding: BatchSharding) -> Iterator[Batch]:
        self._rows = rows = RowStream(self._source, _BlockRanges(plans), self.stages)
        batches = self._slice(rows, plans, sharding)
        if not self._num_pinned:
            return batches
        # Pinning copies, and the thread that launches kernels has no time for it.
        self._pinned = Prefetcher(
            (batch.pin_memory() for batch in batches),
            max_prefetch=self._num_pinned,
        )
        return self._pinned

    def stop(self) -> None:
        """Stop the data tasks."""
        for thread in (self._pinned, self._rows):
            if thread is not None:
                thread.close()

    close = stop

    def _slice(
        self,
        rows: Iterator[EncodedRows],
        plans: Plans[BlockPlan],
        sharding: BatchSharding,
    ) -> Iterator[Batch]:
        slicer = self._slicer(rows=rows)
        for plan, steps in plans():
            # Each worker weights its loss by its share of the step's rows, so that a step with
            # uneven shards has the gradient of one worker with all rows.
            for step in range(steps):
                weight = sharding.world_size / (plan.rows_until(step + 1) - plan.rows_until(step))
                yield slicer.take(
                    plan.worker_rows(step),
                    loss_weight=weight,
                    epoch=plan.epoch,
                    first_row=plan.first_row(step),
                )


@dataclass(frozen=True)
class _BlockRanges:
    """Re-iterable block ranges of all epochs, without rows after the last step."""

    plans: Plans[BlockPlan]

    def __iter__(self) -> Iterator[tuple[Block, BlockRange]]:
        for plan, steps in self.plans():
            yield from plan.block_ranges(steps)


class BatchSlicer:
    """Slicer of an encoded row stream into batches, with one copy per row."""

    def __init__(
        self,
        rows: Iterator[EncodedRows],
        inputs: Schema,
        *,
        targets: Targets | None = None,
        unpooled: Sequence[str] = (),
        tables: Mapping[str, int | StepIds] | None = None,
        pin_constants: bool = False,
        watch_dense: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        """Configure the slicer for a stream of encoded rows and the model's input columns.
        `targets` computes the first label; None keeps it. `unpooled` names the sparse columns for
        `Batch.sequence_features`. `tables` has more keys there, whose first row has ids: a number
        of them (0, 1, ...), or those that a function returns for the step. `pin_constants` pins
        lengths and offsets equal in all batches only once. `watch_dense` is called with the dense
        features of each batch.
        """
        self._rows = rows
        self._targets = targets
        self._pin_constants = pin_constants
        self._watch_dense = watch_dense
        self._num_dense = len(inputs.dense)
        self._keys = inputs.sparse
        self._labels = inputs.label_names
        self._weighted = bool(inputs.list_weights)
        self._aged = {name: inputs.sparse.index(name) for name in inputs.aged}
        self._tables = {
            key: np.arange(rows, dtype=np.int32) if isinstance(rows, int) else rows
            for key, rows in (tables or {}).items()
        }
        self._unpooled = [number for number, key in enumerate(self._keys) if key in unpooled]
        self._pooled = [number for number, key in enumerate(self._keys) if key not in unpooled]
        self._current: EncodedRows | None = None
        self._used = 0
        self._layouts: dict[int, _Layout] = {}

    def take(self, count: int, *, loss_weight: float, epoch: int = 0, first_row: int = 0) -> Batch:
        """Return the next `count` rows, which belong to epoch `epoch`, as a batch. `first_row` is
        the number of rows of all workers in the epoch before this step.
        """
        slices: list[_Slice] = []
        count_left = count
        while count_left > 0:
            if self._current is None or self._used == len(self._current):
                self._current = next(self._rows)
                self._used = 0
            size = min(count_left, len(self._current) - self._used)
            slices.append((self._current, slice(self._used, self._used + size)))
            count_left -= size
            self._used += size
        dense = np.concatenate(
            [
                np.empty((0, self._num_dense), np.float32),
                *(rows.dense[part] for rows, part in slices),
            ]
        )
        if self._watch_dense is not None:
            self._watch_dense(dense)
        ids = self._ids(slices, count)
        labels = {
            name: np.concatenate(
                [np.empty(0, np.float32), *(rows.labels[name][part] for rows, part in slices)],
                dtype=np.float32,
            )
            for name in self._labels
        }
        row_numbers = _optional(slices, "row_numbers") if count else np.empty(0, np.int64)
        if self._targets is not None and count:
            # Per batch, because the last digits of a model's outputs depend on the batch, and
            # batches are the same in every run.
            labels[self._labels[0]] = self._targets(EncodedRows(dense, ids, labels))
        return Batch(
            {DENSE: torch.from_numpy(dense)},
            loss_weight,
            self._features(ids, self._pooled, count),
            {name: torch.from_numpy(values) for name, values in labels.items()},
            weights=_tensor(_optional(slices, "weights")),
            groups=_tensor(_optional(slices, "groups")),
            timestamps=_tensor(_optional(slices, "timestamps")),
            sequence_features=self._sequences(ids, count, step=(epoch, first_row)),
            gaps={name: _gaps(ids[number]) for name, number in self._aged.items()},
            row_numbers=None if row_numbers is None else RowNumbers(epoch, row_numbers),
        )

    def _sequences(
        self,
        ids: Sequence[Ids],
        count: int,
        *,
        step: tuple[int, int],
    ) -> KeyedJaggedTensor | None:
        """Return the ids of unpooled features and full tables. An empty batch gets one row of empty
        lists, because TorchRec cannot exchange unpooled embeddings of zero rows.
        """
        if not self._unpooled and not self._tables:
            return None
        if not self._tables and count:
            return self._features(ids, self._unpooled, count)
        columns: list[Ids] = [ids[number] for number in self._unpooled]
        if not count:
            columns = [JaggedIds(np.empty(0, np.int32), np.zeros(1, np.int32)) for _ in columns]
        for rows in self._tables.values():
            table_ids = rows(*step) if callable(rows) else rows
            lengths = np.zeros(max(count, 1), np.int32)
            lengths[0] = len(table_ids)
            columns.append(JaggedIds(table_ids, lengths))
        keys = [*(self._keys[number] for number in self._unpooled), *self._tables]
        return sparse_features(keys, columns, max(count, 1))

    def _features(
        self,
        ids: Sequence[Ids],
        numbers: Sequence[int],
        count: int,
    ) -> KeyedJaggedTensor | None:
        """Return the ids of the features with these numbers."""
        if not numbers:
            return None
        if len(numbers) == len(ids):
            features = sparse_features(
                self._keys,
                ids,
                count,
                self._layouts,
                weighted=self._weighted,
            )
            if self._pin_constants and count in self._layouts:
                # Pinned tensors are not copied again.
                self._layouts[count] = self._layouts[count].pinned()
            return features
        keys = [self._keys[number] for number in numbers]
        return sparse_features(
            keys,
            [ids[number] for number in numbers],
            count,
            weighted=self._weighted,
        )

    def _ids(self, slices: Sequence[_Slice], count: int) -> Sequence[Ids]:
        """Concatenate the ids of the slices. Fixed-width columns share one buffer, column by
        column.
        """
        if not slices:
            none = np.empty(0, np.int32)
            return SharedBufferColumns(none, [none] * len(self._keys))
        parts = [(rows.fixed_columns, part) for rows, part in slices]
        fixed = [(columns, part) for columns, part in parts if columns is not None]
        if not fixed:
            return [
                concatenate_ids([_cut(rows.ids[c], part) for rows, part in slices])
                for c in range(len(self._keys))
            ]
        assert len(fixed) == len(parts)
        values = join_columns(fixed)
        first = fixed[0][0].columns
        if all(column.ndim == 1 for column in first):
            # One id each, as most logs have: views of all columns at once
            return SharedBufferColumns(values, [*values.reshape(len(first), count)])
        columns = []
        begin = 0
        for column in first:
            shape = (count, *column.shape[1:])
            end = begin + math.prod(shape)
            columns.append(values[begin:end].reshape(shape))
            begin = end
        return SharedBufferColumns(values, columns)


def _optional(slices: Sequence[_Slice], name: str) -> np.ndarray | None:
    """Concatenate a field of all slices. None if the rows have no such values, or there are
    none.
    """
    if not slices or getattr(slices[0][0], name) is None:
        return None
    return np.concatenate([getattr(rows, name)[part] for rows, part in slices])


def _tensor(values: np.ndarray | None) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values)


def _gaps(ids: Ids) -> torch.Tensor:
    """Return the seconds between the ids of a list, float32 [ids]."""
    if not isinstance(ids, JaggedIds) or ids.weights is None:  # Of a batch without rows
        return torch.zeros(ids.values.size if isinstance(ids, JaggedIds) else 0)
    return torch.from_numpy(ids.weights)


class SharedBufferColumns(list[np.ndarray]):
    """Columns that are adjacent views of one array."""

    def __init__(self, values: np.ndarray, columns: Sequence[np.ndarray]) -> None:
        super().__init__(columns)
        self.values = values


def _cut(ids: Ids, rows: slice) -> Ids:
    """Return rows of one column without a copy."""
    return ids.cut(rows.start, rows.stop) if isinstance(ids, JaggedIds) else ids[rows]


@dataclass(frozen=True)
class _Layout:
    """Places of ids in the values of a KeyedJaggedTensor."""

    lengths: torch.Tensor
    """Number of ids of each key and row, int32 [keys * rows]."""
    offsets: torch.Tensor
    """First id of each key and row, and the total."""
    sizes: Sequence[int]
    """Number of ids of each key."""
    starts: Sequence[int]
    """First id of each key, and the total."""

    @classmethod
    def from_columns(cls, columns: Sequence[Ids], rows: int) -> _Layout:
        sizes = [
            len(column.values) if isinstance(column, JaggedIds) else column.size
            for column in columns
        ]
        starts = [0, *itertools.accumulate(sizes)]
        lengths = torch.from_numpy(
            np.concatenate([np.empty(0, np.int32), *(_lengths(column, rows) for column in columns)])
        )
        offsets = torch.zeros(
            len(lengths) + 1,
            dtype=torch.int32 if starts[-1] < 2**31 else torch.int64,
        )
        torch.cumsum(lengths, 0, out=offsets[1:])
        return cls(lengths, offsets, sizes, starts)

    def pinned(self) -> _Layout:
        return replace(
            self,
            lengths=self.lengths.pin_memory(),
            offsets=self.offsets.pin_memory(),
        )


def sparse_features(
    keys: Sequence[str],
    columns: Sequence[Ids],
    rows: int,
    layouts: dict[int, _Layout] | None = None,
    *,
    weighted: bool = False,
) -> KeyedJaggedTensor:
    """Build a KeyedJaggedTensor of `rows` rows. `layouts` caches the layouts of fixed-width columns
    by row count. `weighted` adds weights, 1 for columns without.
    """
    shared = isinstance(columns, SharedBufferColumns)
    layout = layouts.get(rows) if shared and layouts is not None else None
    if layout is None:
        layout = _Layout.from_columns(columns, rows)
        if shared and layouts is not None:
            layouts[rows] = layout
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.from_numpy(_values(columns)),
        weights=torch.from_numpy(_weights(columns, layout.sizes)) if weighted else None,
        lengths=layout.lengths,
        offsets=layout.offsets,
        stride=rows,
        length_per_key=list(layout.sizes),
        offset_per_key=list(layout.starts),
    )


def _values(columns: Sequence[Ids]) -> np.ndarray:
    """Concatenate the ids of all columns."""
    if isinstance(columns, SharedBufferColumns):
        return columns.values
    if isinstance(columns, np.ndarray):
        return columns.reshape(-1)
    if not columns:
        return np.empty(0, np.int32)
    return np.concatenate(
        [
            column.values if isinstance(column, JaggedIds) else column.reshape(-1)
            for column in columns
        ]
    )


def _weights(columns: Sequence[Ids], sizes: Sequence[int]) -> np.ndarray:
    """Concatenate the weights of all columns, float32 [ids]."""
    column_weights = [
        column.weights if isinstance(column, JaggedIds) else None for column in columns
    ]
    return np.concatenate(
        [
            np.ones(size, np.float32) if weights is None else weights
            for weights, size in zip(column_weights, sizes, strict=True)
        ]
    )


def _lengths(ids: Ids, rows: int) -> np.ndarray:
    if isinstance(ids, JaggedIds):
        return ids.lengths
    return np.full(rows, ids.shape[1] if ids.ndim == 2 else 1, np.int32)
