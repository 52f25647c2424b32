"""Candidates of retrieval models, which are the known categories of a column, and checks for
targets before training.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import numpy as np
import pyarrow as pa

from rayrec.config import InputError
from rayrec.data.arrow import arrow_numbers
from rayrec.data.encoded_rows import JaggedIds
from rayrec.data.encoding.known_categories import FREQUENCIES
from rayrec.data.encoding.number_sample import QUANTILES
from rayrec.data.engine import Shared, StreamEngine
from rayrec.data.logs.index import Block, SegmentRange
from rayrec.ingest.stream import open_block
from rayrec.models.base import CandidateRows, ClickModelConfig, ModelInputs
from rayrec.models.heads import ItemsHead
from rayrec.schema import TARGET

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rayrec.data.encoding.preprocessor import Preprocessor
    from rayrec.data.encoding.rules import SparseColumn
    from rayrec.ingest.block_order import BlockOrder


def model_inputs(preprocessor: Preprocessor) -> ModelInputs:
    """Return the inputs of a model for a Preprocessor's columns and tables."""
    return ModelInputs.from_schema(
        preprocessor.inputs,
        candidates=candidate_rows(preprocessor),
        bin_ends=bin_ends(preprocessor),
        frequencies=frequencies(preprocessor),
    )


def frequencies(
    preprocessor: Preprocessor,
) -> tuple[tuple[str, tuple[tuple[int, int], ...]], ...]:
    """Return `ModelInputs.frequencies` of the columns whose categories were counted. Empty for
    Preprocessors of earlier versions, extended ones, and logs with labels.
    """
    runs_of: dict[str, list[list[int]]] = preprocessor.constants.get(FREQUENCIES, {})
    return tuple(
        (name, tuple((amount, count) for amount, count in runs)) for name, runs in runs_of.items()
    )


def bin_ends(preprocessor: Preprocessor) -> tuple[tuple[float, ...], ...]:
    """Return the distinct quantiles of each model input that is a number, as the rules encode them.
    An indicator has 0 and 1. Empty without quantiles in the Preprocessor.
    """
    quantiles = preprocessor.constants.get(QUANTILES)
    if quantiles is None:
        return ()
    ends: list[tuple[float, ...]] = []
    for name, rule in zip(preprocessor.dense_names, preprocessor.dense, strict=True):
        # A column without values has none
        numbers = np.array(quantiles.get(name, ()))
        inputs = np.unique(rule.apply(numbers))
        ends.append(tuple(inputs.tolist()))
    # Indicators follow the numbers
    for _ in preprocessor.inputs.dense[len(ends) :]:
        ends.append((0.0, 1.0))
    return tuple(ends)


def candidate_rows(preprocessor: Preprocessor) -> tuple[tuple[str, CandidateRows], ...]:
    """Return the table rows of each column's known categories. Empty if ids are expanded to random
    ones.
    """
    if preprocessor.multi_hot is not None:
        return ()
    columns = zip(preprocessor.inputs.sparse, preprocessor.sparse, strict=True)
    return tuple((name, _candidate_rows(column)) for name, column in columns)


def _candidate_rows(column: SparseColumn) -> CandidateRows:
    if column.num_tokens is None:
        return CandidateRows(column.first_id, column.num_embeddings)
    # Ids are modulo the table's rows, so any row may belong to a category
    if not column.has_unique_ids:
        return CandidateRows(0, column.num_embeddings)
    stop = column.first_id + column.num_tokens + (column.gap is not None)
    rows = CandidateRows(column.first_id, stop, column.gap)
    is_separate = column.missing_id != column.unknown_id and not rows.contains(column.missing_id)
    return replace(rows, missing=column.missing_id) if is_separate else rows


@final
@dataclass(frozen=True)
class SampledRows:
    """Rows of a table that are drawn for each step, equal on all workers and in resumed runs."""

    candidates: CandidateRows
    """Rows that may be drawn, each with the same probability."""
    num_embeddings: int
    """Number of all rows."""
    count: int
    """Number of drawn rows."""
    seed: int
    """Seed of the run."""

    def __call__(self, epoch: int, first_row: int) -> np.ndarray:
        """Return the rows for the step that begins at a row of an epoch, int32 [count]."""
        candidates = self.candidates
        if candidates.stop is None:
            candidates = replace(candidates, stop=self.num_embeddings)
        draw = np.random.default_rng([self.seed, epoch, first_row])
        numbers = draw.integers(0, max(1, candidates.count or 0), self.count, np.int32)
        ids: np.ndarray = candidates.ids(numbers)
        return ids


@dataclass(frozen=True)
class Ranking:
    """Ranking of all known items, which evaluations of a model measure."""

    feature: str
    """Feature of the item."""
    candidates: int
    """Number of known items."""
    ks: tuple[int, ...]
    """Ranks k of the metrics."""


def ranking_of(
    model: ClickModelConfig,
    inputs: ModelInputs,
    ks: Sequence[int] = (),
) -> Ranking | None:
    """Return the ranking of a model, with its own k unless there are `ks`. None if it does not rank
    all known items: it must have a `candidate_feature`, read its full table, and have a field `k`.
    """
    feature = model.candidate_feature(inputs)
    default_k = getattr(model, "k", None)
    if feature is None or default_k is None or feature not in model.full_tables(inputs):
        return None
    candidates = inputs.candidates_of(feature).count
    return None if candidates is None else Ranking(feature, candidates, tuple(ks) or (default_k,))


