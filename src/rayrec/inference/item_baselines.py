"""Baselines of retrieval models, which learn from the training rows of a run and are measured like
the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, final

import numpy as np
import torch

from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows
from rayrec.metrics.item_ranks import ItemNumbers, tiled_rank_measures
from rayrec.models.evaluation_items import evaluation_items, item_histories
from rayrec.models.item_baselines import (
    ITEM_BASELINES,
    ItemBaseline,
    ItemBaselineKind,
    Popularity,
)
from rayrec.workloads.recsys.candidates import Ranking, model_inputs, ranking_of
from rayrec.workloads.recsys.scorer import load_preprocessor
from rayrec.workloads.recsys.scoring import (
    cache_folder,
    encode_parts,
    item_lists,
    measure_totals,
    open_run_log,
)
from rayrec.workloads.recsys.workload import ClickWorkload

if TYPE_CHECKING:
    from collections.abc import Callable

    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.data.logs.index import LogIndex
    from rayrec.metrics.means import MeasureTotals
    from rayrec.models.base import CandidateRows
    from rayrec.workloads.base import TrainConfig
    from rayrec.workloads.run_config import DataConfig

POPULARITY: Final = "popularity"


@final
@dataclass(frozen=True)
class ItemRows:
    """Items of rows, as candidate numbers."""

    rows: int
    histories: ItemNumbers
    """Known items before the targets. None in rows of single items."""
    targets: ItemNumbers
    seen: ItemNumbers | None
    """Items that are no candidates. None without a list of them."""


def trained_items(
    rows: EncodedRows,
    feature: str,
    preprocessor: Preprocessor,
    candidates: CandidateRows,
) -> ItemNumbers:
    """Return all known items of training rows."""
    lists = item_lists(rows, feature, preprocessor)
    if feature in lists:
        return lists[feature].items(candidates).candidates_only()
    ids = _single_ids(rows, feature, preprocessor)
    return ItemNumbers.one_each(candidates.numbers(ids)).candidates_only()


def evaluated_items(
    rows: EncodedRows,
    feature: str,
    preprocessor: Preprocessor,
    candidates: CandidateRows,
) -> ItemRows:
    """Return the history, targets and seen items of evaluated rows, as a model's measures have
    them.
    """
    lists = item_lists(rows, feature, preprocessor)
    if feature in lists:
        items = evaluation_items(lists, feature, candidates)
        histories = item_histories(lists, feature, candidates, items)
        return ItemRows(len(rows), histories, items.targets, items.seen)
    ids = _single_ids(rows, feature, preprocessor)
    has_item = None if candidates.missing is None else ids != candidates.missing
    targets = ItemNumbers.one_each(candidates.numbers(ids), has_item)
    empty = ids.new_zeros(0)
    return ItemRows(len(rows), ItemNumbers(empty, empty), targets, None)


def _single_ids(rows: EncodedRows, feature: str, preprocessor: Preprocessor) -> torch.Tensor:
    """Return the ids of a column with one a row, int64 [rows]."""
    ids = rows.ids[preprocessor.inputs.sparse.index(feature)]
    assert isinstance(ids, np.ndarray), "the schema has no such list"
    return torch.from_numpy(ids.astype(np.int64))


def _matched(
    events: np.ndarray,
    baseline: Preprocessor,
    other: Preprocessor,
    feature: str,
) -> np.ndarray | None:
    """Return the events of each candidate of another Preprocessor, 0 for other items, int64
    [candidates]. None for hashed items.
    """
    numbers = []
    tokens = []
    for preprocessor in (baseline, other):
        column = preprocessor.inputs.sparse.index(feature)
        rule = preprocessor.sparse[column]
        if rule.num_tokens is None:
            return None
        candidates = model_inputs(preprocessor).candidates_of(feature)
        numbers.append(candidates.numbers(rule.ids()))
        tokens.append(preprocessor.vocabulary(column))
    _, index, other_index = np.intersect1d(
        tokens[0],
        tokens[1],
        assume_unique=True,
        return_indices=True,
    )
    matched = np.zeros(candidates.count or 0, np.int64)
    matched[numbers[1][other_index]] = events[numbers[0][index]]
    return matched


@final
@dataclass(frozen=True)
class ItemBaselines:
    """Baselines of a run, trained by `fit`."""

    config: TrainConfig
    ranking: Ranking
    preprocessor: Preprocessor
    cache: str
    train: LogIndex
    train_rows: tuple[int, int]
    max_rows: int
    models: dict[ItemBaselineKind, ItemBaseline]
    """Baselines by name. Popularity is always one of them."""

    def totals(self, preprocessor: Preprocessor) -> MeasureTotals:
        """Return totals of measures by a model with a Preprocessor, whose items may be others than
        those of these baselines. Hashed items cannot be matched then, so there is no popularity.
        Raises InputError if it has no such items.
        """
        feature = self.ranking.feature
        if feature not in preprocessor.inputs.sparse:
            raise InputError(f"compare: a model has no items {feature}. Compare models of one log.")
        popularity = self.models[POPULARITY]
        assert isinstance(popularity, Popularity)
        events: np.ndarray | None = popularity.events
        ranking = self.ranking
        if preprocessor.hash() != self.preprocessor.hash():
            count = model_inputs(preprocessor).candidates_of(feature).count
            ranking = replace(ranking, candidates=count or 0)
            events = _matched(popularity.events, self.preprocessor, preprocessor, feature)
        return measure_totals(ranking, events)

    def trained_rows(self, kind: ItemBaselineKind) -> int:
        """Return the number of rows that a baseline learns from."""
        start, stop = self.train_rows
        rows = stop - start
        return min(rows, self.max_rows) if self.models[kind].keeps_lists else rows

    def fit(self, progress: Callable[[str, int, int], None]) -> None:
        """Read the training rows once, with whole lists, and train all baselines."""
        start, stop = self.train_rows
        row = start
        unlimited = self.preprocessor
        if not self.train.is_preprocessed:  # Such rows have the items that the model reads
            unlimited = unlimited.with_unlimited_lists()
        for rows in encode_parts(self.train.parts(start, stop), unlimited):
            items = trained_items(rows, self.ranking.feature, unlimited, self._candidates)
            for kind, model in self.models.items():
                first = max(0, stop - self.trained_rows(kind) - row)
                if first < len(rows):
                    model.add(items.cut(first, len(rows)), len(rows) - first)
            row += len(rows)
            progress("train baselines (rows)", row - start, stop - start)
        for model in self.models.values():
            model.finish()

    def rows(self, path: str | None, first: int, stop: int) -> Iterator[ItemRows]:
        """Yield the rows from `first` to before `stop` of a log, or of that with the run's held-out
        rows.
        """
        if path is None:
            data = self.config.workload.evaluation_data(self.config)
        else:
            data = self.config.eval_data.replace(path=path, files=())
        index = _opened(data, self.preprocessor, self.cache, self.config)
        for rows in encode_parts(index.parts(first, stop), self.preprocessor):
            yield self._items(rows)

    def measures(self, kind: ItemBaselineKind, items: ItemRows) -> dict[str, np.ndarray]:
        """Return what the measures of a retrieval network have, but a loss."""
        model = self.models[kind]
        histories = items.histories.in_order()

        def scores(start: int, stop: int) -> torch.Tensor:
            return model.scores(histories.cut(start, stop), stop - start)

        shape = (items.rows, self.ranking.candidates)
        measures = tiled_rank_measures(
            scores,
            items.targets,
            shape=shape,
            ks=self.ranking.ks,
            seen=items.seen,
        )
        return {name: values.numpy() for name, values in measures.items()}

    @property
    def _candidates(self) -> CandidateRows:
        return model_inputs(self.preprocessor).candidates_of(self.ranking.feature)

    def _items(self, rows: EncodedRows) -> ItemRows:
        return evaluated_items(rows, self.ranking.feature, self.preprocessor, self._candidates)


def open_item_baselines(
    config: TrainConfig,
    checkpoint: str,
    *,
    kinds: Sequence[str],
    ks: Sequence[int],
    max_rows: int,
) -> ItemBaselines:
    """Open the training rows of a retrieval model's run for popularity and other baselines.

    Raises InputError for a missing package, an unreadable log, baselines of other models, those of
    lists if rows have one item, and too many items for EASE.
    """
    workload = config.workload
    assert isinstance(workload, ClickWorkload)
    preprocessor = load_preprocessor(checkpoint)
    inputs = model_inputs(preprocessor)
    ranking = ranking_of(workload.model, inputs, ks)
    assert ranking is not None, "the job ranks"
    models: dict[ItemBaselineKind, ItemBaseline] = {}
    for kind in dict.fromkeys((POPULARITY, *kinds)):
        if kind not in ITEM_BASELINES:
            raise InputError(
                f"baselines: {kind} predicts clicks. A model of recipe {config.recipe} has "
                f"{', '.join(ITEM_BASELINES)}."
            )
        if kind != POPULARITY and ranking.feature not in dict(inputs.lists):
            raise InputError(
                f"baselines: {kind} needs lists of items, and column {ranking.feature} has one "
                "item a row. Leave it out."
            )
        models[kind] = ITEM_BASELINES[kind](ranking.candidates)
    path = config.train_data.path
    if path is None:
        raise InputError(
            f"{checkpoint}: config.yaml must name the training log, which baselines are trained on"
        )
    cache = cache_folder(checkpoint)
    index = _opened(config.train_data, preprocessor, cache, config)
    train_rows = (0, index.rows)
    if config.eval_data.path is None:
        train_rows = workload.split_rows(path, index)["train"]
    return ItemBaselines(config, ranking, preprocessor, cache, index, train_rows, max_rows, models)


def _opened(
    data: DataConfig,
    preprocessor: Preprocessor,
    cache: str,
    config: TrainConfig,
) -> LogIndex:
    return open_run_log(data, preprocessor, cache=cache, max_bad_fraction=config.max_bad_fraction)
