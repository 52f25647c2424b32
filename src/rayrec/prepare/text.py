"""Plain text as rows of tokens in MDS shards, with the tokenizer next to them: the training data of language models.

Everything is made in OUT.partial (for a URL, below OUT itself) and marked task by task, so that an interrupted job resumes
where it stopped; manifest.json is written last, then the folder gets its name. The bytes depend on the text and the options
only, not on the engine.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import posixpath
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import pyarrow as pa

from rayrec import storage
from rayrec.config import Config, InputError
from rayrec.data.engine import Engine
from rayrec.data.log_source import plain_files
from rayrec.data.materialized.write_tasks import JOB, disk_errors
from rayrec.data.materialized.writer import goes_on
from rayrec.data.text import mds_index, text_blocks, text_parts
from rayrec.data.text.text_parts import PART_BYTES, Source
from rayrec.data.text.tokenizer import (
    LEAST_BPE,
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
from rayrec.prepare.config import PreparationConfig, cache_folder, engine
from rayrec.prepare.text_tasks import (
    ShardTask,
    TextJob,
    find_characters,
    part_name,
    plan_shards,
    tokenize,
    write_shard,
)

BPE_SAMPLE_BYTES = 256 << 20
"""Training text that a BPE is learnt from; of more, parts spread over all of it. Its different words are held in memory."""
DEFAULT_VOCABULARY_SIZE = 1024
"""Of a BPE: few ids, for small texts and models."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """How a text becomes rows of tokens."""

    tokenizer: str = "bytes_bpe"
    """A local folder of a HuggingFace tokenizer; bytes_bpe: one learnt from the training text; characters: one token each."""
    vocabulary_size: int | None = None
    """Of bytes_bpe; None: 1024."""
    block_size: int = 128
    """Tokens of a row."""
    validation_fraction: float = 0.1
    """Part of the text, its end, that is held out."""
    part_bytes: int = PART_BYTES
    """Text that one task tokenises; tokens do not reach across parts, so the same value gives the same tokens."""
    shard_bytes: int = 16 << 20
    """Size of a shard: what is fetched, kept and shuffled as a whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2 or self.part_bytes < 1024 or self.shard_bytes < 1024:
            raise InputError("block_size must be at least 2, part_bytes and shard_bytes at least 1024")
        if not 0 <= self.validation_fraction < 1:
            raise InputError(f"validation_fraction: {self.validation_fraction} must be at least 0 and below 1")
        if self.vocabulary_size is not None and self.tokenizer != "bytes_bpe":
            raise InputError(
                f"vocabulary_size: of tokenizer bytes_bpe only; {self.tokenizer} has the size that it has, leave it out"
            )
        if self.vocabulary_size is not None and self.vocabulary_size < LEAST_BPE:
            raise InputError(
                f"vocabulary_size: {self.vocabulary_size} is below {LEAST_BPE}, every byte and the end of text"
            )


def preprocess_text(
    path: str, *, out: str, text: TextConfig, config: PreparationConfig, console: Console
) -> dict[str, Any]:
    """Writes the text (UTF-8; file, glob or folder, gzip too, local or at a URL) as rows of tokens into folder `out`, which
    appears complete or not at all; called again after it was interrupted, it resumes where it stopped.

    Of `config` only files and address matter. Returns what the manifest says of the sets, and bytes and seconds. Raises
    InputError for text that is not UTF-8 or fills no row, an unusable tokenizer, or where `out` exists.
    """
    begun = time.perf_counter()
    require("streaming", "tokenizers", extra="language")
    out = storage.absolute(out).rstrip("/")
    _check_target(out)
    given = None if text.tokenizer in ("bytes_bpe", "characters") else _given(text.tokenizer)
    if text_blocks.sets_of_shards(path):
        raise InputError(
            f"{path}: holds MDS shards, not plain text; shards of tokens are made usable by `rayrec adopt {path} --tokenizer "
            "DIR`, and a column of text is to be written into a file first, a document a line"
        )
    files = storage.list_files(path, names=config.files)
    with console.preparing(), engine(config, console, paths=(path, out)) as running:
        sources = _sources(files, running, console)
        work = _Work(out, text, sources, running, console)
        work.begin(files, given)
        manifest = work.finish(files, work.write_shards(work.tokenize()))
    size_bytes = sum(described["bytes"] for described in manifest["sets"].values())
    names = ("format", "block_size", "vocabulary_size", "tokenizer", "end_token", "sets", "tokens_left_out", "hash")
    seconds = time.perf_counter() - begun
    return {"out": out, **{name: manifest[name] for name in names}, "bytes": size_bytes, "seconds": seconds}


