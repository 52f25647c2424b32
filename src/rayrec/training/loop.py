"""Training loop. Runs in segments, between which no batch is in flight, so that all pulled batches
are trained.
"""

import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch

from rayrec.collectives import over_workers
from rayrec.training.progress import Cut, StopSignal, Training, target_fields
from rayrec.training.segments import (
    End,
    Evaluate,
    Outcome,
    Save,
    Schedule,
    SegmentPlanner,
    Train,
    evaluation_interval,
    last_step,
)
from rayrec.training.step_log import Batches, StepAccounting
from rayrec.workloads.base import WorkerSetup
from rayrec.workloads.step_timer import StepTimer

_EVALUATION_POLL_S = 2.0
"""Seconds between two polls for a stop during an evaluation, rounded to full batches."""
_EVALUATION_GRACE_FRACTION = 0.25
"""Share of `failure.grace_s` after which a running evaluation saves its step."""


def run(training: Training) -> bool:
    """Train until the loader ends, the step limit, or early stopping. Returns False if it saved and
    ended before, after a stop request or at the share `pause_at` of its steps. Raises InputError if
    the loss is not finite.
    """
    course = iterate_segments(training)
    account = StepAccounting(training)
    cut: Cut | None = None
    # `course` plans, and this loop trains: a generator keeps the plan's place between two segments.
    while True:
        try:
            stop = next(course) if cut is None else course.send(cut)
        except StopIteration as end:
            return end.value
        cut = _train(training, account, stop)


def _train(training: Training, account: StepAccounting, stop: int) -> Cut:
    """Train up to step `stop`, or less if a save cannot wait."""
    setup = training.setup
    loader = training.loader
    progress = training.progress
    first = progress.step
    batches = Batches(islice(loader, stop - first), setup.clock)
    account.begin()
    while progress.step < stop:
        setup.begin_step(progress.step, account.total)
        if account.count(setup.pipeline.progress(batches), batches, stop=stop):
            batches.end()
            stop = first + batches.num_pulled
    drain(setup.pipeline, batches)
    return account.cut


def iterate_segments(training: Training) -> Generator[int, Cut, bool]:
    """Evaluate, save and stop early between the segments of any loop, as a `SegmentPlanner`
    decides. Yields the step to train up to; a segment may end earlier if a save cannot wait.
    Receives the reason for that. Returns the result of `run`.
    """
    setup = training.setup
    progress = training.progress
    progress.target.set(training.config.early_stopping.target)
    planner = SegmentPlanner(_schedule(training), progress)
    setup.model.train()
    action = planner.first
    while not isinstance(action, End):
        outcome = Outcome()
        if isinstance(action, Train):
            cut = yield action.stop
            setup.clock.stop()
            outcome = Outcome(cut=cut)
        elif isinstance(action, Save):
            _save(training, action)
        else:
            outcome = _evaluate_step(training, action)
            setup.model.train()
        action = planner.next(outcome)
    if action.stopped_early:
        _log_early_stop(training)
    return action.finished


def _schedule(training: Training) -> Schedule:
    config = training.config
    total = training.progress.step + training.loader.steps
    evaluate_every = config.evaluate_every or evaluation_interval(
        training.loader.steps_per_epoch, config.evaluations_per_epoch
    )
    return Schedule(
        total=total,
        end=last_step(total, training.pause_at),
        evaluate_every=evaluate_every,
        save_every=config.checkpoint.every,
        patience=config.early_stopping.patience,
    )


def _save(training: Training, save: Save) -> None:
    training.save(
        training.progress,
        training.loader.state(),
        score=save.score,
        needed=save.needed,
        complete=save.complete,
    )


def _log_early_stop(training: Training) -> None:
    progress = training.progress
    best = progress.early_stopping
    best_fields = {"best_step": best.best_step, "best_score": best.best}
    reached = target_fields(progress, training.config.workload)
    training.log("early_stop", {"step": progress.step, **best_fields, **reached})


def drain(pipeline: Any, batches: Iterator[Any]) -> None:
    """Run the pipeline to its end, so that it has no batch in flight. The iterator must be
    exhausted.
    """
    try:
        pipeline.progress(batches)
    except StopIteration:
        pipeline.reset()
        return
    raise AssertionError("the pipeline contained a batch that was not counted in a step")


