"""Validation of a log before training: a data report, and gates that it must pass."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.data.arrow import arrow_numbers, as_numpy, json_reply, parse_reply
from rayrec.data.encoding.counts import Counts, count_log
from rayrec.data.encoding.encoder import Derivation
from rayrec.data.encoding.fitting import fit, with_constants_of
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import RAYREC, Preset, merged
from rayrec.data.engine import Engine, grouped
from rayrec.data.log_source import LogSource
from rayrec.data.logs.index import LogIndex, Segment, SegmentRange
from rayrec.data.logs.reading import read_raw
from rayrec.data.logs.splits import Slice, slices_of
from rayrec.data.logs.text_log import read_text
from rayrec.data.logs.text_parser import TextParser, max_rows_in
from rayrec.data.raw_block import RawBlock
from rayrec.native import keep_freed_memory
from rayrec.observe.console import Console
from rayrec.prepare import data_report
from rayrec.prepare.config import (
    PreparationConfig,
    engine,
    load_matching_preprocessor,
    task_context,
)
from rayrec.prepare.data_report import Gates, Report, find_failures, find_warnings
from rayrec.prepare.log_statistics import ColumnStats, StatsJob, quantile_edges
from rayrec.schema import Schema


@dataclass(frozen=True)
class Categories:
    """Results of counting categories."""

    columns: dict[str, dict[str, Any]]
    """Figures of each sparse column."""
    dense_unknown: dict[str, float | None]
    """Rates of unknown values in dense columns for which the Preprocessor creates categories."""
    unknown_to: str | None
    """Name of the vocabulary that unknown categories are missing from, or None without one."""
    top: tuple[np.ndarray, ...]
    """Most frequent categories of each sparse column, each uint64 [at most TOP]."""


def examine_categories(
    index: LogIndex,
    slices: Sequence[Slice],
    *,
    config: PreparationConfig,
    preprocessor: Preprocessor | None,
    engine: Engine,
    progress: Callable[[str, int, int | None], None],
) -> Categories:
    """Count the categories of the full log and, without a Preprocessor, of its last slice: the
    difference is the past's vocabulary. Memory is bounded as for `rayrec vocabulary`, except for
    the categories of one column at a time.
    """
    buckets = preprocessor is not None and preprocessor.integer_buckets
    # Count each column separately, even if columns share a vocabulary.
    job = replace(RAYREC.counting(config.schema.unshared()), derivation=Derivation(buckets=buckets))
    # dense columns come first among the counted columns
    shift = len(config.schema.dense) if buckets else 0

    def count(start: int, label: str) -> Counts:
        return count_log(
            job,
            list(index.parts(start, index.rows)),
            engine=engine,
            memory_bytes=config.memory_bytes,
            progress=lambda rows: progress(label, rows, index.rows - start),
        )

    past = next((slice_.start for slice_ in reversed(slices) if slice_.stop > slice_.start), 0)
    with count(0, "categories (rows)") as counts:
        results = [_column(counts, shift + s) for s in range(len(config.schema.sparse))]
        columns = dict(zip(config.schema.sparse, (column for column, _ in results), strict=True))
        top = tuple(tokens for _, tokens in results)
        if preprocessor is not None:
            for s, name in enumerate(config.schema.sparse):
                columns[name].update(_category_rates(preprocessor, counts, shift + s))
            names = config.schema.dense if buckets else ()
            dense_unknown = {
                name: _category_rates(preprocessor, counts, d)["unknown_rate"]
                for d, name in enumerate(names)
            }
            return Categories(columns, dense_unknown, f"Preprocessor {preprocessor.hash()}", top)
        if not past:
            return Categories(columns, {}, None, top)
        last = next(slice_.name for slice_ in slices if slice_.start == past and slice_.stop > past)
        with count(past, f"categories of {last} (rows)") as latest:
            for s, name in enumerate(config.schema.sparse):
                columns[name]["unknown_rate"] = _unknown_to_the_past(
                    counts, latest, s, config.rules
                )
    vocabulary = (
        f"what comes before {last}, categories seen {config.rules.min_count} times or more (rates "
        f"are of {last})"
    )
    return Categories(columns, {}, vocabulary, top)


def _column(counts: Counts, number: int) -> tuple[dict[str, Any], np.ndarray]:
    tokens, amounts, _ = counts.frequent_tokens(number, 2)
    column = {
        **data_report.concentration(amounts, counts.num_distinct(number)),
        "unknown_rate": None,
    }
    return column, data_report.top_categories(tokens, amounts)


def _merge_categories(
    tokens: np.ndarray, amounts: np.ndarray, modulo: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens in ascending order, after an optional modulo, and their counts."""
    tokens, amounts, _ = merged(tokens % tokens.dtype.type(modulo) if modulo else tokens, amounts)
    return tokens, amounts


