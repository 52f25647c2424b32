"""Adam for embedding tables: for all rows in each step, as torch.optim.Adam, or only for the rows
with gradients.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, final

import torch
from torchrec.optim.keyed import KeyedOptimizer

from rayrec.compat.torch_compat import (
    Shard,
    ShardedTensor,
    set_optimizer_in_backward,
    sharded_tensor,
    table_kernels,
)
from rayrec.layers.kernels.kernel_threads import run_kernel
from rayrec.native import c_fields, library
from rayrec.optim.config import SparseOptimizerConfig


@dataclass(frozen=True)
class RowGradients:
    """Gradient of a table [rows, columns], which is 0 in the other rows."""

    ids: torch.Tensor
    """Distinct rows, int64 [n]."""
    values: torch.Tensor
    """Gradient of each row, contiguous, float32 [n, columns]."""

    @classmethod
    def empty(cls, columns: int, device: torch.device) -> RowGradients:
        return cls(
            torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, columns, device=device)
        )

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
    """Output gradient, contiguous, float32: [bags, sum of the features' columns] if pooled, else
    [ids, columns].
    """
    bags: int
    """Number of bags per feature."""
    pooled: bool

    def table_gradients(self, tables: Sequence[TableFeatures]) -> list[RowGradients]:
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
        pointers = [
            None if tensor is None else tensor.data_ptr()
            for tensor in (self.ids, self.offsets, self.weights, self.gradient)
        ]
        lookups = _CLookups(*pointers, self.bags, self.gradient.shape[1], self.pooled)
        gathered = (_CGathered * len(tables))()
        for item, table, rows in zip(gathered, tables, results, strict=True):
            # An address is no reference: `lookups` and `results` are variables here, and live until
            # the kernel returns.
            item.lookup = ctypes.addressof(lookups)
            item.first_feature = table.first
            item.num_features = table.number
            item.column = table.column
            item.dim = table.columns
            item.distinct = rows.ids.data_ptr()
            item.sums = rows.values.data_ptr()
        run_kernel(library().rayrec_gather_row_gradients, gathered, len(tables), at_once=1)
        return [
            RowGradients(rows.ids[: item.found], rows.values[: item.found])
            for item, rows in zip(gathered, results, strict=True)
        ]

    def with_torch_ops(
        self, tables: Sequence[TableFeatures], ranges: Sequence[tuple[int, int]]
    ) -> list[RowGradients]:
        """Compute `table_gradients` with torch operators, for any device. `ranges`: start and end
        of each table in `ids`. Groups tables by width, so that the host waits for a GPU twice
        per width, not per table.
        """
        results: dict[int, RowGradients] = {}
        for columns in dict.fromkeys(table.columns for table in tables):
            numbers = [number for number, table in enumerate(tables) if table.columns == columns]
            bases = list(accumulate((tables[number].rows for number in numbers), initial=0))
            keys = torch.cat(
                [
                    self.ids[slice(*ranges[n])] + base
                    for n, base in zip(numbers, bases, strict=False)
                ]
            )
            values = torch.cat(
                [self._values(tables[number], *ranges[number]) for number in numbers]
            )
            distinct, indices = keys.unique(return_inverse=True)
            sums = values.new_zeros(len(distinct), columns).index_add_(0, indices, values)
            starts = torch.searchsorted(
                distinct, torch.tensor(bases, device=distinct.device)
            ).tolist()
            for number, base, (start, stop) in zip(numbers, bases, pairwise(starts), strict=False):
                results[number] = RowGradients(distinct[start:stop] - base, sums[start:stop])
        return [results[number] for number in range(len(tables))]

    def _values(self, table: TableFeatures, start: int, stop: int) -> torch.Tensor:
        """Return the gradient of each lookup of the table, [stop - start, columns]."""
        columns = table.columns
        column = table.column
        num_features = table.number
        first = table.first * self.bags
        offsets = self.offsets[first : first + num_features * self.bags + 1]
        if self.pooled:
            end = column + num_features * columns
            bag_values = self.gradient[:, column:end].reshape(self.bags, num_features, columns)
            bag_values = bag_values.transpose(0, 1).reshape(-1, columns)
            values = bag_values.repeat_interleave(offsets.diff(), dim=0, output_size=stop - start)
        else:
            values = self.gradient[start:stop, :columns]
        return values if self.weights is None else values * self.weights[start:stop].unsqueeze(1)


@final
class RowGradientCollector:
    """Row gradients of the tables in one fbgemm kernel, instead of the kernel's update."""

    def __init__(self, kernel: Any) -> None:
        """`kernel`: SplitTableBatchedEmbeddingBagsCodegen with float32 tables and no update in the
        backward pass.
        """
        self._look_up: Callable[..., torch.Tensor] = kernel.forward
        self.weights: list[torch.Tensor] = kernel.split_embedding_weights()
        """Local tables or parts of the kernel, in its order, [rows, columns] each."""
        numbers = [kernel.feature_table_map.count(table) for table in range(len(self.weights))]
        columns = kernel.D_offsets.tolist()
        self._tables = [
            TableFeatures(first, number, columns[first], weights.shape[1], len(weights))
            for first, number, weights in zip(
                accumulate(numbers, initial=0), numbers, self.weights, strict=False
            )
        ]
        self._num_features = sum(numbers)
        self._pooled = kernel.pooling_mode.name != "NONE"
        self._collected: list[list[RowGradients]] = [[] for _ in self.weights]
        self._anchor = torch.zeros((), device=self.weights[0].device, requires_grad=True)
        kernel.forward = self._forward

    def _forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output: torch.Tensor = _LookupFunction.apply(
            self._anchor, self, indices, offsets, per_sample_weights
        )
        return output

    def look_up(self, *arguments: Any) -> torch.Tensor:
        indices, offsets, weights = arguments
        return self._look_up(indices=indices, offsets=offsets, per_sample_weights=weights)

    def collect(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        gradient: torch.Tensor,
    ) -> None:
        """Store the row gradients of one backward pass from the gradient of the kernel's output."""
        lookups = Lookups(
            indices.long().contiguous(),
            offsets.long().contiguous(),
            None if weights is None else weights.float().contiguous(),
            gradient.float().contiguous(),
            (len(offsets) - 1) // self._num_features,
            self._pooled,
        )
        for collected, gradients in zip(
            self._collected, lookups.table_gradients(self._tables), strict=True
        ):
            collected.append(gradients)

    def gradients(self, table: int) -> RowGradients:
        """Return the gradients of one of `weights` since `clear`."""
        weights = self.weights[table]
        return RowGradients.sum(
            self._collected[table] or [RowGradients.empty(weights.shape[1], weights.device)]
        )

    def clear(self) -> None:
        for collected in self._collected:
            collected.clear()


class _LookupFunction(torch.autograd.Function):
    """Kernel output that passes its gradient to a collector."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, collector: RowGradientCollector, *arguments: Any
    ) -> torch.Tensor:
        ctx.collector = collector
        ctx.arguments = arguments
        return collector.look_up(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        ctx.collector.collect(*ctx.arguments, *gradients)
        return (None,) * 5


# Mirror of rayrec_looked_up in native/kernels.h, shared by all tables of a kernel call. Its tensors
# are fields of `Lookups`, which outlives the call. `stride` is the width of a gradient's row.
class _CLookups(ctypes.Structure):
    _fields_ = c_fields("void* ids offsets weights gradient; int64 bags stride pooled")


# Mirror of rayrec_gathered_table, one per table. `distinct` and `sums` point into tensors of the
# result, which have room for every lookup; `found` is the number of rows that the kernel filled.
class _CGathered(ctypes.Structure):
    _fields_ = c_fields(
        "void* lookup; int64 first_feature num_features column dim; void* distinct sums; int64 "
        "found"
    )


_VALUES_OF_A_TASK: Final = 1 << 20
"""Number of weights that one thread updates at a time."""
_VALUES_OF_OPERATORS: Final = 1 << 24
"""Number of weights that torch's operators update at a time, to limit their temporary memory."""


@dataclass(frozen=True)
class AdamStep:
    """Parameters of one Adam step."""

    learning_rate: float
    number: int
    """Step number, from 1."""
    betas: tuple[float, float]
    eps: float
    l2: float
    """Factor of the weights that is added to the gradient."""
    decay: float
    """Decoupled weight decay. Each step subtracts this times the learning rate times the weight."""
    every_row: bool
    """Whether to also update rows without a gradient: their moments decay and still move them."""
    gradient_scale: float = 1.0
    """Factor of the gradients before the `l2` term."""

    @property
    def step_size(self) -> float:
        return self.learning_rate / (1 - self.betas[0] ** self.number)

    @property
    def root_scale(self) -> float:
        """Factor of the root mean square."""
        return 1 / math.sqrt(1 - self.betas[1] ** self.number)

    @property
    def keep(self) -> float:
        return 1 - self.learning_rate * self.decay

    def structure(self) -> _CRule:
        rates = (1 - self.betas[0], self.betas[1], 1 - self.betas[1])
        return _CRule(
            self.step_size,
            self.root_scale,
            self.eps,
            *rates,
            self.l2,
            self.keep,
            self.gradient_scale,
        )


@final
class TablePart:
    """Table, or this worker's part of one, with Adam's moments."""

    def __init__(self, weights: torch.Tensor, gradients: Callable[[], RowGradients]) -> None:
        """`weights`: contiguous, float32 [rows, columns], updated in place. `gradients` returns the
        last backward pass's.
        """
        assert weights.is_contiguous()
        assert weights.dtype == torch.float32
        self.weights = weights
        self.gradients = gradients
        self.exp_avg = torch.zeros_like(weights)
        self.exp_avg_sq = torch.zeros_like(weights)
        self._marks: torch.Tensor | None = None

    def update(self, step: AdamStep, gradients: RowGradients) -> None:
        """Apply one step. On CPU, this reads and writes the weights and moments of a row once."""
        if self.weights.is_cuda:
            self.update_with_torch_ops(step, gradients)
            return
        rule = step.structure()  # must outlive the tasks, which point into it
        _update_all(list(self.rows_to_update(rule, gradients, every_row=step.every_row)))

    def rows_to_update(
        self, rule: _CRule, gradients: RowGradients, *, every_row: bool
    ) -> Iterator[_CRows]:
        """Yield the CPU tasks of `update` for threads, in any order. They point into `rule` and
        contiguous `gradients`.
        """
        rows, columns = self.weights.shape
        ids = gradients.ids
        values = gradients.values
        assert ids.is_contiguous()
        assert values.is_contiguous()
        pointers = [tensor.data_ptr() for tensor in (self.weights, self.exp_avg, self.exp_avg_sq)]
        table = (*pointers, columns, ctypes.addressof(rule))
        at_once = max(1, _VALUES_OF_A_TASK // columns)
        for start, stop in _ranges(len(ids), at_once):
            yield _CRows(
                *table, ids.data_ptr(), values.data_ptr(), None, start, stop, not every_row
            )
        if every_row:
            marks = self._marked(ids)
            for start, stop in _ranges(rows, at_once):
                yield _CRows(*table, None, None, marks.data_ptr(), start, stop, False)

    def update_with_torch_ops(self, step: AdamStep, gradients: RowGradients) -> None:
        """Apply `update` with torch operators, on any device. Needs memory for the batch's rows and
        a limited block.
        """
        ids = gradients.ids
        values = gradients.values
        tensors = (self.weights, self.exp_avg, self.exp_avg_sq)
        batch_rows = [tensor[ids] for tensor in tensors]
        if step.every_row:  # As if no row had a gradient. The batch's rows are overwritten below.
            for start, stop in _ranges(
                len(self.weights), max(1, _VALUES_OF_OPERATORS // self.weights.shape[1])
            ):
                weights, mean, square = (tensor[start:stop] for tensor in tensors)
                self._update(weights, mean, square, weights * step.l2, step)
        weights, mean, square = batch_rows
        self._update(weights, mean, square, values * step.gradient_scale + weights * step.l2, step)
        # Chosen on the device: otherwise the host waits for the number of nonzero gradients.
        touched = None if step.every_row else values.any(dim=1, keepdim=True)
        for tensor, rows in zip(tensors, batch_rows, strict=True):
            tensor[ids] = rows if touched is None else torch.where(touched, rows, tensor[ids])

    @staticmethod
    def _update(
        weights: torch.Tensor,
        mean: torch.Tensor,
        square: torch.Tensor,
        gradient: torch.Tensor,
        step: AdamStep,
    ) -> None:
        beta1, beta2 = step.betas
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weights.mul_(step.keep).addcdiv_(
            mean, square.sqrt().mul_(step.root_scale).add_(step.eps), value=-step.step_size
        )

    def squared_norm(self, gradients: RowGradients, *, l2: float) -> float:
        """Return the sum of squares of the gradient plus `l2` times the weights."""
        values = gradients.values.double()
        squares = values.square().sum()
        if l2:
            products = (values * self.weights[gradients.ids]).sum()
            squares += (
                2 * l2 * products + l2**2 * torch.linalg.vector_norm(self.weights).double().square()
            )
        return squares.item()

    def _marked(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a byte per row, 1 for `ids`. Reused, because a table may have many rows and a
        batch few of them.
        """
        if self._marks is None:
            self._marks = torch.empty(len(self.weights), dtype=torch.uint8)
        self._marks.zero_()
        self._marks[ids] = 1
        return self._marks


class TableAdam(KeyedOptimizer):
    """Adam over tables with the state of torch.optim.Adam: exp_avg, exp_avg_sq and step."""

    def __init__(
        self, config: SparseOptimizerConfig, tables: Mapping[str, tuple[Any, Sequence[TablePart]]]
    ) -> None:
        """`tables`: by parameter name, the parameter (a ShardedTensor or the full table) and this
        worker's parts of it.
        """
        assert config.has_custom_update
        self._config = config
        self._tables = dict(tables)
        state = {
            parameter: {**_moments(parameter, parts), "step": torch.zeros(())}
            for parameter, parts in tables.values()
        }
        parameters = {name: parameter for name, (parameter, _) in tables.items()}
        super().__init__(
            parameters, state, [{"params": list(parameters.values()), "lr": config.learning_rate}]
        )
        self._steps: list[torch.Tensor] = [states["step"] for states in state.values()]
        self._clear: list[Callable[[], None]] = []
        self.gradient_scale = 1.0
        """Factor of the gradients and the penalty in the next step."""
        self._gradients: list[list[RowGradients]] | None = None

    @classmethod
    def from_sharded(cls, config: SparseOptimizerConfig, sharded: Any) -> TableAdam:
        """Build for the fused tables of a DistributedModelParallel, whose updates move to this
        optimizer.
        """
        parts: dict[tuple[str, int, int], TablePart] = {}
        clear = []
        for kernel, keys in table_kernels(sharded):
            collector = RowGradientCollector(kernel)
            clear.append(collector.clear)
            for number, (key, weights) in enumerate(zip(keys, collector.weights, strict=True)):
                parts[key] = TablePart(weights, partial(collector.gradients, number))
        tables: dict[str, tuple[Any, list[TablePart]]] = {}
        for name, table in sharded.fused_optimizer.params.items():
            table_keys = [
                (name.split(".")[-2], *shard.metadata.shard_offsets)
                for shard in table.local_shards()
            ]
            tables[name] = table, [parts[key] for key in table_keys]
        optimizer = cls(config, tables)
        optimizer._clear = clear
        return optimizer

    @classmethod
    def from_parameters(
        cls, config: SparseOptimizerConfig, parameters: Mapping[str, torch.nn.Parameter]
    ) -> TableAdam:
        """Build for replicated tables with dense gradients."""
        tables = {
            name: (parameter, [TablePart(parameter.data, partial(_dense_gradients, parameter))])
            for name, parameter in parameters.items()
        }
        return cls(config, tables)

    def zero_grad(self, set_to_none: bool = False) -> None:
        for clear in self._clear:
            clear()
        for parameter, _ in self._tables.values():
            if isinstance(parameter, torch.nn.Parameter) and parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()

    @torch.no_grad()
    def squared_norm(self) -> float:
        """Return the sum of squares of this worker's gradients for the next step."""
        self._gradients = self._gathered()
        return sum(
            part.squared_norm(gradients, l2=self._l2)
            for (_, parts), part_gradients in zip(
                self._tables.values(), self._gradients, strict=True
            )
            for part, gradients in zip(parts, part_gradients, strict=True)
        )

    def _gathered(self) -> list[list[RowGradients]]:
        return [[part.gradients() for part in parts] for _, parts in self._tables.values()]

    @property
    def _l2(self) -> float:
        return self._config.weight_decay if self._config.kind == "adam" else 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        (group,) = self.param_groups
        gradients_of_tables, self._gradients = self._gradients or self._gathered(), None
        # The tasks point into the rules, so both stay here until `_update_all` has returned.
        rules: dict[int, _CRule] = {}
        rows: list[_CRows] = []
        for number, (_, parts), part_gradients in zip(
            self._counted(), self._tables.values(), gradients_of_tables, strict=True
        ):
            step = self._adam_step(number, float(group["lr"]))
            for part, gradients in zip(parts, part_gradients, strict=True):
                if part.weights.is_cuda:
                    part.update_with_torch_ops(step, gradients)
                else:
                    rule = rules.setdefault(number, step.structure())
                    rows.extend(part.rows_to_update(rule, gradients, every_row=step.every_row))
        _update_all(rows)

    def _counted(self) -> list[int]:
        """Start a step of each table and return its number, from 1."""
        for step in self._steps:
            step += 1
        return [int(step) for step in self._steps]

    def _adam_step(self, number: int, learning_rate: float) -> AdamStep:
        config = self._config
        return AdamStep(
            learning_rate=learning_rate,
            number=number,
            betas=config.betas,
            eps=config.eps,
            l2=self._l2 * self.gradient_scale,
            decay=config.weight_decay if config.kind == "adamw" else 0.0,
            every_row=config.kind != "sparse_adam",
            gradient_scale=self.gradient_scale,
        )


def disable_fused_update(tables: torch.nn.Module, config: SparseOptimizerConfig) -> None:
    """Disable the fused kernels' updates for kinds with `has_custom_update`. Call after `build`,
    before sharding `tables`.
    """
    if config.has_custom_update:
        set_optimizer_in_backward(tables.parameters(), torch.optim.SGD, {"lr": 0.0})


def _moments(parameter: Any, parts: Sequence[TablePart]) -> dict[str, Any]:
    """Return the moments of a table, with its shape and sharding."""
    states = {
        "exp_avg": [part.exp_avg for part in parts],
        "exp_avg_sq": [part.exp_avg_sq for part in parts],
    }
    if not isinstance(parameter, ShardedTensor):
        return {name: values[0] for name, values in states.items()}
    shards = [shard.metadata for shard in parameter.local_shards()]
    return {
        name: sharded_tensor(
            [Shard(value, metadata) for value, metadata in zip(values, shards, strict=True)],
            parameter.metadata(),
            like=parameter,
        )
        for name, values in states.items()
    }


def _dense_gradients(parameter: torch.nn.Parameter) -> RowGradients:
    if parameter.grad is None:
        return RowGradients.empty(parameter.shape[1], parameter.device)
    return RowGradients.from_dense(parameter.grad)


def _ranges(count: int, at_once: int) -> Iterable[tuple[int, int]]:
    return ((start, min(start + at_once, count)) for start in range(0, count, at_once))


def _update_all(rows: Sequence[_CRows]) -> None:
    """Update rows of tables with the kernel, largest parts first, in as many threads as torch
    has.
    """
    by_size = sorted(rows, key=lambda part: (part.stop - part.start) * part.dim, reverse=True)
    run_kernel(
        library().rayrec_update_by_adam, (_CRows * len(by_size))(*by_size), len(by_size), at_once=1
    )


# Mirror of rayrec_adam: the constants of one step. `TablePart.update` or the step's `rules` own it.
class _CRule(ctypes.Structure):
    _fields_ = c_fields(
        "float step_size root_scale eps mean_rate square_keep square_rate l2 keep scale"
    )


# Mirror of rayrec_adam_rows: rows that one thread updates. Owners of its pointers:
#
#   weights, mean, square   tensors of the TablePart
#   rule                    variable of the caller, see _CRule
#   ids, gradients          RowGradients of the step
#   marks                   tensor of the TablePart, which it keeps for the next steps
#
# Tasks of one table touch distinct rows, so threads need no lock and sums no order.
class _CRows(ctypes.Structure):
    _fields_ = c_fields(
        "void* weights mean square; int64 dim; void* rule ids gradients marks; int64 start stop "
        "only_nonzero"
    )
