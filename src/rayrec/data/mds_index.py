"""What the index.json of a set of MDS shards says: files, rows, checksums, and the one layout of rows that is read here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rayrec.config import InputError

INDEX: Final = "index.json"
COLUMN: Final = "tokens"
_HASHES: Final = ("xxh3_64", "xxh64", "sha1", "sha256", "md5")
"""That a shard is checked with: the first that its index has."""
_ENCODING: Final = re.compile(r"ndarray:(uint8|uint16|uint32|int32|int64):(\d+)")


@dataclass(frozen=True)
class Shard:
    """One file of rows."""

    name: str
    rows: int
    size_bytes: int
    checksum: tuple[str, str] | None
    """(algorithm, hexadecimal digits); None where the index has none."""


@dataclass(frozen=True)
class Index:
    """All shards of a set."""

    shards: tuple[Shard, ...]
    dtype: np.dtype[Any]
    block_size: int
    """Tokens of a row."""

    @classmethod
    def parse(cls, content: bytes, path: str) -> Index:
        """From the bytes of the file at `path`. Raises InputError for what is no index of rows of tokens."""
        try:
            found = json.loads(content)
            shards = tuple(map(_shard, found["shards"])) if found["version"] == 2 else ()
            layouts = {
                (shard["format"], shard["compression"], *shard["column_names"], *shard["column_encodings"])
                for shard in found["shards"]
            }
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not an index of MDS shards, or a damaged one ({error!r})") from None
        if not shards or any(os.path.basename(shard.name) != shard.name or shard.rows < 1 for shard in shards):
            raise InputError(f"{path}: names no shards that lie beside it and hold rows; prepare the text again")
        layout = layouts.pop()
        encoding = _ENCODING.fullmatch(str(layout[-1]))
        if layouts or layout[:3] != ("mds", None, COLUMN) or len(layout) != 4 or encoding is None:
            raise InputError(
                f"{path}: its shards hold {', '.join(map(str, layout))}; what is read is mds without compression, with one "
                f"column, '{COLUMN}', of fixed length: ndarray:uint16:LENGTH, or uint8, uint32, int32, int64"
            )
        return cls(shards, np.dtype(encoding[1]).newbyteorder("<"), int(encoding[2]))


def _shard(info: Mapping[str, Any]) -> Shard:
    raw = info["raw_data"]
    checksum = next(((name, raw["hashes"][name]) for name in _HASHES if name in raw["hashes"]), None)
    return Shard(str(raw["basename"]), int(info["samples"]), int(raw["bytes"]), checksum)
