"""What a caller decides about an export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rayrec.config import Config, InputError
from rayrec.models.tables import Quantization

LARGEST_LOGIT_DIFFERENCE: Final = 1e-5
"""Of an fp32 export from its checkpoint, on any row."""
LARGEST_AUROC_LOSS: Final[dict[Quantization, float]] = {"fp32": 1e-4, "fp16": 1e-4, "int8": 1e-4, "int4": 2e-3}
"""By how tables are stored: how far AUROC may be from the checkpoint's on the same rows."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """How a click model is exported. For other models everything must be as it is here."""

    quantize: Literal["int8", "int4", "fp16"] | None = None
    """How the embedding tables are stored; None: as they are, fp32."""
    parity_path: str | None = None
    """Labelled log whose rows the export is compared with the checkpoint on; None: what the run evaluated on."""
    parity_rows: int = 50_000
    """Rows compared, spread over the log."""
    max_auroc_loss: float | None = None
    """How far the AUROC may be from the checkpoint's; None: 0.0001, with int4 0.002."""
    ignore_parity: bool = False
    """Export also where the comparison fails, and where the run's log cannot be read (rows drawn at random are compared then);
    report.json says what failed."""
    triton: bool = False
    """Write a model repository for Triton as well, in folder triton."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parity_rows < 2:
            raise InputError(f"parity_rows: {self.parity_rows} must be at least 2")
        if self.max_auroc_loss is not None and not 0 <= self.max_auroc_loss <= 1:
            raise InputError(f"max_auroc_loss: {self.max_auroc_loss} must lie between 0 and 1")

    @property
    def quantization(self) -> Quantization:
        return self.quantize or "fp32"

    @property
    def auroc_limit(self) -> float:
        return LARGEST_AUROC_LOSS[self.quantization] if self.max_auroc_loss is None else self.max_auroc_loss
