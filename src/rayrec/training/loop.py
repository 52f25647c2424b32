"""The one training loop. It runs in segments; between segments nothing is in flight, so what was pulled was trained."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
import torch

from rayrec import machine
from rayrec.collectives import gathered, num_workers, over_workers, sum_over_workers
from rayrec.config import InputError
from rayrec.optim.config import PlateauConfig, learning_rates
from rayrec.row_tally import RowNumbers, RowTally
from rayrec.training.step_log import DataReport
from rayrec.workloads.base import TrainConfig, TrainLoader, WorkerSetup
from rayrec.workloads.step_timer import NoClock, StepClock

_HELD = ("memory_bytes", "device_memory_bytes")
"""In a step event: resident memory of the worker that has most, and the most that tensors took of a GPU since the last log."""
FirstStep = Callable[[float, float], None]
"""Called when the first step of an attempt is done: with the seconds that the pipeline has waited for batches by then, which may
be more than one, and with all seconds since it began."""
_LOOK_S = 5.0
"""Between two looks for reasons to save, as far as whole steps allow: what `failure.grace_s` is not to be lost to."""
_LOOK_PREEMPTED_S = 1.0
"""The same, after a notice that a node is preempted: how far before its deadline a run ends depends on it."""
Cut = Literal["none", "save", "stop"]
"""What came up in a segment: nothing, a save that cannot wait, a wish to save and end."""
_EVALUATION_POLL_S = 2.0
"""Seconds between two polls for a stop during an evaluation, as far as whole batches allow."""
_EVALUATION_GRACE_SHARE = 0.25
"""An evaluation that takes longer than this share of `failure.grace_s` saves its step while it runs."""
_ROUNDING = 1e-6
"""Steps by which a share of a run's steps may be off for the rounding of floats."""
TRAINING_COST = 3
"""Of a step, in forward passes: the backward pass has two products for each of the forward's."""


