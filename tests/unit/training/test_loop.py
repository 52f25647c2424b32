"""Training loop with a prefetching pipeline: evaluation, saves and stops."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import savers
from builders.faults import fails_with, flip, raising, rejects
from builders.loops import StopSignal, fake_setup
from ranks.checkpoint import run_ranks
from ray.train import PreemptionInfo

from rayrec import recipes
from rayrec.checkpoint import Checkpoint, Retention, step_folder, weights_sha256
from rayrec.checkpoint.save_retry import SaveStats
from rayrec.checkpoint.state import model_tensors
from rayrec.models.base import ClickModelConfig
from rayrec.observe.timing import PHASES
from rayrec.optim.config import PlateauConfig
from rayrec.trained_rows import RowNumbers, TrainedRows
from rayrec.training import loop, step_log, worker
from rayrec.training.launchers.base import AttemptContext
from rayrec.training.progress import (
    Counters,
    EarlyStopping,
    Plateau,
    Progress,
    Target,
    Training,
    target_fields,
    with_lowered_rates,
)
from rayrec.training.step_log import (
    StepAccounting,
    multiply_adds_per_s,
    multiply_adds_per_s_or_zero,
)
from rayrec.training.stop_monitor import (
    MORE_WORKERS,
    NODE_PREEMPTED,
    RESUMES,
    GracePeriod,
    Signals,
    StopMonitor,
    last_save_s,
)
from rayrec.training.worker import FinalTest
from rayrec.workloads.run_config import FailureConfig, ScalingConfig
from rayrec.workloads.step_timer import HostTimer, StepTimer


class Pipeline:
    """Pipeline that pulls `ahead` batches before it trains the first, like TorchRec's."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.waiting = list[int]()
        self.trained: list[int] = []
        self.scored = 0
        """Number of evaluation batches, which are negative."""

    def progress(self, batches: Iterator[int]) -> Any:
        while len(self.waiting) < self.ahead and (batch := next(batches, None)) is not None:
            self.waiting.append(batch)
        if not self.waiting:
            raise StopIteration
        batch = self.waiting.pop(0)
        if isinstance(batch, int) and batch < 0:
            self.scored += 1
        else:
            self.trained.append(batch)
        return SimpleNamespace(loss=torch.tensor(float("nan") if batch == 99 else 1.0))

    def reset(self) -> None:
        assert not self.waiting


class Loader:
    """Loader of numbers from `start` as batches, or batches with ten numbered rows. Skips or
    repeats one on request.
    """

    def __init__(
        self, start: int, stop: int, *, numbered: bool = False, skip: int = -1, again: int = -1
    ) -> None:
        self.steps = stop - start
        self.steps_per_epoch = 20
        self.numbered = numbered
        self._next = start
        self._stop = stop
        self._skip = skip
        self._again = again

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        if self._next == self._skip:
            self._next += 1
        if self._next == self._stop:
            raise StopIteration
        number, self._next = self._next, self._next + 1
        if number == self._again:
            self._again = -1
            self._next = number
        return (
            SimpleNamespace(row_numbers=RowNumbers(0, np.arange(10 * number, 10 * number + 10)))
            if self.numbered
            else number
        )

    def rows(self, batches: int) -> int:
        return 10 * batches

    def state(self) -> dict[str, Any]:
        return {"next": self._next}


class Run:
    def __init__(
        self,
        *,
        ahead: int = 3,
        stop: int = 20,
        progress: Progress | None = None,
        evaluation: int = 0,
        recipe: str = "criteo_demo",
        **changes: Any,
    ) -> None:
        """`stop`: last step, in epochs of 20; `evaluation`: batches; `changes`: configuration or
        stop signal fields.
        """
        self.evaluation = evaluation
        self.pipeline = pipeline = Pipeline(ahead)
        self.saves: list[tuple[int, int, float | None, bool, bool]] = []
        self.events: list[tuple[str, int]] = []
        self.fields: list[dict[str, Any]] = []
        self.progress = progress or Progress()
        self.loader = Loader(self.progress.step, stop)
        names = {field.name for field in dataclasses.fields(StopSignal)} & changes.keys()
        signal = {name: changes.pop(name) for name in names}
        self.stop_signal = StopSignal(
            lambda: len(pipeline.trained), lambda: pipeline.scored, **signal
        )
        self.clock: StepTimer = StepTimer()
        self.first_steps: list[tuple[float, float]] = []
        fields = {"evaluate_every": 8, "log_every": 4, "early_stopping": {"patience": 0}, **changes}
        self.config = recipes.ALL[recipe]("none").replace(**fields)

    def run(self, *, pause_at: float | None = None) -> bool:
        metrics = SimpleNamespace(
            update=lambda output: None, compute=lambda: {"auroc": 0.5 + self.progress.step / 100}
        )

        def save(
            progress: Progress, state: dict[str, Any], *, score: Any, needed: bool, complete: bool
        ) -> None:
            # what was pulled was trained
            assert self.loader.numbered or state["next"] == progress.step
            self.saves.append((progress.step, progress.counters.rows, score, needed, complete))

        def log(kind: str, fields: dict[str, Any]) -> None:
            self.events.append((kind, fields["step"]))
            self.fields.append(fields)

        evaluation = {"validation": lambda: iter(range(-self.evaluation, 0))}
        setup = fake_setup(
            self.pipeline, clock=self.clock, make_metrics=lambda: metrics, eval_batches=evaluation
        )
        return loop.run(
            Training(
                setup=setup,
                log=log,
                save=save,
                config=self.config,
                loader=self.loader,
                progress=self.progress,
                pause_at=pause_at,
                stop_signal=self.stop_signal,
                first_step=lambda *times_s: self.first_steps.append(times_s),
            )
        )

    def reported(self, kind: str) -> list[int]:
        return [step for each, step in self.events if each == kind]

    def saved(self) -> list[int]:
        return [save[0] for save in self.saves]

    def evaluated(self) -> list[tuple[int, bool]]:
        """Return the step of each evaluation, and whether it counts for early stopping."""
        return [(event["step"], event["counted"]) for event in self.fields if "set" in event]


