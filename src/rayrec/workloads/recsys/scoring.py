"""Scores a click log with a trained model: what is opened before, and what each scoring process does."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.arrow import arrow_numbers, numpy_of
from rayrec.data.encoding.known_categories import bucket_names, buckets_of
from rayrec.data.encoding.preprocessor import Preprocessor, share_preprocessor
from rayrec.data.engine import Shared, TaskContext
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import Block, LogIndex, Part, select
from rayrec.data.logs.reading import first_lines, good_lines, stretch_of, values_of
from rayrec.data.logs.splits import Slice, slices_of
from rayrec.ingest.block_order import blocks_of_epoch
from rayrec.ingest.stream import open_block
from rayrec.metrics.binary import sigmoid
from rayrec.metrics.means import LabelsAccumulator
from rayrec.metrics.ranking import DEFAULT_KS
from rayrec.schema import Schema
from rayrec.workloads.base import ScoringContext
from rayrec.workloads.recsys.scorer import load_preprocessor, load_scorer
from rayrec.workloads.recsys.settings import check_grouped
from rayrec.workloads.scoring import GROUP, KEY, Device, Scoring

if TYPE_CHECKING:
    from rayrec.workloads.base import TrainConfig
    from rayrec.workloads.recsys.scorer import ClickScorer
    from rayrec.workloads.recsys.settings import ClickSettings

DAY = "day"
FREQUENCY = "frequency:"
_BATCH_ROWS = 8192


def open_scoring(workload: ClickSettings, context: ScoringContext) -> Scoring:
    """See `Workload.open_scoring`: columns `score` and `logit` float32 and, if the log has labels, `label`; for each further
    label L also `score_L`, `logit_L` and `label_L`. A faulty line has a place in the log but no score."""
    preprocessor = load_preprocessor(context.checkpoint)
    group = workload.schema.group if context.evaluating else None
    if group is not None:
        check_grouped(workload.schema, context.path)
        preprocessor = preprocessor.grouped_by(group)
    elif context.evaluating and context.ranking_k:
        raise InputError(
            "ranking_k: metrics at k are computed within groups; name the column of the groups with --group"
        )
    labelled = LogSource.at(context.path).is_labelled(preprocessor.schema)
    if context.evaluating and not labelled:
        raise InputError(
            f"{context.path}: holds no labels, so there is nothing to compare scores with; `rayrec predict` scores it"
        )
    schema = preprocessor.schema if labelled else preprocessor.schema.unlabelled()
    columns = key_columns(context.slice_by, schema)
    frequencies = frequency_columns(context.slice_by, preprocessor)
    index, blocks = _blocks(context, schema)
    told_by = dict.fromkeys((*columns, *frequencies))
    if told_by and index.is_preprocessed:
        raise InputError(
            f"{context.path}: is preprocessed and holds ids in place of categories; give the raw log to tell metrics by "
            f"{', '.join(told_by)}"
        )
    engine = context.engine()
    process = _Process(
        workload=workload,
        config=context.config,
        checkpoint=context.checkpoint,
        preprocessor=share_preprocessor(preprocessor, engine),
        blocks=engine.share(blocks),
        labelled=labelled,
        batch_rows=context.batch_rows or _BATCH_ROWS,
        key_columns=columns,
        frequency_columns=frequencies,
        stretches=tuple(slices_of(index)[1]) if DAY in context.slice_by else (),
    )
    assert sum(scored.block.rows for scored in blocks) == index.rows
    return Scoring(
        block_rows=tuple(scored.block.rows for scored in blocks),
        load=process.load,
        make_totals=functools.partial(
            _ClickTotals, schema, grouped=group is not None, ks=context.ranking_k or DEFAULT_KS
        ),
        described={"bad_rows": index.faults.total, "preprocessor": preprocessor.hash()},
        thread_safe=True,
        is_clicks=True,
    )


def key_columns(slice_by: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """The columns whose values tell the slices apart. Raises InputError for what metrics cannot be told by."""
    columns = dict.fromkeys(by for by in slice_by if by != DAY and not by.startswith(FREQUENCY))
    known = [name for name in (*schema.dense, *schema.sparse) if name not in schema.lists]
    for name in columns:
        if name in schema.lists:
            raise InputError(f"slice_by: column {name} holds lists; choose a column with one value a row")
        if name not in known:
            near = difflib.get_close_matches(name, [DAY, *known], n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {DAY}, {', '.join(known)}"
            raise InputError(f"slice_by: the log has no column '{name}'; {hint}")
    return tuple(columns)


def frequency_columns(slice_by: Sequence[str], preprocessor: Preprocessor) -> tuple[str, ...]:
    """The columns whose categories' frequencies tell the slices apart. Raises InputError where these are not known."""
    columns = dict.fromkeys(by.removeprefix(FREQUENCY) for by in slice_by if by.startswith(FREQUENCY))
    key_columns(tuple(columns), preprocessor.schema)
    for name in columns:
        bucket_names(preprocessor, name)
    return tuple(columns)


