"""End of a worker, and its measurements before training."""

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders.faults import fails_with, flip, raising, rejects
from builders.loops import StopSignal
from builders.savers import Run, save

from rayrec import recipes
from rayrec.checkpoint import Checkpoint, Retention, folder_of, weights_sha256
from rayrec.checkpoint.state import model_tensors
from rayrec.trained_rows import RowNumbers, TrainedRows
from rayrec.training import step_log, worker
from rayrec.training.launchers.base import AttemptContext
from rayrec.training.progress import Progress
from rayrec.training.step_log import multiply_adds_per_s, multiply_adds_per_s_or_zero
from rayrec.training.worker import finish
from rayrec.workloads.run_config import ScalingConfig

CPU = torch.device("cpu")
LAST, BEST = {"auroc": 7.0}, {"auroc": 4.0}
STOPPED_EARLY = Progress(step=7, rows=70, best=4.0, best_step=4, since_best=3, metrics=LAST, best_metrics=BEST)


class Evaluated:
    """Model whose only weight is its step, with a metric equal to the weight."""

    def __init__(self, folder: Path, *, sets: tuple[str, ...] = ("validation",), patience: int = 3) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.evaluations: list[tuple[str, float]] = []
        config = recipes.criteo_demo("none").replace(early_stopping={"patience": patience})
        prepared = SimpleNamespace(folder=str(folder / "preprocessor"))
        self.attempt = AttemptContext(config, str(folder), prepared, None, 0.0, engine=None, channel=None, storage_token="")  # type: ignore[arg-type]
        with closing(Run(folder)) as run:
            saver = run.saver(retention=Retention(num_to_keep=9))
            for step in (4, 7):
                torch.nn.init.constant_(self.model.weight, step)
                save(saver, step, model_tensors(self.model))
        self.expected = TrainedRows()
        self.stop_signal = StopSignal()
        self.setup: Any = SimpleNamespace(
            model=self.model,
            pipeline=SimpleNamespace(progress=next, reset=lambda: None),
            eval_batches={name: lambda name=name: self.batches(name) for name in sets},
            make_metrics=lambda: SimpleNamespace(update=None, compute=lambda: {"auroc": self.weight()}),
            make_samples=lambda: [{"of": list(self.evaluations[-1:])}],
        )

    def weight(self) -> float:
        return self.model.weight.item()

    def batches(self, name: str) -> Iterator[Any]:
        self.evaluations.append((name, self.weight()))
        return iter(())

    def finish(self, progress: Progress = STOPPED_EARLY, *, evaluated_step: int | None = 7) -> Any:
        def log(kind: str, fields: dict[str, Any]) -> None:
            self.events.append((kind, fields))

        parts: dict[str, Any] = {"expected": self.expected, "log": log, "stop_signal": self.stop_signal}
        return finish(self.attempt, self.setup, progress, evaluated_step=evaluated_step, **parts)


VALIDATION = ("validation",)


@pytest.mark.parametrize(
    ("sets", "patience", "evaluated_step", "chosen", "evaluations"),
    [
        (VALIDATION, 3, 7, 4, [("validation", 4.0)]),  # the best weights
        (("validation", "test"), 3, 7, 4, [("test", 4.0)]),
        (VALIDATION, 0, 7, 7, []),  # the last weights, at most once
        (VALIDATION, 0, None, 7, [("validation", 7.0)]),
    ],
)
def test_finish_evaluates_chosen_weights(
    tmp_path: Path, sets: tuple[str, ...], patience: int, evaluated_step: int | None, chosen: int, evaluations: list[Any]
) -> None:
    run = Evaluated(tmp_path, sets=sets, patience=patience)
    told = run.finish(evaluated_step=evaluated_step)
    assert (told["step"], told["chosen_step"], told["checkpoint"]) == (7, chosen, folder_of(str(tmp_path), chosen))
    assert told["weights_sha256"] == weights_sha256(Checkpoint(told["checkpoint"]))
    assert told["metrics"] == told["validation"] == {"auroc": float(chosen)}
    assert run.evaluations == evaluations
    assert run.events == [("finish", told), ("samples", {"samples": [{"of": evaluations}]})]


