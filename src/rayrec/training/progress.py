"""Progress of a run, and the parts of one worker's training that any loop needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

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
_Part = TypeVar("_Part")


@dataclass
class Counters:
    """Steps, rows and seconds of a run so far."""

    step: int = 0
    rows: int = 0
    """Rows trained by all workers."""
    train_s: float = 0.0
    """Seconds in training segments."""
    blocked_s: float = 0.0
    """Seconds spent waiting for data within `train_s` (mean over workers)."""
    evaluation_s: float = 0.0
    """Seconds in completed evaluations (of the slowest worker)."""

    def update(self, *, rows: int, train_s: float, blocked_s: float) -> None:
        """Add the rows and seconds of a logged interval, whose steps are counted one by one."""
        self.rows += rows
        self.train_s += train_s
        self.blocked_s += blocked_s

    @property
    def blocked_fraction(self) -> float:
        return self.blocked_s / self.train_s if self.train_s else 0.0


@dataclass
class EarlyStopping:
    """Best evaluation, and evaluations since the last sufficient improvement."""

    best: float | None = None
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    since_best: int = 0
    """Evaluations since the last one that improved by more than
    `early_stopping.min_improvement`.
    """
    last_improvement: float | None = None
    """Score of that evaluation, the reference for the next ones."""

    def update(
        self, score: float, *, step: int, metrics: dict[str, float], min_improvement: float
    ) -> None:
        """Record an evaluation. As in Keras and Lightning, patience counts from the last evaluation
        that beat the reference by more than `min_improvement`. Smaller improvements do not move the
        reference, so several of them add up. The best score is the maximum; of equal scores the
        latest counts, as in checkpoint retention.
        """
        reference = self.best if self.last_improvement is None else self.last_improvement
        if reference is None or score > reference + min_improvement:
            self.since_best = 0
            self.last_improvement = score
        else:
            self.since_best += 1
        if self.best is None or score >= self.best:
            self.best = score
            self.best_step = step
            self.best_metrics = metrics

    def is_exhausted(self, patience: int) -> bool:
        """Return whether to stop. A patience of 0 never stops."""
        return 0 < patience <= self.since_best


@dataclass
class Plateau:
    """Learning rates lowered when evaluations stop improving."""

    learning_rate_scale: float = 1.0
    """Factor of the schedule's learning rates."""
    plateau_reference: float | None = None
    """Score of the last evaluation that improved by more than `plateau.min_improvement`."""
    plateau_evaluations: int = 0
    """Evaluations since that one, or since the learning rates were lowered."""

    def update(self, score: float, plateau: PlateauConfig) -> bool:
        """Record an evaluation score. Returns whether the learning rates were lowered."""
        if not plateau.patience:
            return False
        reference = self.plateau_reference
        if reference is None or score > reference + plateau.min_improvement:
            self.plateau_reference = score
            self.plateau_evaluations = 0
            return False
        self.plateau_evaluations += 1
        if self.plateau_evaluations < plateau.patience:
            return False
        self.plateau_evaluations = 0
        self.learning_rate_scale *= plateau.factor
        return True


@dataclass
class Target:
    """Metric value that ends the run, and the first counted evaluation that reached it."""

    target: float | None = None
    """`early_stopping.target` of the next fields."""
    target_step: int | None = None
    """Step of that evaluation, None before."""
    target_rows: int | None = None
    """Rows trained at that step."""
    target_s: float | None = None
    """Seconds of training and evaluations after that evaluation."""

    def set(self, target: float | None) -> None:
        """Set the target. No evaluation has reached a new one."""
        if target != self.target:
            vars(self).update(vars(Target(target)))

    def update(self, value: float, *, sign: float, counters: Counters) -> None:
        """Record an evaluation. `sign`: 1 if a higher value is better, -1 if a lower one is. An
        undefined value does not reach the target.
        """
        if self.target is None or self.target_step is not None:
            return
        if sign * value >= sign * self.target:
            self.target_step = counters.step
            self.target_rows = counters.rows
            self.target_s = counters.train_s + counters.evaluation_s


@dataclass
class Progress:
    """Progress of a run; saved with every checkpoint."""

    counters: Counters = field(default_factory=Counters)
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    plateau: Plateau = field(default_factory=Plateau)
    target: Target = field(default_factory=Target)
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation."""
    evaluation_due: bool = False
    """Whether this step has yet to be evaluated, because the run was asked to stop here."""
    trained: TrainedRows | None = field(default_factory=TrainedRows)
    """Rows trained by this worker in this attempt, on worker 0 also in earlier ones. None if a
    batch did not provide its rows.
    """

    @property
    def step(self) -> int:
        return self.counters.step

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint, equal on all workers; collective. The parts' fields
        are at one level, as in earlier versions.
        """
        trained = self.trained_by_all()
        return {
            **vars(self.counters),
            **vars(self.early_stopping),
            **vars(self.plateau),
            **vars(self.target),
            "metrics": self.metrics,
            "evaluation_due": self.evaluation_due,
            "trained": trained and trained.to_dict(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, rank: int) -> Progress:
        """Restore the result of `state`. Checkpoints of earlier versions have fewer fields and no
        `trained`; a NaN metric is stored as null.
        """
        stored = dict(state)
        for name in ("metrics", "best_metrics"):
            stored[name] = {
                metric: math.nan if value is None else value
                for metric, value in state.get(name, {}).items()
            }
        if state.get("trained") is None:
            trained = None
        elif rank == 0:
            trained = TrainedRows.from_dict(state["trained"])
        else:
            # Only rank 0 continues the record: it is a sum over all workers.
            trained = TrainedRows()
        return cls(
            _part(Counters, stored),
            _part(EarlyStopping, stored),
            _part(Plateau, stored),
            _part(Target, stored),
            metrics=stored["metrics"],
            evaluation_due=stored.get("evaluation_due", False),
            trained=trained,
        )

    def trained_by_all(self) -> TrainedRows | None:
        """Return the rows trained by all workers, or None if a batch did not provide its rows;
        collective.
        """
        # All workers or none must take part in the next collectives, so they first agree on what is
        # known.
        _, (unknown,) = over_workers(float(self.trained is None))
        if unknown or self.trained is None:
            return None
        import torch

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


def _part(part: type[_Part], stored: Mapping[str, Any]) -> _Part:
    """Return a part of the progress from the fields that an earlier version may have stored."""
    names = vars(part()).keys() & stored.keys()
    return part(**{name: stored[name] for name in names})


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


def target_fields(progress: Progress, workload: Workload) -> dict[str, Any]:
    """Return event fields on the target: value, metric, and step, rows and seconds until reached,
    or None. Empty without one.
    """
    if progress.target.target is None or not progress.metrics:
        return {}
    metric, *_ = workload.target_value(progress.metrics)
    return {**vars(progress.target), "target_metric": metric}


def with_lowered_rates(
    setup: WorkerSetup, progress: Progress, plateau: PlateauConfig
) -> Callable[[int, int], None]:
    """Return `setup.begin_step` extended by the learning rate factor of `progress`."""
    begin_step = setup.begin_step

    def begin(step: int, total: int) -> None:
        begin_step(step, total)
        if progress.plateau.learning_rate_scale != 1.0:
            for group in setup.optimizer.param_groups:
                group["lr"] = plateau.learning_rate(
                    float(group["lr"]), scale=progress.plateau.learning_rate_scale
                )

    return begin
