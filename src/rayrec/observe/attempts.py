"""Attempts of a run from its events: start, end, cause, and restart cost. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

Event = Mapping[str, Any]
_SIGNS_OF_LIFE: Final = {"start", "step", "evaluate", "checkpoint", "stop"}


@dataclass(frozen=True)
class Restart:
    """A restart of training."""

    cause: str
    lost_s: float
    """Seconds from the last sign of training before the restart to the first step logged after it."""
    steps_redone: int
    """Number of logged steps that were trained again."""


@dataclass(frozen=True)
class Attempt:
    """One start of the workers."""

    begin_s: float
    """Start, in seconds since the run began."""
    num_workers: int | None = None
    first_step: int | None = None
    """None if it failed before training began."""
    last_step: int | None = None
    """Last step logged by this attempt."""
    end: str | None = None
    """Cause of its end. None if unknown."""
    restart: Restart | None = None
    """Cost of resuming training after the previous attempt."""


@final
class Attempts:
    """Attempts of a run, built from its events in time order."""

    def __init__(self) -> None:
        self.all: Final[list[Attempt]] = []
        self._begin_s: float | None = None
        self._driver_begun = False
        self._step = 0
        self._cause: str | None = None
        """Cause of the previous training's end."""
        self._alive_s: float | None = None
        """Time of the last sign of training. None if no sign is expected."""
        self._restarting: tuple[int, float] | None = None
        """Index of the restarted attempt without a step so far, and time of the last sign of training before it."""

    def update(self, event: Event) -> None:
        """Process the next event."""
        kind = event["kind"]
        self._begin_s = event["time"] if self._begin_s is None else self._begin_s
        is_planned = kind == "summary" or bool(kind == "stop" and event.get("paused"))
        self._prolong_restart(event, is_planned=is_planned)
        if kind == "run":
            self._driver_begun = True
            if self._alive_s is not None:
                self._cause = self._cause or "the driver was lost"
        elif kind == "attempt":
            self._append(event, num_workers=event.get("num_workers"))
        elif kind == "start":
            self._start(event)
        elif kind == "failure":
            if not self._driver_begun and self.all and self.all[-1].end is None:
                self._change(end=event["cause"])
            # The failure of a driver comes last. The cause that ended the training before it counts.
            self._cause = (event.get("last") and self._cause) or event["cause"]
        elif kind == "stop":
            self._change(last_step=event["step"], end=f"stopped: {event['cause']}")
            self._cause = self._cause or f"stopped: {event['cause']}"
        elif kind == "finish":
            self._change(last_step=event["step"], end="finished")
        elif kind in ("step", "evaluate"):
            self._change(last_step=event["step"])
            self._step = event["step"] if kind == "step" else self._step
        if is_planned:  # Extending or pausing a run is not a loss.
            self._alive_s = self._cause = None
        elif kind in _SIGNS_OF_LIFE:
            self._alive_s = event["time"]

    def _start(self, event: Event) -> None:
        if not self.all or self.all[-1].first_step is not None:
            self._append(event)  # No attempt event preceded it.
        self._driver_begun = False
        self._change(num_workers=event.get("world_size"), first_step=event["step"])
        if self._alive_s is not None:
            redone, cause = max(0, self._step - event["step"]), self._cause or "the workers were lost"
            self._change(restart=Restart(cause, event["time"] - self._alive_s, redone))
            self._restarting = len(self.all) - 1, self._alive_s
        self._step, self._cause = event["step"], None

    def _append(self, event: Event, num_workers: int | None = None) -> None:
        if self.all and self.all[-1].end is None:
            self._change(end="the driver was lost" if self._driver_begun else "the workers were lost")
        assert self._begin_s is not None
        self.all.append(Attempt(event["time"] - self._begin_s, num_workers))
        self._driver_begun = False

    def _change(self, **fields: Any) -> None:
        if self.all:
            self.all[-1] = replace(self.all[-1], **fields)

    def _prolong_restart(self, event: Event, *, is_planned: bool) -> None:
        """Extend the current restart until a step is trained, or until it fails again before that."""
        kind = event["kind"]
        if self._restarting is None or not (is_planned or kind == "finish" or kind in _SIGNS_OF_LIFE):
            return
        number, alive_s = self._restarting
        restart = self.all[number].restart
        assert restart is not None
        self.all[number] = replace(self.all[number], restart=replace(restart, lost_s=event["time"] - alive_s))
        if is_planned or kind in ("start", "step", "finish"):
            self._restarting = None
