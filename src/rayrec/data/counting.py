"""Counts every category and the dense columns' moments in one distributed pass, and makes a Preprocessor of them."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.config import Config, InputError
from rayrec.data.log import read_segments
from rayrec.data.parsing import RawRows
from rayrec.data.placement import TaskPlacement
from rayrec.data.position import Part
from rayrec.data.preprocessor import FIRST_ID, CDenseColumn, DenseColumn, Preprocessor, SparseColumn
from rayrec.data.ray_tasks import tables, tasks_dataset
from rayrec.native import keep_freed_memory, library
from rayrec.schema import Schema


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(Config):
    """How categories become ids."""

    min_count: int = 2
    """Categories seen less often than this share the out-of-vocabulary id."""
    max_num_embeddings: int | None = None
    """A column needing more rows than this gives up its vocabulary and maps tokens modulo this size; None: no cap."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_count < 1:
            raise InputError(f"min_count: {self.min_count} must be at least 1")
        if self.max_num_embeddings is not None and self.max_num_embeddings <= FIRST_ID:
            raise InputError(f"max_num_embeddings: {self.max_num_embeddings} must be above {FIRST_ID}")


class TokenCounter:
    """Counts of one column's tokens in a growing open-addressing table."""

    def __init__(self, slots: int = 1024) -> None:
        self.used = 0
        self._keys = np.zeros(slots, np.uint32)
        self._counts = np.zeros(slots, np.int64)

    def count(self, raw: RawRows, column: int) -> None:
        """Adds the present tokens of sparse column number `column`."""
        tokens, done = raw.tokens, 0
        num_sparse, bit = tokens.shape[1], len(raw.schema.dense) + column
        while True:
            result = _kernel("rayrec_count_column")(
                ctypes.c_void_p(tokens[done:].ctypes.data + 4 * column),
                ctypes.c_void_p(raw.missing[done:].ctypes.data),
                ctypes.c_int64(raw.rows - done),
                ctypes.c_int64(num_sparse),
                ctypes.c_int32(bit),
                *self._table(),
            )
            if result >= 0:
                self.used = result
                return
            done += -result - 1
            self._grow()

    def merge(self, tokens: np.ndarray, amounts: np.ndarray) -> None:
        """Adds tokens (uint32) with their counts (int64)."""
        done = 0
        while True:
            result = _kernel("rayrec_count_merge")(
                ctypes.c_void_p(tokens[done:].ctypes.data),
                ctypes.c_void_p(amounts[done:].ctypes.data),
                ctypes.c_int64(len(tokens) - done),
                *self._table(),
            )
            if result >= 0:
                self.used = result
                return
            done += -result - 1
            self._grow()

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens uint32, counts int64), in no particular order."""
        used = np.flatnonzero(self._counts)
        return self._keys[used], self._counts[used]

    def _table(self) -> tuple[Any, ...]:
        return (
            ctypes.c_void_p(self._keys.ctypes.data),
            ctypes.c_void_p(self._counts.ctypes.data),
            ctypes.c_int64(len(self._keys)),
            ctypes.c_int64(self.used),
        )

    def _grow(self) -> None:
        tokens, counts = self.items()
        slots = len(self._keys) * 4
        self._keys, self._counts, self.used = np.zeros(slots, np.uint32), np.zeros(slots, np.int64), 0
        self.merge(tokens, counts)


def _kernel(name: str) -> Any:
    function = getattr(library(), name)
    function.restype = ctypes.c_int64
    return function


@dataclass
class Counts:
    """What one pass over some rows found."""

    rows: int
    tokens: list[TokenCounter]
    dense_moments: np.ndarray
    """int64 (num_dense, 4): present values, sum of q, and of q * q its upper and lower part (see _LOW_BITS), where
    q = sign(x) ln(1 + |x|) in units of 1 / _UNITS. Integer sums come out the same in any grouping and order."""

    @classmethod
    def empty(cls, schema: Schema) -> Counts:
        return cls(0, [TokenCounter() for _ in schema.sparse], np.zeros((len(schema.dense), 4), np.int64))

    def to_table(self) -> pa.Table:
        """One row of binary columns: compact, and read back without a copy."""
        items = [counter.items() for counter in self.tokens]
        row = {
            "rows": np.array([self.rows], np.int64),
            "sizes": np.array([len(tokens) for tokens, _ in items], np.int64),
            "tokens": np.concatenate([tokens for tokens, _ in items]) if items else np.zeros(0, np.uint32),
            "counts": np.concatenate([counts for _, counts in items]) if items else np.zeros(0, np.int64),
            "dense": self.dense_moments,
        }
        return pa.table({name: pa.array([value.tobytes()], pa.large_binary()) for name, value in row.items()})

    def add(self, table: pa.Table) -> None:
        """Adds what another pass found."""
        value = {name: np.frombuffer(table.column(name)[0].as_buffer(), dtype) for name, dtype in _TABLE_DTYPES.items()}
        self.rows += int(value["rows"][0])
        self.dense_moments += value["dense"].reshape(self.dense_moments.shape)
        ends = np.cumsum(value["sizes"])
        for counter, size, end in zip(self.tokens, value["sizes"], ends, strict=True):
            counter.merge(value["tokens"][end - size : end], value["counts"][end - size : end])


_TABLE_DTYPES = {"rows": np.int64, "sizes": np.int64, "tokens": np.uint32, "counts": np.int64, "dense": np.int64}


def count_parts(parts: Sequence[Part], *, schema: Schema) -> pa.Table:
    """Counts the rows of some segments; runs in a data task."""
    keep_freed_memory()
    counts = Counts.empty(schema)
    for part in parts:
        raw = read_segments([part.segment], schema)
        if (part.start, part.stop) != (0, part.segment.rows):
            keep = slice(part.start, part.stop)
            raw.rows = part.stop - part.start
            raw.integers, raw.tokens, raw.missing = raw.integers[keep], raw.tokens[keep], raw.missing[keep]
        counts.rows += raw.rows
        for column, counter in enumerate(counts.tokens):
            counter.count(raw, column)
        counts.dense_moments += _dense_moments(raw)
    return counts.to_table()


_UNITS = 1 << 20
_LOW_BITS = 26
"""|q| is below 2^26 (ln 10^18 = 41.4), so each sum has room for 2^37 rows."""


def _dense_moments(raw: RawRows) -> np.ndarray:
    plain = CDenseColumn(0.0, 1.0, 0.0, 0.0)
    moments = np.zeros((raw.integers.shape[1], 4), np.int64)
    for column in range(len(moments)):
        present = (raw.missing[: raw.rows] >> np.uint64(column)) & np.uint64(1) == 0
        values = np.ascontiguousarray(raw.integers[: raw.rows, column][present])
        transformed = np.empty(len(values), np.float32)
        library().rayrec_transform_dense(
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_int64(len(values)),
            ctypes.byref(plain),
            ctypes.c_void_p(transformed.ctypes.data),
        )
        fixed = np.rint(transformed.astype(np.float64) * _UNITS).astype(np.int64)
        squares = fixed * fixed
        low = squares & ((1 << _LOW_BITS) - 1)
        moments[column] = len(fixed), fixed.sum(), (squares >> _LOW_BITS).sum(), low.sum()
    return moments


def count_log(
    schema: Schema,
    parts: Sequence[Part],
    *,
    placement: TaskPlacement,
    parts_per_task: int,
    progress: Callable[[int], None] | None = None,
) -> Counts:
    """Counts the chosen rows in one pass of Ray Data tasks, each pre-aggregating its own; `progress` gets rows done."""
    tasks = [parts[i : i + parts_per_task] for i in range(0, len(parts), parts_per_task)]
    dataset = tasks_dataset("count", functools.partial(count_parts, schema=schema), tasks, placement=placement)
    total = Counts.empty(schema)
    for table in tables(dataset):
        for row in range(len(table)):
            total.add(table.slice(row, 1))
            if progress:
                progress(total.rows)
    return total


def make_preprocessor(profile: str, schema: Schema, counts: Counts, config: VocabularyConfig) -> Preprocessor:
    """Turns counts into a Preprocessor: ids by falling count then rising token, so they depend on the rows alone."""
    sparse, kept = [], []
    for counter in counts.tokens:
        tokens, amounts = counter.items()
        frequent = amounts >= config.min_count
        tokens, amounts = tokens[frequent], amounts[frequent]
        size = FIRST_ID + len(tokens)
        if config.max_num_embeddings is not None and size > config.max_num_embeddings:
            sparse.append(SparseColumn(config.max_num_embeddings, None))
            continue
        sparse.append(SparseColumn(size, len(tokens)))
        kept.append(tokens[np.lexsort((tokens, -amounts))])
    dense = []
    for present, total, high, low in counts.dense_moments.tolist():
        if not present:
            dense.append(DenseColumn(mean=0.0, scale=1.0))
            continue
        mean = total / (present * _UNITS)
        squares = (high << _LOW_BITS) + low
        variance = (present * squares - total * total) / (present * _UNITS) ** 2  # exact up to the division
        scale = 1.0 / math.sqrt(variance) if variance > 1e-12 else 1.0
        # A missing count is taken for none, as every Criteo pipeline does: the same input as 0.
        dense.append(DenseColumn(mean=mean, scale=scale, missing_value=float(np.float32(-mean * scale))))
    return Preprocessor.build(
        profile=profile,
        schema=schema,
        dense=dense,
        sparse=sparse,
        tokens=np.concatenate(kept) if kept else np.zeros(0, np.uint32),
        constants={"min_count": config.min_count, "max_num_embeddings": config.max_num_embeddings, "rows": counts.rows},
    )
