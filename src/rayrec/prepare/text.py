"""Conversion of plain text into token rows in MDS shards, with a tokenizer: training data for
language models. Runs as a resumable job, whose last file is manifest.json. The bytes depend only on
the text and the options, not on the engine.
"""

import functools
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, final

import numpy as np
import pyarrow as pa
from annotated_types import Ge

from rayrec import storage
from rayrec.bounds import Share
from rayrec.config import Config, InputError, json_hash
from rayrec.data.engine import Engine
from rayrec.data.job import JobFolder, ResumableJob, resumable_job
from rayrec.data.log_source import plain_files
from rayrec.data.text import text_blocks
from rayrec.data.text.text_blocks import PART_BYTES, Source, TextPart, read_part
from rayrec.data.text.tokenizer import (
    MIN_BPE_SIZE,
    Files,
    TextTokenizer,
    bytes_bpe,
    characters,
    load_tokenizer,
    read_tokenizer,
    write_tokenizer,
)
from rayrec.imports import require
from rayrec.observe.console import Console
from rayrec.prepare.config import PreparationConfig, engine, task_context

BPE_SAMPLE_BYTES = 256 << 20
"""Maximum training text for learning a BPE, spread over all of it. Its distinct words are kept in
memory.
"""
_RESULTS: Final = (
    "format",
    "block_size",
    "vocabulary_size",
    "tokenizer",
    "end_token",
    "sets",
    "tokens_left_out",
    "hash",
)
"""Entries of the manifest that a call returns."""
DEFAULT_VOCABULARY_SIZE = 1024
"""Default BPE size: few IDs, for small texts and models."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """Options for converting text into token rows."""

    tokenizer: str = "bytes_bpe"
    """Local folder of a HuggingFace tokenizer, bytes_bpe (learned from the training text), or
    characters (one token each).
    """
    vocabulary_size: Annotated[int, Ge(MIN_BPE_SIZE)] | None = None
    """Vocabulary size of bytes_bpe. None: 1024."""
    block_size: Annotated[int, Ge(2)] = 128
    """Number of tokens per row."""
    validation_fraction: Share = 0.1
    """Fraction at the end of the text that is held out for validation."""
    part_bytes: Annotated[int, Ge(1024)] = PART_BYTES
    """Bytes of text per task. Tokens do not span parts, so the tokens depend on this value."""
    shard_bytes: Annotated[int, Ge(1024)] = 16 << 20
    """Bytes per shard, the unit of fetching, caching and shuffling."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocabulary_size is not None and self.tokenizer != "bytes_bpe":
            raise InputError(
                f"vocabulary_size: must be used with tokenizer bytes_bpe only, got {self.tokenizer}"
            )


def preprocess_text(
    path: str, *, out: str, text: TextConfig, config: PreparationConfig, console: Console
) -> dict[str, Any]:
    """Write text (UTF-8; file, glob or folder, also gzip, local or a URL) as token rows to folder
    `out`, atomically. Resumable. Reads only `files` and engine options of `config`. Returns the
    sets of the manifest, bytes and seconds. Raises InputError for text that is not UTF-8 or shorter
    than a row, an unusable tokenizer, or if `out` exists.
    """
    start_s = time.perf_counter()
    require("streaming", "tokenizers", extra="language")
    out = storage.absolute(out).rstrip("/")
    existing_files = None
    if text.tokenizer not in ("bytes_bpe", "characters"):
        existing_files = _load_tokenizer(text.tokenizer)
    if text_blocks.find_shard_sets(path):
        raise InputError(
            f"{path}: must contain plain text, got MDS shards. Use `rayrec adopt {path} "
            "--tokenizer DIR` for shards of tokens. Write a column of text into a file first, one "
            "document per line"
        )
    files = storage.list_files(path, names=config.files)
    identity = [[file.path, file.size_bytes, file.modified_ns] for file in files]
    job_inputs = {
        "version": text_blocks.VERSION,
        "format": text_blocks.FORMAT,
        "text": compute_hash(identity),
        **text.to_dict(),
        "tokenizer": compute_hash(existing_files) if existing_files else text.tokenizer,
    }
    with (
        resumable_job(out, job_inputs, last_file=text_blocks.MANIFEST) as running,
        console.preparing(),
        engine(config, console, paths=(path, out)) as data_engine,
    ):
        if running.resumed:
            console.note(f"Resuming {running.folder.path}")
        plain = plain_files(files, task_context(data_engine, console))
        sources = [
            Source(local.path, file.path, local.size_bytes)
            for file, local in zip(files, plain, strict=True)
        ]
        work = _Work(text, existing_files, sources, running, data_engine, console)
        manifest = work.finish(files, work.write_shards(work.tokenize()))
    return {
        "out": out,
        **{name: manifest[name] for name in _RESULTS},
        "bytes": sum(described["bytes"] for described in manifest["sets"].values()),
        "seconds": time.perf_counter() - start_s,
    }


