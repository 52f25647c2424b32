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
    """Stop trials that are not among the best of those at the same evaluation (ASHA), but never the recipe's own settings. A
    trial is evaluated as often as the recipe says (evaluate_every)."""
    keep_fraction: float = 1 / 3
    """Share of the trials that train on at each of the first, third, ninth, ... evaluation."""
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

    @property
    def reduction(self) -> float:
        """ASHA's reduction factor."""
        return 1 / self.keep_fraction
