"""Training loop with HuggingFace's Trainer: Trainer makes the steps, and rayrec does everything
around them. Trainer cannot run inside rayrec's loop, because `train()` returns only after training
and allows other work between steps only in callbacks. So control is inverted: a callback reports
the end of each step to `loop.iterate_segments`, which decides when to evaluate, save and stop, just
as rayrec's loop reports the end of each segment.

Shared with rayrec's loop are these decisions, the row order and position, the wrapped model (DDP or
FSDP2), the loss arithmetic, the optimizer, learning rates, seeds, evaluation, checkpoints and
events. Trainer provides the order of passes, accumulation, clipping and the optimizer step, through
accelerate. Its data loading, wrapping, evaluation, logging and checkpoints are disabled, and it
writes no file.
"""

import contextlib
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import distributed
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from rayrec.batch import Batch, StepOutput
from rayrec.config import InputError
from rayrec.process_state import temporary_environment
from rayrec.training.loop import iterate_segments
from rayrec.training.progress import Cut, Progress, Training
from rayrec.training.step_log import Batches, StepAccounting
from rayrec.workloads.base import WorkerSetup
from rayrec.workloads.data_parallel.worker import RowPipeline
from rayrec.workloads.data_parallel.workload import DataParallelWorkload
from rayrec.workloads.step_timer import OTHER, enter_phase

LOSS_WEIGHT = "loss_weight"
"""Key of `Batch.loss_weight` among the tensors of a part."""


def run(training: Training) -> bool:
    """Train like `loop.run`, with the same steps and events, but with Trainer's steps."""
    setup = training.setup
    progress = training.progress
    course = iterate_segments(training)
    account = StepAccounting(training)
    try:
        stop = next(course)
    except StopIteration as end:  # nothing to train
        return end.value
    workload = training.config.workload
    assert isinstance(workload, DataParallelWorkload)
    losses: list[torch.Tensor] = []
    batches = Batches(training.loader, setup.clock)
    steps = _Steps(setup, progress, account, course, batches, losses, stop)
    device = _pipeline(setup).device
    options = workload.trainer_options()
    parts = _Parts(batches, workload.accumulate, options.get("data_collator"))
    with _as_it_is(device):
        arguments = _arguments(
            workload, device, steps=account.total, **options.get("arguments", {})
        )
        trainer = _Trainer(
            setup, parts, losses, args=arguments, callbacks=[steps, *options.get("callbacks", ())]
        )
    trainer.remove_callback(PrinterCallback)
    # accelerate makes the optimizer's steps
    optimizer = setup.optimizer.optimizer
    clock = setup.clock
    hooks = [
        optimizer.register_step_pre_hook(lambda *_: enter_phase(clock, "optimizer")),
        optimizer.register_step_post_hook(lambda *_: enter_phase(clock, OTHER)),
    ]
    try:
        trainer.train()
    finally:
        for hook in hooks:
            hook.remove()
    if not steps.ended:
        raise InputError(
            f"trainer_options: a callback ended training at step {progress.step}. Use steps or "
            "early_stopping"
        )
    return steps.finished


def _pipeline(setup: WorkerSetup) -> RowPipeline:
    assert isinstance(setup.pipeline, RowPipeline)
    return setup.pipeline


def _arguments(
    workload: DataParallelWorkload, device: torch.device, *, steps: int, **options: Any
) -> TrainingArguments:
    """Return Trainer's arguments with all its features off that rayrec provides, and the workload's
    own options.
    """
    return TrainingArguments(
        output_dir=tempfile.gettempdir(),  # required, but nothing is written
        max_steps=steps,
        gradient_accumulation_steps=workload.accumulate,
        max_grad_norm=workload.optimizer.max_gradient_norm or 0.0,  # 0 never clips
        use_cpu=device.type == "cpu",
        # uses the existing group
        ddp_backend=distributed.get_backend() if distributed.is_initialized() else None,
        average_tokens_across_devices=False,
        # would synchronize every step; losses are checked when they are logged
        logging_nan_inf_filter=False,
        eval_strategy="no",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )


@contextlib.contextmanager
def _as_it_is(device: torch.device) -> Iterator[None]:
    """Keep rayrec's device and thread count while accelerate sets up the process. It reads the
    device from a variable.
    """
    threads = torch.get_num_threads()
    try:
        with temporary_environment({"ACCELERATE_TORCH_DEVICE": str(device)}):
            yield
    finally:
        torch.set_num_threads(threads)


@final
class _Rates:
    """Dummy scheduler for Trainer: `begin_step` sets the learning rates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        pass

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]


@final
class _Wrapped(torch.nn.Module):
    """Model wrapper that Trainer takes for its own; returns the loss of a part."""

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__()
        self.module = setup.model
        self._pipeline = _pipeline(setup)

    def forward(self, part: Mapping[str, Any]) -> torch.Tensor:
        return self._pipeline.loss(
            Batch(
                {name: value for name, value in part.items() if name != LOSS_WEIGHT},
                part[LOSS_WEIGHT],
            )
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._pipeline.exchange(False):
            yield
        with self._pipeline.exchange(True):  # FSDP keeps the last setting
            pass


@final
class _Parts:
    """Data loader for Trainer: batches in `accumulate` parts. Has no length, so Trainer uses
    `max_steps` and sees one epoch.
    """

    def __init__(
        self,
        batches: Batches,
        accumulate: int,
        collate: Callable[[Sequence[Any]], Mapping[str, Any]] | None,
    ) -> None:
        self._batches = batches
        self._accumulate = accumulate
        self._collate = collate

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            for part in batch.parts(self._accumulate):
                if self._collate is None:
                    yield {**part.tensors, LOSS_WEIGHT: part.loss_weight}
                    continue
                rows = [
                    {name: tensor[row] for name, tensor in part.tensors.items()}
                    for row in range(len(part))
                ]
                tensors = dict(self._collate(rows))
                scale = len(rows) / len(next(iter(tensors.values())))  # it may pack rows
                yield {**tensors, LOSS_WEIGHT: part.loss_weight * scale}


@final
class _Trainer(Trainer):
    """Trainer with rayrec's batches, wrapped model, loss and optimizer."""

    def __init__(
        self, setup: WorkerSetup, parts: _Parts, losses: list[torch.Tensor], **named: Any
    ) -> None:
        self._setup = setup
        self._parts = parts
        self._losses = losses
        optimizer = setup.optimizer.optimizer
        super().__init__(model=setup.model, optimizers=(optimizer, _Rates(optimizer)), **named)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Otherwise accelerate reloads the optimizer state and replaces the tensors that checkpoints
        # save.
        self.accelerator.device_placement = False

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Do nothing: the model, possibly sharded, is already there."""

    def _wrap_model(
        self, model: torch.nn.Module, training: bool = True, dataloader: Any = None
    ) -> torch.nn.Module:
        return _Wrapped(self._setup)

    def get_train_dataloader(self) -> Any:
        return self._parts

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        with self._setup.clock.phase("backward"):  # copying and the forward pass have nested phases
            return super().training_step(*arguments, **named)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        with self._setup.clock.phase("host_to_device"):
            return super()._prepare_inputs(inputs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # only needed for Trainer's logging, which is off

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        loss = model(inputs)
        self._losses.append(loss.detach())
        # Trainer divides by the number of parts, but our losses of parts already add up to the
        # batch mean.
        return loss * self.current_gradient_accumulation_steps


@final
@dataclass(eq=False)
class _Steps(TrainerCallback):
    """Callback around each of Trainer's steps."""

    setup: WorkerSetup
    progress: Progress
    account: StepAccounting
    course: Generator[int, Cut, bool]
    batches: Batches
    losses: list[torch.Tensor]
    stop: int
    finished: bool = False
    ended: bool = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.global_step = self.progress.step
        self.account.begin()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.setup.begin_step(self.progress.step, self.account.total)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        loss = torch.stack(self.losses).sum()
        self.losses.clear()
        # Trainer pulls no batch ahead, so a segment can end after any step.
        cannot_go_on = self.account.count(StepOutput(loss), self.batches, stop=self.stop)
        if self.progress.step < self.stop and not cannot_go_on:
            return
        self.setup.pipeline.reset()
        try:
            self.stop = self.course.send(self.account.cut)
        except StopIteration as end:
            self.finished = end.value
            self.ended = control.should_training_stop = True
        self.account.begin()
