"""Order of a run's segments, saves and evaluations. Pure: needs no torch, storage or clock."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import final

from rayrec.training.progress import Cut, Progress

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
    if fraction is None:
        return total
    return min(total, max(1, math.ceil(total * fraction - _ROUNDING)))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps of an attempt at which it evaluates, saves and ends."""

    total: int
    """Last step of the run."""
    end: int
    """Step to pause at, or `total`."""
    evaluate_every: int
    save_every: int | None
    patience: int
    """Patience of early stopping in evaluations, or 0."""


@dataclass(frozen=True)
class Train:
    """Train up to step `stop`; less if a save cannot wait."""

    stop: int


@dataclass(frozen=True, kw_only=True)
class Save:
    """Save the current step."""

    score: float | None = None
    """Score of these weights, or None if they were not evaluated."""
    needed: bool
    """Whether to save even if the previous save is late."""
    complete: bool
    """Whether to continue only when the checkpoint is in storage."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate the current step."""

    is_regular: bool
    """Whether early stopping and `plateau` count the evaluation. They ignore one at a pause, so
    that pauses do not change the result of a run.
    """
    early_save: Save | None
    """Save during the evaluation if it takes long. None if the step is saved."""


@dataclass(frozen=True, kw_only=True)
class End:
    """End the attempt."""

    finished: bool
    """Whether the run is finished, rather than stopped or paused."""
    stopped_early: bool = False
    """Whether early stopping or the target ended the run now."""


Action = Train | Save | Evaluate | End


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of an action."""

    cut: Cut = "none"
    """Reason for which training ended before `Train.stop`."""
    interrupted: bool = False
    """Whether a stop request ended the evaluation."""
    score: float | None = None
    """Score of a regular evaluation."""
    saved: bool = False
    """Whether the evaluation took long and made its `early_save`."""


# Actions of a plan, and what follows them:
#
# Action     Outcome                Next
# ---------  ---------------------  ----------------------------------------------------------
# (start)    evaluation due         EVALUATE, because an earlier attempt stopped there.
#            stopped early, at end  END.
#            otherwise              TRAIN to the next save, evaluation or end.
# TRAIN      cut "stop"             SAVE, END. A due evaluation is left to the next attempt.
#            cut "save"             SAVE, then as without cut.
#            at an evaluation       EVALUATE.
#            at a save              SAVE.
#            before its end         TRAIN.
# EVALUATE   interrupted            SAVE unless saved, END. The next attempt evaluates again.
#            best, last or due      SAVE with the score.
# SAVE       stopped early          END.
#            at end                 END.
#            otherwise              TRAIN.
@final
class SegmentPlanner:
    """Planner of an attempt. Sets `evaluation_due` of the progress, and reads its other fields."""

    def __init__(self, schedule: Schedule, progress: Progress) -> None:
        self._schedule = schedule
        self._progress = progress
        # Neither the start nor the restored checkpoint needs a save.
        self._saved_step = progress.step
        self._actions = self._plan()
        self.first = next(self._actions)
        """First action. `End` is the last one."""

    def next(self, outcome: Outcome) -> Action:
        """Return the next action, given the outcome of the previous one."""
        return self._actions.send(outcome)

    def _plan(self) -> Generator[Action, Outcome, None]:
        schedule = self._schedule
        progress = self._progress
        if self._stops_early():  # in an earlier attempt
            yield End(finished=True)
        while progress.evaluation_due or progress.step < schedule.end:
            save_due = progress.evaluation_due
            if not progress.evaluation_due:
                save_due = yield from self._train()
            outcome = Outcome()
            if progress.evaluation_due:
                outcome = yield from self._evaluate()
            ends = self._stops_early()
            # Early stopping uses the best weights, so these are always saved.
            best = bool(schedule.patience) and progress.early_stopping.best_step == progress.step
            last = ends or progress.step == schedule.end
            if save_due or last or best:
                # Needed after a save without a score: the score would be lost if that save is
                # still in progress.
                needed = last or best or outcome.saved
                yield self._save(score=outcome.score, needed=needed, complete=last)
            if ends:
                yield End(finished=True, stopped_early=True)
        yield End(finished=schedule.end == schedule.total)

    def _train(self) -> Generator[Action, Outcome, bool]:
        """Train to the segment's end. Ends the plan after a stop request. Returns whether a save is
        due.
        """
        schedule = self._schedule
        progress = self._progress
        segment = next_segment_end(
            progress.step,
            schedule.end,
            evaluate_every=schedule.evaluate_every,
            save_every=schedule.save_every,
        )
        cut = (yield Train(segment.step)).cut
        reached = progress.step == segment.step
        progress.evaluation_due = segment.evaluate and reached
        if cut != "none":
            yield self._save(needed=True, complete=True)
        if cut == "stop":
            yield End(finished=False)
        # A step saved early is saved again only to add its evaluation score.
        return segment.save and reached and (cut == "none" or segment.evaluate)

    def _evaluate(self) -> Generator[Action, Outcome, Outcome]:
        """Evaluate the current step. Ends the plan after a stop request."""
        schedule = self._schedule
        progress = self._progress
        step = progress.step
        early_save = Save(needed=True, complete=False) if self._saved_step != step else None
        is_last = step == schedule.end == schedule.total
        is_regular = step != schedule.end or is_last or step % schedule.evaluate_every == 0
        outcome = yield Evaluate(is_regular=is_regular, early_save=early_save)
        if outcome.saved:
            self._saved_step = step
        progress.evaluation_due = outcome.interrupted
        if outcome.interrupted:
            if self._saved_step != step:
                yield self._save(needed=True, complete=True)
            yield End(finished=False)
        return outcome

    def _save(self, *, score: float | None = None, needed: bool, complete: bool) -> Save:
        self._saved_step = self._progress.step
        return Save(score=score, needed=needed, complete=complete)

    def _stops_early(self) -> bool:
        progress = self._progress
        return (
            progress.early_stopping.is_exhausted(self._schedule.patience)
            or progress.target.target_step is not None
        )
