"""Row gradients of embedding tables, for optimizers that update tables after the backward pass."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, final

import torch

from rayrec.layers.kernel_threads import run_kernel
from rayrec.native import c_fields, library


@dataclass(frozen=True)
class RowGradients:
    """Gradient of a table [rows, columns], which is 0 in the other rows."""

    ids: torch.Tensor
    """Distinct rows, int64 [n]."""
    values: torch.Tensor
    """Gradient of each row, contiguous, float32 [n, columns]."""

    @classmethod
    def empty(cls, columns: int, device: torch.device) -> RowGradients:
        return cls(torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, columns, device=device))

    @classmethod
    def from_dense(cls, gradient: torch.Tensor) -> RowGradients:
        """Return the nonzero rows of a dense gradient [rows, columns]."""
        ids = gradient.any(dim=1).nonzero().squeeze(1)
        return cls(ids, gradient[ids])

    @classmethod
    def sum(cls, parts: Sequence[RowGradients]) -> RowGradients:
        """Return the sum over one or more backward passes."""
        if len(parts) == 1:
            return parts[0]
        values = torch.cat([part.values for part in parts])
        ids, indices = torch.cat([part.ids for part in parts]).unique(return_inverse=True)
        return cls(ids, values.new_zeros(len(ids), values.shape[1]).index_add_(0, indices, values))


@dataclass(frozen=True)
class TableFeatures:
    """Consecutive features of one table in a kernel."""

    first: int
    number: int
    column: int
    """First column of the first feature in a row of all pooled features."""
    columns: int
    """Column count of the table."""
    rows: int
    """Row count of the table, or of the local part."""


@dataclass(frozen=True)
class Lookups:
    """Lookups of one batch in the tables of one kernel."""

    ids: torch.Tensor
    """Ids, by feature and then bag, int64."""
    offsets: torch.Tensor
    """Start of each bag's ids, int64 [features * bags + 1]."""
    weights: torch.Tensor | None
    """Factor of each id's row, float32 [ids]."""
    gradient: torch.Tensor
    """Output gradient, contiguous, float32: [bags, sum of the features' columns] if pooled, else [ids, columns]."""
    bags: int
    """Number of bags per feature."""
    pooled: bool

    def of_tables(self, tables: Sequence[TableFeatures]) -> list[RowGradients]:
        """Return the gradient of each table. On CPU, sums are in lookup order."""
        first_features = [table.first for table in tables] + [tables[-1].first + tables[-1].number]
        # One device sync for all tables.
        ranges = list(pairwise(self.offsets[torch.tensor(first_features) * self.bags].tolist()))
        if self.gradient.is_cuda:
            return self.with_torch_ops(tables, ranges)
        results = [
            RowGradients(torch.empty(size, dtype=torch.int64), torch.empty(size, table.columns))
            for size, table in zip([stop - start for start, stop in ranges], tables, strict=True)
        ]
        pointers = [None if of is None else of.data_ptr() for of in (self.ids, self.offsets, self.weights, self.gradient)]
        lookups = _CLookups(*pointers, self.bags, self.gradient.shape[1], self.pooled)
        gathered = (_CGathered * len(tables))()
        for item, table, rows in zip(gathered, tables, results, strict=True):
            item.lookup = ctypes.addressof(lookups)
            item.first_feature, item.num_features = table.first, table.number
            item.column, item.dim = table.column, table.columns
            item.distinct, item.sums = rows.ids.data_ptr(), rows.values.data_ptr()
        run_kernel(library().rayrec_gather_row_gradients, gathered, len(tables), at_once=1)
        return [
            RowGradients(rows.ids[: item.found], rows.values[: item.found]) for item, rows in zip(gathered, results, strict=True)
        ]

    def with_torch_ops(self, tables: Sequence[TableFeatures], ranges: Sequence[tuple[int, int]]) -> list[RowGradients]:
        """Compute `of_tables` with torch operators, for any device. `ranges`: start and end of each table in `ids`. Groups tables
        by width, so that the host waits for a GPU twice per width, not per table."""
        results: dict[int, RowGradients] = {}
        for columns in dict.fromkeys(table.columns for table in tables):
            numbers = [number for number, table in enumerate(tables) if table.columns == columns]
            bases = list(accumulate((tables[number].rows for number in numbers), initial=0))
            keys = torch.cat([self.ids[slice(*ranges[n])] + base for n, base in zip(numbers, bases, strict=False)])
            values = torch.cat([self._values(tables[number], *ranges[number]) for number in numbers])
            distinct, indices = keys.unique(return_inverse=True)
            sums = values.new_zeros(len(distinct), columns).index_add_(0, indices, values)
            starts = torch.searchsorted(distinct, torch.tensor(bases, device=distinct.device)).tolist()
            for number, base, (start, stop) in zip(numbers, bases, pairwise(starts), strict=False):
                results[number] = RowGradients(distinct[start:stop] - base, sums[start:stop])
        return [results[number] for number in range(len(tables))]

    def _values(self, table: TableFeatures, start: int, stop: int) -> torch.Tensor:
        """Return the gradient of each lookup of the table, [stop - start, columns]."""
        columns, column, num_features = table.columns, table.column, table.number
        first = table.first * self.bags
        offsets = self.offsets[first : first + num_features * self.bags + 1]
        if self.pooled:
            end = column + num_features * columns
            of_bags = self.gradient[:, column:end].reshape(self.bags, num_features, columns)
            of_bags = of_bags.transpose(0, 1).reshape(-1, columns)
            values = of_bags.repeat_interleave(offsets.diff(), dim=0, output_size=stop - start)
        else:
            values = self.gradient[start:stop, :columns]
        return values if self.weights is None else values * self.weights[start:stop].unsqueeze(1)


