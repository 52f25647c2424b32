"""Scoring with a trained data-parallel model: blocks, scoring processes, and exact means."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pyarrow as pa
import torch

from rayrec.checkpoint import Checkpoint, drop_tied_tensors, full_tensors
from rayrec.config import InputError
from rayrec.data.numbered_rows import RowSource
from rayrec.layers.mlp import uses_bfloat16
from rayrec.metrics.means import MeasureTotals
from rayrec.workloads.base import ScoringContext
from rayrec.workloads.scoring import PREFIX, BlockScorer, Device, Scoring, check_weights

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig
    from rayrec.workloads.data_parallel.model import DataParallelModel

_BLOCK_BATCHES = 8
"""Maximum batches per block."""
_MIN_BLOCKS = 16
"""Minimum number of blocks if there are as many batches, to keep all processes busy."""


def open_scoring(workload: DataParallelModel, context: ScoringContext) -> Scoring:
    """Open rows for scoring, with the columns of `predict`, or of `measure` for evaluation. See
    `Workload.open_scoring`.
    """
    process = _ScoringTask(
        workload=workload,
        config=context.config,
        checkpoint=context.checkpoint,
        # Scoring processes of a running cluster have another working directory. The workload
        # interprets paths that are not files.
        path=os.path.abspath(context.path) if os.path.exists(context.path) else context.path,
        evaluating=context.evaluating,
        batch_rows=context.batch_rows or context.config.eval_batch_size,
    )
    source = process.open()
    rows = len(source)
    source.close()
    if not rows:
        raise InputError(f"{context.path}: has no rows to score")
    size = process.block_rows(rows)
    return Scoring(
        block_rows=tuple(min(size, rows - start) for start in range(0, rows, size)),
        load=process.load,
        make_totals=lambda: MeasureTotals(workload.metrics),
        described={},
    )


@dataclass(frozen=True)
class _ScoringTask:
    """Input of all scoring processes."""

    workload: DataParallelModel
    config: TrainConfig
    checkpoint: str
    path: str
    evaluating: bool
    batch_rows: int

    def open(self) -> RowSource:
        """Open a separate source of the rows for this process."""
        open_rows = self.workload.open_labelled if self.evaluating else self.workload.open_inputs
        return open_rows(self.config, checkpoint=self.checkpoint, path=self.path)

    def block_rows(self, rows: int) -> int:
        """Return the rows of each block except the last, in full batches."""
        return self.batch_rows * max(
            1, min(_BLOCK_BATCHES, -(-rows // self.batch_rows) // _MIN_BLOCKS)
        )

    def load(self, device: Device) -> BlockScorer:
        model = load_model(self.workload, self.config, checkpoint=self.checkpoint, device=device)
        source = self.open()
        torch_device = torch.device(device)
        size = self.block_rows(len(source))

        def open_block(number: int) -> _RowBlock:
            rows = np.arange(number * size, min((number + 1) * size, len(source)), dtype=np.int64)
            source.will_read(rows)
            return _RowBlock(self, model, source, torch_device, rows)

        return BlockScorer(open_block, self.batch_rows)


@final
class _RowBlock:
    """Block of numbered rows. See `OpenBlock`."""

    def __init__(
        self,
        task: _ScoringTask,
        model: torch.nn.Module,
        source: RowSource,
        device: torch.device,
        numbers: np.ndarray,
    ) -> None:
        self._task = task
        self._model = model
        self._source = source
        self._device = device
        self._numbers = numbers
        self.rows = len(numbers)

    def score(self, start: int, stop: int) -> Mapping[str, np.ndarray | list[str]]:
        task = self._task
        arrays = self._source.read(self._numbers[start:stop])
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        with (
            torch.inference_mode(),
            torch.autocast(
                self._device.type,
                torch.bfloat16,
                enabled=uses_bfloat16(task.config.precision, self._device),
            ),
        ):
            if not task.evaluating:
                return task.workload.predict(self._model, tensors)
            measures = task.workload.measure(self._model, tensors)
            # device sync
            return {name: values.double().cpu().numpy() for name, values in measures.items()}

    def columns(self, scored: dict[str, Any]) -> dict[str, pa.Array]:
        return {
            "row": pa.array(self._numbers),
            **{name: _column(values) for name, values in scored.items()},
        }


def _column(values: np.ndarray | list[str]) -> pa.Array:
    if isinstance(values, np.ndarray) and values.ndim > 1:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values[0].size)
    return pa.array(values)


def load_model(
    workload: DataParallelModel, config: TrainConfig, *, checkpoint: str, device: str = "cpu"
) -> torch.nn.Module:
    """Load the trained model of a checkpoint folder, in eval mode and without gradients. Verifies
    all checksums. Raises InputError for damaged weights and weights of another model.
    """
    model = workload.build_from(config, checkpoint=checkpoint)
    parameters = drop_tied_tensors(model.state_dict())
    check_weights(checkpoint, {name: list(tensor.shape) for name, tensor in parameters.items()})
    weights = dict(full_tensors(Checkpoint(checkpoint), PREFIX))
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(weights[PREFIX + name])
    return model.requires_grad_(requires_grad=False).eval().to(device)
