"""Training of boosted trees (`ClickModelConfig.BOOSTED`) by LightGBM: one tree per step, on the
rows, Preprocessor and splits of any click model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import lightgbm
import numpy as np
import torch

from rayrec.batch import DENSE, Batch, StepOutput
from rayrec.config import InputError
from rayrec.data.encoded_rows import JaggedIds
from rayrec.humanize import one_line
from rayrec.ingest.block_order import BlockOrder
from rayrec.layers.kernels.trees import BoostedTrees, Tree
from rayrec.models.base import ModelInputs
from rayrec.models.boosted.lightgbm import LightGBMConfig, TreeNetwork, tree_columns
from rayrec.models.scoring_tables import table_name
from rayrec.models.sharded_model import ClickModel, build_click_model
from rayrec.trained_rows import RowNumbers, TrainedRows
from rayrec.workloads.base import WorkerContext
from rayrec.workloads.recsys.category_statistics import CategoryStatistics, folds
from rayrec.workloads.recsys.settings import ClickSettings, Prepared
from rayrec.workloads.step_timer import StepTimer
from rayrec.workloads.worker_setup import step_seed

if TYPE_CHECKING:
    from rayrec.ingest.loader import Loader

# How a learner without gradients fits the loop of networks:
#
#   step          one tree; its batch is all rows (`Round`)
#   loader        rounds, of which each is an epoch; its position is their number
#   tables        statistics of categories, instead of embeddings that are learned
#   network       `TreeNetwork`, whose weights are the trees grown so far
#   optimizer     none; `ConstantRate` has the learning rate for logs
#   evaluations   the network on batches of other rows, as for any click model
#   checkpoint    tables and trees, of a fixed size for any number of trees
#
# So evaluation, export, serving, ensembles and comparisons know nothing of LightGBM. It is needed
# only here.

BATCH_ROWS: Final = 1 << 15
"""Rows that are read at once."""
_SAMPLE_ROWS: Final = 200_000
"""Training rows that bounds of bins are computed from, evenly spread."""
_MIN_MEAN: Final = 1e-9
"""Minimum mean label that trees start from, if all labels are equal."""
_OBJECTIVES: Final = {"binary": "cross_entropy", "number": "regression", "count": "poisson"}
"""LightGBM's objective for each kind of label. Its raw predictions are those of the label's
head.
"""
_CATEGORICAL_OR_MISSING: Final = 0b1101
"""Bits of LightGBM's decision_type that `BoostedTrees` does not have."""

OpenRows = Callable[[], "Loader[Any, Any]"]
"""Function that opens one epoch of the training rows, always in the same order."""
Sums = Callable[[torch.Tensor], torch.Tensor]
"""Function from the columns of rows to the sums of the trees so far."""


@dataclass(frozen=True)
class _Sample:
    """Sampled training rows: dense features, ids of each feature, and folds."""

    dense: np.ndarray
    columns: list[JaggedIds]
    fold: np.ndarray


