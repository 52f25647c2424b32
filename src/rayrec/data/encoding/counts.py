"""Distributed counting of all categories and of the dense columns' moments in bounded memory, alone
or while a log is indexed.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, TypeVar, final

import numpy as np
import pyarrow as pa

from rayrec import host_resources, storage
from rayrec.config import InputError, first_of
from rayrec.data.arrow import arrow_bytes, arrow_texts
from rayrec.data.encoded_rows import JaggedIds
from rayrec.data.encoding.category_counter import (
    NO_ROW,
    Items,
    Spill,
    TokenCounter,
    count_columns,
    frequent_items,
    narrow,
)
from rayrec.data.encoding.encoder import Derivation, file_key
from rayrec.data.encoding.fitting import fit
from rayrec.data.encoding.growth import (
    MIN_CATEGORIES,
    RowOrder,
    category_warning,
    num_changes,
    number_warning,
)
from rayrec.data.encoding.moments import Moments
from rayrec.data.encoding.number_sample import NumberSample
from rayrec.data.encoding.rules import DenseColumn
from rayrec.data.engine import Engine, TaskContext, grouped
from rayrec.data.log_source import CHUNK_BYTES, index_with
from rayrec.data.logs.faults import Faults
from rayrec.data.logs.index import LogIndex, SegmentEntry, SegmentRange, numbered
from rayrec.data.logs.reading import read_raw
from rayrec.data.logs.text_log import Chunk, cut, parsed_segments
from rayrec.data.raw_block import RawBlock, category_type
from rayrec.native import call, keep_freed_memory
from rayrec.schema import Schema

_Item = TypeVar("_Item")
DENSE_UNITS = 1 << 20
"""Units of the fixed-point numbers whose exact sums yield mean and variance. See
Counts.dense_moments.
"""
DENSE_LOW_BITS = 26
_MEMORY_FRACTION = 0.25
"""Default fraction of the available memory for count tables. Ray's object store and the system need
the rest.
"""


def default_memory_bytes() -> int:
    """Return the default memory for count tables: a quarter of the memory available within the
    control group's limits.
    """
    return max(64 << 20, int(host_resources.memory().available * _MEMORY_FRACTION))


TASK_BYTES = 128 << 20
"""Maximum bytes of text per counting task. Larger tasks leave fewer tables to merge."""
_TASK_TABLE_BYTES = 128 << 20
"""Size of a task's tables from which they are packed and restarted."""


@dataclass(frozen=True)
class CountingJob:
    """Picklable description of what to count."""

    schema: Schema
    derivation: Derivation = field(default_factory=Derivation)
    """Derivation of the counted columns from the read ones."""
    first_rows: bool = False
    """Whether to record the first row of every token."""
    transform: DenseColumn | None = None
    """Transform of the numbers whose exact moments are counted. None: `Counts.dense_moments`, of
    sign(x) ln(1 + |x|).
    """
    samples: bool = False
    """Whether to sample numbers, for their quantiles, and to count the moments of numbers without a
    transform, too.
    """

    def empty(self, *, spill: Spill | None = None) -> Counts:
        inputs = self.derivation.inputs(self.schema)
        dtype = category_type(self.schema)
        counts = Counts.empty(
            len(inputs.dense),
            len(inputs.sparse),
            dtype=dtype,
            first_rows=self.first_rows,
            spill=spill,
        )
        if self.transform is not None:
            counts.transform = self.transform
            counts.exact_moments = [Moments() for _ in inputs.dense]
            counts.row_orders = [RowOrder() for _ in inputs.dense]
        if self.samples:
            counts.sample = NumberSample(len(inputs.dense))
            counts.plain_moments = [Moments() for _ in inputs.dense]
        return counts

    def total(self, memory_bytes: int | None, spill_folder: str | None) -> Counts:
        return self.empty(
            spill=Spill(
                spill_folder,
                default_memory_bytes() if memory_bytes is None else memory_bytes,
            )
        )


