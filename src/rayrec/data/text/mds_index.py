"""What the index.json of a set of MDS shards says: files, rows, checksums, columns; and where a row's tokens are in a shard."""

from __future__ import annotations

import json
import mmap
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
_ENCODING: Final = re.compile(r"ndarray(?::(uint8|uint16|uint32|int32|int64)(?::(\d+))?)?")
_DTYPES: Final = {8: "uint8", 16: "uint16", 32: "uint32", 33: "int32", 65: "int64"}
"""Types of tokens by the number that streaming writes before an array whose type its encoding does not give."""


@dataclass(frozen=True)
class Packed:
    """The compressed file of a shard."""

    name: str
    algorithm: str
    """Of streaming's: zstd, gz, br, snappy or bz2, with or without a level."""
    size_bytes: int
    checksum: tuple[str, str] | None


@dataclass(frozen=True)
class Shard:
    """One file of rows."""

    name: str
    rows: int
    size_bytes: int
    checksum: tuple[str, str] | None
    """(algorithm, hexadecimal digits); None where the index has none."""
    packed: Packed | None = None
    """Where it is compressed: what there is in its place."""


@dataclass(frozen=True)
class TokenColumn:
    """The column of a set that has the tokens."""

    name: str
    dtype: str
    """Little-endian: <u2, <i4, <i8, ..."""
    block_size: int
    """Tokens of a row; all rows have as many."""