def finished(**arguments: Any) -> Run:
    """Return a run after its last step."""
    run = Run(**arguments)
    assert run.run()
    return run


def test_pause_evaluates_and_saves_without_changing_run() -> None:
    run = Run(ahead=3)
    assert not run.run(pause_at=0.25)
    assert run.pipeline.trained == list(range(5))
    assert run.events[-1] == ("evaluate", 5)
    # without a score, since this is no evaluation of the run's own
    assert run.saves == [(5, 50, None, True, True)]
    assert (run.progress.early_stopping.best, run.progress.evaluation_due) == (None, False)
    again = Run(progress=run.progress)
    assert not again.run(pause_at=0.25)  # nothing is left to train
    assert (again.pipeline.trained, again.saves, again.events) == ([], [], [])
    assert finished(progress=run.progress).evaluated() == [(8, True), (16, True), (20, True)]
    assert run.evaluated() == [(5, False)]


def test_pause_at_evaluation_of_run_counts() -> None:
    run = Run(ahead=3)
    assert not run.run(pause_at=0.4)
    assert run.saves == [(8, 80, 0.58, True, True)]
    assert run.progress.early_stopping.best_step == 8
    last = Run(progress=run.progress)
    assert last.run(pause_at=1.0)
    assert last.pipeline.trained == list(range(8, 20))
    assert last.saves == [(16, 160, 0.66, False, False), (20, 200, 0.7, True, True)]
    assert [*run.evaluated(), *last.evaluated()] == [(8, True), (16, True), (20, True)]


@pytest.mark.parametrize(
    ("recipe", "config", "expected"),
    [
        pytest.param("criteo_demo", {}, [5, 10, 15, 20, 25, 30, 35, 40], id="criteo_demo"),
        pytest.param(
            "criteo_demo",
            {"evaluations_per_epoch": 3},
            [7, 14, 21, 28, 35, 40],
            id="criteo_demo-evaluations_per_epoch-3",
        ),
        pytest.param(
            "criteo_demo",
            {"evaluations_per_epoch": 100},
            list(range(1, 41)),
            id="criteo_demo-evaluations_per_epoch-100",
        ),
        pytest.param(
            "criteo_demo",
            {"evaluations_per_epoch": 2 / 3},
            [30, 40],
            id="criteo_demo-evaluations_per_epoch-2-3",
        ),
        pytest.param("criteo_finalnet_x4", {}, [20, 40], id="criteo_finalnet_x4"),
        pytest.param("criteo_finalmlp", {}, [20, 40], id="criteo_finalmlp"),
        pytest.param("criteo_dcnv3", {}, [20, 40], id="criteo_dcnv3"),
        pytest.param(
            "criteo_dcnv3",
            {"evaluate_every": 16},
            [16, 32, 40],
            id="criteo_dcnv3-evaluate_every-16",
        ),
    ],
)
def test_evaluations_per_epoch(recipe: str, config: dict[str, Any], expected: Any) -> None:
    """Recipes with published settings evaluate once per epoch: their patience counts epochs;
    `evaluate_every` overrides.
    """
    assert (
        finished(recipe=recipe, stop=40, **{"evaluate_every": None, **config}).reported("evaluate")
        == expected
    )


@pytest.mark.parametrize(
    ("rows_until", "expected"),
    [
        pytest.param([0, 10, 20, 30, 32], (10 * (1 + 2 + 3) + 2 * 4) / 32, id="short_last_step"),
        pytest.param([0, 10, 20, 30, 40], 2.5, id="equal_steps"),
    ],
)
def test_logged_loss_is_mean_over_rows(
    monkeypatch: pytest.MonkeyPatch, rows_until: list[int], expected: float
) -> None:
    run = Run(stop=4, evaluate_every=4)
    progress_of = run.pipeline.progress

    def progress(batches: Iterator[int]) -> Any:
        return SimpleNamespace(loss=progress_of(batches).loss * len(run.pipeline.trained))

    monkeypatch.setattr(run.pipeline, "progress", progress)
    monkeypatch.setattr(run.loader, "rows", rows_until.__getitem__)
    assert run.run()
    (step,) = (fields for fields in run.fields if "loss" in fields)
    assert step["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ahead", [1, 3])
def test_stop_trains_pulled_batches_and_saves(ahead: int) -> None:
    run = Run(ahead=ahead, stop_at=11)
    assert not run.run()
    stopped = 12 + ahead - 1
    assert run.saves[-1] == (stopped, 10 * stopped, None, True, True)
    assert run.pipeline.trained == list(range(stopped))
    again = finished(ahead=ahead, progress=run.progress)
    assert (again.pipeline.trained, again.saved()) == (list(range(stopped, 20)), [16, 20])


