"""Attempts of a run: when workers were started, why each attempt ended, and what it cost to begin again. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

Event = Mapping[str, Any]
_SIGNS_OF_LIFE: Final = {"start", "step", "evaluate", "checkpoint", "stop"}


@dataclass(frozen=True)
class Restart:
    """One time that training began again."""

    cause: str
    lost_s: float
    """From the last sign of training before to the first step logged after it."""
    steps_redone: int
    """Steps logged before that had to be trained again."""


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


@final
class Attempts:
    """Takes the events of a run in order of time."""

    def __init__(self) -> None:
        self.all: Final[list[Attempt]] = []
        self._begin_s: float | None = None
        self._driver_begun = False
        self._step = 0
        self._cause: str | None = None
        """Of the end of the training before."""
        self._alive_s: float | None = None
        """The last sign of training; None where none is to be expected."""
        self._restarting: tuple[int, float] | None = None
        """The attempt that was begun again and has not trained yet, and the last sign of training before it."""

    @property
    def restarts(self) -> list[Restart]:
        """Every restart, in order."""
        return [attempt.restart for attempt in self.all if attempt.restart is not None]

    def update(self, event: Event) -> None:
        """Takes in the next event."""
        kind = event["kind"]
        self._begin_s = event["time"] if self._begin_s is None else self._begin_s
        asked_for = kind == "summary" or bool(kind == "stop" and event.get("paused"))
        self._prolong_restart(event, asked_for=asked_for)
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
            # What ends a driver is told last, and what ended the training before it counts.
            self._cause = (event.get("last") and self._cause) or event["cause"]
        elif kind == "stop":
            self._change(last_step=event["step"], end=f"stopped: {event['cause']}")
            self._cause = self._cause or f"stopped: {event['cause']}"
        elif kind == "finish":
            self._change(last_step=event["step"], end="finished")
        elif kind in ("step", "evaluate"):
            self._change(last_step=event["step"])
            self._step = event["step"] if kind == "step" else self._step
        if asked_for:  # a run that is trained for longer, or was paused, was not held up
            self._alive_s = self._cause = None
        elif kind in _SIGNS_OF_LIFE:
            self._alive_s = event["time"]

    def _start(self, event: Event) -> None:
        if not self.all or self.all[-1].first_step is not None:
            self._append(event)  # without an event of its own
        self._driver_begun = False
        self._change(num_workers=event.get("world_size"), first_step=event["step"])
        if self._alive_s is not None:
            redone = max(0, self._step - event["step"])
            cause = self._cause or "the workers were lost"
            self._change(restart=Restart(cause, event["time"] - self._alive_s, redone))
            self._restarting = len(self.all) - 1, self._alive_s
        self._step, self._cause = event["step"], None

    def _append(self, event: Event, num_workers: int | None = None) -> None:
        """Another attempt begins."""
        if self.all and self.all[-1].end is None:
            self._change(end="the driver was lost" if self._driver_begun else "the workers were lost")
        assert self._begin_s is not None
        self.all.append(Attempt(event["time"] - self._begin_s, num_workers))
        self._driver_begun = False

    def _change(self, **fields: Any) -> None:
        if self.all:
            self.all[-1] = replace(self.all[-1], **fields)

    def _prolong_restart(self, event: Event, *, asked_for: bool) -> None:
        """A restart lasts until something is trained, or until it fails again before that."""
        kind = event["kind"]
        if self._restarting is None or not (asked_for or kind == "finish" or kind in _SIGNS_OF_LIFE):
            return
        number, alive_s = self._restarting
        restart = self.all[number].restart
        assert restart is not None
        self.all[number] = replace(self.all[number], restart=replace(restart, lost_s=event["time"] - alive_s))
        if asked_for or kind in ("start", "step", "finish"):
            self._restarting = None
