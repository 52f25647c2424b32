"""TorchRec's pipelines, which tell a clock what they are at."""

from __future__ import annotations

from typing import Any, final

import torch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.streamable import Pipelineable

from rayrec.batch import Batch
from rayrec.workloads.step_timer import StepClock, TimedOptimizer, notice_exchange, time_forward

Pipelineable.register(Batch)  # has its methods; TorchRec asks for the class


@final
class TimedBase(TrainPipelineBase):
    """One batch after the other."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, device: torch.device, clock: StepClock) -> None:
        time_forward(model, clock)
        super().__init__(model, TimedOptimizer(optimizer, clock), device)  # type: ignore[arg-type]  # steps and clears
        self._clock = clock

    def _wait_for_batch(self, cur_batch: Any) -> None:
        with self._clock.phase("host_to_device"):
            super()._wait_for_batch(cur_batch)

    def _copy_batch_to_gpu(self, cur_batch: Any) -> None:
        with self._clock.phase("host_to_device"):
            super()._copy_batch_to_gpu(cur_batch)

    def _backward(self, losses: torch.Tensor) -> None:
        with self._clock.phase("backward"):
            super()._backward(losses)


@final
class TimedSparseDist(TrainPipelineSparseDist):
    """Exchanges the ids of the next batch while the present one computes."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, device: torch.device, clock: StepClock) -> None:
        time_forward(model, clock)
        timed: Any = TimedOptimizer(optimizer, clock)
        super().__init__(model, timed, device, execute_all_batches=True)
        self._clock = clock

    def _wait_for_batch(self) -> None:
        with self._clock.phase("host_to_device"):
            super()._wait_for_batch()

    def copy_batch_to_gpu(self, dataloader_iter: Any) -> Any:
        with self._clock.phase("host_to_device"):  # within which waiting for the batch is told apart
            return super().copy_batch_to_gpu(dataloader_iter)

    def start_sparse_data_dist(self, batch: Any, context: Any) -> None:
        with self._clock.phase("collectives"):
            super().start_sparse_data_dist(batch, context)

    def wait_sparse_data_dist(self, context: Any) -> None:
        with self._clock.phase("collectives"):
            super().wait_sparse_data_dist(context)

    def _backward(self, losses: torch.Tensor) -> None:
        notice_exchange(self._clock, losses)
        with self._clock.phase("backward"):
            super()._backward(losses)
