"""Blocks of tokens in MDS shards: written by MosaicML streaming, which no other file imports, and read without it.

Shards come through `rayrec.storage` and are kept by `storage.cache.ShardCache`: processes of a node share files, and who needs
a shard first fetches it, under a lock that ends with its holder. Rows are copied out of mapped files: each has a fixed size, so
nothing is decoded.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import mmap
import os
import posixpath
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import ModuleType
from typing import Any, Final, final

import numpy as np
import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.text.mds_index import COLUMN, INDEX, Index, Shard, TokenColumn, damaged
from rayrec.imports import require
from rayrec.storage.cache import LEAST_FILES, ShardCache, default_folder, in_use

_logger = logging.getLogger(__name__)

_OPEN_SHARDS: Final = 256
"""Mapped at once; each holds a file descriptor."""
_NUM_DOWNLOADS: Final = 4
"""Shards fetched ahead at a time."""
_PACKED: Final = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "bz2": "bz2", "snappy": "snappy"}
"""Arrow's names of streaming's compressions."""
_TRIES: Final = 4
"""To open a shard that a full cache may lose between its coming and its being opened."""


def load_streaming() -> ModuleType:
    """The package, without its data sets of images, texts and both: streaming.vision needs torchvision, of which pip's build
    ends a process that has a CPU build of torch, and so empty modules stand for them. Raises InputError without the extra."""
    require("streaming", extra="language")
    for name in ("vision", "text", "multimodal"):
        sys.modules.setdefault(f"streaming.{name}", ModuleType(f"streaming.{name}"))
    return importlib.import_module("streaming")


# Writing -------------------------------------------------------------------------------------------------------------


def write_shard(tokens: np.ndarray, path: str) -> dict[str, Any]:
    """Writes rows of tokens (rows, block_size), uint16 or uint32, as one shard at `path`, which appears complete or not at
    all, and returns what an index says of it. The same rows give the same bytes."""
    streaming = load_streaming()
    columns = {COLUMN: f"ndarray:{tokens.dtype.name}:{tokens.shape[1]}"}
    with storage.Scratch("shard") as folder:
        with streaming.MDSWriter(out=folder, columns=columns, hashes=["xxh64"], size_limit=None) as writer:
            for row in tokens:
                writer.write({COLUMN: row})
        (info,) = storage.read_json(os.path.join(folder, INDEX))["shards"]
        storage.copy_file(os.path.join(folder, info["raw_data"]["basename"]), path)
    info["raw_data"]["basename"] = posixpath.basename(path)
    return info


def write_index(folder: str, shards: Sequence[Mapping[str, Any]]) -> None:
    """Writes the index.json of a folder of shards, from what `write_shard` returned of each, in order."""
    index = json.dumps({"shards": list(shards), "version": 2}, sort_keys=True)
    storage.write_bytes(storage.join(folder, INDEX), index.encode())


# Reading -------------------------------------------------------------------------------------------------------------


@final
class TokenRows:
    """Rows of a set's folder (index.json and shards, local or at a URL), as a RowSource: tokens int64 (n, block_size).
    `column`: which column of a set of another program has them; None: the set is rayrec's own.

    Is made in the process that reads, and not pickled; one thread reads, another may call `will_read`. Shards at a URL, and
    those that are compressed, are kept, plain, in `cache_folder` (default: shards in $RAYREC_CACHE, else in ~/.cache/rayrec),
    which the processes of a node share, so that each is fetched once; beyond `cache_bytes` of one set, those go that are not in
    use and were not for longest. Each is checked against the index before its rows are used. Raises InputError where the folder
    cannot be read.
    """

    def __init__(
        self,
        path: str,
        *,
        column: TokenColumn | None = None,
        cache_folder: str | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        path = storage.absolute(path).rstrip("/")
        content = storage.read_bytes(storage.join(path, INDEX))
        self._index = index = Index.parse(content, storage.join(path, INDEX))
        self._column = column = column or index.own_column(storage.join(path, INDEX))
        self.block_size = column.block_size
        self.chunk_rows: Sequence[int] = tuple(shard.rows for shard in index.shards)
        self.downloaded_bytes = 0
        """By this process."""
        self._counting = threading.Lock()
        self._path = self._folder = path
        self._cache: ShardCache | None = None
        self._most_open = _OPEN_SHARDS
        self._ahead: ThreadPoolExecutor | None = None
        if storage.is_url(path) or any(shard.packed for shard in index.shards):
            sizes_bytes = {shard.name: shard.size_bytes for shard in index.shards}
            cache = ShardCache(
                path,
                index=content,
                sizes_bytes=sizes_bytes,
                folder=cache_folder or default_folder(),
                limit_bytes=cache_bytes,
            )
            if cache_bytes is not None:  # what is mapped cannot go
                self._most_open = min(_OPEN_SHARDS, cache_bytes // max(sizes_bytes.values()) // LEAST_FILES)
            self._folder, self._cache = cache.folder, cache
            self._ahead = ThreadPoolExecutor(_NUM_DOWNLOADS, thread_name_prefix="shards")
        self._bounds = np.cumsum([0, *self.chunk_rows])
        self._mapped: OrderedDict[int, np.ndarray] = OrderedDict()
        self._checked: set[int] = set()
        self._coming: dict[int, Future[None]] = {}

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __reduce__(self) -> Any:
        raise TypeError("TokenRows is not to be pickled: make it in the process that reads")

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows int64 (n,) in the order asked for. Raises InputError for a shard that is damaged or gone, OSError where
        its store is out for too long."""
        rows = np.empty((len(indices), self.block_size), np.int64)
        shards = self._shards_of(indices)
        for shard in np.unique(shards).tolist():
            chosen = np.flatnonzero(shards == shard)
            rows[chosen] = self._rows_of(shard)[indices[chosen] - self._bounds[shard]]
        return {COLUMN: rows}

    def will_read(self, indices: np.ndarray) -> None:
        """Fetches the shards of these rows in the background; what fails there is tried again, and told, by `read`."""
        if self._ahead is None:
            return
        for shard in np.unique(self._shards_of(indices)).tolist():
            known = self._coming.get(shard)
            if shard not in self._mapped and (known is None or known.done()):
                self._coming[shard] = self._ahead.submit(self._fetch_ahead, shard)

    def close(self) -> None:
        """Lets go of files, memory and threads. May be called again."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=True, cancel_futures=True)
        self._mapped.clear()

    def _shards_of(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._bounds, indices, side="right") - 1

    def _rows_of(self, number: int) -> np.ndarray:
        """A shard's rows (rows, block_size), mapped."""
        found = self._mapped.get(number)
        if found is None:
            found = self._mapped[number] = self._open(number)
            while len(self._mapped) > self._most_open:
                self._mapped.popitem(last=False)
        else:
            self._mapped.move_to_end(number)
        return found

    def _open(self, number: int) -> np.ndarray:
        for _ in range(_TRIES):
            try:
                return self._map(number)
            except FileNotFoundError:
                pass
            except InputError as error:
                if self._cache is None:
                    raise
                _logger.warning("%s; fetching it again", error)
                self._cache.remove(self._index.shards[number].name)
            self._fetch(number)
        raise InputError(f"{self._folder}: shards go as fast as they come; allow more cache_bytes")

    def _map(self, number: int) -> np.ndarray:
        """Raises FileNotFoundError where the shard is not here."""
        shard = self._index.shards[number]
        path = os.path.join(self._folder, shard.name)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if self._cache is not None and not in_use(descriptor):
                raise FileNotFoundError(path)
            content = _mapped(descriptor, shard, path)
        finally:
            os.close(descriptor)
        if number not in self._checked:
            _check(content, shard, path)
            self._checked.add(number)
        return self._index.rows(content, shard, self._column, path)

    def _fetch_ahead(self, number: int) -> None:
        with suppress(InputError, OSError):
            self._fetch(number)

    def _fetch(self, number: int) -> None:
        """Brings a shard into the folder, unless it is there; waits while another thread or process does."""
        shard = self._index.shards[number]
        if self._cache is None:
            raise InputError(f"{self._folder}/{shard.name}: no such file; copy it there or prepare the text again")

        def check(local: str) -> None:
            path = storage.join(self._path, shard.name)
            with open(local, "rb") as file:
                _check(_mapped(file.fileno(), shard, path), shard, path)

        fetched_bytes = self._cache.fetch(shard.name, check, lambda: shard_content(self._path, shard))
        with self._counting:
            self.downloaded_bytes += fetched_bytes


