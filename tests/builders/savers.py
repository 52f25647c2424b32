"""Savers of a run's checkpoints, with settings that a test need not name."""

from pathlib import Path
from typing import Any

from rayrec import checkpoint
from rayrec.checkpoint import (
    Checkpoint,
    Retention,
    Saver,
    acquire_lease,
    latest_valid_checkpoint,
    step_folder,
)

Events = list[tuple[str, dict[str, Any]]]


class Run:
    """A run's folder, its savers and their events; use with `contextlib.closing`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self.events = Events()
        self._savers = list[Saver]()

    def saver(self, **changes: Any) -> Saver:
        """Open a saver that takes the run over, unless it is given a lease."""
        settings: dict[str, Any] = {
            "retention": Retention(),
            "extra_files": {},
            "max_outage_s": 20.0,
            **changes,
        }
        if "lease" not in changes:
            settings["lease"] = acquire_lease(self.folder)
        self._savers.append(
            Saver(
                self.folder, log=lambda kind, fields: self.events.append((kind, fields)), **settings
            )
        )
        return self._savers[-1]

    def close(self) -> None:
        for saver in self._savers:
            saver.close()

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def steps(self) -> list[int]:
        return [found.step for found in checkpoint.committed(self.folder)]

    def at(self, step: int) -> Checkpoint:
        return Checkpoint(step_folder(self.folder, step))

    def path(self, step: int, *names: str) -> Path:
        return Path(self.at(step).path.removeprefix("file://"), *names)

    def newest(self) -> Checkpoint | None:
        return latest_valid_checkpoint(self.folder, log=lambda *_: None)


def save(
    saver: Saver, step: int, tensors: dict[str, Any], *, score: float | None = None, **state: Any
) -> Checkpoint:
    assert saver.begin(step, tensors, state=state, score=score)
    saver.wait()
    assert saver.last is not None
    return saver.last
