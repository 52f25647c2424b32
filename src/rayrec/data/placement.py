"""Where data tasks run and how much of the cluster one pipeline of them may use."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.config import Config


@dataclass(frozen=True, kw_only=True)
class TaskPlacement(Config):
    """Where data tasks run and how much of the cluster one pipeline of them may use."""

    num_cpus: float = 1.0
    """CPUs one task reserves."""
    max_cpus: float | None = None
    """CPUs that all tasks of this pipeline may hold at once; None leaves it to Ray Data. A stream submits twice as many tasks, so
    that no CPU waits for the next one: while other CPUs are idle, these run too."""
    max_object_store_bytes: int | None = None
    """Object-store memory this pipeline may fill ahead of its reader; None leaves it to Ray Data."""
    label_selector: dict[str, str] | None = None
    """Ray node labels a task's node must have."""
    max_outage_s: float | None = None
    """Seconds for which a task waits for a store that is out; None: as long as its process would by itself."""
