"""Embedding tables of a click model, with initial values that do not depend on the sharding plan or worker count."""

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

from rayrec import host_resources
from rayrec.config import InputError
from rayrec.models.base import TableInit
from rayrec.models.scoring_tables import table_name, table_of_weight

# Rows drawn from one seed. Small enough to waste little at shard edges, large enough to add no cost.
_BLOCK_ROWS = 65_536
_MAX_THREADS = 8  # Threads that fill one table. Each has a block in host memory, and 8 are as fast as a copy to a GPU.


def feature_names(num_sparse: int) -> list[str]:
    """Return default names for sparse features: cat_0, cat_1, ..."""
    return [f"cat_{index}" for index in range(num_sparse)]


def _block_seed(seed: int, table: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{table}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch requires a signed 64-bit seed


@dataclass(frozen=True)
class TableValues:
    """Initial values of a table. Row r and column c depend only on (seed, table, r, c, table shape) and distribution."""

    seed: int
    table: str
    num_embeddings: int
    embedding_dim: int
    start: TableInit | None = None
    """Distribution, or None for the default."""

    def fill(self, part: torch.Tensor, *, row_offset: int = 0, column_offset: int = 0, threads: int | None = None) -> None:
        """Write the initial values of one part of the table into `part`, in place. `threads`: None uses one for a table in host
        memory, and one per CPU, up to 8, for a table on a device, which is larger."""
        distribution = self.start or TableInit()
        bound = self.num_embeddings**-0.5
        rows, columns = part.shape

        @torch.no_grad()
        def fill_block(block: int) -> None:
            block_start = block * _BLOCK_ROWS
            block_rows = min(_BLOCK_ROWS, self.num_embeddings - block_start)
            row, stop = max(row_offset, block_start), min(block_start + block_rows, row_offset + rows)
            target = part[row - row_offset : stop - row_offset]
            is_plain = target.is_cpu and target.is_contiguous() and target.dtype == torch.float32
            is_direct = is_plain and target.shape == (block_rows, self.embedding_dim)
            values = target if is_direct else torch.empty(block_rows, self.embedding_dim)
            generator = torch.Generator().manual_seed(_block_seed(self.seed, self.table, block))
            if distribution.kind == "normal":
                values.normal_(0.0, distribution.std, generator=generator)
            else:
                values.uniform_(-bound, bound, generator=generator)
            if not is_direct:
                target.copy_(values[row - block_start : stop - block_start, column_offset : column_offset + columns])

        if not rows:
            return
        blocks = range(row_offset // _BLOCK_ROWS, (row_offset + rows - 1) // _BLOCK_ROWS + 1)
        if threads is None:
            threads = 1 if part.device.type in ("cpu", "meta") else min(_MAX_THREADS, host_resources.usable_cpus(granted=None))
        if min(threads, len(blocks)) <= 1:
            for block in blocks:
                fill_block(block)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="start-values") as pool:
            for _ in pool.map(fill_block, blocks):
                pass

    def fill_full_table(self, parameter: torch.Tensor) -> None:
        """Write all initial values into a parameter that contains the full table. Skip row-wise and column-wise shards, which
        TorchRec passes without their offsets: `initialize_shards` must follow."""
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
    start: TableInit | None = None,
) -> EmbeddingBagCollection:
    """Build float32 tables, one per vocabulary, with sum pooling per feature. `num_embeddings` is the row count of each
    feature's table. `table_of` is the vocabulary of each feature, which determines its table, or None for unnamed features with
    separate tables. `weighted` is whether ids have weights, `start` the distribution of initial values (None: the default).
    Tables on `meta` get values when placed by DistributedModelParallel. Raises InputError for no rows, or two sizes."""
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
    start: TableInit | None = None,
) -> EmbeddingCollection:
    """Build the tables of features with unpooled lookups. See `build_embeddings`."""
    settings = _table_settings(num_embeddings, table_of, embedding_dim=embedding_dim, seed=seed, start=start)
    return EmbeddingCollection(tables=[EmbeddingConfig(**of_table) for of_table in settings], device=torch.device(device))


def _table_settings(
    num_embeddings: Sequence[int], table_of: Mapping[str, str], *, embedding_dim: int, seed: int, start: TableInit | None
) -> list[dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for (feature, vocabulary), rows in zip(table_of.items(), num_embeddings, strict=True):
        if vocabulary in tables:
            tables[vocabulary]["feature_names"].append(feature)
            if tables[vocabulary]["num_embeddings"] != rows:
                raise InputError(
                    f"table {vocabulary}: features must have equal row counts, got {rows:,} for {feature} and "
                    f"{tables[vocabulary]['num_embeddings']:,} for another"
                )
            continue
        name = table_name(vocabulary)
        if rows < 1:
            raise InputError(f"table {vocabulary}: must have at least one row, got {rows}. Check num_embeddings.")
        tables[vocabulary] = {
            "name": name,
            "feature_names": [feature],
            "num_embeddings": rows,
            "embedding_dim": embedding_dim,
            "init_fn": TableValues(seed, name, rows, embedding_dim, start).fill_full_table,
        }
    return list(tables.values())


def initialize_shards(model: nn.Module, *, seed: int, start: TableInit | None = None) -> None:
    """Set the initial values of this worker's row-wise and column-wise shards. Call once after sharding `model`. Skips full
    (table-wise) tables, which got their values on placement. `start` must match `build_embeddings`."""
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