def _blocks(context: ScoringContext, schema: Schema) -> tuple[LogIndex, list[ScoredBlock]]:
    """The log's index, and its rows in blocks that are scored one by one."""
    path, data, console = context.path, context.config.eval_data, context.console
    engine = context.engine()
    with console.preparing():
        index = LogSource.at(path).index(
            schema,
            segment_bytes=data.segment_bytes,
            context=TaskContext(engine, cache_folder(context.checkpoint), console.note, console.progress),
            max_bad_fraction=context.config.max_bad_fraction,
        )
        lines = first_lines(index, segments_per_task=data.segments_per_block, engine=engine)
    parts = [Part(segment, start, stop) for segment, start, stop in select(index, 0, index.rows)]
    rows_follow = not index.faults.total or index.is_preprocessed
    return index, [
        ScoredBlock(block, tuple(lines[part.segment] for part in block.parts), rows_follow)
        for block in blocks_of_epoch(parts, shuffle="none", seed=0, epoch=0, segments_per_block=data.segments_per_block)
    ]


def cache_folder(checkpoint: str) -> str:
    """Where unpacked files and indices are kept: $RAYREC_CACHE, else where the run keeps its own, else ~/.cache/rayrec.

    The run's has the index of the log it was trained on already, and every node can reach it.
    """
    chosen = os.environ.get("RAYREC_CACHE")
    if chosen:
        return chosen
    run = storage.folder_of(storage.folder_of(checkpoint.rstrip("/")))  # ROOT/RUN/checkpoints/step_00001000
    of_run = storage.join(storage.folder_of(run), ".cache")
    if storage.exists(of_run) and (storage.is_url(of_run) or os.access(of_run, os.W_OK)):
        return of_run
    return os.path.join(os.path.expanduser("~"), ".cache", "rayrec")


@final
class _ClickTotals:
    """Keeps what `LabelsAccumulator` keeps."""

    def __init__(self, schema: Schema, *, grouped: bool, ks: Sequence[int]) -> None:
        self._kept, self._labels, self._grouped = (
            LabelsAccumulator(schema.labels, grouped=grouped, ks=ks),
            schema.labels,
            grouped,
        )

    @property
    def rows(self) -> int:
        return self._kept.rows

    def update(self, table: pa.Table) -> None:
        def of_labels(column: str) -> dict[str, np.ndarray]:
            others = {label.name: numpy_of(table.column(f"{column}_{label.name}")) for label in self._labels}
            return {"": numpy_of(table.column(column)), **others}

        groups = numpy_of(table.column(GROUP)) if self._grouped else None
        self._kept.update(of_labels("logit"), of_labels("label"), groups)

    def compute(self) -> dict[str, float]:
        return self._kept.compute()


@dataclass(frozen=True)
class ScoredBlock:
    """Rows that are read, encoded and scored together, in the order of the log."""

    block: Block
    first_lines: tuple[int, ...]
    """Position in the log of the first line of each part's segment."""
    lines_known: bool
    """Whether every line is a good row, so that rows follow each other without gaps."""