def _check_target(out: str) -> None:
    made = storage.join(out, text_blocks.MANIFEST) if storage.is_url(out) else out
    if storage.exists(made):
        raise InputError(f"{out}: exists already; remove it or choose another place")


def _given(folder: str) -> Files:
    if not os.path.isdir(os.path.expanduser(folder)):
        raise InputError(
            f"tokenizer: {folder} is no folder here; give one of a HuggingFace tokenizer, bytes_bpe or characters (nothing is "
            "looked for on a hub)"
        )
    files = read_tokenizer(os.path.expanduser(folder))
    TextTokenizer(files, folder)
    return files


def _sources(files: Sequence[storage.File], engine: Engine, console: Console) -> list[Source]:
    folder = storage.absolute(os.path.join(cache_folder(), "unpacked"))
    plain = plain_files(files, unpack_folder=folder, engine=engine, note=console.note)
    return [Source(here.path, file.path, here.size_bytes) for file, here in zip(files, plain, strict=True)]


@final
class _Work:
    """One call's way from text to folder."""

    def __init__(self, out: str, text: TextConfig, sources: list[Source], engine: Engine, console: Console) -> None:
        self.out, self.text, self.engine, self.console = out, text, engine, console
        self.folder = out if storage.is_url(out) else f"{out}.partial"
        self.parts = text_parts.parts_of(
            sources, validation_fraction=text.validation_fraction, part_bytes=text.part_bytes
        )
        if not self.parts:
            raise InputError(f"{sources[0].name}: holds no text")

    def begin(self, files: Sequence[storage.File], given: Files | None) -> None:
        """The tokenizer, and last what all is being made of; both are there already where a call goes on."""
        identity = [[file.path, file.size_bytes, file.modified_ns] for file in files]
        options = {**self.text.to_dict(), "tokenizer": hash_of(given) if given else self.text.tokenizer}
        made_of = {"version": text_blocks.VERSION, "format": text_blocks.FORMAT, "text": hash_of(identity), **options}
        folder = storage.join(self.folder, "tokenizer")
        if goes_on(self.folder, made_of):
            self.console.note(f"{self.folder}: going on")
        else:
            with disk_errors(self.folder):
                write_tokenizer(given or self._made_tokenizer(), folder)
                storage.write_json(storage.join(self.folder, JOB), made_of)
        self.tokenizer = load_tokenizer(folder)
        self.job = TextJob(self.folder, self.tokenizer.hash, self.text.block_size)

    def _made_tokenizer(self) -> Files:
        if self.text.tokenizer == "characters":
            found: set[str] = set()
            for table in self._tables("find characters (parts of the text)", find_characters, self.parts):
                found.update(table.column("characters")[0].as_py())
            return characters(found)
        training = [part for part in self.parts if part.set == "train"]
        every = max(1, -(-sum(part.stop - part.start for part in training) // BPE_SAMPLE_BYTES))
        size = self.text.vocabulary_size or DEFAULT_VOCABULARY_SIZE
        self.console.note(f"learning a byte-level BPE of {size:,} tokens from the training text")
        return bytes_bpe(map(text_parts.read_part, training[::every]), size)

    def tokenize(self) -> dict[int, int]:
        """Tokens of each part."""
        task = functools.partial(tokenize, job=self.job)
        markers = self._markers("tokenize (parts of the text)", task, {part_name(part): part for part in self.parts})
        return {marker["number"]: marker["tokens"] for marker in markers}

    def write_shards(self, tokens_of: dict[int, int]) -> dict[str, dict[str, Any]]:
        """What the manifest says of each set, and `shards`, what its index does."""
        block_size = self.text.block_size
        sets: dict[str, dict[str, Any]] = {}
        row_bytes = block_size * self.tokenizer.dtype.itemsize + 4  # 4: where it starts
        shards: dict[str, ShardTask] = {}
        for name in dict.fromkeys(part.set for part in self.parts):
            counts = [(part.number, tokens_of[part.number]) for part in self.parts if part.set == name]
            total = sum(count for _, count in counts)
            planned = plan_shards(
                name, counts, block_size=block_size, rows_per_shard=max(1, self.text.shard_bytes // row_bytes)
            )
            if not planned:
                raise InputError(
                    f"{self.parts[0].name}: the {name} text has {total:,} tokens, less than one row of {block_size}; give more "
                    "text, or another --validation-fraction or --block-size"
                )
            shards |= {shard.name: shard for shard in planned}
            sets[name] = {
                "blocks": total // block_size,
                "tokens": total // block_size * block_size,
                "tokens_left_out": total % block_size,
                "bytes": 0,
                "shards": [],
            }
        for marker in self._markers("write (shards)", functools.partial(write_shard, job=self.job), shards):
            sets[marker["set"]]["bytes"] += marker["info"]["raw_data"]["bytes"]
            sets[marker["set"]]["shards"].append(marker["info"])
        return sets

    def finish(self, files: Sequence[storage.File], sets: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The indices, the manifest, then the folder's name."""
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
            "hash": hash_of([self.tokenizer.hash, shards]),
        }
        with disk_errors(self.folder):
            for name, infos in shards.items():
                mds.write_index(storage.join(self.folder, name), infos)
                self._remove_others(name, {mds_index.INDEX, *(info["raw_data"]["basename"] for info in infos)})
            storage.remove_folder(storage.join(self.folder, "tokens"))
            storage.write_json(storage.join(self.folder, text_blocks.MANIFEST), manifest)
        if self.folder != self.out:
            os.rename(self.folder, self.out)
        storage.remove_folder(storage.join(self.out, "done"))
        storage.remove_file(storage.join(self.out, JOB))
        return manifest

    def _remove_others(self, name: str, wanted: set[str]) -> None:
        """What a killed task began to write."""
        folder = storage.join(self.folder, name)
        for other in set(storage.list_folder(folder)) - wanted:
            storage.remove_file(storage.join(folder, other))

    def _markers(self, name: str, task: Callable[[Any], pa.Table], items: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What the task says of each item, by the names of their markers; what is done already is not done again."""
        there = {posixpath.splitext(file)[0] for file in storage.list_folder(storage.join(self.folder, "done"))}
        done = {item: storage.read_json(self.job.marker(item)) for item in items if item in there}
        waiting = [item for name_of, item in items.items() if name_of not in done]
        made = self._tables(name, task, waiting)
        for name_of in items:
            yield done[name_of] if name_of in done else json.loads(next(made).column("marker")[0].as_py())

    def _tables(self, name: str, task: Callable[[Any], pa.Table], items: Sequence[Any]) -> Iterator[pa.Table]:
        for number, table in enumerate(self.engine.run(name, task, items, block_bytes=1 << 16), start=1):
            self.console.progress(name, number, len(items))
            yield table


def hash_of(value: Any) -> str:
    """16 hexadecimal digits."""
    if isinstance(value, dict):
        value = {name: hashlib.sha256(content).hexdigest() for name, content in value.items()}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