def test_damaged_best_weights_raise_input_error(tmp_path: Path) -> None:
    run = Evaluated(tmp_path)
    (file,) = Path(folder_of(str(tmp_path), 4)).glob("data_*.safetensors")
    flip(file, -1)
    rejects(r"best weights of the run\. Train it again", run.finish)


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ([[0, 1, 2, 3]], (0, 0)),
        ([[0, 1], [3]], (1, 0)),
        ([[0, 1, 2, 3], [2]], (0, 1)),
        ([[0, 1, 1, 3]], (1, 1)),
        ([None], (None, None)),  # of a loader that does not number its rows
    ],
)
def test_finish_reports_lost_and_repeated_rows(tmp_path: Path, trained: list[Any], expected: tuple[Any, Any]) -> None:
    run = Evaluated(tmp_path, patience=0)
    run.expected.add_ranges([(0, 4)], epoch=0)
    progress = dataclasses.replace(STOPPED_EARLY, trained=None if trained == [None] else TrainedRows())
    for numbers in trained:
        progress.count(None if numbers is None else RowNumbers(0, np.array(numbers)))
    told = run.finish(progress)
    assert (told["rows_lost"], told["rows_repeated"]) == expected


def test_stop_request_ends_final_test(tmp_path: Path) -> None:
    run = Evaluated(tmp_path, sets=("validation", "test"))
    run.stop_signal = StopSignal(stop_after_scored=0)
    run.setup.eval_batches["test"] = lambda: iter([object()] * 10)
    run.setup.make_metrics = lambda: SimpleNamespace(update=lambda output: None, compute=dict)
    assert run.finish() is None
    assert run.events == []


@pytest.mark.parametrize("evaluated_step", [7, None])
def test_samples_use_evaluation_mode(tmp_path: Path, evaluated_step: int | None) -> None:
    run = Evaluated(tmp_path, patience=0)
    run.model.train()
    run.setup.make_samples = lambda: [{"training": run.model.training}]
    run.finish(evaluated_step=evaluated_step)
    assert run.events[-1] == ("samples", {"samples": [{"training": False}]})


def test_first_save_removes_summary_and_slow_save_is_logged_once(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    log = worker.saver_log(str(tmp_path), lambda kind, fields: events.append((kind, fields)), grace_s=60.0)
    summary = tmp_path / "summary.json"
    summary.write_text("{}")
    log("checkpoint_late", {"step": 5, "cause": "full"})
    assert summary.exists()
    log("checkpoint", {"step": 5, "write_s": 9.0})
    assert not summary.exists()
    for step in (6, 7):
        log("checkpoint", {"step": step, "write_s": 61.0})
    assert [(kind, fields["step"]) for kind, fields in events] == [
        ("checkpoint_late", 5), ("checkpoint", 5), ("checkpoint", 6), ("checkpoint_slow", 6), ("checkpoint", 7)
    ]  # fmt: skip


def test_failed_matrix_product_is_skipped_or_returns_zero(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_log, "_WINDOW_S", 0.001)
    whole = multiply_adds_per_s(CPU, precision="fp32")
    monkeypatch.setattr(torch.nn.functional, "linear", raising(NotImplementedError("no such operation")))
    if torch.backends.mkldnn.is_available():
        assert multiply_adds_per_s(CPU, precision="fp32") > 0
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    fails_with(NotImplementedError, "no such operation", multiply_adds_per_s, CPU, precision="fp32")
    assert whole > 0
    monkeypatch.setattr(step_log, "_of_cuda", raising(torch.OutOfMemoryError("CUDA out of memory")))
    with caplog.at_level(logging.WARNING):
        assert multiply_adds_per_s_or_zero(torch.device("cuda"), precision="bf16") == 0.0
    assert "Cannot measure the peak of cuda (CUDA out of memory)" in caplog.text


@pytest.mark.parametrize(("mine", "other", "expected"), [(5.0, 15.0, 20.0), (5.0, 0.0, None), (0.0, 15.0, None)])
def test_peak_requires_all_workers(monkeypatch: pytest.MonkeyPatch, mine: float, other: float, expected: float | None) -> None:
    def over_workers(*values: float) -> tuple[list[float], list[float]]:
        pairs = list(zip(values, (other, float(other == 0.0)), strict=True))
        return [sum(pair) / 2 for pair in pairs], [max(pair) for pair in pairs]

    monkeypatch.setattr(worker, "over_workers", over_workers)
    assert worker.peak_of_all(mine, world_size=2) == expected


@pytest.mark.parametrize(
    ("settings", "share", "threads"),
    [
        ({}, 8, 8),
        ({}, 0, 1),
        ({"cpus_per_worker": 3.0}, 8, 3),
        ({"cpus_per_worker": 0.5}, 8, 1),
        ({"cpus_per_worker": 16.0}, 8, 8),
        ({"cpus_per_worker": 3.0, "threads_per_worker": 5}, 8, 5),
    ],
)
def test_threads_respect_reserved_cpus(settings: dict[str, Any], share: int, threads: int) -> None:
    assert worker.threads_of_worker(ScalingConfig(**settings), node_cpus=share) == threads


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_follows_configuration(allowed: bool) -> None:
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = not allowed
        worker.allow_tf32(allowed)
        assert [switch.allow_tf32 for switch in switches] == [allowed, allowed]
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value
