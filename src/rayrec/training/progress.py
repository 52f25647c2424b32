"""Progress of a run, and the parts of one worker's training that any loop needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

import numpy as np
import torch

from rayrec.collectives import gathered, over_workers, sum_over_workers
from rayrec.optim.config import PlateauConfig
from rayrec.trained_rows import RowNumbers, TrainedRows
from rayrec.workloads.base import TrainConfig, TrainLoader, WorkerSetup, Workload

FirstStep = Callable[[float, float], None]
"""Callback after an attempt's first step, with the seconds waited for batches by then and those
since the attempt began.
"""
Cut = Literal["none", "save", "stop"]
"""Event in a segment: none, a save that cannot wait, or a request to save and end."""


@dataclass
class Progress:
    """Progress of a run; saved with every checkpoint."""

    step: int = 0
    rows: int = 0
    """Rows trained by all workers."""
    train_s: float = 0.0
    """Seconds in training segments."""
    blocked_s: float = 0.0
    """Seconds spent waiting for data within `train_s` (mean over workers)."""
    evaluation_s: float = 0.0
    """Seconds in completed evaluations (of the slowest worker)."""
    best: float | None = None
    best_step: int | None = None
    since_best: int = 0
    """Evaluations since the last one that improved by more than
    `early_stopping.min_improvement`.
    """
    last_improvement: float | None = None
    """Score of that evaluation, the reference for the next ones."""
    learning_rate_scale: float = 1.0
    """Factor of the schedule's learning rates, lowered when evaluations stop improving
    (`plateau`).
    """
    plateau_reference: float | None = None
    """Score of the last evaluation that improved by more than `plateau.min_improvement`."""
    plateau_evaluations: int = 0
    """Evaluations since that one, or since the learning rates were lowered."""
    target: float | None = None
    """`early_stopping.target` of the next fields."""
    target_step: int | None = None
    """Step of the first counted evaluation that reached the target, None before."""
    target_rows: int | None = None
    """`rows` at that step."""
    target_s: float | None = None
    """`train_s + evaluation_s` after that evaluation."""
    metrics: dict[str, float] = field(default_factory=dict)
    best_metrics: dict[str, float] = field(default_factory=dict)
    evaluation_due: bool = False
    """Whether this step has yet to be evaluated, because the run was asked to stop here."""
    trained: TrainedRows | None = field(default_factory=TrainedRows)
    """Rows trained by this worker in this attempt, on worker 0 also in earlier ones. None if a
    batch did not provide its rows.
    """

    def set_target(self, target: float | None) -> None:
        """Set the target. No evaluation has reached a new one."""
        if target == self.target:
            return
        self.target = target
        self.target_step = None
        self.target_rows = None
        self.target_s = None

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint, equal on all workers; collective."""
        trained = self.trained_by_all()
        plain = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name != "trained"
        }
        return {**plain, "trained": trained and trained.to_dict()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, rank: int) -> Progress:
        """Restore the result of `state`. Checkpoints of earlier versions have no `trained`; a NaN
        metric is stored as null.
        """
        stored = state.get("trained")
        trained = (
            None
            if stored is None
            else TrainedRows.from_dict(stored)
            if rank == 0
            else TrainedRows()
        )
        metrics = {
            name: {
                metric: math.nan if value is None else value
                for metric, value in state[name].items()
            }
            for name in ("metrics", "best_metrics")
            if name in state
        }
        return cls(**{**state, **metrics, "trained": trained})

    def trained_by_all(self) -> TrainedRows | None:
        """Return the rows trained by all workers, or None if a batch did not provide its rows;
        collective.
        """
        _, (unknown,) = over_workers(float(self.trained is None))
        if unknown or self.trained is None:
            return None
        # Sent as bytes and added here, modulo 2^64.
        checksums = torch.frombuffer(
            bytearray(np.array(self.trained.checksums, "<u8").tobytes()), dtype=torch.uint8
        )
        pairs = (
            np.frombuffer(each.cpu().numpy().tobytes(), "<u8").tolist()
            for each in gathered(checksums)
        )
        return TrainedRows.total(
            sum_over_workers(self.trained.counts.copy()),
            ((first, second) for first, second in pairs),
        )

    def count(self, rows: RowNumbers | None) -> None:
        if rows is None:
            self.trained = None
        elif self.trained is not None:
            self.trained.add(rows)


