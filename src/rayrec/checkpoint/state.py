"""Training state under plan-independent names: weights `model.NAME`, optimizer state
`optimizer.PARAMETER.STATE`.

The table alone determines names and shapes of its tensors, so that any plan and worker count can
read the state of any other. The exception is row-wise Adagrad, which has a number for each row and
*column part*; only column_wise and table_column_wise plans have more than one part. The state of a
part is stored under its columns, `optimizer.PARAMETER.momentum1.columns_0_32`, and the state of
full rows under `optimizer.PARAMETER.momentum1`, both with shape [rows]. A rank with other columns
averages the stored parts, weighted by overlap. The state is the sum of squares per row divided by
the number of columns, with no finer resolution within a part. The mean of equal numbers is exact,
so splitting columns and merging them without training in between changes no bit. A state of shape
[rows, columns] would need only one name, but be as large as the weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rayrec.checkpoint.communicator import Communicator
from rayrec.checkpoint.discovery import Checkpoint
from rayrec.checkpoint.plan import drop_tied_tensors
from rayrec.checkpoint.reader import TableReader, restore
from rayrec.compat.torch_compat import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    forget_cached_rows,
    sharded_tensor,
)
from rayrec.config import InputError

Columns = tuple[int, int]
"""First column, and last column plus one."""
Rows = tuple[int, int]
"""First row, and number of rows."""


@dataclass(frozen=True)
class RowMap:
    """Source rows for a table of `rows` rows in a stored table of `stored_rows` rows."""

    rows: int
    stored_rows: int
    sources: np.ndarray | None = None
    """Stored row of each row, -1 without a source, int32 or int64 [rows]. None maps each row to the
    same row, if it exists.
    """

    def sources_between(self, first: int, stop: int) -> np.ndarray:
        """Return the stored row of each of the rows [first, stop), -1 if it has no source, int64
        [stop - first].
        """
        if self.sources is not None:
            return self.sources[first:stop].astype(np.int64)
        same = np.arange(first, stop, dtype=np.int64)
        same[max(0, self.stored_rows - first) :] = -1
        return same


def model_tensors(model: torch.nn.Module) -> dict[str, Any]:
    """Return all entries of the model's state dict (tensor, ShardedTensor or DTensor) as
    `model.NAME`. Tied tensors (GPT-2's output layer is its embedding) have only their first
    name.
    """
    return {
        f"model.{name}": tensor for name, tensor in drop_tied_tensors(model.state_dict()).items()
    }


def optimizer_tensors(optimizer: Any) -> dict[str, Any]:
    """Return the state of fused and dense optimizers (tensor or ShardedTensor) as
    `optimizer.PARAMETER.STATE`.
    """
    return {name: value for name, value, _ in _named_states(optimizer)}


def all_tensors(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return all tensors of a checkpoint. They share memory with the live ones, so that filling
    them restores the run.
    """
    return {**model_tensors(model), **optimizer_tensors(optimizer)}


def restore_all(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: Any) -> None:
    """Restore weights and optimizer state, saved under any plan and by any workers; collective.
    Raises as `rayrec.checkpoint.restore`, and InputError for stored tensors that model or optimizer
    lack. The run is then partly restored.
    """
    start_from(checkpoint, {}, model, optimizer)


def restore_model(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    """Restore the weights only; collective. Raises the errors of `rayrec.checkpoint.restore`."""
    restore(checkpoint, model_tensors(model))
    forget_cached_rows(model)


# Sources of a restore, by the tensors' names:
#
#   same shape, no map        each rank reads its shards of the stored tensor
#   table with a row map      each rank reads ranges of rows and copies those that it needs
#   row-wise optimizer state  stored per column part; joined, or averaged over other parts
#   optimizer without state   one step with zero gradients creates it; weights are restored after
def start_from(
    checkpoint: Checkpoint, row_maps: Mapping[str, RowMap], model: torch.nn.Module, optimizer: Any
) -> None:
    """Initialize weights and optimizer state from another run's checkpoint, as far as it has them;
    collective. `row_maps` maps the rows of tables; rows without a source keep initial values and an
    empty state. Raises the errors of `restore_all`.
    """
    stored, only_weights = Communicator.all().run_on_rank0(
        lambda: (list(checkpoint.manifest()["tensors"]), checkpoint.has_only_weights())
    )
    if not only_weights:
        make_state(optimizer)
    targets = Targets(model, optimizer, stored=set(stored))
    if only_weights:
        targets.tensors = model_tensors(model)
    # A tensor may live on one rank only, so only the union shows what nobody would read.
    live = set[str]().union(*Communicator.all().all_gather(list(targets.tensors)))
    if surplus := min(set(stored) - live, default=None):
        owner = "optimizer" if surplus.startswith("optimizer.") else "model"
        raise InputError(
            f"{checkpoint.path}: contains {surplus}, which the {owner} of this run does not have. "
            f"It was saved with another {owner}: use the settings of its config.yaml"
        )
    by_rows = {
        name: (tensor, row_map)
        for name, tensor in targets.tensors.items()
        if len(tensor.size())
        and (row_map := row_maps.get(_match_weight(name, row_maps))) is not None
    }
    restore(
        checkpoint,
        {name: tensor for name, tensor in targets.tensors.items() if name not in by_rows},
    )
    if row_maps:
        restore_rows(checkpoint, by_rows)
    targets.loaded()
    forget_cached_rows(model)


def _match_weight(name: str, weights: Collection[str]) -> str:
    """Return the one of `weights` that a tensor of `all_tensors` is, or is the state of, or ""."""
    kind, _, rest = name.partition(".")
    if kind == "model":
        return rest if rest in weights else ""
    while rest and rest not in weights:
        rest = rest.rpartition(".")[0]
    return rest


def make_state(optimizer: Any) -> None:
    """Create the optimizer state that first exists after a step (Adam's), to be filled by a
    restore. Steps such an optimizer with zero gradients, which may move its weights, so restore
    them after. Optimizers of tables always have state and take no step.
    """
    parts = getattr(optimizer, "optimizers", None)
    if parts is not None:  # TorchRec's CombinedOptimizer
        for _, part in parts:
            make_state(part)
        return
    existing = optimizer.state
    lacks = False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, torch.nn.Parameter) and not existing.get(parameter):
                parameter.grad = torch.zeros_like(parameter)
                lacks = True
    if lacks:
        optimizer.step()
        optimizer.zero_grad()


class Targets:
    """Tensors to be filled from a checkpoint with the names `stored`. Fill `tensors` in place, then
    call `loaded`, which converts column parts and copies them into the optimizer.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, *, stored: Collection[str]) -> None:
        self.tensors: dict[str, Any] = model_tensors(model)
        self._joins: list[tuple[_Part, dict[Columns, dict[Rows, torch.Tensor]]]] = []
        stored_parts = _stored_parts(stored)
        read: dict[str, dict[Rows, torch.Tensor]] = {}
        for name, value, part in _named_states(optimizer):
            sources: list[Columns] = []
            if part is not None and name not in stored:
                full_rows = [(0, part.table.size()[1])] if part.name in stored else []
                sources = part.covering(full_rows + stored_parts.get(part.name, []))
            if part is None or not sources:  # the reader rejects names that are not stored
                self.tensors[name] = value
                continue
            for columns in sources:
                source = part.name_of(columns)
                if source not in read:
                    read[source] = part.blank()
                    self.tensors[source] = part.as_table(read[source])
            self._joins.append(
                (part, {columns: read[part.name_of(columns)] for columns in sources})
            )

    def loaded(self) -> None:
        for part, sources in self._joins:
            part.average(sources)


@dataclass(frozen=True)
class _Part:
    """Column part of a table's row-wise state on this worker."""

    name: str
    table: torch.Tensor
    """Weights, [rows, columns]. Not a ShardedTensor if every worker has all of it."""
    columns: Columns
    states: dict[Rows, torch.Tensor]
    """Live state of these rows, 1-D."""

    def name_of(self, columns: Columns) -> str:
        is_full = columns == (0, self.table.size()[1])
        return self.name if is_full else f"{self.name}.columns_{columns[0]}_{columns[1]}"

    def blank(self) -> dict[Rows, torch.Tensor]:
        """Return zeros for all rows of which this worker has any columns."""
        some = next(iter(self.states.values()))
        placements = (
            _placements(self.table.local_shards())
            if isinstance(self.table, ShardedTensor)
            else self.states
        )
        return {rows: some.new_zeros(rows[1]) for rows in placements}

    def as_table(self, states: Mapping[Rows, torch.Tensor]) -> torch.Tensor:
        """Return `states` as this worker's shards of a tensor of shape [table rows]."""
        if not isinstance(self.table, ShardedTensor):
            return states[0, self.table.size()[0]]
        everywhere = {
            _rows(metadata): metadata.placement
            for metadata in self.table.metadata().shards_metadata
        }
        placements = everywhere | _placements(self.table.local_shards())
        shards = {
            rows: ShardMetadata([rows[0]], [rows[1]], placements[rows])
            for rows in sorted(placements)
        }
        return sharded_tensor(
            [Shard(state, shards[rows]) for rows, state in states.items()],
            ShardedTensorMetadata(
                shards_metadata=list(shards.values()),
                size=torch.Size(self.table.size()[:1]),
                tensor_properties=TensorProperties(dtype=next(iter(states.values())).dtype),
            ),
            like=self.table,
        )

    def covering(self, stored: list[Columns]) -> list[Columns]:
        """Return the items of `stored` that overlap these columns, or [] if they do not cover
        them.
        """
        overlapping = [columns for columns in stored if _overlap(columns, self.columns)]
        covered = sum(_overlap(columns, self.columns) for columns in overlapping)
        return overlapping if covered == self.columns[1] - self.columns[0] else []

    def average(self, sources: dict[Columns, dict[Rows, torch.Tensor]]) -> None:
        """Convert stored column parts into the state of this one."""
        # In float64 the products and sums of equal numbers are exact, so their mean is the same
        # number.
        for rows, state in self.states.items():
            total = torch.zeros_like(state, dtype=torch.float64)
            for columns, values in sources.items():
                total += values[rows].double() * _overlap(columns, self.columns)
            state.copy_(total / (self.columns[1] - self.columns[0]))


def _named_states(optimizer: Any) -> Iterator[tuple[str, Any, _Part | None]]:
    """Yield name, value and column part (None if not row-wise) of every state tensor on this
    worker.
    """
    parameters = getattr(optimizer, "params", {})
    for parameter, states in optimizer.state_dict()["state"].items():
        for state, value in states.items():
            # Fused states are prefixed with their table (`cat_0.momentum1`), which is dropped here.
            name = f"optimizer.{parameter}.{state.rsplit('.', 1)[-1]}"
            if not isinstance(value, torch.Tensor):
                continue
            table = parameters.get(parameter)
            if table is None or (len(table.size()), len(value.size())) != (2, 1):
                yield name, value, None
                continue
            for part in _parts(name, table, value):
                yield part.name_of(part.columns), part.as_table(part.states), part


def _parts(name: str, table: torch.Tensor, state: torch.Tensor) -> Iterator[_Part]:
    """Yield a worker's row-wise state by column part. TorchRec lists the shards of both in the same
    order, but stacks the state's shards. Their offsets and shape depend on the number of parts in
    the plan, so no other plan can use them.
    """
    if not isinstance(table, ShardedTensor) or not isinstance(state, ShardedTensor):
        rows, columns = table.size()
        yield _Part(name, table, (0, columns), {(0, rows): state})
        return
    parts: dict[Columns, dict[Rows, torch.Tensor]] = {}
    for shard, values in zip(table.local_shards(), state.local_shards(), strict=True):
        parts.setdefault(_columns(shard.metadata), {})[_rows(shard.metadata)] = values.tensor
    for part, states in parts.items():
        yield _Part(name, table, part, states)


def _stored_parts(stored: Collection[str]) -> dict[str, list[Columns]]:
    """Return the stored column parts, sorted, by the name of the full rows' state."""
    parts: dict[str, list[Columns]] = {}
    for name in stored:
        match = re.fullmatch(r"(optimizer\..+)\.columns_(\d+)_(\d+)", name)
        if match:
            parts.setdefault(match[1], []).append((int(match[2]), int(match[3])))
    return {name: sorted(columns) for name, columns in parts.items()}


def _placements(shards: list[Shard]) -> dict[Rows, Any]:
    return {_rows(shard.metadata): shard.metadata.placement for shard in shards}


def _rows(metadata: ShardMetadata) -> Rows:
    return metadata.shard_offsets[0], metadata.shard_sizes[0]


def _columns(metadata: ShardMetadata) -> Columns:
    return metadata.shard_offsets[1], metadata.shard_offsets[1] + metadata.shard_sizes[1]


def _overlap(one: Columns, other: Columns) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def restore_rows(checkpoint: Checkpoint, tensors: Mapping[str, tuple[Any, RowMap]]) -> None:
    """Copy stored rows into `tensors` in place according to their row maps, under any plan and
    number of workers. Rows without a source are unchanged. Dimension 0 of a tensor or ShardedTensor
    matches its map. Collective in a process group. Each rank reads the row ranges for its shards,
    64 MiB at a time. Memory: 24 bytes per row of its largest shard. Raises on all ranks
    DamagedError for a damaged file, InputError for a missing tensor or a wrong shape.
    """
    ranks = Communicator.all()
    manifest = ranks.run_on_rank0(checkpoint.manifest)
    ranks.run_on_all_ranks(lambda: _fill_all(checkpoint, manifest, tensors))


def _fill_all(
    checkpoint: Checkpoint, manifest: dict[str, Any], tensors: Mapping[str, tuple[Any, RowMap]]
) -> None:
    for name, (tensor, row_map) in tensors.items():
        entry = manifest["tensors"].get(name)
        if entry is None:
            raise InputError(
                f"{checkpoint.path}: {name} not found. Use a checkpoint of the same model and "
                "optimizer"
            )
        shape = [row_map.stored_rows, *tensor.size()[1:]]
        if entry["shape"] != shape:
            raise InputError(
                f"{checkpoint.path}: {name} must have shape {shape}, got {entry['shape']}"
            )
    reader = TableReader(checkpoint.path, manifest)
    for name, (tensor, row_map) in tensors.items():
        for part, first_row, first_column in _row_parts(tensor):
            _fill(
                reader,
                name,
                part.detach(),
                row_map.sources_between(first_row, first_row + len(part)),
                first_column,
            )


def _row_parts(tensor: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield this worker's parts of a tensor, with their first row and column."""
    if not isinstance(tensor, ShardedTensor):
        yield tensor, 0, 0
        return
    for shard in tensor.local_shards():
        first_row, *offsets = shard.metadata.shard_offsets
        yield shard.tensor, first_row, offsets[0] if offsets else 0


def _fill(
    reader: TableReader, name: str, target: torch.Tensor, sources: np.ndarray, first_column: int
) -> None:
    # Sorted, so that the file is read once from start to end, in windows.
    order = np.argsort(sources, kind="stable")
    ordered = sources[order]
    columns = None if target.dim() == 1 else (first_column, first_column + target.shape[1])
    for first, stop in reader.windows(name):
        begin, end = np.searchsorted(ordered, [first, stop]).tolist()
        if begin == end:
            continue
        low = int(ordered[begin])
        high = int(ordered[end - 1]) + 1
        rows = reader.rows(name, low, high, columns=columns)
        targets = torch.from_numpy(order[begin:end]).to(target.device)
        selected = torch.from_numpy(ordered[begin:end] - low)
        if end - begin != high - low or not bool((selected == torch.arange(high - low)).all()):
            rows = rows[selected]
        target[targets] = rows.to(target.device)
