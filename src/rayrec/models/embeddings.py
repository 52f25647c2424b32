"""The embedding tables of a click model, and start values that no sharding plan and no number of workers changes."""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from rayrec import machine
from rayrec.config import InputError
from rayrec.models.base import TableStart
from rayrec.models.scoring_tables import table_name, table_of_weight

# Rows drawn from one seed. Small enough that a shard wastes little at its edges, large enough to cost nothing.
_BLOCK_ROWS = 65_536
_MOST_THREADS = 8  # that fill one table: each has a block in host memory, and together they are as fast as a copy to a GPU


def feature_names(num_sparse: int) -> list[str]:
    """cat_0, cat_1, ...: the names of sparse features that were given none."""
    return [f"cat_{index}" for index in range(num_sparse)]


def _block_seed(seed: int, table: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{table}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch wants a signed 64-bit seed


@dataclass(frozen=True)
class TableValues:
    """Start values of a table.

    Row r, column c gets the same value of the distribution `start` in any shard: it depends on (seed, table, r, c, shape of the
    table) alone.
    """

    seed: int
    table: str
    num_embeddings: int
    embedding_dim: int
    start: TableStart | None = None
    """Distribution; None: the default."""

    def fill(self, part: torch.Tensor, *, row_offset: int = 0, column_offset: int = 0, threads: int | None = None) -> None:
        """Write the start values of one part of the table into `part`, in place.

        `threads` draw them; None: one for a table in host memory, and for one on a device, which is too large for one thread to
        fill soon, as many as there are CPUs, up to 8.
        """
        distribution = self.start or TableStart()
        bound = self.num_embeddings**-0.5
        rows, columns = part.shape

        @torch.no_grad()
        def fill_block(block: int) -> None:
            block_start = block * _BLOCK_ROWS
            block_rows = min(_BLOCK_ROWS, self.num_embeddings - block_start)
            row, stop = max(row_offset, block_start), min(block_start + block_rows, row_offset + rows)
            target = part[row - row_offset : stop - row_offset]
            whole = target.is_cpu and target.is_contiguous() and target.dtype == torch.float32
            in_place = whole and target.shape == (block_rows, self.embedding_dim)
            values = target if in_place else torch.empty(block_rows, self.embedding_dim)
            generator = torch.Generator().manual_seed(_block_seed(self.seed, self.table, block))
            if distribution.kind == "normal":
                values.normal_(0.0, distribution.std, generator=generator)
            else:
                values.uniform_(-bound, bound, generator=generator)
            if not in_place:
                target.copy_(values[row - block_start : stop - block_start, column_offset : column_offset + columns])

        if not rows:
            return
        blocks = range(row_offset // _BLOCK_ROWS, (row_offset + rows - 1) // _BLOCK_ROWS + 1)
        if threads is None:
            threads = 1 if part.device.type in ("cpu", "meta") else min(_MOST_THREADS, machine.usable_cpus(granted=None))
        if min(threads, len(blocks)) <= 1:
            for block in blocks:
                fill_block(block)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="start-values") as pool:
            for _ in pool.map(fill_block, blocks):
                pass

    def fill_whole(self, parameter: torch.Tensor) -> None:
        """Write all start values into a parameter that is the whole table.

        TorchRec also calls this on row- and column-wise shards, without saying which part they are: those are left to
        `initialize_shards`, which must follow.
        """
        if tuple(parameter.shape) == (self.num_embeddings, self.embedding_dim):
            self.fill(parameter.data)


def build_embeddings(
    num_embeddings: Sequence[int],
    *,
    embedding_dim: int,
    seed: int,
    device: str = "meta",
    table_of: Mapping[str, str] | None = None,
    weighted: bool = False,
    start: TableStart | None = None,
) -> EmbeddingBagCollection:
    """One table per vocabulary, sum-pooled per feature, float32; on `meta` until DistributedModelParallel places the shards.

    `num_embeddings`: rows of each feature's table. `table_of`: the vocabulary of each feature, which names its table; None:
    features without names, with a table each. `weighted`: ids have weights. `start`: distribution of the start values; None: the
    default. Raises InputError for a table without rows, and for two sizes of one table.
    """
    names = table_of or {feature: feature for feature in feature_names(len(num_embeddings))}
    settings = _table_settings(num_embeddings, names, embedding_dim=embedding_dim, seed=seed, start=start)
    tables = [EmbeddingBagConfig(**of_table) for of_table in settings]
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted, device=torch.device(device))


def build_sequences(
    num_embeddings: Sequence[int],
    *,
    embedding_dim: int,
    seed: int,
    table_of: Mapping[str, str],
    device: str = "meta",
    start: TableStart | None = None,
) -> EmbeddingCollection:
    """The same, for features whose embeddings are given one by one, not summed."""
    settings = _table_settings(num_embeddings, table_of, embedding_dim=embedding_dim, seed=seed, start=start)
    tables = [EmbeddingConfig(**of_table) for of_table in settings]
    return EmbeddingCollection(tables=tables, device=torch.device(device))


def _table_settings(
    num_embeddings: Sequence[int], table_of: Mapping[str, str], *, embedding_dim: int, seed: int, start: TableStart | None
) -> list[dict[str, Any]]:
    """Of each table, as TorchRec's configurations have them."""
    tables: dict[str, dict[str, Any]] = {}
    for (feature, vocabulary), rows in zip(table_of.items(), num_embeddings, strict=True):
        if vocabulary in tables:
            tables[vocabulary]["feature_names"].append(feature)
            if tables[vocabulary]["num_embeddings"] != rows:
                raise InputError(
                    f"table {vocabulary}: feature {feature} needs {rows:,} rows of it, and another feature "
                    f"{tables[vocabulary]['num_embeddings']:,}; features of one vocabulary have the same number"
                )
            continue
        name = table_name(vocabulary)
        if rows < 1:
            raise InputError(f"table {vocabulary}: needs at least one row, not {rows}; check num_embeddings")
        tables[vocabulary] = {
            "name": name,
            "feature_names": [feature],
            "num_embeddings": rows,
            "embedding_dim": embedding_dim,
            "init_fn": TableValues(seed, name, rows, embedding_dim, start).fill_whole,
        }
    return list(tables.values())


def initialize_shards(model: nn.Module, *, seed: int, start: TableStart | None = None) -> None:
    """Give this worker's row- and column-wise shards their start values, of the distribution that `build_embeddings` got; call
    once after sharding `model`.

    Whole (table-wise) tables have theirs already, from when they were placed, and are not touched.
    """
    for key, value in model.state_dict().items():
        table = table_of_weight(key)
        if not isinstance(value, ShardedTensor) or table is None:
            continue
        num_embeddings, embedding_dim = value.size()
        for shard in value.local_shards():
            if tuple(shard.tensor.shape) == (num_embeddings, embedding_dim):
                continue
            row_offset, column_offset = shard.metadata.shard_offsets
            values = TableValues(seed, table, num_embeddings, embedding_dim, start)
            values.fill(shard.tensor, row_offset=row_offset, column_offset=column_offset)
