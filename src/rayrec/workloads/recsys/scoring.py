"""Scoring of a click log with a trained model: driver setup and scoring processes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
import pyarrow as pa

from rayrec import host_resources, storage
from rayrec.config import InputError, suggest
from rayrec.data.arrow import arrow_numbers, arrow_rows, as_numpy
from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.encoding.clipping import COLUMN, ClipCounter, arrow_flags
from rayrec.data.encoding.known_categories import assign_buckets, bucket_names, ids_by_row
from rayrec.data.encoding.preprocessor import Preprocessor, put_preprocessor
from rayrec.data.engine import Shared, TaskContext, ThreadEngine
from rayrec.data.log_source import LogSource
from rayrec.data.logs.extra_columns import ExtraColumns, find_types
from rayrec.data.logs.index import Block, LogIndex, SegmentRange
from rayrec.data.logs.reading import (
    first_lines,
    good_lines,
    name_slices,
    read_column,
)
from rayrec.data.logs.splits import Slice, slices_of
from rayrec.ingest.block_order import BlockOrder
from rayrec.ingest.stream import open_block
from rayrec.metrics.means import MeasureTotals
from rayrec.metrics.ranking import DEFAULT_KS
from rayrec.models.heads import BinaryHead, Head, LabelHead, labels_accumulator
from rayrec.schema import Schema
from rayrec.storage import cache
from rayrec.workloads.base import ScoringContext, TrainConfig
from rayrec.workloads.recsys.candidates import model_inputs
from rayrec.workloads.recsys.items.predicted import (
    ITEM_COLUMNS,
    BlockItems,
    ItemsRequest,
    heads_beside,
    items_request,
)
from rayrec.workloads.recsys.items.recommender import Recommender
from rayrec.workloads.recsys.scorer import (
    ClickScorer,
    load_preprocessor,
    load_scorer,
)
from rayrec.workloads.recsys.settings import ClickSettings, check_grouped
from rayrec.workloads.run_config import DataConfig
from rayrec.workloads.scoring import GROUP, KEY, BlockScorer, Device, Scoring

DAY = "day"
FREQUENCY = "frequency:"
_BATCH_ROWS = 8192
BATCH_ROWS: Final = 2048
"""Maximum rows per encoded batch."""
_OUTPUT = "output:"
"""Prefix of head outputs in scored columns."""


# Who does what, to score a log:
#
#   driver     open_scoring    index, blocks of segments; shares Preprocessor and blocks once
#   process    _ScoringTask    loads the scorer once, then opens blocks by number
#   block      _LogBlock       `score`: batches on the device; `columns`: the block's table
#   driver     _ClickTotals    metrics of the tables in log order, so that bits do not depend on
#                              the number of processes
def open_scoring(workload: ClickSettings, context: ScoringContext) -> Scoring:
    """Implement `Workload.open_scoring`. Columns are `score` and `logit` (float32) and, for labeled
    logs, `label`. Further labels L have `score_L`, `logit_L`, `label_L`, other heads
    `Head.columns`. Retrieval models have `items`, lists of the users' ids, and `scores`. The log's
    own `context.extra_columns` follow. Invalid lines count as positions without a score.
    """
    preprocessor = _load_preprocessor(workload, context)
    heads = workload.model.output_heads(model_inputs(preprocessor))
    measuring = context.evaluating and not any(isinstance(head, LabelHead) for head in heads)
    labelled = _is_labelled(context, preprocessor.schema, measuring=measuring)
    schema = preprocessor.schema if labelled else preprocessor.schema.unlabelled()
    path = context.path
    context = _with_lists(context, schema)
    columns = key_columns(context.slice_by, schema)
    frequencies = frequency_columns(context.slice_by, preprocessor)
    items = items_request(workload.model, context, preprocessor)
    _check_extra(context, schema, heads, items)
    index, set_name, rows = _index(context, schema, dict.fromkeys((*columns, *frequencies)))
    blocks = _blocks(context, index, rows)
    engine = context.engine()
    process = _ScoringTask(
        workload=workload,
        config=context.config,
        checkpoint=context.checkpoint,
        preprocessor=put_preprocessor(preprocessor, engine),
        blocks=engine.share(blocks),
        labelled=labelled,
        measuring=measuring,
        batch_rows=context.batch_rows or _BATCH_ROWS,
        key_columns=columns,
        frequency_columns=frequencies,
        day_slices=tuple(slices_of(index)[1]) if DAY in context.slice_by else (),
        extra=find_types(context.extra_columns, index, engine),
        counts_clipped=context.counts_clipped,
        items=items,
    )
    block_rows = tuple(scored.block.rows for scored in blocks)
    assert sum(block_rows) == rows[1] - rows[0]
    set_fields = {"set": set_name, "path": path} if set_name else {}
    return Scoring(
        block_rows=block_rows,
        load=process.load,
        make_totals=MeasureTotals
        if measuring
        else functools.partial(
            _ClickTotals,
            heads,
            grouped=schema.group is not None,
            ks=context.ranking_k or DEFAULT_KS,
        ),
        described={
            **set_fields,
            "bad_rows": index.faults.total,
            "preprocessor": preprocessor.hash(),
        },
        thread_safe=True,
        is_clicks=isinstance(heads[0], BinaryHead),
        bounded=ClipCounter(preprocessor).names if context.counts_clipped and not measuring else (),
        set_name=set_name,
        first_row=rows[0],
        rows_key=_rows_key(index.parts(*rows)) if set_name else "",
    )


def _load_preprocessor(workload: ClickSettings, context: ScoringContext) -> Preprocessor:
    """Return the checkpoint's Preprocessor, for an evaluation with the group of the workload."""
    preprocessor = load_preprocessor(context.checkpoint)
    if not context.evaluating:
        return preprocessor
    if workload.schema.group is not None:
        check_grouped(workload.schema, context.path)
        return preprocessor.grouped_by(workload.schema.group)
    if context.ranking_k:
        raise InputError(
            "ranking_k: metrics at k require groups. Name the group column with --group."
        )
    return preprocessor


