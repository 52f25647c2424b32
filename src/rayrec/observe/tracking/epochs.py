"""Where in which epoch a step is, as far as the events of a run tell."""

from __future__ import annotations

from typing import Any, final

from rayrec.observe.tracking.scalars import Event


@final
class Epochs:
    """Follows the events of a run. An epoch has the steps that the training rows need in batches of all workers; where the
    events do not tell these, the whole run counts as one epoch."""

    def __init__(self) -> None:
        self._rows: int | None = None
        self.global_batch_size: int | None = None
        self.steps_per_epoch = 1

    def update(self, event: Event) -> None:
        """Takes an event of kind prepared or start; others tell nothing here."""
        if event["kind"] == "prepared":
            sets: dict[str, Any] = event.get("rows_of_sets", {})
            self._rows = sets.get("train")
        elif event["kind"] == "start":
            batch_size = event.get("batch_size")
            self.global_batch_size = batch_size and batch_size * event["world_size"]
            known = self._rows and self.global_batch_size
            self.steps_per_epoch = -(-self._rows // self.global_batch_size) if known else event["steps"]  # type: ignore[operator]
            self.steps_per_epoch = max(1, self.steps_per_epoch)

    def of(self, step: int) -> tuple[int, int]:
        """(epoch from 0, steps done of it from 1) once `step` steps of the run are done."""
        return max(0, step - 1) // self.steps_per_epoch, max(0, step - 1) % self.steps_per_epoch + 1
