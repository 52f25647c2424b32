"""Token blocks in MDS shards, written and decoded by MosaicML streaming, which only this file
imports. `storage.cache.ShardCache` keeps fetched shards: the processes of a node share files.
The first one to need a shard fetches it under a lock, which is released if it dies.
"""

from __future__ import annotations

import importlib
import json
import logging
import mmap
import os
import posixpath
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Final, Literal, final

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.arrow import json_reply
from rayrec.humanize import one_line
from rayrec.imports import require
from rayrec.storage import cache
from rayrec.storage.cache import MIN_FILES, ShardCache, in_use

_logger = logging.getLogger(__name__)

INDEX: Final = "index.json"
COLUMN: Final = "tokens"
LENGTHS: Final = "lengths"
"""Batch key of the token counts of padded rows, int64 [rows]."""
Layout = Literal["equal", "pack", "pad"]
_HASHES: Final = ("xxh3_64", "xxh64", "sha1", "sha256", "md5")
"""Checksum algorithms in order of preference. Shards are checked with the first one in their
index.
"""
_OPEN_SHARDS: Final = 256
"""Maximum number of mapped shards. Each uses a file descriptor."""
_NUM_DOWNLOADS: Final = 4
"""Maximum number of concurrent prefetches."""
_TRIES: Final = 4
"""Maximum attempts to open a shard. A full cache may evict it between download and opening."""


@dataclass(frozen=True)
class ShardFile:
    """File of a shard, as its index describes it."""

    name: str
    size_bytes: int
    checksum: tuple[str, str] | None
    """Pair (algorithm, hexadecimal digits). None if the index has no checksum."""


@dataclass(frozen=True)
class Shard(ShardFile):
    """Shard of rows in a plain file."""

    rows: int
    entry: Mapping[str, Any]
    """Entry of the index, from which streaming makes a reader."""
    packed: ShardFile | None = None
    """Compressed file that replaces the plain one. None if not compressed."""

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Shard:
        """Parse an entry of the index. Raises ValueError, KeyError or TypeError."""
        packed = _file(entry["zip_data"]) if entry["compression"] is not None else None
        if packed is not None and os.path.basename(packed.name) != packed.name:
            raise ValueError(packed.name)
        plain = _file(entry["raw_data"])
        return cls(**vars(plain), rows=int(entry["samples"]), entry=entry, packed=packed)


def _file(info: Mapping[str, Any]) -> ShardFile:
    hashes = info["hashes"]
    checksum = next(((name, hashes[name]) for name in _HASHES if name in hashes), None)
    return ShardFile(str(info["basename"]), int(info["bytes"]), checksum)


