"""Settings of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayrec.config import Config, InputError


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Config):
    """How many trials there are, how the best is chosen, and what each of them gets."""

    trials: int = 20
    """Trials, the recipe's own settings being one of them; grids alone decide this themselves."""
    metric: Literal["auroc", "logloss"] = "auroc"
    """Of the validation rows: what the best trial is best in."""
    seed: int = 0
    """Of the values that are drawn."""
    stop_early: bool = True
    """Train all trials for the first part of their steps only, then the best of them for longer, and so on (successive halving);
    the recipe's own settings are always trained to the end. False: all trials are."""
    keep_fraction: float = 1 / 3
    """Share of the trials that train on after each part. By default trials are compared when 1/27, 1/9 and 1/3 of their steps are
    done."""
    cpus_per_trial: int = 1
    """Threads of a trial, which trains in one process."""
    gpus_per_trial: float = 0.0
    """GPUs of a trial; a fraction lets several share one."""
    concurrent: int | None = None
    """Most trials at once; None: as many as there is room for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("trials", "cpus_per_trial", "concurrent"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: {value} must be at least 1")
        if not 0 < self.keep_fraction <= 0.5:
            raise InputError(f"keep_fraction: {self.keep_fraction} must be above 0 and at most 0.5")
        if self.gpus_per_trial < 0:
            raise InputError(f"gpus_per_trial: {self.gpus_per_trial} must be at least 0")
