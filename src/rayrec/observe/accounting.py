"""What failures and saves cost a run, reckoned from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

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
    """Every restart that the events of a run (in order of time) tell of. Pure."""
    found: list[Restart] = []
    alive_s: float | None = None
    step, cause = 0, None
    pending: tuple[str, float, int] | None = None
    for event in events:
        kind = event["kind"]
        if kind == "failure":
            # What ends a driver is told last, and what ended the training before it counts.
            cause = (event.get("last") and cause) or event["cause"]
        elif kind == "stop":
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
        if kind in _SIGNS_OF_LIFE:
            alive_s = event["time"]
        elif kind == "summary":  # a finished run that is trained for longer was not held up
            alive_s = cause = None
    if pending is not None:
        assert alive_s is not None
        found.append(Restart(pending[0], alive_s - pending[1], pending[2]))
    return found


def costs(events: Iterable[Mapping[str, Any]], *, train_s: float) -> dict[str, Any]:
    """The part of a run's summary that tells of restarts and saves. Pure."""
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
