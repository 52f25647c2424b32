"""Numbers, epochs and intervals that trackers get from events, and the identity of a run. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

Event = Mapping[str, Any]
_PREFIXES = {"step": "train", "checkpoint": "checkpoint", "data": "data"}
_NO_MEASURES = {"time", "kind", "step", "steps", "set"}


def scalars(event: Event) -> dict[str, float]:
    """The measures of an event by name: train/loss, train/times_s/forward, validation/auroc, checkpoint/stall_s, final/auroc,
    data/backlog_rows, data/parse/busy (of a stage); nothing of kinds that measure nothing. What was not finite is left out."""
    kind = event["kind"]
    if kind == "finish":
        return dict(_numbers(event["metrics"], "final"))
    prefix = str(event["set"]) if kind == "evaluate" else _PREFIXES.get(kind)
    if prefix is None:
        return {}
    measures = {name: value for name, value in event.items() if name not in _NO_MEASURES}
    if kind == "data":
        measures |= {stage["stage"]: stage for stage in measures.pop("stages", ())}
    return dict(_numbers(measures, prefix))


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}/{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


@final
class Firsts:
    """Knows what was told before, for trackers that cannot take anything back: steps that are done again after a failure
    give the same numbers, and count once."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], int] = {}

    def new(self, event: Event) -> bool:
        """Whether an event that has a step is the first of its kind for it; says so once."""
        of, step = series(event), event["step"]
        if step <= self._last.get(of, -1):
            return False
        self._last[of] = step
        return True

    def told(self, of: tuple[str, str], step: int) -> None:
        """Steps up to this one were told by an earlier driver."""
        self._last[of] = max(step, self._last.get(of, -1))

    def knows(self, of: tuple[str, str]) -> bool:
        return of in self._last


def series(event: Event) -> tuple[str, str]:
    """The curve an event belongs to: its kind, and, of an evaluation, the set."""
    return event["kind"], str(event.get("set", ""))


@dataclass(frozen=True)
class Interval:
    """What lies between two logs of one attempt."""

    steps: int
    rows: int
    elapsed_s: float
    """Zero where the speed is not known."""


@final
class Intervals:
    """Tells steps and rows apart that the totals of events add up."""

    def __init__(self) -> None:
        self._step = self._rows = 0

    def begin(self, start: Event) -> int:
        """An attempt starts; returns how many steps that were logged before are to be done again."""
        again = max(0, self._step - start["step"])
        self._step, self._rows = start["step"], start.get("rows", 0)
        return again

    def of(self, event: Event) -> Interval:
        """What the event of kind step closes. Events of an attempt come in the order of their steps."""
        rows = event["rows"] - self._rows
        interval = Interval(
            steps=event["step"] - self._step,
            rows=rows,
            elapsed_s=rows / event["rows_per_s"] if event["rows_per_s"] else 0.0,
        )
        self._step, self._rows = event["step"], event["rows"]
        return interval


@final
class Epochs:
    """Follows the events of a run. An epoch is the training rows once, in batches of all workers, of which it has
    `steps_per_epoch` in the present attempt; where the events do not tell these, the whole run counts as one epoch."""

    def __init__(self) -> None:
        self._train_rows = 0
        self.global_batch_size: int | None = None
        self.steps_per_epoch = 1
        self._step = self._rows = 0

    def update(self, event: Event) -> None:
        """Takes an event of kind prepared, start or step; others tell nothing here."""
        if event["kind"] == "prepared":
            sets: dict[str, Any] = event.get("rows_of_sets", {})
            self._train_rows = sets.get("train", 0)
        elif event["kind"] == "start":
            batch_size = event.get("batch_size")
            self.global_batch_size = batch_size and batch_size * event["world_size"]
            batches = -(-self._train_rows // self.global_batch_size) if self.global_batch_size else 0
            self.steps_per_epoch = max(1, batches or event["steps"])
            self._step, self._rows = event["step"], event.get("rows", event["step"] * (self.global_batch_size or 0))
        elif event["kind"] == "step":
            self._step, self._rows = event["step"], event["rows"]

    def rows(self, step: int) -> int:
        """Trained once `step` steps of the run are done. Attempts may have batches of different sizes, so rows are counted, not
        steps."""
        return self._rows + (step - self._step) * (self.global_batch_size or 0)

    def done(self, step: int) -> float:
        """Epochs that are done then, in part too."""
        return self.rows(step) / self._train_rows if self._knows() else step / self.steps_per_epoch

    def of(self, step: int) -> tuple[int, int]:
        """(epoch from 0, steps done of it from 1) once `step` steps of the run are done."""
        if not self._knows():
            return max(0, step - 1) // self.steps_per_epoch, max(0, step - 1) % self.steps_per_epoch + 1
        assert self.global_batch_size
        epoch, rows = divmod(max(0, self.rows(step) - 1), self._train_rows)
        return epoch, rows // self.global_batch_size + 1

    def _knows(self) -> bool:
        return bool(self._train_rows and self.global_batch_size)


def run_identity(name: str, begin_s: float) -> str:
    """16 hex digits: the same for all drivers of a run, others for a run of the same name that is started again. `begin_s` is the
    time of its first event."""
    return hashlib.sha256(f"{name} {begin_s:.6f}".encode()).hexdigest()[:16]
