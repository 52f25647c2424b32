"""Fills parts of tables with rows of a checkpoint that have other numbers there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rayrec.checkpoint.communicator import Ranks
from rayrec.checkpoint.discovery import Checkpoint
from rayrec.checkpoint.reader import TableReader
from rayrec.checkpoint.row_map import RowMap
from rayrec.compat.torch_compat import ShardedTensor
from rayrec.config import InputError


def restore_rows(checkpoint: Checkpoint, tensors: Mapping[str, tuple[Any, RowMap]]) -> None:
    """Fills the rows of `tensors` that a map gives a stored row, in place, and leaves the others unchanged; under any plan and
    number of workers. Dimension 0 of a tensor (tensor or ShardedTensor) is the rows of its map.

    Collective if a process group is up. Each rank reads the ranges of rows that its shards need, 64 MiB at a time. Memory in
    addition: 24 bytes for each row of its largest shard. Raises, on all ranks, DamagedError if any rank found a file damaged,
    InputError for a tensor that is missing or has another shape; tensors may then be partly filled.
    """
    ranks = Ranks.all()
    manifest = ranks.from_first(checkpoint.manifest)
    ranks.together(lambda: _fill_all(checkpoint, manifest, tensors))


def _fill_all(checkpoint: Checkpoint, manifest: dict[str, Any], tensors: Mapping[str, tuple[Any, RowMap]]) -> None:
    for name, (tensor, row_map) in tensors.items():
        entry = manifest["tensors"].get(name)
        if entry is None:
            raise InputError(f"{checkpoint.path}: has no {name}; it was saved by another model or optimizer")
        wanted = [row_map.stored_rows, *tensor.size()[1:]]
        if entry["shape"] != wanted:
            raise InputError(f"{checkpoint.path}: {name} has shape {entry['shape']}, expected is {wanted}")
    reader = TableReader(checkpoint.path, manifest)
    for name, (tensor, row_map) in tensors.items():
        for part, first_row, first_column in _parts(tensor):
            _fill(reader, name, part.detach(), row_map.of(first_row, first_row + len(part)), first_column)


def _parts(tensor: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """This worker's parts of a tensor, with their first row and column."""
    if not isinstance(tensor, ShardedTensor):
        yield tensor, 0, 0
        return
    for shard in tensor.local_shards():
        first_row, *others = shard.metadata.shard_offsets
        yield shard.tensor, first_row, others[0] if others else 0


def _fill(reader: TableReader, name: str, target: torch.Tensor, sources: np.ndarray, first_column: int) -> None:
    order = np.argsort(sources, kind="stable")
    ordered = sources[order]
    columns = None if target.dim() == 1 else (first_column, first_column + target.shape[1])
    for first, stop in reader.windows(name):
        begin, end = np.searchsorted(ordered, [first, stop]).tolist()
        if begin == end:
            continue
        low, high = int(ordered[begin]), int(ordered[end - 1]) + 1
        rows = reader.rows(name, low, high, columns=columns)
        places = torch.from_numpy(order[begin:end]).to(target.device)
        wanted = torch.from_numpy(ordered[begin:end] - low)
        if end - begin != high - low or not bool((wanted == torch.arange(high - low)).all()):
            rows = rows[wanted]
        target[places] = rows.to(target.device)
