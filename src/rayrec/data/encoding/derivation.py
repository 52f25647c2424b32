"""Derivation of a model's input columns from a log's columns, between parser and encoder."""

from dataclasses import dataclass, replace

import numpy as np

from rayrec.data.logs.index import source_of
from rayrec.data.raw_block import RawBlock
from rayrec.native import call
from rayrec.schema import Schema


def file_key(path: str) -> str:
    """Return the key of a file's constants, independent of its folder and compression."""
    return source_of(path)[1].removesuffix(".gz").removesuffix(".parquet")


@dataclass(frozen=True)
class Derivation:
    """Derivation of a model's input columns; the log's columns unchanged for most presets."""

    buckets: bool = False
    """Whether to convert integers to categories, before the others: floor(ln(x)^2) for x > 2, else x, plus 2^31 to sort like the
    numbers. 0 is missing (the rule of FuxiCTR on Criteo_x4)."""
    modulo: int | None = None
    """Modulo applied to categories before counting. None: no modulo."""
    file_minimum: dict[str, int] | None = None
    """Smallest integer of each file by `file_key`, "" for others, subtracted from its integers; a missing one is 0."""

    def inputs(self, schema: Schema) -> Schema:
        """Return the derived columns."""
        return schema.replace(dense=(), sparse=schema.dense + schema.sparse) if self.buckets else schema

    def counted(self, block: RawBlock) -> RawBlock:
        """Return the counted columns of rows."""
        block = self._bucketed(block) if self.buckets else block
        if self.modulo is None:
            return block
        return replace(block, categories=block.categories % block.categories.dtype.type(self.modulo))

    def from_minimum(self, block: RawBlock) -> RawBlock:
        """Return the rows with the integers that the Encoder takes. The Encoder converts them to categories itself."""
        if self.file_minimum is None:
            return block
        numbers = block.numbers.copy()
        for path, start, stop in block.files or (("", 0, block.rows),):
            numbers[start:stop] -= self.file_minimum.get(file_key(path), self.file_minimum[""])  # 0 if missing
        return replace(block, numbers=numbers, missing=block.missing & ~np.uint64((1 << len(block.schema.dense)) - 1))

    def applied(self, block: RawBlock) -> RawBlock:
        """Return the model's input columns."""
        block = self.from_minimum(block)
        return self._bucketed(block) if self.buckets else block

    def _bucketed(self, block: RawBlock) -> RawBlock:
        num_dense, num_sparse = block.numbers.shape[1], block.categories.shape[1]
        categories = np.empty((block.rows, num_dense + num_sparse), np.uint32)
        numbers, columns = np.ascontiguousarray(block.numbers), num_dense + num_sparse
        call("rayrec_bucket_integers", numbers, block.rows, categories, num_dense, columns)
        categories[:, num_dense:] = block.categories
        missing = block.missing.copy()
        for column in range(num_dense):  # 0 means missing; the parser stores it for a missing number
            missing |= (block.numbers[:, column] == 0).astype(np.uint64) << np.uint64(column)
        # The mask's bits stay in place: dense columns precede sparse ones there too.
        numbers = np.empty((block.rows, 0), np.int64)
        return replace(block, schema=self.inputs(block.schema), numbers=numbers, categories=categories, missing=missing)
