"""Baselines without a neural network, trained on the rows of a click model: the click rate,
logistic regression on hashed categories (scikit-learn), and gradient-boosted trees (LightGBM).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

import numpy as np

from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows, Ids, JaggedIds, concatenate_ids
from rayrec.data.logs.index import LogIndex, SegmentRange
from rayrec.imports import require
from rayrec.metrics.binary import binary_metrics
from rayrec.workloads.recsys.scorer import load_preprocessor
from rayrec.workloads.recsys.scoring import cache_folder, encode_parts, open_run_log
from rayrec.workloads.recsys.workload import ClickWorkload

if TYPE_CHECKING:
    from scipy import sparse

    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.workloads.base import TrainConfig
    from rayrec.workloads.run_config import DataConfig

Kind = Literal["prior", "logistic", "lightgbm"]
CLICK_BASELINES: Final[tuple[Kind, ...]] = ("prior", "logistic", "lightgbm")
PACKAGES: Final[dict[str, str]] = {"lightgbm": "lightgbm", "logistic": "sklearn"}

_FOLDS: Final = 5
_SMOOTHING: Final = 20.0
"""Prior strength of each category's click rate, in rows with the mean label."""
_TREES: Final = 1000
"""Maximum number of trees. Validation rows select the actual number."""
_PATIENCE: Final = 30
"""Number of trees without a better validation loss before training stops."""
_HASHED: Final = 1 << 20
"""Number of hashed category weights in the logistic regression."""
_STRENGTHS: Final = (0.01, 0.03, 0.1, 0.3)
"""Inverse L2 penalties to try. The validation rows select one."""
_PRIME: Final = np.uint64(0x9E3779B97F4A7C15)


class Scorer(Protocol):
    """Trained baseline model."""

    @property
    def parameters(self) -> int:
        """Number of weights, or of splits and leaves."""

    def logits(self, rows: EncodedRows) -> np.ndarray:
        """Return logits, float32 [rows]."""


@dataclass(frozen=True)
class Baselines:
    """Training and validation rows of a run's baselines, encoded by its Preprocessor."""

    preprocessor: Preprocessor
    train: EncodedRows
    validation: EncodedRows
    cache: str
    config: TrainConfig

    def fit(self, kind: Kind, **settings: Any) -> Scorer:
        """Train a baseline. `settings` override LightGBM's defaults, or set `strengths`, the
        inverse L2 penalties to try.
        """
        if kind == "prior":
            return _Prior.fit(self)
        return (
            _Trees.fit(self, **settings) if kind == "lightgbm" else _Logistic.fit(self, **settings)
        )

    def evaluation_rows(self, first: int, stop: int) -> Iterator[EncodedRows]:
        """Yield the rows from `first` to before `stop` of the log with the run's held-out rows."""
        return self._rows(self.config.workload.evaluation_data(self.config), first, stop)

    def rows(self, path: str, first: int = 0, stop: int | None = None) -> Iterator[EncodedRows]:
        """Yield the rows of a labeled log in order, all or from row `first` to before `stop`.
        Raises InputError if it cannot be read or has too many invalid lines.
        """
        return self._rows(self.config.eval_data.replace(path=path, files=()), first, stop)

    def _rows(self, data: DataConfig, first: int, stop: int | None) -> Iterator[EncodedRows]:
        index = open_run_log(
            data,
            self.preprocessor,
            cache=self.cache,
            max_bad_fraction=self.config.max_bad_fraction,
        )
        return encode_parts(
            index.parts(first, index.rows if stop is None else stop),
            self.preprocessor,
        )


# Rows of the baselines:
#
#   run with eval_data       all training rows       all rows of the evaluation log
#   run without              its training set        its validation set
#
# They train on the last `max_rows`, the nearest in time to the predicted rows, and validate on the
# first `max_rows`.
def open_baselines(
    config: TrainConfig,
    checkpoint: str,
    *,
    max_rows: int,
    kinds: tuple[Kind, ...],
) -> Baselines:
    """Read the last `max_rows` training rows and at most as many validation rows of a checkpoint's
    run. Memory on the driver: 4 bytes for each number and id of these rows, and several times as
    much while a baseline is trained. Raises InputError for a missing package, an unreadable log,
    and a run without validation rows.
    """
    for kind in kinds:
        if kind in PACKAGES:
            require(PACKAGES[kind], extra="baselines")
    assert isinstance(config.workload, ClickWorkload)
    preprocessor = load_preprocessor(checkpoint)
    cache = cache_folder(checkpoint)
    path = config.train_data.path
    if path is None:
        raise InputError(
            f"{checkpoint}: config.yaml must name the training log, which baselines are trained on"
        )

    def opened(data: DataConfig) -> LogIndex:
        return open_run_log(
            data,
            preprocessor,
            cache=cache,
            max_bad_fraction=config.max_bad_fraction,
        )

    index = opened(config.train_data)
    if config.eval_data.path is None:
        sets = config.workload.split_rows(path, index)
        train = sets["train"]
        validation_index = index
        validation_range = sets["validation"]
    else:
        train = (0, index.rows)
        validation_index = opened(config.eval_data)
        validation_range = (0, validation_index.rows)
    train_tail = (max(train[0], train[1] - max_rows), train[1])
    validation_head = (
        validation_range[0],
        min(validation_range[1], validation_range[0] + max_rows),
    )
    train_rows, validation_rows = (
        _encode(parts, preprocessor)
        for parts in (index.parts(*train_tail), validation_index.parts(*validation_head))
    )
    return Baselines(preprocessor, train_rows, validation_rows, cache, config)


