"""Orders of rows: which rows an epoch has, in what order they come, and the steps of one worker in it.

An order is pure: it is the same on every node, for any number of workers. No array has an entry a step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from rayrec.row_tally import RowTally

Place = TypeVar("Place")
Place_co = TypeVar("Place_co", covariant=True)
Plan = TypeVar("Plan", bound="EpochPlan[Any]")
Plan_co = TypeVar("Plan_co", bound="EpochPlan[Any]", covariant=True)


@dataclass(frozen=True)
class Share:
    """One worker's share of each step."""

    rank: int
    world_size: int
    batch_size: int
    """Rows that a worker takes in a step."""


class EpochPlan(Protocol[Place_co]):
    """One worker's steps in an epoch, or in the rest of one."""

    @property
    def epoch(self) -> int: ...

    @property
    def steps(self) -> int:
        """The same on every worker."""
        ...

    def rows_until(self, step: int) -> int:
        """Return the rows of all workers before a step."""
        ...

    def after(self, step: int) -> Place_co:
        """Return the place before a step."""
        ...


Plans: TypeAlias = Callable[[], Iterator[tuple[Plan, int]]]
"""Plans of one epoch after the other, each with the number of its steps that are wanted; the same at each call."""


class EpochOrder(Protocol[Place, Plan_co]):
    """Which rows an epoch has and in what order they come."""

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        ...

    def place(self, state: dict[str, Any] | None) -> Place:
        """Return the place of a stored state, the start for None. Raises InputError for one in other rows, or in another order
        of them."""
        ...

    def start(self, epoch: int) -> Place: ...

    def plan(self, place: Place, share: Share) -> Plan_co:
        """Return the steps from a place to the end of its epoch, where any number of workers has come to it."""
        ...

    def state(self, place: Place) -> dict[str, Any]:
        """Return plain JSON values, the same on every worker."""
        ...

    def trained(self, place: Place) -> RowTally:
        """Return the rows that must have been trained up to a place: each once in every epoch, less those that are left."""
        ...
