"""HuggingFace loop, bit-identical in steps, segments and events to rayrec's own."""

import copy
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.faults import rejects
from builders.loops import StopSignal
from ranks.checkpoint import same
from ranks.data_parallel import NextToken, products_by_onednn

from rayrec.checkpoint.state import all_tensors, make_state
from rayrec.config import InputError
from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule
from rayrec.training import huggingface, loop
from rayrec.training.progress import Progress, Training
from rayrec.workloads.base import TrainConfig, WorkerContext


def config(**changes: Any) -> TrainConfig:
    """Return a configuration of 13 steps of 8 rows in two epochs and a bit (4 rows last), evaluated
    every 5 and saved every 4.
    """
    optimizer = DenseOptimizerConfig(kind="adamw", learning_rate=0.01, max_gradient_norm=0.5)
    workload = NextToken(
        optimizer=optimizer, schedule=LearningRateSchedule(warmup_steps=3, decay_fraction=0.5)
    )
    made = TrainConfig(
        recipe="next_token",
        workload=workload,
        steps=13,
        batch_size=8,
        evaluate_every=5,
        log_every=2,
    )
    return made.replace(checkpoint={"every": 4}).replace(**changes)


class Attempt:
    """One call of a loop, from the start or from a save."""

    def __init__(
        self, run: Any, desired: TrainConfig, *, start: Any = None, **stop_signal: float
    ) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.saves: dict[int, Any] = {}
        self.progress = progress = copy.deepcopy(start.progress) if start else Progress()
        context = WorkerContext(desired, 0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]
        loader = desired.workload.make_loader(
            context, None, state=start and start.loader, step=progress.step
        )
        self.setup = desired.workload.set_up(context, None)
        if start:
            make_state(self.setup.optimizer)
            with torch.no_grad():
                for name, tensor in self.tensors().items():
                    tensor.copy_(start.tensors[name])

        def save(
            progress: Progress, state: dict[str, Any], *, score: Any, needed: bool, complete: bool
        ) -> None:
            copies = {name: tensor.clone() for name, tensor in self.tensors().items()}
            self.saves[progress.step] = SimpleNamespace(
                progress=copy.deepcopy(progress), loader=state, tensors=copies
            )

        self.finished = run(
            Training(
                config=desired,
                setup=self.setup,
                loader=loader,
                progress=progress,
                log=lambda kind, fields: self.events.append((kind, fields)),
                save=save,
                stop_signal=StopSignal(lambda: progress.step, **stop_signal),
            )
        )
        loader.close()

    def tensors(self) -> dict[str, torch.Tensor]:
        return all_tensors(self.setup.model, self.setup.optimizer)

    def reported(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events without clock-dependent fields."""
        timed = {
            "rows_per_s",
            "blocked_fraction",
            "times_s",
            "multiply_adds_per_s",
            "peak_fraction",
            "memory_bytes",
            "seconds",
        }
        kept = [
            (kind, fields) for kind, fields in self.events if kind not in ("data", "data_nodes")
        ]
        return [
            (kind, {k: v for k, v in fields.items() if k not in timed}) for kind, fields in kept
        ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"workload": {"accumulate": 2}},
        {"workload": {"accumulate": 4, "optimizer": {"max_gradient_norm": None}}},
        {"workload": {"model": {"dropout": 0.0}}, "log_every": 1},
    ],
    ids=str,
)
def test_huggingface_loop_matches_own_loop(changes: dict[str, Any]) -> None:
    own, other = (Attempt(run, config(**changes)) for run in (loop.run, huggingface.run))
    assert (own.finished, other.finished) == (True, True)
    assert own.reported() == other.reported()
    for run in (own, other):
        times_s = [fields["times_s"] for kind, fields in run.events if kind == "step"]
        assert all(
            min(times[name] for name in ("data", "forward", "backward", "optimizer")) > 0
            for times in times_s
        )
    assert own.saves.keys() == other.saves.keys() == {4, 8, 12, 13}
    for step, save in own.saves.items():
        assert same(save.tensors, other.saves[step].tensors)
        assert save.loader == other.saves[step].loader
    for run in (own, other):
        run.progress.counters.train_s = 0.0
        run.progress.counters.blocked_s = 0.0
        run.progress.counters.evaluation_s = 0.0
    assert own.progress == other.progress


def test_loops_with_onednn_and_accumulated_parts_match(monkeypatch: pytest.MonkeyPatch) -> None:
    products = products_by_onednn(monkeypatch)
    test_huggingface_loop_matches_own_loop({"workload": {"accumulate": 2}})
    assert products
    # Three parts of 8 rows, or of the epoch's last 4; only rounding may differ.
    own = Attempt(loop.run, config(workload={"model": {"dropout": 0.0}}))
    parts = Attempt(huggingface.run, config(workload={"model": {"dropout": 0.0}, "accumulate": 3}))
    losses = [[fields["loss"] for _, fields in attempt.reported()] for attempt in (own, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.fixture(scope="module")
def whole() -> Attempt:
    return Attempt(huggingface.run, config())


@pytest.mark.parametrize("step", [4, 8, 12, 13])
def test_resumed_attempt_matches_uninterrupted_weights(whole: Attempt, step: int) -> None:
    rest = Attempt(huggingface.run, config(), start=whole.saves[step])
    assert rest.finished
    assert same(rest.tensors(), whole.tensors())
    found, expected = (
        [event for event in each.reported() if event[0] == "evaluate"] for each in (rest, whole)
    )
    assert found == [event for event in expected if event[1]["step"] > step]


def test_stop_ends_preemption_saves_and_due_evaluation_is_made(whole: Attempt) -> None:
    first = Attempt(huggingface.run, config(), stop_at=6)
    assert not first.finished
    assert (first.progress.step, list(first.saves)) == (6, [4, 6])
    # either loop may resume where the other stopped
    rest = Attempt(loop.run, config(), start=first.saves[6])
    assert same(rest.tensors(), whole.tensors())
    warned = Attempt(huggingface.run, config(), preempt_at=6)
    assert warned.finished
    assert list(warned.saves) == [4, 6, 8, 12, 13]
    assert same(warned.tensors(), whole.tensors())
    first = Attempt(huggingface.run, config(log_every=5), stop_at=5)
    assert (first.progress.step, first.progress.evaluation_due) == (5, True)
    rest = Attempt(huggingface.run, config(log_every=5), start=first.saves[5])
    assert rest.reported()[0][0] == "evaluate"
    assert same(rest.tensors(), whole.tensors())  # which was logged more often


def test_trainer_options_reach_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainerCallback

    seen: list[Any] = []

    class Observer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append((state.global_step, args.gradient_checkpointing))
            control.should_training_stop |= state.global_step == stop_at

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"tokens": torch.stack([row["tokens"] for row in rows])}

    def use(options: dict[str, Any]) -> None:
        monkeypatch.setattr(NextToken, "trainer_options", lambda self: options)

    stop_at = 0
    options = {
        "arguments": {"gradient_checkpointing": True},
        "callbacks": [Observer()],
        "data_collator": collate,
    }
    run_config = config(workload={"model": {"dropout": 0.0}}, loop="huggingface")
    use(options)
    run_config.workload.check(run_config)
    with_options = Attempt(huggingface.run, run_config)
    assert seen == [(step, True) for step in range(1, 14)]
    rejects(
        "trainer_options: must be used with loop huggingface",
        run_config.workload.check,
        run_config.replace(loop="rayrec"),
    )
    use({"arguments": {"learning_rate": 1.0}})
    rejects(
        "trainer_options: learning_rate is not supported. Use arguments",
        run_config.workload.check,
        run_config,
    )
    stop_at = 3
    use(options)
    rejects("a callback ended training at step 3", Attempt, huggingface.run, run_config)
    use({"data_collator": lambda rows: {"tokens": collate(rows)["tokens"][: len(rows) // 2]}})
    assert Attempt(huggingface.run, run_config).finished
    use({})
    assert same(with_options.tensors(), Attempt(loop.run, run_config).tensors())


def test_non_finite_loss_raises_input_error() -> None:
    with pytest.raises(
        InputError, match=r"the loss is (nan|inf) at step 2. Lower the learning rates"
    ):
        Attempt(
            huggingface.run, config(workload={"optimizer": {"learning_rate": 1e38}}, log_every=2)
        )


def test_loss_matches_plain_trainer_script(tmp_path: Path) -> None:
    from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

    plain = {"model": {"dropout": 0.0}, "schedule": {"warmup_steps": 0, "decay_fraction": 0.0}}
    workload = {**plain, "optimizer": {"eps": 1e-8, "weight_decay": 0.01}}
    # whole epochs of full batches
    desired = config(steps=10, log_every=1, batch_size=4, workload=workload)
    ours = Attempt(huggingface.run, desired)
    context = WorkerContext(desired, 0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]
    loader = desired.workload.make_loader(context, None, state=None, step=0)
    rows = [row for batch in loader for row in batch.tensors["tokens"]]
    # Trainer divides by the number of labels, also where nothing predicts them: the first of a row.
    labels = [torch.cat([torch.tensor([-100]), row[1:]]) for row in rows]
    loader.close()

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    settings: dict[str, Any] = {
        "max_steps": 10,
        "per_device_train_batch_size": 4,
        "lr_scheduler_type": "constant",
        "learning_rate": 0.01,
        "weight_decay": 0.01,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    set_seed(desired.seed)
    model = desired.workload.build(None)
    trainer = InOrder(
        model=model,
        train_dataset=[  # type: ignore[arg-type]
            {"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)
        ],
        args=TrainingArguments(output_dir=str(tmp_path), **settings),
    )
    trainer.remove_callback(PrinterCallback)
    # Its own optimizer spares biases and normalisations the weight decay.
    trainer.create_optimizer()
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.01
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [fields["loss"] for kind, fields in ours.reported() if kind == "step"] == pytest.approx(
        theirs, abs=6e-5
    )
    torch.testing.assert_close(
        ours.setup.model.state_dict(), model.state_dict(), rtol=1e-5, atol=1e-5
    )


def test_huggingface_loop_restores_process_and_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads(), os.environ.get("ACCELERATE_TORCH_DEVICE")
    Attempt(huggingface.run, config())
    assert (torch.get_num_threads(), os.environ.get("ACCELERATE_TORCH_DEVICE")) == before
    assert not list(tmp_path.iterdir())