def _encode(parts: Iterable[SegmentRange], preprocessor: Preprocessor) -> EncodedRows:
    """Encode rows without weights, groups and additional labels, which baselines do not use."""
    batches = list(encode_parts(parts, preprocessor))
    if not batches:
        raise InputError("baselines: the run's split has no rows to train or to validate on")
    columns = [
        _without_weights(concatenate_ids(column))
        for column in zip(*(batch.ids for batch in batches), strict=True)
    ]
    labels = {next(iter(batches[0].labels)): np.concatenate([batch.label for batch in batches])}
    return EncodedRows(np.concatenate([batch.dense for batch in batches]), columns, labels)


def _without_weights(ids: Ids) -> Ids:
    return JaggedIds(ids.values, ids.lengths) if isinstance(ids, JaggedIds) else ids


@dataclass(frozen=True)
class _Rates:
    """Number of training rows and clicks of each category in a column with one id per row."""

    count: np.ndarray
    clicks: np.ndarray
    prior: float

    @classmethod
    def from_rows(cls, ids: np.ndarray, labels: np.ndarray, num_embeddings: int) -> _Rates:
        clicks = np.bincount(ids, weights=labels, minlength=num_embeddings)
        return cls(
            np.bincount(ids, minlength=num_embeddings).astype(np.float64),
            clicks,
            float(labels.mean()),
        )

    def __sub__(self, other: _Rates) -> _Rates:
        return _Rates(self.count - other.count, self.clicks - other.clicks, self.prior)

    def features(self, ids: np.ndarray) -> np.ndarray:
        """Return the smoothed click rate and log count of each id, float32 [rows, 2]."""
        count = self.count[ids]
        clicks = self.clicks[ids]
        rate = (clicks + _SMOOTHING * self.prior) / (count + _SMOOTHING)
        return np.stack([rate, np.log1p(count)], axis=1).astype(np.float32)


class _Prior:
    """Click rate of the training rows, the same for every row."""

    parameters = 1

    def __init__(self, rate: float) -> None:
        self._logit = np.log(rate / (1 - rate))

    @classmethod
    def fit(cls, baselines: Baselines) -> _Prior:
        labels = baselines.train.label
        # One more click and one more row without keep the logit finite if all labels are equal.
        return cls((float(labels.sum()) + 1.0) / (len(labels) + 2.0))

    def logits(self, rows: EncodedRows) -> np.ndarray:
        return np.full(len(rows), self._logit, np.float32)


