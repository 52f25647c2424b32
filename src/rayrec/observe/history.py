"""Sums over the events of a run: curves, attempts, restarts, status, and cost in time and money. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from rayrec.config import InputError

_SIGNS_OF_LIFE = {"start", "step", "evaluate", "checkpoint", "stop"}


@dataclass(frozen=True)
class Restart:
    """One time that training began again."""

    cause: str
    lost_s: float
    """From the last sign of training before to the first step logged after it."""
    steps_redone: int
    """Steps logged before that had to be trained again."""


def restarts(events: Iterable[Mapping[str, Any]]) -> list[Restart]:
    """Every restart in the events of a run (in order of time). Pure."""
    found: list[Restart] = []
    alive_s: float | None = None
    step, cause = 0, None
    pending: tuple[str, float, int] | None = None
    for event in events:
        kind = event["kind"]
        if kind == "failure":
            # What ends a driver is told last, and what ended the training before it counts.
            cause = (event.get("last") and cause) or event["cause"]
        elif kind == "stop" and not _is_asked_for(event):
            cause = cause or f"stopped: {event['cause']}"
        elif kind == "run" and alive_s is not None:
            cause = cause or "the driver was lost"
        if kind == "start":
            if alive_s is not None:
                if pending is not None:  # it failed again before it trained
                    found.append(Restart(pending[0], event["time"] - pending[1], pending[2]))
                pending = cause or "the workers were lost", alive_s, max(0, step - event["step"])
            step, cause = event["step"], None
        elif kind == "step":
            step = event["step"]
        if kind in ("step", "finish", "summary") and pending is not None:
            found.append(Restart(pending[0], event["time"] - pending[1], pending[2]))
            pending = None
        if _is_asked_for(event):  # a run that is trained for longer, or was paused, was not held up
            alive_s = cause = None
        elif kind in _SIGNS_OF_LIFE:
            alive_s = event["time"]
    if pending is not None:
        assert alive_s is not None
        found.append(Restart(pending[0], alive_s - pending[1], pending[2]))
    return found


def _is_asked_for(event: Mapping[str, Any]) -> bool:
    """Whether an event ends the training as its driver wished; what comes later was asked for besides."""
    return event["kind"] == "summary" or bool(event["kind"] == "stop" and event.get("paused"))


def costs(events: Iterable[Mapping[str, Any]], *, train_s: float) -> dict[str, Any]:
    """The part of a run's summary about restarts and saves. Pure."""
    events = list(events)
    again = restarts(events)
    stall_s = sum(event["stall_s"] for event in events if event["kind"] == "checkpoint")
    return {
        "restarts": len(again),
        "restart_causes": [asdict(restart) for restart in again],
        "lost_s": sum(restart.lost_s for restart in again),
        "steps_redone": sum(restart.steps_redone for restart in again),
        "checkpoint_stall_s": stall_s,
        "checkpoint_stall_fraction": stall_s / (train_s + stall_s) if train_s + stall_s else 0.0,
    }


Event = Mapping[str, Any]
VALIDATION = "validation_"
"""What names of validation metrics begin with in a row of `logged`."""
_FIELDS = ("rows", "loss", "rows_per_s", "blocked_fraction")
_NO_METRICS = {"time", "kind", "step", "set", "counted"}


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
        if event["kind"] == "start":  # what lies behind its step is done again
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
            if not found or found[-1].first_step is not None:  # without an event of its own
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
        if _is_asked_for(event):
            begun = False
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


_POINT = 0.01
"""Of AUROC."""


@dataclass(frozen=True)
class Price:
    """What the machines cost."""

    per_node_hour: float
    """In `currency`."""
    nodes: int = 1
    currency: str = "USD"

    def __post_init__(self) -> None:
        if self.per_node_hour < 0 or self.nodes < 1:
            raise InputError(
                f"price_per_node_hour {self.per_node_hour}, nodes {self.nodes}: at least 0, and at least 1 node"
            )


@dataclass(frozen=True)
class Cost:
    """Of a run so far; None where it cannot be told."""

    node_hours: float
    total: float
    per_epoch: float | None
    """Over the epochs trained, whole or not."""
    per_auroc_point: float | None
    """For each 0.01 of AUROC above 0.5, which guessing has."""
    currency: str = "USD"


def cost(events: Sequence[Event], price: Price) -> Cost:
    """Counts the time from each start of the driver to the last that is heard of it; machines that stand idle between are not the
    run's."""
    hours = working_s(events) / 3600 * price.nodes
    total = hours * price.per_node_hour
    epochs, auroc = _epochs(events), _auroc(events)
    return Cost(
        node_hours=hours,
        total=total,
        per_epoch=total / epochs if epochs else None,
        per_auroc_point=total / ((auroc - 0.5) / _POINT) if auroc is not None and auroc > 0.5 else None,
        currency=price.currency,
    )


def working_s(events: Sequence[Event]) -> float:
    """Seconds for which the drivers of a run were at work; the time between them is left out. Pure."""
    total = 0.0
    for before, event in pairwise(events):
        if event["kind"] != "run":
            total += event["time"] - before["time"]
    return total


def epochs_trained(rows: int | None, rows_of_sets: Mapping[str, int]) -> float | None:
    """Passes over the training rows that so many rows trained are, whole or not; None where that is not known. Pure."""
    return rows / rows_of_sets["train"] if rows is not None and rows_of_sets.get("train") else None


def _epochs(events: Sequence[Event]) -> float | None:
    sets: Mapping[str, Any] = next((event["rows_of_sets"] for event in reversed(events) if "rows_of_sets" in event), {})
    rows = next((event["rows"] for event in reversed(events) if event["kind"] == "step"), None)
    return epochs_trained(rows, sets)


def _auroc(events: Sequence[Event]) -> float | None:
    for event in reversed(events):
        if event["kind"] == "finish" and "metrics" in event:
            return event["metrics"].get("auroc")
        if event["kind"] == "evaluate" and "auroc" in event:
            return event["auroc"]
    return None