def check_candidates(
    model: ClickModelConfig,
    preprocessor: Preprocessor,
    *,
    note: Callable[[str], None],
) -> None:
    """Check that a retrieval model has candidates, and that each predicted id belongs to one
    category. Notes a `k` above their number. Raises InputError.
    """
    inputs = model_inputs(preprocessor)
    feature = model.candidate_feature(inputs)
    if feature is None:
        return
    predicts_ids = any(isinstance(head, ItemsHead) for head in model.output_heads(inputs))
    if (
        predicts_ids
        and not preprocessor.sparse[preprocessor.inputs.sparse.index(feature)].has_unique_ids
    ):
        raise InputError(
            f"preset: each category of column {feature} must have a separate id, because "
            f"{type(model).__name__} predicts them. Leave out max_num_embeddings, num_embeddings "
            "and hashes."
        )
    if model.needs_frequencies() and inputs.frequencies_of(feature) is None:
        raise InputError(
            f"workload.model.loss: this loss needs the frequencies of column {feature}, which the "
            "Preprocessor lacks. Build it again (`rayrec vocabulary`), or choose --workload.model."
            "loss sampled."
        )
    count = inputs.candidates_of(feature).count
    k = getattr(model, "k", 0)
    if not count:
        min_count = preprocessor.constants.get("rules", {}).get("min_count", "an empty vocabulary")
        raise InputError(
            f"preset.min_count: no category of column {feature} is in enough of the counted rows, "
            f"got {min_count}. Lower it."
        )
    if count is not None and k > count:
        note(
            f"workload.model.k: column {feature} has only {count} known items, got {k}. The first "
            f"{k} are all of them"
        )


def named_column(model: ClickModelConfig, preprocessor: Preprocessor) -> str | None:
    """Return the column of a retrieval model's candidates if its Preprocessor should have their
    texts: if each has an id of its own, and not all are known already.
    """
    column = model.candidate_feature(model_inputs(preprocessor))
    if column is None or preprocessor.schema.tokens != "any":
        return None
    number = preprocessor.inputs.sparse.index(column)
    if not preprocessor.sparse[number].has_unique_ids:
        return None
    names = preprocessor.names
    is_named = names is not None and names.column == column
    if is_named and names is not None and names.num_tokens == len(preprocessor.vocabulary(number)):
        return None
    return column


@dataclass(frozen=True)
class TargetCheck:
    """Check that a retrieval model finds targets in the rows of a set."""

    model: ClickModelConfig
    preprocessor: Shared[Preprocessor]

    def check(self, order: BlockOrder, *, name: str, path: str, engine: StreamEngine) -> None:
        """Read rows until one has a target. Raises InputError if none has. In other sets than
        `train`, unknown items count too: they are misses.
        """
        inputs = model_inputs(self.preprocessor.get())
        feature = self.model.candidate_feature(inputs)
        if feature is None or (name != "train" and feature not in dict(inputs.lists)):
            return
        longest = 0
        count = functools.partial(self._count, name=name)
        tables = engine.stream("targets", count, order.parts, block_bytes=64, prefetch_blocks=1)
        with contextlib.closing(tables):  # Which ends the tasks ahead
            for table in tables:
                counts = {column: table.column(column)[0].as_py() for column in _COLUMNS}
                if counts["known_targets" if name == "train" else "targets"]:
                    return
                longest = max(longest, counts["longest"])
        if longest < 2 and feature in dict(inputs.lists):
            raise InputError(
                f"{path}: no list of column {feature} in the {name} rows has two items, got at "
                f"most {longest}. Each row must have the items of one user in order of time, as a "
                "list, or separated by the schema's list_delimiter."
            )
        raise InputError(
            f"{path}: no {name} row has a known item of column {feature} to predict. Lower "
            "preset.min_count, or give the Preprocessor of this log."
        )

    def _count(self, part: SegmentRange, *, name: str) -> pa.Table:
        """Return the counts of a part's rows in a data task."""
        preprocessor = self.preprocessor.get()
        inputs = model_inputs(preprocessor)
        feature = self.model.candidate_feature(inputs)
        assert feature is not None
        rows = open_block(Block((part,), None), preprocessor).encode(0, part.rows)
        sparse = preprocessor.inputs.sparse
        if name != "train" and preprocessor.schema.sequence is not None:
            # The held-out items of lists of events
            ids = rows.ids[sparse.index(TARGET)]
            assert isinstance(ids, JaggedIds)
            ids = ids.values
        else:
            ids = rows.ids[sparse.index(feature)]
        counts = count_targets(ids, inputs.candidates_of(feature))
        return pa.table(
            {
                name: arrow_numbers(np.array([count]))
                for name, count in zip(_COLUMNS, counts, strict=True)
            }
        )


_COLUMNS = ("targets", "known_targets", "longest")


def count_targets(ids: np.ndarray | JaggedIds, candidates: CandidateRows) -> tuple[int, int, int]:
    """Return the number of items to predict, the number of candidates among them, and the longest
    row's length. Pure. In a list, these are the items after the first.
    """
    if not isinstance(ids, JaggedIds):
        return len(ids), int(candidates.contains(ids).sum()), int(len(ids) > 0)
    is_target = np.ones(len(ids.values), bool)
    is_target[ids.offsets[:-1][ids.lengths > 0]] = False
    return (
        int(is_target.sum()),
        int((is_target & candidates.contains(ids.values)).sum()),
        int(ids.lengths.max(initial=0)),
    )
