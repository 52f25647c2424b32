"""Formats of files, found in their first bytes instead of their names."""

from __future__ import annotations

import os
import re
import zlib
from contextlib import suppress
from functools import lru_cache
from typing import Final

from rayrec import storage
from rayrec.config import InputError, packaged_json
from rayrec.schema import Schema
from rayrec.storage.cache import GZIP_MAGIC, read_head

PARQUET_MAGIC: Final = b"PAR1"
_HEAD_BYTES: Final = 16 << 10
"""Bytes at the start of a file that show its format: one request to a store."""
_MAX_LINES: Final = 5
"""Number of complete lines that must have the form of a text format."""
_CRITEO_TABS: Final = (38, 39)
_MAX_CACHED: Final = 4096
_MAGIC: Final[dict[str, str]] = packaged_json(__package__, "file_starts.json")
"""First bytes of formats that logs cannot have, in hexadecimal digits, perhaps with bytes behind
them; what such a file is, and the fix.
"""
_NUMBER: Final = r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?"
_LIBSVM: Final = rf"{_NUMBER}(?: qid:[0-9]+)?(?: [0-9]+:{_NUMBER})+"
_LIBFFM: Final = rf"{_NUMBER}(?: [0-9]+:[0-9]+:{_NUMBER})+"
_VOWPAL_WABBIT: Final = rf"(?:{_NUMBER} )*(?:'\S+ ?)?\|[a-zA-Z]\S* [^|]+(?:\|[a-zA-Z]\S* [^|]+)*"
_LINES: Final = {
    _LIBSVM: (
        "libsvm text (label index:value ...); read it with sklearn.datasets.load_svmlight_file"
    ),
    _LIBFFM: "libffm text (label field:index:value ...); parse its fields into columns",
    _VOWPAL_WABBIT: (
        "Vowpal Wabbit text (label |namespace feature ...); parse its namespaces into columns"
    ),
}
"""Patterns of lines of text formats without columns, and what such a file is, with the fix."""


@lru_cache(_MAX_CACHED)
def _starts_as_parquet(path: str, version: tuple[int, int] | None) -> bool:
    del version  # Part of the cache key
    return read_head(path, len(PARQUET_MAGIC)) == PARQUET_MAGIC


def is_parquet(path: str) -> bool:
    """Return whether a file is Parquet: named so, or with its first bytes. Reads other files once
    per process: 4 bytes, a request at a URL. Raises InputError if that is impossible.
    """
    if storage.name_of(path).lower().endswith(".parquet"):
        return True
    version = None
    if not storage.is_url(path) and os.path.exists(path):
        status = os.stat(path)
        version = status.st_size, status.st_mtime_ns
    return _starts_as_parquet(path, version)


def text_head(path: str, max_bytes: int = _HEAD_BYTES) -> bytes:
    """Return the first bytes of a file, or of what is packed in a gzip file. Of a damaged one, what
    can be unpacked. Raises InputError if the file is unreadable.
    """
    head = read_head(path, max_bytes)
    if not head.startswith(GZIP_MAGIC):
        return head
    engine = zlib.decompressobj(wbits=31)
    try:
        return engine.decompress(head, max_bytes)
    except zlib.error:  # Reported when the file is read
        return b""


def count_names(path: str, schema: Schema) -> int:
    """Return the number of the schema's columns that the first line of a text file names."""
    first = next(
        (
            line
            for line in text_head(path).removeprefix(b"\xef\xbb\xbf").splitlines()
            if line.strip()
        ),
        b"",
    )
    fields = {
        field.strip(" \t'\"") for field in re.split(r"[\t,;|]", first.decode("utf-8", "replace"))
    }
    return len(fields.intersection(schema.columns))


def is_criteo_text(path: str) -> bool:
    """Return whether the first file of a path has lines of Criteo's columns, perhaps without the
    label. False if unreadable.
    """
    with suppress(InputError, OSError):
        first = next((file for file in storage.list_files(path) if file.size_bytes), None)
        return (
            first is not None
            and text_head(first.path).partition(b"\n")[0].count(b"\t") in _CRITEO_TABS
        )
    return False


def all_lines_match(start: bytes, line: re.Pattern[bytes]) -> bool:
    """Return whether the first complete lines of a file all have a form, and there are some."""
    lines = [each.rstrip(b"\r") for each in start.split(b"\n")[:-1] if each.strip()][:_MAX_LINES]
    return bool(lines) and all(map(line.fullmatch, lines))


def foreign_format(head: bytes) -> str:
    """Return the format of a file's first bytes if logs cannot have it, with the fix; empty if it
    may be a log.
    """
    for magic, cause in _MAGIC.items():
        start, _, inside = magic.partition(" ")
        if head.startswith(bytes.fromhex(start)) and bytes.fromhex(inside) in head:
            return cause
    if re.match(rb'\s*\[?\s*\{\s*"[^"\n]*"\s*:', head):
        return (
            "JSON, not columns; write it as Parquet, such as pandas.read_json(FILE, "
            "lines=True).to_parquet(OUT) or ray.data.read_json(FILE).write_parquet(OUT)"
        )
    lines = [
        line.rstrip() for line in head.decode("utf-8", "replace").splitlines()[:-1] if line.strip()
    ][:_MAX_LINES]
    for pattern, cause in _LINES.items():
        if lines and all(re.fullmatch(pattern, line) for line in lines):
            return f"{cause} and write Parquet or CSV with a header"
    return ""


def reject_foreign_content(file: storage.File) -> None:
    """Check that a file is not of a format that logs cannot have. Raises InputError with the way
    out.
    """
    cause = foreign_format(text_head(file.path))
    if cause:
        raise InputError(f"{file.path}: is {cause}")
