"""What a run is called by in trackers that keep many runs."""

from __future__ import annotations

import hashlib


def run_identity(name: str, begin_s: float) -> str:
    """16 hex digits: the same for all drivers of a run, others for a run of the same name that is begun anew. `begin_s` is the
    time of its first event."""
    return hashlib.sha256(f"{name} {begin_s:.6f}".encode()).hexdigest()[:16]
