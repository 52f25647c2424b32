"""Compares an export's scores with those of its checkpoint: the rows, the comparison, and the limits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rayrec.config import InputError
from rayrec.data.encoded import Bags, EncodedRows, Ids
from rayrec.data.log import LogIndex, Segment, select
from rayrec.data.log_head import has_labels
from rayrec.data.position import Part
from rayrec.inference.config import LARGEST_LOGIT_DIFFERENCE, ExportConfig
from rayrec.inference.run_rows import BATCH_ROWS, encoded_parts, open_run_log
from rayrec.metrics.binary import auroc
from rayrec.workloads.recsys import ClickWorkload

if TYPE_CHECKING:
    from rayrec.data.preprocessor import Preprocessor
    from rayrec.models.tables import Quantization
    from rayrec.workloads.base import TrainConfig

_SPEED_S: Final = 0.5
"""Seconds that a model is measured for."""
_DRAWN_BAG: Final = 3
"""Most ids a drawn row has in a column of any number."""

Score = Callable[[EncodedRows], np.ndarray]


@dataclass(frozen=True)
class ParityRows:
    """Rows to compare two models on."""

    origin: str
    """What they are, for people."""
    batches: tuple[EncodedRows, ...]
    fault: str | None = None
    """Why they cannot show what an export is worth."""

    @property
    def rows(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def score(self, score: Score) -> np.ndarray:
        """float32 (rows,): logits."""
        return np.concatenate([score(batch) for batch in self.batches])

    def labels(self) -> np.ndarray | None:
        """float32 (rows,); None for drawn rows."""
        labels = [batch.labels for batch in self.batches]
        return None if labels[0] is None else np.concatenate(labels)  # type: ignore[arg-type]

    def rows_per_s(self, score: Score) -> float:
        """Of one caller with one batch, the best of about half a second: what else the machine does makes it only slower."""
        batch, best_s, end = self.batches[0], math.inf, time.perf_counter() + _SPEED_S
        while (start := time.perf_counter()) < end or best_s == math.inf:
            score(batch)
            best_s = min(best_s, time.perf_counter() - start)
        return len(batch) / best_s


def parity_rows(config: TrainConfig, preprocessor: Preprocessor, *, settings: ExportConfig, cache: str) -> ParityRows:
    """The rows an export is compared on: of `settings.parity_path`; else of the log the run evaluated on (its test rows, where
    there are enough, or those of --eval-data.path). Where that cannot be read and `settings.ignore_parity` says that it need not,
    drawn ones, and `fault` says why. Folder `cache` keeps the index.

    Raises InputError where there are no such rows, and where parity_path is unusable or holds no labels.
    """
    if settings.parity_path is not None:
        path = settings.parity_path
        if not has_labels(path, preprocessor.schema):
            raise InputError(f"{path}: holds no labels, so no AUROC can be compared; give a labelled log")
        index = open_run_log(config.train_data.replace(path=path, files=()), preprocessor, cache=cache)
        return _read(index, (0, index.rows), preprocessor, settings, origin=f"rows of {path}")
    try:
        return _of_the_run(config, preprocessor, settings, cache)
    except (InputError, OSError) as error:  # moved, removed or unavailable: only the checkpoint must be there
        path = config.eval_data.path or config.train_data.path or "none"
        fault = f"no rows of the run's log, {path}, which cannot be read ({' '.join(str(error).split())})"
        if not settings.ignore_parity:
            raise InputError(
                f"export: has {fault} to compare on; give a labelled log as --parity-path, or pass --ignore-parity, and rows "
                "drawn at random are compared"
            ) from None
        return replace(drawn_rows(preprocessor, rows=settings.parity_rows), fault=fault)


def _of_the_run(config: TrainConfig, preprocessor: Preprocessor, settings: ExportConfig, cache: str) -> ParityRows:
    assert isinstance(config.workload, ClickWorkload)
    if config.eval_data.path is not None:
        index = open_run_log(config.eval_data, preprocessor, cache=cache)
        return _read(index, (0, index.rows), preprocessor, settings, origin=f"rows of {config.eval_data.path}")
    index = open_run_log(config.train_data, preprocessor, cache=cache)
    sets = config.workload.split_rows(config.train_data.path or "", index)
    name = "test" if "test" in sets else "validation"
    start, stop = sets[name]
    if stop - start >= settings.parity_rows:
        return _read(index, (start, stop), preprocessor, settings, origin=f"{name} rows of {config.train_data.path}")
    # Training rows compare two models as well as any, and of few rows an AUROC is noise.
    return _read(index, (0, index.rows), preprocessor, settings, origin=f"rows of {config.train_data.path}")


def _read(
    index: LogIndex, rows: tuple[int, int], preprocessor: Preprocessor, settings: ExportConfig, *, origin: str
) -> ParityRows:
    parts = spread(select(index, *rows), rows=settings.parity_rows)
    return ParityRows(origin, tuple(encoded_parts(parts, preprocessor)))


def spread(found: Sequence[tuple[Segment, int, int]], *, rows: int) -> list[Part]:
    """At most `rows` rows, from segments at even distances. Pure."""
    total = sum(stop - start for _, start, stop in found)
    wanted = max(1, math.ceil(len(found) * min(1.0, rows / total)))
    chosen = [found[place * len(found) // wanted] for place in range(wanted)]
    parts, left = [], rows
    for number, (segment, start, stop) in enumerate(chosen):
        take = min(stop - start, -(-left // (len(chosen) - number)))
        if take:
            parts.append(Part(segment, start, start + take))
        left -= take
    return parts


def drawn_rows(preprocessor: Preprocessor, *, rows: int, seed: int = 0) -> ParityRows:
    """Rows without labels: dense features from a normal distribution, ids of all the tables' rows alike."""
    rng = np.random.default_rng(seed)
    batches = []
    for start in range(0, rows, BATCH_ROWS):
        count = min(BATCH_ROWS, rows - start)
        dense = rng.standard_normal((count, len(preprocessor.inputs.dense)), np.float32)
        ids = [
            _drawn_ids(rng, count, num_embeddings, hotness, preprocessor.id_dtype)
            for num_embeddings, hotness in zip(preprocessor.num_embeddings, preprocessor.hotness, strict=True)
        ]
        batches.append(EncodedRows(dense, ids, None))
    return ParityRows("rows drawn at random, their labels by the checkpoint's own scores", tuple(batches))


