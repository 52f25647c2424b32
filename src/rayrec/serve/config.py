"""How rows are scored, whatever they are and wherever that is done, and what an evaluation tells beside its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.config import Config, InputError
from rayrec.significance import Resampling
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


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(ScoringConfig):
    """How rows are scored, and what is told of a click model beside its metrics over all rows."""

    group: str | None = None
    """Column such as the user: also tell how well rows are ordered within its values (gauc); None: the schema's, if any."""
    slice_by: tuple[str, ...] = ()
    """Tell metrics also by slices: day, COLUMN (its values), frequency:COLUMN (how often its value was trained on); may be given
    several times."""
    slice_top: int = 10
    """Of a column's values, those with the most rows that are told one by one; the others are told together."""
    confidence: float | None = None
    """Tell intervals that hold the true metric with this probability, such as 0.95; None: none."""
    resamples: int = 1000
    """Times the rows are drawn anew for intervals and comparisons."""
    seed: int = 0
    """Of these draws."""
    compare: str | None = None
    """Another checkpoint of a click model, scored on the same rows: whether the two differ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slice_top < 1:
            raise InputError(f"slice_top: {self.slice_top} must be at least 1")
        if len(set(self.slice_by)) < len(self.slice_by):
            raise InputError(f"slice_by: {', '.join(self.slice_by)} names one twice")
        _ = self.resampling

    @property
    def resampling(self) -> Resampling:
        """With the default confidence where two checkpoints are compared and none is given."""
        confidence = Resampling.confidence if self.confidence is None else self.confidence
        return Resampling(confidence=confidence, resamples=self.resamples, seed=self.seed)

    @property
    def asks_for_more(self) -> bool:
        """Whether more than metrics over all rows is asked for."""
        return bool(self.slice_by) or self.confidence is not None or self.compare is not None
