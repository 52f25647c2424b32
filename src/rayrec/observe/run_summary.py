"""Summary of a run's events: status, attempts, curves, time and cost. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, final

from rayrec.config import InputError
from rayrec.humanize import duration_text
from rayrec.observe.data_side import DataSums
from rayrec.observe.timing import Interval, TimeBreakdown

Event = Mapping[str, Any]
VALIDATION: Final = "validation_"
"""Prefix of validation metrics in the rows of `curve`."""
_CURVE_FIELDS: Final = ("rows", "loss", "rows_per_s", "blocked_fraction")
_NO_METRICS: Final = {"time", "kind", "step", "set", "counted", "seconds", "best"}
_BEGINS: Final = {"run", "attempt", "start"}
_ENDS: Final = {"stop", "failure", "finish", "summary"}
_SIGNS_OF_LIFE: Final = {"start", "step", "evaluate", "checkpoint", "stop"}
_POINT: Final = 0.01
"""One AUROC point."""


def select_metrics(evaluation: Event) -> dict[str, Any]:
    """Return the metrics of an evaluate event."""
    return {name: value for name, value in evaluation.items() if name not in _NO_METRICS}


def target_text(fields: Event) -> str | None:
    """Describe when a run reached its target, from the fields of an event or summary. None without
    a target.
    """
    if fields.get("target") is None:
        return None
    text = f"{fields['target_metric']} {fields['target']:g}"
    if fields["target_step"] is None:
        return f"{text} not reached"
    needed = (
        f"{fields['target_rows']:,} rows, {duration_text(round(fields['target_s']))} of training "
        "and evaluations"
    )
    return f"{text} reached at step {fields['target_step']:,} ({needed})"


def series(event: Event) -> tuple[str, str]:
    """Return the curve of an event: its kind, and the set for evaluations."""
    return event["kind"], str(event.get("set", ""))


@dataclass(frozen=True)
class Restart:
    """A restart of training."""

    cause: str
    lost_s: float
    """Seconds from the last sign of training before the restart to the first step logged after
    it.
    """
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


# Events of a run in time order, and their effect on its attempts. An event may be missing, because
# whatever wrote it was killed.
#
#   run        a driver began; if training had a sign of life, the previous driver was lost
#   attempt    a new attempt; ends the one before as lost if nothing else ended it
#   start      its workers train; the time since the last sign of life is the cost of a restart
#   step       training went on, which ends a restart
#   failure    cause of the end, unless a driver failed only because its workers had
#   stop       ends the attempt; a pause expects no further sign of life
#   finish     ends the attempt
#   summary    the run is complete, so silence from then on is no loss
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
        """Index of the restarted attempt without a step so far, and time of the last sign of
        training before it.
        """

    def update(self, event: Event) -> None:
        """Process the next event."""
        kind = event["kind"]
        self._begin_s = event["time"] if self._begin_s is None else self._begin_s
        is_planned = kind == "summary" or bool(kind == "stop" and event.get("paused"))
        self._prolong_restart(event, is_planned=is_planned)
        self._record(event)
        if is_planned:  # Extending or pausing a run is not a loss.
            self._alive_s = self._cause = None
        elif kind in _SIGNS_OF_LIFE:
            self._alive_s = event["time"]

    def _record(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "run":
            self._driver_begun = True
            if self._alive_s is not None:
                self._cause = self._cause or "the driver was lost"
        elif kind == "attempt":
            self._append(event, num_workers=event.get("num_workers"))
        elif kind == "start":
            self._start(event)
        elif kind == "failure":
            self._fail(event)
        elif kind == "stop":
            self._change(last_step=event["step"], end=f"stopped: {event['cause']}")
            self._cause = self._cause or f"stopped: {event['cause']}"
        elif kind == "finish":
            self._change(last_step=event["step"], end="finished")
        elif kind in ("step", "evaluate"):
            self._change(last_step=event["step"])
            self._step = event["step"] if kind == "step" else self._step

    def _fail(self, event: Event) -> None:
        if not self._driver_begun and self.all and self.all[-1].end is None:
            self._change(end=event["cause"])
        # The failure of a driver comes last. The cause that ended the training before it counts.
        self._cause = (event.get("last") and self._cause) or event["cause"]

    def _start(self, event: Event) -> None:
        if not self.all or self.all[-1].first_step is not None:
            self._append(event)  # No attempt event preceded it.
        self._driver_begun = False
        self._change(num_workers=event.get("world_size"), first_step=event["step"])
        if self._alive_s is not None:
            redone = max(0, self._step - event["step"])
            cause = self._cause or "the workers were lost"
            self._change(restart=Restart(cause, event["time"] - self._alive_s, redone))
            self._restarting = len(self.all) - 1, self._alive_s
        self._step = event["step"]
        self._cause = None

    def _append(self, event: Event, num_workers: int | None = None) -> None:
        if self.all and self.all[-1].end is None:
            self._change(
                end="the driver was lost" if self._driver_begun else "the workers were lost"
            )
        assert self._begin_s is not None
        self.all.append(Attempt(event["time"] - self._begin_s, num_workers))
        self._driver_begun = False

    def _change(self, **fields: Any) -> None:
        if self.all:
            self.all[-1] = replace(self.all[-1], **fields)

    def _prolong_restart(self, event: Event, *, is_planned: bool) -> None:
        """Extend the current restart until a step is trained, or until it fails again before
        that.
        """
        kind = event["kind"]
        if self._restarting is None or not (
            is_planned or kind == "finish" or kind in _SIGNS_OF_LIFE
        ):
            return
        number, alive_s = self._restarting
        restart = self.all[number].restart
        assert restart is not None
        self.all[number] = replace(
            self.all[number], restart=replace(restart, lost_s=event["time"] - alive_s)
        )
        if is_planned or kind in ("start", "step", "finish"):
            self._restarting = None


@dataclass
class Saves:
    """Totals over the checkpoints of a run."""

    stall_s: float = 0.0
    """Seconds for which training waited."""
    write_s: float = 0.0
    bytes: int = 0
    late: int = 0
    """Number of skipped saves."""


@dataclass(frozen=True)
class Price:
    """Price of the machines."""

    per_node_hour: float
    """Price of one node per hour, in `currency`."""
    nodes: int = 1
    currency: str = "USD"

    def __post_init__(self) -> None:
        if self.per_node_hour < 0 or self.nodes < 1:
            actual = f"got {self.per_node_hour} and {self.nodes}"
            raise InputError(
                f"price_per_node_hour and nodes: must be at least 0 and at least 1, {actual}"
            )


@dataclass(frozen=True)
class Cost:
    """Cost of a run so far. None if unknown."""

    node_hours: float
    total: float
    per_epoch: float | None
    """Cost per epoch, counting partial epochs."""
    per_auroc_point: float | None
    """Cost per 0.01 of AUROC above 0.5, the AUROC of guessing."""
    currency: str = "USD"


def _event_nodes(event: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the (host, id) of each entry of an event's nodes. The id is empty without Ray, and in
    events of earlier versions.
    """
    hosts = event.get("nodes", ())
    return list(zip(hosts, event.get("node_ids") or [""] * len(hosts), strict=True))


