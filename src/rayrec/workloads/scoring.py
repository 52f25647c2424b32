"""What serving and a workload agree on, so that the same processes score clicks, images and texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa

from rayrec.data.placement import TaskPlacement
from rayrec.observe.console import Console

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class ScoringContext:
    """What a workload is told when rows are to be scored with a checkpoint."""

    config: TrainConfig
    """Of the checkpoint's config.yaml, but for what the caller has set anew."""
    checkpoint: str
    """The checkpoint's folder, its weights verified, reachable from every node."""
    path: str
    """Of the rows; as the user gave it."""
    evaluating: bool
    """Whether the rows are to be compared with their labels, else they are predicted."""
    batch_rows: int | None
    """Rows the model takes at once; None: the workload's choice."""
    connect: Callable[[], TaskPlacement]
    """Reaches Ray, if nobody has before, and says where data tasks may run."""
    console: Console


class Totals(Protocol):
    """Sums up the tables of an evaluation."""

    @property
    def rows(self) -> int:
        """Rows so far."""
        ...

    def update(self, table: pa.Table) -> None: ...

    def compute(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Scoring:
    """The rows of an input, ready to be scored in blocks that follow each other."""

    rows: int
    num_blocks: int
    load: Callable[[Device], Callable[[int], pa.Table]]
    """Called once in each scoring process; picklable. Loads the model; what it returns scores a block by its number, into a table
    with a row for each: `row` (int64, its 0-based place in the input) and the workload's own columns."""
    make_totals: Callable[[], Totals]
    """Takes the same tables where `evaluating` was asked for."""
    described: dict[str, Any]
    """What a result tells beside rows and metrics; plain JSON values."""