@dataclass
class Progress:
    """How far a run has come; saved with every checkpoint."""

    step: int = 0
    rows: int = 0
    """Rows trained on, of all workers."""
    train_s: float = 0.0
    """Time spent in training segments."""
    blocked_s: float = 0.0
    """Of it, waiting for data (mean over workers)."""
    best: float | None = None
    """Best score of an evaluation."""
    best_step: int | None = None
    since_best: int = 0
    """Evaluations since the last one that was better by more than `early_stopping.min_improvement`."""
    last_improvement: float | None = None
    """Score of that evaluation, with which the next ones are compared."""
    learning_rate_scale: float = 1.0
    """What the schedule's learning rates are multiplied by, since evaluations got no better (`plateau`)."""
    plateau_reference: float | None = None
    """Score of the last evaluation that was better by more than `plateau.min_improvement`."""
    plateau_evaluations: int = 0
    """Evaluations since that one, or since the learning rates were lowered."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    best_metrics: dict[str, float] = field(default_factory=dict)
    """Of the best one."""
    evaluation_due: bool = False
    """This step is yet to be evaluated: the run was asked to stop here."""
    trained: RowTally | None = field(default_factory=RowTally)
    """The rows that this worker trained in this attempt and, on worker 0, those of earlier attempts; None if some batch did not
    tell its rows."""

    def state(self) -> dict[str, Any]:
        """Plain JSON values of a checkpoint, the same on every worker; collective."""
        trained = self.trained_by_all()
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "trained"}
        return {**plain, "trained": trained and trained.to_dict()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, rank: int) -> Progress:
        """What `state` gave. A checkpoint of an earlier version has no `trained`; a metric that was NaN is null."""
        stored = state.get("trained")
        trained = None if stored is None else RowTally.from_dict(stored) if rank == 0 else RowTally()
        metrics = {
            name: {metric: math.nan if value is None else value for metric, value in state[name].items()}
            for name in ("metrics", "best_metrics")
            if name in state
        }
        return cls(**{**state, **metrics, "trained": trained})

    def trained_by_all(self) -> RowTally | None:
        """The rows that all workers trained; None if some batch did not tell its rows; collective."""
        _, (unknown,) = over_workers(float(self.trained is None))
        return None if unknown or self.trained is None else _tally_over_workers(self.trained)

    def count(self, rows: RowNumbers | None) -> None:
        """This worker has trained these rows."""
        if rows is None:
            self.trained = None
        elif self.trained is not None:
            self.trained.add(rows)

    def blocked_fraction(self) -> float:
        return self.blocked_s / self.train_s if self.train_s else 0.0


class Batches:
    """The batches of one segment: counts them, knows their rows until they are trained, adds up the time spent waiting for
    them, and may be ended early."""

    def __init__(self, source: Iterator[Any], clock: StepClock) -> None:
        self._source, self._clock = source, clock
        self.num_pulled = 0
        self.blocked_s = 0.0
        self._in_flight: deque[RowNumbers | None] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            with self._clock.phase("data"):
                batch = next(self._source)
        finally:
            self.blocked_s += time.perf_counter() - start
        self.num_pulled += 1
        self._in_flight.append(getattr(batch, "row_numbers", None))
        return batch

    def trained(self) -> RowNumbers | None:
        """The rows of the oldest batch that was pulled and not trained before; None if it does not tell. Pipelines train in the
        order in which they pull."""
        return self._in_flight.popleft()

    def end(self) -> None:
        """Gives no more batches; those pulled ahead by a pipeline are still to be trained."""
        self._source = iter(())


@dataclass(frozen=True)
class Boundary:
    """Where a segment ends, and why."""

    step: int
    evaluate: bool
    save: bool


def next_boundary(step: int, end: int, *, evaluate_every: int, save_every: int | None) -> Boundary:
    """The end of the segment that begins at `step`. Pure.

    Saves coincide with evaluations where no interval is given; the end is always evaluated and saved.
    """
    ahead = [evaluate_every - step % evaluate_every, end - step]
    if save_every is not None:
        ahead.append(save_every - step % save_every)
    stop = step + min(ahead)
    evaluate = stop % evaluate_every == 0 or stop == end
    save = (stop % save_every == 0 if save_every is not None else evaluate) or stop == end
    return Boundary(stop, evaluate, save)


def last_step(total: int, share: float | None) -> int:
    """The first step at which `share` of a run's `total` steps is done; None: all of them. Pure."""
    return total if share is None else min(total, max(1, math.ceil(total * share - _ROUNDING)))


class Interruption(Protocol):
    """Reasons to save before a save is due."""

    def seen(self) -> tuple[bool, bool]:
        """(this worker was asked to stop, or finds that a node is about to go; it is time to look for preemption notices); cheap
        and local."""
        ...

    def preempted(self) -> bool:
        """Whether to save, because there is a new notice that a worker's node will go; collective."""
        ...

    def urgent(self) -> bool:
        """Whether this worker was asked to stop for a reason that cannot wait for the end of an evaluation; local."""
        ...


class Save(Protocol):
    """Saves a checkpoint; collective."""

    def __call__(
        self, progress: Progress, loader_state: dict[str, Any], *, score: float | None, needed: bool, complete: bool
    ) -> None:
        """`score`: of these weights, None where they were not evaluated. `needed`: this very step must be saved, also
        where the save before is late. `complete`: return when it is in storage."""
        ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """Parts of one worker's training, for any loop."""

    config: TrainConfig
    setup: WorkerSetup
    loader: TrainLoader
    progress: Progress
    log: Callable[[str, dict[str, Any]], None]
    """Called on every worker with the same kind and fields."""
    save: Save
    interruption: Interruption
    first_step: FirstStep | None = None
    pause_at: float | None = None
    """Share of the run's steps after which it pauses. None for all of them."""


