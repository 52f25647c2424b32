"""Encoder of raw blocks by a Preprocessor's rules: derived columns, lookup tables, kernels, and
bags of synthetic ids.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from rayrec.config import Config, InputError
from rayrec.data.encoded_rows import EncodedRows, Ids, JaggedIds, expand_ranges
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.data.logs.index import resolve_source
from rayrec.data.logs.text_parser import MAX_LINE_BYTES, CLayout, CRawRows
from rayrec.data.raw_block import RawBlock
from rayrec.native import c_fields, call
from rayrec.schema import Schema


def file_key(path: str) -> str:
    """Return the key of a file's constants, independent of its folder and compression."""
    return resolve_source(path)[1].removesuffix(".gz").removesuffix(".parquet")


def indicator_names(columns: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Return the names of the indicator inputs of dense columns: `age is missing` for age, with a
    star if the log has such a column.
    """
    names: list[str] = []
    for column in columns:
        name = f"{column} is missing"
        while name in schema.columns or name in names:
            name += "*"
        names.append(name)
    return tuple(names)


@dataclass(frozen=True)
class Derivation:
    """Derivation of a model's input columns; the log's columns unchanged for most presets."""

    buckets: bool = False
    """Whether to convert integers to categories, before the others: floor(ln(x)^2) for x > 2, else
    x, plus 2^31 to sort like the numbers. 0 is missing (the rule of FuxiCTR on Criteo_x4).
    """
    modulo: int | None = None
    """Modulo applied to categories before counting. None: no modulo."""
    file_minimum: dict[str, int] | None = None
    """Smallest integer of each file by `file_key`, "" for others, subtracted from its integers; a
    missing one is 0.
    """
    indicators: tuple[str, ...] = ()
    """Dense columns with an additional input that is 1 if their value is missing."""

    def inputs(self, schema: Schema) -> Schema:
        """Return the derived columns: numbers, then their indicators, and categories."""
        schema = schema.computed()
        if self.buckets:
            return schema.replace(dense=(), sparse=schema.dense + schema.sparse)
        if self.indicators:
            return schema.replace(dense=schema.dense + indicator_names(self.indicators, schema))
        return schema

    def counted(self, block: RawBlock) -> RawBlock:
        """Return the counted columns of rows."""
        block = self._bucketed(block) if self.buckets else block
        if self.modulo is None:
            return block
        return replace(
            block, categories=block.categories % block.categories.dtype.type(self.modulo)
        )

    def from_minimum(self, block: RawBlock) -> RawBlock:
        """Return the rows with the integers that the Encoder takes. The Encoder converts them to
        categories itself.
        """
        if self.file_minimum is None:
            return block
        numbers = block.numbers.copy()
        for path, start, stop in block.files or (("", 0, block.rows),):
            # 0 if missing
            numbers[start:stop] -= self.file_minimum.get(file_key(path), self.file_minimum[""])
        return replace(
            block,
            numbers=numbers,
            missing=block.missing & ~np.uint64((1 << len(block.schema.dense)) - 1),
        )

    def applied(self, block: RawBlock) -> RawBlock:
        """Return the model's input columns."""
        block = self.from_minimum(block)
        return self._bucketed(block) if self.buckets else block

    def _bucketed(self, block: RawBlock) -> RawBlock:
        num_dense = block.numbers.shape[1]
        num_sparse = block.categories.shape[1]
        categories = np.empty((block.rows, num_dense + num_sparse), np.uint32)
        numbers = np.ascontiguousarray(block.numbers)
        columns = num_dense + num_sparse
        call("rayrec_bucket_integers", numbers, block.rows, categories, num_dense, columns)
        categories[:, num_dense:] = block.categories
        missing = block.missing.copy()
        # 0 means missing; the parser stores it for a missing number
        for column in range(num_dense):
            missing |= (block.numbers[:, column] == 0).astype(np.uint64) << np.uint64(column)
        # The mask's bits stay in place: dense columns precede sparse ones there too.
        numbers = np.empty((block.rows, 0), np.int64)
        return replace(
            block,
            schema=self.inputs(block.schema),
            numbers=numbers,
            categories=categories,
            missing=missing,
        )


MLPERF_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids per row in each of Criteo's 26 columns in MLPerf's DLRM-DCNv2 benchmark; 214 in total."""


@dataclass(frozen=True, kw_only=True)
class MultiHot(Config):
    """Bags like MLPerf's DLRM-DCNv2 (torchrec_dlrm's materialize_synthetic_multihot_dataset): id i
    is expanded to the bag [i, h - 1 random ids], always the same ones.

    The random ids are a function of (seed, column, id, position), so no table of them is needed:
    the original's takes 24 GB. Distributions and sizes equal the original's, the individual ids
    differ.
    """

    sizes: tuple[int, ...] = MLPERF_SIZES
    """Ids per row in each sparse column."""
    distribution: Literal["uniform", "pareto"] = "uniform"
    """Distribution of ids. uniform: over the table; pareto: (1 - u)^-4 - 1 in 32 bits, modulo table
    size (NumPy, a = 0.25).
    """
    seed: int = 0
    """Seed of the random ids."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes or min(self.sizes) < 1:
            raise InputError(f"multi_hot.sizes: must be 1 or more each, got {self.sizes}")

    def expand(self, ids: Sequence[np.ndarray], num_embeddings: Sequence[int]) -> list[np.ndarray]:
        """Expand each column's ids [rows] to [rows, size], unchanged if the size is 1; the dtype
        stays.
        """
        return [
            column if size == 1 else self._expand_column(number, column, size, rows)
            for number, (column, size, rows) in enumerate(
                zip(ids, self.sizes, num_embeddings, strict=True)
            )
        ]

    def _expand_column(
        self, number: int, ids: np.ndarray, size: int, num_embeddings: int
    ) -> np.ndarray:
        ids = np.ascontiguousarray(ids)
        out = np.empty((len(ids), size), ids.dtype)
        seed = ctypes.c_uint64(self.seed & (2**64 - 1))
        pareto = ctypes.c_int32(self.distribution == "pareto")
        call(
            "rayrec_expand_bags",
            ids,
            len(ids),
            ids.itemsize,
            size,
            num_embeddings,
            seed,
            number,
            pareto,
            out,
        )
        return out


