"""Training loop. Runs in segments, between which no batch is in flight, so that all pulled batches
are trained.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from rayrec.collectives import over_workers
from rayrec.training.progress import (
    Cut,
    StopSignal,
    Training,
    judge,
    lower_on_plateau,
    meet_target,
    target_fields,
)
from rayrec.training.step_log import Batches, StepAccounting
from rayrec.workloads.base import WorkerSetup
from rayrec.workloads.step_timer import StepTimer

_EVALUATION_POLL_S = 2.0
"""Seconds between two polls for a stop during an evaluation, rounded to full batches."""
_EVALUATION_GRACE_FRACTION = 0.25
"""Share of `failure.grace_s` after which a running evaluation saves its step."""
_ROUNDING = 1e-6
"""Tolerance in steps for floating-point rounding of a share or a multiple of steps."""


@dataclass(frozen=True)
class SegmentEnd:
    step: int
    evaluate: bool
    save: bool


def next_segment_end(
    step: int, end: int, *, evaluate_every: int, save_every: int | None
) -> SegmentEnd:
    """Return the segment's end from `step`. Without save interval, each evaluation saves; the run's
    end does both. Pure.
    """
    steps_left = [evaluate_every - step % evaluate_every, end - step]
    if save_every is not None:
        steps_left.append(save_every - step % save_every)
    stop = step + min(steps_left)
    evaluate = stop % evaluate_every == 0 or stop == end
    save = (stop % save_every == 0 if save_every is not None else evaluate) or stop == end
    return SegmentEnd(stop, evaluate, save)


def evaluation_interval(steps_per_epoch: int, evaluations_per_epoch: float) -> int:
    """Return the steps between two evaluations, rounded up. Pure."""
    return max(1, math.ceil(steps_per_epoch / evaluations_per_epoch - _ROUNDING))


def last_step(total: int, fraction: float | None) -> int:
    """Return the first step at which `fraction` (None: all) of a run's `total` steps is done.
    Pure.
    """
    return (
        total if fraction is None else min(total, max(1, math.ceil(total * fraction - _ROUNDING)))
    )


def run(training: Training) -> bool:
    """Train until the loader ends, the step limit, or early stopping. Returns False if it saved and
    ended before, after a stop request or at the share `pause_at` of its steps. Raises InputError if
    the loss is not finite.
    """
    course = iterate_segments(training)
    account = StepAccounting(training)
    cut: Cut | None = None
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
    """Evaluate, save and stop early between the segments of any loop. Yields the step to train up
    to; a segment may end earlier if a save cannot wait. Receives the reason for that. Returns the
    result of `run`. A stop ends an evaluation between two batches; the next attempt repeats the
    evaluation. The step to pause at is evaluated and saved. Unless it is a regular evaluation,
    early stopping and `plateau` ignore it, so that pauses do not change the result of a run.
    """
    config = training.config
    setup = training.setup
    loader = training.loader
    progress = training.progress
    patience = config.early_stopping.patience
    progress.set_target(config.early_stopping.target)
    if 0 < patience <= progress.since_best or progress.target_step is not None:
        return True  # stopped early in an earlier attempt
    total = progress.step + loader.steps
    evaluate_every = config.evaluate_every or evaluation_interval(
        loader.steps_per_epoch, config.evaluations_per_epoch
    )
    end = last_step(total, training.pause_at)
    setup.model.train()
    saved_step = progress.step  # neither the start nor the restored checkpoint needs a save

    def save_now(*, score: float | None = None, needed: bool, complete: bool) -> None:
        nonlocal saved_step
        training.save(progress, loader.state(), score=score, needed=needed, complete=complete)
        saved_step = progress.step

    while True:
        cut: Cut = "none"
        save_due = progress.evaluation_due  # at the step where an earlier attempt stopped
        if not progress.evaluation_due:
            if progress.step >= end:
                return end == total
            boundary = next_segment_end(
                progress.step,
                end,
                evaluate_every=evaluate_every,
                save_every=config.checkpoint.every,
            )
            cut = yield boundary.step
            setup.clock.stop()
            reached = progress.step == boundary.step
            progress.evaluation_due = boundary.evaluate and reached
            # A step saved early is saved again only to add its evaluation score.
            save_due = boundary.save and reached and (cut == "none" or boundary.evaluate)
        if cut != "none":
            save_now(needed=True, complete=True)
        if cut == "stop":
            return False
        score = None
        saved_in_evaluation = False
        if progress.evaluation_due:
            watch = EvaluationWatch(
                training.stop_signal,
                save=None
                if saved_step == progress.step
                else partial(save_now, needed=True, complete=False),
                save_after_s=_EVALUATION_GRACE_FRACTION * config.failure.grace_s,
            )
            is_regular = progress.step != end or end == total or progress.step % evaluate_every == 0
            score = _evaluate_step(training, watch, is_regular=is_regular)
            if progress.evaluation_due:  # ended by a stop request; evaluation_due is saved too
                if saved_step != progress.step:
                    save_now(needed=True, complete=True)
                return False
            saved_in_evaluation = watch.saved
            setup.model.train()
        ends = 0 < patience <= progress.since_best or progress.target_step is not None
        # Early stopping uses the best weights, so these are always saved.
        best = bool(patience) and progress.best_step == progress.step
        last = ends or progress.step == end
        if save_due or last or best:
            # Needed after a save without a score: the score would be lost if that save is still in
            # progress.
            save_now(score=score, needed=last or best or saved_in_evaluation, complete=last)
        if ends:
            _log_early_stop(training)
            return True


def _log_early_stop(training: Training) -> None:
    progress = training.progress
    best_fields = {"best_step": progress.best_step, "best_score": progress.best}
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


def _evaluate_step(training: Training, watch: EvaluationWatch, *, is_regular: bool) -> float | None:
    """Evaluate the current step and record the result; if regular, for early stopping and
    `plateau`. Returns the score, None if not regular. Does nothing if `watch` ended the
    evaluation.
    """
    config = training.config
    progress = training.progress
    start_s = time.perf_counter()
    metrics = evaluate(training.setup, "validation", watch, max_rows=config.eval_rows)
    if metrics is None:
        return None
    _, (seconds,) = over_workers(time.perf_counter() - start_s)
    progress.evaluation_due, progress.metrics, progress.evaluation_s = (
        False,
        metrics,
        progress.evaluation_s + seconds,
    )
    score = None
    lowered = False
    if is_regular:
        score = config.workload.score(metrics)
        judge(progress, score, min_improvement=config.early_stopping.min_improvement)
        meet_target(progress, config.workload)
        lowered = lower_on_plateau(progress, score, config.plateau)
    best: dict[str, Any] = {}
    if progress.best_step is not None:
        name, value, _ = config.workload.objective_value(progress.best_metrics)
        best = {"best": {"step": progress.best_step, name: value}}
    event = {"step": progress.step, "set": "validation", "counted": is_regular, "seconds": seconds}
    training.log("evaluate", {**event, **metrics, **best})
    if lowered:
        training.log(
            "plateau", {"step": progress.step, "learning_rate_scale": progress.learning_rate_scale}
        )
    return score
