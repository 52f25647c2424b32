"""Configuration of scoring, evaluation and exports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from rayrec.config import Config, InputError
from rayrec.metrics.ranking import DEFAULT_KS, check_ks
from rayrec.metrics.significance import Resampling
from rayrec.workloads.scoring import Device

if TYPE_CHECKING:
    from rayrec.models.scoring_tables import Quantization


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
class _ResampledConfig(ScoringConfig):
    """How rows are scored, and how sure metrics are."""

    group: str | None = None
    """Column such as the user: also report how well rows are ordered within its values (gauc, NDCG, recall); None: the schema's,
    if any."""
    confidence: float | None = None
    """Tell intervals that hold the true metric with this probability, such as 0.95; None: none."""
    resamples: int = 1000
    """Number of bootstrap resamples for intervals and comparisons."""
    seed: int = 0
    """Of these draws."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.resampling

    @property
    def resampling(self) -> Resampling:
        """With the default confidence where two checkpoints are compared and none is given."""
        confidence = Resampling.confidence if self.confidence is None else self.confidence
        return Resampling(confidence=confidence, resamples=self.resamples, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(_ResampledConfig):
    """How rows are scored, and what is reported of a click model in addition to its metrics over all rows."""

    ranking_k: tuple[int, ...] = ()
    """With a group: rank k of ndcg_at_K, recall_at_K and hit_rate_at_K, may be given several times; none: 10."""
    slice_by: tuple[str, ...] = ()
    """Tell metrics also by slices: day, COLUMN (its values), frequency:COLUMN (how often its value was trained on); may be given
    several times."""
    slice_top: int = 10
    """Of a column's values, those with the most rows that are told one by one; the others are told together."""
    compare: str | None = None
    """Another checkpoint of a click model, scored on the same rows: whether the two differ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slice_top < 1:
            raise InputError(f"slice_top: {self.slice_top} must be at least 1")
        if len(set(self.slice_by)) < len(self.slice_by):
            raise InputError(f"slice_by: {', '.join(self.slice_by)} names one twice")
        check_ks(self.ranking_k)

    @property
    def ks(self) -> tuple[int, ...]:
        """Ranks k of the metrics at k."""
        return self.ranking_k or DEFAULT_KS

    @property
    def asks_for_more(self) -> bool:
        """Whether more than metrics over all rows is asked for."""
        return bool(self.slice_by) or self.confidence is not None or self.compare is not None


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig(_ResampledConfig):
    """How rows are scored with each of several click models, and how sure their differences are."""

    confidence: float = 0.95
    """Probability with which intervals hold the true metric."""
    ensemble: bool = False
    """Compare the mean of the models' logits too, as one more model."""
    baselines: tuple[Literal["lightgbm", "logistic"], ...] = ()
    """Compare models that are no networks too, trained on the first model's training rows: lightgbm (gradient-boosted trees on
    numbers and smoothed rates of clicks) and logistic (regression on hashed categories)."""
    baseline_rows: int = 1_000_000
    """The last training rows that baselines are trained on; they are held in memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.baselines)) < len(self.baselines):
            raise InputError(f"baselines: {', '.join(self.baselines)} names one twice")
        if self.baseline_rows < 1:
            raise InputError(f"baseline_rows: {self.baseline_rows} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ComparisonGates(Config):
    """What the last model (the ensemble, if it is asked for) must gain over the first."""

    min_auroc_gain: float | None = None
    """Least AUROC of the last model less that of the first; may be negative, for a loss that is allowed."""
    max_p_value: float | None = None
    """Largest p-value of that difference."""


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
