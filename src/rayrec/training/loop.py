"""The one training loop. It runs in segments; between segments nothing is in flight, so what was pulled was trained."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import distributed

from rayrec.workloads.base import TrainConfig, TrainLoader, WorkerSetup


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
    """Evaluations since the best one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    best_metrics: dict[str, float] = field(default_factory=dict)
    """Of the best one."""

    def blocked_fraction(self) -> float:
        return self.blocked_s / self.train_s if self.train_s else 0.0


class TimedIterator:
    """Hands on the items of an iterator and adds up the time spent waiting for them."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self.blocked_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            return next(self._source)
        finally:
            self.blocked_s += time.perf_counter() - start


def boundaries(
    start: int, stop: int, *, evaluate_every: int, save_every: int | None
) -> Iterator[tuple[int, bool, bool]]:
    """(step, evaluate there, save there) of every segment's end from `start` to `stop`. Pure.

    Saves coincide with evaluations where no interval is given; the end is always evaluated and saved.
    """
    step = start
    while step < stop:
        ahead = [evaluate_every - step % evaluate_every, stop - step]
        if save_every is not None:
            ahead.append(save_every - step % save_every)
        step += min(ahead)
        evaluate = step % evaluate_every == 0 or step == stop
        save = (step % save_every == 0 if save_every is not None else evaluate) or step == stop
        yield step, evaluate, save


def run(
    config: TrainConfig,
    setup: WorkerSetup,
    loader: TrainLoader,
    progress: Progress,
    *,
    log: Callable[[str, dict[str, Any]], None],
    save: Callable[[Progress, dict[str, Any], float | None], None],
) -> None:
    """Trains from `progress` on until the loader ends, the step limit, or early stopping.

    `log(kind, fields)` is called on every worker with the same values; `save(progress, loader_state, score)` is
    collective, its score None where these weights were not evaluated.
    """
    if 0 < config.early_stopping.patience <= progress.since_best:
        return  # it had stopped before
    first_step, rows_before = progress.step, progress.rows
    total = first_step + loader.steps
    evaluate_every = config.evaluate_every or max(1, math.ceil(loader.steps_per_epoch / 4))
    pipeline = setup.pipeline
    setup.model.train()
    for stop, evaluate_now, save_now in boundaries(
        first_step, total, evaluate_every=evaluate_every, save_every=config.checkpoint.every
    ):
        batches = TimedIterator(islice(loader, stop - progress.step))
        losses: list[torch.Tensor] = []
        start_s = time.perf_counter()
        while progress.step < stop:
            setup.set_learning_rate(progress.step, total)
            losses.append(pipeline.progress(batches).loss)
            progress.step += 1
            if progress.step % config.log_every and progress.step < stop:
                continue
            # The one device sync between two logs.
            loss, blocked_s = mean_over_workers(torch.stack(losses).mean().item(), batches.blocked_s)
            now_s = time.perf_counter()
            rows = rows_before + loader.rows(progress.step - first_step) - progress.rows
            progress.rows += rows
            progress.train_s += now_s - start_s
            progress.blocked_s += blocked_s
            fields = {
                "step": progress.step,
                "steps": total,
                "loss": loss,
                "rows": progress.rows,
                "rows_per_s": rows / (now_s - start_s),
                "blocked_fraction": blocked_s / (now_s - start_s),
            }
            log("step", fields)
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at step {progress.step}; lower the learning rates")
            losses, start_s, batches.blocked_s = [], now_s, 0.0
        drain(pipeline, batches)
        score = None
        if evaluate_now:
            progress.metrics = evaluate(setup, "validation")
            score = config.workload.score(progress.metrics)
            judge(progress, score, min_improvement=config.early_stopping.min_improvement)
            log("evaluate", {"step": progress.step, "set": "validation", **progress.metrics})
            setup.model.train()
        patience = config.early_stopping.patience
        stopping = 0 < patience <= progress.since_best
        # With early stopping the best weights are the ones to use, so they are always saved.
        if save_now or stopping or (patience and progress.best_step == progress.step):
            save(progress, loader.state(), score)
        if stopping:
            log("early_stop", {"step": progress.step, "best_step": progress.best_step, "best_score": progress.best})
            return


def judge(progress: Progress, score: float, *, min_improvement: float) -> None:
    """Notes the score of an evaluation. Of equal ones the later counts as best, as it does for what is kept."""
    if progress.best is None or score > progress.best + min_improvement:
        progress.since_best = 0
    else:
        progress.since_best += 1
    if progress.best is None or score >= progress.best:
        progress.best, progress.best_step, progress.best_metrics = score, progress.step, progress.metrics


def drain(pipeline: Any, batches: Iterator[Any]) -> None:
    """Leaves nothing in flight: the iterator is at its end, so the pipeline has no batch to give back."""
    try:
        pipeline.progress(batches)
    except StopIteration:
        pipeline.reset()
        return
    raise AssertionError("the pipeline held a batch that no step was counted for")


@torch.no_grad()
def evaluate(setup: WorkerSetup, name: str) -> dict[str, float]:
    """Scores every row of an evaluation set once; collective."""
    setup.model.eval()
    metrics, batches = setup.make_metrics(), setup.eval_batches[name]()
    while True:
        try:
            metrics.update(setup.pipeline.progress(batches))
        except StopIteration:
            setup.pipeline.reset()
            return metrics.compute()


def mean_over_workers(*values: float) -> list[float]:
    """Means over the workers, in a fixed order of addition; collective."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return list(values)
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyone, mine)
    return torch.stack(everyone).mean(dim=0).tolist()