# What is read, and what remains in memory:
#
#   first pass     sums of categories, labels, weights, row numbers, the sample
#   second pass    columns of a batch -> LightGBM's bins, one byte per row and column
#
# A resumed run makes both passes again, which gives the same bins. The trees so far give each row's
# start value. LightGBM adds up the same float64 numbers in the same order.
@final
class TreeRows:
    """Training rows of boosted trees."""

    def __init__(
        self,
        open_rows: OpenRows,
        statistics: CategoryStatistics,
        *,
        rows: int,
        watch_dense: Callable[[np.ndarray], None],
    ) -> None:
        """Read the rows once, into empty `statistics`. `rows` is their number. `watch_dense` is
        called with the dense features of each batch.
        """
        self._open = open_rows
        self.statistics = statistics
        self._num_rows = rows
        stride = -(-rows // _SAMPLE_ROWS)
        labels = []
        weights = []
        numbers = []
        samples = []
        begin = 0
        with closing(open_rows()) as loader:
            for batch in loader:
                dense, columns, fold = _parts(batch)
                label = next(iter(batch.labels.values())).numpy()
                weight = np.ones_like(label)
                if batch.weights is not None:
                    weight = batch.weights.numpy()
                    weights.append(weight)
                labels.append(label)
                numbers.append(_numbers(batch))
                watch_dense(dense)
                statistics.add(columns, fold, weight, label)
                # Every `stride`th row of all batches together
                sampled = np.arange(-begin % stride, len(label), stride)
                samples.append(
                    _Sample(
                        dense[sampled],
                        [ids.take(sampled) for ids in columns],
                        fold[sampled],
                    )
                )
                begin += len(label)
        self._label = np.concatenate(labels)
        self._weight = np.concatenate(weights) if weights else None
        self._sample = _joined(samples)
        self.numbers = np.concatenate(numbers)

    def mean_logit(self) -> float:
        """Return the logit of the mean label, weighted like the rows."""
        mean = np.average(self._label.astype(np.float64), weights=self._weight)
        inside = float(np.clip(mean, _MIN_MEAN, 1 - _MIN_MEAN))
        return math.log(inside / (1 - inside))

    def dataset(
        self, parameters: Mapping[str, Any], *, start: Sums | None = None
    ) -> lightgbm.Dataset:
        """Read the rows again, into LightGBM's bins. `start` returns the start values of rows. None
        starts from the mean label.
        """
        settings = dict(parameters)
        sample = self._sample
        columns = self._columns(sample.dense, sample.columns, sample.fold)
        bins = lightgbm.Dataset(columns.numpy(), params=settings).construct()
        with closing(self._open()) as loader:
            sequence = _Columns(loader, self._columns, rows=self._num_rows, start=start)
            dataset = lightgbm.Dataset(
                sequence, self._label, reference=bins, weight=self._weight, params=settings
            ).construct()
        if start is not None:
            dataset.set_init_score(sequence.start_values())
        return dataset

    def _columns(
        self, dense: np.ndarray, columns: Sequence[JaggedIds], fold: np.ndarray
    ) -> torch.Tensor:
        summed = torch.from_numpy(self.statistics.summed(columns, fold))
        return tree_columns(torch.from_numpy(dense), summed)


@final
class _Columns(lightgbm.Sequence):
    """Columns of all rows for LightGBM, which takes them once, in order."""

    batch_size = BATCH_ROWS

    def __init__(
        self,
        batches: Iterator[Batch],
        columns: Callable[..., torch.Tensor],
        *,
        rows: int,
        start: Sums | None,
    ) -> None:
        self._batches = batches
        self._columns = columns
        self._num_rows = rows
        self._start = start
        self._sums: list[np.ndarray] = []

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, rows: Any) -> np.ndarray:
        columns = self._columns(*_parts(next(self._batches)))
        assert len(columns) == rows.stop - rows.start, "LightGBM takes the batches in order"
        if self._start is not None:
            self._sums.append(self._start(columns).numpy())
        return columns.numpy()

    def start_values(self) -> np.ndarray:
        return np.concatenate(self._sums)


def _parts(batch: Batch) -> tuple[np.ndarray, list[JaggedIds], np.ndarray]:
    """Return the dense features, the ids of each feature, and the folds of a batch."""
    columns = []
    features = batch.sparse_features
    for column in () if features is None else features.to_dict().values():
        weights = column.weights_or_none()
        columns.append(
            JaggedIds(
                column.values().numpy(),
                column.lengths().numpy(),
                None if weights is None else weights.numpy(),
            )
        )
    return batch.tensors[DENSE].numpy(), columns, folds(_numbers(batch))


def _numbers(batch: Batch) -> np.ndarray:
    assert batch.row_numbers is not None, "readers of click logs number their rows"
    return batch.row_numbers.numbers


def _joined(samples: Sequence[_Sample]) -> _Sample:
    columns = zip(*(sample.columns for sample in samples), strict=True)
    return _Sample(
        np.concatenate([sample.dense for sample in samples]),
        [JaggedIds.concatenated(column) for column in columns],
        np.concatenate([sample.fold for sample in samples]),
    )


@dataclass(frozen=True)
class Round:
    """Input of one step: all training rows."""

    rows: TreeRows
    row_numbers: RowNumbers


@final
class RoundLoader:
    """Loader of boosting rounds, each of which is a step and an epoch. Reads the rows before the
    first one.
    """

    steps_per_epoch = 1

    def __init__(
        self,
        order: BlockOrder,
        read: Callable[[], TreeRows],
        *,
        state: dict[str, Any] | None,
        step: int,
        steps: int,
    ) -> None:
        """Create the loader after `step` of `steps` rounds. Raises InputError if `state` belongs to
        other rows.
        """
        order.position(state)
        self._order = order
        self._read = read
        self._first = step
        self._done = step
        self.steps = max(0, steps - step) if order.rows else 0
        self._rows: TreeRows | None = None

    def start(self) -> None:
        """Do nothing: reading needs the CPUs of the model's setup."""

    def __iter__(self) -> Iterator[Round]:
        return self

    def __next__(self) -> Round:
        if self._done == self._first + self.steps:
            raise StopIteration
        if self._rows is None:
            self._rows = self._read()
        numbers = RowNumbers(self._done, self._rows.numbers)
        self._done += 1
        return Round(self._rows, numbers)

    def rows(self, batches: int) -> int:
        return batches * self._order.rows

    def trained_rows(self) -> TrainedRows:
        return self._order.trained(self._order.start(self._done))

    def state(self) -> dict[str, Any]:
        return self._order.state(self._order.start(self._done))

    def close(self) -> None:
        self._rows = None