def _drawn_ids(rng: np.random.Generator, rows: int, num_embeddings: int, hotness: int | None, dtype: np.dtype) -> Ids:
    if hotness is None:
        lengths = rng.integers(0, _DRAWN_BAG + 1, rows).astype(np.int32)
        return Bags(rng.integers(0, num_embeddings, int(lengths.sum()), dtype), lengths)
    return rng.integers(0, num_embeddings, rows if hotness == 1 else (rows, hotness), dtype)


@dataclass(frozen=True)
class Comparison:
    """An export's logits beside its checkpoint's, on the same rows."""

    rows: int
    origin: str
    max_logit_difference: float
    max_relative_difference: float
    """As a share of the logit, or of 1 where that is larger."""
    mean_logit_difference: float
    auroc_checkpoint: float
    auroc_export: float

    @property
    def auroc_difference(self) -> float:
        """Unsigned; NaN where all rows are of one class."""
        return abs(self.auroc_checkpoint - self.auroc_export)

    def to_dict(self) -> dict[str, Any]:
        values = {**vars(self), "auroc_difference": self.auroc_difference}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }  # JSON knows no NaN

    def failure(self, quantization: Quantization, *, auroc_limit: float, relative: bool = False) -> str | None:
        """What is beyond its limit, in words; None: nothing. `relative`: a large logit may differ by more, for who adds up
        float32 in another order cannot do better. Pure."""
        if not math.isfinite(self.max_logit_difference):
            return "logits that are not finite"
        largest = self.max_relative_difference if relative else self.max_logit_difference
        if quantization == "fp32" and largest > LARGEST_LOGIT_DIFFERENCE:
            return f"a logit that differs by {largest:.2g}{relative * ' of it'}, more than {LARGEST_LOGIT_DIFFERENCE:g}"
        if quantization != "fp32" and math.isnan(self.auroc_difference):
            return "no AUROC to compare (the rows are of one class)"
        if self.auroc_difference > auroc_limit:
            return f"an AUROC that differs by {self.auroc_difference:.2g}, more than {auroc_limit:g}"
        return None


def compare(origin: str, labels: np.ndarray | None, checkpoint: np.ndarray, export: np.ndarray) -> Comparison:
    """`checkpoint` and `export`: float32 (rows,) logits. Without labels they are drawn from the checkpoint's scores, by a fixed
    seed."""
    differences = np.abs(checkpoint.astype(np.float64) - export.astype(np.float64))
    if not np.isfinite(differences).all():
        return Comparison(len(checkpoint), origin, math.inf, math.inf, math.inf, math.nan, math.nan)
    if labels is None:
        chances = 1 / (1 + np.exp(-np.clip(checkpoint.astype(np.float64), -500, 500)))
        labels = (np.random.default_rng(0).random(len(checkpoint)) < chances).astype(np.float32)
    return Comparison(
        rows=len(checkpoint),
        origin=origin,
        max_logit_difference=float(differences.max()),
        max_relative_difference=float((differences / np.maximum(1.0, np.abs(checkpoint))).max()),
        mean_logit_difference=float(differences.mean()),
        auroc_checkpoint=auroc(checkpoint, labels),
        auroc_export=auroc(export, labels),
    )