@final
class RowGradientCollector:
    """Row gradients of the tables in one fbgemm kernel, instead of the kernel's update."""

    def __init__(self, kernel: Any) -> None:
        """`kernel`: SplitTableBatchedEmbeddingBagsCodegen with float32 tables and no update in the backward pass."""
        self._look_up: Callable[..., torch.Tensor] = kernel.forward
        self.weights: list[torch.Tensor] = kernel.split_embedding_weights()
        """Local tables or parts of the kernel, in its order, [rows, columns] each."""
        numbers = [kernel.feature_table_map.count(table) for table in range(len(self.weights))]
        columns = kernel.D_offsets.tolist()
        self._tables = [
            TableFeatures(first, number, columns[first], weights.shape[1], len(weights))
            for first, number, weights in zip(accumulate(numbers, initial=0), numbers, self.weights, strict=False)
        ]
        self._num_features = sum(numbers)
        self._pooled = kernel.pooling_mode.name != "NONE"
        self._collected: list[list[RowGradients]] = [[] for _ in self.weights]
        self._anchor = torch.zeros((), device=self.weights[0].device, requires_grad=True)
        kernel.forward = self._forward

    def _forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        output: torch.Tensor = _LookupFunction.apply(self._anchor, self, indices, offsets, per_sample_weights)
        return output

    def look_up(self, *arguments: Any) -> torch.Tensor:
        indices, offsets, weights = arguments
        return self._look_up(indices=indices, offsets=offsets, per_sample_weights=weights)

    def collect(self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, gradient: torch.Tensor) -> None:
        """Store the row gradients of one backward pass from the gradient of the kernel's output."""
        lookups = Lookups(
            indices.long().contiguous(),
            offsets.long().contiguous(),
            None if weights is None else weights.float().contiguous(),
            gradient.float().contiguous(),
            (len(offsets) - 1) // self._num_features,
            self._pooled,
        )
        for collected, gradients in zip(self._collected, lookups.of_tables(self._tables), strict=True):
            collected.append(gradients)

    def gradients(self, table: int) -> RowGradients:
        """Return the gradients of one of `weights` since `clear`."""
        weights = self.weights[table]
        return RowGradients.sum(self._collected[table] or [RowGradients.empty(weights.shape[1], weights.device)])

    def clear(self) -> None:
        for collected in self._collected:
            collected.clear()


class _LookupFunction(torch.autograd.Function):
    """Kernel output that passes its gradient to a collector."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, collector: RowGradientCollector, *arguments: Any) -> torch.Tensor:
        ctx.collector, ctx.arguments = collector, arguments
        return collector.look_up(*arguments)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:  # type: ignore[override]
        ctx.collector.collect(*ctx.arguments, gradient)
        return (None,) * 5


class _CLookups(ctypes.Structure):
    _fields_ = c_fields("void* ids offsets weights gradient; int64 bags stride pooled")


class _CGathered(ctypes.Structure):
    _fields_ = c_fields("void* lookup; int64 first_feature num_features column dim; void* distinct sums; int64 found")
