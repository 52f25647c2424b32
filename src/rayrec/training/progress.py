"""How far a run has come, and what any training loop is given: the parts of one worker's training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

import numpy as np
import torch

from rayrec.collectives import gathered, over_workers, sum_over_workers
from rayrec.optim.config import PlateauConfig
from rayrec.row_tally import RowNumbers, RowTally
from rayrec.workloads.base import TrainConfig, TrainLoader, WorkerSetup

FirstStep = Callable[[float, float], None]
"""Called when the first step of an attempt is done: with the seconds that the pipeline has waited for batches by then, which may
be more than one, and with all seconds since it began."""
Cut = Literal["none", "save", "stop"]
"""What came up in a segment: nothing, a save that cannot wait, a wish to save and end."""


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


def _tally_over_workers(mine: RowTally) -> RowTally:
    # As bytes and added here, modulo 2^64.
    checksums = torch.frombuffer(bytearray(np.array(mine.checksums, "<u8").tobytes()), dtype=torch.uint8)
    pairs = (np.frombuffer(each.cpu().numpy().tobytes(), "<u8").tolist() for each in gathered(checksums))
    return RowTally.total(sum_over_workers(mine.counts.copy()), ((first, second) for first, second in pairs))