@pytest.mark.parametrize(("stop_at", "step", "evaluated"), [(15, 16, [16, 20]), (20, 20, [20])])
def test_stop_at_due_evaluation_defers_to_next_start(
    stop_at: int, step: int, evaluated: list[int]
) -> None:
    run = Run(ahead=1, stop_at=stop_at)
    assert not run.run()
    assert run.saves[-1] == (step, 10 * step, None, True, True)
    assert run.progress.evaluation_due
    again = finished(progress=run.progress)
    assert again.saves[0][:3] == (step, 10 * step, 0.5 + step / 100)
    assert again.reported("evaluate") == evaluated
    assert not again.progress.evaluation_due


def test_preemption_saves_once_and_early_stopping_best_and_last() -> None:
    run = finished(ahead=3, preempt_at=10)
    assert run.saved() == [8, 14, 16, 20]
    assert run.saves[1] == (14, 140, None, True, True)
    assert run.pipeline.trained == list(range(20))
    run = finished(
        early_stopping={"patience": 1, "min_improvement": 0.2},
        evaluate_every=5,
        checkpoint={"every": 50},
    )
    # Better at every evaluation, though never by enough: the second ends it.
    assert [(save[0], *save[3:]) for save in run.saves] == [(5, True, False), (10, True, True)]
    assert run.reported("early_stop") == [10]
    finished(progress=run.progress, early_stopping={"patience": 1})


def test_target_ends_run_and_survives_resume() -> None:
    run = finished(early_stopping={"patience": 0, "target": 0.65})
    assert (run.reported("evaluate"), run.reported("early_stop"), run.pipeline.trained[-1]) == (
        [8, 16],
        [16],
        15,
    )
    assert run.saves[-1] == (16, 160, 0.66, True, True)
    first, last = (fields for fields in run.fields if "counted" in fields)
    assert [event["best"] for event in (first, last)] == [
        {"step": 8, "auroc": 0.58},
        {"step": 16, "auroc": 0.66},
    ]
    assert run.progress.counters.evaluation_s == first["seconds"] + last["seconds"]
    reached = {
        "target": 0.65,
        "target_metric": "auroc",
        "target_step": 16,
        "target_rows": 160,
        "target_s": run.progress.counters.train_s + run.progress.counters.evaluation_s,
    }
    assert run.fields[-1] == {"step": 16, "best_step": 16, "best_score": 0.66, **reached}
    state = json.loads(json.dumps(run.progress.state()))
    again = finished(
        progress=Progress.from_state(state, rank=0), early_stopping={"patience": 0, "target": 0.65}
    )
    assert (again.events, again.saves) == ([], [])  # nothing is trained or evaluated again
    assert target_fields(again.progress, again.config.workload) == reached
    other = finished(
        progress=Progress.from_state(state, rank=0), early_stopping={"patience": 0, "target": 0.9}
    )
    assert other.pipeline.trained == [16, 17, 18, 19]
    assert (other.reported("early_stop"), other.progress.target.target_step) == ([], None)
    old = {
        name: value
        for name, value in state.items()
        if not name.startswith(("target", "evaluation_s"))
    }
    assert Progress.from_state(old, rank=0).target.target_step is None  # of an earlier version


class CustomScore(ClickModelConfig):
    def score(self, metrics: Mapping[str, float]) -> float:
        return -metrics["spread"]


def test_target_uses_score_metric() -> None:
    for recipe, metrics, target, reached, name in (
        ("criteo_demo", {"auroc": 0.8, "logloss": 0.4}, 0.8, True, "auroc"),
        # its score is the negative logloss
        ("criteo_demo", {"auroc": math.nan, "logloss": 0.4}, -1.0, False, "auroc"),
        ("criteo_demo", {"mse": 0.5, "mae": 0.6}, 0.5, True, "mse"),
        ("criteo_demo", {"mse": 0.5, "mae": 0.6}, 0.4, False, "mse"),
        # its score is the negative logloss as well
        ("clicks", {"auroc": 0.8, "logloss": 0.4}, 0.8, True, "auroc"),
        ("clicks", {"auroc": 0.7, "logloss": 0.4}, 0.8, False, "auroc"),
        ("gpt2_tiny", {"loss": 3.2, "perplexity": 24.5}, 3.3, True, "loss"),
        ("gpt2_tiny", {"loss": 3.2, "perplexity": 24.5}, 3.1, False, "loss"),
        ("mnist_resnet18", {"loss": 0.1, "accuracy": 0.97}, 0.98, False, "accuracy"),
        ("two_tower", {"ndcg_at_10": 0.2, "recall_at_10": 0.4}, 0.2, True, "ndcg_at_10"),
        ("own", {"auroc": 0.8, "spread": 0.5}, -0.6, True, "score"),
    ):
        config = recipes.criteo_demo("none") if recipe == "own" else recipes.ALL[recipe]("none")
        workload = (
            dataclasses.replace(config.workload, model=CustomScore())
            if recipe == "own"
            else config.workload
        )
        progress = Progress(Counters(step=8), target=Target(target), metrics=metrics)
        _, value, sign = workload.target_value(metrics)
        progress.target.update(value, sign=sign, counters=progress.counters)
        assert progress.target.target_step == (8 if reached else None)
        assert target_fields(progress, workload)["target_metric"] == name


