"""What limits the speed of a run: the stages of its data side, and a verdict in words. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from rayrec.observe.timing import PHASES, WORDS, TimeSplit, time_split
from rayrec.quantities import number_text, size_text

Event = Mapping[str, Any]


@dataclass(frozen=True)
class StageSide:
    """One stage of making rows."""

    name: str
    rows_per_s: float
    """Of all the CPUs, were they at this stage alone."""
    busy: float
    """Share of the CPUs' time that it took."""
    share: float
    """Of the work of all stages."""
    cpu_share: float
    """Of its own work: what it computed in."""
    queue_share: float
    """Of its own work: what it could have computed in and had no CPU for; for the rest it waited for storage."""


@dataclass(frozen=True)
class DataSide:
    """Sums and means over the events of kind data."""

    cpus: float
    """That may make rows at once, in the last attempt."""
    rows_per_s: float
    """Rows taken in use."""
    busy: float
    """Share of the CPUs' time in which stages were at work."""
    stages: tuple[StageSide, ...]
    """In their order."""
    storage_share: float
    """Of the stages' work: what reading waited for storage."""
    contention: float
    """Share of a CPU that stages got when they could compute: 1 where each had its CPU to itself."""
    backlog_rows: float
    """Mean."""
    store_fill: float | None
    """Share of the object store in use, half of the time at least; None where it was not watched."""
    spilled_bytes: int
    """Bytes that went from the object store to disk, of all its users, in this time."""
    spilling_share: float
    """Of the events, those in which more was spilled than in the one before."""

    @property
    def capacity_rows_per_s(self) -> float | None:
        """Rows the CPUs would make a second if they never paused; None where nothing was measured."""
        return self.rows_per_s / self.busy if self.busy else None


def data_side(events: Iterable[Event]) -> DataSide | None:
    """Of all data events but the first behind each start (if others contain rows): its time is that of the start. Those in
    which no block was taken in use count with their time: the next block was made in it. None without any."""
    attempts = list(_attempts(events))
    # What was spilled is told since the attempt began, so each event has to be held against the one before.
    behind = [(before, event) for told in attempts for before, event in pairwise(told)]
    used = [event for _, event in behind]
    if not any(event["rows"] for event in used):
        used = [event for told in attempts for event in told]
    if not used:
        return None
    seconds = sum(event["seconds"] for event in used)
    rows = sum(event["rows"] for event in used)
    # Attempts may have had different numbers of CPUs.
    possible_s = sum(event["seconds"] * event["cpus"] for event in used)
    wall_s, cpu_s, queue_s = (_stage_seconds(used, kind) for kind in (None, "cpu_share", "queue_share"))
    total_s, computed_s, queued_s = (sum(spent.values()) for spent in (wall_s, cpu_s, queue_s))
    waited_s = max(0.0, sum(spent.get("read", 0.0) * sign for spent, sign in ((wall_s, 1), (cpu_s, -1), (queue_s, -1))))
    spilled = [
        max(0, (event.get("spilled_bytes") or 0) - (before.get("spilled_bytes") or 0)) for before, event in behind
    ]
    fills = [
        event["object_store_bytes"] / event["object_store_limit_bytes"]
        for event in used
        if event.get("object_store_limit_bytes")
    ]
    return DataSide(
        cpus=used[-1]["cpus"],
        rows_per_s=rows / seconds,
        busy=min(1.0, total_s / possible_s),
        stages=tuple(
            StageSide(
                name=name,
                rows_per_s=rows * possible_s / seconds / spent_s,
                busy=min(1.0, spent_s / possible_s),
                share=spent_s / total_s,
                cpu_share=min(1.0, cpu_s[name] / spent_s),
                queue_share=min(1.0, queue_s[name] / spent_s),
            )
            for name, spent_s in wall_s.items()
            if spent_s
        ),
        storage_share=waited_s / total_s if total_s else 0.0,
        contention=computed_s / (computed_s + queued_s) if computed_s else 1.0,
        backlog_rows=sum(event["backlog_rows"] * event["seconds"] for event in used) / seconds,
        store_fill=statistics.median_low(fills) if fills else None,
        spilled_bytes=sum(spilled),
        spilling_share=sum(grown > 0 for grown in spilled) / len(spilled) if spilled else 0.0,
    )


def _attempts(events: Iterable[Event]) -> Iterator[Sequence[Event]]:
    """The data events of each attempt that has some."""
    told: list[Event] = []
    for event in events:
        if event["kind"] == "start" and told:
            yield told
            told = []
        elif event["kind"] == "data" and event.get("stages") is not None:
            told.append(event)
    if told:
        yield told


def _stage_seconds(events: Iterable[Event], share: str | None) -> dict[str, float]:
    """CPU-seconds that each stage was at work, or the share of them that a field names."""
    seconds: dict[str, float] = {}
    for event in events:
        for stage in event["stages"]:
            spent = stage["busy"] * event["seconds"] * event["cpus"] * (stage.get(share, 0.0) if share else 1.0)
            seconds[stage["stage"]] = seconds.get(stage["stage"], 0.0) + spent
    return seconds


