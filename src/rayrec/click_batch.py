"""Batches of clicks: what the loader hands to a click model, able to move themselves to a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from rayrec.row_tally import RowNumbers


@dataclass
class ClickBatch(Pipelineable):
    """One worker's part of one global batch of a click log."""

    dense_features: torch.Tensor
    """(rows, num_dense) float32, normalised."""
    sparse_features: KeyedJaggedTensor
    """One key per sparse column, `rows` bags each."""
    labels: torch.Tensor
    """(rows,) float32, 0 or 1."""
    loss_weight: float
    """world_size / rows of the global batch: summing row losses times this, then averaging over workers (as DDP
    does), gives the exact mean over the global batch also when workers hold different numbers of rows."""
    weights: torch.Tensor | None = None
    """(rows,) float32: what each row's loss is multiplied by; None: 1 each."""
    groups: torch.Tensor | None = None
    """(rows,) int64, always on the CPU: keys of the rows' groups, where the schema has a group."""
    row_numbers: RowNumbers | None = None
    """Which rows these are, for the loop to count; copies on a device do not have it."""

    def to(self, device: torch.device, non_blocking: bool = False) -> ClickBatch:
        return ClickBatch(
            dense_features=self.dense_features.to(device, non_blocking=non_blocking),
            sparse_features=self.sparse_features.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            loss_weight=self.loss_weight,
            weights=None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
            groups=self.groups,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)
        if self.weights is not None:
            self.weights.record_stream(stream)

    def pin_memory(self) -> ClickBatch:
        return ClickBatch(
            dense_features=self.dense_features.pin_memory(),
            sparse_features=self.sparse_features.pin_memory(),
            labels=self.labels.pin_memory(),
            loss_weight=self.loss_weight,
            weights=None if self.weights is None else self.weights.pin_memory(),
            groups=self.groups,
            row_numbers=self.row_numbers,  # a loader pins batches before the loop counts them
        )

    def __len__(self) -> int:
        return self.labels.numel()


@dataclass(frozen=True)
class StepOutput:
    """What a model's forward pass hands to the loop beside the loss to differentiate; detached."""

    loss: torch.Tensor
    """Scalar: this worker's loss, without penalties; its mean over workers is the mean over the global batch."""
    logits: torch.Tensor
    """(rows,) float32"""
    labels: torch.Tensor
    """(rows,) float32"""
    groups: torch.Tensor | None = None
    """(rows,) int64, as in the batch."""
