"""Batches of rows of any kind, able to move themselves to a device, and what a step gives; nothing here needs more than torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from rayrec.row_tally import RowNumbers

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

DENSE: Final = "dense"
"""The tensor of a click log's dense features."""


@dataclass
class Batch:
    """One worker's part of one global batch."""

    tensors: dict[str, torch.Tensor]
    """(rows, ...) each: images, blocks of tokens, or (DENSE) a click log's dense features, (rows, num_dense) float32."""
    loss_weight: float
    """world_size / rows of the global batch: the sum of row losses times this, averaged over workers (as DDP and FSDP do),
    is the exact mean over the global batch also where workers hold different numbers of rows. 0: a filler, which counts
    nowhere, for a worker that has no row where others have."""
    sparse_features: KeyedJaggedTensor | None = None
    """Of a click log: one key per categorical feature, `rows` lists of ids each; with weights if any feature has them."""
    labels: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of a click log: (rows,) float32 by name; the main label is from 0 to 1, in others NaN stands for a missing value. Empty
    for a log without a label."""
    weights: torch.Tensor | None = None
    """(rows,) float32: what each row's loss is multiplied by; None: 1 each."""
    groups: torch.Tensor | None = None
    """(rows,) int64, always on the CPU: keys of the rows' groups, where the schema has a group."""
    timestamps: torch.Tensor | None = None
    """(rows,) int64, always on the CPU: microseconds since 1970-01-01 00:00 UTC, if the schema has a timestamp."""
    sequence_features: KeyedJaggedTensor | None = None
    """As `sparse_features`, of the features whose embeddings the model takes one by one; they are in no other field."""
    row_numbers: RowNumbers | None = None
    """Which rows these are, none for a filler, for the loop to count; copies on a device and parts do not have it."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        def moved_ids(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return ids.to(device, non_blocking=non_blocking)

        return self._with(moved, moved_ids, None)

    def pin_memory(self) -> Batch:
        """A copy in pinned memory; it keeps its row numbers, because a loader pins batches before the loop counts them."""
        return self._with(torch.Tensor.pin_memory, lambda ids: ids.pin_memory(), self.row_numbers)

    def _with(
        self,
        change: Callable[[torch.Tensor], torch.Tensor],
        change_ids: Callable[[KeyedJaggedTensor], KeyedJaggedTensor],
        row_numbers: RowNumbers | None,
    ) -> Batch:
        sparse, sequences = self.sparse_features, self.sequence_features
        return Batch(
            {name: change(tensor) for name, tensor in self.tensors.items()},
            self.loss_weight,
            None if sparse is None else change_ids(sparse),
            {name: change(tensor) for name, tensor in self.labels.items()},
            None if self.weights is None else change(self.weights),
            self.groups,
            self.timestamps,
            None if sequences is None else change_ids(sequences),
            row_numbers,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (*self.tensors.values(), *self.labels.values()):
            tensor.record_stream(stream)
        if self.weights is not None:
            self.weights.record_stream(stream)
        for ids in (self.sparse_features, self.sequence_features):
            if ids is not None:
                ids.record_stream(stream)

    def parts(self, count: int) -> list[Batch]:
        """The tensors in exactly so many parts of nearly equal size, so that every worker makes as many passes; where there are
        fewer rows, fillers make up the number. Not of a click log."""
        assert self.sparse_features is None
        if count == 1:
            return [self]
        pieces = {name: tensor.tensor_split(count) for name, tensor in self.tensors.items()}
        parts = [Batch({name: pieces[name][number] for name in pieces}, self.loss_weight) for number in range(count)]
        filler = Batch({name: tensor[:1] for name, tensor in self.tensors.items()}, 0.0)
        return [part if len(part) else filler for part in parts]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))


@dataclass(frozen=True)
class StepOutput:
    """What a step hands to the loop beside the loss to differentiate; detached."""

    loss: torch.Tensor
    """Scalar: this worker's loss, without penalties; its mean over workers is the mean over the global batch."""
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Of a click model: (rows,) float32 logits by the label's name, the main label first; for a label that is a number, the
    prediction itself."""
    labels: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """(rows,) float32, as in the batch."""
    groups: torch.Tensor | None = None
    """(rows,) int64, as in the batch."""
    measures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What an evaluation averages, (rows that have it,) each; empty in training."""