@dataclass(frozen=True)
class Index:
    """All shards of a set."""

    shards: tuple[Shard, ...]
    columns: tuple[tuple[str, str, int | None], ...]
    """(name, encoding, bytes of a value: None if they differ), in the order in which a row has them."""

    @classmethod
    def parse(cls, content: bytes, path: str) -> Index:
        """From the bytes of the file at `path`. Raises InputError for what is no index of MDS shards."""
        try:
            found = json.loads(content)
            shards = tuple(map(_shard, found["shards"])) if found["version"] == 2 else ()
            layouts = {
                tuple(zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True))
                for shard in found["shards"]
            }
            formats = {shard["format"] for shard in found["shards"]}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not an index of MDS shards, or a damaged one ({error!r})") from None
        if not shards or any(os.path.basename(shard.name) != shard.name or shard.rows < 1 for shard in shards):
            raise InputError(f"{path}: names no shards that lie beside it and hold rows; prepare the text again")
        if formats != {"mds"} or len(layouts) > 1:
            raise InputError(f"{path}: its shards are not all of format mds with the same columns; write them again")
        return cls(shards, layouts.pop())

    def own_column(self, path: str) -> TokenColumn:
        """The column that rayrec's own sets have. Raises InputError for a set of another program."""
        (name, encoding, _), *others = self.columns
        match = _ENCODING.fullmatch(encoding)
        if name != COLUMN or others or match is None or match[2] is None:
            described = ", ".join(f"{column} ({kind})" for column, kind, _ in self.columns)
            raise InputError(
                f"{path}: its shards hold {described}, not what rayrec writes: '{COLUMN}' of fixed length; make a folder of "
                "another program usable with `rayrec adopt`"
            )
        return TokenColumn(COLUMN, np.dtype(match[1]).newbyteorder("<").str, int(match[2]))

    def find_column(self, name: str | None, path: str) -> tuple[str, str]:
        """(name, encoding) of the column of tokens: `name`, else tokens, else input_ids, else the only one. Raises InputError if
        there is none, or one that has no tokens."""
        encodings = {column: encoding for column, encoding, _ in self.columns}
        guesses = [guess for guess in (COLUMN, "input_ids") if guess in encodings]
        chosen = name or (guesses[0] if guesses else next(iter(encodings)) if len(encodings) == 1 else None)
        described = ", ".join(f"{column} ({encoding})" for column, encoding in encodings.items())
        if chosen not in encodings:
            raise InputError(
                f"{path}: its rows have {described}; name the column of tokens with --column"
                + (f", {name} is none" if name else "")
            )
        encoding = encodings[chosen]
        if encoding == "str":
            raise InputError(
                f"{path}: column {chosen} is text, not tokens; write the text into a file, a document a line, and run `rayrec "
                "preprocess FILE --format mds`"
            )
        if encoding != "bytes" and _ENCODING.fullmatch(encoding) is None:
            raise InputError(
                f"{path}: column {chosen} is of type {encoding}; tokens are read from ndarray, of whole numbers, and bytes"
            )
        return chosen, encoding

    def measure(self, content: mmap.mmap, name: str, bytes_dtype: str, path: str) -> TokenColumn:
        """The column of tokens, from the first row of a shard; `bytes_dtype` is that of tokens in a column of bytes."""
        start, _ = np.frombuffer(content, "<u4", 2, 4).tolist()
        _, size, _, dtype = self._place(content, start, name, bytes_dtype, path)
        if not size or size % dtype.itemsize:
            raise InputError(f"{path}: column {name}: {size} bytes are no row of {dtype}; give --token-dtype")
        return TokenColumn(name, dtype.newbyteorder("<").str, size // dtype.itemsize)

    def rows(self, content: mmap.mmap, shard: Shard, column: TokenColumn, path: str) -> np.ndarray:
        """The tokens (rows, block_size) of a mapped shard. Raises InputError for a shard that is damaged, or whose rows have
        different lengths."""
        count, dtype = int(np.frombuffer(content, "<u4", 1)[0]), np.dtype(column.dtype)
        starts = np.frombuffer(content, "<u4", shard.rows + 1, 4).astype(np.int64)
        if count != shard.rows or starts[-1] != shard.size_bytes or not 0 < starts[0] < starts[1] <= starts[-1]:
            raise damaged(path, f"does not hold {shard.rows:,} rows of {column.block_size} tokens")
        first, size, head, found = self._place(content, int(starts[0]), column.name, column.dtype, path)
        row_bytes = int(starts[1] - starts[0])
        same = (
            found == dtype and size == column.block_size * dtype.itemsize and not (np.diff(starts) != row_bytes).any()
        )
        if same and head:
            heads = np.ndarray((shard.rows, first), np.uint8, content, int(starts[0]), (row_bytes, 1))
            same = all(not (heads[:, low:high] != heads[0, low:high]).any() for low, high in head)
        if not same:
            raise InputError(
                f"{path}: its rows do not all have {column.block_size} tokens of {dtype} at the same place; write rows of one "
                "length, without columns of other lengths"
            )
        return np.ndarray(
            (shard.rows, column.block_size), dtype, content, int(starts[0]) + first, (row_bytes, dtype.itemsize)
        )

    def _place(
        self, content: mmap.mmap, start: int, name: str, bytes_dtype: str, path: str
    ) -> tuple[int, int, list[tuple[int, int]], np.dtype[Any]]:
        """Of the row that starts at byte `start`: (first byte of the tokens in the row, their bytes, ranges of the row that
        say how it is laid out, dtype)."""
        variable = sum(not size for _, _, size in self.columns)
        sizes = iter(np.frombuffer(content, "<u4", variable, start).tolist())
        at = 4 * variable
        head = [(0, at)] if variable else []
        for column, encoding, fixed in self.columns:
            size = fixed or next(sizes)
            if column != name:
                at += size
                continue
            if encoding == "bytes":
                return at, size, head, np.dtype(bytes_dtype)
            match = _ENCODING.fullmatch(encoding)
            assert match is not None
            prefix, dtype = at, match[1]
            if dtype is None:
                dtype = _DTYPES.get(content[start + prefix])
                prefix += 1
            if match[2] is None:
                shape = content[start + prefix]
                prefix += 1 + (shape >> 2) * (1 << (shape & 3))
            if dtype is None:
                raise InputError(f"{path}: column {name} has an array that is not of whole numbers; tokens are")
            return prefix, size - (prefix - at), [*head, *([(at, prefix)] if prefix > at else [])], np.dtype(dtype)
        raise AssertionError(name)


def damaged(path: str, how: str) -> InputError:
    return InputError(f"{path}: damaged: {how}; copy it again or prepare the text again")


def _shard(info: Mapping[str, Any]) -> Shard:
    raw, algorithm = info["raw_data"], info["compression"]
    if algorithm is None:
        return Shard(str(raw["basename"]), int(info["samples"]), int(raw["bytes"]), _checksum(raw))
    packed = info["zip_data"]
    name = str(packed["basename"])
    if os.path.basename(name) != name:
        raise ValueError(name)
    of_packed = Packed(name, str(algorithm), int(packed["bytes"]), _checksum(packed))
    return Shard(str(raw["basename"]), int(info["samples"]), int(raw["bytes"]), _checksum(raw), of_packed)


def _checksum(file: Mapping[str, Any]) -> tuple[str, str] | None:
    return next(((name, file["hashes"][name]) for name in _HASHES if name in file["hashes"]), None)
