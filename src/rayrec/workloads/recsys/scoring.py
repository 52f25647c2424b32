"""Scoring of a click log with a trained model: driver setup and scoring processes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
import pyarrow as pa
import torch

from rayrec import host_resources, storage
from rayrec.config import InputError, suggest
from rayrec.data.arrow import arrow_numbers, arrow_rows, as_numpy
from rayrec.data.encoded_rows import EncodedRows, JaggedIds
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
from rayrec.metrics.means import Accumulator, MeasureTotals
from rayrec.metrics.ranking import DEFAULT_KS
from rayrec.metrics.recommended import RecommendedItems
from rayrec.models.evaluation_items import SEEN, TARGET, ItemList, evaluation_items
from rayrec.models.heads import BinaryHead, Head, LabelHead, labels_accumulator
from rayrec.schema import Schema
from rayrec.storage import cache
from rayrec.workloads.base import ScoringContext, TrainConfig
from rayrec.workloads.recsys.candidates import Ranking, model_inputs, ranking_of
from rayrec.workloads.recsys.items.predicted import (
    ITEM_COLUMNS,
    BlockItems,
    ItemsRequest,
    heads_beside,
    items_request,
)
from rayrec.workloads.recsys.items.recommender import Recommender
from rayrec.workloads.recsys.scorer import ClickScorer, load_preprocessor, load_scorer
from rayrec.workloads.recsys.settings import ClickSettings, check_grouped
from rayrec.workloads.run_config import DataConfig
from rayrec.workloads.scoring import GROUP, KEY, BlockScorer, Device, Scoring

DAY = "day"
FREQUENCY = "frequency:"
LENGTH = "length:"
_LENGTHS: Final = (0, 1, 2, 5, 10, 20, 50, 100)
"""First length of each bucket of lists."""
_LENGTH_NAMES: Final = ("0", "1", "2-4", "5-9", "10-19", "20-49", "50-99", "100 or more")
REQUEST_TIME: Final = "the network reads the time of each row's first target"
"""Note in evaluations of networks that read the time at which they are asked."""
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
    inputs = model_inputs(preprocessor)
    heads = workload.model.output_heads(inputs)
    measuring = context.evaluating and not any(isinstance(head, LabelHead) for head in heads)
    ranking = ranking_of(workload.model, inputs, context.ks) if measuring else None
    _check_ks(context, workload.schema, ranking)
    labelled = _is_labelled(context, preprocessor.schema, measuring=measuring)
    schema = preprocessor.schema if labelled else preprocessor.schema.unlabelled()
    path = context.path
    context = _with_lists(context, schema)
    slices = _SliceColumns.from_names(context.slice_by, preprocessor, schema, ranking)
    items = items_request(workload.model, context, preprocessor)
    _check_extra(context, schema, heads, items)
    index, set_name, rows = _index(context, schema, slices.names)
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
        ranking=ranking,
        batch_rows=context.batch_rows or _BATCH_ROWS,
        slices=slices,
        day_slices=tuple(slices_of(index)[1]) if DAY in context.slice_by else (),
        extra=find_types(context.extra_columns, index, engine),
        counts_clipped=context.counts_clipped,
        items=items,
    )
    block_rows = tuple(scored.block.rows for scored in blocks)
    assert sum(block_rows) == rows[1] - rows[0]
    described = {"set": set_name, "path": path} if set_name else {}
    if measuring and workload.model.reads_request_time:
        described["request_time"] = REQUEST_TIME
    return Scoring(
        block_rows=block_rows,
        load=process.load,
        make_totals=_totals_maker(context, schema, heads, ranking, measuring=measuring),
        described={
            **described,
            "bad_rows": index.faults.total,
            "preprocessor": preprocessor.hash(),
        },
        thread_safe=True,
        is_clicks=isinstance(heads[0], BinaryHead),
        is_ranking=ranking is not None,
        bounded=ClipCounter(preprocessor).names if context.counts_clipped and not measuring else (),
        set_name=set_name,
        first_row=rows[0],
        rows_key=_rows_key(_keyed(index, context, schema).parts(*rows)) if set_name else "",
    )


def _totals_maker(
    context: ScoringContext,
    schema: Schema,
    heads: Sequence[Head],
    ranking: Ranking | None,
    *,
    measuring: bool,
) -> Callable[[], Accumulator]:
    """Return a function that creates the totals of an evaluation's tables."""
    if measuring:
        return functools.partial(measure_totals, ranking)
    ks = context.ks or DEFAULT_KS
    return functools.partial(_ClickTotals, heads, grouped=schema.group is not None, ks=ks)