@final
class RunSummary:
    """State of a run, updated with its events in time order and readable at any time. Values not
    reported yet are None. Without `curves`, memory does not grow with the steps. Does not count
    measures that events of another version lack.
    """

    status = "preparing"
    ended = False
    """Whether the run finished, stopped or failed for good. A later driver may resume it."""
    step = 0
    steps: int | None = None
    evaluation: Event | None = None
    """Last evaluation of the validation rows."""
    final: Event | None = None
    """The finish event, with the metrics of the selected weights."""
    last_time_s: float | None = None
    """Unix time of the last event."""
    working_s = 0.0
    """Seconds with an active driver, without the time between drivers."""
    interval = Interval()
    """Interval that ends with the last step event."""
    steps_redone = 0
    """Number of logged steps that the current attempt trains again."""
    is_repeat = False
    """Whether an earlier event of the same `series` had this step or a later one."""
    train_rows = 0
    """Number of training rows per epoch. 0 if unknown."""
    global_batch_size: int | None = None
    steps_per_epoch = 1
    """Steps per epoch of the current attempt. If unknown, the run is one epoch."""
    _begin_s: float | None = None
    _logged = (0, 0)
    """Steps and rows at the last log, or at the start of the attempt."""
    _logs = 0
    """Number of step events in the current attempt."""
    _pace: tuple[int, float] | None = None
    """First step logged by this attempt, and its time."""
    _evaluates_since_s: float | None = None
    _peaks: tuple[int, float] = (0, 0.0)
    _auroc: float | None = None
    _planned_steps: int | None = None
    """Planned number of steps if the run stopped early."""
    _turn: Event | None = None
    """Last event that begins or ends the run or an attempt."""
    _is_starting = False

    def __init__(self, events: Iterable[Event] = (), *, curves: bool = True) -> None:
        self.latest: Final[dict[str, Event]] = {}
        """Last event of each kind."""
        self.starts: Final[list[dict[str, float]]] = []
        """Seconds by stage of each start. The first includes the command, the others are later
        attempts or commands.
        """
        self.time: Final = TimeBreakdown()
        """Time of all steps, including repeated ones."""
        self.warm_time: Final = TimeBreakdown()
        """Time without the first logged interval after each start, which includes startup, and its
        saves and evaluations.
        """
        self.data: Final = DataSums()
        self.saves: Final = Saves()
        self._attempts: Final = Attempts()
        self.attempts: Final = self._attempts.all
        self._curves = curves
        self._curve: dict[int, dict[str, Any]] = {}
        self._seen: dict[tuple[str, str], int] = {}
        for event in events:
            self.update(event)

    # -- taking events

    def update(self, event: Event) -> None:
        """Process the next event."""
        kind = event["kind"]
        time_s = event["time"]
        if self._begin_s is None:
            self._begin_s = time_s
        elif self.last_time_s is not None and kind != "run":
            self.working_s += time_s - self.last_time_s
        self.last_time_s = time_s
        self.latest[kind] = event
        if kind in _BEGINS or kind in _ENDS:
            self._turn = event
        if kind in ("failure", "stop"):
            self.ended = bool(event.get("last"))
        else:
            self.ended = kind == "summary" or (self.ended and kind not in _BEGINS)
        if "step" in event:
            before = self._seen.get(series(event), -1)
            self.is_repeat = event["step"] <= before
            self._seen[series(event)] = max(before, event["step"])
        self._attempts.update(event)
        self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        """Call the method for an event's kind."""
        kind = event["kind"]
        if kind in ("run", "prepared", "attempt", "start_up"):
            self._prepare(event)
        elif kind == "start":
            self._start(event)
        elif kind == "step":
            self._take_step(event)
        elif kind == "evaluate":
            self._evaluate(event)
        elif kind == "data":
            self.data.add(event)
        elif kind in ("checkpoint", "checkpoint_late"):
            self._save(event)
        else:
            self._end(event)

    def _prepare(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "start_up":
            if not self._is_starting:
                self.starts.append({})
            self._is_starting = True
            for name, seconds in event["stages"].items():
                self.starts[-1][name] = self.starts[-1].get(name, 0.0) + seconds
            return
        self.status = "preparing" if kind == "run" else "starting workers"
        if kind == "prepared":
            self.train_rows = event.get("rows_of_sets", {}).get("train", 0)
        elif kind == "run" or event["number"] > 1:
            self._is_starting = False

    def _start(self, event: Event) -> None:
        step = event["step"]
        self.steps_redone = max(0, self._logged[0] - step)
        self.status = "training"
        self.step = step
        self.steps = event.get("steps")
        self.final = self._planned_steps = self._pace = self._evaluates_since_s = None
        self._logs = 0
        # Later steps are repeated.
        self._curve = {logged: row for logged, row in self._curve.items() if logged <= step}
        self.data.begin()
        batch_size = event.get("batch_size")
        self.global_batch_size = batch_size and batch_size * event["world_size"]
        batches = -(-self.train_rows // self.global_batch_size) if self.global_batch_size else 0
        self.steps_per_epoch = max(1, batches or self.steps or 1)
        self._logged = step, event.get("rows", step * (self.global_batch_size or 0))

    def _take_step(self, event: Event) -> None:
        step = event["step"]
        steps_before, rows_before = self._logged
        rows = event.get("rows", rows_before)
        elapsed_s = (rows - rows_before) / event["rows_per_s"] if event.get("rows_per_s") else 0.0
        self.interval = Interval(step - steps_before, rows - rows_before, elapsed_s)
        self._logged, self._logs = (step, rows), self._logs + 1
        for split in self._splits():
            split.add(event, self.interval)
        self.step = step
        self.steps = event.get("steps")
        self._evaluates_since_s, self._pace = event["time"], self._pace or (step, event["time"])
        if event.get("peak_fraction"):
            count, total = self._peaks
            self._peaks = count + 1, total + event["peak_fraction"]
        epoch = {"epoch": rows / self.train_rows} if self.train_rows else {}
        workers = {
            f"loss_worker_{rank}": worker["loss"]
            for rank, worker in enumerate(event.get("workers", ()))
        }
        self._draw(
            event, {name: event[name] for name in _CURVE_FIELDS if name in event} | workers | epoch
        )

    def _splits(self) -> tuple[TimeBreakdown, ...]:
        """Return the breakdowns that count the time after the last log."""
        return (self.time, self.warm_time) if self._logs > 1 else (self.time,)

    def _evaluate(self, event: Event) -> None:
        since_s, self._evaluates_since_s = self._evaluates_since_s, None
        for split in self._splits():  # Events of earlier versions have no seconds.
            split.evaluation_s += event.get(
                "seconds", max(0.0, event["time"] - (since_s or event["time"]))
            )
        self._auroc = event.get("auroc", self._auroc)
        if event["set"] == "validation":
            self.evaluation = event
            self._draw(
                event, {VALIDATION + name: value for name, value in select_metrics(event).items()}
            )

    def _draw(self, event: Event, fields: Mapping[str, Any]) -> None:
        if self._curves:
            assert self._begin_s is not None
            self._curve.setdefault(event["step"], {"step": event["step"]}).update(
                fields, time_s=event["time"] - self._begin_s
            )

    def _save(self, event: Event) -> None:
        if event["kind"] == "checkpoint_late":
            self.saves.late += 1
            return
        stall_s = event.get("stall_s", 0.0)
        self.saves.stall_s += stall_s
        self.saves.write_s += event.get("write_s", 0.0)
        self.saves.bytes += event.get("bytes", 0)
        for split in self._splits():
            split.checkpoint_s += stall_s

    def _end(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "failure":
            self.status = f"failed: {event['cause']}"
        elif kind == "stop":
            self.status = f"stopped: {event['cause']}"
        elif kind == "early_stop":
            self._planned_steps = self.steps
        elif kind == "finish":
            self.status = "finishing"
            self.final = event
            self.step = self.steps = event["step"]
            if "metrics" in event:
                self._auroc = event["metrics"].get("auroc")
        elif kind == "summary":
            self.status = "finished"
            if self._planned_steps is not None and self._planned_steps > self.step:
                self.status = (
                    f"finished, stopped early at step {self.step:,} of {self._planned_steps:,}"
                )

    # -- results

    @property
    def restarts(self) -> list[Restart]:
        """All restarts, in order."""
        return [attempt.restart for attempt in self.attempts if attempt.restart is not None]

    def nodes(self) -> dict[str, list[str]]:
        """Return what runs on each node in the current attempt: its workers' ranks, and data tasks.
        Ray nodes on one host are named "HOST (ID)".
        """
        start = self.latest.get("start", {})
        data = self.latest.get("data_nodes", {})
        on: dict[tuple[str, str], list[str]] = {}
        for node, group in groupby(enumerate(_event_nodes(start)), key=itemgetter(1)):
            ranks = [rank for rank, _ in group]
            text = f"workers {ranks[0]} to {ranks[-1]}" if ranks[1:] else f"worker {ranks[0]}"
            on.setdefault(node, []).append(text)
        if data.get("time", -1.0) >= start.get("time", 0.0):
            for node in _event_nodes(data):
                on.setdefault(node, []).append("data tasks")
        hosts = [host for host, _ in on]
        return {
            host if hosts.count(host) == 1 else f"{host} ({node_id})": texts
            for (host, node_id), texts in on.items()
        }

    @property
    def peak_fraction(self) -> float | None:
        """Mean peak fraction over the step events that report one."""
        count, total = self._peaks
        return total / count if count else None

    def standing(self) -> str:
        """Describe the state of the run from its last events."""
        last = self.latest.get("step")
        reached = (
            f" at step {last['step']:,} of {last['steps']:,}" if last else " before its first step"
        )
        kind = self._turn and self._turn["kind"]
        if kind in ("summary", "finish"):
            return "finished"
        if self._turn is not None and kind in ("stop", "failure"):
            return f"{'stopped' if kind == 'stop' else 'failed'} ({self._turn['cause']}){reached}"
        return f"not finished{reached}"

    def left_s(self) -> float | None:
        """Return the seconds to the last step at the pace of this attempt, with saves and
        evaluations. None if unknown.
        """
        if self._pace is None or self.steps is None or self.last_time_s is None:
            return None
        first_step, first_s = self._pace
        if self.step == first_step:
            return None
        return (self.steps - self.step) * (self.last_time_s - first_s) / (self.step - first_step)

    def curve(self) -> list[dict[str, Any]]:
        """Return one row per logged or evaluated step, in order. Keys: `step`, `epoch` (fractional;
        needs the prepared event), `rows`, `loss`, `loss_worker_N` if logged, `rows_per_s`,
        `blocked_fraction`, `validation_METRIC` and `time_s` (since the run began). Missing values
        have no key. Steps repeated after a failure appear once, with their last values.
        """
        return [self._curve[step] for step in sorted(self._curve)]

    def costs(self, *, train_s: float) -> dict[str, Any]:
        """Return the fields of a run's summary about restarts and saves."""
        restarts = self.restarts
        stall_s = self.saves.stall_s
        return {
            "restarts": len(restarts),
            "restart_causes": [asdict(restart) for restart in restarts],
            "lost_s": sum(restart.lost_s for restart in restarts),
            "steps_redone": sum(restart.steps_redone for restart in restarts),
            "checkpoint_stall_s": stall_s,
            "checkpoint_stall_fraction": stall_s / (train_s + stall_s)
            if train_s + stall_s
            else 0.0,
        }

    def cost(self, price: Price) -> Cost:
        """Compute the cost of the time from each driver start to its last event. Idle machines
        between drivers do not count.
        """
        hours = self.working_s / 3600 * price.nodes
        total = hours * price.per_node_hour
        auroc = self._auroc
        last = self.latest.get("step")
        epochs = last["rows"] / self.train_rows if last and self.train_rows else None
        return Cost(
            node_hours=hours,
            total=total,
            per_epoch=total / epochs if epochs else None,
            per_auroc_point=total / ((auroc - 0.5) / _POINT)
            if auroc is not None and auroc > 0.5
            else None,
            currency=price.currency,
        )

    # -- epochs, in batches of all workers

    def rows_at(self, step: int) -> int:
        """Return the number of rows trained after `step` steps. Counts rows, because batch sizes
        may differ between attempts.
        """
        logged, rows = self._logged
        return rows + (step - logged) * (self.global_batch_size or 0)

    def epochs_at(self, step: int) -> float:
        """Return the number of epochs after `step` steps, with fractions."""
        return (
            self.rows_at(step) / self.train_rows
            if self.train_rows and self.global_batch_size
            else step / self.steps_per_epoch
        )

    def epoch_at(self, step: int) -> tuple[int, int]:
        """Return (epoch from 0, steps of it from 1) after `step` steps."""
        if self.train_rows and self.global_batch_size:
            epoch, rows = divmod(max(0, self.rows_at(step) - 1), self.train_rows)
            return epoch, rows // self.global_batch_size + 1
        epoch, steps = divmod(max(0, step - 1), self.steps_per_epoch)
        return epoch, steps + 1