# past = all - latest, per category. Thus a category is known to the past if its count over all rows
# exceeds its count in the latest rows by min_count.
def _unknown_to_the_past(
    counts: Counts, latest: Counts, number: int, rules: Preset
) -> float | None:
    """Return the fraction of the latest values whose category occurred fewer than min_count times
    before.
    """
    tokens, amounts = _merge_categories(*latest.frequent_tokens(number)[:2], rules.token_modulo)
    # Fewer occurrences than min_count plus one cannot matter, unless the modulo merges categories.
    counted = counts.frequent_tokens(number, 1 if rules.token_modulo else rules.min_count + 1)
    all_tokens, all_amounts = _merge_categories(*counted[:2], rules.token_modulo)
    both, latest_index, index = np.intersect1d(
        tokens, all_tokens, assume_unique=True, return_indices=True
    )
    return data_report.unknown_rate(
        tokens, amounts, both[all_amounts[index] - amounts[latest_index] >= rules.min_count]
    )


def _category_rates(
    preprocessor: Preprocessor, counts: Counts, number: int
) -> dict[str, float | None]:
    """Return the unknown and collision rates of a Preprocessor's column."""
    column = preprocessor.sparse[number]
    tokens, amounts, _ = counts.frequent_tokens(number)
    vocabulary = preprocessor.vocabulary(number)
    rates: dict[str, float | None] = {"unknown_rate": None}
    if column.num_tokens is not None:
        merged_counts = _merge_categories(tokens, amounts, column.token_modulo)
        rates["unknown_rate"] = data_report.unknown_rate(*merged_counts, np.sort(vocabulary))
    ids = column.first_id + (column.num_tokens or 0) + (column.gap is not None)
    if column.num_tokens is None or column.token_modulo or ids > column.num_embeddings:
        rates["collision_rate"] = data_report.collision_rate(column, vocabulary, tokens, amounts)
    return rates


_TASK_ROWS = 500_000
_READ_ROWS = 100_000
"""Minimum number of rows that a task reads at a time; larger segments are read in full."""
_EDGE_ROWS = 1 << 17
"""Rows of the first slice used for the quantiles of dense columns."""
_EDGE_RANGES = 64
_HASH_BYTES = 1 << 30
"""Memory for row hashes without a configured limit."""


Batch = tuple[int, tuple[SegmentRange, ...]]
"""Number of a slice, and adjacent parts of it."""


def _read(parts: Sequence[SegmentRange], schema: Schema) -> RawBlock:
    block = read_raw([part.segment for part in parts], schema)
    # Only the first and last segment may be cut.
    return block.cut(parts[0].start, block.rows - (parts[-1].segment.rows - parts[-1].stop))


def _stats_task(batches: Sequence[Batch], *, job: StatsJob) -> pa.Table:
    keep_freed_memory()
    stats = ColumnStats.empty(job)
    for number, parts in batches:
        stats.count(
            _read(parts, job.schema), job, number, parts[0].segment.first_row + parts[0].start
        )
    return stats.to_table()


def _values_task(parts: Sequence[SegmentRange], *, schema: Schema) -> pa.Table:
    block = _read(parts, schema)
    values = [
        arrow_numbers(numbers.astype(np.float64), block.is_missing(name))
        for numbers, name in zip(block.numbers.T, schema.dense, strict=True)
    ]
    return pa.table(values, names=list(schema.dense))


