"""Changes of a block between the parser and the encoder: integers as categories, numbers counted from their file's least one."""

from dataclasses import dataclass, replace

import numpy as np

from rayrec.data.logs.index import source_of
from rayrec.data.raw_block import RawBlock
from rayrec.native import call
from rayrec.schema import Schema


def file_key(path: str) -> str:
    """The name by which constants of a file are kept, in any folder, packed or not."""
    return source_of(path)[1].removesuffix(".gz").removesuffix(".parquet")


@dataclass(frozen=True)
class Derivation:
    """The columns of a model's inputs, made of those of a log; the same columns for most presets."""

    buckets: bool = False
    """Whether integers are categories too, before the others: floor(ln(x)^2) for x > 2, else x, plus 2^31 so that they sort as
    the numbers do. 0 is no category (the rule of FuxiCTR on Criteo_x4)."""
    modulo: int | None = None
    """Categories are counted modulo this."""
    file_minimum: dict[str, int] | None = None
    """The least integer of each file, by its `file_key`, which is subtracted from the file's integers, a missing one being 0; ""
    for other files."""

    def inputs(self, schema: Schema) -> Schema:
        """Return the columns that are made of a log's."""
        return schema.replace(dense=(), sparse=schema.dense + schema.sparse) if self.buckets else schema

    def counted(self, block: RawBlock) -> RawBlock:
        """Return what is counted of a log's rows."""
        block = self._bucketed(block) if self.buckets else block
        if self.modulo is None:
            return block
        return replace(block, categories=block.categories % block.categories.dtype.type(self.modulo))

    def from_minimum(self, block: RawBlock) -> RawBlock:
        """Return the rows with their integers as the Encoder takes them, which makes categories of them itself."""
        if self.file_minimum is None:
            return block
        numbers = block.numbers.copy()
        for path, start, stop in block.files or (("", 0, block.rows),):
            numbers[start:stop] -= self.file_minimum.get(file_key(path), self.file_minimum[""])  # 0 where missing
        missing = block.missing & ~np.uint64((1 << len(block.schema.dense)) - 1)
        return replace(block, numbers=numbers, missing=missing)

    def applied(self, block: RawBlock) -> RawBlock:
        """Return the columns of the model's inputs."""
        block = self.from_minimum(block)
        return self._bucketed(block) if self.buckets else block

    def _bucketed(self, block: RawBlock) -> RawBlock:
        num_dense, num_sparse = block.numbers.shape[1], block.categories.shape[1]
        categories = np.empty((block.rows, num_dense + num_sparse), np.uint32)
        numbers, columns = np.ascontiguousarray(block.numbers), num_dense + num_sparse
        call("rayrec_bucket_integers", numbers, block.rows, categories, num_dense, columns)
        categories[:, num_dense:] = block.categories
        missing = block.missing.copy()
        for column in range(num_dense):  # 0 is no category; the parser stores it where a number is missing
            missing |= (block.numbers[:, column] == 0).astype(np.uint64) << np.uint64(column)
        # The bits of a row's mask keep their places: dense columns come before sparse ones there too.
        return replace(
            block,
            schema=self.inputs(block.schema),
            numbers=np.empty((block.rows, 0), np.int64),
            categories=categories,
            missing=missing,
        )