# In the order of rayrec_dense_kind in native/kernels.h
DENSE_KINDS = ("signed_log", "log", "identity")


# Mirror of rayrec_sparse_column in native/kernels.h. `slots` points into the array of the column's
# lookup table, or is NULL for a hashed column. The Encoder owns both as long as it exists, so it
# cannot be pickled.
class CSparseColumn(ctypes.Structure):
    _fields_ = c_fields(
        "void* slots; int64 num_slots; uint64 modulo; int64 base missing_id unknown_id hash; "
        "uint32 token_modulo; int32 padding"
    )


# Mirror of rayrec_dense_column in native/kernels.h. Plain values, without a pointer.
class CDenseColumn(ctypes.Structure):
    _fields_ = c_fields(
        "int64 kind lowest; double shift mean mean_low scale; float missing_value lower upper; "
        "int32 bounded"
    )


def c_dense_column(column: DenseColumn) -> CDenseColumn:
    """Return the kernels' view of a dense column."""
    constants = (column.shift, column.mean, column.mean_low, column.scale, column.missing_value)
    bounded = column.lower is not None and column.upper is not None
    bounds = (column.lower or 0.0, column.upper or 0.0, bounded)
    return CDenseColumn(DENSE_KINDS.index(column.kind), column.lowest, *constants, *bounds)


def _c_sparse_column(column: SparseColumn, slots: np.ndarray | None) -> CSparseColumn:
    """Return the kernels' view of a column of 32-bit categories; it points into `slots`, which must
    outlive it.
    """
    out = CSparseColumn(
        missing_id=column.missing_id, unknown_id=column.unknown_id, base=column.first_id
    )
    out.token_modulo = column.token_modulo or 0
    out.hash = column.murmur3 + 2 * column.mixed
    if slots is None:
        out.slots = None
        out.modulo = column.num_embeddings - column.first_id
    else:
        out.slots = slots.ctypes.data
        out.num_slots = len(slots)
        out.modulo = 1
    return out


def num_slots(num_tokens: int) -> int:
    """Return the size of the open-addressing table for `num_tokens` tokens: a power of two, at most
    two thirds full.
    """
    slots = 16
    while slots * 2 < num_tokens * 3:
        slots *= 2
    return slots


