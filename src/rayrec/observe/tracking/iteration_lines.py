"""The line that the first DLRM printed as it trained, for scripts that read it."""

from __future__ import annotations

from typing import Any, final

from rayrec import storage
from rayrec.observe.tracking.epochs import Epochs
from rayrec.observe.tracking.scalars import Intervals
from rayrec.observe.tracking.view_file import ViewFile


@final
class IterationTracker:
    """Writes RUN/iterations.log: `Finished training it 16/150 of epoch 0, 439.75 ms/it, loss 0.512345`, and what was measured of
    validation rows as `Testing at - 16/150 of epoch 0, auroc 0.7701, ...`. Steps done again appear again, as they did there."""

    def __init__(self, folder: str) -> None:
        self._file = ViewFile(storage.join(folder, "iterations.log"))
        self._epochs, self._intervals = Epochs(), Intervals()

    def update(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        self._epochs.update(event)
        if kind == "start":
            self._intervals.begin(event)
        elif kind == "step":
            interval = self._intervals.of(event)
            each_ms = 1000 * interval.elapsed_s / interval.steps if interval.steps else 0.0
            loss = "nan" if event["loss"] is None else f"{event['loss']:.6f}"
            self._say(f"Finished training it {self._place(event)}, {each_ms:.2f} ms/it, loss {loss}")
        elif kind == "evaluate":
            measures = [(name, value) for name, value in event.items() if isinstance(value, float) and name != "time"]
            told = ", ".join(f"{name} {value:.6f}" for name, value in measures)
            self._say(f"Testing at - {self._place(event)}, {told}")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _place(self, event: dict[str, Any]) -> str:
        epoch, done = self._epochs.of(event["step"])
        return f"{done}/{self._epochs.steps_per_epoch} of epoch {epoch}"

    def _say(self, text: str) -> None:
        self._file.write(text.encode() + b"\n")