def _is_labelled(context: ScoringContext, schema: Schema, *, measuring: bool) -> bool:
    """Return whether the log has the labels and times, which only evaluations need. Raises
    InputError for an evaluation without them, unless the network itself measures rows.
    """
    labelled = LogSource.at(context.path).is_labelled(schema)
    if schema.label is None:
        return context.evaluating
    if context.evaluating and not (labelled or measuring):
        raise InputError(
            f"{context.path}: has no labels to evaluate against. Use `rayrec predict` to score it."
        )
    return labelled


def _with_lists(context: ScoringContext, schema: Schema) -> ScoringContext:
    """Return the context for lists of events. Evaluations read those of the run's split,
    predictions the whole list of every user, with the user. Other data is unchanged.
    """
    if schema.sequence is None:
        return context
    config = context.config
    names = config.train_data.files if context.evaluation_rows else ()
    source = LogSource.at(context.path, names)
    if source.is_preprocessed:
        return context
    with context.console.preparing():
        lists = source.lists(
            schema,
            _task_context(context),
            max_bad_fraction=config.max_bad_fraction,
            rows="log" if context.evaluating else "histories",
        )
    user = () if context.evaluating else (schema.sequence.user,)
    extra_columns = tuple(dict.fromkeys((*user, *context.extra_columns)))
    return replace(context, path=lists.path, extra_columns=extra_columns)


def _task_context(context: ScoringContext) -> TaskContext:
    console = context.console
    return TaskContext(
        context.engine(),
        cache_folder(context.checkpoint),
        console.note,
        console.progress,
        console.warn,
    )


