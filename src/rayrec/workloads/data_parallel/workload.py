"""Data-parallel workload for PyTorch models with rows in and a loss for each row out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rayrec.workloads.base import RunContext, WarmStart, WorkerContext, WorkerSetup
from rayrec.workloads.data_parallel.model import DataParallelModel

if TYPE_CHECKING:
    from rayrec.checkpoint import Checkpoint
    from rayrec.ingest.loader import Loader
    from rayrec.ingest.row_order import RowPlan, RowPosition
    from rayrec.workloads.base import ScoringContext
    from rayrec.workloads.scoring import Scoring


@dataclass(frozen=True, kw_only=True)
class DataParallelWorkload(DataParallelModel):
    """Training with DDP (full model per worker) or FSDP2 (sharded model) on rows in any order.
    Subclasses define the rows, the model and its measures. This class does the rest: row order,
    exact resume, gradient averaging, checkpoints and evaluation.
    """

    WORKER_MODULES: ClassVar[tuple[str, ...]] = ("rayrec.workloads.data_parallel.worker",)

    def warm_start(self, context: RunContext, prepared: Any, checkpoint: Checkpoint) -> WarmStart:
        """Start from all weights and optimizer state by name. Uses the memory of one more model."""
        import torch

        from rayrec.checkpoint import drop_tied_tensors
        from rayrec.workloads.scoring import (
            require_same_optimizer,
            require_same_weights,
            stored_settings,
        )

        require_same_optimizer(
            checkpoint,
            stored_settings(checkpoint),
            "optimizer",
            self.optimizer,
            fields=("kind", "momentum"),
        )
        with torch.random.fork_rng(devices=[]):
            weights = drop_tied_tensors(self.build(prepared).state_dict())
        shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
        require_same_weights(checkpoint, shapes)
        return WarmStart(checkpoint.path, context.engine.share({}), {"weights": len(shapes)})

    def make_loader(
        self, context: WorkerContext, prepared: Any, *, state: dict[str, Any] | None, step: int
    ) -> Loader[RowPosition, RowPlan]:
        from rayrec.workloads.data_parallel.worker import train_loader

        return train_loader(self, context, prepared, state=state, step=step)

    def set_up(self, context: WorkerContext, prepared: Any) -> WorkerSetup:
        from rayrec.workloads.data_parallel.worker import set_up

        return set_up(self, context, prepared)

    def open_scoring(self, context: ScoringContext) -> Scoring:
        from rayrec.workloads.data_parallel.scoring import open_scoring

        return open_scoring(self, context)

    def summarize(self, prepared: Any, metrics: dict[str, float]) -> dict[str, Any]:
        return {"rows_of_sets": self.set_rows(prepared)}
