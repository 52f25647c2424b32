"""Configuration of scoring, evaluation and export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from annotated_types import Ge

from rayrec.bounds import Count, Fraction
from rayrec.config import Config, InputError
from rayrec.metrics.ranking import check_ks
from rayrec.metrics.significance import Resampling
from rayrec.workloads.scoring import Device

if TYPE_CHECKING:
    from rayrec.models.scoring_tables import Quantization

BaselineKind = Literal["prior", "logistic", "lightgbm", "popularity", "itemknn", "ease"]
"""Baselines of click models, and of retrieval models."""


@dataclass(frozen=True, kw_only=True)
class ScoringConfig(Config):
    """Settings of scoring."""

    batch_rows: Count | None = None
    """Rows per batch. None: 8192 for click models, for others as in evaluations during training."""
    device: Device = "cpu"
    """Compute device. With cuda, each scoring process gets one GPU."""
    max_bad_fraction: float | None = None
    """Maximum share of invalid lines in a log. None uses the value from training."""


@dataclass(frozen=True, kw_only=True)
class PredictionConfig(ScoringConfig):
    """Settings of a prediction."""

    keep: tuple[str, ...] = ()
    """Columns of the input to write next to the predictions, unchanged. They need not be model
    inputs. Click models only.
    """
    k: Count | None = None
    """Number of items to recommend, at most all known ones. None: that of the model. Retrieval
    models only.
    """
    exclude_seen: bool = True
    """Whether to leave out the items that a row has already: its list of items, and `seen`.
    Retrieval models only.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.keep)) < len(self.keep):
            raise InputError(f"keep: values must be unique, got {', '.join(self.keep)}")


