"""Losses and speed of a real `rayrec.train` run, read from its events."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rows import attempt, emit, in_turn, median_of, note
from subprocesses import child

from rayrec.observe.console import Console
from rayrec.observe.events import read_events
from rayrec.workloads.base import TrainConfig


def measured_run(config: TrainConfig, *, warm_steps: int) -> dict[str, Any]:
    """Train and return the run's measurements.

    `losses`: global mean of each logged step. `rows_per_s` and `blocked_fraction`: of steps after
    the warm-up. `config_hash`: from the summary.
    """
    import rayrec

    with tempfile.TemporaryDirectory() as storage:
        result = rayrec.train(
            config.replace(storage_path=storage, name="run"), console=Console(quiet=True)
        )
        events = read_events(os.path.join(result.folder, "events.jsonl"), kinds={"step"})
    measurements = {
        "losses": [event["loss"] for event in events],
        "config_hash": result.summary["config_hash"],
    }
    return {**measurements, **warm_speed(events, warm_steps=warm_steps)}


def matrix_peak(precision: str, *, engine: str = "onednn") -> Any:
    """Return the multiply-adds and additions a second of large matrix products, in a fresh
    process.
    """
    script = str(Path(__file__).with_name("train_benchmark.py"))
    return attempt(
        f"matrix peak, {engine}",
        partial(child, script, "matrix_peak", precision=precision, engine=engine),
    )


def warm_speed(events: list[dict[str, Any]], *, warm_steps: int) -> dict[str, float]:
    """Return `rows_per_s` and `blocked_fraction` of step events after the warm-up, or {} without
    such events.
    """
    late = [(a["rows"], b) for a, b in pairwise(events) if a["step"] >= warm_steps]
    if not late:
        return {}
    # Each event has the speed since the previous event.
    seconds = [(event["rows"] - rows) / event["rows_per_s"] for rows, event in late]
    blocked_s = sum(
        event["blocked_fraction"] * weight for (_, event), weight in zip(late, seconds, strict=True)
    )
    rows = late[-1][1]["rows"] - late[0][0]
    return {"rows_per_s": rows / sum(seconds), "blocked_fraction": blocked_s / sum(seconds)}


def largest_difference(losses: list[float], peer: list[float]) -> float:
    """Return the largest difference between two loss curves of equal length."""
    return max(abs(a - b) for a, b in zip(losses, peer, strict=True))


def interleaved_rates(
    repeats: int, **candidates: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the candidates `in_turn`: the median `rows_per_s` of each, and the last result of
    each.
    """
    by_name = in_turn(
        repeats, lambda number: candidates, shown=lambda result: f"{result['rows_per_s']:,.1f}/s"
    )
    rates = {
        name: median_of(results, lambda result: result["rows_per_s"])
        for name, results in by_name.items()
    }
    return rates, {name: results[-1] for name, results in by_name.items()}


def emit_losses(
    name: str, *, peer: str, workload: str, result: dict[str, Any], peer_losses: list[float]
) -> None:
    """Print a row with the largest difference between a run's loss curve (of `measured_run`) and
    the peer's.
    """
    steps = len(peer_losses)
    difference = largest_difference(result["losses"], peer_losses)
    emit(
        name,
        peer=peer,
        workload=f"{workload}: global mean loss of each of the first {steps} steps",
        unit="max_loss_difference",
        value=difference,
        ratio=None,
        repeats=1,
        config_hash=result["config_hash"],
        first_loss=round(peer_losses[0], 6),
        last_loss=round(peer_losses[-1], 6),
    )
    note(f"  {workload}: losses differ by {difference:.2g} at most over {steps} steps")