class EvaluationWatch:
    """Polls between the batches of one evaluation. Ends it after a stop request, and saves its step
    if it takes long or a node of the run is about to be preempted. Decisions use numbers shared by
    all workers, so that all decide alike at the same batch.
    """

    def __init__(
        self, stop_signal: StopSignal, *, save: Callable[[], None] | None, save_after_s: float
    ) -> None:
        """Start the watch. `save`: collective save of the evaluated step after `save_after_s`
        seconds, or None.
        """
        self._stop_signal = stop_signal
        self._save = save
        self._save_after_s = save_after_s
        self._start_s = time.perf_counter()
        self._batches = 0
        self._poll_at = 1
        self.saved = False

    def stopped(self) -> bool:
        """Return whether to end, after each batch. Collective if a poll is due: after 1, 2, 4, ...,
        then every 2 s.
        """
        self._batches += 1
        if self._batches < self._poll_at:
            return False
        _, preemption_poll = self._stop_signal.poll()
        # Workers reach this after the same batch, because the poll's interval comes from shared
        # numbers too.
        (elapsed_s, *_), (_, stop_requested, poll) = over_workers(
            time.perf_counter() - self._start_s, self._stop_signal.urgent(), preemption_poll
        )
        self._poll_at += max(
            1, min(int(_EVALUATION_POLL_S * self._batches / max(elapsed_s, 1e-6)), self._batches)
        )
        preempted = bool(poll) and self._stop_signal.preempted()
        if (
            self._save is not None
            and not stop_requested
            and (preempted or elapsed_s >= self._save_after_s)
        ):
            self._save()
            self._save = None
            self.saved = True
        return bool(stop_requested)


@torch.no_grad()
def evaluate(
    setup: WorkerSetup,
    name: str,
    watch: EvaluationWatch | None = None,
    *,
    max_rows: int | None = None,
) -> dict[str, float] | None:
    """Score each row of an evaluation set once, or `max_rows`; return the metrics, or None if
    `watch` ended it; collective.
    """
    setup.model.eval()
    batches_of = setup.eval_batches[name]
    metrics = setup.make_metrics()
    source = batches_of() if max_rows is None else batches_of(max_rows)
    batches = Batches(source, StepTimer())
    stopped = False
    try:
        # All workers have equal numbers of batches, so that they leave this loop, and enter the
        # metrics' collectives, together.
        while True:
            try:
                metrics.update(setup.pipeline.progress(batches))
            except StopIteration:
                setup.pipeline.reset()
                return None if stopped else metrics.compute()
            if not stopped and watch is not None and watch.stopped():
                stopped = True
                batches.end()  # only the prefetched batches are still scored
    finally:
        close = getattr(source, "close", None)
        if close is not None:  # ends data tasks of an interrupted evaluation
            close()


def _evaluate_step(training: Training, action: Evaluate) -> Outcome:
    """Evaluate the current step, and log and record the result: if regular, also for early
    stopping, target and `plateau`.
    """
    config = training.config
    progress = training.progress
    early_save = action.early_save
    watch = EvaluationWatch(
        training.stop_signal,
        save=None if early_save is None else partial(_save, training, early_save),
        save_after_s=_EVALUATION_GRACE_FRACTION * config.failure.grace_s,
    )
    start_s = time.perf_counter()
    metrics = evaluate(training.setup, "validation", watch, max_rows=config.eval_rows)
    if metrics is None:
        return Outcome(interrupted=True, saved=watch.saved)
    _, (seconds,) = over_workers(time.perf_counter() - start_s)
    progress.metrics = metrics
    progress.counters.evaluation_s += seconds
    score = None
    lowered = False
    early_stopping = progress.early_stopping
    if action.is_regular:
        score = config.workload.score(metrics)
        early_stopping.update(
            score,
            step=progress.step,
            metrics=metrics,
            min_improvement=config.early_stopping.min_improvement,
        )
        _, value, sign = config.workload.target_value(metrics)
        progress.target.update(value, sign=sign, counters=progress.counters)
        lowered = progress.plateau.update(score, config.plateau)
    best: dict[str, Any] = {}
    if early_stopping.best_step is not None:
        name, value, _ = config.workload.objective_value(early_stopping.best_metrics)
        best = {"best": {"step": early_stopping.best_step, name: value}}
    event = {
        "step": progress.step,
        "set": "validation",
        "counted": action.is_regular,
        "seconds": seconds,
    }
    training.log("evaluate", {**event, **metrics, **best})
    if lowered:
        scale = progress.plateau.learning_rate_scale
        training.log("plateau", {"step": progress.step, "learning_rate_scale": scale})
    return Outcome(score=score, saved=watch.saved)