@dataclass(frozen=True)
class TokenColumn:
    """Token column of a set."""

    name: str
    dtype: str
    """Little-endian dtype: <u2, <i4, <i8, ..."""
    block_size: int
    """Number of tokens in every row, or in every block made of rows."""
    layout: Layout = "equal"
    """Blocks of training. equal: rows; pack: rows of a shard joined, then cut; pad: rows padded or
    cut to block_size.
    """
    end_token: int | None = None
    """Token inserted after packed rows that do not end with it. None: rows are joined unchanged."""
    blocks: Sequence[int] = ()
    """Number of blocks in each shard, if packed or padded."""

    def pack_blocks(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Pack or pad the tokens of a shard's rows into int32 [blocks, block_size]. Padded ones
        begin with their length.
        """
        size = self.block_size
        # Rows of one shard only: a block over two shards would need both to be fetched.
        if self.layout == "pack":
            if self.end_token is not None:
                rows = [
                    row if row[-1:] == self.end_token else np.append(row, self.end_token)
                    for row in rows
                ]
            joined = np.concatenate(rows)
            return joined[: len(joined) // size * size].reshape(-1, size).astype("<i4")
        blocks = np.zeros((len(rows), 1 + size), "<i4")
        for block, row in zip(blocks, rows, strict=True):
            block[0] = min(len(row), size)
            block[1 : 1 + len(row)] = row[:size]
        return blocks


@dataclass(frozen=True)
class Index:
    """Shards and row layout of a set."""

    shards: tuple[Shard, ...]
    encodings: Mapping[str, str]
    """Streaming's encodings by column, in row order."""

    @classmethod
    def parse(cls, content: bytes, path: str) -> Index:
        """Parse the content of the index file at `path`. Raises InputError if it is not an index of
        MDS shards.
        """
        try:
            index = json.loads(content)
            shards = tuple(map(Shard.parse, index["shards"])) if index["version"] == 2 else ()
            layouts = {
                tuple(zip(shard["column_names"], shard["column_encodings"], strict=True))
                for shard in index["shards"]
            }
            formats = {shard["format"] for shard in index["shards"]}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: not an index of MDS shards, or damaged ({error!r})"
            ) from None
        if not shards or any(
            os.path.basename(shard.name) != shard.name or shard.rows < 1 for shard in shards
        ):
            raise InputError(
                f"{path}: must name shards in its folder that have rows. Prepare the text again."
            )
        if formats != {"mds"} or len(layouts) > 1:
            raise InputError(
                f"{path}: its shards must all have format mds and the same columns. Write them "
                "again."
            )
        return cls(shards, dict(layouts.pop()))

    def default_column(self, path: str) -> TokenColumn:
        """Return the token column of a set written by rayrec. Raises InputError for a set of
        another program.
        """
        match = re.fullmatch(r"ndarray:(uint16|uint32):(\d+)", self.encodings.get(COLUMN, ""))
        if len(self.encodings) > 1 or match is None:
            raise InputError(
                f"{path}: its shards have {self._describe()}, but rayrec writes '{COLUMN}' of "
                "fixed length. Make a folder of another program usable with `rayrec adopt`."
            )
        return TokenColumn(COLUMN, np.dtype(match[1]).newbyteorder("<").str, int(match[2]))

    def _describe(self) -> str:
        return ", ".join(f"{column} ({encoding})" for column, encoding in self.encodings.items())

    def find_column(self, name: str | None, path: str) -> tuple[str, str]:
        """Find (name, encoding) of the token column: `name`, tokens, input_ids, or the only one.
        Raises InputError without one.
        """
        usual = [guess for guess in (COLUMN, "input_ids") if guess in self.encodings]
        only = list(self.encodings) if len(self.encodings) == 1 else []
        selected = name or next(iter([*usual, *only]), "")
        if selected not in self.encodings:
            hint = f", {name} not found" if name else ""
            raise InputError(
                f"{path}: its rows have {self._describe()}. Name the token column with "
                f"--column{hint}."
            )
        encoding = self.encodings[selected]
        if encoding == "str":
            raise InputError(
                f"{path}: column {selected} is text, not tokens. Write the text into a file, one "
                "document per line, and run `rayrec preprocess FILE --format mds`."
            )
        if encoding.partition(":")[0] not in ("bytes", "ndarray"):
            raise InputError(
                f"{path}: column {selected}: token type must be ndarray of integers or bytes, got "
                f"{encoding}"
            )
        return selected, encoding


def different_rows(path: str, block_size: int, dtype: str) -> InputError:
    return InputError(
        f"{path}: all rows must have {block_size} tokens of {np.dtype(dtype)}. Adopt them with "
        "--rows pack or --rows pad."
    )


def damaged(path: str, how: str) -> InputError:
    return InputError(f"{path}: damaged: {how}. Copy it again or prepare the text again.")


