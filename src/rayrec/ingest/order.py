"""Epoch order interface: the row order of an epoch, and the steps of one worker in it. An order is pure: equal on every node, for
any number of workers. No array grows with the number of steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from rayrec.trained_rows import TrainedRows

PositionT = TypeVar("PositionT")
PositionT_co = TypeVar("PositionT_co", covariant=True)
Plan = TypeVar("Plan", bound="EpochPlan[Any]")
Plan_co = TypeVar("Plan_co", bound="EpochPlan[Any]", covariant=True)


@dataclass(frozen=True)
class BatchSharding:
    """Share of one worker in each step."""

    rank: int
    world_size: int
    batch_size: int
    """Rows per worker and step."""


class EpochPlan(Protocol[PositionT_co]):
    """Steps of one worker in an epoch, or in the rest of one."""

    @property
    def epoch(self) -> int: ...

    @property
    def steps(self) -> int:
        """Number of steps, equal on all workers."""

    def rows_until(self, step: int) -> int:
        """Return the row count of all workers before a step."""

    def position_at(self, step: int) -> PositionT_co:
        """Return the position before a step."""


Plans: TypeAlias = Callable[[], Iterator[tuple[Plan, int]]]
"""Function that yields the plan and number of steps of each epoch. All calls yield the same."""


_MAX_SPANS: Final = 64
"""Maximum number of ranges of `spread`. Each may require reading a full segment of a log."""


def spread(rows: int, count: int) -> list[tuple[int, int]]:
    """Return up to 64 ranges [start, stop) with `count` of `rows` rows in all, or all of these, evenly spread. Pure."""
    if count >= rows:
        return [(0, rows)]
    size = -(-count // _MAX_SPANS)
    starts = [(first * rows // count, first) for first in range(0, count, size)]
    return [(start, start + min(size, count - first)) for start, first in starts]


class EpochOrder(Protocol[PositionT, Plan_co]):
    """Rows of an epoch and their order."""

    @property
    def rows(self) -> int:
        """Row count of an epoch."""

    def position(self, state: dict[str, Any] | None) -> PositionT:
        """Return the position of a stored state, or the start for None. Raises InputError if the rows or their order differ."""

    def start(self, epoch: int) -> PositionT: ...

    def plan(self, position: PositionT, sharding: BatchSharding) -> Plan_co:
        """Plan the steps from a position to the end of its epoch. Any number of workers may have reached it."""

    def state(self, position: PositionT) -> dict[str, Any]:
        """Return the position as JSON values, equal on all workers."""

    def trained(self, position: PositionT) -> TrainedRows:
        """Return the rows trained before a position: every row once per epoch, minus the rest of the current epoch."""