Bottleneck = Literal["data", "collectives", "host_to_device", "checkpoint", "evaluation", "model"]
_WORTH_TELLING: Final = 0.10
"""Share of the time from which on waiting is what holds a run back; below it the model does."""
_BUSY: Final = 0.4
"""Share of the data CPUs' time from which on they are the limit: of what a bounded pipeline of Ray Data is given it keeps up to
half in reserve."""
_WAITS_FOR_STORAGE: Final = 0.4
"""Share of the data tasks' work from which on waiting for storage is what it is."""
_FULL_STORE: Final = 0.9
_SPILLING: Final = 0.25
"""Share of the data events from which on spilling goes on: a store is everybody's on its node, and spills now and then."""
_ONE_WORKER: Final = 0.5
"""Share of the waiting for other workers that one of them has to spend longer than the mean in a phase to be what is waited
for."""
_CONTENDED: Final = 0.7
_LARGEST_LIFT: Final = 4.0
"""Times as many rows/s as now that are promised at most: the model's own speed is an extrapolation there."""


@dataclass(frozen=True)
class Verdict:
    """What holds a run back."""

    bottleneck: Bottleneck
    share: float
    """Of the time, that it takes."""
    cause: str | None
    """Of waiting for data: storage, object_store, read, parse, encode (the stage that keeps the CPUs busy), delivery (rows are
    made, but do not come in time), unknown. Of waiting for other workers: the phase that one of them takes longer for, if it is
    that."""
    text: str
    """Plain words: what, why, the remedy."""


def verdict(events: Sequence[Event]) -> Verdict | None:
    """On a run, finished or not; None where no step was logged. The first interval behind each start is left out if there are
    others."""
    split = time_split(events, warm=True)
    if not split.training_s:
        split = time_split(events)
    if not split.training_s:
        return None
    shares = split.shares()
    # Of a run that is under way the end, with its last save and evaluation, is still to come.
    avoidable: tuple[Bottleneck, ...] = ("data", "collectives", "host_to_device", "checkpoint", "evaluation")
    worst = max(avoidable, key=lambda name: shares[name])
    share = shares[worst]
    if share < _WORTH_TELLING:
        return _model(events, split)
    if worst == "data":
        return _data(events, split)
    if worst == "checkpoint":
        return Verdict(worst, share, None, _checkpoint_text(events, share))
    if worst == "collectives":
        return _collectives(split)
    texts = {
        "host_to_device": "Copying batches to the device {share} of the time: the link to the device is the limit; fewer dense "
        "columns or ids a row would lift it.",
        "evaluation": "Evaluating {share} of the time: a larger --evaluate-every, or a smaller log as --eval-data.path, would "
        "give it to training.",
    }
    return Verdict(worst, share, None, texts[worst].format(share=_percent(share)))


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _peak_text(fraction: float) -> str:
    """The peak is the fastest of a few products measured at the start of a worker, so the device may do more."""
    if fraction > 1:
        return ", faster than the peak measured at the start (a lower bound of what the device can do)"
    return f", at {_percent(fraction)} of the device's peak"


def _rate(rows_per_s: float) -> str:
    """Two digits: it is an estimate."""
    digits = -max(0, math.floor(math.log10(max(rows_per_s, 1.0))) - 1)
    return f"{round(rows_per_s, digits):,.0f} rows/s"


# -- data


def _data(events: Sequence[Event], split: TimeSplit) -> Verdict:
    share, side = split.shares()["data"], data_side(events)
    begin = f"Blocked on data {_percent(share)} of the time: "
    if side is None or not side.stages:
        return Verdict("data", share, "unknown", begin + "what makes the rows was not measured.")
    now = split.rows / split.training_s if split.training_s else 0.0
    unblocked = now * min(_LARGEST_LIFT, split.training_s / max(split.training_s - split.times_s["data"], 1e-9))
    if side.spilling_share >= _SPILLING or (side.store_fill or 0.0) >= _FULL_STORE:
        return Verdict("data", share, "object_store", begin + _store_text(side))
    threads = [stage.name for stage in side.stages] == ["read"]  # of the workers themselves
    if side.storage_share >= _WAITS_FOR_STORAGE and side.busy >= _BUSY / 2:
        wait = _percent(side.storage_share)
        return Verdict(
            "data",
            share,
            "storage",
            f"{begin}reading waits for storage, {wait} of the work on rows; storage nearer by, or {_more(side, now, unblocked)}"
            if not threads
            else f"{begin}reading waits for storage, {wait} of it; storage nearer by, or a larger "
            "--train-data.prefetch-blocks, would lift it.",
        )
    if side.busy < _BUSY:
        return Verdict(
            "data",
            share,
            "delivery",
            f"{begin}those who make rows pause {_percent(1 - side.busy)} of it, so rows are made in time but come late; a larger "
            "--train-data.prefetch-blocks, or smaller --train-data.block-bytes, would lift it.",
        )
    slowest = max(side.stages, key=lambda stage: stage.share)
    if threads:
        text = (
            f"the thread of each worker that reads rows has no pause at {_rate(now)} in all; more workers, or less to do for "
            "each row, would lift it."
        )
        return Verdict("data", share, slowest.name, begin + text)
    what = {"read": "read", "parse": "read and parse", "encode": "parse and encode"}[slowest.name]
    starved = ""
    if side.contention < _CONTENDED:
        starved = f" (they share CPUs with others and get {_percent(side.contention)} of one each)"
    return Verdict(
        "data",
        share,
        slowest.name,
        f"{begin}the tasks that {what} are CPU-bound{starved}, {_percent(slowest.share)} of it to {slowest.name}; "
        f"{_more(side, now, unblocked)} `rayrec preprocess` saves most of that work.",
    )


