"""Exact statistics of log rows for the data report. Can be merged in any grouping and order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa

from rayrec.data.arrow import arrow_bytes
from rayrec.data.encoded_rows import JaggedIds
from rayrec.data.encoding.counts import add_logarithms
from rayrec.data.encoding.encoder import build_slots, find_ids, num_slots
from rayrec.data.encoding.rules import DenseColumn
from rayrec.data.raw_block import RawBlock
from rayrec.schema import Schema

TOP = 100
"""Number of categories of a column that drift compares individually. The others count as one."""
DECILES = 10
_FINER = 4
"""Number of parts of a decile for predicting the label."""
_NUM_PARTS = 16
"""Number of parts of the log, in row order, whose limits reveal a column that only grows."""
_BUCKET_BITS = 11
_BUCKETS = 1 << _BUCKET_BITS
"""Number of hash groups of the categories after the top ones, for predicting the label."""
_DENSE_CODES = DECILES * _FINER + 1
_SPARSE_CODES = TOP + _BUCKETS + 1
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


@dataclass(frozen=True)
class StatsJob:
    """Parameters of `ColumnStats`, sent to the tasks."""

    schema: Schema
    num_slices: int
    edges: np.ndarray
    """Quantiles of the first slice, see `quantile_edges`, float64 [num_dense, DECILES * _FINER -
    1].
    """
    top: tuple[np.ndarray, ...]
    """Most frequent categories of each sparse column, each uint64 [at most TOP]."""
    hash_shift: int = 0
    """Keeps one in 2^hash_shift of the row hashes."""
    rules: tuple[DenseColumn, ...] = ()
    """Rules of a Preprocessor for the dense columns, whose bounds are checked. Empty without
    one.
    """
    num_rows: int = 1
    """Number of rows of the log."""


@dataclass
class ColumnStats:
    """Statistics of rows. A slice is a file, or another row range that is compared with others."""

    rows: np.ndarray
    """Rows per slice, int64 [num_slices]."""
    clicks: np.ndarray
    """Clicks per slice, int64 [num_slices]."""
    missing: np.ndarray
    """Rows without a value, int64 [num_slices, num_dense + num_sparse]."""
    dense_bins: np.ndarray
    """Rows by decile of the first slice, then missing, int64 [num_slices, num_dense, DECILES +
    1].
    """
    sparse_bins: np.ndarray
    """Values by top category, then all others, then rows without a value, int64 [num_slices,
    num_sparse, TOP + 2].
    """
    signs: np.ndarray
    """Counts of negative and zero values, weight last, int64 [num_dense + 1, 2]."""
    moments: np.ndarray
    """Moments as in Counts.dense_moments, of sign(x) ln(1 + |x|) in float64, int64 [num_dense,
    4].
    """
    dense_outcomes: np.ndarray
    """Rows by fortieth and label + 2 * held out, int64 [num_dense, _DENSE_CODES, 4]."""
    sparse_outcomes: np.ndarray
    """Rows by top category, hash group or missing, and label + 2 * held out, int64 [num_sparse,
    _SPARSE_CODES, 4].
    """
    limits: np.ndarray
    """Minimum and negated maximum, infinite without values, weight last, float64 [num_dense + 1,
    2].
    """
    part_limits: np.ndarray
    """Minimum and negated maximum of each sixteenth of the log, infinite without values, float64
    [_NUM_PARTS, num_dense, 2].
    """
    clipped: np.ndarray
    """Number of values beyond the bounds of `StatsJob.rules`, int64 [num_dense]."""
    hashes: np.ndarray
    """Row hashes in no particular order, uint64."""

    @classmethod
    def empty(cls, job: StatsJob) -> ColumnStats:
        num_dense = len(job.schema.dense)
        num_sparse = len(job.schema.sparse)
        slices = job.num_slices
        return cls(
            rows=np.zeros(slices, np.int64),
            clicks=np.zeros(slices, np.int64),
            missing=np.zeros((slices, num_dense + num_sparse), np.int64),
            dense_bins=np.zeros((slices, num_dense, DECILES + 1), np.int64),
            sparse_bins=np.zeros((slices, num_sparse, TOP + 2), np.int64),
            signs=np.zeros((num_dense + 1, 2), np.int64),
            moments=np.zeros((num_dense, 4), np.int64),
            dense_outcomes=np.zeros((num_dense, _DENSE_CODES, 4), np.int64),
            sparse_outcomes=np.zeros((num_sparse, _SPARSE_CODES, 4), np.int64),
            limits=np.full((num_dense + 1, 2), np.inf),
            part_limits=np.full((_NUM_PARTS, num_dense, 2), np.inf),
            clipped=np.zeros(num_dense, np.int64),
            hashes=np.zeros(0, np.uint64),
        )

    def to_table(self) -> pa.Table:
        """Serialize into one row of binary columns."""
        names = [field.name for field in fields(self)]
        return pa.table({name: arrow_bytes([getattr(self, name).tobytes()]) for name in names})

    def add(self, table: pa.Table) -> np.ndarray:
        """Add statistics of other rows from `to_table`, except for their hashes (uint64), which are
        returned.
        """
        buffers = {name: table.column(name)[0].as_buffer() for name in table.column_names}
        for name, buffer in buffers.items():
            array = getattr(self, name)
            if name in ("limits", "part_limits"):
                np.minimum(array, np.frombuffer(buffer, np.float64).reshape(array.shape), out=array)
            elif name != "hashes":
                array += np.frombuffer(buffer, np.int64).reshape(array.shape)
        return np.frombuffer(buffers["hashes"], np.uint64)

    def count(self, block: RawBlock, job: StatsJob, slice_number: int, first_row: int) -> None:
        """Add rows of one slice, starting at `first_row` of the log."""
        schema = block.schema
        labels = block.labels.get(block.schema.label or "")
        outcome = np.zeros(block.rows, np.int64) if labels is None else labels.astype(np.int64)
        self.rows[slice_number] += block.rows
        self.clicks[slice_number] += outcome.sum()
        numbers = np.arange(first_row, first_row + block.rows, dtype=np.int64).view(np.uint64)
        outcome += 2 * (_mixed(numbers) >> np.uint64(62) == 0)  # a quarter is held out
        for d, name in enumerate(schema.dense):
            values = block.numbers[:, d].astype(np.float64)  # integers beyond 2^53 are rounded
            self._count_dense(d, values, block.is_missing(name), outcome, job, slice_number)
            self._count_order(d, values, block.is_missing(name), job, first_row)
        for s, name in enumerate(schema.sparse):
            self._count_sparse(
                s, block.column(name), block.is_missing(name), outcome, job, slice_number
            )
        if block.weights is not None:
            self._count_range(-1, block.weights.astype(np.float64))
        hashes = row_hashes(block)
        if job.hash_shift:
            hashes = hashes[hashes >> np.uint64(64 - job.hash_shift) == 0]
        self.hashes = np.concatenate([self.hashes, hashes])

    def _count_range(self, index: int, present: np.ndarray) -> None:
        if len(present):
            self.signs[index] += np.count_nonzero(present < 0), np.count_nonzero(present == 0)
            self.limits[index] = np.minimum(self.limits[index], (present.min(), -present.max()))

    def _count_dense(
        self,
        d: int,
        values: np.ndarray,
        missing: np.ndarray,
        outcome: np.ndarray,
        job: StatsJob,
        number: int,
    ) -> None:
        present = values[~missing]
        self.missing[number, d] += len(values) - len(present)
        self._count_range(d, present)
        if job.rules and job.rules[d].lower is not None:
            inputs = job.rules[d].apply(present)
            self.clipped[d] += np.count_nonzero(
                (inputs <= job.rules[d].lower) | (inputs >= job.rules[d].upper)
            )
        add_logarithms(self.moments[d], np.copysign(np.log1p(np.abs(present)), present))
        codes = np.searchsorted(job.edges[d], values)
        codes[missing] = _DENSE_CODES - 1
        table = _table(codes, outcome, _DENSE_CODES)
        self.dense_outcomes[d] += table
        by_code = table.sum(axis=1)
        self.dense_bins[number, d, :DECILES] += by_code[:-1].reshape(DECILES, _FINER).sum(axis=1)
        self.dense_bins[number, d, DECILES] += by_code[-1]

    def _count_order(
        self, d: int, values: np.ndarray, missing: np.ndarray, job: StatsJob, first_row: int
    ) -> None:
        present = np.flatnonzero(~missing)
        if not len(present):
            return
        parts = (first_row + present) * _NUM_PARTS // job.num_rows
        starts = np.flatnonzero(np.diff(parts, prepend=-1))
        limits = self.part_limits[parts[starts], d]
        extremes = np.stack(
            [
                np.minimum.reduceat(values[present], starts),
                -np.maximum.reduceat(values[present], starts),
            ],
            axis=1,
        )
        self.part_limits[parts[starts], d] = np.minimum(limits, extremes)

    def _count_sparse(
        self,
        s: int,
        column: np.ndarray | JaggedIds,
        missing: np.ndarray,
        outcome: np.ndarray,
        job: StatsJob,
        number: int,
    ) -> None:
        tokens = (column.values if isinstance(column, JaggedIds) else column).astype(np.uint64)
        self.missing[number, len(job.schema.dense) + s] += np.count_nonzero(missing)
        codes = find_ids(tokens, _slots(job.top[s]), -1).astype(np.int64)
        rest = TOP + (tokens * _MIX[0] >> np.uint64(64 - _BUCKET_BITS)).astype(np.int64)
        codes = np.where(codes < 0, rest, codes)
        if not isinstance(column, JaggedIds):
            codes[missing] = _SPARSE_CODES - 1
        else:  # one entry for each value, and one for each row without values
            codes = np.concatenate([codes, np.full(np.count_nonzero(missing), _SPARSE_CODES - 1)])
            outcome = np.concatenate([np.repeat(outcome, column.lengths), outcome[missing]])
        table = _table(codes, outcome, _SPARSE_CODES)
        self.sparse_outcomes[s] += table
        by_code = table.sum(axis=1)
        self.sparse_bins[number, s, :TOP] += by_code[:TOP]
        self.sparse_bins[number, s, TOP:] += by_code[TOP:-1].sum(), by_code[-1]


def _table(codes: np.ndarray, outcome: np.ndarray, num_codes: int) -> np.ndarray:
    return np.bincount(codes * 4 + outcome, minlength=num_codes * 4).reshape(num_codes, 4)


def _slots(tokens: np.ndarray) -> np.ndarray:
    slots = np.zeros((num_slots(len(tokens)), 2), np.uint64)
    distinct = build_slots(tokens, np.arange(len(tokens), dtype=np.int32), slots)
    assert distinct
    return slots


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return mixed copies of uint64 values (the finalizer of splitmix64, shortened)."""
    mixed = values * _MIX[0]
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIX[1]
    mixed ^= mixed >> np.uint64(29)
    return mixed


