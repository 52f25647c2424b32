"""Diagnosis of the training bottleneck, in plain words. Pure."""

import math
from dataclasses import dataclass
from typing import Final, Literal

from rayrec.humanize import number_text, size_text
from rayrec.observe.data_side import PipelineStats
from rayrec.observe.run_summary import RunSummary, Saves
from rayrec.observe.timing import PHASES, WORDS, TimeBreakdown

Bottleneck = Literal["data", "collectives", "host_to_device", "checkpoint", "evaluation", "model"]
_MIN_WAITING: Final = 0.10
"""Minimum share of time spent waiting to name it as the bottleneck. Below it, the model is the
bottleneck.
"""
_BUSY: Final = 0.4
"""Minimum busy share of the data CPUs to call them the limit. Ray's work on each task, large for
small blocks, is not in it.
"""
_WAITS_FOR_STORAGE: Final = 0.4
"""Minimum share of the data tasks' work spent waiting for storage to name storage as the cause."""
_FULL_STORE: Final = 0.9
_SPILLING: Final = 0.25
"""Minimum share of data events with spilling. The object store is shared by all jobs of a node, so
it spills occasionally.
"""
_ONE_WORKER: Final = 0.5
"""Minimum excess of one worker over the mean in a phase to blame that worker, as a share of the
waiting for other workers.
"""
_CONTENDED: Final = 0.7
_LARGEST_LIFT: Final = 4.0
"""Maximum predicted speedup. Beyond it, the model's own speed is an extrapolation."""


@dataclass(frozen=True)
class Diagnosis:
    """The bottleneck of a run."""

    bottleneck: Bottleneck
    fraction: float
    """Share of time that the bottleneck takes."""
    cause: str | None
    """Cause. For data: storage, object_store, the stage that keeps the CPUs busy (read, parse,
    encode), delivery (rows are made in time but delivered late) or unknown. For collectives: the
    phase in which one worker is slower, if any.
    """
    text: str
    """Explanation and fix, in plain words."""


def diagnose(run: RunSummary) -> Diagnosis | None:
    """Diagnose a run, finished or not. None if no step was logged. Skips each start's first
    interval, if there are others.
    """
    split = run.warm_time if run.warm_time.training_s else run.time
    if not split.training_s:
        return None
    fractions = split.fractions()
    # The last save and evaluation of a running run are still to come.
    avoidable: tuple[Bottleneck, ...] = (
        "data",
        "collectives",
        "host_to_device",
        "checkpoint",
        "evaluation",
    )
    worst = max(avoidable, key=lambda name: fractions[name])
    fraction = fractions[worst]
    if fraction < _MIN_WAITING:
        return _model(run, split)
    if worst == "data":
        return _data(run.data.side(), split)
    if worst == "checkpoint":
        return Diagnosis(worst, fraction, None, _checkpoint_text(run.saves, fraction))
    if worst == "collectives":
        return _collectives(split)
    texts = {
        "host_to_device": (
            "Copying batches to the device {fraction} of the time: limited by the link to the "
            "device. Use fewer dense columns or ids per row."
        ),
        "evaluation": (
            "Evaluating {fraction} of the time. Use a larger --evaluate-every, or a smaller log "
            "for --eval-data.path."
        ),
    }
    return Diagnosis(worst, fraction, None, texts[worst].format(fraction=_percent(fraction)))


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.0f} %"


def _rate(rows_per_s: float) -> str:
    """Format a speed estimate with two significant digits."""
    digits = -max(0, math.floor(math.log10(max(rows_per_s, 1.0))) - 1)
    return f"{round(rows_per_s, digits):,.0f} rows/s"


# -- data


def _data(side: PipelineStats | None, split: TimeBreakdown) -> Diagnosis:
    fraction = split.fractions()["data"]

    def diagnosis(cause: str, text: str) -> Diagnosis:
        return Diagnosis(
            "data", fraction, cause, f"Blocked on data {_percent(fraction)} of the time: {text}"
        )

    if side is None or not side.stages:
        return diagnosis("unknown", "the data stages were not measured.")
    now = split.rows / split.training_s if split.training_s else 0.0
    unblocked = now * min(
        _LARGEST_LIFT, split.training_s / max(split.training_s - split.times_s["data"], 1e-9)
    )
    if side.spilling_fraction >= _SPILLING or (side.store_fill or 0.0) >= _FULL_STORE:
        return diagnosis("object_store", _store_text(side))
    # Workers read rows in their own threads.
    threads = [stage.name for stage in side.stages] == ["read"]
    if side.storage_fraction >= _WAITS_FOR_STORAGE and side.busy >= _BUSY / 2:
        wait = (
            f"waiting for storage is {_percent(side.storage_fraction)} of the data work. Use "
            "faster storage, or"
        )
        if threads:
            return diagnosis("storage", f"{wait} a larger --train-data.prefetch-blocks.")
        return diagnosis("storage", f"{wait} more CPUs: {_cpu_advice(side, now, unblocked)}")
    if side.busy < _BUSY:
        return diagnosis(
            "delivery",
            f"data tasks pause {_percent(1 - side.busy)} of the time, so rows are made in time but "
            "delivered late. Use a larger --train-data.prefetch-blocks, or smaller "
            "--train-data.block-bytes.",
        )
    slowest = max(side.stages, key=lambda stage: stage.fraction)
    if threads:
        return diagnosis(
            slowest.name,
            f"the reader thread of each worker is always busy, at {_rate(now)} in total. Use more "
            "workers, or less work per row.",
        )
    tasks = {"read": "read", "parse": "read and parse", "encode": "parse and encode"}[slowest.name]
    starved = ""
    if side.contention < _CONTENDED:
        starved = (
            f" (and get only {_percent(side.contention)} of a CPU each, because other processes "
            "use them)"
        )
    return diagnosis(
        slowest.name,
        f"the tasks that {tasks} are CPU-bound{starved}, {_percent(slowest.fraction)} of it to "
        f"{slowest.name}. {_cpu_advice(side, now, unblocked)} `rayrec preprocess` avoids most of "
        "this work.",
    )