def run(training: Training) -> bool:
    """Trains from `progress` on until the loader ends, the step limit, or early stopping; False where it was asked to stop
    before, or has done the share `pause_at` of its steps, and has saved. Raises InputError where the loss is not finite."""
    course, account = steer(training), Account(training)
    cut: Cut | None = None
    while True:
        try:
            stop = next(course) if cut is None else course.send(cut)
        except StopIteration as end:
            return end.value
        cut = _train(training, account, stop)


def _train(training: Training, account: Account, stop: int) -> Cut:
    """Trains up to step `stop`, or less far where a save cannot wait."""
    setup, loader, progress = training.setup, training.loader, training.progress
    first = progress.step
    batches = Batches(islice(loader, stop - first), setup.clock)
    account.begin()
    while progress.step < stop:
        setup.begin_step(progress.step, account.total)
        if account.count(setup.pipeline.progress(batches).loss, batches, stop=stop):
            batches.end()
            stop = first + batches.num_pulled
    drain(setup.pipeline, batches)
    return account.cut


def steer(training: Training) -> Generator[int, Cut, bool]:
    """What happens between segments, for any loop: evaluation, saving, early stopping.

    Yields the step to train up to, before which a segment may end where a save cannot wait; is sent what came up meanwhile;
    returns what `run` does. A stop ends an evaluation between two batches; the next attempt repeats the evaluation.

    The step to pause at is evaluated and saved. If it is not one of the run's own evaluations, neither early stopping nor
    `plateau` counts it, so that a run that was paused learns what one does that was not.
    """
    config, setup, loader, progress = training.config, training.setup, training.loader, training.progress
    patience = config.early_stopping.patience
    if 0 < patience <= progress.since_best:
        return True  # it had stopped before
    total = progress.step + loader.steps
    evaluate_every = config.evaluate_every or max(1, math.ceil(loader.steps_per_epoch / config.evaluations_per_epoch))
    end = last_step(total, training.pause_at)
    setup.model.train()
    saved_step = progress.step  # the start, and a checkpoint that training resumed from, need no save

    def save_now(*, score: float | None = None, needed: bool, complete: bool) -> None:
        nonlocal saved_step
        training.save(progress, loader.state(), score=score, needed=needed, complete=complete)
        saved_step = progress.step

    while True:
        cut: Cut = "none"
        save_due = progress.evaluation_due  # of the step that an earlier attempt stopped at
        if not progress.evaluation_due:
            if progress.step >= end:
                return end == total
            boundary = next_boundary(
                progress.step, end, evaluate_every=evaluate_every, save_every=config.checkpoint.every
            )
            cut = yield boundary.step
            setup.clock.stop()
            reached = progress.step == boundary.step
            progress.evaluation_due = boundary.evaluate and reached
            # What is saved at once is saved again only where an evaluation adds its score.
            save_due = boundary.save and reached and (cut == "none" or boundary.evaluate)
        if cut != "none":
            save_now(needed=True, complete=True)
        if cut == "stop":
            return False
        score, saved_in_evaluation = None, False
        if progress.evaluation_due:
            watch = EvaluationWatch(
                training.interruption,
                save=None if saved_step == progress.step else partial(save_now, needed=True, complete=False),
                save_after_s=_EVALUATION_GRACE_SHARE * config.failure.grace_s,
            )
            metrics = evaluate(setup, "validation", watch)
            if metrics is None:  # evaluation_due is saved too
                if saved_step != progress.step:
                    save_now(needed=True, complete=True)
                return False
            saved_in_evaluation = watch.saved
            progress.evaluation_due, progress.metrics = False, metrics
            own = progress.step != end or end == total or progress.step % evaluate_every == 0
            score = config.workload.score(progress.metrics) if own else None
            lowered = score is not None and _registered(progress, score, config)
            training.log("evaluate", {"step": progress.step, "set": "validation", "counted": own, **progress.metrics})
            if lowered:
                training.log("plateau", {"step": progress.step, "learning_rate_scale": progress.learning_rate_scale})
            setup.model.train()
        learnt = 0 < patience <= progress.since_best
        # With early stopping the best weights are the ones to use, so they are always saved.
        best = bool(patience) and progress.best_step == progress.step
        last = learnt or progress.step == end
        if save_due or last or best:
            # The score of a step that was saved without one must not be lost because that save is still in progress.
            save_now(score=score, needed=last or best or saved_in_evaluation, complete=last)
        if learnt:
            training.log(
                "early_stop", {"step": progress.step, "best_step": progress.best_step, "best_score": progress.best}
            )
            return True