def _faults_task(segments: Sequence[Segment], *, schema: Schema) -> pa.Table:
    counter = Counter[tuple[str, str]]()
    for segment in segments:
        size = segment.stop - segment.start
        faults = TextParser(schema, max_rows_in(schema, size)).parse(
            read_text(segment), size, max_faults=size
        )
        counter.update((fault.kind, fault.column) for fault in faults.first)
    return json_reply([[*key, rows] for key, rows in counter.items()])


def _edges(index: LogIndex, first: Slice, schema: Schema, engine: Engine) -> np.ndarray:
    """Return quantiles of up to _EDGE_ROWS rows, evenly spread over the first slice. Depends on row
    numbers only.
    """
    rows = first.stop - first.start
    ranges = [(first.start, first.stop)]
    if rows > _EDGE_ROWS:
        length = _EDGE_ROWS // _EDGE_RANGES
        starts = [
            first.start + (rows - length) * i // (_EDGE_RANGES - 1) for i in range(_EDGE_RANGES)
        ]
        ranges = [(start, start + length) for start in starts]
    items = (
        [tuple(index.parts(*row_range)) for row_range in ranges] if rows and schema.dense else []
    )
    tables = list(engine.run("quantiles", functools.partial(_values_task, schema=schema), items))
    values = [
        np.concatenate([as_numpy(table.column(name).drop_null()) for table in tables])
        if tables
        else np.zeros(0)
        for name in schema.dense
    ]
    return quantile_edges(values)


