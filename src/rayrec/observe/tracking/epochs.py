"""Where in which epoch a step is, as far as the events of a run tell."""

from __future__ import annotations

from typing import Any, final

from rayrec.observe.tracking.scalars import Event


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
