"""Batches of any kind of rows, movable to a device, and training step outputs. Depends on torch
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from rayrec.trained_rows import RowNumbers

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

DENSE: Final = "dense"
"""Name of the tensor with a click log's dense features."""


@dataclass
class Batch:
    """One worker's part of a global batch."""

    tensors: dict[str, torch.Tensor]
    """Images, blocks of tokens, or (DENSE) a click log's dense features, float32 [rows, num_dense].
    Each [rows, ...].
    """
    loss_weight: float
    """World size / rows of the global batch. The sum of row losses times this, averaged over
    workers (as in DDP and FSDP), is the exact global mean, even if workers have different row
    counts. 0: a filler that counts nowhere, for a worker without rows.
    """
    sparse_features: KeyedJaggedTensor | None = None
    """Categorical features of a click log: one key per feature with `rows` lists of ids, with
    weights if any feature has them.
    """
    labels: dict[str, torch.Tensor] = field(default_factory=dict)
    """Labels of a click log by name, float32 [rows]. The main label is from 0 to 1; NaN is a
    missing value in others.
    """
    weights: torch.Tensor | None = None
    """Loss weight of each row, float32 [rows]. None: 1 each."""
    groups: torch.Tensor | None = None
    """Group key of each row, int64 [rows], always on the CPU. None if the schema has no group."""
    timestamps: torch.Tensor | None = None
    """Microseconds since 1970-01-01 00:00 UTC, int64 [rows], always on the CPU. None if the schema
    has no timestamp.
    """
    sequence_features: KeyedJaggedTensor | None = None
    """Features whose embeddings the model takes one by one, like `sparse_features`. No other field
    contains them.
    """
    gaps: dict[str, torch.Tensor] = field(default_factory=dict)
    """Seconds from each id of a feature in `sequence_features` to the next one in its row, from the
    last one to the row's time, float32 [ids], by feature. Those with times only.
    """
    row_numbers: RowNumbers | None = None
    """Row numbers for the loop to count, empty for a filler. None in copies on a device and in
    parts.
    """

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self._changed(lambda item: item.to(device, non_blocking=non_blocking), None)

    def pin_memory(self) -> Batch:
        """Copy to pinned memory, with row numbers, because a loader pins batches before the loop
        counts them.
        """
        return self._changed(lambda item: item.pin_memory(), self.row_numbers)

    def _changed(self, change: Callable[[Any], Any], row_numbers: RowNumbers | None) -> Batch:
        """Return a copy with `change` applied to the tensors that a device needs."""
        optional = {
            name: getattr(self, name)
            for name in ("sparse_features", "weights", "sequence_features")
        }
        changed: dict[str, Any] = {
            name: None if item is None else change(item) for name, item in optional.items()
        }
        changed["tensors"] = {name: change(tensor) for name, tensor in self.tensors.items()}
        changed["labels"] = {name: change(tensor) for name, tensor in self.labels.items()}
        changed["gaps"] = {name: change(tensor) for name, tensor in self.gaps.items()}
        changed["row_numbers"] = row_numbers
        return replace(self, **changed)

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (*self.tensors.values(), *self.labels.values(), *self.gaps.values()):
            tensor.record_stream(stream)
        if self.weights is not None:
            self.weights.record_stream(stream)
        for ids in (self.sparse_features, self.sequence_features):
            if ids is not None:
                ids.record_stream(stream)

    def parts(self, count: int) -> list[Batch]:
        """Split the tensors into `count` near-equal parts, for equally many passes of all workers,
        with fillers. Not for click logs.
        """
        assert self.sparse_features is None
        if count == 1:
            return [self]
        split = {name: tensor.tensor_split(count) for name, tensor in self.tensors.items()}
        parts = [
            Batch({name: split[name][number] for name in split}, self.loss_weight)
            for number in range(count)
        ]
        filler = Batch({name: tensor[:1] for name, tensor in self.tensors.items()}, 0.0)
        return [part if len(part) else filler for part in parts]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))


@dataclass(frozen=True)
class StepOutput:
    """Detached results of a training step, in addition to the loss to differentiate."""

    loss: torch.Tensor
    """Loss of this worker without penalties, a scalar. Its mean over workers is the mean over the
    global batch.
    """
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Logits of a click model by label name, the main label first, or the prediction of a number
    label, float32 [rows].
    """
    labels: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Labels from the batch, float32 [rows]."""
    groups: torch.Tensor | None = None
    """Group keys from the batch, int64 [rows]."""
    measures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values that an evaluation averages, one per row that has them. Empty in training."""
