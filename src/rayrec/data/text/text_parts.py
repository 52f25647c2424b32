"""Plain text cut into parts that can be read and tokenised apart: at ends of lines, independent of the reader's position."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.materialized.row_maps import free_memory
from rayrec.storage.cache import GZIP_MAGIC, gunzip

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
                parts.append(
                    TextPart(len(parts), name, source.path, source.name, start, stop, source.size_bytes, follows)
                )
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
    most = free_memory() // 4  # the text, its parts and their tokens are in memory at the same time
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
