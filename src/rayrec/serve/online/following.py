"""Which checkpoint of a run in progress is the one to serve."""

from __future__ import annotations

from typing import Literal

from rayrec import storage
from rayrec.checkpoint import Checkpoint, DamagedError, committed
from rayrec.checkpoint.folders import check_files

Follow = Literal["no", "newest", "best"]


def choose(run: str, which: Literal["newest", "best"]) -> str | None:
    """The folder, absolute, of a run's newest complete checkpoint, or of the one with the best score of an evaluation (of equal
    ones the later); None where there is none (yet). One that lacks files, as while it is removed, is passed over."""
    scored: list[tuple[float, str]] = []
    for checkpoint in reversed(committed(storage.absolute(run))):
        found = _score(checkpoint)
        if found is None:
            continue
        if which == "newest":
            return checkpoint.path
        if found[0] is not None:
            scored.append((found[0], checkpoint.path))
    return max(scored, key=lambda entry: entry[0])[1] if scored else None  # the first, hence the newest, of equal ones


def _score(checkpoint: Checkpoint) -> tuple[float | None] | None:
    """The score in a checkpoint's manifest; None for one that is not whole."""
    try:
        manifest = checkpoint.manifest()
        check_files(checkpoint, manifest)
    except (DamagedError, FileNotFoundError):
        return None
    return (manifest["score"],)
