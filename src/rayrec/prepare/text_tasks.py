"""What the tasks of preparing a text do: see which characters there are, tokenise a part, write a shard of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.data.job import JobFolder
from rayrec.data.text.text_blocks import TextPart, read_part
from rayrec.data.text.tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class TextJob:
    """What all tasks know."""

    folder: JobFolder
    tokenizer_hash: str
    block_size: int

    @property
    def tokenizer(self) -> TextTokenizer:
        return _loaded(storage.join(self.folder.path, "tokenizer"), self.tokenizer_hash)

    def tokens(self, number: int) -> str:
        """Where the ids of a part are kept until the shards are written."""
        return self.folder.aid("tokens", f"part-{number:06d}.bin")


@dataclass(frozen=True)
class ShardTask:
    """Neighbouring rows of one set."""

    number: int
    set: str
    file: str
    pieces: tuple[tuple[int, int, int], ...]
    """(part, first token in it, tokens) in order; together they fill rows."""

    @property
    def tokens(self) -> int:
        return sum(count for _, _, count in self.pieces)


@lru_cache(maxsize=1)
def _loaded(folder: str, tokenizer_hash: str) -> TextTokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.hash == tokenizer_hash, folder
    return tokenizer


def find_characters(part: TextPart) -> pa.Table:
    """The characters of a part's text, and its bytes."""
    text = read_part(part)
    return pa.table({"characters": ["".join(sorted(set(text)))], "bytes": [part.stop - part.start]})


def tokenize(part: TextPart, *, job: TextJob) -> pa.Table:
    """Writes the ids of a part; finds how many they are."""
    job.folder.require()
    tokenizer = job.tokenizer
    tokens = tokenizer.encode(read_part(part))
    if part.follows and tokenizer.end_token is not None:
        tokens = np.concatenate([np.array([tokenizer.end_token], tokens.dtype), tokens])
    with job.folder.disk_errors():
        storage.write_bytes(job.tokens(part.number), tokens.data)
    return job.folder.done("tokenize", part.number, {"tokens": len(tokens)})


def plan_shards(
    name: str, tokens_of_parts: Sequence[tuple[int, int]], *, block_size: int, rows_per_shard: int, first: int = 0
) -> list[ShardTask]:
    """The shards of a set whose parts have so many tokens: (part, tokens) in order. Each has `rows_per_shard` rows, the last
    one fewer; tokens that fill no row are in none. `first`: the number of the first one's task. Pure."""
    rows = sum(tokens for _, tokens in tokens_of_parts) // block_size
    waiting = [(part, 0, tokens) for part, tokens in reversed(tokens_of_parts)]
    shards: list[ShardTask] = []
    for row in range(0, rows, rows_per_shard):
        needed = min(rows_per_shard, rows - row) * block_size
        pieces = []
        while needed:
            part, start, left = waiting.pop()
            taken = min(left, needed)
            if taken:
                pieces.append((part, start, taken))
            if taken < left:
                waiting.append((part, start + taken, left - taken))
            needed -= taken
        shards.append(ShardTask(first + len(shards), name, f"shard.{len(shards):05d}.mds", tuple(pieces)))
    return shards


def write_shard(shard: ShardTask, *, job: TextJob) -> pa.Table:
    """Writes the shard's rows; finds what the index says of it."""
    from rayrec.data.text import mds  # brings torch

    dtype = job.tokenizer.dtype
    tokens = np.empty(shard.tokens, dtype)
    done = 0
    for part, start, count in shard.pieces:
        target = tokens[done : done + count].view(np.uint8)
        read_bytes = storage.read_into(job.tokens(part), start * dtype.itemsize, target)
        assert read_bytes == len(target), job.tokens(part)
        done += count
    with job.folder.disk_errors():
        info = mds.write_shard(tokens.reshape(-1, job.block_size), storage.join(job.folder.path, shard.set, shard.file))
    return job.folder.done("write", shard.number, {"set": shard.set, "info": info})