def _registered(progress: Progress, score: float, config: TrainConfig) -> bool:
    """Registers the score of an evaluation for early stopping and `plateau`; True if the learning rates are lower from now on."""
    judge(progress, score, min_improvement=config.early_stopping.min_improvement)
    return lower_on_plateau(progress, score, config.plateau)


class Account:
    """Counts steps, rows, losses and time, logs them, and finds out whether a segment has to end early."""

    def __init__(self, training: Training) -> None:
        config, setup, loader, progress = training.config, training.setup, training.loader, training.progress
        self._config, self._loader, self._progress = config, loader, progress
        self._first_step_done = training.first_step
        self._clock, self._cost, self._peak = setup.clock, setup.multiply_adds_per_row, setup.peak_multiply_adds_per_s
        self._log, self._interruption, self._optimizer = training.log, training.interruption, setup.optimizer
        self._data = DataReport(loader) if config.observe.times else None
        self._first_step, self._rows_before = progress.step, progress.rows
        self._losses: list[torch.Tensor] = []
        self._start_s = 0.0
        self._num_rows = 0
        """Rows that this worker trained since the last log."""
        self._look_at = progress.step + 1
        """Step of the next look for reasons to save; of the first one, which takes longest, nothing is known before."""
        self._look_s = _LOOK_S
        self.total = progress.step + loader.steps
        """The run's steps."""
        self.cut: Cut = "none"
        """What came up in this segment."""

    def begin(self) -> None:
        """A segment begins."""
        self.cut = "none"
        self._losses, self._start_s = [], time.perf_counter()
        self._clock.start()

    def count(self, loss: torch.Tensor, batches: Batches, *, stop: int) -> bool:
        """One more step is done; collective where a log or a look is due. True where the segment cannot go on up to `stop`."""
        if self._first_step_done is not None:
            self._first_step_done(batches.blocked_s, time.perf_counter() - self._start_s)
            self._first_step_done = None
        progress, rows = self._progress, batches.trained()
        progress.count(rows)
        self._num_rows += 0 if rows is None else len(rows.numbers)
        self._losses.append(loss)
        progress.step += 1
        due = progress.step % self._config.log_every == 0 or progress.step >= stop
        if not due and (progress.step < self._look_at or not self._look()):
            return False
        self._clock.cut()
        # The one device sync between two logs.
        mine = torch.stack(self._losses).mean().item()
        now_s = time.perf_counter()
        times_s = self._clock.read()
        held = [machine.resident_bytes(), *_device_bytes()]
        own = [mine, batches.blocked_s, now_s - self._start_s, self._num_rows, *times_s.values(), *held]
        data = self._data.take() if self._data else []
        means, maxima = over_workers(*own, *data, *self._interruption.seen())
        *_, asked, look = maxima
        mean, blocked_s, elapsed_s, num_rows = means[:4]
        times_max_s = dict(zip(times_s, maxima[4:], strict=False))
        times_s = dict(zip(times_s, means[4:], strict=False))
        most_held = maxima[len(own) - len(held) : len(own)]
        self._log_steps(mean, num_rows, blocked_s, sum(times_s.values()) or elapsed_s, times_s, times_max_s, most_held)
        if self._data:
            self._data.tell(means[len(own) : len(own) + len(data)], step=progress.step, log=self._log)
        self._plan_look(elapsed_s)
        self._losses, self._start_s, self._num_rows, batches.blocked_s = [], now_s, 0, 0.0
        if due:
            self._heed(asked, look)
        return progress.step < stop and self.cut != "none"

    def _look(self) -> bool:
        """Whether something has come up where no log is due; collective. Three numbers go around; with NCCL it waits for the
        device, once in `_LOOK_S`."""
        (elapsed_s, *_), (_, asked, look) = over_workers(
            time.perf_counter() - self._start_s, *self._interruption.seen()
        )
        before = self.cut
        self._plan_look(elapsed_s)
        self._heed(asked, look)
        return self.cut != before

    def _plan_look(self, elapsed_s: float) -> None:
        """Chooses the next look, by numbers that are the same on every worker: the mean time since the last log, and no
        further ahead than the attempt has come, since its first steps say little of the later ones."""
        step_s = elapsed_s / len(self._losses)
        so_far = self._progress.step - self._first_step
        self._look_at = self._progress.step + max(1, min(int(self._look_s / max(step_s, 1e-6)), so_far))

    def _heed(self, asked: float, look: float) -> None:
        if asked:
            self.cut = "stop"
        elif look and self._interruption.preempted():
            self._look_s, self._look_at = _LOOK_PREEMPTED_S, self._progress.step + 1
            self.cut = "save" if self.cut == "none" else self.cut

    def _log_steps(
        self,
        loss: float,
        num_rows: float,
        blocked_s: float,
        elapsed_s: float,
        times_s: dict[str, float],
        times_max_s: dict[str, float],
        most_held: Sequence[float],
    ) -> None:
        progress = self._progress
        if progress.trained is None:  # the loader's word for it
            rows = self._rows_before + self._loader.rows(progress.step - self._first_step) - progress.rows
        else:
            rows = round(num_rows * num_workers())
        progress.rows += rows
        progress.train_s += elapsed_s
        progress.blocked_s += blocked_s
        fields: dict[str, Any] = {
            "step": progress.step,
            "steps": self.total,
            "loss": loss,
            "rows": progress.rows,
            "rows_per_s": rows / elapsed_s,
            "blocked_fraction": blocked_s / elapsed_s,
            "learning_rate": max(learning_rates(self._optimizer), default=0.0),
            **{name: int(size) for name, size in zip(_HELD, most_held, strict=False) if size},
        }
        if times_s:
            fields["times_s"] = times_s
            if num_workers() > 1:  # of one worker it is the same
                fields["times_max_s"] = times_max_s
        if self._cost is not None:
            done = TRAINING_COST * self._cost * rows / elapsed_s
            fields["multiply_adds_per_s"] = done
            if self._peak is not None:
                fields["peak_fraction"] = done / self._peak
        self._log("step", fields)
        if not math.isfinite(loss):
            raise InputError(f"the loss is {loss} at step {progress.step}; lower the learning rates")


