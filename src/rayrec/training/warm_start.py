"""The start of a new run with the weights and optimizer state of another one, as far as the driver prepares it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayrec.observe.events import EventWriter
from rayrec.observe.panel import note_of
from rayrec.workloads.base import RunContext, TrainConfig, WarmStart

if TYPE_CHECKING:
    from rayrec.checkpoint import Checkpoint

KIND = "warm_start"
"""Kind of the event that says what the run started with."""


def find(config: TrainConfig, folder: str) -> Checkpoint | None:
    """The checkpoint that the run starts with; None for a run without `init_from`, and for one that has a checkpoint of its own.
    Raises InputError if there is none, or if its files are not complete."""
    from rayrec.checkpoint import latest, open_checkpoint
    from rayrec.checkpoint.discovery import check_files

    if config.init_from is None or latest(folder) is not None:
        return None
    checkpoint = open_checkpoint(config.init_from)
    check_files(checkpoint, checkpoint.manifest())
    return checkpoint


def prepare(context: RunContext, prepared: Any, checkpoint: Checkpoint, events: EventWriter) -> WarmStart:
    """What the workers need for it; writes an event and prints a line. Raises InputError for a checkpoint that does not fit."""
    start = context.config.workload.warm_start(context, prepared, checkpoint)
    context.stopwatch.lap("warm_start")
    event = {"checkpoint": start.checkpoint, **start.report}
    events.write(KIND, **event)
    context.note(str(note_of({"kind": KIND, **event})))
    return start