def _cpu_advice(side: PipelineStats, now: float, unblocked: float) -> str:
    """Return how many more CPUs for data tasks would avoid all waiting, and the resulting speed."""
    more = max(1, math.ceil(side.cpus * (unblocked / now - 1))) if now else 1
    lifted = min(unblocked, now * (side.cpus + more) / side.cpus)
    cpus = f"{more} more CPU{'s' if more > 1 else ''} for data tasks (now {side.cpus:g})"
    return f"{cpus} would raise {_rate(now)} to about {_rate(lifted)}."


def _store_text(side: PipelineStats) -> str:
    text = f"{size_text(side.spilled_bytes)} were spilled from the object store to disk"
    if side.store_fill is not None and side.store_fill >= _FULL_STORE:
        text = f"the object store is {_percent(side.store_fill)} full"
        text += (
            f" and {size_text(side.spilled_bytes)} were spilled to disk"
            if side.spilled_bytes
            else ""
        )
    return (
        f"{text}. Use a larger --cluster.object-store-bytes, smaller --train-data.block-bytes or a "
        "smaller --train-data.prefetch-blocks."
    )


# -- the rest


def _checkpoint_text(saves: Saves, fraction: float) -> str:
    speed = f"{size_text(saves.bytes / saves.write_s)}/s" if saves.write_s else "an unknown speed"
    late = saves.late
    skipped = (
        f", and {late} save{'s were' if late > 1 else ' was'} skipped during an earlier one"
        if late
        else ""
    )
    return (
        f"Blocked on checkpoints {_percent(fraction)} of the time: storage writes them at "
        f"{speed}{skipped}. Use a larger --checkpoint.every, or faster storage for --storage-path."
    )


def _collectives(split: TimeBreakdown) -> Diagnosis:
    """Diagnose whether all workers wait for the exchange or for one slow worker, which a mean over
    many workers hides.
    """
    fraction = split.fractions()["collectives"]
    fractions = split.fractions()
    slowest = split.slowest_fractions()
    begin = f"Waiting for other workers {_percent(fraction)} of the time: "
    slow = max(
        (name for name in PHASES if name != "collectives"),
        key=lambda name: slowest[name] - fractions[name],
    )
    if slowest[slow] - fractions[slow] < _ONE_WORKER * fraction:
        text = (
            "exchanging ids, embeddings and gradients is slow, or some workers are slower than "
            "others. Use fewer workers with larger batches, or a faster network."
        )
        return Diagnosis("collectives", fraction, None, begin + text)
    remedies = {
        "data": "Its data pipeline is slower. Check the data tasks, storage and CPUs of its node.",
        "host_to_device": "Its link to the device is slower, or shared.",
    }
    text = (
        f"{WORDS[slow]} takes one worker {_percent(slowest[slow])} ({_percent(fractions[slow])} on "
        "average), and the others wait for it. "
        f"{remedies.get(slow, 'Check the processor of its node for slowness and other jobs.')}"
    )
    return Diagnosis("collectives", fraction, slow, begin + text)


def _model(run: RunSummary, split: TimeBreakdown) -> Diagnosis:
    fractions = split.fractions()
    if not split.measured:
        text = f"Not limited by waiting: blocked on data {_percent(fractions['data'])} of the time."
        return Diagnosis("model", fractions["other"], None, text)
    computing = sum(fractions[name] for name in ("forward", "backward", "optimizer"))
    parts = ", ".join(
        f"{name} {_percent(fractions[name])}" for name in ("forward", "backward", "optimizer")
    )
    peak = ""
    # The peak is the fastest of a few matrix products at worker start.
    if run.peak_fraction and run.peak_fraction > 1:
        peak = ", faster than the peak measured at the start (a lower bound for the device)"
    elif run.peak_fraction:
        peak = f", at {_percent(run.peak_fraction)} of the device's peak"
    text = (
        f"The model computes {_percent(computing)} of the time ({parts}){peak}, and waits for "
        f"data {_percent(fractions['data'])}."
    )
    if fractions["other"] >= _MIN_WAITING:
        text += f" The other {_percent(fractions['other'])} is Python between the steps."
    side = run.data.side()
    capacity = (
        side.capacity_rows_per_s
        if side is not None and side.storage_fraction < _WAITS_FOR_STORAGE
        else None
    )
    now = split.rows / split.training_s
    if capacity is not None and capacity > now:
        text += (
            f" The data pipeline could deliver {number_text(round(capacity, -2))} rows/s, "
            f"{capacity / now:.1f} times as many."
        )
    return Diagnosis("model", computing, None, text)