def _device_bytes() -> list[float]:
    """The most that tensors took of this worker's GPU since the last call."""
    if not torch.cuda.is_initialized():
        return []
    most = float(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return [most]


def judge(progress: Progress, score: float, *, min_improvement: float) -> None:
    """Registers the score of an evaluation.

    Patience is counted from the last evaluation that was better by more than `min_improvement` than the one counted before, as
    in Keras and Lightning: smaller steps do not move this reference, so several of them add up. The best score is the highest of
    all; of equal ones the later counts, as it does for what is kept.
    """
    reference = progress.best if progress.last_improvement is None else progress.last_improvement
    if reference is None or score > reference + min_improvement:
        progress.since_best, progress.last_improvement = 0, score
    else:
        progress.since_best += 1
    if progress.best is None or score >= progress.best:
        progress.best, progress.best_step, progress.best_metrics = score, progress.step, progress.metrics


def lower_on_plateau(progress: Progress, score: float, plateau: PlateauConfig) -> bool:
    """Registers the score of an evaluation; True if the learning rates are lower from now on."""
    if not plateau.patience:
        return False
    if progress.plateau_reference is None or score > progress.plateau_reference + plateau.min_improvement:
        progress.plateau_reference, progress.plateau_evaluations = score, 0
        return False
    progress.plateau_evaluations += 1
    if progress.plateau_evaluations < plateau.patience:
        return False
    progress.plateau_evaluations = 0
    progress.learning_rate_scale *= plateau.factor
    return True


def with_lowered_rates(setup: WorkerSetup, progress: Progress, plateau: PlateauConfig) -> Callable[[int, int], None]:
    """`setup.begin_step`, which sets the schedule's learning rates, and after it the factors of `progress`."""
    begin_step = setup.begin_step

    def begin(step: int, total: int) -> None:
        begin_step(step, total)
        if progress.learning_rate_scale != 1.0:
            for group in setup.optimizer.param_groups:
                group["lr"] = plateau.learning_rate(float(group["lr"]), scale=progress.learning_rate_scale)

    return begin


def drain(pipeline: Any, batches: Iterator[Any]) -> None:
    """Leaves nothing in flight: the iterator is at its end, so the pipeline has no batch to give back."""
    try:
        pipeline.progress(batches)
    except StopIteration:
        pipeline.reset()
        return
    raise AssertionError("the pipeline held a batch that no step was counted for")


class EvaluationWatch:
    """Polls between the batches of one evaluation: ends it when the run was asked to stop, and saves its step when the
    evaluation takes long or a node of the run is about to be preempted.

    Every decision is made from numbers that all workers have, so all workers take it at the same batch.
    """

    def __init__(self, interruption: Interruption, *, save: Callable[[], None] | None, save_after_s: float) -> None:
        """`save`: saves the step under evaluation, collective; None if that is not needed. `save_after_s`: seconds of
        evaluation after which the step is saved."""
        self._interruption, self._save, self._save_after_s = interruption, save, save_after_s
        self._start_s = time.perf_counter()
        self._batches, self._poll_at = 0, 1
        self.saved = False

    def stopped(self) -> bool:
        """Called after each batch: whether the evaluation has to end here. Collective when a poll is due: after 1, 2, 4, ...
        batches, and about every two seconds from then on."""
        self._batches += 1
        if self._batches < self._poll_at:
            return False
        _, preemption_poll = self._interruption.seen()
        (elapsed_s, *_), (_, asked, poll) = over_workers(
            time.perf_counter() - self._start_s, self._interruption.urgent(), preemption_poll
        )
        ahead = int(_EVALUATION_POLL_S * self._batches / max(elapsed_s, 1e-6))
        self._poll_at += max(1, min(ahead, self._batches))
        preempted = bool(poll) and self._interruption.preempted()
        if self._save is not None and not asked and (preempted or elapsed_s >= self._save_after_s):
            self._save()
            self._save, self.saved = None, True
        return bool(asked)


@torch.no_grad()
def evaluate(setup: WorkerSetup, name: str, watch: EvaluationWatch | None = None) -> dict[str, float] | None:
    """Scores every row of an evaluation set once -> its metrics; collective. None if `watch` ended it before its last batch."""
    setup.model.eval()
    metrics, source = setup.make_metrics(), setup.eval_batches[name]()
    batches, stopped = Batches(source, NoClock()), False
    try:
        while True:
            try:
                metrics.update(setup.pipeline.progress(batches))
            except StopIteration:
                setup.pipeline.reset()
                return None if stopped else metrics.compute()
            if not stopped and watch is not None and watch.stopped():
                stopped = True
                batches.end()  # scores what the pipeline has pulled ahead, and no more
    finally:
        close = getattr(source, "close", None)
        if close is not None:  # data tasks of an evaluation that was ended
            close()


def _tally_over_workers(mine: RowTally) -> RowTally:
    # As bytes and added here, modulo 2^64.
    checksums = torch.frombuffer(bytearray(np.array(mine.checksums, "<u8").tobytes()), dtype=torch.uint8)
    pairs = (np.frombuffer(each.cpu().numpy().tobytes(), "<u8").tolist() for each in gathered(checksums))
    return RowTally.total(sum_over_workers(mine.counts.copy()), ((first, second) for first, second in pairs))
