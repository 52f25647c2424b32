"""Formats of files, found in their first bytes instead of their names."""

from __future__ import annotations

import re
import zlib
from contextlib import suppress
from typing import Final

from rayrec import storage
from rayrec.config import InputError, packaged_json
from rayrec.schema import Schema
from rayrec.storage.cache import GZIP_MAGIC, read_head
from rayrec.storage.zip_archive import unzip_head

_HEAD_BYTES: Final = 16 << 10
"""Bytes at the start of a file that show its format: one request to a store."""
_MAX_LINES: Final = 5
"""Number of complete lines that must have the form of a text format."""
_CRITEO_TABS: Final = (38, 39)
_MAGIC: Final[dict[str, str]] = packaged_json(__package__, "file_starts.json")
"""First bytes of formats that logs cannot have, in hexadecimal digits, perhaps with bytes behind
them; what such a file is, and the fix.
"""


def text_head(path: str, max_bytes: int = _HEAD_BYTES) -> bytes:
    """Return the first bytes of a file, or of what is packed in a gzip or zip file. Of a damaged
    one, what can be unpacked. Raises InputError if the file is unreadable.
    """
    head = read_head(path, max_bytes)
    unzipped = unzip_head(head, max_bytes)
    if unzipped is not None:
        return unzipped
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
    marks = rf"{re.escape(schema.delimiter)}|::|[\t,;|]"
    fields = {field.strip(" \t'\"") for field in re.split(marks, first.decode("utf-8", "replace"))}
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
    # The last line may be cut.
    lines = [each for each in re.split(rb"[\r\n]", start)[:-1] if each.strip()][:_MAX_LINES]
    return bool(lines) and all(map(line.fullmatch, lines))


def foreign_format(head: bytes) -> str:
    """Return the format of a file's first bytes if logs cannot have it, with the fix; empty if it
    may be a log.
    """
    if re.match(rb'\s*\[\s*\{\s*"', head):
        return (
            "a JSON array; write an object in each line, such as pandas.read_json(FILE).to_json("
            "OUT, orient='records', lines=True)"
        )
    for magic, cause in _MAGIC.items():
        start, _, inside = magic.partition(" ")
        if head.startswith(bytes.fromhex(start)) and bytes.fromhex(inside) in head:
            return cause
    return ""


def reject_foreign_content(file: storage.File) -> None:
    """Check that a file is not of a format that logs cannot have. Raises InputError with the way
    out.
    """
    cause = foreign_format(text_head(file.path))
    if cause:
        raise InputError(f"{file.path}: is {cause}")
