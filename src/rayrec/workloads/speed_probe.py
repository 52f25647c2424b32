"""The time of a small slice of the real stages on this machine: the measurements of a forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rayrec.sharding.communication import Links, Traffic


@dataclass(frozen=True)
class Target:
    """The cluster that a forecast is made for, as far as the measurement needs it."""

    num_workers: int
    workers_per_node: int
    memory_bytes: int | None = None
    """That one worker may fill with tables, of its device where it has one; None: as on a node like this machine."""
    gpu_rows_per_s: float | None = None
    """That one GPU trains, known from elsewhere; None: it is measured."""
    host_memory_bytes: int | None = None
    """With GPUs: host memory that one worker may fill, with a checkpoint's copy; None: not known."""
    links: Links = field(default_factory=Links)
    """Between its workers."""


@dataclass(frozen=True)
class MeasuredSpeed:
    """Measured on this machine, without Ray."""

    num_workers: int
    """That trained side by side."""
    threads_per_worker: int
    device: str
    """What they trained on: cpu or cuda."""
    rows_per_s: float
    """Of all of them together, on batches that were ready."""
    cpu_s_per_row: float
    """Of their processes."""
    stage_wall_s: Mapping[str, float]
    """Seconds one task takes for a row, by stage."""
    stage_cpu_s: Mapping[str, float]
    """Of it, computing."""
    rows: int
    """Of the log, about."""
    worker_bytes: tuple[int, ...]
    """Tables with their optimizer state that each worker of the run would hold."""
    sampled_vocabulary: bool
    """The tables' sizes are those of the slice, because there is no Preprocessor: real ones are larger."""
    plan: str
    """Which worker holds which table, readable."""
    traffic: Traffic | None = None
    """What workers of the run would send each other; None: not known."""
    given: bool = False
    """Whether `rows_per_s` was told and not measured."""
    notes: tuple[str, ...] = ()
    """What was otherwise here than it will be there, a sentence each."""