def _load_tokenizer(folder: str) -> Files:
    if not os.path.isdir(os.path.expanduser(folder)):
        raise InputError(
            f"tokenizer: {folder} not found. Use bytes_bpe, characters or a local HuggingFace "
            "tokenizer's folder, not a hub name"
        )
    files = read_tokenizer(os.path.expanduser(folder))
    TextTokenizer(files, folder)
    return files


@final
class _Work:
    """State of one call of `preprocess_text`."""

    def __init__(
        self,
        text: TextConfig,
        tokenizer_files: Files | None,
        sources: list[Source],
        running: ResumableJob,
        engine: Engine,
        console: Console,
    ) -> None:
        self.text = text
        self.running = running
        self.engine = engine
        self.console = console
        self.parts = text_blocks.split_parts(
            sources, validation_fraction=text.validation_fraction, part_bytes=text.part_bytes
        )
        if not self.parts:
            raise InputError(f"{sources[0].name}: contains no text")
        folder = storage.join(running.folder.path, "tokenizer")
        if not running.resumed:
            with running.folder.disk_errors():
                write_tokenizer(tokenizer_files or self._create_tokenizer(), folder)
        self.tokenizer = load_tokenizer(folder)
        self.job = TextJob(running.folder, self.tokenizer.hash, text.block_size)

    def _create_tokenizer(self) -> Files:
        if self.text.tokenizer == "characters":
            distinct: set[str] = set()
            name = "find characters (parts of the text)"
            tables = self.engine.run(name, find_characters, self.parts, block_bytes=1 << 16)
            for number, table in enumerate(tables, start=1):
                distinct.update(table.column("characters")[0].as_py())
                self.console.progress(name, number, len(self.parts))
            return characters(distinct)
        training = [part for part in self.parts if part.set == "train"]
        every = max(1, -(-sum(part.stop - part.start for part in training) // BPE_SAMPLE_BYTES))
        size = self.text.vocabulary_size or DEFAULT_VOCABULARY_SIZE
        self.console.note(f"Learning a byte-level BPE of {size:,} tokens from the training text")
        return bytes_bpe(map(text_blocks.read_part, training[::every]), size)

    def tokenize(self) -> dict[int, int]:
        """Tokenize all parts and return their token counts."""
        report = functools.partial(self.console.progress, "tokenize (parts of the text)")
        results = self.running.run(
            "tokenize", functools.partial(tokenize, job=self.job), self.parts, self.engine, report
        )
        return {
            part.number: part_result["tokens"]
            for part, part_result in zip(self.parts, results, strict=True)
        }

    def write_shards(self, tokens_of: dict[int, int]) -> dict[str, dict[str, Any]]:
        """Write the shards. Return the manifest entry of each set, and its index entries as
        `shards`.
        """
        block_size = self.text.block_size
        sets: dict[str, dict[str, Any]] = {}
        row_bytes = block_size * self.tokenizer.dtype.itemsize + 4  # 4 for its offset
        shards: list[ShardTask] = []
        for name in dict.fromkeys(part.set for part in self.parts):
            counts = [
                (part.number, tokens_of[part.number]) for part in self.parts if part.set == name
            ]
            total = sum(count for _, count in counts)
            rows_per_shard = max(1, self.text.shard_bytes // row_bytes)
            planned = plan_shards(
                name,
                counts,
                block_size=block_size,
                rows_per_shard=rows_per_shard,
                first=len(shards),
            )
            if not planned:
                raise InputError(
                    f"{self.parts[0].name}: the {name} text has {total:,} tokens, less than one "
                    f"row of {block_size}. Use more text, or another --validation-fraction or "
                    "--block-size"
                )
            shards += planned
            rows, left_out = divmod(total, block_size)
            sets[name] = {
                "blocks": rows,
                "tokens": rows * block_size,
                "tokens_left_out": left_out,
                "bytes": 0,
                "shards": [],
            }
        report = functools.partial(self.console.progress, "write (shards)")
        for result in self.running.run(
            "write", functools.partial(write_shard, job=self.job), shards, self.engine, report
        ):
            sets[result["set"]]["bytes"] += result["info"]["raw_data"]["bytes"]
            sets[result["set"]]["shards"].append(result["info"])
        return sets

    def finish(
        self, files: Sequence[storage.File], sets: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """Write the indexes and the manifest. Return the manifest."""
        from rayrec.data.text import mds

        shards = {name: described.pop("shards") for name, described in sets.items()}
        manifest = {
            "format": text_blocks.FORMAT,
            "version": text_blocks.VERSION,
            **{
                name: value
                for name, value in self.text.to_dict().items()
                if name not in ("tokenizer", "vocabulary_size")
            },
            "vocabulary_size": self.tokenizer.vocabulary_size,
            "tokenizer": self.tokenizer.hash,
            "end_token": self.tokenizer.end_token,
            "sets": sets,
            "tokens_left_out": sum(described["tokens_left_out"] for described in sets.values()),
            "source": [{"path": file.path, "bytes": file.size_bytes} for file in files],
            "hash": compute_hash([self.tokenizer.hash, shards]),
        }
        folder = self.running.folder
        with folder.disk_errors():
            for name, infos in shards.items():
                mds.write_index(storage.join(folder.path, name), infos)
            storage.write_json(storage.join(folder.path, text_blocks.MANIFEST), manifest)
        return manifest


def compute_hash(value: Any) -> str:
    """Return a hash of 16 hexadecimal digits."""
    if isinstance(value, dict):
        value = {name: hashlib.sha256(content).hexdigest() for name, content in value.items()}
    return json_hash(value)


@dataclass(frozen=True)
class TextJob:
    """Parameters of all tasks."""

    folder: JobFolder
    tokenizer_hash: str
    block_size: int

    @property
    def tokenizer(self) -> TextTokenizer:
        return _loaded(storage.join(self.folder.path, "tokenizer"), self.tokenizer_hash)

    def tokens(self, number: int) -> str:
        """Return the path of a part's IDs, kept until the shards are written."""
        return self.folder.aid("tokens", f"part-{number:06d}.bin")


@dataclass(frozen=True)
class ShardTask:
    """Adjacent rows of one set."""

    number: int
    set: str
    file: str
    token_ranges: tuple[tuple[int, int, int], ...]
    """Tuples of (part, first token in it, token count), in order. Together they fill rows."""

    @property
    def tokens(self) -> int:
        return sum(count for _, _, count in self.token_ranges)


@lru_cache(maxsize=1)
def _loaded(folder: str, tokenizer_hash: str) -> TextTokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.hash == tokenizer_hash, folder
    return tokenizer


def find_characters(part: TextPart) -> pa.Table:
    """Return the distinct characters of a part, and its size in bytes."""
    return pa.table(
        {"characters": ["".join(sorted(set(read_part(part))))], "bytes": [part.stop - part.start]}
    )


def tokenize(part: TextPart, *, job: TextJob) -> pa.Table:
    """Write the IDs of a part and return their number."""
    job.folder.require()
    tokenizer = job.tokenizer
    tokens = tokenizer.encode(read_part(part))
    if part.follows and tokenizer.end_token is not None:
        tokens = np.concatenate([np.array([tokenizer.end_token], tokens.dtype), tokens])
    with job.folder.disk_errors():
        storage.write_bytes(job.tokens(part.number), tokens.data)
    return job.folder.done("tokenize", part.number, {"tokens": len(tokens)})


def plan_shards(
    name: str,
    tokens_of_parts: Sequence[tuple[int, int]],
    *,
    block_size: int,
    rows_per_shard: int,
    first: int = 0,
) -> list[ShardTask]:
    """Plan the shards of a set, given (part, token count) in order. Each has `rows_per_shard` rows,
    the last one fewer. Drops tokens that do not fill a row. `first`: number of the first task.
    Pure.
    """
    rows = sum(tokens for _, tokens in tokens_of_parts) // block_size
    waiting = [(part, 0, tokens) for part, tokens in reversed(tokens_of_parts)]
    shards: list[ShardTask] = []
    for row in range(0, rows, rows_per_shard):
        needed = min(rows_per_shard, rows - row) * block_size
        ranges = []
        while needed:
            part, start, left = waiting.pop()
            count = min(left, needed)
            if count:
                ranges.append((part, start, count))
            if count < left:
                waiting.append((part, start + count, left - count))
            needed -= count
        shards.append(
            ShardTask(first + len(shards), name, f"shard.{len(shards):05d}.mds", tuple(ranges))
        )
    return shards


def write_shard(shard: ShardTask, *, job: TextJob) -> pa.Table:
    """Write a shard's rows and return its index entry."""
    from rayrec.data.text import mds  # imports torch

    dtype = job.tokenizer.dtype
    tokens = np.empty(shard.tokens, dtype)
    done = 0
    for part, start, count in shard.token_ranges:
        target = tokens[done : done + count].view(np.uint8)
        read_bytes = storage.read_into(job.tokens(part), start * dtype.itemsize, target)
        assert read_bytes == len(target), job.tokens(part)
        done += count
    with job.folder.disk_errors():
        info = mds.write_shard(
            tokens.reshape(-1, job.block_size), storage.join(job.folder.path, shard.set, shard.file)
        )
    return job.folder.done("write", shard.number, {"set": shard.set, "info": info})
