"""Text as token rows: prepared folders and text tokenised in memory."""

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rayrec import host_resources, storage
from rayrec.config import InputError
from rayrec.data.numbered_rows import ArrayRows, RowSource
from rayrec.data.text.mds import COLUMN, INDEX, TokenColumn
from rayrec.data.text.tokenizer import load_tokenizer
from rayrec.storage.cache import GZIP_MAGIC, gunzip

MANIFEST: Final = "manifest.json"
FORMAT: Final = "rayrec-tokens"
VERSION: Final = 1


@dataclass(frozen=True)
class TokenFolder:
    """Folder written by `rayrec preprocess --format mds`, or an adopted folder of another program's
    shards.
    """

    path: str
    block_size: int
    """Number of tokens per row."""
    part_bytes: int
    """Size of the text parts that were tokenised separately."""
    vocabulary_size: int
    """Exclusive upper bound of token ids."""
    tokenizer_hash: str
    end_token: int | None
    """End-of-text token id. None if the tokenizer has no such token."""
    sets: Mapping[str, int]
    """Row counts of train and, if text was held out, validation."""
    hash: str
    """Hash of all rows and the tokenizer."""
    set_folders: Mapping[str, str]
    """Folder of each set, relative to `path`, or a URL. The set name for sets written by rayrec."""
    columns: Mapping[str, TokenColumn]
    """Token columns of sets written by another program."""

    @property
    def tokenizer(self) -> str:
        """Folder of the HuggingFace tokenizer."""
        return storage.join(self.path, "tokenizer")

    def set_path(self, name: str) -> str:
        """Return the folder of a set, with its index.json and shards."""
        folder = self.set_folders[name]
        if storage.is_url(folder):
            return folder
        return storage.join(self.path, folder) if folder else self.path


def find_shard_sets(path: str) -> dict[str, str]:
    """Find the sets of MDS shards in a folder: {train: folder, validation: folder}, relative to
    `path`. The folder itself is train (""), or it contains train and possibly one of validation,
    val, valid, eval and test. Empty without shards.
    """
    if storage.exists(storage.join(path, INDEX)):
        return {"train": ""}
    if not storage.exists(storage.join(path, "train", INDEX)):
        return {}
    names = ("validation", "val", "valid", "eval", "test")
    validation = next(
        (name for name in names if storage.exists(storage.join(path, name, INDEX))), None
    )
    return {"train": "train", "validation": validation} if validation else {"train": "train"}


def is_tokens(path: str) -> bool:
    """Return whether the path contains prepared text."""
    manifest = storage.join(path, MANIFEST)
    return storage.exists(manifest) and _format(storage.read_json(manifest)) == FORMAT


def open_tokens(path: str) -> TokenFolder:
    """Open prepared text at a path or URL. Raises InputError if it is not found or has another
    version.
    """
    path = storage.absolute(path).rstrip("/")
    manifest = storage.join(path, MANIFEST)
    if not storage.exists(manifest):
        raise InputError(
            f"{path}: {MANIFEST} not found. Make it with `rayrec preprocess TEXT --format mds "
            f"--out {path}`."
        )
    content = storage.read_json(manifest)
    if _format(content) != FORMAT or content.get("version") != VERSION:
        raise InputError(
            f"{manifest}: must be of prepared text, version {VERSION}. Prepare the text again."
        )
    return TokenFolder(
        path=path,
        block_size=content["block_size"],
        part_bytes=content["part_bytes"],
        vocabulary_size=content["vocabulary_size"],
        tokenizer_hash=content["tokenizer"],
        end_token=content["end_token"],
        sets={name: entry["blocks"] for name, entry in content["sets"].items()},
        hash=content["hash"],
        set_folders={name: entry.get("folder", name) for name, entry in content["sets"].items()},
        columns={
            name: TokenColumn(**entry["column"])
            for name, entry in content["sets"].items()
            if "column" in entry
        },
    )


def _format(manifest: Any) -> str | None:
    return manifest.get("format") if isinstance(manifest, dict) else None


def text_rows(path: str, *, tokenizer: str, block_size: int, part_bytes: int) -> RowSource:
    """Tokenise plain or gzip text (file, glob or folder, local or at a URL) into rows {tokens int64
    [n, block_size]} in memory. `tokenizer` is a folder. Tokens equal those of `rayrec preprocess`
    with the same sizes; an incomplete last row is dropped. Raises InputError if no text is found,
    it is shorter than a row, or it cannot be tokenised.
    """
    loaded = load_tokenizer(tokenizer)
    token_arrays: list[np.ndarray] = []
    for file in storage.list_files(path):
        encoded = [loaded.encode(text) for text in read_texts(file, part_bytes)]
        if token_arrays and encoded and loaded.end_token is not None:
            token_arrays.append(np.array([loaded.end_token]))
        token_arrays += encoded
    tokens = np.concatenate([np.empty(0, np.int64), *token_arrays]).astype(np.int64)
    rows = len(tokens) // block_size
    if not rows:
        raise InputError(
            f"{path}: {len(tokens):,} tokens are less than one row of {block_size}. Use more text."
        )
    return ArrayRows({COLUMN: tokens[: rows * block_size].reshape(rows, block_size)})


