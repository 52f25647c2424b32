"""Text as rows of tokens: what a prepared folder says of itself, and text that is tokenised in memory."""

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rayrec import machine, storage
from rayrec.config import InputError
from rayrec.data.numbered_rows import ArrayRows, RowSource
from rayrec.data.text.mds import COLUMN, INDEX, TokenColumn
from rayrec.data.text.tokenizer import TextTokenizer, copy_tokenizer, load_tokenizer
from rayrec.storage.cache import GZIP_MAGIC, gunzip

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
        raise InputError(f"{manifest}: not of prepared text, or of another version than {VERSION}; prepare the text again")
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
        columns={name: TokenColumn(**described["column"]) for name, described in found["sets"].items() if "column" in described},
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


PART_BYTES: Final = 4 << 20
"""A word that lies across a cut would be two tokens; so seams, and with them tokens, depend on this."""
LINE_BYTES: Final = 1 << 20
"""A longer line is cut between characters."""
_LOOK_BYTES: Final = 1 << 16

Read = Callable[[int, int], bytes]
"""The bytes [start, start + count) of a text, fewer at its end."""


@dataclass(frozen=True)
class TextPart:
    """A stretch of one file: the lines that start in [start, stop)."""

    number: int
    set: str
    path: str
    name: str
    """What the user calls the file; `path` may be where it was unpacked."""
    start: int
    stop: int
    size_bytes: int
    """Of the file."""
    follows: bool
    """Whether a file begins with it, behind another one of its set: a text ended there."""


@dataclass(frozen=True)
class Source:
    """One file of text."""

    path: str
    name: str
    size_bytes: int


def cut(read: Read, size_bytes: int, position: int) -> int:
    """The first start of a line at or behind `position`, the end of the text counting as one; in a line that goes on for
    LINE_BYTES, the first start of a character."""
    if position <= 0 or position >= size_bytes:
        return min(max(position, 0), size_bytes)
    looked = position - 1
    while looked < position + LINE_BYTES:
        piece = read(looked, _LOOK_BYTES)
        newline = piece.find(b"\n")
        if newline >= 0:
            return looked + newline + 1
        looked += len(piece)
        if looked >= size_bytes:
            return size_bytes
    around = read(position, 4)  # a character has up to four bytes, all but its first of the form 10xxxxxx
    return position + next((i for i, byte in enumerate(around) if byte & 0xC0 != 0x80), 0)


def parts_of(sources: Sequence[Source], *, validation_fraction: float, part_bytes: int) -> list[TextPart]:
    """All of the text, in order; the last `validation_fraction` of its bytes is of the set `validation`."""
    total = sum(source.size_bytes for source in sources)
    held_out_from = total if validation_fraction == 0 else int(total * (1 - validation_fraction))
    parts: list[TextPart] = []
    begun: set[str] = set()
    before = 0
    for source in sources:
        edge = min(max(held_out_from - before, 0), source.size_bytes)
        for name, first, last in (("train", 0, edge), ("validation", edge, source.size_bytes)):
            inner = range((first // part_bytes + 1) * part_bytes, last, part_bytes)
            edges = [first, *inner, last] if first < last else []
            for start, stop in itertools.pairwise(edges):
                follows = start == 0 and name in begun
                parts.append(TextPart(len(parts), name, source.path, source.name, start, stop, source.size_bytes, follows))
                begun.add(name)
        before += source.size_bytes
    return parts


def read_part(part: TextPart) -> str:
    """The text of a part. Raises InputError where it is not UTF-8."""

    def read(start: int, count: int) -> bytes:
        buffer = np.empty(count, np.uint8)
        return buffer[: storage.read_into(part.path, start, buffer)].tobytes()

    start, stop = (cut(read, part.size_bytes, position) for position in (part.start, part.stop))
    return decoded(read(start, stop - start), part.name, start)


def decoded(content: bytes, name: str, start: int) -> str:
    """Text from bytes, of which the first is byte `start` of file `name`. Raises InputError where it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: byte {start + error.start:,} is not UTF-8 ({error.reason}); convert the file, with iconv for instance"
        ) from None


def _unpacked(content: bytes, path: str) -> bytes:
    """Raises InputError before the text fills the memory."""
    text = bytearray()
    most = machine.memory().available // 4  # the text, its parts and their tokens are in memory at the same time
    for piece in gunzip([content]):
        text += piece
        if len(text) > most:
            raise InputError(
                f"{path}: unpacks to more than {most / 1e9:.1f} GB, a quarter of the free memory; prepare blocks of tokens "
                "first, which are read from files"
            )
    return bytes(text)


def read_texts(file: storage.File, part_bytes: int) -> list[str]:
    """A whole file, plain or gzip, in the parts it would be tokenised in."""
    content = storage.read_bytes(file.path)
    if content.startswith(GZIP_MAGIC):
        try:
            content = _unpacked(content, file.path)
        except (EOFError, zlib.error) as error:
            raise InputError(f"{file.path}: damaged gzip file ({error or 'cut short'}); fetch it again") from None
    edges = [*range(0, len(content), part_bytes), len(content)]
    cuts = [cut(lambda start, count: content[start : start + count], len(content), edge) for edge in edges]
    return [decoded(content[low:high], file.path, low) for low, high in itertools.pairwise(cuts)]