def _more(side: DataSide, now: float, unblocked: float) -> str:
    """CPUs for data tasks that would let the workers train without a pause."""
    more = max(1, math.ceil(side.cpus * (unblocked / now - 1))) if now else 1
    lifted = min(unblocked, now * (side.cpus + more) / side.cpus)
    cpus = f"{more} more CPU{'s' if more > 1 else ''} for data tasks (now {side.cpus:g})"
    return f"{cpus} would lift {_rate(now)} to about {_rate(lifted)}."


def _store_text(side: DataSide) -> str:
    told = f"{size_text(side.spilled_bytes)} were spilled from the object store to disk"
    if side.store_fill is not None and side.store_fill >= _FULL_STORE:
        told = f"the object store is full to {_percent(side.store_fill)}"
        told += f" and {size_text(side.spilled_bytes)} were spilled to disk" if side.spilled_bytes else ""
    return (
        f"{told}; more memory for it (--cluster.object-store-bytes), smaller --train-data.block-bytes or a smaller "
        "--train-data.prefetch-blocks would lift it."
    )


# -- the rest


def _checkpoint_text(events: Sequence[Event], share: float) -> str:
    saves = [event for event in events if event["kind"] == "checkpoint"]
    size_bytes, write_s = sum(event["bytes"] for event in saves), sum(event["write_s"] for event in saves)
    speed = f"{size_text(size_bytes / write_s)}/s" if write_s else "an unknown speed"
    late = sum(event["kind"] == "checkpoint_late" for event in events)
    skipped = (
        f", and {late} save{'s were' if late > 1 else ' was'} left out, as the one before was not through"
        if late
        else ""
    )
    return (
        f"Held up by checkpoints {_percent(share)} of the time: storage takes them at {speed}{skipped}; a larger "
        "--checkpoint.every, or faster storage for --storage-path, would give it to training."
    )


def _collectives(split: TimeSplit) -> Verdict:
    """Whether all wait for the exchange, or for one of them: a mean over many workers hides one."""
    share, shares, most = split.shares()["collectives"], split.shares(), split.most_shares()
    begin = f"Waiting for other workers {_percent(share)} of the time: "
    slow = max((name for name in PHASES if name != "collectives"), key=lambda name: most[name] - shares[name])
    if most[slow] - shares[slow] < _ONE_WORKER * share:
        text = (
            "exchanging ids, embeddings and gradients takes that long, or some workers are slower than others; fewer workers "
            "with larger batches, or a faster network, would lift it."
        )
        return Verdict("collectives", share, None, begin + text)
    remedies = {
        "data": "what makes its rows is slower than the others', so look at the data tasks, storage and CPUs of its node.",
        "host_to_device": "its link to the device is slower, or shared.",
    }
    text = (
        f"{WORDS[slow]} takes one worker {_percent(most[slow])} ({_percent(shares[slow])} on average), and the others wait for "
        f"it; {remedies.get(slow, 'look at the processor of its node, and who else uses it.')}"
    )
    return Verdict("collectives", share, slow, begin + text)


def _model(events: Sequence[Event], split: TimeSplit) -> Verdict:
    shares = split.shares()
    if not split.measured:
        text = f"Nothing is waited for: blocked on data {_percent(shares['data'])} of the time."
        return Verdict("model", shares["other"], None, text)
    computing = sum(shares[name] for name in ("forward", "backward", "optimizer"))
    parts = ", ".join(
        f"{name} {_percent(shares[key])}"
        for name, key in (("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer"))
    )
    peaks = [event["peak_fraction"] for event in events if event["kind"] == "step" and event.get("peak_fraction")]
    peak = _peak_text(sum(peaks) / len(peaks)) if peaks else ""
    text = f"The model computes {_percent(computing)} of the time ({parts}){peak}; it waits for data {_percent(shares['data'])}."
    if shares["other"] >= _WORTH_TELLING:
        text += f" {_percent(shares['other'])} is neither: Python between the steps."
    side = data_side(events)
    capacity = side.capacity_rows_per_s if side is not None and side.storage_share < _WAITS_FOR_STORAGE else None
    now = split.rows / split.training_s
    if capacity is not None and capacity > now:
        text += (
            f" The data side could make {number_text(round(capacity, -2))} rows/s, {capacity / now:.1f} times as many."
        )
    return Verdict("model", computing, None, text)