PART_BYTES: Final = 4 << 20
"""Default size of text parts. It affects tokens, because words are not merged across parts."""
LINE_BYTES: Final = 1 << 20
"""Maximum line length. Longer lines are cut between characters."""
_SCAN_BYTES: Final = 1 << 16

Read = Callable[[int, int], bytes]
"""Function that returns the bytes [start, start + count) of a text, fewer at its end."""


@dataclass(frozen=True)
class TextPart:
    """Lines of one file that start in [start, stop)."""

    number: int
    set: str
    path: str
    name: str
    """File name for messages. `path` may be an unpacked copy."""
    start: int
    stop: int
    size_bytes: int
    """File size."""
    follows: bool
    """Whether to insert an end-of-text token before this part, because it begins a file that is not
    the first of its set.
    """


@dataclass(frozen=True)
class Source:
    """Text file."""

    path: str
    name: str
    size_bytes: int


def cut(read: Read, size_bytes: int, position: int) -> int:
    """Return the first line start, or the text's end, from `position` on; in lines over LINE_BYTES,
    the first character start.
    """
    if position <= 0 or position >= size_bytes:
        return min(max(position, 0), size_bytes)
    offset = position - 1
    while offset < position + LINE_BYTES:
        chunk = read(offset, _SCAN_BYTES)
        newline = chunk.find(b"\n")
        if newline >= 0:
            return offset + newline + 1
        offset += len(chunk)
        if offset >= size_bytes:
            return size_bytes
    around = read(position, 4)  # UTF-8: up to four bytes, all but the first are 10xxxxxx.
    return position + next((i for i, byte in enumerate(around) if byte & 0xC0 != 0x80), 0)


def split_parts(
    sources: Sequence[Source], *, validation_fraction: float, part_bytes: int
) -> list[TextPart]:
    """Split the text into parts, in order. The last `validation_fraction` of its bytes becomes the
    set `validation`.
    """
    total = sum(source.size_bytes for source in sources)
    validation_start = total if validation_fraction == 0 else int(total * (1 - validation_fraction))
    parts: list[TextPart] = []
    started_sets: set[str] = set()
    before = 0
    for source in sources:
        edge = min(max(validation_start - before, 0), source.size_bytes)
        for name, first, last in (("train", 0, edge), ("validation", edge, source.size_bytes)):
            inner = range((first // part_bytes + 1) * part_bytes, last, part_bytes)
            edges = [first, *inner, last] if first < last else []
            for start, stop in itertools.pairwise(edges):
                follows = start == 0 and name in started_sets
                parts.append(
                    TextPart(
                        len(parts),
                        name,
                        source.path,
                        source.name,
                        start,
                        stop,
                        source.size_bytes,
                        follows,
                    )
                )
                started_sets.add(name)
        before += source.size_bytes
    return parts


def read_part(part: TextPart) -> str:
    """Read the text of a part. Raises InputError if it is not UTF-8."""

    def read(start: int, count: int) -> bytes:
        buffer = np.empty(count, np.uint8)
        return buffer[: storage.read_into(part.path, start, buffer)].tobytes()

    start, stop = (cut(read, part.size_bytes, position) for position in (part.start, part.stop))
    return decode(read(start, stop - start), part.name, start)


def decode(content: bytes, name: str, start: int) -> str:
    """Decode bytes that begin at byte `start` of file `name`. Raises InputError if they are not
    UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: byte {start + error.start:,} is not UTF-8 ({error.reason}). Convert the "
            "file, for example with iconv."
        ) from None


def _unpacked(content: bytes, path: str) -> bytes:
    """Unpack gzip content. Raises InputError before the text fills the memory."""
    text = bytearray()
    # The text, its parts and their tokens are in memory together.
    max_bytes = host_resources.memory().available // 4
    for chunk in gunzip([content]):
        text += chunk
        if len(text) > max_bytes:
            raise InputError(
                f"{path}: unpacks to more than {max_bytes / 1e9:.1f} GB, a quarter of the free "
                "memory. Prepare token blocks first, which are read from files."
            )
    return bytes(text)


def read_texts(file: storage.File, part_bytes: int) -> list[str]:
    """Read a plain or gzip file as the parts to tokenise."""
    content = storage.read_bytes(file.path)
    if content.startswith(GZIP_MAGIC):
        try:
            content = _unpacked(content, file.path)
        except (EOFError, zlib.error) as error:
            raise InputError(
                f"{file.path}: damaged gzip file ({error or 'truncated'}). Fetch it again."
            ) from None
    edges = [*range(0, len(content), part_bytes), len(content)]
    cuts = [
        cut(lambda start, count: content[start : start + count], len(content), edge)
        for edge in edges
    ]
    return [decode(content[low:high], file.path, low) for low, high in itertools.pairwise(cuts)]