def read_rows(
    context: WorkerContext, prepared: Prepared, open_rows: OpenRows, *, config: LightGBMConfig
) -> TreeRows:
    """Read the training rows of a run."""
    workload = context.config.workload
    assert isinstance(workload, ClickSettings)
    inputs = ModelInputs.from_schema(prepared.inputs)
    statistics = CategoryStatistics(
        inputs.table_of,
        prepared.num_embeddings,
        lists=[name for name, _ in inputs.lists],
        smoothing=config.smoothing,
        is_binary=workload.predicts_clicks,
    )
    return TreeRows(
        open_rows,
        statistics,
        rows=prepared.sets["train"].rows,
        watch_dense=prepared.training_clips.add,
    )


# LightGBM continues its generators from tree to tree, and a resumed run does not have their state.
# So each step has its seeds. LightGBM takes a new seed for its rows only together with another
# share, so that shares alternate between two values that differ by less than a row.
@dataclass(frozen=True)
class _Draws:
    """Random columns and rows of each tree."""

    config: LightGBMConfig
    seed: int

    def parameters(self, step: int) -> dict[str, Any]:
        """Return LightGBM's parameters for a step, none if nothing is drawn."""
        rows = self.config.rows_per_tree
        if min(rows, self.config.columns_per_tree) == 1:
            return {}
        seed = step_seed(self.seed, step, 0) >> 33
        seeds = {"feature_fraction_seed": seed, "bagging_seed": seed}
        return seeds if rows == 1 else {**seeds, "bagging_fraction": rows - 1e-12 * (step % 2)}


# Life of the pipeline:
#
#   first step       statistics -> tables; rows -> bins, with start values if trees were restored
#   each step        one more tree by LightGBM, copied into the model
#   evaluations      the model alone, as in scoring
@final
class BoostingPipeline:
    """Pipeline whose training step adds a tree. Scores with the model in eval mode."""

    def __init__(
        self,
        model: ClickModel,
        config: LightGBMConfig,
        clock: StepTimer,
        *,
        kind: str,
        seed: int,
        logit_offset: float = 0.0,
    ) -> None:
        """`kind` is that of the label's head. `logit_offset` is the logit among the rows that
        train, minus that among all rows.
        """
        self._clock = clock
        self._model = model
        network = model.head.network
        assert isinstance(network, TreeNetwork)
        self._trees = network.trees
        self._seed = seed
        self._offset = logit_offset
        self._parameters = _parameters(config, objective=_OBJECTIVES[kind])
        self._draws = _Draws(config, seed)
        self._booster: lightgbm.Booster | None = None

    def progress(self, batches: Iterator[Any]) -> StepOutput:
        """Add a tree, or score a batch in eval mode. Raises StopIteration at the end."""
        batch = next(batches)
        if not self._model.training:
            return self._model(batch)[1]
        count = self._trees.count
        with self._clock.phase("data"):
            if self._booster is None:
                self._booster = self._begin(batch.rows)
        with self._clock.phase("optimizer"):
            # The first tree of a sample is its start value
            if self._trees.count == count:
                self._grow(self._booster, batch.row_numbers.epoch)
            loss = float(self._booster.eval_train()[0][2])
        return StepOutput(torch.tensor(loss))

    def reset(self) -> None:
        """Do nothing: no batch is in flight."""

    def _begin(self, rows: TreeRows) -> lightgbm.Booster:
        tables = self._model.state_dict()
        for vocabulary in dict.fromkeys(self._model.head.inputs.table_of.values()):
            name = f"embeddings.embedding_bags.{table_name(vocabulary)}.weight"
            rows.statistics.fill(vocabulary, tables[name].numpy())
        self._trees.check()
        if self._offset and not self._trees.count:
            self._trees.append(_leaf(rows.mean_logit() - self._offset))
        start = _shifted(self._trees, self._offset) if self._trees.count else None
        dataset = rows.dataset(self._parameters, start=start)
        try:
            return lightgbm.Booster(self._parameters, dataset)
        except lightgbm.basic.LightGBMError as error:
            raise InputError(
                f"LightGBM rejects the training rows: {one_line(error)}. Fix the label, or choose "
                "another --model."
            ) from error

    def _grow(self, booster: lightgbm.Booster, step: int) -> None:
        """Add a tree."""
        if parameters := self._draws.parameters(step):
            booster.reset_parameter(parameters)
        before = booster.num_trees()
        booster.update()
        number = booster.num_trees()
        # LightGBM adds none if no split is left, or, as its first one, a tree of one leaf: the mean
        # label, or 0 if there are start values.
        if number > before:
            tree = parse_tree(booster.model_to_string(num_iteration=1, start_iteration=before))
            if len(tree.column) or not self._trees.count:
                self._trees.append(tree)