def build_slots(categories: np.ndarray, ids: np.ndarray, out: np.ndarray) -> bool:
    """Fill the zeroed table `out` so that category i has id ids[i] (int32, 0 or more); return False
    for a repeated one. `out` has a power of two of slots, more than categories: uint64 [slots] for
    uint32, uint64 [slots, 2] for uint64.
    """
    wide = categories.dtype == np.uint64
    assert categories.dtype in (np.uint32, np.uint64)
    assert (out.dtype, out.ndim) == (np.uint64, 1 + wide)
    assert ids.dtype == np.int32
    assert len(categories) == len(ids)
    assert len(out) > len(categories)
    assert len(out) & (len(out) - 1) == 0
    item_bytes = ctypes.c_int32(categories.itemsize)
    sizes = (len(categories), out, len(out))
    return not call(
        "rayrec_build_slots", categories, item_bytes, ids, *sizes, returns=ctypes.c_int32
    )


def find_ids(categories: np.ndarray, slots: np.ndarray, unknown_id: int) -> np.ndarray:
    """Return the id of each category in a table of `build_slots`, unknown_id if absent, int32
    [categories].
    """
    assert slots.dtype == np.uint64
    assert categories.dtype == (np.uint64 if slots.ndim == 2 else np.uint32)
    categories = np.ascontiguousarray(categories)
    out = np.empty(len(categories), np.int32)
    item_bytes = ctypes.c_int32(categories.itemsize)
    table = (slots, len(slots), ctypes.c_int32(unknown_id))
    call("rayrec_look_up", categories, item_bytes, len(categories), *table, out)
    return out


def id_type(columns: Sequence[SparseColumn]) -> np.dtype:
    """Return int32, or int64 if a table has too many rows for it."""
    largest = max((column.num_embeddings for column in columns), default=0)
    return np.dtype(np.int32 if largest <= 2**31 else np.int64)