def test_rates_fall_without_improvement_and_scale_schedule() -> None:
    plateau = PlateauConfig(patience=2, factor=0.1, min_improvement=0.01)
    progress = Progress()
    lowered = []
    for step, score in enumerate([0.5, 0.505, 0.52, 0.53, 0.51, 0.525, 0.52, 0.6]):
        if progress.plateau.update(score, plateau):
            lowered.append((step, progress.plateau.learning_rate_scale))
        progress = Progress.from_state(progress.state(), rank=0)  # as a resumed run
    # 0.53 is better than 0.52 by less than 0.01, and so on; a fall begins the count again.
    assert lowered == [(4, pytest.approx(0.1)), (6, pytest.approx(0.01))]
    assert (progress.plateau.plateau_reference, progress.plateau.plateau_evaluations) == (0.6, 0)
    assert not Plateau(plateau_reference=1.0).update(0.0, PlateauConfig())
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}, {"lr": 0.0}, {"lr": 0.0}])

    def begin_step(step: int, total: int) -> None:
        for group, rate in zip(optimizer.param_groups, (0.1 / (step + 1), 1e-5, 1e-7), strict=True):
            group["lr"] = rate

    progress = Progress()
    begin = with_lowered_rates(
        SimpleNamespace(begin_step=begin_step, optimizer=optimizer),
        progress,
        PlateauConfig(patience=1),
    )
    begin(0, 9)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1e-5, 1e-7]
    progress.plateau.learning_rate_scale = 0.01
    begin(1, 9)
    # The second stops at the floor, and the third was below it.
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.0005, 1e-6, 1e-7])