def _load_preprocessor(workload: ClickSettings, context: ScoringContext) -> Preprocessor:
    """Return the checkpoint's Preprocessor, for an evaluation with the group of the workload."""
    preprocessor = load_preprocessor(context.checkpoint)
    if not context.evaluating:
        return preprocessor
    if workload.schema.group is not None:
        check_grouped(workload.schema, context.path)
        return preprocessor.grouped_by(workload.schema.group)
    return preprocessor


def _check_ks(context: ScoringContext, schema: Schema, ranking: Ranking | None) -> None:
    """Check that there is something to rank if ranks k are given. Raises InputError."""
    if context.ks and context.evaluating and schema.group is None and ranking is None:
        raise InputError(
            "k: metrics at k require groups or a retrieval model that ranks all known items. Name "
            "the group column with --group."
        )


def measure_totals(ranking: Ranking | None, popularity: np.ndarray | None = None) -> MeasureTotals:
    """Return totals of a model without labels. `popularity` is the number of training events of
    each candidate, int64 [candidates].
    """
    if ranking is None:
        return MeasureTotals()
    recommended = RecommendedItems(ranking.candidates, ranking.ks, popularity)
    return MeasureTotals(recommended=recommended)


def measure_columns(measures: Mapping[str, np.ndarray]) -> dict[str, pa.Array]:
    """Return table columns with the measures of rows, null instead of NaN."""
    columns = {}
    for name, values in measures.items():
        if values.ndim == 1:
            columns[name] = arrow_numbers(values, np.isnan(values))
        elif values.shape[1]:
            columns[name] = arrow_rows(values)
    return columns


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