def _count_stats(
    index: LogIndex,
    job: StatsJob,
    slices: Sequence[Slice],
    engine: Engine,
    progress: Callable[[int], None],
) -> tuple[ColumnStats, np.ndarray]:
    limit = max(1, min(_TASK_ROWS, index.rows // 8))
    sized = functools.partial(
        grouped, size_of=lambda part: part.rows, max_bytes=min(limit, _READ_ROWS), max_items=limit
    )
    parts_by_slice = [list(index.parts(slice_.start, slice_.stop)) for slice_ in slices]
    batches: list[Batch] = [
        (n, tuple(parts))
        for n, slice_parts in enumerate(parts_by_slice)
        for parts in sized(slice_parts)
    ]
    tasks = grouped(
        batches,
        lambda batch: sum(part.rows for part in batch[1]),
        max_bytes=limit,
        overflows=True,
    )
    total = ColumnStats.empty(job)
    hashes = [np.zeros(0, np.uint64)]
    for table in engine.run("examine", functools.partial(_stats_task, job=job), tasks):
        hashes.append(total.add(table).copy())
        progress(int(total.rows.sum()))
    return total, np.concatenate(hashes)


def _find_faults(index: LogIndex, schema: Schema, engine: Engine) -> dict[str, Any]:
    return {
        "by_kind": dict(sorted(index.faults.counts.items())),
        "by_column": _columns_at_fault(index, schema, engine),
        "first": index.faults.to_dict()["first"],
        "labels": index.faults.labels,
    }


def _columns_at_fault(index: LogIndex, schema: Schema, engine: Engine) -> dict[str, dict[str, int]]:
    """Count rejected lines by kind and column. For tables only the first few, because their index
    has no more.
    """
    counter = Counter[tuple[str, str]]()
    if index.faults.total and index.format == "text":
        size = max(1, len(index.segments) // 64)
        items = [index.segments[i : i + size] for i in range(0, len(index.segments), size)]
        for table in engine.run(
            "faults", functools.partial(_faults_task, schema=schema), items, block_bytes=1 << 16
        ):
            counter.update({(kind, column): rows for kind, column, rows in parse_reply(table)})
    else:
        counter.update((fault.kind, fault.column) for fault in index.faults.first)
    by_kind: dict[str, dict[str, int]] = {}
    for (kind, column), rows in sorted(counter.items()):
        if column:
            by_kind.setdefault(kind, {})[column] = rows
    return by_kind


def validate(
    path: str,
    *,
    config: PreparationConfig,
    gates: Gates | None = None,
    preprocessor: str | None = None,
    console: Console,
) -> Report:
    """Validate a raw log; see docs/validate.md. Failed gates are in the report and raise no error.
    Checks categories against the Preprocessor in a folder, or else the categories of the last file
    (of a single file, its last seventh) against a vocabulary of all earlier rows. Raises InputError
    for an unusable log or a Preprocessor of another schema.
    """
    gates = gates or Gates()
    source = LogSource.at(path, config.files)
    source.require_raw()
    config = config.adapted(path, preprocessor=preprocessor)
    existing = load_matching_preprocessor(preprocessor, config.schema)
    with console.preparing(), engine(config, console, paths=(path,)) as running:
        index = source.index(
            config.schema,
            segment_bytes=config.segment_bytes,
            context=task_context(running, console),
        )
        return examine(
            index,
            path=path,
            config=config,
            gates=gates,
            preprocessor=existing,
            engine=running,
            progress=console.progress,
        )


# Rows whose hash starts with `shift` zero bits are a sample by content. It has all copies of a row
# or none, so that the rate of duplicates is unbiased.
def _hash_shift(rows: int, memory_bytes: int | None) -> int:
    """Return the shift for which one in 2^shift row hashes, stored twice while they are collected,
    fits the memory.
    """
    max_rows = (memory_bytes or _HASH_BYTES) // 16
    return max(0, (-(-rows // max_rows) - 1).bit_length()) if rows else 0


def _fitted(
    schema: Schema, index: LogIndex, preprocessor: Preprocessor | None, engine: Engine
) -> Schema:
    """Return the schema with the constants of its formulas: the Preprocessor's, or of all rows."""
    if preprocessor is not None:
        schema = with_constants_of(schema, preprocessor.schema)
    return fit(schema, index, (0, index.rows), engine)


# A report needs three jobs of tasks over the log:
#
#   categories   count_log       all rows; without a Preprocessor also the last slice, whose
#                                difference to all is the past
#   examine      _stats_task     numbers, labels and drift by slice, with quantiles of the first
#   faults       _faults_task    only if there are invalid lines, and only of text
def examine(
    index: LogIndex,
    *,
    path: str,
    config: PreparationConfig,
    gates: Gates,
    preprocessor: Preprocessor | None,
    engine: Engine,
    progress: Callable[[str, int, int | None], None],
) -> Report:
    """Build the report of an indexed log, in two passes over its rows, and another over its text if
    there are invalid lines. Depends on the rows only, not on how the log is divided.
    """
    if gates.max_bad_fraction is None:
        gates = gates.replace(max_bad_fraction=config.max_bad_fraction)
    schema = _fitted(config.schema, index, preprocessor, engine)
    config = config.replace(schema=schema)
    slices_by, slices = slices_of(index)
    categories = examine_categories(
        index, slices, config=config, preprocessor=preprocessor, engine=engine, progress=progress
    )
    first = next((slice_ for slice_ in slices if slice_.stop > slice_.start), Slice("", 0, 0))
    job = StatsJob(
        schema,
        num_slices=len(slices),
        edges=_edges(index, first, schema, engine),
        top=categories.top,
        hash_shift=_hash_shift(index.rows, config.memory_bytes),
        rules=() if preprocessor is None else preprocessor.dense,
        num_rows=index.rows,
    )
    stats, hashes = _count_stats(
        index, job, slices, engine, lambda rows: progress("examine (rows)", rows, index.rows)
    )
    drift = data_report.describe_drift(stats, schema)
    dense = data_report.dense_columns(stats, schema, drift, job.rules)
    for name, rate in categories.dense_unknown.items():
        dense[name]["unknown_rate"] = rate
    content = {
        "path": path,
        "rows": index.rows,
        "bad_rows": index.faults.total,
        "bad_fraction": index.bad_fraction,
        "faults": _find_faults(index, schema, engine),
        "label": data_report.describe_label(stats, schema.label) if schema.label else None,
        "weight": data_report.describe_weight(stats) if schema.weight else None,
        "slices": data_report.slices_of(stats, schema, [slice_.name for slice_ in slices], drift),
        "dense": dense,
        "sparse": data_report.sparse_columns(stats, schema, drift, categories.columns),
        "slices_by": slices_by,
        "unknown_to": categories.unknown_to,
        "duplicates": {
            "rate": data_report.duplicate_rate(hashes),
            "rows": len(hashes),
            "sampled": 1 / (1 << job.hash_shift),
        },
        "gates": gates.to_dict(),
    }
    return Report(content, tuple(find_warnings(content)), tuple(find_failures(content, gates)))