# A category's click rate includes the row's own label. Trees would learn to read it, so that each
# training row gets rates of the four folds without it; other rows get those of all.
class _Trees:
    """Gradient-boosted trees on numbers and target-encoded categories: click rate and count from
    other folds. Skips lists.
    """

    def __init__(self, rates: dict[int, _Rates], booster: Any) -> None:
        self._rates = rates
        self._booster = booster

    @classmethod
    def fit(cls, baselines: Baselines, **settings: Any) -> _Trees:
        import lightgbm

        rows = baselines.train
        labels = baselines.train.label
        num_embeddings = baselines.preprocessor.num_embeddings
        fold = np.arange(len(rows)) % _FOLDS
        rates = {}
        columns = [rows.dense]
        for number, ids in enumerate(rows.ids):
            if isinstance(ids, JaggedIds) or ids.ndim != 1:
                continue
            full_rates = rates[number] = _Rates.from_rows(ids, labels, num_embeddings[number])
            encoded_ids = np.empty((len(rows), 2), np.float32)
            for fold_number in range(_FOLDS):
                inside = fold == fold_number
                without = full_rates - _Rates.from_rows(
                    ids[inside],
                    labels[inside],
                    num_embeddings[number],
                )
                encoded_ids[inside] = without.features(ids[inside])
            columns.append(encoded_ids)
        if not any(part.shape[1] for part in columns):
            raise InputError(
                "baselines: the log has neither numbers nor columns of one category. Leave out "
                "lightgbm."
            )
        trees_model = cls(rates, None)
        train_set = lightgbm.Dataset(np.concatenate(columns, axis=1), labels)
        validation_set = train_set.create_valid(
            trees_model._features(baselines.validation),
            baselines.validation.label,
        )
        repeatable = {"seed": 0, "deterministic": True, "force_row_wise": True}
        parameters = {
            "objective": "binary",
            "learning_rate": 0.05,
            "verbosity": -1,
            **repeatable,
            **settings,
        }
        stop = lightgbm.early_stopping(_PATIENCE, verbose=False)
        trees_model._booster = lightgbm.train(
            parameters,
            train_set,
            _TREES,
            valid_sets=[validation_set],
            callbacks=[stop],
        )
        return trees_model

    def _features(self, rows: EncodedRows) -> np.ndarray:
        # Of columns with one category, because `fit` skips lists
        ids = {number: cast(np.ndarray, rows.ids[number]) for number in self._rates}
        id_features = [rates.features(ids[number]) for number, rates in self._rates.items()]
        return np.concatenate([rows.dense, *id_features], axis=1)

    @property
    def parameters(self) -> int:
        trees = self._booster.dump_model()["tree_info"]
        return sum(2 * tree["num_leaves"] - 1 for tree in trees)

    def logits(self, rows: EncodedRows) -> np.ndarray:
        scores = self._booster.predict(self._features(rows), raw_score=True)
        return scores.astype(np.float32)


# Without the columns that no training row has, the solver's vectors are as long as the data need
# instead of 2^20.
class _Logistic:
    """Logistic regression on numbers and 2^20 hashed category weights."""

    def __init__(self, model: Any, trained: np.ndarray) -> None:
        """Create a scorer. `trained` has the columns of `one_hot` with a weight in the model."""
        self._model = model
        self._trained = trained

    @classmethod
    def fit(cls, baselines: Baselines, *, strengths: tuple[float, ...] = _STRENGTHS) -> _Logistic:
        from sklearn.linear_model import LogisticRegression

        features = one_hot(baselines.train)
        validation_features = one_hot(baselines.validation)
        trained = np.flatnonzero(features.getnnz(axis=0))
        features, validation_features = features[:, trained], validation_features[:, trained]

        def loss(model: Any) -> float:
            logits = model.decision_function(validation_features).astype(np.float32)
            return binary_metrics(logits, baselines.validation.label)["logloss"]

        models = (LogisticRegression(C=strength, max_iter=200, tol=1e-3) for strength in strengths)
        return cls(
            min((model.fit(features, baselines.train.label) for model in models), key=loss),
            trained,
        )

    @property
    def parameters(self) -> int:
        return int(np.count_nonzero(self._model.coef_)) + 1

    def logits(self, rows: EncodedRows) -> np.ndarray:
        scores = self._model.decision_function(one_hot(rows)[:, self._trained])
        return scores.astype(np.float32)


def one_hot(rows: EncodedRows) -> sparse.csr_matrix:
    """Return the numbers, and the count of each hashed category, as float32 [rows, num_dense +
    2^20].
    """
    from scipy import sparse

    values = []
    owners = []
    for number, ids in enumerate(rows.ids):
        if isinstance(ids, JaggedIds):
            flat = ids.values
            owner = np.repeat(np.arange(len(rows)), ids.lengths)
        else:
            flat = ids.reshape(-1)
            owner = np.repeat(np.arange(len(rows)), ids.size // max(len(rows), 1))
        # Multiplicative hashing, modulo 2^64: the highest 20 bits are the best mixed ones.
        with np.errstate(over="ignore"):
            mixed = (flat.astype(np.uint64) + np.uint64(number + 1) * np.uint64(1 << 40)) * _PRIME
        values.append((mixed >> np.uint64(44)).astype(np.int32))
        owners.append(owner.astype(np.int32))
    positions = (
        (np.concatenate(owners), np.concatenate(values))
        if values
        else (np.empty(0, int), np.empty(0, int))
    )
    hashed = sparse.csr_matrix(
        (np.ones(len(positions[0]), np.float32), positions),
        shape=(len(rows), _HASHED),
    )
    return sparse.hstack([sparse.csr_matrix(rows.dense), hashed], format="csr")