class Encoder:
    """Encoder of blocks by given rules. Not picklable, because it has pointers. A kernel encodes
    logs of hexadecimal tokens by row; the rules themselves encode other logs by column.
    """

    def __init__(
        self,
        numbers: Sequence[DenseColumn],
        categories: Sequence[SparseColumn],
        slots: Sequence[np.ndarray | None],
        *,
        derivation: Derivation,
        multi_hot: MultiHot | None,
    ) -> None:
        """Create an encoder. `slots` is the lookup table of each categorical column, None if it is
        hashed.
        """
        self._numbers = numbers
        self._categories = categories
        self._slots = slots
        self._derivation = derivation
        self._multi_hot = multi_hot
        self._id_type = id_type(categories)

    def encode(self, block: RawBlock, order: np.ndarray | None = None) -> EncodedRows:
        """Encode rows `order` (int64, default all in order) of a block. About 0.5 microseconds per
        Criteo row. A row without a category in a list has one id there, missing_id, of weight 1.
        """
        schema = block.schema
        ids: Sequence[Ids]
        if schema.tokens == "hexadecimal":
            dense, ids = self._by_kernel(self._derivation.from_minimum(block), order)
        elif order is None or len(order) < block.rows:
            block, order = block if order is None else block.take(np.asarray(order, np.int64)), None
            dense, ids = self._by_rules(block)
        else:
            # Of all rows, encoded values are permuted: they have fewer bytes than raw ones
            dense, ids = self._by_rules(block)
            dense = dense.take(order, axis=0)
            ids = [each.take(order) for each in ids]
        if self._multi_hot is not None:
            one_hot = [column for column in ids if isinstance(column, np.ndarray)]
            ids = self._multi_hot.expand(
                one_hot, [column.num_embeddings for column in self._categories]
            )
        labels = block.labels
        weights = block.weights
        times = block.times
        if order is not None:
            labels = {name: values[order] for name, values in labels.items()}
            weights = None if weights is None else weights[order]
            times = None if times is None else times[order]
        return EncodedRows(dense, ids, labels, weights, timestamps=times)

    def ids(self, categories: np.ndarray, column: int) -> np.ndarray:
        """Return the ids of categories in one column."""
        return self._categories[column].encode(
            categories, None, self._vocabulary_lookup(column), self._id_type
        )

    def _by_kernel(
        self, block: RawBlock, order: np.ndarray | None
    ) -> tuple[np.ndarray, Sequence[Ids]]:
        order = (
            np.arange(block.rows, dtype=np.int64)
            if order is None
            else np.ascontiguousarray(order, np.int64)
        )
        rows = len(order)
        num_dense = block.numbers.shape[1]
        num_sparse = block.categories.shape[1]
        dense = np.empty((rows, len(self._numbers)), np.float32)
        # Column by column, since embedding lookups read one column at a time.
        ids: Any = np.empty((len(self._categories), rows), self._id_type)  # A sequence of rows
        matrices = (block.numbers, block.categories, block.missing)
        assert all(matrix.flags.c_contiguous for matrix in matrices)
        # Points into the block's matrices, which the block owns during the call. The kernel reads
        # no labels.
        raw = CRawRows(*(matrix.ctypes.data for matrix in matrices), None, block.rows)
        layout = CLayout(0, num_dense, num_sparse, MAX_LINE_BYTES)
        buckets = ctypes.c_int32(self._derivation.buckets)
        rules = (buckets, *self._c_columns)
        call(
            "rayrec_encode",
            ctypes.byref(raw),
            ctypes.byref(layout),
            order,
            rows,
            *rules,
            dense,
            ids,
            ids.itemsize,
            rows,
        )
        return dense, ids

    @cached_property
    def _c_columns(self) -> tuple[ctypes.Array[CDenseColumn], ctypes.Array[CSparseColumn]]:
        """Rules as C structs, cached: building them costs as much as encoding 300 rows, and servers
        encode single ones.
        """
        return (
            (CDenseColumn * len(self._numbers))(*map(c_dense_column, self._numbers)),
            (CSparseColumn * len(self._categories))(
                *map(_c_sparse_column, self._categories, self._slots)
            ),
        )

    def _by_rules(self, block: RawBlock) -> tuple[np.ndarray, Sequence[Ids]]:
        schema = block.schema
        num_indicators = sum(number.indicator for number in self._numbers)
        dense = np.empty((block.rows, len(self._numbers) + num_indicators), np.float32)
        column = len(self._numbers)
        for index, (number, name) in enumerate(zip(self._numbers, schema.dense, strict=True)):
            missing = block.is_missing(name)
            dense[:, index] = number.encode(block.numbers[:, index], missing)
            if number.indicator:
                dense[:, column] = missing
                column += 1
        ids: list[Ids] = []
        for index, (rule, name) in enumerate(zip(self._categories, schema.sparse, strict=True)):
            values = block.column(name)
            if isinstance(values, JaggedIds):
                # No time passes between the missing category of an empty list and the row's time
                weight = 0.0 if name in schema.aged else 1.0
                item_ids = self.ids(values.values, index)
                ids.append(_bags(item_ids, values, rule.missing_id, weight=weight))
            else:
                ids.append(
                    rule.encode(
                        values,
                        block.is_missing(name),
                        self._vocabulary_lookup(index),
                        self._id_type,
                    )
                )
        return dense, ids

    def _vocabulary_lookup(self, column: int) -> Callable[[np.ndarray], np.ndarray]:
        rule = self._categories[column]
        slots = self._slots[column]

        def ids_of(categories: np.ndarray) -> np.ndarray:
            assert slots is not None
            return find_ids(categories, slots, rule.unknown_id)

        return ids_of


def _bags(ids: np.ndarray, lists: JaggedIds, missing_id: int, *, weight: float) -> JaggedIds:
    """Return the ids of lists as bags with at least one id each. An empty list gets the missing id
    with `weight`.
    """
    lengths = np.maximum(lists.lengths, 1)
    if len(ids) == lengths.sum():  # No list is empty
        return JaggedIds(ids, lengths, lists.weights)
    values = np.full(lengths.sum(), missing_id, ids.dtype)
    indices = expand_ranges(np.cumsum(lengths, dtype=np.int64) - lengths, lists.lengths)
    values[indices] = ids
    if lists.weights is None:
        return JaggedIds(values, lengths)
    weights = np.full(len(values), weight, np.float32)
    weights[indices] = lists.weights
    return JaggedIds(values, lengths, weights)