@dataclass(frozen=True)
class _SliceColumns:
    """Columns to slice rows by."""

    keys: tuple[str, ...]
    """Columns whose values are returned."""
    frequency: tuple[str, ...]
    """Columns whose category frequencies are returned."""
    length: tuple[str, ...]
    """Lists whose lengths are returned."""

    @classmethod
    def from_names(
        cls,
        slice_by: Sequence[str],
        preprocessor: Preprocessor,
        schema: Schema,
        ranking: Ranking | None,
    ) -> _SliceColumns:
        """Return the columns in `slice_by`. Raises InputError for other columns, and if frequencies
        are unknown.
        """
        ranked = None if ranking is None else ranking.feature
        return cls(
            key_columns(slice_by, schema),
            frequency_columns(slice_by, preprocessor, ranked=ranked),
            length_columns(slice_by, schema),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All columns, each once."""
        return tuple(dict.fromkeys((*self.keys, *self.frequency, *self.length)))


def key_columns(slice_by: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Return the columns to slice by value. Raises InputError for other columns."""
    columns = dict.fromkeys(
        by for by in slice_by if by != DAY and not by.startswith((FREQUENCY, LENGTH))
    )
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


def frequency_columns(
    slice_by: Sequence[str],
    preprocessor: Preprocessor,
    *,
    ranked: str | None = None,
) -> tuple[str, ...]:
    """Return the columns to slice by category frequency, which may be that of the `ranked` items.
    Raises InputError if the frequencies are unknown.
    """
    columns = dict.fromkeys(
        by.removeprefix(FREQUENCY) for by in slice_by if by.startswith(FREQUENCY)
    )
    key_columns(tuple(name for name in columns if name != ranked), preprocessor.schema)
    for name in columns:
        bucket_names(preprocessor, name)
    return tuple(columns)


def length_columns(slice_by: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Return the lists to slice by their length. Raises InputError for other columns."""
    columns = dict.fromkeys(by.removeprefix(LENGTH) for by in slice_by if by.startswith(LENGTH))
    for name in columns:
        if name not in schema.lists:
            lists = ", ".join(schema.lists) or "none"
            raise InputError(
                f"slice_by: {LENGTH}{name}: must name a list, of which the log has {lists}"
            )
    return tuple(columns)


def _check_extra(
    context: ScoringContext,
    schema: Schema,
    heads: Sequence[Head],
    items: ItemsRequest | None,
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
    context: ScoringContext,
    schema: Schema,
    slice_columns: Iterable[str],
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
        tuple(index.parts(*rows)),
        shuffle="none",
        seed=0,
        segments_per_block=segments_per_block,
    )
    rows_follow = not index.faults.total or index.is_preprocessed
    return [
        ScoredBlock(block, tuple(lines[part.segment] for part in block.parts), rows_follow)
        for block in order.blocks(0)
    ]


def _keyed(index: LogIndex, context: ScoringContext, schema: Schema) -> LogIndex:
    """Return the index whose checksums identify rows for models with and without times of items:
    for built lists, that without their ages.
    """
    if schema.sequence is None or not schema.aged or index.is_preprocessed:
        return index
    return _index(context, schema.with_ages(reads_ages=False), ())[0]


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
    data: DataConfig,
    preprocessor: Preprocessor,
    *,
    cache: str,
    max_bad_fraction: float = 1.0,
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


def item_lists(rows: EncodedRows, feature: str, preprocessor: Preprocessor) -> dict[str, ItemList]:
    """Return the list `feature` of rows, and the lists `TARGET` and `SEEN` of logs that have
    them.
    """
    lists = {}
    for name in (feature, TARGET, SEEN):
        if name in preprocessor.inputs.lists:
            ids = rows.ids[preprocessor.inputs.sparse.index(name)]
            assert isinstance(ids, JaggedIds), "the schema's lists are lists"
            lists[name] = ItemList(
                torch.from_numpy(ids.values.astype(np.int64)),
                torch.from_numpy(ids.lengths.astype(np.int64)),
            )
    return lists


def first_targets(rows: EncodedRows, feature: str, preprocessor: Preprocessor) -> np.ndarray:
    """Return the id of each row's first target in lists of items, -1 without targets, int64
    [rows].
    """
    candidates = model_inputs(preprocessor).candidates_of(feature)
    lists = item_lists(rows, feature, preprocessor)
    targets = evaluation_items(lists, feature, candidates).targets.in_order()
    rule = preprocessor.sparse[preprocessor.inputs.sparse.index(feature)]
    ids = candidates.ids(targets.numbers)
    ids[targets.numbers < 0] = rule.unknown_id
    first_rows, first = np.unique(targets.rows.numpy(), return_index=True)
    result = np.full(len(rows), -1, np.int64)
    result[first_rows] = ids.numpy()[first]
    return result


def encode_parts(
    parts: Iterable[SegmentRange],
    preprocessor: Preprocessor,
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
    ranking: Ranking | None
    """Ranking of a retrieval model, if `measuring`."""
    slices: _SliceColumns
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
        self,
        preprocessor: Preprocessor,
        blocks: Sequence[ScoredBlock],
        scorer: ClickScorer,
    ) -> BlockScorer:
        """Return a scorer of these blocks."""
        recommender = None if self.items is None else Recommender(scorer, preprocessor)
        return BlockScorer(
            lambda number: _LogBlock(
                self,
                preprocessor,
                blocks[number],
                scorer,
                recommender=recommender,
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
                recommender,
                task.items,
                preprocessor,
                scored.block,
                self._opened,
            )
        self._label_heads = [head for head in scorer.heads if isinstance(head, LabelHead)]
        self._clips = ClipCounter(preprocessor) if task.counts_clipped else None

    def score(self, start: int, stop: int) -> dict[str, np.ndarray]:
        rows = self._opened.encode(start, stop)
        if self._task.measuring:
            ranking = self._task.ranking
            measures = self._scorer.measure(rows, ks=() if ranking is None else ranking.ks)
            return measures | self._bucket_keys(rows)
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
        columns |= self._bucket_keys(rows)
        if self._clips is not None and self._clips.names:
            columns |= self._clips.columns(rows.dense)
        return columns

    def _bucket_keys(self, rows: EncodedRows) -> dict[str, np.ndarray]:
        """Return the number of each row's bucket in columns to slice by frequency, int8 [rows], -1
        in rows without a target.
        """
        columns = {}
        for name in self._task.slices.frequency:
            ids = rows.ids[self._preprocessor.inputs.sparse.index(name)]
            if isinstance(ids, np.ndarray):
                buckets = assign_buckets(self._preprocessor, name, ids)
            else:  # The ranked items: frequency_columns rejects other lists
                first = first_targets(rows, name, self._preprocessor)
                buckets = assign_buckets(self._preprocessor, name, first)
                buckets[first < 0] = -1
            columns[KEY + FREQUENCY + name] = buckets
        return columns

    def columns(self, scored: dict[str, np.ndarray]) -> dict[str, pa.Array]:
        task = self._task
        block = self._scored.block
        columns = {"row": arrow_numbers(_rows(self._scored, self._schema))}
        if task.measuring:
            measures = {name: each for name, each in scored.items() if not name.startswith(KEY)}
            return columns | measure_columns(measures) | self._keys(scored)
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
        columns |= {
            name: arrow_flags(values) for name, values in scored.items() if name.startswith(COLUMN)
        }
        columns |= self._keys(scored)
        if task.extra.types.names:
            columns |= task.extra.read(block, self._schema)
        return columns

    def _keys(self, scored: Mapping[str, np.ndarray]) -> dict[str, pa.Array]:
        """Return the columns to slice by."""
        task = self._task
        columns = {}
        if task.day_slices:
            columns[KEY + DAY] = name_slices(self._scored.block, task.day_slices)
        for name in task.slices.keys:
            columns[KEY + name] = self._values(name)
        for name in task.slices.frequency:
            key = KEY + FREQUENCY + name
            is_missing = scored[key] < 0
            if name not in self._schema.lists:
                is_missing = self._values(name).is_null().to_numpy(zero_copy_only=False)
            columns[key] = _named(scored[key], bucket_names(self._preprocessor, name), is_missing)
        for name in task.slices.length:
            assert self._opened.raw is not None, "open_scoring rejects preprocessed logs"
            lists = self._opened.raw.column(name)
            assert isinstance(lists, JaggedIds), "length_columns rejects others"
            lengths = lists.lengths[self._scored.block.order()]
            buckets = np.searchsorted(_LENGTHS, lengths, side="right") - 1
            columns[KEY + LENGTH + name] = _named(buckets, _LENGTH_NAMES, buckets < 0)
        return columns

    def _values(self, name: str) -> pa.Array:
        assert self._opened.raw is not None, "open_scoring rejects preprocessed logs"
        return read_column(self._scored.block, self._opened.raw, name, self._schema)


def _arrow_column(values: np.ndarray) -> pa.Array:
    """Convert numbers or texts, one or several a row."""
    return pa.array(values.tolist()) if values.dtype == object else arrow_rows(values)


def _named(buckets: np.ndarray, names: Sequence[str], is_missing: np.ndarray) -> pa.Array:
    """Return the names of rows' buckets, null if missing."""
    return pa.DictionaryArray.from_arrays(
        pa.array(buckets.astype(np.int32), mask=is_missing),
        pa.array(names, pa.large_string()),
    )


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