class StopSignal(Protocol):
    """Reasons for an early save."""

    def poll(self) -> tuple[bool, bool]:
        """Return (whether a stop was requested or a node is to go, whether to poll for preemption
        notices); cheap, local.
        """

    def preempted(self) -> bool:
        """Return whether to save because of a new preemption notice for a worker's node;
        collective.
        """

    def urgent(self) -> bool:
        """Return whether this worker was asked to stop for a reason that cannot wait for the end of
        an evaluation; local.
        """


class Save(Protocol):
    def __call__(
        self,
        progress: Progress,
        loader_state: dict[str, Any],
        *,
        score: float | None,
        needed: bool,
        complete: bool,
    ) -> None:
        """Save `progress` and the loader state. `score` is None if these weights were not
        evaluated. `needed`: whether to save even if the previous save is late. `complete`: whether
        to return only when the checkpoint is in storage.
        """


@dataclass(frozen=True, kw_only=True)
class Training:
    """Parts of one worker's training, for any loop."""

    config: TrainConfig
    setup: WorkerSetup
    loader: TrainLoader
    progress: Progress
    log: Callable[[str, dict[str, Any]], None]
    """Function called on every worker with the same kind and fields."""
    save: Save
    stop_signal: StopSignal
    first_step: FirstStep | None = None
    pause_at: float | None = None
    """Share of the run's steps after which it pauses. None for all of them."""


def judge(progress: Progress, score: float, *, min_improvement: float) -> None:
    """Record an evaluation score for early stopping. As in Keras and Lightning, patience counts
    from the last evaluation that beat the reference by more than `min_improvement`. Smaller
    improvements do not move the reference, so several of them add up. The best score is the
    maximum; of equal scores the latest counts, as in checkpoint retention.
    """
    reference = progress.best if progress.last_improvement is None else progress.last_improvement
    if reference is None or score > reference + min_improvement:
        progress.since_best = 0
        progress.last_improvement = score
    else:
        progress.since_best += 1
    if progress.best is None or score >= progress.best:
        progress.best = score
        progress.best_step = progress.step
        progress.best_metrics = progress.metrics


def meet_target(progress: Progress, workload: Workload) -> None:
    """Record that an evaluation reached the target, if it is the first. An undefined metric does
    not.
    """
    _, value, sign = workload.target_value(progress.metrics)
    if (
        progress.target is not None
        and progress.target_step is None
        and sign * value >= sign * progress.target
    ):
        progress.target_step = progress.step
        progress.target_rows = progress.rows
        progress.target_s = progress.train_s + progress.evaluation_s


def target_fields(progress: Progress, workload: Workload) -> dict[str, Any]:
    """Return event fields on the target: value, metric, and step, rows and seconds until reached,
    or None. Empty without one.
    """
    if progress.target is None or not progress.metrics:
        return {}
    metric, *_ = workload.target_value(progress.metrics)
    reached = {name: getattr(progress, name) for name in ("target_step", "target_rows", "target_s")}
    return {"target": progress.target, "target_metric": metric, **reached}


def lower_on_plateau(progress: Progress, score: float, plateau: PlateauConfig) -> bool:
    """Record an evaluation score. Returns whether the learning rates were lowered."""
    if not plateau.patience:
        return False
    if (
        progress.plateau_reference is None
        or score > progress.plateau_reference + plateau.min_improvement
    ):
        progress.plateau_reference = score
        progress.plateau_evaluations = 0
        return False
    progress.plateau_evaluations += 1
    if progress.plateau_evaluations < plateau.patience:
        return False
    progress.plateau_evaluations = 0
    progress.learning_rate_scale *= plateau.factor
    return True


def with_lowered_rates(
    setup: WorkerSetup, progress: Progress, plateau: PlateauConfig
) -> Callable[[int, int], None]:
    """Return `setup.begin_step` extended by the learning rate factor of `progress`."""
    begin_step = setup.begin_step

    def begin(step: int, total: int) -> None:
        begin_step(step, total)
        if progress.learning_rate_scale != 1.0:
            for group in setup.optimizer.param_groups:
                group["lr"] = plateau.learning_rate(
                    float(group["lr"]), scale=progress.learning_rate_scale
                )

    return begin
