"""Text of a log's file as a stream of bytes: unpacked, in UTF-8."""

from __future__ import annotations

import codecs
import functools
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from rayrec import storage
from rayrec.config import InputError
from rayrec.schema import Schema
from rayrec.storage.cache import GZIP_MAGIC, gunzip, read_head
from rayrec.storage.zip_archive import ZIP_MAGIC, unzip

MAX_LINE_BYTES: Final = 64 << 20
_READ_BYTES: Final = 4 << 20
_BOM: Final = b"\xef\xbb\xbf"


class ByteStream(Protocol):
    def read(self, size: int, /) -> bytes:
        """Return the next bytes, at most `size`, none at the end."""


class _Chunks:
    """Stream of bytes that come in pieces."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, at most `size`, none at the end."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return b""
            self._rest = chunk
        data = self._rest[:size]
        self._rest = self._rest[size:]
        return data


@contextmanager
def open_text(path: str, schema: Schema) -> Iterator[ByteStream]:
    """Open the text of a file, unpacked and in UTF-8. Raises InputError if it is damaged."""
    filesystem, inner = storage.resolve(path)
    with filesystem.open_input_stream(inner, compression=None) as file:
        stream: ByteStream = file
        head = read_head(path, len(ZIP_MAGIC))
        if head == ZIP_MAGIC:
            stream = _Chunks(unzip(path))
        elif head.startswith(GZIP_MAGIC):
            # Arrow's reader refuses the zeros behind the data with which tapes and object stores
            # fill blocks.
            stream = _Chunks(gunzip(iter(functools.partial(file.read, _READ_BYTES), b"")))
        if not schema.is_utf8:
            stream = _Chunks(
                _in_utf8(
                    iter(functools.partial(stream.read, _READ_BYTES), b""), str(schema.encoding)
                )
            )
        try:
            yield stream
        except UnicodeError as error:
            raise InputError(
                f"{path}: is no text in {schema.encoding}, the schema's encoding ({error})"
            ) from None
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{path}: cannot be read to its end ({error or 'it is cut'}); fetch it again"
            ) from None


def _in_utf8(chunks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """Convert text in another encoding. Bytes that it leaves undefined stay as they are, so that
    their rows are not UTF-8.
    """
    decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
    for chunk in chunks:
        yield decoder.decode(chunk).encode("utf-8", "surrogateescape")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")


def line_blocks(path: str, schema: Schema, *, block_bytes: int = _READ_BYTES) -> Iterator[bytes]:
    r"""Yield a file's text in blocks of complete lines, without a byte order mark. Lines end with
    \n, whatever they end with in the file. Raises InputError for a line of more than
    MAX_LINE_BYTES.
    """
    with open_text(path, schema) as stream:
        rest = b""
        is_first = True
        while chunk := stream.read(block_bytes):
            if is_first:
                chunk = chunk.removeprefix(_BOM)
                is_first = False
            # The last \r may be half of a line end, which the next chunk completes.
            text = rest + chunk
            cut = text.endswith(b"\r")
            text = with_newlines(text.removesuffix(b"\r"))
            stop = text.rfind(b"\n") + 1
            if stop:
                yield text[:stop]
            rest = text[stop:] + b"\r" * cut
            if len(rest) > MAX_LINE_BYTES:
                raise InputError(
                    f"{path}: a line exceeds {MAX_LINE_BYTES >> 20} MiB, so it is not a file of "
                    "lines"
                )
        rest = with_newlines(rest)
        if rest:
            yield rest if rest.endswith(b"\n") else rest + b"\n"


def with_newlines(text: bytes) -> bytes:
    r"""Return text whose lines all end with \n."""
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in text else text