def row_hashes(block: RawBlock) -> np.ndarray:
    """Hash all values of each row, including label and weight, with a collision probability of
    2^-64, uint64 [rows].
    """
    hashes = np.zeros(block.rows, np.uint64)
    salt = 0

    def add(values: np.ndarray, missing: np.ndarray | None) -> None:
        nonlocal salt
        salt += 1
        mixed = _mixed(values + _mixed(np.array([salt], np.uint64)))
        if missing is not None:
            mixed[missing] = 0
        np.add(hashes, mixed, out=hashes)

    for d, name in enumerate(block.schema.dense):
        # normalizes -0.0; integers beyond 2^53 are rounded
        values = block.numbers[:, d].astype(np.float64) + 0.0
        add(values.view(np.uint64), block.is_missing(name))
    for name in block.schema.sparse:
        column = block.column(name)
        missing = block.is_missing(name)
        if not isinstance(column, JaggedIds):
            add(column.astype(np.uint64), missing)
            continue
        ends = np.cumsum(column.lengths, dtype=np.int64)
        starts = ends - column.lengths
        index = np.arange(len(column.values), dtype=np.int64) - np.repeat(starts, column.lengths)
        values = np.concatenate(
            [
                [np.uint64(0)],
                np.cumsum(_mixed(column.values ^ _mixed(index.view(np.uint64) + _MIX[1]))),
            ]
        )
        add(values[ends] - values[starts], missing)
    label = block.labels.get(block.schema.label or "")
    if label is not None:
        add(label.astype(np.uint64), None)
    if block.weights is not None:
        add(block.weights.astype(np.float64).view(np.uint64), None)
    return _mixed(hashes)


def quantile_edges(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return quantiles of each column's present values, ascending, every _FINER-th a decile, 0
    without values, float64 [num_dense, DECILES * _FINER - 1].
    """
    fractions = np.arange(1, DECILES * _FINER) / (DECILES * _FINER)
    edges = [
        np.quantile(x, fractions, method="inverted_cdf") if len(x) else np.zeros(len(fractions))
        for x in columns
    ]
    return np.array(edges, np.float64).reshape(-1, len(fractions))