@dataclass(frozen=True, kw_only=True)
class _ResampledConfig(ScoringConfig):
    """Settings of scoring and of metric intervals."""

    k: tuple[int, ...] = ()
    """Rank k of ndcg_at_K, recall_at_K, hit_rate_at_K and others, for a retrieval model, or with a
    group. Repeatable. By default that of the retrieval model, with a group 10.
    """
    group: str | None = None
    """Column such as the user, for ranking metrics within its values (GAUC, NDCG, recall). None
    uses the schema's, if any.
    """
    confidence: float | None = None
    """Confidence level of metric intervals, such as 0.95. None omits intervals."""
    resamples: int = 1000
    """Number of bootstrap resamples for intervals and comparisons."""
    seed: int = 0
    """Random seed of the resamples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ks(self.k)
        _ = self.resampling

    @property
    def resampling(self) -> Resampling:
        """Resampling, with the default confidence if none is set."""
        confidence = Resampling.confidence if self.confidence is None else self.confidence
        return Resampling(confidence=confidence, resamples=self.resamples, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(_ResampledConfig):
    """Settings of an evaluation, with additional reports for click and retrieval models."""

    RENAMED: ClassVar[Mapping[str, str]] = {"ranking_k": "k"}

    slice_by: tuple[str, ...] = ()
    """Slice for additional metrics: day, COLUMN (its values), frequency:COLUMN (training rows with
    its value) or length:COLUMN (lengths of a list). The frequency of a retrieval model's items is
    that of the first target. Repeatable.
    """
    slice_top: Count = 10
    """Number of the most frequent values of a column with separate slices. All others share one."""
    compare: str | None = None
    """Another checkpoint of the same kind, to compare with on the same rows."""
    baselines: tuple[BaselineKind, ...] | None = None
    """Baselines trained on the run's training rows to report next to the model: prior (their click
    rate), logistic (regression on hashed categories), lightgbm (gradient-boosted trees). Retrieval
    models have itemknn (similar items), ease (linear model of items), and popularity, which is
    always reported. Without a name: prior and logistic, or popularity and itemknn.
    """
    baseline_rows: Count = 1_000_000
    """Number of the last training rows to train baselines on, kept in memory. Popularity counts
    all.
    """

    importance: bool = False
    """Whether to report the loss of quality when the values of each feature are permuted among the
    rows.
    """
    importance_rows: Count = 50_000
    """Maximum number of rows to permute, evenly spread over the evaluated ones. They stay in
    memory, encoded: 4 bytes for each number, 4 or 8 for each id. More rows narrow the intervals.
    """
    importance_repeats: Count = 5
    """Number of permutations per feature. Each scores all these rows again. More of them narrow the
    interval only as far as the rows allow.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.slice_by)) < len(self.slice_by):
            raise InputError(f"slice_by: values must be unique, got {', '.join(self.slice_by)}")
        check_baselines(self.baselines or ())

    @property
    def needs_rows(self) -> bool:
        """Request for more than metrics over all rows of this model and baselines."""
        return bool(self.slice_by) or self.confidence is not None or self.compare is not None

    @property
    def asks_for_more(self) -> bool:
        """Request for more than metrics over all rows."""
        requests = (self.confidence, self.compare, self.baselines)
        return bool(self.slice_by) or any(request is not None for request in requests)


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig(_ResampledConfig):
    """Settings of a comparison between click models, or between retrieval models."""

    confidence: float = 0.95
    """Confidence level of intervals."""
    baselines: tuple[BaselineKind, ...] = ()
    """Baselines to add, trained on the first model's training rows: prior (their click rate),
    logistic (regression on hashed categories) and lightgbm (gradient-boosted trees on numbers and
    smoothed click rates). Retrieval models have popularity, itemknn and ease.
    """
    baseline_rows: Count = 1_000_000
    """Number of the last training rows to train baselines on, kept in memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_baselines(self.baselines)


def check_baselines(baselines: tuple[str, ...]) -> None:
    """Raise InputError if a baseline is named twice."""
    if len(set(baselines)) < len(baselines):
        raise InputError(f"baselines: values must be unique, got {', '.join(baselines)}")


@dataclass(frozen=True, kw_only=True)
class ComparisonGates(Config):
    """Required gain of the last model over the first: in AUROC, or for retrieval models in NDCG at
    the first k.
    """

    min_auroc_gain: float | None = None
    """Minimum AUROC of the last model minus AUROC of the first. Negative values allow a loss."""
    min_ndcg_gain: float | None = None
    """Minimum NDCG of the last retrieval model minus NDCG of the first, at the first k."""
    max_p_value: float | None = None
    """Maximum p-value of that difference."""


LARGEST_LOGIT_DIFFERENCE: Final = 1e-5
"""Maximum difference between the logits of an fp32 export and its checkpoint, on any row."""
LARGEST_AUROC_LOSS: Final[dict[Quantization, float]] = {
    "fp32": 1e-4,
    "fp16": 1e-4,
    "int8": 1e-4,
    "int4": 2e-3,
}
"""Maximum AUROC difference between an export and its checkpoint on the same rows, by
quantization.
"""


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """Settings of a click model export. Other models need the defaults."""

    quantize: Literal["int8", "int4", "fp16"] | None = None
    """Quantization of the embedding tables. None keeps fp32."""
    parity_path: str | None = None
    """Labelled log for the comparison with the checkpoint. None uses the run's evaluation rows."""
    parity_rows: Annotated[int, Ge(2)] = 50_000
    """Number of rows to compare, spread over the log."""
    max_auroc_loss: Fraction | None = None
    """Maximum AUROC difference from the checkpoint. None: 0.0001, with int4 0.002."""
    ignore_parity: bool = False
    """Whether to export even if the comparison fails, or the run's log is unreadable (random rows
    then). See report.json.
    """
    triton: bool = False
    """Whether to also write a model repository for Triton, in folder triton."""

    @property
    def quantization(self) -> Quantization:
        return self.quantize or "fp32"

    @property
    def auroc_limit(self) -> float:
        return (
            LARGEST_AUROC_LOSS[self.quantization]
            if self.max_auroc_loss is None
            else self.max_auroc_loss
        )