# LightGBM's scores of a sample's rows are the trees' sums plus the offset. The first tree is the
# mean label alone, and the offset is added to it first, so that a resumed run has the same scores,
# bit by bit.
def _shifted(trees: BoostedTrees, offset: float) -> BoostedTrees:
    """Return the trees with an offset in the values of the first one."""
    if not offset:
        return trees
    shifted = copy.deepcopy(trees)
    with torch.no_grad():
        shifted.value[0] += offset
    return shifted


def _leaf(value: float) -> Tree:
    """Return a tree of one leaf."""
    none = np.empty(0, np.int64)
    return Tree(none, np.empty(0), none, none, np.array([value]))


def _parameters(config: LightGBMConfig, *, objective: str) -> dict[str, Any]:
    # The same trees for any number of threads, and after a restart
    repeatable = {"deterministic": True, "force_row_wise": True}
    return {
        "objective": objective,
        "metric": objective,
        "verbosity": -1,
        "num_threads": torch.get_num_threads(),
        "learning_rate": config.learning_rate,
        "num_leaves": config.leaves,
        "max_depth": config.max_depth,
        "min_data_in_leaf": config.min_leaf_rows,
        "lambda_l2": config.l2,
        "max_bin": config.max_bins,
        "feature_fraction": config.columns_per_tree,
        # Differs from the share of every step (`_Draws`)
        "bagging_fraction": config.rows_per_tree - 2e-12,
        "bagging_freq": int(config.rows_per_tree < 1),
        # Which columns can be split depends on all rows, not on the sample
        "feature_pre_filter": False,
        "use_missing": False,
        **repeatable,
    }


def parse_tree(text: str) -> Tree:
    """Return the only tree of a model in LightGBM's text format, whose numbers are exact. Raises
    ValueError for a tree with categorical splits or missing values.
    """
    lines = (line.partition("=") for line in text.partition("\nTree=")[2].splitlines())
    fields = {name: values.split() for name, _, values in lines if values}

    def numbers(name: str, kind: type) -> np.ndarray:
        return np.array(fields.get(name, []), kind)

    value = numbers("leaf_value", np.float64)
    if len(value) == 1:
        return _leaf(float(value[0]))
    if (numbers("decision_type", np.int64) & _CATEGORICAL_OR_MISSING).any():
        raise ValueError("the tree must only compare numbers")
    return Tree(
        numbers("split_feature", np.int64),
        numbers("threshold", np.float64),
        numbers("left_child", np.int64),
        numbers("right_child", np.int64),
        value,
    )


@final
class ConstantRate:
    """Optimizer of a model without gradients, for the loop's log: no state, and one learning
    rate.
    """

    def __init__(self, learning_rate: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [], "lr": learning_rate}]
        self.state: dict[Any, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": self.param_groups}


def make_model(
    workload: ClickSettings,
    context: WorkerContext,
    prepared: Prepared,
    inputs: ModelInputs,
    clock: StepTimer,
) -> tuple[ClickModel, ConstantRate, BoostingPipeline]:
    """Return a model without trees, its optimizer, and its pipeline."""
    config = workload.model
    assert isinstance(config, LightGBMConfig)
    model = build_click_model(
        config, inputs, num_embeddings=prepared.num_embeddings, embedding_device="cpu"
    )
    kind = config.output_heads(inputs)[0].kind
    pipeline = BoostingPipeline(
        model,
        config,
        clock,
        kind=kind,
        seed=context.config.seed,
        logit_offset=workload.logit_offset,
    )
    return model, ConstantRate(config.learning_rate), pipeline


def make_loader(
    context: WorkerContext,
    prepared: Prepared,
    open_rows: OpenRows,
    *,
    state: dict[str, Any] | None,
    step: int,
) -> RoundLoader:
    """Return the rounds of a worker after `step` of them."""
    config = context.config
    assert isinstance(config.workload, ClickSettings)
    assert isinstance(config.workload.model, LightGBMConfig)
    assert config.steps is not None, "`ClickWorkload.adapted` sets them"
    read = partial(read_rows, context, prepared, open_rows, config=config.workload.model)
    return RoundLoader(prepared.sets["train"], read, state=state, step=step, steps=config.steps)