@dataclass(frozen=True)
class _Process:
    """What every scoring process is told."""

    workload: ClickSettings
    config: TrainConfig
    checkpoint: str
    preprocessor: Shared[Preprocessor]
    blocks: Shared[list[ScoredBlock]]
    labelled: bool
    batch_rows: int
    key_columns: tuple[str, ...]
    """Whose values come along, so that metrics can be told by them."""
    frequency_columns: tuple[str, ...]
    """Likewise: how often their values were counted."""
    stretches: tuple[Slice, ...]
    """Of the log, if metrics are to be told by them."""

    def load(self, device: Device) -> _BlockScorer:
        preprocessor = self.preprocessor.get()
        scorer = load_scorer(
            self.workload.model,
            precision=self.config.precision,
            checkpoint=self.checkpoint,
            preprocessor=preprocessor,
            device=device,
        )
        return _BlockScorer(self, preprocessor, self.blocks.get(), scorer)


@final
class _BlockScorer:
    def __init__(
        self, told: _Process, preprocessor: Preprocessor, blocks: list[ScoredBlock], scorer: ClickScorer
    ) -> None:
        self._told, self._preprocessor, self._blocks, self._scorer = told, preprocessor, blocks, scorer

    def __call__(self, number: int) -> pa.Table:
        scored, told, preprocessor = self._blocks[number], self._told, self._preprocessor
        schema = preprocessor.schema if told.labelled else preprocessor.schema.unlabelled()
        opened = open_block(scored.block, preprocessor, labelled=told.labelled)
        num_rows = scored.block.rows
        names = self._scorer.labels
        logits = {name: np.empty(num_rows, np.float32) for name in names}
        labels = {name: np.empty(num_rows, np.float32) for name in names}
        groups = np.empty(num_rows, np.int64) if told.labelled and schema.group else None
        buckets = {name: np.empty(num_rows, np.int8) for name in told.frequency_columns}
        for start in range(0, num_rows, told.batch_rows):
            rows = opened.encode(start, min(start + told.batch_rows, num_rows))
            place = slice(start, start + len(rows))
            for name, found in self._scorer.score_labels(rows).items():
                logits[name][place] = found
            if rows.labels is not None:
                for name, values in zip(names, (rows.labels, *rows.more_labels), strict=True):
                    labels[name][place] = values
            if groups is not None:
                assert rows.groups is not None
                groups[place] = rows.groups
            for name, found in buckets.items():
                ids = rows.ids[preprocessor.inputs.sparse.index(name)]
                assert isinstance(ids, np.ndarray), "lists are refused before"
                found[place] = buckets_of(preprocessor, name, ids)
        columns = {"row": arrow_numbers(_rows(scored, schema))}
        numbers = {label.name for label in preprocessor.inputs.labels if label.kind == "number"}
        for name in names:
            suffix = "" if name == names[0] else f"_{name}"
            columns[f"score{suffix}"] = arrow_numbers(logits[name] if name in numbers else sigmoid(logits[name]))
            columns[f"logit{suffix}"] = arrow_numbers(logits[name])
            if told.labelled:
                columns[f"label{suffix}"] = arrow_numbers(labels[name])
        if groups is not None:
            columns[GROUP] = arrow_numbers(groups)
        if told.stretches:
            columns[KEY + DAY] = stretch_of(scored.block, told.stretches)
        for name in told.key_columns:
            assert opened.raw is not None, "refused before"
            columns[KEY + name] = values_of(scored.block, opened.raw, name, schema)
        for name, found in buckets.items():
            assert opened.raw is not None, "refused before"
            missing = values_of(scored.block, opened.raw, name, schema).is_null().to_numpy(zero_copy_only=False)
            columns[KEY + FREQUENCY + name] = pa.DictionaryArray.from_arrays(
                pa.array(found.astype(np.int32), mask=missing),
                pa.array(bucket_names(preprocessor, name), pa.large_string()),
            )
        return pa.table(columns)


def _rows(scored: ScoredBlock, schema: Schema) -> np.ndarray:
    """int64: where each row of the block stands among all lines of the log."""
    chosen = []
    for part, first_line in zip(scored.block.parts, scored.first_lines, strict=True):
        rows = np.arange(part.start, part.stop, dtype=np.int64)
        chosen.append(first_line + (rows if scored.lines_known else good_lines(part.segment, schema)[rows]))
    return np.concatenate(chosen)
