"""How rows are scored, whatever they are and wherever that is done: what evaluating and predicting share."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.config import Config
from rayrec.workloads.scoring import Device


@dataclass(frozen=True, kw_only=True)
class ScoringConfig(Config):
    """How rows are scored."""

    batch_rows: int | None = None
    """Rows the model takes at once; None: a click model 8192, others as many as in evaluations while training."""
    device: Device = "cpu"
    """cuda: each scoring process gets one GPU."""
    max_bad_fraction: float | None = None
    """Share of faulty lines above which a log is refused; None: as in training."""
    cluster_address: str | None = None
    """Address of a running Ray cluster; None: RAY_ADDRESS, else a local Ray."""