# Layout of a shard (little-endian), as MosaicML streaming writes it:
#
#   uint32               number of rows
#   uint32 [rows + 1]    offset of each row in the file, and of its end
#   rows                 sizes (uint32) of columns without a fixed one, then their bytes
#
# The offsets are checked before any row is decoded: streaming trusts them, and would read a damaged
# shard as other tokens. Shards are mapped: the processes of a node share their pages. A mapping
# must outlive the rows read from it, so `ShardRows` holds it.
@final
class ShardRows:
    """Rows of a mapped shard, each decoded by streaming when read."""

    def __init__(self, content: mmap.mmap, shard: Shard, column: TokenColumn, path: str) -> None:
        """Check the offsets of the rows. Raises InputError if damaged."""
        self._starts = np.frombuffer(content, "<u4", shard.rows + 1, 4).astype(np.int64)
        if (
            int(np.frombuffer(content, "<u4", 1)[0]) != shard.rows
            or self._starts[-1] != shard.size_bytes
            or (np.diff(self._starts, prepend=0) <= 0).any()
        ):
            raise damaged(path, f"does not have {shard.rows:,} rows")
        self._content = content
        self._column = column
        self._path = path
        # Only tokens are decoded. Other columns may be large, or pickles, which contain code.
        columns = zip(shard.entry["column_names"], shard.entry["column_encodings"], strict=True)
        encodings = [encoding if name == column.name else "bytes" for name, encoding in columns]
        self._reader = load_streaming().base.format.reader_from_json(
            "", None, {**shard.entry, "column_encodings": encodings}
        )

    def read_all(self) -> list[np.ndarray]:
        """Return the tokens of each row."""
        return [self.tokens(row) for row in range(len(self._starts) - 1)]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Return the tokens of rows, [rows, block_size]. Raises InputError for another length."""
        tokens = [self.tokens(row) for row in rows.tolist()]
        if any(len(row) != self._column.block_size for row in tokens):
            raise different_rows(self._path, self._column.block_size, self._column.dtype)
        return np.stack(tokens)

    def tokens(self, row: int) -> np.ndarray:
        """Return the tokens of a row. Raises InputError if they cannot be decoded."""
        name = self._column.name
        start, stop = self._starts[row : row + 2].tolist()
        try:
            tokens = self._reader.decode_sample(self._content[start:stop])[name]
            if isinstance(tokens, bytes):
                tokens = np.frombuffer(tokens, self._column.dtype)
        except (ValueError, KeyError, IndexError) as error:
            raise InputError(
                f"{self._path}: column {name}: row {row:,} cannot be decoded ({error}). Set "
                "--token-dtype, or copy the file again."
            ) from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InputError(f"{self._path}: column {name}: tokens must be arrays of integers")
        return tokens


# Threads of a loader may import at the same time. The second must not see the empty modules.
_import_lock: Final = threading.Lock()


def load_streaming() -> ModuleType:
    """Import streaming without its vision, text and multimodal datasets, which import torchvision,
    whose pip build crashes with a CPU build of torch. The caller can still import them. Raises
    InputError if not installed.
    """
    require("streaming", extra="language")
    with _import_lock:
        if "streaming" in sys.modules:
            return importlib.import_module("streaming")
        # Restored even if the import fails: the caller may use these modules.
        # Empty modules in their place while the package is imported.
        empty = {
            f"streaming.{name}": ModuleType(f"streaming.{name}")
            for name in ("vision", "text", "multimodal")
        }
        sys.modules.update(empty)
        try:
            streaming = importlib.import_module("streaming")
        finally:
            for name in empty:
                del sys.modules[name]
        for name in empty:
            delattr(streaming, name.rpartition(".")[2])
        return streaming


def write_shard(tokens: np.ndarray, path: str) -> dict[str, Any]:
    """Write tokens [rows, block_size], uint16 or uint32, as a shard, atomically and reproducibly.
    Return its index entry.
    """
    streaming = load_streaming()
    columns = {COLUMN: f"ndarray:{tokens.dtype.name}:{tokens.shape[1]}"}
    # Streaming writes local folders only, and does not write atomically.
    with storage.Scratch("shard") as folder:
        with streaming.MDSWriter(
            out=folder, columns=columns, hashes=["xxh64"], size_limit=None
        ) as writer:
            for row in tokens:
                writer.write({COLUMN: row})
        (info,) = storage.read_json(os.path.join(folder, INDEX))["shards"]
        storage.copy_file(os.path.join(folder, info["raw_data"]["basename"]), path)
    info["raw_data"]["basename"] = posixpath.basename(path)
    return info


def write_index(folder: str, shards: Sequence[Mapping[str, Any]]) -> None:
    """Write index.json from the entries returned by `write_shard`, in order."""
    index = json.dumps({"shards": list(shards), "version": 2}, sort_keys=True)
    storage.write_bytes(storage.join(folder, INDEX), index.encode())


@final
class TokenRows:
    """RowSource over a folder of shards (with index.json, local or at a URL), with tokens int64 [n,
    block_size].

    Remote and compressed shards are cached, unpacked, in a folder shared by the processes of a
    node, so that each is fetched once. Shards are checked against the index before use. Create it
    in the process that reads: it cannot be pickled. One thread reads; another may call `will_read`.

    Args:
        path: Folder of the set.
        column: Token column of a set written by another program. None for a set of rayrec.
        cache_folder: Shard cache. None uses `shards` in $RAYREC_CACHE, else in ~/.cache/rayrec.
        cache_bytes: Maximum cache size of this set. Beyond it, the least recently used shards that
            are not in use are removed.

    Raises InputError if the folder cannot be read.
    """

    def __init__(
        self,
        path: str,
        *,
        column: TokenColumn | None = None,
        cache_folder: str | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        # Not first in a reading thread: streaming imports transformers, and a package that replaces
        # itself in sys.modules is incomplete for a thread that waited for another's import.
        load_streaming()
        path = storage.absolute(path).rstrip("/")
        content = storage.read_bytes(storage.join(path, INDEX))
        self._index = index = Index.parse(content, storage.join(path, INDEX))
        self._column = column = column or index.default_column(storage.join(path, INDEX))
        self.block_size = column.block_size
        self._shards = index.shards
        """Shards as mapped: packed and padded ones are made by this class."""
        if column.layout != "equal":
            self._width = column.block_size + (column.layout == "pad")
            self._shards = tuple(
                Shard(shard.name, 4 * blocks * self._width, None, blocks, {})
                for shard, blocks in zip(index.shards, column.blocks, strict=True)
            )
            content += repr(column).encode()
        self.chunk_rows: Sequence[int] = tuple(shard.rows for shard in self._shards)
        self.downloaded_bytes = 0
        """Bytes downloaded by this process."""
        self._count_lock = threading.Lock()
        self._path = self._folder = path
        self._cache: ShardCache | None = None
        self._max_open = _OPEN_SHARDS
        self._ahead: ThreadPoolExecutor | None = None
        if (
            storage.is_url(path)
            or column.layout != "equal"
            or any(shard.packed for shard in index.shards)
        ):
            sizes_bytes = {shard.name: shard.size_bytes for shard in self._shards}
            folder = cache_folder or os.path.join(cache.folder(), "shards")
            self._cache = ShardCache(
                path, index=content, sizes_bytes=sizes_bytes, folder=folder, limit_bytes=cache_bytes
            )
            if cache_bytes is not None:  # Mapped shards cannot be evicted.
                self._max_open = min(
                    _OPEN_SHARDS, cache_bytes // max(sizes_bytes.values()) // MIN_FILES
                )
            self._folder = self._cache.folder
            self._ahead = ThreadPoolExecutor(_NUM_DOWNLOADS, thread_name_prefix="shards")
        self._bounds = np.cumsum([0, *self.chunk_rows])
        self._mapped: OrderedDict[int, np.ndarray | ShardRows] = OrderedDict()
        self._checked: set[int] = set()
        self._pending: dict[int, Future[None]] = {}

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __reduce__(self) -> Any:
        raise TypeError("TokenRows cannot be pickled: create it in the process that reads")

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Read rows in the given order, with LENGTHS if 0-padded. Raises InputError for a bad
        shard, OSError in an outage.
        """
        padded = self._column.layout == "pad"
        rows = np.empty((len(indices), self.block_size + padded), np.int64)
        shards = self._find_shards(indices)
        for shard in np.unique(shards).tolist():
            matches = np.flatnonzero(shards == shard)
            rows[matches] = self._read_rows(shard)[indices[matches] - self._bounds[shard]]
        return (
            {COLUMN: np.ascontiguousarray(rows[:, 1:]), LENGTHS: rows[:, 0].copy()}
            if padded
            else {COLUMN: rows}
        )

    def will_read(self, indices: np.ndarray) -> None:
        """Fetch the shards of these rows in the background. `read` retries failures and raises
        them.
        """
        if self._ahead is None:
            return
        for shard in np.unique(self._find_shards(indices)).tolist():
            future = self._pending.get(shard)
            if shard not in self._mapped and (future is None or future.done()):
                self._pending[shard] = self._ahead.submit(self._fetch, shard)

    def close(self) -> None:
        """Release files, memory and threads. Can be called repeatedly."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=True, cancel_futures=True)
        self._mapped.clear()

    def _find_shards(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._bounds, indices, side="right") - 1

    def _read_rows(self, number: int) -> np.ndarray | ShardRows:
        """Return the mapped rows of a shard."""
        if number not in self._mapped:
            self._mapped[number] = self._open(number)
            if len(self._mapped) > self._max_open:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(number)
        return self._mapped[number]

    def _open(self, number: int) -> np.ndarray | ShardRows:
        for _ in range(_TRIES):
            try:
                return self._map(number)
            except FileNotFoundError:
                pass
            except InputError as error:
                if self._cache is None:
                    raise
                _logger.warning("Fetching a shard again: %s", error)
                self._cache.remove(self._index.shards[number].name)
            self._fetch(number)
        raise InputError(
            f"{self._folder}: shards are evicted as fast as they arrive. Increase cache_bytes."
        )

    def _map(self, number: int) -> np.ndarray | ShardRows:
        """Map a shard. Raises FileNotFoundError if it has not been fetched."""
        shard = self._shards[number]
        path = os.path.join(self._folder, shard.name)
        with open(path, "rb") as file:
            if self._cache is not None and not in_use(file.fileno()):
                raise FileNotFoundError(path)
            content = _mapped(file.fileno(), shard, path)
        if number not in self._checked:
            _check_bytes(content, shard.checksum, path)
            self._checked.add(number)
        if self._column.layout != "equal":
            return np.frombuffer(content, "<i4").reshape(shard.rows, self._width)
        return ShardRows(content, shard, self._column, path)

    def _fetch(self, number: int) -> None:
        """Fetch a shard into the folder unless present. Waits if another thread or process is
        fetching it.
        """
        shard = self._index.shards[number]
        if self._cache is None:
            raise InputError(
                f"{self._folder}/{shard.name}: not found. Copy it there or prepare the text again."
            )

        def check(local: str) -> None:
            map_shard(local, self._shards[number], storage.join(self._path, shard.name))

        def blocks() -> Iterator[bytes]:
            with opened_shard(self._path, shard) as (content, path):
                rows = ShardRows(content, shard, self._column, path).read_all()
                yield self._column.pack_blocks(rows).tobytes()

        read = (
            blocks if self._column.layout != "equal" else partial(shard_content, self._path, shard)
        )
        fetched_bytes = self._cache.fetch(shard.name, check, read)
        with self._count_lock:
            self.downloaded_bytes += fetched_bytes


def shard_content(folder: str, shard: Shard) -> Iterator[bytes]:
    """Read a shard from a folder, local or at a URL, and unpack it. Raises InputError if a
    compressed file is damaged.
    """
    packed = shard.packed
    if packed is None:
        yield from storage.read_stream(storage.join(folder, shard.name))
        return
    path = storage.join(folder, packed.name)
    content = storage.read_bytes(path)
    if len(content) != packed.size_bytes:
        raise damaged(
            path, f"size must be {packed.size_bytes:,} bytes by its index, got {len(content):,}"
        )
    _check_bytes(content, packed.checksum, path)
    try:
        plain = load_streaming().base.compression.decompress(shard.entry["compression"], content)
    except Exception as error:  # Each library has its own.
        raise damaged(path, f"cannot be unpacked ({one_line(error)[:100]})") from None
    yield plain


@contextmanager
def opened_shard(folder: str, shard: Shard) -> Iterator[tuple[mmap.mmap, str]]:
    """Check, map and yield a shard, packed or plain, with its path. Raises InputError if missing or
    damaged.
    """
    path = storage.join(folder, shard.packed.name if shard.packed else shard.name)
    if not storage.exists(path):
        raise InputError(f"{path}: file not found. Copy it there")
    with storage.Scratch("shard") as scratch:
        local = path
        if shard.packed or storage.is_url(path):
            local = os.path.join(scratch, shard.name)
            storage.write_stream(local, shard_content(folder, shard))
        yield map_shard(local, shard, path), path


def scan_shard(shard: Shard, *, folder: str, column: TokenColumn) -> pa.Table:
    """Check a shard in a data task. The reply has `dtype` and `block_size` (measured for equal
    rows), the smallest and largest token, and the numbers of `blocks`, their `tokens`, and tokens
    `left_out`. Raises InputError for an unsuitable shard.
    """
    with opened_shard(folder, shard) as (content, path):
        rows = ShardRows(content, shard, column, path).read_all()
        tokens = np.concatenate(rows)
        num_tokens = tokens.size
        if column.layout == "equal":
            dtype = rows[0].dtype.newbyteorder("<").str
            column = replace(column, dtype=dtype, block_size=len(rows[0]))
            if any(len(row) != column.block_size for row in rows):
                raise different_rows(path, column.block_size, column.dtype)
            num_blocks = shard.rows
        else:
            blocks = column.pack_blocks(rows)
            num_blocks = len(blocks)
            num_tokens = int(blocks[:, 0].sum()) if column.layout == "pad" else blocks.size
        return json_reply(
            {
                "dtype": column.dtype,
                "block_size": column.block_size,
                "min": int(tokens.min(initial=0)),
                "max": int(tokens.max(initial=0)),
                "blocks": num_blocks,
                "tokens": num_tokens,
                "left_out": max(0, tokens.size - num_tokens),
            }
        )


def map_shard(local: str, shard: Shard, path: str | None = None) -> mmap.mmap:
    """Map a plain shard and check it against its index. Errors name `path`, by default `local`."""
    with open(local, "rb") as file:
        content = _mapped(file.fileno(), shard, path or local)
    _check_bytes(content, shard.checksum, path or local)
    return content


def _mapped(descriptor: int, shard: Shard, path: str) -> mmap.mmap:
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes != shard.size_bytes or size_bytes < 4 * (shard.rows + 2):
        raise damaged(
            path, f"size must be {shard.size_bytes:,} bytes by its index, got {size_bytes:,}"
        )
    return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)


def _check_bytes(content: bytes | mmap.mmap, checksum: tuple[str, str] | None, path: str) -> None:
    if checksum is not None:
        algorithm, digits = checksum
        if load_streaming().base.hashing.get_hash(algorithm, content) != digits:
            raise damaged(path, f"{algorithm} must be {digits} by its index")
