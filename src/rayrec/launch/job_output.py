"""What can be learnt from what a job printed: the run's summary, and the last word of one that failed."""

from __future__ import annotations

import json
from typing import Any


def summary_of(log: str) -> dict[str, Any] | None:
    """The summary that `rayrec train` prints last; what others printed after it does not matter."""
    start = f"\n{log}".rfind("\n{\n")
    if start < 0:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(log, start)
    except ValueError:
        return None
    return found if "weights_sha256" in found else None


def last_said(message: str) -> str:
    """What rayrec said last in a failed job's log, else the last line of it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("rayrec train: ")]
    return (ours or lines or ["no more is known"])[-1].removeprefix("rayrec train: ")