# Two passes become one: rows are counted where they are read, and only sums travel.
#
#   task      CountAccumulator: tables of tokens -> packed when large -> one or more table rows
#   driver    Counts.add merges them; tables beyond memory_bytes move to a Spill
#   result    frequent_tokens: from memory, or from the Spill, partition by partition
#
# Everything is a sum, minimum or count of integers, so the result does not depend on tasks or
# engine.
@dataclass
class Counts:
    """Result of counting rows, independent of their order and grouping."""

    rows: int
    tokens: list[TokenCounter]
    """Counter of each sparse column, or of the first with its vocabulary. After spilling, use
    `frequent_tokens`.
    """
    missing: np.ndarray
    """Number of rows without a value and the first such row (2^63 - 1 if none), int64 [num_sparse,
    2].
    """
    dense_moments: np.ndarray
    """Count, sum of q, and sums of the upper and lower DENSE_LOW_BITS bits of q * q, for present
    values, int64 [num_dense, 4]. q = sign(x) ln(1 + |x|) in units of 1 / DENSE_UNITS. |q| is below
    2^26 (ln 10^18 = 41.4), so each sum has room for 2^37 rows. Integers, so that sums are exact in
    any order.
    """
    file_minimum: dict[str, int]
    """File (see `file_key`) -> smallest integer in all its dense columns, 0 for a missing one.
    Integer logs only.
    """
    labels: np.ndarray
    """Number of rows with label 0 and with label 1, int64 [2]."""
    spill: Spill | None = None
    """Storage for tables that exceed the memory limit. None: no limit, for a single task."""
    transform: DenseColumn | None = None
    """Transform of the numbers, `CountingJob.transform`."""
    exact_moments: list[Moments] = field(default_factory=list)
    """Moments of each dense column after `transform`. Empty without one: then `dense_moments` are
    counted.
    """
    sample: NumberSample | None = None
    """Sample of rows for quantiles. None: not asked for (`CountingJob.samples`)."""
    plain_moments: list[Moments] = field(default_factory=list)
    """Moments of each dense column without a transform. Empty without `sample`."""
    row_orders: list[RowOrder] = field(default_factory=list)
    """Order of each dense column's values, for warnings only: it depends on the grouping of rows.
    Empty without `transform`.
    """
    changes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Number of rows whose category differs from the one before, within the blocks read, int64
    [num_sparse], for warnings only. 0 for lists and hexadecimal tokens.
    """
    _distinct: dict[int, int] = field(default_factory=dict)

    @classmethod
    def empty(
        cls,
        num_dense: int,
        num_sparse: int,
        *,
        dtype: Any = np.uint32,
        first_rows: bool = False,
        spill: Spill | None = None,
    ) -> Counts:
        # Tables filled from parts of other tables need a different hash function.
        family = 0 if spill is None else 1
        return cls(
            rows=0,
            tokens=[
                TokenCounter(dtype=dtype, first_rows=first_rows, family=family)
                for _ in range(num_sparse)
            ],
            missing=np.array([[0, NO_ROW]] * num_sparse, np.int64).reshape(-1, 2),
            dense_moments=np.zeros((num_dense, 4), np.int64),
            file_minimum={},
            labels=np.zeros(2, np.int64),
            spill=spill,
            changes=np.zeros(num_sparse, np.int64),
        )

    def frequent_tokens(
        self, column: int, min_count: int = 1, *, always: int | None = None
    ) -> Items:
        """Return a sparse column's tokens counted at least `min_count` times, and the token
        `always` with any count. Spilled counts are read in parts, so that only the returned ones
        are in memory together.
        """
        if self.spill is None or not self.spill.has_spilled:
            return frequent_items(self.tokens[column], min_count, always)
        self.spill.write(self.tokens)
        items, self._distinct[column] = self.spill.merged(
            column, self.tokens[column], min_count, always=always
        )
        return items

    def num_distinct(self, column: int) -> int:
        """Return the number of distinct tokens of a sparse column. Free after `frequent_tokens` of
        the same column.
        """
        if self.spill is None or not self.spill.has_spilled:
            return self.tokens[column].used
        if column not in self._distinct:
            self.frequent_tokens(column, NO_ROW)
        return self._distinct[column]

    def spilled(self) -> str:
        """Return a sentence on the counts written to disk, empty if all fit into memory."""
        if self.spill is None or not self.spill.has_spilled:
            return ""
        limit = self.spill.memory_bytes >> 20
        size = self.spill.written_bytes >> 20
        return (
            f"spilled {size:,} MiB of category counts beyond {limit:,} MiB of memory to "
            f"{self.spill.folder}"
        )

    def close(self) -> None:
        """Free the spilled counts. `frequent_tokens` must not be called afterwards."""
        if self.spill is not None:
            self.spill.close()

    def __enter__(self) -> Counts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def table_bytes(self) -> int:
        return sum(counter.num_bytes for counter in self.tokens)

    @property
    def present(self) -> list[int]:
        """Number of rows with a value in each dense column."""
        if self.transform is not None:
            return [moments.present for moments in self.exact_moments]
        counted: list[int] = self.dense_moments[:, 0].tolist()
        return counted

    def add_rows(self, block: RawBlock, first_row: int) -> None:
        """Add the counted columns of rows; row r is number first_row + r of the log."""
        assert self.spill is None, "only `add` keeps memory bounded"
        self.rows += block.rows
        self._add_numbers(block, first_row)
        if block.schema.tokens == "hexadecimal":
            count_columns(self.tokens, block, first_row, self.missing)
            return
        rows = np.arange(first_row, first_row + block.rows, dtype=np.int64)
        columns = zip(
            block.schema.sparse,
            block.schema.vocabulary_owners,
            self.missing,
            strict=True,
        )
        for number, (name, owner, absences) in enumerate(columns):
            counter = self.tokens[owner]
            values = block.column(name)
            missing = block.is_missing(name)
            absent = rows[missing]
            if not isinstance(values, JaggedIds):
                self.changes[number] += num_changes(values)
            if isinstance(values, JaggedIds):
                counter.count_values(
                    values.values,
                    np.repeat(rows, values.lengths) if counter.first_rows else None,
                )
            elif len(absent):
                counter.count_values(
                    values[~missing],
                    rows[~missing] if counter.first_rows else None,
                )
            else:
                counter.count_values(values, rows)
            if len(absent):
                absences[:] = (
                    absences[0] + len(absent),
                    min(absences[1], absent[0]),
                )

    def _add_numbers(self, block: RawBlock, first_row: int) -> None:
        """Add the dense columns of rows."""
        if self.sample is not None:
            self.sample.add_block(block)
        if block.schema.tokens == "hexadecimal" and self.transform is None:
            if len(self.dense_moments):
                units = (
                    float(DENSE_UNITS),
                    ctypes.c_int32(DENSE_LOW_BITS),
                    _small_logs(),
                )
                read = (
                    block.numbers,
                    block.missing,
                    block.rows,
                    ctypes.c_int32(len(self.dense_moments)),
                )
                call("rayrec_dense_moments", *read, *units, self.dense_moments)
            return
        for number, (column, name) in enumerate(
            zip(block.numbers.T, block.schema.dense, strict=True)
        ):
            present = column[~block.is_missing(name)]
            if self.transform is not None:
                self.exact_moments[number].add_values(self.transform.transform(present))
                self.row_orders[number].add(present, first_row)
                if self.sample is not None:
                    self.plain_moments[number].add_values(present)
            else:
                # Rounded as for integer columns
                logarithms = np.copysign(np.log1p(np.abs(present)), present).astype(np.float32)
                add_logarithms(self.dense_moments[number], logarithms.astype(np.float64))

    def add_source(self, block: RawBlock, path: str) -> None:
        """Add the labels of rows read from a file, and the file's smallest integer."""
        labels = block.labels.get(block.schema.label or "")
        if labels is not None:
            clicks = int(np.count_nonzero(labels))
            self.labels += block.rows - clicks, clicks
        if block.schema.tokens == "hexadecimal" and block.numbers.size:
            # The parser stores 0 for a missing one
            self._lower(file_key(path), int(block.numbers.min()))

    def _lower(self, name: str, value: int) -> None:
        self.file_minimum[name] = min(value, self.file_minimum.get(name, value))

    def to_table(self) -> pa.Table:
        """Convert in-memory counts to one row of binary columns, which is compact and read without
        a copy.
        """
        assert self.spill is None
        items = [counter.items() for counter in self.tokens]
        row = {
            "rows": np.array([self.rows], np.int64),
            "missing": self.missing,
            "dense": self.dense_moments,
            "exact": _packed_moments(self.exact_moments),
            "plain": _packed_moments(self.plain_moments),
            "orders": np.frombuffer(
                json.dumps([order.spans for order in self.row_orders]).encode(),
                np.uint8,
            ),
            "changes": self.changes,
            "labels": self.labels,
            "file_minimum": np.frombuffer(json.dumps(self.file_minimum).encode(), np.uint8),
            "sizes": np.array([len(tokens) for tokens, _, _ in items], np.int64),
            "tokens": _concatenate([tokens for tokens, _, _ in items], np.uint32),
            "counts": narrow(_concatenate([counts for _, counts, _ in items], np.int64)),
            "first_rows": _concatenate(
                [rows for _, _, rows in items if rows is not None], np.int64
            ),
            **({} if self.sample is None else self.sample.to_arrays()),
        }
        return pa.table({name: arrow_bytes([value.tobytes()]) for name, value in row.items()})

    def add(self, table: pa.Table, *, first_row: int = 0) -> None:
        """Add counts of other passes, one per table row. Their row numbers start at `first_row`."""
        for number in range(len(table)):
            self._add_row(
                {name: table.column(name)[number].as_buffer() for name in table.column_names},
                first_row,
            )

    def _add_row(self, buffers: dict[str, pa.Buffer], first_row: int) -> None:
        def read(name: str, dtype: Any = np.int64) -> np.ndarray:
            return np.frombuffer(buffers[name], dtype)

        self._distinct.clear()
        self.rows += int(read("rows")[0])
        self.dense_moments += read("dense").reshape(-1, 4)
        _merge_moments(self.exact_moments, buffers["exact"])
        _merge_moments(self.plain_moments, buffers["plain"])
        if self.sample is not None:
            num_dense = len(self.plain_moments)
            other = NumberSample.from_buffers(buffers, num_dense)
            self.sample.merge(other)
        for order, spans in zip(self.row_orders, json.loads(bytes(buffers["orders"])), strict=True):
            order.merge(spans, first_row)
        self.changes += read("changes")
        self.labels += read("labels")
        missing = read("missing").reshape(-1, 2)
        self.missing[:, 0] += missing[:, 0]
        present = missing[:, 0] > 0
        self.missing[present, 1] = np.minimum(
            self.missing[present, 1], missing[present, 1] + first_row
        )
        for name, value in json.loads(bytes(buffers["file_minimum"])).items():
            self._lower(name, value)
        sizes = read("sizes")
        if not sizes.sum():
            return
        tokens = read("tokens", self.tokens[0].dtype)
        counts = read(
            "counts",
            np.uint32 if len(buffers["counts"]) == 4 * len(tokens) else np.int64,
        )
        rows = read("first_rows") if self.tokens[0].first_rows else None
        for column, (size, stop) in enumerate(
            zip(sizes.tolist(), np.cumsum(sizes).tolist(), strict=True)
        ):
            for part in self._fitting(column, stop - size, stop):
                self.tokens[column].merge(
                    tokens[part],
                    counts[part],
                    None if rows is None else rows[part],
                    shift_rows=first_row,
                )

    def _fitting(self, column: int, start: int, stop: int) -> Iterator[slice]:
        """Yield the slices of [start, stop) that a column's table can take sequentially, with
        tables spilled in between.
        """
        if self.spill is None:
            yield slice(start, stop)
            return
        counter = self.tokens[column]
        longest = max(self.spill.table_bytes // 128, 1024)
        for low in range(start, stop, longest):
            high = min(low + longest, stop)
            grown = counter.num_bytes_with(high - low)
            # A growing table needs memory in addition to the old one.
            if grown > counter.num_bytes and self.table_bytes + grown > self.spill.table_bytes:
                self.spill.write(self.tokens)
            yield slice(low, high)


def _packed_moments(moments: Sequence[Moments]) -> np.ndarray:
    """Return the moments of each column as JSON, uint8 [bytes]."""
    stored = [each.to_json() for each in moments]
    text = json.dumps(stored)
    return np.frombuffer(text.encode(), np.uint8)


def _merge_moments(moments: Sequence[Moments], packed: pa.Buffer) -> None:
    """Add those of other rows, as `_packed_moments` returns them."""
    stored = json.loads(bytes(packed))
    for each, other in zip(moments, stored, strict=True):
        each.merge(Moments.from_json(other))


def add_logarithms(moments: np.ndarray, logarithms: np.ndarray) -> None:
    """Add float64 numbers to a row of Counts.dense_moments."""
    fixed = np.rint(logarithms * DENSE_UNITS).astype(np.int64)
    # Below 2^52. Their sum would overflow, so its upper and lower bits are added apart.
    squares = fixed * fixed
    low = squares & ((1 << DENSE_LOW_BITS) - 1)
    moments += (
        len(fixed),
        fixed.sum(),
        (squares >> DENSE_LOW_BITS).sum(),
        low.sum(),
    )


def mean_and_variance(moments: Sequence[int]) -> tuple[float, float]:
    """Return the mean and variance of a row of Counts.dense_moments, exact up to the division."""
    present, total, high, low = (int(value) for value in moments)
    squares = (high << DENSE_LOW_BITS) + low
    return total / (present * DENSE_UNITS), (present * squares - total * total) / (
        present * DENSE_UNITS
    ) ** 2


def find_problems(counts: Counts, inputs: Schema) -> list[str]:
    """Return sentences on problems of the counted rows: labels of one class, or columns in `inputs`
    without a value, other than those that files may lack.
    """
    problems = []
    if counts.rows and counts.labels.sum() and not counts.labels.all():
        only = int(np.flatnonzero(counts.labels)[0])
        problems.append(
            f"all {counts.rows:,} training rows have label {only}, so nothing can be learned; "
            "check the label column"
        )
    present = [*counts.present, *(counts.rows - counts.missing[:, 0])]
    empty = [
        name
        for name, values in zip((*inputs.dense, *inputs.sparse), present, strict=True)
        if not values and name not in inputs.optional
    ]
    if counts.rows and empty:
        problems.append(
            f"no training row has a value in {first_of(empty, 8)}; check these columns, or "
            "leave them out of the schema"
        )
    return problems


def find_trends(counts: Counts, inputs: Schema) -> list[str]:
    """Return sentences on columns in `inputs` that only grow or whose categories never return. Call
    it after `frequent_tokens` of spilled counts, which it would repeat.
    """
    warnings = [
        number_warning(name, order.trend)
        for name, order in zip(inputs.dense, counts.row_orders, strict=False)
        if order.trend is not None
    ]
    for number, name in enumerate(inputs.sparse):
        # Other columns add categories to a shared vocabulary.
        is_alone = inputs.vocabularies.count(inputs.vocabularies[number]) == 1
        if inputs.tokens == "hexadecimal" or name in inputs.lists or not is_alone:
            continue
        distinct = counts.num_distinct(number)
        # Every category has at least one change before it, and more if it returns.
        if distinct >= MIN_CATEGORIES and counts.changes[number] < distinct:
            warnings.append(category_warning(name))
    return warnings


def _concatenate(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


@lru_cache(maxsize=1)
def _small_logs() -> np.ndarray:
    table = np.empty(call("rayrec_num_small_logs"), np.int32)
    call("rayrec_small_logs", float(DENSE_UNITS), table)
    return table


class CountAccumulator:
    """Counts of a data task, packed when their tables grow large."""

    def __init__(self, counting: CountingJob) -> None:
        self._counting = counting
        self._counts = counting.empty()
        self._packed: list[pa.Table] = []

    def add(self, block: RawBlock, path: str, first_row: int) -> None:
        self._counts.add_source(block, path)
        self._counts.add_rows(self._counting.derivation.counted(block), first_row)
        if self._counts.table_bytes > _TASK_TABLE_BYTES:
            self._packed.append(self._counts.to_table())
            self._counts = self._counting.empty()

    def table(self) -> pa.Table:
        return pa.concat_tables([*self._packed, self._counts.to_table()])


def count_parts(parts: Sequence[SegmentRange], *, counting: CountingJob) -> pa.Table:
    """Count the rows of some segments in a data task. Returns one row of `Counts.to_table`, or more
    if tables grow large.
    """
    keep_freed_memory()
    packer = CountAccumulator(counting)
    for part in parts:
        block = read_raw([part.segment], counting.schema).cut(part.start, part.stop)
        packer.add(block, part.segment.path, part.segment.first_row + part.start)
    return packer.table()


def count_log(
    counting: CountingJob,
    parts: Sequence[SegmentRange],
    *,
    engine: Engine,
    memory_bytes: int | None = None,
    spill_folder: str | None = None,
    task_bytes: int = TASK_BYTES,
    progress: Callable[[int], None] | None = None,
    into: Counts | None = None,
) -> Counts:
    """Count the given rows in one pass of data tasks that pre-aggregate. `progress` receives the
    number of counted rows. `into` are counts of other rows to add to. Tables that together exceed
    `memory_bytes` (None: `default_memory_bytes()`) are spilled to a file in `spill_folder` (None:
    the folder for temporary files) and read back later; the result is the same. Close the Counts to
    free that file. Raises InputError if rows are missing, or if the disk is full.
    """
    total = counting.total(memory_bytes, spill_folder) if into is None else into

    def size_of(part: SegmentRange) -> int:
        size = part.segment.stop - part.segment.start
        return size if part.segment.format == "text" else size * _ROW_BYTES

    tasks = group_tasks(parts, size_of, task_bytes)
    try:
        for table in engine.run("count", functools.partial(count_parts, counting=counting), tasks):
            total.add(table)
            if progress:
                progress(total.rows)
    except BaseException:
        total.close()
        raise
    return total


_ROW_BYTES = 256
"""Assumed size of a table row, about that of one in Criteo's text."""
_MIN_TASKS = 16
_MIN_TASK_BYTES = 24 << 20
"""Minimum number of tasks for a short log, and their minimum size. More tasks use all cores; each
costs about 25 ms.
"""


def group_tasks(
    items: Sequence[_Item], size_of: Callable[[_Item], int], task_bytes: int
) -> list[list[_Item]]:
    """Combine neighbouring items into tasks."""
    balanced_bytes = max(sum(map(size_of, items)) // _MIN_TASKS, _MIN_TASK_BYTES)
    return grouped(items, size_of, max_bytes=min(balanced_bytes, task_bytes), overflows=True)


def _index_and_count(
    chunks: Sequence[tuple[Chunk, tuple[int, int]]],
    *,
    counting: CountingJob,
    segment_bytes: int,
) -> pa.Table:
    """Index chunks in a data task, and count segments within bytes [start, stop) of the file. Rows
    are numbered from 0.
    """
    keep_freed_memory()
    packer = CountAccumulator(counting)
    entries = []
    total = Faults()
    rows = 0
    counted = []
    for chunk, (start, stop) in chunks:
        for entry, faults, raw in parsed_segments(chunk, counting.schema, segment_bytes):
            entries.append(entry)
            total.add(faults)
            if start <= entry.start and entry.stop <= stop:
                packer.add(raw, entry.path, rows)
                counted += [rows, rows + raw.rows]
            rows += raw.rows
    table = packer.table()
    result = {
        "entries": entries,
        "faults": total.to_dict(),
        "counted": [min(counted), max(counted)] if counted else None,
    }
    return table.append_column("reply", arrow_texts([json.dumps(result), *[""] * (len(table) - 1)]))


_MARGIN: Final = 0.03
"""Fraction of a log left uncounted at estimated borders of the chosen rows, which only the index
determines exactly.
"""


@dataclass
class _PartialCounts:
    """Counts from the pass that indexed the log."""

    counts: Counts
    rows: list[int] = field(default_factory=list)
    """First and last rows, exclusive, of the counted ranges, which together are one range."""


# Which rows are counted is known only with the index, and that needs the same pass over the log:
#
#   guess    bytes of each file that surely belong to the chosen rows: estimated, minus a margin
#   pass     index all, count the segments inside the guess
#   after    index known: count what is missing at both borders; if the guess was wrong, all
@final
class CountingIndexer:
    """Indexer of a text log that counts most of the chosen rows in the same pass. Must be closed.
    Only the index determines the chosen rows exactly, so the pass estimates them from file sizes.
    `counts` adds missed rows, or counts again if too many.
    """

    def __init__(
        self,
        counting: CountingJob,
        rows_of: Callable[[LogIndex], tuple[int, int]],
        *,
        memory_bytes: int | None = None,
        task_bytes: int = TASK_BYTES,
    ) -> None:
        """Create an indexer. `rows_of` returns the rows [start, stop) of an index to count."""
        self._counting = counting
        self._chosen = rows_of
        self._memory_bytes = memory_bytes
        self._task_bytes = task_bytes
        self._partial: _PartialCounts | None = None

    @property
    def schema(self) -> Schema:
        """Schema of the counted rows, after `counts` with the constants of its formulas."""
        return self._counting.schema

    def index(
        self,
        files: Sequence[storage.File],
        schema: Schema,
        *,
        segment_bytes: int,
        context: TaskContext,
    ) -> LogIndex:
        """Index like `index_log`; counts nothing if the index is cached."""
        assert schema == self._counting.schema
        self.close()

        def run() -> Iterable[pa.Table]:
            range_of = dict(zip([file.path for file in files], self._guess(files), strict=True))
            chunks = [
                (chunk, range_of[chunk.path])
                for chunk in cut(files, max(CHUNK_BYTES, segment_bytes))
            ]
            tasks = group_tasks(
                chunks,
                lambda ranged: ranged[0].stop - ranged[0].start,
                self._task_bytes,
            )
            function = functools.partial(
                _index_and_count,
                counting=self._counting,
                segment_bytes=segment_bytes,
            )
            self._partial = _PartialCounts(self._counting.total(self._memory_bytes, None))
            return context.engine.run("index and count", function, tasks)

        try:
            return index_with(
                run,
                files,
                schema,
                segment_bytes=segment_bytes,
                context=context,
                consume=self._consume,
            )
        except BaseException:
            self.close()
            raise

    def _consume(self, table: pa.Table, reply: Mapping[str, Any], first_row: int) -> None:
        assert self._partial is not None
        self._partial.counts.add(table, first_row=first_row)
        self._partial.rows += [first_row + row for row in reply["counted"] or ()]

    def _guess(self, files: Sequence[storage.File]) -> list[tuple[int, int]]:
        """Return the bytes [start, stop) of each file with chosen rows only, assuming equally long
        rows, minus a margin.
        """
        sizes = numbered(
            SegmentEntry(file.path, 0, file.size_bytes, file.size_bytes) for file in files
        )
        try:
            start, stop = self._chosen(LogIndex(sizes, Faults()))
        except InputError:  # From the estimate; the index is checked later
            return [(0, 0)] * len(files)
        borders = {size.first_row for size in sizes} | {
            size.first_row + size.rows for size in sizes
        }
        margin = int(sum(size.rows for size in sizes) * _MARGIN)
        start += 0 if start in borders else margin
        stop -= 0 if stop in borders else margin
        return [
            (
                max(start - size.first_row, 0),
                min(max(stop - size.first_row, 0), size.rows),
            )
            for size in sizes
        ]

    def counts(
        self,
        index: LogIndex,
        *,
        engine: Engine,
        progress: Callable[[int], None] | None = None,
    ) -> Counts:
        """Return counts of the chosen rows, to be closed by the caller. See `count_log` for the
        arguments. Formulas are fitted to these rows first.
        """
        start, stop = self._chosen(index)
        fitted = fit(self.schema, index, (start, stop), engine)
        self._counting = replace(self._counting, schema=fitted)
        counts = None
        missing = [(start, stop)]
        if self._partial is not None:
            counts = self._partial.counts
            low = min(self._partial.rows, default=0)
            high = max(self._partial.rows, default=0)
            assert counts.rows == high - low
            self._partial = None
            missing = [(start, low), (high, stop)]
            if not start <= low <= high <= stop:  # The guess was wrong
                counts.close()
                counts = None
                missing = [(start, stop)]
        parts = [part for low, high in missing for part in index.parts(low, high)]
        count = functools.partial(
            count_log,
            memory_bytes=self._memory_bytes,
            task_bytes=self._task_bytes,
        )
        return count(self._counting, parts, engine=engine, progress=progress, into=counts)

    def close(self) -> None:
        """Free unused counts."""
        if self._partial is not None:
            self._partial.counts.close()
            self._partial = None

    def __enter__(self) -> CountingIndexer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