def shard_content(folder: str, shard: Shard) -> Iterator[bytes]:
    """The content of a shard in a folder, local or at a URL, unpacked if it is compressed. Raises InputError for a compressed
    file that is damaged."""
    packed = shard.packed
    if packed is None:
        yield from storage.read_stream(storage.join(folder, shard.name))
        return
    path = storage.join(folder, packed.name)
    content = storage.read_bytes(path)
    if len(content) != packed.size_bytes:
        raise damaged(path, f"has {len(content):,} bytes, its index says {packed.size_bytes:,}")
    _check_bytes(content, packed.checksum, path)
    algorithm = packed.algorithm.partition(":")[0]  # what follows is a level
    if algorithm not in _PACKED:
        raise InputError(f"{path}: compressed by {packed.algorithm}, which rayrec does not know")
    try:
        if algorithm == "snappy":  # without Arrow's frames
            plain = pa.Codec("snappy").decompress(content, shard.size_bytes, asbytes=True)
        else:
            plain = pa.CompressedInputStream(pa.BufferReader(content), _PACKED[algorithm]).read()
    except (OSError, pa.ArrowInvalid) as error:
        raise damaged(path, f"cannot be unpacked ({' '.join(str(error).split())[:100]})") from None
    yield plain


def map_shard(path: str, shard: Shard) -> mmap.mmap:
    """A plain shard's content, mapped and checked against its index."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        content = _mapped(descriptor, shard, path)
    finally:
        os.close(descriptor)
    _check(content, shard, path)
    return content


def _mapped(descriptor: int, shard: Shard, path: str) -> mmap.mmap:
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes != shard.size_bytes or size_bytes < 4 * (shard.rows + 2):
        raise damaged(path, f"has {size_bytes:,} bytes, its index says {shard.size_bytes:,}")
    return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)


def _check(content: mmap.mmap, shard: Shard, path: str) -> None:
    """Raises InputError where the content is not what the index has a checksum of."""
    _check_bytes(content, shard.checksum, path)


def _check_bytes(content: bytes | mmap.mmap, checksum: tuple[str, str] | None, path: str) -> None:
    if checksum is not None:
        algorithm, digits = checksum
        hashes: Any = hashlib
        if algorithm.startswith("xxh"):
            require("xxhash", extra="language")
            hashes = importlib.import_module("xxhash")
        if getattr(hashes, algorithm)(content).hexdigest() != digits:
            raise damaged(path, f"its {algorithm} is not {digits}, as its index says")
