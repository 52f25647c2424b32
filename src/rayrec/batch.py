"""Batches of any tensors, able to move themselves to a device; nothing here needs more than torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rayrec.row_tally import RowNumbers


@dataclass
class TensorBatch:
    """One worker's part of one global batch."""

    tensors: dict[str, torch.Tensor]
    """(rows, ...) each."""
    loss_weight: float
    """world_size / rows of the global batch: the sum of row losses times this, averaged over workers (as DDP and FSDP do),
    is the exact mean over the global batch also where workers hold different numbers of rows. 0: a filler, which counts
    nowhere, for a worker that has no row where others have."""
    row_numbers: RowNumbers | None = None
    """Which rows these are, none for a filler, for the loop to count; copies and parts do not have it."""

    def to(self, device: torch.device, non_blocking: bool = False) -> TensorBatch:
        tensors = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.tensors.items()}
        return TensorBatch(tensors, self.loss_weight)

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in self.tensors.values():
            tensor.record_stream(stream)

    def pin_memory(self) -> TensorBatch:
        return TensorBatch({name: tensor.pin_memory() for name, tensor in self.tensors.items()}, self.loss_weight)

    def parts(self, count: int) -> list[TensorBatch]:
        """The batch in exactly so many parts of nearly equal size, so that every worker makes as many passes; where it has
        fewer rows, fillers make up the number."""
        if count == 1:
            return [self]
        pieces = {name: tensor.tensor_split(count) for name, tensor in self.tensors.items()}
        parts = [
            TensorBatch({name: pieces[name][number] for name in pieces}, self.loss_weight) for number in range(count)
        ]
        filler = TensorBatch({name: tensor[:1] for name, tensor in self.tensors.items()}, 0.0)
        return [part if len(part) else filler for part in parts]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))


@dataclass(frozen=True)
class RowOutput:
    """What a step hands to the loop; detached."""

    loss: torch.Tensor
    """Scalar: this worker's loss; its mean over workers is the mean over the global batch."""
    measures: Mapping[str, torch.Tensor]
    """(rows,) each; empty in training."""