def key_columns(slice_by: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Return the columns to slice by value. Raises InputError for other columns."""
    columns = dict.fromkeys(by for by in slice_by if by != DAY and not by.startswith(FREQUENCY))
    columns_in_log = [name for name in (*schema.dense, *schema.sparse) if name not in schema.lists]
    for name in columns:
        if name in schema.lists:
            raise InputError(
                f"slice_by: column {name} contains lists. Choose a column with one value per row."
            )
        if name not in columns_in_log:
            names = [DAY, *columns_in_log]
            hint = suggest(name, names, otherwise=f"there are {', '.join(names)}")
            raise InputError(f"slice_by: the log has no column '{name}'; {hint}")
    return tuple(columns)


def frequency_columns(slice_by: Sequence[str], preprocessor: Preprocessor) -> tuple[str, ...]:
    """Return the columns to slice by category frequency. Raises InputError if the frequencies are
    unknown.
    """
    columns = dict.fromkeys(
        by.removeprefix(FREQUENCY) for by in slice_by if by.startswith(FREQUENCY)
    )
    key_columns(tuple(columns), preprocessor.schema)
    for name in columns:
        bucket_names(preprocessor, name)
    return tuple(columns)


def _check_extra(
    context: ScoringContext, schema: Schema, heads: Sequence[Head], items: ItemsRequest | None
) -> None:
    """Check that the log has the columns to keep, and that predictions have other names. Raises
    InputError.
    """
    predicted = {"row"}
    if items is not None:
        predicted.update(ITEM_COLUMNS)
        heads = heads_beside(heads, context.extra_columns)
    for head in heads:
        predicted.update(_table_columns(head))
    for name in context.extra_columns:
        if name in predicted:
            raise InputError(
                f"keep: predictions have a column {name} already; leave it out, or rename it in "
                f"{context.path}"
            )
    LogSource.at(context.path).check_extra(context.extra_columns, schema)


def _table_columns(head: Head) -> Iterator[str]:
    """Yield the names of a head's columns in tables of scores."""
    empty = {name: np.zeros(0, dtype) for name, dtype in zip(head.names, head.dtypes, strict=True)}
    yield from head.columns(empty, lambda _: np.zeros(0, np.int64))
    if isinstance(head, LabelHead):
        yield f"label{head.suffix}"


def _index(
    context: ScoringContext, schema: Schema, slice_columns: Iterable[str]
) -> tuple[LogIndex, str, tuple[int, int]]:
    """Return the log index, the name of the run's own set if only its rows are scored, and the row
    range [start, stop). Raises InputError if the log does not have the values of `slice_columns`.
    """
    config = context.config
    assert isinstance(config.workload, ClickSettings)
    data = (
        config.workload.evaluation_data(config)
        if context.evaluation_rows
        else config.eval_data.replace(files=())
    )
    files = data.files if schema.sequence is None else ()
    with context.console.preparing():
        index = LogSource.at(context.path, files).index(
            schema,
            segment_bytes=data.segment_bytes,
            context=_task_context(context),
            max_bad_fraction=config.max_bad_fraction,
            extra=context.extra_columns,
        )
    if index.is_preprocessed and (names := ", ".join(slice_columns)):
        raise InputError(
            f"{context.path}: is preprocessed and has ids instead of categories. Use the raw log "
            f"to slice metrics by {names}."
        )
    # Lists of any events have the parts of the run's split.
    has_parts = schema.sequence is not None and context.evaluating and not index.is_preprocessed
    if not (context.evaluation_rows or has_parts):
        return index, "", (0, index.rows)
    return index, *config.workload.evaluation_rows(config, index)


def _blocks(context: ScoringContext, index: LogIndex, rows: tuple[int, int]) -> list[ScoredBlock]:
    """Return the rows [start, stop) of the log in blocks to score."""
    segments_per_block = context.config.eval_data.segments_per_block
    with context.console.preparing():
        lines = first_lines(index, segments_per_task=segments_per_block, engine=context.engine())
    order = BlockOrder(
        tuple(index.parts(*rows)), shuffle="none", seed=0, segments_per_block=segments_per_block
    )
    rows_follow = not index.faults.total or index.is_preprocessed
    return [
        ScoredBlock(block, tuple(lines[part.segment] for part in block.parts), rows_follow)
        for block in order.blocks(0)
    ]


# Two checkpoints are compared only on equal rows. A checksum identifies rows that moved to another
# path; names stand in for it in logs that have none.
def _rows_key(parts: Iterable[SegmentRange]) -> str:
    """Hash these rows by the checksums of their segments, or by file names without checksums."""
    digest = hashlib.sha256()
    for part in parts:
        segment = part.segment
        identity = (segment.path, segment.start) if segment.checksum is None else segment.checksum
        digest.update(repr((identity, segment.rows, part.start, part.stop)).encode())
    return digest.hexdigest()


def cache_folder(checkpoint: str) -> str:
    """Return the cache folder for unpacked files and indices: $RAYREC_CACHE, else the run's cache,
    else ~/.cache/rayrec. The run's cache has the index of its training log, and every node can
    reach it.
    """
    # ROOT/RUN/checkpoints/step_00001000
    run = storage.parent_folder(storage.parent_folder(checkpoint.rstrip("/")))
    return cache.folder(storage.join(storage.parent_folder(run), ".cache"))


def open_run_log(
    data: DataConfig, preprocessor: Preprocessor, *, cache: str, max_bad_fraction: float = 1.0
) -> LogIndex:
    """Return the index of a log, cached in folder `cache`. Raises InputError if unreadable or with
    too many invalid lines.
    """
    if data.path is None:
        raise InputError("the run's config.yaml must name its log")
    return LogSource.at(data.path, data.files).index(
        preprocessor.schema,
        segment_bytes=data.segment_bytes,
        context=TaskContext(ThreadEngine(host_resources.usable_cpus()), cache),
        max_bad_fraction=max_bad_fraction,
    )


def encode_parts(
    parts: Iterable[SegmentRange], preprocessor: Preprocessor
) -> Iterator[EncodedRows]:
    """Yield the rows of log parts in order, in batches of up to `BATCH_ROWS`."""
    for part in parts:
        read = open_block(Block((part,), None), preprocessor).encode
        for start in range(0, part.rows, BATCH_ROWS):
            yield read(start, min(start + BATCH_ROWS, part.rows))


@final
class _ClickTotals:
    """Totals of scored tables in a `LabelsAccumulator`."""

    def __init__(self, heads: Sequence[Head], *, grouped: bool, ks: Sequence[int]) -> None:
        self._heads = [head for head in heads if isinstance(head, LabelHead)]
        accumulator = labels_accumulator(heads, grouped=grouped, ks=ks)
        assert accumulator is not None, "models without labels are measured"
        self._kept = accumulator
        self._grouped = grouped

    @property
    def rows(self) -> int:
        return self._kept.rows

    def update(self, table: pa.Table) -> None:
        def label_values(column: str) -> dict[str, np.ndarray]:
            return {
                head.name: as_numpy(table.column(f"{column}{head.suffix}")) for head in self._heads
            }

        self._kept.update(
            label_values("logit"),
            label_values("label"),
            as_numpy(table.column(GROUP)) if self._grouped else None,
        )

    def compute(self) -> dict[str, float]:
        return self._kept.compute()


@dataclass(frozen=True)
class ScoredBlock:
    """Rows that are read, encoded and scored together, in log order."""

    block: Block
    first_lines: tuple[int, ...]
    """Line number of the first line of each part's segment."""
    has_all_lines: bool
    """Flag for logs without invalid lines, whose row numbers equal line numbers."""


@dataclass(frozen=True)
class _ScoringTask:
    """Input of all scoring processes."""

    workload: ClickSettings
    config: TrainConfig
    checkpoint: str
    preprocessor: Shared[Preprocessor]
    blocks: Shared[list[ScoredBlock]]
    labelled: bool
    """Flag for rows with all columns of the schema, including those for training and evaluation
    only.
    """
    measuring: bool
    """Flag to measure rows with the network instead of predicting."""
    batch_rows: int
    key_columns: tuple[str, ...]
    """Columns whose values are returned for slicing."""
    frequency_columns: tuple[str, ...]
    """Columns whose category frequencies are returned for slicing."""
    day_slices: tuple[Slice, ...]
    """Time slices of the log, if used for slicing."""
    extra: ExtraColumns
    """Columns of the log that are returned unchanged."""
    counts_clipped: bool
    """Flag to return which numbers are beyond their bounds."""
    items: ItemsRequest | None
    """Items to predict. None: none."""

    def load(self, device: Device) -> BlockScorer:
        preprocessor = self.preprocessor.get()
        scorer = load_scorer(
            self.workload.model,
            precision=self.config.precision,
            checkpoint=self.checkpoint,
            preprocessor=preprocessor,
            device=device,
        )
        return self.block_scorer(preprocessor, self.blocks.get(), scorer)

    def block_scorer(
        self, preprocessor: Preprocessor, blocks: Sequence[ScoredBlock], scorer: ClickScorer
    ) -> BlockScorer:
        """Return a scorer of these blocks."""
        recommender = None if self.items is None else Recommender(scorer, preprocessor)
        return BlockScorer(
            lambda number: _LogBlock(
                self, preprocessor, blocks[number], scorer, recommender=recommender
            ),
            self.batch_rows,
        )


@final
class _LogBlock:
    """Block of a log. See `OpenBlock`."""

    def __init__(
        self,
        task: _ScoringTask,
        preprocessor: Preprocessor,
        scored: ScoredBlock,
        scorer: ClickScorer,
        *,
        recommender: Recommender | None = None,
    ) -> None:
        self._task = task
        self._preprocessor = preprocessor
        self._scored = scored
        self._scorer = scorer
        self._schema = preprocessor.schema if task.labelled else preprocessor.schema.unlabelled()
        self._opened = open_block(scored.block, preprocessor, labelled=task.labelled)
        self.rows = scored.block.rows
        self._heads = scorer.heads
        self._items: BlockItems | None = None
        if recommender is not None and task.items is not None:
            self._heads = heads_beside(scorer.heads, task.extra.types.names)
            self._items = BlockItems(
                recommender, task.items, preprocessor, scored.block, self._opened
            )
        self._label_heads = [head for head in scorer.heads if isinstance(head, LabelHead)]
        self._clips = ClipCounter(preprocessor) if task.counts_clipped else None

    def score(self, start: int, stop: int) -> dict[str, np.ndarray]:
        rows = self._opened.encode(start, stop)
        if self._task.measuring:
            return self._scorer.measure(rows)
        columns = {}
        if self._heads:
            values_of = self._scorer.predict(rows)
            columns = {f"{_OUTPUT}{name}": values for name, values in values_of.items()}
        if self._items is not None:
            columns |= self._items.score(rows, start, stop)
        columns |= {
            f"label{head.suffix}": rows.labels[head.name]
            for head in self._label_heads
            if rows.labels
        }
        if self._task.labelled and self._schema.group:
            assert rows.groups is not None
            columns[GROUP] = rows.groups
        for name in self._task.frequency_columns:
            ids = rows.ids[self._preprocessor.inputs.sparse.index(name)]
            assert isinstance(ids, np.ndarray), "key_columns rejects lists"
            columns[KEY + FREQUENCY + name] = assign_buckets(self._preprocessor, name, ids)
        if self._clips is not None and self._clips.names:
            columns |= self._clips.columns(rows.dense)
        return columns

    def columns(self, scored: dict[str, np.ndarray]) -> dict[str, pa.Array]:
        task = self._task
        block = self._scored.block
        columns = {"row": arrow_numbers(_rows(self._scored, self._schema))}
        if task.measuring:
            return columns | {
                name: arrow_numbers(values, np.isnan(values)) for name, values in scored.items()
            }
        values = {
            name.removeprefix(_OUTPUT): array
            for name, array in scored.items()
            if name.startswith(_OUTPUT)
        }
        for head in self._heads:
            predicted = head.columns(values, functools.partial(ids_by_row, self._preprocessor))
            columns |= {name: _arrow_column(column) for name, column in predicted.items()}
            if isinstance(head, LabelHead) and task.labelled:
                name = f"label{head.suffix}"
                columns[name] = arrow_numbers(scored[name].astype(np.float32, copy=False))
        if self._items is not None:
            columns |= self._items.columns(scored)
        if GROUP in scored:
            columns[GROUP] = arrow_numbers(scored[GROUP])
        if task.day_slices:
            columns[KEY + DAY] = name_slices(block, task.day_slices)
        columns |= {
            name: arrow_flags(values) for name, values in scored.items() if name.startswith(COLUMN)
        }
        for name in task.key_columns:
            columns[KEY + name] = self._values(name)
        for name in task.frequency_columns:
            missing = self._values(name).is_null().to_numpy(zero_copy_only=False)
            columns[KEY + FREQUENCY + name] = pa.DictionaryArray.from_arrays(
                pa.array(scored[KEY + FREQUENCY + name].astype(np.int32), mask=missing),
                pa.array(bucket_names(self._preprocessor, name), pa.large_string()),
            )
        if task.extra.types.names:
            columns |= task.extra.read(block, self._schema)
        return columns

    def _values(self, name: str) -> pa.Array:
        assert self._opened.raw is not None, "open_scoring rejects preprocessed logs"
        return read_column(self._scored.block, self._opened.raw, name, self._schema)


def _arrow_column(values: np.ndarray) -> pa.Array:
    """Convert numbers or texts, one or several a row."""
    return pa.array(values.tolist()) if values.dtype == object else arrow_rows(values)


# Invalid lines have line numbers but no rows. Only a segment with one is parsed again for the
# numbers of its valid lines.
def _rows(scored: ScoredBlock, schema: Schema) -> np.ndarray:
    """Return the line number of each row of the block in the log, int64."""
    line_numbers = []
    for part, first_line in zip(scored.block.parts, scored.first_lines, strict=True):
        rows = np.arange(part.start, part.stop, dtype=np.int64)
        line_numbers.append(
            first_line + (rows if scored.has_all_lines else good_lines(part.segment, schema)[rows])
        )
    return np.concatenate(line_numbers)
