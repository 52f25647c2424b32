"""Text as rows of tokens: what a prepared folder says of itself, and text that is tokenised in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.numbered_rows import ArrayRows, RowSource
from rayrec.data.text.mds import COLUMN, INDEX, TokenColumn
from rayrec.data.text.text_parts import read_texts
from rayrec.data.text.tokenizer import TextTokenizer, copy_tokenizer, load_tokenizer

__all__ = [
    "TextTokenizer",
    "TokenFolder",
    "copy_tokenizer",
    "is_tokens",
    "load_tokenizer",
    "open_tokens",
    "sets_of_shards",
    "text_rows",
]

MANIFEST: Final = "manifest.json"
FORMAT: Final = "rayrec-tokens"
VERSION: Final = 1


@dataclass(frozen=True)
class TokenFolder:
    """What `rayrec preprocess --format mds` wrote, or a folder of another program's shards that was adopted."""

    path: str
    block_size: int
    """Tokens of a row."""
    part_bytes: int
    """Text that was tokenised at once."""
    vocabulary_size: int
    """Ids are below it."""
    tokenizer_hash: str
    end_token: int | None
    """Id of what ends a text, where there is such a token."""
    sets: Mapping[str, int]
    """Rows of train and, where text was held out, validation."""
    hash: str
    """Of all rows and the tokenizer."""
    set_folders: Mapping[str, str]
    """Folder of each set, below `path`; those of rayrec's own sets have their names."""
    columns: Mapping[str, TokenColumn]
    """Of sets that another program wrote: where their tokens are."""

    @property
    def tokenizer(self) -> str:
        """A HuggingFace tokenizer's folder."""
        return storage.join(self.path, "tokenizer")

    def set_path(self, name: str) -> str:
        """The folder of a set: its index.json and shards."""
        folder = self.set_folders[name]
        return storage.join(self.path, folder) if folder else self.path


def sets_of_shards(path: str) -> dict[str, str]:
    """The sets of MDS shards in a folder by name, train and validation, with their folders: itself (""), or train and one of
    validation, val, valid, eval and test; none if there are no shards."""
    if storage.exists(storage.join(path, INDEX)):
        return {"train": ""}
    found = {"train": "train"} if storage.exists(storage.join(path, "train", INDEX)) else {}
    names = ("validation", "val", "valid", "eval", "test") if found else ()
    held_out = next((name for name in names if storage.exists(storage.join(path, name, INDEX))), None)
    return found if held_out is None else {**found, "validation": held_out}


def is_tokens(path: str) -> bool:
    """Whether text lies there prepared, and not as text."""
    manifest = storage.join(path, MANIFEST)
    return storage.exists(manifest) and _format(storage.read_json(manifest)) == FORMAT


def open_tokens(path: str) -> TokenFolder:
    """Raises InputError where no prepared text lies at the path or URL, or one of another version."""
    path = storage.absolute(path).rstrip("/")
    manifest = storage.join(path, MANIFEST)
    if not storage.exists(manifest):
        raise InputError(f"{path}: holds no {MANIFEST}; make it by rayrec preprocess TEXT --format mds --out {path}")
    found = storage.read_json(manifest)
    if _format(found) != FORMAT or found.get("version") != VERSION:
        raise InputError(
            f"{manifest}: not of prepared text, or of another version than {VERSION}; prepare the text again"
        )
    return TokenFolder(
        path=path,
        block_size=found["block_size"],
        part_bytes=found["part_bytes"],
        vocabulary_size=found["vocabulary_size"],
        tokenizer_hash=found["tokenizer"],
        end_token=found["end_token"],
        sets={name: described["blocks"] for name, described in found["sets"].items()},
        hash=found["hash"],
        set_folders={name: described.get("folder", name) for name, described in found["sets"].items()},
        columns={
            name: TokenColumn(**described["column"])
            for name, described in found["sets"].items()
            if "column" in described
        },
    )


def _format(manifest: Any) -> str | None:
    return manifest.get("format") if isinstance(manifest, dict) else None


def text_rows(path: str, *, tokenizer: str, block_size: int, part_bytes: int) -> RowSource:
    """Plain text (file, glob or folder, gzip too, local or at a URL) as rows {tokens int64 (n, block_size)} in memory.

    `tokenizer`: a folder. Tokens are those of `rayrec preprocess` with these sizes; those that fill no row are left out. Raises
    InputError where there is no text, less than a row of it, or such as cannot be tokenised.
    """
    found = load_tokenizer(tokenizer)
    pieces: list[np.ndarray] = []
    for file in storage.list_files(path):
        encoded = [found.encode(text) for text in read_texts(file, part_bytes)]
        if pieces and encoded and found.end_token is not None:
            pieces.append(np.array([found.end_token]))
        pieces += encoded
    tokens = np.concatenate([np.empty(0, np.int64), *pieces]).astype(np.int64)
    rows = len(tokens) // block_size
    if not rows:
        raise InputError(f"{path}: {len(tokens):,} tokens are less than one row of {block_size}; give more text")
    return ArrayRows({COLUMN: tokens[: rows * block_size].reshape(rows, block_size)})