def test_plateau_is_logged_and_saved() -> None:
    run = finished(plateau={"patience": 1, "min_improvement": 0.2, "factor": 0.5}, evaluate_every=5)
    assert (run.reported("plateau"), run.progress.state()["learning_rate_scale"]) == (
        [10, 15, 20],
        0.125,
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_longest_worker_times_are_logged(monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    def over_workers(*values: float) -> tuple[list[float], list[float]]:
        """Simulate another worker with twice the values."""
        return [1.5 * value for value in values], [2.0 * value for value in values]

    if num_workers > 1:
        monkeypatch.setattr(step_log, "over_workers", over_workers)
        monkeypatch.setattr(step_log, "num_workers", lambda: num_workers)
    run = Run()
    run.clock = HostTimer()
    assert run.run()
    steps = [fields for fields in run.fields if "times_s" in fields]
    assert len(steps) == 5
    for fields in steps:
        assert fields["learning_rate"] == 0.5  # the highest
        assert fields["memory_bytes"] > 50_000_000 * num_workers  # of the worker that has most
        if num_workers == 1:
            assert "times_max_s" not in fields
        else:
            assert list(fields["times_max_s"]) == list(fields["times_s"]) == list(PHASES)
            expected = {
                name: pytest.approx(seconds * 2 / 1.5)
                for name, seconds in fields["times_s"].items()
            }
            assert fields["times_max_s"] == expected
            assert fields["times_max_s"]["other"] > 0


def test_non_finite_loss_raises_input_error() -> None:
    run = Run()
    run.pipeline.waiting = [99]
    rejects(r"the loss is nan at step 4\. Lower the learning rates", run.run)


@pytest.fixture
def slow_run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Return a factory of runs whose clock, `now_s`, advances only by `step_s` per step."""

    def make(step_s: float, **arguments: Any) -> Run:
        run = Run(**{"log_every": 50, "evaluate_every": 50, **arguments})
        clock = SimpleNamespace(now_s=0.0)
        progress = run.pipeline.progress
        clock.monotonic = clock.perf_counter = lambda: clock.now_s

        def slow(batches: Iterator[int]) -> Any:
            clock.now_s += step_s
            return progress(batches)

        monkeypatch.setattr(run.pipeline, "progress", slow)
        for module in (loop, step_log):
            monkeypatch.setattr(module, "time", clock)
        return run

    return make


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize(("step_s", "seen_at"), [(0.001, 16), (1.0, 13), (10.0, 10)])
def test_stop_request_is_seen_between_logs(
    slow_run: Callable[..., Run], ahead: int, step_s: float, seen_at: int
) -> None:
    run = slow_run(step_s, ahead=ahead, stop_at=10)
    assert not run.run()
    stopped = seen_at + ahead - 1
    assert run.saves == [(stopped, 10 * stopped, None, True, True)]
    assert run.pipeline.trained == list(range(stopped))
    # what was trained is logged, so that it is accounted for
    assert run.reported("step") == sorted({seen_at, stopped})
    assert run.progress.counters.train_s == pytest.approx(stopped * step_s)


@pytest.mark.parametrize(("notice", "stopped"), [({}, 16), ({"preempt_at": 4}, 12)])
def test_preemption_notice_shortens_poll_interval(
    slow_run: Callable[..., Run], notice: dict[str, int], stopped: int
) -> None:
    run = slow_run(0.5, ahead=1, evaluate_every=20, stop_at=12, **notice)
    assert not run.run()
    assert run.saved()[-1] == stopped


@pytest.mark.parametrize("start", [0, 7])
def test_first_step_is_timed_separately(
    slow_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    run = slow_run(2.0, progress=Progress(Counters(start, 10 * start)))
    pull = run.loader.__next__

    def slow_pull(loader: Loader) -> int:
        loop.time.now_s += 0.25  # type: ignore[attr-defined]
        return pull()

    monkeypatch.setattr(Loader, "__next__", slow_pull)
    assert run.run()
    assert run.first_steps == [(0.75, 2.75)]  # the pipeline pulls three batches for it


def test_polls_change_neither_logs_nor_saves(
    slow_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = slow_run(10.0, ahead=1, log_every=7)
    assert looked.run()
    blind = slow_run(10.0, ahead=1, log_every=7)
    monkeypatch.setattr(StepAccounting, "_poll", lambda self: False)
    assert blind.run()
    assert (looked.events, looked.saves, looked.progress) == (
        blind.events,
        blind.saves,
        blind.progress,
    )
    assert looked.reported("step") == [7, 14, 20]


def test_preemption_notice_at_segment_end_saves() -> None:
    for config, expected in [
        # Where an evaluation is due it may take long: saved before, and with its score after.
        ({"evaluate_every": 4}, [(12, None, True), (12, 0.62, False)]),
        ({"checkpoint": {"every": 4}, "evaluate_every": 20}, [(12, None, True)]),
    ]:
        run = finished(ahead=1, preempt_at=12, **config)
        assert [
            (step, score, complete) for step, _, score, _, complete in run.saves if step == 12
        ] == expected
        assert [step for step in run.saved() if step != 12] == [4, 8, 16, 20]
        assert run.pipeline.trained == list(range(20))
        assert not run.progress.evaluation_due


@pytest.mark.parametrize("ahead", [1, 3])
def test_stop_ends_evaluation_and_next_attempt_repeats(ahead: int) -> None:
    run = Run(ahead=ahead, evaluation=100, stop_after_scored=5)
    assert not run.run()
    # polls come after 1, 2, 4, 8 batches; what was pulled is scored
    assert run.pipeline.scored == 8 + ahead - 1
    assert run.saves == [(8, 80, None, True, True)]
    assert run.progress.evaluation_due
    assert run.reported("evaluate") == []
    again = finished(ahead=ahead, evaluation=100, progress=run.progress)
    assert (again.pipeline.scored, again.saves[0][:3]) == (300, (8, 80, 0.58))
    assert again.pipeline.trained == list(range(8, 20))


def test_workers_end_evaluation_together(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(ahead=1, evaluation=100)

    def over_workers(*values: float) -> tuple[list[float], list[float]]:
        asked = len(values) == 3 and run.pipeline.scored >= 3  # by another worker
        return list(values), [values[0], float(asked), *values[2:]] if len(values) == 3 else list(
            values
        )

    monkeypatch.setattr(loop, "over_workers", over_workers)
    assert not run.run()
    assert (run.pipeline.scored, run.saves) == (4, [(8, 80, None, True, True)])


EVALUATING: dict[str, Any] = {"evaluation": 10, "ahead": 1, "evaluate_every": 8}


# At the second batch of 10 s, a quarter of grace_s is over. The score is not lost to a save in
# progress.
@pytest.mark.parametrize(
    ("batch_s", "saves"),
    [(10, [(None, True, False), (0.58, True, False)]), (1, [(0.58, False, False)])],
)
def test_long_evaluation_saves_step_before_end(
    slow_run: Callable[..., Run], batch_s: float, saves: list[Any]
) -> None:
    run = slow_run(batch_s, **EVALUATING)
    assert run.run()
    assert [save[2:] for save in run.saves if save[0] == 8] == saves


def test_saved_step_is_not_saved_again_during_evaluation(slow_run: Callable[..., Run]) -> None:
    run = slow_run(
        10.0,
        progress=Progress(Counters(8, 80), evaluation_due=True),
        stop_after_scored=12,
        **EVALUATING,
    )
    assert not run.run()
    assert run.saved() == [8, 16]
    assert run.saves[1] == (16, 160, None, True, True)


def test_preemption_notice_during_evaluation_saves() -> None:
    run = finished(ahead=3, evaluation=100, preempt_after_scored=3)
    assert [save[:3] for save in run.saves] == [
        (8, 80, None),
        (8, 80, 0.58),
        (16, 160, 0.66),
        (20, 200, 0.7),
    ]


def tally(rows: int) -> TrainedRows:
    held = TrainedRows()
    held.add_ranges([(0, rows)], epoch=0)
    return held


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize(
    ("fault", "rows", "off"),
    [({}, 200, (0, 0)), ({"skip": 7}, 190, (10, 0)), ({"again": 7}, 200, (0, 10))],
)
def test_rows_count_when_trained(
    ahead: int, fault: dict[str, int], rows: int, off: tuple[int, int]
) -> None:
    run = Run(ahead=ahead, checkpoint={"every": 5})
    batches = 19 if "again" in fault else 20
    run.loader = Loader(0, batches, numbered=True, **fault)
    run.loader.steps = rows // 10
    assert run.run()
    assert (
        run.progress.counters.rows,
        [fields["rows"] for fields in run.fields if "rows" in fields][-1],
    ) == (rows, rows)
    assert run.progress.trained.lost_and_repeated(tally(10 * batches)) == off


def test_trained_rows_span_attempts_and_may_be_missing() -> None:
    run = Run(ahead=3, stop_at=11)
    run.loader = Loader(0, 20, numbered=True)
    assert not run.run()
    state = json.loads(json.dumps(run.progress.state()))
    first, second = (Progress.from_state(state, rank=rank) for rank in (0, 1))
    assert (first, second.trained) == (run.progress, TrainedRows())
    again = Run(ahead=3, progress=first)
    again.loader = Loader(first.step, 20, numbered=True)
    assert again.run()
    assert again.progress.trained == tally(200)
    state = Run().progress.state()
    del state["trained"]
    assert Progress.from_state(state, rank=0).trained is None


STORED: dict[str, Any] = {
    "step": 8,
    "rows": 80,
    "train_s": 3.0,
    "blocked_s": 1.0,
    "evaluation_s": 2.0,
    "best": 0.6,
    "best_step": 4,
    "since_best": 1,
    "last_improvement": 0.6,
    "learning_rate_scale": 0.1,
    "plateau_reference": 0.5,
    "plateau_evaluations": 1,
    "target": 0.6,
    "target_step": 4,
    "target_rows": 40,
    "target_s": 2.5,
    "metrics": {"auroc": 0.55},
    "best_metrics": {"auroc": 0.6},
    "evaluation_due": True,
    "trained": None,
}
"""Progress in the checkpoint of an earlier version."""


def test_progress_keeps_fields_of_earlier_checkpoints() -> None:
    progress = Progress.from_state(STORED, rank=0)
    assert progress.counters == Counters(8, 80, 3.0, 1.0, 2.0)
    assert progress.early_stopping == EarlyStopping(0.6, 4, {"auroc": 0.6}, 1, 0.6)
    assert progress.plateau == Plateau(0.1, 0.5, 1)
    assert progress.target == Target(0.6, 4, 40, 2.5)
    assert progress.state() == STORED


# -- End of a worker, and its measurements before training
CPU = torch.device("cpu")
LAST = {"auroc": 7.0}
BEST = {"auroc": 4.0}
STOPPED_EARLY = Progress(
    Counters(step=7, rows=70),
    EarlyStopping(best=4.0, best_step=4, best_metrics=BEST, since_best=3),
    metrics=LAST,
)


class Evaluated:
    """Model whose only weight is its step, with a metric equal to the weight."""

    def __init__(
        self, folder: Path, *, sets: tuple[str, ...] = ("validation",), patience: int = 3
    ) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.evaluations: list[tuple[str, float]] = []
        config = recipes.criteo_demo("none").replace(early_stopping={"patience": patience})
        prepared = SimpleNamespace(folder=str(folder / "preprocessor"))
        self.attempt = AttemptContext(
            config,
            str(folder),
            prepared,
            None,  # type: ignore[arg-type]
            0.0,
            engine=None,  # type: ignore[arg-type]
            channel=None,  # type: ignore[arg-type]
            storage_token="",
        )
        with closing(savers.Run(folder)) as run:
            saver = run.saver(retention=Retention(num_to_keep=9))
            for step in (4, 7):
                torch.nn.init.constant_(self.model.weight, step)
                savers.save(saver, step, model_tensors(self.model))
        self.expected = TrainedRows()
        self.stop_signal = StopSignal()
        self.setup: Any = SimpleNamespace(
            model=self.model,
            pipeline=SimpleNamespace(progress=next, reset=lambda: None),
            eval_batches={name: lambda name=name: self.batches(name) for name in sets},
            make_metrics=lambda: SimpleNamespace(
                update=None, compute=lambda: {"auroc": self.weight()}
            ),
            make_samples=lambda: [
                {"of": list(self.evaluations[-1:]), "training": self.model.training}
            ],
        )

    def weight(self) -> float:
        return self.model.weight.item()

    def batches(self, name: str) -> Iterator[Any]:
        self.evaluations.append((name, self.weight()))
        return iter(())

    def finish(self, progress: Progress = STOPPED_EARLY, *, evaluated_step: int | None = 7) -> Any:
        training = Training(
            progress=progress,
            log=lambda kind, fields: self.events.append((kind, fields)),
            config=self.attempt.config,
            setup=self.setup,
            loader=None,
            save=None,
            stop_signal=self.stop_signal,
        )
        return FinalTest(
            attempt=self.attempt,
            training=training,
            evaluated_step=evaluated_step,
            expected=self.expected,
        ).run()


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
    tmp_path: Path,
    sets: tuple[str, ...],
    patience: int,
    evaluated_step: int | None,
    chosen: int,
    evaluations: list[Any],
) -> None:
    run = Evaluated(tmp_path, sets=sets, patience=patience)
    run.model.train()
    reported = run.finish(evaluated_step=evaluated_step)
    assert (reported["step"], reported["chosen_step"], reported["checkpoint"]) == (
        7,
        chosen,
        step_folder(str(tmp_path), chosen),
    )
    assert reported["weights_sha256"] == weights_sha256(Checkpoint(reported["checkpoint"]))
    assert reported["metrics"] == reported["validation"] == {"auroc": float(chosen)}
    assert reported["metrics_set"] == sets[-1]
    assert run.evaluations == evaluations
    assert run.events == [
        ("finish", reported),
        ("samples", {"samples": [{"of": evaluations, "training": False}]}),
    ]


def test_finish_evaluates_all_rows_after_short_evaluations(tmp_path: Path) -> None:
    run = Evaluated(tmp_path, sets=("validation", "test"), patience=0)
    object.__setattr__(run.attempt, "config", run.attempt.config.replace(eval_rows=5))
    last = dataclasses.replace(STOPPED_EARLY, metrics={"auroc": 0.1}, target=Target(0.5))
    result = run.finish(last)
    assert run.evaluations == [("validation", 7.0), ("test", 7.0)]  # without a limit
    assert (result["validation"], result["metrics"], result["target_step"]) == (LAST, LAST, None)
    (kind, event), *_ = run.events
    assert (kind, event["step"], event["counted"], event["auroc"]) == ("evaluate", 7, False, 7.0)


def test_damaged_best_weights_raise_input_error(tmp_path: Path) -> None:
    run = Evaluated(tmp_path)
    (file,) = Path(step_folder(str(tmp_path), 4)).glob("data_*.safetensors")
    flip(file, -1)
    rejects(r"best weights of the run\. Train it again", run.finish)


@pytest.mark.parametrize(
    ("trained", "expected"),
    # None: the loader numbers no rows
    [([[0, 1], [3]], (1, 0)), ([[0, 1, 2, 3], [2]], (0, 1)), ([None], (None, None))],
)
def test_finish_reports_lost_and_repeated_rows(
    tmp_path: Path, trained: list[Any], expected: tuple[Any, Any]
) -> None:
    run = Evaluated(tmp_path, patience=0)
    run.expected.add_ranges([(0, 4)], epoch=0)
    progress = dataclasses.replace(
        STOPPED_EARLY, trained=None if trained == [None] else TrainedRows()
    )
    for numbers in trained:
        progress.count(None if numbers is None else RowNumbers(0, np.array(numbers)))
    reported = run.finish(progress)
    assert (reported["rows_lost"], reported["rows_repeated"]) == expected


def test_stop_request_ends_final_test(tmp_path: Path) -> None:
    run = Evaluated(tmp_path, sets=("validation", "test"))
    run.stop_signal = StopSignal(stop_after_scored=0)
    run.setup.eval_batches["test"] = lambda: iter([object()] * 10)
    run.setup.make_metrics = lambda: SimpleNamespace(update=lambda output: None, compute=dict)
    assert run.finish() is None
    assert run.events == []


def test_first_save_removes_summary_and_slow_save_is_logged_once(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    log = worker.SaverLog(
        str(tmp_path), lambda kind, fields: events.append((kind, fields)), grace_s=60.0
    )
    summary = tmp_path / "summary.json"
    summary.write_text("{}")
    log("checkpoint_late", {"step": 5, "cause": "full"})
    assert summary.exists()
    log("checkpoint", {"step": 5, "write_s": 9.0})
    assert not summary.exists()
    for step in (6, 7):
        log("checkpoint", {"step": step, "write_s": 61.0})
    assert [(kind, fields["step"]) for kind, fields in events] == [
        ("checkpoint_late", 5),
        ("checkpoint", 5),
        ("checkpoint", 6),
        ("checkpoint_slow", 6),
        ("checkpoint", 7),
    ]


def test_failed_matrix_product_is_skipped_or_returns_zero(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_log, "_WINDOW_S", 0.001)
    whole = multiply_adds_per_s(CPU, precision="fp32")
    monkeypatch.setattr(
        torch.nn.functional, "linear", raising(NotImplementedError("no such operation"))
    )
    if torch.backends.mkldnn.is_available():
        assert multiply_adds_per_s(CPU, precision="fp32") > 0
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    fails_with(NotImplementedError, "no such operation", multiply_adds_per_s, CPU, precision="fp32")
    assert whole > 0
    monkeypatch.setattr(
        step_log, "_measure_cuda", raising(torch.OutOfMemoryError("CUDA out of memory"))
    )
    with caplog.at_level(logging.WARNING):
        assert multiply_adds_per_s_or_zero(torch.device("cuda"), precision="bf16") == 0.0
    assert "Cannot measure the peak of cuda (CUDA out of memory)" in caplog.text


def peaks(folder: str, rank: int) -> None:
    assert worker.sum_peaks((5.0, 15.0)[rank], world_size=2) == 20.0
    for unknown in (0, 1):
        assert worker.sum_peaks(5.0 * (rank != unknown), world_size=2) is None


def test_peak_requires_all_workers(tmp_path: Path) -> None:
    run_ranks(peaks, 2, str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "share", "threads"),
    [
        pytest.param({}, 8, 8, id="8"),
        pytest.param({}, 0, 1, id="0"),
        pytest.param({"cpus_per_worker": 3.0}, 8, 3, id="cpus_per_worker-3.0"),
        pytest.param({"cpus_per_worker": 0.5}, 8, 1, id="cpus_per_worker-0.5"),
        pytest.param({"cpus_per_worker": 16.0}, 8, 8, id="cpus_per_worker-16.0"),
        pytest.param(
            {"cpus_per_worker": 3.0, "threads_per_worker": 5}, 8, 5, id="cpus_per_worker-3.0-8"
        ),
    ],
)
def test_threads_respect_reserved_cpus(settings: dict[str, Any], share: int, threads: int) -> None:
    assert worker.worker_threads(ScalingConfig(**settings), node_cpus=share) == threads


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_follows_configuration(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    switches = [SimpleNamespace(allow_tf32=not allowed) for _ in range(2)]
    monkeypatch.setattr(torch.backends.cuda, "matmul", switches[0])
    monkeypatch.setattr(torch.backends, "cudnn", switches[1])
    worker.allow_tf32(allowed)
    assert [switch.allow_tf32 for switch in switches] == [allowed, allowed]


# -- Grace periods
@pytest.mark.parametrize(
    ("grace_s", "written", "over_at"),
    [
        (60.0, {}, 61),  # nothing was written
        (60.0, {0: 5}, 61),  # before the stop
        (60.0, {0: 5, 50: 6}, 111),
        (60.0, {10: 1, 75: 2}, 71),  # a stall longer than grace_s
        # progress without an end
        (60.0, {10 + 30 * number: number for number in range(1, 100)}, 301),
        (0.0, {1: 1}, 1),
    ],
)
def test_grace_period_extends_while_save_progresses(
    grace_s: float, written: dict[int, int], over_at: int
) -> None:
    grace = GracePeriod(FailureConfig(grace_s=grace_s, max_grace_s=5 * grace_s), now_s=1000.0)
    so_far = 0
    for second in range(1000):
        so_far = written.get(second, so_far)
        if grace.expired(1000.0 + second, saved_bytes=so_far):
            assert second == over_at
            return
    raise AssertionError("it was waited for without an end")


@pytest.mark.parametrize("write_s", [0.0, 0.1, 3.0, 40.0])
@pytest.mark.parametrize("step_s", [0.001, 0.2, 5.0, 30.0])
def test_last_save_ends_shortly_before_preemption(write_s: float, step_s: float) -> None:
    deadline_s = 120.0
    between_s = max(step_s, 1.0)
    begin_s = last_save_s(deadline_s, write_s=write_s, between_s=between_s)
    saved_s = 0.0
    while saved_s < begin_s:  # the first look behind the moment, after which the step is ended
        saved_s += between_s
    assert saved_s + step_s + write_s <= deadline_s
    # what is not used
    assert deadline_s - (saved_s + write_s) <= 0.5 * write_s + 2 * between_s + 2.0


@pytest.mark.parametrize(
    ("deadline_ms", "save_s", "ended_at"),
    [
        (5_100_000, 0, 81),  # 100 - (1.5 * 10 + 2 * 1 + 2) = 81
        (5_100_000, 30, 81),  # the save at the notice is no step
        (5_100_000, 70, 91),  # the first look after that save
        (5_030_000, 0, 21),  # too near for another save than the one at the notice
        (None, 0, None),  # nobody knows when the node goes
    ],
)
def test_preemption_notice_saves_and_ends_before_deadline(
    monkeypatch: pytest.MonkeyPatch, deadline_ms: int | None, save_s: int, ended_at: int | None
) -> None:
    now: dict[str, Any] = {"s": 5000.0, "info": None}
    monkeypatch.setattr(time, "time", lambda: now["s"])
    monkeypatch.setattr(time, "monotonic", lambda: now["s"])
    saves = SaveStats(write_s=10.0)
    watch, other = (
        StopMonitor(None, rank=rank, saves=saves, preemption=lambda: now["info"]) for rank in (0, 1)
    )
    saves = []
    seconds = iter(range(200))
    for second in seconds:
        now["s"] = 5000.0 + second
        if second == 20:
            now["info"] = PreemptionInfo(
                deadline_ms=deadline_ms, preempted_node_to_ranks={"a": [1]}
            )
        asked, look = watch.poll()
        assert other.poll() == (False, False)  # only rank 0 looks at the clock
        if asked:
            break
        cut = look and watch.preempted()
        assert not look or other.preempted() == cut
        if cut:
            saves.append(second)
            deque(islice(seconds, save_s), maxlen=0)  # the save takes so long
    assert (saves, second if asked else None) == ([20], ended_at)
    assert watch.cause == (None if ended_at is None else NODE_PREEMPTED)
    assert watch.urgent() == (ended_at is not None)  # an evaluation is not waited for


def test_preemption_overrides_scale_up_which_waits() -> None:
    for cause, expected in ((MORE_WORKERS, NODE_PREEMPTED), ("SIGTERM", "SIGTERM")):
        info = PreemptionInfo(deadline_ms=1, preempted_node_to_ranks={"a": [1]})
        watch = StopMonitor(None, rank=0, preemption=lambda info=info: info)  # type: ignore[misc]
        assert watch.preempted()
        watch.cause = cause
        assert watch.poll()[0]
        assert watch.cause == expected
    assert NODE_PREEMPTED in RESUMES  # the driver starts another attempt
    watch = StopMonitor(None, rank=1)
    for cause, expected in (
        (None, (False, False)),
        (MORE_WORKERS, (True, False)),
        ("SIGTERM", (True, True)),
    ):
        watch.cause = cause
        assert (watch.poll()[0], watch.urgent()) == expected


# -- SIGTERM and Ctrl-C: at once, or noted while workers save
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_signals_raise_or_are_noted(number: signal.Signals, error: type[BaseException]) -> None:
    before = signal.getsignal(number)
    with Signals(), pytest.raises(error) as caught:
        signal.raise_signal(number)
    assert getattr(caught.value, "code", None) == (143 if number is signal.SIGTERM else None)
    with Signals() as signals:
        with signals.deferred():
            signal.raise_signal(number)
            assert signals.cause == number.name
            fails_with(error, "", signal.raise_signal, number)  # the second
        fails_with(error, "", signals.throw)
    assert signal.getsignal(number) is before
    with ThreadPoolExecutor(1) as pool:  # another thread cannot handle signals
        signals = pool.submit(Signals().__enter__).result()
        assert signal.getsignal(number) is before
        pool.submit(signals.__exit__, None, None, None).result()
