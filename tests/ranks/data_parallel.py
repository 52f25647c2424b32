"""Small data-parallel workload and functions of its ranks, each in a separate process."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from builders.faults import watched
from builders.loops import StopSignal
from ranks.checkpoint import local
from torch import distributed
from torch.nn import functional

from rayrec import checkpoint
from rayrec.checkpoint import Checkpoint
from rayrec.checkpoint.state import all_tensors, restore_all
from rayrec.data.numbered_rows import ArrayRows, RowSource
from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule
from rayrec.training import loop
from rayrec.training.progress import Progress, Training
from rayrec.workloads.base import RunContext, TrainConfig, WorkerContext
from rayrec.workloads.data_parallel.workload import DataParallelWorkload
from rayrec.workloads.language import GPT2Config
from rayrec.workloads.run_config import DataConfig, ScalingConfig

ROWS = {"train": 101, "validation": 37}


class Net(torch.nn.Module):
    """Two blocks with tied input and output, optionally with batch-dependent parts."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6) if batch_norm else torch.nn.Tanh()
            )
            for _ in range(2)
        )
        self.inner = torch.nn.Linear(6, 6, bias=False)
        self.outer = torch.nn.Linear(6, 6, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.outer(x)


@dataclass(frozen=True, kw_only=True)
class Small(DataParallelWorkload):
    """Workload that predicts which of six numbers is the largest."""

    batch_norm: bool = False
    noise: float = 0.0

    def check(self, config: TrainConfig) -> None:
        pass

    def prepare(self, context: RunContext) -> None:
        pass

    def set_rows(self, prepared: Any) -> dict[str, int]:
        return ROWS

    def open_set(self, context: WorkerContext, prepared: Any, name: str) -> RowSource:
        x = np.random.default_rng(len(name)).normal(size=(ROWS[name], 6)).astype(np.float32)
        return ArrayRows({"x": x, "label": x.argmax(axis=1)})

    def build(self, prepared: Any) -> torch.nn.Module:
        return Net(self.batch_norm)

    def measure(
        self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        logits = model(tensors["x"]).float()
        loss = functional.cross_entropy(logits, tensors["label"], reduction="none")
        return {"loss": loss, "accuracy": (logits.argmax(dim=1) == tensors["label"]).float()}

    def augment(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, "x": tensors["x"] + self.noise * torch.randn_like(tensors["x"])}

    def score(self, metrics: dict[str, float]) -> float:
        return metrics["accuracy"]


TOKEN_ROWS = {"train": 44, "validation": 10}
VOCABULARY = 13
LENGTH = 8


@dataclass(frozen=True, kw_only=True)
class NextToken(DataParallelWorkload):
    """Tiny GPT-2 that learns to count."""

    LOOPS: ClassVar[tuple[str, ...]] = ("rayrec", "huggingface")

    model: GPT2Config = field(
        default_factory=lambda: GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=8,
            n_positions=LENGTH,
        )
    )

    def prepare(self, context: RunContext) -> None:
        pass

    def set_rows(self, prepared: Any) -> dict[str, int]:
        return TOKEN_ROWS

    def open_set(self, context: WorkerContext, prepared: Any, name: str) -> RowSource:
        starts = np.random.default_rng(len(name)).integers(VOCABULARY, size=(TOKEN_ROWS[name], 1))
        return ArrayRows({"tokens": (starts + np.arange(LENGTH)) % VOCABULARY})

    def build(self, prepared: Any) -> torch.nn.Module:
        return self.model.build(VOCABULARY)

    def measure(
        self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        from rayrec.workloads.language_model import row_losses  # which brings transformers

        return {"loss": row_losses(model, tensors["tokens"])}

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["loss"]


def products_by_onednn(patch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Make oneDNN compute GPT-2's products of any size; return them as they are made."""
    from rayrec.layers import mlp
    from rayrec.workloads import language_model

    patch.setattr(language_model, "_MIN_MULTIPLY_ADDS", 1)
    for module in (language_model, mlp):
        patch.setattr(module, "onednn_is_faster", lambda: True)
    return watched(patch, language_model, "apply_linear")


def next_token_config(world_size: int, **workload: Any) -> TrainConfig:
    """Return a short configuration without randomness, and with a task that does not amplify
    rounding in gradients.
    """
    model = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=8,
        n_positions=LENGTH,
        dropout=0.0,
    )
    words = NextToken(
        model=model, optimizer=DenseOptimizerConfig(kind="sgd", learning_rate=0.1), **workload
    )
    return dataclasses.replace(config(world_size, steps=6), workload=words)


def config(world_size: int, *, steps: int = 12, **workload: Any) -> TrainConfig:
    optimizer = DenseOptimizerConfig(kind="adamw", learning_rate=0.02, max_gradient_norm=0.5)
    small = Small(optimizer=optimizer, schedule=LearningRateSchedule(warmup_steps=3), **workload)
    return TrainConfig(
        recipe="small",
        workload=small,
        steps=steps,
        batch_size=16 // world_size,
        eval_batch_size=5,
        evaluate_every=6,
        log_every=1,
        train_data=DataConfig(shuffle="full"),
        scaling=ScalingConfig(num_workers=world_size),
    )


def train(
    folder: str, rank: int, configuration: TrainConfig, *, from_step: int | None = None
) -> list[dict[str, Any]]:
    """Train, from a checkpoint if a step is given; save FOLDER/STEP at every evaluation and return
    the events.
    """
    world_size = distributed.get_world_size() if distributed.is_initialized() else 1
    engine: Any = None
    context = WorkerContext(configuration, rank, world_size, torch.device("cpu"), engine)
    stored = None if from_step is None else Checkpoint(f"{folder}/{from_step}")
    state = stored.manifest()["state"] if stored else None
    progress = Progress.from_state(state["progress"], rank=rank) if state else Progress()
    loader = configuration.workload.make_loader(
        context, None, state=state["loader"] if state else None, step=progress.step
    )
    setup = configuration.workload.set_up(context, None)
    if stored:
        restore_all(stored, setup.model, setup.optimizer)
    events: list[dict[str, Any]] = []

    def save(progress: Progress, position: dict[str, Any], **_: Any) -> None:
        checkpoint.save(
            f"{folder}/{progress.step}",
            all_tensors(setup.model, setup.optimizer),
            state={"progress": progress.state(), "loader": position},
        )

    def log(kind: str, fields: dict[str, Any]) -> None:
        events.append({"kind": kind, **fields})

    loop.run(
        Training(
            config=configuration,
            log=log,
            save=save,
            setup=setup,
            loader=loader,
            progress=progress,
            stop_signal=StopSignal(),
        )
    )
    loader.close()
    return events


def ddp(folder: str, rank: int) -> None:
    train(folder, rank, config(2))


def fsdp(folder: str, rank: int) -> None:
    train(folder, rank, config(2, parallel="fsdp", accumulate=3))


def parallel_options(folder: str, rank: int) -> None:
    cases: dict[str, dict[str, Any]] = {
        "graph": {"parallel_options": {"static_graph": True, "gradient_as_bucket_view": False}},
        "unused": {
            "parallel_options": {"find_unused_parameters": True, "bucket_cap_mb": 0.0001},
            "accumulate": 3,
        },
        "unsharded": {"parallel": "fsdp", "parallel_options": {"reshard_after_forward": False}},
        "rounded": {
            "parallel": "fsdp",
            "parallel_options": {"param_dtype": "bf16", "reduce_dtype": "bf16"},
        },
    }
    for name, changes in cases.items():
        train(f"{folder}/{name}", rank, config(2).replace(workload=changes))


def fsdp_by_onednn(folder: str, rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        products = products_by_onednn(patch)
        train(folder, rank, next_token_config(2, parallel="fsdp", accumulate=2))
    assert products


def fsdp_goes_on(folder: str, rank: int) -> None:
    """Resume with FSDP from a checkpoint of one worker."""
    train(folder, rank, config(2, parallel="fsdp"), from_step=6)


def noisy(folder: str, rank: int) -> None:
    """Train with augmentation and batch statistics, which could differ after a crash: once fully,
    once from the middle.
    """
    configuration = config(2, batch_norm=True, noise=0.3)
    train(folder, rank, configuration)
    whole = checkpoint.weights_sha256(Checkpoint(f"{folder}/12"))
    train(folder, rank, configuration, from_step=6)
    assert checkpoint.weights_sha256(Checkpoint(f"{folder}/12")) == whole


def statistics(folder: str, rank: int) -> None:
    """Check that statistics of batch normalization are equal on all workers after a segment."""
    configuration = config(2, batch_norm=True)
    engine: Any = None
    context = WorkerContext(configuration, rank, 2, torch.device("cpu"), engine)
    setup = configuration.workload.set_up(context, None)
    loader = configuration.workload.make_loader(context, None, state=None, step=0)
    setup.model.train()
    for _ in range(3):
        setup.pipeline.progress(loader)
    setup.pipeline.reset()
    loader.close()
    for buffer in setup.model.buffers():
        everyone = [torch.empty_like(buffer) for _ in range(2)]
        distributed.all_gather(everyone, local(buffer))
        assert torch.equal(*everyone)
