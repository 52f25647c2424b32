"""What the events of a run add up to: its curves, its attempts, and how it stands. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayrec.observe.accounting import Restart, restarts

Event = Mapping[str, Any]
VALIDATION = "validation_"
"""What names of validation metrics begin with in a row of `logged`."""
_FIELDS = ("rows", "loss", "rows_per_s", "blocked_fraction")
_NO_METRICS = {"time", "kind", "step", "set"}


def logged(events: Iterable[Event]) -> list[dict[str, Any]]:
    """A row for each step that was logged or evaluated, by step: `step`, `epoch` (passes over the training rows so far, in part
    too; needs the event of kind prepared), `rows`, `loss`, `rows_per_s`, `blocked_fraction`,
    `validation_METRIC` and `time_s`, seconds since the run began; what was not logged is not there. Steps that were done again
    after a failure appear once, as they were the last time."""
    rows: dict[int, dict[str, Any]] = {}
    begin_s: float | None = None
    rows_per_epoch = 0
    for event in events:
        begin_s = event["time"] if begin_s is None else begin_s
        if event["kind"] == "prepared":
            rows_per_epoch = event.get("rows_of_sets", {}).get("train", 0)
        if event["kind"] == "start":  # what lies behind its step is done anew
            rows = {step: row for step, row in rows.items() if step <= event["step"]}
        elif event["kind"] == "step":
            new = {name: event[name] for name in _FIELDS}
            if rows_per_epoch:
                new["epoch"] = event["rows"] / rows_per_epoch
        elif event["kind"] == "evaluate" and event["set"] == "validation":
            new = {VALIDATION + name: value for name, value in metrics_of(event).items()}
        else:
            continue
        if event["kind"] != "start":
            rows.setdefault(event["step"], {"step": event["step"]}).update(new, time_s=event["time"] - begin_s)
    return [rows[step] for step in sorted(rows)]


def metrics_of(evaluation: Event) -> dict[str, Any]:
    """The metrics of an event of kind evaluate."""
    return {name: value for name, value in evaluation.items() if name not in _NO_METRICS}


@dataclass(frozen=True)
class Attempt:
    """One time that workers were started."""

    begin_s: float
    """Seconds since the run began."""
    num_workers: int | None = None
    first_step: int | None = None
    """None where it failed before training began."""
    last_step: int | None = None
    """Logged by it."""
    end: str | None = None
    """Why it ended; None where nothing tells."""
    restart: Restart | None = None
    """What it cost to get from the attempt before to this one's training."""


def attempts(events: Sequence[Event]) -> list[Attempt]:
    """Every attempt of a run, in order."""
    found: list[Attempt] = []
    costs = iter(restarts(events))
    begun = driver_begun = False
    for event in events:
        kind = event["kind"]
        if kind == "run":
            driver_begun = True
        elif kind == "attempt":
            found = [*_lost(found, driver_begun), Attempt(_since(events, event), event["num_workers"])]
            driver_begun = False
        elif kind == "start":
            if not found or found[-1].first_step is not None:  # not told of by an event of its own
                found = [*_lost(found, driver_begun), Attempt(_since(events, event))]
            found[-1] = replace(
                found[-1],
                num_workers=event["world_size"],
                first_step=event["step"],
                restart=next(costs) if begun else None,
            )
            begun, driver_begun = True, False
        elif found and kind in ("step", "evaluate"):
            found[-1] = replace(found[-1], last_step=event["step"])
        elif found and kind == "failure" and not driver_begun and found[-1].end is None:
            found[-1] = replace(found[-1], end=event["cause"])
        elif found and kind == "stop":
            found[-1] = replace(found[-1], last_step=event["step"], end=f"stopped: {event['cause']}")
        elif found and kind == "finish":
            found[-1] = replace(found[-1], last_step=event["step"], end="finished")
        elif kind == "summary":
            begun = False  # what comes now was asked for besides
    return found


def _lost(found: list[Attempt], driver_begun: bool) -> list[Attempt]:
    """The attempts so far, now that another one begins."""
    if not found or found[-1].end is not None:
        return found
    return [*found[:-1], replace(found[-1], end="the driver was lost" if driver_begun else "the workers were lost")]


def _since(events: Sequence[Event], event: Event) -> float:
    return event["time"] - events[0]["time"]


def standing(events: Sequence[Event]) -> str:
    """How the run stands, as far as its last events tell."""
    steps = [event for event in events if event["kind"] == "step"]
    reached = f" at step {steps[-1]['step']:,} of {steps[-1]['steps']:,}" if steps else " before its first step"
    for event in reversed(events):
        if event["kind"] in ("summary", "finish"):
            return "finished"
        if event["kind"] == "stop":
            return f"stopped ({event['cause']}){reached}"
        if event["kind"] == "failure":
            return f"failed ({event['cause']}){reached}"
        if event["kind"] in ("start", "run", "attempt"):
            break
    return f"not finished{reached}"
