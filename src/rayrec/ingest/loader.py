"""Resumable iterator over the batches of one worker, for any rows in any order."""

from collections.abc import Iterator
from typing import Any, Generic, final

from rayrec.batch import Batch
from rayrec.data.stage_times import StageTimes
from rayrec.ingest.batches import BatchReader
from rayrec.ingest.block_order import BatchSharding, EpochOrder, Plan, PositionT
from rayrec.trained_rows import TrainedRows


@final
class Loader(Generic[PositionT, Plan]):
    """Iterator over one worker's batches, from a position to the end of the last epoch or for
    `max_steps` batches.
    """

    def __init__(
        self,
        order: EpochOrder[PositionT, Plan],
        reader: BatchReader[Plan],
        sharding: BatchSharding,
        *,
        state: dict[str, Any] | None = None,
        epochs: int | None,
        max_steps: int | None = None,
    ) -> None:
        """Create the loader at a stored position.

        Args:
            sharding: Worker rank, world size and batch size.
            state: `state()` of a loader with the same rows and order and any number of workers.
                None starts at epoch 0.
            epochs: Number of epochs. None runs for `max_steps`.
            max_steps: Maximum number of batches.

        Raises InputError if `state` belongs to other rows or another order.
        """
        self._order = order
        self._reader = reader
        self._sharding = sharding
        self._first = order.plan(order.position(state), sharding)
        self.steps_per_epoch = order.plan(order.start(0), sharding).steps
        if epochs is None:
            assert max_steps is not None
            self.steps = max_steps if order.rows else 0
        else:
            to_end = self._first.steps + (epochs - self._first.epoch - 1) * self.steps_per_epoch
            self.steps = max(0, to_end if max_steps is None else min(to_end, max_steps))
        self._batches: Iterator[Batch] | None = None
        self._num_delivered = 0

    @property
    def stages(self) -> StageTimes:
        return self._reader.stages

    def start(self) -> None:
        """Start reading before the first `next`."""
        if self._batches is None and self.steps:
            self._batches = self._reader.batches(self._plans, self._sharding)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.start()
        if self._batches is None or self._num_delivered == self.steps:
            raise StopIteration
        batch = next(self._batches)
        self._num_delivered += 1
        return batch

    def rows(self, batches: int) -> int:
        """Count the rows of all workers in the first `batches` batches."""
        plan, step = self._at(batches)
        rows = plan.rows_until(step)
        if plan is not self._first:
            rows += self._first.rows_until(self._first.steps)
            rows += (plan.epoch - self._first.epoch - 1) * self._order.rows
        return rows

    def trained_rows(self) -> TrainedRows:
        """Return the rows trained at this position: every row once per epoch, minus the rest of the
        current epoch.
        """
        return self._order.trained(self._position())

    def state(self) -> dict[str, Any]:
        """Return the position after the batches returned so far. JSON values, equal on all
        workers.
        """
        return self._order.state(self._position())

    def close(self) -> None:
        """Stop reading and release the rows."""
        self._batches = iter(())
        self._reader.close()

    def _position(self) -> PositionT:
        plan, step = self._at(self._num_delivered)
        position: PositionT = plan.position_at(step)
        return position

    def _at(self, batches: int) -> tuple[Plan, int]:
        """Return the plan of the epoch after this many batches, and its number of completed
        steps.
        """
        if batches < self._first.steps:
            return self._first, batches
        epochs, step = divmod(batches - self._first.steps, max(1, self.steps_per_epoch))
        return self._plan_after(epochs), step

    def _plan_after(self, epochs: int) -> Plan:
        """Return the full plan of the epoch that follows `epochs` full epochs after the first."""
        return self._order.plan(self._order.start(self._first.epoch + 1 + epochs), self._sharding)

    def _plans(self) -> Iterator[tuple[Plan, int]]:
        left = self.steps
        plan = self._first
        epochs = 0
        while left > 0:
            yield plan, min(left, plan.steps)
            left, plan, epochs = left - plan.steps, self._plan_after(epochs), epochs + 1
