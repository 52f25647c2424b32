"""How start values of embedding tables are distributed. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayrec.config import Config, InputError


@dataclass(frozen=True, kw_only=True)
class TableStart(Config):
    """Distribution of the start values of embedding tables."""

    kind: Literal["uniform", "normal"] = "uniform"
    """uniform: from -sqrt(1/n) to sqrt(1/n) for a table of n rows; normal: with mean 0 and standard deviation `std`."""
    std: float = 1e-4
    """Standard deviation (normal)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.std < float("inf"):
            raise InputError(f"TableStart.std: {self.std} must be above 0 and finite")
